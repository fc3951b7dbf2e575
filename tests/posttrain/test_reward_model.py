"""Reward models learn what can be told apart, in any cut of a batch, and a stopped run ends in the same bytes."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from glm5.model.config import ModelConfig
from glm5.model.glm5 import GLM5
from glm5.model.weights import save_model
from glm5.posttrain.reward.data import answered, read_examples
from glm5.posttrain.reward.model import HEAD, RewardModel, Scorer, fingerprint
from glm5.posttrain.reward.train import (
    RewardModelConfig,
    RewardTrainer,
    measure,
    pair_loss,
    point_loss,
    resolve,
    train_reward_model,
)
from glm5.text import Message
from glm5.train.schedule import LearningRate
from glm5.utils.errors import CheckpointError, ConfigError, DataError
from glm5.utils.runlog import read_metrics
from support.conversations import tokenizer
from support.training import tiny


def trunk(seed: int = 2) -> GLM5:
    sizes = {**tiny().config.to_dict(), "vocab_size": 384, "hidden_size": 48}
    return GLM5(ModelConfig.from_dict(sizes), seed=seed)


def checkpoint(directory: Path) -> str:
    save_model(trunk(), directory, tokenizer=tokenizer())
    return str(directory)


def pairs(count: int, seed: int) -> list[dict[str, Any]]:
    """The better answer says "def" first, the worse one "null"; what follows is noise."""
    draw = random.Random(seed)  # noqa: S311
    words = ["weather", "true", "path/to", "{}", "return"]

    def tail() -> str:
        return " ".join(draw.choices(words, k=draw.randint(0, 3)))

    return [
        {"prompt": f"{draw.choice(words)} {i}", "chosen": f"def {tail()}", "rejected": f"null {tail()}"}
        for i in range(count)
    ]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def config(directory: Path, **changes: Any) -> RewardModelConfig:
    defaults: dict[str, Any] = dict(
        run=str(directory / "run"),
        seq_len=64,
        steps=30,
        batch=8,
        micro_batch=8,
        lr=LearningRate(3e-3, 3e-3),
        device="cpu",
        eval_every=0,
        save_every=10,
    )
    if "data" not in changes:
        defaults["data"] = (write(directory / "train.jsonl", pairs(48, 0)),)
        defaults["held_out"] = (write(directory / "held.jsonl", pairs(24, 1)),)
    if "checkpoint" not in changes:
        defaults["checkpoint"] = checkpoint(directory / "base")
    return RewardModelConfig(**{**defaults, **changes})


# --------------------------------------------------------------------------------------------------- values, losses
def test_a_value_does_not_depend_on_what_lies_beside_an_answer() -> None:
    model = RewardModel(trunk(), "pairwise").eval()
    texts = [answered(tokenizer(), [Message("user", "a" * n)], "null" * (n % 3 + 1)) for n in (1, 9, 4, 23, 2)]
    together = model.values(texts).detach()
    alone = torch.cat([model.values([text]) for text in texts]).detach()
    direct = torch.stack(
        [model.head(model.trunk.hidden(torch.tensor([text]))[0, -1])[0] for text in texts]  # the last token's state
    ).detach()
    assert torch.allclose(together, alone, atol=1e-5)
    assert torch.allclose(together, direct, atol=1e-5)
    assert together.std() > 0.1  # a new head tells answers apart
    assert torch.equal(model.all_values(texts, at_once=2), model.all_values(texts, at_once=2))
    assert torch.allclose(model.all_values(texts, at_once=2), together, atol=1e-5)


def test_losses_have_their_formulas_values() -> None:
    chosen, rejected = torch.tensor([1.0, 0.5]), torch.tensor([0.5, 2.0])
    expected = math.log(1 + math.exp(-0.5)) + math.log(1 + math.exp(1.5))
    assert float(pair_loss(chosen, rejected, 0.0)) == pytest.approx(expected)
    assert float(pair_loss(chosen, rejected, 0.1)) == pytest.approx(expected + 0.1 * (2.25 + 6.25))
    p = 1 / (1 + math.exp(-0.5))
    expected = -(0.25 * math.log(p) + 0.75 * math.log(1 - p))
    assert float(point_loss(torch.tensor([0.5]), torch.tensor([0.25]))) == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["pairwise", "pointwise"])
def test_the_step_does_not_depend_on_micro_batches(tmp_path: Path, kind: Any) -> None:
    rows = pairs(6, 3)
    if kind == "pointwise":
        rows = [{"prompt": r["prompt"], "response": r["chosen"], "score": i / 5} for i, r in enumerate(rows)]
    given = config(tmp_path, kind=kind, data=(write(tmp_path / "x.jsonl", rows),), batch=6, steps=1)
    examples = read_examples(given.data[0], kind, tokenizer(), 64)
    found = []
    for micro in (1, 4, 6):
        trainer = RewardTrainer(replace(given, micro_batch=micro), RewardModel(trunk(), kind), examples, [], tmp_path)
        metrics = trainer.advance(lambda: False)
        found.append((metrics, {n: p.detach().clone() for n, p in trainer.model.named_parameters()}))
    for metrics, weights in found[1:]:
        assert metrics["loss"] == pytest.approx(found[0][0]["loss"], rel=1e-5)
        assert metrics["grad_norm"] == pytest.approx(found[0][0]["grad_norm"], rel=1e-4)
        assert all(torch.allclose(w, found[0][1][n], atol=2e-4) for n, w in weights.items())
    moved = {n for n, p in RewardModel(trunk(), kind).named_parameters() if not torch.equal(p, found[0][1][n])}
    assert any("o_proj" in n for n in moved)
    assert {"head.weight", "trunk.model.embed_tokens.weight"} <= moved
    drafting = f"model.layers.{trunk().config.num_hidden_layers}."
    assert not any(".indexer." in n or "lm_head" in n or drafting in n for n in moved)


# --------------------------------------------------------------------------------------------------- learning
def test_a_preference_that_can_be_told_is_learned(tmp_path: Path) -> None:
    said: list[str] = []
    found = train_reward_model(config(tmp_path, steps=40), said.append)
    assert found.held_out["before"]["accuracy"] < 0.9
    assert found.held_out["after"]["accuracy"] == 1.0
    assert found.held_out["after"]["loss"] < 0.3
    assert "48 pairwise rows, 6.67 passes; 24 held out" in said[0]
    records = read_metrics(found.run)
    assert records[-1]["accuracy"] == 1.0
    assert records[-1]["margin"] > 1

    scorer = Scorer.load(found.model)
    good, bad = scorer.score([([Message("user", "true")], "def path/to"), ([Message("user", "true")], "null path/to")])
    assert 0 < bad < 0.4 < 0.6 < good < 1
    texts = [t for e in read_examples(str(tmp_path / "train.jsonl"), "pairwise", tokenizer(), 64) for t in e.texts]
    scores = scorer.model.scores(scorer.model.all_values(texts))
    assert abs(float(scores.mean()) - 0.5) < 0.05  # the zero is that of the training data
    assert fingerprint(found.model) == fingerprint(found.model)


def test_scores_are_learned_by_a_pointwise_head(tmp_path: Path) -> None:
    rows = []
    for row in pairs(24, 0):
        rows.append({"prompt": row["prompt"], "response": row["chosen"], "score": 5})
        rows.append(
            {"prompt": row["prompt"], "response": {"role": "assistant", "content": row["rejected"]}, "score": 2}
        )
    files = (write(tmp_path / "points.jsonl", rows),)
    given = config(tmp_path, kind="pointwise", score_range=(1, 5), data=files, held_out=files, steps=40)
    found = train_reward_model(given, lambda _: None)
    assert found.held_out["after"]["accuracy"] == 1.0
    assert found.held_out["after"]["error"] < 0.15 < found.held_out["before"]["error"]
    high, low = Scorer.load(found.model).score(
        [([Message("user", "{} 1")], "def {}"), ([Message("user", "{} 1")], "null")]
    )
    assert high == pytest.approx(1.0, abs=0.2)  # (5 - 1) / 4
    assert low == pytest.approx(0.25, abs=0.2)


def test_a_head_alone_leaves_the_trunk_as_it_was(tmp_path: Path) -> None:
    found = train_reward_model(config(tmp_path, steps=2, head_only=True), lambda _: None)
    before, after = trunk().state_dict(), RewardModel.load(found.model).trunk.state_dict()
    assert all(torch.equal(t, after[n]) for n, t in before.items())


# --------------------------------------------------------------------------------------------------- runs
class Stop(Exception):
    """As a kill: nothing of the loop runs after it."""


def test_a_run_that_is_cut_ends_in_the_same_bytes(tmp_path: Path) -> None:
    whole = config(tmp_path, steps=12, save_every=5, eval_every=4)
    expected = train_reward_model(whole, lambda _: None)
    cut = replace(whole, run=str(tmp_path / "cut"))
    given = resolve(cut)
    held = read_examples(cut.held_out[0], "pairwise", tokenizer(), 64)
    examples = read_examples(cut.data[0], "pairwise", tokenizer(), 64)
    trainer = RewardTrainer(given, RewardModel(trunk(), "pairwise", seed=given.seed), examples, held, Path(cut.run))

    def end() -> None:
        if trainer.finished_steps == 7:
            raise Stop

    with pytest.raises(Stop):
        trainer.run(end)
    Path(cut.run, "weights.json").write_text((Path(whole.run) / "weights.json").read_text())
    found = train_reward_model(cut, lambda _: None)
    assert found.held_out == expected.held_out
    for name in ("model.safetensors", HEAD, "reward.json"):
        assert (found.model / name).read_bytes() == (expected.model / name).read_bytes()
    timeless = [[{k: v for k, v in r.items() if k != "time"} for r in read_metrics(f.run)] for f in (expected, found)]
    assert timeless[0] == timeless[1]

    with pytest.raises(ConfigError, match="batch"):
        train_reward_model(replace(cut, batch=4), lambda _: None)
    write(tmp_path / "train.jsonl", pairs(47, 0))
    with pytest.raises(DataError, match="not those that this run began with"):
        train_reward_model(cut, lambda _: None)


# --------------------------------------------------------------------------------------------------- bad input
def test_bad_rows_are_listed_by_their_lines(tmp_path: Path) -> None:
    good = {"prompt": "a", "chosen": "b", "rejected": "c"}
    path = tmp_path / "bad.jsonl"
    lines = [
        good,
        {**good, "rejected": "b"},
        {**good, "chosen": "  "},
        {"prompt": "a", "response": "b", "score": 1},
        {**good, "prompt": [{"role": "assistant", "content": "x"}]},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + "{\n")
    with pytest.raises(DataError) as e:
        read_examples(str(path), "pairwise", tokenizer(), 64)
    text = str(e.value)
    assert "5 of 6 rows cannot be used" in text
    assert "line 2: chosen, rejected: the same" in text
    assert "line 3: chosen: '  '" in text
    assert "line 4: response: no field of pairwise rows. Give --kind pointwise" in text
    assert "line 5: prompt: ends with a message of role assistant" in text
    assert "line 6: not JSON" in text

    for score in (True, "1", 1.5, None):
        write(path, [{"prompt": "a", "response": "b", "score": score}])
        with pytest.raises(DataError, match=r"line 1: score: .*must be a number in \[0, 1\]"):
            read_examples(str(path), "pointwise", tokenizer(), 64)
    write(path, [good, {**good, "chosen": "weather " * 80}])
    with pytest.raises(DataError, match=r"1 of 2 rows have more than 64 tokens:\n  line 2: "):
        read_examples(str(path), "pairwise", tokenizer(), 64)
    with pytest.raises(ConfigError, match="score_range"):
        read_examples(str(path), "pointwise", tokenizer(), 64, (1.0, 1.0))


def test_what_is_no_reward_model_is_said(tmp_path: Path) -> None:
    base = checkpoint(tmp_path / "base")
    with pytest.raises(CheckpointError, match="is no reward model"):
        RewardModel.load(base)
    (tmp_path / "run").mkdir()
    path = RewardModel(trunk(), "pairwise", centre=0.25, scale=2.0).save(tmp_path / "run" / "model", tokenizer())
    with pytest.raises(CheckpointError, match="Give its model"):
        RewardModel.load(tmp_path / "run")
    loaded = RewardModel.load(path)
    assert (loaded.centre, loaded.scale) == (0.25, 2.0)
    assert float(loaded.scores(torch.tensor(0.25))) == 0.5
    (path / "reward.json").write_text('{"kind": "pairwise", "centre": 0.0, "scale": 0.0}')
    with pytest.raises(CheckpointError, match=r"reward\.json says"):
        RewardModel.load(path)
    (path / HEAD).write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match="damaged reward model"):
        RewardModel.load(path)
    with pytest.raises(ConfigError, match="must name the model's directory"):
        resolve(RewardModelConfig())
    with pytest.raises(ConfigError, match="must name at least one JSONL file"):
        resolve(RewardModelConfig(checkpoint=base))
    long = Scorer(RewardModel(trunk(), "pairwise"), tokenizer())
    with pytest.raises(DataError, match="the reward model reads"):
        long.score([([Message("user", "x")], "a" * (long.model.longest + 1))])
    assert long.score([]) == []


def test_measures_of_points_have_known_values() -> None:
    model = RewardModel(trunk(), "pointwise")
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.fill_(0.0)
    from glm5.posttrain.reward.data import Example

    texts = [answered(tokenizer(), [Message("user", c)], c) for c in "abc"]
    found = measure(model, [Example((t,), s) for t, s in zip(texts, (0.0, 0.5, 1.0), strict=True)])
    assert found["accuracy"] == 0.0  # equal values put nothing in order
    assert found["error"] == pytest.approx(1 / 3)
    assert found["loss"] == pytest.approx(math.log(2))
