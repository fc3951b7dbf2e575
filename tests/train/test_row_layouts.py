"""How packed rows lie, told beforehand: the same as what is found by looking at them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from glm5.kernels.visibility import SEGMENTS, Layout, Visibility, inside
from glm5.train.objective import Objective
from glm5.train.rows import Rows
from glm5.train.totals import Counts, Totals
from support.training import SEQ_LEN, dataset, trainer

CPU = torch.device("cpu")


def laid_out(rows: Rows, depths: int = 3) -> Rows:
    """As on a GPU."""
    seen = [rows.first_BS[:, :SEQ_LEN], *(inside(rows.first_BS, d, SEQ_LEN) for d in range(1, depths + 1))]
    return replace(rows, layouts=tuple(Layout.of(first_BT, CPU) for first_BT in seen))


@pytest.mark.parametrize("numbers", [range(4), range(3, 9)])
def test_a_layout_is_what_a_look_finds(numbers: range, tmp_path: Path) -> None:
    batch = dataset(tmp_path, (64, 150, 20, 9, 61, 33, 5, 80, 47)).batch(list(numbers)).whole_first()
    rows = laid_out(Rows.of(batch, CPU))
    for depth in range(4):
        told = rows.visible(depth)
        assert told is not None
        looked = Visibility.documents(told.first_BT)
        (whole, rest), (expected, others) = told.whole_first, looked.whole_first
        assert whole == expected
        if whole == len(batch):
            continue
        edges, longest, padded = rest.segments
        found, most, empty = others.segments
        assert padded == empty
        assert longest >= most
        assert (len(edges) - 1) % SEGMENTS == 0
        assert edges[: len(found)].tolist() == found.tolist()
        assert set(edges[len(found) :].tolist()) <= {int(found[-1])}  # documents of no length


def test_losses_and_gradients_are_those_of_a_look(tmp_path: Path) -> None:
    data = dataset(tmp_path)
    found = []
    for told in (False, True):
        of = trainer(tmp_path, data, mtp_depths=3)
        rows = Rows.of(data.batch([1, 2, 3]), CPU)
        rows = laid_out(rows) if told else rows
        assert (rows.visible(1) is not None) == told
        counts = Counts(rows=3, mtp_rows=3, tokens=50, queries=50)
        loss = Objective(of.config, of.ranks, 0, counts, Totals(len(of.routers), 2)).of(of.model, rows, 0)
        loss.backward()
        found.append(
            {n: p.grad for n, p in of.model.named_parameters() if p.grad is not None} | {"loss": loss.detach()}
        )
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][n], found[1][n]) for n in found[0])


def test_a_part_of_the_rows_is_looked_at(tmp_path: Path) -> None:
    rows = laid_out(Rows.of(dataset(tmp_path).batch([1, 2, 3]), CPU))
    assert rows.head(3).visible(1) is not None
    assert rows.head(2).visible(1) is None
    assert rows.head(3, 2).visible(1) is None
