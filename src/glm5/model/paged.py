"""The cache in pages, and one call of the model over many sequences: whatever each of them has to run, side by side.

A page holds the same slots of every cached tensor: per layer the MLA latent row and the index key, the MTP block's
included. Two things make whole pages reusable by any text that begins the same:

- The MTP block's entry that reads (trunk's hidden state of slot i - 1, token of slot i) lies in slot i. So what a page
  holds depends on tokens up to its end only, and slot 0 has no entry.
- With each page the trunk's hidden state of its last slot is kept, which the entry after it reads.

All rows of a call form one flat batch [1, N] for projections, norms and experts. Attention takes them in groups:
sequences with equally many rows together. Which page is whose is decided by `glm5.serve.pages`; here are the tensors.
Source: report section 3; paged attention (Kwon et al., 2023). Read next: `cache`, `mla`, `glm5.serve.engine`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from glm5.kernels.dispatch import pick
from glm5.kernels.indexer_fp8 import IndexKeys, round_keys
from glm5.kernels.pages import Pages
from glm5.kernels.visibility import Visibility
from glm5.model.cache import Part, cache_widths
from glm5.model.config import ModelConfig
from glm5.model.packed import pack_rows, page_tensors
from glm5.utils.errors import ConfigError

# Sequences with up to so many rows each are attended to together; longer chunks fill the machine by themselves.
GROUP_UP_TO = 16


class PagedCache:
    """Pages of every layer, and of host memory.

    Args:
        pages, host_pages: how many. size: tokens of a page.
        draft: with the MTP block's entries and the hidden states at pages' ends.
        fp8: hold rows and keys in 8 bits (see `packed`), else in `dtype`.

    Attributes:
        layers: per layer [latent pool, index key pool], each [1, pages * size, width]; in 8 bits the scales of the keys
            as a third.
        hidden: [pages, D], the trunk's hidden state of each page's last slot.
    """

    def __init__(
        self,
        config: ModelConfig,
        pages: int,
        host_pages: int = 0,
        *,
        size: int = 64,
        draft: bool = False,
        fp8: bool = False,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if config.attention != "mla":
            raise ConfigError("attention", config.attention, "pages hold MLA's latent rows and index keys only")
        self.size, self.draft, self.fp8, self.latent = size, draft, fp8, config.kv_lora_rank
        layers = config.num_cache_layers if draft else config.num_hidden_layers
        kinds = page_tensors(config) if fp8 else tuple((width, dtype) for width in cache_widths(config))
        on_device = {"device": device}
        on_host = {"device": "cpu", "pin_memory": torch.device(device).type == "cuda"}

        def tensors(count: int, options: Any) -> tuple[list[list[Tensor]], Tensor]:
            pools = [
                [torch.zeros(1, count * size, width, dtype=kind, **options) for width, kind in kinds]
                for _ in range(layers)
            ]
            return pools, torch.zeros(count, config.hidden_size if draft else 0, dtype=dtype, **options)

        self.layers, self.hidden = tensors(pages, on_device)
        self._host_layers, self._host_hidden = tensors(host_pages, on_host)

    def nbytes_per_page(self) -> int:
        """Bytes of one page, all tensors."""
        return sum(t.shape[-1] * t.element_size() for layer in self.layers for t in layer) * self.size + (
            self.hidden.shape[-1] * self.hidden.element_size()
        )

    def release(self) -> None:
        """Give the device's memory back, and what was in it."""
        for tensor in self.tensors():
            tensor.untyped_storage().resize_(0)

    def resume(self) -> None:
        """Take it again, zeros."""
        for tensor in self.tensors():
            tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
            tensor.zero_()

    def tensors(self) -> list[Tensor]:
        """Those on the device, which hold pages."""
        return [*(pool for layer in self.layers for pool in layer), self.hidden]

    def copy(self, kind: str, source: int, target: int) -> None:
        """Copy one page, all tensors: `to_host`, `to_device` or `within`, as `glm5.serve.pages.Copy` says."""
        device, host = (self.layers, self.hidden), (self._host_layers, self._host_hidden)
        read, write = {"to_host": (device, host), "to_device": (host, device), "within": (device, device)}[kind]
        a, b = source * self.size, target * self.size
        for old, new in zip(read[0], write[0], strict=True):
            for x, y in zip(old, new, strict=True):
                y[:, b : b + self.size] = x[:, a : a + self.size]
        write[1][target] = read[1][source]


@dataclass(frozen=True)
class Run:
    """Slots [start, start + count) of one sequence, which lie in the pages of its `table`."""

    table: Sequence[int]
    start: int
    count: int


@dataclass(frozen=True)
class _Group:
    """Runs of equal length: rows [first, first + batch * queries) of the flat batch."""

    first: int
    batch: int
    queries: int
    visible: Visibility
    pages: Pages


