"""Which key slots each query may see: one contiguous interval per query, instead of a mask.

Causality, left padding, packed documents, chunked prefill, cached decode and draft verification are all of this
form. Read next: `attention`, `indexer`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

# Documents of a micro-batch are padded to a multiple of so many, so that few numbers of them occur.
SEGMENTS = 32


@dataclass(frozen=True)
class Layout:
    """How packed rows lie, known without a look at the device.

    Attributes:
        whole: how many rows at the beginning are of one document each. edges: int32, of the rows after them, flattened:
            where each document begins and the last ends, the end several times. longest: no document is longer.
        padded: whether some query sees nothing.
    """

    whole: int
    edges: Tensor
    longest: int
    padded: bool

    @classmethod
    def of(cls, first_BT: Tensor, device: torch.device) -> Layout:
        """Of rows on the host, as `Visibility.documents` takes them."""
        queries = first_BT.shape[1]
        whole = int((first_BT == 0).all(1).long().cumprod(0).sum())
        first, last = first_BT[whole:], torch.arange(queries).expand(len(first_BT) - whole, -1)
        edges = _edges(first, last).to(torch.int32)
        edges = torch.cat((edges, edges[-1:].expand(-(len(edges) - 1) % SEGMENTS)))
        if device.type == "cuda":
            edges = edges.pin_memory()
        return cls(whole, edges.to(device, non_blocking=True), queries, bool((first > last).any()))


@dataclass(frozen=True)
class Visibility:
    """Query (b, t) sees key slots `first_BT[b, t] <= s <= last_BT[b, t]`; an empty interval is padding.

    Args:
        first_BT, last_BT: int64 (or int32, as kernels take them) [B, T], inclusive bounds in key slots.
        offset: set when every row is plainly causal (`first = 0`, `last = offset + t`), which lets an operator
            use a fused causal kernel; None says nothing.
        slots: upper bound (exclusive) of the slots that any query sees, known without reading the tensors.
        packed: set when rows are packed documents, each query at its own slot, which sees its document so far.
        layout: of packed rows, where it is known.
    """

    first_BT: Tensor
    last_BT: Tensor
    slots: int
    offset: int | None = None
    packed: bool = False
    layout: Layout | None = None

    @classmethod
    def causal(cls, batch: int, queries: int, offset: int = 0, device: torch.device | str | None = None) -> Visibility:
        """Plain causal attention of `queries` new tokens after `offset` cached ones, in every row."""
        last_T = torch.arange(offset, offset + queries, device=device)
        last_BT = last_T.expand(batch, queries)
        return cls(torch.zeros_like(last_T).expand(batch, queries), last_BT, offset + queries, offset)

    @classmethod
    def documents(cls, first_BT: Tensor, layout: Layout | None = None) -> Visibility:
        """Causal attention inside packed documents: `first_BT[b, t]` is the slot where t's document begins."""
        batch, queries = first_BT.shape
        last_BT = torch.arange(queries, device=first_BT.device).expand(batch, queries)
        return cls(first_BT.long(), last_BT, queries, packed=True, layout=layout)

    def tile(self, start: int, stop: int) -> Visibility:
        """The same for queries `start:stop`, with `slots` tightened where that is known."""
        slots = self.slots if self.offset is None else self.offset + stop
        offset = None if self.offset is None else self.offset + start
        return Visibility(self.first_BT[:, start:stop], self.last_BT[:, start:stop], min(slots, self.slots), offset)

    def mask_BTS(self) -> Tensor:
        """Boolean [B, T, slots], True where visible. Make it for tiles of queries only."""
        slot_S = torch.arange(self.slots, device=self.last_BT.device)
        mask = slot_S <= self.last_BT[..., None]
        if self.offset is None:
            mask = mask & (slot_S >= self.first_BT[..., None])
        return mask

    @cached_property
    def narrow(self) -> tuple[Tensor, Tensor]:
        """The bounds as contiguous int32, made once for all layers of a call."""
        return self.first_BT.to(torch.int32).contiguous(), self.last_BT.to(torch.int32).contiguous()

    @cached_property
    def segments(self) -> tuple[Tensor, int, bool]:
        """Of packed rows, flattened: where each document begins and the last ends, int32; the longest's length; whether
        there is padding.

        Padding between documents is a segment too. Made once for all layers of a call; waits for the device unless the
        layout is known.
        """
        if self.layout is not None and self.layout.whole == 0:
            return self.layout.edges, self.layout.longest, self.layout.padded
        edges, empty_BT = _edges(self.first_BT, self.last_BT), self.first_BT > self.last_BT
        longest, padded = torch.stack((edges.diff().max(), empty_BT.any().long())).tolist()
        return edges.to(torch.int32), longest, bool(padded)

    @cached_property
    def whole_first(self) -> tuple[int, Visibility]:
        """Of packed rows: how many at the beginning are of one document each, and what the rows after them see. Made
        once for all layers of a call; waits for the device unless the layout is known."""
        known = self.layout
        whole = known.whole if known is not None else int((self.first_BT == 0).all(1).long().cumprod(0).sum())
        layout = None if known is None else replace(known, whole=0)
        return whole, Visibility(self.first_BT[whole:], self.last_BT[whole:], self.slots, packed=True, layout=layout)

    @cached_property
    def positions_BTK(self) -> Tensor:
        """All slots that each query sees, as a selection: int32 [B, T, slots], ascending, then -1. Made once a call."""
        slot_BTK = self.first_BT[..., None] + torch.arange(self.slots, device=self.last_BT.device)
        return torch.where(slot_BTK <= self.last_BT[..., None], slot_BTK, -1).to(torch.int32)

    def count_BT(self) -> Tensor:
        """Visible slots per query; 0 for padding."""
        return (self.last_BT - self.first_BT + 1).clamp(min=0)


def inside(first_BS: Tensor, depth: int, queries: int) -> Tensor:
    """Of packed rows of S slots: where each query's document begins, or, where the slot `depth` ahead lies in another
    document, one past the queries, who then see nothing."""
    first_BT = first_BS[:, :queries]
    return first_BT.masked_fill(first_BS[:, depth : depth + queries] != first_BT, queries)


def _edges(first_BT: Tensor, last_BT: Tensor) -> Tensor:
    """int64: where each document of packed rows, flattened, begins and the last ends."""
    begins_BT = first_BT == last_BT
    empty_BT = first_BT > last_BT
    begins_BT[:, 1:] |= empty_BT[:, 1:] & ~empty_BT[:, :-1]
    begins_BT[:, :1] = True
    end = torch.full((1,), begins_BT.numel(), device=begins_BT.device)
    return torch.cat((begins_BT.flatten().nonzero()[:, 0], end))
