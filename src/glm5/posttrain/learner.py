"""What reinforcement learning and distillation have in common: the policy, its optimizer, the run's directory.

    RUN/config.json      everything that decides the result, which --config reads
    RUN/metrics.jsonl    a line an update, which `glm5 watch` draws
    RUN/samples.jsonl    a line a prompt (`samples`)
    RUN/checkpoints/     to resume from; whole or not at all
    RUN/model/           the result in the public layout

`Learner.run` calls `step`, which a subclass has. A step is a function of what a checkpoint holds (weights, optimizer,
numbers of steps and prompts), so a run that was killed ends in the same bytes as one that was not, and with the same
ledger of prompts. Weights are trained in fp32, and the engine has the same ones. Indexers and the MTP block rest: the
policy's loss has no gradient for either. Source: report, sections 3.2 and 3.5. Read next: `reason`, `distill`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from glm5.model.glm5 import GLM5
from glm5.model.weights import save_model
from glm5.posttrain.losses import LossConfig
from glm5.posttrain.prompts import Prompt
from glm5.posttrain.rollouts import Group, Rollouts
from glm5.posttrain.rows import PolicyRows, Trajectory, pack
from glm5.posttrain.samples import SampleLedger
from glm5.posttrain.update import PolicyUpdate, freeze_indexers, score
from glm5.text.tokenizer import Tokenizer
from glm5.train.checkpoint import CheckpointStore
from glm5.train.optim import MuonSplit, first_nonfinite, parameter_roles
from glm5.train.random_state import seed_random_state
from glm5.train.schedule import LearningRate
from glm5.train.stopping import stop_requests
from glm5.utils.errors import CheckpointError, ConfigError, DataError, NumericalError
from glm5.utils.progress import Progress
from glm5.utils.runlog import RunLog, keep_config

# What a resumed run may change: where things lie, how much is measured and how often, how fast things are done.
MAY_DIFFER = {"run", "save_every", "keep", "eval_every", "held_out", "memory_gib", "verifiers", "dry_run", "page_every"}


Prepare = Callable[[PolicyRows, Sequence[Group]], PolicyRows]


@dataclass(frozen=True)
class LearnConfig:
    """Updates of a policy. The report gives neither rates nor steps; the defaults are ours."""

    steps: int = 100
    """Times that answers are drawn and learned from."""
    updates: int = 1
    """Updates from one batch of answers, each from its own share of the groups; 1 is on-policy, as in the report."""
    lr: LearningRate = field(default_factory=lambda: LearningRate(peak=1e-5, final=1e-5, warmup_steps=5))
    """Learning rate, of Muon and AdamW alike."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    momentum: float = 0.95
    """Muon's momentum."""
    clip: float = 1.0
    """Largest global gradient norm."""
    row_tokens: int = 1024
    """Tokens of a packed row; a longer answer makes its batch's rows longer."""
    micro_batch: int = 4
    """Rows that go through the model at once."""
    seed: int = 0
    """Of the prompts' order and of all draws."""
    save_every: int = 20
    """Steps between checkpoints; one is also written at the end."""
    keep: int = 2
    """Checkpoints kept."""

    def __post_init__(self) -> None:
        for name in ("steps", "updates", "row_tokens", "micro_batch", "save_every", "keep"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "must be at least 1")
        for name in ("weight_decay", "clip"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(name, getattr(self, name), "must be a finite number of at least 0")


class Learner:
    """See the module.

    Args:
        model: trained in place, in fp32. loss: which. rollouts: the engine; it gets the weights after every step.
        directory: of the run. data: a digest of the prompts, so that a run is not resumed on others.
    """

    def __init__(
        self, config: LearnConfig, model: GLM5, loss: LossConfig, rollouts: Rollouts, directory: Path, data: str
    ) -> None:
        if model.dtype != torch.float32:
            raise ConfigError("dtype", str(model.dtype), "a policy is trained in float32")
        self.config, self.model, self.rollouts, self.directory, self.data = config, model, rollouts, directory, data
        model.train()
        freeze_indexers(model)
        self.optimizer = MuonSplit(
            parameter_roles(model, model.config),
            config.lr.at(0, config.steps),
            weight_decay=config.weight_decay,
            momentum=config.momentum,
        )
        self.update = PolicyUpdate(model, self.optimizer, loss, micro_batch=config.micro_batch, clip=config.clip)
        self.store = CheckpointStore(directory / "checkpoints", config.keep)
        self.ledger = SampleLedger(directory)
        self.finished_steps = 0
        self.tokens = 0

    def step(self) -> dict[str, Any]:
        """Draw, learn, and write the ledger; returns the step's metrics."""
        raise NotImplementedError

    # ------------------------------------------------------------------ learning
    def rows(self, trajectories: Sequence[Trajectory]) -> PolicyRows:
        """Packed, no longer than there is need for, on the model's device."""
        longest, total = max(len(t.ids) for t in trajectories), sum(len(t.ids) for t in trajectories)
        seq_len = max(longest, min(self.config.row_tokens, total)) - 1
        return pack(trajectories, max(seq_len, 1), vocab_size=self.rollouts.engine.vocab_size).to(self.model.device)

    def learn(self, groups: Sequence[Group], prepare: Prepare | None = None) -> dict[str, float]:
        """The updates from these groups; the mean of their figures, extremes as such.

        Args:
            prepare: changes each update's rows, made of these groups, under the weights that drew the answers.
        """
        self.optimizer.set_lr(self.config.lr.at(self.finished_steps, self.config.steps))
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
            old = score(self.model, rows, micro_batch=self.config.micro_batch) if part else None
            batches.append((rows, len(trajectories), old))
        found = []
        for rows, rollouts, old in batches:
            found.append(self.update(rows, rollouts, old_BT=old))
            self.tokens += int(rows.mask_BT.sum())
        return _together(found)

    # ------------------------------------------------------------------ state
    def save(self) -> Path:
        """Write a checkpoint of everything that the next step depends on."""
        tensors = {"model": dict(self.model.state_dict()), "optimizer": self.optimizer.named_state()}
        state = {"prompts": self.ledger.next, "tokens": self.tokens, "skipped": self.update.skipped, "data": self.data}
        return self.store.save(self.finished_steps, tensors, state)

    def resume(self) -> list[str]:
        """Go on from the newest whole checkpoint, or begin. Returns warnings about damaged ones.

        Raises:
            DataError: the prompts, or the ledger, are not those of the run.
        """
        seed_random_state(self.config.seed)
        found = self.store.load_newest(self.model.device)
        if found is None:
            self.ledger.resume(0, 0)
            return []
        if found.state["data"] != self.data:
            raise DataError(
                "the prompts are not those that this run began with", "Bring them back, or use another --run"
            )
        try:
            self.model.load_state_dict(found.tensors["model"])
        except RuntimeError as e:
            what = f"{found.path} holds another model: {' '.join(str(e).split())[:300]}"
            raise CheckpointError(
                what, "Resume with the model it was saved with, or choose another directory"
            ) from None
        self.optimizer.load_named_state(found.tensors.get("optimizer", {}))
        self.finished_steps, self.tokens = found.step, found.state["tokens"]
        self.update.skipped = found.state["skipped"]
        self.ledger.resume(found.step, found.state["prompts"])
        return list(found.warnings)

    # ------------------------------------------------------------------ all of it
    def run(
        self,
        *,
        resolved: Any,
        may_differ: Collection[str] = (),
        title: str,
        measure: Callable[[], dict[str, Any]] | None = None,
        measure_every: int = 0,
        on_step: Callable[[Learner], None] | None = None,
    ) -> None:
        """Learn for `config.steps`, from where the directory's newest checkpoint ended.

        Args:
            resolved: the dataclass to keep as the run's configuration. may_differ: fields that may change later.
            measure: figures of held-out prompts, before the first step, every `measure_every` steps and at the end.
            on_step: called after each step (tests use it to interrupt).

        Raises:
            NumericalError: a loss or a weight is not finite; the last checkpoint is from before.
            KeyboardInterrupt: Ctrl-C or SIGTERM came; the step was finished and saved.
        """
        config = self.config
        with RunLog(self.directory) as log:
            begun = bool(self.store.list())
            keep_config(self.directory, resolved, begun=begun, may_differ={*MAY_DIFFER, *may_differ})
            warnings = self.resume()
            self.rollouts.push(self.model, self.finished_steps)
            log.resume(self.finished_steps if begun else -1)
            log.save_environment()
            with (
                Progress(title, config.steps, start=self.finished_steps) as progress,
                stop_requests(progress.note) as stop_requested,
            ):
                for warning in warnings:
                    progress.note(f"warning: {warning}")
                if begun:
                    progress.note(f"resumed after step {self.finished_steps} from {self.store.directory}")
                elif measure is not None:
                    log.log(0, **measure())
                while self.finished_steps < config.steps:
                    self.rollouts.seconds.clear()
                    metrics = self.step()
                    self.finished_steps += 1
                    done = self.finished_steps
                    self.rollouts.push(self.model, done)
                    stopping = stop_requested()
                    last = done == config.steps
                    if measure is not None and (last or (measure_every and done % measure_every == 0)):
                        metrics |= measure()
                    times = {f"time/{name}": s for name, s in self.rollouts.seconds.items()}
                    log.log(done, **metrics, **times, prompts=self.ledger.next, tokens=self.tokens)
                    progress.update(done, **{n: metrics[n] for n in SHOWN if n in metrics})
                    if done % config.save_every == 0 or last or stopping:
                        bad = first_nonfinite(self.model.named_parameters())
                        if bad is not None:
                            raise NumericalError(f"parameter {bad} is not finite after step {done}", "Lower the rate")
                        log.sync()
                        self.save()
                    if on_step is not None:
                        on_step(self)
                    if stopping and not last:
                        progress.note(f"stopped after step {done}, which is saved; the same command goes on from it")
                        raise KeyboardInterrupt
            log.finish(prompts=self.ledger.next, tokens=self.tokens, states=dict(self.ledger.states))

    def export(self, tokenizer: Tokenizer) -> Path:
        """Write the model in the public layout."""
        path = self.directory / "model"
        save_model(self.model, path, tokenizer=tokenizer, overwrite=True)
        return path


SHOWN = ("reward", "reverse_kl", "frac_reward_zero_std", "entropy", "completions/mean_length", "grad_norm")


def digest(prompts: Iterable[Prompt]) -> str:
    """Of all that decides what a run of these prompts draws and how it is judged."""
    hashed = hashlib.sha256()
    for p in prompts:
        values = [p.id, [asdict(m) for m in p.messages], p.answer, p.verifier, p.domain, dict(p.info)]
        hashed.update(json.dumps(values, sort_keys=True, default=str).encode() + b"\n")
    return hashed.hexdigest()


def _together(found: Sequence[dict[str, float]]) -> dict[str, float]:
    """Figures of several updates as one's: extremes, the number of steps, else means."""
    joined: dict[str, float] = {}
    for name in found[0] if found else ():
        values = [f[name] for f in found if name in f]
        if name.endswith(("_max", "_min")):
            joined[name] = max(values) if name.endswith("_max") else min(values)
        elif name == "stepped":
            joined[name] = sum(values)
        else:
            joined[name] = sum(values) / len(values)
    return joined
