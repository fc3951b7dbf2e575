"""One greedy prompt set, every way to run it: the same ids, the same log-probabilities, those of the model itself and
of transformers."""

from __future__ import annotations

import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import save

from glm5.model.generate import generate
from glm5.model.glm5 import GLM5
from glm5.model.trace import Trace
from glm5.model.weights import disk_tensors, save_model
from glm5.serve.client import Unavailable, WeightUpdate
from glm5.serve.config import EngineConfig
from glm5.serve.engine import Engine
from glm5.serve.llm import Answer
from glm5.serve.prefix import page_keys
from glm5.serve.request import Delta, Finish, Request, SamplingParams
from glm5.serve.transfer import Load
from glm5.utils.errors import CheckpointError, ConfigError, UserError
from support.cluster import cluster, play
from support.drafting import agreeable
from support.engines import answered, drained
from support.golden import load_reference
from support.tiny import tiny_config, tiny_model

K = 24  # index_topk of the tiny model
LENGTHS = (1, 2, 23, 24, 25, 63, 64, 65, 127, 129, 200)  # around k, and around pages of 64
NEW = 12
GREEDY = SamplingParams(max_new_tokens=NEW, temperature=0.0, ignore_eos=True, logprobs=0)
SMALL = EngineConfig(pages=40, context=256, overlap=False)
TOLERANCE = 2e-5


class Expected(NamedTuple):
    ids: list[int]
    logprobs: torch.Tensor


@pytest.fixture(scope="module")
def model() -> GLM5:
    return agreeable(0).eval()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(6, 320, (n,), generator=generator).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def expected(model: GLM5, prompts: list[list[int]]) -> list[Expected]:
    """What the model gives by itself: `generate`, and its log-probabilities from one pass without a cache."""
    answers = []
    for ids in prompts:
        out = list(generate(model, ids, max_new_tokens=NEW, stop_ids=()))
        with torch.no_grad():
            rows = model(torch.tensor([ids + out])).logits[0, len(ids) - 1 : -1].log_softmax(-1)
        answers.append(Expected(out, rows.gather(-1, torch.tensor(out)[:, None])[:, 0]))
    return answers


