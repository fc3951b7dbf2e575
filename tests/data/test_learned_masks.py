"""Documents that say which of their ids are targets, as conversations do."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_loader import CharTokenizer

from glm5.data import TokenDataset, TokenStore
from glm5.data.shards import Encoded, write_encoded
from glm5.utils.errors import DataError


def encoded(count: int = 9) -> list[Encoded]:
    made = []
    for n in range(count):
        ids = [1, 2, *(5 + (n + k) % 90 for k in range(4 + n))]
        learned = [k > 2 and k % 3 != 0 for k in range(len(ids))]
        made.append(Encoded(f"c{n}", ids, sum(learned), learned))
    return made


def test_only_marked_ids_are_targets_whatever_the_packing(tmp_path: Path) -> None:
    store = write_encoded(encoded(), CharTokenizer(), tmp_path / "tokens", shard_tokens=20)  # several shards
    assert len(list((tmp_path / "tokens").glob("learned-*.bin"))) > 2
    assert store.targets == sum(sum(e.learned or ()) for e in encoded())
    for n, e in enumerate(encoded()):
        assert store.learned(n, 0, len(e.ids)).tolist() == e.learned
        assert store.learned(n, 2, 3).tolist() == list(e.learned or ())[2:5]
    data = TokenDataset(store, 8)
    found = []
    for batch in data.batches(3):
        target_BT, weight_BT = batch.targets()
        found += target_BT[weight_BT > 0].tolist()
    expected = [i for e in encoded() for i, learned in zip(e.ids, e.learned or (), strict=True) if learned]
    assert sorted(found) == sorted(expected)
    assert data.bytes_per_token == pytest.approx(store.text_bytes.sum() / store.targets)


def test_flags_are_of_all_documents_and_of_all_ids(tmp_path: Path) -> None:
    first, second = encoded(2)
    for bad in (Encoded("b", [1, 2, 3], 1), Encoded("b", [1, 2, 3], 1, [True])):
        with pytest.raises(ValueError, match="b: needs one flag an id"):
            write_encoded([first, second, bad], CharTokenizer(), tmp_path / "tokens")
        assert not (tmp_path / "tokens").exists()


def test_damage_to_the_flags_is_named(tmp_path: Path) -> None:
    write_encoded(encoded(), CharTokenizer(), tmp_path / "tokens")
    path = tmp_path / "tokens" / "learned-00000.bin"
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"learned-00000\.bin is damaged"):
        TokenStore(tmp_path / "tokens")
