"""The asynchronous learner: takes whole groups from the trajectory store as they come, and never waits for a rollout.

    store: groups nobody runs for -> intake: staleness, failures, filling, advantages -> plan -> update -> close
    after every `learn.updates` updates: forget the optimizer's state, push the weights, go on

The loss is the report's Eq. 3 to 5 on the engine's own log-probabilities: no older policy is scored. What an agent was
told by its environment is context and no action. A version is the number of pushes; a sample is stale, looked at when
it is taken, if its oldest token is more than `max_staleness` versions old. Which groups an update reads is written down
before it is made, so that a learner that was killed makes the same updates again and its ledger is that of one that was
not. Source: report, sections 3.3, 3.6 and 4.1. Read next: `intake`, `store`, `engines`.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from glm5.model.glm5 import GLM5
from glm5.posttrain.advantage import Baseline, reward_figures
from glm5.posttrain.intake import Settled, take
from glm5.posttrain.learner import Batch, LearnConfig, Learner, together
from glm5.posttrain.losses import LossConfig
from glm5.posttrain.outcome import State, reward_of
from glm5.posttrain.record import retokenised
from glm5.posttrain.rows import Trajectory
from glm5.posttrain.store import Sample, Store
from glm5.text.tokenizer import Tokenizer
from glm5.train.drive import Asked
from glm5.train.ranks import Ranks
from glm5.utils.errors import ConfigError, UserError

LEDGER = "trajectories.sqlite"  # in the run's directory
LOOK_S = 0.02  # how often it is looked for groups


@dataclass(frozen=True)
class IntakeConfig:
    """What an update reads."""

    groups: int = 16
    """Groups of an update. The report does not give it."""
    max_staleness: int = 4
    """Largest distance, in pushes of weights, between a sample's oldest token and the weights that it trains (the
    report's τ, whose value it does not give)."""
    baseline: Baseline = "mean"
    """Advantages: R - mean as in the report, (R - mean) / std, or R - mean of the others."""
    patience: int = 1000
    """Groups that may teach nothing, one after another, before it is an error: a policy that always fails, or always
    succeeds, would be asked for ever."""
    reset_optimizer: bool = True
    """Forget the optimizer's state after each push, as the report does."""
    retokenise: bool = False
    """Learn from ids that are made anew from the text, as where only texts are kept: to see what it breaks."""

    def __post_init__(self) -> None:
        for name in ("groups", "patience"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "must be at least 1")
        if self.max_staleness < 0:
            raise ConfigError("max_staleness", self.max_staleness, "must be at least 0")


class Drawers(Protocol):
    """Whoever draws: engines, agents, and those who bring what they draw to the store. Methods of the learner's
    thread."""

    def push(self, model: GLM5, version: int) -> None:
        """Give the model's weights, under a version, to all engines."""
        ...

    def begin(self) -> None:
        """The engines have their weights: samples may be started."""
        ...

    def check(self) -> None:
        """Raises whatever has ended them."""
        ...

    def figures(self) -> dict[str, Any]:
        """What is to be seen of them, since the last time this was asked."""
        ...


