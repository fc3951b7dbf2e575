"""`glm5 midtrain` as a function: a model learns longer contexts in stages, each of rows and a mixture of its own.

    RUN/config.json      what was asked for, which --config reads
    RUN/data/NAME/       tokens of each corpus, made once for all stages (`prepare`)
    RUN/1-32k/ ...       each stage: metrics and checkpoints; a resumable run
    RUN/model/           the result in the public layout
    RUN/result.json      held-out bits per byte of each corpus after each stage

One model and one optimizer go through all stages: momenta stay. The report (section 2.3) extends from 4K to 32K with 1T
tokens, to 128K with 500B, to 200K with 50B, the rate falling on a line from 4e-5 to 1e-5; what it mixes, and at which
ratios, it does not say. A model that attends sparsely trains so here, too: every `train.stage` is then "sparse". Read
next: `together`, `loop`, `glm5.data.mixing`; `sparsify`, which follows.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from glm5.data.loader import TokenDataset
from glm5.data.mixing import MixedDataset, MixedLoader, Mixture, Source
from glm5.model.glm5 import GLM5
from glm5.parallel.mesh import World
from glm5.text.tokenizer import Tokenizer, load_tokenizer
from glm5.train.config import TrainConfig
from glm5.train.groups import rows_for
from glm5.train.loop import MAY_DIFFER, Trainer
from glm5.train.prepare import STDLIB, Prepared, Say, TextConfig
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
from glm5.utils.errors import ConfigError
from glm5.utils.files import write_json
from glm5.utils.runlog import keep_config

# What a resumed run may change, beside its stages' `MAY_DIFFER`: where things lie, and how much is measured.
ALSO_MAY_DIFFER = MESH_MAY_DIFFER | {"run", "checkpoint", "held_out_rows"}


@dataclass(frozen=True)
class Stage:
    """One length of context."""

    name: str = "32k"
    """Of its directory, behind its number."""
    seq_len: int = 32_768
    """Tokens that a row predicts."""
    corpora: tuple[str, ...] = (STDLIB,)
    """What it mixes: directories, .jsonl files, text files or stdlib; PATH, or PATH=RATIO for its weight (of rows)."""
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.-]+", self.name):
            raise ConfigError("name", self.name, "must be letters, digits, dots and dashes, for a directory")
        if self.seq_len < 1:
            raise ConfigError("seq_len", self.seq_len, "must be at least 1")
        paths = [source.path for source in self.sources]
        if len(set(paths)) < len(paths):
            raise ConfigError("corpora", self.corpora, "names one twice: give it once, with its ratio")
        Mixture({source.path: source.ratio for source in self.sources})
        if self.train.stage == "warmup":
            raise ConfigError("train.stage", "warmup", "is `glm5 sparsify`'s: give pretrain or sparse")

    @property
    def sources(self) -> list[Source]:
        return [Source.parse(text) for text in self.corpora]


def report_stages() -> tuple[Stage, ...]:
    """The report's lengths and rates. Steps are in the proportion of its tokens; how many they are is ours."""
    ends = ((4e-5, 2.06e-5), (2.06e-5, 1.1e-5), (1.1e-5, 1e-5))
    lengths = (("32k", 32_768, 1220), ("128k", 131_072, 153), ("200k", 202_752, 10))
    return tuple(
        Stage(name, length, (STDLIB,), _stage_training(steps, *rates))
        for (name, length, steps), rates in zip(lengths, ends, strict=True)
    )


def _stage_training(steps: int, peak: float, final: float) -> TrainConfig:
    return TrainConfig(
        steps=steps, batch=BatchWarmup(8, 8, 0), micro_batch=1, lr=LearningRate(peak, final, shape="linear")
    )


