"""Shares and speeds by feedback, in a simulation whose time is made of events: no clock, no network."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Mapping

import pytest

from glm5.posttrain.rollout.steering import Steering
from glm5.utils.errors import ConfigError

GROUP, LEAD = 8, 16
Seconds = Callable[[random.Random], float]


def always(seconds: float) -> Seconds:
    return lambda rng: seconds


def mostly(seconds: float) -> Seconds:
    """Long-tailed: the 99th percentile is about ten times the median."""
    return lambda rng: seconds * rng.lognormvariate(0, 1) / 1.65


class Factory:
    """So many places for samples of tasks, whose groups begin as `Steering` says.

    Args:
        tasks: ratio, and seconds of a sample. caps: samples of a task at once. useless: share of a task's samples.
    """

    def __init__(
        self,
        tasks: Mapping[str, tuple[float, Seconds]],
        places: int,
        *,
        caps: Mapping[str, int] | None = None,
        useless: Mapping[str, float] | None = None,
    ) -> None:
        self.tasks, self.places, self.caps, self.useless = tasks, places, caps or {}, useless or {}
        self.rng, self.steering, self.now = random.Random(3), Steering(LEAD), 0.0  # noqa: S311
        self.running: list[tuple[float, str, str]] = []
        self.waiting: list[tuple[str, str]] = []
        self.at_work: Counter[str] = Counter()
        self.groups = 0
        self.finished: list[str] = []  # tasks of the samples of use
        for name, (ratio, _) in tasks.items():
            self.steering.join(name, ratio)

    def _has_room(self, task: str) -> bool:
        return self.at_work[task] < self.caps.get(task, self.places)

    def _fill(self) -> None:
        while len(self.running) < self.places:
            place = next((i for i, (task, _) in enumerate(self.waiting) if self._has_room(task)), None)
            if place is not None:
                task, sample = self.waiting.pop(place)
                self.at_work[task] += 1
                heapq.heappush(self.running, (self.now + self.tasks[task][1](self.rng), sample, task))
                continue
            blocked = {task for task, _ in self.waiting}
            able = [t for t in self.steering.there if self._has_room(t) and t not in blocked]
            chosen = self.steering.choose(able, self.now)
            if chosen is None:
                return
            samples = [f"{self.groups}-{member}" for member in range(GROUP)]
            self.groups += 1
            self.steering.began(chosen, samples, self.now)
            self.waiting += [(chosen, sample) for sample in samples]

    def until(self, finished: int) -> Factory:
        while len(self.finished) < finished:
            self._fill()
            self.now, sample, task = heapq.heappop(self.running)
            self.at_work[task] -= 1
            of_use = self.rng.random() >= self.useless.get(task, 0.0)
            self.steering.ended(task, sample, self.now, of_use=of_use)
            if of_use:
                self.finished.append(task)
        return self

    def shares(self, first: int = 0, last: int | None = None) -> dict[str, float]:
        window = self.finished[first:last]
        return {task: window.count(task) / len(window) for task in self.tasks}


@pytest.mark.parametrize("kind", [always, mostly])
def test_a_task_ten_times_slower_reaches_its_share(kind: Callable[[float], Seconds]) -> None:
    made = Factory({"fast": (1, kind(1)), "slow": (1, kind(10))}, 64).until(6000)
    assert made.shares() == pytest.approx({"fast": 0.5, "slow": 0.5}, abs=0.01)
    for first in range(500, 6000, 500):  # not only in the end
        assert made.shares(first, first + 500)["slow"] == pytest.approx(0.5, abs=0.05)


def test_what_is_under_way_is_no_share() -> None:
    """Of five hundred places a slow task needs most: it has its share from early on, and not only in the long run."""
    made = Factory({"fast": (1, mostly(1)), "slow": (1, mostly(10))}, 512).until(1500)
    assert made.shares()["slow"] == pytest.approx(0.5, abs=0.03)


def test_no_place_is_idle_for_it() -> None:
    """As many samples a second as any schedule with these shares can have."""
    made = Factory({"fast": (1, always(1)), "slow": (1, always(10))}, 64).until(6000)
    best = 64 / (0.5 * 1 + 0.5 * 10)
    assert 6000 / made.now > 0.95 * best


def test_three_tasks_at_set_ratios() -> None:
    tasks = {"a": (3.0, mostly(1)), "b": (1.0, mostly(10)), "c": (2.0, mostly(30))}
    made = Factory(tasks, 256).until(6000)
    assert made.shares() == pytest.approx({"a": 3 / 6, "b": 1 / 6, "c": 2 / 6}, abs=0.01)


def test_one_that_fails_often_begins_more() -> None:
    tasks = {"good": (1.0, always(1)), "bad": (1.0, always(2))}
    made = Factory(tasks, 64, useless={"bad": 0.4}).until(4000)
    assert made.shares() == pytest.approx({"good": 0.5, "bad": 0.5}, abs=0.01)


def test_one_that_always_fails_takes_no_more_than_its_share_of_the_work() -> None:
    tasks = {"good": (1.0, always(1)), "dead": (1.0, always(1))}
    made = Factory(tasks, 64, useless={"dead": 1.0}).until(2000)
    assert 2000 <= made.groups * GROUP < 2.6 * 2000


def test_the_others_are_slowed_down_where_one_cannot_be_hurried() -> None:
    made = Factory({"fast": (1, always(1)), "slow": (1, always(10))}, 64, caps={"slow": 8}).until(2000)
    assert made.shares() == pytest.approx({"fast": 0.5, "slow": 0.5}, abs=0.02)
    assert made.now == pytest.approx(1000 / (8 / 10), rel=0.05), "as fast as the slow one can"


def test_one_that_was_away_begins_where_the_others_are() -> None:
    made = Factory({"stays": (1, always(1)), "comes": (1, always(1))}, 32).until(500)
    made.steering.leave("comes")
    made.until(2500)
    assert made.shares(600, 2500)["comes"] == 0
    made.steering.join("comes", 1.0)
    made.until(4500)
    assert made.shares(2600, 4500)["comes"] == pytest.approx(0.5, abs=0.02), "and does not make up for it"


def test_another_ratio_holds_from_then_on() -> None:
    made = Factory({"a": (1, always(1)), "b": (1, always(1))}, 32).until(1000)
    made.steering.join("a", 3.0)
    made.until(3000)
    assert made.shares(1100, 3000)["a"] == pytest.approx(0.75, abs=0.02)


def test_what_is_told() -> None:
    with pytest.raises(ConfigError, match="lead"):
        Steering(0)
    steering = Steering(4)
    assert steering.choose([], 0.0) is None
    assert steering.due(0.0) == {}
    steering.join("a", 3)
    steering.join("b", 1)
    assert steering.shares() == {"a": 0.75, "b": 0.25}
    steering.began("a", ["x", "y"], 0.0)
    assert sum(steering.due(1.0).values()) == pytest.approx(2)
    assert steering.choose(["a", "b"], 1.0) == "b"
