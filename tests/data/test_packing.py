"""Packing: every prediction once, nothing seen or predicted across documents, few documents cut."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5.data.packing import Plan, Strategy, first_and_positions, plan_rows, targets_at_depth
from glm5.utils.errors import ConfigError

STRATEGIES: list[Strategy] = ["best-fit", "concatenate"]
LENGTHS = st.lists(st.integers(2, 60), min_size=1, max_size=30)
FAR = 1000  # token k of document d gets the id d * FAR + k


def rows_of(plan: Plan, seq_len: int, ahead: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids and document numbers [rows, seq_len + ahead] as the loader lays them out; -1 is empty."""
    ids = np.full((plan.rows, seq_len + ahead), -1, dtype=np.int64)
    documents = np.full_like(ids, -1)
    for row in range(plan.rows):
        slot = 0
        for piece in range(plan.row_starts[row], plan.row_starts[row + 1]):
            count = plan.slots[piece]
            documents[row, slot : slot + count] = plan.document[piece]
            ids[row, slot : slot + count] = plan.document[piece] * FAR + plan.start[piece] + np.arange(count)
            slot += count
        assert slot <= seq_len + ahead
    return ids, documents


@pytest.mark.parametrize("strategy", STRATEGIES)
@given(lengths=LENGTHS, seq_len=st.integers(1, 20), ahead=st.integers(1, 5))
@settings(max_examples=150, deadline=None)
def test_every_prediction_is_made_once_and_none_across_documents(
    strategy: Strategy, lengths: list[int], seq_len: int, ahead: int
) -> None:
    plan = plan_rows(lengths, seq_len, ahead, strategy)
    ids, documents = rows_of(plan, seq_len, ahead)
    first, position = first_and_positions(documents[:, :seq_len])
    everything = np.ones(ids.shape, dtype=bool)
    for depth in range(1, ahead + 1):
        target, weight = targets_at_depth(ids, documents, everything, depth, seq_len)
        counts = weight > 0
        # The target is the token `depth` further on in the query's own document.
        assert np.array_equal(target[counts], ids[:, :seq_len][counts] + depth)
        assert np.array_equal(target[counts] // FAR, documents[:, :seq_len][counts])
        assert not target[~counts].any()
        made = Counter(target[counts].tolist())
        assert max(made.values(), default=1) == 1
        wanted = {d * FAR + k for d, length in enumerate(lengths) for k in range(depth, length)}
        assert made.keys() <= wanted
        if depth == 1:
            assert made.keys() == wanted
    # A query sees its own document from the beginning of the piece, and nothing else.
    for row, slot in np.ndindex(documents[:, :seq_len].shape):
        seen = documents[row, first[row, slot] : slot + 1]
        if documents[row, slot] < 0:
            assert len(seen) == 0
        else:
            assert (seen == documents[row, slot]).all()
            assert first[row, slot] == 0 or documents[row, first[row, slot] - 1] != documents[row, slot]
            assert position[row, slot] == slot - first[row, slot]


@given(lengths=LENGTHS, seq_len=st.integers(1, 20), ahead=st.integers(1, 5))
@settings(max_examples=100, deadline=None)
def test_best_fit_keeps_the_targets_of_every_depth(lengths: list[int], seq_len: int, ahead: int) -> None:
    """A piece that does not end its document fills its row, and the slots ahead hold what follows."""
    ids, documents = rows_of(plan_rows(lengths, seq_len, ahead, "best-fit"), seq_len, ahead)
    for depth in range(1, ahead + 1):
        _, weight = targets_at_depth(ids, documents, np.ones(ids.shape, dtype=bool), depth, seq_len)
        assert weight.sum() == sum(max(0, length - depth) for length in lengths)


@given(lengths=LENGTHS, seq_len=st.integers(1, 20))
@settings(max_examples=100, deadline=None)
def test_best_fit_cuts_no_document_that_fits(lengths: list[int], seq_len: int) -> None:
    plan = plan_rows(lengths, seq_len, 1, "best-fit")
    pieces = Counter(plan.document.tolist())
    for document, length in enumerate(lengths):
        assert pieces[document] == -(-(length - 1) // seq_len)
    slots = np.add.reduceat(plan.slots, plan.row_starts[:-1])
    assert slots.max() <= seq_len + 1
    # Two rows that fit into one would be one.
    assert plan.rows == 1 or np.sort(slots)[:2].sum() > seq_len + 1


@pytest.mark.parametrize("seq_len", [64, 256])
def test_best_fit_wastes_little(seq_len: int) -> None:
    lengths = np.random.default_rng(0).lognormal(5, 1, 2000).astype(np.int64) + 2
    plan = plan_rows(lengths, seq_len, 4, "best-fit")
    least = plan.slots.clip(max=seq_len + 1).sum() / (seq_len + 1)
    assert least <= plan.rows < 1.02 * least + 1
    whole = plan_rows(lengths, seq_len, 4, "concatenate")
    assert len(plan.document) < len(whole.document)


def test_plans_by_hand() -> None:
    plan = plan_rows([3, 8, 2], seq_len=4, ahead=3, strategy="best-fit")
    # Document 1 asks for 7 predictions: 4 and 3. Its first piece goes on for 2 deeper targets.
    assert plan.row_starts.tolist() == [0, 1, 2, 4]
    assert plan.document.tolist() == [1, 1, 0, 2]
    assert plan.start.tolist() == [0, 4, 0, 0]
    assert plan.slots.tolist() == [7, 4, 3, 2]
    plan = plan_rows([3, 8, 2], seq_len=4, ahead=3, strategy="concatenate")
    # Stream 000111111112 2: rows begin at slots 0, 4, 8 and 12, the last of which holds nothing to predict.
    assert plan.row_starts.tolist() == [0, 2, 3, 5]
    assert plan.document.tolist() == [0, 1, 1, 1, 2]
    assert plan.start.tolist() == [0, 0, 1, 5, 0]
    assert plan.slots.tolist() == [3, 4, 7, 3, 2]


def test_concatenation_leaves_no_slot_empty() -> None:
    lengths = np.random.default_rng(1).integers(2, 50, 300)
    ids, _documents = rows_of(plan_rows(lengths, 32, 1, "concatenate"), 32, 1)
    stream = ids[:, :32].reshape(-1)
    stream = stream[stream >= 0]
    expected = np.concatenate([d * FAR + np.arange(length) for d, length in enumerate(lengths)])
    # All but a document's last token where that begins a row, and a row's last slot once such a row shifts by one.
    assert len(expected) - len(stream) <= 2 * len(ids)
    assert set(stream.tolist()) <= set(expected.tolist())


def test_padding_sees_nothing_and_positions_restart() -> None:
    documents = np.array([[5, 5, 5, 2, 2, -1, -1], [7, 7, 7, 7, 7, 7, 7]])
    first, position = first_and_positions(documents)
    assert first.tolist() == [[0, 0, 0, 3, 3, 6, 7], [0] * 7]
    assert position.tolist() == [[0, 1, 2, 0, 1, 0, 0], [0, 1, 2, 3, 4, 5, 6]]
    assert first.dtype == position.dtype == np.int32


def test_targets_by_hand() -> None:
    ids = np.array([[10, 11, 12, 20, 21, 22, 23]])
    documents = np.array([[0, 0, 0, 1, 1, 1, -1]])
    loss = np.array([[False, True, True, False, True, True, False]])
    target, weight = targets_at_depth(ids, documents, loss, 1, 4)
    assert target.tolist() == [[11, 12, 0, 21]]
    assert weight.tolist() == [[1.0, 1.0, 0.0, 1.0]]
    target, weight = targets_at_depth(ids, documents, loss, 2, 4)
    assert target.tolist() == [[12, 0, 0, 22]]
    target, weight = targets_at_depth(ids, documents, loss, 3, 4)
    assert target.tolist() == [[0, 0, 0, 0]]
    assert weight.dtype == np.float32


@pytest.mark.parametrize("depth", [0, 4])
def test_depth_out_of_range(depth: int) -> None:
    rows = np.zeros((1, 7), dtype=np.int64)
    with pytest.raises(ConfigError, match=f"depth={depth}: must be from 1 to 3"):
        targets_at_depth(rows, rows, rows > -1, depth, 4)


def test_bad_plans_are_refused() -> None:
    for bad in (dict(seq_len=0, ahead=1), dict(seq_len=4, ahead=0)):
        with pytest.raises(ConfigError, match="must be at least 1"):
            plan_rows([5], **bad)
    with pytest.raises(ConfigError, match="lengths=1"):
        plan_rows([5, 1], 4, 1)
    with pytest.raises(ConfigError, match="strategy='first-fit'"):
        plan_rows([5], 4, 1, "first-fit")  # type: ignore[arg-type]
    for strategy in STRATEGIES:
        assert plan_rows([], 4, 1, strategy).rows == 0
