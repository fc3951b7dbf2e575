"""The engine's thread: requests in, deltas out, and what becomes of them when something fails."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from glm5.serve import runner as runner_module
from glm5.serve.client import PauseMode, Stats, Unavailable, WeightGroup, WeightUpdate
from glm5.serve.request import Constraint, Delta, Finish, Request, SamplingParams
from glm5.serve.runner import RequestFailed, Runner
from glm5.utils.errors import UserError
from support.scripted import chat_tokenizer


class Counting:
    """An engine whose answers count up from the prompt's last id, one id a step; it refuses prompts that begin with 13.

    It checks that one thread alone touches it.
    """

    vocab_size, context = 1000, 100
    weight_version = "1"
    overlap = flying = False
    resting: str | None = None

    def __init__(self) -> None:
        self.running: dict[str, dict[int, list[int]]] = {}
        self.requests: dict[str, Request] = {}
        self.log: list[Any] = []
        self.fail: BaseException | None = None
        self.threads: set[int] = set()
        self.slow_s = 0.0
        self.aside = threading.Event()  # what waits in a thread of its own goes on when it is set
        self.aside.set()
        self.waits = 0
        self.free = 0

    def _touch(self) -> None:
        self.threads.add(threading.get_ident())

    @property
    def has_work(self) -> bool:
        return bool(self.running)

    def add(self, request: Request) -> None:
        self._touch()
        if request.input_ids[0] == 13:
            raise UserError("input_ids: 13", "choose another")
        self.requests[request.rid] = request
        self.running[request.rid] = {i: [] for i in range(request.params.n)}

    def abort(self, rid: str) -> None:
        self._touch()
        self.log.append(("abort", rid))
        self.running.pop(rid, None)

    def step(self) -> list[Delta]:
        self._touch()
        time.sleep(self.slow_s)
        if self.fail is not None:
            error, self.fail = self.fail, None
            raise error
        deltas = []
        for rid, answers in list(self.running.items()):
            request = self.requests[rid]
            for index, ids in list(answers.items()):
                ids.append(request.input_ids[-1] + len(ids) + 1)
                done = len(ids) == (request.params.max_new_tokens or 5)
                finish = Finish("length") if done else None
                deltas.append(Delta(rid, index, (ids[-1],), finish=finish, cached_tokens=7))
                if done:
                    del answers[index]
            if not answers:
                del self.running[rid]
        return deltas

    def advance(self, landed: Callable[[], None] | None = None) -> list[Delta]:
        raise AssertionError("this engine does not overlap")

    def settle(self) -> list[Delta]:
        return []

    def _wait(self) -> None:
        self.waits += 1
        assert self.aside.wait(60)

    def prepare(self, request: Request) -> None:
        self._wait()
        if request.params.constraint is not None and request.params.constraint.text == "(":
            raise UserError("regex: '(' cannot be read", "close it")

    def receive_weights(self, update: WeightUpdate) -> dict[str, Any]:
        self._wait()
        return {"a": update.names}

    def check(self, request: Request) -> int:
        return 0

    def return_lease(self, name: str) -> None:
        self.log.append(("return", name))

    def pause(self, mode: PauseMode) -> None:
        self.log.append(("pause", mode))

    def resume(self) -> None:
        self.log.append("resume")

    def flush_cache(self) -> bool:
        self._touch()
        self.free = 640
        return not self.running

    def update_weights(self, update: WeightUpdate, received: Any = None) -> None:
        self._touch()
        if received is not None:
            self.log.append(("received", received))
        if update.path == "bad":
            raise UserError("bad is no checkpoint", "name another")
        self.weight_version = update.weight_version or self.weight_version

    def join_group(self, group: Any) -> None:
        self._wait()
        self.log.append(group)

    def leave_group(self, group_name: str) -> None:
        self.log.append(group_name)

    def checksum(self) -> dict[str, str]:
        return {"a": "b"}

    def release_memory(self, tags: tuple[str, ...]) -> None:
        self.log.append(("release", tags))

    def resume_memory(self, tags: tuple[str, ...]) -> None:
        self.log.append(("resume", tags))

    def stats(self) -> Stats:
        return Stats(running=len(self.running), free_tokens=self.free)

    def info(self) -> dict[str, Any]:
        return {"page_size": 64}


def run(test: Callable[[Runner, Counting], Coroutine[Any, Any, None]]) -> None:
    """Run a test with a runner that is started and stopped around it."""

    async def main() -> None:
        engine = Counting()
        runner = Runner(engine, chat_tokenizer(), "m")
        await runner.start()
        try:
            async with asyncio.timeout(20):
                await test(runner, engine)
        finally:
            await runner.stop()
        assert engine.threads <= {runner._thread.ident}

    asyncio.run(main())


def request(*ids: int, **params: Any) -> Request:
    return Request(ids or (50,), SamplingParams(**params))


async def collect(runner: Runner, asked: Request) -> list[Delta]:
    return [delta async for delta in await runner.generate(asked)]


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


def test_answers_arrive_whole_and_in_order() -> None:
    async def test(runner: Runner, engine: Counting) -> None:
        many = [request(10 * i, n=1 + i % 3, max_new_tokens=1 + i % 7) for i in range(30)]
        for asked, deltas in zip(many, await asyncio.gather(*(collect(runner, r) for r in many)), strict=True):
            n, most = asked.params.n, asked.params.max_new_tokens
            for index in range(n):
                mine = [d for d in deltas if d.index == index]
                assert [d.ids[0] for d in mine] == [asked.input_ids[-1] + k + 1 for k in range(most or 0)]
                assert [d.finish is not None for d in mine] == [False] * (len(mine) - 1) + [True]
        assert runner.stats().steps > 0
        await until(lambda: runner.stats().running == 0)

    run(test)


def test_refused_requests_leave_nothing() -> None:
    async def test(runner: Runner, engine: Counting) -> None:
        with pytest.raises(UserError, match="13"):
            await runner.generate(request(13))
        asked = request(20)
        stream = await runner.generate(asked)
        with pytest.raises(UserError, match="in use"):
            await runner.generate(asked)
        await stream.aclose()
        assert len(await collect(runner, Request((20,), rid=asked.rid))) == 5

    run(test)


@pytest.mark.parametrize("read", [0, 2])
def test_closing_early_ends_the_request(read: int) -> None:
    async def test(runner: Runner, engine: Counting) -> None:
        engine.slow_s = 0.005
        asked = request(max_new_tokens=1000)
        stream = await runner.generate(asked)
        for _ in range(read):
            await anext(stream)
        await stream.aclose()
        await stream.aclose()
        await until(lambda: not engine.running)
        assert engine.log == [("abort", asked.rid)]

    run(test)


def test_cancelling_whoever_waits_ends_the_request() -> None:
    async def test(runner: Runner, engine: Counting) -> None:
        async def read() -> None:
            stream = await runner.generate(request(max_new_tokens=10_000))
            try:
                async for _ in stream:
                    pass
            finally:
                await stream.aclose()

        for wait in (0, 0, 0.01):
            task = asyncio.create_task(read())
            await asyncio.sleep(wait)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await until(lambda: not engine.running)
        engine.slow_s = 0.05  # a request that was given up before the engine heard of it
        running = asyncio.create_task(collect(runner, request(max_new_tokens=4)))
        await until(lambda: engine.running)
        late = asyncio.create_task(runner.generate(request(max_new_tokens=10_000)))
        await asyncio.sleep(0)
        late.cancel()
        await asyncio.gather(late, return_exceptions=True)
        await running
        await until(lambda: not engine.running)
        assert not runner._names
        assert not runner._open

    run(test)


def test_abort_finishes_with_what_is_known() -> None:
    async def test(runner: Runner, engine: Counting) -> None:
        engine.slow_s = 0.002
        asked = request(n=2, max_new_tokens=10_000)
        stream = await runner.generate(asked)
        await anext(stream)
        await anext(stream)
        await runner.abort("nobody")
        await runner.abort(asked.rid)
        ends = [d async for d in stream if d.finish]
        assert sorted(d.index for d in ends) == [0, 1]
        assert all(d.finish.type == "abort" and d.ids == () and d.cached_tokens == 7 for d in ends)  # type: ignore[union-attr]
        others = [asyncio.create_task(collect(runner, request(max_new_tokens=10_000))) for _ in range(3)]
        await until(lambda: len(engine.running) == 3)
        await runner.abort(None)
        for deltas in await asyncio.gather(*others):
            assert deltas[-1].finish == Finish("abort")
        await runner.update_weights(WeightUpdate("disk", weight_version="7"))
        await runner.pause("keep")
        waiting = asyncio.create_task(collect(runner, request(50, 51)))
        await until(lambda: engine.running)
        await runner.abort(None)
        (only,) = await waiting  # it ended before any step
        assert (only.prompt_tokens, only.weight_version) == (2, "7")

    run(test)


def test_pause_keeps_what_runs_and_accepts_more() -> None:
    async def test(runner: Runner, engine: Counting) -> None:
        engine.slow_s = 0.002
        first = asyncio.create_task(collect(runner, request(max_new_tokens=20)))
        await until(lambda: engine.running)
        await runner.pause("keep")
        steps = runner.stats().steps
        second = asyncio.create_task(collect(runner, request(max_new_tokens=3)))
        await until(lambda: len(engine.running) == 2)
        await asyncio.sleep(0.05)
        assert runner.paused
        assert runner.stats().steps == steps
        assert await runner.probe(1.0)  # it listens, though no step runs
        await runner.update_weights(WeightUpdate("disk", weight_version="2"))
        assert runner.weight_version == "2"
        await runner.resume()
        assert len(await first) == 20
        assert len(await second) == 3
        assert engine.log == [("pause", "keep"), "resume"]

    run(test)


def test_pause_that_aborts_and_one_that_waits() -> None:
    async def test(runner: Runner, engine: Counting) -> None:
        engine.slow_s = 0.002
        running = asyncio.create_task(collect(runner, request(max_new_tokens=10_000)))
        await until(lambda: engine.running)
        await runner.pause("abort")
        assert (await running)[-1].finish == Finish("abort")
        await runner.resume()

        running = asyncio.create_task(collect(runner, request(max_new_tokens=30)))
        await until(lambda: engine.running)
        pausing = asyncio.create_task(runner.pause("wait"))
        await asyncio.sleep(0.005)
        held = [asyncio.create_task(collect(runner, request(first))) for first in (50, 13)]
        gone = await runner.generate(request())
        await gone.aclose()
        await pausing
        assert (await running)[-1].finish == Finish("length")
        await asyncio.sleep(0.02)
        assert not any(task.done() for task in held)
        assert not engine.running
        await runner.resume()
        assert len(await held[0]) == 5
        refused = (await held[1])[-1].finish
        assert refused is not None
        assert (refused.type, refused.refused) == ("error", True)

    run(test)


def test_a_pause_that_waits_can_be_called_off() -> None:
    async def test(runner: Runner, engine: Counting) -> None:
        engine.slow_s = 0.002
        running = asyncio.create_task(collect(runner, request(max_new_tokens=10_000)))
        await until(lambda: engine.running)
        pausing = asyncio.create_task(runner.pause("wait"))
        await until(lambda: runner.paused)
        await runner.resume()
        await asyncio.wait_for(pausing, 10)
        await runner.abort(None)
        assert (await running)[-1].finish == Finish("abort")
        assert len(await collect(runner, request())) == 5
        assert not runner.paused

    run(test)


def test_what_a_pause_holds_back_stays_while_the_engine_rests() -> None:
    async def test(runner: Runner, engine: Counting) -> None:
        engine.slow_s = 0.002
        running = asyncio.create_task(collect(runner, request(max_new_tokens=10_000)))
        await until(lambda: engine.running)
        pausing = asyncio.create_task(runner.pause("wait"))
        await asyncio.sleep(0.02)
        held = asyncio.create_task(collect(runner, request()))
        await until(lambda: runner._held)
        engine.resting = "the memory of weights is released"
        with pytest.raises(Unavailable, match="released"):
            await runner.resume()
        assert not held.done()
        engine.resting = None
        await runner.resume()
        assert len(await held) == 5
        pausing.cancel()
        await runner.abort(None)
        assert (await running)[-1].finish == Finish("abort")

    run(test)


def test_one_request_fails_and_the_others_go_on() -> None:
    async def test(runner: Runner, engine: Counting) -> None:
        engine.slow_s = 0.002
        bad, good = request(max_new_tokens=100), request(max_new_tokens=20)
        tasks = [asyncio.create_task(collect(runner, r)) for r in (bad, good)]
        await until(lambda: len(engine.running) == 2)
        engine.fail = RequestFailed([bad.rid], "its logits were NaN")
        failed, whole = await asyncio.gather(*tasks)
        assert failed[-1].finish == Finish("error", message="its logits were NaN")
        assert len(whole) == 20
        assert runner.failure is None

    run(test)


def test_fatal_error_ends_all_and_says_why() -> None:
    async def test(runner: Runner, engine: Counting) -> None:
        task = asyncio.create_task(collect(runner, request(max_new_tokens=10_000)))
        await until(lambda: engine.running)
        engine.fail = RuntimeError("out of memory")
        last = (await task)[-1].finish
        assert last is not None
        assert last.type == "error"
        assert "out of memory" in (runner.failure or "")
        assert not await runner.probe(0.5)
        for call in (runner.generate(request()), runner.flush(), runner.abort(None)):
            with pytest.raises(Unavailable, match="out of memory"):
                await call

    run(test)


def test_probe_proves_a_step() -> None:
    async def test(runner: Runner, engine: Counting) -> None:
        before = runner.stats().steps
        assert await runner.probe(5.0)
        assert runner.stats().steps > before
        engine.slow_s = 0.3
        task = asyncio.create_task(collect(runner, request(max_new_tokens=2)))
        await until(lambda: engine.running)
        assert not await runner.probe(0.01)
        assert await runner.probe(5.0)
        await task

    run(test)


def test_commands_reach_the_engine_and_their_errors_the_caller() -> None:
    async def test(runner: Runner, engine: Counting) -> None:
        assert await runner.flush()
        assert await runner.checksum() == {"a": "b"}
        await runner.release_memory(("weights",))
        await runner.resume_memory(("weights",))
        with pytest.raises(UserError, match="bad is no checkpoint"):
            await runner.update_weights(WeightUpdate("disk", path="bad"))
        assert await runner.info() == {"page_size": 64}
        assert len(await collect(runner, request())) == 5

    run(test)


def test_a_constraint_is_compiled_while_others_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "MOST_COMPILING", 4)

    async def test(runner: Runner, engine: Counting) -> None:
        engine.aside.clear()
        texts = ["(", "[0-9]+", "[a-z]+", "x"]
        asked = [request(10 * i, constraint=Constraint("regex", text)) for i, text in enumerate(texts)]
        waiting = [asyncio.create_task(collect(runner, r)) for r in asked]
        await until(lambda: engine.waits == 2)  # the others wait for a thread
        with pytest.raises(Unavailable, match="4 requests wait"):
            await runner.generate(request(constraint=Constraint("regex", "y")))
        assert len(await collect(runner, request())) == 5
        assert not any(task.done() for task in waiting)
        waiting[3].cancel()
        engine.aside.set()
        with pytest.raises(UserError, match="cannot be read"):
            await waiting[0]
        assert [len(await task) for task in waiting[1:3]] == [5, 5]
        assert engine.waits == 3  # nobody compiled for the one that was cancelled
        assert set(engine.requests) >= {asked[1].rid, asked[2].rid}
        assert not {asked[0].rid, asked[3].rid} & set(engine.requests)
        assert runner._compiling == 0
        assert len(await collect(runner, asked[3])) == 5

    run(test)


@pytest.mark.parametrize("every", [False, True])
def test_an_abort_reaches_what_is_still_compiled(every: bool) -> None:
    async def test(runner: Runner, engine: Counting) -> None:
        engine.aside.clear()
        asked = [request(n=2, constraint=Constraint("regex", "a")) for _ in range(2)]
        collecting = [asyncio.create_task(collect(runner, one)) for one in asked]
        await until(lambda: engine.waits == 2)
        await runner.abort(None if every else asked[0].rid)
        engine.aside.set()
        ended, other = [await one for one in collecting]
        assert [(delta.index, delta.ids, delta.finish) for delta in ended] == [(i, (), Finish("abort")) for i in (0, 1)]
        assert ended[0].prompt_tokens == len(asked[0].input_ids)
        assert (asked[1].rid in engine.requests) == (len(other) == 10) == (not every)
        assert asked[0].rid not in engine.requests
        assert len(await collect(runner, asked[0])) == 10  # its name is free

    run(test)


def test_groups_are_joined_and_weights_arrive_while_others_are_answered() -> None:
    async def test(runner: Runner, engine: Counting) -> None:
        engine.aside.clear()
        group = WeightGroup("127.0.0.1", 1, 1, 2)
        joining = asyncio.create_task(runner.join_group(group))
        updates = [WeightUpdate("distributed", names=(n,), weight_version=n) for n in ("5", "6")]
        updating = [asyncio.create_task(runner.update_weights(update)) for update in updates]
        await until(lambda: engine.waits == 2)  # the second update waits for the first
        assert len(await collect(runner, request())) == 5
        assert runner.weight_version == "1"
        assert not joining.done()
        engine.aside.set()
        await asyncio.gather(joining, *updating)
        assert group in engine.log
        assert [entry for entry in engine.log if entry is not group] == [
            ("received", {"a": ("5",)}),
            ("received", {"a": ("6",)}),
        ]
        assert runner.weight_version == "6"

    run(test)


def test_whoever_waits_for_a_group_hears_of_the_end() -> None:
    async def main() -> None:
        engine = Counting()
        runner = Runner(engine, chat_tokenizer(), "m")
        await runner.start()
        engine.aside.clear()
        joining = asyncio.create_task(runner.join_group(WeightGroup("127.0.0.1", 1, 1, 2)))
        await until(lambda: engine.waits == 1)
        await runner.stop()
        try:
            with pytest.raises(Unavailable, match="stopping"):
                await asyncio.wait_for(joining, 60)
        finally:
            engine.aside.set()

    asyncio.run(main())


def test_figures_are_new_when_a_command_is_answered() -> None:
    async def test(runner: Runner, engine: Counting) -> None:
        gates = [threading.Event(), threading.Event()]
        before = asyncio.create_task(runner.call(lambda: gates[0].wait(60)))
        await asyncio.sleep(0)  # it is in the queue
        flushing = asyncio.create_task(runner.flush())
        await asyncio.sleep(0)
        behind = asyncio.create_task(runner.call(lambda: gates[1].wait(60)))
        await asyncio.sleep(0)
        gates[0].set()
        assert await flushing
        assert runner.stats().free_tokens == 640
        gates[1].set()
        await asyncio.gather(before, behind)

    run(test)


def test_before_the_start_and_after_the_end_nothing_is_accepted() -> None:
    async def main() -> None:
        runner = Runner(Counting(), chat_tokenizer(), "m")
        with pytest.raises(Unavailable, match="not started"):
            await runner.generate(request())
        await runner.start()
        stream = await runner.generate(request(max_new_tokens=100_000))
        await runner.stop()
        last = [delta async for delta in stream][-1].finish
        assert last is not None
        assert last.type == "error"
        with pytest.raises(Unavailable, match="stopping"):
            await runner.generate(request())

    asyncio.run(main())
