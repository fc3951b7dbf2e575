"""`midtrain`: longer contexts in stages, mixed as told, one optimizer through all, resumable, on several ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from test_pretrain import config as pretrain_config
from test_pretrain import write_corpus

from glm5.model.weights import load_model
from glm5.parallel.mesh import World
from glm5.train.config import TrainConfig
from glm5.train.loop import Trainer
from glm5.train.midtrain import MidtrainConfig, Stage, midtrain, report_stages
from glm5.train.pretrain import pretrain
from glm5.train.schedule import BatchWarmup, LearningRate
from glm5.utils.errors import ConfigError, FileError
from glm5.utils.runlog import read_metrics
from support.ranks import as_launched, run_ranks


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with two corpora, a and b, and under run/model a model that was trained in rows of 32."""
    directory = tmp_path_factory.mktemp("dense")
    write_corpus(directory / "corpus")
    write_corpus(directory / "other", files=12, words=150, seed=3)
    pretrain(pretrain_config(directory), lambda _: None)
    return directory


def config(dense: Path, run: Path, **changes: Any) -> MidtrainConfig:
    a, b = str(dense / "corpus"), str(dense / "other")

    def stage(name: str, seq_len: int, *corpora: str, steps: int = 3) -> Stage:
        rate = LearningRate(2e-2, 1e-2, shape="linear")
        train = TrainConfig(steps=steps, batch=BatchWarmup(4, 4, 0), micro_batch=2, lr=rate, save_every=1)
        return Stage(name, seq_len, corpora, train)

    defaults: dict[str, Any] = dict(
        checkpoint=str(dense / "run" / "model"),
        run=str(run),
        held_out=0.2,
        held_out_rows=8,
        stages=(stage("64", 64, f"{a}=3", f"{b}=1"), stage("96", 96, b, steps=2)),
        device="cpu",
    )
    return MidtrainConfig(**{**defaults, **changes})


