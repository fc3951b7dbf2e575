"""`glm5 sft` as a function: a model learns from conversations, and is exported with its tokenizer.

    RUN/config.json    everything that decides the result, which --config reads
    RUN/data/          conversations as tokens and masks (`chat_data`); RUN/held-out/ those that only measure
    RUN/checkpoints/   to resume from (`glm5.train.loop`)
    RUN/model/         the result in the public layout
    RUN/result.json    loss on the held-out conversations before and after, and what it took

It is `glm5.train`'s loop on other rows, on one process or the ranks of a mesh: MTP trains along, on the same masks;
nothing sees or predicts another conversation. With `--qat int4` the experts are read at INT4 all the while
(`glm5.quant.int4`). Source: report, sections 3.1 and 2.4.3. Read next: `chat_data`, `glm5.train.loop`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from glm5.data.mixing import MixedLoader, Source
from glm5.model.config import ModelConfig
from glm5.model.glm5 import GLM5
from glm5.model.weights import load_model
from glm5.parallel.mesh import World
from glm5.posttrain.chat_data import ChatData, ChatDataset, TooLong, prepare_chat
from glm5.quant.int4 import GROUP, marked, train_at_int4
from glm5.quant.int4 import check as check_int4
from glm5.text.tokenizer import Tokenizer, load_tokenizer
from glm5.train.config import TrainConfig
from glm5.train.evaluate import HeldOut, held_out
from glm5.train.loop import MAY_DIFFER, Trainer
from glm5.train.prepare import Say
from glm5.train.ranks import Ranks
from glm5.train.rows import check_stage
from glm5.train.schedule import BatchWarmup, LearningRate
from glm5.train.together import (
    MESH_MAY_DIFFER,
    MeshConfig,
    check_weights,
    claimed,
    keep_weights,
    measured,
    settled,
    together,
)
from glm5.utils.config_io import to_dict
from glm5.utils.errors import CheckpointError, ConfigError
from glm5.utils.files import read_json, write_json
from glm5.utils.runlog import CONFIG, refuse_changes

# What a resumed run may change, beside its stage's `MAY_DIFFER`: where things lie, and how much is measured.
ALSO_MAY_DIFFER = MESH_MAY_DIFFER | {"run", "checkpoint", "held_out", "held_out_rows", "dry_run"}


def sft_training() -> TrainConfig:
    """Our defaults; the report gives none. MTP and router bias have their late values, as after pre-training."""
    return TrainConfig(
        steps=300,
        batch=BatchWarmup(8, 8, 0),
        micro_batch=1,
        lr=LearningRate(peak=1e-4, final=1e-5, warmup_steps=10),
        mtp_weight=0.1,
        bias_rate=0.0,
        save_every=100,
    )


@dataclass(frozen=True)
class SftConfig(MeshConfig):
    """Fine-tune a model on conversations."""

    checkpoint: str = ""
    """The model to begin with: a directory in the public layout, with its tokenizer."""
    data: tuple[str, ...] = ()
    """JSONL files of conversations: FILE, or FILE=RATIO for its weight among the others (of rows)."""
    held_out: tuple[str, ...] = ()
    """JSONL files that are only measured, before and after."""
    run: str = "runs/sft"
    """Directory of the run. An interrupted run goes on when the same command is given again."""
    seq_len: int = 4096
    """Tokens that a row predicts; no conversation may be longer."""
    clear_thinking: bool = False
    """Leave out what was thought before the last user's message, of conversations that do not say themselves. False is
    preserved thinking."""
    too_long: TooLong = "refuse"
    """Conversations longer than a row: refuse the data, or drop and count them."""
    qat: Literal["off", "int4"] = "off"
    """int4: train and measure with the routed experts read at INT4, as they will be served once they are packed; the
    weights that learn, and those that are saved, keep all digits."""
    qat_group: int = GROUP
    """Columns of a row that share a scale, with qat=int4."""
    held_out_rows: int | None = None
    """Measure the first so many held-out rows only."""
    dry_run: bool = False
    """Read and render the conversations, print what training would be, and keep nothing."""
    train: TrainConfig = field(default_factory=sft_training)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_stage_batch("train", self.train)
        paths = [Source.parse(text).path for text in self.data]
        twice = next((p for i, p in enumerate(paths) if p in paths[:i]), None)
        if twice is not None:
            raise ConfigError("data", twice, "is there twice: give a file once, with its ratio")
        if self.seq_len < 1:
            raise ConfigError("seq_len", self.seq_len, "must be at least 1")
        if self.held_out_rows is not None and self.held_out_rows < 1:
            raise ConfigError("held_out_rows", self.held_out_rows, "must be at least 1; leave it out for all rows")
        if self.train.stage == "warmup":
            raise ConfigError("train.stage", "warmup", "trains nothing that speaks; leave it out")
        if self.qat == "off" and self.qat_group != GROUP:
            raise ConfigError("qat_group", self.qat_group, "belongs to qat=int4: add --qat int4, or leave it out")

    @property
    def sources(self) -> list[Source]:
        return [Source.parse(text) for text in self.data]


@dataclass(frozen=True)
class Tuned:
    """What came of it. held_out: nats per learned token "before" and "after", empty where nothing was measured."""

    run: Path
    model: Path
    steps: int
    tokens: int
    held_out: dict[str, float]
    result: dict[str, Any]


def resolve(config: SftConfig) -> tuple[SftConfig, ModelConfig]:
    """The configuration with its device and the MTP depths that its model allows, and the model's own.

    Raises:
        UserError: the checkpoint cannot be used, or there is no data.
    """
    if not config.checkpoint:
        raise ConfigError("checkpoint", "", "must name the model's directory: glm5 sft CHECKPOINT --data FILE ...")
    if not config.data:
        raise ConfigError(
            "data", (), "must name at least one JSONL file of conversations: --data FILE [FILE=RATIO ...]"
        )
    path = Path(config.checkpoint)
    if (path / "model" / "config.json").is_file():
        raise CheckpointError(f"{path} is a run, not a model", f"Give its model, {path / 'model'}")
    model = ModelConfig.load(config.checkpoint)
    if config.seq_len > model.max_position_embeddings:
        rule = f"must be at most max_position_embeddings={model.max_position_embeddings}"
        raise ConfigError("seq_len", config.seq_len, rule)
    if config.qat == "int4":
        check_int4(model, config.qat_group)
    depths = config.train.mtp_depths if model.num_nextn_predict_layers else 0
    return settled(replace(config, train=replace(config.train, mtp_depths=depths))), model


def staged(config: SftConfig, model: ModelConfig, dataset: ChatDataset) -> SftConfig:
    """The configuration with the stage that suits model and rows.

    A sparse model trains with its selection, and its indexers on the KL, where rows are longer than what they select;
    on shorter rows nothing is left out, and the stage is the dense one.
    """
    sparse = model.sparse and dataset.seq_len > model.index_topk
    return replace(config, train=replace(config.train, stage="sparse" if sparse else "pretrain"))


def sft(config: SftConfig, say: Say = print) -> Tuned:
    """Train, export and measure; goes on where an earlier start of the same run ended.

    Args:
        say: receives lines for the user; progress goes to standard error.

    Raises:
        UserError: see `load_model`, `prepare_chat`, `Trainer` and `Trainer.run`.
    """
    config, shape = resolve(config)
    tokenizer, run = load_tokenizer(config.checkpoint), Path(config.run)
    with together(config, run, shape) as world:
        ranks = Ranks(world)
        with claimed(run, ".sft.lock", ranks):
            begun = ranks.from_main((run / "checkpoints").exists)
            ranks.on_main(lambda: _check_begun(config, run, begun))
            made = ranks.on_main(lambda: conversations(config, tokenizer, run / "data", begun=begun))
            data = ranks.together(lambda: made or conversations(config, tokenizer, run / "data", begun=True))
            dataset = data.dataset(config.seq_len, 1 + config.train.mtp_depths)
            config = staged(config, shape, dataset)
            for line in describe(config, data, dataset):
                say(line)
            device = config.device if world is None else str(world.device)
            model = load_model(config.checkpoint, device=device, dtype="float32")
            check_weights(model, world)
            rounded = quantised(config, model)
            measure = Measure(config, tokenizer, run, begun, ranks, say)
            measure.before(model)
            trainer = train(config, dataset, model, run, world)
            trainer.state.as_run = rounded
            say(f"export    {run / 'model'}")
            trainer.export(run / "model", tokenizer=tokenizer)
            measure.after(trainer)
            loader = trainer.loader
            assert isinstance(loader, MixedLoader)
            result = {
                "steps": trainer.finished_steps,
                "tokens": trainer.tokens,
                "epochs": loader.epochs(trainer.samples),
                "held_out": measure.loss,
                "conversations": data.counts,
            }
            ranks.on_main(lambda: write_json(run / "result.json", result))
    return Tuned(run, run / "model", trainer.finished_steps, trainer.tokens, measure.loss, result)


def quantised(config: SftConfig, model: GLM5) -> frozenset[str]:
    """Make a model read its experts as the configuration says, and say so in its own. Names what is rounded."""
    if config.qat == "int4":
        return train_at_int4(model, config.qat_group)
    model.config = marked(model.config, None)
    return frozenset()


def int4_bytes(config: SftConfig, model: ModelConfig) -> int:
    """What is read of the experts at INT4 while it waits for the backward pass, on one device: each layer's, or one's
    where feed-forward layers run again."""
    moe = sum(map(model.is_moe, range(model.num_hidden_layers))) + config.train.mtp_depths
    again = {"feed-forward", "layer"} & set(config.pipeline.recompute)
    one = 3 * model.hidden_size * model.moe_intermediate_size * model.n_routed_experts
    precision = config.train.precision
    bf16 = precision == "bf16" or (precision == "auto" and config.device != "cpu")
    return (1 if again else moe) * one * (2 if bf16 else 4)


def _check_begun(config: SftConfig, run: Path, begun: bool) -> None:
    """Refuse to go on with another configuration, which is said before the data is looked at, or other weights."""
    if begun:
        refuse_changes(read_json(run / CONFIG), to_dict(config), MAY_DIFFER | ALSO_MAY_DIFFER | {"stage"})
    keep_weights(config.checkpoint, run / "weights.json", begun=begun)


def conversations(config: SftConfig, tokenizer: Tokenizer, directory: Path, *, begun: bool) -> ChatData:
    """The conversations to train on, in `directory`."""
    return prepare_chat(
        [s.path for s in config.sources],
        tokenizer,
        directory,
        seq_len=config.seq_len,
        clear_thinking=config.clear_thinking,
        too_long=config.too_long,
        begun=begun,
    )


def describe(config: SftConfig, data: ChatData, dataset: ChatDataset) -> list[str]:
    """What will be trained on, a line a file."""
    loader = MixedLoader(dataset, {s.path: s.ratio for s in config.sources}, config.train.seed)
    batch, steps = config.train.batch, config.train.steps
    samples = 0
    for _ in range(steps):
        samples += batch.batch(samples)
    passes = loader.epochs(samples)
    lines = []
    for path, (first, last) in dataset.task_rows.items():
        counts, share = data.counts[path], loader.mixture.shares[path]
        dropped = f", {counts['too_long']:,} too long and left out" if counts["too_long"] else ""
        lines.append(
            f"data      {path}: {counts['conversations']:,} conversations{dropped} in {last - first:,} rows of "
            f"{dataset.seq_len:,}; {share:.0%} of the mixture, {passes[path]:.3g} passes"
        )
    store = data.store
    lines.append(f"          {store.targets:,} of {store.tokens:,} tokens are learned")
    return lines


def train(config: SftConfig, dataset: ChatDataset, model: GLM5, run: Path, world: World | None) -> Trainer:
    """The training itself, in `run`."""
    check_stage(config.train, model.config, dataset)
    loader = MixedLoader(dataset, {s.path: s.ratio for s in config.sources}, config.train.seed)
    how = (world, config.pipeline, config.gather_once, config.prefetch, config.by_heads)
    trainer = Trainer(config.train, model, loader, run, *how)
    may_differ = {*MAY_DIFFER, *ALSO_MAY_DIFFER}
    trainer.run(resolved=replace(config, dry_run=False), may_differ=may_differ, title="sft")
    return trainer


class Measure:
    """Loss on the held-out conversations, kept in RUN/held-out.json: a resumed run knows it as it was "before".

    All ranks call it, and share out the rows.
    """

    def __init__(self, config: SftConfig, tokenizer: Tokenizer, run: Path, begun: bool, ranks: Ranks, say: Say) -> None:
        self.config, self.path, self.ranks, self.say = config, run / "held-out.json", ranks, say
        self.data = None
        self.loss: dict[str, float] = ranks.from_main(
            lambda: read_json(self.path) if begun and self.path.exists() else {}
        )
        if config.held_out:

            def make() -> ChatData:
                return prepare_chat(
                    config.held_out,
                    tokenizer,
                    run / "held-out",
                    seq_len=config.seq_len,
                    clear_thinking=config.clear_thinking,
                    too_long=config.too_long,
                    begun=False,
                )

            made = ranks.on_main(make)
            self.data = ranks.together(lambda: made or make()).dataset(config.seq_len, 1)

    def before(self, model: GLM5) -> None:
        """Of the model that training begins with, whole on every rank."""
        if self.data is not None and "before" not in self.loss:
            options: dict[str, Any] = dict(
                sparse=self.config.train.sparse, max_rows=self.config.held_out_rows, ranks=self.ranks
            )
            self._keep("before", held_out(model, self.data, **options))

    def after(self, trainer: Trainer) -> None:
        """Of what it has made."""
        if self.data is not None:
            sparse = self.config.train.sparse
            ready = partial(quantised, self.config)
            self._keep("after", measured(trainer, self.data, self.config.held_out_rows, sparse=sparse, ready=ready))

    def _keep(self, name: str, found: HeldOut) -> None:
        self.loss[name] = found.loss
        self.ranks.on_main(lambda: write_json(self.path, self.loss))
        self.say(
            f"held out  {found.loss:.4f} nats a learned token {name} training; {found.accuracy:.1%} are the likeliest"
        )
