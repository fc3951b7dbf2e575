"""Losses of reinforcement learning, term by term over the actions of packed rows.

An action is a token that the policy drew. Each loss is

    sum over actions t of   weight_t · correction_t · term_t(log π_θ)

where `weight` holds the normalisation, `correction` what is done about an engine whose probabilities differ from the
trainer's, and `term` the objective. All divisors are counts of the whole batch, passed in, so that a gradient does not
depend on how the batch was cut into rows, micro-batches and ranks: sums add up.

    GLM-5 Eq. 1 (reasoning, general)   objective "clip", correction "icepop", mean "sequence"       `glm5_reasoning()`
    GLM-5 Eq. 3 to 5 (agents)          objective "double_sided", mean "token"                       `glm5_agentic()`
    GRPO   arXiv:2402.03300            objective "clip", mean "sequence", KL as k3                  `LossConfig()`
    DAPO   arXiv:2503.14476            objective "clip" with the higher upper bound, mean "token"   `dapo()`
    GSPO   arXiv:2507.18071            objective "sequence_clip", mean "sequence"                   `gspo()`
    Dr. GRPO  arXiv:2503.20783         mean "constant", advantages without std

Three policies: θ, which learns; `old`, the trainer's at the time of the rollout; `rollout`, the engine's that drew the
tokens. All [N] tensors stand at the query whose next token is the action (`rows` has the one convention). Sources: the
report, sections 3.2 and 4.1; TIS and MIS: Yao et al. 2025; IcePop: Ring team 2025. Read next: `advantage`, `logprobs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from glm5.train.ranks import Ranks
from glm5.utils.errors import ConfigError

Objective = Literal["clip", "sequence_clip", "double_sided"]
Correction = Literal["none", "icepop", "truncate", "mask"]
Level = Literal["token", "sequence", "geometric"]
Mean = Literal["sequence", "token", "constant"]
Estimator = Literal["k1", "k2", "k3"]

# Logarithms of ratios are cut here, far outside every bound, so that no ratio overflows and turns a gradient to NaN.
LOG_LIMIT = 20.0


@dataclass(frozen=True)
class LossConfig:
    """Which loss. The defaults are GRPO with its symmetric clip and without a KL term."""

    objective: Objective = "clip"
    """clip: PPO's clipped surrogate a token; sequence_clip: GSPO's a sequence; double_sided: GLM-5's Eq. 3."""
    clip_low: float = 0.2
    """ε below 1: the ratio's lower bound is 1 - clip_low."""
    clip_high: float = 0.2
    """ε above 1: the upper bound is 1 + clip_high."""
    correction: Correction = "none"
    """What becomes of ρ = π_old / π_rollout. icepop and mask: ρ inside the closed band, else 0; truncate: min(ρ, high).
    Only `icepop` is of tokens alone."""
    correction_level: Level = "token"
    """ρ of each token, of the sequence (their product), or its geometric mean."""
    correction_low: float = 0.5
    """Lower end of the band."""
    correction_high: float = 2.0
    """Upper end of the band, or the cap."""
    mean: Mean = "sequence"
    """sequence: mean over a sequence's actions, then over sequences; token: over all actions; constant: actions are
    summed and divided by sequences times `constant_length`."""
    constant_length: int = 0
    """The divisor of `constant`: the longest answer that is allowed."""
    kl_weight: float = 0.0
    """Weight of KL(π_θ ‖ π_ref) as a term of the loss; π_ref is the model that the run began with."""
    kl_estimator: Estimator = "k3"
    """Estimator of that term: k2 or k3; k1 has no gradient in the mean, and is refused."""
    entropy_weight: float = 0.0
    """Weight of the mean entropy, which is then raised."""

    def __post_init__(self) -> None:
        for name in ("clip_low", "clip_high", "correction_low", "correction_high"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(name, getattr(self, name), "must be a finite number of at least 0")
        for name in ("kl_weight", "entropy_weight"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(name, getattr(self, name), "must be a finite number of at least 0")
        if self.correction_low > self.correction_high:
            raise ConfigError("correction_low", self.correction_low, f"must be at most {self.correction_high}")
        if self.correction == "icepop" and self.correction_level != "token":
            raise ConfigError("correction_level", self.correction_level, "IcePop is of tokens; `mask` has the others")
        if self.objective == "double_sided" and self.correction != "none":
            raise ConfigError("correction", self.correction, "double_sided corrects for the engine by itself: none")
        if (self.mean == "constant") != (self.constant_length > 0):
            raise ConfigError("constant_length", self.constant_length, "belongs to mean=constant, and is then above 0")
        if self.kl_weight and self.kl_estimator == "k1":
            raise ConfigError("kl_estimator", "k1", "its gradient is 0 in the mean: use k2 or k3, or lower the reward")


def glm5_reasoning(beta: float = 2.0) -> LossConfig:
    """The report's Eq. 1: IcePop's band [1/β, β], clip 0.2 and 0.28, no KL."""
    return LossConfig(clip_high=0.28, correction="icepop", correction_low=1 / beta, correction_high=beta)


def glm5_agentic(low: float = 0.3, high: float = 5.0) -> LossConfig:
    """The report's Eq. 3 to 5. It does not give ε; the defaults are those that its authors' later paper (SAO,
    arXiv:2607.07508) is said to use, by a second-hand source."""
    return LossConfig(objective="double_sided", clip_low=low, clip_high=high, mean="token")


def dapo() -> LossConfig:
    """DAPO: the upper bound at 0.28, one mean over all tokens of the batch."""
    return LossConfig(clip_high=0.28, mean="token")


def gspo() -> LossConfig:
    """GSPO with its paper's bounds, which are of a mean over a sequence and so are small."""
    return LossConfig(objective="sequence_clip", clip_low=3e-4, clip_high=4e-4)


# ---------------------------------------------------------------------------------------------------- normalisation
@dataclass(frozen=True)
class BatchCounts:
    """The whole batch's divisors. Add those of ranks and micro-batches up, or count once before cutting.

    Args:
        actions_S: int64 [S], actions of each sequence, over all of its rows.
    """

    actions_S: Tensor

    @classmethod
    def of(cls, mask_N: Tensor, sequence_N: Tensor, sequences: int) -> BatchCounts:
        """Count the actions (True in `mask_N`) of sequences 0 … `sequences` - 1. Slots of none have -1."""
        inside_N = mask_N & (sequence_N >= 0)
        return cls(torch.bincount(sequence_N[inside_N], minlength=sequences))

    @cached_property
    def tokens(self) -> int:
        return int(self.actions_S.sum())

    @cached_property
    def sequences(self) -> int:
        """Sequences with at least one action: one without has no mean, and weighs nothing."""
        return int((self.actions_S > 0).sum())

    def weights(self, config: LossConfig, mask_N: Tensor, sequence_N: Tensor) -> Tensor:
        """What each token's term is multiplied by, fp64 [N]: 0 where it is no action.

        A sequence in three rows weighs as much as in one, and masked tokens are in no denominator.
        """
        if config.mean == "token":
            each_N = mask_N.double() / max(1, self.tokens)
        elif config.mean == "constant":
            each_N = mask_N.double() / (max(1, self.sequences) * config.constant_length)
        else:
            actions_N = self.actions_S[sequence_N.clamp(min=0)].clamp(min=1)
            each_N = 1 / (actions_N * max(1, self.sequences)).double()
        return torch.where(mask_N, each_N, 0.0)


# ---------------------------------------------------------------------------------------------------- terms
def clipped(log_ratio_N: Tensor, advantages_N: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """-min(r·Â, clip(r, 1 - clip_low, 1 + clip_high)·Â) of r = exp(log_ratio) (PPO; GRPO; DAPO's two bounds)."""
    ratio_N = log_ratio_N.clamp(-LOG_LIMIT, LOG_LIMIT).exp()
    bounded_N = ratio_N.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio_N * advantages_N, bounded_N * advantages_N)


def double_sided(
    logprobs_N: Tensor, rollout_logprobs_N: Tensor, advantages_N: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """-sg[f(r)]·Â·log π_θ, with r = π_θ / π_rollout and f(r) = r where 1 - clip_low < r < 1 + clip_high, else 0
    (report, Eq. 3 to 5; strict bounds).

    The report does not say that f is a constant to the gradient. It must be: then the gradient is that of the masked
    importance-weighted return, f(r)·Â·∇log π; through both factors there would be r·Â·log π·∇log π too.
    """
    ratio_N = (logprobs_N - rollout_logprobs_N).detach().exp()
    inside_N = (ratio_N > 1 - clip_low) & (ratio_N < 1 + clip_high)
    return -torch.where(inside_N, ratio_N, 0.0) * advantages_N * logprobs_N


def sequence_log_ratio(
    logprobs_N: Tensor, old_logprobs_N: Tensor, sequence_N: Tensor, mask_N: Tensor, actions_S: Tensor
) -> Tensor:
    """GSPO's log s_i = (1/|y_i|) Σ_t (log π_θ - log π_old), [S], without gradient: this call's part of it, to be added
    to those of other micro-batches that hold rows of the same sequences."""
    difference_N = torch.where(mask_N, (logprobs_N - old_logprobs_N).detach(), 0.0)
    sums_S = difference_N.new_zeros(len(actions_S))
    sums_S.index_add_(0, sequence_N.clamp(min=0), difference_N)
    return sums_S / actions_S.clamp(min=1)


def spread_over_tokens(log_s_S: Tensor, logprobs_N: Tensor, sequence_N: Tensor) -> Tensor:
    """log of s_i as a token's own ratio, with value s_i and the gradient s_i·∇log π_t (GSPO, the token form): its mean
    over a sequence's actions is s_i with the gradient of s_i."""
    return log_s_S[sequence_N.clamp(min=0)] + logprobs_N - logprobs_N.detach()


def kl(logprobs_N: Tensor, reference_logprobs_N: Tensor, estimator: Estimator) -> Tensor:
    """KL(π_θ ‖ π_ref) at tokens that θ drew, by one of three estimators, with d = log π_θ - log π_ref.

    k1 = d: unbiased, often negative; as a loss its gradient is 0 in the mean. k2 = d²/2: biased in value; its gradient
    is that of the KL. k3 = exp(-d) - 1 + d: unbiased and never negative; as a loss it pulls as KL(π_ref ‖ π_θ) does.
    Source: Schulman, "Approximating KL divergence" (2020).
    """
    d_N = logprobs_N - reference_logprobs_N
    if estimator == "k1":
        return d_N
    if estimator == "k2":
        return 0.5 * d_N.square()
    return torch.expm1(-d_N) + d_N


# ---------------------------------------------------------------------------------------------------- correction
def icepop(ratio_N: Tensor, beta: float) -> Tensor:
    """pop(ρ, 1/β, β): ρ where 1/β ≤ ρ ≤ β, both ends in, else 0 (report, Eq. 1)."""
    return masked(ratio_N, 1 / beta, beta)


def masked(ratio_N: Tensor, low: float, high: float) -> Tensor:
    """Masked importance sampling: ρ where low ≤ ρ ≤ high, else 0."""
    return torch.where((ratio_N >= low) & (ratio_N <= high), ratio_N, 0.0)


def truncated(ratio_N: Tensor, cap: float) -> Tensor:
    """Truncated importance sampling: min(ρ, cap)."""
    return ratio_N.clamp(max=cap)


def mismatch_ratio(
    old_logprobs_N: Tensor,
    rollout_logprobs_N: Tensor,
    sequence_N: Tensor,
    mask_N: Tensor,
    actions_S: Tensor,
    level: Level = "token",
) -> Tensor:
    """ρ of every token, without gradient: its own, or its sequence's as a product or as a geometric mean.

    For the latter two, all rows of a sequence must be here: a rollout's ratio is known before any training on it.
    """
    log_N = torch.where(mask_N, (old_logprobs_N - rollout_logprobs_N).detach(), 0.0)
    if level != "token":
        sums_S = log_N.new_zeros(len(actions_S)).index_add_(0, sequence_N.clamp(min=0), log_N)
        if level == "geometric":
            sums_S = sums_S / actions_S.clamp(min=1)
        log_N = torch.where(mask_N, sums_S[sequence_N.clamp(min=0)], 0.0)
    return log_N.clamp(-LOG_LIMIT, LOG_LIMIT).exp()


# ---------------------------------------------------------------------------------------------------- all of it
@dataclass(frozen=True)
class Actions:
    """What a loss reads: [N] tensors over the slots of packed rows, whatever their shape was.

    Args:
        logprobs: log π_θ of the token drawn, with its gradient. mask: bool, where there is an action.
        sequence: int64, the rollout that the slot is of, -1 for none; several rows may be of one.
        advantages: of each token. rollout_logprobs: the engine's.
        old_logprobs: the trainer's at the time of the rollout; None is θ itself, before its first update on this batch.
        reference_logprobs: for the KL term. entropy: of π_θ, with gradient if it is a term.
        log_s: [S], GSPO's `sequence_log_ratio` of the whole batch, where a sequence's rows are not all here.
        ratio: [N], the `mismatch_ratio` made before cutting, where the level needs rows that are not all here.
    """

    logprobs: Tensor
    mask: Tensor
    sequence: Tensor
    advantages: Tensor
    rollout_logprobs: Tensor
    old_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None
    entropy: Tensor | None = None
    log_s: Tensor | None = None
    ratio: Tensor | None = None


@dataclass
class PolicyLoss:
    """A part of a batch's loss.

    Attributes:
        loss: scalar with gradient. Add the parts up; nothing is left to divide.
        metrics: sums over this part's actions, see `LossMetrics`.
        moving: actions whose gradient is not made 0 by weight, correction, advantage or clip. Where the whole batch has
            none, do not step: an optimizer's momentum and weight decay would move the weights all the same.
    """

    loss: Tensor
    metrics: LossMetrics
    moving: Tensor


@dataclass
class LossMetrics:
    """Figures of a batch under the names that practitioners know: sums and extremes that add up over its parts.

    `values` gives, over actions: `entropy`, `logprob`, `ppo_kl` (k3 of old against θ) and `clip_frac_low`, `_high`;
    `kl_ref`; of the engine's mismatch, ρ = old / rollout: `mismatch_k1`, `mismatch_k3`, `mismatch_chi2`,
    `train_rollout_logprob_abs_diff` and its `_max`, `ratio_min`, `ratio_max`, `rollout_is_eff_sample_size`,
    `is_masked_low`, `is_masked_high`, and both together by the advantage's sign, `is_masked_positive` and `_negative`
    (each a share of the actions of that sign); `is_truncated`.
    """

    sums: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)

    def add(self, other: LossMetrics) -> None:
        """Take in another part's."""
        for name, value in other.sums.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        for name, value in other.maxima.items():
            self.maxima[name] = torch.maximum(self.maxima[name], value) if name in self.maxima else value

    def over(self, ranks: Ranks) -> None:
        """Take in those of all ranks, which have made the same figures."""
        if ranks.alone:
            return
        for name in sorted(self.sums):
            self.sums[name] = ranks.sum(self.sums[name].double())
        for name in sorted(self.maxima):
            ranks.largest(self.maxima[name], "data")

    def values(self) -> dict[str, float]:
        """Means, shares and extremes. A part without actions says nothing but that there were none."""
        found = {name: float(value) for name, value in self.sums.items()}
        tokens = found.pop("actions", 0.0)
        if not tokens:
            return {"actions": 0.0}
        positive, negative = found.pop("positive"), found.pop("negative")
        ratio, square = found.pop("ratio"), found.pop("ratio_square")
        masked_positive, masked_negative = found.pop("is_masked_positive"), found.pop("is_masked_negative")
        out = {"actions": tokens, **{name: value / tokens for name, value in found.items()}}
        out["is_masked_positive"] = masked_positive / positive if positive else 0.0
        out["is_masked_negative"] = masked_negative / negative if negative else 0.0
        out["mismatch_chi2"] = square / tokens - 1
        out["rollout_is_eff_sample_size"] = ratio * ratio / square / tokens if square else 0.0
        for name, value in self.maxima.items():
            out[name] = -float(value) if name == "ratio_min" else float(value)
        return out


def policy_loss(config: LossConfig, actions: Actions, counts: BatchCounts) -> PolicyLoss:
    """The loss of a part of a batch whose counts are `counts`.

    Whatever stands in slots that are no actions, infinities too, reaches neither loss nor gradient nor metrics.

    Raises:
        ValueError: a tensor is missing that the configuration needs.
    """
    mask_N, sequence_N = actions.mask, actions.sequence
    logprobs_N = torch.where(mask_N, actions.logprobs, 0.0)
    advantages_N = torch.where(mask_N, actions.advantages, 0.0).detach()
    rollout_N = torch.where(mask_N, actions.rollout_logprobs, 0.0).detach()
    old = actions.logprobs if actions.old_logprobs is None else actions.old_logprobs
    old_N = torch.where(mask_N, old, 0.0).detach()
    weights_N = counts.weights(config, mask_N, sequence_N).to(logprobs_N.dtype)

    log_ratio_N = logprobs_N - old_N
    if config.objective == "sequence_clip":
        log_s_S = actions.log_s
        if log_s_S is None:
            log_s_S = sequence_log_ratio(logprobs_N, old_N, sequence_N, mask_N, counts.actions_S)
        log_ratio_N = spread_over_tokens(log_s_S, logprobs_N, sequence_N)
    if config.objective == "double_sided":
        log_ratio_N = logprobs_N - rollout_N
        term_N = double_sided(logprobs_N, rollout_N, advantages_N, config.clip_low, config.clip_high)
    else:
        term_N = clipped(log_ratio_N, advantages_N, config.clip_low, config.clip_high)

    rho_N = actions.ratio
    if rho_N is None:
        rho_N = mismatch_ratio(old_N, rollout_N, sequence_N, mask_N, counts.actions_S, config.correction_level)
    correction_N = _correct(config, rho_N)
    loss = (weights_N * correction_N * term_N).sum()
    if config.kl_weight:
        if actions.reference_logprobs is None:
            raise ValueError("kl_weight needs reference_logprobs")
        reference_N = torch.where(mask_N, actions.reference_logprobs, 0.0).detach()
        loss = loss + config.kl_weight * (weights_N * kl(logprobs_N, reference_N, config.kl_estimator)).sum()
    if config.entropy_weight:
        if actions.entropy is None:
            raise ValueError("entropy_weight needs entropy")
        loss = loss - config.entropy_weight * (weights_N * torch.where(mask_N, actions.entropy, 0.0)).sum()

    with torch.no_grad():
        low_N, high_N = _clips(config, log_ratio_N.exp(), advantages_N)
        terms = bool(config.kl_weight or config.entropy_weight)
        still_N = (correction_N == 0) | (advantages_N == 0) | low_N | high_N
        moving = (mask_N & (weights_N > 0) & (~still_N | terms)).sum()
        metrics = _measure(config, actions, logprobs_N, old_N, old_N - rollout_N, rho_N, advantages_N)
        metrics.sums["clip_frac_low"] = (mask_N & low_N).sum()
        metrics.sums["clip_frac_high"] = (mask_N & high_N).sum()
        if config.objective == "double_sided":  # whose bounds are its correction: what lies outside has no gradient
            gone_N = mask_N & (low_N | high_N)
            metrics.sums |= {
                "is_masked_low": (mask_N & low_N).sum(),
                "is_masked_high": (mask_N & high_N).sum(),
                "is_masked_positive": (gone_N & (advantages_N > 0)).sum(),
                "is_masked_negative": (gone_N & (advantages_N < 0)).sum(),
            }
    return PolicyLoss(loss, metrics, moving)


def _correct(config: LossConfig, ratio_N: Tensor) -> Tensor:
    if config.correction == "none":
        return torch.ones_like(ratio_N)
    if config.correction == "truncate":
        return truncated(ratio_N, config.correction_high)
    return masked(ratio_N, config.correction_low, config.correction_high)


def _clips(config: LossConfig, ratio_N: Tensor, advantages_N: Tensor) -> tuple[Tensor, Tensor]:
    """Where a bound takes the gradient away, below and above."""
    low, high = 1 - config.clip_low, 1 + config.clip_high
    if config.objective == "double_sided":
        return ratio_N <= low, ratio_N >= high
    return (ratio_N < low) & (advantages_N < 0), (ratio_N > high) & (advantages_N > 0)


def _measure(
    config: LossConfig,
    actions: Actions,
    logprobs_N: Tensor,
    old_N: Tensor,
    log_N: Tensor,
    level_N: Tensor,
    advantages_N: Tensor,
) -> LossMetrics:
    """The sums of one part. log_N: log ρ of each token; level_N: ρ as it corrects."""
    mask_N = actions.mask
    banded = config.correction in ("icepop", "mask")
    below_N = mask_N & (level_N < config.correction_low) & banded
    above_N = mask_N & (level_N > config.correction_high) & banded
    gone_N = below_N | above_N
    apart_N, rho_N = log_N.abs(), log_N.exp()
    inside = mask_N.to(logprobs_N.dtype)
    sums: Mapping[str, Tensor] = {
        "actions": mask_N.sum(),
        "positive": (mask_N & (advantages_N > 0)).sum(),
        "negative": (mask_N & (advantages_N < 0)).sum(),
        "logprob": logprobs_N.sum(),
        "ppo_kl": (kl(old_N, logprobs_N, "k3") * inside).sum(),
        "ratio": (rho_N * inside).sum(),
        "ratio_square": (rho_N.square() * inside).sum(),
        "mismatch_k1": -(log_N * inside).sum(),
        "mismatch_k3": ((torch.expm1(log_N) - log_N) * inside).sum(),
        "train_rollout_logprob_abs_diff": apart_N.sum(),
        "is_masked_low": below_N.sum(),
        "is_masked_high": above_N.sum(),
        "is_masked_positive": (gone_N & (advantages_N > 0)).sum(),
        "is_masked_negative": (gone_N & (advantages_N < 0)).sum(),
        "is_truncated": (mask_N & (level_N > config.correction_high) & (config.correction == "truncate")).sum(),
    }
    made = {name: value.detach() for name, value in sums.items()}
    if actions.entropy is not None:
        made["entropy"] = torch.where(mask_N, actions.entropy, 0.0).detach().sum()
    if actions.reference_logprobs is not None:
        reference_N = torch.where(mask_N, actions.reference_logprobs, 0.0)
        made["kl_ref"] = kl(logprobs_N, reference_N, "k3").detach().sum()
    maxima = {}
    for name, value_N in (
        ("train_rollout_logprob_abs_diff_max", apart_N),
        ("ratio_max", rho_N),
        ("ratio_min", -rho_N),
    ):
        none = value_N.new_full((), float("-inf"))
        maxima[name] = torch.where(mask_N, value_N, none).amax().detach() if len(mask_N) else none
    return LossMetrics(made, maxima)
