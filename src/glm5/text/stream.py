"""Decoding while tokens arrive: text as early as it is certain, and never half a character.

A token may end inside a character, so the bytes that could still become one are held back. What `push` and
`finish` return, joined, is `Tokenizer.decode` of all the ids. Read next: `tokenizer`.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from glm5.text.tokenizer import Tokenizer


class StreamDecoder:
    """Turns the ids of one sequence into text, piece by piece.

    Args:
        tokenizer: the tokenizer of the ids.
        skip_control: leave out prefixes, roles and the end of text, as `Tokenizer.decode` does.
    """

    def __init__(self, tokenizer: Tokenizer, skip_control: bool = False) -> None:
        self._tokenizer, self._skip_control = tokenizer, skip_control
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text that these ids complete, which may be empty.

        U+FFFD appears only for bytes that no continuation could make valid.

        Raises:
            DataError: an id has no token. Nothing of this call is consumed.
        """
        return self._utf8.decode(self._tokenizer.decode_bytes(ids, self._skip_control))

    def finish(self) -> str:
        """What is left at the end of the sequence: U+FFFD if it ended inside a character. Then begin anew."""
        return self._utf8.decode(b"", final=True)
