"""Generation: greedy against the plain forward pass, speculation against no speculation, sampling against its own
distribution, and the cache that is left behind."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from glm5.kernels.visibility import Visibility
from glm5.model import generate as generate_module
from glm5.model.generate import generate
from glm5.model.glm5 import GLM5
from glm5.model.sampling import Sampling
from glm5.model.speculate import SpeculationStats, accept_sampled, follow, propose
from glm5.utils.errors import NumericalError, UserError
from support.tiny import tiny_config, tiny_model

TOPK = tiny_config().index_topk


def prompt(length: int, seed: int = 0) -> Tensor:
    return torch.randint(6, 320, (length,), generator=torch.Generator().manual_seed(seed))


def agreeable(seed: int, scale: float = 0.05, **changes: object) -> GLM5:
    """A model whose drafts are often right: what a layer adds is small beside the embedding, and the MTP block passes
    the embedding on with little of the hidden state, so that both predict from nearly the same state."""
    model = tiny_model(seed, **changes)
    with torch.no_grad():
        mtp, width = model.mtp, model.config.hidden_size
        mtp.eh_proj.weight.copy_(torch.cat((torch.eye(width), 0.03 * mtp.eh_proj.weight[:, width:]), dim=1))
        mtp.enorm.weight.fill_(0.3)
        mtp.shared_head.norm.weight.copy_(model.model.norm.weight)
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
                parameter.mul_(scale)
    return model


@torch.no_grad()
def greedy_without_cache(model: GLM5, ids: Tensor, n: int) -> list[int]:
    ids = ids[None]
    for _ in range(n):
        ids = torch.cat((ids, model(ids, logits_to_keep=1).logits.argmax(-1)), dim=1)
    return ids[0, -n:].tolist()


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


# --------------------------------------------------------------------------- speculation, greedy
@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("make", [tiny_model, agreeable])
def test_speculation_gives_the_same_tokens(make: type[GLM5], k: int) -> None:
    """Prompts below, at and beyond the top-k; random models reject nearly all, agreeable ones accept many."""
    stats = SpeculationStats()
    for seed, length in itertools.product((0, 1), (1, TOPK - 4, 60)):
        model, ids = make(seed), prompt(length, seed)
        plain = list(generate(model, ids, max_new_tokens=24, stop_ids=()))
        assert list(generate(model, ids, max_new_tokens=24, stop_ids=(), speculate=k, stats=stats)) == plain
    if make is agreeable:
        assert stats.accept_length > 1.3
        assert 0.25 < stats.acceptance[0] < 0.9  # both outcomes happen


@pytest.mark.parametrize("changes", [{"attention": "gqa"}, {"n_shared_experts": 0}])
def test_speculation_of_other_shapes(changes: dict[str, object]) -> None:
    model = GLM5(tiny_config(head_dim=24, num_key_value_heads=4, initializer_range=0.3, **changes), seed=4).eval()
    ids = prompt(30)
    plain = list(generate(model, ids, max_new_tokens=16, stop_ids=()))
    assert list(generate(model, ids, max_new_tokens=16, stop_ids=(), speculate=3)) == plain


@torch.no_grad()
def reference_cache(model: GLM5, ids: list[int]) -> list[list[Tensor]]:
    """The cache of one prefill, and the MTP layer's slots from its hidden states; all but the last of those."""
    cache = model.new_cache(1)
    hidden = model.hidden(torch.tensor([ids]), cache=cache)
    model.draft_hidden(hidden[:, :-1], torch.tensor([ids[1:]]), cache, 0)
    return [[t[:, : len(ids)] for t in layer] for layer in cache.layers]


