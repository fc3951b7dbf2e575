"""One attempt at a task: its files laid out, an agent's commands or the solution run, the verifier's verdict.

The verifier can be met with nothing prepared for it. While the agent works, /tests, /solution and /logs are not there;
when it is done, all that it started is dead, and the verifier runs with a fresh /tests, a fresh /logs and a home
directory that the agent never saw. A missing or unreadable reward is no verdict, never a 0.
Read next: `harbor`, `glm5.utils.outcome`.
"""

from __future__ import annotations

import json
import math
import posixpath
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from glm5.agents.sandbox import Finished, Limits, Sandbox, SandboxError
from glm5.agents.sandbox.bubblewrap import read_tree
from glm5.agents.tasks.dockerfile import Step
from glm5.agents.tasks.harbor import Task
from glm5.utils.errors import UserError
from glm5.utils.outcome import Outcome

_VERIFIERS = ("/tests", "/solution", "/logs")
_REWARD, _REWARDS = "/logs/verifier/reward.txt", "/logs/verifier/reward.json"
# Where Python and others look for what a user has set up: nowhere that the agent could write.
_CLEAN = {"HOME": "/logs/home", "TMPDIR": "/logs/tmp", "PYTHONNOUSERSITE": "1", "PYTHONSAFEPATH": "1"}
# The verifier runs, and is asked, whatever the agent did to the directory that it works in.
_BEGIN = (
    "mkdir -p /logs/verifier /logs/agent /logs/artifacts /logs/home /logs/tmp; "
    'chmod u+rwx "$0"; mkdir -p "$0"; cd "$0"; exec bash /tests/test.sh'
)


class AgentTimeout(Exception):
    """The task's time for the agent is used up."""


@dataclass(frozen=True)
class Judged:
    """How an attempt ended. `reward` in [0, 1], or None where there is no verdict; `detail` for a reader."""

    outcome: Outcome
    reward: float | None
    detail: str = ""


