"""A command that ends when whoever started it does, however that ends: `python -m glm5.utils.leash COMMAND...`.

The leash is standard input: whoever starts this keeps the other end of a pipe and writes nothing. When it closes, the
command and its process group hear SIGTERM, and SIGKILL after `GRACE_S`. This process leaves its parent at once, so that
a parent that is taken down with its children still leaves somebody to end the command. Read next:
`glm5.posttrain.cluster`.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

GRACE_S = 10.0
LOOK_S = 0.2


def main(argv: Sequence[str]) -> int:
    """Run `argv` on a leash. Returns its status; says it on standard output, since nobody waits for this process."""
    if os.fork():
        os._exit(0)
    os.setsid()
    let_go: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: let_go.append(number))
    command = subprocess.Popen(argv, stdin=subprocess.DEVNULL, start_new_session=True)
    ended_at = None
    while command.poll() is None:
        there, _, _ = select.select([0] if not let_go else [], [], [], LOOK_S)
        if there and not os.read(0, 4096):
            let_go.append(0)
        if let_go and ended_at is None:
            ended_at = time.monotonic()
            _signal(command.pid, signal.SIGTERM)
        elif ended_at is not None and time.monotonic() - ended_at > GRACE_S:
            _signal(command.pid, signal.SIGKILL)
    _signal(command.pid, signal.SIGKILL)  # whatever it left behind
    with suppress(OSError):
        print(f"ended with status {command.returncode}", flush=True)
    return 0


def _signal(group: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
