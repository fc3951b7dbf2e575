"""One attempt at a task: an agent's commands or the solution run, then the verifier's verdict, in its environment.

A missing or unreadable reward is no verdict, never a 0; and whatever an agent did to its environment is its own doing,
and no way to a missing verdict. Read next: `places`, `harbor`, `glm5.utils.outcome`.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from glm5.agents.sandbox import Finished, SandboxError
from glm5.agents.sandbox.container import Spoiled
from glm5.agents.tasks.contained import InContainer
from glm5.agents.tasks.harbor import Task
from glm5.agents.tasks.places import InSandbox
from glm5.utils.errors import DataError, UserError
from glm5.utils.outcome import Outcome

_REWARD, _REWARDS = "/logs/verifier/reward.txt", "/logs/verifier/reward.json"
Where = InSandbox | InContainer
IN_SANDBOX = InSandbox()


class AgentTimeout(Exception):
    """The task's time for the agent is used up."""


@dataclass(frozen=True)
class Judged:
    """How an attempt ended. `reward` in [0, 1], or None where there is no verdict; `detail` for a reader."""

    outcome: Outcome
    reward: float | None
    detail: str = ""


class Trial:
    """A task laid out in an environment; a context manager.

    Raises:
        SandboxError: no environment can be had, or it cannot be made.
        UserError: its files are not what its Dockerfile names, or it asks for what is not had where it shall run.
    """

    def __init__(self, task: Task, where: Where = IN_SANDBOX) -> None:
        self.task = task
        self._left = task.agent_s
        self._place = where.open(task)

    def __enter__(self) -> Trial:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        self._place.close()

    def act(self, command: Sequence[str] | str, *, stdin: bytes = b"", wall_s: float | None = None) -> Finished:
        """A command of the agent's, a list of words or a line of bash, in the task's directory.

        Raises:
            AgentTimeout: the time of the whole attempt is used up, before or while it ran.
        """
        if self._left <= 0:
            raise AgentTimeout
        words = ["bash", "-c", command] if isinstance(command, str) else command
        seconds = min(self._left, self._left if wall_s is None else wall_s)
        start = time.monotonic()
        done = self._place.act(words, stdin, seconds)
        self._left -= time.monotonic() - start
        if self._left <= 0 and done.ending == "wall_time":
            raise AgentTimeout
        return done

    def solve(self) -> Finished:
        """Run the reference solution, as Harbor's oracle does: /solution/solve.sh in the task's directory."""
        return self._place.solve(self.task.agent_s)

    def judge(self) -> Judged:
        """Run the verifier and read its reward. May be asked again; every time, all is as at the first.

        An environment that the agent has made unusable is a failed task.
        """
        try:
            return self._judge()
        except Spoiled as e:
            return Judged(Outcome.TASK_FAILED, 0.0, str(e))

    def _judge(self) -> Judged:
        done = self._place.verify(self.task.verifier_s)
        said = done.text.strip()[-500:]
        if done.code is None:
            return Judged(Outcome.VERIFIER_NO_VERDICT, None, f"the verifier ended by its limit, {done.ending}: {said}")
        if done.code > 128:  # whoever did it, what it left is not its word
            return Judged(
                Outcome.VERIFIER_NO_VERDICT, None, f"the verifier was killed by signal {done.code - 128}: {said}"
            )
        try:
            reward = self._reward()
        except (ValueError, RecursionError) as e:
            return Judged(Outcome.VERIFIER_NO_VERDICT, None, f"{e}: {said}")
        return Judged(Outcome.OK if reward >= 1 else Outcome.TASK_FAILED, reward, said)

    def _reward(self) -> float:
        """As Harbor reads it: of both files the JSON counts. Of several rewards it is the one named reward."""
        text = self._place.read(_REWARDS)
        if text is not None:
            table = json.loads(text)
            named = table if isinstance(table, Mapping) else {"reward": table}
            if "reward" not in named and len(named) != 1:
                raise ValueError(f"of the rewards {', '.join(named) or '(none)'} none is named reward")
            value = named.get("reward", next(iter(named.values())))
        else:
            text = self._place.read(_REWARD)
            if text is None:
                raise ValueError("the verifier wrote no reward")
            value = text.decode(errors="replace").strip()
        try:
            reward = float(value)
        except (TypeError, ValueError):
            raise ValueError(f"the reward {value!r} is no number") from None
        if not math.isfinite(reward) or not 0 <= reward <= 1:
            raise ValueError(f"the reward {reward} does not lie in [0, 1]")
        return reward


def attempt(task: Task, agent: Callable[[Trial], None], where: Where = IN_SANDBOX) -> Judged:
    """Lay a task out, let an agent act, judge. Whatever goes wrong has its own outcome.

    An agent whose time is up is judged by what it left, and its outcome is `timeout` unless that solves the task. What
    the agent's own code raises is passed on.
    """
    try:
        with Trial(task, where) as trial:
            late = False
            try:
                agent(trial)
            except AgentTimeout:
                late = True
            except Spoiled as e:
                return Judged(Outcome.TASK_FAILED, 0.0, str(e))
            judged = trial.judge()
    except UserError as e:
        return Judged(Outcome.ENV_CRASH, None, str(e))
    if late and judged.outcome is Outcome.TASK_FAILED:
        return Judged(Outcome.TIMEOUT, judged.reward, judged.detail)
    return judged


def solve(task: Task, where: Where = IN_SANDBOX) -> Judged:
    """What the reference solution gets; it should be 1."""
    return attempt(task, lambda trial: _must(trial.solve()), where)


def prove(task: Task, where: Where = IN_SANDBOX, runs: int = 1) -> None:
    """Show that a task can be learned from: in each of some runs its solution gets 1, and doing nothing gets 0.

    Raises:
        DataError: it is not so; the message has the first verdict that is wrong.
    """
    for run in range(runs):
        for name, found, expected in (
            ("its solution", solve(task, where), 1.0),
            ("doing nothing", attempt(task, lambda trial: None, where), 0.0),
        ):
            if found.reward != expected:
                raise DataError(
                    f"task {task.name}: {name} got {found.reward} ({found.outcome}) in run {run}: {found.detail}",
                    "Mend its tests, its solution or its environment",
                )


def _must(done: Finished) -> None:
    if not done.ok:
        raise SandboxError(
            f"the solution failed ({done.ending}, status {done.code}): {done.text.strip()[-300:]}", "Mend it"
        )
