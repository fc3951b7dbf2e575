"""The words for how a rollout ended, which of them leave the group, and what becomes of a sample."""

from __future__ import annotations

import pytest

from glm5.posttrain.outcome import Outcome, State, outcome_of, reward_of, state_of_failure
from glm5.posttrain.verify.verdict import judged, no_verdict


def test_the_words() -> None:
    words = "ok task_failed timeout env_crash verifier_no_verdict engine_lost aborted_stale".split()
    assert [str(o) for o in Outcome] == words
    states = "trained stale environment_failed zero_variance group_dropped cancelled".split()
    assert [str(s) for s in State] == states


def test_only_what_the_policy_had_no_part_in_leaves() -> None:
    assert {o for o in Outcome if not o.leaves_group} == {Outcome.OK, Outcome.TASK_FAILED, Outcome.TIMEOUT}
    assert reward_of(Outcome.TIMEOUT, None) == 0.0  # or a policy could escape a bad answer through it
    assert reward_of(Outcome.TIMEOUT, 0.5) == 0.5
    assert reward_of(Outcome.ENV_CRASH, 1.0) is None


def test_verdicts_and_failures() -> None:
    assert outcome_of(judged(True)) is Outcome.OK
    assert outcome_of(judged(False)) is Outcome.TASK_FAILED
    assert outcome_of(no_verdict("no reward file")) is Outcome.VERIFIER_NO_VERDICT
    assert state_of_failure(Outcome.ABORTED_STALE) is State.STALE
    assert state_of_failure(Outcome.VERIFIER_NO_VERDICT) is State.ENVIRONMENT_FAILED
    with pytest.raises(ValueError, match="stays"):
        state_of_failure(Outcome.TIMEOUT)
