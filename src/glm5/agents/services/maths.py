"""Problems solved with Python at hand: the model may run code in the sandbox before it answers.

Variables last from call to call (`glm5.agents.session`). Who judges the answer is handed in, so that this module needs
no verifier: `glm5.posttrain.verify.service` makes the service with ours.
Source: the report, section 3.2 (tool-integrated reasoning). Read next: `tools`, `glm5.agents.session`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from glm5.agents.protocol import Result, Rollout, judged
from glm5.agents.sandbox import Limits, require
from glm5.agents.service import Policy, TaskService
from glm5.agents.services.tools import Tool, talk
from glm5.agents.session import LIMITS, PythonSession
from glm5.utils.errors import DataError
from glm5.utils.outcome import Outcome

SYSTEM = (
    "Solve the problem. You can run Python with the tool `python`; what it prints, and the value of its last line, "
    r"comes back. End with the answer in \boxed{}."
)


@dataclass(frozen=True)
class Problem:
    """A question and what its judge needs. `answer` and `info` are JSON values."""

    prompt: str
    answer: Any
    verifier: str = "maths"
    info: Mapping[str, Any] = field(default_factory=dict)


# An answer's reward in [0, 1], or None where it cannot be judged, and a word on it. Called from many threads.
Judge = Callable[[Problem, str], tuple[float | None, str]]


class PythonToolService(TaskService):
    """Each group gets one problem, in their order, again and again.

    Args:
        name: of the task. problems: at least one. judge: see `Judge`.
        turns: messages of the model at most. An answer that was not given by then is wrong.
        limits: of one call, and of the session. sampling: fields of each request, as max_tokens.
    """

    def __init__(
        self,
        name: str,
        problems: Sequence[Problem],
        judge: Judge,
        *,
        turns: int = 8,
        limits: Limits = LIMITS,
        sampling: Mapping[str, Any] | None = None,
    ) -> None:
        if not problems:
            raise DataError(f"task {name} has no problem", "Give at least one")
        self.name, self.problems, self.judge, self.turns = name, list(problems), judge, turns
        self.limits, self.sampling = limits, dict(sampling or {})

    async def start(self) -> None:
        """Raises SandboxError where this host cannot isolate the model's code."""
        require()

    def rollout(self, asked: Rollout, policy: Policy) -> Result:
        problem = self.problems[asked.index % len(self.problems)]
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": problem.prompt}]
        with PythonSession(self.limits) as session:
            tool = Tool(
                "python", "Run Python code.", {"code": ("string", "what to run")}, lambda code: session.call(code).shown
            )
            went = talk(asked, policy, messages, [tool], self.turns, self.sampling)
        if went.text is None:
            return judged(0.0, "no answer within its turns", **went.metrics)
        reward, detail = self.judge(problem, went.text)
        if reward is None:
            return Result(Outcome.VERIFIER_NO_VERDICT, detail=detail, metrics=went.metrics)
        return judged(reward, detail, **went.metrics)
