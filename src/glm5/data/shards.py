"""Documents as token ids on disk: raw memory-mapped shards and a manifest with their checksums.

    manifest.json      sizes, tokenizer, checksums; written last
    tokens-00000.bin   token ids end to end, little-endian uint16 or uint32; a document never spans two shards
    documents.npy      int64 [documents, 2]: tokens, bytes of text
    token-bytes.npy    int32 [vocab]: the bytes of text that each id stands for
    names.json         the documents' ids
    learned-00000.bin  only where it was given: one byte a token, whether it may be a target

A document is stored as `[gMASK]<sop>`, its text, `<|endoftext|>`, as GLM's prompts open and turns end. A directory
appears whole or not at all, and a damaged file is named when it is opened. How documents fill rows is decided
later, so one set of shards serves every sequence length. Read next: `loader`.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from glm5.data.corpus import Document
from glm5.utils.errors import DataError, FileError
from glm5.utils.files import (
    file_errors,
    fsync_directory,
    make_directory,
    read_json,
    sha256_file,
    write_bytes,
    write_json,
)

FORMAT = "glm5-tokens-1"
_REMAKE = "Remove the directory and tokenize the corpus again"


class TextTokenizer(Protocol):
    """What this room needs of `glm5.text.Tokenizer`, which it may not import."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def prefix_ids(self) -> tuple[int, ...]: ...
    @property
    def end_of_text_id(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...
    def text_bytes_per_id(self) -> list[int]: ...


@dataclass(frozen=True)
class Encoded:
    """One document to be stored: its ids as they are, and the bytes of text in its targets.

    Args:
        learned: whether each id may be a target; None is all but the tokenizer's prefix. All documents of a store give
            it, or none.
    """

    name: str
    ids: Sequence[int]
    num_bytes: int
    learned: Sequence[bool] | None = None


class TokenStore:
    """An opened directory of shards. Documents are numbered in the order in which they were written.

    Args:
        directory: what `write_tokens` made.
        verify: compare every file with its checksum. Sizes are compared in any case.

    Raises:
        FileError: the directory, its manifest or a file of it cannot be read.
        DataError: a file is damaged, truncated or missing; it is named.
    """

    def __init__(self, directory: str | Path, verify: bool = True) -> None:
        self.directory = Path(directory)
        manifest = _read_manifest(self.directory)
        for name, entry in manifest["files"].items():
            _check_file(self.directory / name, entry, verify)
        self.vocab_size: int = manifest["vocab_size"]
        self.max_id: int = manifest["max_id"]
        self.prefix_length: int = manifest["prefix_length"]
        self.end_of_text_id: int = manifest["end_of_text_id"]
        self.tokenizer_fingerprint: str = manifest["tokenizer"]
        self.fingerprint: str = sha256_file(self.directory / "manifest.json")

        with file_errors(self.directory, "read the tokens in"):
            self.names: list[str] = read_json(self.directory / "names.json")
            self.token_bytes: NDArray[np.int32] = np.load(self.directory / "token-bytes.npy", allow_pickle=False)
            table = np.load(self.directory / "documents.npy", allow_pickle=False)
            self._shards = [
                np.memmap(self.directory / shard, dtype=manifest["dtype"], mode="r") for shard in manifest["shards"]
            ]
            self._learned = [
                np.memmap(self.directory / shard, dtype=np.bool_, mode="r") for shard in manifest.get("learned", ())
            ]
        self.lengths: NDArray[np.int64] = table[:, 0]
        self.text_bytes: NDArray[np.int64] = table[:, 1]
        self.targets: int = manifest.get("targets", self.tokens - self.prefix_length * len(self.names))
        self._starts = np.cumsum(self.lengths) - self.lengths
        self._shard_starts = np.cumsum([0, *map(len, self._shards)])[:-1]

    @property
    def tokens(self) -> int:
        """Token ids stored, prefixes and ends of text included."""
        return int(self.lengths.sum())

    def read(self, document: int, start: int, count: int) -> NDArray[np.int64]:
        """`count` ids of one document from its token `start`.

        Raises:
            DataError: an id is outside the vocabulary; the shard is named.
        """
        shard, offset = self._place(document, start)
        ids = self._shards[shard][offset : offset + count].astype(np.int64)
        if count and ids.max() >= self.vocab_size:
            raise DataError(
                f"{self.directory / f'tokens-{shard:05d}.bin'} holds id {ids.max()}, "
                f"outside its vocabulary of {self.vocab_size}",
                _REMAKE,
            )
        return ids

    def learned(self, document: int, start: int, count: int) -> NDArray[np.bool_]:
        """Whether each of these ids may be a target."""
        if not self._learned:
            return np.arange(start, start + count) >= self.prefix_length
        shard, offset = self._place(document, start)
        return np.array(self._learned[shard][offset : offset + count])

    def _place(self, document: int, start: int) -> tuple[int, int]:
        at = int(self._starts[document]) + start
        shard = int(np.searchsorted(self._shard_starts, at, side="right")) - 1
        return shard, at - int(self._shard_starts[shard])


def write_tokens(
    documents: Iterable[Document],
    tokenizer: TextTokenizer,
    directory: str | Path,
    shard_tokens: int = 1 << 27,
) -> TokenStore:
    """Tokenize documents into a new directory, in their order, with bounded memory. Empty texts are skipped.

    Args:
        documents: the corpus.
        tokenizer: a `glm5.text.Tokenizer`, or anything that does the same.
        directory: the directory to make; its parents are made too.
        shard_tokens: begin a new shard once one holds so many.

    Raises:
        FileError: the directory is there already, or cannot be written. Nothing is left behind.
        DataError: there is no text, or the tokenizer gives an id outside its own vocabulary.
    """
    return write_encoded(_encoded(documents, tokenizer), tokenizer, directory, shard_tokens)


def write_encoded(
    documents: Iterable[Encoded],
    tokenizer: TextTokenizer,
    directory: str | Path,
    shard_tokens: int = 1 << 27,
) -> TokenStore:
    """The same for documents that are ids already, such as conversations."""
    directory = Path(directory)
    if directory.exists():
        raise FileError(f"{directory} is there already", "Open it with TokenDataset.open, or choose another path")
    make_directory(directory.parent)
    partial = directory.with_name(f".{directory.name}.partial")
    with file_errors(directory, "write the tokens to"):
        if partial.exists():  # left by a process that was killed
            shutil.rmtree(partial)
        partial.mkdir()
        try:
            _write_files(iter(documents), tokenizer, partial, shard_tokens)
            os.rename(partial, directory)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        fsync_directory(directory.parent)
    return TokenStore(directory, verify=False)


def _write_files(encoded: Iterator[Encoded], tokenizer: TextTokenizer, partial: Path, shard_tokens: int) -> None:
    dtype = "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"
    names: list[str] = []
    table: list[tuple[int, int]] = []
    shards: list[str] = []
    masks: list[str] = []
    files: dict[str, dict[str, Any]] = {}
    max_id, targets = 0, 0
    for first in encoded:
        name = f"tokens-{len(shards):05d}.bin"
        digest, tokens = hashlib.sha256(), 0
        masked = first.learned is not None if not shards else bool(masks)
        mask: list[NDArray[np.bool_]] = []
        with open(partial / name, "xb") as shard:
            # The chain gives back the document that the outer loop took to see whether there is one.
            for document in itertools.chain([first], encoded):
                max_id = max(max_id, max(document.ids))
                data = np.array(document.ids, dtype=dtype).tobytes()
                digest.update(data)
                shard.write(data)
                flags = document.learned
                if (flags is not None) != masked or (flags is not None and len(flags) != len(document.ids)):
                    raise ValueError(f"{document.name}: needs one flag an id in `learned`, like all documents or none")
                if flags is not None:
                    mask.append(np.array(flags, dtype=np.bool_))
                names.append(document.name)
                table.append((len(document.ids), document.num_bytes))
                tokens += len(document.ids)
                if tokens >= shard_tokens:
                    break
            shard.flush()
            os.fsync(shard.fileno())
        shards.append(name)
        files[name] = {"bytes": tokens * np.dtype(dtype).itemsize, "sha256": digest.hexdigest()}
        if masked:
            masks.append(f"learned-{len(masks):05d}.bin")
            joined = np.concatenate(mask)
            targets += int(joined.sum())
            write_bytes(partial / masks[-1], joined.tobytes())
            files[masks[-1]] = {"bytes": len(joined), "sha256": hashlib.sha256(joined.tobytes()).hexdigest()}
    if not names:
        raise DataError("the corpus has no text to tokenize", "Give at least one document that is not empty")

    _save_array(partial / "documents.npy", np.array(table, dtype=np.int64))
    _save_array(partial / "token-bytes.npy", np.array(tokenizer.text_bytes_per_id(), dtype=np.int32))
    write_json(partial / "names.json", names)
    for name in ("documents.npy", "token-bytes.npy", "names.json"):
        files[name] = {"bytes": (partial / name).stat().st_size, "sha256": sha256_file(partial / name)}
    manifest = {
        "format": FORMAT,
        "dtype": dtype,
        "vocab_size": tokenizer.vocab_size,
        "max_id": max_id,
        "prefix_length": len(tokenizer.prefix_ids),
        "end_of_text_id": tokenizer.end_of_text_id,
        "tokenizer": tokenizer.fingerprint,
        "documents": len(names),
        "tokens": sum(length for length, _ in table),
        "text_bytes": sum(size for _, size in table),
        "shards": shards,
        **({"learned": masks, "targets": targets} if masks else {}),
        "files": files,
    }
    write_json(partial / "manifest.json", manifest)


def _encoded(documents: Iterable[Document], tokenizer: TextTokenizer) -> Iterator[Encoded]:
    """Documents with their ids, encoded some at a time so that all cores work and memory stays bounded."""
    prefix, end = list(tokenizer.prefix_ids), tokenizer.end_of_text_id
    texts = (document for document in documents if document.text)
    while chunk := list(itertools.islice(texts, 64)):
        for document, ids in zip(chunk, tokenizer.encode_batch([d.text for d in chunk]), strict=True):
            if ids and not 0 <= min(ids) <= max(ids) < tokenizer.vocab_size:
                raise DataError(
                    f"{document.id} got id {max(ids)}, outside the tokenizer's vocabulary of {tokenizer.vocab_size}",
                    "Repair the tokenizer",
                )
            yield Encoded(document.id, [*prefix, *ids, end], document.num_bytes)


def _save_array(path: Path, array: NDArray[Any]) -> None:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    write_bytes(path, buffer.getvalue())


def _read_manifest(directory: Path) -> dict[str, Any]:
    manifest = read_json(directory / "manifest.json")
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DataError(f"{directory / 'manifest.json'} is not a manifest of {FORMAT}", _REMAKE)
    return manifest


def _check_file(path: Path, entry: dict[str, Any], verify: bool) -> None:
    if not path.exists():
        raise DataError(f"{path} is missing", _REMAKE)
    size = path.stat().st_size
    if size != entry["bytes"]:
        raise DataError(f"{path} is damaged: it has {size:,} bytes, and {entry['bytes']:,} were written", _REMAKE)
    if verify and sha256_file(path) != entry["sha256"]:
        raise DataError(f"{path} is damaged: its checksum differs from the manifest's", _REMAKE)
