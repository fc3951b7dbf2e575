"""Stop strings across token borders: found where they end, whatever tokens they came in.

A stop string may begin in one token and end inside another, or inside the bytes of one character, so it is looked for
in the text, not in ids. The text is UTF-8 decoded step by step: a character counts once all its bytes are there.
Read next: `sampler`, which asks after every id.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StopMatch:
    """A stop string was found. `trim`: characters from its beginning to the end of the text so far; `after`: those
    that follow it. Both count the U+FFFD that bytes still waiting for their character would be decoded to."""

    stop: str
    trim: int
    after: int


class StopMatcher:
    """Looks for stop strings in one answer, as its bytes arrive.

    Of several matches the one that ends first wins, and of those that end together the longest: the answer does not
    depend on how tokens cut the text.

    Args:
        stops: strings of at least one character.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._reach = max(map(len, self._stops), default=1) - 1  # how far back a match that ends now can begin
        self._tail = ""

    def push(self, data: bytes) -> StopMatch | None:
        """Take the bytes of one more token; the match that they complete, if any."""
        new = self._utf8.decode(data)
        text, old = self._tail + new, len(self._tail)
        self._tail = text[-self._reach :] if self._reach else ""
        ends = []
        for stop in self._stops:
            start = text.find(stop, max(0, old - len(stop) + 1))  # only what ends in the new text
            if start >= 0:
                ends.append((start + len(stop), -len(stop), stop))
        if not ends:
            return None
        end, _, stop = min(ends)
        waiting = len(self._utf8.getstate()[0].decode("utf-8", "replace"))
        after = len(text) - end + waiting
        return StopMatch(stop, after + len(stop), after)

    @property
    def held(self) -> int:
        """How many characters at the end of the decoded text may yet begin a stop string: do not show them yet."""
        for n in range(len(self._tail), 0, -1):
            if any(stop.startswith(self._tail[-n:]) for stop in self._stops):
                return n
        return 0
