"""The tasks of `benchmarks/terminal_learning.py`: who looks solves them, who guesses wrong does not, and what is
pretended is what a shell does."""

from __future__ import annotations

import argparse
import importlib
import json
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest

from glm5.agents.tasks import attempt

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    before = set(sys.modules)
    module = importlib.import_module("terminal_learning")
    for made in set(sys.modules) - before:  # other scripts' names stay free
        if str(getattr(sys.modules[made], "__file__", None) or "").startswith(str(FOLDER)):
            monkeypatch.delitem(sys.modules, made)
    return module


def test_a_quarter_is_held_out_from_scripts_and_rollouts(bench: ModuleType) -> None:
    parts = [bench.asked(n, held=held) for n in range(800) for held in (True, False)]
    held = {(one.figure, one.column, one.separator) for one in parts if one.held_out}
    learned = {(one.figure, one.column, one.separator) for one in parts if not one.held_out}
    assert not held & learned
    assert len(held | learned) == 48
    assert 6 <= len(held) <= 18


@pytest.mark.parametrize("pretend", [True, False])
def test_a_careful_script_solves_it_and_a_wrong_guess_does_not(
    bench: ModuleType, tmp_path: Path, pretend: bool, request: pytest.FixtureRequest
) -> None:
    if not pretend:
        request.getfixturevalue("isolation")
    args = argparse.Namespace(tasks=2, held_out=2, concurrency=2, services=0, pretend=pretend, weaker=False)
    service = bench.Tables(tmp_path, args, 0)
    for number, task in enumerate([*service.held, *service.tasks]):
        one = bench.asked(number if number < 2 else 1_000_000 + number - 2, held=number < 2)
        told: list[str] = []

        def careful(trial, one=one, told=told):  # type: ignore[no-untyped-def]
            for said in one.script(random.Random(0), 0.0):  # noqa: S311
                for call in said.get("tool_calls", ()):
                    told.append(trial.act(json.loads(call["function"]["arguments"])["command"]).text.rstrip())

        assert attempt(task, careful, service.where).reward == 1.0
        assert told == ["\n".join(one.lines[:2]), ""]
        wrong = next(s for s in bench.SEPARATORS if s != one.separator)
        guess = one.command(wrong)
        assert attempt(task, lambda trial, guess=guess: trial.act(guess), service.where).reward == 0.0


def test_services_share_the_tasks(bench: ModuleType, tmp_path: Path) -> None:
    args = argparse.Namespace(tasks=7, held_out=5, concurrency=8, services=3, pretend=True, weaker=False)
    parts = [bench.Tables(tmp_path, args, 0, part) for part in range(3)]
    assert [part.name for part in parts] == ["tables.0", "tables.1", "tables.2"]
    assert [part.concurrency for part in parts] == [3, 3, 3]
    for of, count in (("held", 5), ("tasks", 7)):
        names = [task.name for part in parts for task in getattr(part, of)]
        assert len(names) == len(set(names)) == count


def test_intervals_are_wilson_s(bench: ModuleType) -> None:
    assert bench.interval(0.5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert bench.interval(0.0, 8) == pytest.approx((0.0, 1.96**2 / (8 + 1.96**2)), abs=1e-9)


def test_hasty_scripts_guess(bench: ModuleType) -> None:
    draw, right, looks = random.Random(0), 0, 0  # noqa: S311
    for number in range(400):
        one = bench.asked(number, held=False)
        calls = [call for said in one.script(draw, 0.7) for call in said.get("tool_calls", ())]
        looks += len(calls) == 2
        right += one.command(one.separator) in calls[-1]["function"]["arguments"]
    assert 0.22 < looks / 400 < 0.38
    assert 0.38 < right / 400 < 0.58  # 0.3 + 0.7 / 4
