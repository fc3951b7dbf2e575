"""Speculation: the same tokens as without it, the same distribution, and drafts that read what they should."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from torch import Tensor

from glm5.kernels.visibility import Visibility
from glm5.model.generate import generate
from glm5.model.glm5 import GLM5
from glm5.model.sampling import Sampling
from glm5.model.speculate import SpeculationStats, follow, propose
from support.drafting import TOPK, agreeable, prompt
from support.tiny import tiny_config, tiny_model


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
    drafts = propose(model, cache, token, 4, Sampling(), 0, 0, sparse=True)
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


def test_drafts_are_right_as_often_as_coupled_draws_promise() -> None:
    """And what is drawn has the target's distribution, whatever was drafted."""
    generator = torch.Generator().manual_seed(11)
    target, draft = torch.randn(2, 5, generator=generator).mul(1.5)
    target[2] = -torch.inf  # what the target never says, the drafts may
    sampling, n = Sampling(temperature=1.0), 6000
    drawn = sampling.draw(target.expand(n, -1), 7, 0)
    drafted = sampling.draw(draft.expand(n, -1), 7, 0)
    p, q = target.softmax(-1).double(), draft.softmax(-1).double()
    expected: dict[object, float] = {i: float(p[i]) for i in range(5) if p[i] > 0}
    assert chi_square(dict(Counter[object](drawn.tolist())), expected) < 3.5
    distance = float((p - q).abs().sum() / 2)
    right = float((drawn == drafted).double().mean())
    spread = (right * (1 - right) / n) ** 0.5
    assert (1 - distance) / (1 + distance) - 4 * spread < right < 1 - distance + 4 * spread
    assert torch.equal(sampling.draw(target.expand(3, -1), 7, 5), drawn[5:8])  # row i has the noise of its position


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


def test_a_seed_gives_one_text_with_drafts_and_without() -> None:
    model, ids = agreeable(1).eval(), prompt(40, seed=5).tolist()
    options = dict(max_new_tokens=24, temperature=0.9, top_p=0.9, stop_ids=())
    for seed in (0, -5, 2**63 + 1):
        plain = list(generate(model, ids, seed=seed, **options))  # type: ignore[arg-type]
        for speculate in (1, 3):
            assert list(generate(model, ids, seed=seed, speculate=speculate, **options)) == plain  # type: ignore[arg-type]
