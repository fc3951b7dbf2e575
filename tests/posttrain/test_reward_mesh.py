"""A reward model on two processes: what one makes, also where a process has no row of a step; and it goes on on one."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from test_reward_model import config, trunk

from glm5.parallel.mesh import World
from glm5.posttrain.reward.data import Example
from glm5.posttrain.reward.model import RewardModel
from glm5.posttrain.reward.train import RewardModelConfig, RewardTrainer, train_reward_model
from glm5.train.ranks import Ranks
from glm5.train.schedule import LearningRate
from glm5.utils.config_io import save
from glm5.utils.errors import CheckpointError, ConfigError
from glm5.utils.runlog import read_metrics
from support.ranks import run_ranks


def in_two(given: RewardModelConfig) -> str:
    """What the command says of a run on two processes."""
    path = Path(given.run).with_suffix(".json")
    save(path, given)
    command = [sys.executable, "-m", "glm5.cli.main", "reward-model", "--config", str(path), "--mesh", "dp=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("batch", [5, 1])
def test_two_processes_make_what_one_makes(tmp_path: Path, batch: int) -> None:
    """Of a batch of 1 the second process has nothing to read, and the same gradients all the same."""
    small = dict(steps=3, batch=batch, micro_batch=2, eval_every=2, save_every=2, lr=LearningRate(1e-4, 1e-4))
    one = config(tmp_path, run=str(tmp_path / "one"), **small)
    alone = train_reward_model(one, lambda _: None)
    two = replace(one, run=str(tmp_path / "two"))
    said = in_two(two)
    assert said.count("held out  accuracy") == 1  # one process speaks
    metrics = [read_metrics(run) for run in (alone.run, two.run)]
    for name in ("loss", "accuracy", "margin", "grad_norm", "held_out/loss", "held_out/accuracy"):
        values, others = ([r[name] for r in some if name in r] for some in metrics)
        assert values
        assert others == pytest.approx(values, rel=1e-4, abs=1e-6), name
    models = [RewardModel.load(Path(run) / "model") for run in (alone.run, two.run)]
    assert models[1].centre == pytest.approx(models[0].centre, rel=1e-4)
    for (name, a), (_, b) in zip(models[0].named_parameters(), models[1].named_parameters(), strict=True):
        assert float((a - b).detach().abs().max()) < 1e-4, name

    # On one process from where the two ended.
    more = train_reward_model(replace(two, mesh="", steps=3), lambda _: None)
    assert more.steps == 3
    assert more.held_out["before"] == pytest.approx(alone.held_out["before"], rel=1e-4)


def test_a_mesh_that_would_divide_the_model_is_refused(tmp_path: Path) -> None:
    for mesh in ("dp=2,ep=2", "tp=2", "dp=2,shard=1"):
        with pytest.raises(ConfigError, match="may have dp alone"):
            RewardModelConfig(mesh=mesh)


def trainer(directory: Path, ranks: Ranks | None = None) -> RewardTrainer:
    examples = [Example(((1, 2, 3), (1, 2, 4)))]
    return RewardTrainer(RewardModelConfig(), RewardModel(trunk(), "pairwise"), examples, [], directory, ranks)


def _resumed(world: World, directory: str) -> str:
    with pytest.raises(CheckpointError) as said:
        trainer(Path(directory, str(world.rank)), Ranks(world)).resume()
    return said.value.what


def test_ranks_that_see_other_directories_do_not_go_on(tmp_path: Path) -> None:
    """One would begin anew beside another that goes on, and their gradients would be added up."""
    begun = trainer(tmp_path / "0")
    begun.finished_steps = 3
    begun.save()
    told = "rank 1: sees no checkpoint, and rank 0 the one of step 3"
    assert run_ranks(2, "dp=2", _resumed, str(tmp_path)) == [told, told]
