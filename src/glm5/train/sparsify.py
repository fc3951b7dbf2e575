"""`glm5 sparsify` as a function: a dense model becomes a sparse one in DSA's two stages, and says what that cost.

    RUN/warmup/   only the indexers learn, from the dense attention; a resumable run
    RUN/adapt/    everything learns with sparse attention, the indexers from the selected set; a resumable run
    RUN/model/    the result in the public layout
    RUN/result.json   held-out bits per byte and indexer recall before, between and after

Source: report section 2.1.1 (warm-up of 1,000 steps at 5e-3 falling to 2e-4, adaptation at 1e-5). Read next:
`pretrain`, `loop`, `glm5.kernels.indexer_loss`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from glm5.data.loader import Loader
from glm5.model.glm5 import GLM5
from glm5.model.weights import load_model
from glm5.text.tokenizer import load_tokenizer
from glm5.train.config import TrainConfig
from glm5.train.evaluate import held_out, indexer_recall
from glm5.train.loop import MAY_DIFFER, Trainer
from glm5.train.prepare import STDLIB, Prepared, Say, TextConfig, prepare
from glm5.train.rows import check_stage
from glm5.train.schedule import LearningRate
from glm5.utils.devices import resolve_device
from glm5.utils.errors import ConfigError
from glm5.utils.files import exclusive, read_json, require_writable, sha256_file, write_json
from glm5.utils.runlog import keep_config

# What a resumed run may change, beside its stages' `MAY_DIFFER`: where things lie, and how much is measured.
ALSO_MAY_DIFFER = {"run", "corpus", "checkpoint", "held_out_rows", "recall_rows"}


@dataclass(frozen=True)
class SparsifyConfig(TextConfig):
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
    device: str = "auto"
    """cpu, cuda or cuda:N; auto is a GPU where there is one."""
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
        super().__post_init__()
        for name, stage in (("warmup", "warmup"), ("adapt", "sparse")):
            given = getattr(self, name).stage
            if given != stage:
                raise ConfigError(f"{name}.stage", given, f"must be {stage!r}")


@dataclass(frozen=True)
class Sparsified:
    """What came of it. bits_per_byte and recall: by moment, in order (see `sparsify`)."""

    run: Path
    model: Path
    bits_per_byte: dict[str, float]
    recall: dict[str, float]
    result: dict[str, Any]


def sparsify(config: SparsifyConfig, say: Say = print) -> Sparsified:
    """Warm up, adapt, export and measure; goes on where an earlier start of the same run ended.

    Bits per byte are measured "dense" (before), "sparse, warm-up only", "sparse, adapted" and "dense attention, adapted
    weights"; recall "untrained", "after warm-up" and "after adaptation", as the mean over layers.

    Args:
        say: receives lines for the user; progress goes to standard error.

    Raises:
        UserError: see `load_model`, `prepare`, `Trainer` and `Trainer.run`.
    """
    config = replace(config, device=resolve_device(config.device))
    if not config.checkpoint:
        raise ConfigError("checkpoint", "", "must name the dense model's directory: glm5 sparsify CHECKPOINT ...")
    # Read before the run's directory is made: most calls that fail name something else than a model.
    changes: dict[str, Any] = {} if config.topk is None else {"index_topk": config.topk}
    model = load_model(config.checkpoint, device=config.device, dtype="float32", **changes)
    model.config = model.config.replace(extra={**model.config.extra, "glm5_attention": "sparse"})
    tokenizer = load_tokenizer(config.checkpoint)
    run = require_writable(config.run)
    with exclusive(run / ".sparsify.lock"):
        begun = (run / "warmup" / "checkpoints").exists()
        keep_config(run, config, begun=begun, may_differ=MAY_DIFFER | ALSO_MAY_DIFFER)
        keep_weights(config.checkpoint, run / "weights.json", begun=begun)
        data = prepare(
            config,
            run / "data",
            ahead=1 + max(config.warmup.mtp_depths, config.adapt.mtp_depths),
            vocab_size=model.config.vocab_size,
            tokenizer=tokenizer,
            begun=begun,
            say=say,
        )
        for stage in (config.warmup, config.adapt):  # what contradicts the second is said before the first
            check_stage(stage, model.config, data.training)
        figures = Figures(run / "result.json", config, data, say)
        figures.measure(model, "dense", sparse=False, recall="untrained")
        model = _train(config.warmup, model, data, run / "warmup", "warm-up").fp32_model()
        figures.measure(model, "sparse, warm-up only", sparse=True, recall="after warm-up")
        adapted = _train(config.adapt, model, data, run / "adapt", "adapt")
        say(f"export    {run / 'model'}")
        adapted.export(run / "model", tokenizer=tokenizer)
        model = adapted.fp32_model()
        figures.measure(model, "sparse, adapted", sparse=True, recall="after adaptation")
        figures.measure(model, "dense attention, adapted weights", sparse=False)
    return Sparsified(run, run / "model", figures.bits_per_byte, figures.recall, figures.result)


def _corpus_of(checkpoint: str) -> str:
    """What `glm5 pretrain` says beside a model that it made: the corpus of its run."""
    file = Path(checkpoint).parent / "config.json"
    said = read_json(file) if checkpoint and file.is_file() else None
    corpus = said.get("corpus") if isinstance(said, dict) else None
    return corpus if isinstance(corpus, str) and corpus else STDLIB


def _train(stage: TrainConfig, model: GLM5, data: Prepared, directory: Path, title: str) -> Trainer:
    loader = Loader(data.training, stage.seed)
    trainer = Trainer(stage, model, loader, directory)
    trainer.run(title=title)
    return trainer


def keep_weights(checkpoint: str, path: Path, *, begun: bool) -> None:
    """Write checksums of the weights that the run begins with.

    Raises:
        ConfigError: the run has begun, with other weights.
    """
    sums = {file.name: sha256_file(file) for file in sorted(Path(checkpoint).glob("*.safetensors"))}
    if begun and read_json(path) != sums:
        rule = "its weights are not those that this run began with; choose another --run directory"
        raise ConfigError("checkpoint", checkpoint, rule)
    write_json(path, sums)


class Figures:
    """Held-out figures, kept in a file as they are made, so that a resumed run measures none twice."""

    def __init__(self, path: Path, config: SparsifyConfig, data: Prepared, say: Say) -> None:
        self.path, self.config, self.data, self.say = path, config, data, say
        begun: dict[str, Any] = read_json(path) if path.exists() else {}
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
        """Bits per byte as `name`, and the indexers' recall as `recall`, unless they are known."""
        data = self.data.held_out
        if data is None or (name in self.bits_per_byte and (not recall or recall in self.recall)):
            return
        found = held_out(model, data, sparse=sparse, max_rows=self.config.held_out_rows)
        self.bits_per_byte[name] = found.bits_per_byte
        line = f"measured  {found.bits_per_byte:.4f} bits per byte  {name}"
        if recall:
            layers = indexer_recall(model, data, max_rows=self.config.recall_rows)
            self.result["recall_by_layer"][recall] = layers
            self.recall[recall] = sum(layers) / len(layers)
            line += f"; recall {self.recall[recall]:.3f} {recall}"
        write_json(self.path, self.result)
        self.say(line)
