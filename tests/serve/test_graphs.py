"""Recorded steps: static buffers and padding rows change no id and no log-probability. Without a GPU, the same buffers
go through the plain call."""

from __future__ import annotations

import logging
import threading
import warnings
from dataclasses import replace

import pytest
import torch

from glm5.kernels import cuda
from glm5.kernels.cpu.build import available
from glm5.model.glm5 import GLM5
from glm5.model.paged import PagedBatch, PagedCache, Run
from glm5.serve import graphs
from glm5.serve.config import EngineConfig
from glm5.serve.engine import Engine
from glm5.serve.llm import Answer
from glm5.serve.request import Request, SamplingParams
from support.drafting import agreeable
from support.engines import answered
from support.tiny import tiny_config, tiny_model

GREEDY = SamplingParams(max_new_tokens=20, temperature=0.0, ignore_eos=True, logprobs=0)
PLAIN = EngineConfig(pages=40, context=256, max_running=5, chunk=64, cuda_graphs=False)
CUDA = torch.cuda.is_available()
HOPPER, WHY = cuda.available()
LENGTHS = (1, 20, 40, 63, 64, 65, 150)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glm5.serve.executor.recorder_for", lambda device: lambda run: run)


def _prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(6, 320, (n,), generator=generator).tolist() for n in LENGTHS]


def _answers(model: GLM5, config: EngineConfig, params: SamplingParams) -> tuple[list[Answer], Engine]:
    engine = Engine(model, config)
    answers = answered(engine, [Request(ids, params) for ids in _prompts()])
    assert engine.info()["pages"] == config.pages, "the spare page is not given out"
    return answers, engine


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("drafts", [0, 2])
def test_recorded_steps_give_the_same_answers(drafts: int) -> None:
    model = agreeable(0).eval()
    plain, none = _answers(model, replace(PLAIN, drafts=drafts), GREEDY)
    ours, some = _answers(model, replace(PLAIN, drafts=drafts, cuda_graphs=True), GREEDY)
    assert none.info()["recorded_steps"] == 0
    assert some.info()["recorded_steps"] > 10
    if drafts:
        assert some.executor.drafter is not None
        assert all(kind is not None and kind.replayed > 10 for kind in some.executor.drafter.recorded)
        assert some.speculation == none.speculation
        assert some.speculation.accept_length > 1.5
    for a, b in zip(ours, plain, strict=True):
        assert a.ids == b.ids
        torch.testing.assert_close(
            torch.tensor([i.logprob for i in a.info]), torch.tensor([i.logprob for i in b.info]), atol=2e-5, rtol=0
        )


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize(("drafts", "invariant"), [(0, False), (2, False), (2, True)])
def test_sequences_that_decode_beside_prompts_are_replayed_too(drafts: int, invariant: bool) -> None:
    """A long prompt in small chunks: nearly every step of the others is one beside a part of it."""
    if invariant and not available()[0]:
        pytest.skip(available()[1])
    model = agreeable(0).eval()
    long = torch.randint(6, 320, (200,), generator=torch.Generator().manual_seed(5)).tolist()
    told = []
    for config in (PLAIN, replace(PLAIN, cuda_graphs=True)):
        engine = Engine(model, replace(config, drafts=drafts, invariant=invariant, chunk=8, max_batched_tokens=32))
        short = [Request(ids, GREEDY) for ids in _prompts()[:3]]
        told.append((answered(engine, [*short, Request(long, GREEDY)]), engine.info()))
    (plain, none), (ours, some) = told
    assert none["recorded_steps"] == 0
    assert some["recorded_steps"] > (10 if drafts else 25)
    for a, b in zip(ours, plain, strict=True):
        assert a.ids == b.ids
        assert a.info == b.info or not invariant
        torch.testing.assert_close(
            torch.tensor([i.logprob for i in a.info]), torch.tensor([i.logprob for i in b.info]), atol=2e-5, rtol=0
        )


