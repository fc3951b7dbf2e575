"""Intervals against their definition, slot by slot, and cut into tiles."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5.kernels.visibility import Visibility
from support.naive import interval_mask


@given(batch=st.integers(1, 3), queries=st.integers(1, 9), offset=st.integers(0, 7))
@settings(deadline=None, max_examples=50)
def test_causal(batch: int, queries: int, offset: int) -> None:
    visible = Visibility.causal(batch, queries, offset)
    assert (visible.slots, visible.offset) == (offset + queries, offset)
    mask = visible.mask_BTS()
    assert mask.shape == (batch, queries, offset + queries)
    for t in range(queries):
        assert mask[:, t].tolist() == [[True] * (offset + t + 1) + [False] * (queries - t - 1)] * batch
    assert torch.equal(mask, interval_mask(visible, visible.slots))
    assert torch.equal(visible.count_BT(), mask.sum(-1))


@given(st.data())
@settings(deadline=None, max_examples=100)
def test_any_intervals_and_their_tiles(data: st.DataObject) -> None:
    """A tile is the same rows of the whole; no query of a tile sees past the tile's own `slots`."""
    queries, slots = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 8))
    bound = st.lists(st.integers(-1, slots - 1), min_size=queries, max_size=queries)
    first, last = (torch.tensor([data.draw(bound)]) for _ in range(2))
    whole = data.draw(st.sampled_from([Visibility(first.clamp(min=0), last, slots), Visibility.causal(1, queries, 3)]))
    mask = whole.mask_BTS()
    assert torch.equal(mask, interval_mask(whole, whole.slots))
    assert torch.equal(whole.count_BT(), mask.sum(-1))
    start = data.draw(st.integers(0, queries - 1))
    stop = data.draw(st.integers(start + 1, queries))
    tile = whole.tile(start, stop)
    assert torch.equal(tile.mask_BTS(), mask[:, start:stop, : tile.slots])
    assert not mask[:, start:stop, tile.slots :].any()
    inner = tile.tile(0, 1)
    assert torch.equal(inner.mask_BTS(), mask[:, start : start + 1, : inner.slots])


def test_documents() -> None:
    visible = Visibility.documents(torch.tensor([[0, 0, 2, 2, 2, 9]]))
    seen = [[s for s in range(6) if visible.mask_BTS()[0, t, s]] for t in range(6)]
    assert seen == [[0], [0, 1], [2], [2, 3], [2, 3, 4], []]
    assert visible.count_BT().tolist() == [[1, 2, 1, 2, 3, 0]]


def test_segments_of_packed_rows() -> None:
    """Documents of 3, 1 and 2 tokens, then padding; a row without padding; one whose documents' ends see nothing."""
    first = [[0, 0, 0, 3, 4, 4, 8, 8], [0, 0, 0, 0, 0, 5, 5, 5], [0, 0, 8, 3, 3, 8, 6, 8]]
    edges, longest, padded = Visibility.documents(torch.tensor(first)).segments
    assert edges.tolist() == [0, 3, 4, 6, 8, 13, 16, 18, 19, 21, 22, 23, 24]
    assert edges.dtype == torch.int32
    assert (longest, padded) == (5, True)
    assert not Visibility.documents(torch.tensor([[0, 0, 2, 2]])).segments[2]


def test_rows_of_one_document_that_come_first() -> None:
    visible = Visibility.documents(torch.tensor([[0, 0, 0], [0, 0, 0], [0, 0, 2], [0, 0, 0]]))
    whole, others = visible.whole_first
    assert whole == 2
    assert others.packed
    assert torch.equal(others.mask_BTS(), visible.mask_BTS()[2:])
    assert others.whole_first[0] == 0
