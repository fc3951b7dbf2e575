"""Index scores and selection against float64 over whole matrices, in one tile and in many."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from glm5.kernels import tiling
from glm5.kernels.indexer import index_scores, index_select
from glm5.kernels.visibility import Visibility
from support import naive

HEADS, WIDTH = 3, 6


def inputs(batch: int, queries: int, slots: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, queries, HEADS, WIDTH, generator=generator)
    w = torch.randn(batch, queries, HEADS, generator=generator)
    return q, w, torch.randn(batch, slots, WIDTH, generator=generator)


def by_rule(scores_BTS: Tensor, mask_BTS: Tensor, k: int, width: int) -> Tensor:
    rows = [
        naive.topk_positions(row, k) for row in scores_BTS.masked_fill(~mask_BTS, -torch.inf).flatten(0, 1).tolist()
    ]
    out = torch.tensor([row + [-1] * (width - len(row)) for row in rows], dtype=torch.int32)
    return out.view(*scores_BTS.shape[:2], width)


VISIBILITIES = {
    "causal": (Visibility.causal(2, 40), 40),
    "cached": (Visibility.causal(2, 11, offset=20), 31),
    "decode": (Visibility.causal(2, 1, offset=30), 31),
    "documents": (Visibility.documents(torch.tensor([[0] * 9 + [9] * 21, [0] * 30])), 30),
    "padded": (
        Visibility(
            torch.tensor([[4] * 20, [0] * 20]), torch.cat((torch.arange(20)[None], torch.full((1, 20), -1))), 20
        ),
        20,
    ),
}


@pytest.mark.parametrize("name", VISIBILITIES)
def test_scores(name: str) -> None:
    visible, slots = VISIBILITIES[name]
    q, w, k = inputs(2, visible.first_BT.shape[1], slots + 5)
    k[:, slots:] = torch.nan  # a cache's unused slots
    ours = index_scores(q, w, k, visible)
    mask = naive.interval_mask(visible, slots)
    exact = naive.index_scores(q, w, k[:, :slots])
    assert ours.shape == exact.shape
    assert ours.dtype == torch.float32
    assert torch.equal(ours > -torch.inf, mask)
    torch.testing.assert_close(ours[mask], exact[mask].float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tile", [1, 700, 8 * 2**20])
@pytest.mark.parametrize("k", [1, 5, 19, 100])
@pytest.mark.parametrize("name", VISIBILITIES)
def test_selection(name: str, k: int, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same positions for every tile size, short of k, at k and past it."""
    monkeypatch.setattr(tiling, "TILE_ELEMENTS", tile)
    visible, slots = VISIBILITIES[name]
    q, w, keys = inputs(2, visible.first_BT.shape[1], slots + 5)
    out = index_select(q, w, keys, visible, k)
    mask = naive.interval_mask(visible, slots)
    width = min(k, visible.slots)
    assert out.dtype == torch.int32
    assert torch.equal(out, by_rule(naive.index_scores(q, w, keys[:, :slots]), mask, k, width))


def test_relu_plateau_takes_the_lowest_positions() -> None:
    """Keys opposite to every query score exactly zero; among them, the earliest win."""
    q = torch.ones(1, 30, HEADS, WIDTH)
    k = -torch.ones(1, 30, WIDTH)
    k[0, 20] = 1.0
    out = index_select(q, torch.ones(1, 30, HEADS), k, Visibility.causal(1, 30), 4)
    assert out[0, 19].tolist() == [0, 1, 2, 3]
    assert out[0, 29].tolist() == [0, 1, 2, 20]
    assert out[0, 1].tolist() == [0, 1, -1, -1]


def test_negative_head_weights_put_a_match_below_the_plateau() -> None:
    q, k = torch.ones(1, 6, 1, WIDTH), -torch.ones(1, 6, WIDTH)
    k[0, 0] = 1.0
    out = index_select(q, -torch.ones(1, 6, 1), k, Visibility.causal(1, 6), 2)
    assert out[0, 5].tolist() == [1, 2]


@pytest.mark.parametrize("place", [0, 777, 4_095, 8_000])
def test_a_needle_is_found_at_any_depth(place: int) -> None:
    """Among 8,192 keys one lies along the queries; it is the best for each, wherever it stands."""
    generator = torch.Generator().manual_seed(place)
    k = torch.randn(1, 8192, WIDTH, generator=generator)
    needle = torch.randn(WIDTH, generator=generator)
    k[0, place] = 20 * needle
    q, w = needle.expand(1, 3, HEADS, WIDTH), torch.ones(1, 3, HEADS)
    visible = Visibility.causal(1, 3, offset=8189)
    assert index_select(q, w, k, visible, 1).flatten().tolist() == [place] * 3


def test_bf16_inputs_are_scored_in_fp32() -> None:
    """Queries and keys are raised before the product: the score of bf16 inputs is exact to fp32, not to bf16."""
    q, w, k = inputs(1, 20, 20)
    q, k = q.bfloat16(), k.bfloat16()
    ours = index_scores(q, w, k, Visibility.causal(1, 20))
    exact = naive.index_scores(q, w, k).float()
    mask = naive.interval_mask(Visibility.causal(1, 20), 20)
    torch.testing.assert_close(ours[mask], exact[mask], rtol=1e-5, atol=1e-5)
