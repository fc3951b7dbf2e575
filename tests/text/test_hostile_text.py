"""Text that nobody wrote by hand: it costs no more than other text."""

from __future__ import annotations

import random
import time

from glm5.text.tokenizer import LONGEST_RUN, Tokenizer, _short_runs


def test_long_runs_are_cut_for_training_and_nothing_is_lost() -> None:
    text = "a b " + "x" * (3 * LONGEST_RUN + 5) + " c" + " " * (LONGEST_RUN + 1) + "d"
    pieces = _short_runs(text)
    assert "".join(pieces) == text
    assert max(max(map(len, p.split()), default=0) for p in pieces) <= LONGEST_RUN
    assert _short_runs("a plain text\n") == ["a plain text\n"]
    assert _short_runs("") == [""]


def test_a_megabyte_without_a_space_trains_and_comes_back() -> None:
    """Uncut, this takes about an hour. The bound only has to tell the two apart."""
    text = "".join(random.Random(0).choices("abcdefgh", k=1_000_000))  # noqa: S311
    began = time.monotonic()
    tokenizer = Tokenizer.train([text], 350)
    assert time.monotonic() - began < 120
    part = text[:5000]
    assert tokenizer.decode(tokenizer.encode(part)) == part
