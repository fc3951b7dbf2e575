"""From a corpus to the datasets of a run: collect, deduplicate, hold out, tokenize, keep; and find it again.

    RUN/data/source.json   fingerprint of the documents and settings, and what was counted; written last
    RUN/data/tokenizer/    trained on the training documents, or a copy of the one that was given
    RUN/data/training/     token shards
    RUN/data/held-out/     token shards of the documents that no training sees

A run that goes on opens what is there if the fingerprint matches: nothing is tokenized twice, and no run goes on
with another corpus than it began with. Source: report section 2.2 does the same at scale. Read next: `pretrain`.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm5.data.corpus import Corpus, Document, collect_files, read_jsonl, split_held_out, stdlib_sources
from glm5.data.filters import drop_copies_of, drop_exact_copies
from glm5.data.loader import TokenDataset
from glm5.data.shards import TokenStore, write_tokens
from glm5.text.tokenizer import Tokenizer, load_tokenizer
from glm5.utils.errors import ConfigError, DataError, FileError
from glm5.utils.files import file_errors, read_json, require_writable, write_json

STDLIB = "stdlib"
_VERSION = 1  # of what happens between the documents and the tokens

Say = Callable[[str], None]


@dataclass(frozen=True)
class TextConfig:
    """The text of a run."""

    corpus: str = STDLIB
    """A directory of text files, a .jsonl file (objects with "text"), one text file, or stdlib: this Python's own."""
    suffixes: tuple[str, ...] = ()
    """Of a directory take only files whose names end so, such as .py .md; by default all that hold text."""
    seq_len: int = 512
    """Tokens that a row predicts."""
    held_out: float = 0.05
    """Share of the documents that no training sees; 0 holds out none, and nothing is measured."""

    def __post_init__(self) -> None:
        if not self.corpus:
            raise ConfigError("corpus", "", "must name a directory, a file, or stdlib")
        if self.suffixes and (self.corpus == STDLIB or self.corpus.endswith(".jsonl")):
            raise ConfigError(
                "suffixes", self.suffixes, f"choose files of a directory, and corpus={self.corpus} is none"
            )
        if self.seq_len < 1:
            raise ConfigError("seq_len", self.seq_len, "must be at least 1")
        if not 0 <= self.held_out < 1:
            raise ConfigError("held_out", self.held_out, "must lie in [0, 1)")


@dataclass(frozen=True)
class Prepared:
    """What a run trains and is measured on. counts: what became of the corpus, by JSON values."""

    tokenizer: Tokenizer
    training: TokenDataset
    held_out: TokenDataset | None
    counts: dict[str, Any]


def collect(config: TextConfig) -> Corpus:
    """The documents of `config.corpus`. Errors as in `glm5.data.corpus`."""
    if config.corpus == STDLIB:
        return stdlib_sources()
    if config.corpus.endswith(".jsonl"):
        return read_jsonl(config.corpus)
    return collect_files(config.corpus, config.suffixes or None)


def prepare(
    config: TextConfig,
    directory: Path,
    *,
    ahead: int,
    vocab_size: int,
    tokenizer: Tokenizer | None,
    begun: bool,
    say: Say,
) -> Prepared:
    """The datasets of a run in `directory`; made if they are missing or, before the run has begun, out of date.

    Args:
        ahead: 1 + the number of MTP depths.
        vocab_size: of the tokenizer that is trained where none is given.
        begun: checkpoints depend on this data: it may be made again, but must stay the same.
        say: receives lines for the user.

    Raises:
        DataError: no usable text; too little of it; or the corpus is not the one that the run began with.
        FileError: the corpus cannot be read, or the directory written.
    """
    corpus = collect(config)
    say(f"corpus    {corpus.summary()}")
    identity = tokenizer.fingerprint if tokenizer is not None else f"trained to {vocab_size}"
    fingerprint = _fingerprint(corpus.documents, config.held_out, identity)
    found = _open(config, directory, fingerprint, ahead, say)
    if found is None:
        before = _source(directory)
        if begun and before is not None and before["fingerprint"] != fingerprint:
            raise DataError(
                f"{config.corpus} is not the corpus that the run in {directory.parent} began with (other documents, "
                "held-out share or tokenizer)",
                "Restore it, or choose another --run directory",
            )
        _make(config, corpus, directory, fingerprint, vocab_size, tokenizer)
        found = _open(config, directory, fingerprint, ahead, say)
        assert found is not None
    counts = found.counts
    say(
        f"data      {counts['training_documents']:,} documents and {counts['training_tokens']:,} tokens to learn from, "
        f"{counts['held_out_documents']:,} documents held out; {found.training.bytes_per_token:.2f} bytes a token; "
        f"removed: {counts['exact_copies']:,} exact copies, {counts['copies_of_held_out']:,} that repeat held-out text"
    )
    return found


