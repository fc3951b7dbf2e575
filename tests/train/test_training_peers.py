"""The benchmark beside other trainers compares one model: the first losses of all agree, on weights that would tell."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

FILE = Path(__file__).parents[2] / "benchmarks" / "training_peers.py"


@pytest.fixture(scope="module")
def peers() -> ModuleType:
    spec = importlib.util.spec_from_file_location("training_peers", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["training_peers"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_train_one_model(peers: ModuleType, tmp_path: Path) -> None:
    options = argparse.Namespace(device="cpu", preset="nano", rows=2, micro_batch=1, seq_len=48, steps=1)
    job = peers.prepared(options, tmp_path / "data")
    for name, t in job.weights.items():
        if name.endswith("weight") and t.ndim == 2 and "norm" not in name:
            t.mul_(4.0)  # attention and routers that choose, so that another model would have another loss
        if name.endswith("e_score_correction_bias"):
            t.copy_(torch.linspace(-0.3, 0.3, len(t)))
    losses = {}
    for name in ("glm5", "plain", "deepseek", "glm"):
        row = peers.measured(name, job)
        assert not row.note, row
        assert row.tokens_per_second > 0
        assert row.tflops > 0
        losses[name] = row.first_loss
    assert losses["glm5"] > 8.2  # far from the 7.6 of a model that knows nothing
    assert losses["plain"] == pytest.approx(losses["glm5"], abs=1e-4)
    assert losses["deepseek"] == pytest.approx(losses["glm5"], abs=1e-3)  # its log has four digits
    assert losses["glm"] == pytest.approx(losses["glm5"], abs=1e-3)


def test_says_what_is_not_installed(peers: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    assert peers.measured("glm", None).note == "accelerate is not installed"
