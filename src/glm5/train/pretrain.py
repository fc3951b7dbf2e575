"""`glm5 pretrain` as a function: text, tokenizer, dense training, a checkpoint in the public layout, a measurement.

    RUN/config.json    everything that decides the result, which --config reads
    RUN/data/          tokenizer and token shards (`prepare`)
    RUN/checkpoints/   to resume from (`loop`)
    RUN/model/         the result: config.json, safetensors, tokenizer
    RUN/result.json    held-out bits per byte, and what it took

Source: report sections 2.1 and 2.2. Read next: `prepare`, `loop`, then `sparsify`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from glm5.data.loader import Loader
from glm5.model.config import ModelConfig
from glm5.model.glm5 import GLM5
from glm5.model.presets import nano
from glm5.parallel.mesh import Mesh, World
from glm5.text.tokenizer import Tokenizer, load_tokenizer
from glm5.train.config import TrainConfig
from glm5.train.groups import rows_for
from glm5.train.loop import MAY_DIFFER, Trainer
from glm5.train.prepare import Prepared, Say, TextConfig
from glm5.train.ranks import Ranks
from glm5.train.rows import check_stage
from glm5.train.schedule import BatchWarmup, LearningRate
from glm5.train.together import (
    MESH_MAY_DIFFER,
    MeshConfig,
    begin_with,
    check_weights,
    claimed,
    keep_weights,
    measured,
    prepare_once,
    settled,
    together,
)
from glm5.utils.config_io import differences, to_dict
from glm5.utils.errors import ConfigError
from glm5.utils.files import read_json, write_json
from glm5.utils.runlog import CONFIG, refuse_changes

# What a resumed run may change, beside its stage's `loop.MAY_DIFFER`: where things lie, and how much is measured.
ALSO_MAY_DIFFER = MESH_MAY_DIFFER | {"run", "corpus", "tokenizer", "checkpoint", "held_out_rows", "dry_run"}
# Fields of a model that exists which can be changed: none is a tensor's shape.
LOOSE = {"index_topk", "max_position_embeddings", "rope_theta", "initializer_range", "dtype", "glm5_attention"}


@dataclass(frozen=True)
class PretrainConfig(MeshConfig, TextConfig):
    """Train a model with dense attention, from text."""

    run: str = "runs/pretrain"
    """Directory of the run. An interrupted run goes on when the same command is given again."""
    tokenizer: str = ""
    """A tokenizer.json or the directory that holds it; by default one is trained on the corpus."""
    vocab_size: int | None = None
    """Ids of the tokenizer that is trained; by default the model's vocab_size, which always follows the tokenizer."""
    checkpoint: str = ""
    """A model to train further: a directory in the public layout, with its tokenizer. --from CHECKPOINT also takes its
    shape."""
    init_seed: int = 0
    """Of the initial weights."""
    held_out_rows: int | None = None
    """Measure the first so many held-out rows only."""
    dry_run: bool = False
    """Print parameters, tokens, steps and an estimate of the memory, and write nothing."""
    model: ModelConfig = field(default_factory=nano)
    """Shape of the model; --preset or --model FILE chooses it."""
    train: TrainConfig = field(default_factory=lambda: nano_training())

    def __post_init__(self) -> None:
        MeshConfig.__post_init__(self)
        TextConfig.__post_init__(self)
        if self.train.stage != "pretrain":
            raise ConfigError("train.stage", self.train.stage, "must be 'pretrain'; `glm5 sparsify` runs the others")
        if self.tokenizer and self.vocab_size is not None:
            raise ConfigError("vocab_size", self.vocab_size, "contradicts --tokenizer, whose vocabulary is fixed")
        if self.checkpoint and self.vocab_size is not None:
            raise ConfigError("vocab_size", self.vocab_size, "contradicts the checkpoint, whose vocabulary is fixed")
        # `check_stage` says these too, but only once the corpus is tokenized.
        if self.train.mtp_depths and not self.model.num_nextn_predict_layers:
            raise ConfigError("train.mtp_depths", self.train.mtp_depths, "this model has no MTP block: give 0")
        mesh = Mesh.parse(self.mesh)
        mesh.check_model(self.model)
        self.check_stages(self.model, mesh)
        self.check_stage_batch("train", self.train)
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

    A vocabulary that is not ours to choose is padded to a multiple of 64 rows, as GLM-5's is; that of a model to train
    further stays.

    Raises:
        ConfigError: the shape or the tokenizer are not those of the model to train further, or it attends sparsely.
    """
    config = settled(config)
    if config.checkpoint:
        return _further(config)
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


def _further(config: PretrainConfig) -> tuple[PretrainConfig, Tokenizer]:
    """`resolve`, of a model that exists."""
    there = ModelConfig.load(config.checkpoint)
    if there.sparse:
        rule = "attends sparsely, and dense training would leave its indexers behind: train it with `glm5 midtrain`"
        raise ConfigError("checkpoint", config.checkpoint, rule)
    for name, (has, wanted) in differences(there.to_dict(), config.model.to_dict()).items():
        if name.rpartition(".")[2] not in LOOSE and not name.startswith("rope_"):
            raise ConfigError(f"model.{name}", wanted, f"the model in {config.checkpoint} has {has!r}, and keeps it")
    tokenizer = load_tokenizer(config.checkpoint)
    if config.tokenizer and load_tokenizer(config.tokenizer).fingerprint != tokenizer.fingerprint:
        raise ConfigError("tokenizer", config.tokenizer, f"is not that of {config.checkpoint}: leave it out")
    return replace(
        config, model=config.model.replace(extra={**config.model.extra, "glm5_attention": "dense"})
    ), tokenizer


def pretrain(config: PretrainConfig, say: Say = print, checked: Callable[[], None] = lambda: None) -> Pretrained:
    """Train, export and measure; goes on where an earlier start of the same run ended.

    Args:
        say: receives lines for the user; progress goes to standard error.
        checked: called before the first step, once nothing is left that could be wrong with what was asked for.

    Raises:
        UserError: see `prepare`, `Trainer` and `Trainer.run`.
    """
    config, given = resolve(config)
    run = Path(config.run)
    with together(config, run, config.model) as world:
        ranks = Ranks(world)
        with claimed(run, ".pretrain.lock", ranks):
            begun = ranks.from_main((run / "checkpoints").exists)
            ranks.on_main(lambda: _check_begun(config, run, begun))
            data = prepare_once(
                config,
                run / "data",
                given,
                ranks,
                say,
                ahead=1 + config.train.mtp_depths,
                vocab_size=config.model.vocab_size,
                begun=begun,
            )
            data = replace(data, training=rows_for(config.train, data.training))
            check_stage(config.train, config.model, data.training)
            checked()
            trainer = train(config, data, run, world)
            if ranks.main:
                say(f"export    {run / 'model'}")
            trainer.export(run / "model", tokenizer=data.tokenizer)
            result = measure(config, trainer, data)
            ranks.on_main(lambda: write_json(run / "result.json", result))
    bits = result["held_out"]["bits_per_byte"] if result["held_out"] else None
    return Pretrained(run, run / "model", result["parameters"], trainer.finished_steps, trainer.tokens, bits, result)


def _check_begun(config: PretrainConfig, run: Path, begun: bool) -> None:
    """Refuse another configuration or other weights than the run began with, before its text is read."""
    if begun and (run / CONFIG).exists():
        refuse_changes(read_json(run / CONFIG), to_dict(replace(config, dry_run=False)), MAY_DIFFER | ALSO_MAY_DIFFER)
    if config.checkpoint:
        keep_weights(config.checkpoint, run / "weights.json", begun=begun)


def train(config: PretrainConfig, data: Prepared, run: Path, world: World | None = None) -> Trainer:
    """The training itself, in `run`."""
    device = config.device if world is None else world.device
    if config.checkpoint:
        model = begin_with(config.checkpoint, device)
        check_weights(model, world)
        model.config = config.model
    else:
        model = GLM5(config.model, seed=config.init_seed).to(device)
    loader = Loader(data.training, config.train.seed)
    how = (config.pipeline, config.gather_once, config.prefetch, config.by_heads)
    trainer = Trainer(config.train, model, loader, run, world, *how)
    trainer.run(resolved=replace(config, dry_run=False), may_differ=ALSO_MAY_DIFFER, title="pretrain")
    return trainer


def measure(config: PretrainConfig, trainer: Trainer, data: Prepared) -> dict[str, Any]:
    """The run's closing figures, as JSON values."""
    found = None
    if data.held_out is not None:
        sums = measured(trainer, data.held_out, config.held_out_rows, sparse=False)
        found = {"bits_per_byte": sums.bits_per_byte, "loss": sums.loss, "tokens": sums.tokens, "bytes": sums.bytes}
    return {
        "parameters": trainer.parameters,
        "steps": trainer.finished_steps,
        "tokens": trainer.tokens,
        "epochs": trainer.loader.epoch(trainer.samples),
        "held_out": found,
        "corpus": data.counts,
    }
