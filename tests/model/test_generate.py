"""Generation: greedy against the plain forward pass, what ends it, what is never chosen, and the cache left behind.

`test_speculate` and `test_sampling` have the rest.
"""

from __future__ import annotations

import pytest
import torch

from glm5.model import generate as generate_module
from glm5.model.generate import generate
from glm5.model.speculate import SpeculationStats
from glm5.utils.errors import NumericalError, UserError
from support.drafting import TOPK, agreeable, greedy_without_cache, prompt
from support.tiny import tiny_model


# --------------------------------------------------------------------------- plain decoding
@pytest.mark.parametrize("length", [1, TOPK - 1, TOPK, 60])
def test_greedy_is_the_argmax_of_the_forward_pass(length: int) -> None:
    model, ids = tiny_model(2), prompt(length)
    expected = greedy_without_cache(model, ids, 8)
    assert list(generate(model, ids, max_new_tokens=8, stop_ids=())) == expected
    assert list(model.generate(ids[None], max_new_tokens=8, stop_ids=())) == expected
    assert list(generate(model, ids.tolist(), max_new_tokens=8, stop_ids=(), seed=3)) == expected


def test_sparse_and_dense_differ() -> None:
    model, ids = tiny_model(2), prompt(100)
    sparse, dense = (list(generate(model, ids, max_new_tokens=12, stop_ids=(), sparse=s)) for s in (True, False))
    assert sparse != dense


@pytest.mark.parametrize("speculate", [0, 2])
def test_prefill_in_chunks_changes_nothing(monkeypatch: pytest.MonkeyPatch, speculate: int) -> None:
    model, ids = agreeable(2), prompt(100)
    whole_stats, stats = SpeculationStats(), SpeculationStats()
    options = dict(max_new_tokens=12, stop_ids=(), speculate=speculate)
    whole = list(generate(model, ids, stats=whole_stats, **options))  # type: ignore[arg-type]
    for chunk in (1, 7, 50, 99, 100):
        stats = SpeculationStats()
        monkeypatch.setattr(generate_module, "PREFILL_CHUNK", chunk)
        assert list(generate(model, ids, stats=stats, **options)) == whole  # type: ignore[arg-type]
        assert stats == whole_stats  # the drafts too


@pytest.mark.parametrize("speculate", [0, 3])
def test_stop_ids_end_the_text_and_are_its_last(speculate: int) -> None:
    model, ids = agreeable(1), prompt(23, seed=33)
    free = list(generate(model, ids, max_new_tokens=30, stop_ids=()))
    for at in range(2, 12):
        stop = free[at]
        first = free.index(stop)
        assert list(generate(model, ids, stop_ids=[stop], speculate=speculate, max_new_tokens=30)) == free[: first + 1]


def test_stop_ids_default_to_the_configuration() -> None:
    model, ids = tiny_model(2), prompt(23)
    free = list(generate(model, ids, max_new_tokens=10, stop_ids=()))
    ending = tiny_model(2, eos_token_id=(free[4],))
    assert list(generate(ending, ids, max_new_tokens=10)) == free[: free.index(free[4]) + 1]


@pytest.mark.parametrize("speculate", [0, 1, 4])
@pytest.mark.parametrize("spare", [1, 2, 5, 9])
def test_stops_at_the_context_limit(speculate: int, spare: int) -> None:
    model, ids = agreeable(1, max_position_embeddings=40), prompt(40 - spare)
    out = list(generate(model, ids, stop_ids=(), speculate=speculate))
    assert len(out) == spare
    assert list(generate(model, ids, stop_ids=(), speculate=speculate, max_new_tokens=100)) == out
    assert len(list(generate(model, ids, stop_ids=(), speculate=speculate, max_new_tokens=1))) == 1


def test_streams_lazily_and_leaves_the_callers_modes_alone() -> None:
    model = tiny_model(2)
    stream = generate(model, prompt(5), max_new_tokens=1000, stop_ids=())
    for _ in range(3):
        assert isinstance(next(stream), int)
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


