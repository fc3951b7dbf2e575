"""The benchmarks of learning: what is careless is wrong, a verdict is of paired seeds, and a line is of its stretch."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from glm5.posttrain.verify import gym

FOLDER = Path(__file__).parents[2] / "benchmarks"


def benchmark(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A script of the folder, which imports what lies beside it."""
    monkeypatch.syspath_prepend(FOLDER)
    before = set(sys.modules)
    module = importlib.import_module(name)
    for made in set(sys.modules) - before:  # other scripts' names stay free, and so do those that only look like them
        if str(getattr(sys.modules[made], "__file__", None) or "").startswith(str(FOLDER)):
            monkeypatch.delitem(sys.modules, made)
    return module


def test_careless_answers_are_often_wrong_and_sometimes_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that fine-tuning on them leaves something to learn, and a verifier finds it."""
    careless = benchmark("reason_learning", monkeypatch).CARELESS
    small: dict[str, dict[str, Any]] = {
        "gcd": {"min_numbers": 2, "max_numbers": 2, "min_value": 2, "max_value": 20},
        "lcm": {"min_numbers": 2, "max_numbers": 2, "min_value": 2, "max_value": 20},
        "number_sorting": {"min_numbers": 3, "max_numbers": 3, "min_decimals": 0, "max_decimals": 0, "max_value": 9},
        "letter_counting": {"min_words": 2, "max_words": 4},
        "spell_backward": {"min_word_len": 3, "max_word_len": 4},
    }
    for name, options in small.items():
        rows = gym.rows(name, 60, 0, **options)
        right = [gym.check(careless[name](r["info"]["metadata"]), r["answer"], r["info"]).reward for r in rows]
        assert 0 < sum(v == 1.0 for v in right) < 40, name
        assert all(v in (0.0, 1.0) for v in right), name


def test_a_verdict_is_of_paired_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds that differ a hundred times more than arms do hide nothing: 0.1 apart by 0.01. Half of an interval of three
    is Student's 4.30 standard errors, each deviation / sqrt(3)."""
    verdict = benchmark("rl_ablations", monkeypatch).verdict
    assert verdict([0.1, 0.5, 0.9], [0.0, 0.39, 0.81]) == "+0.100 ± 0.025 (95%): differs"
    assert verdict([0.1, 0.5, 0.9], [0.25, 0.39, 0.81]) == "+0.017 ± 0.359 (95%): within the noise"
    assert verdict([0.30, 0.36, 0.33], [0.2, 0.2, 0.2]).endswith("differs")
    assert verdict([0.21, 0.25, 0.22], [0.2, 0.2, 0.2]).endswith("within the noise")  # 2.2 standard errors of three
    assert verdict([0.5], [0.1]) == "+0.400, one seed: no verdict"


def test_careless_answers_of_the_ablations_are_tasks_half_done(monkeypatch: pytest.MonkeyPatch) -> None:
    module = benchmark("rl_ablations", monkeypatch)
    assert module.SOLVED["sort"](("4", "1", "7")) == "1 4 7"
    assert module.CARELESS["sort"](("4", "1", "7")) == "4 1 7"
    assert module.SOLVED["big"](("4", "1", "7")) == "7"
    assert module.CARELESS["big"](("4", "1", "7")) == "4"


def test_a_line_has_the_steps_since_the_last_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    table = benchmark("reason_minutes", monkeypatch).table
    steps = [{"step": i, "reward": i / 10, "unknown": 1.0} for i in range(1, 5)]
    lines = table(steps, [{"step": 0, "gcd": 0.2}, {"step": 2, "gcd": 0.4}, {"step": 4, "gcd": 0.5}])
    assert lines == [
        "before  gcd 0.20",
        "after step    2  gcd 0.40\n    reward 0.15",
        "after step    4  gcd 0.50\n    reward 0.35",
    ]


def test_tasks_that_are_measured_are_not_learned_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And what is fine-tuned on says something else than the right answer about as often as it is asked to."""
    module = benchmark("reason_learning", monkeypatch)
    spec = 'gcd:{"min_numbers":2,"max_numbers":2,"min_value":2,"max_value":20}'
    args = argparse.Namespace(
        first=[spec], second=[], count=300, held_out=30, answers=2, careless=0.5, first_line=False
    )
    seed = module.Seed(1, tmp_path, args)
    seed.write_tasks()
    (file,) = seed.answers()
    rows = {
        p: [json.loads(r) for r in (tmp_path / f"gcd-{p}.jsonl").read_text().splitlines()] for p in ("held", "train")
    }
    asked = {p: {r["prompt"] for r in rows[p]} for p in rows}
    assert len(asked["held"]) == 30 == len(rows["held"])
    assert not asked["held"] & asked["train"]
    talks = [json.loads(line)["messages"] for line in file.read_text().splitlines()]
    assert len(talks) == 2 * len(rows["train"])
    answers = {r["prompt"]: r["answer"] for r in rows["train"]}
    wrong = sum(answers[user["content"]] != said["content"] for user, said in talks) / len(talks)
    assert 0.2 < wrong < 0.5  # a careless answer may be right by luck
