"""Task services by name, and one of them as a process: `python -m glm5.agents.loading FILE.py:Class ORCHESTRATOR`.

Read next: `service`.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from glm5.agents.service import TaskService, serve
from glm5.utils.errors import ConfigError, UserError


def load_tasks(names: Sequence[str]) -> list[TaskService]:
    """The services of these names, one each.

    Raises:
        UserError: one cannot be found, or is none.
    """
    return [_load(name) for name in names]


def _load(name: str) -> TaskService:
    place, colon, of = name.rpartition(":")
    if not colon or not place:
        raise ConfigError("tasks", name, "must be FILE.py:Class or module:Class")
    try:
        if place.endswith(".py"):
            spec = importlib.util.spec_from_file_location(f"glm5_tasks_{Path(place).stem}", place)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module  # dataclasses look their own module up there
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
    except Exception as error:  # of whatever the task's own code does
        raise ConfigError("tasks", name, f"must be importable: {_told(error)}") from error
    made = getattr(module, of, None)
    if not (isinstance(made, type) and issubclass(made, TaskService)):
        raise ConfigError("tasks", name, f"must be a TaskService: {place} has no such class {of}")
    try:
        service: TaskService = made()
    except Exception as error:  # likewise
        raise ConfigError("tasks", name, f"must be made without arguments: {_told(error)}") from error
    if not isinstance(getattr(service, "name", None), str):
        raise ConfigError("tasks", name, f'must have a name: write name = "..." in {of}')
    return service


def _told(error: Exception) -> str:
    """What went wrong, and where in the task's own code."""
    frames = [f for f in traceback.extract_tb(error.__traceback__)[1:] if "importlib" not in f.filename]
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


def main(argv: Sequence[str]) -> int:
    """Serve a task until SIGTERM or Ctrl-C; a key is read from GLM5_API_KEY. Says where as soon as it listens.
    Returns 2 for a mistake of the user."""
    parser = argparse.ArgumentParser(prog="python -m glm5.agents.loading", description="Serve a task.")
    parser.add_argument("task", help="FILE.py:Class or module:Class")
    parser.add_argument("orchestrator", help="its address: http://HOST:PORT")
    parser.add_argument("--host", default="127.0.0.1", help="under which the orchestrator reaches this machine")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    given = parser.parse_args(argv)
    try:
        (service,) = load_tasks([given.task])
        serve(service, given.orchestrator, host=given.host, port=given.port, ready=_say)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _say(url: str) -> None:
    print(f"listening on {url}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