class Trial:
    """A task laid out in a sandbox; a context manager.

    Raises:
        SandboxError: no sandbox can be had, or the environment cannot be made.
        UserError: the environment's files are not what its Dockerfile names.
    """

    def __init__(self, task: Task, limits: Limits | None = None) -> None:
        self.task = task
        base = limits or Limits()
        bounds = {"memory_bytes": task.memory_bytes, "disk_bytes": min(task.disk_bytes, base.disk_bytes)}
        self.agent_directories = task.image.directories
        self._box = Sandbox(
            Limits(**{**vars(base), **bounds, "wall_s": task.verifier_s}),
            writable=[*self.agent_directories, *_VERIFIERS],
            apart=_VERIFIERS,
            cwd=task.image.workdir,
            environment={**task.image.environment, **task.environment},
        )
        self._left = task.agent_s
        try:
            self._build()
        except BaseException:
            self._box.close()
            raise

    def __enter__(self) -> Trial:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        self._box.close()

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
        done = self._box.run(words, stdin=stdin, wall_s=seconds, writable=self.agent_directories)
        self._left -= time.monotonic() - start
        if self._left <= 0 and done.ending == "wall_time":
            raise AgentTimeout
        return done

    def solve(self) -> Finished:
        """Run the reference solution, as Harbor's oracle does: /solution/solve.sh in the task's directory."""
        self._box.put_tree(self.task.directory / "solution", "/solution")
        return self._box.run(
            ["bash", "/solution/solve.sh"],
            wall_s=self.task.agent_s,
            environment={**self.task.solution_environment, "DEBIAN_FRONTEND": "noninteractive"},
            writable=[*self.agent_directories, "/solution"],
        )

    def judge(self) -> Judged:
        """Run the verifier and read its reward. May be asked again; every time, all is as at the first."""
        self._box.clear(*_VERIFIERS)
        self._box.put_tree(self.task.directory / "tests", "/tests")
        done = self._box.run(
            ["bash", "-c", _BEGIN, self.task.image.workdir],
            wall_s=self.task.verifier_s,
            cwd="/",
            environment={**self.task.verifier_environment, **_CLEAN},
            writable=[*self.agent_directories, "/tests", "/logs"],
        )
        said = done.text.strip()[-500:]
        if done.code is None:
            return Judged(Outcome.VERIFIER_NO_VERDICT, None, f"the verifier ended by its limit, {done.ending}: {said}")
        if done.code > 128:  # whoever did it, what it left is not its word
            return Judged(
                Outcome.VERIFIER_NO_VERDICT, None, f"the verifier was killed by signal {done.code - 128}: {said}"
            )
        try:
            reward = self._reward()
        except ValueError as e:
            return Judged(Outcome.VERIFIER_NO_VERDICT, None, f"{e}: {said}")
        return Judged(Outcome.OK if reward >= 1 else Outcome.TASK_FAILED, reward, said)

    # ----------------------------------------------------------------------- inside
    def _reward(self) -> float:
        text = self._box.get(_REWARD)
        if text is not None:
            value: object = text.decode(errors="replace").strip()
        else:
            text = self._box.get(_REWARDS)
            if text is None:
                raise ValueError("the verifier wrote no reward")
            table = json.loads(text)
            value = table.get("reward", next(iter(table.values()), None)) if isinstance(table, Mapping) else table
        try:
            reward = float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            raise ValueError(f"the reward {value!r} is no number") from None
        if not math.isfinite(reward) or not 0 <= reward <= 1:
            raise ValueError(f"the reward {reward} does not lie in [0, 1]")
        return reward

    def _build(self) -> None:
        self._box.run(["mkdir", "-p", self.task.image.workdir], cwd="/")
        for step in self.task.image.steps:
            self._copy(step) if step.kind == "copy" else self._run(step)

    def _run(self, step: Step) -> None:
        done = self._box.run(
            step.words,
            wall_s=self.task.build_s,
            cwd=step.workdir,
            environment=step.environment,
            writable=self.agent_directories,
        )
        if not done.ok:
            raise SandboxError(
                f"{self.task.name}: line {step.line} of its Dockerfile failed ({done.ending}, status {done.code}): "
                f"{done.text.strip()[-300:]}",
                "It has no network and a read-only system here; run the task in a container if it needs more",
            )

    def _copy(self, step: Step) -> None:
        """As docker does: contents of directories go into the target, files too if it is one or ends in /."""
        *sources, target = [word for word in step.words if not word.startswith("--chmod=")]
        mode = next((int(word.split("=")[1], 8) for word in step.words if word.startswith("--chmod=")), None)
        context = self.task.directory / "environment"
        destination = posixpath.normpath(posixpath.join(step.workdir, target))
        for pattern in sources:
            paths = sorted(context.glob(pattern.lstrip("/"))) if pattern.strip("./") else [context]
            if not paths or any(not p.resolve().is_relative_to(context.resolve()) for p in paths):
                raise UserError(f"{context}/Dockerfile:{step.line}: there is no {pattern}", "Add it, or mend the line")
            for path in paths:
                if path.is_dir():
                    files, into = read_tree(path), destination
                else:
                    inside = target.endswith("/") or len(sources) > 1 or self._is_directory(destination)
                    name = path.name if inside else posixpath.basename(destination)
                    files = {name: (path.read_bytes(), path.stat().st_mode & 0o777)}
                    into = destination if inside else posixpath.dirname(destination)
                if path == context:
                    files.pop("Dockerfile", None)
                self._box.put_tree({n: (data, m if mode is None else mode) for n, (data, m) in files.items()}, into)

    def _is_directory(self, path: str) -> bool:
        return self._box.run(["test", "-d", path], cwd="/").ok


def attempt(task: Task, agent: Callable[[Trial], None], limits: Limits | None = None) -> Judged:
    """Lay a task out, let an agent act, judge. Whatever goes wrong has its own outcome.

    An agent whose time is up is judged by what it left, and its outcome is `timeout` unless that solves the task. What
    the agent's own code raises is passed on.
    """
    try:
        with Trial(task, limits) as trial:
            late = False
            try:
                agent(trial)
            except AgentTimeout:
                late = True
            judged = trial.judge()
    except UserError as e:
        return Judged(Outcome.ENV_CRASH, None, str(e))
    if late and judged.outcome is Outcome.TASK_FAILED:
        return Judged(Outcome.TIMEOUT, judged.reward, judged.detail)
    return judged


def solve(task: Task, limits: Limits | None = None) -> Judged:
    """What the reference solution gets; it should be 1."""
    return attempt(task, lambda trial: _must(trial.solve()), limits)


def _must(done: Finished) -> None:
    if not done.ok:
        raise SandboxError(
            f"the solution failed ({done.ending}, status {done.code}): {done.text.strip()[-300:]}", "Mend it"
        )
