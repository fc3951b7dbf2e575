"""A task's directory, read: what it holds, its limits and what cannot be run here. Read next: `dockerfile`, `trial`."""

from __future__ import annotations

import math
import os
import posixpath
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm5.agents.tasks.dockerfile import Image, read_dockerfile
from glm5.agents.tasks.repository import leaks, repositories
from glm5.utils.errors import DataError

MIB = 1 << 20
_MODES = ("public", "allowlist", "no-network")  # the later, the stricter
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


class TaskError(DataError):
    """A task's directory is not in order, or asks for what the sandbox has not. The message names file and field."""


@dataclass(frozen=True)
class Task:
    """One task. Times in seconds, sizes in bytes.

    Args:
        name: of `[task]`, or of its directory.
        directory: where it lies.
        instruction: what the agent is told.
        docker_image: what it runs in where it has no Dockerfile.
        workdir: where commands start, in place of what the Dockerfile says.
        cpus: None: not bounded.
        network: whether it asks for one; allowlist: for some addresses of it only.
        separate: whether the verifier has a container of its own. verifier_image: the one for it, if it is named.
        artifacts: absolute paths that are handed on to it.
        agent_user, verifier_user: whose commands are run, in a container.
        environment, verifier_environment, solution_environment: variables for all commands, the verifier, the solution.
        metadata: whatever `[metadata]` holds.
    """

    name: str
    directory: Path
    instruction: str
    docker_image: str
    workdir: str | None
    agent_s: float
    verifier_s: float
    build_s: float
    cpus: float | None
    memory_bytes: int
    disk_bytes: int
    network: bool
    allowlist: bool
    separate: bool
    verifier_image: str
    artifacts: tuple[str, ...]
    agent_user: str | None
    verifier_user: str | None
    environment: Mapping[str, str]
    verifier_environment: Mapping[str, str]
    solution_environment: Mapping[str, str]
    metadata: Mapping[str, Any]

    def image(self) -> Image:
        """Its Dockerfile, as the sandbox follows it. Raises DataError where it cannot."""
        path = self.directory / "environment" / "Dockerfile"
        return read_dockerfile(path) if path.is_file() else Image()


def read_tasks(directory: Path) -> list[Task]:
    """All tasks below a directory, by name: each directory that has a `task.toml`.

    Raises:
        TaskError: one of them is not in order, or there is none.
    """
    found = [read_task(path.parent) for path in sorted(directory.rglob("task.toml"))]
    if not found:
        raise TaskError(f"{directory} holds no task", "Name a directory of directories with a task.toml each")
    return found


# What is refused, by field, where it has a value.
_NOT_HERE = {
    "steps": "tasks of several steps are not run here",
    "environment.gpus": "there is no GPU in its environment here",
    "environment.tpu": "there is no TPU in its environment here",
    "environment.mcp_servers": "MCP servers are not started here",
    "environment.skills_dir": "agents' skills are not laid out here",
    "environment.healthcheck": "health checks are not made here",
    "verifier.collect": "nothing is collected for the verifier here",
}


def read_task(directory: Path) -> Task:
    """Read and check a task. What the sandbox cannot follow in its Dockerfile is found when it is laid out there.

    Raises:
        TaskError: a file is missing, a field has a value that it cannot have, or the task needs what is had neither in
            the sandbox nor in one container: several containers, steps, a GPU, a verifier in a container of its own.
    """
    for needed in ("task.toml", "instruction.md", "tests/test.sh"):
        if not (directory / needed).is_file():
            raise TaskError(f"{directory} has no {needed}", "A task has task.toml, instruction.md and tests/test.sh")
    fields = _Fields(directory / "task.toml", _toml(directory / "task.toml"))
    for name, reason in _NOT_HERE.items():
        if fields.get(name, None):
            raise TaskError(f"{directory}: {name}: {reason}", "Run the task with Harbor itself")
    if fields.get("environment.os", "linux") != "linux":
        raise TaskError(f"{directory}: environment.os: only Linux is run here", "Run the task with Harbor itself")
    for name in ("environment", "tests"):
        for compose in ("docker-compose.yaml", "docker-compose.yml"):
            if (directory / name / compose).exists():
                raise TaskError(f"{directory}: {name}/{compose}: several containers are not run here", "Use Harbor")
    for repository in repositories(directory / "environment"):
        if found := leaks(repository):
            raise TaskError(
                f"{repository} holds {', '.join(found)}, in which an agent could find what is to come",
                "Take it away: glm5.agents.tasks.repository.seal does",
            )
    own = bool(fields.get("verifier.environment", {}))
    verifying = fields.text("verifier.environment_mode") or ("separate" if own else "shared")
    if verifying not in ("shared", "separate") or (own and verifying == "shared"):
        raise TaskError(
            f"{directory}: verifier.environment_mode={verifying!r}",
            "It is shared, or separate, and where verifier.environment is given always separate",
        )
    docker_image = fields.text("environment.docker_image") or ""
    if not (directory / "environment" / "Dockerfile").is_file() and not docker_image:
        raise TaskError(f"{directory} has neither environment/Dockerfile nor environment.docker_image", "Add one")
    mode = fields.network()
    return Task(
        name=fields.text("task.name") or directory.name,
        directory=directory,
        instruction=(directory / "instruction.md").read_text(encoding="utf-8"),
        docker_image=docker_image,
        workdir=fields.text("environment.workdir"),
        agent_s=fields.number("agent.timeout_sec", 600.0),
        verifier_s=fields.number("verifier.timeout_sec", 600.0),
        build_s=fields.number("environment.build_timeout_sec", 600.0),
        cpus=fields.number("environment.cpus", 0.0, least=0.0) or None,
        memory_bytes=int(fields.number("environment.memory_mb", 1024)) * MIB,
        disk_bytes=int(fields.number("environment.storage_mb", 256)) * MIB,
        network=mode != "no-network",
        allowlist=mode == "allowlist",
        separate=verifying == "separate",
        verifier_image=fields.text("verifier.environment.docker_image") or "",
        artifacts=fields.artifacts(),
        agent_user=fields.text("agent.user"),
        verifier_user=fields.text("verifier.user"),
        environment=fields.variables("environment.env"),
        verifier_environment=fields.variables("verifier.env"),
        solution_environment=fields.variables("solution.env"),
        metadata=dict(fields.get("metadata", {})),
    )


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise TaskError(f"{path} is no TOML: {e}", "Mend the file") from None


