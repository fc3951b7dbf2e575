"""A Python tool: an interpreter in the sandbox that lasts from call to call, as in a notebook.

Each call sends code and gets what it printed, the value of its last expression, or its traceback. A call that takes too
long, or ends the interpreter, costs the session's variables: the next call has a fresh one, and the observation says
so. Files stay. What is printed is an observation for a model, never a verdict: code that forges the end of its own call
deceives itself alone. Source: the report's section 3.2 (tool-integrated reasoning). Read next: `sandbox.bubblewrap`.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

from glm5.agents.sandbox import Limits, Sandbox, SandboxError
from glm5.agents.sandbox.limits import MIB, readable
from glm5.agents.sandbox.pipes import FLOOD, Kept

LIMITS = Limits(wall_s=10, cpu_s=600, memory_bytes=512 * MIB, disk_bytes=64 * MIB, processes=32, output_bytes=8192)

# Runs in the sandbox. Code comes on a copy of stdin, its length before it; a byte on DONE ends a call.
_DRIVER = """
import ast, io, os, sys, traceback
source = os.fdopen(os.dup(0), "rb")
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.dup2(1, 2)
names = {"__name__": "__main__"}
while True:
    size = source.readline()
    if not size:
        break
    text = source.read(int(size)).decode()
    try:
        tree = ast.parse(text, "<call>")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "<call>", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "<call>", "eval"), names)
            if value is not None:
                print(repr(value))
    except SystemExit:
        raise
    except BaseException as e:
        frames = traceback.extract_tb(e.__traceback__)[1:]
        print("Traceback (most recent call last):")
        print("".join(traceback.format_list(frames) + traceback.format_exception_only(e)), end="")
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(DONE, b".")
"""


@dataclass(frozen=True)
class Observed:
    """What a call showed.

    Args:
        text: output and the last expression's value, or the traceback; the middle of a long one is left out.
        ending: `returned`; `wall_time` or `output` where a limit ended it; `died` where the interpreter ended, by
            `sys.exit`, a signal, or because the memory was used up.
    """

    text: str
    ending: str

    @property
    def lost_variables(self) -> bool:
        return self.ending != "returned"

    @property
    def shown(self) -> str:
        """What a model sees: the output, and what became of its variables."""
        lost = f"[ended: {self.ending}; variables are lost]" if self.lost_variables else ""
        return "\n".join(part for part in (self.text.rstrip("\n"), lost) if part) or "[no output]"


class PythonSession:
    """The interpreter; a context manager. One call at a time.

    Args:
        limits: `wall_s` and `output_bytes` are of each call; `cpu_s` of each interpreter; the rest of the session.

    Raises:
        SandboxError: no sandbox can be had.
    """

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.limits = limits
        self.box = Sandbox(limits)
        self._process: subprocess.Popen[bytes] | None = None
        self._done = -1

    def __enter__(self) -> PythonSession:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the interpreter and its sandbox. Twice is once."""
        self._end()
        self.box.close()

    def call(self, code: str) -> Observed:
        """Run code; what it defines is there in the next call.

        Raises:
            SandboxError: the session is closed, or an interpreter cannot be started.
        """
        if self._process is None:
            self._begin()
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        source = code.encode(errors="replace")
        message = memoryview(b"%d\n%b" % (len(source), source))
        kept, ending = Kept(self.limits.output_bytes), ""
        deadline = time.monotonic() + self.limits.wall_s
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            selector.register(self._done, selectors.EVENT_READ)
            selector.register(process.stdin, selectors.EVENT_WRITE)
            while not ending:
                left = deadline - time.monotonic()
                ready = {key.fileobj for key, _ in selector.select(max(left, 0))}
                if process.stdin in ready:
                    message = _write(process.stdin.fileno(), message)
                    if not message:
                        selector.unregister(process.stdin)
                # Output first: the byte that ends a call is written after all output of the call.
                over = self._done in ready
                data = _read(process.stdout.fileno())
                while data:
                    kept.add(data)
                    data = _read(process.stdout.fileno()) if kept.total <= FLOOD * kept.size else b""
                if kept.total > FLOOD * kept.size:
                    ending = "output"
                elif over:
                    ending = "returned" if _read(self._done) else "died"
                elif data is not None:  # end of file: nobody holds the output any more
                    ending = "died"
                elif left <= 0:
                    ending = "wall_time"
        if ending != "returned":
            self._end()
        text = readable(kept.bytes)
        if kept.lost:
            half = kept.size - kept.size // 2
            text = readable(kept.bytes[:half]) + f"\n[{kept.lost} bytes left out]\n" + readable(kept.bytes[half:])
        return Observed(text, ending)

    def _begin(self) -> None:
        """Start an interpreter, from a thread that lives as long as it does; see `Sandbox.start`."""
        receive, send = os.pipe()
        started: list[subprocess.Popen[bytes] | SandboxError] = []
        ready = threading.Event()

        def hold() -> None:
            try:
                driver = f"DONE = {send}\n{_DRIVER}"
                process = self.box.start(["/usr/bin/python3", "-I", "-B", "-c", driver], pass_fds=[send])
            except SandboxError as e:
                started.append(e)
            else:
                started.append(process)
            ready.set()
            if isinstance(started[0], subprocess.Popen):
                started[0].wait()

        threading.Thread(target=hold, daemon=True, name="python-session").start()
        ready.wait()
        os.close(send)
        if isinstance(started[0], SandboxError):
            os.close(receive)
            raise started[0]
        self._process, self._done = started[0], receive
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
        os.set_blocking(receive, False)

    def _end(self) -> None:
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert stream is not None
            with suppress(OSError):
                stream.close()
        os.close(self._done)
        self._process, self._done = None, -1


def _read(descriptor: int) -> bytes | None:
    """Some bytes; empty at the end of file; None where there is nothing yet."""
    try:
        return os.read(descriptor, 1 << 16)
    except BlockingIOError:
        return None


def _write(descriptor: int, data: memoryview) -> memoryview:
    """What is left to write; nothing where nobody reads."""
    try:
        return data[os.write(descriptor, data[: 1 << 16]) :]
    except BlockingIOError:
        return data
    except BrokenPipeError:
        return data[:0]
