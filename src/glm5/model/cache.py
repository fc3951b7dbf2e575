"""The cache: per layer the MLA latent row (512 + 64 elements a token) and the index key (128), nothing else.

All layers' tensors, the MTP block's included, live and die together: written, cropped, reordered and repeated as
one, so that index keys can never be left behind. Rows have their own lengths, so right-padded and speculated
batches need no holes. Source: report section 2.1; `config` for the widths. Read next: `mla`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from glm5.kernels.indexer_fp8 import IndexKeys
from glm5.kernels.pages import Pages
from glm5.kernels.visibility import Visibility
from glm5.model.config import ModelConfig


def cache_widths(config: ModelConfig) -> tuple[int, ...]:
    """Elements per token of each cached tensor of a layer: (latent + rope, index key), or (keys, values) in GQA."""
    if config.attention == "mla":
        return (config.latent_dim, config.index_head_dim)
    group = config.num_key_value_heads * config.head_dim
    return (group, group)


class Part(NamedTuple):
    """What some rows of a call attend to.

    visible: of these rows. rows [B, S, latent + rope], index_keys [B, S, I]; with `pages` those of a pool, [1, R, .],
    and in 8 bits as `packed` says, rows being bytes.
    span: where the rows are in a flat batch (first row, sequences, rows of each); None is the whole call, as it is.
    by_row: take the form of attention in which a row's bits do not depend on the others: absorbed, over a selection.
    """

    visible: Visibility
    rows: Tensor
    index_keys: Tensor | IndexKeys
    pages: Pages | None = None
    span: tuple[int, int, int] | None = None
    by_row: bool = False

    def of(self, x: Tensor) -> Tensor:
        """This part's rows of [1, N, ...] as [B, T, ...]."""
        if self.span is None:
            return x
        first, batch, queries = self.span
        return x[0, first : first + batch * queries].unflatten(0, (batch, queries))


class Keys(Protocol):
    """Where blocks put the keys of new tokens, and find those of earlier ones: `Cache`, or a call over pages."""

    def store(
        self, layer: int, slot_BT: Tensor | None, visible: Visibility, rows_BTX: Tensor, index_BTI: Tensor
    ) -> list[Part]:
        """Write new rows; what they attend to, themselves included."""
        ...


class SharedRows(ABC):
    """Keys of rows whose positions several processes share out among them; a call runs the positions held here.

    Attributes:
        slot_T: int64 [T], the slots of the whole rows that are held here, ascending.
        visible: what each of them sees, in slots of the whole rows.
    """

    slot_T: Tensor
    visible: Visibility

    @property
    def position_BT(self) -> Tensor:
        """Rotary positions."""
        return (self.visible.last_BT - self.visible.first_BT).clamp(min=0)

    @abstractmethod
    def store(
        self, layer: int, slot_BT: Tensor | None, visible: Visibility, rows_BTX: Tensor, index_BTI: Tensor
    ) -> list[Part]:
        """Give others the new rows; everyone's, in the order of slots."""

    @abstractmethod
    def by_heads(self, *heads: int) -> bool:
        """Whether `attend` is there, and takes so many heads of queries, of keys."""

    @abstractmethod
    def attend(self, q_BTHX: Tensor, k_BTGX: Tensor, v_BTGV: Tensor, scale: float) -> Tensor:
        """Dense attention [B, T, H, V] of the positions held here, every process doing some heads of the whole rows."""

    @abstractmethod
    def ahead(self, depth: int) -> SharedRows:
        """The same at an MTP depth: positions whose token so far ahead is of another document see nothing."""


@dataclass(frozen=True)
class DraftPlace:
    """How far the MTP layer of a one-sequence cache has followed the trunk; `speculate` keeps it.

    Its slots [first, filled) are written. `hidden_1ND`: the trunk's hidden states of the N slots from `filled` on,
    which it has still to read; `ids`: the tokens after each of those slots but the last, so N - 1 of them.
    """

    first: int
    filled: int
    hidden_1ND: Tensor
    ids: tuple[int, ...]

    @property
    def end(self) -> int:
        """The number of tokens that the trunk held when this was recorded."""
        return self.filled + self.hidden_1ND.shape[1]

    def cropped(self, length: int) -> DraftPlace:
        """The same for a cache of `length` tokens at most. The last row that stays may have read a token that does
        not: it can make a draft worse, never a result."""
        filled = min(self.filled, length)
        kept = max(0, min(self.end, length) - filled)
        return DraftPlace(min(self.first, filled), filled, self.hidden_1ND[:, :kept], self.ids[: max(0, kept - 1)])


