"""Prefill and decode in workers of their own: the same tokens, and nothing lost or kept when one of them fails."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from glm5.model.generate import generate
from glm5.model.glm5 import GLM5
from glm5.model.weights import save_model
from glm5.serve import transfer
from glm5.serve.client import Unavailable, WeightGroup, WeightUpdate
from glm5.serve.engine import Engine
from glm5.serve.llm import Answer
from glm5.serve.prefix import page_keys
from glm5.serve.request import Constraint, Finish, PageSource, Request, SamplingParams
from glm5.serve.transfer import PageBytes
from glm5.serve.wire import Wire, WireClosed, as_type, connect, listen
from glm5.utils.errors import UserError
from support.cluster import KEY, SMALL, Worker, cluster, play
from support.drafting import agreeable
from support.engines import drained
from support.scripted import chat_tokenizer

LENGTHS = (1, 2, 24, 64, 65, 66, 127, 129, 130, 200, 255)
NEW = 10
GREEDY = SamplingParams(max_new_tokens=NEW, temperature=0.0, ignore_eos=True, logprobs=0)
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def model() -> GLM5:
    return agreeable(0, vocab_size=chat_tokenizer().vocab_size).eval()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(6, 320, (n,), generator=generator).tolist() for n in LENGTHS]


def expected(model: GLM5, prompts: list[list[int]]) -> list[list[int]]:
    """What the model says by itself; remembered by its weights' first numbers."""
    name = model.lm_head.weight[0, :4].tolist()
    return [_said(model, repr(name), tuple(ids)) for ids in prompts]


def _said(model: GLM5, name: str, ids: tuple[int, ...], known: dict[Any, list[int]] = {}) -> list[int]:  # noqa: B006
    if (name, ids) not in known:
        known[name, ids] = list(generate(model, ids, max_new_tokens=NEW, stop_ids=()))
    return known[name, ids]


