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
from typing import Any

from rich.console import Console

from glm5.model.config import ModelConfig
from glm5.model.presets import nano
from glm5.train.config import LearningRate, TrainConfig
from glm5.train.schedule import BatchWarmup
from glm5.utils.files import write_json

PROMPTS = (
    "def read_lines(path):\n    with open(path) as f:\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "import os\nimport sys\n\ndef main(argv=None):\n    ",
)


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the demo's result; saved with each stage as its configuration."""

    model: ModelConfig = field(default_factory=nano)
    seq_len: int = 512
    held_out_share: float = 0.05
    held_out_rows: int | None = None
    pretrain: TrainConfig = field(
        default_factory=lambda: TrainConfig(
            steps=440,
            batch=BatchWarmup(4, 8, 640, multiple=4),
            micro_batch=8,
            lr=LearningRate(peak=0.02, final=0.001, warmup_steps=20),
            mtp_share=0.25,
            save_every=110,
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
        seq_len=256,
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
        console.print(f"[bold]{name:<9}[/bold] {text}")
        began = time.perf_counter()
        yield
        times[name] = times.get(name, 0.0) + time.perf_counter() - began

    with stage("corpus", "the Python standard library's source, split by hash, copies of held-out files removed"):
        corpus = prepare(recipe, directory / "data")
    console.print(f"          {corpus.summary}")
    config = recipe.model.replace(vocab_size=corpus.tokenizer.vocab_size, eos_token_id=corpus.tokenizer.stop_ids[:1])
    config = config.replace(pad_token_id=corpus.tokenizer.stop_ids[0])
    model = GLM5(config, seed=recipe.pretrain.seed)
    parameters = sum(p.numel() for p in model.parameters())

    def measure(sparse: bool) -> float:
        return held_out(model, corpus.held_out, sparse=sparse, max_rows=recipe.held_out_rows).bits_per_byte

    bits: dict[str, float] = {}
    recall: dict[str, list[float]] = {}
    with stage(
        "pretrain", f"{parameters / 1e6:.1f}M parameters, dense attention, {recipe.pretrain.mtp_depths} MTP depths"
    ):
        train(recipe.pretrain, recipe, model, corpus, directory / "pretrain")
    with stage("measure", "held-out bits per byte, dense"):
        bits["dense"] = measure(sparse=False)
        recall["untrained"] = indexer_recall(model, corpus.held_out)
    with stage("warm-up", "only the indexers learn, from the dense attention"):
        train(recipe.warmup, recipe, model, corpus, directory / "warmup")
    with stage("measure", f"the same weights with top-{config.index_topk} of {recipe.seq_len} positions"):
        bits["sparse, warm-up only"] = measure(sparse=True)
        recall["after warm-up"] = indexer_recall(model, corpus.held_out)
    with stage("adapt", "everything learns with sparse attention"):
        trainer = train(recipe.adapt, recipe, model, corpus, directory / "adapt")
        trainer.export(directory / "model", tokenizer=corpus.tokenizer)
    with stage("measure", "held-out bits per byte, sparse; and dense attention with the adapted weights"):
        bits["sparse, adapted"] = measure(sparse=True)
        bits["dense attention, adapted weights"] = measure(sparse=False)
        recall["after adaptation"] = indexer_recall(model, corpus.held_out)
    model.requires_grad_(False).eval()
    with stage("draft", f"greedy decoding with {recipe.drafts} drafts from the shared MTP block, and without"):
        drafts = drafting(model, corpus.prompts, drafts=recipe.drafts, new_tokens=recipe.draft_tokens)
    completions = {}
    with stage("complete", "code that no file holds"):
        for prompt in PROMPTS:
            ids = corpus.tokenizer.encode(prompt)
            text = corpus.tokenizer.decode(
                model.generate([*corpus.tokenizer.prefix_ids, *ids], max_new_tokens=80, temperature=0.4, seed=0),
                skip_control=True,
            )
            completions[prompt] = text

    from glm5.cli.demo_report import summarise, write_html

    report = summarise(recipe, config, corpus, parameters, bits, recall, drafts, completions, times)
    write_json(directory / "report.json", report)
    write_html(report, directory)
    for line in report["lines"]:
        console.print(line)
    console.print(f"\nreport    {directory / 'report.html'} and report.json\nnext      glm5 chat {directory / 'model'}")
    return report


@dataclass(frozen=True)
class DemoCorpus:
    """The data of the demo: datasets, tokenizer, prompts from held-out files, and the compressor's figure."""

    tokenizer: Any
    training: Any
    held_out: Any
    prompts: list[list[int]]
    xz_bits_per_byte: float
    summary: str
    counts: dict[str, Any]


def prepare(recipe: Recipe, directory: Path) -> DemoCorpus:
    """Corpus, tokenizer and token shards; what is there from an earlier start is used again."""
    from glm5.data.compress import xz_bits_per_byte
    from glm5.data.corpus import split_held_out, stdlib_sources
    from glm5.data.filters import drop_copies_of, drop_exact_copies
    from glm5.data.loader import TokenDataset
    from glm5.text.tokenizer import Tokenizer, load_tokenizer

    found = stdlib_sources()
    unique, exact = drop_exact_copies(found.documents)
    training, held = split_held_out(unique, recipe.held_out_share)
    training, near = drop_copies_of(held, training)
    if (directory / "tokenizer" / "tokenizer.json").exists():
        tokenizer = load_tokenizer(directory / "tokenizer")
    else:
        tokenizer = Tokenizer.train((d.text for d in training), recipe.model.vocab_size)
        tokenizer.save(directory / "tokenizer")

    def dataset(name: str, documents: Any) -> TokenDataset:
        place = directory / name
        if (place / "manifest.json").exists():
            return TokenDataset.open(place, recipe.seq_len)
        return TokenDataset.build(documents, tokenizer, place, recipe.seq_len)

    train_set, held_set = dataset("training", training), dataset("held-out", held)
    step = max(1, len(held) // recipe.draft_prompts)
    prompts = [[*tokenizer.prefix_ids, *tokenizer.encode(d.text)[: recipe.seq_len // 2]] for d in held[::step]][
        : recipe.draft_prompts
    ]
    bytes_per_token = train_set.text_bytes / int(train_set.store.tokens)
    counts = {
        "files": len(found.documents),
        "left out": dict(found.dropped),
        "exact copies": len(exact),
        "near copies of held-out files": len(near),
        "training files": len(training),
        "held-out files": len(held),
        "training tokens": int(train_set.store.tokens),
        "training bytes": train_set.text_bytes,
        "held-out bytes": held_set.text_bytes,
        "bytes per token": bytes_per_token,
    }
    summary = (
        f"{len(training)} files and {train_set.store.tokens / 1e6:.2f}M tokens to learn from, "
        f"{len(held)} files held out, {bytes_per_token:.2f} bytes a token"
    )
    return DemoCorpus(tokenizer, train_set, held_set, prompts, xz_bits_per_byte(held), summary, counts)


def train(config: TrainConfig, recipe: Recipe, model: Any, corpus: DemoCorpus, directory: Path) -> Any:
    """One stage, from its newest checkpoint if there is one."""
    from glm5.data.loader import Loader
    from glm5.train.loop import Trainer

    loader = Loader(corpus.training, config.seed, model.config.vocab_size)
    per_token = corpus.counts["bytes per token"]
    trainer = Trainer(config, model, loader, directory, bytes_per_token=per_token)
    trainer.run(resolved=recipe, title=directory.name)
    return trainer
