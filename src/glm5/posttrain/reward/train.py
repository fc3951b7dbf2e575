"""`glm5 reward-model` as a function: a reward model learns from preferences or scores, and is exported.

    RUN/config.json      everything that decides the result, which --config reads
    RUN/metrics.jsonl    a line a step, which `glm5 watch` draws
    RUN/checkpoints/     to resume from; whole or not at all
    RUN/model/           trunk, head and tokenizer (`model`)
    RUN/result.json      how often the held-out rows are judged rightly, before and after

Loss of a pair (Bradley and Terry): -log sigmoid(v(chosen) - v(rejected)), with a small term that keeps the two values'
sum near 0; of a point: cross-entropy of sigmoid(v) against the score. Sums, divided once by the batch, so that the
gradient does not depend on micro-batches. Which rows a step reads is a function of its number; on several ranks, each
with the whole model, they share these rows out and add their gradients up. Indexers, MTP block and the language model's
head rest. The report gives no detail: rates, steps and the rest are our defaults. Read next: `model`, `data`,
`glm5.train.drive`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from glm5.data.mixing import order_of
from glm5.model.config import ModelConfig
from glm5.model.weights import load_model
from glm5.parallel.mesh import Mesh
from glm5.posttrain.reward.data import Example, Kind, digest, read_examples
from glm5.posttrain.reward.model import RewardModel
from glm5.posttrain.update import freeze_indexers
from glm5.text.tokenizer import Tokenizer, load_tokenizer
from glm5.train.checkpoint import CheckpointStore
from glm5.train.drive import Asked, drive
from glm5.train.optim import MuonSplit, ParamRole, clip_grad_norm, first_nonfinite, parameter_roles
from glm5.train.prepare import Say
from glm5.train.random_state import seed_random_state
from glm5.train.ranks import Ranks
from glm5.train.schedule import LearningRate
from glm5.train.together import (
    MESH_MAY_DIFFER,
    ProcessConfig,
    check_weights,
    claimed,
    keep_weights,
    settled,
    together,
)
from glm5.utils.config_io import to_dict
from glm5.utils.errors import CheckpointError, ConfigError, DataError, NumericalError
from glm5.utils.files import read_json, write_json
from glm5.utils.runlog import CONFIG, refuse_changes

# What a resumed run may change: where things lie, how much is measured and how often, how fast things are done.
MAY_DIFFER = {"run", "checkpoint", "held_out", "eval_every", "save_every", "keep", "dry_run", *MESH_MAY_DIFFER}
CALIBRATED_ON = 512  # rows whose values give a pairwise model its centre and scale


@dataclass(frozen=True)
class RewardModelConfig(ProcessConfig):
    """Train an outcome reward model."""

    checkpoint: str = ""
    """The model to begin with: a directory in the public layout, with its tokenizer."""
    data: tuple[str, ...] = ()
    """JSONL files: rows of prompt, chosen, rejected; or, with --kind pointwise, of prompt, response, score."""
    held_out: tuple[str, ...] = ()
    """JSONL files that are only measured, before and after."""
    run: str = "runs/reward-model"
    """Directory of the run. An interrupted run goes on when the same command is given again."""
    kind: Kind = "pairwise"
    """What rows say: which of two answers is better, or how good one is."""
    score_range: tuple[float, float] = (0.0, 1.0)
    """Lowest and highest score of pointwise rows."""
    seq_len: int = 4096
    """Tokens that an answer may have with its prompt; longer rows are refused."""
    head_only: bool = False
    """Leave the trunk as it is, and train the head alone."""
    steps: int = 200
    """Updates in all."""
    batch: int = 32
    """Rows in a step."""
    micro_batch: int = 4
    """Rows that go through the model at once."""
    lr: LearningRate = field(default_factory=lambda: LearningRate(peak=1e-4, final=1e-5, warmup_steps=10))
    """Learning rate, of Muon and AdamW alike."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    clip: float = 1.0
    """Largest global gradient norm."""
    centring: float = 0.01
    """Weight of the square of the two values' sum, which pairs alone leave undetermined."""
    seed: int = 0
    """Of the rows' order and the head's first weights."""
    eval_every: int = 50
    """Steps between measurements of the held-out rows, which are also measured before and after; 0 is never between."""
    save_every: int = 50
    """Steps between checkpoints; one is also written at the end."""
    keep: int = 2
    """Checkpoints kept."""
    dry_run: bool = False
    """Read and check the rows, print what training would be, and keep nothing."""

    def __post_init__(self) -> None:
        super().__post_init__()
        mesh = Mesh.parse(self.mesh)
        if mesh != Mesh(dp=mesh.dp):
            raise ConfigError("mesh", self.mesh, "may have dp alone: each rank holds the whole model")
        for name in ("seq_len", "steps", "batch", "micro_batch", "save_every", "keep"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "must be at least 1")
        for name in ("weight_decay", "clip", "centring", "eval_every"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(name, getattr(self, name), "must be a finite number of at least 0")


@dataclass(frozen=True)
class Trained:
    """What came of it. held_out: figures "before" and "after"; empty where nothing was measured."""

    run: Path
    model: Path
    steps: int
    held_out: dict[str, dict[str, float]]


def resolve(config: RewardModelConfig) -> RewardModelConfig:
    """The configuration with the device and the mesh that it will have here.

    Raises:
        UserError: the checkpoint cannot be used, or there is no data.
    """
    if not config.checkpoint:
        raise ConfigError("checkpoint", "", "must name the model's directory: glm5 reward-model CHECKPOINT --data FILE")
    if not config.data:
        raise ConfigError("data", (), "must name at least one JSONL file: --data FILE ...")
    path = Path(config.checkpoint)
    if (path / "model" / "config.json").is_file():
        raise CheckpointError(f"{path} is a run, not a model", f"Give its model, {path / 'model'}")
    most = ModelConfig.load(path).max_position_embeddings
    if config.seq_len > most:
        raise ConfigError("seq_len", config.seq_len, f"must be at most max_position_embeddings={most}")
    return settled(config)


def read_all(config: RewardModelConfig, tokenizer: Tokenizer) -> tuple[list[Example], list[Example]]:
    """The rows to learn from, and those to measure. Errors as `read_examples`."""
    train, held = (
        [e for p in paths for e in read_examples(p, config.kind, tokenizer, config.seq_len, config.score_range)]
        for paths in (config.data, config.held_out)
    )
    return train, held


# ---------------------------------------------------------------------------------------------------- losses
def pair_loss(chosen_N: Tensor, rejected_N: Tensor, centring: float) -> Tensor:
    """Sum over pairs of -log sigmoid(v(chosen) - v(rejected)) + centring · (v(chosen) + v(rejected))²."""
    return F.softplus(rejected_N - chosen_N).sum() + centring * (chosen_N + rejected_N).square().sum()


def point_loss(values_N: Tensor, score_N: Tensor) -> Tensor:
    """Sum over answers of the cross-entropy of sigmoid(v) against a score in [0, 1]."""
    return F.binary_cross_entropy_with_logits(values_N, score_N, reduction="sum")


def measure(
    model: RewardModel, examples: Sequence[Example], at_once: int = 8, ranks: Ranks | None = None
) -> dict[str, float]:
    """How well rows are judged: "accuracy" and "loss" of pairs; "error" (mean, absolute), "loss", and "accuracy" of
    points: the share of any two with different scores that are put in their order."""
    texts = [text for e in examples for text in e.texts]
    values = values_of(model, texts, at_once, ranks or Ranks())
    if model.kind == "pairwise":
        chosen, rejected = values[0::2], values[1::2]
        loss = float(pair_loss(chosen, rejected, 0.0)) / len(examples)
        return {"accuracy": float((chosen > rejected).double().mean()), "loss": loss}
    score = torch.tensor([e.score for e in examples], dtype=torch.float64)
    differ = score[:, None] > score[None, :]
    ordered = (values[:, None] > values[None, :])[differ]
    return {
        "accuracy": float(ordered.double().mean()) if len(ordered) else 0.0,
        "error": float((torch.sigmoid(values) - score).abs().mean()),
        "loss": float(point_loss(values, score)) / len(examples),
    }


def values_of(model: RewardModel, texts: Sequence[Sequence[int]], at_once: int, ranks: Ranks) -> Tensor:
    """v of many conversations, fp64 on the CPU, on every rank; each reads its share."""
    found = ranks.dealt(texts, lambda mine: model.all_values(mine, at_once, ranks.beat).tolist())
    return torch.tensor(found, dtype=torch.float64)


# ---------------------------------------------------------------------------------------------------- learning
class RewardTrainer:
    """Training of one reward model on examples.

    Args:
        model: trained in place, in fp32. held: examples that are only measured. directory: of the run.
        ranks: that train together, data ranks all, each with the same whole model and examples.
    """

    def __init__(
        self,
        config: RewardModelConfig,
        model: RewardModel,
        examples: Sequence[Example],
        held: Sequence[Example],
        directory: Path,
        ranks: Ranks | None = None,
    ) -> None:
        self.config, self.model, self.directory = config, model.train(), directory
        self.examples, self.held, self.data = examples, held, digest(examples)
        freeze_indexers(model.trunk)
        drafting = f"model.layers.{model.trunk.config.num_hidden_layers}."
        for name, p in model.trunk.named_parameters():  # a head that is tied to the embedding has its name
            if config.head_only or name == "lm_head.weight" or name.startswith(drafting):
                p.requires_grad_(False)
        weight, bias = model.head.parameters()
        self.optimizer = MuonSplit(
            [
                *parameter_roles(model.trunk, model.trunk.config),
                ParamRole("reward_head.weight", weight, "adamw", "head"),
                ParamRole("reward_head.bias", bias, "adamw", "vectors", decay=False),
            ],
            config.lr.at(0, config.steps),
            weight_decay=config.weight_decay,
        )
        self.store = CheckpointStore(directory / "checkpoints", config.keep)
        self.ranks = ranks or Ranks()
        self.finished_steps = 0
        self._order = lru_cache(maxsize=2)(lambda epoch: order_of("rows", len(examples), config.seed, epoch))

    def rows(self, step: int) -> list[Example]:
        """Those of a step: a pass over all, shuffled anew, follows another."""
        count, found = len(self.examples), []
        for number in range(step * self.config.batch, (step + 1) * self.config.batch):
            epoch, place = divmod(number, count)
            found.append(self.examples[int(self._order(epoch)[place])])
        return found

    def advance(self, stop: Asked) -> dict[str, Any]:
        """One update; its figures, and those of the held-out rows where it is their turn.

        Raises:
            NumericalError: the loss or a gradient is not finite; the weights are those of before.
        """
        config, ranks, batch = self.config, self.ranks, self.rows(self.finished_steps)
        ranks.at(self.finished_steps, "0 rows")
        first_of_mine, ways = (0, 1) if ranks.world is None else (ranks.world.place("dp"), ranks.count("dp"))
        mine = batch[first_of_mine::ways]
        self.optimizer.set_lr(lr := config.lr.at(self.finished_steps, config.steps))
        self.optimizer.zero_grad(set_to_none=True)
        total, right, margin = 0.0, 0.0, 0.0
        for first in range(0, len(mine), config.micro_batch):
            part = mine[first : first + config.micro_batch]
            values = self.model.values([text for e in part for text in e.texts])
            if config.kind == "pairwise":
                loss = pair_loss(values[0::2], values[1::2], config.centring)
                gap = (values[0::2] - values[1::2]).detach()
                right, margin = right + float((gap > 0).sum()), margin + float(gap.sum())
            else:
                loss = point_loss(values, values.new_tensor([e.score for e in part]))
            (loss / len(batch)).backward()
            total += float(loss.detach())
            ranks.beat()
        sums = torch.tensor([total, right, margin], dtype=torch.float64, device=ranks.device)
        total, right, margin = ranks.sum(sums).tolist()
        if not math.isfinite(total):
            self.optimizer.zero_grad(set_to_none=True)
            raise NumericalError(f"the loss of step {self.finished_steps} is {total}")
        self._add_up()
        norm = clip_grad_norm(list(self.model.named_parameters()), config.clip or math.inf)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.finished_steps += 1
        pairs = {"accuracy": right / len(batch), "margin": margin / len(batch)} if config.kind == "pairwise" else {}
        done, every = self.finished_steps, config.eval_every
        held = self.measured() if done == config.steps or (every and done % every == 0) else {}
        return {"loss": total / len(batch), **pairs, "grad_norm": norm, "lr": lr, **held}

    def _add_up(self) -> None:
        """Gradients over all ranks: a rank without rows has none, and a parameter that no rank has one of gets none."""
        if self.ranks.alone:
            return
        trained = [p for p in self.model.parameters() if p.requires_grad]
        there = torch.tensor([p.grad is not None for p in trained], dtype=torch.int32, device=self.ranks.device)
        for parameter, moved in zip(trained, self.ranks.largest(there).tolist(), strict=True):
            if moved:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                self.ranks.sum(parameter.grad)

    def measured(self) -> dict[str, float]:
        """Figures of the held-out rows, kept by step in a file, so that a resumed run knows how it began."""
        if not self.held:
            return {}
        path = self.directory / "held-out.json"
        found = measure(self.model, self.held, ranks=self.ranks)

        def keep() -> None:
            kept = read_json(path) if path.exists() and self.finished_steps else {}
            write_json(path, {**kept, str(self.finished_steps): found})

        self.ranks.on_main(keep)
        return {f"held_out/{name}": value for name, value in found.items()}

    # ------------------------------------------------------------------ what `drive` asks besides
    def opening(self) -> dict[str, Any]:
        """Held-out figures before the first step."""
        return self.measured()

    def save(self, store: CheckpointStore | None = None) -> Path:
        """Write a checkpoint of everything that the next step depends on; the main rank does, as all have the same."""
        tensors = {"model": dict(self.model.state_dict()), "optimizer": self.optimizer.named_state()}
        chosen = store or self.store
        return self.ranks.from_main(lambda: chosen.save(self.finished_steps, tensors, {"data": self.data}))

    def resume(self) -> list[str]:
        """Go on from the newest whole checkpoint, or begin. Returns warnings about damaged ones.

        Raises:
            DataError: the rows are not those of the run. CheckpointError: it holds another model, or ranks see other
                directories.
        """
        seed_random_state(self.config.seed)
        found = self.ranks.together(lambda: self.store.load_newest(self.model.trunk.device))
        seen = "no checkpoint" if found is None else f"the one of step {found.step}"
        main = self.ranks.from_main(lambda: seen)
        if other := self.ranks.first(None if seen == main else f"sees {seen}, and rank 0 {main}"):
            raise CheckpointError(other, "Let all hosts see one and the same --run")
        if found is None:
            return []
        if found.state["data"] != self.data:
            raise DataError("the rows are not those that this run began with", "Bring them back, or use another --run")
        try:
            self.model.load_state_dict(found.tensors["model"])
        except RuntimeError as e:
            what = f"{found.path} holds another model: {' '.join(str(e).split())[:300]}"
            raise CheckpointError(what, "Resume with the model it was saved with, or use another --run") from None
        self.optimizer.load_named_state(found.tensors.get("optimizer", {}))
        self.finished_steps = found.step
        return list(found.warnings)

    def another_store(self, directory: Path) -> CheckpointStore:
        """For one checkpoint elsewhere."""
        return CheckpointStore(directory, 1)

    def bad_weight(self) -> str | None:
        """The first parameter that is not finite."""
        bad = first_nonfinite(self.model.named_parameters())
        return bad and f"parameter {bad}"

    def shown(self, metrics: dict[str, Any]) -> dict[str, float]:
        """What a person who waits sees."""
        return {n: metrics[n] for n in ("loss", "accuracy", "held_out/accuracy") if n in metrics}

    def summary(self) -> dict[str, Any]:
        """The closing figures of a run."""
        return {"rows": self.finished_steps * self.config.batch}

    # ------------------------------------------------------------------ all of it
    def run(self, on_step: Callable[[], None] | None = None) -> dict[str, dict[str, float]]:
        """Train for `config.steps`, from where the directory's newest checkpoint ended. Returns the held-out figures
        "before" and "after", where there are some.

        Raises:
            NumericalError, KeyboardInterrupt: as `drive`.
        """
        resolved = replace(self.config, dry_run=False)
        save_every = self.config.save_every
        drive(
            self,
            self.config.steps,
            resolved=resolved,
            may_differ=MAY_DIFFER,
            title="reward-model",
            save_every=save_every,
            on_step=on_step,
        )
        path = self.directory / "held-out.json"
        if not self.held or not path.exists():
            return {}
        found = read_json(path)
        return {"before": found.get("0", {}), "after": found[str(max(map(int, found)))]}

    def calibrate(self) -> None:
        """Give a pairwise model the centre and scale of its values on rows it learned from."""
        if self.config.kind == "pairwise":
            texts = [text for e in self.examples[:CALIBRATED_ON] for text in e.texts]
            values = values_of(self.model, texts, 2 * self.config.micro_batch, self.ranks)
            self.model.centre, self.model.scale = float(values.mean()), max(float(values.std()), 1e-3)


def describe(config: RewardModelConfig, train: Sequence[Example], held: Sequence[Example]) -> list[str]:
    """What there is to learn from."""
    longest = max(len(text) for e in [*train, *held] for text in e.texts)
    passes = config.steps * config.batch / len(train)
    rows = f"{len(train):,} {config.kind} rows, {passes:.3g} passes; {len(held):,} held out"
    return [f"data      {rows}; the longest answer has {longest:,} tokens with its prompt"]


def train_reward_model(config: RewardModelConfig, say: Say = print) -> Trained:
    """Train, calibrate and export; goes on where an earlier start of the same run ended.

    Raises:
        UserError: see `resolve`, `read_examples`, `RewardTrainer.resume` and `RewardTrainer.run`.
    """
    config = resolve(config)
    run, kept = Path(config.run), replace(config, dry_run=False)
    with together(config, run, ModelConfig.load(config.checkpoint)) as world:
        ranks = Ranks(world)
        with claimed(run, ".reward.lock", ranks):
            ranks.on_main(lambda: begin(kept))
            tokenizer = load_tokenizer(config.checkpoint)
            train, held = ranks.together(lambda: read_all(config, tokenizer))
            for line in describe(config, train, held):
                say(line)
            device = config.device if world is None else str(world.device)
            trunk = load_model(config.checkpoint, device=device, dtype="float32")
            check_weights(trunk, world)
            model = RewardModel(trunk, config.kind, seed=config.seed)
            trainer = RewardTrainer(config, model, train, held, run, ranks)
            held_out = trainer.run()
            trainer.calibrate()
            ranks.on_main(lambda: model.save(run / "model", tokenizer))
            result = {"steps": trainer.finished_steps, "held_out": held_out}
            ranks.on_main(lambda: write_json(run / "result.json", result))
    return Trained(run, run / "model", trainer.finished_steps, held_out)


def begin(config: RewardModelConfig) -> None:
    """Refuse, before anything is read, to go on with another configuration or other weights."""
    run = Path(config.run)
    begun = (run / "checkpoints").exists()
    if begun:
        refuse_changes(read_json(run / CONFIG), to_dict(config), MAY_DIFFER)
    keep_weights(config.checkpoint, run / "weights.json", begun=begun)
