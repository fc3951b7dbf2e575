"""Stop strings: found wherever tokens cut the text, and the text before them is exact."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5.serve.stops import StopMatch, StopMatcher


def feed(stops: list[str], pieces: list[bytes]) -> tuple[str, StopMatch] | None:
    """The text before the match and the match, or None."""
    matcher, data = StopMatcher(stops), b""
    for piece in pieces:
        data += piece
        match = matcher.push(piece)
        if match is not None:
            text = data.decode("utf-8", "replace")
            return text[: len(text) - match.trim], match
    return None


def by_hand(stops: list[str], text: str) -> tuple[str, str] | None:
    """One character after another: the text before the first stop that ends, and that stop, the longest of equals."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return None


def test_a_stop_across_tokens_and_what_follows_it() -> None:
    assert feed(["\n\nUser"], [b"yes\n", b"\nUs", b"er: no"]) == ("yes", StopMatch("\n\nUser", 10, 4))
    assert feed(["END"], [b"EN", b"EN", b"D"]) == ("EN", StopMatch("END", 3, 0))
    assert feed(["END"], [b"E", b"N", b"X", b"D"]) is None


def test_several_stops_end_the_answer_at_the_first_that_ends() -> None:
    assert feed(["abcd", "bc"], [b"xabcd"]) == ("xa", StopMatch("bc", 3, 1))
    assert feed(["b", "ab"], [b"a", b"b"]) == ("", StopMatch("ab", 2, 0))
    assert feed(["z", "y"], [b"xy", b"z"]) == ("x", StopMatch("y", 1, 0))


def test_a_character_counts_once_its_bytes_are_there() -> None:
    euro = "€".encode()
    assert feed(["€"], [b"1", euro[:1], euro[1:2], euro[2:] + b"!"]) == ("1", StopMatch("€", 2, 1))
    # The match is complete, and the first byte of another character waits: it would be decoded to one U+FFFD.
    assert feed(["S"], [b"a", b"S" + euro[:2]]) == ("a", StopMatch("S", 2, 1))
    # Bytes that no continuation can save are U+FFFD before the match.
    assert feed(["S"], [euro[:2], b"S"]) == ("�", StopMatch("S", 1, 0))


def test_a_match_that_was_passed_over_is_not_found_again() -> None:
    matcher = StopMatcher(["ab", "wxyz"])
    assert matcher.push(b"ab") == StopMatch("ab", 2, 0)
    assert matcher.push(b"c") is None
    assert matcher.push(b"ab") == StopMatch("ab", 2, 0)


def test_what_may_yet_become_a_stop_is_held() -> None:
    matcher = StopMatcher(["</end>", "d>x"])
    assert (matcher.push(b"text <"), matcher.held) == (None, 1)
    assert (matcher.push(b"/en"), matcher.held) == (None, 4)
    assert (matcher.push(b"t"), matcher.held) == (None, 0)
    assert (matcher.push(b"</end"), matcher.held) == (None, 5)
    assert (matcher.push(b"d"), matcher.held) == (None, 1)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_the_answer_does_not_depend_on_where_tokens_cut(data: st.DataObject) -> None:
    letters = st.text(alphabet="ab€", max_size=24)
    text = data.draw(letters)
    stops = data.draw(st.lists(st.text(alphabet="ab€", min_size=1, max_size=4), min_size=1, max_size=3))
    raw = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(raw)), max_size=8)))
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    found, expected = feed(stops, pieces), by_hand(stops, text)
    assert (found and (found[0], found[1].stop)) == expected


@pytest.mark.parametrize("stop", ["a", "aa", "aaa"])
def test_a_stop_that_overlaps_itself(stop: str) -> None:
    found = feed([stop], [b"b", *[b"a"] * 5])
    assert found is not None
    assert found[0] == "b"
