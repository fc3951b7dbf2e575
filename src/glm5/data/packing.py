"""Packing documents into rows of one length, so that no query sees another document and no target is one.

A document of n tokens asks for n - 1 predictions. It is cut into pieces of at most `seq_len` predictions, only the
last of which can be shorter; a piece of m predictions takes m + 1 slots of a row, since its last token is a target
and never an input. Pieces share a token at each cut, so every prediction is made exactly once however rows are
packed, and bits per byte is exact.

A row has `seq_len` input slots (suffix T) and `ahead` more (suffix S = T + ahead) that hold only targets: slot
T for the next token of a full piece, those after it for MTP's deeper targets. The contract with the model is
`first_BT`, the first slot that each query sees (`glm5.kernels.visibility`): resetting positions alone would still let
one document read another. Sources: report section 2.1 (MTP depths) and 2.3 (packing); Ding et al., "Fewer Truncations
Improve Language Modeling" (2024) for best-fit. Read next: `shards`, then `loader`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from glm5.utils.errors import ConfigError

I64 = NDArray[np.int64]
Strategy = Literal["best-fit", "concatenate", "whole"]


@dataclass(frozen=True)
class Plan:
    """Which stretch of which document lies where. Arrays have one entry per piece, ordered by row, then slot.

    Args:
        document: index of the piece's document.
        start: its first token within the document.
        slots: its length, its predictions and one more (up to `ahead` of them if the document goes on).
        row_starts: the piece with which each row begins, and the number of pieces: [rows + 1].
    """

    document: I64
    start: I64
    slots: I64
    row_starts: I64

    @property
    def rows(self) -> int:
        return len(self.row_starts) - 1


def plan_rows(lengths: Sequence[int] | I64, seq_len: int, ahead: int, strategy: Strategy = "best-fit") -> Plan:
    """Lay documents out in rows.

    "best-fit" takes pieces from the longest to the shortest and puts each into the fullest row with room; documents no
    longer than a row stay whole. "concatenate" lays documents end to end in their order and starts a new row wherever
    one is full, as most trainers do; it leaves no slot empty but the last row's, and cuts more documents. "whole" gives
    every document a row of its own, or as many as it needs, each with all its tokens among the row's first `seq_len`
    slots: rows of any length, for whoever puts them together for each step (`glm5.train.groups`).

    Args:
        lengths: tokens per document, at least 2 each.
        seq_len: predictions per row.
        ahead: targets per query: 1 for the next token, and 1 for each MTP depth.

    Raises:
        ConfigError: `seq_len` or `ahead` is below 1 (`seq_len` below 2 for "whole"), or a document is shorter than 2
            tokens.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    for name, value in (("seq_len", seq_len), ("ahead", ahead)):
        if value < 1:
            raise ConfigError(name, value, "must be at least 1")
    if len(sizes) and sizes.min() < 2:
        raise ConfigError("lengths", int(sizes.min()), "a document needs 2 tokens, one to read and one to predict")
    if strategy == "best-fit":
        pieces, rows = _best_fit(sizes, seq_len)
    elif strategy == "concatenate":
        pieces, rows = _concatenate(sizes, seq_len)
    elif strategy == "whole":
        if seq_len < 2:
            raise ConfigError("seq_len", seq_len, "must be at least 2 for whole documents")
        pieces = _cut(sizes, seq_len - 1)
        rows = np.arange(len(pieces[0]))
    else:
        raise ConfigError("strategy", strategy, "must be best-fit, concatenate or whole")

    document, start, predictions = pieces
    row_starts = np.searchsorted(rows, np.arange(rows.max(initial=-1) + 2))
    # Only the piece that fills its row goes on into the slots ahead: after others, the next slot is taken or empty.
    ends = np.cumsum(predictions + 1)
    row_begins = (ends - predictions - 1)[row_starts[:-1]]
    fills = ends - np.repeat(row_begins, np.diff(row_starts)) == seq_len + 1
    extra = np.where(fills, np.minimum(ahead - 1, sizes[document] - start - predictions - 1), 0)
    return Plan(document, start, predictions + 1 + extra, row_starts)


