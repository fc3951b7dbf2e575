"""Everything that rollouts need, in one process and in virtual time: engines, gateway, services, orchestrator, learner.

Each part can be killed and started at any time. What a dead part was about to do is never done: its requests do not
leave, and its store is closed. With `dies_at` the orchestrator dies at its n-th step: a request before it is sent or
after it was answered, a call of the store before or after it.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from glm5.agents.service import Hosted, attend
from glm5.posttrain.rollout.desk import create_desk
from glm5.posttrain.rollout.options import RolloutOptions
from glm5.posttrain.rollout.orchestrator import Orchestrator
from glm5.posttrain.store import Store
from glm5.serve.gateway.app import GatewayOptions, create_gateway
from glm5.serve.gateway.pool import EnginePool
from glm5.serve.gateway.remote import HttpEngine
from glm5.serve.gateway.router import Router
from glm5.serve.http.app import create_app
from support.rollouts import VERSION, ScriptedEngine, ScriptedTask, learn
from support.virtual import Network

OPTIONS = RolloutOptions(
    group=4, concurrency=32, max_open=64, beat_s=1.0, silent_s=3.0, grace_s=5.0, patience_s=60.0, losses=50
)


class _Life:
    """One life of the orchestrator's process: its steps are counted, and after its death it does nothing."""

    def __init__(self, dies_at: int | None) -> None:
        self.steps, self.dies_at, self.dead = 0, dies_at, False
        self.run: asyncio.Task[None] | None = None

    def step(self) -> None:
        self.steps += 1
        if self.steps - 1 == self.dies_at:
            self.end()
        if self.dead:
            raise asyncio.CancelledError

    def end(self) -> None:
        self.dead = True
        if self.run is not None:
            self.run.cancel()


class _Link(httpx.AsyncBaseTransport):
    def __init__(self, network: Network, life: _Life) -> None:
        self.network, self.life = network, life

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.life.step()
        answer = await self.network.handle_async_request(request)
        self.life.step()
        return answer


class _Store(Store):
    """`clock` of `Store` jumps about, as clocks do."""

    def __init__(self, path: Path, life: _Life, full: Callable[[], bool], clock: Callable[[], float]) -> None:
        super().__init__(path, clock=clock)
        self._life, self._full = life, full

    def start(self, *args: Any) -> Any:
        return self._stepped(super().start, *args)

    def deliver(self, *args: Any) -> Any:
        return self._stepped(super().deliver, *args)

    def close_samples(self, *args: Any) -> Any:
        return self._stepped(super().close_samples, *args)

    def _stepped(self, call: Callable[..., Any], *args: Any) -> Any:
        self._life.step()
        self._db.execute(f"PRAGMA max_page_count = {1 if self._full() else 10**6}")  # it is never below what is there
        made = call(*args)
        self._life.step()
        return made


def _frozen(app: Any, thawed: asyncio.Event) -> Any:
    """An application that takes requests, and answers them later."""

    async def later(scope: Any, receive: Any, send: Any) -> None:
        await thawed.wait()
        await app(scope, receive, send)

    return later


