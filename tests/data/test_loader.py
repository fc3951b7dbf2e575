"""Shards and loader: exact byte counts, one integer of state, damage named, nothing half written."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from glm5.data import Batch, Document, Loader, TokenDataset, TokenStore, write_tokens
from glm5.data.packing import Strategy
from glm5.text import Tokenizer
from glm5.utils.errors import ConfigError, DataError, FileError


class CharTokenizer:
    """Ids 0, 1, 2 are end of text and prefix; a character is its code point + 3."""

    vocab_size = 260
    prefix_ids = (1, 2)
    end_of_text_id = 0
    fingerprint = "characters"

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [[ord(character) + 3 for character in text] for text in texts]

    def text_bytes_per_id(self) -> list[int]:
        return [0, 0, 0] + [1] * 128 + [2] * 129


def corpus(count: int = 40) -> list[Document]:
    return [
        Document(f"d{n:02d}", "".join(chr(97 + (n * 7 + k) % 26) for k in range(3 + n * 5 % 61))) for n in range(count)
    ]


@pytest.fixture
def dataset(tmp_path: Path) -> TokenDataset:
    return TokenDataset.build(corpus(), CharTokenizer(), tmp_path / "tokens", seq_len=16)


def same(a: Batch, b: Batch) -> bool:
    return all(np.array_equal(getattr(a, f.name), getattr(b, f.name)) for f in fields(Batch))


def joined(batches: Iterator[Batch]) -> list[np.ndarray]:
    return [row for batch in batches for row in batch.ids_BS]


# ------------------------------------------------------------------------------------------------ contents
def test_documents_are_stored_with_prefix_and_end(dataset: TokenDataset) -> None:
    store = dataset.store
    assert store.names == [d.id for d in corpus()]
    for n, document in enumerate(corpus()):
        ids = [1, 2, *(ord(c) + 3 for c in document.text), 0]
        assert store.lengths[n] == len(ids)  # lengths include prefix and end of text
        assert store.read(n, 0, len(ids)).tolist() == ids
        assert store.read(n, 2, 1).tolist() == ids[2:3]
    assert store.tokens == store.lengths.sum() == sum(len(d.text) + 3 for d in corpus())
    assert store.tokenizer_fingerprint == "characters"


def test_empty_documents_are_skipped_also_in_front(tmp_path: Path) -> None:
    texts = ["", "x", "", "yy", ""]
    store = write_tokens([Document(str(n), t) for n, t in enumerate(texts)], CharTokenizer(), tmp_path / "t")
    assert store.names == ["1", "3"]
    assert store.lengths.tolist() == [4, 5]
    assert store.read(0, 0, 4).tolist() == [1, 2, ord("x") + 3, 0]


@pytest.mark.parametrize("strategy", ["best-fit", "concatenate"])
@pytest.mark.parametrize("seq_len", [1, 7, 16, 64])
def test_every_byte_of_text_is_predicted_once(tmp_path: Path, strategy: Strategy, seq_len: int) -> None:
    """Also the first of every document; the end of text is predicted too, and stands for no byte."""
    documents = [*corpus(), Document("wide", "aé\u00c0z" * 9)]
    dataset = TokenDataset.build(documents, CharTokenizer(), tmp_path / "t", seq_len, 4, strategy)
    sizes, predicted = 0, Counter[int]()
    for batch in dataset.batches(5):
        target, weight = batch.targets()
        sizes += int(batch.num_bytes_BT.sum())
        predicted.update(target[weight > 0].tolist())
    assert sizes == dataset.text_bytes == sum(len(d.text.encode()) for d in documents)
    expected = Counter(ord(c) + 3 for d in documents for c in d.text)
    expected[0] = len(documents)
    assert predicted == expected


def test_batches_are_what_packing_promises(dataset: TokenDataset) -> None:
    batch = dataset.batch(range(dataset.rows))
    assert batch.ids_BS.shape == batch.document_BS.shape == batch.loss_BS.shape == (dataset.rows, 20)
    assert batch.first_BT.shape == batch.position_BT.shape == batch.num_bytes_BT.shape == (dataset.rows, 16)
    assert len(batch) == dataset.rows
    assert batch.seq_len == 16
    assert np.array_equal(batch.input_BT, batch.ids_BS[:, :16])
    padding = batch.document_BS < 0
    assert (batch.ids_BS[padding] == dataset.store.end_of_text_id).all()
    assert not batch.loss_BS[padding].any()
    slot_T = np.arange(16)
    assert (batch.first_BT[padding[:, :16]] > np.broadcast_to(slot_T, padding[:, :16].shape)[padding[:, :16]]).all()
    prefix = (batch.ids_BS == 1) | (batch.ids_BS == 2)
    assert not batch.loss_BS[prefix].any()
    assert batch.loss_BS[~prefix & ~padding].all()
    with pytest.raises(ConfigError, match="depth=5: must be from 1 to 4"):
        batch.targets(5)
    with pytest.raises(IndexError, match=f"row {dataset.rows} of {dataset.rows}"):
        dataset.batch([dataset.rows])


def test_rows_of_one_document_come_first(dataset: TokenDataset) -> None:
    batch = dataset.batch(range(dataset.rows - 1, -1, -1))
    ordered = batch.whole_first()
    kinds = [bool(first_T.any()) for first_T in ordered.first_BT]
    assert kinds == sorted(kinds)
    assert len(set(kinds)) == 2
    for name in ("ids_BS", "document_BS", "position_BT"):
        before, after = getattr(batch, name).tolist(), getattr(ordered, name).tolist()
        assert after != before
        assert sorted(after) == sorted(before)


def test_many_shards_hold_the_same(tmp_path: Path) -> None:
    one = write_tokens(corpus(), CharTokenizer(), tmp_path / "one")
    many = write_tokens(corpus(), CharTokenizer(), tmp_path / "many", shard_tokens=50)
    assert len(list((tmp_path / "many").glob("tokens-*.bin"))) > 10
    assert len(list((tmp_path / "one").glob("tokens-*.bin"))) == 1
    a, b = TokenDataset(one, 16), TokenDataset(many, 16)
    assert same(a.batch(range(a.rows)), b.batch(range(b.rows)))


def test_large_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    class Wide(CharTokenizer):
        vocab_size = 154_880

        def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
            return [[154_000 + len(text)] * 3 for text in texts]

        def text_bytes_per_id(self) -> list[int]:
            return [1] * self.vocab_size

    store = write_tokens(corpus(3), Wide(), tmp_path / "t")
    assert store.read(1, 2, 3).tolist() == [154_008] * 3
    assert (tmp_path / "t" / "tokens-00000.bin").stat().st_size == 4 * store.tokens


def test_the_same_corpus_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_tokens(corpus(), CharTokenizer(), tmp_path / name)
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()
    stores = [TokenStore(tmp_path / name) for name in ("a", "b")]
    assert stores[0].fingerprint == stores[1].fingerprint


def test_real_tokenizer_bits_per_byte_are_exact(tmp_path: Path) -> None:
    """A model that gives every token the same probability has a known number of bits per byte."""
    texts = [Document(f"{n}", f"def größe_{n}(x):\n    return {n} * x  # <|user|> 数\n" * (n + 1)) for n in range(12)]
    tokenizer = Tokenizer.train((d.text for d in texts), 320)
    dataset = TokenDataset.build(texts, tokenizer, tmp_path / "t", seq_len=24)
    nats = sizes = 0.0
    for batch in dataset.batches(4):
        nats += math.log(tokenizer.vocab_size) * float(batch.targets()[1].sum())
        sizes += int(batch.num_bytes_BT.sum())
    tokens = sum(len(tokenizer.encode(d.text)) + 1 for d in texts)
    assert sizes == sum(d.num_bytes for d in texts)
    assert nats / math.log(2) / sizes == pytest.approx(tokens * math.log2(320) / sizes, rel=1e-12)
    assert dataset.store.tokenizer_fingerprint == tokenizer.fingerprint


# ------------------------------------------------------------------------------------------------ the loader
def test_the_stream_is_the_same_however_it_is_cut(dataset: TokenDataset) -> None:
    total = 3 * dataset.rows + 5
    whole = Loader(dataset, seed=1).batch(0, total).ids_BS
    for sizes in ([1], [7], [2, 3, 5, 8], [dataset.rows], [dataset.rows + 3]):
        index, rows, step = 0, [], 0
        while index < total:
            count = min(sizes[step % len(sizes)], total - index)
            # A new loader every time: the index is the whole state.
            rows.append(Loader(dataset, seed=1).batch(index, count).ids_BS)
            index, step = index + count, step + 1
        assert np.array_equal(np.concatenate(rows), whole)


def test_every_epoch_holds_every_row_once_in_another_order(dataset: TokenDataset) -> None:
    loader = Loader(dataset, seed=3)
    orders = [loader.rows(epoch * dataset.rows, dataset.rows).tolist() for epoch in range(4)]
    assert all(sorted(order) == list(range(dataset.rows)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    assert loader.rows(0, dataset.rows).tolist() == orders[0]  # going back is no different
    other = Loader(dataset, seed=4).rows(0, dataset.rows).tolist()
    assert other != orders[0]
    assert sorted(other) == sorted(orders[0])
    assert loader.epoch(dataset.rows * 3 // 2) == pytest.approx(1.5, abs=0.1)


def test_orders_look_shuffled(tmp_path: Path) -> None:
    dataset = TokenDataset.build(corpus(), CharTokenizer(), tmp_path / "t", seq_len=1)
    order = Loader(dataset, seed=0).rows(0, dataset.rows)
    assert abs(np.corrcoef(order, np.arange(dataset.rows))[0, 1]) < 0.1
    assert np.mean(np.diff(order) == 1) < 0.01


def test_another_process_reads_the_same_stream(dataset: TokenDataset) -> None:
    script = (
        "import sys; from glm5.data import *;"
        "print(Loader(TokenDataset.open(sys.argv[1], 16), 5).batch(100, 9).ids_BS.tolist())"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, str(dataset.store.directory)], capture_output=True, text=True, check=True
    )
    assert json.loads(result.stdout) == Loader(dataset, 5).batch(100, 9).ids_BS.tolist()


def test_processes_take_their_own_ranges(dataset: TokenDataset) -> None:
    whole = Loader(dataset, 0).batch(40, 8)
    parts = [Loader(dataset, 0).batch(40 + 2 * rank, 2).ids_BS for rank in range(4)]
    assert np.array_equal(np.concatenate(parts), whole.ids_BS)


def test_reopening_at_another_length_gives_the_same_text(dataset: TokenDataset) -> None:
    for seq_len in (4, 33):
        again = TokenDataset.open(dataset.store.directory, seq_len)
        assert again.text_bytes == dataset.text_bytes
        assert sum(int(b.num_bytes_BT.sum()) for b in again.batches(3)) == dataset.text_bytes
    assert len(joined(dataset.batches(7))) == dataset.rows


def test_the_first_rows_alone(dataset: TokenDataset) -> None:
    whole = joined(dataset.batches(4))
    for most in (1, 4, 6, dataset.rows + 5):
        found = joined(dataset.batches(4, most))
        assert len(found) == min(most, dataset.rows)
        assert all(np.array_equal(a, b) for a, b in zip(found, whole, strict=False))


# ------------------------------------------------------------------------------------------------ errors
def test_ids_outside_the_models_vocabulary(dataset: TokenDataset, tmp_path: Path) -> None:
    highest = max(ord(c) + 3 for d in corpus() for c in d.text)
    Loader(dataset, 0, vocab_size=highest + 1)
    with pytest.raises(
        DataError, match=rf"id {highest}, outside the model's vocabulary of {highest}.*vocab_size to 260"
    ):
        Loader(dataset, 0, vocab_size=highest)
    with pytest.raises(DataError, match=r"bad got id 260, outside the tokenizer's vocabulary of 260"):
        write_tokens([Document("ok", "a"), Document("bad", chr(257))], CharTokenizer(), tmp_path / "t")
    assert not (tmp_path / "t").exists()


def test_an_id_beyond_the_vocabulary_on_disk_names_the_shard(tmp_path: Path) -> None:
    store = write_tokens(corpus(), CharTokenizer(), tmp_path / "t", shard_tokens=100)
    shard = tmp_path / "t" / "tokens-00002.bin"
    shard.write_bytes(b"\xff\xff" * (shard.stat().st_size // 2))
    dataset = TokenDataset(TokenStore(tmp_path / "t", verify=False), 16)
    with pytest.raises(DataError, match=r"tokens-00002\.bin holds id 65535, outside its vocabulary of 260"):
        dataset.batch(range(dataset.rows))
    del store


def test_small_corpora_say_so(tmp_path: Path) -> None:
    documents = [Document("a", "abc"), Document("b", "d")]
    with pytest.raises(DataError, match=r"8 tokens to predict, fewer than one sequence of 16.*seq_len=8 or less"):
        TokenDataset.build(documents, CharTokenizer(), tmp_path / "t", seq_len=16)
    assert TokenDataset.open(tmp_path / "t", seq_len=8).rows == 2
    for empty in ([], [Document("a", "")]):
        with pytest.raises(DataError, match="no text to tokenize"):
            write_tokens(empty, CharTokenizer(), tmp_path / "e")
        assert not list(tmp_path.glob("*e*"))


def damage_cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def damage_flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def damage_empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [damage_cut, damage_flip, damage_empty, Path.unlink])
@pytest.mark.parametrize("name", ["tokens-00001.bin", "documents.npy", "token-bytes.npy", "names.json"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, damage: Callable[[Path], None]) -> None:
    write_tokens(corpus(), CharTokenizer(), tmp_path / "t", shard_tokens=200)
    damage(tmp_path / "t" / name)
    with pytest.raises(DataError, match=rf"{name} is (damaged|missing)") as caught:
        TokenDataset.open(tmp_path / "t", 16)
    assert "again" in caught.value.mend


def test_a_damaged_manifest_or_a_foreign_directory(tmp_path: Path) -> None:
    write_tokens(corpus(), CharTokenizer(), tmp_path / "t")
    damage_cut(tmp_path / "t" / "manifest.json")  # the closing line end
    damage_cut(tmp_path / "t" / "manifest.json")
    with pytest.raises(FileError, match=r"manifest\.json is not valid JSON"):
        TokenStore(tmp_path / "t")
    (tmp_path / "t" / "manifest.json").write_text("{}")
    with pytest.raises(DataError, match="not a manifest of glm5-tokens-1"):
        TokenStore(tmp_path / "t")
    with pytest.raises(FileError, match="no such file"):
        TokenStore(tmp_path / "nothing")


def test_an_existing_directory_is_never_overwritten(dataset: TokenDataset) -> None:
    before = dataset.store.fingerprint
    with pytest.raises(FileError, match="is there already"):
        write_tokens(corpus(3), CharTokenizer(), dataset.store.directory)
    assert TokenStore(dataset.store.directory).fingerprint == before


def test_a_failed_or_killed_build_leaves_no_dataset(tmp_path: Path) -> None:
    def breaking() -> Iterator[Document]:
        yield from corpus(5)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_tokens(breaking(), CharTokenizer(), tmp_path / "t")
    assert not list(tmp_path.iterdir())
    # What a killed process leaves is swept away by the next one.
    (tmp_path / ".t.partial").mkdir()
    (tmp_path / ".t.partial" / "tokens-00000.bin").write_bytes(b"half")
    assert write_tokens(corpus(5), CharTokenizer(), tmp_path / "t").names == [d.id for d in corpus(5)]
    assert [p.name for p in tmp_path.iterdir()] == ["t"]


def test_read_only_and_full_disks(
    tmp_path: Path,
    read_only: Callable[[Path], AbstractContextManager[None]],
    file_size_limit: Callable[[int], AbstractContextManager[None]],
) -> None:
    with read_only(tmp_path), pytest.raises(FileError):
        write_tokens(corpus(), CharTokenizer(), tmp_path / "t")
    with file_size_limit(1000), pytest.raises(FileError) as caught:
        write_tokens(corpus(), CharTokenizer(), tmp_path / "t")
    assert str(tmp_path / "t") in str(caught.value)
    assert caught.value.mend
    assert not list(tmp_path.iterdir())


def test_impossible_requests(dataset: TokenDataset) -> None:
    with pytest.raises(ConfigError, match="index=-1"):
        Loader(dataset, 0).batch(-1, 2)
    with pytest.raises(ConfigError, match="count=0"):
        Loader(dataset, 0).batch(0, 0)
    with pytest.raises(ConfigError, match="seq_len=0"):
        TokenDataset.open(dataset.store.directory, 0)