def _best_fit(sizes: I64, seq_len: int) -> tuple[tuple[I64, I64, I64], I64]:
    """Pieces (document, start, predictions) and their rows, ordered by row."""
    document, start, predictions = _cut(sizes, seq_len)
    order = np.argsort(-predictions, kind="stable")
    row_of = np.zeros(len(document), dtype=np.int64)
    # Rows by free slots, and one bit per amount of which there is a row: the lowest bit at or above a piece's slots
    # is the best fit, found without a search over rows.
    by_room: list[list[int]] = [[] for _ in range(seq_len + 2)]
    available, rows = 0, 0
    for piece in order.tolist():
        slots = int(predictions[piece]) + 1
        fitting = available >> slots
        if fitting:
            room = slots + (fitting & -fitting).bit_length() - 1
            row = by_room[room].pop()
            if not by_room[room]:
                available &= ~(1 << room)
        else:
            room, row = seq_len + 1, rows
            rows += 1
        row_of[piece] = row
        if room - slots >= 2:
            by_room[room - slots].append(row)
            available |= 1 << (room - slots)
    by_row = order[np.argsort(row_of[order], kind="stable")]
    return (document[by_row], start[by_row], predictions[by_row]), row_of[by_row]


def _cut(sizes: I64, most: int) -> tuple[I64, I64, I64]:
    """Pieces (document, start, predictions) of so many predictions at most, in the order of the documents."""
    counts = -(-(sizes - 1) // most)
    document = np.repeat(np.arange(len(sizes)), counts)
    start = (np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)) * most
    return document, start, np.minimum(sizes[document] - 1 - start, most)


def _concatenate(sizes: I64, seq_len: int) -> tuple[tuple[I64, I64, I64], I64]:
    """The same, with documents end to end in a stream that is cut every `seq_len` slots."""
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if len(ends) else 0
    # A cut at stream slot c begins a piece at c; the token at c is also the last target of the piece before.
    cuts = np.union1d(np.arange(0, total, seq_len), ends - sizes).astype(np.int64)
    document = np.searchsorted(ends, cuts, side="right")
    start = cuts - (ends - sizes)[document]
    row = cuts // seq_len
    stop = np.minimum(np.minimum((row + 1) * seq_len + 1, ends[document]), total)
    predictions = stop - cuts - 1
    # A document's last token that begins a row has nothing left to predict, and was a target already.
    useful = predictions > 0
    row = row[useful]
    _, row = np.unique(row, return_inverse=True)
    return (document[useful], start[useful], predictions[useful]), row.astype(np.int64)


def first_and_positions(document_BT: NDArray[np.integer]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Where each query's view begins, and its position, from the document index of every slot (-1: padding).

    Returns:
        first_BT: the first slot of the query's piece; for padding the slot after it, which is an empty view.
        position_BT: slots since the piece began; 0 for padding.
    """
    batch, slots = document_BT.shape
    slot_T = np.arange(slots, dtype=np.int32)
    begins = np.ones((batch, slots), dtype=bool)
    begins[:, 1:] = document_BT[:, 1:] != document_BT[:, :-1]
    first_BT = np.maximum.accumulate(np.where(begins, slot_T, 0), axis=1).astype(np.int32)
    padding = document_BT < 0
    position_BT = np.where(padding, 0, slot_T - first_BT).astype(np.int32)
    return np.where(padding, slot_T + 1, first_BT).astype(np.int32), position_BT


def targets_at_depth(
    ids_BS: NDArray[np.integer],
    document_BS: NDArray[np.integer],
    loss_BS: NDArray[np.bool_],
    depth: int,
    seq_len: int,
) -> tuple[I64, NDArray[np.float32]]:
    """What each query is to predict `depth` tokens ahead, and whether it counts.

    A target of another document, past a piece's end, in padding, or not marked in `loss_BS` has weight 0.

    Args:
        ids_BS, document_BS, loss_BS: token ids, document index (-1: padding) and "may be a target" of every slot.
        depth: 1 for the next token, d + 1 for MTP depth d.
        seq_len: the number of queries T; `seq_len + depth` slots are needed.

    Returns:
        target_BT int64 (0 where it does not count) and weight_BT, 0 or 1.

    Raises:
        ConfigError: rows are too short for this depth.
    """
    slots = ids_BS.shape[1]
    if depth < 1 or seq_len + depth > slots:
        raise ConfigError("depth", depth, f"must be from 1 to {slots - seq_len}, the slots kept ahead of each row")
    here = document_BS[:, :seq_len]
    there = slice(depth, seq_len + depth)
    counts = (here >= 0) & (document_BS[:, there] == here) & loss_BS[:, there]
    return np.where(counts, ids_BS[:, there], 0).astype(np.int64), counts.astype(np.float32)
