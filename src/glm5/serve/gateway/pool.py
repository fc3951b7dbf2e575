"""Several engines behind the gateway, as one backend: the router says which answers, and who does not live is left out.

A request that an engine lost before its first id is asked elsewhere; one that was lost later fails, since what was told
cannot be taken back, and the turn can be asked for again. Read next: `router`, `app`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import fields, replace
from itertools import count
from typing import Any

from glm5.serve.client import Backend, PauseMode, Stats, Stream, Unavailable, WeightGroup, WeightUpdate
from glm5.serve.gateway.router import Lease, Router
from glm5.serve.request import Delta, Request
from glm5.utils.ending import ended
from glm5.utils.errors import UserError

log = logging.getLogger(__name__)


class EnginePool:
    """See the module. A `Backend`.

    Args:
        engines: by name, all of one model. router: made for the version that they begin with.
        beat_s: how often each is asked whether it lives; in as much time it must answer.
    """

    def __init__(
        self,
        engines: Mapping[str, Backend],
        router: Router,
        *,
        beat_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        first = next(iter(engines.values()))
        self.tokenizer, self.model_name = first.tokenizer, first.model_name
        self.context, self.vocab_size = min(e.context for e in engines.values()), first.vocab_size
        self.engines, self.router, self.beat_s, self._time = dict(engines), router, beat_s, clock
        self._heard = 0.0
        self._at: dict[str, str] = {}  # which engine has a request, by its name
        self._beats: asyncio.Task[None] | None = None

    @property
    def weight_version(self) -> str:
        return self.router.version

    @property
    def paused(self) -> bool:
        return all(engine.paused for engine in self.engines.values())

    @property
    def failure(self) -> str | None:
        reasons = [engine.failure for engine in self.engines.values()]
        return None if None in reasons else "; ".join(map(str, reasons))

    # -------------------------------------------------------------------------------------------------- health
    def clock(self) -> float:
        """Seconds for which engines could be heard. Where this process is late they stand still: it would take its own
        silence for the engines'."""
        return self._heard

    async def start(self) -> None:
        """Hear of every engine once, then again and again."""
        await self.beat()
        self._beats = asyncio.ensure_future(self._beat_on())

    async def stop(self) -> None:
        """Ask no more."""
        if self._beats is not None:
            await ended([self._beats], "who asks whether engines live")

    async def beat(self) -> None:
        """Ask every engine whether it lives."""

        async def ask(name: str, engine: Backend) -> None:
            try:
                alive = engine.failure is None and await asyncio.wait_for(engine.probe(self.beat_s), self.beat_s)
            except (Unavailable, TimeoutError, OSError):
                alive = False
            if alive:
                self.router.beat(name, engine.weight_version, self.clock())

        await asyncio.gather(*(ask(name, engine) for name, engine in self.engines.items()))

    async def _beat_on(self) -> None:
        while True:
            begun = self._time()
            await asyncio.sleep(self.beat_s)
            await self.beat()
            self._heard += min(self._time() - begun, 2 * self.beat_s)

    # -------------------------------------------------------------------------------------------------- requests
    async def generate(self, request: Request) -> Stream:
        """As `Backend` has it. Raises Unavailable if no engine takes it."""
        stream = _Routed(self, request)
        await stream.begin()
        return stream

    async def abort(self, rid: str | None) -> None:
        names = list(self.engines) if rid is None else [self._at[rid]] if rid in self._at else []
        for name in names:
            await self._unless_lost(name, self.engines[name].abort(rid))

    # -------------------------------------------------------------------------------------------------- all of them
    async def pause(self, mode: PauseMode) -> None:
        await self._all(lambda engine: engine.pause(mode))

    async def resume(self) -> None:
        await self._all(lambda engine: engine.resume())

    async def flush(self) -> bool:
        return False not in await self._all(lambda engine: engine.flush())  # who is lost says nothing

    async def update_weights(self, update: WeightUpdate) -> None:
        """Push new weights to every engine, and leave out those that do not confirm them."""
        await self._all(lambda engine: engine.update_weights(update))
        await self.confirm(update.weight_version)

    async def confirm(self, version: str | None) -> None:
        """Engines have been given weights of this version: leave out those that do not say so themselves."""
        await self.beat()
        if version is not None and (late := self.router.set_version(version)):
            log.warning("not at weights %s: %s", version, ", ".join(late))

    async def join_group(self, group: WeightGroup) -> None:
        """Engine i of those that live joins as rank `rank_offset` + i."""
        ranks = count(group.rank_offset)
        await self._all(lambda engine: engine.join_group(replace(group, rank_offset=next(ranks))))

    async def leave_group(self, group_name: str) -> None:
        await self._all(lambda engine: engine.leave_group(group_name))

    async def checksum(self) -> dict[str, str]:
        """Of an engine that may be asked."""
        there = self.router.routable(self.clock())
        if not there:
            raise Unavailable("no engine is alive with the current weights")
        return await self.engines[there[0].name].checksum()

    async def release_memory(self, tags: tuple[str, ...]) -> None:
        """Of all, or of none: each is asked first to forget its prefixes, which it cannot while requests run."""
        held = not self.paused
        try:
            if held:
                await self.pause("keep")
            if not await self.flush():
                raise UserError("requests run", "Abort them, or pause with mode retract, before memory is released")
            await self._all(lambda engine: engine.release_memory(tags))
        finally:
            if held:
                await self.resume()

    async def resume_memory(self, tags: tuple[str, ...]) -> None:
        """Of each by itself: engines do not say what they had released. Where one has no room, ask all once more."""
        await self._all(lambda engine: engine.resume_memory(tags))

    async def probe(self, timeout_s: float) -> bool:
        """Whether an engine may be asked."""
        return bool(self.router.routable(self.clock()))

    def stats(self) -> Stats:
        """Sums over the engines; of `cache_usage` the mean."""
        every = [engine.stats() for engine in self.engines.values()]
        sums = {field.name: sum(getattr(one, field.name) for one in every) for field in fields(Stats)}
        return Stats(**{**sums, "cache_usage": sums["cache_usage"] / len(every)})

    async def info(self) -> dict[str, Any]:
        """Of each engine by its name, and what the router knows of it."""
        now = self.clock()
        there = {engine.name for engine in self.router.routable(now)}
        return {
            name: {"routable": name in there, "version": state.version, "load": state.load}
            for name, state in self.router.engines.items()
        }

    async def _all(self, call: Callable[[Backend], Coroutine[Any, Any, Any]]) -> list[Any]:
        """What each engine that lives answers."""
        names = [name for name, engine in self.engines.items() if engine.failure is None]
        return await asyncio.gather(*(self._unless_lost(name, call(self.engines[name])) for name in names))

    async def _unless_lost(self, name: str, work: Coroutine[Any, Any, Any]) -> Any:
        try:
            return await work
        except Unavailable as error:
            log.warning("engine %s: %s", name, error)
            self.router.lost(name)
            return None


