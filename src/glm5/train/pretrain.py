"""`glm5 pretrain` as a function: text, tokenizer, dense training, a checkpoint in the public layout, a measurement.

    RUN/config.json    everything that decides the result, which --config reads
    RUN/data/          tokenizer and token shards (`prepare`)
    RUN/checkpoints/   to resume from (`loop`)
    RUN/model/         the result: config.json, safetensors, tokenizer
    RUN/result.json    held-out bits per byte, and what it took

Source: report sections 2.1 and 2.2. Read next: `prepare`, `loop`, then `sparsify`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from glm5.data.loader import Loader, TokenDataset
from glm5.model.config import ModelConfig
from glm5.model.glm5 import GLM5
from glm5.model.presets import nano
from glm5.parallel.mesh import Mesh, World, launched, open_world
from glm5.parallel.watch import check_alike, watched
from glm5.text.tokenizer import Tokenizer, load_tokenizer
from glm5.train.config import TrainConfig
from glm5.train.evaluate import HeldOut, held_out
from glm5.train.loop import Trainer
from glm5.train.prepare import Prepared, Say, TextConfig, opened, prepare
from glm5.train.ranks import PipelineOptions, Ranks, check_batch
from glm5.train.schedule import BatchWarmup, LearningRate
from glm5.utils.config_io import to_dict
from glm5.utils.devices import resolve_device
from glm5.utils.errors import ConfigError
from glm5.utils.files import exclusive, require_writable, write_json

# What a resumed run may change, beside its stage's `loop.MAY_DIFFER`: where things lie, and how much is measured.
ALSO_MAY_DIFFER = {
    "run",
    "corpus",
    "tokenizer",
    "held_out_rows",
    "dry_run",
    "mesh",
    "gather_once",
    "restarts",
    "hang_seconds",
}
ALSO_MAY_DIFFER |= {"schedule", "layout", "stages_per_rank", "reduce_every", "offload", "recompute"}


@dataclass(frozen=True)
class PretrainConfig(TextConfig):
    """Train a model with dense attention, from text."""

    run: str = "runs/pretrain"
    """Directory of the run. An interrupted run goes on when the same command is given again."""
    tokenizer: str = ""
    """A tokenizer.json or the directory that holds it; by default one is trained on the corpus."""
    vocab_size: int | None = None
    """Ids of the tokenizer that is trained; by default the model's vocab_size, which always follows the tokenizer."""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto is a GPU where there is one."""
    init_seed: int = 0
    """Of the initial weights."""
    mesh: str = ""
    """How processes that torchrun started divide the work, like dp=2,ep=2,tp=2 (axes: dp, pp, cp, tp; ep and shard fold
    on dp x cp); by default all of them divide the rows."""
    gather_once: bool = False
    """On several processes: hold all parameters from a step's first micro-batch to its last, and reduce gradients after
    the last; faster, for the memory of whole parameters and fp32 gradients."""
    pipeline: PipelineOptions = field(default_factory=PipelineOptions)
    """How the stages run, where the mesh has pp."""
    restarts: int = 0
    """On processes that this command starts itself: how often all are started again, from the newest checkpoint, after
    one has failed."""
    hang_seconds: float = 300.0
    """On several processes: how long a step may stand still before stack traces of all are written to RUN/ranks."""
    deterministic: bool = False
    """Only operators whose result is the same at every run, where torch has them; slower on a GPU."""
    held_out_rows: int | None = None
    """Measure the first so many held-out rows only."""
    dry_run: bool = False
    """Print parameters, tokens, steps and an estimate of the memory, and write nothing."""
    model: ModelConfig = field(default_factory=nano)
    """Shape of the model; --preset or --model FILE chooses it."""
    train: TrainConfig = field(default_factory=lambda: nano_training())

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.train.stage != "pretrain":
            raise ConfigError("train.stage", self.train.stage, "must be 'pretrain'; `glm5 sparsify` runs the others")
        if self.tokenizer and self.vocab_size is not None:
            raise ConfigError("vocab_size", self.vocab_size, "contradicts --tokenizer, whose vocabulary is fixed")
        # `check_stage` says these too, but only once the corpus is tokenized.
        if self.train.mtp_depths and not self.model.num_nextn_predict_layers:
            raise ConfigError("train.mtp_depths", self.train.mtp_depths, "this model has no MTP block: give 0")
        mesh = Mesh.parse(self.mesh)
        mesh.check_model(self.model)
        check_batch(self.train, mesh)
        if self.restarts < 0:
            raise ConfigError("restarts", self.restarts, "must be at least 0")
        if not 0 < self.hang_seconds < float("inf"):
            raise ConfigError("hang_seconds", self.hang_seconds, "must be a positive number")
        longest = self.model.max_position_embeddings
        if self.seq_len > longest:
            raise ConfigError("seq_len", self.seq_len, f"must be at most max_position_embeddings={longest}")


