"""The engines of an asynchronous run with the gateway before them, in an event loop of their own.

    learner's thread            event loop                                     engine's thread, or another process
    push(model, version)  ->    EnginePool: pause, new weights, go on    ->    steps go on under the new version
                                gateway <- agents, over loopback HTTP

The learner never waits for generation and generation never ends for the learner: a request that runs goes on across a
push. Its prefix is read anew under the new weights (`in_flight="renew"`), so that each token's version is the whole
truth about where its probability came from, or its old entries stay ("keep"). Source: report, sections 3.6 and 4.1.
Read next: `agent`, `glm5.serve.gateway.pool`.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import shutil
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import uvicorn
from torch import Tensor

from glm5.model.glm5 import GLM5
from glm5.model.weights import disk_tensors, save_model
from glm5.posttrain.pushing import Sums, require_arrived, require_same, rounded, tensors_of
from glm5.posttrain.spread import Spread
from glm5.serve.client import Backend, PauseMode, Stats, Unavailable, WeightUpdate
from glm5.serve.config import EngineConfig
from glm5.serve.engine import Engine
from glm5.serve.gateway.app import GatewayOptions, create_gateway
from glm5.serve.gateway.pool import EnginePool
from glm5.serve.gateway.remote import HttpEngine
from glm5.serve.gateway.router import Router
from glm5.serve.runner import Runner
from glm5.serve.weights import checksums_of
from glm5.text.tokenizer import Tokenizer
from glm5.utils.ending import bounded, ended
from glm5.utils.errors import CheckpointError, UserError
from glm5.utils.listening import listen

log = logging.getLogger(__name__)

T = TypeVar("T")
InFlight = Literal["renew", "keep"]
NAME = "policy"  # what agents call the model
PROBE_S = 10.0  # in which an engine must answer to take part in a push: it may be in a long step
BEAT_S = 1.0  # while somebody waits for the event loop
LOOK_S = 0.02  # how often it is looked whether engines work
STILL_S = 60.0  # for which the event loop may stand still without a word
INFO_S = 10.0  # in which an engine must say how it is
START_S = 300.0  # an engine that is not there after so long will not come
GRACE_S = 5  # for requests that are under way at the end
STOP_S = 60.0  # for each that ends
LAST_S = 600.0  # more than all that is waited for at the end, each for STOP_S at most


class Engines:
    """See the module. Use it in a `with` block; the methods are called from outside of the event loop.

    Args:
        engines: by name, all of one model. Those with a `start` and `stop` are started and stopped.
        in_flight: what becomes of the cache entries of requests that run during a push.
        served: the model of the one engine in this process, which copies weights where they lie.
        directory: where weights are put for engines that read them from disk (`remote`).
        spread: sends weights to engines behind HTTP over a process group, instead.
        dtype: of the engines' weights, to which those that are pushed are rounded.
        host: address that the gateway listens on. key: that the gateway asks for.
        patience_s: how long a push waits where no engine is left that can take it, since some may come back.
    """

    def __init__(
        self,
        engines: Mapping[str, Backend],
        *,
        in_flight: InFlight = "renew",
        served: GLM5 | None = None,
        directory: Path | None = None,
        spread: Spread | None = None,
        dtype: torch.dtype = torch.float32,
        beat_s: float = 2.0,
        host: str = "127.0.0.1",
        key: str | None = None,
        patience_s: float = 0.0,
    ) -> None:
        self._engines, self._pause = dict(engines), _PAUSES[in_flight]
        self._host, self._patience_s, self.key = host, patience_s, key
        self._last: WeightUpdate | None = None  # that engines which begin anew can read
        self._pushing = asyncio.Lock()
        self._served, self._directory, self._spread, self._dtype = served, directory, spread, dtype
        self.pool = EnginePool(self._engines, Router("0", silent_s=10 * beat_s), beat_s=beat_s)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="engines", daemon=True)
        self._looked = self._busy = 0
        self._heard = threading.Event()  # set where the event loop has come to what it was asked at `_asked`
        self._heard.set()
        self._asked, self._said = 0.0, False
        self._before = Stats()
        self._servers: list[tuple[uvicorn.Server, asyncio.Task[None]]] = []
        self._watching: list[asyncio.Task[None]] = []
        self.url = ""
        self.seconds = 0.0
        self.beat: Callable[[], None] = lambda: None

    # ------------------------------------------------------------------ which
    @classmethod
    def local(
        cls,
        model: GLM5,
        tokenizer: Tokenizer,
        config: EngineConfig,
        *,
        dtype: torch.dtype = torch.float32,
        **about: Any,
    ) -> Engines:
        """One engine in this process, with its own copy of the weights."""
        served = copy.deepcopy(model).eval().requires_grad_(False).to(dtype)
        runner = Runner(Engine(served, config, tokenizer), tokenizer, NAME)
        return cls({"local": runner}, served=served, dtype=dtype, **about)

    @classmethod
    def remote(
        cls,
        urls: Sequence[str] | Mapping[str, str],
        tokenizer: Tokenizer,
        context: int,
        directory: Path | None,
        *,
        api_key: str | None = None,
        **about: Any,
    ) -> Engines:
        """Engines behind HTTP that can read `directory`, or take part in `spread`; a mapping gives them names."""
        named = urls if isinstance(urls, Mapping) else {url: url for url in urls}
        made = {name: HttpEngine(url, tokenizer, NAME, context, api_key=api_key) for name, url in named.items()}
        return cls(made, directory=directory, **about)

    # ------------------------------------------------------------------ their life
    def __enter__(self) -> Engines:
        self._thread.start()
        try:
            self.call(self._start())
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.end(self._stop(), "the engines")
        finally:
            self._end()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(0 if self._stands() else STOP_S)  # of a loop that stands still no end is to be had
        if self._thread.is_alive():
            log.warning("the event loop of the engines does not end, and is left")
        else:
            self._loop.close()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Do something in the event loop, and wait for it; whoever may take us for dead hears a `beat` meanwhile, and
        who holds the loop up is named."""
        waited = self.spawn(work)
        while not wait({waited}, BEAT_S).done:
            self.beat()
            self._stands()
        return waited.result()

    def spawn(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Do something in the event loop, meanwhile."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def end(self, work: Coroutine[Any, Any, None], who: str) -> None:
        """`call` at the end of a run: whoever hangs is named, and left after `LAST_S`, or if the loop stands."""
        ending, began = self.spawn(work), time.monotonic()
        while time.monotonic() - began < LAST_S and not self._stands():
            if wait({ending}, min(BEAT_S, LAST_S)).done:
                return ending.result()
        ending.cancel()
        log.warning("%s did not end: something holds the event loop up", who)

    def _stands(self) -> bool:
        """Whether the event loop has stood still for `STILL_S`; a warning says once in which line. Ask now and then."""
        now = time.monotonic()
        if self._heard.is_set():
            self._heard.clear()
            self._asked, self._said = now, False
            self._loop.call_soon_threadsafe(self._heard.set)
        if now - self._asked <= STILL_S:
            return False
        if not self._said and (frame := sys._current_frames().get(self._thread.ident or 0)):
            self._said = True
            where = f"{frame.f_code.co_filename}, line {frame.f_lineno}, {frame.f_code.co_name}"
            mend = "an `async def` that blocks holds up all rollouts: make it a plain `def`, which runs in a thread"
            log.warning("nothing has gone on for %g s in %s; %s", STILL_S, where, mend)
        return True

    async def _start(self) -> None:
        for engine in self._engines.values():
            if isinstance(engine, Runner | HttpEngine):
                await engine.start()
        deadline = time.monotonic() + START_S
        while not all([await engine.probe(10.0) for engine in self._engines.values()]):
            if time.monotonic() > deadline:
                raise UserError(f"not every engine of {', '.join(self._engines)} answers", "Look at what they say")
            await asyncio.sleep(0.5)
        # The first push gives them their version; until then all may be asked.
        self.pool.router.set_version(next(iter(self._engines.values())).weight_version)
        options = GatewayOptions(api_key=self.key)
        of = self.pool
        app = create_gateway(of, options, start=of.start, stop=of.stop, forget=of.router.forget)
        self.url = await self.serve(app, self._host)
        self._watching = [asyncio.ensure_future(self._look()), asyncio.ensure_future(self._mend())]

    async def serve(self, app: Any, host: str = "127.0.0.1", port: int = 0) -> str:
        """Serve an application in the event loop until the end; its address.

        Raises:
            UserError: the address cannot be listened on.
        """
        listening = listen(host, port)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", ws="none", timeout_graceful_shutdown=GRACE_S))
        serving = asyncio.ensure_future(server.serve([listening]))
        while not server.started:
            if serving.done():
                await serving
            await asyncio.sleep(0.01)
        self._servers.append((server, serving))
        return f"http://{host}:{listening.getsockname()[1]}"

    async def _stop(self) -> None:
        await bounded(self.pool.abort(None), f"what runs at {', '.join(self._engines)}", STOP_S)
        await ended(self._watching, "who looks after the engines")
        for server, _ in self._servers:
            server.should_exit = True
        serving = asyncio.gather(*(serving for _, serving in self._servers), return_exceptions=True)
        await bounded(serving, "the gateway", STOP_S)
        if self._spread is not None:
            await bounded(self._spread.leave(), "the group that weights are spread over", STOP_S)
        for name, engine in self._engines.items():
            if isinstance(engine, Runner | HttpEngine):
                await bounded(engine.stop(), f"engine {name}", STOP_S)

    def check(self) -> None:
        """Raises UserError where the engine in this process has ended: none will come in its place, as one behind HTTP
        may. Warns where the event loop stands still, and says in which line."""
        self._stands()
        if self._served is not None and self.pool.failure is not None:
            raise UserError(f"the engine has ended: {self.pool.failure}", "Mend that; the same command goes on")

    # ------------------------------------------------------------------ weights
    def push(self, model: GLM5, version: int) -> None:
        """Give all engines the model's weights. What runs goes on.

        Raises:
            CheckpointError: an engine's checksums are not those of what was sent.
            UserError: no engine took them.
        """
        began = time.perf_counter()
        if self._served is not None:
            self.call(self._copy(self._served, dict(disk_tensors(model)), version))
        else:
            self._send(rounded(model, self._dtype), version)
        self.seconds += time.perf_counter() - began

    async def _copy(self, served: GLM5, tensors: Mapping[str, Tensor], version: int) -> None:
        """The engine in this process copies what the learner, who waits, has. No step is made until it is compared."""
        ((name, runner),) = self._engines.items()
        assert isinstance(runner, Runner), "it is in this process"
        async with self._pushing:
            try:
                await runner.pause(self._pause)
                await runner.update_weights(WeightUpdate("distributed", weight_version=str(version)), tensors)
                await runner.call(lambda: require_same(dict(disk_tensors(served)), tensors, version))
                await self.pool.confirm(str(version))
                await runner.resume()
            except Unavailable as error:
                raise _nobody(version, error) from None
            except CheckpointError:  # it rests, and nobody is sent there
                self.pool.router.lost(name)
                raise

    def _send(self, model: GLM5, version: int) -> None:
        """To engines behind HTTP, which tell the checksums of what they have."""
        update: WeightUpdate | Mapping[str, Tensor]
        if self._directory is None:
            update = tensors_of(model)
            sums = checksums_of(update.items())
        else:
            path = self._directory / f"version-{version:08}"
            save_model(model, path, overwrite=True)
            update = WeightUpdate("disk", path=str(path.absolute()), weight_version=str(version))
            sums = checksums_of(disk_tensors(model))
        self.call(self._push(update, version))
        require_arrived(self.call(self._checksum(version)), sums, version)
        if self._directory is not None:
            for old in self._directory.glob("version-*"):
                if old != path:
                    shutil.rmtree(old, ignore_errors=True)

    async def _push(self, update: WeightUpdate | Mapping[str, Tensor], version: int) -> None:
        """What is to be spread becomes an update here: no engine is being mended with what was there before."""
        async with self._pushing:
            if not isinstance(update, WeightUpdate):
                assert self._spread is not None
                update = self._spread.update(update, str(version))
            self._last = update
            await self._give(self.pool, list(self._engines.values()), update)

    async def _give(self, backend: Backend, engines: Sequence[Backend], update: WeightUpdate) -> None:
        """New weights to these engines, which are one backend."""
        if self._spread is None:
            return await self._renew(backend, update)
        asked = [e for e in engines if isinstance(e, HttpEngine) and e.failure is None]
        answers = await asyncio.gather(*(e.probe(max(self.pool.beat_s, PROBE_S)) for e in asked))
        there = [engine for engine, here in zip(asked, answers, strict=True) if here]
        try:
            update = replace(update, group_name=await self._spread.meet(there))
        except Unavailable as error:
            log.warning("%s", error)  # whoever is there hears of it in the next line
        both = self._renew(backend, update), self._spread.send()
        for told in await asyncio.gather(*both, return_exceptions=True):  # neither is left alone
            if isinstance(told, BaseException):
                raise told

    async def _checksum(self, version: int) -> Sums:
        """Of an engine that has confirmed the version, waited for if there may be one."""
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                return await self.pool.checksum()
            except Unavailable as error:
                if time.monotonic() >= deadline:
                    raise _nobody(version, error) from None
            await asyncio.sleep(0.1)

    async def _renew(self, backend: Backend, update: WeightUpdate) -> None:
        await backend.pause(self._pause)
        try:
            await backend.update_weights(update)
        finally:
            await backend.resume()

    # ------------------------------------------------------------------ engines that come and go
    async def moved(self, name: str, url: str | None) -> None:
        """An engine behind HTTP was lost (None), or has begun anew, at this address."""
        engine = self._engines[name]
        assert isinstance(engine, HttpEngine), "others live in this process"
        if url == engine.url and engine.failure is None:
            return
        self.pool.router.lost(name)
        if url is None:
            await engine.leave("it was lost")
        else:
            await engine.move(url)

    async def _mend(self) -> None:
        """Bring engines that began anew, or missed a push, to the current weights; then the pool lets them in."""
        while True:
            await asyncio.sleep(self.pool.beat_s)
            for engine in self._engines.values():
                async with self._pushing:
                    update = self._last
                    if update is None or engine.failure or engine.weight_version in ("", update.weight_version):
                        continue
                    try:
                        if await engine.probe(self.pool.beat_s):
                            await self._give(engine, [engine], update)
                    except Exception as error:  # whatever it is, the others are still to be mended
                        log.warning("an engine did not take weights %s: %s", update.weight_version, error)

    # ------------------------------------------------------------------ figures
    async def _look(self) -> None:
        while True:
            self._looked += 1
            self._busy += self.pool.stats().running > 0
            await asyncio.sleep(LOOK_S)

    def figures(self) -> dict[str, float]:
        """What happened since the last time this was asked, under practitioners' names."""
        return self.call(self._figures())

    async def _figures(self) -> dict[str, float]:
        now, before = self.pool.stats(), self._before
        infos = [info for engine in self._engines.values() if (info := await _info(engine))]
        found = {
            "engine/idle": 1 - self._busy / max(1, self._looked),
            "engine/routable": float(len(self.pool.router.routable(self.pool.clock()))),
            "engine/count": float(len(self._engines)),
            "engine/running": float(now.running),
            "engine/moves": float(self.pool.router.moves),
            "time/weight_sync": self.seconds,
        }
        if asked := now.prefix_queries - before.prefix_queries:
            found["engine/prefix_hit_rate"] = (now.prefix_hits - before.prefix_hits) / asked
        if lengths := [info["accept_length"] for info in infos if info.get("accept_length")]:
            found["engine/spec_accept_length"] = sum(lengths) / len(lengths)
        self._before, self._looked, self._busy, self.seconds = now, 0, 0, 0.0
        return found


def _nobody(version: int, error: Unavailable) -> UserError:
    return UserError(f"no engine confirmed weights {version}: {error}", "Look at what they say")


async def _info(engine: Backend) -> dict[str, Any]:
    """What an engine says of itself; nothing of one that was lost."""
    try:
        return await asyncio.wait_for(engine.info(), INFO_S)
    except (Unavailable, TimeoutError):
        return {}


_PAUSES: dict[InFlight, PauseMode] = {"renew": "retract", "keep": "keep"}
