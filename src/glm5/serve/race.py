"""Draws that depend on a seed and a position alone, and the figures that go with them: plain functions of tensors.

A race draws from p: of exponentially distributed E_i, the id of largest p_i / E_i wins, with probability p_i. The noise
is a hash, so it needs no state, and two distributions that are given the same noise agree as often as draws that know
nothing of each other's distribution can promise (`sampler` says what that gives). Every step works row by row, and
what is summed over a row is summed by torch's softmax or in integers: a row's bits do not depend on the rows beside
it. Read next: `sampler`, `glm5.model.sampling.kept`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from glm5.model.sampling import kept
from glm5.serve.request import SamplingParams, TokenInfo


def noise_key(seed: int, index: int, position: int) -> tuple[int, int]:
    """64 bits of a hash that name the noise of one draw, as two signed words."""
    return struct.unpack("<ii", blake2b(struct.pack("<qqq", seed, index, position), digest_size=8).digest())


def exponentials(keys: Sequence[tuple[int, int]], width: int, device: torch.device) -> Tensor:
    """Noise of the exponential distribution, one row a key, fp32 [len(keys), width]: a hash of key and column.

    Two rounds of the 32-bit finalizer of MurmurHash3, each on one word of the key; 31 bits make a uniform number.
    """
    words = torch.tensor(keys, dtype=torch.int32, device=device)
    h = torch.arange(width, dtype=torch.int32, device=device) ^ words[:, :1]
    _mix(h)
    h += words[:, 1:]
    _mix(h)
    # Small numbers decide a race, and float32 is fine near 0, so it is 1 that is cut off.
    uniform = ((h & 0x7FFFFFFF).float() + 0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_()


def _mix(h: Tensor) -> None:
    """MurmurHash3's finalizer, in place on int32: shifts are made logical, products wrap."""
    h ^= (h >> 16) & 0xFFFF
    h *= 0x85EBCA6B - 2**32
    h ^= (h >> 13) & 0x7FFFF
    h *= 0xC2B2AE35 - 2**32
    h ^= (h >> 16) & 0xFFFF


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
