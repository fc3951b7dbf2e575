"""`glm5 demo`: a small, true GLM-5 from nothing to a chat, on real text, in minutes on two CPU cores.

`glm5 pretrain` and `glm5 sparsify` (report, section 2.1.1) with their settings chosen: the standard library's source
becomes a corpus, a tokenizer and a dense model, the model becomes sparse, and held-out files say what that cost. Then
drafting with the shared MTP block is checked and timed, and the model completes code. Last, a copy of it is fine-tuned
on small tasks and learns from verified answers to them (sections 3.1 and 3.2).

    RUN/pretrain/                  the run of `glm5 pretrain`
    RUN/{data,warmup,adapt,model}  the run of `glm5 sparsify`
    RUN/answers/{sft,rl}           the runs of `glm5 sft` and `glm5 rl reason`
    RUN/report.{json,html}         what was found

Every stage resumes. Read next: `glm5.train.pretrain`, `glm5.train.sparsify`, `demo_answers`, `demo_report`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from glm5.model.presets import nano
from glm5.utils.config_io import parse

if TYPE_CHECKING:
    from glm5.cli.demo_answers import Answers
    from glm5.train.pretrain import PretrainConfig
    from glm5.train.sparsify import SparsifyConfig

PROMPTS = (
    "def read_lines(path):\n    with open(path) as f:\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "import os\nimport sys\n\ndef main(argv=None):\n    ",
)
DRAFTS = 3


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


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the demo's result."""

    pretrain: PretrainConfig
    sparsify: SparsifyConfig
    answers: Answers
    draft_prompts: int = 8
    draft_tokens: int = 96


def recipe(directory: Path, *, quick: bool = False) -> Recipe:
    """The demo as `make demo` runs it, or (quick) the same path for tests, and not for its figures."""
    from glm5.cli.demo_answers import answers
    from glm5.train.config import TrainConfig
    from glm5.train.pretrain import PretrainConfig
    from glm5.train.schedule import BatchWarmup, LearningRate
    from glm5.train.sparsify import SparsifyConfig

    pretrain, warmup, adapt = (60, 15, 10) if quick else (360, 50, 60)
    small = dict(
        hidden_size=128, num_hidden_layers=3, intermediate_size=256, moe_intermediate_size=64, n_routed_experts=8,
        vocab_size=1024, index_topk=64,
    )  # fmt: skip
    common: dict[str, Any] = dict(device="cpu", seq_len=256 if quick else 512, held_out_rows=48 if quick else None)
    dense = PretrainConfig(
        run=str(directory / "pretrain"),
        model=nano(**small) if quick else nano(),
        train=TrainConfig(
            steps=pretrain,
            batch=BatchWarmup(4, 8, 640, multiple=4),
            micro_batch=8,
            lr=LearningRate(peak=0.01, final=0.0005, warmup_steps=20),
            bias_rate=5e-3,  # in hundreds of steps, not hundreds of thousands
            mtp_share=0.25,
            save_every=pretrain // 3,
        ),
        **common,
    )
    sparse = SparsifyConfig(
        run=str(directory),
        checkpoint=str(directory / "pretrain" / "model"),
        warmup=TrainConfig(
            stage="warmup", steps=warmup, lr=LearningRate(peak=2e-2, final=1e-3, shape="linear"), mtp_share=0.25
        ),
        adapt=TrainConfig(
            stage="sparse", steps=adapt, lr=LearningRate(peak=1e-3, final=1e-3, shape="constant"), mtp_share=0.25
        ),
        **common,
    )
    learning = answers(directory / "answers", str(directory / "model"), quick=quick)
    return Recipe(dense, sparse, learning, 3, 32) if quick else Recipe(dense, sparse, learning)


def main(argv: Sequence[str]) -> int:
    """Entry of `glm5 demo`."""
    options = parse(DemoOptions, argv, prog="glm5 demo")
    directory = options.run or Path("runs") / ("demo-quick" if options.quick else "demo")
    report = run(recipe(directory, quick=options.quick), Console(stderr=True, highlight=False))
    if options.json:
        print(json.dumps(report, indent=1))
    if options.chat and sys.stdin.isatty():
        from glm5.cli.chat import main as chat

        return chat([str(directory / "model")])
    return 0


def run(recipe: Recipe, console: Console) -> dict[str, Any]:
    """The whole demo; returns what report.json holds."""
    from glm5.cli.demo_answers import learned_answers
    from glm5.cli.demo_report import summarise, write_html
    from glm5.data.compress import xz_bits_per_byte
    from glm5.data.shards import TokenStore
    from glm5.model.weights import load_model
    from glm5.text.tokenizer import load_tokenizer
    from glm5.train.evaluate import drafting
    from glm5.train.prepare import collect
    from glm5.train.pretrain import pretrain
    from glm5.train.sparsify import sparsify
    from glm5.utils.files import write_json

    seconds: dict[str, float] = {}

    @contextmanager
    def part(name: str, text: str) -> Iterator[None]:
        console.print(f"[bold]{name:<9}[/bold] {text}", soft_wrap=True)
        began = time.perf_counter()
        yield
        seconds[name] = time.perf_counter() - began

    def say(line: str) -> None:
        console.print(f"  {line}", soft_wrap=True, markup=False)

    with part("pretrain", "on the Python standard library's source, copies of held-out files removed; dense attention"):
        pretrain(recipe.pretrain, say)
    with part("sparsify", "the indexers learn from the dense attention, then everything with sparse attention"):
        sparse = sparsify(recipe.sparsify, say)
    model, tokenizer = load_model(sparse.model), load_tokenizer(sparse.model)
    names = set(TokenStore(sparse.run / "data" / "held-out").names)
    unseen = [document for document in collect(recipe.sparsify).documents if document.id in names]
    with part("draft", f"greedy decoding with {DRAFTS} drafts from the shared MTP block, and without"):
        spread = unseen[:: max(1, len(unseen) // recipe.draft_prompts)][: recipe.draft_prompts]
        half = recipe.sparsify.seq_len // 2
        prompts = [[*tokenizer.prefix_ids, *tokenizer.encode(document.text)[:half]] for document in spread]
        drafts = drafting(model, prompts, drafts=DRAFTS, new_tokens=recipe.draft_tokens)
    with part("complete", "code that no file holds"):
        completions = {}
        for prompt in PROMPTS:
            ids = [*tokenizer.prefix_ids, *tokenizer.encode(prompt)]
            new = model.generate(ids, max_new_tokens=80, temperature=0.4, seed=0)
            completions[prompt] = tokenizer.decode(new, skip_control=True)

    with part("answers", "a copy is fine-tuned on solved tasks, then learns from verified answers of its own"):
        learned = learned_answers(recipe.answers, sparse.run / "answers")

    xz, context = xz_bits_per_byte(unseen), recipe.sparsify.seq_len
    report = summarise(model, sparse, xz, drafts, completions, learned, seconds, context)
    write_json(sparse.run / "report.json", report)
    write_html(report, sparse.run)
    lines = [*report["lines"], "", f"report    {sparse.run / 'report.html'} and report.json"]
    console.print("\n".join([*lines, f"next      glm5 chat {sparse.model}"]), soft_wrap=True, markup=False)
    return report