class PagedBatch:
    """One call: where its rows are written, what they see, and where each run's rows are.

    Args:
        runs: what each sequence runs; at least one, each at least one slot.
        first: the first slot that has an entry: 0 in the trunk, 1 in the MTP block.
        by_row: see `Part`; for few rows (`glm5.serve.invariant`).

    Attributes:
        runs, first: as given.
        offsets: where each run's rows begin in the flat batch. order: the runs in the order of the batch.
        row_N: each row's place in a pool. position_1N: rotary positions.
    """

    by_row = False

    def __init__(self, cache: PagedCache, runs: Sequence[Run], *, first: int = 0, by_row: bool = False) -> None:
        self.cache, self.size, self.by_row = cache, cache.size, by_row
        self.runs, self.first = runs, first
        device = cache.hidden.device
        members: dict[tuple[int, int], list[int]] = {}
        for i, run in enumerate(runs):
            members.setdefault((run.count, -1 if run.count <= GROUP_UP_TO else i), []).append(i)
        self.offsets = [0] * len(runs)
        self.order = [i for indices in members.values() for i in indices]
        at, parts = 0, []
        for (count, _), indices in members.items():
            wide = max(-(-(runs[i].start + count) // self.size) for i in indices)
            table = [list(runs[i].table[:wide]) for i in indices]
            pages = Pages(torch.tensor([t + [0] * (wide - len(t)) for t in table], device=device), self.size)
            start_B1 = torch.tensor([[runs[i].start] for i in indices], device=device)
            last_BT = start_B1 + torch.arange(count, device=device)
            slots = max(runs[i].start for i in indices) + count
            # One sequence alone is plainly causal, which the operators know how to use.
            offset = runs[indices[0]].start if len(indices) == 1 and first == 0 else None
            visible = Visibility(torch.full_like(last_BT, first), last_BT, slots, offset)
            parts.append((visible, pages))
            for j, i in enumerate(indices):
                self.offsets[i] = at + j * count
            at += len(indices) * count
        self._place(parts, first)

    def _place(
        self, parts: Sequence[tuple[Visibility, Pages]], first: int, rows: Sequence[Tensor] | None = None
    ) -> None:
        """Lay out groups of rows behind each other: what those of each see, where their keys are, and where their own
        places are if that is known."""
        at = 0
        self.groups: list[_Group] = []
        for visible, pages in parts:
            batch, queries = visible.last_BT.shape
            self.groups.append(_Group(at, batch, queries, visible, pages))
            at += batch * queries
        rows = rows or [pages.rows(visible.last_BT) for visible, pages in parts]
        self.row_N = _together([row_BT.flatten() for row_BT in rows])
        slot_N = _together([visible.last_BT.flatten() for visible, _ in parts])
        self.position_1N = (slot_N - first if first else slot_N)[None]

    @property
    def ends_N(self) -> Tensor:
        """Whether each row is the last of a page."""
        return self.row_N % self.size == self.size - 1

    @property
    def visible(self) -> Visibility:
        """Of the first group. Blocks hand it on; what each row sees comes with `store`."""
        return self.groups[0].visible

    def flat(self, values: Sequence[Sequence[int]]) -> Tensor:
        """Lists of ids, one per run, in the order of the batch: int64 [1, N]."""
        out = [0] * self.row_N.shape[0]
        for at, ids in zip(self.offsets, values, strict=True):
            out[at : at + len(ids)] = ids
        return torch.tensor([out], device=self.row_N.device)

    def store(
        self, layer: int, slot_BT: Tensor | None, visible: Visibility, rows_1NX: Tensor, index_1NI: Tensor
    ) -> list[Part]:
        """Write a layer's new rows; what each group reads. Slots and visibility are this batch's own."""
        self.write(layer, rows_1NX, index_1NI)
        return self.parts(layer)

    def pools(self, layer: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """For an operator that writes a layer's new rows itself: where they go, and the pools of rows and index keys;
        None where what is written is made of them first."""
        if self.cache.fp8:
            return None
        rows, index_keys = self.cache.layers[layer]
        return self.row_N, rows, index_keys

    def write(self, layer: int, rows_1NX: Tensor, index_1NI: Tensor) -> None:
        """Write a layer's new rows."""
        pools = self.cache.layers[layer]
        if self.cache.fp8:
            new = round_keys(index_1NI)
            packed = (pack_rows(rows_1NX, self.cache.latent), new.values, new.scale[..., None])
            for pool, value in zip(pools, packed, strict=True):  # as bytes, which every device can copy by index
                pool[0].view(torch.uint8).index_copy_(0, self.row_N, value[0].view(torch.uint8))
            return
        rows, index_keys = pools
        fast = pick("store", self.row_N, rows, index_keys, rows_1NX, index_1NI)
        if fast is not None:
            fast(self.row_N, (rows[0], rows_1NX[0]), (index_keys[0], index_1NI[0]))
        else:
            rows[0].index_copy_(0, self.row_N, rows_1NX[0])
            index_keys[0].index_copy_(0, self.row_N, index_1NI[0])

    def parts(self, layer: int) -> list[Part]:
        """What each group reads of a layer."""
        rows, keys, *scale = self.cache.layers[layer]
        held = IndexKeys(keys, scale[0][..., 0]) if self.cache.fp8 else keys
        spans = ((g, (g.first, g.batch, g.queries)) for g in self.groups)
        return [Part(g.visible, rows, held, g.pages, span, self.by_row) for g, span in spans]

    def keep_hidden(self, hidden_1ND: Tensor) -> None:
        """Keep the trunk's hidden states of slots that end a page."""
        if not self.cache.draft:
            return
        ends_N = self.ends_N
        if bool(ends_N.any()):
            self.cache.hidden[self.row_N[ends_N] // self.size] = hidden_1ND[0, ends_N]


def _together(parts: Sequence[Tensor]) -> Tensor:
    """One behind the other; of one alone, that one."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
