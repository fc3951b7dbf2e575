"""Rules: what keeps and what breaks each, what is no rule, and how a verifier's worker asks them."""

from __future__ import annotations

from typing import Any

import pytest

from glm5.posttrain.reward.rules import RULES, broken, check, has_markdown, openings, repetition, require_rules, words
from glm5.posttrain.verify.pool import Task, VerifierPool
from glm5.utils.errors import DataError

KEPT: list[tuple[str, Any, str, str]] = [  # rule, value, a text that keeps it, and one that breaks it
    ("max_words", 3, "one two three", "one two three four"),
    ("max_words", 2, "数据", "数据库"),
    ("min_words", 3, "it's two", "one two"),
    ("max_repetition", 0.2, "a b c d e f", "a b c d a b c d a b c d"),
    ("includes", ["Oslo", "fjord"], "OSLO lies on a fjord.", "Oslo lies there."),
    ("excludes", ["as an AI"], "I think so.", "As an AI, I cannot."),
    ("starts_with", "Dear", "  Dear Ms Ito", "Hi, Dear"),
    ("ends_with", "Yours", "I am\nYours\n", "Yours truly"),
    ("matches", r"^\d{4}$", "2024", "in 2024"),
    ("script", "latin", "Größe 3", "Größе по-русски"),
    ("script", "cjk", "数据模型", "数据 model"),
    ("format", "plain", "Go there, then back.", "## Way\nGo there."),
    ("format", "plain", "3 * 4 is 12 - really", "**Go** there"),
    ("format", "list", "- one\n- two", "one, two"),
    ("format", "json", '{"a": [1]}', "{'a': 1}"),
    ("finished", True, "It ends.", "It ends in the mid"),
    ("finished", False, "and so on", "The end."),
]


@pytest.mark.parametrize(("name", "value", "good", "bad"), KEPT)
def test_each_rule(name: str, value: Any, good: str, bad: str) -> None:
    assert broken(good, {name: value}) == []
    assert broken(bad, {name: value}) == [name]
    assert check(good, {name: value}, {}).reward == 1.0
    assert check(bad, {name: value}, {}).reward == 0.0


def test_every_rule_is_tested_and_an_empty_answer_breaks_all() -> None:
    assert {name for name, *_ in KEPT} == RULES.keys()
    rules = {name: value for name, value, *_ in KEPT}
    assert set(broken(" \n", rules)) == rules.keys()


def test_the_score_is_the_share_of_rules_that_are_kept() -> None:
    verdict = check("As an AI, I say four", {"max_words": 9, "excludes": ["as an ai"], "finished": True}, {})
    assert verdict.reward == pytest.approx(1 / 3)
    assert verdict.detail == "breaks excludes, finished"


@pytest.mark.parametrize(
    ("rules", "match"),
    [
        ({"max_word": 3}, "Did you mean max_words"),
        ({"max_words": -1}, "must be a number of words"),
        ({"max_words": True}, "must be a number of words"),
        ({"includes": "Oslo"}, "must be a list of texts"),
        ({"includes": []}, "must be a list of texts"),
        ({"matches": "("}, "must be a regular expression"),
        ({"max_repetition": 2}, r"in \[0, 1\]"),
        ({"format": "xml"}, "plain or list or json"),
        (["max_words"], "must be an object"),
    ],
)
def test_what_is_no_rule_is_refused_and_judges_nothing(rules: Any, match: str) -> None:
    with pytest.raises(DataError, match=match):
        require_rules(rules)
    assert check("a text", rules, {}).reward is None


def test_a_pattern_that_takes_for_ever_is_killed_and_is_no_zero() -> None:
    with VerifierPool(workers=1, timeout_s=1.0) as pool:
        pool.require(["rules"])
        slow = pool.check(Task("rules", "a" * 64 + "b", {"matches": "^(a+)+$"}))
        assert (slow.reward, slow.cause) == (None, "timeout")
    with VerifierPool(workers=1, timeout_s=60.0) as pool:
        assert pool.check(Task("rules", "one two", {"max_words": 2})).reward == 1.0


def test_what_monitors_count() -> None:
    assert words("Don't stop, 数据!") == ["don", "t", "stop", "数", "据"]
    assert repetition("a b c") == 0.0
    assert repetition("a b c d a b c d") == pytest.approx(1 / 5)
    assert repetition("ha " * 24) == pytest.approx(20 / 21)
    assert has_markdown("1. first\n2. second")
    assert not has_markdown("1.5 times as many")
    assert openings(["I think so too", "I think so, yes", "No"]) == {("i", "think", "so"): 2}
