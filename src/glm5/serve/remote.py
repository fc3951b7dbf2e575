"""A backend in another process: `serve_backend` speaks for it there, `Remote` is it here.

Every method of `Backend` is a message that is answered; the deltas of a request come as messages of their own. What a
backend is now (`Now`) is told every `TOLD_EVERY_S`, which is also its sign of life: a process that is silent for
`SILENT_S` is given up. Read next: `fleet`, `worker`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

from glm5.serve.client import Stats, Unavailable, WeightGroup, WeightUpdate
from glm5.serve.request import Delta, Request
from glm5.serve.runner import Runner
from glm5.serve.wire import Wire, WireClosed, as_type
from glm5.utils.errors import UserError

log = logging.getLogger(__name__)
TOLD_EVERY_S = 0.2
SILENT_S = 20.0


@dataclass(frozen=True)
class Hello:
    """How a worker introduces itself. `address`: where its pages are fetched, and `port`, if not empty, where from
    other hosts: ":" and a port of the front's host. `page`: bytes of one."""

    role: str
    name: str
    address: str
    context: int
    vocab_size: int
    pages: int
    page: int
    weight_version: str = "0"
    port: str = ""


@dataclass(frozen=True)
class Now:
    """What a worker is now."""

    stats: Stats
    weight_version: str
    failure: str | None


# What each call takes, and which call it is.
CALLS: dict[str, tuple[Any, Callable[[Runner, Any], Any]]] = {
    "check": (Request, lambda b, request: b.check(request)),
    "abort": (str | None, lambda b, rid: b.abort(rid)),
    "pause": (str, lambda b, mode: b.pause(mode)),
    "resume": (None, lambda b, _: b.resume()),
    "flush": (None, lambda b, _: b.flush()),
    "update_weights": (WeightUpdate, lambda b, update: b.update_weights(update)),
    "join_group": (WeightGroup, lambda b, group: b.join_group(group)),
    "leave_group": (str, lambda b, name: b.leave_group(name)),
    "checksum": (None, lambda b, _: b.checksum()),
    "release_memory": (tuple[str, ...], lambda b, tags: b.release_memory(tags)),
    "may_release": (None, lambda b, _: b.may_release()),
    "resume_memory": (tuple[str, ...], lambda b, tags: b.take_memory(tags)),
    "probe": (float, lambda b, timeout_s: b.probe(timeout_s)),
    "info": (None, lambda b, _: b.info()),
    "return_lease": (str, lambda b, name: b.return_lease(name)),
}


async def serve_backend(backend: Runner, wire: Wire) -> None:
    """Answer calls until the other side is gone."""
    tasks: set[asyncio.Task[None]] = set()
    requests: dict[int, asyncio.Task[None]] = {}  # by the number of the call

    def now() -> Now:
        return Now(backend.stats(), backend.weight_version, backend.failure)

    async def tell() -> None:
        while True:
            wire.post("now", now())
            await asyncio.sleep(TOLD_EVERY_S)

    async def answer(number: int, name: str, given: Any) -> None:
        try:
            if name == "generate":
                stream = await backend.generate(as_type(given, Request))
                async with aclosing(stream):
                    wire.post("result", number, None)
                    async for delta in stream:
                        await wire.send("delta", number, delta)
            elif name not in CALLS:
                raise WireClosed(f"there is no call {name[:40]}")
            else:
                kind, method = CALLS[name]
                result = await method(backend, None if kind is None else as_type(given, kind))
                wire.post("now", now())
                await wire.send("result", number, result)
        except UserError as error:
            wire.post("refused", number, error.what, error.mend)
        except (Unavailable, WireClosed) as error:
            wire.post("failed", number, str(error))
        except Exception as error:
            log.exception("%s failed", name)
            wire.post("failed", number, f"{type(error).__name__}: {error}")

    def start(work: Any) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task

    start(tell())
    try:
        while True:
            match await wire.receive():
                case ["call", int(number), "generate", given]:
                    requests[number] = start(answer(number, "generate", given))
                    requests[number].add_done_callback(partial(_forget, requests, number))
                case ["call", int(number), str(name), given]:
                    start(answer(number, name, given))
                case ["leave", int(number)]:
                    if number in requests:
                        requests[number].cancel()
                case other:
                    raise WireClosed(f"unknown message {str(other)[:100]}")
    except WireClosed:
        pass
    finally:
        for task in list(tasks):
            task.cancel()


def _forget(requests: dict[int, asyncio.Task[None]], number: int, _: asyncio.Task[None]) -> None:
    del requests[number]


