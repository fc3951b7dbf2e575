"""Monitors: each alerts on its own hack, at its bound, and an honest run is quiet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from glm5.posttrain.reward.monitors import MonitorConfig, Monitors, Watched, observed
from glm5.utils.errors import ConfigError

Group = list[Watched]


def answer(text: str = "a b c d", tokens: int = 10, reward: float | None = 0.5, **parts: float | None) -> Watched:
    return Watched(text, tokens, reward, parts)


def run(step: Callable[[int], list[Group]], steps: int = 12, **bounds: Any) -> list[list[str]]:
    """The alerts of each step."""
    monitors = Monitors(MonitorConfig(**{"window": 3, **bounds}))
    return [monitors.watch(step(i)).get("alert", []) for i in range(steps)]


def test_figures_have_known_values() -> None:
    groups = [
        [
            answer("I think so. # no", 10, 0.0, rules=0.0, judge=1.0),
            answer("# Yes\nI do", 30, 1.0, rules=1.0, judge=0.8),
        ],
        [answer("I think so too", 20, None, rules=1.0), answer("ha ha ha ha ha", 20, 0.5, rules=0.5, model=0.25)],
    ]
    found = observed(groups)
    assert found["monitor/length"] == 20
    assert found["monitor/markdown"] == 1 / 4
    assert found["monitor/no_verdict"] == 1 / 4
    assert found["monitor/opening"] == 2 / 4
    assert found["monitor/repetition"] == pytest.approx((1 / 2) / 4)
    assert found["monitor/length_correlation"] == pytest.approx(1.0)  # of the first group alone
    assert found["monitor/soft"] == pytest.approx((1.0 + 0.8 + 0.25) / 3)
    assert found["monitor/precise"] == pytest.approx((0.0 + 1.0 + 0.5) / 3)
    assert found["monitor/overrated"] == pytest.approx(1 / 3)
    assert observed([]) == {}
    assert "monitor/soft" not in observed([[answer()]])


def test_an_honest_run_is_quiet() -> None:
    def step(i: int) -> list[Group]:
        # Everything gets better, and answers get longer without being paid for their length.
        return [[answer(f"{i} {n} so", 10 + i, 0.5, rules=0.5 + i / 40, judge=0.4 + i / 40) for n in range(4)]] * 2

    assert run(step) == [[]] * 12


def test_length_that_pays_is_an_alert_and_length_alone_is_not() -> None:
    def step(i: int, paid: float) -> list[Group]:
        return [[answer(tokens=(10 + 3 * i) * (1 + n), reward=0.5 + paid * n / 10) for n in range(4)]]

    alerts = run(lambda i: step(i, 1.0))
    assert alerts[:5] == [[]] * 5  # the first window and the last would overlap
    assert alerts[-1][0].startswith("length: answers grew from 32 to 100 tokens, and longer ones are paid better")
    assert run(lambda i: step(i, -1.0)) == [[]] * 12
    assert run(lambda i: step(i, 1.0), length_growth=9.0) == [[]] * 12


@pytest.mark.parametrize(
    ("late", "said"),
    [
        ("# Answer\n- {i} one\n- {n} two", "format: answers with Markdown rose from 0% to 100%"),
        ("Great question! I {i} {n}", "format: answers that begin alike rose from"),
        ("yes I do yes I do yes I do yes I do {i} {n}", "format: what an answer says again rose from 0% to"),
    ],
    ids=["markdown", "opening", "repetition"],
)
def test_a_habit_that_is_learned_is_an_alert_and_one_that_was_there_is_not(late: str, said: str) -> None:
    def step(i: int, begins: int) -> list[Group]:
        texts = [(late if i >= begins else "{n} {i} words").format(i=i, n=n) for n in range(4)]
        return [[answer(text, 10, 0.5) for text in texts]]

    assert any(a.startswith(said) for a in run(lambda i: step(i, 6))[-1])
    assert run(lambda i: step(i, 0)) == [[]] * 12


def test_a_judge_that_rises_while_rules_fall_is_an_alert() -> None:
    def step(i: int, rules: float) -> list[Group]:
        return [[answer(rules=0.7 + rules * i / 20, judge=0.3 + i / 40) for _ in range(3)]]

    alerts = run(lambda i: step(i, -1.0))
    assert alerts[5] == []  # risen by 0.075
    assert alerts[-1] == [
        "disagreement: model and judge rose from 0.32 to 0.55 while rules and verifier fell from 0.65 to 0.20"
    ]
    assert run(lambda i: step(i, 0.0)) == [[]] * 12
    assert run(lambda i: step(i, 0.2)) == [[]] * 12


def test_praise_for_what_rules_reject_and_missing_verdicts_are_alerts() -> None:
    praised = [[answer(rules=0.0, judge=0.9), answer(rules=1.0, judge=0.9)]]
    alerts = run(lambda i: praised, steps=4)
    assert alerts[1] == []
    assert alerts[2] == ["disagreement: model or judge praise 50% of the answers that rules or verifier reject"]
    missing = [[answer(reward=None), answer(), answer(), answer()]]
    assert run(lambda i: missing, steps=3)[-1] == ["no verdict: 25% of the answers have none"]
    assert run(lambda i: missing, steps=3, no_verdict=0.3)[-1] == []


def test_a_resumed_run_alerts_like_one_that_was_not_stopped() -> None:
    def step(i: int) -> list[Group]:
        return [[answer(tokens=(10 + 3 * i) * (1 + n), reward=n / 10) for n in range(4)]]

    whole = Monitors(MonitorConfig(window=3))
    records = [{"step": i + 1, "reward": 0.5, **whole.watch(step(i))} for i in range(8)]
    again = Monitors(MonitorConfig(window=3))
    again.restore(records[:5])
    assert [again.watch(step(i)) for i in range(5, 8)] == [
        {n: v for n, v in r.items() if n not in ("step", "reward")} for r in records[5:]
    ]
    assert records[-1]["alerts"] == 1


def test_bounds_must_make_sense() -> None:
    for changes in (dict(window=0), dict(disagreement=-0.1), dict(length_growth=float("inf"))):
        with pytest.raises(ConfigError, match=next(iter(changes))):
            MonitorConfig(**changes)  # type: ignore[arg-type]
