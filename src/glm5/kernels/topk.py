"""Stable top-k: the k highest scores of each row, ties to the lower position, the same on every run.

The report (section 3.2) found that a non-deterministic top-k ruins RL of a DSA model, and ReLU scores tie often
(an exact-zero plateau). So the rule is fixed: higher score first, then lower position. `racing_topk` is what it warns
of, for showing it. Read next: `indexer`.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Up to this many rows (decode), sorting k + 1 entries costs less than the passes over whole rows.
FEW_ROWS = 16


def stable_topk(scores_NS: Tensor, k: int) -> Tensor:
    """Positions of the k highest finite scores per row; `-inf` marks invisible slots.

    Args:
        scores_NS: fp32 [N, S].
        k: at least 1; may exceed S.

    Returns:
        int32 [N, min(k, S)], ascending positions, padded at the end with -1 where a row has fewer visible slots.
    """
    if k < 1:
        raise ValueError(f"k={k}: must be at least 1")
    if scores_NS.shape[0] <= FEW_ROWS and scores_NS.shape[-1] > k:
        values_NK, index_NK = torch.topk(scores_NS, k + 1, dim=-1)
        # Where the k-th place is not shared, and k slots are visible, the set is what it is: only its order is ours.
        if bool((values_NK[:, k - 1] > values_NK[:, k]).all()):
            return index_NK[:, :k].sort(-1).values.to(torch.int32)
    keep_NS = topk_mask(scores_NS, k)
    return mask_to_positions(keep_NS, min(k, scores_NS.shape[-1]))


def racing_topk(scores_NS: Tensor, k: int, ties: torch.Generator) -> Tensor:
    """As `stable_topk`, but whichever of those that tie at the k-th place come first are taken, and who comes first is
    drawn from `ties`: what a kernel does whose threads race for the last places. For showing what that breaks."""
    order_NS = torch.rand(scores_NS.shape, generator=ties, device=ties.device).to(scores_NS.device).argsort(-1)
    keep_NS = torch.zeros_like(scores_NS, dtype=torch.bool)
    keep_NS.scatter_(-1, order_NS, topk_mask(scores_NS.gather(-1, order_NS), k))
    return mask_to_positions(keep_NS, min(k, scores_NS.shape[-1]))


def topk_mask(scores_NS: Tensor, k: int) -> Tensor:
    """The same selection as a boolean [N, S]."""
    visible_NS = scores_NS > -torch.inf
    if scores_NS.shape[-1] <= k:
        return visible_NS
    kth_N1 = torch.topk(scores_NS, k, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    keep_NS = scores_NS > kth_N1
    tied_NS = (scores_NS == kth_N1) & visible_NS
    room_N1 = k - keep_NS.sum(-1, keepdim=True)
    crowded_N = (tied_NS.sum(-1, keepdim=True) > room_N1).squeeze(-1)
    if crowded_N.any():  # only rows whose k-th place is shared need the ordered count
        rows = crowded_N.nonzero().squeeze(-1)
        tied = tied_NS[rows]
        tied_NS[rows] = tied & (tied.cumsum(-1) <= room_N1[rows])
    return keep_NS | tied_NS


def mask_to_positions(keep_NS: Tensor, width: int) -> Tensor:
    """Ascending positions of the True entries, int32 [N, width], padded with -1. `width` bounds every row's count."""
    row, position = keep_NS.nonzero(as_tuple=True)
    n = keep_NS.shape[0]
    if position.numel() == n * width:
        return position.view(n, width).to(torch.int32)
    count_N = keep_NS.sum(-1)
    rank = torch.arange(position.numel(), device=position.device) - (count_N.cumsum(0) - count_N)[row]
    out = torch.full((n, width), -1, dtype=torch.int32, device=keep_NS.device)
    out[row, rank] = position.to(torch.int32)
    return out


def positions_to_mask(selected_NK: Tensor, slots: int) -> Tensor:
    """Boolean [N, slots] that is True at each selected position; -1 entries select nothing."""
    mask = torch.zeros(selected_NK.shape[0], slots + 1, dtype=torch.bool, device=selected_NK.device)
    index = torch.where(selected_NK < 0, slots, selected_NK).long()
    return mask.scatter_(-1, index, True)[:, :slots]
