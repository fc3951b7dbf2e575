"""`glm5 sparsify` as a function: a dense model becomes a sparse one in DSA's two stages, and says what that cost.

    RUN/warmup/   only the indexers learn, from the dense attention; a resumable run
    RUN/adapt/    everything learns with sparse attention, the indexers from the selected set; a resumable run
    RUN/model/    the result in the public layout
    RUN/result.json   held-out bits per byte and indexer recall before, between and after

Source: report section 2.1.1 (warm-up of 1,000 steps at 5e-3 falling to 2e-4, adaptation at 1e-5). Read next:
`pretrain`, `loop`, `glm5.kernels.indexer_loss`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from glm5.data.loader import Loader
from glm5.model.glm5 import GLM5
from glm5.model.weights import load_model
from glm5.parallel.mesh import World
from glm5.text.tokenizer import load_tokenizer
from glm5.train.config import TrainConfig
from glm5.train.evaluate import held_out, indexer_recall
from glm5.train.groups import rows_for
from glm5.train.loop import MAY_DIFFER, Trainer
from glm5.train.prepare import STDLIB, Prepared, Say, TextConfig
from glm5.train.ranks import Ranks
from glm5.train.rows import check_stage
from glm5.train.schedule import LearningRate
from glm5.train.together import (
    MESH_MAY_DIFFER,
    MeshConfig,
    begin_with,
    check_weights,
    claimed,
    keep_weights,
    prepare_once,
    settled,
    together,
)
from glm5.utils.errors import ConfigError
from glm5.utils.files import read_json, write_json
from glm5.utils.runlog import keep_config

# What a resumed run may change, beside its stages' `MAY_DIFFER`: where things lie, and how much is measured.
ALSO_MAY_DIFFER = MESH_MAY_DIFFER | {"run", "corpus", "checkpoint", "held_out_rows", "recall_rows"}


@dataclass(frozen=True)
class SparsifyConfig(MeshConfig, TextConfig):
    """Adapt a dense model to sparse attention."""

    corpus: str = ""
    """A directory of text files, a .jsonl file, one text file, or stdlib; by default what the checkpoint's own run was
    trained on, else stdlib."""
    checkpoint: str = ""
    """The dense model: a directory in the public layout, with its tokenizer."""
    run: str = "runs/sparsify"
    """Directory of the run. An interrupted run goes on when the same command is given again."""
    topk: int | None = None
    """Positions that each query selects (index_topk); by default the model's."""
    held_out_rows: int | None = None
    """Measure the first so many held-out rows only."""
    recall_rows: int = 32
    """Held-out rows over which the indexers' recall is measured."""
    warmup: TrainConfig = field(
        default_factory=lambda: TrainConfig(stage="warmup", lr=LearningRate(peak=5e-3, final=2e-4, shape="linear"))
    )
    adapt: TrainConfig = field(
        default_factory=lambda: TrainConfig(stage="sparse", lr=LearningRate(peak=1e-5, final=1e-5, shape="constant"))
    )

    def __post_init__(self) -> None:
        if not self.corpus:
            object.__setattr__(self, "corpus", _corpus_of(self.checkpoint))
        MeshConfig.__post_init__(self)
        TextConfig.__post_init__(self)
        for name, stage in (("warmup", "warmup"), ("adapt", "sparse")):
            given = getattr(self, name).stage
            if given != stage:
                raise ConfigError(f"{name}.stage", given, f"must be {stage!r}")
            self.check_stage_batch(name, getattr(self, name))


@dataclass(frozen=True)
class Sparsified:
    """What came of it. bits_per_byte and recall: by moment, in order (see `sparsify`)."""

    run: Path
    model: Path
    bits_per_byte: dict[str, float]
    recall: dict[str, float]
    result: dict[str, Any]


