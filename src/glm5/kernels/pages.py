"""Keys that lie in pages: a pool of rows that all sequences share, and which pages are whose.

An operator that takes `pages` reads slot s of sequence b at row `table[b, s // size] * size + s % size` of a pool
[1, rows, width]; without, at [b, s]. Source: paged attention (Kwon et al., 2023). Read next: `indexer`, `attention`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pages:
    """table_BP: int64, contiguous, the page of each `size` slots of each sequence; any page where there are none."""

    table_BP: Tensor
    size: int

    def gather(self, pool_1RX: Tensor, slots: int) -> Tensor:
        """The first `slots` rows of every sequence, [B, slots, X]."""
        table = self.table_BP[:, : -(-slots // self.size)]
        paged = pool_1RX[0].view(-1, self.size * pool_1RX.shape[-1])
        batch, pages = table.shape
        rows = paged.index_select(0, table.flatten()).view(batch, pages * self.size, -1)
        return rows[:, :slots]

    def rows(self, selected_BTK: Tensor) -> Tensor:
        """Rows of the pool, int64, for slots that were selected; -1 stays."""
        slot = selected_BTK.long()
        page = self.table_BP.gather(1, (slot.clamp(min=0) // self.size).flatten(1)).view_as(slot)
        return torch.where(slot < 0, -1, page * self.size + slot % self.size)
