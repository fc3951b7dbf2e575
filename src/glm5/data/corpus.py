"""Collecting documents: from a directory, a JSONL file, or the Python standard library that runs this.

Nothing disappears in silence: every file or line is either a document or counted under the reason why not, and
the two sums agree. Documents come out in the order of their ids, so that a corpus is a function of its files and
not of a directory listing. Source: report section 2.2 for what is done at scale. Read next: `filters`, then `packing`.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from glm5.utils.errors import DataError
from glm5.utils.files import file_errors

_GENERATED = re.compile(r"(?i)\bauto-?(matically[ -])?generated\b|\bgenerated (from|by)\b")


@dataclass(frozen=True)
class Document:
    """One text with a name that is unique in its corpus (a relative path, or a line of a file)."""

    id: str
    text: str

    @property
    def num_bytes(self) -> int:
        """Size in UTF-8."""
        return len(self.text.encode())


@dataclass
class Corpus:
    """Documents sorted by id, and what was left out and why. `seen == len(documents) + sum(dropped.values())`."""

    source: str
    documents: list[Document] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)  # reason -> the first id dropped for it

    @property
    def seen(self) -> int:
        return len(self.documents) + self.dropped.total()

    @property
    def num_bytes(self) -> int:
        return sum(document.num_bytes for document in self.documents)

    def drop(self, id: str, reason: str) -> None:
        self.dropped[reason] += 1
        self.examples.setdefault(reason, id)

    def summary(self) -> str:
        """One line, e.g. "3 documents (1,204 bytes) of 5 in notes; left out: 2 binary (logo.png)"."""
        reasons = ", ".join(f"{n} {reason} ({self.examples[reason]})" for reason, n in sorted(self.dropped.items()))
        kept = f"{len(self.documents):,} documents ({self.num_bytes:,} bytes) of {self.seen:,} in {self.source}"
        return f"{kept}; left out: {reasons}" if reasons else kept


def collect_files(
    root: str | Path,
    suffixes: Iterable[str] | None = None,
    exclude: Iterable[str] = (),
    max_bytes: int = 64 << 20,
) -> Corpus:
    """Every text file under a directory, or the one file given. A document's id is its path relative to `root`.

    Hidden files and directories are not looked at, nor `__pycache__`. Text is UTF-8, or UTF-16 with a byte order
    mark; line ends stay as they are.

    Args:
        root: a directory, or one file.
        suffixes: look only at names that end so, e.g. (".py", ".md"). None: at all.
        exclude: names of directories that are not entered.
        max_bytes: larger files are left out.

    Raises:
        FileError: `root` cannot be read.
        DataError: it holds no text: nothing at all, or only empty, binary or undecodable files.
    """
    root = Path(root)
    endings = None if suffixes is None else tuple(suffixes)
    corpus = Corpus(str(root))
    for path in [root] if root.is_file() else _walk(root, {*exclude, "__pycache__"}):
        if endings is not None and not path.name.endswith(endings):
            continue
        id = path.name if path == root else path.relative_to(root).as_posix()
        if not _is_unicode(id):
            corpus.drop(id.encode("utf-8", "backslashreplace").decode(), "name not UTF-8")
            continue
        try:
            # A named pipe or device would block or never end.
            if not path.is_file():
                corpus.drop(id, "not a file")
                continue
            if path.stat().st_size > max_bytes:
                corpus.drop(id, f"larger than {max_bytes:,} bytes")
                continue
            data = path.read_bytes()
        except OSError:
            corpus.drop(id, "unreadable")
            continue
        text, reason = _text_of(data)
        if text is None:
            corpus.drop(id, reason)
        else:
            corpus.documents.append(Document(id, text))
    return _finished(corpus)


def read_jsonl(path: str | Path) -> Corpus:
    """Documents from a file with one JSON object a line: its "text", and its "id", else `name:number`.

    Raises:
        FileError: the file cannot be read.
        DataError: no line holds text.
    """
    path = Path(path)
    corpus = Corpus(str(path))
    taken: set[str] = set()
    with file_errors(path, "read the corpus"), path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            id = f"{path.name}:{number}"
            if not line.strip():
                corpus.drop(id, "blank line")
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):  # not UTF-8 either, a number of 5,000 digits, brackets by the thousand
                corpus.drop(id, "not JSON")
                continue
            if not isinstance(record, dict):
                corpus.drop(id, "not a JSON object")
                continue
            text = record.get("text")
            id = str(record.get("id", id))
            if not isinstance(text, str):
                corpus.drop(id, "no text under 'text'")
            elif not text:
                corpus.drop(id, "empty")
            elif not _is_unicode(text) or not _is_unicode(id):
                corpus.drop(f"{path.name}:{number}", "lone surrogate")
            elif id in taken:
                corpus.drop(id, "id used before")
            else:
                taken.add(id)
                corpus.documents.append(Document(id, text))
    return _finished(corpus)


def stdlib_sources(include_tests: bool = False, include_generated: bool = False) -> Corpus:
    """The source code of the standard library of the Python that runs this: real text on every machine.

    Args:
        include_tests: also the test suites, if this Python has them (about twice as much again).
        include_generated: also files whose head says that a program wrote them: code-page tables, help topics.
            They are a quarter of the library, and no code.

    Raises:
        DataError: this Python came without sources.
    """
    tests = () if include_tests else ("test", "tests", "idle_test")
    root = sysconfig.get_path("stdlib")
    corpus = collect_files(root, suffixes=(".py",), exclude=("site-packages", "dist-packages", *tests))
    if not include_generated:
        documents, corpus.documents = corpus.documents, []
        for document in documents:
            if _GENERATED.search(document.text, 0, 1000):
                corpus.drop(document.id, "generated")
            else:
                corpus.documents.append(document)
    return _finished(corpus)


def split_held_out(documents: Iterable[Document], fraction: float) -> tuple[list[Document], list[Document]]:
    """Documents for training and held out, decided by a hash of each id.

    A document's side depends on nothing else, so that it stays where it is when the corpus grows or its text is
    edited. Copies under other names may land on the other side: see `filters`.

    Args:
        fraction: the share of documents to hold out, above 0 and below 1.

    Raises:
        DataError: the fraction is out of range, or leaves one side empty.
    """
    if not 0 < fraction < 1:
        raise DataError(f"held-out fraction {fraction} is not between 0 and 1", "Use 0.05, for example")
    train: list[Document] = []
    held_out: list[Document] = []
    for document in documents:
        point = int.from_bytes(hashlib.sha256(document.id.encode()).digest()[:8], "big") / 2**64
        (held_out if point < fraction else train).append(document)
    if not train or not held_out:
        raise DataError(
            f"holding out {fraction:g} of {len(train) + len(held_out)} documents leaves "
            f"{len(train)} for training and {len(held_out)} held out",
            "Use more documents, or another fraction",
        )
    return train, held_out


def _walk(directory: Path, excluded: set[str]) -> Iterator[Path]:
    with file_errors(directory, "read the corpus"):
        paths = list(directory.iterdir())
    for path in paths:
        if path.name.startswith("."):
            continue
        # A link to a directory could lead back up; its files are met where they are.
        if path.is_dir():
            if path.name not in excluded and not path.is_symlink():
                yield from _walk(path, excluded)
        else:
            yield path


def _text_of(data: bytes) -> tuple[str | None, str]:
    """The text of a file's bytes, or None and the reason."""
    if not data:
        return None, "empty"
    try:
        if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            text = data.decode("utf-16")
        else:
            text = data.decode("utf-8")
    except UnicodeDecodeError:
        return None, "binary" if b"\0" in data else "not UTF-8"
    return (None, "binary") if "\0" in text else (text, "")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _finished(corpus: Corpus) -> Corpus:
    if not corpus.documents:
        raise DataError(
            f"no text found: {corpus.summary()}",
            "Give a directory of UTF-8 text files, or a .jsonl file with one object a line",
        )
    corpus.documents.sort(key=lambda document: document.id)
    return corpus
