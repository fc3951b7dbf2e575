"""Control groups: memory and processes of a whole tree, counted by the kernel. Both versions.

Version 1 has a hierarchy for each kind, version 2 one for all. A group is made below the one that this process is in
(or the nearest above it that hands memory and processes on, since version 2 lets no process live beside groups), which
must be writable: as root it is, and for a user after `systemd-run --user --scope -p Delegate=yes`. Read next:
`bubblewrap`.
"""

from __future__ import annotations

import os
import secrets
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_KINDS = ("memory", "pids")


@dataclass(frozen=True)
class Group:
    """One group: its directories (one, or one for each kind) and whether they are of version 2."""

    directories: tuple[Path, ...]
    unified: bool

    @property
    def killed(self) -> int:
        """How many processes the kernel killed because the memory was used up."""
        path = self.directories[0] / ("memory.events" if self.unified else "memory.oom_control")
        for line in _lines(path):
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
        return 0

    def kill(self) -> None:
        """Kill every process in it."""
        for _ in range(100):
            members = {int(n) for d in self.directories for n in _lines(d / "cgroup.procs")}
            if not members:
                return
            for number in members:
                with suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            time.sleep(0.005)

    def remove(self) -> None:
        """Remove the directories, once the processes in them, already killed, are gone."""
        for directory in self.directories:
            for _ in range(100):
                try:
                    directory.rmdir()
                except FileNotFoundError:
                    break
                except OSError:
                    time.sleep(0.02)
                else:
                    break


def parents(root: Path = _ROOT, own: Path = Path("/proc/self/cgroup")) -> tuple[tuple[Path, ...], bool] | None:
    """Where groups that bound memory and processes can be made, and whether that is version 2. None: nowhere."""
    places: dict[str, str] = {}
    for line in _lines(own):
        _, names, place = line.split(":", 2)
        places.update(dict.fromkeys(names.split(","), place))
    ones = []
    for kind in _KINDS:
        here = root / kind / places.get(kind, "/").lstrip("/")
        there = here if here.is_dir() else root / kind
        if (there / "tasks").exists() and os.access(there, os.W_OK):
            ones.append(there)
    if len(ones) == len(_KINDS):
        return tuple(ones), False
    here = root / places.get("", "/").lstrip("/")
    for there in (here, *(above for above in here.parents if above.is_relative_to(root))):
        given = " ".join(_lines(there / "cgroup.subtree_control")).split()
        if set(_KINDS) <= set(given) and os.access(there, os.W_OK) and os.access(there / "cgroup.procs", os.W_OK):
            return (there,), True
    return None


def _sweep(place: Path) -> None:
    """Remove the empty groups of makers that were killed before they could."""
    for left in place.glob("glm5-*-*"):
        if not Path("/proc", left.name.split("-")[1]).exists():
            with suppress(OSError):
                left.rmdir()


def _lines(path: Path) -> list[str]:
    """The lines of a file of the kernel's; none where it cannot be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def make(memory_bytes: int, processes: int) -> Group | None:
    """A new group with these bounds, or None where there is no place for one."""
    found = parents()
    if found is None:
        return None
    places, unified = found
    for place in places:
        _sweep(place)
    name = f"glm5-{os.getpid()}-{secrets.token_hex(6)}"
    made: list[Path] = []
    try:
        for place in places:
            (place / name).mkdir()
            made.append(place / name)
        memory, pids = made[0], made[-1]
        (memory / ("memory.max" if unified else "memory.limit_in_bytes")).write_text(str(memory_bytes))
        (pids / "pids.max").write_text(str(processes))
        swap = memory / ("memory.swap.max" if unified else "memory.memsw.limit_in_bytes")
        if swap.exists():
            swap.write_text("0" if unified else str(memory_bytes))
    except OSError:
        for directory in made:
            with suppress(OSError):
                directory.rmdir()
        return None
    return Group(tuple(made), unified)