@pytest.mark.parametrize("k", [1, 2, 4])
def test_cache_after_drafts_and_rejections_is_the_cache_of_a_prefill(k: int) -> None:
    """Latents, index keys and the MTP layer's slots alike, wherever the caller stops."""
    model, ids = agreeable(1), prompt(30, seed=9)
    new = list(generate(model, ids, max_new_tokens=20, stop_ids=()))
    for stop_after in (1, 2, 3, 4, 5, 11, 20):
        cache = model.new_cache(1)
        stream = generate(model, ids, max_new_tokens=20, stop_ids=(), speculate=k, cache=cache)
        assert list(itertools.islice(stream, stop_after)) == new[:stop_after]
        stream.close()  # type: ignore[attr-defined]
        held = [*ids.tolist(), *new[: stop_after - 1]]
        assert cache.uniform == int(cache.length_B) == len(held)
        assert cache.draft is not None
        assert cache.draft.end == len(held)
        expected = reference_cache(model, held)
        for layer, tensors in enumerate(expected):
            followed = len(held) if layer < model.config.num_hidden_layers else cache.draft.filled
            for got, want in zip(cache.layers[layer], tensors, strict=True):
                torch.testing.assert_close(got[:, :followed], want[:, :followed], rtol=0, atol=2e-5)
        assert cache.draft.filled >= len(held) - k - 1


def test_drafts_are_those_of_the_block_with_its_whole_context() -> None:
    """After any rejections, the first draft is the argmax of the MTP block run afresh over all tokens so far."""
    model, ids = agreeable(1), prompt(40, seed=5)
    plain = list(generate(model, ids, max_new_tokens=20, stop_ids=()))
    stats = SpeculationStats()
    list(generate(model, ids, max_new_tokens=20, stop_ids=(), speculate=1, stats=stats))
    text, accepted, steps, at = [*ids.tolist(), *plain], 0, 0, len(ids)
    while at < len(text) - 1:  # text[at] is the newest token; a draft follows unless it would be beyond the end
        if at == len(text) - 2:
            break
        sequence = torch.tensor([text[: at + 1]])
        with torch.no_grad():
            hidden = model.hidden(sequence[:, :-1])
            (drafted,) = model.mtp_hidden(torch.cat((hidden, hidden[:, -1:]), 1), sequence, 1)
            draft = int(model.lm_head(drafted[:, -1]).argmax())
        right = draft == text[at + 1]
        accepted, steps, at = accepted + right, steps + 1, at + 1 + right
    assert (stats.steps, sum(stats.accepted)) == (steps, accepted)
    assert 0 < accepted < steps


@torch.no_grad()
def test_later_drafts_recycle_the_blocks_normed_output() -> None:
    """Draft d reads the output of draft d - 1 as its hidden state, after the shared norm, one slot further on."""
    model, ids = tiny_model(1), prompt(40, seed=5)
    cache = model.new_cache(1)
    states = model.hidden(ids[None], cache=cache)
    token = int(model.lm_head(states[:, -1]).argmax())
    follow(model, cache, states, ids.tolist())
    drafts, _ = propose(model, cache, token, 4, Sampling(), torch.Generator(), sparse=True)
    after = [*ids.tolist()[1:], token]
    for draft in drafts[0].tolist():
        visible = Visibility.causal(1, len(after))
        rope = model._rope(visible.last_BT)
        output = model.mtp.predict(model.model.embed_tokens(torch.tensor([after])), states, rope, visible)[:, -1:]
        assert draft == int(model.lm_head(output).argmax())
        states, after = torch.cat((states, output), dim=1), [*after, draft]


def test_statistics() -> None:
    stats = SpeculationStats()
    assert (stats.accept_length, stats.acceptance) == (0.0, [])
    for drafted, accepted in ((3, 3), (3, 0), (2, 1), (3, 0)):
        stats.record(drafted, accepted)
    assert stats.steps == 4
    assert (stats.drafted, stats.accepted) == ([4, 4, 3], [2, 1, 1])
    assert stats.accept_length == 2.0  # 1 of its own, and 4 accepted in 4 steps
    assert stats.acceptance == [0.5, 0.25, 1 / 3]


