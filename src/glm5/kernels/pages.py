"""Keys that lie in pages: a pool of rows that all sequences share, and which pages are whose.

An operator that takes `pages` reads slot s of sequence b at row `table[b, s // size] * size + s % size` of a pool
[1, rows, width]; without, at [b, s]. Source: paged attention (Kwon et al., 2023). Read next: `indexer`, `attention`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from glm5.kernels.visibility import Visibility


@dataclass(frozen=True)
class Pages:
    """table_BP: int64, contiguous, the page of each `size` slots of each sequence; any page where there are none."""

    table_BP: Tensor
    size: int

    def gather(self, pool_1RX: Tensor, visible: Visibility) -> Tensor:
        """The first `visible.slots` rows of every sequence, [B, slots, X]: zeros where none of its queries looks, since
        what lies there, of an earlier holder, may be NaN, which a mask does not undo."""
        table = self.table_BP[:, : -(-visible.slots // self.size)]
        paged = pool_1RX[0].view(-1, self.size * pool_1RX.shape[-1])
        batch, pages = table.shape
        rows = paged.index_select(0, table.flatten()).view(batch, pages * self.size, -1)[:, : visible.slots]
        slot_S = torch.arange(visible.slots, device=rows.device)
        first_B1, last_B1 = visible.first_BT.amin(1, keepdim=True), visible.last_BT.amax(1, keepdim=True)
        unseen_BS = (slot_S < first_B1) | (slot_S > last_B1)
        return rows.masked_fill_(unseen_BS[..., None], 0.0)

    def rows(self, selected_BTK: Tensor) -> Tensor:
        """Rows of the pool, int64, for slots that were selected; -1 stays."""
        slot = selected_BTK.long()
        page = self.table_BP.gather(1, (slot.clamp(min=0) // self.size).flatten(1)).view_as(slot)
        return torch.where(slot < 0, -1, page * self.size + slot % self.size)
