"""`sparsify`: two stages on a dense checkpoint, each doing its part alone, resumable to the same bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_pretrain import config as pretrain_config
from test_pretrain import write_corpus

from glm5.model.weights import load_model, save_model
from glm5.parallel.mesh import World
from glm5.text.tokenizer import load_tokenizer
from glm5.train import evaluate
from glm5.train.config import TrainConfig
from glm5.train.loop import Trainer
from glm5.train.prepare import prepare
from glm5.train.pretrain import pretrain
from glm5.train.schedule import BatchWarmup, LearningRate
from glm5.train.sparsify import SparsifyConfig, sparsify
from glm5.utils.errors import CheckpointError, ConfigError, DataError
from glm5.utils.runlog import read_metrics
from support.ranks import as_launched, run_ranks


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a corpus and, under run/model, a dense model that has learned something of it."""
    directory = tmp_path_factory.mktemp("dense")
    write_corpus(directory / "corpus")
    pretrain(pretrain_config(directory, train=dict(steps=30)), lambda _: None)
    return directory


def config(dense: Path, run: Path, **changes: Any) -> SparsifyConfig:
    stage: dict[str, Any] = dict(batch=BatchWarmup(4, 4, 0), micro_batch=4, save_every=2)
    warmup = dict(stage="warmup", steps=6, lr=LearningRate(2e-2, 2e-3, shape="linear"), **stage)
    adapt = dict(stage="sparse", steps=5, lr=LearningRate(2e-3, 2e-3, shape="constant"), **stage)
    defaults: dict[str, Any] = dict(
        checkpoint=str(dense / "run" / "model"),
        corpus=str(dense / "corpus"),
        run=str(run),
        seq_len=32,
        held_out=0.2,
        topk=8,
        warmup=TrainConfig(**{**warmup, **changes.pop("warmup", {})}),
        adapt=TrainConfig(**{**adapt, **changes.pop("adapt", {})}),
    )
    return SparsifyConfig(**{**defaults, **changes})


def stop_in(stage: str, step: int) -> Callable[[Trainer], dict[str, Any]]:
    """`Trainer.step` that is interrupted in one step of one stage."""
    whole = Trainer.step

    def interrupted(self: Trainer) -> dict[str, Any]:
        if (self.config.stage, self.finished_steps) == (stage, step):
            raise KeyboardInterrupt
        return whole(self)

    return interrupted


