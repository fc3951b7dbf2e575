"""`glm5 reward-model` from the command line: a dry run that keeps nothing, a run with its curves, mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from glm5.cli.main import main
from glm5.model.weights import save_model
from glm5.posttrain.reward.model import HEAD, Scorer
from glm5.text import Message
from support.conversations import tokenizer
from support.training import tiny


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    model = type(tiny())(tiny().config.replace(vocab_size=384), seed=0)
    save_model(model, tmp_path / "base", tokenizer=tokenizer())
    rows = [{"prompt": f"{i}", "chosen": "def", "rejected": "null"} for i in range(6)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    data = str(tmp_path / "pairs.jsonl")
    return [
        *(str(tmp_path / "base"), "--data", data, "--held-out", data, "--run", str(tmp_path / "run")),
        *("--steps", "2", "--batch", "4", "--seq-len", "32", "--device", "cpu"),
    ]


def test_a_dry_run_a_run_and_its_curves(options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reward-model", *options, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "6 pairwise rows, 1.33 passes; 6 held out" in out
    assert "dry run: nothing was kept" in out
    assert not (tmp_path / "run").exists()

    assert main(["reward-model", *options]) == 0
    out = capsys.readouterr().out
    assert "trained   2 steps" in out
    assert "held out  accuracy:" in out
    model = tmp_path / "run" / "model"
    assert f"--reward.model {model}" in out
    assert (model / HEAD).is_file()
    assert len(Scorer.load(model).score([([Message("user", "0")], "def")])) == 1
    assert main(["watch", str(tmp_path / "run"), "--once"]) == 0
    assert "loss" in capsys.readouterr().out
    assert main(["reward-model", *options]) == 0  # a finished run is not run again, and says the same
    assert capsys.readouterr().out == out
    assert main(["generate", str(model), "--prompt", "a", "--max-new-tokens", "1", "--device", "cpu"]) == 0


def test_mistakes_are_one_message(options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "x"}\n{"prompt": "x", "chosen": "a", "rejected": "a"}\n')
    assert main(["reward-model", *options]) == 2
    err = capsys.readouterr().err
    assert "2 of 2 rows cannot be used" in err
    assert "line 2: chosen, rejected: the same" in err
    assert main(["reward-model"]) == 2
    assert "must name the model's directory" in capsys.readouterr().err
    assert main(["reward-model", *options, "--steps", "0"]) == 2
    assert "steps" in capsys.readouterr().err