class Remote:
    """A worker, seen from the front.

    Attributes:
        hello: what it is. lost: why it will never answer again, or None. outstanding: tokens of prompts under way.
    """

    def __init__(self, wire: Wire, hello: Hello) -> None:
        self.hello, self.outstanding = hello, 0
        self.lost: str | None = None
        self.weight_version = hello.weight_version
        self._stats = Stats()
        self._wire = wire
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._streams: dict[int, asyncio.Queue[Delta | None]] = {}
        self._heard = time.monotonic()

    def stats(self) -> Stats:
        """As it was told last."""
        return self._stats

    async def listen(self) -> None:
        """Take what it says, until it is gone."""
        watch = asyncio.ensure_future(self._watch())
        try:
            while True:
                message = await self._wire.receive()
                self._heard = time.monotonic()
                self._take(message)
        except WireClosed as error:
            self._lose(self.lost or f"the {self.hello.role} worker {self.hello.name} is gone ({error})")
        finally:
            watch.cancel()
            await self._wire.close()

    async def close(self) -> None:
        """Let it go: it sees the end of the connection."""
        await self._wire.close()

    async def _watch(self) -> None:
        while time.monotonic() - self._heard < SILENT_S:
            await asyncio.sleep(SILENT_S / 10)
        self._lose(f"the {self.hello.role} worker {self.hello.name} was silent for {SILENT_S:g} s")
        await self._wire.close()

    def _take(self, message: list[Any]) -> None:
        match message:
            case ["delta", int(number), given]:
                if number in self._streams:
                    self._streams[number].put_nowait(as_type(given, Delta))
            case ["now", given]:
                now = as_type(given, Now)
                self._stats, self.weight_version = now.stats, now.weight_version
                if now.failure is not None:
                    self._lose(now.failure)
            case ["result", int(number), result]:
                self._settle(number, result, None)
            case ["refused", int(number), str(what), str(mend)]:
                self._settle(number, None, UserError(what, mend))
            case ["failed", int(number), str(why)]:
                if number in self._streams and number not in self._calls:
                    self._streams[number].put_nowait(None)  # in the middle of an answer
                self._settle(number, None, Unavailable(why))
            case other:
                raise WireClosed(f"unknown message {str(other)[:100]}")

    def _settle(self, number: int, result: Any, error: Exception | None) -> None:
        done = self._calls.pop(number, None)
        if done is None or done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)

    def _lose(self, why: str) -> None:
        self.lost = self.lost or why
        for number in list(self._calls):
            self._settle(number, None, Unavailable(self.lost))
        for inbox in self._streams.values():
            inbox.put_nowait(None)

    async def call(self, name: str, given: Any = None) -> Any:
        """Carry out a method there.

        Raises:
            UserError: as the method. Unavailable: the worker is lost, or cannot work now.
        """
        return await self._ask(next(self._numbers), name, given)

    async def _ask(self, number: int, name: str, given: Any) -> Any:
        if self.lost is not None:
            raise Unavailable(self.lost)
        done = self._calls[number] = asyncio.get_running_loop().create_future()
        self._wire.post("call", number, name, given)
        try:
            return await done
        finally:
            self._calls.pop(number, None)

    async def generate(self, request: Request) -> RemoteStream:
        """As `Backend.generate`."""
        inbox: asyncio.Queue[Delta | None] = asyncio.Queue()
        number = next(self._numbers)
        self._streams[number] = inbox
        stream = RemoteStream(self, number, request.params.n, inbox)
        try:
            await self._ask(number, "generate", request)
        except BaseException:
            await stream.aclose()
            raise
        return stream

    def leave(self, number: int) -> None:
        """Nobody reads this request's answers any more."""
        self._streams.pop(number, None)
        if self.lost is None:
            self._wire.post("leave", number)


class RemoteStream:
    """The `Stream` of a `Remote`. Raises Unavailable when the worker is lost."""

    def __init__(self, remote: Remote, number: int, answers: int, inbox: asyncio.Queue[Delta | None]) -> None:
        self._remote, self._number, self._left, self._inbox = remote, number, answers, inbox
        self._closed = False

    def __aiter__(self) -> RemoteStream:
        return self

    async def __anext__(self) -> Delta:
        if self._left == 0 or self._closed:
            await self.aclose()
            raise StopAsyncIteration
        delta = await self._inbox.get()
        if delta is None:
            raise Unavailable(self._remote.lost or "the worker is lost")
        self._left -= delta.finish is not None
        return delta

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            self._remote.leave(self._number)