def test_each_stage_moves_its_part(dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Warm-up leaves all but the indexers as they were, bit for bit; adaptation moves everything that is used."""
    before = load_model(dense / "run" / "model").state_dict()
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", stop_in("sparse", 0))
        with pytest.raises(KeyboardInterrupt):
            sparsify(config(dense, tmp_path / "run"), lambda _: None)
    newest = max((tmp_path / "run" / "warmup" / "checkpoints").glob("step-*"))
    from safetensors.torch import load_file

    warm = load_file(newest / "model.safetensors")
    assert {n for n in before if not torch.equal(before[n], warm[n])} == {n for n in before if ".indexer." in n}

    found = sparsify(config(dense, tmp_path / "run"), lambda _: None)
    after = load_model(found.model)
    unmoved = {n for n, t in after.state_dict().items() if torch.equal(t, warm[n])}
    assert not unmoved
    assert after.config.index_topk == 8
    assert after.config.extra["glm5_attention"] == "sparse"


def test_the_report_is_what_the_checkpoints_measure(dense: Path, tmp_path: Path) -> None:
    said: list[str] = []
    found = sparsify(config(dense, tmp_path / "run"), said.append)
    assert list(found.bits_per_byte) == [
        "dense",
        "sparse, warm-up only",
        "sparse, adapted",
        "dense attention, adapted weights",
    ]
    assert list(found.recall) == ["untrained", "after warm-up", "after adaptation"]
    first, last = load_model(dense / "run" / "model", index_topk=8), load_model(found.model)
    data = prepare(
        config(dense, tmp_path / "run"), tmp_path / "run" / "data", ahead=4, vocab_size=320,
        tokenizer=load_tokenizer(found.model), begun=True, say=lambda _: None,
    )  # fmt: skip
    assert data.held_out is not None
    for model, sparse, name in ((first, False, "dense"), (last, True, "sparse, adapted")):
        again = evaluate.held_out(model, data.held_out, sparse=sparse)
        assert again.bits_per_byte == pytest.approx(found.bits_per_byte[name], rel=1e-6)
    # The same split by hash: what pretraining held out is held out here too.
    pretrained = json.loads((dense / "run" / "result.json").read_text())
    assert found.bits_per_byte["dense"] == pytest.approx(pretrained["held_out"]["bits_per_byte"], rel=1e-6)
    assert json.loads((tmp_path / "run" / "result.json").read_text()) == found.result
    layers = found.result["recall_by_layer"]["after warm-up"]
    assert found.recall["after warm-up"] == pytest.approx(sum(layers) / 2)
    assert sum("bits per byte" in line for line in said) == 4


def test_warmup_raises_recall_and_adaptation_recovers_bits(dense: Path, tmp_path: Path) -> None:
    """The point of it all, at a size where a few steps show it: k a quarter of the rows."""
    adapt = dict(steps=40, lr=LearningRate(1e-2, 1e-2, shape="constant"))
    found = sparsify(config(dense, tmp_path / "run", warmup=dict(steps=40), adapt=adapt), lambda _: None)
    assert found.recall["after warm-up"] > found.recall["untrained"] + 0.01
    assert found.bits_per_byte["sparse, adapted"] < found.bits_per_byte["sparse, warm-up only"]
    kl = [r["indexer_kl"] for r in read_metrics(tmp_path / "run" / "warmup")]
    assert sum(kl[-5:]) < sum(kl[:5])


@pytest.mark.parametrize(("stage", "step"), [("warmup", 3), ("sparse", 3)])
def test_stopped_in_either_stage_it_ends_in_the_same_bytes(
    stage: str, step: int, dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = sparsify(config(dense, tmp_path / "whole"), lambda _: None)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", stop_in(stage, step))
        with pytest.raises(KeyboardInterrupt):
            sparsify(config(dense, tmp_path / "broken"), lambda _: None)
    broken = sparsify(config(dense, tmp_path / "broken"), lambda _: None)
    for name in ("model.safetensors", "config.json"):
        assert (whole.model / name).read_bytes() == (broken.model / name).read_bytes()
    assert whole.result == broken.result


def _on_ranks(world: World, dense: str, run: str) -> tuple[dict[str, float], dict[str, float]]:
    with as_launched(world):
        found = sparsify(config(Path(dense), Path(run), mesh="dp=2,ep=2"), lambda _: None)
        return found.bits_per_byte, found.recall


def test_both_stages_run_on_ranks(dense: Path, tmp_path: Path) -> None:
    """Warm-up and adaptation, the way between them, and every measurement: as in one process."""
    alone = sparsify(config(dense, tmp_path / "alone"), lambda _: None)
    for bits, recall in run_ranks(2, "dp=2,ep=2", _on_ranks, str(dense), str(tmp_path / "ranks")):
        assert list(bits) == list(alone.bits_per_byte)
        assert bits == pytest.approx(alone.bits_per_byte, rel=2e-3)
        assert recall == pytest.approx(alone.recall, abs=0.02)
    for stage, name in (("warmup", "indexer_kl"), ("adapt", "loss")):
        one, many = ([m[name] for m in read_metrics(tmp_path / run / stage)] for run in ("alone", "ranks"))
        assert many == pytest.approx(one, rel=1e-2)  # Muon magnifies the last digits of weak directions, step by step
    dense_weights = load_model(dense / "run" / "model").state_dict()
    warmed = load_model(tmp_path / "ranks" / "warmup" / "model").state_dict()
    moved = {n for n, t in warmed.items() if not torch.equal(t, dense_weights[n])}
    assert moved
    assert all(".indexer." in name for name in moved)


def test_a_finished_run_measures_nothing_twice(dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = sparsify(config(dense, tmp_path / "run"), lambda _: None)
    monkeypatch.setattr("glm5.train.sparsify.held_out", lambda *_, **__: pytest.fail("measured again"))
    assert sparsify(config(dense, tmp_path / "run"), lambda _: None).result == first.result


def test_bf16_keeps_the_digits_of_what_rests(dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Warm-up in bf16 hands on the fp32 weights that it did not train, not their roundings."""
    before = load_model(dense / "run" / "model").state_dict()
    seen: list[dict[str, Any]] = []
    full = Trainer.fp32_model

    def record(self: Trainer) -> Any:
        model = full(self)
        seen.append({n: t.clone() for n, t in model.state_dict().items()})
        return model

    monkeypatch.setattr(Trainer, "fp32_model", record)
    precision = dict(precision="bf16")
    sparsify(config(dense, tmp_path / "run", warmup=precision, adapt=precision), lambda _: None)
    after_warmup = seen[0]
    resting = [n for n in before if ".indexer." not in n]
    assert all(torch.equal(before[n], after_warmup[n]) for n in resting)
    assert any(not torch.equal(before[n], before[n].bfloat16().float()) for n in resting)


# --------------------------------------------------------------------------- what cannot work
def test_contradictions(dense: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for changes, match in (
        (dict(checkpoint=""), "checkpoint='': must name the dense model's directory"),
        (dict(topk=32), "seq_len=32: must exceed index_topk=32"),
        (dict(topk=0), "index_topk=0: must be a positive integer"),
        (dict(seq_len=100_000), "fewer than one sequence of 100,000"),
    ):
        with pytest.raises((ConfigError, DataError), match=match):
            sparsify(config(dense, run, **changes), lambda _: None)
    with pytest.raises(ConfigError, match=r"warmup\.stage='sparse': must be 'warmup'"):
        config(dense, run, warmup=dict(stage="sparse"))
    with pytest.raises(CheckpointError, match="no such directory"):
        sparsify(config(dense, run, checkpoint=str(tmp_path / "nowhere")), lambda _: None)
    assert not (run / "warmup" / "checkpoints").exists()


def test_a_gqa_model_has_nothing_to_make_sparse(dense: Path, tmp_path: Path) -> None:
    model = pretrain(
        pretrain_config(
            tmp_path,
            corpus=str(dense / "corpus"),
            train=dict(steps=1),
            model=pretrain_config(tmp_path).model.replace(attention="gqa", head_dim=16),
        ),
        lambda _: None,
    ).model
    with pytest.raises(ConfigError, match="stage='warmup': a GQA model has no indexer to train"):
        sparsify(config(dense, tmp_path / "sparse", checkpoint=str(model)), lambda _: None)


def test_a_run_goes_on_with_its_own_configuration_and_weights_alone(dense: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    sparsify(config(dense, run), lambda _: None)
    with pytest.raises(ConfigError, match=r"adapt\.lr\.peak=0\.1: this run began with 0\.002"):
        sparsify(config(dense, run, adapt=dict(lr=LearningRate(0.1, 0.1, shape="constant"))), lambda _: None)
    other = load_model(dense / "run" / "model")
    with torch.no_grad():
        other.lm_head.weight.mul_(2)
    save_model(other, tmp_path / "other", tokenizer=load_tokenizer(dense / "run" / "model"))
    with pytest.raises(ConfigError, match="its weights are not those that this run began with"):
        sparsify(config(dense, run, checkpoint=str(tmp_path / "other")), lambda _: None)
    sparsify(config(dense, run, warmup=dict(log_every=2)), lambda _: None)


def test_the_corpus_is_by_default_that_of_the_checkpoints_run(tmp_path: Path) -> None:
    run = tmp_path / "mine"
    run.mkdir()
    (run / "config.json").write_text(json.dumps({"corpus": "some/where", "seq_len": 64}))
    assert SparsifyConfig(checkpoint=str(run / "model")).corpus == "some/where"
    assert SparsifyConfig(checkpoint=str(run / "model"), corpus="else/where").corpus == "else/where"
    assert SparsifyConfig(checkpoint=str(tmp_path / "other" / "model")).corpus == "stdlib"