# --------------------------------------------------------------------------- sameness
@pytest.mark.parametrize(("drafts", "tcp"), [(0, False), (3, False), (3, True)])
def test_disaggregated_gives_the_same(
    drafts: int, tcp: bool, model: GLM5, prompts: list[list[int]], tmp_path: Path
) -> None:
    """Cold, again with pages on both sides, and sampled: ids, log-probabilities and accepted drafts are those of one
    engine. Every cached tensor of every page is the same on both sides."""
    config = replace(SMALL, drafts=drafts)
    alone = Engine(model, config)

    def by_one(params: SamplingParams) -> list[Answer]:
        out = []
        for ids in prompts:
            answer, request = Answer(), Request(ids, params)
            alone.add(request)
            while alone.has_work:
                for delta in alone.step():
                    answer.add(delta)
            out.append(answer)
        return out

    async def test() -> None:
        async with cluster(model, tmp_path, "pd", config, tcp) as c:
            fetched: list[int] = []
            write = PageBytes.write

            def count(self: PageBytes, page: int, data: torch.Tensor) -> None:
                fetched.append(page)
                write(self, page, data)

            PageBytes.write = count  # type: ignore[method-assign]
            try:
                plain = by_one(GREEDY)
                for again in range(2):
                    answers = [(await c.answer(Request(ids, GREEDY)))[0] for ids in prompts]
                    assert [a.ids for a in answers] == expected(model, prompts) == [a.ids for a in plain]
                    for a, b in zip(answers, plain, strict=True):
                        torch.testing.assert_close(
                            torch.tensor(a.logprobs), torch.tensor(b.logprobs), rtol=0, atol=TOLERANCE
                        )
                        if not again:
                            assert (a.drafted, a.accepted) == (b.drafted, b.accepted)
                    # The first time all pages of each prompt's ids but the last; then only begun pages.
                    pages = [-(-(n - 1) // 64) for n in LENGTHS]
                    begun = [(n - 1) % 64 > 0 for n in LENGTHS]
                    assert len(fetched) == sum(begun if again else pages)
                    fetched.clear()
            finally:
                PageBytes.write = write  # type: ignore[method-assign]
            sampled = replace(GREEDY, temperature=0.8, seed=3, n=2)
            together = await asyncio.gather(*(c.answer(Request(ids, sampled)) for ids in prompts))
            assert [two[0].ids for two in together] == [a.ids for a in by_one(replace(sampled, n=1))]
            assert all(two[0].ids != two[1].ids for two in together)
            await c.until_clean()

    play(test)


def test_all_caches_of_a_page_move(model: GLM5, tmp_path: Path) -> None:
    """Of every layer, the MTP block's included: the pages of one text are the same bytes on both sides."""

    async def test() -> None:
        async with cluster(model, tmp_path, "pd", replace(SMALL, drafts=2)) as c:
            ids = [7 + i % 300 for i in range(193)]
            await c.answer(Request(ids, GREEDY))
            pages = []
            for worker in c.workers:
                nodes = worker.engine.tree.match(page_keys(ids[:-1], 64))
                assert len(nodes) == 3
                form = PageBytes(worker.engine.cache)
                out = torch.empty(len(nodes), form.size, dtype=torch.uint8)
                for row, node in zip(out, nodes, strict=True):
                    form.read(node.page, row)
                pages.append(out)
            assert torch.equal(*pages)
            layers = worker.engine.cache.layers
            assert len(layers) == model.config.num_hidden_layers + 1
            assert all(pool[0, nodes[1].page * 64 : nodes[1].page * 64 + 64].any() for pair in layers for pool in pair)

    play(test)


def test_whatever_is_asked_is_answered_as_by_one_engine(model: GLM5, tmp_path: Path) -> None:
    """Forms, stops, bias, figures of the prompt, what could be drawn, experts: all of it passes between processes."""
    asked = [
        replace(GREEDY, constraint=Constraint("regex", "[0-9]{3}"), max_new_tokens=30, ignore_eos=False),
        replace(GREEDY, logit_bias={77: 60.0}, stop=("\u1234", chat_tokenizer().decode([77]) * 3)),
        replace(GREEDY, prompt_logprobs=2, logprobs=3),
        replace(GREEDY, temperature=0.9, top_p=0.5, seed=-1, kept_set=True, repetition_penalty=1.2),
        replace(GREEDY, routed_experts=True, n=2, temperature=1.0, seed=4),
        replace(GREEDY, stop_token_ids=(7, 8), min_new_tokens=4, thinking_budget=3),
    ]
    config = replace(SMALL, drafts=2)

    async def test() -> None:
        async with cluster(model, tmp_path, "pd", config) as c:
            for i, params in enumerate(asked):
                ids = [6 + (7 * j + i) % 300 for j in range(100 + i)]
                engine, request = Engine(model, config, chat_tokenizer()), Request(ids, params)
                engine.add(request)
                found = drained(engine)
                alone = [found[request.rid, index] for index in range(params.n)]
                for mine, theirs in zip(await c.answer(Request(ids, params)), alone, strict=True):
                    told = [(one.ids, one.finish, one.trim, one.routed) for one in (mine, theirs)]
                    assert told[0] == told[1]
                    assert [one.kept for one in mine.info] == [one.kept for one in theirs.info]
                    assert [len(one.top) for one in mine.info] == [len(one.top) for one in theirs.info]
                    assert len(mine.prompt_info) == len(theirs.prompt_info)
                    for a, b in zip(mine.prompt_info, theirs.prompt_info, strict=True):
                        assert (a is None) == (b is None)
                        assert a is None or b is None or abs(a.logprob - b.logprob) < TOLERANCE
            await c.until_clean()

    play(test)


def test_drafts_stay_as_good_on_a_decode_worker(model: GLM5, tmp_path: Path) -> None:
    """The same prompts again and again, their pages fetched or known: as many drafts are right as the first time."""
    rng = random.Random(5)  # noqa: S311

    async def test() -> None:
        async with cluster(model, tmp_path, "pd", replace(SMALL, drafts=3, pages=24)) as c:
            texts = [[rng.randrange(6, 320) for _ in range(rng.randrange(60, 200))] for _ in range(12)]
            rounds = []
            for _ in range(4):
                answers = await c.all([Request(ids, GREEDY) for ids in texts])
                rounds.append((sum(a.accepted for a in answers), sum(a.drafted for a in answers)))
            assert rounds[0][0] > 0.2 * rounds[0][1]
            assert len(set(rounds)) == 1
            await c.until_clean()

    play(test)


# --------------------------------------------------------------------------- failures
class Gate:
    """Stops `PageBytes.read`, so that a transfer is caught in its middle."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        read, left = PageBytes.read, [after]

        def gated(pages: PageBytes, page: int, out: torch.Tensor) -> None:
            left[0] -= 1
            if left[0] < 0:
                self.reached.set()
                self.open.wait(20)
            read(pages, page, out)

        monkeypatch.setattr(PageBytes, "read", gated)

    async def wait(self) -> None:
        await asyncio.to_thread(self.reached.wait, 20)


class Slow:
    """Makes steps of one worker wait, so that a prefill, or a decode, is caught in its middle."""

    def __init__(self, worker: Worker, after: int) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        step, left = worker.engine.executor.run, [after]

        def gated(*plan: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                self.reached.set()
                self.open.wait(20)
            return step(*plan)

        worker.engine.executor.run = gated  # type: ignore[method-assign]

    async def wait(self) -> None:
        await asyncio.to_thread(self.reached.wait, 20)


def test_nothing_is_left_as_soon_as_all_is_answered(model: GLM5, prompts: list[list[int]], tmp_path: Path) -> None:
    """No request is counted, a flush finds nothing in use, and the figures after it say so."""

    async def test() -> None:
        async with cluster(model, tmp_path, "pd") as c:
            for ids in prompts[3:6]:
                await c.answer(Request(ids, GREEDY))
                stats = c.fleet.stats()
                assert (stats.running, stats.waiting) == (0, 0)
                assert await c.fleet.flush()
                assert c.fleet.stats().cache_usage == 0
                assert c.fleet.stats().free_tokens == SMALL.pages * 64

    play(test)


@pytest.mark.parametrize("when", ["prefill", "transfer", "decode"])
@pytest.mark.parametrize("how", ["abort", "leave"])
def test_an_abort_frees_both_sides_at_once(
    when: str, how: str, model: GLM5, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with cluster(model, tmp_path, "pd", replace(SMALL, drafts=1, chunk=64)) as c:
            request = Request([7] * 250, replace(GREEDY, max_new_tokens=40))
            gate = {
                "prefill": lambda: Slow(c.prefill[0], 1),
                "transfer": lambda: Gate(monkeypatch, 2),
                "decode": lambda: Slow(c.decode[0], 5),
            }[when]()
            stream = await c.fleet.generate(request)
            await gate.wait()
            assert not all(w.clean for w in c.workers)
            if how == "abort":
                await c.fleet.abort(request.rid)
                last = [delta async for delta in stream][-1]
                assert last.finish is not None
                assert (last.finish.type, last.prompt_tokens) == ("abort", 250)
            else:
                await stream.aclose()
            gate.open.set()
            await c.until_clean()
            assert not c.fleet._alive
            again = await c.answer(Request([7] * 250, GREEDY))
            assert again[0].ids == expected(model, [[7] * 250])[0]

    play(test)


def test_an_abort_reaches_what_is_still_looked_at(model: GLM5, tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(model, tmp_path, "pd") as c:
            looking, go_on = threading.Event(), threading.Event()
            engine = c.decode[0].engine

            def check(request: Request) -> int:
                looking.set()
                assert go_on.wait(60)
                return 0

            engine.check = check  # type: ignore[method-assign]
            request = Request([7] * 90, GREEDY)
            asked = asyncio.create_task(c.answer(request))
            await asyncio.to_thread(looking.wait, 60)
            await c.fleet.abort(request.rid)
            go_on.set()
            (answer,) = await asked
            assert (answer.ids, answer.finish) == ([], Finish("abort"))
            assert not c.fleet._alive
            assert all(worker.engine.tree.queries == 0 for worker in c.workers)
            assert len((await c.answer(request))[0].ids) == NEW

    play(test)


def test_a_prefill_worker_that_dies_is_replaced(
    model: GLM5, prompts: list[list[int]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In the middle of reading: by the other one, then by the decode worker itself."""

    async def test() -> None:
        async with cluster(model, tmp_path, "ppd", replace(SMALL, chunk=64)) as c:
            want = expected(model, prompts)
            for left in (1, 0):
                assert await c.fleet.flush()
                slow = [Slow(w, 2) for w in c.prefill if not w.stopped]
                asked = asyncio.ensure_future(c.all([Request(ids, GREEDY) for ids in prompts]))
                reached = [asyncio.ensure_future(one.wait()) for one in slow]
                await asyncio.wait(reached, return_when=asyncio.FIRST_COMPLETED)
                victim = next(
                    w
                    for w, one in zip([w for w in c.prefill if not w.stopped], slow, strict=True)
                    if one.reached.is_set()
                )
                killing = asyncio.ensure_future(victim.kill())
                for one in slow:
                    one.open.set()
                await killing
                assert [a.ids for a in await asked] == want
                await c.until_clean()
                assert sum(w.lost is None for w in c.fleet.prefill) == left
            assert "no prefill worker is left" in caplog.text
            assert await c.fleet.probe(5.0)

    play(test)


def test_a_prefill_worker_that_dies_in_a_transfer(
    model: GLM5, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with cluster(model, tmp_path, "pd", replace(SMALL, drafts=2)) as c:
            gate = Gate(monkeypatch, 2)
            ids = [9] * 250
            asked = asyncio.ensure_future(c.answer(Request(ids, GREEDY)))
            await gate.wait()
            killing = asyncio.ensure_future(c.prefill[0].kill())
            assert (await asked)[0].ids == expected(model, [ids])[0]
            gate.open.set()
            await killing
            await c.until_clean()
            assert "the prompt is read here" in caplog.text

    play(test)


def test_a_silent_keeper_is_not_waited_for(model: GLM5, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "SILENCE_S", 0.2)

    async def test() -> None:
        async with cluster(model, tmp_path, "pd") as c:
            gate = Gate(monkeypatch, 1)
            ids = [9] * 250
            assert (await c.answer(Request(ids, GREEDY)))[0].ids == expected(model, [ids])[0]
            device = c.prefill[0].engine.pool.device
            assert any(device.pins)  # a page is being read, so none is given to anybody
            gate.open.set()
            await c.until_clean()

    play(test)


def test_an_engine_that_cannot_fetch_reads_the_prompt_itself(model: GLM5) -> None:
    """At once: it does not wait until another request comes."""
    engine = Engine(model, SMALL, chat_tokenizer())
    params = replace(GREEDY, max_new_tokens=3)
    engine.add(Request([9] * 200, params, source=PageSource("elsewhere", "a lease", 199)))
    got: list[int] = []
    while engine.has_work:
        for delta in engine.step():
            got += delta.ids
    assert got == list(generate(model, [9] * 200, max_new_tokens=3, stop_ids=()))


def test_a_cancelled_load_writes_nothing_and_a_cancellation_waits_for_a_write(model: GLM5) -> None:
    """So the pages of a load that was given up can go to another at once."""
    engine = Engine(model, SMALL, chat_tokenizer())
    orders: list[transfer.Load] = []
    engine.lending.fetch = orders.append
    engine.add(Request([9] * 200, GREEDY, rid="one", source=PageSource("elsewhere", "a lease", 199)))
    engine.step()
    (load,) = orders
    page = load.item.pages[1]
    full = torch.ones(load.pages.size, dtype=torch.uint8)
    load.write(1, full)
    assert torch.equal(_read(load.pages, page), full)
    inside, go_on, write = threading.Event(), threading.Event(), load.pages.write

    def slow(page: int, data: torch.Tensor) -> None:
        inside.set()
        go_on.wait(20)
        write(page, data)

    load.pages.write = slow  # type: ignore[method-assign]
    writing = threading.Thread(target=load.write, args=(1, 2 * full))
    writing.start()
    assert inside.wait(20)
    cancelling = threading.Thread(target=engine.abort, args=("one",))
    cancelling.start()
    cancelling.join(0.1)
    assert cancelling.is_alive()
    assert engine.pool.device.free < 40
    go_on.set()
    cancelling.join(20)
    writing.join(20)
    assert engine.pool.device.free == 40
    load.write(1, 3 * full)
    assert torch.equal(_read(load.pages, page), 2 * full)
    engine.lending.end_load(load, filled=True)  # which comes too late
    assert not engine.has_work
    engine.scheduler.check()


@pytest.mark.parametrize("acks", [False, True])
def test_a_reader_that_says_nothing_holds_no_pages(
    acks: bool, model: GLM5, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is stopped in the middle, or that takes all pages and never says that it is done."""
    monkeypatch.setattr(transfer, "WINDOW", 2)
    monkeypatch.setattr(transfer, "SILENCE_S", 0.1)

    async def test() -> None:
        async with cluster(model, tmp_path, "pd") as c:
            one = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
            async for _ in await c.prefill[0].runner.generate(Request([9] * 250, one, rid="mine", lease=True)):
                pass
            wire = await connect(c.fleet.prefill[0].hello.address, KEY)
            wire.post("mapped")
            wire.post("want", 1, "mine", 0)
            said = []
            with suppress(WireClosed):
                while True:
                    said.append(await wire.receive())
                    if acks and said[-1][0] == "page":
                        wire.post("ack", said[-1][3])
            assert (said[-1][0] == "end") == acks
            await c.prefill[0].runner.return_lease("mine")
            await c.until_clean()
            await wire.close()

    play(test)


@pytest.mark.parametrize("told", [False, True])
def test_a_decode_worker_that_dies(told: bool, model: GLM5, tmp_path: Path) -> None:
    """A request begins again with the other one, unless it was told ids already."""

    async def test() -> None:
        async with cluster(model, tmp_path, "pdd") as c:
            slow = [Slow(w, 3 if told else 0) for w in c.decode]
            ids = [9] * 250
            asked = asyncio.ensure_future(c.answer(Request(ids, GREEDY)))
            reached = [asyncio.ensure_future(one.wait()) for one in slow]
            await asyncio.wait(reached, return_when=asyncio.FIRST_COMPLETED)
            victim = next(w for w, one in zip(c.decode, slow, strict=True) if one.reached.is_set())
            killing = asyncio.ensure_future(victim.kill())
            for one in slow:
                one.open.set()
            (answer,) = await asked
            await killing
            want = expected(model, [ids])[0]
            assert answer.finish is not None
            if told:
                assert answer.finish.type == "error"
                assert "decode worker" in answer.finish.message
                assert answer.ids == want[: len(answer.ids)]
            else:
                assert (answer.ids, answer.finish.type) == (want, "length")
            await c.until_clean()
            (after,) = await c.answer(Request(ids, GREEDY))
            assert after.ids == want
            await next(w for w in c.decode if not w.stopped).kill()
            while c.fleet.failure is None:
                await asyncio.sleep(0.01)
            with pytest.raises(Unavailable, match="decode worker"):
                await c.fleet.generate(Request(ids, GREEDY))
            assert not await c.fleet.probe(1.0)

    play(test)


def test_pages_stay_until_the_reader_is_done(model: GLM5, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease that is returned, a flush, other weights and a crowd that wants every page: none of the pages that a
    reader has asked for is given out before its `done`; and no more than WINDOW pages come without an ack."""
    monkeypatch.setattr(transfer, "WINDOW", 4)
    config = replace(SMALL, pages=22, context=64 * 15)
    save_model(agreeable(1, vocab_size=chat_tokenizer().vocab_size), tmp_path / "other")

    async def test() -> None:
        own = {0: agreeable(0, vocab_size=chat_tokenizer().vocab_size).eval()}  # whose weights are replaced
        async with cluster(model, tmp_path, "pd", config, models=own) as c:
            worker = c.prefill[0]
            engine, call = worker.engine, worker.runner.call
            one = GREEDY.__class__(max_new_tokens=1, temperature=0.0, ignore_eos=True)
            ids = [7 + i % 50 for i in range(64 * 12)]
            async for _ in await worker.runner.generate(Request(ids, one, rid="mine", lease=True)):
                pass
            form = PageBytes(engine.cache)
            lease = engine.scheduler.leases["mine"]
            before = torch.stack([_read(form, page) for page in lease.pages])
            wire = await connect(c.fleet.prefill[0].hello.address, KEY)
            layout, path = (await wire.receive())[1:]
            assert layout == form.layout
            slots = transfer.Slots.map(path)
            wire.post("mapped")
            wire.post("want", 5, "mine", 0)
            have = await wire.receive()
            assert have[:4] == ["have", 5, 64 * 12, "0"]
            got: dict[int, torch.Tensor] = {}
            free: list[int] = []
            for _ in range(4):
                _, _, index, slot, _ = await wire.receive()
                got[index] = slots[slot].clone()
                free.append(slot)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await wire.receive()
            await call(lambda: engine.return_lease("mine"))
            await worker.runner.flush()
            await worker.runner.update_weights(WeightUpdate("disk", path=str(tmp_path / "other"), weight_version="9"))
            for seed in range(6):  # a crowd that wants every page
                async for _ in await worker.runner.generate(Request([100 + seed] * 64 * 6, one)):
                    pass
            assert engine.pool.device.free + engine.pool.device.idle == 10
            for slot in free:
                wire.post("ack", slot)
            while (message := await wire.receive())[0] == "page":
                got[message[2]] = slots[message[3]].clone()
                wire.post("ack", message[3])
            assert message == ["end", 5]
            assert torch.equal(torch.stack([got[i] for i in range(12)]), before)
            wire.post("done", 5, "mine")
            wire.post("want", 6, "mine", 0)
            assert (await wire.receive())[0] == "gone"
            await c.until_clean()
            wire.post("want", 7, "no such", 0)
            await wire.close()
            await c.until_clean()

    play(test)


def _read(form: PageBytes, page: int) -> torch.Tensor:
    out = torch.empty(form.size, dtype=torch.uint8)
    form.read(page, out)
    return out


def test_weights_change_on_all_workers(model: GLM5, prompts: list[list[int]], tmp_path: Path) -> None:
    """A worker that cannot take them is not asked any more; prefixes of other weights are not fetched."""
    first, other = (agreeable(seed, vocab_size=chat_tokenizer().vocab_size).eval() for seed in (0, 1))
    save_model(other, tmp_path / "other")
    save_model(model, tmp_path / "first")
    models = {0: first, 1: agreeable(0, vocab_size=chat_tokenizer().vocab_size).eval()}

    async def test() -> None:
        async with cluster(model, tmp_path, "pd", models=models) as c:
            assert [a.ids for a in await c.all([Request(ids, GREEDY) for ids in prompts])] == expected(model, prompts)
            await c.fleet.update_weights(WeightUpdate("disk", path=str(tmp_path / "other"), weight_version="2"))
            assert c.fleet.weight_version == "2"
            answers = await c.all([Request(ids, GREEDY) for ids in prompts])
            assert [a.ids for a in answers] == expected(other, prompts)
            assert len(await c.fleet.checksum()) > 10
            c.prefill[0].engine.update_weights = _refuse  # type: ignore[method-assign]
            with pytest.raises(UserError, match="broken"):
                await c.fleet.update_weights(WeightUpdate("disk", path=str(tmp_path / "first"), weight_version="3"))
            with pytest.raises(UserError, match="differ"):
                await c.fleet.checksum()
            answers = await c.all([Request(ids, GREEDY) for ids in prompts])
            assert [a.ids for a in answers] == expected(model, prompts)
            with pytest.raises(UserError, match=r"no-such|broken"):
                await c.fleet.update_weights(WeightUpdate("disk", path="no-such"))
            assert c.fleet.weight_version == "3"

    play(test)


def test_a_worker_with_other_weights_waits_for_an_update(
    model: GLM5, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_model(model, tmp_path / "same")

    async def test() -> None:
        own = {i: agreeable(0, vocab_size=chat_tokenizer().vocab_size).eval() for i in range(3)}
        async with cluster(model, tmp_path, "pd", models=own) as c:
            late = Worker(own[2], SMALL, "decode", "late", tmp_path, False)
            late.engine.weight_version = "other"
            c.workers.append(late)
            await late.start()
            while len(c.fleet.decode) < 2:
                await asyncio.sleep(0.005)
            assert "late has weights other" in caplog.text
            asked = [Request([7 + i] * 80, GREEDY) for i in range(6)]
            assert [a.weight_version for a in await c.all(asked)] == ["0"] * 6
            await c.fleet.update_weights(WeightUpdate("disk", path=str(tmp_path / "same"), weight_version="2"))
            asked = [Request([7 + i] * 80, GREEDY) for i in range(6)]
            assert [a.weight_version for a in await c.all(asked)] == ["2"] * 6
            assert late.engine.tree.queries

    play(test)


def test_the_smallest_worker_says_how_long_texts_may_be(
    model: GLM5, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with cluster(model, tmp_path, "pd") as c:
            assert c.fleet.context == SMALL.context
            small = Worker(model, replace(SMALL, pages=2), "decode", "small", tmp_path, False)
            assert "texts may have 129 tokens, not 300" in caplog.text
            c.workers.append(small)
            await small.start()
            while len(c.fleet.decode) < 2:
                await asyncio.sleep(0.005)
            assert "small takes texts of 129 tokens, the others of 300" in caplog.text
            assert c.fleet.context == 129
            for worker in c.decode:
                assert worker.engine.context >= c.fleet.context

    play(test)


def _full(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def test_memory_of_all_workers_or_of_none(model: GLM5, tmp_path: Path) -> None:
    """One worker has a request, then one has no room to come back: the others are as they were."""
    save_model(model, tmp_path / "same")
    own = {i: agreeable(0, vocab_size=chat_tokenizer().vocab_size).eval() for i in range(3)}
    prompt, tags = [7] * 80, ("weights", "kv_cache", "cuda_graph")

    async def test() -> None:
        async with cluster(model, tmp_path, "ddd", models=own) as c:
            engines = [worker.engine for worker in c.decode]
            want = expected(model, [prompt])[0]
            slow = Slow(c.decode[0], 3)
            stream = await c.decode[0].runner.generate(Request(prompt, replace(GREEDY, max_new_tokens=100)))
            await slow.wait()
            releasing = asyncio.ensure_future(c.fleet.release_memory(tags))
            await asyncio.sleep(0)
            slow.open.set()
            with pytest.raises(UserError, match="1 requests run"):
                await releasing
            assert not any(engine._released for engine in engines)
            assert not c.fleet.paused
            await stream.aclose()
            asked = [Request([7 + i, *prompt], GREEDY) for i in range(6)]
            assert len(await c.all(asked)) == 6  # all go on
            await c.fleet.pause("retract")
            await c.fleet.release_memory(tags)
            assert all(engine._released == set(tags) for engine in engines)

            resume, engines[1].cache.resume = engines[1].cache.resume, _full  # type: ignore[method-assign]
            for some in (("weights", "kv_cache"), ("kv_cache",), tags):
                with pytest.raises(UserError, match=r"out of memory.*resume again"):
                    await c.fleet.resume_memory(some)
                assert all(engine._released == set(tags) for engine in engines)
                assert all(engine.cache.hidden.untyped_storage().nbytes() == 0 for engine in engines)
                assert all(p.numel() == 0 for engine in engines for p in engine.model.parameters())
            engines[1].cache.resume = resume  # type: ignore[method-assign]
            await c.fleet.resume_memory(tags)
            await c.fleet.update_weights(WeightUpdate("disk", path=str(tmp_path / "same")))
            assert c.fleet.paused
            await c.fleet.resume()
            for _ in engines:
                assert (await c.answer(Request(prompt, GREEDY)))[0].ids == want

    play(test)


def test_workers_go_on_where_one_could_not_be_paused_for_a_release(model: GLM5, tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(model, tmp_path, "dd") as c:
            pause, c.decode[1].engine.pause = c.decode[1].engine.pause, _full  # type: ignore[method-assign]
            with pytest.raises(Unavailable, match="out of memory"):
                await c.fleet.release_memory(("kv_cache",))
            c.decode[1].engine.pause = pause  # type: ignore[method-assign]
            assert not any(worker.runner.paused for worker in c.decode)
            assert len(await c.all([Request([7 + i] * 80, GREEDY) for i in range(4)])) == 4

    play(test)


def test_nobody_resumes_while_memory_is_given_back(model: GLM5, tmp_path: Path) -> None:
    """A step in between would make a worker refuse what others have done."""
    order: list[str] = []

    async def test() -> None:
        async with cluster(model, tmp_path, "dd") as c:
            asked, may_go = threading.Event(), threading.Event()
            first = c.decode[0].engine
            release, resume = first.release_memory, first.resume

            def slowly(tags: tuple[str, ...]) -> None:
                asked.set()
                assert may_go.wait(60)
                release(tags)
                order.append("released")

            def resumed() -> None:
                order.append("resumed")
                resume()

            first.release_memory, first.resume = slowly, resumed  # type: ignore[method-assign]
            await c.fleet.pause("keep")
            releasing = asyncio.ensure_future(c.fleet.release_memory(("kv_cache",)))
            while not asked.is_set():
                await asyncio.sleep(0.005)
            resuming = asyncio.ensure_future(c.fleet.resume())
            await asyncio.sleep(0.05)
            assert c.fleet.paused
            assert c.decode[1].runner.paused
            may_go.set()
            await asyncio.gather(releasing, resuming)
            assert order == ["released", "resumed"]
            assert not c.decode[1].runner.paused

    play(test)


def test_a_group_that_one_worker_cannot_join_is_left_by_all(model: GLM5, tmp_path: Path) -> None:
    """They would wait for each other."""
    asked: list[tuple[str, int]] = []

    async def test() -> None:
        async with cluster(model, tmp_path, "pdd") as c:
            left = {w.name: threading.Event() for w in c.workers}

            def join(worker: Worker, group: WeightGroup) -> None:
                asked.append((worker.name, group.rank_offset))
                if group.rank_offset == 3 and group.group_name == "broken":
                    raise UserError("cannot join broken", "Check address, ranks and size")
                if group.group_name == "broken":
                    assert left[worker.name].wait(60)
                    raise UserError("joining broken was given up", "Join it again")

            for worker in c.workers:
                worker.engine.join_group = partial(join, worker)  # type: ignore[method-assign]
                worker.engine.leave_group = lambda name, worker=worker: left[worker.name].set()  # type: ignore[misc]
            with pytest.raises(UserError, match="cannot join broken"):
                await c.fleet.join_group(WeightGroup("127.0.0.1", 1, 1, 4, "broken"))
            assert [left[w.name].is_set() for w in c.workers] == [True, True, False]
            await c.fleet.join_group(WeightGroup("127.0.0.1", 1, 1, 4, "good"))
            assert sorted(rank for _, rank in asked[3:]) == [1, 2, 3]
            for worker in c.workers:
                await worker.kill()
            while any(w.lost is None for w in (*c.fleet.prefill, *c.fleet.decode)):
                await asyncio.sleep(0.005)
            with pytest.raises(Unavailable):
                await c.fleet.join_group(WeightGroup("127.0.0.1", 1, 1, 4, "nobody"))
            with pytest.raises(Unavailable):
                await c.fleet.checksum()

    play(test)


@pytest.mark.parametrize("roles", [("prefill", "decode"), ("decode", "prefill")])
def test_after_all_were_lost_new_workers_are_taken_as_they_come(
    roles: tuple[str, str], model: GLM5, tmp_path: Path
) -> None:
    """They have the checkpoint's weights, and not those that the lost ones were given."""
    save_model(model, tmp_path / "same")

    async def test() -> None:
        own = {i: agreeable(0, vocab_size=chat_tokenizer().vocab_size).eval() for i in range(2)}
        async with cluster(model, tmp_path, "pd", models=own) as c:
            await c.fleet.update_weights(WeightUpdate("disk", path=str(tmp_path / "same"), weight_version="2"))
            for worker in list(c.workers):
                await worker.kill()
            while any(w.lost is None for w in (*c.fleet.prefill, *c.fleet.decode)):
                await asyncio.sleep(0.005)
            for role in roles:
                new = Worker(model, SMALL, role, f"new-{role}", tmp_path, False)
                c.workers.append(new)
                await new.start()
                while c.fleet.failure is not None if role == "decode" else len(c.fleet.prefill) < 2:
                    await asyncio.sleep(0.005)
            [answer] = await c.answer(Request([7] * 80, GREEDY))
            assert (len(answer.ids), answer.weight_version) == (NEW, "0")

    play(test)


def test_a_fault_of_a_worker_is_told_and_not_waited_for(model: GLM5, tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(model, tmp_path, "pd") as c:

            def broken() -> bool:
                raise RuntimeError("no disk")

            c.decode[0].engine.flush_cache = broken  # type: ignore[method-assign]
            with pytest.raises(Unavailable, match="RuntimeError: no disk"):
                await c.fleet.flush()
            with pytest.raises(Unavailable, match="no call"):
                await c.fleet.decode[0].call("format_disk")
            assert len((await c.answer(Request([5] * 70, GREEDY)))[0].ids) == NEW

    play(test)


def _refuse(update: WeightUpdate, received: Any = None) -> None:
    raise UserError("broken", "mend it")


def test_pauses(model: GLM5, prompts: list[list[int]], tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(model, tmp_path, "pd", replace(SMALL, drafts=1)) as c:
            want = expected(model, prompts)
            for mode in ("keep", "retract", "wait"):
                running = asyncio.ensure_future(c.all([Request(ids, GREEDY) for ids in prompts]))
                while not any(one.told for one in c.fleet._alive.values()):
                    await asyncio.sleep(0.001)
                await c.fleet.pause(mode)  # type: ignore[arg-type]
                assert c.fleet.paused
                assert await c.fleet.probe(5.0)
                more = asyncio.ensure_future(c.answer(Request(prompts[-1], GREEDY)))
                await asyncio.sleep(0.05)
                assert not more.done()
                await c.fleet.resume()
                assert [a.ids for a in await running] == want
                assert (await more)[0].ids == want[-1]
            running = asyncio.ensure_future(c.all([Request(ids, GREEDY) for ids in prompts]))
            while not any(one.told for one in c.fleet._alive.values()):
                await asyncio.sleep(0.001)
            pausing = asyncio.ensure_future(c.fleet.pause("wait"))
            await asyncio.sleep(0)
            await c.fleet.resume()  # called off
            await asyncio.wait_for(pausing, 30)
            assert not c.fleet.paused
            assert [a.ids for a in await running] == want
            assert (await asyncio.wait_for(c.answer(Request(prompts[-1], GREEDY)), 30))[0].ids == want[-1]
            running = asyncio.ensure_future(c.all([Request(ids, GREEDY) for ids in prompts]))
            await asyncio.sleep(0.05)
            await c.fleet.pause("abort")
            assert {a.finish.type for a in await running if a.finish} <= {"abort", "length"}
            await c.fleet.resume()
            await c.until_clean()
            assert await c.fleet.flush()
            assert all(w.engine.pool.device.free == 40 for w in c.workers)
            assert {"prefill", "decode"} == set(await c.fleet.info())

    play(test)


def test_what_cannot_be_served_is_refused_before_anything_runs(model: GLM5, tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(model, tmp_path, "pd") as c:
            for request, field in (
                (Request([5] * 300), "context"),
                (Request([5], replace(GREEDY, stop=("",))), "stop"),
                (Request([5], replace(GREEDY, top_p=0.0)), "top_p"),
            ):
                with pytest.raises(UserError, match=field):
                    await c.fleet.generate(request)
            stream = await c.fleet.generate(Request([5] * 70, GREEDY, rid="a"))
            with pytest.raises(UserError, match="in use"):
                await c.fleet.generate(Request([5] * 70, GREEDY, rid="a"))
            await stream.aclose()
            await c.until_clean()
            await c.fleet.release_memory(("kv_cache",))
            with pytest.raises(Unavailable, match="the memory of kv_cache is released"):
                await c.fleet.generate(Request([5], GREEDY))

    play(test)


def test_random_faults_leak_nothing(model: GLM5, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Requests come, are aborted and left while workers die: each ends once, in bounded time, with the right ids."""
    caplog.set_level(logging.ERROR)
    rng = random.Random(3)  # noqa: S311
    config = replace(SMALL, pages=24, host_pages=8, drafts=2, chunk=48, max_running=8, max_batched_tokens=64)

    async def test() -> None:
        async with cluster(model, tmp_path, "pppddd", config) as c:
            texts = [[rng.randrange(6, 320) for _ in range(rng.randrange(1, 240))] for _ in range(12)]
            want = dict(zip(map(tuple, texts), expected(model, texts), strict=True))
            ended: list[str] = []

            async def one(ids: list[int]) -> None:
                request, answer, left = Request(ids, GREEDY), Answer(), rng.random()
                with suppress(Unavailable):
                    stream = await c.fleet.generate(request)
                    async for delta in stream:
                        answer.add(delta)
                        if left < 0.1 and answer.ids:
                            await stream.aclose()
                            ended.append("left")
                            return
                    assert answer.finish is not None
                    assert answer.ids == want[tuple(ids)][: len(answer.ids)]
                    assert answer.finish.type != "length" or len(answer.ids) == NEW
                    ended.append(answer.finish.type)

            tasks = []
            for i in range(90):
                tasks.append(asyncio.ensure_future(one(rng.choice(texts))))
                await asyncio.sleep(rng.random() * 0.03)
                if rng.random() < 0.15 and c.fleet._alive:
                    await c.fleet.abort(rng.choice(list(c.fleet._alive)))
                if i in (30, 50):
                    role = "prefill" if i == 30 else "decode"
                    await rng.choice([w for w in c.workers if w.role == role and not w.stopped]).kill()
            async with asyncio.timeout(30):
                await asyncio.gather(*tasks)
            await c.until_clean()
            assert len(ended) == 90
            assert ended.count("length") > 45
            assert {"abort", "left"} <= set(ended)

    play(test)
    assert "Traceback" not in caplog.text


# --------------------------------------------------------------------------- the wire
def test_who_has_another_key_or_none_is_not_heard(tmp_path: Path) -> None:
    async def test() -> None:
        heard: list[Any] = []

        async def serve(wire: Wire) -> None:
            while True:
                heard.append(await wire.receive())

        at = str(tmp_path / "socket")
        server = await listen(at, KEY, serve)
        with pytest.raises(WireClosed, match="key"):
            await connect(at, b"another")
        reader, writer = await asyncio.open_unix_connection(at)
        writer.write(b"GET / HTTP/1.1\r\n\r\n" + bytes(200))
        await writer.drain()
        writer.write_eof()
        await reader.read()
        writer.close()
        wire = await connect(at, KEY)
        wire.post("hello", GREEDY, -float("inf"), b"\0\xff")
        while not heard:
            await asyncio.sleep(0.01)
        kind, params, number, data = heard[0]
        assert (kind, number, data) == ("hello", -float("inf"), b"\0\xff")
        assert as_type(params, SamplingParams) == GREEDY
        with pytest.raises(WireClosed, match="SamplingParams"):
            as_type({"n": "three"}, SamplingParams)
        wire._writer.write((1 << 40).to_bytes(8, "big"))
        await asyncio.sleep(0.05)
        assert len(heard) == 1
        with pytest.raises(WireClosed, match="no-such"):
            await connect(str(tmp_path / "no-such"), KEY)
        with pytest.raises(UserError, match="no address"):
            await connect("localhost", KEY)
        server.close()

    play(test)


def test_a_connection_that_ends_with_its_loop_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def hold(wire: Wire) -> None:
        await wire.receive()

    async def test() -> None:
        await listen(str(tmp_path / "there"), KEY, hold)
        await connect(str(tmp_path / "there"), KEY)  # and then the loop ends, with both ends open

    asyncio.run(test())
    assert "Traceback" not in caplog.text
