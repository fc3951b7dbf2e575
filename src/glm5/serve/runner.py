"""Runs an engine in a thread of its own and speaks asyncio to the server: the in-process `Backend`.

The thread alone touches the engine. What the server wants arrives as commands in one queue, carried out between two
steps, or, with an engine that overlaps, while one runs. What a step yields goes back to the event loop in one call,
when the next one has begun. Two things take long and need nothing of a step, so they have threads of their own: to
compile a constraint, for which its request waits alone, and to wait for a process group and for what it sends. An
engine that raises `RequestFailed` loses those requests; any other exception ends them all, and `failure` says why. Read
next: `http.app`.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from glm5.serve.client import PauseMode, Stats, Unavailable, WeightGroup, WeightUpdate
from glm5.serve.request import Delta, Finish, Request, SamplingParams
from glm5.text.tokenizer import Tokenizer
from glm5.utils.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
log = logging.getLogger(__name__)
COMPILERS = 2  # constraints that are compiled at a time
MOST_COMPILING = 64  # requests that wait for that; more are refused


class RequestFailed(Exception):
    """Raised by an engine's step: these requests cannot go on, the engine can. Their pages are given back."""

    def __init__(self, rids: Sequence[str], message: str) -> None:
        self.rids = tuple(rids)
        super().__init__(message)


class Engine(Protocol):
    """What the runner drives. Every method is called from its thread, but for four that may wait: `prepare`,
    `receive_weights`, `join_group` and `leave_group` have a thread of their own for each call.

    `abort` ends a request without a word: the runner itself tells the waiting side. `pause` with mode keep or retract
    prepares for a time without steps. Either `step` is called, or, where `overlap` says so, `advance` and `settle`,
    with the other methods in between, also while a step runs (`flying`).
    """

    vocab_size: int
    context: int
    weight_version: str

    @property
    def overlap(self) -> bool: ...
    @property
    def resting(self) -> str | None: ...
    @property
    def has_work(self) -> bool: ...
    @property
    def flying(self) -> bool: ...
    def prepare(self, request: Request) -> None: ...
    def check(self, request: Request) -> int: ...
    def return_lease(self, name: str) -> None: ...
    def add(self, request: Request) -> None: ...
    def abort(self, rid: str) -> None: ...
    def step(self) -> list[Delta]: ...
    def advance(self, landed: Callable[[], None] | None = None) -> list[Delta]: ...
    def settle(self) -> list[Delta]: ...
    def pause(self, mode: PauseMode) -> None: ...
    def resume(self) -> None: ...
    def flush_cache(self) -> bool: ...
    def receive_weights(self, update: WeightUpdate) -> dict[str, Tensor]: ...
    def update_weights(self, update: WeightUpdate, received: Mapping[str, Tensor] | None = None) -> None: ...
    def join_group(self, group: WeightGroup) -> None: ...
    def leave_group(self, group_name: str) -> None: ...
    def checksum(self) -> dict[str, str]: ...
    def release_memory(self, tags: tuple[str, ...]) -> None: ...
    def may_release(self) -> None: ...
    def resume_memory(self, tags: tuple[str, ...]) -> tuple[str, ...]: ...
    def stats(self) -> Stats: ...
    def info(self) -> dict[str, Any]: ...


def nothing_more(last: Delta, finish: Finish) -> Delta:
    """The end of an answer whose last delta is known, and which gets no ids any more."""
    return replace(last, ids=(), info=(), prompt_info=(), finish=finish, drafted=0, accepted=0, routed=b"")


class Answers:
    """The deltas of one request as they come: the `Stream` of a `Runner`."""

    def __init__(self, inbox: asyncio.Queue[Delta], n: int, leave: Callable[[bool], None]) -> None:
        self._inbox, self._left, self._leave = inbox, n, leave
        self._closed = False

    def __aiter__(self) -> Answers:
        return self

    async def __anext__(self) -> Delta:
        if self._left == 0 or self._closed:
            await self.aclose()
            raise StopAsyncIteration
        delta = await self._inbox.get()
        self._left -= delta.finish is not None
        return delta

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            self._leave(self._left > 0)