class World:
    """See the module.

    Args:
        tasks: what the services play. clock: of the orchestrator's ledger.
    """

    def __init__(
        self,
        path: Path,
        tasks: Sequence[ScriptedTask],
        options: RolloutOptions = OPTIONS,
        *,
        engines: int = 2,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.path, self.options, self.clock, self.disk_is_full = path, options, clock, False
        self.network = Network()
        self.tasks = {task.name: task for task in tasks}
        self.engines = {f"engine{n}": create_app(ScriptedEngine(delay_s=0.01)) for n in range(engines)}
        self.parts: dict[str, Callable[[], None]] = {}  # those that live: how to end each
        self.orchestrator: Orchestrator | None = None
        self.life = _Life(None)
        self.lives = self.steps = 0
        self.failures: list[BaseException] = []

    def die_at(self, step: int) -> None:
        """The next orchestrator dies at this step of it."""
        self.life, self.lives = _Life(step), 0

    def start(self, name: str) -> None:
        """Start a part: an engine, a task, `gateway`, `orchestrator` or `learner`."""
        if name in self.parts:
            return
        if name in self.engines:
            self.network.hosts[name] = self.engines[name]
            self.parts[name] = lambda: self.network.kill(name)
        elif name in self.tasks:
            self._start_task(name)
        else:
            getattr(self, f"_start_{name}")()

    def kill(self, name: str) -> None:
        if name in self.parts:
            self.parts.pop(name)()

    def start_all(self) -> None:
        for name in (*self.engines, "gateway", "orchestrator", *self.tasks, "learner"):
            self.start(name)

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        def over(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                self.failures.append(error)

        task = asyncio.ensure_future(work)
        task.add_done_callback(over)
        return task

    def _start_gateway(self) -> None:
        tokenizer = ScriptedEngine().tokenizer
        engines = {}
        for name in self.engines:
            engines[name] = HttpEngine(f"http://{name}", tokenizer, "glm5-test", 4096)
            engines[name]._http = self.network.client(f"http://{name}")
        router = Router(str(VERSION), silent_s=5.0)
        pool = EnginePool(engines, router, beat_s=1.0, clock=asyncio.get_running_loop().time)
        app = create_gateway(pool, GatewayOptions())

        async def serve() -> None:
            await pool.start()
            self.network.hosts["gateway"] = app

        starting = self._spawn(serve())

        def end() -> None:
            starting.cancel()
            self.network.kill("gateway")
            self._spawn(pool.stop())
            for session in app.state.server.sessions.values():
                session.cancel()

        self.parts["gateway"] = end

    def _start_task(self, name: str) -> None:
        hosted = Hosted(self.tasks[name], self.network.client())
        self.network.hosts[name] = hosted.app()
        attending = self._spawn(attend(hosted, f"http://{name}", "http://desk", self.network.client()))

        def end() -> None:
            self.network.kill(name)
            attending.cancel()
            self._spawn(hosted.stop())

        self.parts[name] = end

    def _start_orchestrator(self) -> None:
        life = self.life
        self.lives += 1
        store = _Store(self.path, life, lambda: self.disk_is_full, self.clock)
        http = httpx.AsyncClient(transport=_Link(self.network, life), timeout=None)  # noqa: S113
        self.orchestrator = Orchestrator(store, "http://gateway", self.options, http=http)
        self.network.hosts["desk"] = create_desk(self.orchestrator)
        life.run = self._spawn(self.orchestrator.run(until_done=list(self.tasks)))
        life.run.add_done_callback(lambda _: store.close())

        def end() -> None:
            self.network.kill("desk")
            life.end()
            self.life = _Life(None)

        self.parts["orchestrator"] = end

    def _start_learner(self) -> None:
        async def learning() -> None:
            with Store(self.path) as store:
                while True:
                    if not learn(store):
                        await asyncio.sleep(0.5)
                    await asyncio.sleep(0.05)

        self.parts["learner"] = self._spawn(learning()).cancel

    async def storm(self, seed: int, every_s: float, faults: Counter[str]) -> None:
        """Kill, hang and starve parts at random, until cancelled; a dead one is back within a second."""
        rng = random.Random(seed)  # noqa: S311
        while True:
            await asyncio.sleep(rng.expovariate(1 / every_s))
            kind = rng.choice(("kill", "kill", "kill", "hang", "full"))
            name = rng.choice((*self.engines, "gateway", "orchestrator", *self.tasks, "learner"))
            if kind == "kill":
                self.kill(name)
                await asyncio.sleep(rng.random())
                self.start(name)
            elif kind == "full":
                self.disk_is_full = True
                await asyncio.sleep(rng.uniform(0.5, 3.0))
                self.disk_is_full = False
            elif name in self.network.hosts:
                thawed, app = asyncio.Event(), self.network.hosts[name]
                self.network.hosts[name] = _frozen(app, thawed)
                await asyncio.sleep(rng.uniform(0.1, 4.0))
                self.network.hosts[name] = app
                thawed.set()
            faults[f"{kind} {name}" if kind == "kill" else kind] += 1

    async def finish(self, keep: Sequence[str] = ()) -> None:
        """Wait until the orchestrator has ended by itself and the learner has taken all; start what died meanwhile.
        Then end all parts, but those to keep."""
        while True:
            self.start_all()
            run = self.life.run
            assert run is not None
            await asyncio.wait({run})
            self.steps = self.life.steps
            self.kill("orchestrator")
            if not run.cancelled():
                break
        if self.failures:
            raise self.failures[0]
        with Store(self.path) as store:
            while store.counts().open:
                await asyncio.sleep(0.5)
        for name in [name for name in self.parts if name not in keep]:
            self.kill(name)
        await asyncio.sleep(1.0)
