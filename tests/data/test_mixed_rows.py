"""Rows of several corpora: each as it is alone, drawn at their ratios, the same after a stop."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from glm5.data.balance import CostModel
from glm5.data.loader import TokenDataset
from glm5.data.mixing import MixedDataset, MixedLoader, Source
from glm5.utils.errors import ConfigError
from support.training import LetterTokenizer, documents


def made(directory: Path, name: str, lengths: list[int], seq_len: int = 16) -> TokenDataset:
    return TokenDataset.build(documents(lengths, seed=len(name)), LetterTokenizer(), directory / name, seq_len, 2)


@pytest.fixture
def mixed(tmp_path: Path) -> MixedDataset:
    return MixedDataset({"a": made(tmp_path, "a", [40, 9]), "bb": made(tmp_path, "bb", [70, 5, 20])})


def test_a_row_is_what_its_source_holds(mixed: MixedDataset) -> None:
    a, b = mixed.sources["a"], mixed.sources["bb"]
    assert mixed.rows == a.rows + b.rows
    wanted = [a.rows + 1, 0, a.rows, a.rows - 1]  # in no order, of both
    found = mixed.batch(wanted)
    parts = [b.batch([1]), a.batch([0]), b.batch([0]), a.batch([a.rows - 1])]
    for name in ("ids_BS", "document_BS", "loss_BS", "first_BT", "position_BT", "num_bytes_BT"):
        assert np.array_equal(getattr(found, name), np.concatenate([getattr(p, name) for p in parts])), name
    cost = CostModel(1.0, 2.0, 3.0, 4, 0.0, 0.0)
    assert mixed.work(wanted, cost).tolist() == [
        *b.work([1], cost).tolist(),
        *a.work([0], cost).tolist(),
        *b.work([0], cost).tolist(),
        *a.work([a.rows - 1], cost).tolist(),
    ]
    assert mixed.bytes_per_token == (a.text_bytes + b.text_bytes) / (a.store.targets + b.store.targets)
    with pytest.raises(IndexError):
        mixed.batch([mixed.rows])


def test_rows_come_at_the_ratios_and_go_on_where_they_stopped(mixed: MixedDataset) -> None:
    loader = MixedLoader(mixed, {"a": 1, "bb": 3}, seed=2)
    rows = loader.rows(0, 80).tolist()
    first, last = mixed.task_rows["a"]
    assert Counter(first <= row < last for row in rows) == {True: 20, False: 60}
    assert set(rows) == set(range(mixed.rows))
    assert MixedLoader(mixed, {"a": 2, "bb": 6}, seed=2).rows(33, 20).tolist() == rows[33:53]


def test_sources_that_do_not_mix(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rows of one length"):
        MixedDataset({"a": made(tmp_path, "a", [40]), "bb": made(tmp_path, "bb", [40], seq_len=8)})
    with pytest.raises(ConfigError, match="rows of one length"):
        MixedDataset({})


def test_a_source_is_a_path_and_maybe_a_ratio() -> None:
    assert Source.parse("code=2.5") == Source("code", 2.5)
    assert Source.parse("a=b/c") == Source("a=b/c", 1.0)
