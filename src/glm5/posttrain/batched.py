"""A learner that draws its own answers, a batch a step: reasoning and distillation, wholly on-policy by default.

    RUN/samples.jsonl    a line a prompt (`samples`)
    RUN/rollouts.html    some answers of a late step, token by token (`page`)

On several ranks each draws its share of the prompts with an engine of its own (`rollouts`); all then hold all answers.

Read next: `reason`, `distill`, `rollouts`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from glm5.model.glm5 import GLM5
from glm5.posttrain.learner import Batch, LearnConfig, Learner
from glm5.posttrain.losses import LossConfig
from glm5.posttrain.page import write_page
from glm5.posttrain.prompts import Prompt
from glm5.posttrain.rollouts import Group, Rollouts
from glm5.posttrain.rows import PolicyRows, Trajectory
from glm5.posttrain.samples import SampleLedger
from glm5.posttrain.update import score
from glm5.train.drive import Asked

Prepare = Callable[[PolicyRows, Sequence[Group]], PolicyRows]


class BatchedLearner(Learner):
    """See the module. Subclasses have `draw`.

    Args:
        rollouts: the engine; it gets the weights after every step.

    `pages` is the number of steps between pages of rollouts; 0 writes none. `reference` is the model that the loss's KL
    term keeps the policy near, whole on every rank; its routers and its indexers choose for themselves.
    """

    pages: int = 0
    reference: GLM5 | None = None

    def __init__(
        self, config: LearnConfig, model: GLM5, loss: LossConfig, rollouts: Rollouts, directory: Path, data: str
    ) -> None:
        super().__init__(config, model, loss, directory, data, rollouts.engine.vocab_size, rollouts.ranks)
        self.rollouts = rollouts
        if rollouts.config.topk == "racing":
            model.race(config.seed)
        self.ledger = SampleLedger(directory, writes=self.ranks.main)

    def draw(self) -> tuple[dict[str, Any], Sequence[Group]]:
        """Draw, and learn; the metrics, and all groups for the ledger."""
        raise NotImplementedError

    def step(self, stop: Asked) -> dict[str, Any]:
        """Nobody is waited for, so that a stop waits for the step."""
        self.rollouts.seconds.clear()
        metrics, groups = self.draw()
        records = [g.record() for g in groups]
        self.ranks.together(lambda: self.ledger.add(self.finished_steps + 1, records))
        return metrics

    def learn_groups(self, groups: Sequence[Group], prepare: Prepare | None = None) -> dict[str, float]:
        """The updates from these groups; the mean of their figures, extremes as such.

        Args:
            prepare: changes each update's rows, made of these groups, under the weights that drew the answers.
        """
        updates = min(self.config.updates, len(groups))
        batches = []
        for part in range(updates):
            trajectories: list[Trajectory] = []
            share = groups[part::updates]
            for group in share:
                trajectories += group.trajectories(len(trajectories), self.rollouts.config.temperature)
            rows = self.rows(trajectories)
            rows = prepare(rows, share) if prepare else rows
            # The first update's old policy is the one that learns; the others' must be remembered.
            old_BT = self.score(rows) if part else None
            reference_BT = None if self.reference is None else self.score(rows.without_replay(), self.reference)
            batches.append(Batch(rows, len(trajectories), old_BT, reference_BT))
        return self.learn(batches)

    def page(self, groups: Sequence[Group], prepare: Prepare | None = None) -> None:
        """Show these groups, if it is their step's turn. prepare: as in `learn_groups`."""
        if not self.pages or self.finished_steps % self.pages:
            return
        trajectories: list[Trajectory] = []
        for group in groups:
            trajectories += group.trajectories(len(trajectories), self.rollouts.config.temperature)
        rewards = [group.samples[i].reward for group in groups for i in group.learned]
        rows = self.rows(trajectories)
        rows = prepare(rows, groups) if prepare else rows
        path, title = self.directory / "rollouts.html", f"Rollouts of step {self.finished_steps + 1}"
        write_page(path, title, rows, self.model, self.rollouts.tokenizer, rewards, self.ranks)

    def score(self, rows: PolicyRows, model: GLM5 | None = None) -> Tensor:
        """log π of every action under the weights of now, or another model's: see `update.score`."""
        return score(model or self.model, rows, micro_batch=self.config.micro_batch, ranks=self.ranks)

    def push(self) -> None:
        self.rollouts.push(self.whole(), self.finished_steps)

    def kept(self) -> dict[str, Any]:
        return {"prompts": self.ledger.next}

    def rewind(self, state: Mapping[str, Any]) -> None:
        self.ranks.together(lambda: self.ledger.resume(self.finished_steps, state.get("prompts", 0)))

    def figures(self) -> dict[str, Any]:
        times = {f"time/{name}": s for name, s in self.rollouts.seconds.items()}
        return {**times, "prompts": self.ledger.next}

    def summary(self) -> dict[str, Any]:
        return {"prompts": self.ledger.next, "states": dict(self.ledger.states), **super().summary()}


def digest(prompts: Iterable[Prompt]) -> str:
    """Of all that decides what a run of these prompts draws and how it is judged."""
    hashed = hashlib.sha256()
    for p in prompts:
        values = [p.id, [asdict(m) for m in p.messages], p.answer, p.verifier, p.domain, dict(p.info)]
        hashed.update(json.dumps(values, sort_keys=True, default=str).encode() + b"\n")
    return hashed.hexdigest()
