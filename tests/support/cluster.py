"""A front with prefill and decode workers in one process: engines, sockets and pages, and a way to lose a worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from glm5.model.glm5 import GLM5
from glm5.serve.config import EngineConfig
from glm5.serve.engine import Engine, Ranks
from glm5.serve.fleet import Fleet
from glm5.serve.llm import Answer
from glm5.serve.remote import Hello, Remote, serve_backend
from glm5.serve.request import Request
from glm5.serve.runner import Runner
from glm5.serve.transfer import Fetcher, PageBytes, keep
from glm5.serve.wire import Wire, as_type, connect, listen
from support.scripted import chat_tokenizer

SMALL = EngineConfig(pages=40, context=300)
KEY = b"a key"


class Worker:
    """A worker in this process: an engine, its thread, its two sockets. `kill` ends it as a lost process would."""

    def __init__(
        self,
        model: GLM5,
        config: EngineConfig,
        role: str,
        name: str,
        home: Path,
        tcp: bool,
        ranks: Ranks | None = None,
    ) -> None:
        self.engine = Engine(model, config, chat_tokenizer(), ranks=ranks)
        self.runner = Runner(self.engine, chat_tokenizer(), name)
        self.role, self.name, self._home, self._tcp = role, name, home, tcp
        self.stopped = False
        self.readers: list[Wire] = []

    async def start(self) -> None:
        at = "127.0.0.1:0" if self._tcp else str(self._home / self.name)

        directory = "" if self._tcp else str(self._home)

        async def reader(wire: Wire) -> None:
            self.readers.append(wire)
            await keep(wire, self.engine.lending, self.runner.call, PageBytes(self.engine.cache), directory)

        self.server = await listen(at, KEY, reader)
        address = f"127.0.0.1:{self.server.sockets[0].getsockname()[1]}" if self._tcp else at
        self.fetcher = Fetcher(
            KEY,
            asyncio.get_running_loop(),
            self.runner.call,
            lambda load, filled: self.engine.lending.end_load(load, filled=filled),
        )
        self.engine.lending.fetch = self.fetcher.start
        await self.runner.start()
        self.wire = await connect(str(self._home / "front"), KEY)
        pages = self.engine.pool.device.count
        version = self.engine.weight_version
        hello = Hello(self.role, self.name, address, self.engine.context, self.engine.vocab_size, pages, 1, version)
        self.wire.post("hello", hello)
        self.serving = asyncio.ensure_future(serve_backend(self.runner, self.wire))

    async def kill(self) -> None:
        self.stopped = True
        for wire in (self.wire, *self.readers):
            wire._writer.transport.abort()
        await self.stop()

    async def stop(self) -> None:
        self.server.close()
        await self.fetcher.close()
        await self.wire.close()
        await asyncio.wait({self.serving}, timeout=60)
        await self.runner.stop()

    @property
    def clean(self) -> bool:
        """Nothing is held but by the prefix tree, and nothing waits."""
        device, scheduler = self.engine.pool.device, self.engine.scheduler
        kept = scheduler.leases or scheduler.running or scheduler.waiting or self.engine.lending.loading
        return not kept and not any(device.pins) and device.free + device.idle == device.count


class Cluster:
    def __init__(self, fleet: Fleet, workers: list[Worker]) -> None:
        self.fleet, self.workers = fleet, workers

    @property
    def prefill(self) -> list[Worker]:
        return [w for w in self.workers if w.role == "prefill"]

    @property
    def decode(self) -> list[Worker]:
        return [w for w in self.workers if w.role == "decode"]

    async def answer(self, request: Request) -> list[Answer]:
        answers = [Answer() for _ in range(request.params.n)]
        async for delta in await self.fleet.generate(request):
            answers[delta.index].add(delta)
        return answers

    async def all(self, requests: list[Request]) -> list[Answer]:
        return [one[0] for one in await asyncio.gather(*map(self.answer, requests))]

    async def until_clean(self) -> None:
        """Every worker that lives is clean, in bounded time."""
        async with asyncio.timeout(60.0):
            while not all(w.clean for w in self.workers if not w.stopped):
                await asyncio.sleep(0.005)
        for worker in self.workers:
            worker.engine.scheduler.check()


@asynccontextmanager
async def cluster(
    model: GLM5,
    home: Path,
    roles: str = "pd",
    config: EngineConfig = SMALL,
    tcp: bool = False,
    models: dict[int, GLM5] | None = None,
    ranks: dict[int, Ranks] | None = None,
) -> AsyncIterator[Cluster]:
    fleet = Fleet(chat_tokenizer(), "tiny", direct_up_to=0)

    async def front(wire: Wire) -> None:
        remote = Remote(wire, as_type((await wire.receive())[1], Hello))
        fleet.join(remote)
        await remote.listen()

    server = await listen(str(home / "front"), KEY, front)
    names = {"p": "prefill", "d": "decode"}
    workers = [
        Worker((models or {}).get(i, model), config, names[r], f"{r}{i}", home, tcp, (ranks or {}).get(i))
        for i, r in enumerate(roles)
    ]
    begun: list[Worker] = []
    try:
        for worker in workers:
            await worker.start()
            begun.append(worker)
        while len(fleet.prefill) + len(fleet.decode) < len(workers):
            await asyncio.sleep(0.005)
        yield Cluster(fleet, workers)
    finally:
        for worker in begun:
            if not worker.stopped:
                await worker.stop()
        server.close()
        assert not list(home.glob("pages-*"))


def play(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(300):
            await test()

    asyncio.run(bounded())
