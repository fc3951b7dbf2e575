"""How a rollout ended: the one vocabulary that environments, verifiers, the gateway and the learner share.

Only what the policy had no part in leaves a group. A time-out stays and is scored 0, so that a policy cannot learn to
escape a bad answer through it. Source: the report, section 4.1. Read next: `glm5.posttrain.outcome`.
"""

from __future__ import annotations

from enum import StrEnum


class Outcome(StrEnum):
    """How a rollout ended.

    ok: it was judged, and solved the task. task_failed: it was judged, and did not. timeout: it took longer than it
    may. env_crash: the environment failed. verifier_no_verdict: the verifier gave no reward. engine_lost: the engine
    that answered is gone. aborted_stale: it was ended because its weights were too old.
    """

    OK = "ok"
    TASK_FAILED = "task_failed"
    TIMEOUT = "timeout"
    ENV_CRASH = "env_crash"
    VERIFIER_NO_VERDICT = "verifier_no_verdict"
    ENGINE_LOST = "engine_lost"
    ABORTED_STALE = "aborted_stale"

    @property
    def leaves_group(self) -> bool:
        """Whether it says nothing of the policy, so that the rollout must not be learned from."""
        return self in _LEAVE


_LEAVE = {Outcome.ENV_CRASH, Outcome.VERIFIER_NO_VERDICT, Outcome.ENGINE_LOST, Outcome.ABORTED_STALE}
