"""Verifiers in processes that can be killed: a check that hangs costs its time limit and nothing more.

Python cannot stop a computation from outside its process, and alarms work in the main thread only, so every check runs
in a worker (`worker`), which is killed with all that it started when its time is up, and replaced. Any thread may ask.
Each answer gets its own verdict, in order, whatever becomes of those beside it. Read next: `verdict`, `worker`.
"""

from __future__ import annotations

import json
import os
import queue
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import IO, Any

from glm5.posttrain.verify.verdict import Verdict
from glm5.utils.errors import ConfigError, UserError

START_S = 120.0  # a worker may take so long to start and import, on a busy machine


@dataclass(frozen=True)
class Task:
    """One answer to judge: `verifier` by name, `answer` and `info` as JSON values.

    A verifier finds in `info["check_s"]` after how many seconds the pool kills it.
    """

    verifier: str
    response: str
    answer: Any
    info: Mapping[str, Any] = field(default_factory=dict)


class VerifierPool:
    """Some workers, started when they are first needed.

    Args:
        workers: checks at a time. timeout_s: of one check. memory_mib: that one worker may take.

    `counts` says what came of all checks: right, wrong, partly, and the causes of there being no verdict. `beat` is
    called after each check of many.
    """

    def __init__(self, workers: int = 2, timeout_s: float = 10.0, memory_mib: int = 4096) -> None:
        if workers < 1:
            raise ConfigError("workers", workers, "must be at least 1")
        if not 0 < timeout_s < float("inf"):
            raise ConfigError("timeout_s", timeout_s, "must be above 0")
        self.workers, self.timeout_s, self.memory_mib = workers, timeout_s, memory_mib
        self.counts: Counter[str] = Counter()
        self.beat: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._free: queue.Queue[_Worker] = queue.Queue()
        self._all = [_Worker(memory_mib << 20, timeout_s) for _ in range(workers)]
        for worker in self._all:
            self._free.put(worker)
        self._threads = ThreadPoolExecutor(workers, "verify")

    def require(self, names: Sequence[str]) -> None:
        """Load verifiers now.

        Raises:
            UserError: one is not known, or cannot be imported where checks run.
        """
        worker = self._free.get()
        try:
            for name in dict.fromkeys(names):
                found = worker.ask({"load": name}, START_S)
                if not found.known:
                    raise UserError(found.detail or f"verifier {name!r} cannot be loaded ({found.cause})")
        finally:
            self._free.put(worker)

    def check(self, task: Task) -> Verdict:
        """The verdict on one answer; waits for a free worker. The time limit counts from the check's own start."""
        worker = self._free.get()
        try:
            found = worker.ask({**vars(task), "info": {**task.info, "check_s": self.timeout_s}}, self.timeout_s)
        finally:
            self._free.put(worker)
        name = found.cause or {1.0: "right", 0.0: "wrong"}.get(found.reward or 0.0, "partly")
        with self._lock:
            self.counts[name] += 1
        return found

    def check_all(self, tasks: Sequence[Task]) -> list[Verdict]:
        """Verdicts on many, in their order."""
        found = []
        for verdict in self._threads.map(self.check, tasks):
            found.append(verdict)
            self.beat()
        return found

    def close(self) -> None:
        """End all workers."""
        self._threads.shutdown(cancel_futures=True)
        for worker in self._all:
            worker.kill()

    def __enter__(self) -> VerifierPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Worker:
    """One process, started again after it was killed or died. Used by one thread at a time."""

    def __init__(self, memory: int, timeout_s: float) -> None:
        # The worker's own clock is the last resort, for when this process is gone; it must not run out before ours.
        self._arguments = [str(memory), str(2 * timeout_s + START_S)]
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None

    def ask(self, task: Mapping[str, Any], timeout_s: float) -> Verdict:
        try:
            line = json.dumps(task, allow_nan=False).encode() + b"\n"
        except (TypeError, ValueError) as e:
            return Verdict(None, "error", f"the task is no JSON: {e}")
        try:
            process = self._started(task)
            found = self._exchange(process, line, timeout_s)
        except TimeoutError:
            self.kill()
            return Verdict(None, "timeout", f"no verdict after {timeout_s:g} s; the check was killed")
        except (OSError, EOFError, ValueError) as e:
            said = self._last_words() or str(e)
            self.kill()
            return Verdict(None, "crash", said)
        return Verdict(found["reward"], found["cause"], found["detail"])

    def _started(self, task: Mapping[str, Any]) -> subprocess.Popen[bytes]:
        """A running process that has loaded the task's verifier: importing is not part of anyone's time."""
        if self._process is None or self._process.poll() is not None:
            self.kill()
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `kill`
            self._process = subprocess.Popen(
                [sys.executable, "-m", "glm5.posttrain.verify.worker", *self._arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                start_new_session=True,  # so that whatever it starts is killed with it
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            )
            self._loaded: set[str] = set()
        name = task.get("verifier")
        if name is not None and name not in self._loaded:
            self._exchange(self._process, json.dumps({"load": name}).encode() + b"\n", START_S)
            self._loaded.add(name)
        return self._process

    def _exchange(self, process: subprocess.Popen[bytes], line: bytes, timeout_s: float) -> dict[str, Any]:
        """Send a line and read one. Raises TimeoutError, or EOFError where the process is gone."""
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(line)
        process.stdin.flush()
        deadline, data = time.monotonic() + timeout_s, b""
        with selectors.DefaultSelector() as ready:
            ready.register(process.stdout, selectors.EVENT_READ)
            while not data.endswith(b"\n"):
                if not ready.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError
                piece = os.read(process.stdout.fileno(), 1 << 16)
                if not piece:
                    raise EOFError(f"the process ended with status {process.wait()}")
                data += piece
        found = json.loads(data)
        assert isinstance(found, dict)
        return found

    def _last_words(self) -> str:
        """The end of what a dead process wrote, and its status."""
        if self._process is None or self._errors is None:
            return ""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        status = self._process.poll()
        self._errors.seek(0)
        said = " ".join(self._errors.read().decode(errors="replace").split())[-300:]
        return f"the process ended with status {status}: {said}"

    def kill(self) -> None:
        """End the process and all that it started."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with suppress(OSError):
                        pipe.close()
            self._process = None
        if self._errors is not None:
            self._errors.close()
            self._errors = None
