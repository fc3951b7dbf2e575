"""`glm5 demo`: a small, true GLM-5 from nothing to a chat, on real text, in minutes on two CPU cores.

Top to bottom: the standard library's source becomes a corpus and a tokenizer; `nano` pretrains with dense attention;
the indexers warm up; everything adapts to sparse attention (report, section 2.1.1); held-out files say what that
cost; drafting with the shared MTP block is checked and timed; the model completes code. Every stage resumes.
Read next: `glm5.train.loop`, `glm5.train.evaluate`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from glm5.model.config import ModelConfig
from glm5.model.presets import nano
from glm5.train.config import LearningRate, TrainConfig
from glm5.train.prepare import Prepared, TextConfig, collect, prepare
from glm5.train.schedule import BatchWarmup
from glm5.utils.files import write_json

if TYPE_CHECKING:
    from glm5.model.glm5 import GLM5
    from glm5.train.loop import Trainer

PROMPTS = (
    "def read_lines(path):\n    with open(path) as f:\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "import os\nimport sys\n\ndef main(argv=None):\n    ",
)


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the demo's result; saved with each stage as its configuration."""

    model: ModelConfig = field(default_factory=nano)
    text: TextConfig = field(default_factory=TextConfig)
    held_out_rows: int | None = None
    pretrain: TrainConfig = field(
        default_factory=lambda: TrainConfig(
            steps=360,
            batch=BatchWarmup(4, 8, 640, multiple=4),
            micro_batch=8,
            lr=LearningRate(peak=0.01, final=0.0005, warmup_steps=20),
            bias_rate=5e-3,  # in hundreds of steps, not hundreds of thousands
            mtp_share=0.25,
            save_every=120,
        )
    )
    warmup: TrainConfig = field(
        default_factory=lambda: TrainConfig(
            stage="warmup", steps=50, lr=LearningRate(peak=2e-2, final=1e-3, shape="linear"), mtp_share=0.25
        )
    )
    adapt: TrainConfig = field(
        default_factory=lambda: TrainConfig(
            stage="sparse", steps=60, lr=LearningRate(peak=1e-3, final=1e-3, shape="constant"), mtp_share=0.25
        )
    )
    drafts: int = 3
    draft_prompts: int = 8
    draft_tokens: int = 96


def full() -> Recipe:
    """The demo as `make demo` runs it."""
    return Recipe()


def quick() -> Recipe:
    """The same path with a smaller model and few steps: for tests, not for its figures."""
    base = Recipe()
    model = nano(
        hidden_size=128, num_hidden_layers=3, intermediate_size=256, moe_intermediate_size=64, n_routed_experts=8,
        vocab_size=1024, index_topk=64,
    )  # fmt: skip
    return replace(
        base,
        model=model,
        text=TextConfig(seq_len=256),
        held_out_rows=48,
        pretrain=replace(base.pretrain, steps=60, save_every=30),
        warmup=replace(base.warmup, steps=15),
        adapt=replace(base.adapt, steps=10),
        draft_prompts=3,
        draft_tokens=32,
    )


@dataclass(frozen=True)
class DemoOptions:
    """Train a small GLM-5 on Python's standard library, make it sparse, measure it, and talk to it."""

    run: Path | None = None
    """Directory of the run; by default runs/demo, or runs/demo-quick. An interrupted run goes on."""
    quick: bool = False
    """A smaller model and few steps: under 90 seconds, to see that everything works."""
    chat: bool = True
    """Open a chat at the end (with a terminal); --no-chat for scripts."""
    json: bool = False
    """Print the report as JSON on standard output."""


def main(argv: Sequence[str]) -> int:
    """Entry of `glm5 demo`."""
    from glm5.utils.config_io import parse

    options = parse(DemoOptions, argv, prog="glm5 demo")
    recipe = quick() if options.quick else full()
    directory = options.run or Path("runs") / ("demo-quick" if options.quick else "demo")
    console = Console(stderr=True, highlight=False)
    report = run(recipe, directory, console)
    if options.json:
        print(json.dumps(report, indent=1))
    if options.chat and sys.stdin.isatty():
        from glm5.cli.chat import main as chat

        return chat([str(directory / "model")])
    return 0


