"""Which task's group begins next: each task gets its set share of what is finished, however slow it is. Plain Python.

Fair queueing with feedback. A task's progress grows by 1 / ratio with each finished sample of use. What runs counts as
far as it is more than the task needs on the way: by Little's law a task that takes d seconds has d times its rate under
way, so of N samples that run

    due_i = N r_i d_i / y_i / sum_j (r_j d_j / y_j)          r: ratio, d: seconds of a sample, y: share that is of use

are its own; d and y are measured all the time. The task whose progress + y (running - due) / ratio is least begins the
next group. A slow task thus has more rollouts under way, one that fails often begins more of them, and a task that is
ahead of the others by more than `lead` samples waits: that is how its speed is steered where one of the others cannot
be hurried. A task that joins, or comes back, begins where the others are; it does not make up for what it missed. One
that has nothing more to give must leave: the others would be ahead of it for ever.

Source: the report, section 4.1 (ratios and speeds of tasks). Read next: `orchestrator`, which asks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from glm5.utils.errors import ConfigError

MEMORY = 0.05  # weight of the newest sample in a task's mean duration and yield
USELESS = 0.25  # a task fewer of whose samples are of use gets no more help: the others are finished as if they were


@dataclass
class Course:
    """A task as it is steered.

    Attributes:
        progress: samples of use that it has finished, by its ratio, from where the others were when it joined.
        seconds: mean of a sample that finished; None before the first. yields: share of these that are of use.
        begun: when the samples that run began, oldest first.
    """

    ratio: float
    progress: float
    seconds: float | None = None
    yields: float = 1.0
    begun: dict[str, float] = field(default_factory=dict)

    @property
    def running(self) -> int:
        return len(self.begun)


class Steering:
    """See the module. Times are seconds of one clock, given by the caller.

    Args:
        lead: samples by which a task may be ahead of the one that is most behind.
    """

    def __init__(self, lead: int) -> None:
        if lead < 1:
            raise ConfigError("lead", lead, "must be at least 1")
        self.lead = lead
        self.there: dict[str, Course] = {}
        self._away: dict[str, Course] = {}

    def join(self, task: str, ratio: float) -> None:
        """A task takes part from now on; or has another ratio."""
        if task in self.there:
            self.there[task].ratio = ratio
            return
        least = min((course.progress for course in self.there.values()), default=0.0)
        course = self._away.pop(task, None) or Course(ratio, least)
        course.ratio, course.progress = ratio, max(course.progress, least)
        self.there[task] = course

    def leave(self, task: str) -> None:
        """A task takes no part for now. What runs of it goes on."""
        if task in self.there:
            self._away[task] = self.there.pop(task)

    def began(self, task: str, samples: Iterable[str], now: float) -> None:
        """Samples of a task are under way."""
        course = self._course(task)
        for sample in samples:
            course.begun[sample] = now

    def ended(self, task: str, sample: str, now: float, *, of_use: bool) -> None:
        """One has finished."""
        course = self._course(task)
        seconds = now - course.begun.pop(sample, now)
        course.seconds = seconds if course.seconds is None else course.seconds + MEMORY * (seconds - course.seconds)
        course.yields += MEMORY * (of_use - course.yields)
        if of_use or course.yields < USELESS:
            course.progress += 1 / course.ratio

    def shares(self) -> dict[str, float]:
        """What each task that takes part is to have, together 1."""
        total = sum(course.ratio for course in self.there.values())
        return {task: course.ratio / total for task, course in self.there.items()}

    def due(self, now: float) -> dict[str, float]:
        """Of the samples that run, those that are each task's own."""
        seconds = {task: _seconds(course, now) for task, course in self.there.items()}
        guess = max(seconds.values(), default=0.0) or 1.0  # of a task of which nothing is known yet
        needs = {task: c.ratio * (seconds[task] or guess) / _yields(c) for task, c in self.there.items()}
        running, total = sum(course.running for course in self.there.values()), sum(needs.values())
        return {task: running * need / total for task, need in needs.items()}

    def choose(self, able: Iterable[str], now: float) -> str | None:
        """Which of these tasks begins a group; None: those that could have to wait for others."""
        due = self.due(now)
        place = {
            task: c.progress + _yields(c) * (c.running - due[task]) / c.ratio for task, c in self.there.items()
        }  # fmt: skip
        best = min((task for task in able if task in place), key=place.__getitem__, default=None)
        if best is None:
            return None
        ahead = (place[best] - min(place.values())) * self.there[best].ratio
        return best if ahead <= self.lead else None

    def _course(self, task: str) -> Course:
        return self.there[task] if task in self.there else self._away.setdefault(task, Course(1.0, 0.0))


def _seconds(course: Course, now: float) -> float:
    """Of a sample; before the first has finished, as long as the oldest runs by now."""
    return now - min(course.begun.values(), default=now) if course.seconds is None else course.seconds


def _yields(course: Course) -> float:
    return max(course.yields, USELESS)
