"""From rewards to advantages: by groups of answers to one prompt, and what becomes of groups that are not whole.

A group is the answers to one prompt, [G] rewards of it. Everything here is plain arithmetic on Python numbers, but for
distillation, which is token by token. Order of work: verdicts → `repair` (which answers count) → `group_advantages` on
what is left, each answer once → `repeats`. A copy thus never moves its group's mean. Sources: the report, sections 3.2,
3.3, 3.5 and 4.1; DAPO (arXiv:2503.14476) for overlong shaping and dynamic sampling; RLOO (arXiv:2402.14740). Read next:
`losses`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from glm5.utils.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

Baseline = Literal["std", "mean", "leave_one_out"]

EPSILON = 1e-6  # added to std, so that rewards that differ by rounding alone do not become advantages of 1


def group_advantages(rewards: Sequence[float], baseline: Baseline = "std") -> list[float]:
    """The advantage of each answer of a group.

    "std": (R_i - mean) / (std + 1e-6), with the deviation over G (GRPO; report Eq. 1). "mean": R_i - mean (Dr. GRPO;
    the report's agents, section 4.1). "leave_one_out": R_i - mean of the others (RLOO), which is G / (G - 1) times
    "mean"; a single answer has no others, and gets 0.

    Raises:
        ConfigError: a reward is not finite: an answer without a verdict must leave the group before (`repair`).
    """
    bad = next((r for r in rewards if not math.isfinite(r)), None)
    if bad is not None:
        raise ConfigError("rewards", bad, "must be finite; take answers without a verdict out of their group first")
    count = len(rewards)
    if not count:
        return []
    mean = math.fsum(rewards) / count
    centred = [r - mean for r in rewards]
    if all_equal(rewards):
        return [0.0] * count  # exactly, where the mean's rounding would leave a trace
    if baseline == "mean":
        return centred
    if baseline == "leave_one_out":
        return [c * count / (count - 1) for c in centred]
    std = math.sqrt(math.fsum(c * c for c in centred) / count)
    return [c / (std + EPSILON) for c in centred]


def all_equal(rewards: Sequence[float]) -> bool:
    """Whether a group's rewards, of which there is one at least, leave nothing to learn."""
    return all(r == rewards[0] for r in rewards)


# ---------------------------------------------------------------------------------------------------- groups
def reward_figures(groups: Sequence[Sequence[float]]) -> dict[str, float]:
    """What groups' known rewards are like, under the names that practitioners know; empty where there is none.

    Groups whose rewards are all equal teach nothing (DAPO, dynamic sampling). They are counted by what they say of the
    prompt: too easy, all at 1 or above (`zero_std/count_1`), or too hard (`zero_std/count_0`). Shares are of
    groups that hold a reward.
    """
    there = [rewards for rewards in groups if rewards]
    known = [r for rewards in there for r in rewards]
    if not known:
        return {}
    mean = math.fsum(known) / len(known)
    equal = [rewards[0] for rewards in there if all_equal(rewards)]
    solved = sum(reward >= 1 for reward in equal)
    return {
        "reward": mean,
        "reward_std": math.sqrt(math.fsum((r - mean) ** 2 for r in known) / len(known)),
        "frac_reward_zero_std": len(equal) / len(there),
        "zero_std/count_1": solved,
        "zero_std/count_0": len(equal) - solved,
    }


@dataclass(frozen=True)
class Repaired:
    """A group after its invalid answers have left. members: the numbers of the answers that fill its G places, a number
    twice where it is repeated; empty where the group is dropped."""

    members: list[int]
    dropped: bool

    @property
    def unique(self) -> list[int]:
        """The answers that advantages are made of: each once."""
        return list(dict.fromkeys(self.members))


def repair(valid: Sequence[bool]) -> Repaired:
    """The report's rule for answers that failed for reasons not their own (section 4.1): where more than half of the
    group is valid, valid ones are repeated, in their order, until it is full; else the group is dropped.

    Half is not more than half.
    """
    there = [number for number, ok in enumerate(valid) if ok]
    if 2 * len(there) <= len(valid):
        return Repaired([], True)
    return Repaired([there[i % len(there)] for i in range(len(valid))], False)


def repaired_advantages(
    rewards: Sequence[float | None], baseline: Baseline = "std", beside: Sequence[float] = ()
) -> tuple[dict[int, float], dict[int, int]] | None:
    """Advantages of a group's valid answers (a reward of None is invalid), and how often each is there.

    Advantages are made before repetition, of each valid answer once: copies would pull mean and deviation towards
    whoever stands first. None where the group is dropped.

    Args:
        beside: rewards of answers that nobody learns from, and that the baseline is made of as well.
    """
    repaired = repair([r is not None for r in rewards])
    if repaired.dropped:
        return None
    unique = repaired.unique
    made = group_advantages([*(r for r in rewards if r is not None), *beside], baseline)[: len(unique)]
    return dict(zip(unique, made, strict=True)), dict(Counter(repaired.members))


# ---------------------------------------------------------------------------------------------------- shaping
def overlong_penalty(length: int, longest: int, margin: int) -> float:
    """What is added to a reward for an answer's length: 0 up to longest - margin, from there on a straight line to -1
    at `longest`, and -1 beyond (DAPO, soft overlong punishment).

    Raises:
        ConfigError: `margin` is not in [0, longest].
    """
    if not 0 <= margin <= longest:
        raise ConfigError("margin", margin, f"must lie in [0, longest={longest}]")
    begins = longest - margin
    if length <= begins:
        return 0.0
    return -1.0 if length >= longest else (begins - length) / margin


def distillation_advantages(teacher_logprobs_N: Tensor, logprobs_N: Tensor, weight: float = 1.0) -> Tensor:
    """On-policy distillation's advantage of each token, sg[log π_teacher - log π_θ] (report, Eq. 2), times `weight`.

    It takes the place of Â in Eq. 1, with groups of one: in the mean its gradient is that of -KL(π_θ ‖ π_teacher).
    Added to a task's advantage with weight λ it is a penalty for leaving the teacher.

    Args:
        teacher_logprobs_N: of the engine that serves the teacher. logprobs_N: the trainer's; both of the tokens drawn,
            under the same temperature and kept set.
    """
    return weight * (teacher_logprobs_N - logprobs_N).detach()