def run(recipe: Recipe, directory: Path, console: Console) -> dict[str, Any]:
    """The whole demo; returns what report.json holds."""
    from glm5.model.glm5 import GLM5
    from glm5.train.evaluate import drafting, held_out, indexer_recall

    times: dict[str, float] = {}

    @contextmanager
    def stage(name: str, text: str) -> Iterator[None]:
        console.print(f"[bold]{name:<9}[/bold] {text}", soft_wrap=True)
        began = time.perf_counter()
        yield
        times[name] = times.get(name, 0.0) + time.perf_counter() - began

    def say(text: str) -> None:
        console.print(f"  {text}", soft_wrap=True)

    with stage("corpus", "the Python standard library's source, copies of held-out files removed"):
        begun = (directory / "pretrain" / "checkpoints").exists()
        depths = recipe.pretrain.mtp_depths
        data = prepare(
            recipe.text,
            directory / "data",
            ahead=1 + depths,
            vocab_size=recipe.model.vocab_size,
            tokenizer=None,
            begun=begun,
            say=say,
        )
        prompts, xz = held_out_prompts(recipe, data)
    unseen = data.held_out
    assert unseen is not None
    stop = data.tokenizer.end_of_text_id
    config = recipe.model.replace(vocab_size=data.tokenizer.vocab_size, eos_token_id=(stop,), pad_token_id=stop)
    model = GLM5(config, seed=recipe.pretrain.seed)
    parameters = sum(p.numel() for p in model.parameters())

    def measure(sparse: bool) -> float:
        return held_out(model, unseen, sparse=sparse, max_rows=recipe.held_out_rows).bits_per_byte

    bits: dict[str, float] = {}
    recall: dict[str, list[float]] = {}
    with stage(
        "pretrain", f"{parameters / 1e6:.1f}M parameters, dense attention, {recipe.pretrain.mtp_depths} MTP depths"
    ):
        train(recipe.pretrain, model, data, directory / "pretrain", recipe)
    with stage("measure", "held-out bits per byte, dense"):
        bits["dense"] = measure(sparse=False)
        recall["untrained"] = indexer_recall(model, unseen)
    with stage("warm-up", "only the indexers learn, from the dense attention"):
        train(recipe.warmup, model, data, directory / "warmup", recipe)
    with stage("measure", f"the same weights with top-{config.index_topk} of {recipe.text.seq_len} positions"):
        bits["sparse, warm-up only"] = measure(sparse=True)
        recall["after warm-up"] = indexer_recall(model, unseen)
    with stage("adapt", "everything learns with sparse attention"):
        trainer = train(recipe.adapt, model, data, directory / "adapt", recipe)
        trainer.export(directory / "model", tokenizer=data.tokenizer)
    with stage("measure", "held-out bits per byte, sparse; and dense attention with the adapted weights"):
        bits["sparse, adapted"] = measure(sparse=True)
        bits["dense attention, adapted weights"] = measure(sparse=False)
        recall["after adaptation"] = indexer_recall(model, unseen)
    model.requires_grad_(False).eval()
    with stage("draft", f"greedy decoding with {recipe.drafts} drafts from the shared MTP block, and without"):
        drafts = drafting(model, prompts, drafts=recipe.drafts, new_tokens=recipe.draft_tokens)
    completions = {}
    with stage("complete", "code that no file holds"):
        for prompt in PROMPTS:
            ids = data.tokenizer.encode(prompt)
            text = data.tokenizer.decode(
                model.generate([*data.tokenizer.prefix_ids, *ids], max_new_tokens=80, temperature=0.4, seed=0),
                skip_control=True,
            )
            completions[prompt] = text

    from glm5.cli.demo_report import summarise, write_html

    report = summarise(recipe, config, data.counts, xz, parameters, bits, recall, drafts, completions, times)
    write_json(directory / "report.json", report)
    write_html(report, directory)
    for line in report["lines"]:
        console.print(line, soft_wrap=True)
    console.print(
        f"\nreport    {directory / 'report.html'} and report.json\nnext      glm5 chat {directory / 'model'}",
        soft_wrap=True,
    )
    return report


def held_out_prompts(recipe: Recipe, data: Prepared) -> tuple[list[list[int]], float]:
    """The first halves of rows of a few held-out files, to draft from; and what `xz -9e` makes of all such files."""
    from glm5.data.compress import xz_bits_per_byte

    assert data.held_out is not None
    names = set(data.held_out.store.names)
    documents = [d for d in collect(recipe.text).documents if d.id in names]
    step = max(1, len(documents) // recipe.draft_prompts)
    prompts = [
        [*data.tokenizer.prefix_ids, *data.tokenizer.encode(d.text)[: recipe.text.seq_len // 2]]
        for d in documents[::step][: recipe.draft_prompts]
    ]
    return prompts, xz_bits_per_byte(documents)


def train(config: TrainConfig, model: GLM5, data: Prepared, directory: Path, resolved: Recipe) -> Trainer:
    """One stage, from its newest checkpoint if there is one."""
    from glm5.data.loader import Loader
    from glm5.train.loop import Trainer

    loader = Loader(data.training, config.seed, model.config.vocab_size)
    trainer = Trainer(config, model, loader, directory, bytes_per_token=data.bytes_per_token)
    trainer.run(resolved=resolved, title=directory.name)
    return trainer
