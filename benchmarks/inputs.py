"""Random inputs that several benchmarks of operators use, and how a selection is checked. Read next: `kernels`."""

from __future__ import annotations

import torch
from torch import Tensor


def random_selection(rows: int, slots: int, keys: int) -> Tensor:
    """Ascending distinct positions, uniformly random."""
    out = torch.empty(rows, keys, dtype=torch.int32, device="cuda")
    for start in range(0, rows, 256):
        part = out[start : start + 256]
        part.copy_(torch.rand(part.shape[0], slots, device="cuda").topk(keys, -1).indices.sort(-1).values)
    return out


def wrong_rows(picked: Tensor, scores: Tensor, k: int) -> float:
    """Share of rows that differ from a stable sort's choice."""
    best = scores.sort(dim=-1, descending=True, stable=True).indices[:, :k].sort(-1).values
    return float((picked.long().sort(-1).values != best).any(-1).float().mean())


def index_inputs(sets: int, batch: int, queries: int, slots: int) -> tuple[Tensor, ...]:
    q = torch.randn(sets, batch, queries, 32, 128, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(sets, batch, queries, 32, device="cuda") / 64
    k = torch.randn(batch, slots, 128, device="cuda", dtype=torch.bfloat16)
    last = torch.arange(slots - queries, slots, device="cuda", dtype=torch.int32).expand(batch, queries).contiguous()
    return q, w, k, torch.zeros_like(last), last


# Share of its positions that a query has in common with the query so many before it, as `selection_overlap` measured
# it: mean over the two layers of a small model whose indexers had learned, k = 256 of more than 1,024 positions.
OVERLAP = {1: 0.530, 2: 0.512, 4: 0.504, 8: 0.497, 16: 0.488, 64: 0.475}
# Parts of the variance of the scores behind `neighbourly_selection`, and how much of each goes on from row to row: one
# is new in every row, one drifts, one stays. Fitted to OVERLAP for the choice of one position in 16.
DRIFTS = ((0.18, 0.0), (0.05, 0.85), (0.77, 1.0))


def neighbourly_selection(rows: int, slots: int, keys: int, device: str = "cuda") -> Tensor:
    """Ascending positions, of which rows 1 to 64 apart share what OVERLAP says where `keys` are a 16th of `slots`.

    Each row is the choice by scores of which a part stays. A stand-in: how much is shared was measured, of a small
    model; where the positions lie is made up (anywhere alike, as if every query saw all slots), and so is what is
    shared further away (no less).
    """
    parts = [torch.randn(slots, device=device) for _ in DRIFTS]
    out = torch.empty(rows, keys, dtype=torch.int32, device=device)
    for n in range(rows):
        for part, (_, keep) in zip(parts, DRIFTS, strict=True):
            part.mul_(keep).add_(torch.randn_like(part), alpha=(1 - keep**2) ** 0.5)
        scores = sum(share**0.5 * part for part, (share, _) in zip(parts, DRIFTS, strict=True))
        out[n] = scores.topk(keys).indices.sort().values
    return out


def shared_positions(selected: Tensor, slots: int, distance: int) -> Tensor:
    """Of every row [N, K] from number `distance` on: the share of its positions, below `slots` (-1 pads), that the row
    so many before it has too, [N - distance]."""
    has = torch.zeros(selected.shape[0], slots + 1, dtype=torch.bool, device=selected.device)
    has.scatter_(1, selected.long() % (slots + 1), True)  # -1 goes to the column that is cut off
    return (has[distance:, :-1] & has[:-distance, :-1]).sum(-1) / selected.shape[1]
