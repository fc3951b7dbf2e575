"""What becomes of a sample: how its rollout ended, and the one final state that the ledger gives it.

Every sample that was started ends in exactly one state, so that the states always add up to the samples started
(`store`). The words for how a rollout ended are `glm5.utils.outcome`'s, since environments and the gateway use them
too. Source: the report, section 4.1. Read next: `store`, `intake`.
"""

from __future__ import annotations

from enum import StrEnum

from glm5.posttrain.verify.verdict import Verdict
from glm5.utils.outcome import Outcome

__all__ = ["Outcome", "State", "outcome_of", "reward_of", "state_of_failure"]


class State(StrEnum):
    """The final state of a sample.

    trained: an update has read it. stale: its oldest token came from weights too old. environment_failed: it failed for
    reasons not its own. zero_variance: all rewards of its group were equal. group_dropped: too few of its group were
    valid. cancelled: whoever started it wants it no more.
    """

    TRAINED = "trained"
    STALE = "stale"
    ENVIRONMENT_FAILED = "environment_failed"
    ZERO_VARIANCE = "zero_variance"
    GROUP_DROPPED = "group_dropped"
    CANCELLED = "cancelled"


def outcome_of(verdict: Verdict) -> Outcome:
    """The outcome of a rollout that ran to its end and was judged, or could not be."""
    if verdict.reward is None:
        return Outcome.VERIFIER_NO_VERDICT
    return Outcome.OK if verdict.reward >= 1 else Outcome.TASK_FAILED


def reward_of(outcome: Outcome, reward: float | None) -> float | None:
    """The reward that a sample counts with: None where it leaves its group, 0 for a time-out that nobody judged."""
    if outcome.leaves_group:
        return None
    return 0.0 if reward is None else reward


def state_of_failure(outcome: Outcome) -> State:
    """The final state of a sample that leaves its group.

    Raises:
        ValueError: it does not leave.
    """
    if not outcome.leaves_group:
        raise ValueError(f"{outcome} stays in its group")
    return State.STALE if outcome is Outcome.ABORTED_STALE else State.ENVIRONMENT_FAILED
