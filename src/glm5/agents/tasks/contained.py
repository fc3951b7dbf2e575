"""A task in a container of its own image; its verifier in the same one, or in another, as the task says.

The agent is the container's root, as in Harbor's, unless the task names a user. In the same container it could put
another program in the place of one that the verifier runs. A verifier in its own container (`environment_mode =
"separate"`) sees only what the task declares as artifacts, plain files and directories of a bounded size.
Read next: `places`, `glm5.agents.sandbox.container`.
"""

from __future__ import annotations

import hashlib
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from glm5.agents.sandbox import Finished, Limits
from glm5.agents.sandbox.container import Container, Engine
from glm5.agents.sandbox.files import read_tree
from glm5.agents.tasks.harbor import Task, TaskError
from glm5.agents.tasks.places import CLEAN, LOGS, SOLVE, Place

_ARTIFACTS = "/logs/artifacts"  # handed on to a verifier of its own, declared or not
_VERIFY = f"{LOGS}; chmod -R a+rwX /logs; exec bash /tests/test.sh"


@dataclass(frozen=True)
class InContainer:
    """Tasks run in containers of their own image.

    Args:
        engine: Docker or Podman, and whether tasks may have a network. One that asks for none never gets one.
        keep_processes: whether what the agent started goes on while the verifier runs, as Harbor has it. A task about
            a server needs that; a reward that is learned from is safer without.
    """

    engine: Engine
    limits: Limits = field(default_factory=Limits)
    keep_processes: bool = False

    def require(self) -> None:
        """Raises SandboxError where the engine does not run."""
        self.engine.require()

    def open(self, task: Task) -> Place:
        """Build a task's images and start its container. Raises SandboxError, or TaskError on what it cannot have."""
        return ContainerPlace(task, self)


class ContainerPlace:
    """See `InContainer`."""

    def __init__(self, task: Task, how: InContainer) -> None:
        self.task, self.how = task, how
        if how.engine.network and task.allowlist:
            raise TaskError(f"{task.directory}: network_mode='allowlist' is not held here", "Run it with Harbor")
        how.engine.require()
        self._images = [self._image("environment", task.docker_image)]
        if task.separate:
            self._images.append(self._image("tests", task.verifier_image) or self._images[0])
        self._box = self._start(self._images[0], task.environment)
        self._judge = self._box  # where the verifier ran last
        self._laid = set[str]()  # what the agent must not see, if it goes on
        if task.separate:
            self._box.run(["mkdir", "-p", "-m", "777", _ARTIFACTS], cwd="/", user="0")

    def act(self, words: Sequence[str], stdin: bytes, seconds: float) -> Finished:
        if self._laid:
            self._box.remove(*sorted(self._laid))
            self._laid.clear()
        return self._box.run(words, stdin=stdin, wall_s=seconds, cwd=self.task.workdir, user=self.task.agent_user)

    def solve(self, seconds: float) -> Finished:
        self._renew(self._box, {"/solution": self.task.directory / "solution"})
        variables = {**self.task.solution_environment, **SOLVE}
        command = ["bash", "/solution/solve.sh"]
        return self._box.run(command, wall_s=seconds, cwd=self.task.workdir, environment=variables)

    def verify(self, seconds: float) -> Finished:
        if not self.how.keep_processes:
            self._box.end_processes()
        if self.task.separate:
            self._hand_on()
        else:
            self._renew(self._box, {"/tests": self.task.directory / "tests", "/logs": {}})
        return self._judge.run(
            ["bash", "-c", _VERIFY],
            wall_s=seconds,
            cwd=None if self.task.separate else self.task.workdir,
            environment={**self.task.verifier_environment, **CLEAN},
            user=self.task.verifier_user,
        )

    def read(self, path: str) -> bytes | None:
        return self._judge.get(path)

    def close(self) -> None:
        self._judge.close()
        self._box.close()

    # ----------------------------------------------------------------------- inside
    def _start(self, image: str, environment: Mapping[str, str]) -> Container:
        task, given = self.task, vars(self.how.limits)
        limits = Limits(**{**given, "memory_bytes": task.memory_bytes, "wall_s": task.verifier_s})
        return Container(
            self.how.engine,
            image,
            limits,
            cpus=task.cpus,
            network=task.network,
            environment=environment,
            start_s=task.build_s,
        )

    def _hand_on(self) -> None:
        """A new container for the verifier, with the artifacts where they were."""
        if self._judge is not self._box:
            self._judge.close()
        self._judge = self._start(self._images[1], {})
        if self._images[1] == self._images[0]:  # an image without the tests in it
            self._renew(self._judge, {"/tests": self.task.directory / "tests"})
        for path in dict.fromkeys((_ARTIFACTS, *self.task.artifacts)):
            found = self._box.take(path)
            if found is not None:
                self._judge.run(["mkdir", "-p", posixpath.dirname(path)], cwd="/", user="0")
                self._judge.put_tree(found, posixpath.dirname(path))

    def _renew(self, box: Container, trees: Mapping[str, Path | Mapping[str, tuple[bytes, int]]]) -> None:
        box.renew(*trees)
        if box is self._box:
            self._laid.update(trees)
        for directory, files in trees.items():
            box.put_tree(files, directory)

    def _image(self, name: str, given: str) -> str:
        """The name of the image that is given, or built from a directory of the task's; empty if it has none."""
        context = self.task.directory / name
        if given and (name == "tests" or not (context / "Dockerfile").is_file()):
            return given
        if not (context / "Dockerfile").is_file():
            return ""
        content = hashlib.sha256()
        for path, (data, mode) in read_tree(context).items():
            content.update(f"{path}\0{mode:o}\0{len(data)}\0".encode() + data)
        tag = f"glm5-task:{content.hexdigest()[:24]}"
        self.how.engine.build(context, tag, self.task.build_s)
        return tag
