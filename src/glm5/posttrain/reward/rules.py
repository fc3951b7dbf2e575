"""Rules that a text keeps or breaks, as a verifier: precise, and blind to all that cannot be counted.

    {"max_words": 40, "excludes": ["As an AI"], "format": "json"}

The score is the share of the rules that are kept. Like any verifier it runs in a process that can be killed, since a
pattern may take for ever. Source: report, section 3.4 (rule-based rewards: precise, but narrow); the rules are ours.
Needs no torch. Read next: `hybrid`, `glm5.posttrain.verify.verdict`.
"""

from __future__ import annotations

import difflib
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from glm5.posttrain.verify.verdict import Verdict, no_verdict
from glm5.utils.errors import DataError

# A word is a run of letters and digits, or one sign of a script that is written without spaces.
_WORD = re.compile(
    r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]|[^\W\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]+"
)
_MARKDOWN = re.compile(r"^\s{0,3}(#{1,6}\s|[-*+]\s|\d+[.)]\s|>|```)|\*\*[^*\n]+\*\*", re.MULTILINE)
_BULLET = re.compile(r"^\s{0,3}([-*+]|\d+[.)])\s+\S", re.MULTILINE)
_ENDS = tuple(".!?…。！？\"')]}»”’`")
FORMATS = ("plain", "list", "json")
REPEATED = 4  # words of a run that counts as said again


def words(text: str) -> list[str]:
    """The words of a text, in lower case; a sign of Chinese or Japanese is one."""
    return _WORD.findall(text.casefold())


def repetition(text: str) -> float:
    """Share of a text's runs of four words that stood there before, in [0, 1]."""
    said = words(text)
    runs = [tuple(said[i : i + REPEATED]) for i in range(len(said) - REPEATED + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def has_markdown(text: str) -> bool:
    """Whether it has headings, bullets, quotes, fences or bold type."""
    return bool(_MARKDOWN.search(text))


# ---------------------------------------------------------------------------------------------------- the rules
@dataclass(frozen=True)
class Rule:
    """kept: whether a text keeps it, at a value. valid: whether the value makes sense. values: which do, in words."""

    kept: Callable[[str, Any], bool]
    valid: Callable[[Any], bool]
    values: str


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_share(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_text, value))


def _is_pattern(value: Any) -> bool:
    try:
        return _is_text(value) and re.compile(value) is not None
    except re.error:
        return False


def _is_scripts(value: Any) -> bool:
    return isinstance(value, str) and value.isalpha()


def _in_script(text: str, script: str) -> bool:
    """Nine letters in ten, and one at least, have the script's name in theirs: LATIN, CYRILLIC, CJK, HIRAGANA, …"""
    letters = [unicodedata.name(c, "") for c in text if c.isalpha()]
    return bool(letters) and sum(script.upper() in name for name in letters) >= 0.9 * len(letters)


def _in_format(text: str, name: str) -> bool:
    if name == "plain":
        return not has_markdown(text)
    if name == "list":
        return len(_BULLET.findall(text)) >= 2
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


RULES = {
    "max_words": Rule(lambda text, n: len(words(text)) <= n, _is_count, "a number of words"),
    "min_words": Rule(lambda text, n: len(words(text)) >= n, _is_count, "a number of words"),
    "max_repetition": Rule(
        lambda text, share: repetition(text) <= share, _is_share, "a share of runs of four words, in [0, 1]"
    ),
    "includes": Rule(
        lambda text, parts: all(p.casefold() in text.casefold() for p in parts), _is_texts, "a list of texts"
    ),
    "excludes": Rule(
        lambda text, parts: not any(p.casefold() in text.casefold() for p in parts), _is_texts, "a list of texts"
    ),
    "starts_with": Rule(lambda text, start: text.lstrip().startswith(start), _is_text, "a text"),
    "ends_with": Rule(lambda text, end: text.rstrip().endswith(end), _is_text, "a text"),
    "matches": Rule(lambda text, pattern: bool(re.search(pattern, text)), _is_pattern, "a regular expression"),
    "script": Rule(_in_script, _is_scripts, "a script in Unicode's words: latin, cyrillic, cjk"),
    "format": Rule(_in_format, lambda value: value in FORMATS, " or ".join(FORMATS)),
    "finished": Rule(
        lambda text, wanted: text.rstrip().endswith(_ENDS) == wanted,
        lambda value: isinstance(value, bool),
        "true, false",
    ),
}


def require_rules(rules: Any) -> dict[str, Any]:
    """The rules, if they are some.

    Raises:
        DataError: it is no object, a rule is not known, or its value makes no sense.
    """
    if not isinstance(rules, dict):
        raise DataError(f"rules: {rules!r}", 'It must be an object, as {"max_words": 40}')
    for name, value in rules.items():
        if name not in RULES:
            near = difflib.get_close_matches(name, RULES, n=1)
            raise DataError(f"rules.{name}: no such rule", f"Did you mean {near[0]}?" if near else ", ".join(RULES))
        if not RULES[name].valid(value):
            raise DataError(f"rules.{name}: {value!r}", f"It must be {RULES[name].values}")
    return rules


def broken(response: str, rules: Mapping[str, Any]) -> list[str]:
    """Names of the rules that a text breaks. An empty answer breaks all."""
    return [name for name, value in rules.items() if not (response.strip() and RULES[name].kept(response, value))]


def check(response: str, answer: Any, info: Mapping[str, Any]) -> Verdict:
    """The verifier: `answer` is an object of rules, one at least."""
    try:
        rules = require_rules(answer)
    except DataError as e:
        return no_verdict(str(e))
    if not rules:
        return no_verdict("no rules")
    failed = broken(response, rules)
    return Verdict(1 - len(failed) / len(rules), detail=f"breaks {', '.join(failed)}" if failed else "keeps all")


def openings(texts: list[str], count: int = 3) -> Counter[tuple[str, ...]]:
    """How often texts begin with which words; those that have fewer are left out."""
    return Counter(tuple(found[:count]) for text in texts if len(found := words(text)) >= count)