class AgentLearner(Learner):
    """See the module.

    Args:
        ledger: the run's trajectory store, in which `drawers` start and deliver samples; the main rank alone has both,
            and hands each update's trajectories to all. data, ranks: see `Learner`.
    """

    def __init__(
        self,
        config: LearnConfig,
        intake: IntakeConfig,
        model: GLM5,
        loss: LossConfig,
        directory: Path,
        data: str,
        vocab_size: int,
        ledger: Store | None,
        drawers: Drawers | None,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__(config, model, loss, directory, data, vocab_size, ranks)
        self.intake, self.ledger, self.drawers = intake, ledger, drawers
        self.tokenizer: Tokenizer | None = None  # for `IntakeConfig.retokenise`
        self.updates = 0
        self._stream = torch.cuda.Stream(self.model.device) if self.model.device.type == "cuda" else None
        self._settled: list[Settled] = []  # in this step
        self._waited = 0.0
        self._worked = 0.0

    @property
    def _mine(self) -> tuple[Store, Drawers]:
        assert self.ledger is not None, "of the main rank"
        assert self.drawers is not None, "of the main rank"
        return self.ledger, self.drawers

    # ------------------------------------------------------------------ a step
    def step(self, stop: Asked) -> dict[str, Any] | None:
        """Updates, each from the groups that are there next. A stop between two of them ends the step early."""
        found: list[dict[str, float]] = []
        self._settled = []
        self._waited = self._worked = 0.0
        for _ in range(self.config.updates):
            dealt = self.ranks.from_main(lambda: self._next(stop))
            if dealt is None:
                break
            began = time.perf_counter()
            trajectories, rollouts = dealt
            with self._beside_engine():
                found.append(self.learn([Batch(self.rows(trajectories), rollouts)]))
            self.updates += 1
            self.ranks.on_main(self._close)
            self._worked += time.perf_counter() - began
        if not found:
            return None
        if self.intake.reset_optimizer:
            self.optimizer.reset()
        taken = intake_figures(self._settled, self.finished_steps) if self.ranks.main else {}
        return {**taken, **together(found)}

    @contextmanager
    def _beside_engine(self) -> Iterator[None]:
        """On a GPU, a stream of the learner's own, empty at the end: an engine in this process would wait, in each of
        its steps, for all that the learner has asked for."""
        own = self._stream
        if own is None:
            yield
            return
        own.wait_stream(torch.cuda.current_stream(own.device))
        with torch.cuda.stream(own):
            yield
        own.synchronize()

    def _next(self, stop: Asked) -> tuple[list[Trajectory], int] | None:
        """On the main rank: what the next update reads, and how many its rollouts are numbered to."""
        made = self._groups(stop)
        if made is None:
            return None
        self._settled.append(made)
        return self._trajectories(made)

    def _close(self) -> None:
        self._mine[0].close_samples(self._settled[-1].trained, step=self.updates)

    def _groups(self, stop: Asked) -> Settled | None:
        """What the next update reads, as soon as enough is there; None if a stop was asked for before.

        Raises:
            UserError: the rollouts teach nothing.
        """
        began, intake = time.perf_counter(), self.intake
        ledger, drawers = self._mine
        gone, made, seen = Settled(), Settled(), None
        try:
            while True:
                if seen != (mark := ledger.mark()):  # of before: what comes meanwhile is seen the next time
                    seen = mark
                    made = take(
                        ledger,
                        intake.groups,
                        self.finished_steps,
                        intake.max_staleness,
                        intake.baseline,
                        step=self.updates + 1,
                    )
                    gone.closed |= made.closed
                    gone.dropped += made.dropped
                if len(made.taken) >= intake.groups:
                    return Settled(made.taken, gone.closed, gone.dropped)
                if len(gone.dropped) > intake.patience * (1 + len(made.taken)):
                    raise _useless(gone, ledger)
                if stop():
                    return None
                drawers.check()
                self.ranks.at(self.finished_steps, "0 rollouts and updates")  # it waits, and does not stand still
                time.sleep(LOOK_S)
        finally:
            self._waited += time.perf_counter() - began

    def _trajectories(self, made: Settled) -> tuple[list[Trajectory], int]:
        trajectories: list[Trajectory] = []
        rollouts, ledger = 0, self._mine[0]
        for one in (one for group in made.taken for one in group):
            records = ledger.records(one.sample.id)
            if self.intake.retokenise:
                assert self.tokenizer is not None, "it makes the ids"
                records = [retokenised(record, self.tokenizer) for record in records]
            for _ in range(one.copies):
                trajectories += [record.trajectory(rollouts, one.advantage) for record in records]
                rollouts += 1
        return trajectories, rollouts

    def push(self) -> None:
        model = self.whole()
        self.ranks.on_main(lambda: self._mine[1].push(model, self.finished_steps))

    def figures(self) -> dict[str, Any]:
        return self.ranks.on_main(self._figures) or {}

    def _figures(self) -> dict[str, Any]:
        waited, worked = self._waited, self._worked
        ledger, drawers = self._mine
        return {
            "idle/trainer": waited / max(1e-9, waited + worked),
            "time/wait": waited,
            "time/update": worked,
            "queue/ready": len(ledger.ready(4 * self.intake.groups)),
            "updates": self.updates,
            **drawers.figures(),
        }

    # ------------------------------------------------------------------ state
    def resume(self) -> list[str]:
        warnings = super().resume()
        self.ranks.on_main(lambda: self._mine[1].begin())
        return warnings

    def kept(self) -> dict[str, Any]:
        return {"updates": self.updates}

    def rewind(self, state: Mapping[str, Any]) -> None:
        self.updates = state.get("updates", 0)
        self.ranks.on_main(lambda: self._mine[0].rewind(self.updates))

    def summary(self) -> dict[str, Any]:
        if not self.ranks.main:
            return super().summary()
        counts = self._mine[0].counts()
        return {"updates": self.updates, "started": counts.started, "states": counts.by_status, **super().summary()}


# ---------------------------------------------------------------------------------------------------- figures
def intake_figures(settled: Sequence[Settled], version: int) -> dict[str, Any]:
    """What the updates of a step took and left, under the names of `docs/agent-rl.md`.

    Args:
        version: of the weights that were trained.
    """
    taken = [one for made in settled for group in made.taken for one in group]
    groups = [[one.sample for one in group] for made in settled for group in made.taken]
    groups += [list(group) for made in settled for group in made.dropped]
    every = [sample for group in groups for sample in group]
    stale = [version - (one.sample.oldest or 0) for one in taken]
    ages = [max(0.0, time.time() - (one.sample.delivered or 0.0)) for one in taken]
    took = [max(0.0, (s.delivered or s.started) - s.started) for s in every]
    rewards = [[r for s in group if (r := _reward(s)) is not None] for group in groups]
    states = Counter(str(state) for made in settled for state in made.closed.values())
    found: dict[str, Any] = {
        **reward_figures(rewards),
        "staleness": {str(distance): count for distance, count in sorted(Counter(stale).items())},
        "staleness/mean": statistics.fmean(stale),
        "staleness/max": max(stale),
        "queue/age_mean": statistics.fmean(ages),
        "queue/age_max": max(ages),
        "rollout/seconds_mean": statistics.fmean(took),
        "rollout/seconds_max": max(took),
        "samples/trained": len(taken),
        "samples/repeated": sum(one.copies - 1 for one in taken),
        **{f"samples/{state}": states[state] for state in State if state is not State.TRAINED},
        "outcomes": dict(sorted(Counter(str(s.outcome) for s in every).items())),
    }
    for task in dict.fromkeys(s.task for s in every):
        here = [r for s in every if s.task == task and (r := _reward(s)) is not None]
        if here:
            found[f"rewards/{task}"] = statistics.fmean(here)
    return found


def _reward(sample: Sample) -> float | None:
    return None if sample.outcome is None else reward_of(sample.outcome, sample.reward)


def _useless(gone: Settled, ledger: Store) -> UserError:
    """What to say of groups that teach nothing."""
    states = Counter(gone.closed.values()).most_common()
    what = f"{len(gone.dropped):,} groups in a row teach nothing: " + ", ".join(f"{n:,} {state}" for state, n in states)
    mend = "make the task easier, or fine-tune the model on it first"
    if states[0][0] is State.ENVIRONMENT_FAILED:
        failed = next(id for id, state in gone.closed.items() if state is State.ENVIRONMENT_FAILED)
        what += f"; {failed} so: {ledger.sample(failed).detail or 'nobody said how'}"
        mend = "mend the task, its environment or its verifier"
    return UserError(what, f"Look at some (`glm5 trajectories`); {mend}")
