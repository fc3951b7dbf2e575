"""From logits to a distribution: known values, ties, and properties of every setting."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5.model import sampling
from glm5.model.sampling import Sampling


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


def test_equals_are_kept_in_order_of_their_ids() -> None:
    logits = torch.zeros(1, 6)
    assert Sampling(1.0, top_k=2).probs(logits).nonzero()[:, 1].tolist() == [0, 1]
    assert Sampling(0.0).draw(logits, 0, 0).tolist() == [0]


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


def kept_by_hand(p: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """One id after the other, in plain numbers."""
    order = sorted(range(len(p)), key=lambda id: (-p[id], id))
    order = order[:top_k] if top_k else order
    total, before, kept_ids = sum(p[id] for id in order) if top_k else 1.0, 0.0, set()
    for id in order:
        if top_p < 1 and before >= top_p * total:
            break
        kept_ids.add(id)
        before += p[id]
    return {id for id in kept_ids if p[id] > 0 and p[id] >= min_p * max(p)}


@pytest.mark.parametrize("prefix", [8, 1024])
def test_rows_with_rules_of_their_own_keep_what_each_would_keep_alone(
    monkeypatch: pytest.MonkeyPatch, prefix: int
) -> None:
    monkeypatch.setattr(sampling, "PREFIX", prefix)  # 8: many rows need more than their first ids
    random = torch.Generator().manual_seed(0)

    def drawn(scale: float, off: float, nothing: float, **kind: torch.dtype) -> torch.Tensor:
        values = torch.rand(6, generator=random) * scale
        return values.masked_fill(torch.rand(6, generator=random) < off, nothing).to(**kind)

    for trial in range(80):
        logits = 3 * torch.randn(6, 57, generator=random)
        logits = logits.round() if trial % 2 else logits  # rounded: many equals
        logits[:, ::5] = -torch.inf if trial % 3 == 0 else 1.0
        probs = logits.softmax(-1)
        top_k = drawn(70, 0.4, 0, dtype=torch.long)
        top_p = drawn(1, 0.4, 1, dtype=torch.double).clamp(min=1e-3)
        min_p = drawn(0.3, 0.5, 0)
        keep = sampling.kept(probs, top_k, top_p, min_p)
        for row in range(6):
            rules = (int(top_k[row]), float(top_p[row]), float(min_p[row]))
            assert set(keep[row].nonzero()[:, 0].tolist()) == kept_by_hand(probs[row].double().tolist(), *rules)
            one = slice(row, row + 1)
            assert torch.equal(sampling.kept(probs[one], top_k[one], top_p[one], min_p[one])[0], keep[row])
