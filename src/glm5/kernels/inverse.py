"""Who selected a row: the inverse of a selection, for summing every row's gradients in a fixed order.

Read next: `cuda.sparse_mla_backward`, `triton.indexer_loss`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def inverse_index(selected_NK: Tensor, queries: int, batch: int, slots: int, start: int = 0) -> tuple[Tensor, Tensor]:
    """The entries of a selection by the row that they select.

    Args:
        selected_NK: int32 slots of queries `start`, `start + 1`, … of a batch's B * T; -1 selects nothing.
        queries: T, of each sequence. slots: rows of each sequence.

    Returns:
        (order, starts), int32. Row r, counted over the batch, is selected by the entries
        order[starts[r] : starts[r + 1]], ascending numbers into the flattened selected_NK.
    """
    n = selected_NK.shape[0]
    sequence_N = torch.div(torch.arange(start, start + n, device=selected_NK.device), queries, rounding_mode="floor")
    row_NK = selected_NK + (sequence_N * slots).to(torch.int32)[:, None]
    row, order = torch.where(selected_NK < 0, batch * slots, row_NK).flatten().sort(stable=True)
    bounds = torch.arange(batch * slots + 1, dtype=torch.int32, device=row.device)
    return order.to(torch.int32), torch.searchsorted(row, bounds, out_int32=True)
