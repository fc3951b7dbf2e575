"""A process fed and read within bounds of time and size, whatever it does. Read next: `bubblewrap`."""

from __future__ import annotations

import os
import selectors
import subprocess
import time
from contextlib import suppress
from typing import Literal

FLOOD = 64  # how many times what is kept a process may write before it is killed


class Kept:
    """The first and the last bytes of a stream, half of `size` each; `lost` counts those between."""

    def __init__(self, size: int) -> None:
        self.size, self.total = size, 0
        self._head, self._tail = bytearray(), bytearray()

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = self.size - self.size // 2 - len(self._head)
        self._head += data[:room]
        self._tail += data[room:] if room < len(data) else b""
        if len(self._tail) > self.size:  # cut now and then, not with every read
            del self._tail[: -(self.size // 2) or None]

    @property
    def bytes(self) -> bytes:
        tail = self._tail[-(self.size // 2) :] if self.size // 2 else b""
        return bytes(self._head + tail)

    @property
    def lost(self) -> int:
        return self.total - len(self.bytes)


def converse(
    process: subprocess.Popen[bytes], stdin: bytes, deadline: float, kept: int, most: int | None = None
) -> tuple[Literal["exited", "wall_time", "output"], Kept, Kept]:
    """Write `stdin`, read both outputs until the process ends, its time is up (monotonic) or it floods; then kill it.

    It floods when it has written more than `most` bytes, by default `FLOOD` times what is kept.

    Whoever holds the other ends of the pipes after the process itself is dead is not waited for.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    out, err = Kept(kept), Kept(kept)
    sinks = {process.stdout: out, process.stderr: err}
    rest = memoryview(stdin)
    ending: Literal["exited", "wall_time", "output"] = "exited"
    with selectors.DefaultSelector() as selector:
        for stream in sinks:
            os.set_blocking(stream.fileno(), False)
            selector.register(stream, selectors.EVENT_READ)
        os.set_blocking(process.stdin.fileno(), False)
        if rest:
            selector.register(process.stdin, selectors.EVENT_WRITE)
        else:
            process.stdin.close()
        try:
            while len(selector.get_map()) > bool(rest):  # an output is open
                left = deadline - time.monotonic()
                if left <= 0:
                    ending = "wall_time"
                    break
                ready = selector.select(min(left, 0.5))
                if not ready and process.poll() is not None:
                    break
                for key, _ in ready:
                    if key.fileobj is process.stdin:
                        rest = _feed(process, selector, rest)
                        continue
                    data = os.read(key.fd, 1 << 16)
                    if data:
                        sinks[key.fileobj].add(data)  # type: ignore[index]
                    else:
                        selector.unregister(key.fileobj)
                if max(out.total, err.total) > (FLOOD * kept if most is None else most):
                    ending = "output"
                    break
            if ending == "exited":
                try:
                    process.wait(max(deadline - time.monotonic(), 0))
                except subprocess.TimeoutExpired:
                    ending = "wall_time"
        finally:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout, process.stderr):
                with suppress(OSError):
                    pipe.close()
    return ending, out, err


def _feed(process: subprocess.Popen[bytes], selector: selectors.BaseSelector, rest: memoryview) -> memoryview:
    assert process.stdin is not None
    try:
        rest = rest[os.write(process.stdin.fileno(), rest[: 1 << 16]) :]
    except BlockingIOError:
        return rest
    except BrokenPipeError:  # it does not read what it was given, which is its own affair
        rest = rest[:0]
    if not rest:
        selector.unregister(process.stdin)
        process.stdin.close()
    return rest
