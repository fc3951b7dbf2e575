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


def neighbourly_selection(rows: int, slots: int, keys: int, keep: float = 0.98) -> Tensor:
    """Ascending positions of which neighbouring rows share five in six, as those of a trained indexer do: each is the
    choice by scores that drift from row to row."""
    scores = torch.randn(slots, device="cuda")
    out = torch.empty(rows, keys, dtype=torch.int32, device="cuda")
    for n in range(rows):
        scores = keep * scores + (1 - keep**2) ** 0.5 * torch.randn(slots, device="cuda")
        out[n] = scores.topk(keys).indices.sort().values
    return out