# --------------------------------------------------------------------------- sampled
@pytest.mark.parametrize("temperature", [0.0, 2.0])
@pytest.mark.parametrize("speculate", [0, 2])
def test_ids_that_pad_the_vocabulary_are_never_chosen(speculate: int, temperature: float) -> None:
    model = agreeable(1)
    with torch.no_grad():
        model.lm_head.weight[300:] *= 3  # where the model errs
    options = dict(max_new_tokens=30, temperature=temperature, seed=1, stop_ids=(), speculate=speculate)
    assert max(generate(model, prompt(20), **options)) >= 300  # type: ignore[arg-type]
    new = list(generate(model, prompt(20), vocab_size=300, **options))  # type: ignore[arg-type]
    assert max(new) < 300
    if temperature == 0:
        assert new == list(generate(model, prompt(20), max_new_tokens=30, stop_ids=(), vocab_size=300))


def test_seed_repeats_and_touches_no_global_state() -> None:
    model, ids = tiny_model(2), prompt(9)
    options = dict(max_new_tokens=12, temperature=1.0, stop_ids=())
    state = torch.get_rng_state()
    a, b, c = (list(generate(model, ids, seed=s, **options)) for s in (1, 1, 2))  # type: ignore[arg-type]
    assert a == b != c
    assert list(generate(model, ids, **options)) != list(generate(model, ids, **options))  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("speculate", "temperature"), [(0, 0.0), (3, 0.0), (0, 0.8), (3, 0.8)])
def test_logprobs_are_the_models_own(speculate: int, temperature: float) -> None:
    model, ids = agreeable(1), prompt(30)
    logprobs: list[float] = []
    new = list(
        generate(
            model,
            ids,
            max_new_tokens=20,
            temperature=temperature,
            top_k=5,
            seed=1,
            stop_ids=(),
            speculate=speculate,
            logprobs=logprobs,
        )
    )
    with torch.no_grad():
        logits = model(torch.cat((ids, torch.tensor(new)))[None]).logits[0, len(ids) - 1 : -1]
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(new)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(logprobs), expected, rtol=0, atol=5e-5)


# --------------------------------------------------------------------------- the cache between calls
@pytest.mark.parametrize("speculate", [0, 3])
def test_conversation_continues_from_the_cache(speculate: int) -> None:
    model, turns = agreeable(2), [prompt(n, seed=n).tolist() for n in (20, 5, 11)]
    cache, text, carry = model.new_cache(1), [], []
    for turn in turns:
        text += turn
        fresh = list(generate(model, text, max_new_tokens=9, stop_ids=()))
        options = dict(max_new_tokens=9, stop_ids=(), speculate=speculate, cache=cache)
        assert list(generate(model, [*carry, *turn], **options)) == fresh  # type: ignore[arg-type]
        text += fresh
        assert cache.uniform == len(text) - 1
        carry = fresh[-1:]
    if speculate:
        assert cache.draft is not None
        assert cache.draft.first == 0  # the MTP layer has followed from the beginning


def test_speculation_may_begin_and_pause_in_the_middle() -> None:
    """Where the MTP layer has not followed, it drafts from what it has seen; the text is the same."""
    model, text, carry = agreeable(2), prompt(30, seed=1).tolist(), []
    cache = model.new_cache(1)
    new_input, firsts = text, []
    for speculate in (0, 2, 0, 2, 2):
        fresh = list(generate(model, text, max_new_tokens=9, stop_ids=()))
        stream = generate(model, new_input, max_new_tokens=9, stop_ids=(), speculate=speculate, cache=cache)
        assert list(stream) == fresh
        carry, more = fresh[-1:], prompt(3, seed=len(text)).tolist()
        text, new_input = [*text, *fresh, *more], [*carry, *more]
        firsts.append(cache.draft.first if cache.draft else None)
    # It began at call 2, fell behind in call 3, began anew at call 4 and went on in call 5.
    assert firsts[0] is None
    assert firsts[1] == firsts[2] == 38
    assert firsts[3] == firsts[4] == 38 + 24


def test_drafts_read_no_slot_that_the_block_did_not_write() -> None:
    model, ids = agreeable(1), prompt(40, seed=5)
    counts = []
    for garbage in (0.0, 50.0):
        cache, stats = model.new_cache(1), SpeculationStats()
        carry = list(generate(model, ids, max_new_tokens=1, stop_ids=(), cache=cache))
        for tensor in cache.layers[-1]:
            tensor[:, :40] = garbage
        list(generate(model, carry, max_new_tokens=40, stop_ids=(), speculate=2, cache=cache, stats=stats))
        counts.append(stats)
    assert counts[0] == counts[1]
    assert sum(counts[0].accepted) > 0