class Cache:
    """Key slots of every layer for a batch of sequences, grown as needed.

    Attributes:
        length_B: int64 tokens held per row. first_B: int64 first real slot per row (left padding before it).
        layers: per layer, a list of tensors [B, capacity, width].
        draft: the place of speculative decoding, of a single sequence that uses it.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch: int = 1,
        *,
        capacity: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.widths = cache_widths(config)
        self.max_slots = config.max_position_embeddings
        self.layers = [
            [torch.zeros(batch, capacity, w, dtype=dtype, device=device) for w in self.widths]
            for _ in range(config.num_cache_layers)
        ]
        self.length_B = torch.zeros(batch, dtype=torch.int64, device=device)
        self.first_B = torch.zeros(batch, dtype=torch.int64, device=device)
        self.uniform: int | None = 0  # the common length where all rows are equal and unpadded, else None
        self.draft: DraftPlace | None = None

    @property
    def batch(self) -> int:
        return self.length_B.shape[0]

    @property
    def capacity(self) -> int:
        return self.layers[0][0].shape[1]

    def nbytes(self, *, used: bool = True) -> int:
        """Bytes of the held tokens (or of the whole allocation), all layers and tensors."""
        tokens = int(self.length_B.sum()) if used else self.batch * self.capacity
        return tokens * sum(t.shape[-1] * t.element_size() for layer in self.layers for t in layer)

    def reserve(self, slots: int) -> None:
        """Make room for `slots` per row, at least doubling, so that growth costs linear time in all."""
        if slots <= self.capacity:
            return
        capacity = max(slots, min(2 * self.capacity, self.max_slots), 64)
        with torch.inference_mode(False), torch.no_grad():  # `generate` grows it, and any mode may then write to it
            for layer in self.layers:
                for i, old in enumerate(layer):
                    new = torch.zeros(self.batch, capacity, old.shape[-1], dtype=old.dtype, device=old.device)
                    new[:, : old.shape[1]] = old
                    layer[i] = new

    def write(self, layer: int, slot_BT: Tensor | None, start: int | None, *values: Tensor) -> list[Tensor]:
        """Write new rows [B, T, width] into `layer`, at `start` in every row or at `slot_BT`; return whole tensors.

        Slots must have been reserved. Returns the layer's tensors [B, capacity, width].
        """
        tensors = self.layers[layer]
        for tensor, value in zip(tensors, values, strict=True):
            if start is not None:
                tensor[:, start : start + value.shape[1]] = value
            else:
                assert slot_BT is not None
                tensor.scatter_(1, slot_BT[..., None].expand_as(value), value.to(tensor.dtype))
        return tensors

    def store(
        self, layer: int, slot_BT: Tensor | None, visible: Visibility, rows_BTX: Tensor, index_BTI: Tensor
    ) -> list[Part]:
        """Write new rows, and give what they attend to."""
        rows, index_keys = self.write(layer, slot_BT, visible.offset, rows_BTX, index_BTI)
        return [Part(visible, rows, index_keys)]

    def crop(self, length: int | Tensor) -> None:
        """Forget everything from `length` on (at least 0; per row, or one for all). Never grows a row."""
        limit = torch.as_tensor(length, device=self.length_B.device)
        if limit.is_floating_point() or limit.shape not in ((), self.length_B.shape) or bool((limit < 0).any()):
            raise ValueError(f"length={length}: must be at least 0, one integer or one for each of {self.batch} rows")
        self.length_B = torch.minimum(self.length_B, limit.expand_as(self.length_B))
        self.first_B = torch.minimum(self.first_B, self.length_B)  # a row cut inside its left padding starts anew
        if self.uniform is not None:
            same = isinstance(length, int) or self.batch == 1
            self.uniform = min(self.uniform, int(limit)) if same else None
        if self.draft is not None:
            self.draft = None if self.uniform is None else self.draft.cropped(self.uniform)

    def reorder(self, rows: Tensor) -> None:
        """Keep the given rows, in that order, repeats allowed: beam search, or repeating a prompt n times."""
        with torch.inference_mode(False), torch.no_grad():  # as in `reserve`: any mode may then write to it
            for layer in self.layers:
                layer[:] = [t.index_select(0, rows) for t in layer]
        self.length_B, self.first_B = self.length_B[rows], self.first_B[rows]
        self.draft = None