def test_accept_length_counts_the_tokens_of_each_step() -> None:
    model, ids, stats = agreeable(1), prompt(60, seed=70), SpeculationStats()
    new = list(generate(model, ids, max_new_tokens=30, stop_ids=(), speculate=2, stats=stats))
    # The first token is the prefill's and the last may be plain; all others come from steps.
    assert stats.steps * stats.accept_length in (len(new) - 1, len(new) - 2)


# --------------------------------------------------------------------------- speculation, sampled
def chi_square(observed: dict[object, int], expected: dict[object, float]) -> float:
    """Upper z-score of the chi-square statistic (Wilson-Hilferty); cells expected below 5 are pooled."""
    total = sum(observed.values())
    assert not set(observed) - set(expected)
    cells = [(observed.get(c, 0), p * total) for c, p in expected.items() if p * total >= 5]
    rest = (total - sum(o for o, _ in cells), total - sum(e for _, e in cells))
    if rest[1] >= 1:
        cells.append(rest)
    free = len(cells) - 1
    x = sum((o - e) ** 2 / e for o, e in cells) / free
    return (x ** (1 / 3) - (1 - 2 / (9 * free))) / (2 / (9 * free)) ** 0.5


def test_rejection_sampling_leaves_the_target_distribution() -> None:
    """Joint distribution of the tokens of two verified positions, against the product of the targets."""
    generator = torch.Generator().manual_seed(11)
    target = torch.randn(3, 5, generator=generator).mul(1.5).softmax(-1)
    draft = torch.randn(2, 5, generator=generator).mul(1.5).softmax(-1)
    target[0, 2] = 0.0  # what the target never says, the drafts may
    target[0] /= target[0].sum()
    seen: Counter[object] = Counter()
    lengths: Counter[int] = Counter()
    n = 6000
    for _ in range(n):
        drafts = [int(torch.multinomial(q, 1, generator=generator)) for q in draft]
        out = accept_sampled(target, draft, drafts, generator)
        lengths[len(out)] += 1
        while len(out) < 3:  # what a rejection cut off would be drawn from the target at the next steps
            out.append(int(torch.multinomial(target[len(out)], 1, generator=generator)))
        seen[tuple(out)] += 1
    joint = torch.einsum("a,b,c->abc", *target.double())
    expected: dict[object, float] = {key: float(joint[key]) for key in itertools.product(range(5), repeat=3)}
    expected = {key: p for key, p in expected.items() if p > 0}
    assert chi_square(dict(seen), expected) < 3.5
    # The chance of a first acceptance is the overlap of the two distributions.
    overlap = float(torch.minimum(target[0], draft[0]).sum())
    accepted = 1 - lengths[1] / n
    assert abs(accepted - overlap) < 4 * (overlap * (1 - overlap) / n) ** 0.5


def test_equal_distributions_are_always_accepted_and_disjoint_ones_never() -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(3, 6, generator=generator).softmax(-1)
    for _ in range(50):
        assert accept_sampled(p, p[:2], [3, 5], generator)[:2] == [3, 5]
    target, draft = torch.tensor([[0.5, 0.5, 0.0]] * 2), torch.tensor([[0.0, 0.0, 1.0]])
    assert {tuple(accept_sampled(target, draft, [2], generator)) for _ in range(50)} == {(0,), (1,)}


