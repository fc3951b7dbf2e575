"""Index sets of benchmarks: those that are made up overlap as the measured ones, and overlap is counted right."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"


def benchmark(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A script of the folder; its name, and that of what it imports beside it, stay free for others."""
    monkeypatch.syspath_prepend(FOLDER)
    for taken in ("inputs", name):
        monkeypatch.delitem(sys.modules, taken, raising=False)
    module = importlib.import_module(name)
    for made in ("inputs", name):
        monkeypatch.delitem(sys.modules, made, raising=False)
    return module


def test_made_up_sets_overlap_as_they_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = benchmark("inputs", monkeypatch)
    torch.manual_seed(0)
    selected = inputs.neighbourly_selection(160, 32768, 2048, device="cpu")
    assert selected.dtype == torch.int32
    assert (selected[:, 1:] > selected[:, :-1]).all()
    assert selected[:, 0].min() >= 0
    assert selected[:, -1].max() < 32768
    for distance, share in inputs.OVERLAP.items():
        found = float(inputs.shared_positions(selected, 32768, distance).mean())
        assert found == pytest.approx(share, abs=0.02), distance


def test_shared_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = benchmark("inputs", monkeypatch)
    selected = torch.tensor([[0, 1, 2, 3], [4, 3, 2, 1], [0, -1, -1, -1], [5, 0, -1, -1]])
    assert inputs.shared_positions(selected, 6, 1).tolist() == [0.75, 0.0, 0.25]
    assert inputs.shared_positions(selected, 6, 2).tolist() == [0.25, 0.0]


def test_only_long_queries_of_one_document_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    overlap = benchmark("selection_overlap", monkeypatch)
    first_T = torch.tensor([0] * 20 + [20] * 20)
    selected_TK = torch.arange(40)[:, None] - torch.arange(8)  # the last eight: seven shared with a neighbour
    selected_TK = selected_TK.masked_fill(selected_TK < first_T[:, None], -1)
    shares = overlap.Shares()
    shares.add(selected_TK, first_T)
    means = shares.means(1)
    assert {d: means[d] for d in ("1", "2", "4", "8")} == {"1": 7 / 8, "2": 6 / 8, "4": 4 / 8, "8": 0.0}
    assert means["recent"] == 1 / 8  # k / 8 is the query's own position
    assert shares.sums[1, 1][1] == 2 * (20 - 8 - 1)  # queries that see nine or more, and whose neighbour does
    assert shares.sums[4, "recent"][1] == 0
