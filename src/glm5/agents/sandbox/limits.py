"""What a command in the sandbox may use, and how it ended. Read next: `bubblewrap`."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Literal

from glm5.utils.errors import ConfigError

MIB = 1 << 20
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True)
class Limits:
    """Bounds of one sandbox. Time and output are of each command; memory, disk and processes of all that runs in it.

    Args:
        wall_s: seconds until everything that the command started is killed.
        cpu_s: seconds of processor time of each process.
        memory_bytes: of all processes together. What they keep in files counts as disk.
        disk_bytes: of all writable directories together; they lie in memory, never on the host's disk.
        files: files and directories in them.
        file_bytes: of one file.
        processes: processes and threads at one time.
        open_files: of each process.
        output_bytes: kept of each of stdout and stderr. A command that writes 64 times as much is killed.
        control_group: False is a weaker sandbox, for hosts that can make no control group, and only where it is asked
            for: `memory_bytes` is then of each process alone, `processes` of each command, and none ends as `memory`.
    """

    wall_s: float = 60.0
    cpu_s: int = 60
    memory_bytes: int = 1024 * MIB
    disk_bytes: int = 256 * MIB
    files: int = 20_000
    file_bytes: int = 256 * MIB
    processes: int = 128
    open_files: int = 512
    output_bytes: int = 1 * MIB
    control_group: bool = True

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, bool) and not value > 0:
                raise ConfigError(field.name, value, "must be above 0")


Ending = Literal["exited", "wall_time", "cpu_time", "memory", "output"]


@dataclass(frozen=True)
class Finished:
    """How a command ended.

    Args:
        ending: `exited` by itself, or which limit ended it. Under `memory` the kernel killed one of its processes,
            and the command may have gone on.
        code: its exit status, 128 + n after signal n; None where a limit of time or output ended it.
        stdout, stderr: the first and the last bytes, half of `output_bytes` each.
        lost: bytes of both that are not kept.
        seconds: of wall time.
    """

    ending: Ending
    code: int | None
    stdout: bytes
    stderr: bytes
    lost: int
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether it exited with status 0, within its limits."""
        return self.ending == "exited" and self.code == 0

    @property
    def text(self) -> str:
        """stdout, and stderr behind it, for a reader or a model; see `readable`."""
        return readable(self.stdout + self.stderr)


def readable(data: bytes) -> str:
    r"""UTF-8, with what is none as U+FFFD, and control characters that could steer a terminal as `\x1b`."""
    text = data.decode("utf-8", errors="replace")
    return _CONTROL.sub(lambda found: f"\\x{ord(found.group()):02x}", text)