def _filled(model: GLM5, lengths: tuple[int, ...], tables: list[list[int]]) -> PagedCache:
    cache = PagedCache(model.config, 13)
    for ids, table in zip(_ids(*lengths), tables, strict=True):
        model.hidden(torch.tensor([ids]), cache=PagedBatch(cache, [Run(table, 0, len(ids))]))
    return cache


def _ids(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(6, 320, (n,), generator=generator).tolist() for n in lengths]


def test_padding_touches_nothing_but_the_spare_page_and_tables_may_change() -> None:
    model = tiny_model(0).eval()
    lengths, tables = (70, 10, 100), [[3, 1], [4, 11], [0, 7]]
    with torch.inference_mode():
        cache = _filled(model, lengths, tables)
        record = graphs.Graphs(model, cache, spare=12, most=8, context=256, record=lambda run: run)
        for order in ((0, 1, 2), (2, 0), (1,)):  # rows leave, and others take their places
            runs = [Run(tables[i], lengths[i], 1) for i in order]
            before = [pool.clone() for layer in cache.layers for pool in layer]
            outputs = record(runs, [[9 + i] for i in order])
            assert outputs is not None
            batch = PagedBatch(cache, runs)
            expected = model.hidden(batch.flat([[9 + i] for i in order]), cache=batch)[0]
            torch.testing.assert_close(outputs[0], expected, atol=1e-5, rtol=1e-5)
            touched = {int(row) for row in batch.row_N} | set(range(12 * 64, 13 * 64))
            kept = [row for row in range(13 * 64) if row not in touched]
            pools = [pool for layer in cache.layers for pool in layer]
            assert all(torch.equal(a[:, kept], b[:, kept]) for a, b in zip(pools, before, strict=True))


