"""What is told of rollouts while they run: for the run log (`glm5 watch` draws it), and for Prometheus.

`snapshot` is a dictionary of numbers and dictionaries, as the run log takes it; `write` keeps a log of its own, in
`RUN/rollouts`, whose steps are samples that have finished. Names are in `snapshot`. Read next: `orchestrator`.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from glm5.posttrain.rollout.sample import Ending, Job
from glm5.utils.runlog import RunLog

if TYPE_CHECKING:
    from glm5.posttrain.rollout.orchestrator import Orchestrator

RECENT = 1000  # finished samples whose shares are told
MEMORY = 0.05  # weight of the newest sample in a mean


@dataclass
class TaskFigures:
    """Of one task, since this process began."""

    outcomes: Counter[str] = field(default_factory=Counter)
    retries: Counter[str] = field(default_factory=Counter)
    means: dict[str, float] = field(default_factory=dict)

    def mean(self, name: str, value: float) -> None:
        before = self.means.get(name, value)
        self.means[name] = before + MEMORY * (value - before)


class Figures:
    """Counts as samples end. concurrency: rollouts that there may be at once."""

    def __init__(self, concurrency: int) -> None:
        self.concurrency = concurrency
        self.tasks: dict[str, TaskFigures] = {}
        self.recent: deque[str] = deque(maxlen=RECENT)  # tasks of finished samples of use
        self.staleness: Counter[int] = Counter()  # versions from a sample's oldest token to its delivery
        self.held_s: defaultdict[str, float] = defaultdict(float)
        self.disk_errors = self.finished = 0
        self._reason, self._since = "", 0.0

    def held(self, reason: str, now: float) -> None:
        """Why no more is begun from now on: `open` (the learner has enough), `services` (none can take more),
        `steering` (those that can have their share), `disk`; "" where all slots are in use."""
        if self._reason:
            self.held_s[self._reason] += now - self._since
        self._reason, self._since = reason, now

    def of(self, task: str) -> TaskFigures:
        return self.tasks.setdefault(task, TaskFigures())

    def retried(self, task: str, ending: Ending) -> None:
        """An attempt is followed by another."""
        self.of(task).retries[str(ending.outcome)] += 1

    def ended(self, job: Job, ending: Ending, version: int | None, seconds: float) -> None:
        """A sample has finished."""
        self.finished += 1
        one = self.of(job.task)
        one.outcomes["cancelled" if ending.cancelled else str(ending.outcome)] += 1
        one.mean("seconds", seconds)
        one.mean("useful", float(not (ending.cancelled or ending.outcome.leaves_group)))
        if ending.reward is not None:
            one.mean("reward", ending.reward)
            self.recent.append(job.task)
        for name, value in (ending.result.metrics if ending.result is not None else {}).items():
            one.mean(f"metrics.{name}", value)
        oldest = min((r.oldest for r in ending.records if r.oldest is not None), default=None)
        if oldest is not None and version is not None:
            self.staleness[max(0, version - oldest)] += 1

    def snapshot(self, of: Orchestrator, wall: float) -> dict[str, Any]:
        """All figures of an orchestrator.

        Args:
            wall: seconds since 1970: the ages of queues are by the clock of the ledger.

        Returns:
            running, waiting, open, open_limit: samples. idle: share of the places for rollouts that are free.
            held_s: seconds for which nothing more was begun, by reason. staleness: samples by versions behind at their
            delivery. version: of the weights. tasks: by name, target (share of the finished ones of use that it is
            set to have), share (that it has had lately), running, waiting, delivered (and not yet taken), oldest_s and
            queue_s (age of the oldest that runs, and that is delivered), outcomes and retries by kind, seconds, useful,
            reward, metrics.* (means, lately), there.
        """
        shares, recent = of.steering.shares(), Counter(self.recent)
        under_way = Counter(job.task for job in of.running.values())
        tasks = {}
        for name in sorted({*of.steering.there, *self.tasks, *of.queues, *of.services.known}):
            queue, mine = of.queues.get(name), self.of(name)
            tasks[name] = {
                "target": shares.get(name, 0.0),
                "share": recent[name] / max(1, len(self.recent)),
                "running": under_way[name],
                "waiting": len(of.waiting.get(name, ())),
                "delivered": 0 if queue is None else queue.delivered,
                "oldest_s": _age(None if queue is None else queue.running_since, wall),
                "queue_s": _age(None if queue is None else queue.delivered_since, wall),
                "there": int(of.services.there(name)),
                "outcomes": dict(mine.outcomes),
                "retries": dict(mine.retries),
                **mine.means,
            }
        return {
            "running": len(of.running),
            "waiting": sum(map(len, of.waiting.values())),
            "open": of.open,
            "open_limit": of.options.open_limit,
            "finished": self.finished,
            "idle": 1 - len(of.running) / self.concurrency,
            "held_s": dict(self.held_s),
            "disk_errors": self.disk_errors,
            "staleness": {str(k): v for k, v in sorted(self.staleness.items())},
            **({} if of.version is None else {"version": of.version}),
            "tasks": tasks,
        }


def _age(since: float | None, wall: float) -> float:
    return 0.0 if since is None else max(0.0, wall - since)


async def write(of: Orchestrator, log: RunLog, every_s: float = 10.0) -> None:
    """Log the figures again and again, until cancelled; then once more. Steps go on from those in the log."""
    begun = max(0, log.last_step)
    try:
        while True:
            await asyncio.sleep(every_s)
            log.log(begun + of.figures.finished, rollouts=of.figures.snapshot(of, time.time()))
    finally:
        log.log(begun + of.figures.finished, rollouts=of.figures.snapshot(of, time.time()))


def prometheus(figures: dict[str, Any]) -> str:
    """A snapshot in Prometheus' text format: `glm5:rollouts_*`, by task where it is a task's."""
    lines = []
    for name, value in figures.items():
        if isinstance(value, int | float):
            lines.append(f"glm5:rollouts_{name} {value}")
        elif name != "tasks":
            lines += [f'glm5:rollouts_{name}{{kind="{kind}"}} {count}' for kind, count in value.items()]
    for task, mine in figures["tasks"].items():
        for name, value in mine.items():
            metric = f"glm5:rollouts_task_{name.replace('.', '_')}"
            if isinstance(value, dict):
                lines += [f'{metric}{{task="{task}",kind="{kind}"}} {count}' for kind, count in value.items()]
            else:
                lines.append(f'{metric}{{task="{task}"}} {value}')
    return "\n".join(lines) + "\n"
