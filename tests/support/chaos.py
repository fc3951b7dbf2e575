"""Rollouts in processes of their own, and what happens to them: SIGKILL, hangs, a full disk, clocks that jump, slow
connections, deliveries that come twice. At random moments by seed, so many a sample, whatever the machine's pace.

Engine, gateway, services, orchestrator and learner are the real ones; tasks and engine follow `support.rollouts`, so
that what becomes of every sample is known (`expected`). Processes fork from a server that has imported all they need.
"""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import os
import random
import resource
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn

from glm5.agents.service import serve as serve_task
from glm5.posttrain.outcome import Outcome, State
from glm5.posttrain.record import Record
from glm5.posttrain.rollout.desk import serve as serve_desk
from glm5.posttrain.rollout.options import RolloutOptions
from glm5.posttrain.rollout.orchestrator import Orchestrator
from glm5.posttrain.store import Store
from glm5.serve.gateway.app import GatewayOptions, create_gateway
from glm5.serve.gateway.pool import EnginePool
from glm5.serve.gateway.remote import HttpEngine
from glm5.serve.gateway.router import Router
from glm5.serve.http.app import create_app
from glm5.utils.errors import FileError
from glm5.utils.listening import listen
from support.rollouts import FATES, VERSION, ScriptedEngine, ScriptedTask, fate, learn, number

FAULTS = ("kill", "kill", "kill", "hang", "disk", "loris")
FULL_S = 1.5  # how long a disk is full


@dataclass(frozen=True)
class TaskSpec:
    """A scripted task. inside: it runs in the orchestrator's process."""

    name: str
    groups: int
    seconds: float
    ratio: float = 1.0
    timeout_s: float = 300.0
    hang_s: float = 0.1
    concurrency: int = 64
    inside: bool = False

    def made(self) -> ScriptedTask:
        return ScriptedTask(
            self.name, self.groups, seconds=self.seconds, ratio=self.ratio, timeout_s=self.timeout_s,
            hang_s=self.hang_s, concurrency=self.concurrency,
        )  # fmt: skip


# --------------------------------------------------------------------------------------------------- the processes
def run_app(app: Any, listening: socket.socket) -> None:
    uvicorn.Server(uvicorn.Config(app, log_level="critical", ws="none")).run([listening])


def engine(listening: socket.socket) -> None:
    run_app(create_app(ScriptedEngine(delay_s=0.002)), listening)


def gateway(listening: socket.socket, engines: list[str]) -> None:
    tokenizer = ScriptedEngine().tokenizer
    made = {url: HttpEngine(url, tokenizer, "glm5-test", 4096, timeout_s=60) for url in engines}
    pool = EnginePool(made, Router(str(VERSION), silent_s=60.0), beat_s=0.5)
    run_app(create_gateway(pool, GatewayOptions(), start=pool.start, stop=pool.stop), listening)


def service(spec: TaskSpec, desk: str) -> None:
    serve_task(spec.made(), desk)


def jumping(seed: int) -> Callable[[], float]:
    """A clock that is now years behind, now years ahead."""
    rng = random.Random(seed)  # noqa: S311
    return lambda: time.time() + rng.choice((0.0, 0.0, -1e8, 1e8))


