"""Where a task is laid out and attempted. Here: what every such place does, and the sandbox; `contained`: a container.

The verifier can be met with nothing prepared for it. While the agent works, /tests, /solution and /logs are not there;
when it is done, all that it started is dead, and the verifier runs with a fresh /tests, a fresh /logs and a home
directory that the agent never saw. In the sandbox the agent cannot change the system either.
Read next: `contained`, `trial`, `glm5.agents.sandbox`.
"""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from glm5.agents.sandbox import Finished, Limits, Sandbox, SandboxError, require
from glm5.agents.sandbox.files import read_tree
from glm5.agents.tasks.dockerfile import Step
from glm5.agents.tasks.harbor import Task, TaskError
from glm5.utils.errors import UserError

VERIFIERS = ("/tests", "/solution", "/logs")
SOLVE = {"DEBIAN_FRONTEND": "noninteractive"}
# Where programs look for what a user has set up, and for room: nowhere that the agent could write.
CLEAN = {"HOME": "/logs/home", "TMPDIR": "/logs/tmp", "PYTHONNOUSERSITE": "1", "PYTHONSAFEPATH": "1"}
LOGS = "mkdir -p /logs/verifier /logs/agent /logs/artifacts /logs/home /logs/tmp"


class Place(Protocol):
    """A task's environment. Its methods raise SandboxError where it is broken, and nothing on what an agent does."""

    def act(self, words: Sequence[str], stdin: bytes, seconds: float) -> Finished:
        """Run a command of the agent's."""

    def solve(self, seconds: float) -> Finished:
        """Run the reference solution."""

    def verify(self, seconds: float) -> Finished:
        """Run the verifier, with nothing of the agent's running and nothing prepared for it."""

    def read(self, path: str) -> bytes | None:
        """The beginning of a file, None where there is none."""

    def close(self) -> None:
        """End the environment and all that runs in it."""


@dataclass(frozen=True)
class InSandbox:
    """Tasks run in the sandbox: this host's system, no network, `glm5.agents.sandbox.bubblewrap`."""

    limits: Limits = field(default_factory=Limits)

    def require(self) -> None:
        """Raises SandboxError where there is no sandbox."""
        require(self.limits.control_group)

    def open(self, task: Task) -> Place:
        """Lay a task out. Raises SandboxError, or UserError where its Dockerfile cannot be followed."""
        return SandboxPlace(task, self.limits)


class SandboxPlace:
    """See `InSandbox`."""

    def __init__(self, task: Task, limits: Limits) -> None:
        if task.separate:
            raise TaskError(f"{task.directory}: its verifier wants a container of its own", "Run it in containers")
        self.task, self.image = task, task.image()
        bounds = {"memory_bytes": task.memory_bytes, "disk_bytes": min(task.disk_bytes, limits.disk_bytes)}
        self._directories = self.image.directories
        self._box = Sandbox(
            Limits(**{**vars(limits), **bounds, "wall_s": task.verifier_s}),
            writable=[*self._directories, *VERIFIERS],
            apart=VERIFIERS,
            cwd=task.workdir or self.image.workdir,
            environment={**self.image.environment, **task.environment},
        )
        try:
            self._box.run(["mkdir", "-p", self._box.cwd], cwd="/")
            for step in self.image.steps:
                self._copy(step) if step.kind == "copy" else self._run(step)
        except BaseException:
            self._box.close()
            raise

    def act(self, words: Sequence[str], stdin: bytes, seconds: float) -> Finished:
        return self._box.run(words, stdin=stdin, wall_s=seconds, writable=self._directories)

    def solve(self, seconds: float) -> Finished:
        self._box.put_tree(self.task.directory / "solution", "/solution")
        return self._box.run(
            ["bash", "/solution/solve.sh"],
            wall_s=seconds,
            environment={**self.task.solution_environment, **SOLVE},
            writable=[*self._directories, "/solution"],
        )

    def verify(self, seconds: float) -> Finished:
        self._box.clear(*VERIFIERS)
        self._box.put_tree(self.task.directory / "tests", "/tests")
        # It runs, and is asked, whatever the agent did to the directory that it works in.
        begin = f'{LOGS}; chmod u+rwx "$0"; mkdir -p "$0"; cd "$0"; exec bash /tests/test.sh'
        return self._box.run(
            ["bash", "-c", begin, self._box.cwd],
            wall_s=seconds,
            cwd="/",
            environment={**self.task.verifier_environment, **CLEAN},
            writable=[*self._directories, "/tests", "/logs"],
        )

    def read(self, path: str) -> bytes | None:
        return self._box.get(path)

    def close(self) -> None:
        self._box.close()

    # ----------------------------------------------------------------------- laying out
    def _run(self, step: Step) -> None:
        done = self._box.run(
            step.words,
            wall_s=self.task.build_s,
            cwd=step.workdir,
            environment=step.environment,
            writable=self._directories,
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
