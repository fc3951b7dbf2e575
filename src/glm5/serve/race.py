"""Draws that depend on a seed and a position alone, and the figures that go with them: plain functions of tensors.

A race draws from p: of exponentially distributed E_i, the id of largest p_i / E_i wins, with probability p_i. The noise
is a hash, so it needs no state, and two distributions that are given the same noise agree as often as draws that know
nothing of each other's distribution can promise (`sampler` says what that gives). Every step works row by row, and
what is summed over a row is summed by torch's softmax or in integers: a row's bits do not depend on the rows beside
it. Read next: `sampler`, `glm5.model.noise`, `glm5.model.sampling.kept`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from glm5.model.noise import exponentials
from glm5.model.sampling import kept
from glm5.serve.request import SamplingParams, TokenInfo


def race(
    probs_SV: Tensor, params: Sequence[SamplingParams], keys: Sequence[tuple[int, int]]
) -> tuple[Tensor, Tensor | None]:
    """Truncate each row as its parameters say, and draw from it with the noise of its key.

    Returns:
        ids int64 [S], and what could be drawn bool [S, V] (None: all).
    """
    keep_SV = None
    if any(map(truncates, params)):
        top_k = torch.tensor([max(p.top_k, 0) for p in params], device=probs_SV.device)
        top_p = torch.tensor([p.top_p for p in params], dtype=torch.double, device=probs_SV.device)
        keep_SV = kept(probs_SV, top_k, top_p, probs_SV.new_tensor([p.min_p for p in params]))
        probs_SV = probs_SV.masked_fill(~keep_SV, 0.0)
    return (probs_SV / exponentials(keys, probs_SV.shape[1], probs_SV.device)).argmax(-1), keep_SV


def truncates(p: SamplingParams) -> bool:
    """Whether some ids cannot be drawn that otherwise could."""
    return p.top_k > 0 or p.top_p < 1 or p.min_p > 0


def figures(logprobs_NV: Tensor, id_N: Tensor, tops: Sequence[int]) -> list[TokenInfo]:
    """Each id's log-probability, and those of the likeliest ids that can occur at all."""
    own = logprobs_NV.gather(-1, id_N[:, None])[:, 0].tolist()
    best = logprobs_NV.topk(min(max(tops), logprobs_NV.shape[1]))
    out = []
    for logprob, ids, values, top in zip(own, best.indices.tolist(), best.values.tolist(), tops, strict=True):
        pairs = zip(ids[:top], values[:top], strict=True)
        out.append(TokenInfo(logprob, tuple((id, value) for id, value in pairs if value > -torch.inf)))
    return out