def test_stages_lengthen_and_mix_and_resume_to_the_same_bytes(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[tuple[int, int, dict[str, int]]] = []
    step = Trainer.step

    def watched(self: Trainer) -> dict[str, Any]:
        count = self.config.batch.batch(self.samples)
        numbers = self.loader.rows(self.samples, count)
        tasks = self.loader.dataset.task_rows  # type: ignore[attr-defined]
        each = {Path(n).name: sum(a <= x < b for x in numbers) for n, (a, b) in tasks.items()}
        rows.append((self.loader.dataset.seq_len, count, each))
        return step(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", watched)
        whole = midtrain(config(dense, tmp_path / "whole"), lambda _: None)
    assert rows == [(64, 4, {"corpus": 3, "other": 1})] * 3 + [(96, 4, {"other": 4})] * 2
    assert [m["lr"] for m in read_metrics(whole.run / "1-64")] == pytest.approx([0.02, 0.05 / 3, 0.04 / 3])
    assert {name: sorted(Path(p).name for p in of) for name, of in whole.bits_per_byte.items()} == {
        "64": ["corpus", "other"],
        "96": ["other"],
    }
    assert json.loads((whole.run / "result.json").read_text())["bits_per_byte"] == whole.bits_per_byte
    last = read_metrics(whole.run / "2-96")[-1]
    assert last["tokens"] == whole.tokens > 3 * 4 * 60

    def stop(self: Trainer) -> dict[str, Any]:
        if (self.loader.dataset.seq_len, self.finished_steps) == (96, 1):
            raise KeyboardInterrupt
        return step(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", stop)
        with pytest.raises(KeyboardInterrupt):
            midtrain(config(dense, tmp_path / "broken"), lambda _: None)
    broken = midtrain(config(dense, tmp_path / "broken"), lambda _: None)
    for name in ("model.safetensors", "config.json"):
        assert (whole.model / name).read_bytes() == (broken.model / name).read_bytes(), name
    assert broken.bits_per_byte == whole.bits_per_byte


def test_the_optimizer_goes_through_all_stages(dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One stage cut into two of its rows and rate is the same run: momenta are not begun anew."""
    given = config(dense, tmp_path / "one").stages[1]
    constant = LearningRate(1e-2, 1e-2, shape="constant")

    def stages(*steps: int) -> tuple[Stage, ...]:
        train = [TrainConfig(steps=n, batch=BatchWarmup(4, 4, 0), micro_batch=2, lr=constant) for n in steps]
        return tuple(Stage(f"{i}", 64, given.corpora, t) for i, t in enumerate(train))

    plain = Trainer._rows

    def shifted(self: Trainer, first: int, count: int) -> Any:  # a stage begins its rows anew; here they go on
        return plain(self, first + (8 if self.directory.name == "2-1" else 0), count)

    models = []
    monkeypatch.setattr(Trainer, "_rows", shifted)
    for name, steps in (("one", (4,)), ("two", (2, 2))):
        found = midtrain(config(dense, tmp_path / name, stages=stages(*steps), held_out=0.0), lambda _: None)
        models.append(load_model(found.model).state_dict())
    assert all(torch.equal(t, models[1][name]) for name, t in models[0].items())


def _on_ranks(world: World, dense: str, run: str) -> dict[str, dict[str, float]]:
    with as_launched(world):
        return midtrain(config(Path(dense), Path(run), mesh="cp=2"), lambda _: None).bits_per_byte


def test_ranks_train_what_one_process_trains(dense: Path, tmp_path: Path) -> None:
    """Rows are shared by position, as long ones are."""
    alone = midtrain(config(dense, tmp_path / "alone"), lambda _: None)
    together = run_ranks(2, "cp=2", _on_ranks, str(dense), str(tmp_path / "ranks"))
    for found in together:
        for stage, of in alone.bits_per_byte.items():
            assert found[stage] == pytest.approx(of, rel=2e-3)
    for stage in ("1-64", "2-96"):
        one, many = ([m["loss"] for m in read_metrics(tmp_path / name / stage)] for name in ("alone", "ranks"))
        assert many == pytest.approx(one, rel=2e-3)


def test_the_reports_lengths_and_rates() -> None:
    stages = report_stages()
    assert [s.seq_len for s in stages] == [32_768, 131_072, 202_752]
    tokens = [s.seq_len * s.train.steps for s in stages]
    assert [t / tokens[-1] for t in tokens] == pytest.approx([20, 10, 1], rel=0.03)
    ends = [(s.train.lr.peak, s.train.lr.final) for s in stages]
    assert ends[0][0] == 4e-5
    assert ends[-1][1] == 1e-5
    assert all(before[1] == after[0] for before, after in pairwise(ends))
    # On one line, by tokens.
    total = sum((1000, 500, 50))
    assert ends[0][1] == pytest.approx(4e-5 - 3e-5 * 1000 / total, rel=0.01)
    assert ends[1][1] == pytest.approx(4e-5 - 3e-5 * 1500 / total, rel=0.01)


def test_contradictions(dense: Path, tmp_path: Path) -> None:
    one = config(dense, tmp_path / "run").stages[0]
    with pytest.raises(ConfigError, match="two have one name"):
        config(dense, tmp_path / "run", stages=(one, one))
    with pytest.raises(ConfigError, match="names one twice"):
        Stage("a", 8, ("x", "x=2"))
    with pytest.raises(ConfigError, match="must be above 0"):
        Stage("a", 8, ("x=0",))
    with pytest.raises(ConfigError, match=r"stages\.0\.train\.batch\.initial=4: must be a multiple of dp=3"):
        config(dense, tmp_path / "run", mesh="dp=3")
    for field, other, said in (
        ("precision", "bf16", "'auto'"),
        ("momentum", 0.5, "0.95"),
        ("stage", "sparse", "'pret"),
    ):
        later = replace(one, name="later", train=replace(one.train, **{field: other}))
        with pytest.raises(ConfigError, match=rf"stages\.1\.train\.{field}=.* must stay {said}"):
            config(dense, tmp_path / "run", stages=(one, later))
    sparse = Stage("a", 64, one.corpora, TrainConfig(stage="sparse"))
    with pytest.raises(
        ConfigError, match=r"stages\.0\.train\.stage='sparse': this model attends densely: give 'pretrain'"
    ):
        midtrain(config(dense, tmp_path / "run", stages=(sparse,)), lambda _: None)
    lost = replace(one, corpora=(str(tmp_path / "nowhere"),))
    with pytest.raises(FileError, match="nowhere"):
        midtrain(config(dense, tmp_path / "run", stages=(lost,)), lambda _: None)
    assert not (tmp_path / "run").exists()
