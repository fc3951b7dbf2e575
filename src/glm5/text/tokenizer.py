"""Byte-level BPE: text or bytes to token ids and back, losslessly.

The vocabulary starts from the 256 byte values, so every input has a spelling; merges, matching and the file
format are the `tokenizers` library's (`tokenizer.json`), and what is saved here loads in transformers. What this
module adds is what training and serving must be able to rely on:

- Text is text. `<|user|>` typed by a user becomes ordinary tokens, unless the caller says `allow_special`.
- Nothing is lost. `decode(encode(text)) == text` for every Unicode string, and for every byte string
  `decode_bytes(encode(data)) == data`: bytes that are not UTF-8 become one token each.
- Lone surrogates are not Unicode text; a `str` with one is refused, with the way to keep it as bytes.
- Ids are checked. An id without a token raises; it is never dropped.

Read next: `stream`, which decodes while tokens arrive, and `glm5.data.corpus`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from glm5.text.special import CONTROL_TOKENS, SPECIAL_TOKENS, SPLIT
from glm5.text.template import chat_template
from glm5.utils.errors import DataError
from glm5.utils.files import file_errors, write_json, write_text


def _byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte inside `tokenizer.json`, as GPT-2 defined it.

    Printable Latin-1 bytes stand for themselves; the other 68 take the characters from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()
_CHARACTER_OF = {byte: character for character, byte in _ALPHABET.items()}
_ESCAPED_BYTE = re.compile("([\udc80-\udcff])")
# The library's trainer takes time quadratic in its longest word: hours for a megabyte of letters without a space.
LONGEST_RUN = 1000
_LONG_RUN = re.compile(rf"(\S{{{LONGEST_RUN}}}|\s{{{LONGEST_RUN}}})")


class _Special:
    """An attribute that is the id of one special token; reading it raises `DataError` if there is none."""

    def __init__(self, token: str) -> None:
        self.token = token

    def __get__(self, tokenizer: Tokenizer, owner: type) -> int:
        return tokenizer.special_id(self.token)


class Tokenizer:
    """A byte-level BPE tokenizer. Make one with `Tokenizer.train` or `load_tokenizer`.

    Args:
        backend: the `tokenizers` object, whose model must be byte-level BPE.

    Raises:
        DataError: it is another kind of tokenizer.
    """

    end_of_text_id = _Special("<|endoftext|>")
    gmask_id = _Special("[gMASK]")
    sop_id = _Special("<sop>")
    system_id = _Special("<|system|>")
    user_id = _Special("<|user|>")
    assistant_id = _Special("<|assistant|>")
    observation_id = _Special("<|observation|>")
    think_id = _Special("<think>")
    end_think_id = _Special("</think>")
    tool_call_id = _Special("<tool_call>")
    end_tool_call_id = _Special("</tool_call>")
    tool_response_id = _Special("<tool_response>")
    end_tool_response_id = _Special("</tool_response>")
    arg_key_id = _Special("<arg_key>")
    end_arg_key_id = _Special("</arg_key>")
    arg_value_id = _Special("<arg_value>")
    end_arg_value_id = _Special("</arg_value>")

    def __init__(self, backend: Backend) -> None:
        self._full = backend
        added = backend.get_added_tokens_decoder()
        self.special: dict[str, int] = {token.content: id for id, token in added.items()}
        self._control = frozenset(id for id, token in added.items() if token.special)
        self._plain = _without_added_tokens(backend, set(self.special))

        vocabulary = backend.get_vocab(with_added_tokens=True)
        self._bytes: list[bytes | None] = [None] * (max(vocabulary.values()) + 1)
        for token, id in vocabulary.items():
            self._bytes[id] = token.encode() if token in self.special else _bytes_of(token)
        self._byte_ids = [vocabulary[_CHARACTER_OF[byte]] for byte in range(256)]

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> Tokenizer:
        """Learn a vocabulary from texts. The same texts in the same order give the same bytes on disk.

        Args:
            texts: the corpus. Read once.
            vocab_size: the number of ids, special tokens and the 256 bytes included.

        Raises:
            DataError: `vocab_size` has no room for merges, or the corpus is too small or uniform to fill it.
        """
        smallest = len(SPECIAL_TOKENS) + len(_ALPHABET)
        if vocab_size < smallest:
            raise DataError(
                f"vocab_size={vocab_size} is below the {smallest} ids of the special tokens and single bytes",
                f"Ask for at least {smallest}, and for 2,048 or more to be of use",
            )
        backend = Backend(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=2,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=sorted(_ALPHABET),
            show_progress=False,
        )
        backend.train_from_iterator((piece for text in texts for piece in _short_runs(_checked(text))), trainer)
        found = backend.get_vocab_size()
        if found < vocab_size:
            raise DataError(
                f"the corpus gives only {found} tokens of the {vocab_size} asked for: no other pair occurs twice",
                f"Train on more text, or set vocab_size to {found} or less",
            )
        # The trainer flags every one of them special; as published, those that structure an answer are not.
        spec = json.loads(backend.to_str())
        for token in spec["added_tokens"]:
            token["special"] = token["content"] in CONTROL_TOKENS
        return cls(Backend.from_str(json.dumps(spec)))

    # ------------------------------------------------------------------------------------------ text to ids
    def encode(self, text: str | bytes, allow_special: bool = False) -> list[int]:
        """Token ids of a text, or of bytes that need not be UTF-8. Nothing is put before or after it.

        Args:
            text: any text or bytes, also empty. For UTF-8 bytes the ids are those of the decoded text.
            allow_special: read special tokens written in the text as such; only for text that the program itself
                composed. Otherwise they are ordinary characters.

        Raises:
            DataError: a `str` holds a lone surrogate.
        """
        backend = self._full if allow_special else self._plain
        if isinstance(text, str):
            return backend.encode(_checked(text), add_special_tokens=False).ids
        # `surrogateescape` marks each undecodable byte 0x80..0xFF as the surrogate U+DC80..U+DCFF, which valid
        # UTF-8 can't contain: what lies between two marks is text.
        ids: list[int] = []
        for piece in _ESCAPED_BYTE.split(text.decode("utf-8", "surrogateescape")):
            if len(piece) == 1 and _ESCAPED_BYTE.match(piece):
                ids.append(self._byte_ids[ord(piece) - 0xDC00])
            else:
                ids += backend.encode(piece, add_special_tokens=False).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of many texts as ordinary text, on all cores."""
        encodings = self._plain.encode_batch_fast([_checked(text) for text in texts], add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    # ------------------------------------------------------------------------------------------ ids to text
    def decode_bytes(self, ids: Iterable[int], skip_control: bool = False) -> bytes:
        """The exact bytes that ids stand for; special tokens as they are written.

        Args:
            ids: token ids (any integers that index a list).
            skip_control: leave out prefixes, roles and the end of text, but not `<think>` or tool tags.

        Raises:
            DataError: an id has no token. The message names it.
        """
        parts = []
        for id in ids:
            part = self._bytes[id] if 0 <= id < len(self._bytes) else None
            if part is None:
                raise DataError(
                    f"token id {id} has no token: the vocabulary has {self.vocab_size} ids",
                    "Use the tokenizer that the model was trained with, and never sample padding rows",
                )
            if not (skip_control and id in self._control):
                parts.append(part)
        return b"".join(parts)

    def decode(self, ids: Iterable[int], skip_control: bool = False) -> str:
        """The text of ids. Bytes that are not UTF-8 become U+FFFD, so use `decode_bytes` where that matters."""
        return self.decode_bytes(ids, skip_control).decode("utf-8", "replace")

    # ------------------------------------------------------------------------------------------ vocabulary
    @property
    def vocab_size(self) -> int:
        """One more than the highest id. A model's `vocab_size` must be at least this, and may be padded."""
        return len(self._bytes)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of what `save` writes to `tokenizer.json`: which tokenizer some token ids belong to."""
        return hashlib.sha256(self._full.to_str(pretty=True).encode()).hexdigest()

    @property
    def prefix_ids(self) -> tuple[int, int]:
        """`[gMASK]<sop>`, with which every GLM document and prompt opens."""
        return self.gmask_id, self.sop_id

    @property
    def stop_ids(self) -> tuple[int, int, int]:
        """The ids that end an assistant's turn: end of text, the user's turn, a tool's result."""
        return self.end_of_text_id, self.user_id, self.observation_id

    def special_id(self, token: str) -> int:
        """The id of a special token such as `<|user|>`.

        Raises:
            DataError: this tokenizer has no such special token.
        """
        if token not in self.special:
            raise DataError(f"the tokenizer has no special token {token}", "Use a GLM tokenizer, or train one")
        return self.special[token]

    def text_bytes_per_id(self) -> list[int]:
        """The bytes of text that each id stands for: 0 for special tokens and for ids without a token."""
        special = set(self.special.values())
        return [0 if part is None or id in special else len(part) for id, part in enumerate(self._bytes)]

    # ------------------------------------------------------------------------------------------ files
    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`: transformers' AutoTokenizer
        loads them, too.

        Raises:
            FileError: the directory cannot be written.
        """
        folder = Path(directory)
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|endoftext|>",
            "pad_token": "<|endoftext|>",
            "extra_special_tokens": [token for token, id in self.special.items() if id in self._control],
            "padding_side": "left",
            "clean_up_tokenization_spaces": False,
        }
        write_text(folder / "tokenizer.json", self._full.to_str(pretty=True))
        write_json(folder / "tokenizer_config.json", config)
        write_text(folder / "chat_template.jinja", chat_template())


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Load a tokenizer that was saved here or published, from its `tokenizer.json` or the directory that holds it.

    Raises:
        FileError: the file cannot be read.
        DataError: it is damaged, or not byte-level BPE, or the path is a run.
    """
    file = Path(path)
    if not (file / "tokenizer.json").exists() and (file / "model" / "tokenizer.json").is_file():
        raise DataError(f"{path} is a run, not a model", f"Give its model, {file / 'model'}")
    file = file / "tokenizer.json" if file.is_dir() else file
    with file_errors(file, "read the tokenizer"):
        data = file.read_bytes()
    try:
        backend = Backend.from_buffer(data)
    except Exception as error:  # the library raises bare Exception for every fault of the file
        raise DataError(
            f"{file} is not a usable tokenizer.json: {error}",
            "Point at a checkpoint's directory or its tokenizer.json, or train one with Tokenizer.train",
        ) from error
    return Tokenizer(backend)


def _checked(text: str) -> str:
    """The text itself, if it can be written as UTF-8; the library's own message would not say how to mend it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"the text has a lone surrogate U+{ord(text[error.start]):04X} at character {error.start}: "
            "it is not Unicode",
            'Keep it as bytes with text.encode("utf-8", "surrogatepass"), or replace it',
        ) from error
    return text


def _short_runs(text: str) -> list[str]:
    """The text, cut inside runs of more than `LONGEST_RUN` characters without (or of nothing but) blank space."""
    if max(map(len, text.split()), default=0) < LONGEST_RUN and " " * LONGEST_RUN not in text:
        return [text]
    return [piece for piece in _LONG_RUN.split(text) if piece]


def _bytes_of(token: str) -> bytes:
    """The bytes that an entry of a byte-level vocabulary stands for."""
    try:
        return bytes(_ALPHABET[character] for character in token)
    except KeyError as error:
        raise DataError(
            f"the vocabulary entry {token!r} is not spelled in the byte-level alphabet",
            "Use a byte-level BPE tokenizer, as GLM's is",
        ) from error


def _without_added_tokens(backend: Backend, added: set[str]) -> Backend:
    """A tokenizer that differs in one thing: it has never heard of the special tokens.

    The library's own switch (`encode_special_tokens`) still matches added tokens that are not flagged special,
    such as `<think>`. They also leave the vocabulary where no merge makes them, because a tokenizer that looks
    whole words up first (GLM's does) would find `/nothink` there.
    """
    spec: dict[str, Any] = json.loads(backend.to_str())
    model = spec["model"]
    if model.get("type") != "BPE" or not set(_ALPHABET) <= set(model["vocab"]):
        raise DataError(
            f"the tokenizer is not byte-level BPE (its model is {model.get('type')})",
            "Use a byte-level BPE tokenizer, as GLM's is",
        )
    merged = {"".join(pair if isinstance(pair, list) else pair.split(" ")) for pair in model["merges"]}
    unmade = added - merged - set(_ALPHABET)
    model["vocab"] = {token: id for token, id in model["vocab"].items() if token not in unmade}
    spec["added_tokens"] = []
    spec["post_processor"] = None
    return Backend.from_str(json.dumps(spec))