def test_cropped_cache_starts_another_branch() -> None:
    model, ids = agreeable(2), prompt(40, seed=6)
    cache = model.new_cache(1)
    list(generate(model, ids, max_new_tokens=15, stop_ids=(), speculate=2, cache=cache))
    for length in (45, 40, 25, 1):
        cache.crop(length)
        other = prompt(6, seed=length).tolist()
        kept = [*ids.tolist(), *greedy_without_cache(model, ids, 15)][:length]
        fresh = list(generate(model, [*kept, *other], max_new_tokens=8, stop_ids=()))
        assert list(generate(model, other, max_new_tokens=8, stop_ids=(), speculate=2, cache=cache)) == fresh
        cache.crop(length)
        ids = torch.tensor(kept)


def test_cache_that_generate_grew_can_be_used_in_any_mode() -> None:
    model, ids = tiny_model(2), prompt(10)
    cache = model.new_cache(1)
    new = list(generate(model, ids, max_new_tokens=200, stop_ids=(), cache=cache))
    with torch.no_grad():
        logits = model(torch.tensor([new[-1:]]), cache=cache).logits[0, -1]
        whole = model(torch.cat((ids, torch.tensor(new)))[None], logits_to_keep=1).logits[0, -1]
    torch.testing.assert_close(logits, whole, rtol=0, atol=5e-5)


# --------------------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        ([], {}, "prompt is empty"),
        (torch.zeros(1, 0, dtype=torch.int64), {}, "prompt is empty"),
        ([[1, 2], [3, 4]], {}, "input_ids"),
        ([0.5], {}, "input_ids"),
        ([1] * 1024, {}, "leaves no room"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens=0"),
        ([1], {"temperature": -1.0}, "temperature"),
        ([1], {"temperature": float("nan")}, "temperature"),
        ([1], {"top_p": 0.0}, "top_p"),
        ([1], {"top_k": -1}, "top_k"),
        ([1], {"min_p": 1.5}, "min_p"),
        ([1], {"speculate": -1}, "speculate"),
    ],
)
def test_bad_arguments_are_refused_at_the_call(ids: object, options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        generate(tiny_model(0), ids, **options)  # type: ignore[arg-type]


def test_ids_outside_the_vocabulary_and_foreign_caches() -> None:
    model = tiny_model(0)
    cache = model.new_cache(1)
    with pytest.raises(UserError, match="320"):
        next(generate(model, [1, 320], cache=cache))
    assert cache.uniform == 0
    with pytest.raises(UserError, match="cache"):
        generate(model, [1], cache=model.new_cache(2))


def test_no_mtp_block_no_speculation() -> None:
    model = tiny_model(0, num_nextn_predict_layers=0)
    assert len(list(generate(model, [7], max_new_tokens=3, stop_ids=()))) == 3
    with pytest.raises(UserError, match=r"speculate=1: .*no MTP block"):
        generate(model, [7], speculate=1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_an_error(temperature: float) -> None:
    model = tiny_model(0)
    with torch.no_grad():
        model.lm_head.weight[5, 0] = torch.nan
    with pytest.raises(NumericalError, match="NaN"):
        next(generate(model, [7], temperature=temperature))


# --------------------------------------------------------------------------- on a CUDA device
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="generation on CUDA goes untested here: no device")
def test_generates_on_a_cuda_device() -> None:
    model, ids = agreeable(1), prompt(60, seed=5)
    expected = list(generate(model, ids, max_new_tokens=24, stop_ids=()))
    model = model.cuda()
    cache, stats, logprobs = model.new_cache(1), SpeculationStats(), []
    assert list(generate(model, ids, max_new_tokens=24, stop_ids=())) == expected
    drafted = generate(
        model, ids, max_new_tokens=24, stop_ids=(), speculate=3, cache=cache, stats=stats, logprobs=logprobs
    )
    assert list(drafted) == expected
    assert cache.layers[0][0].is_cuda
    assert stats.accept_length > 1
    assert len(logprobs) == 24
    for speculate in (0, 2):
        options = dict(max_new_tokens=24, temperature=1.0, top_p=0.9, seed=3, speculate=speculate, stop_ids=())
        a, b = (list(generate(model, ids, **options)) for _ in range(2))  # type: ignore[arg-type]
        assert a == b
