"""From logits to a token: temperature, top-k, top-p and min-p in fp32, from a generator of its own.

The truncated distribution is an explicit tensor, because exact speculative sampling compares two of them.
Read next: `generate`, `speculate`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from glm5.utils.errors import NumericalError, UserError


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
                raise UserError(f"{name}={getattr(self, name)!r}", "must be a number")
        for name in ("top_k", "vocab_size"):
            if not (isinstance(getattr(self, name), int) or (name == "vocab_size" and self.vocab_size is None)):
                raise UserError(f"{name}={getattr(self, name)!r}", "must be an integer")
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
        if 0 < self.top_k < probs.shape[-1] or self.top_p < 1:
            probs = self._truncate(probs)
        if self.min_p > 0:
            probs = probs.masked_fill(probs < self.min_p * probs.amax(-1, keepdim=True), 0.0)
            probs = probs / probs.sum(-1, keepdim=True)
        return probs

    def _truncate(self, probs_NV: Tensor) -> Tensor:
        """Top-k, then top-p of what is left; equal probabilities are kept in order of their ids."""
        sorted_NV, order_NV = probs_NV.sort(dim=-1, descending=True, stable=True)
        if self.top_k:
            sorted_NV[:, self.top_k :] = 0.0
            sorted_NV /= sorted_NV.sum(-1, keepdim=True)
        if self.top_p < 1:
            before_NV = sorted_NV.cumsum(-1) - sorted_NV  # mass before each: the first is always kept
            sorted_NV = sorted_NV.masked_fill(before_NV >= self.top_p, 0.0)
            sorted_NV /= sorted_NV.sum(-1, keepdim=True)
        return torch.zeros_like(probs_NV).scatter_(-1, order_NV, sorted_NV)

    def draw(self, logits_NV: Tensor, generator: torch.Generator) -> Tensor:
        """One id per row, int64 [N]. Greedy touches no random state."""
        if self.greedy:
            best_N, id_N = logits_NV[:, : self.vocab_size].float().max(-1)
            _check_finite(best_N)
            return id_N
        return draw(self.probs(logits_NV), generator)


def draw(probs_NV: Tensor, generator: torch.Generator) -> Tensor:
    """One id per row of a distribution, int64 [N]."""
    return torch.multinomial(probs_NV, 1, generator=generator).squeeze(-1)


def _check_finite(best_N: Tensor) -> None:
    if not all(map(isfinite, best_N.flatten().tolist())):
        raise NumericalError(
            "the logits of the next token have a NaN or no finite value",
            "Check the checkpoint's files, and try dtype=float32",
        )