def nano_training() -> TrainConfig:
    """Eight rows a step for 600 steps: minutes on two cores. Muon bears a high rate at this width."""
    return TrainConfig(
        steps=600,
        batch=BatchWarmup(8, 8, 0),
        lr=LearningRate(peak=0.02, final=0.001, warmup_steps=20),
        mtp_share=0.25,
        save_every=100,
    )


def mini_training() -> TrainConfig:
    """For one GPU: 10,000 steps of 32 rows, at the report's ratio of last to highest rate."""
    return TrainConfig(
        steps=10_000,
        batch=BatchWarmup(32, 32, 0),
        micro_batch=4,
        lr=LearningRate(peak=2e-3, final=4e-4, warmup_steps=200),
        save_every=500,
    )


def glm5_training() -> TrainConfig:
    """The report's learning rate, and the late values of GLM-4.5; tokens and batch are a matter of the cluster."""
    return TrainConfig(
        steps=100_000,
        batch=BatchWarmup(1024, 1024, 0),
        micro_batch=1,
        lr=LearningRate(warmup_steps=2000),
        late_tokens=15_000_000_000_000,
        late_mtp_weight=0.1,
        late_bias_rate=0.0,
    )


@dataclass(frozen=True)
class Pretrained:
    """What came of it. bits_per_byte is of the held-out text, None where nothing was held out."""

    run: Path
    model: Path
    parameters: int
    steps: int
    tokens: int
    bits_per_byte: float | None
    result: dict[str, Any]


