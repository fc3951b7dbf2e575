"""Collecting text: nothing lost in silence, nothing that depends on a listing's order, errors that help."""

from __future__ import annotations

import json
import lzma
import os
import random
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from glm5.data import Document, collect_files, read_jsonl, split_held_out, stdlib_sources, xz_bits_per_byte
from glm5.utils.errors import DataError, FileError, UserError


def write(root: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


# ------------------------------------------------------------------------------------------------ directories
def test_every_file_is_a_document_or_counted(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "b/two.txt": "zwei\r\nLüge".encode(),
            "a.txt": b"one\n",
            "empty.txt": b"",
            "picture.png": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\xff",
            "zeros.bin": b"abc\0def",
            "latin1.txt": "Größe".encode("latin-1"),
            "wide.cs": "class Ü {}".encode("utf-16"),
            "utf32.txt": "four bytes".encode("utf-32"),
            "big.txt": b"x" * 101,
            ".hidden/x.txt": b"not looked at",
            "__pycache__/y.txt": b"not looked at",
            "skip/z.txt": b"not looked at",
        },
    )
    (tmp_path / "dangling.txt").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe.txt")
    corpus = collect_files(tmp_path, exclude=("skip",), max_bytes=100)
    assert corpus.documents == [
        Document("a.txt", "one\n"),
        Document("b/two.txt", "zwei\r\nLüge"),
        Document("wide.cs", "class Ü {}"),
    ]
    assert corpus.dropped == {
        "empty": 1,
        "binary": 3,
        "not UTF-8": 1,
        "larger than 100 bytes": 1,
        "not a file": 2,
    }
    assert corpus.seen == 11 == len(corpus.documents) + corpus.dropped.total()
    assert corpus.num_bytes == 4 + 11 + 11
    assert corpus.examples["not UTF-8"] == "latin1.txt"
    assert "3 documents (26 bytes) of 11" in corpus.summary()
    assert "1 empty (empty.txt)" in corpus.summary()


def test_suffixes_one_file_and_nested_links(tmp_path: Path) -> None:
    write(tmp_path, {"a.py": b"a", "b.md": b"b", "c/d.py": b"d"})
    (tmp_path / "c" / "up").symlink_to(tmp_path)  # would never end if it were followed
    assert [d.id for d in collect_files(tmp_path, suffixes=(".py",)).documents] == ["a.py", "c/d.py"]
    assert collect_files(tmp_path / "b.md").documents == [Document("b.md", "b")]


def test_names_that_are_not_utf8_are_counted(tmp_path: Path) -> None:
    write(tmp_path, {"good.txt": b"text"})
    (tmp_path / os.fsdecode(b"bad\xff.txt")).write_bytes(b"text")
    corpus = collect_files(tmp_path)
    assert corpus.dropped == {"name not UTF-8": 1}
    corpus.summary().encode()


def test_unreadable_files_are_counted(
    tmp_path: Path, read_only: Callable[[Path], AbstractContextManager[None]]
) -> None:
    write(tmp_path, {"good.txt": b"text", "secret.txt": b"text"})
    (tmp_path / "secret.txt").chmod(0)
    with read_only(tmp_path):  # also stops being the superuser, who could read it
        corpus = collect_files(tmp_path)
    assert corpus.dropped == {"unreadable": 1}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"no text found: 0 documents"),
        ({"a.bin": b"\0\1", "b.bin": b"\xff\0"}, r"left out: 2 binary \(a\.bin\)"),
        ({"a.txt": b"", "b.txt": b""}, r"left out: 2 empty"),
    ],
)
def test_a_corpus_without_text_says_what_was_there(tmp_path: Path, files: dict[str, bytes], message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        collect_files(write(tmp_path, files))
    assert caught.value.mend


def test_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="nowhere"):
        collect_files(tmp_path / "nowhere")


# ------------------------------------------------------------------------------------------------ JSONL
def test_jsonl_totals_reconcile(tmp_path: Path) -> None:
    """Seven rows, five of them unusable, as a reader elsewhere skipped without a word."""
    rows = [
        json.dumps({"id": "first", "text": "good"}).encode(),
        json.dumps({"id": "e", "text": ""}).encode(),
        json.dumps({"id": "n", "text": None}).encode(),
        json.dumps({"id": "m", "body": "x"}).encode(),
        b'{"id": "s", "text": "\\ud800"}',
        b'{"id": "b", "text": "cut',
        json.dumps({"text": "also good", "meta": {"k": 1}}).encode(),
    ]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join(rows) + b"\n")
    corpus = read_jsonl(path)
    assert corpus.documents == [Document("first", "good"), Document("rows.jsonl:7", "also good")]
    assert corpus.dropped == {"empty": 1, "no text under 'text'": 2, "lone surrogate": 1, "not JSON": 1}
    assert corpus.seen == 7