def opened(config: TextConfig, directory: Path, *, ahead: int) -> Prepared:
    """What another process has just prepared in `directory`, without reading the corpus again.

    Raises:
        DataError: it is not there, or damaged: not the directory that the other process writes to.
    """
    source = _source(directory)
    found = None if source is None else _open(config, directory, source["fingerprint"], ahead, lambda _: None)
    if found is None:
        what = f"{directory} does not hold the data that the first process has prepared there"
        raise DataError(what, "Choose a --run directory that all hosts see")
    return found


def _fingerprint(documents: Sequence[Document], held_out: float, tokenizer: str) -> str:
    digest = hashlib.sha256(json.dumps([_VERSION, held_out, tokenizer]).encode())
    for document in documents:
        digest.update(json.dumps([document.id, hashlib.sha256(document.text.encode()).hexdigest()]).encode())
    return digest.hexdigest()


def _source(directory: Path) -> dict[str, Any] | None:
    path = directory / "source.json"
    return read_json(path) if path.exists() else None


def _open(config: TextConfig, directory: Path, fingerprint: str, ahead: int, say: Say) -> Prepared | None:
    """What is there, if it is whole and made of the same documents."""
    source = _source(directory)
    if source is None or source["fingerprint"] != fingerprint:
        return None
    try:
        tokenizer = load_tokenizer(directory / "tokenizer")
        stores = {name: TokenStore(directory / name) for name in ("training", "held-out") if source["parts"][name]}
        if any(store.tokenizer_fingerprint != tokenizer.fingerprint for store in stores.values()):
            raise DataError(f"{directory} holds tokens of another tokenizer")
    except (DataError, FileError) as e:
        say(f"warning   {e.what}; tokenizing again")
        return None
    training = TokenDataset(stores["training"], config.seq_len, ahead)
    held_out = None
    if "held-out" in stores:
        # Few documents may be shorter than one row: rows are no longer than what there is.
        most = int((stores["held-out"].lengths - 1).sum())
        held_out = TokenDataset(stores["held-out"], min(config.seq_len, most), ahead)
    return Prepared(tokenizer, training, held_out, source["counts"])


def _make(
    config: TextConfig,
    corpus: Corpus,
    directory: Path,
    fingerprint: str,
    vocab_size: int,
    tokenizer: Tokenizer | None,
) -> None:
    with file_errors(directory, "replace"):
        if directory.exists():
            shutil.rmtree(directory)
    require_writable(directory)  # before minutes of filtering and tokenizing
    documents, exact = drop_exact_copies(corpus.documents)
    held_out: list[Document] = []
    near: Sequence[Any] = ()
    if config.held_out:
        try:
            documents, held_out = split_held_out(documents, config.held_out)
        except DataError as e:
            raise DataError(e.what, f"{e.mend}, or hold out nothing with --held-out 0") from None
        documents, near = drop_copies_of(held_out, documents)
    if not documents:
        raise DataError(f"every document of {config.corpus} repeats a held-out one", "Use more text, or --held-out 0")
    if tokenizer is None:
        tokenizer = Tokenizer.train((document.text for document in documents), vocab_size)
    tokenizer.save(directory / "tokenizer")
    training = write_tokens(documents, tokenizer, directory / "training")
    if held_out:
        write_tokens(held_out, tokenizer, directory / "held-out")
    counts = {
        "documents": corpus.seen,
        "left_out": dict(corpus.dropped),
        "exact_copies": len(exact),
        "copies_of_held_out": len(near),
        "training_documents": len(documents),
        "training_tokens": training.tokens,
        "training_bytes": int(training.text_bytes.sum()),
        "held_out_documents": len(held_out),
        "held_out_bytes": sum(document.num_bytes for document in held_out),
    }
    parts = {"training": True, "held-out": bool(held_out)}
    write_json(directory / "source.json", {"fingerprint": fingerprint, "parts": parts, "counts": counts})