def run(engine: Engine, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[Answer]:
    """First answers, in order."""
    return answered(engine, [Request(ids, params) for ids in prompts])


def drain(engine: Engine, requests: list[Request]) -> list[Answer]:
    """First answers of requests that are there already."""
    found = drained(engine)
    return [found[request.rid, 0] for request in requests]


def same(found: list[Answer], expected: list[Expected]) -> None:
    for a, b in zip(found, expected, strict=True):
        same_one(a, b)


def same_one(a: Answer, b: Expected) -> None:
    assert a.ids == b.ids, a
    torch.testing.assert_close(torch.tensor(a.logprobs), b.logprobs, rtol=0, atol=TOLERANCE)
    assert a.finish is not None
    assert a.finish.type == "length"


# --------------------------------------------------------------------------- sameness
def cold(engine: Engine, prompts: list[list[int]]) -> list[Answer]:
    return [run(engine, [ids])[0] for ids in prompts]


def together(engine: Engine, prompts: list[list[int]]) -> list[Answer]:
    return run(engine, prompts)


def warm(engine: Engine, prompts: list[list[int]]) -> list[Answer]:
    run(engine, prompts)
    again = run(engine, prompts)
    for ids, answer in zip(prompts, again, strict=True):
        assert answer.cached_tokens == (len(ids) - 1) // 64 * 64
    return again


def beside_strangers(engine: Engine, prompts: list[list[int]]) -> list[Answer]:
    generator = torch.Generator().manual_seed(9)
    for i in range(6):
        ids = torch.randint(6, 320, (40 * i + 3,), generator=generator).tolist()
        engine.add(Request(ids, SamplingParams(max_new_tokens=30, seed=i)))
        engine.step()
    return run(engine, prompts)


def from_host(engine: Engine, prompts: list[list[int]]) -> list[Answer]:
    """Read, pushed out to host memory by others, and back."""
    run(engine, prompts)
    generator = torch.Generator().manual_seed(9)
    restored = [0]
    copy = engine.cache.copy

    def count(kind: str, source: int, target: int) -> None:
        restored[0] += kind == "to_device"
        copy(kind, source, target)

    engine.cache.copy = count  # type: ignore[method-assign]
    for _ in range(12):
        run(engine, [torch.randint(6, 320, (230,), generator=generator).tolist()])
    answers = [run(engine, [ids])[0] for ids in prompts]
    assert restored[0] >= 3
    assert answers[-1].cached_tokens == 192
    return answers


def preempted(engine: Engine, prompts: list[list[int]]) -> list[Answer]:
    """In the middle of decoding a crowd of higher priority takes every page."""
    requests = [Request(ids, GREEDY) for ids in prompts]
    for request in requests:
        engine.add(request)
    answers = {request.rid: Answer() for request in requests}
    for _ in range(4):
        for delta in engine.step():
            answers[delta.rid].add(delta)
    for i in range(5):
        engine.add(Request([10 + i] * 240, replace(GREEDY, max_new_tokens=3), priority=1))
    rest = drain(engine, requests)
    assert engine.scheduler.preemptions > 3
    for request, more in zip(requests, rest, strict=True):
        first = answers[request.rid]
        first.ids, first.info, first.finish = first.ids + more.ids, first.info + more.info, more.finish or first.finish
    return [answers[request.rid] for request in requests]


def retracted(engine: Engine, prompts: list[list[int]]) -> list[Answer]:
    requests = [Request(ids, GREEDY) for ids in prompts]
    for request in requests:
        engine.add(request)
    answers = {request.rid: Answer() for request in requests}
    for step in range(6):
        if step % 2:
            engine.pause("retract")
            engine.resume()
        for delta in engine.step():
            answers[delta.rid].add(delta)
    for request, more in zip(requests, drain(engine, requests), strict=True):
        first = answers[request.rid]
        first.ids, first.info, first.finish = first.ids + more.ids, first.info + more.info, more.finish or first.finish
    return [answers[request.rid] for request in requests]


def after_an_update_and_back(engine: Engine, prompts: list[list[int]]) -> list[Answer]:
    """With prefixes of both weights kept: those of the other ones are not read."""
    first = run(engine, prompts)
    own, other = (save(dict(named)) for named in (disk_tensors(engine.model), disk_tensors(agreeable(1))))
    try:
        engine.update_weights(WeightUpdate("tensor", tensors=(other,), weight_version="other", flush_cache=False))
        changed = run(engine, prompts)
    finally:
        engine.update_weights(WeightUpdate("tensor", tensors=(own,), weight_version="own", flush_cache=False))
    assert all(a.ids != b.ids for a, b in zip(first, changed, strict=True))
    again = run(engine, prompts)
    assert not any(answer.cached_tokens for answer in (*changed, *again))
    return again


def disaggregated(engine: Engine, prompts: list[list[int]]) -> list[Answer]:
    """Read by a prefill worker, answered by a decode worker: two engines of the same settings."""
    found: list[Answer] = []

    async def test() -> None:
        with tempfile.TemporaryDirectory() as home:
            async with cluster(engine.model, Path(home), config=engine.config) as workers:
                decoder, fetched = workers.decode[0].engine, [0]
                end_load = decoder.lending.end_load

                def count(load: Load, *, filled: bool) -> None:
                    fetched[0] += filled
                    end_load(load, filled=filled)

                decoder.lending.end_load = count  # type: ignore[method-assign]
                found.extend(await workers.all([Request(ids, GREEDY) for ids in prompts]))
                await workers.until_clean()
                assert fetched[0] == sum(len(ids) > 1 for ids in prompts)
                engine.speculation = decoder.speculation

    play(test)
    return found


WAYS: dict[str, tuple[EngineConfig, Callable[[Engine, list[list[int]]], list[Answer]]]] = {
    "cold": (SMALL, cold),
    "together": (SMALL, together),
    "warm": (SMALL, warm),
    "beside strangers": (SMALL, beside_strangers),
    "in chunks of 7": (replace(SMALL, chunk=7), together),
    "in chunks of 64": (replace(SMALL, chunk=64, max_batched_tokens=80, max_running=16), together),
    "from host memory": (replace(SMALL, pages=14, host_pages=64), from_host),
    "preempted": (replace(SMALL, pages=24), preempted),
    "retracted": (SMALL, retracted),
    "after an update and back": (SMALL, after_an_update_and_back),
    "disaggregated": (SMALL, disaggregated),
}


def test_transformers_expects_the_same(
    model: GLM5,
    prompts: list[list[int]],
    expected: list[Expected],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where its indexer breaks ties as ours does: by position."""

    def stable(scores: torch.Tensor, k: int, dim: int = -1) -> Any:
        values, indices = scores.sort(dim=dim, descending=True, stable=True)
        return torch.return_types.topk((values[..., :k], indices[..., :k]))

    save_model(model, tmp_path / "model")
    reference = load_reference(tmp_path / "model")
    monkeypatch.setattr(torch.Tensor, "topk", stable)
    for ids, (out, logprobs) in zip(prompts, expected, strict=True):
        with torch.no_grad():
            rows = reference(torch.tensor([ids + out])).logits[0, len(ids) - 1 : -1].log_softmax(-1)
        assert rows.argmax(-1).tolist() == out
        theirs = rows.gather(-1, torch.tensor(out)[:, None])[:, 0]
        torch.testing.assert_close(theirs, logprobs, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(("drafts", "overlap"), [(0, False), (3, False), (0, True), (3, True)])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_same(
    way: str, drafts: int, overlap: bool, model: GLM5, prompts: list[list[int]], expected: list[Expected]
) -> None:
    config, answer = WAYS[way]
    engine = Engine(model, replace(config, drafts=drafts, overlap=overlap))
    same(answer(engine, prompts), expected)
    if drafts:
        assert engine.speculation.accept_length > 1.5
    engine.flush_cache()
    assert engine.pool.device.free == engine.pool.device.count
    engine.close()


@pytest.mark.parametrize("drafts", [0, 2])
def test_a_seed_gives_one_text_however_it_is_run(drafts: int, model: GLM5, prompts: list[list[int]]) -> None:
    params = SamplingParams(max_new_tokens=NEW, temperature=0.8, top_p=0.9, seed=5, ignore_eos=True)
    alone = [run(Engine(model, SMALL), [ids], params)[0].ids for ids in prompts]
    crowd = Engine(model, replace(SMALL, chunk=11, drafts=drafts))
    assert [a.ids for a in run(crowd, prompts, params)] == alone
    options: dict[str, Any] = dict(max_new_tokens=NEW, temperature=0.8, top_p=0.9, seed=5, stop_ids=())
    assert [list(generate(model, ids, speculate=drafts, **options)) for ids in prompts] == alone
    assert len({tuple(ids) for ids in alone}) > 5


@pytest.mark.parametrize("drafts", [0, 2])
def test_answers_have_the_probabilities_that_the_model_gives(drafts: int, model: GLM5) -> None:
    """Of 1,024 answers to one prompt, n at a time: what is drawn, first, second and third id together, with drafts of
    which some are right and some are not."""
    prompt, width = [7, 8, 9, 10, 11], 3
    params = SamplingParams(max_new_tokens=3, temperature=1.3, top_k=width, ignore_eos=True, n=128)
    engine = Engine(model, replace(SMALL, pages=400, max_running=128, drafts=drafts))
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(8):
        engine.add(Request(prompt, replace(params, seed=seed)))
        counts.update(tuple(answer.ids) for answer in drained(engine).values())
    chances: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        grown = {}
        for ids, chance in chances.items():
            with torch.no_grad():
                best = model(torch.tensor([[*prompt, *ids]]), logits_to_keep=1).logits[0, 0].topk(width)
            for id, p in zip(best.indices.tolist(), (best.values / 1.3).softmax(-1).tolist(), strict=True):
                grown[*ids, id] = chance * p
        chances = grown
    assert set(counts) <= set(chances)
    total = counts.total()
    often = {ids: chance for ids, chance in chances.items() if chance * total > 4}
    chi = sum((counts[ids] - chance * total) ** 2 / (chance * total) for ids, chance in often.items())
    free = len(often) - 1
    assert free >= 8
    assert chi < free + 4 * (2 * free) ** 0.5  # four standard deviations
    if drafts:
        assert 0.1 < engine.speculation.acceptance[0] < 0.95


def test_several_answers_share_a_prompt(model: GLM5, prompts: list[list[int]]) -> None:
    params = SamplingParams(max_new_tokens=NEW, seed=1, n=4, ignore_eos=True)
    for drafts in (0, 3):
        engine = Engine(model, replace(SMALL, drafts=drafts))
        request = Request(prompts[-2], params)
        engine.add(request)
        found = drained(engine)
        texts = [tuple(found[request.rid, i].ids) for i in range(4)]
        assert len(set(texts)) == 4
        if drafts == 0:
            plain = texts
    assert texts == plain


def test_shared_pages_hold_no_entries_of_drafts(model: GLM5) -> None:
    """What the tree keeps of an answer is what reading that text would make, the MTP block's entries included, however
    many drafts were accepted last."""
    found = 0
    for length in range(100, 128, 3):
        engine = Engine(model, replace(SMALL, drafts=3))
        ids = [7 + i % 300 for i in range(length)]
        (answer,) = run(engine, [ids], replace(GREEDY, max_new_tokens=130 - length))
        text = [*ids, *answer.ids]
        reader = Engine(model, replace(SMALL, drafts=3))
        run(reader, [text], replace(GREEDY, max_new_tokens=1))
        keys = page_keys(text, 64)
        pairs = list(zip(engine.tree.match(keys), reader.tree.match(keys), strict=False))
        found += len(pairs)
        for mine, read in pairs:
            for a, b in zip(engine.cache.layers, reader.cache.layers, strict=True):
                for x, y in zip(a, b, strict=True):
                    rows = x[0, mine.page * 64 :][:64], y[0, read.page * 64 :][:64]
                    torch.testing.assert_close(*rows, rtol=0, atol=2e-5)
    assert found > 12


# --------------------------------------------------------------------------- weights
@pytest.mark.parametrize("drafts", [0, 3])
def test_an_update_and_back(drafts: int, prompts: list[list[int]], expected: list[Expected], tmp_path: Path) -> None:
    """Old prefixes are not read under new weights, and the first weights give the first answers again."""
    save_model(agreeable(0), tmp_path / "first")
    save_model(agreeable(1), tmp_path / "second")
    engine = Engine(agreeable(0).eval(), replace(SMALL, drafts=drafts))
    same(run(engine, prompts), expected)
    sums = engine.checksum()
    for flush in (True, False):
        engine.update_weights(
            WeightUpdate("disk", path=str(tmp_path / "second"), weight_version=f"b{flush}", flush_cache=flush)
        )
        changed = run(engine, prompts)
        assert all(a.cached_tokens == 0 for a in changed)
        assert [a.ids for a in changed] == [a.ids for a in run(Engine(agreeable(1).eval(), SMALL), prompts)]
        assert [a.ids for a in changed] != [a.ids for a in expected]
        engine.update_weights(
            WeightUpdate("disk", path=str(tmp_path / "first"), weight_version=f"a{flush}", flush_cache=flush)
        )
        same(run(engine, prompts), expected)
        assert engine.checksum() == sums
    assert "model.layers.3.eh_proj.weight" in sums


def test_weights_sent_as_tensors(prompts: list[list[int]], expected: list[Expected]) -> None:
    """All of them, in two parts under public names; then parts that do not fit, which change nothing."""
    engine = Engine(agreeable(1).eval(), SMALL)
    run(engine, prompts[:3])
    named = {name: tensor.contiguous() for name, tensor in disk_tensors(agreeable(0))}
    parts = [dict(list(named.items())[i::2]) for i in range(2)]
    for i, part in enumerate(parts):
        engine.update_weights(WeightUpdate("tensor", tensors=(save(part),), weight_version=f"part {i}"))
    same(run(engine, prompts), expected)
    assert engine.weight_version == "part 1"
    sums = engine.checksum()
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    for wrong, said in (
        ({"no.such": torch.ones(2)}, "unknown: no.such"),
        ({name: torch.ones(2, 2)}, "misshapen"),
        ({name: torch.full_like(named[name], torch.nan)}, "not finite"),
    ):
        whole = {"model.norm.weight": torch.zeros_like(named["model.norm.weight"]), **wrong}
        with pytest.raises(CheckpointError, match=said):
            engine.update_weights(WeightUpdate("tensor", tensors=(save(whole),)))
    with pytest.raises(CheckpointError, match="no safetensors file"):
        engine.update_weights(WeightUpdate("tensor", tensors=(b"garbage",)))
    assert engine.checksum() == sums


def test_weights_that_do_not_fit_change_nothing(model: GLM5, tmp_path: Path) -> None:
    save_model(tiny_model(hidden_size=32), tmp_path)
    engine = Engine(model, SMALL)
    before = engine.checksum()
    with pytest.raises(UserError, match="another model's configuration"):
        engine.update_weights(WeightUpdate("disk", path=str(tmp_path)))
    assert engine.checksum() == before


# --------------------------------------------------------------------------- memory
def held(engine: Engine) -> int:
    """Bytes of weights and of pages on the device."""
    tensors = [*engine.model.state_dict().values(), *engine.cache.tensors()]
    return sum(t.untyped_storage().nbytes() for t in tensors)


@pytest.mark.parametrize("drafts", [0, 3])
def test_memory_is_released_and_taken_again(
    drafts: int, prompts: list[list[int]], expected: list[Expected], tmp_path: Path
) -> None:
    """As a trainer on the same device asks for it: weights first, pushed in two parts, then the pages."""
    engine = Engine(agreeable(0).eval(), replace(SMALL, drafts=drafts, overlap=True))
    same(run(engine, prompts), expected)
    before = held(engine)
    waiting = Request(prompts[-1], GREEDY)
    engine.add(waiting)
    first = Answer()
    for delta in engine.step():
        first.add(delta)
    with pytest.raises(UserError, match="retract"):
        engine.release_memory(("kv_cache",))
    engine.pause("retract")
    engine.release_memory(("weights", "kv_cache", "cuda_graph"))
    assert held(engine) == 0
    assert not engine.has_work
    assert list(engine.tree.nodes()) == []
    with pytest.raises(Unavailable, match="cuda_graph, kv_cache, weights is released"):
        engine.add(Request(prompts[0], GREEDY))
    with pytest.raises(UserError, match="Resume it first"):
        engine.update_weights(WeightUpdate("disk", path=str(tmp_path)))
    engine.release_memory(("weights",))
    engine.resume_memory(("weights",))
    with pytest.raises(Unavailable, match="kv_cache"):
        engine.add(Request(prompts[0], GREEDY))
    with pytest.raises(UserError, match="weights have not come"):  # and not: resume the pages
        engine.checksum()
    named = {name: tensor.contiguous() for name, tensor in disk_tensors(agreeable(0))}
    parts = [dict(list(named.items())[i::2]) for i in range(2)]
    engine.update_weights(WeightUpdate("tensor", tensors=(save(parts[0]),)))
    engine.resume_memory(("kv_cache", "cuda_graph"))
    assert held(engine) == before
    with pytest.raises(Unavailable, match=f"{len(parts[1])} weights have not come"):
        engine.check(Request(prompts[0], GREEDY))
    with pytest.raises(UserError, match="have not come"):
        engine.checksum()
    assert not engine.has_work
    engine.update_weights(WeightUpdate("tensor", tensors=(save(parts[1]),)))
    rest = drain(engine, [waiting])[0]
    first.ids, first.info, first.finish = first.ids + rest.ids, first.info + rest.info, rest.finish
    same([first, *run(engine, prompts)], [expected[-1], *expected])

    save_model(agreeable(0), tmp_path)
    engine.release_memory(("weights",))
    engine.resume_memory(("weights", "kv_cache"))
    engine.update_weights(WeightUpdate("disk", path=str(tmp_path)))
    same(run(engine, prompts), expected)
    engine.close()


@pytest.mark.parametrize("where", ["weights", "pages"])
def test_memory_that_is_not_there_is_taken_wholly_or_not_at_all(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(agreeable(0).eval(), replace(SMALL, drafts=1))
    tags = ("weights", "kv_cache")
    engine.release_memory(tags)
    with monkeypatch.context() as faults:
        if where == "pages":
            faults.setattr(engine.cache.hidden, "zero_", _no_room)  # after all others
        else:
            faults.setattr(list(engine.model.parameters())[-1], "new_empty_strided", _no_room)
        for _ in range(2):
            with pytest.raises(UserError, match="out of memory"):
                engine.resume_memory(tags)
            assert held(engine) == 0
            assert "kv_cache, weights is released" in (engine.resting or "")
    assert engine.resume_memory(("weights",)) == ("weights",)
    assert engine.resume_memory(tags) == ("kv_cache",)
    assert engine.resume_memory(tags) == ()
    engine.update_weights(WeightUpdate("tensor", tensors=(save(dict(disk_tensors(agreeable(0)))),)))
    assert run(engine, [[5, 6, 7]])[0].ids == run(Engine(agreeable(0).eval(), SMALL), [[5, 6, 7]])[0].ids


def _no_room(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


# --------------------------------------------------------------------------- what else is asked
def test_prompt_logprobs(model: GLM5, prompts: list[list[int]]) -> None:
    ids = prompts[-1]
    engine = Engine(model, replace(SMALL, chunk=30))
    for _ in range(2):  # the second time nothing may come from cached pages
        (answer,) = run(engine, [ids], replace(GREEDY, prompt_logprobs=2))
        assert answer.prompt_info[0] is None
        assert len(answer.prompt_info) == len(ids)
        with torch.no_grad():
            rows = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        found = torch.tensor([info.logprob for info in answer.prompt_info[1:] if info is not None])
        torch.testing.assert_close(found, rows.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(("drafts", "way"), [(0, "plain"), (3, "plain"), (0, "preempted"), (3, "preempted")])
def test_routed_experts(drafts: int, way: str, model: GLM5, prompts: list[list[int]], expected: list[Expected]) -> None:
    """Of every token but the last, in every layer, those that one pass over the text chooses; also of cached prompts,
    of several answers to one, and when pages were lost in the middle."""
    params = replace(GREEDY, routed_experts=True)
    engine = Engine(model, replace(SMALL, drafts=drafts, chunk=30, pages=40 if way == "plain" else 24))
    if way == "plain":
        run(engine, prompts)  # so that prefixes are known
        answers = run(engine, prompts, params)
        several = Request(prompts[-2], replace(params, temperature=0.9, n=2, seed=4))
        engine.add(several)
        two = list(drained(engine).values())
        texts = [prompts[-2], prompts[-2]]
    else:
        requests = [Request(ids, params) for ids in prompts]
        by_rid = {request.rid: Answer() for request in requests}
        for request in requests:
            engine.add(request)
        for step in range(400):
            if step == 5:
                for i in range(5):
                    engine.add(Request([10 + i] * 240, replace(GREEDY, max_new_tokens=3), priority=1))
            for delta in engine.step():
                if delta.rid in by_rid:
                    by_rid[delta.rid].add(delta)
        assert engine.scheduler.preemptions > 3
        answers, two, texts = [by_rid[request.rid] for request in requests], [], []
    same(answers, expected)
    for ids, answer in zip([*prompts, *texts], [*answers, *two], strict=True):
        whole = [*ids, *answer.ids]
        trace = Trace()
        with torch.no_grad():
            model(torch.tensor([whole[:-1]]), trace=trace)
        told = np.frombuffer(answer.routed, np.int32).reshape(len(whole) - 1, model.config.num_hidden_layers, -1)
        chosen = [experts.numpy() for _, _, experts in trace.router]
        dense = model.config.num_hidden_layers - len(chosen)
        assert dense == 1
        assert not told[:, :dense].any()
        for layer, experts in enumerate(chosen, dense):
            np.testing.assert_array_equal(np.sort(told[:, layer]), np.sort(experts.reshape(len(told), -1)))


def test_routed_experts_are_refused_where_there_are_none() -> None:
    dense = tiny_model(0, first_k_dense_replace=3, num_hidden_layers=3)
    with pytest.raises(UserError, match="routed_experts"):
        Engine(dense, SMALL).add(Request([5], replace(GREEDY, routed_experts=True)))


def test_a_poisoned_request_fails_alone(prompts: list[list[int]], expected: list[Expected]) -> None:
    """An id whose embedding is NaN: its request ends in an error, the others' answers stay exact, also in its pages."""
    used = {i for ids in (*prompts, *(e.ids for e in expected)) for i in ids}
    unused = min(set(range(6, 320)) - used)
    for drafts in (0, 3):
        model = agreeable(0).eval()
        with torch.no_grad():
            model.model.embed_tokens.weight[unused] = torch.nan
        engine = Engine(model, replace(SMALL, drafts=drafts, pages=24))
        poison = Request([7] * 70 + [unused] * 50, GREEDY)
        engine.add(poison)
        requests = [Request(ids, GREEDY) for ids in prompts]
        for request in requests:
            engine.add(request)
        bad, *good = drain(engine, [poison, *requests])
        assert bad.finish is not None
        assert bad.finish.type == "error"
        assert bad.ids == []
        same(good, expected)
        same(run(engine, prompts), expected)  # in pages that it has held


def test_an_abort_frees_the_pages(model: GLM5, prompts: list[list[int]]) -> None:
    engine = Engine(model, replace(SMALL, drafts=2))
    request = Request(prompts[-1], GREEDY)
    engine.add(request)
    engine.step()
    engine.abort(request.rid)
    engine.abort("unknown")
    assert not engine.has_work
    assert engine.flush_cache()
    assert engine.pool.device.free == engine.pool.device.count


@pytest.mark.parametrize("drafts", [0, 3])
def test_what_happens_while_a_step_runs(drafts: int, prompts: list[list[int]], expected: list[Expected]) -> None:
    """The model is held in the middle of a step: requests come and are aborted, the engine is paused and its weights
    are replaced. Nobody's ids change, and the deltas of the step are told once."""
    model, held, free = agreeable(0).eval(), threading.Event(), threading.Event()
    engine = Engine(model, replace(SMALL, drafts=drafts, overlap=True))
    work = engine.executor.run

    def gated(*given: Any) -> Any:
        held.set()
        assert free.wait(20)
        return work(*given)

    first, gone, *others = [Request(ids, GREEDY) for ids in prompts]
    answers = {request.rid: Answer() for request in (first, gone, *others)}

    def take(deltas: list[Delta]) -> None:
        for delta in deltas:
            answers[delta.rid].add(delta)

    engine.add(first)
    engine.add(gone)
    for _ in range(3):
        take(engine.advance(lambda: None))
    engine.executor.run = gated  # type: ignore[method-assign]
    free.clear()
    take(engine.advance(lambda: None))
    assert held.wait(20)
    assert engine.flying
    for request in others:
        engine.add(request)
    engine.abort(gone.rid)
    engine.scheduler.check()
    assert not engine.flush_cache()
    free.set()
    engine.pause("retract")
    assert not engine.flying
    assert not engine.scheduler.running
    told = engine.settle()
    assert [delta.rid for delta in told] == [first.rid]
    take(told)
    assert engine.settle() == []
    while engine.has_work:
        take(engine.advance(lambda: None))
        engine.scheduler.check()
    for request, want in zip((first, *others), (expected[0], *expected[2:]), strict=True):
        same_one(answers[request.rid], want)
    assert answers[gone.rid].finish is None
    assert answers[gone.rid].ids == expected[1].ids[: len(answers[gone.rid].ids)]
    assert not engine._answers
    assert engine._drafter is None or not engine._drafter._places
    engine.close()


def test_an_error_of_the_model_reaches_whoever_advances(model: GLM5) -> None:
    engine = Engine(model, replace(SMALL, overlap=True))

    def fail(*given: Any) -> Any:
        raise RuntimeError("out of memory")

    engine.executor.run = fail  # type: ignore[method-assign]
    engine.add(Request([5], GREEDY))
    engine.advance(lambda: None)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.advance(lambda: None)
    engine.close()


def test_stop_ids_of_the_model_and_the_request(model: GLM5, prompts: list[list[int]], expected: list[Expected]) -> None:
    third = expected[-1].ids[2]
    for drafts in (0, 3):
        engine = Engine(model, replace(SMALL, drafts=drafts))
        (answer,) = run(engine, [prompts[-1]], replace(GREEDY, stop_token_ids=(third,)))
        cut = expected[-1].ids.index(third) + 1
        assert answer.ids == expected[-1].ids[:cut]
        assert answer.finish is not None
        assert (answer.finish.type, answer.finish.matched) == ("stop", third)


def test_texts_are_as_long_as_pages_allow(model: GLM5, caplog: pytest.LogCaptureFixture) -> None:
    """What has no limit of its own ends there, and nobody is promised more."""
    engine = Engine(model, replace(SMALL, pages=2))
    assert engine.context == engine.info()["context"] == 129
    assert "texts may have 129 tokens, not 256" in caplog.text
    (answer,) = run(engine, [[7] * 100], replace(GREEDY, max_new_tokens=None))
    assert len(answer.ids) == 29
    assert answer.finish == Finish("length")
    with pytest.raises(UserError, match="no room in a context of 129"):
        engine.add(Request([7] * 129, GREEDY))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        (dict(context=2000), "context"),
        (dict(memory_gib=0.0, pages=0), "memory_gib"),
        (dict(pages=-1), "pages=-1"),
        (dict(max_running=0), "max_running"),
        (dict(max_running=0, pages=0), "max_running"),
    ],
)
def test_settings_out_of_range(changes: dict[str, int], field: str, model: GLM5) -> None:
    with pytest.raises(ConfigError, match=field):
        Engine(model, replace(SMALL, **changes))


def test_prefixes_go_as_the_setting_says(model: GLM5) -> None:
    """One that was used twice stays, though another was used later; by time it would go."""
    kept = {}
    often, later = [7] * 129, [8] * 129
    for eviction in ("lru", "frequency"):
        engine = Engine(model, replace(SMALL, pages=7, eviction=eviction))
        for ids in (often, often, often, later):
            run(engine, [ids], replace(GREEDY, max_new_tokens=1))
        run(engine, [[9] * 250], replace(GREEDY, max_new_tokens=1))  # takes four of the seven pages
        kept[eviction] = [engine.check(Request(ids)) for ids in (often, later)]
    assert kept == {"lru": [64, 128], "frequency": [128, 64]}


def test_drafts_need_an_mtp_block() -> None:
    with pytest.raises(ConfigError, match="drafts=2"):
        Engine(tiny_model(num_nextn_predict_layers=0), replace(SMALL, drafts=2))
    assert tiny_config().num_nextn_predict_layers == 1