def test_jsonl_odd_rows(tmp_path: Path) -> None:
    path = tmp_path / "odd.jsonl"
    rows = [
        b"",
        b'["list"]',
        b"\xff\xfe",
        b'{"id": 7, "text": "b"}',
        b'{"id": "7", "text": "again"}',
        b'{"id": "\\ud800", "text": "x"}',
        b'{"id": 8, "text": 3}',
    ]
    path.write_bytes(b"\n".join(rows))
    corpus = read_jsonl(path)
    assert corpus.documents == [Document("7", "b")]
    assert corpus.dropped == {
        "blank line": 1,
        "not a JSON object": 1,
        "not JSON": 1,
        "id used before": 1,
        "lone surrogate": 1,
        "no text under 'text'": 1,
    }
    assert corpus.seen == 7


def test_jsonl_errors(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"gone\.jsonl"):
        read_jsonl(tmp_path / "gone.jsonl")
    (tmp_path / "binary.jsonl").write_bytes(b"\x00\x01\xff\n\xfe")
    with pytest.raises(UserError, match="2 not JSON"):
        read_jsonl(tmp_path / "binary.jsonl")


# ------------------------------------------------------------------------------------------------ the library
def test_stdlib_sources() -> None:
    corpus = stdlib_sources()
    ids = [document.id for document in corpus.documents]
    assert {"os.py", "json/decoder.py", "asyncio/events.py"} <= set(ids)
    assert ids == sorted(set(ids))
    assert not any("site-packages" in id or id.startswith("test/") or not id.endswith(".py") for id in ids)
    assert corpus.num_bytes > 5_000_000
    assert corpus.documents[ids.index("os.py")].text == Path(os.__file__).read_bytes().decode()
    everything = stdlib_sources(include_generated=True)
    assert everything.seen == corpus.seen
    assert len(everything.documents) == len(ids) + corpus.dropped["generated"] > len(ids)


def test_stdlib_without_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(DataError, match="no text found"):
        stdlib_sources()


# ------------------------------------------------------------------------------------------------ the split
def test_a_documents_side_depends_on_its_id_alone() -> None:
    documents = [Document(f"file{n}.py", f"text {n}") for n in range(2000)]
    train, held_out = split_held_out(documents, 0.05)
    assert len(train) + len(held_out) == 2000
    assert 70 < len(held_out) < 130
    sides = {d.id for d in held_out}
    edited = [Document(d.id, d.text + "!") for d in reversed(documents[:1000])]
    _, again = split_held_out(edited, 0.05)
    assert {d.id for d in again} == {id for id in sides if int(id[4:-3]) < 1000}
    _, larger = split_held_out(documents, 0.2)
    assert sides < {d.id for d in larger}


def test_split_is_fixed_for_all_time() -> None:
    _, held_out = split_held_out([Document(f"{n}.py", "x") for n in range(40)], 0.1)
    assert [d.id for d in held_out] == ["8.py", "13.py", "14.py", "27.py", "35.py"]


@pytest.mark.parametrize("fraction", [0, 1, -0.1, 2, float("nan")])
def test_split_fraction_out_of_range(fraction: float) -> None:
    with pytest.raises(DataError, match="not between 0 and 1"):
        split_held_out([Document("a", "x")], fraction)


def test_split_with_an_empty_side() -> None:
    with pytest.raises(DataError, match=r"of 2 documents leaves 2 for training and 0 held out"):
        split_held_out([Document("a", "x"), Document("b", "x")], 1e-9)


# ------------------------------------------------------------------------------------------------ xz
def test_xz_bits_per_byte_weights_by_size(tmp_path: Path) -> None:
    noise = bytes(random.Random(0).choices(range(32, 127), k=5000)).decode()  # noqa: S311
    documents = [Document("noise", noise), Document("same", "a" * 20_000)]
    sizes = [len(lzma.compress(d.text.encode(), preset=9 | lzma.PRESET_EXTREME)) for d in documents]
    assert xz_bits_per_byte(documents) == 8 * sum(sizes) / 25_000
    assert 6.5 < xz_bits_per_byte(documents[:1]) < 7.5
    assert xz_bits_per_byte(documents[1:]) < 0.1
    with pytest.raises(DataError, match="no text"):
        xz_bits_per_byte([])


@pytest.mark.skipif(shutil.which("xz") is None, reason="the xz program is not installed")
def test_xz_bits_per_byte_is_what_the_program_gives(tmp_path: Path) -> None:
    text = Path(random.__file__).read_text(encoding="utf-8")
    (tmp_path / "random.py").write_text(text, encoding="utf-8")
    result = subprocess.run(["xz", "-9e", "--stdout", tmp_path / "random.py"], capture_output=True, check=True)
    assert xz_bits_per_byte([Document("random.py", text)]) == 8 * len(result.stdout) / len(text.encode())