def resolve(config: PretrainConfig) -> tuple[PretrainConfig, Tokenizer | None]:
    """The configuration with its device and the vocabulary of the tokenizer, and the tokenizer if one is named.

    A vocabulary that is not ours to choose is padded to a multiple of 64 rows, as GLM-5's is.
    """
    config = replace(config, device=resolve_device(config.device))
    model = config.model.replace(extra={**config.model.extra, "glm5_attention": "dense"})
    if not config.tokenizer:
        # A tokenizer that is trained here begins with its special tokens, the end of text first.
        vocab_size = config.vocab_size or model.vocab_size
        model = model.replace(vocab_size=vocab_size, eos_token_id=(0,), pad_token_id=0)
        return replace(config, model=model), None
    tokenizer = load_tokenizer(config.tokenizer)
    end = tokenizer.end_of_text_id
    vocab_size = -(-tokenizer.vocab_size // 64) * 64
    return replace(config, model=model.replace(vocab_size=vocab_size, eos_token_id=(end,), pad_token_id=end)), tokenizer


def pretrain(config: PretrainConfig, say: Say = print) -> Pretrained:
    """Train, export and measure; goes on where an earlier start of the same run ended.

    Args:
        say: receives lines for the user; progress goes to standard error.

    Raises:
        UserError: see `prepare`, `Trainer` and `Trainer.run`.
    """
    config, given = resolve(config)
    with together(config) as world:
        ranks = Ranks(world)
        run = Path(config.run)
        with ExitStack() as held:
            ranks.on_main(lambda: held.enter_context(exclusive(require_writable(run) / ".pretrain.lock")))
            data = prepare_once(config, run, given, ranks, say)
            trainer = train(config, data, run, world)
            if ranks.main:
                say(f"export    {run / 'model'}")
            trainer.export(run / "model", tokenizer=data.tokenizer)
            result = measure(config, trainer, data)
            ranks.on_main(lambda: write_json(run / "result.json", result))
    bits = result["held_out"]["bits_per_byte"] if result["held_out"] else None
    return Pretrained(run, run / "model", result["parameters"], trainer.finished_steps, trainer.tokens, bits, result)


@contextmanager
def together(config: PretrainConfig) -> Iterator[World | None]:
    """The processes that train together: those that torchrun started, or None for this one alone.

    Raises:
        ConfigError: the mesh needs another number of them.
        ParallelError: they did not find each other, or don't run the same.
    """
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    mesh = Mesh.parse(config.mesh)
    if not launched() and mesh.size == 1:
        yield None
        return
    if not config.mesh and launched():
        mesh = Mesh(dp=int(os.environ["WORLD_SIZE"]))
    mesh.check_model(config.model)
    with open_world(mesh, config.device.partition(":")[0]) as world:
        check_alike(world, to_dict(config))
        with watched(world, Path(config.run) / "ranks", config.hang_seconds):
            yield world


def prepare_once(config: PretrainConfig, run: Path, given: Tokenizer | None, ranks: Ranks, say: Say) -> Prepared:
    """The run's data: made by the main rank, opened by all."""
    ahead = 1 + config.train.mtp_depths

    def make() -> Prepared:
        return prepare(
            config,
            run / "data",
            ahead=ahead,
            vocab_size=config.model.vocab_size,
            tokenizer=given,
            begun=(run / "checkpoints").exists(),
            say=say,
        )

    made = ranks.on_main(make)
    return ranks.together(lambda: made or opened(config, run / "data", ahead=ahead))


def train(config: PretrainConfig, data: Prepared, run: Path, world: World | None = None) -> Trainer:
    """The training itself, in `run`."""
    model = GLM5(config.model, seed=config.init_seed).to(config.device if world is None else world.device)
    loader = Loader(data.training, config.train.seed)
    trainer = Trainer(config.train, model, loader, run, world, config.pipeline, config.gather_once)
    trainer.run(resolved=replace(config, dry_run=False), may_differ=ALSO_MAY_DIFFER, title="pretrain")
    return trainer


def measure(config: PretrainConfig, trainer: Trainer, data: Prepared) -> dict[str, Any]:
    """The run's closing figures, as JSON values."""
    found = None
    if data.held_out is not None:
        sums = _measured(config, trainer, data.held_out)
        found = {"bits_per_byte": sums.bits_per_byte, "loss": sums.loss, "tokens": sums.tokens, "bytes": sums.bytes}
    return {
        "parameters": trainer.parameters,
        "steps": trainer.finished_steps,
        "tokens": trainer.tokens,
        "epochs": trainer.loader.epoch(trainer.samples),
        "held_out": found,
        "corpus": data.counts,
    }


def _measured(config: PretrainConfig, trainer: Trainer, data: TokenDataset) -> HeldOut:
    if trainer.pipeline is None:
        return held_out(trainer.model, data, sparse=False, max_rows=config.held_out_rows, ranks=trainer.ranks)
    # A pipeline's stages have no forward pass of their own: the main rank measures the whole model.
    model, world = trainer.fp32_model(), trainer.ranks.world
    assert world is not None

    def alone() -> HeldOut:
        here = model.to(world.device)
        return held_out(here, data, sparse=False, max_rows=config.held_out_rows)

    sums: HeldOut = world.gather_objects(trainer.ranks.on_main(alone))[0]
    return sums
