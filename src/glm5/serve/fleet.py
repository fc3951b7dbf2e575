"""Many workers as one backend: prefill workers read prompts, decode workers answer them. Needs no torch.

    check      a decode worker says whether the request can be served, and how much of the prompt it has already
    prefill    a prefill worker reads all but the last id and keeps the pages under a lease, if there is enough to read
    decode     the decode worker fetches the pages that it lacks from there (`transfer`), reads the last id and answers
    return     the lease is returned, whatever happened

The last id is read where the answer is drawn: a lease is pages and one hidden state, and nothing of the sampler moves.

When something fails:
- A prefill worker is lost while it reads: another one reads; if there is none, the decode worker reads all itself, and
  the log says so. Lost while its pages are fetched: the decode worker reads what is missing.
- A decode worker is lost: a request that was told nothing yet begins again with another one; one that was told ids ends
  with an error, since what it was told cannot be taken back.
- A client goes away, or a request is aborted: both workers are told at once, and free what it had.
- A worker that refused an update of the weights that others took is not asked any more until an update succeeds.
- The front is lost: the workers see the end of their connection and exit.

Source: report section 3 (prefill and decode apart, in the rollouts). Read next: `remote`, `transfer`, `worker`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any
from zlib import crc32

from glm5.serve.client import PauseMode, Stats, Unavailable, WeightGroup, WeightUpdate
from glm5.serve.pages import PAGE_SIZE
from glm5.serve.remote import Remote
from glm5.serve.request import Delta, Finish, PageSource, Request, SamplingParams
from glm5.serve.runner import Answers, nothing_more
from glm5.serve.wire import is_path
from glm5.text.tokenizer import Tokenizer
from glm5.utils.errors import UserError

log = logging.getLogger(__name__)
TRIES = 3  # of a request, on decode workers that get lost


class Fleet:
    """See the module. Its workers come with `join`.

    Args:
        tokenizer, model_name: of the model. direct_up_to: tokens of a prompt that a decode worker reads by itself.
    """

    def __init__(self, tokenizer: Tokenizer, model_name: str, *, direct_up_to: int = PAGE_SIZE) -> None:
        self.tokenizer, self.model_name, self._direct = tokenizer, model_name, direct_up_to
        self.context = self.vocab_size = 0
        self.prefill: list[Remote] = []
        self.decode: list[Remote] = []
        self._alive: dict[str, _Open] = {}
        self._behind: set[asyncio.Task[None]] = set()  # what is told to workers, and nobody waits for
        self._stale: set[Remote] = set()
        self._version = "0"
        self._paused: PauseMode | None = None
        self._memory = asyncio.Lock()
        self._may_begin = asyncio.Event()
        self._may_begin.set()

    def join(self, worker: Remote) -> None:
        """A worker is ready.

        Raises:
            UserError: it serves another model than those that are here.
        """
        hello, others = worker.hello, [*self.prefill, *self.decode]
        if others and hello.vocab_size != self.vocab_size:
            raise UserError(f"worker {hello.name}: another model", "Start all workers with the same one")
        if others and hello.context != self.context:
            told = "%s takes texts of %d tokens, the others of %d: the smaller counts for all"
            log.warning(told, hello.name, hello.context, self.context)
        if not self._ready(others):  # whoever comes to nobody says what runs
            self._version = hello.weight_version
        elif hello.weight_version != self.weight_version:
            log.warning("%s has weights %s, not %s: update them", hello.name, hello.weight_version, self.weight_version)
            self._stale.add(worker)
        self.context = min(hello.context, self.context) if others else hello.context
        self.vocab_size = hello.vocab_size
        (self.prefill if hello.role == "prefill" else self.decode).append(worker)

    # ------------------------------------------------------------------------------------------ what it is
    @property
    def failure(self) -> str | None:
        """Without a decode worker nothing can be answered."""
        if any(w.lost is None for w in self.decode):
            return None
        return self.decode[-1].lost if self.decode else "no decode worker has come yet"

    @property
    def paused(self) -> bool:
        return self._paused is not None

    @property
    def weight_version(self) -> str:
        return next((w.weight_version for w in self._ready(self.decode)), self._version)

    def stats(self) -> Stats:
        """Counts of all workers; requests are those of this front."""
        each = [w.stats() for w in self._here()]
        begun = sum(one.begun for one in self._alive.values())
        return Stats(
            running=begun,
            waiting=len(self._alive) - begun,
            cache_usage=max((s.cache_usage for s in each), default=0.0),
            free_tokens=sum(w.stats().free_tokens for w in self._ready(self.decode)),
            steps=sum(s.steps for s in each),
            preemptions=sum(s.preemptions for s in each),
            prefix_queries=sum(s.prefix_queries for s in each),
            prefix_hits=sum(s.prefix_hits for s in each),
        )

    async def info(self) -> dict[str, Any]:
        """Of each worker."""
        of = [(w, await w.call("info")) for w in self._here()]
        return {
            role: [{"name": w.hello.name, **info} for w, info in of if w.hello.role == role]
            for role in ("prefill", "decode")
        }

    async def probe(self, timeout_s: float) -> bool:
        """Whether every worker that is there answers."""
        try:
            async with asyncio.timeout(timeout_s):
                answers = await self._all("probe", timeout_s)
        except (TimeoutError, Unavailable):
            return False
        return self.failure is None and all(answers)

    def _here(self) -> list[Remote]:
        return [w for w in (*self.prefill, *self.decode) if w.lost is None]

    def _ready(self, workers: Iterable[Remote]) -> list[Remote]:
        return [w for w in workers if w.lost is None and w not in self._stale]

    def _pick(self, workers: list[Remote], request: Request) -> Remote | None:
        """The one with the least to do; among equals the same for prompts that begin alike, so that it knows them."""
        ready = self._ready(workers)
        if not ready:
            return None
        least = min(w.outstanding for w in ready)
        equals = [w for w in ready if w.outstanding == least]
        return equals[crc32(repr(list(request.input_ids[:PAGE_SIZE])).encode()) % len(equals)]

    # ------------------------------------------------------------------------------------------ requests
    async def generate(self, request: Request) -> Answers:
        """As `Backend.generate`."""
        if request.rid in self._alive:
            raise UserError(f"rid={request.rid!r} is in use by a running request", "Choose another, or leave it out")
        one = self._alive[request.rid] = _Open(request, self.weight_version, self._forget)
        try:
            await self._check(request)
        except BaseException:
            self._forget(one)
            raise
        if one.unwanted:
            one.end(Finish("abort"))
        else:
            one.task = asyncio.ensure_future(self._drive(one))
        return Answers(one.inbox, request.params.n, one.leave)

    async def _check(self, request: Request) -> None:
        why = ""
        for _ in range(TRIES):
            worker = self._decoder(request)
            try:
                await worker.call("check", request)
                return
            except Unavailable as error:  # it is gone, or says why it cannot work now
                why = str(error)
        raise Unavailable(self.failure or why)

    def _decoder(self, request: Request) -> Remote:
        worker = self._pick(self.decode, request)
        if worker is None:
            raise Unavailable(self.failure or f"the decode workers have not weights {self.weight_version}. Update them")
        return worker

    async def _drive(self, one: _Open) -> None:
        """From the queue to the last delta, or to the error that stands for it."""
        try:
            await self._may_begin.wait()
            one.entered = True
            for left in reversed(range(TRIES)):
                try:
                    await self._attempt(one)
                    return
                except Unavailable as error:
                    if one.told or not left:
                        one.end(Finish("error", message=str(error)))
                        return
                    log.warning("%s: begins again (%s)", one.request.rid, error)
        except asyncio.CancelledError:
            one.end(Finish("abort"))
        except Exception as error:
            log.exception("%s failed", one.request.rid)
            one.end(Finish("error", message=str(error)))
        finally:
            self._forget(one)

    def _forget(self, one: _Open) -> None:
        """It has ended, or was never begun. Its name may be another's by now."""
        if self._alive.get(one.request.rid) is one:
            del self._alive[one.request.rid]

    def _tell(self, work: Coroutine[Any, Any, Any]) -> None:
        """Carry out a call whose result nobody needs."""

        async def quietly() -> None:
            with suppress(Unavailable):
                await work

        task = asyncio.ensure_future(quietly())
        self._behind.add(task)
        task.add_done_callback(self._behind.discard)

    async def _attempt(self, one: _Open) -> None:
        request = one.request
        decoder = self._decoder(request)
        tokens = len(request.input_ids)
        decoder.outstanding += tokens
        lease: tuple[Remote, PageSource] | None = None
        try:
            known = await decoder.call("check", request)
            if tokens - 1 - known > self._direct and not request.params.reads_all:
                lease = await self._prefill(one, decoder)
            stream = await decoder.generate(replace(request, source=lease[1] if lease else None))
            one.begun = True
            try:
                async for delta in stream:
                    one.tell(delta)
            finally:
                await stream.aclose()
        finally:
            decoder.outstanding -= tokens
            if lease is not None and lease[0].lost is None:
                self._tell(lease[0].call("return_lease", lease[1].lease))

    async def _prefill(self, one: _Open, reader: Remote) -> tuple[Remote, PageSource] | None:
        """Let a prefill worker read the prompt; where its pages then are, or None."""
        request = one.request
        params = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
        while (worker := self._pick(self.prefill, request)) is not None:
            tokens = len(request.input_ids) - 1
            worker.outstanding += tokens
            try:
                asked = replace(request, input_ids=list(request.input_ids[:-1]), params=params, lease=True)
                stream = await worker.generate(asked)
                try:
                    async for delta in stream:
                        one.cached = delta.cached_tokens
                        if delta.finish is not None and delta.finish.type == "length":
                            near = is_path(reader.hello.address) or not worker.hello.port
                            address = worker.hello.address if near else worker.hello.port
                            return worker, PageSource(address, request.rid, tokens)
                finally:
                    await stream.aclose()
                return None  # its logits were not finite: the decode worker will say so itself
            except UserError as error:
                log.warning("%s: prefill refused it (%s); it is read where it is answered", request.rid, error)
                return None
            except Unavailable as error:
                log.warning("%s: %s; another worker reads it", request.rid, error)
            except BaseException:  # it may have ended already, with a lease
                self._tell(worker.call("return_lease", request.rid))
                raise
            finally:
                worker.outstanding -= tokens
        if self.prefill:
            log.warning("%s: no prefill worker is left; it is read where it is answered", request.rid)
        return None

    async def abort(self, rid: str | None) -> None:
        """As `Backend.abort`."""
        for one in [self._alive[r] for r in list(self._alive) if rid in (None, r)]:
            one.leave(unfinished=True)

    # ------------------------------------------------------------------------------------------ all workers
    async def _all(self, name: str, given: Any = None) -> list[Any]:
        """Call all that are there, at the same time; the first error is raised when all have answered."""
        return _results(await asyncio.gather(*(w.call(name, given) for w in self._here()), return_exceptions=True))

    async def pause(self, mode: PauseMode) -> None:
        """As `Backend.pause`."""
        self._paused = mode
        if mode == "abort":
            await self.abort(None)
        if mode == "wait":
            self._may_begin.clear()
            while self._paused == "wait" and any(one.entered for one in self._alive.values()):
                await asyncio.sleep(0.01)
            if self._paused != "wait":  # resumed, or paused otherwise, meanwhile
                return
        await self._all("pause", "retract" if mode == "retract" else "keep")

    async def resume(self) -> None:
        """As `Backend.resume`. Not while memory is given back: nobody may make a step then."""
        async with self._memory:
            self._paused = None
            await self._all("resume")
            self._may_begin.set()

    async def flush(self) -> bool:
        """As `Backend.flush`: all, or False. Leases of requests that have ended are returned first."""
        await asyncio.gather(*self._behind)
        return not self._alive and all(await self._all("flush"))

    async def update_weights(self, update: WeightUpdate) -> None:
        """As `Backend.update_weights`. Workers that refuse what others took are not asked until an update succeeds."""
        workers = self._here()
        results = await asyncio.gather(*(w.call("update_weights", update) for w in workers), return_exceptions=True)
        failed = {w for w, result in zip(workers, results, strict=True) if isinstance(result, BaseException)}
        if len(failed) < len(workers):
            self._stale = failed
            self._version = update.weight_version or self._version
        _results(results)

    async def join_group(self, group: WeightGroup) -> None:
        """Worker i joins as rank `rank_offset` + i, prefill workers first: all, or none, since they wait for each
        other."""
        each = {w: replace(group, rank_offset=group.rank_offset + i) for i, w in enumerate(self._here())}
        if not each:
            raise Unavailable(self.failure or "no worker is there")
        joining = {w: asyncio.ensure_future(w.call("join_group", one)) for w, one in each.items()}
        await asyncio.wait(joining.values(), return_when=asyncio.FIRST_EXCEPTION)
        error = next((e for task in joining.values() if task.done() and (e := task.exception())), None)
        if error is not None:
            others = [w for w, task in joining.items() if not task.done() or task.exception() is None]
            leaving = (w.call("leave_group", group.group_name) for w in others)
            await asyncio.gather(*leaving, *joining.values(), return_exceptions=True)
            raise error

    async def leave_group(self, group_name: str) -> None:
        await self._all("leave_group", group_name)

    async def checksum(self) -> dict[str, str]:
        """As `Backend.checksum`.

        Raises:
            UserError: the workers' weights differ. Unavailable: no worker is there.
        """
        if not (sums := await self._all("checksum")):
            raise Unavailable(self.failure or "no worker is there")
        first, *others = sums
        if any(other != first for other in others):
            raise UserError("the workers' weights differ", "Update them again")
        return dict(first)

    async def release_memory(self, tags: tuple[str, ...]) -> None:
        """As `Backend.release_memory`: all are asked first, and none makes a step in between."""
        async with self._still():
            await self._all("may_release")
            await self._all("release_memory", tags)

    async def resume_memory(self, tags: tuple[str, ...]) -> None:
        """As `Backend.resume_memory`: where one has not so much, the others give back what they took."""
        async with self._still():
            workers = self._here()
            calls = (w.call("resume_memory", tags) for w in workers)
            taken = dict(zip(workers, await asyncio.gather(*calls, return_exceptions=True), strict=True))
            if any(isinstance(one, BaseException) for one in taken.values()):
                back = [w.call("release_memory", one) for w, one in taken.items() if isinstance(one, list) and one]
                await asyncio.gather(*back, return_exceptions=True)
            _results(taken.values())

    @asynccontextmanager
    async def _still(self) -> AsyncIterator[None]:
        """Inside it no worker makes a step, and nobody else is here."""
        async with self._memory:
            await asyncio.gather(*self._behind)
            held = self._paused is None
            try:
                if held:
                    await self._all("pause", "keep")
                yield
            finally:
                if held and self._paused is None:
                    await self._all("resume")


