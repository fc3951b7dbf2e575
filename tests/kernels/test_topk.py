"""Stable top-k against the rule written as a sort."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from glm5.kernels.topk import mask_to_positions, positions_to_mask, stable_topk, topk_mask
from support.naive import topk_positions

INF = float("inf")


def by_rule(scores_NS: Tensor, k: int) -> Tensor:
    width = min(k, scores_NS.shape[-1])
    rows = [topk_positions(row, k) for row in scores_NS.tolist()]
    return torch.tensor([row + [-1] * (width - len(row)) for row in rows], dtype=torch.int32).view(len(rows), width)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_is_the_rule_under_heavy_ties(data: st.DataObject) -> None:
    """Few distinct values, so that almost every k-th place is shared; some slots and whole rows are -inf."""
    rows, slots = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 24))
    value = st.sampled_from([-INF, -1.0, -0.0, 0.0, 0.0, 1.0, INF])
    scores = torch.tensor(
        data.draw(st.lists(st.lists(value, min_size=slots, max_size=slots), min_size=rows, max_size=rows))
    )
    k = data.draw(st.integers(1, 30))
    out = stable_topk(scores, k)
    assert out.dtype == torch.int32
    assert torch.equal(out, by_rule(scores, k))


@pytest.mark.parametrize("k", [1, 7, 64, 300, 301])
def test_is_the_rule_on_long_rows(k: int) -> None:
    scores = torch.randn(20, 300, generator=torch.Generator().manual_seed(0))
    scores[:10] = scores[:10].mul(4).round()  # ties
    scores[::3, :50] = -INF
    assert torch.equal(stable_topk(scores, k), by_rule(scores, k))


def test_a_plateau_goes_to_the_lowest_positions() -> None:
    """ReLU scores often tie at exactly zero: the first k of them win, on every run and device."""
    assert stable_topk(torch.zeros(2, 100), 5).tolist() == [[0, 1, 2, 3, 4]] * 2
    scores = torch.zeros(1, 100)
    scores[0, 70], scores[0, 20] = 2.0, -1.0
    assert stable_topk(scores, 4).tolist() == [[0, 1, 2, 70]]
    signs = torch.tensor([[-0.0, 0.0, -0.0, 0.0]])  # -0 and 0 are one score
    assert stable_topk(signs, 2).tolist() == [[0, 1]]


def test_nothing_visible_selects_nothing() -> None:
    scores = torch.full((2, 6), -INF)
    scores[1, 4] = -3.0
    assert stable_topk(scores, 3).tolist() == [[-1, -1, -1], [4, -1, -1]]
    assert not topk_mask(scores, 3)[0].any()


def test_k_past_the_end_keeps_all_that_is_visible() -> None:
    scores = torch.tensor([[1.0, -INF, 3.0]])
    assert stable_topk(scores, 8).tolist() == [[0, 2, -1]]


def test_k_must_be_positive() -> None:
    with pytest.raises(ValueError, match="k=0"):
        stable_topk(torch.zeros(1, 3), 0)


def test_mask_and_positions_are_inverse() -> None:
    keep = torch.rand(50, 40, generator=torch.Generator().manual_seed(1)) < 0.3
    keep[3] = False
    positions = mask_to_positions(keep, 40)
    assert positions.shape == (50, 40)
    assert torch.equal(positions_to_mask(positions, 40), keep)
    assert torch.equal((positions >= 0).sum(-1), keep.sum(-1))
    full = mask_to_positions(torch.ones(2, 4, dtype=torch.bool), 4)
    assert full.tolist() == [[0, 1, 2, 3]] * 2
