"""Fine-tuning on two processes: the same losses and weights as on one, and the same files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from test_sft import checkpoint, config, write

from glm5.model.weights import load_model
from glm5.posttrain.sft import sft
from glm5.train.schedule import BatchWarmup, LearningRate
from glm5.utils.config_io import save
from glm5.utils.errors import ConfigError
from glm5.utils.runlog import read_metrics


def test_two_processes_make_what_one_makes(tmp_path: Path) -> None:
    held = (write(tmp_path / "held.jsonl"),)
    one = config(
        tmp_path,
        checkpoint=checkpoint(tmp_path),
        held_out=held,
        run=str(tmp_path / "one"),
        # Small steps: all updates have one size, in a direction that is rounding where a gradient is next to nothing.
        train=dict(
            batch=BatchWarmup(4, 4, 0),
            steps=3,
            measure_every=1,
            save_every=3,
            mtp_depths=1,
            lr=LearningRate(2e-4, 2e-5),
        ),
    )
    alone = sft(one, lambda _: None)

    save(tmp_path / "two.json", replace(one, run=str(tmp_path / "two")))
    command = [sys.executable, "-m", "glm5.cli.main", "sft", "--config", str(tmp_path / "two.json"), "--mesh", "dp=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("held out") == 2  # one process speaks
    spread = tmp_path / "two"
    losses = [[r["loss"] for r in read_metrics(run) if "loss" in r] for run in (alone.run, spread)]
    assert len(losses[0]) == 3
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    before, after, together = (load_model(p).state_dict() for p in (one.checkpoint, alone.model, spread / "model"))
    for name, start in before.items():
        apart, moved = (together[name] - after[name]).norm(), (after[name] - start).norm()
        assert float(apart) <= 0.05 * float(moved) + 1e-6, name
    results = [json.loads((run / "result.json").read_text()) for run in (alone.run, spread)]
    assert results[1]["held_out"] == pytest.approx(results[0].pop("held_out"), rel=1e-4)
    assert {k: v for k, v in results[1].items() if k != "held_out"} == results[0]


def test_a_batch_that_cannot_be_dealt_out_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.batch"):
        config(tmp_path, mesh="dp=2", train=dict(batch=BatchWarmup(3, 3, 0)))