class _Open:
    """A request under way: where its deltas go, and the last one of each answer that has not ended."""

    def __init__(self, request: Request, version: str, ended: Callable[[_Open], None]) -> None:
        self.request, self._ended = request, ended
        self.inbox: asyncio.Queue[Delta] = asyncio.Queue()
        self.task: asyncio.Task[None] | None = None
        self.entered = self.begun = self.told = False
        self.unwanted = False  # before it was begun
        self.cached = 0  # prompt tokens that the prefill worker knew
        blank = Delta(request.rid, 0, (), prompt_tokens=len(request.input_ids), weight_version=version)
        self._last = {i: replace(blank, index=i) for i in range(request.params.n)}

    def leave(self, unfinished: bool) -> None:
        """Nobody wants more of it."""
        if unfinished and self.task is not None:
            self.task.cancel()
        self.unwanted = unfinished

    def tell(self, delta: Delta) -> None:
        delta = replace(delta, cached_tokens=max(delta.cached_tokens, self.cached))
        self.told = self.told or bool(delta.ids)
        if delta.finish is None:
            self._last[delta.index] = delta
        else:
            self._last.pop(delta.index, None)
            if not self._last:  # before anybody hears of it, who may count what is alive
                self._ended(self)
        self.inbox.put_nowait(delta)

    def end(self, finish: Finish) -> None:
        """Finish all answers that have not ended."""
        for last in list(self._last.values()):
            self.tell(nothing_more(last, finish))


def _results(results: Iterable[Any]) -> list[Any]:
    found = list(results)
    for result in found:
        if isinstance(result, BaseException):
            raise result
    return found
