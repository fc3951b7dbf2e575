"""Which key slots each query may see: one contiguous interval per query, instead of a mask.

Causality, left padding, packed documents, chunked prefill, cached decode and draft verification are all of this
form. Read next: `attention`, `indexer`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Visibility:
    """Query (b, t) sees key slots `first_BT[b, t] <= s <= last_BT[b, t]`; an empty interval is padding.

    Args:
        first_BT, last_BT: int64 [B, T], inclusive bounds in key slots.
        offset: set when every row is plainly causal (`first = 0`, `last = offset + t`), which lets an operator
            use a fused causal kernel; None says nothing.
        slots: upper bound (exclusive) of the slots that any query sees, known without reading the tensors.
        packed: set when rows are packed documents, each query at its own slot, which sees its document so far.
    """

    first_BT: Tensor
    last_BT: Tensor
    slots: int
    offset: int | None = None
    packed: bool = False

    @classmethod
    def causal(cls, batch: int, queries: int, offset: int = 0, device: torch.device | str | None = None) -> Visibility:
        """Plain causal attention of `queries` new tokens after `offset` cached ones, in every row."""
        last_T = torch.arange(offset, offset + queries, device=device)
        last_BT = last_T.expand(batch, queries)
        return cls(torch.zeros_like(last_T).expand(batch, queries), last_BT, offset + queries, offset)

    @classmethod
    def documents(cls, first_BT: Tensor) -> Visibility:
        """Causal attention inside packed documents: `first_BT[b, t]` is the slot where t's document begins."""
        batch, queries = first_BT.shape
        last_BT = torch.arange(queries, device=first_BT.device).expand(batch, queries)
        return cls(first_BT.long(), last_BT, queries, packed=True)

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

        Padding between documents is a segment too. Made once for all layers of a call; waits for the device.
        """
        begins_BT = self.first_BT == self.last_BT
        empty_BT = self.first_BT > self.last_BT
        begins_BT[:, 1:] |= empty_BT[:, 1:] & ~empty_BT[:, :-1]
        begins_BT[:, 0] = True
        end = torch.full((1,), begins_BT.numel(), device=begins_BT.device)
        edges = torch.cat((begins_BT.flatten().nonzero()[:, 0], end))
        longest, padded = torch.stack((edges.diff().max(), empty_BT.any().long())).tolist()
        return edges.to(torch.int32), longest, bool(padded)

    @cached_property
    def whole_first(self) -> tuple[int, Visibility]:
        """Of packed rows: how many at the beginning are of one document each, and what the rows after them see. Made
        once for all layers of a call; waits for the device."""
        whole = int((self.first_BT == 0).all(1).long().cumprod(0).sum())
        return whole, Visibility(self.first_BT[whole:], self.last_BT[whole:], self.slots, packed=True)

    @cached_property
    def positions_BTK(self) -> Tensor:
        """All slots that each query sees, as a selection: int32 [B, T, slots], ascending, then -1. Made once a call."""
        slot_BTK = self.first_BT[..., None] + torch.arange(self.slots, device=self.last_BT.device)
        return torch.where(slot_BTK <= self.last_BT[..., None], slot_BTK, -1).to(torch.int32)

    def count_BT(self) -> Tensor:
        """Visible slots per query; 0 for padding."""
        return (self.last_BT - self.first_BT + 1).clamp(min=0)