def sparsify(config: SparsifyConfig, say: Say = print, checked: Callable[[], None] = lambda: None) -> Sparsified:
    """Warm up, adapt, export and measure; goes on where an earlier start of the same run ended.

    Bits per byte are measured "dense" (before), "sparse, warm-up only", "sparse, adapted" and "dense attention, adapted
    weights"; recall "untrained", "after warm-up" and "after adaptation", as the mean over layers.

    Args:
        say: receives lines for the user; progress goes to standard error.
        checked: called before the first step, once nothing is left that could be wrong with what was asked for.

    Raises:
        UserError: see `load_model`, `prepare`, `Trainer` and `Trainer.run`.
    """
    config = settled(config)
    if not config.checkpoint:
        raise ConfigError("checkpoint", "", "must name the dense model's directory: glm5 sparsify CHECKPOINT ...")
    # Read before the run's directory is made: most calls that fail name something else than a model.
    changes: dict[str, Any] = {} if config.topk is None else {"index_topk": config.topk}
    model = begin_with(config.checkpoint, "cpu" if config.mesh else config.device, **changes)
    tokenizer, run = load_tokenizer(config.checkpoint), Path(config.run)
    with together(config, run, model.config) as world:
        ranks = Ranks(world)
        with claimed(run, ".sparsify.lock", ranks):
            begun = ranks.from_main((run / "warmup" / "checkpoints").exists)

            def keep() -> None:
                keep_config(run, config, begun=begun, may_differ=MAY_DIFFER | ALSO_MAY_DIFFER)
                keep_weights(config.checkpoint, run / "weights.json", begun=begun)

            ranks.on_main(keep)
            data = prepare_once(
                config,
                run / "data",
                tokenizer,
                ranks,
                say,
                ahead=1 + max(config.warmup.mtp_depths, config.adapt.mtp_depths),
                vocab_size=model.config.vocab_size,
                begun=begun,
            )
            for stage in (config.warmup, config.adapt):  # what contradicts the second is said before the first
                check_stage(stage, model.config, rows_for(stage, data.training))
            check_weights(model, world)
            checked()
            stages = Stages(config, model if world is None else model.to(world.device), data, world)
            figures = Figures(run / "result.json", config, data, say, ranks)
            figures.measure(stages.model, "dense", sparse=False, recall="untrained")
            stages.train(config.warmup, run / "warmup", "warm-up")
            figures.measure(stages.model, "sparse, warm-up only", sparse=True, recall="after warm-up")
            adapted = stages.train(config.adapt, run / "adapt", "adapt")
            say(f"export    {run / 'model'}")
            adapted.export(run / "model", tokenizer=tokenizer)
            stages.take_up(adapted, run / "model")
            figures.measure(stages.model, "sparse, adapted", sparse=True, recall="after adaptation")
            figures.measure(stages.model, "dense attention, adapted weights", sparse=False)
    return Sparsified(run, run / "model", figures.bits_per_byte, figures.recall, figures.result)


class Stages:
    """A model that goes from stage to stage, whole on every rank between two of them."""

    def __init__(self, config: SparsifyConfig, model: GLM5, data: Prepared, world: World | None) -> None:
        self.config, self.model, self.data, self.world = config, model, data, world
        model.config = model.config.replace(extra={**model.config.extra, "glm5_attention": "sparse"})

    def train(self, stage: TrainConfig, directory: Path, title: str) -> Trainer:
        """Run a stage, and take up what it made; on several ranks by way of DIRECTORY/model."""
        config, loader = self.config, Loader(rows_for(stage, self.data.training), stage.seed)
        how = (self.world, config.pipeline, config.gather_once, config.prefetch, config.by_heads)
        trainer = Trainer(stage, self.model, loader, directory, *how)
        trainer.run(title=title)
        if stage is not config.adapt:
            if self.world is not None:
                trainer.export(directory / "model")
            self.take_up(trainer, directory / "model")
        return trainer

    def take_up(self, trainer: Trainer, exported: Path) -> None:
        """The model that a stage made: its own, or on several ranks what they have exported."""
        if self.world is None:
            self.model = trainer.fp32_model()
        else:
            config = self.model.config
            self.model = load_model(exported, device=str(self.world.device), dtype="float32")
            self.model.config = config


def _corpus_of(checkpoint: str) -> str:
    """What `glm5 pretrain` says beside a model that it made: the corpus of its run."""
    file = Path(checkpoint).parent / "config.json"
    said = read_json(file) if checkpoint and file.is_file() else None
    corpus = said.get("corpus") if isinstance(said, dict) else None
    return corpus if isinstance(corpus, str) and corpus else STDLIB


class Figures:
    """Held-out figures, kept in a file as they are made, so that a resumed run measures none twice."""

    def __init__(self, path: Path, config: SparsifyConfig, data: Prepared, say: Say, ranks: Ranks) -> None:
        self.path, self.config, self.data, self.say, self.ranks = path, config, data, say, ranks
        begun: dict[str, Any] = ranks.from_main(lambda: read_json(path) if path.exists() else {})
        rows = [config.held_out_rows, config.recall_rows]
        if begun.get("rows") != rows:
            begun = {"rows": rows, "bits_per_byte": {}, "recall": {}, "recall_by_layer": {}}
        self.result = {**begun, "corpus": data.counts}

    @property
    def bits_per_byte(self) -> dict[str, float]:
        return self.result["bits_per_byte"]

    @property
    def recall(self) -> dict[str, float]:
        return self.result["recall"]

    def measure(self, model: GLM5, name: str, *, sparse: bool, recall: str = "") -> None:
        """Bits per byte as `name`, and the indexers' recall as `recall`, unless they are known. The model is whole on
        every rank, which share out the rows; recall is measured on the main one."""
        data, ranks = self.data.held_out, self.ranks
        if data is None or (name in self.bits_per_byte and (not recall or recall in self.recall)):
            return
        found = held_out(model, data, sparse=sparse, max_rows=self.config.held_out_rows, ranks=ranks)
        self.bits_per_byte[name] = found.bits_per_byte
        line = f"measured  {found.bits_per_byte:.4f} bits per byte  {name}"
        if recall:
            layers = ranks.from_main(lambda: indexer_recall(model, data, max_rows=self.config.recall_rows))
            self.result["recall_by_layer"][recall] = layers
            self.recall[recall] = sum(layers) / len(layers)
            line += f"; recall {self.recall[recall]:.3f} {recall}"
        ranks.on_main(lambda: write_json(self.path, self.result))
        self.say(line)