def fill_disk(*_: object) -> None:
    """No file can grow for a while: not even by what is in the log already."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    signal.setitimer(signal.ITIMER_REAL, FULL_S)


def empty_disk(*_: object) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def mind_the_disk() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, fill_disk)
    signal.signal(signal.SIGALRM, empty_disk)


def orchestrator(
    listening: socket.socket, path: Path, gateway: str, options: RolloutOptions, specs: list[TaskSpec], seed: int
) -> None:
    async def main() -> None:
        with Store(path, clock=jumping(seed)) as store:
            made = Orchestrator(store, gateway, options)
            hosting = asyncio.gather(*(made.host(spec.made()) for spec in specs if spec.inside))
            await serve_desk(made, listening, until_done=[spec.name for spec in specs])
            await hosting
        os._exit(0)

    mind_the_disk()
    asyncio.run(main())


def learner(path: Path, seed: int) -> None:
    """Takes and closes; and delivers again what was delivered, the same or otherwise."""
    mind_the_disk()
    rng = random.Random(seed)  # noqa: S311
    wrong = Record([1, 2], [False, True], [0.0, -1.0], [-1, 3])
    with Store(path, clock=jumping(seed)) as store:
        while True:
            with suppress(FileError):
                if learn(store, rng.randint(1, 4)):
                    continue
                time.sleep(0.5)
                for sample in store.samples(status="delivered", limit=1):
                    assert sample.outcome is not None
                    again = store.records(sample.id)
                    assert store.deliver(sample.id, sample.outcome, sample.reward, again) in ("repeated", "late")
                    assert store.deliver(sample.id, Outcome.OK, 1.0, [wrong]) in ("other", "late")


# --------------------------------------------------------------------------------------------------- what is known
def expected(specs: list[TaskSpec], group: int) -> dict[str, tuple[str, float | None, str]]:
    """Outcome, reward and final state of every sample, by the rules as they are written, not by their code."""
    made = {}
    for spec in specs:
        for index in range(spec.groups):
            names = [f"{spec.name}-{index}-{member}" for member in range(group)]
            fates = [fate(spec.name, index, member) for member in range(group)]
            rewards: list[float | None] = []
            for name, one in zip(names, fates, strict=True):
                of = {Outcome.OK: 1.0, Outcome.TASK_FAILED: number(name) % 5 / 10, Outcome.TIMEOUT: 0.0}
                rewards.append(of.get(FATES[one]))
            good = [r for r, one in zip(rewards, fates, strict=True) if r is not None and one != "old"]
            if 2 * len(good) <= group:
                rest = State.GROUP_DROPPED
            else:
                rest = State.ZERO_VARIANCE if len(set(good)) == 1 else State.TRAINED
            for name, one, reward in zip(names, fates, rewards, strict=True):
                state = State.ENVIRONMENT_FAILED if reward is None else State.STALE if one == "old" else rest
                made[name] = str(FATES[one]), reward, str(state)
    return made


# --------------------------------------------------------------------------------------------------- the supervisor
@dataclass
class Chaos:
    """A run.

    Args:
        directory: for the store and what processes say. every: finished samples from fault to fault, on average.
        engines: how many. limit_s: after which it has failed.
        script: faults, "KIND PROCESS", instead of random ones, `every` samples from one to the next.
        first: so many of them come before the learner begins. So they come in the middle whatever the pace is: no more
            than `options.max_open` samples can be begun until then.

    Attributes:
        faults: what was done, how often. peak: most samples that ran at once.
    """

    directory: Path
    specs: list[TaskSpec]
    options: RolloutOptions
    seed: int
    every: float
    engines: int = 1
    limit_s: float = 600.0
    script: list[str] | None = None
    first: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    peak: int = 0

    def __post_init__(self) -> None:
        self.path = self.directory / "trajectories.sqlite"
        self.rng = random.Random(self.seed)  # noqa: S311
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["support.chaos", "glm5.posttrain.intake"])
        self._parts: dict[str, Any] = {}
        self._starts = 0
        # The sockets stay open while processes come and go: no port is taken by somebody else in between.
        self._sockets = {name: self._listen() for name in (*self._engines, "gateway", "orchestrator")}
        self._intruders: list[socket.socket] = []

    @staticmethod
    def _listen() -> socket.socket:
        return listen("127.0.0.1", 0)

    @property
    def _engines(self) -> list[str]:
        return [f"engine{n}" for n in range(self.engines)]

    def _url(self, name: str) -> str:
        return f"http://127.0.0.1:{self._sockets[name].getsockname()[1]}"

    def _start(self, name: str) -> None:
        self._starts += 1
        seed = self.seed * 1000 + self._starts
        if name in self._engines:
            target, args = engine, (self._sockets[name],)
        elif name == "gateway":
            target, args = gateway, (self._sockets[name], [self._url(n) for n in self._engines])
        elif name == "orchestrator":
            target, args = orchestrator, (
                self._sockets[name], self.path, self._url("gateway"), self.options, self.specs, seed
            )  # fmt: skip
        elif name == "learner":
            target, args = learner, (self.path, seed)
        else:
            target, args = service, (next(s for s in self.specs if s.name == name), self._url("orchestrator"))
        output = self.directory / f"{name}.err"
        part = self._context.Process(target=told, args=(str(output), target, args), daemon=True)
        part.start()
        self._parts[name] = part

    def _wait(self) -> float:
        if self.script is not None:
            return self.every if self.script else math.inf
        return self.every if math.isinf(self.every) else self.rng.expovariate(1 / self.every)

    def _next(self) -> tuple[str, str]:
        """Kind and process of the next fault."""
        if self.script is not None:
            kind, name = self.script.pop(0).split()
            return kind, name
        kind = self.rng.choice(FAULTS)
        return kind, self.rng.choice(["orchestrator", "learner"] if kind == "disk" else sorted(self._parts))

    def _fault(self) -> None:
        kind, name = self._next()
        part = self._parts[name]
        if kind == "loris":
            self._loris()
        elif kind == "kill":
            with suppress(ProcessLookupError):
                os.kill(part.pid, signal.SIGKILL)
            part.join()
            kind = f"kill {name}"
            time.sleep(self.rng.random() / 2)
        elif kind == "hang":
            with suppress(ProcessLookupError):
                os.kill(part.pid, signal.SIGSTOP)
                time.sleep(self.rng.uniform(0.1, 1.5))
                os.kill(part.pid, signal.SIGCONT)
        else:
            with suppress(ProcessLookupError):
                os.kill(part.pid, signal.SIGUSR1)
        self.faults[kind] += 1

    def _loris(self) -> None:
        """Connections that say a little and nothing more, for as long as they are let."""
        for one in self._intruders:
            one.close()
        self._intruders = []
        for name in ("gateway", "orchestrator", *self._engines):
            for _ in range(3):
                one = socket.create_connection(self._sockets[name].getsockname())
                head = "POST /sessions HTTP/1.1", "Host: x", "Content-Type: application/json", "Content-Length: 9"
                one.sendall("\r\n".join((*head, "", "{")).encode())
                self._intruders.append(one)

    def _finished(self) -> tuple[int, int]:
        counts = self._store.counts()
        self.peak = max(self.peak, counts.by_status["running"])
        return counts.started - counts.by_status["running"], counts.open

    def run(self) -> float:
        """Until every sample has its final state. Returns the seconds that it took.

        Raises:
            AssertionError: it took too long, or a process ended by itself.
        """
        begun = time.monotonic()
        self._store = Store(self.path)
        try:
            following = self._wait()
            over = False
            while True:
                assert time.monotonic() - begun < self.limit_s, f"not over in {self.limit_s} s: {self._finished()}"
                names = [*self._engines, "gateway"]
                if sum(self.faults.values()) >= self.first:
                    names.append("learner")
                names += [s.name for s in self.specs if not s.inside] + ([] if over else ["orchestrator"])
                for name in names:
                    part = self._parts.get(name)
                    if part is not None and part.exitcode == 0 and name == "orchestrator":
                        over = True
                        del self._parts[name]
                        continue
                    # Whoever hears of a full disk before it minds the signal dies of it.
                    killed = part is None or part.exitcode in (-signal.SIGKILL, -signal.SIGUSR1)
                    assert killed or part.exitcode is None, f"{name}: {part.exitcode}"
                    if killed:
                        self._start(name)
                finished, still = self._finished()
                if over and not still:
                    return time.monotonic() - begun
                if finished >= following and not over:
                    self._fault()
                    following = (finished if self.script is None else following) + self._wait()
                time.sleep(0.1)
        finally:
            self._store.close()
            for part in self._parts.values():
                if part.exitcode is None:
                    os.kill(part.pid, signal.SIGKILL)
                part.join()
            for one in (*self._intruders, *self._sockets.values()):
                one.close()

    def said(self) -> str:
        """What the processes wrote on standard error."""
        files = sorted(self.directory.glob("*.err"))
        return "\n".join(f"--- {file.name}\n{file.read_text()[-3000:]}" for file in files)


def told(output: str, target: Callable[..., None], args: tuple[Any, ...]) -> None:
    """A process's beginning: what it says goes into a file."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 2)
    os.dup2(file, 1)
    sys.stderr = sys.stdout = os.fdopen(file, "w", buffering=1)
    target(*args)
