"""What all reinforcement learning and distillation have in common: the policy, its optimizer, the run's directory.

    RUN/config.json      everything that decides the result, which --config reads
    RUN/metrics.jsonl    a line a step, which `glm5 watch` draws
    RUN/checkpoints/     to resume from; whole or not at all
    RUN/model/           the result in the public layout

A step is a number of updates, then new weights for the engines, whose version is the number of steps. Subclasses say
where its samples come from: `batched` draws them itself, `agent` takes them as they come. On several ranks the policy
lies over them as in pre-training, and each reads its share of a batch's rows. A step is a function of what
a checkpoint and the run's ledger hold, so a run that was killed ends in the same bytes as one that was not. Weights are
trained in fp32, and the engine has the same ones. The MTP block rests, and so do the indexers unless they are told to
learn: the policy's loss has no gradient for either. Source: report, sections 3.2, 3.5 and 4.1. Read next: `batched`,
`agent`, `glm5.train.drive`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glm5.model.glm5 import GLM5
from glm5.model.weights import save_model
from glm5.posttrain.losses import LossConfig
from glm5.posttrain.rows import PolicyRows, Trajectory, pack
from glm5.posttrain.update import PolicyUpdate, freeze_indexers
from glm5.quant.int4 import marked
from glm5.text.tokenizer import Tokenizer
from glm5.train.checkpoint import CheckpointStore
from glm5.train.drive import Asked, drive
from glm5.train.optim import MuonSplit, first_nonfinite, parameter_roles
from glm5.train.random_state import seed_random_state
from glm5.train.ranks import PipelineOptions, Ranks
from glm5.train.schedule import LearningRate
from glm5.train.state import TrainState
from glm5.utils.errors import CheckpointError, ConfigError, DataError

# What a resumed run may change: where things lie, how much is measured and how often, how fast things are done.
MAY_DIFFER = {"run", "save_every", "keep", "eval_every", "held_out", "memory_gib", "verifiers", "dry_run", "page_every"}


@dataclass(frozen=True)
class LearnConfig:
    """Updates of a policy. The report gives neither rates nor steps; the defaults are ours."""

    steps: int = 100
    """Times that the engines get new weights."""
    updates: int = 1
    """Updates between two of these. Reasoning makes them from one batch of answers, each from its own share of the
    groups, and 1 is on-policy, as in the report; agents take new groups for each."""
    lr: LearningRate = field(default_factory=lambda: LearningRate(peak=1e-5, final=1e-5, warmup_steps=5))
    """Learning rate, of Muon and AdamW alike."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    momentum: float = 0.95
    """Muon's momentum."""
    clip: float = 1.0
    """Largest global gradient norm."""
    indexer_weight: float = 0.0
    """Weight of the indexers' KL, as in pre-training; 0 freezes them, as the report does."""
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
        if not 0 <= self.momentum < 1:
            raise ConfigError("momentum", self.momentum, "must lie in [0, 1)")
        for name in ("weight_decay", "clip", "indexer_weight"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(name, getattr(self, name), "must be a finite number of at least 0")


@dataclass(frozen=True)
class Batch:
    """What one update reads. rollouts: how many its rollouts are numbered to. old_BT, reference_BT: as `PolicyUpdate`
    has them."""

    rows: PolicyRows
    rollouts: int
    old_BT: Tensor | None = None
    reference_BT: Tensor | None = None


class Learner:
    """See the module.

    Args:
        model: trained in place, in fp32. loss: which. vocab_size: ids below it could be drawn.
        directory: of the run. data: a digest of what is learned from, so that a run is not resumed on other data.
        ranks: that learn together, each with the same whole model; it is laid out over them.

    Attributes:
        measure: figures of held-out tasks, made before the first step, every `measure_every` steps and at the end.
    """

    def __init__(
        self,
        config: LearnConfig,
        model: GLM5,
        loss: LossConfig,
        directory: Path,
        data: str,
        vocab_size: int,
        ranks: Ranks | None = None,
    ) -> None:
        if model.dtype != torch.float32:
            raise ConfigError("dtype", str(model.dtype), "a policy is trained in float32")
        self.config, self.model, self.directory, self.data = config, model, directory, data
        self.vocab_size, self.ranks = vocab_size, ranks or Ranks()
        model.train()
        model.config = marked(model.config, None)  # it no longer learns at INT4, if it did
        if not config.indexer_weight:
            freeze_indexers(model)
        self.ranks.place(model, PipelineOptions())
        roles = parameter_roles(model, model.config)
        holdings = self.ranks.holdings([role.parameter for role in roles])
        self.optimizer = MuonSplit(
            roles,
            config.lr.at(0, config.steps),
            weight_decay=config.weight_decay,
            momentum=config.momentum,
            holdings=holdings,
        )
        self.update = PolicyUpdate(
            model,
            self.optimizer,
            loss,
            micro_batch=config.micro_batch,
            clip=config.clip,
            indexer_weight=config.indexer_weight,
            ranks=self.ranks,
            holdings=holdings,
        )
        self.state = TrainState(model, None, self.ranks, self.optimizer, {})
        self.store = self.ranks.store(directory / "checkpoints", config.keep, self.state.places)
        self.measure: Callable[[], dict[str, Any]] | None = None
        self.measure_every = 0
        self.finished_steps = 0
        self.tokens = 0

    # ------------------------------------------------------------------ of a subclass
    def step(self, stop: Asked) -> dict[str, Any] | None:
        """The updates of a step, kept in the ledger; their metrics. None: `stop` ended it before anything changed."""
        raise NotImplementedError

    def push(self) -> None:
        """Give the engines the weights, as version `finished_steps`."""
        raise NotImplementedError

    def rewind(self, state: Mapping[str, Any]) -> None:
        """Bring the ledger to the checkpoint of `finished_steps`, whose `state` this is; empty for a fresh run."""
        raise NotImplementedError

    def kept(self) -> dict[str, Any]:
        """What `rewind` needs."""
        return {}

    def figures(self) -> dict[str, Any]:
        """Metrics of a step that are known at its very end."""
        return {}

    def summary(self) -> dict[str, Any]:
        """The closing figures of a run."""
        return {"tokens": self.tokens}

    # ------------------------------------------------------------------ learning
    def rows(self, trajectories: Sequence[Trajectory]) -> PolicyRows:
        """Packed, no longer than there is need for, on the model's device."""
        longest, total = max(len(t.ids) for t in trajectories), sum(len(t.ids) for t in trajectories)
        seq_len = max(longest, min(self.config.row_tokens, total)) - 1
        return pack(trajectories, max(seq_len, 1), vocab_size=self.vocab_size).to(self.model.device)

    def learn(self, batches: Sequence[Batch]) -> dict[str, float]:
        """An update from each; the mean of their figures, extremes as such."""
        self.optimizer.set_lr(self.config.lr.at(self.finished_steps, self.config.steps))
        found = []
        for batch in batches:
            remembered = {"old_BT": batch.old_BT, "reference_BT": batch.reference_BT}
            found.append(self.update(batch.rows, batch.rollouts, **remembered))
            self.tokens += int(batch.rows.mask_BT.sum())
        return together(found)

    # ------------------------------------------------------------------ state
    def save(self, store: CheckpointStore | None = None) -> Path:
        """Write a checkpoint of everything that the next step depends on."""
        tensors = {"model": self.state.weights(), "optimizer": self.optimizer.named_state()}
        state = {"tokens": self.tokens, "skipped": self.update.skipped, "data": self.data, **self.kept()}
        return (store or self.store).save(self.finished_steps, tensors, state)

    def resume(self) -> list[str]:
        """Go on from the newest whole checkpoint, or begin; the engines have the weights then. Returns warnings about
        damaged checkpoints.

        Raises:
            DataError: what is learned from, or the ledger, is not the run's.
        """
        seed_random_state(self.config.seed)
        found = self.store.load_newest(self.model.device)
        if found is None:
            self.rewind({})
            self.push()
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
        self.rewind(found.state)
        self.push()
        return list(found.warnings)

    def another_store(self, directory: Path) -> CheckpointStore:
        """For one checkpoint elsewhere."""
        return self.ranks.store(directory, 1, self.state.places)

    def bad_weight(self) -> str | None:
        """The first parameter of this rank that is not finite."""
        bad = first_nonfinite((n, self.ranks.local(p)) for n, p in self.model.named_parameters())
        return bad and f"parameter {bad}"

    # ------------------------------------------------------------------ all of it
    def opening(self) -> dict[str, Any]:
        """Held-out figures before the first step."""
        return {} if self.measure is None else self.measure()

    def advance(self, stop: Asked) -> dict[str, Any] | None:
        """One step, and its weights to the engines."""
        self.ranks.at(self.finished_steps, "0 rollouts and updates")
        metrics = self.step(stop)
        if metrics is None:
            return None
        self.finished_steps += 1
        self.push()
        done, every = self.finished_steps, self.measure_every
        if self.measure is not None and (done == self.config.steps or (every and done % every == 0)):
            metrics |= self.measure()
        return {**metrics, **self.figures(), "tokens": self.tokens}

    def shown(self, metrics: dict[str, Any]) -> dict[str, float]:
        """What a person who waits sees."""
        return {n: metrics[n] for n in SHOWN if n in metrics}

    def run(
        self,
        *,
        resolved: Any,
        may_differ: Collection[str] = (),
        title: str,
        on_step: Callable[[Learner], None] | None = None,
    ) -> None:
        """Learn for `config.steps`, from where the directory's newest checkpoint ended.

        Args:
            resolved: the dataclass to keep as the run's configuration. may_differ: fields that may change later.
            on_step: called after each step (tests use it to interrupt).

        Raises:
            NumericalError, KeyboardInterrupt: as `drive`.
        """
        drive(
            self,
            self.config.steps,
            resolved=resolved,
            may_differ={*MAY_DIFFER, *may_differ},
            title=title,
            save_every=self.config.save_every,
            on_step=None if on_step is None else lambda: on_step(self),
        )

    def export(self, tokenizer: Tokenizer) -> Path:
        """Write the model in the public layout."""
        path, model = self.directory / "model", self.state.whole_model()
        self.ranks.on_main(lambda: save_model(model, path, tokenizer=tokenizer, overwrite=True))
        return path

    def whole(self) -> GLM5:
        """The model with all weights on every rank; all call this."""
        if self.ranks.alone:
            return self.model
        with torch.device("meta"):
            full = GLM5(self.model.config, seed=None)
        full.load_state_dict({n: self.ranks.whole(t) for n, t in self.state.weights().items()}, assign=True)
        return full


SHOWN = (
    *("reward", "reverse_kl", "frac_reward_zero_std", "staleness/mean", "idle/trainer", "entropy"),
    *("completions/mean_length", "grad_norm"),
)


def together(found: Sequence[dict[str, float]]) -> dict[str, float]:
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