def _blanks(request: Request, version: str) -> dict[int, Delta]:
    """For each answer what is known of it before its first delta."""
    blank = Delta(request.rid, 0, (), prompt_tokens=len(request.input_ids), weight_version=version)
    return {i: replace(blank, index=i) for i in range(request.params.n)}


@dataclass
class _Open:
    """A request that has not ended: where its deltas go, and the last one of each answer that goes on."""

    inbox: asyncio.Queue[Delta]
    last: dict[int, Delta]


class Runner:
    """An engine as a `Backend`. Begin with `start`, end with `stop`.

    Args:
        engine: nobody else may touch it from now on.
        tokenizer, model_name: of its model.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, model_name: str) -> None:
        self.tokenizer, self.model_name = tokenizer, model_name
        self.context, self.vocab_size = engine.context, engine.vocab_size
        self._engine = engine
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failure: str | None = "the engine has not started"
        self._names: set[str] = set()  # of the event loop's side: requests that somebody reads
        self._compilers = asyncio.Semaphore(COMPILERS)
        self._compiling = 0
        self._preparing: dict[str, bool] = {}  # by name, requests that are not the engine's yet: whether to end them
        self._updating = asyncio.Lock()
        # Of the thread's side: what has not ended, and what a `wait` pause holds back.
        self._open: dict[str, _Open] = {}
        self._held: list[Request] = []
        self._paused: PauseMode | None = None
        self._steps = 0
        self._stats = engine.stats()

    # ------------------------------------------------------------------------------------- the event loop's side
    async def start(self) -> None:
        """Start the thread. Call it once, in the event loop that will use the runner."""
        self._loop = asyncio.get_running_loop()
        self._failure = None
        self._thread.start()

    async def stop(self) -> None:
        """End all requests and the thread; returns when the step that runs has ended."""
        if self._thread.is_alive():
            self._failure = self._failure or "the server is stopping"
            self._commands.put(None)
            while self._thread.is_alive():  # and no thread that waits for it, for which the process would wait
                await asyncio.sleep(0.01)

    @property
    def failure(self) -> str | None:
        return self._failure

    @property
    def paused(self) -> bool:
        return self._paused is not None

    @property
    def weight_version(self) -> str:
        return self._engine.weight_version

    def stats(self) -> Stats:
        return replace(self._stats, steps=self._steps)

    async def info(self) -> dict[str, Any]:
        return await self.call(self._engine.info)

    async def generate(self, request: Request) -> Answers:
        if request.rid in self._names:
            raise UserError(f"rid={request.rid!r} is in use by a running request", "Choose another, or leave it out")
        self._names.add(request.rid)
        inbox: asyncio.Queue[Delta] = asyncio.Queue()
        self._preparing[request.rid] = False
        try:
            await self._prepare(request)
            if self._preparing[request.rid]:
                for delta in _blanks(request, self.weight_version).values():
                    inbox.put_nowait(nothing_more(delta, Finish("abort")))
            else:
                await self.call(lambda: self._add(request, inbox))
        except BaseException:
            self._names.discard(request.rid)
            # Cancelled while the command was under way: it may have been carried out.
            self._commands.put(lambda: self._close(request.rid))
            raise
        finally:
            del self._preparing[request.rid]
        return Answers(inbox, request.params.n, lambda unfinished: self._leave(request.rid, unfinished))

    def _leave(self, rid: str, unfinished: bool) -> None:
        self._names.discard(rid)
        if unfinished:
            self._commands.put(lambda: self._close(rid))

    async def abort(self, rid: str | None) -> None:
        for one in self._preparing:
            self._preparing[one] |= rid in (None, one)
        await self.call(lambda: self._abort(rid))

    async def pause(self, mode: PauseMode) -> None:
        if mode == "wait":
            await self.call(lambda: self._pause("wait"))
            while self._running_count() and self._paused == "wait":
                await asyncio.sleep(0.01)
            await self.call(self._all_ended)
        else:
            await self.call(lambda: self._pause(mode))

    async def resume(self) -> None:
        await self.call(self._resume)

    async def flush(self) -> bool:
        return await self.call(self._engine.flush_cache)

    async def update_weights(self, update: WeightUpdate, received: Mapping[str, Tensor] | None = None) -> None:
        """As `Backend.update_weights`. What a group sends arrives while steps go on, and counts from one step to the
        next; updates are made in the order in which they are asked for.

        Args:
            received: the tensors, where they are in this process. They are copied, and may not change meanwhile.
        """
        async with self._updating:
            if update.source == "distributed" and received is None:
                received = await self._aside(lambda: self._engine.receive_weights(update))
            await self.call(lambda: self._engine.update_weights(update, received))

    async def join_group(self, group: WeightGroup) -> None:
        await self._aside(lambda: self._engine.join_group(group))

    async def leave_group(self, group_name: str) -> None:
        await self._aside(lambda: self._engine.leave_group(group_name))

    async def checksum(self) -> dict[str, str]:
        return await self.call(self._engine.checksum)

    async def release_memory(self, tags: tuple[str, ...]) -> None:
        await self.call(lambda: self._engine.release_memory(tags))

    async def may_release(self) -> None:
        """See `Engine.may_release`."""
        await self.call(self._engine.may_release)

    async def resume_memory(self, tags: tuple[str, ...]) -> None:
        await self.take_memory(tags)

    async def take_memory(self, tags: tuple[str, ...]) -> tuple[str, ...]:
        """As `resume_memory`; what was taken."""
        return await self.call(lambda: self._engine.resume_memory(tags))

    async def check(self, request: Request) -> int:
        """See `Engine.check`."""
        await self._prepare(request)
        return await self.call(lambda: self._engine.check(request))

    async def return_lease(self, name: str) -> None:
        """See `Engine.return_lease`."""
        await self.call(lambda: self._engine.return_lease(name))

    async def probe(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                if self.paused or self._engine.resting is not None:
                    await self.call(lambda: None)
                    return True
                before = self._steps
                if self._running_count() == 0:
                    rid = f"probe-{uuid.uuid4().hex}"
                    request = Request((0,), SamplingParams(max_new_tokens=1, temperature=0, ignore_eos=True), rid)
                    async for delta in await self.generate(request):
                        if delta.finish and delta.finish.type == "error":
                            return False
                while self._steps == before and not self.paused:
                    await asyncio.sleep(0.005)
                return True
        except (TimeoutError, Unavailable):
            return False

    def _running_count(self) -> int:
        return len(self._open) - len(self._held)

    async def _prepare(self, request: Request) -> None:
        """Compile the constraint of a request, if it has one."""
        if request.params.constraint is None:
            return
        if self._compiling >= MOST_COMPILING:
            raise Unavailable(f"{self._compiling} requests wait for their constraints to be compiled. Try again later")
        self._compiling += 1
        try:
            async with self._compilers:
                await self._aside(lambda: self._engine.prepare(request))
        finally:
            self._compiling -= 1

    async def _aside(self, work: Callable[[], T]) -> T:
        """Carry out `work` in a thread of its own, whatever the engine does; its exception is raised here."""
        result, run = self._asked(work)
        threading.Thread(target=run, name="aside", daemon=True).start()
        return await self._result(result)

    async def call(self, work: Callable[[], T]) -> T:
        """Carry out `work` in the engine's thread between two steps; its exception is raised here."""

        def counted() -> T:
            try:
                return work()
            finally:
                self._stats = self._engine.stats()  # whoever asks next is told what this has changed

        result, run = self._asked(counted)
        self._commands.put(run)
        return await self._result(result)

    def _asked(self, work: Callable[[], T]) -> tuple[asyncio.Future[T], Callable[[], None]]:
        """Where the result of `work` will be, and what carries it out, in any thread."""
        if self._failure:
            raise Unavailable(self._failure)
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def settle(result: T | None, error: BaseException | None) -> None:
            if done.done():  # whoever asked has gone
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)  # type: ignore[arg-type]

        def run() -> None:
            try:
                result, error = work(), None
            except Exception as caught:
                result, error = None, caught
            with suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(settle, result, error)

        return done, run

    async def _result(self, done: asyncio.Future[T]) -> T:
        while True:  # a command behind a fatal error is never carried out
            finished, _ = await asyncio.wait({done}, timeout=1.0)
            if finished:
                return done.result()
            if not self._thread.is_alive():
                raise Unavailable(self._failure or "the engine's thread has ended")

    def _deliver(self, deltas: list[tuple[asyncio.Queue[Delta], Delta]]) -> None:
        for inbox, delta in deltas:
            inbox.put_nowait(delta)

    # ------------------------------------------------------------------------------------------ the thread's side
    def _run(self) -> None:
        try:
            while self._obey():
                if self._may_step():
                    self._step()
                self._stats = self._engine.stats()
        except Exception as error:
            log.exception("the engine failed")
            self._failure = f"the engine failed: {type(error).__name__}: {error}"
        with suppress(Exception):  # which would be told already
            self._engine.settle()
        self._end(list(self._open), Finish("error", message=self._failure or "the server is stopping"))

    def _may_step(self) -> bool:
        return self._paused in (None, "wait") and self._engine.has_work and not self._engine.flying

    def _wake(self) -> None:
        """A step has run: `_obey` need not wait any more. From any thread."""
        self._commands.put(lambda: None)

    def _obey(self) -> bool:
        """Carry out every command that is there; with nothing else to do, wait for one. False ends the thread."""
        wait = not self._may_step()
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()
            wait = False

    def _step(self) -> None:
        try:
            deltas = self._engine.advance(self._wake) if self._engine.overlap else self._engine.step()
        except RequestFailed as error:
            for rid in error.rids:
                self._engine.abort(rid)
            self._end(list(error.rids), Finish("error", message=str(error)))
            return
        self._steps += 1
        self._tell(deltas)

    def _tell(self, deltas: list[Delta]) -> None:
        told = []
        for delta in deltas:
            one = self._open.get(delta.rid)
            if one is None:
                continue
            told.append((one.inbox, delta))
            if delta.finish is None:
                one.last[delta.index] = delta
            else:
                one.last.pop(delta.index, None)
                if not one.last:
                    del self._open[delta.rid]
        self._post(told)

    def _add(self, request: Request, inbox: asyncio.Queue[Delta]) -> None:
        if self._paused == "wait":
            self._held.append(request)
        else:
            self._engine.add(request)
        self._open[request.rid] = _Open(inbox, _blanks(request, self.weight_version))

    def _abort(self, rid: str | None) -> None:
        rids = list(self._open) if rid is None else [rid] if rid in self._open else []
        for one in rids:
            if not self._unhold(one):
                self._engine.abort(one)
        self._end(rids, Finish("abort"))

    def _close(self, rid: str) -> None:
        """Nobody reads this request's answers any more."""
        if self._open.pop(rid, None) is not None and not self._unhold(rid):
            self._engine.abort(rid)

    def _unhold(self, rid: str) -> bool:
        count = len(self._held)
        self._held = [r for r in self._held if r.rid != rid]
        return len(self._held) < count

    def _pause(self, mode: PauseMode) -> None:
        if mode == "abort":
            self._abort(None)
        if mode != "wait":
            self._engine.pause(mode)
            self._tell(self._engine.settle())
        self._paused = mode

    def _all_ended(self) -> None:
        """What a `wait` pause waited for has ended; unless it was resumed, or paused otherwise, meanwhile."""
        if self._paused == "wait":
            self._pause("keep")

    def _resume(self) -> None:
        if self._held and self._engine.resting is not None:  # it would take none of them; they stay
            raise Unavailable(self._engine.resting)
        if self._paused not in (None, "wait"):
            self._engine.resume()
        self._paused = None
        held, self._held = self._held, []
        for request in held:
            try:
                self._engine.add(request)
            except UserError as error:
                self._end([request.rid], Finish("error", message=str(error), refused=True))

    def _end(self, rids: list[str], finish: Finish) -> None:
        """Finish the open answers of these requests."""
        ended = [
            (one.inbox, nothing_more(last, finish))
            for one in [self._open.pop(rid) for rid in rids if rid in self._open]
            for last in one.last.values()
        ]
        self._post(ended)

    def _post(self, deltas: list[tuple[asyncio.Queue[Delta], Delta]]) -> None:
        if deltas and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, deltas)
