"""Prompts: rows and their faults, domains at their ratios, difficulty, and orders that resume."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from glm5.data.mixing import Mixture
from glm5.posttrain.prompts import (
    Difficulty,
    PromptOrder,
    pass_rate,
    prompts_from_rows,
    read_prompts,
)
from glm5.posttrain.verify.verdict import Verdict
from glm5.utils.errors import ConfigError, DataError, FileError


def row(number: int = 0, **changes: Any) -> dict[str, Any]:
    return {
        "prompt": f"What is {number} + 1?",
        "answer": str(number + 1),
        "verifier": "maths",
        "domain": "sums",
    } | changes


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


# ------------------------------------------------------------------------------------------------ rows
def test_rows_become_prompts(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    info = {"choices": {"A": "x"}}
    given = row(prompt=messages, id="a", info=info, pass_rate={"weak": 0, "strong": 0.5})
    first, second = read_prompts(write(tmp_path / "p.jsonl", given, "", row(1)))
    assert [m.role for m in first.messages] == ["system", "user"]
    assert (first.id, first.weak, first.strong, first.info) == ("a", 0, 0.5, info)
    assert second.messages[0].content == "What is 1 + 1?"
    assert (second.weak, second.strong) == (None, None)
    assert second.id == read_prompts(write(tmp_path / "q.jsonl", row(1)))[0].id  # its content's
    task = first.task("A")
    assert (task.verifier, task.response, task.answer, task.info) == ("maths", "A", "1", info)


def test_bad_rows_are_listed_by_line_and_nothing_is_used(tmp_path: Path) -> None:
    bad = [
        row(answer=None),
        "{",
        "[1]",
        row(verifier=""),
        row(prompt=""),
        row(prompt=[{"role": "assistant", "content": "a"}]),
        row(pass_rate={"weak": 2}),
        row(pass_rate={"medium": 0.1}),
        row(rating=5),
        row(info=[]),
        row(tools="x"),
        '{"prompt": "p", "answer": NaN, "verifier": "maths", "domain": "d"}',
        row(prompt=[{"role": "user", "text": "a"}]),
        '{"prompt": "p", "answer": "1", "verifier": "maths"}',
    ]
    path = write(tmp_path / "p.jsonl", row(), *bad, row(2))
    with pytest.raises(DataError) as found:
        read_prompts(path)
    assert "14 of 16 rows cannot be used" in found.value.what
    for number, name in zip(
        range(2, 16),
        (
            "answer",
            "JSON",
            "list",
            "verifier",
            "prompt: ''. It must be a text, or a list of messages",
            "assistant",
            "weak",
            "pass_rate",
            "rating",
            "info",
            "tools",
            "NaN",
            "prompt[0].content: missing",
            "domain: missing",
        ),
        strict=True,
    ):
        (line,) = [x for x in found.value.what.splitlines() if x.startswith(f"  line {number}:")]
        assert name in line


def test_many_bad_rows_and_no_rows(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="and 30 more"):
        read_prompts(write(tmp_path / "p.jsonl", *["x"] * 50))
    with pytest.raises(DataError, match="has no rows"):
        read_prompts(write(tmp_path / "q.jsonl", "", ""))
    with pytest.raises(FileError, match=r"missing\.jsonl"):
        read_prompts(tmp_path / "missing.jsonl")
    with pytest.raises(DataError, match="'a' is there twice"):
        read_prompts(write(tmp_path / "r.jsonl", row(id="a"), row(1, id="a")))


# ------------------------------------------------------------------------------------------------ difficulty
def test_difficulty_by_two_pass_rates() -> None:
    rates = [(0.0, 0.5), (0.9, 1.0), (0.0, 0.0), (None, 0.5), (0.2, None), (0.25, 0.25)]
    prompts = prompts_from_rows(
        row(i, pass_rate={k: v for k, v in (("weak", weak), ("strong", strong)) if v is not None})
        for i, (weak, strong) in enumerate(rates)
    )
    kept, left = Difficulty(weak_at_most=0.25, strong_at_least=0.25).select(prompts)
    assert [prompts.index(p) for p in kept] == [0, 3, 4, 5]
    assert left == {"too easy": 1, "too hard": 1}
    assert Difficulty().select(prompts) == (prompts, {})
    with pytest.raises(ConfigError, match="weak_at_most=2"):
        Difficulty(weak_at_most=2)


def test_pass_rates_count_verdicts_only() -> None:
    hang = Verdict(None, "timeout")
    assert pass_rate([Verdict(1.0), hang, Verdict(0.0), Verdict(0.5)]) == 0.5
    assert pass_rate([hang]) is None


# ------------------------------------------------------------------------------------------------ mixing
def test_ratios_hold_for_every_beginning() -> None:
    mixture = Mixture({"a": 3, "b": 1, "c": 0.1})
    whole = mixture.samples(0, 820)
    for n in range(0, 820, 13):
        counts = Counter(name for name, _ in whole[:n])
        for name, share in mixture.shares.items():
            assert abs(counts[name] - n * share) <= 1.5
    assert Counter(name for name, _ in whole) == {"a": 600, "b": 200, "c": 20}
    for name in "abc":
        numbers = [number for source, number in whole if source == name]
        assert numbers == list(range(len(numbers)))


@pytest.mark.parametrize("ratios", [{"a": 1}, {"a": 1, "b": 1, "c": 1}, {"a": 0.3, "b": 0.7}, {"a": 1, "b": 1000}])
def test_samples_are_a_function_of_their_number(ratios: dict[str, float]) -> None:
    mixture = Mixture(ratios)
    whole = mixture.samples(0, 300)
    for index in range(0, 290, 3):
        assert mixture.samples(index, 7) == whole[index : index + 7]
    far = mixture.samples(10**9, 3)
    assert len(far) == 3


def test_ratios_that_mean_nothing() -> None:
    for ratios in ({}, {"a": 0.0}, {"a": 1, "b": float("inf")}):
        with pytest.raises(ConfigError):
            Mixture(ratios)
    with pytest.raises(ConfigError, match="index=-1"):
        Mixture({"a": 1}).samples(-1, 1)


def test_every_prompt_of_a_domain_comes_once_a_pass() -> None:
    rows = [row(i, domain="sums") for i in range(6)] + [row(100 + i, domain="letters") for i in range(4)]
    order = PromptOrder(prompts_from_rows(rows), {"sums": 2, "letters": 1}, seed=3)
    whole = order.prompts(0, 60)
    assert Counter(p.domain for p in whole) == {"sums": 40, "letters": 20}
    sums = [p.id for p in whole if p.domain == "sums"]
    assert all(len(set(sums[i : i + 6])) == 6 for i in range(0, 36, 6))
    assert sums[:6] != sums[6:12]
    resumed = PromptOrder(prompts_from_rows(rows), {"sums": 2, "letters": 1}, seed=3)
    assert resumed.prompts(17, 20) == whole[17:37]
    other = PromptOrder(prompts_from_rows(rows), {"sums": 2, "letters": 1}, seed=4)
    assert other.prompts(0, 60) != whole
    with pytest.raises(ConfigError, match="must name the domains that there are: sums, letters"):
        PromptOrder(prompts_from_rows(rows), {"sums": 1})
