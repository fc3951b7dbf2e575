"""From logits to a token: temperature, top-k, top-p and min-p in fp32, with the noise of a seed and a position.

A draw is a race: of exponentially distributed E_i, the id of largest p_i / E_i wins, with probability p_i. What
truncation keeps is decided by `kept`, one row at a time, for one sequence and for an engine's batch alike.
Read next: `generate`, `speculate`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from glm5.model.noise import exponentials, noise_key
from glm5.utils.errors import ConfigError, NumericalError, UserError

PREFIX = 1024  # the most probable ids of a row that are sorted at first
MASS = 2**40  # probability 1 as an integer


@dataclass(frozen=True)
class Sampling:
    """How to draw.

    Args:
        temperature: 0 takes the most probable token (the lowest id of equals). top_k: keep that many; 0 keeps all.
        top_p: then keep the most probable that together reach this mass. min_p: then keep those at least this
            fraction as probable as the best.
        vocab_size: only ids below this exist. Models pad their vocabulary, and no tokenizer can spell the padding.

    Raises:
        UserError: a value lies outside its range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p"):
            if isinstance(getattr(self, name), bool) or not isinstance(getattr(self, name), int | float):
                raise ConfigError(name, getattr(self, name), "must be a number")
        for name in ("top_k", "vocab_size"):
            if not (isinstance(getattr(self, name), int) or (name == "vocab_size" and self.vocab_size is None)):
                raise ConfigError(name, getattr(self, name), "must be an integer")
        ranges = {
            "temperature": (0 <= self.temperature < float("inf"), "must be finite and at least 0"),
            "top_p": (0 < self.top_p <= 1, "must lie in (0, 1]"),
            "top_k": (self.top_k >= 0, "must be at least 0, which keeps all"),
            "min_p": (0 <= self.min_p <= 1, "must lie in [0, 1]"),
            "vocab_size": (self.vocab_size is None or self.vocab_size > 0, "must be at least 1"),
        }
        for name, (fits, rule) in ranges.items():
            if not fits:
                raise UserError(f"{name}={getattr(self, name)}", rule)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def probs(self, logits_NV: Tensor) -> Tensor:
        """The distribution that is drawn from, fp32 [N, vocab_size]; for greedy all mass is on the best id.

        Raises:
            NumericalError: a row has a NaN, or nothing finite to choose from.
        """
        logits = logits_NV[:, : self.vocab_size].float()
        best_N1, id_N1 = logits.max(-1, keepdim=True)
        _check_finite(best_N1)
        if self.greedy:
            return torch.zeros_like(logits).scatter_(-1, id_N1, 1.0)
        # Subtracting first keeps tiny temperatures from overflowing to inf - inf, the bound from dividing 0 by 0.
        probs = ((logits - best_N1) / max(self.temperature, 1e-30)).softmax(-1)
        if self.top_k > 0 or self.top_p < 1 or self.min_p > 0:
            rows = (len(probs),)
            top_k_N = probs.new_full(rows, self.top_k, dtype=torch.long)
            top_p_N = probs.new_full(rows, self.top_p, dtype=torch.double)
            keep_NV = kept(probs, top_k_N, top_p_N, probs.new_full(rows, self.min_p))
            probs = probs.masked_fill(~keep_NV, 0.0)
            probs = probs / probs.sum(-1, keepdim=True)
        return probs

    def draw(self, logits_NV: Tensor, seed: int, position: int) -> Tensor:
        """One id per row, int64 [N]: row i with the noise of `position` + i, which greedy does not need."""
        if self.greedy:
            best_N, id_N = logits_NV[:, : self.vocab_size].float().max(-1)
            _check_finite(best_N)
            return id_N
        probs_NV = self.probs(logits_NV)
        keys = [noise_key(seed, 0, position + i) for i in range(len(probs_NV))]
        return (probs_NV / exponentials(keys, probs_NV.shape[1], probs_NV.device)).argmax(-1)


def kept(probs_NV: Tensor, top_k_N: Tensor, top_p_N: Tensor, min_p_N: Tensor) -> Tensor:
    """Which ids truncation leaves to draw from: top-k, then top-p of what is left, then min-p.

    All three keep a beginning of the same order, the more probable first and of equals the lower id, so the kept set
    is known by its size. Masses are summed as integers: exact, so a row's set does not depend on the rows beside it.

    Args:
        probs_NV: fp32, each row sums to 1. top_k_N: int64, 0 keeps all. top_p_N: fp64. min_p_N: fp32.

    Returns:
        bool [N, V], at least one True a row; an id without probability is never kept.
    """
    vocab = probs_NV.shape[1]
    most_N = torch.where(top_k_N > 0, top_k_N.clamp(max=vocab), vocab)
    whole_N = (most_N == vocab) & (top_p_N >= 1)  # rows that need no order
    size_N, last_N, settled_N = _cut(probs_NV, most_N, top_p_N, min(PREFIX, vocab))
    open_N = ~(settled_N | whole_N)  # rows whose most probable ids are not enough: sort them all
    if bool(open_N.any()):
        size_N[open_N], last_N[open_N], _ = _cut(probs_NV[open_N], most_N[open_N], top_p_N[open_N], vocab)
    above_NV, equal_NV = probs_NV > last_N[:, None], probs_NV == last_N[:, None]
    equals_N1 = (size_N - above_NV.sum(-1))[:, None]
    keep_NV = above_NV | (equal_NV & (equal_NV.cumsum(-1) <= equals_N1)) | whole_N[:, None]
    best_N1 = probs_NV.amax(-1, keepdim=True)
    return keep_NV & (probs_NV >= min_p_N[:, None] * best_N1) & (probs_NV > 0)


def _cut(probs_NV: Tensor, most_N: Tensor, top_p_N: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """How many of each row's `width` most probable ids are kept, the probability of the last, and if that is final."""
    vocab = probs_NV.shape[1]
    sorted_NW = probs_NV.topk(width).values if width < vocab else probs_NV.sort(dim=-1, descending=True).values
    inside_NW = torch.arange(width, device=probs_NV.device) < most_N[:, None]
    mass_NW = (sorted_NW.double() * MASS).round().long().masked_fill(~inside_NW, 0)
    total_N = torch.where(most_N < vocab, mass_NW.sum(-1), MASS)
    before_NW = (mass_NW.cumsum(-1) - mass_NW).double()
    short_NW = (before_NW < (top_p_N * total_N.double())[:, None]) | (top_p_N >= 1)[:, None]
    size_N = (inside_NW & short_NW).sum(-1)
    final_N = (most_N <= width) | ((most_N == vocab) & (size_N < width))
    return size_N, sorted_NW.gather(-1, size_N[:, None] - 1)[:, 0], final_N


def _check_finite(best_N: Tensor) -> None:
    if not all(map(isfinite, best_N.flatten().tolist())):
        raise NumericalError(
            "the logits of the next token have a NaN or no finite value",
            "Check the checkpoint's files, and try dtype=float32",
        )