class _Routed:
    """The stream of one request, wherever it is."""

    def __init__(self, pool: EnginePool, request: Request) -> None:
        self._pool, self._request = pool, request
        self._stream: Stream | None = None
        self._lease: Lease | None = None
        self._failed: set[str] = set()
        self._told = False

    async def begin(self) -> None:
        """Find an engine that takes the request."""
        pool, request = self._pool, self._request
        while True:
            lease = self._lease = pool.router.route(request.route or request.rid, pool.clock(), avoid=self._failed)
            pool._at[request.rid] = lease.engine
            try:
                self._stream = await pool.engines[lease.engine].generate(request)
                return
            except Unavailable as error:
                self._lost(lease, error)
            except BaseException:
                self._give_back()
                raise

    def __aiter__(self) -> _Routed:
        return self

    async def __anext__(self) -> Delta:
        while True:
            stream, lease = self._stream, self._lease
            if stream is None or lease is None:  # it has ended
                raise StopAsyncIteration
            try:
                delta = await anext(stream)
            except StopAsyncIteration:
                await self.aclose()
                raise
            except Unavailable as error:
                self._lost(lease, error)
                await stream.aclose()
                if self._told:
                    raise
                await self.begin()
                continue
            self._told = self._told or bool(delta.ids)
            return delta

    def _lost(self, lease: Lease, error: Unavailable) -> None:
        log.warning("engine %s lost request %s: %s", lease.engine, self._request.rid, error)
        self._failed.add(lease.engine)
        self._give_back()
        self._pool.router.lost(lease.engine)

    def _give_back(self) -> None:
        if self._lease is not None:
            self._pool.router.release(self._lease)
            self._pool._at.pop(self._request.rid, None)
            self._lease = None
            if not self._request.route:
                self._pool.router.forget(self._request.rid)

    async def aclose(self) -> None:
        self._give_back()
        if self._stream is not None:
            await self._stream.aclose()
