"""A task's directory, read: what it holds, its limits and what cannot be run here. Read next: `dockerfile`, `trial`."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm5.agents.tasks.dockerfile import Image, read_dockerfile
from glm5.utils.errors import DataError

MIB = 1 << 20


class TaskError(DataError):
    """A task's directory is not in order, or asks for what the sandbox has not. The message names file and field."""


@dataclass(frozen=True)
class Task:
    """One task. Times in seconds, sizes in bytes.

    Args:
        name: of `[task]`, or of its directory.
        directory: where it lies.
        instruction: what the agent is told.
        image: its Dockerfile, as far as the sandbox follows it.
        environment, verifier_environment, solution_environment: variables for all commands, the verifier, the solution.
        metadata: whatever `[metadata]` holds.
    """

    name: str
    directory: Path
    instruction: str
    image: Image
    agent_s: float
    verifier_s: float
    build_s: float
    memory_bytes: int
    disk_bytes: int
    environment: Mapping[str, str]
    verifier_environment: Mapping[str, str]
    solution_environment: Mapping[str, str]
    metadata: Mapping[str, Any]

    @property
    def has_solution(self) -> bool:
        return (self.directory / "solution" / "solve.sh").is_file()


def read_tasks(directory: Path) -> list[Task]:
    """All tasks below a directory, by name: each directory that has a `task.toml`.

    Raises:
        TaskError: one of them is not in order, or there is none.
    """
    found = [read_task(path.parent) for path in sorted(directory.rglob("task.toml"))]
    if not found:
        raise TaskError(f"{directory} holds no task", "Name a directory of directories with a task.toml each")
    return found


def read_task(directory: Path) -> Task:
    """Read and check a task.

    Raises:
        TaskError: a file is missing, a field has a value that it cannot have, or the task needs what the sandbox has
            not: several containers, steps, a GPU, a verifier in a container of its own.
    """
    for needed in ("task.toml", "instruction.md", "tests/test.sh"):
        if not (directory / needed).is_file():
            raise TaskError(f"{directory} has no {needed}", "A task has task.toml, instruction.md and tests/test.sh")
    table = _toml(directory / "task.toml")
    fields = _Fields(directory / "task.toml", table)
    if table.get("steps"):
        raise TaskError(f"{directory}: tasks of several steps are not run here", "Make a task of each step")
    if fields.number("environment.gpus", 0, least=0):
        raise TaskError(f"{directory}: environment.gpus: the sandbox has no GPU", "Run it in a container")
    if fields.get("verifier.environment", {}) or fields.get("verifier.environment_mode", "shared") != "shared":
        raise TaskError(f"{directory}: a verifier in its own container is not run here", "Run it with Harbor")
    for compose in ("docker-compose.yaml", "docker-compose.yml"):
        if (directory / "environment" / compose).exists():
            raise TaskError(f"{directory}: environment/{compose}: several containers are not run here", "Use Harbor")
    dockerfile = directory / "environment" / "Dockerfile"
    if not dockerfile.is_file() and not fields.get("environment.docker_image", ""):
        raise TaskError(f"{directory} has neither environment/Dockerfile nor environment.docker_image", "Add one")
    return Task(
        name=str(fields.get("task.name", directory.name)),
        directory=directory,
        instruction=(directory / "instruction.md").read_text(encoding="utf-8"),
        image=read_dockerfile(dockerfile) if dockerfile.is_file() else Image(),
        agent_s=fields.number("agent.timeout_sec", 600.0),
        verifier_s=fields.number("verifier.timeout_sec", 600.0),
        build_s=fields.number("environment.build_timeout_sec", 600.0),
        memory_bytes=int(fields.number("environment.memory_mb", 1024)) * MIB,
        disk_bytes=int(fields.number("environment.storage_mb", 256)) * MIB,
        environment=fields.variables("environment.env"),
        verifier_environment=fields.variables("verifier.env"),
        solution_environment=fields.variables("solution.env"),
        metadata=dict(table.get("metadata", {})),
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

    def variables(self, name: str) -> dict[str, str]:
        value = self.get(name, {})
        if not isinstance(value, Mapping) or not all(isinstance(v, str) for v in value.values()):
            raise TaskError(f"{self.path}: {name}: must be a table of texts", "Mend the field")
        return dict(value)