@dataclass(frozen=True)
class _Fields:
    """Values of a table by dotted names, each checked."""

    path: Path
    table: Mapping[str, Any]

    def get(self, name: str, default: Any) -> Any:
        value: Any = self.table
        for part in name.split("."):
            if not isinstance(value, Mapping):
                raise TaskError(f"{self.path}: {name}: a table was expected above it", "Mend the file")
            value = value.get(part)
            if value is None:
                return default
        return value

    def number(self, name: str, default: float, least: float | None = None) -> float:
        value = self.get(name, default)
        bad = isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value)
        if bad or (value <= 0 if least is None else value < least):
            raise TaskError(f"{self.path}: {name}={value!r}: must be a number above 0", "Mend the field")
        return float(value)

    def text(self, name: str) -> str | None:
        value = self.get(name, None)
        if value is not None and (isinstance(value, bool) or not isinstance(value, str | int) or value == ""):
            raise TaskError(f"{self.path}: {name}={value!r}: must be a text", "Mend the field")
        return None if value is None else str(value)

    def artifacts(self) -> tuple[str, ...]:
        """Paths, each given as a text or a table with `source`."""
        found = []
        for one in self.get("artifacts", []):
            table = {"source": one} if isinstance(one, str) else one
            source = table.get("source") if isinstance(table, Mapping) else None
            if not isinstance(source, str) or posixpath.normpath(source) != source or source.count("/") < 1:
                raise TaskError(f"{self.path}: artifacts: {one!r}", "Name an absolute path")
            if not source.startswith("/") or table.get("service", "main") != "main" or table.get("exclude"):
                raise TaskError(
                    f"{self.path}: artifacts: {one!r}",
                    "Only absolute paths of the agent's container are handed on whole",
                )
            found.append(source)
        return tuple(found)

    def network(self) -> str:
        """`public`, `no-network` or `allowlist`; the stricter of what the environment, agent and verifier ask for."""
        old = {True: "public", False: "no-network", None: None}[self.get("environment.allow_internet", None)]
        modes = {name: self.text(f"{name}.network_mode") for name in ("environment", "agent", "verifier")}
        modes["environment"] = modes["environment"] or old or "public"
        for name, mode in modes.items():
            if mode not in (None, *_MODES):
                raise TaskError(f"{self.path}: {name}.network_mode={mode!r}: is not known", f"Use {', '.join(_MODES)}")
        return max((mode for mode in modes.values() if mode), key=_MODES.index)

    def variables(self, name: str) -> dict[str, str]:
        """Texts in which `${NAME}` and `${NAME:-default}` stand for variables of this process."""
        value = self.get(name, {})
        if not isinstance(value, Mapping) or not all(isinstance(v, str) for v in value.values()):
            raise TaskError(f"{self.path}: {name}: must be a table of texts", "Mend the field")

        def variable(found: re.Match[str]) -> str:
            known = os.environ.get(found[1], found[2])
            if known is None:
                raise TaskError(f"{self.path}: {name}: ${{{found[1]}}} is not set", f"Set {found[1]}")
            return known

        return {key: _VARIABLE.sub(variable, text) for key, text in value.items()}
