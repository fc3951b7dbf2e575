"""Answers that are letters, words or plain numbers: exact after a normalisation that says what it forgives.

Source: report, section 3.2, where science questions are multiple choice or have short answers. Read next: `extract`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from glm5.posttrain.verify.extract import final_answer
from glm5.posttrain.verify.verdict import Verdict, judged, no_verdict

_LETTER = re.compile(r"\(?\s*([A-Za-z])\s*\)?(?=$|[\s.:,;)])")
_DRESS = re.compile(r"\\(?:text|mathrm|mathbf|textbf)\s*\{([^{}]*)\}|[$*`]")
_NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:[eE][+-]?\d+)?")


def choice(response: str, answer: Any, info: Mapping[str, Any]) -> Verdict:
    """Multiple choice. `answer` is a letter, or a list of all letters that are right together.

    A response may name the letter, `(B)`, `B.`, `B: text`, or several joined by commas or "and"; a choice more or less
    is wrong. With `info["choices"]`, {letter: text}, the text of a choice stands for its letter.
    """
    letters = [answer] if isinstance(answer, str) else answer
    if not isinstance(letters, list) or not letters or not all(isinstance(x, str) and len(x) == 1 for x in letters):
        return no_verdict(f"the expected answer {answer!r} is no letter, nor a list of letters")
    said = final_answer(response)
    if said is None:
        return judged(False, "no final answer")
    choices = info.get("choices") or {}
    named = _letters(said)
    if not named:
        named = {letter.upper() for letter, text in choices.items() if normal(str(text)) == normal(said)}
    return judged(named == {letter.upper() for letter in letters}, f"{said!r} for {answer!r}")


def _letters(said: str) -> set[str]:
    """The letters that an answer names, by itself or before its text; empty if it begins otherwise."""
    text = _DRESS.sub(lambda m: m.group(1) or "", said).strip()
    first = _LETTER.match(text)
    if first is None:
        return set()
    found, rest = {first.group(1).upper()}, text[first.end() :]
    while more := re.match(r"\s*(?:,|;|&|/|and\b|or\b)+\s*(?:and\b|or\b)?\s*", rest):
        following = _LETTER.match(rest[more.end() :])
        if following is None or not more.group().strip():
            break
        found.add(following.group(1).upper())
        rest = rest[more.end() + following.end() :]
    # "A dog" is an article and a word, not the choice A.
    dressed = rest[:1] in (".", ":", ")", ",", ";", "") or text.startswith("(")
    return found if dressed or not rest.strip() else set()


def short(response: str, answer: Any, info: Mapping[str, Any]) -> Verdict:
    """A short text. `answer` is a string, or a list of those that are right; see `normal` for what is forgiven."""
    accepted = [answer] if isinstance(answer, str | int | float) else answer
    if not isinstance(accepted, list) or not accepted:
        return no_verdict(f"the expected answer {answer!r} is neither a text nor a list of texts")
    said = final_answer(response)
    if said is None:
        return judged(False, "no final answer")
    return judged(normal(said) in {normal(str(x)) for x in accepted}, f"{said!r} for {answer!r}")


def normal(text: str) -> str:
    """Without case, dress (LaTeX text, stars, quotes), outer punctuation, leading article and doubled blanks."""
    text = unicodedata.normalize("NFKC", _DRESS.sub(lambda m: m.group(1) or "", text)).casefold()
    text = " ".join(text.split()).strip(" .,;:!?\"'()[]")
    return re.sub(r"^(?:the|an?)\s+(?=\S)", "", text)


def number(response: str, answer: Any, info: Mapping[str, Any]) -> Verdict:
    """A plain number, a fraction or a percentage. `info["tolerance"]` is relative, by default 0: exactly equal."""
    expected, tolerance = read_number(str(answer)), info.get("tolerance", 0)
    if expected is None:
        return no_verdict(f"the expected answer {answer!r} is no number")
    said = final_answer(response)
    found = read_number(said) if said is not None else None
    if found is None:
        return judged(False, f"{said!r} is no number" if said else "no final answer")
    return judged(abs(found - expected) <= Fraction(str(tolerance)) * abs(expected), f"{said!r} for {answer!r}")


def read_number(text: str) -> Fraction | None:
    """`1,234.5`, `-3/4`, `12%`, `1e-3`, with dress; None for anything else, an exponent of more than 4 digits too."""
    text = (
        _DRESS.sub(lambda m: m.group(1) or "", text).replace("−", "-").replace("\\%", "%").strip().rstrip(".").strip()
    )
    percent = text.endswith("%")
    parts = [part.strip() for part in text.rstrip("%").split("/")]
    values = []
    for part in parts:
        if not re.search(r"\d", part) or not _NUMBER.fullmatch(part) or re.search(r"[eE][+-]?\d{5,}", part):
            return None
        values.append(Fraction(part.replace(",", "")))
    if len(values) > 2 or (len(values) == 2 and values[1] == 0):
        return None
    found = values[0] if len(values) == 1 else values[0] / values[1]
    return found / 100 if percent else found
