"""`glm5 demo` on a corpus of a few files: its figures are its runs' own, and a second start finds everything done."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from glm5.cli import demo
from glm5.cli.demo_answers import write_tasks
from glm5.model.presets import nano
from glm5.posttrain.prompts import read_prompts
from glm5.posttrain.reason import Reasoner
from glm5.train.loop import Trainer
from glm5.train.schedule import BatchWarmup

WORDS = "def return import class self if else for while not None True False print len range open path with as".split()


def tiny(directory: Path) -> demo.Recipe:
    """The quick recipe with a tenth of everything."""
    quick = demo.recipe(directory / "run", quick=True)
    text = dict(corpus=str(directory / "corpus"), seq_len=32, held_out=0.2, held_out_rows=None)
    model = nano(
        vocab_size=320, hidden_size=32, num_hidden_layers=2, q_lora_rank=16, kv_lora_rank=16, index_topk=16,
        intermediate_size=48, moe_intermediate_size=16, n_routed_experts=4,
    )  # fmt: skip
    rows = dict(batch=BatchWarmup(4, 4, 0), micro_batch=4)
    return demo.Recipe(
        replace(quick.pretrain, **text, model=model, train=replace(quick.pretrain.train, steps=6, **rows)),
        replace(
            quick.sparsify,
            **text,
            warmup=replace(quick.sparsify.warmup, steps=3, **rows),
            adapt=replace(quick.sparsify.adapt, steps=3, **rows),
        ),
        quick.answers,
        draft_prompts=2,
        draft_tokens=8,
    )


def test_figures_are_those_of_the_two_runs_and_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)  # noqa: S311
    (tmp_path / "corpus").mkdir()
    for i in range(30):
        (tmp_path / "corpus" / f"{i:02}.py").write_text(" ".join(rng.choices(WORDS, k=60)) + "\n")
    console = Console(quiet=True)
    first = demo.run(tiny(tmp_path), console)
    run = tmp_path / "run"
    assert json.loads((run / "report.json").read_text()) == first
    dense = json.loads((run / "pretrain" / "result.json").read_text())["held_out"]["bits_per_byte"]
    assert first["bits_per_byte"]["dense"] == pytest.approx(dense, rel=1e-6)
    assert list(first["bits_per_byte"])[1:] == list(json.loads((run / "result.json").read_text())["bits_per_byte"])
    assert first["drafting"]["identical_to_plain"]
    assert first["cache_bytes_per_token"]["held"] == first["cache_bytes_per_token"]["ledger"]
    assert len(first["completions"]) == len(demo.PROMPTS)
    assert first["answers"]["steps"] == 2
    assert 0 <= first["answers"]["fine_tuned"] <= 1
    assert (run / "answers" / "rl" / "samples.jsonl").exists()
    page = (run / "report.html").read_text()
    assert "Learning from verified answers" in page
    for name, bits in first["bits_per_byte"].items():
        assert name in page
        assert f"{bits:.4g}" in page

    monkeypatch.setattr(Reasoner, "step", lambda *_: pytest.fail("learned again"))
    monkeypatch.setattr(Trainer, "step", lambda _: pytest.fail("trained again"))
    again = demo.run(tiny(tmp_path), console)
    for name in ("model", "corpus", "bits_per_byte", "indexer_recall", "completions", "answers"):
        assert again[name] == first[name], name


@pytest.mark.parametrize("quick", [True, False])
def test_the_recipe_is_one_run_that_feeds_the_other(quick: bool, tmp_path: Path) -> None:
    found = demo.recipe(tmp_path, quick=quick)
    assert Path(found.sparsify.checkpoint) == Path(found.pretrain.run) / "model"
    assert found.sparsify.seq_len == found.pretrain.seq_len > found.pretrain.model.index_topk
    assert found.sparsify.held_out_rows == found.pretrain.held_out_rows
    assert Path(found.answers.sft.checkpoint) == tmp_path / "model"
    assert Path(found.answers.reason.checkpoint) == Path(found.answers.sft.run) / "model"


def test_held_out_tasks_are_others(tmp_path: Path) -> None:
    write_tasks(tmp_path)
    learned, held = (read_prompts(tmp_path / f"{name}.jsonl") for name in ("tasks", "held-out"))
    assert (len(learned), len(held)) == (620, 100)
    texts = {p.messages[0].content for p in learned}
    assert not texts & {p.messages[0].content for p in held}
    for p in [*learned, *held]:
        digits = p.messages[0].content.removeprefix("max(").removesuffix(")").split(", ")
        assert max(map(int, digits)) == int(p.answer)