@dataclass(frozen=True)
class MidtrainConfig(MeshConfig):
    """Train a model further on longer contexts, in stages."""

    checkpoint: str = ""
    """The model: a directory in the public layout, with its tokenizer."""
    run: str = "runs/midtrain"
    """Directory of the run. An interrupted run goes on when the same command is given again."""
    suffixes: tuple[str, ...] = ()
    """Of directories take only files whose names end so, such as .py .md; by default all that hold text."""
    held_out: float = 0.05
    """Share of the documents that no training sees; 0 holds out none, and nothing is measured."""
    held_out_rows: int | None = None
    """Measure the first so many held-out rows of each corpus only."""
    rope_theta: float | None = None
    """Base of the rotary angles; by default the model's (GLM-4.5 changes 1e4 to 1e6 with the first extension)."""
    stages: tuple[Stage, ...] = field(default_factory=report_stages)
    """The lengths in their order; a file for --config may name any number."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.stages:
            raise ConfigError("stages", (), "must be at least one")
        names = [stage.name for stage in self.stages]
        if len(set(names)) < len(names):
            raise ConfigError("stages", names, "two have one name")
        for i, stage in enumerate(self.stages):
            self.check_stage_batch(f"stages.{i}.train", stage.train)
            stage.train.check_follows(self.stages[0].train, f"stages.{i}.train.")
        for path in self.corpora:  # what is wrong with the text of one is said for all, before anything is read
            self.text(path)

    @property
    def corpora(self) -> list[str]:
        """Of all stages, each once."""
        return list(dict.fromkeys(source.path for stage in self.stages for source in stage.sources))

    def text(self, path: str) -> TextConfig:
        """The text of one corpus, in rows of the shortest length that it is wanted in."""
        lengths = [stage.seq_len for stage in self.stages for source in stage.sources if source.path == path]
        directory = path != STDLIB and not path.endswith(".jsonl")
        return TextConfig(path, self.suffixes if directory else (), min(lengths), self.held_out)


@dataclass(frozen=True)
class Midtrained:
    """What came of it. bits_per_byte: by stage, then by corpus; empty where nothing was held out."""

    run: Path
    model: Path
    tokens: int
    bits_per_byte: dict[str, dict[str, float]]


def midtrain(config: MidtrainConfig, say: Say = print, checked: Callable[[], None] = lambda: None) -> Midtrained:
    """All stages, the export and the measurements; goes on where an earlier start of the same run ended.

    Args:
        say: receives lines for the user; progress goes to standard error.
        checked: called before the first step, once nothing is left that could be wrong with what was asked for.

    Raises:
        UserError: see `load_model`, `prepare`, `Trainer` and `Trainer.run`.
    """
    config = settled(config)
    if not config.checkpoint:
        raise ConfigError("checkpoint", "", "must name the model's directory: glm5 midtrain CHECKPOINT ...")
    model = begin_with(config.checkpoint, "cpu" if config.mesh else config.device)
    tokenizer, run, shape = load_tokenizer(config.checkpoint), Path(config.run), model.config
    for i, stage in enumerate(config.stages):
        if stage.train.sparse != shape.sparse:
            kind, fitting = ("sparsely", "sparse") if shape.sparse else ("densely", "pretrain")
            rule = f"this model attends {kind}: give {fitting!r}"
            raise ConfigError(f"stages.{i}.train.stage", stage.train.stage, rule)
    longest = max(shape.max_position_embeddings, *(stage.seq_len for stage in config.stages))
    base = shape.rope_theta if config.rope_theta is None else config.rope_theta
    model.config = shape = shape.replace(max_position_embeddings=longest, rope_theta=base)
    with together(config, run, shape) as world:
        ranks = Ranks(world)
        with claimed(run, ".midtrain.lock", ranks):
            begun = ranks.from_main(lambda: any(run.glob("*/checkpoints")))

            def keep() -> None:
                keep_config(run, config, begun=begun, may_differ=MAY_DIFFER | ALSO_MAY_DIFFER)
                keep_weights(config.checkpoint, run / "weights.json", begun=begun)

            ranks.on_main(keep)
            data = _prepared(config, run, tokenizer, ranks, say, vocab_size=shape.vocab_size, begun=begun)
            loaders = [_loader(stage, data) for stage in config.stages]
            for stage, loader in zip(config.stages, loaders, strict=True):
                check_stage(stage.train, shape, loader.dataset)
            check_weights(model, world)
            checked()
            return _run(config, model, loaders, data, tokenizer, world, say)


def _run(
    config: MidtrainConfig,
    model: GLM5,
    loaders: list[MixedLoader],
    data: dict[str, Prepared],
    tokenizer: Tokenizer,
    world: World | None,
    say: Say,
) -> Midtrained:
    run, model = Path(config.run), model if world is None else model.to(world.device)
    trainer: Trainer | None = None
    found: dict[str, dict[str, float]] = {}
    for number, (stage, loader) in enumerate(zip(config.stages, loaders, strict=True), 1):
        directory = run / f"{number}-{stage.name}"
        if trainer is None:
            how = (world, config.pipeline, config.gather_once, config.prefetch, config.by_heads)
            trainer = Trainer(stage.train, model, loader, directory, *how)
        else:
            trainer.go_on(stage.train, loader, directory)
        trainer.run(title=stage.name)
        found[stage.name] = {}
        for path in (source.path for source in stage.sources):
            held = data[path].held_out
            if held is None:
                continue
            rows = TokenDataset(held.store, min(stage.seq_len, held.store.targets), held.ahead)
            bits = measured(trainer, rows, config.held_out_rows, sparse=stage.train.sparse).bits_per_byte
            found[stage.name][path] = bits
            say(f"measured  {bits:.4f} bits per byte  {path} in rows of {rows.seq_len:,} after {stage.name}")
    assert trainer is not None
    say(f"export    {run / 'model'}")
    trainer.export(run / "model", tokenizer=tokenizer)
    result = {"tokens": trainer.tokens, "bits_per_byte": found, "corpora": {p: d.counts for p, d in data.items()}}
    trainer.ranks.on_main(lambda: write_json(run / "result.json", result))
    return Midtrained(run, run / "model", trainer.tokens, found)


def _prepared(
    config: MidtrainConfig, run: Path, tokenizer: Tokenizer, ranks: Ranks, say: Say, *, vocab_size: int, begun: bool
) -> dict[str, Prepared]:
    """Every corpus' tokens, in a directory named after it."""
    ahead = 1 + max(stage.train.mtp_depths for stage in config.stages)
    data: dict[str, Prepared] = {}
    for number, path in enumerate(config.corpora):
        directory = run / "data" / f"{number}-{re.sub(r'[^A-Za-z0-9._-]+', '-', Path(path).name) or 'text'}"
        made = dict(ahead=ahead, vocab_size=vocab_size)
        data[path] = prepare_once(config.text(path), directory, tokenizer, ranks, say, **made, begun=begun)
    return data


def _loader(stage: Stage, data: dict[str, Prepared]) -> MixedLoader:
    """A stage's rows."""
    made = {source.path: data[source.path].training for source in stage.sources}
    rows = {path: rows_for(stage.train, TokenDataset(d.store, stage.seq_len, d.ahead)) for path, d in made.items()}
    return MixedLoader(MixedDataset(rows), {s.path: s.ratio for s in stage.sources}, stage.train.seed)