@pytest.mark.parametrize(
    ("speculate", "options"),
    [
        (0, {"temperature": 0.7, "top_k": 4, "top_p": 0.9, "min_p": 0.05}),
        (2, {"temperature": 0.7, "top_k": 4, "top_p": 0.9, "min_p": 0.05}),
        (2, {"temperature": 1.0}),
    ],
)
def test_sampled_texts_follow_the_models_distribution(speculate: int, options: dict[str, float]) -> None:
    """All texts of three tokens over a vocabulary of six, against probabilities enumerated by plain passes."""
    model = agreeable(
        3,
        scale=0.2,
        vocab_size=6,
        num_hidden_layers=1,
        first_k_dense_replace=0,
        index_topk=4,
        eos_token_id=(),
        pad_token_id=None,
    )
    ids = torch.tensor([1, 5, 2, 0, 3])
    sampling = Sampling(**options)  # type: ignore[arg-type]
    expected: dict[object, float] = {}
    with torch.no_grad():
        pairs = torch.tensor(list(itertools.product(range(6), repeat=2)))
        texts = torch.cat((ids.expand(36, -1), pairs), dim=1)
        logits = model(texts).logits[:, -3:]
    for (a, b), row in zip(pairs.tolist(), logits, strict=True):
        p = sampling.probs(row).double()
        for c in range(6):
            expected[a, b, c] = float(p[0, a] * p[1, b] * p[2, c])
    expected = {key: p for key, p in expected.items() if p > 0}
    seen: Counter[object] = Counter()
    stats = SpeculationStats()
    for seed in range(300):
        text = generate(model, ids, max_new_tokens=3, seed=seed, speculate=speculate, stats=stats, **options)  # type: ignore[arg-type]
        seen[tuple(text)] += 1
    assert abs(sum(expected.values()) - 1) < 1e-6
    assert chi_square(dict(seen), expected) < 3.5
    if speculate:
        assert 0.2 < stats.acceptance[0] < 0.98


# --------------------------------------------------------------------------- sampling
def test_temperature_top_k_top_p_min_p() -> None:
    p = torch.tensor([[0.1, 0.4, 0.15, 0.3, 0.05]])
    logits = p.log() + 7
    close = dict(rtol=0, atol=1e-6)
    torch.testing.assert_close(Sampling(1.0).probs(logits), p, **close)
    torch.testing.assert_close(Sampling(0.5).probs(logits), p**2 / (p**2).sum(), **close)
    torch.testing.assert_close(Sampling(0.0).probs(logits), torch.tensor([[0.0, 1, 0, 0, 0]]), **close)
    kept = torch.tensor([[0, 0.4, 0, 0.3, 0]]) / 0.7
    torch.testing.assert_close(Sampling(1.0, top_k=2).probs(logits), kept, **close)
    torch.testing.assert_close(Sampling(1.0, top_p=0.69).probs(logits), kept, **close)
    torch.testing.assert_close(Sampling(1.0, min_p=0.5).probs(logits), kept, **close)
    # Nucleus of what top-k left: 0.4 / 0.7 already reaches 0.5.
    torch.testing.assert_close(Sampling(1.0, 0.5, 2).probs(logits), torch.tensor([[0.0, 1, 0, 0, 0]]), **close)
    torch.testing.assert_close(Sampling(1.0, top_p=1e-9).probs(logits).argmax(), torch.tensor(1))
    torch.testing.assert_close(Sampling(1.0, top_k=99).probs(logits), p, **close)


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


def test_equals_are_kept_in_order_of_their_ids() -> None:
    logits = torch.zeros(1, 6)
    assert Sampling(1.0, top_k=2).probs(logits).nonzero()[:, 1].tolist() == [0, 1]
    assert Sampling(0.0).draw(logits, torch.Generator()).tolist() == [0]


@settings(max_examples=60, deadline=None)
@given(
    st.floats(1e-4, 5),
    st.floats(0.01, 1),
    st.integers(0, 40),
    st.floats(0, 1),
    st.integers(0, 2**31),
)
def test_every_setting_gives_a_distribution_that_keeps_the_best(
    temperature: float, top_p: float, top_k: int, min_p: float, seed: int
) -> None:
    logits = 20 * torch.randn(3, 31, generator=torch.Generator().manual_seed(seed))
    probs = Sampling(temperature, top_p, top_k, min_p).probs(logits.to(torch.bfloat16))
    assert probs.dtype == torch.float32
    torch.testing.assert_close(probs.sum(-1), torch.ones(3))
    assert bool((probs >= 0).all())
    assert bool((probs.gather(-1, logits.to(torch.bfloat16).argmax(-1, keepdim=True)) > 0).all())
    if top_k > 0:
        assert bool(((probs > 0).sum(-1) <= top_k).all())


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
    with pytest.raises(UserError, match="num_nextn_predict_layers"):
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