def test_sequences_with_fewer_drafts_are_padded_behind_their_own_rows() -> None:
    """Up to the last slot of a context that ends with a page, and of tables that have no page for the padding."""
    model = tiny_model(0).eval()
    lengths, tables, counts = (127, 10, 62), [[3, 1], [4], [0]], (1, 2, 3)
    with torch.inference_mode():
        cache = _filled(model, lengths, tables)
        record = graphs.Graphs(model, cache, spare=12, most=8, queries=4, context=128, record=lambda run: run)
        runs = [Run(tables[i], lengths[i], counts[i]) for i in range(2)] + [Run([0, 5], 62, 3)]
        ids = [[9 + i + t for t in range(count)] for i, count in enumerate(counts)]
        before = [pool.clone() for layer in cache.layers for pool in layer]
        outputs = record(runs, ids)
        assert outputs is not None
        batch = PagedBatch(cache, runs)
        flat = model.hidden(batch.flat(ids), cache=batch)[0]
        rows = [at + t for at, count in zip(batch.offsets, counts, strict=True) for t in range(count)]
        torch.testing.assert_close(outputs[0], flat[rows], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(outputs[1], model.lm_head(flat)[rows], atol=1e-5, rtol=1e-5)
        behind = {4 * 64 + 12, 4 * 64 + 13, 5 * 64 + 1} | set(range(12 * 64, 13 * 64))
        kept = [row for row in range(13 * 64) if row not in behind | {int(row) for row in batch.row_N}]
        pools = [pool for layer in cache.layers for pool in layer]
        assert all(torch.equal(a[:, kept], b[:, kept]) for a, b in zip(pools, before, strict=True))


@pytest.mark.usefixtures("recorded")
def test_warming_up_records_every_number_of_sequences_once(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(tiny_model(0).eval(), replace(PLAIN, cuda_graphs=True, max_running=5))
    with caplog.at_level(logging.INFO):
        engine.warm()
        engine.warm()
    told = [r.getMessage() for r in caplog.records if "recording" in r.getMessage()]
    assert told == [f"recording a step of {n} sequences, 1 rows each, tables of 4 pages" for n in (1, 2, 4, 5)]
    assert engine.info()["recorded_steps"] == 0
    Engine(tiny_model(0).eval(), PLAIN).warm()  # nothing to do


def test_what_is_not_recorded_is_left_to_the_plain_call(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model(0).eval()
    cache = PagedCache(model.config, 13)

    def refuse(run: graphs.Recorder) -> graphs.Recorder:
        raise RuntimeError("operation not permitted when stream is capturing")

    record = graphs.Graphs(model, cache, spare=12, most=2, context=128, record=refuse)  # type: ignore[arg-type]
    assert record([Run([0], 0, 1), Run([1], 0, 2)], [[1], [1, 2]]) is None, "more rows than are recorded"
    assert record([Run([i], 0, 1) for i in range(3)], [[1]] * 3) is None, "more sequences than are recorded"
    assert record([Run([0], 0, 9)], [list(range(9))]) is None, "a chunk of a prompt"
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert record([Run([0], 0, 1)], [[1]]) is None
        assert record([Run([0], 0, 1)], [[1]]) is None
    assert [r.getMessage() for r in caplog.records] == [
        "steps run plainly, without CUDA graphs: operation not permitted when stream is capturing"
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason=WHY)
@pytest.mark.parametrize("queries", [1, 3])
def test_a_recorded_step_on_a_gpu_gives_what_the_plain_call_gives(queries: int) -> None:
    """At GLM-5's head widths, which the kernels take; contexts below and above k."""
    heads = dict(q_lora_rank=64, kv_lora_rank=512, qk_nope_head_dim=64, qk_rope_head_dim=64, v_head_dim=128)
    config = tiny_config(**heads, index_n_heads=32, index_head_dim=128, index_topk=64, dtype="bfloat16")
    model = GLM5(config, seed=0).to("cuda", torch.bfloat16).eval()
    model.lay_out()
    lengths, tables = (70, 10, 500), [[3, 1, 9], [4, 11], [0, 7, 2, 5, 6, 8, 12, 13, 10]]
    cache = PagedCache(config, 20, device="cuda", dtype=torch.bfloat16)
    record = graphs.recorder_for(model.device)
    assert record is not None
    with torch.inference_mode():
        for ids, table in zip(_ids(*lengths), tables, strict=True):
            batch = PagedBatch(cache, [Run(table, 0, len(ids))])
            model.hidden(batch.flat([ids]), cache=batch)
        recorded = graphs.Graphs(model, cache, spare=19, most=8, queries=queries, context=4096, record=record)
        for order in ((0, 1, 2), (2,), (1, 0)):
            runs, ids = [Run(tables[i], lengths[i], queries) for i in order], _ids(*[queries] * len(order))
            batch = PagedBatch(cache, runs)
            expected = model.hidden(batch.flat(ids), cache=batch)[0].clone()
            outputs = recorded(runs, ids)
            assert outputs is not None
            error = (outputs[0] - expected).float().norm() / expected.float().norm()
            assert float(error) < 0.02
    assert recorded.replayed == 3


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="no CUDA device")
def test_widths_that_no_kernel_takes_run_plainly_on_a_gpu(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model(0).to("cuda", torch.bfloat16).eval()
    engine = Engine(model, EngineConfig(pages=20, context=256, max_running=2))
    for ids in _ids(30, 70):
        engine.add(Request(ids, SamplingParams(max_new_tokens=5, temperature=0.0, ignore_eos=True)))
    with caplog.at_level(logging.WARNING):
        count = sum(len(delta.ids) for _ in range(40) if engine.has_work for delta in engine.step())
    assert count == 10
    assert engine.info()["recorded_steps"] == 0
    assert any("waits for the device" in r.getMessage() for r in caplog.records)
    torch.rand(1, device="cuda")  # torch goes on


@pytest.mark.parametrize("beside", [False, True])
def test_a_call_that_waits_is_refused_and_another_thread_may_wait(
    beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = ["default"]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    out = torch.zeros(1), torch.zeros(1)

    def wait() -> None:
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)

    def run() -> graphs.Outputs:
        thread = threading.Thread(target=wait)
        (thread.start if beside else wait)()
        if beside:
            thread.join()
        return out

    if beside:
        graphs._refuse_waiting(run)
    else:
        with pytest.raises(RuntimeError, match="waits for the device"):
            graphs._refuse_waiting(run)
    assert modes == ["default", "warn", "default"]
