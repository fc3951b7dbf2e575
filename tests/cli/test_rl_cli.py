"""`glm5 rl reason` and `glm5 distill` from the command line: a dry run that keeps nothing, runs, curves, mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from glm5.cli.main import main
from glm5.model.weights import save_model
from support.conversations import tokenizer
from support.training import tiny


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "support"))
    model = type(tiny())(tiny().config.replace(vocab_size=384), seed=0)
    save_model(model, tmp_path / "base", tokenizer=tokenizer())
    row = {"answer": "x", "verifier": "verifiers:even", "domain": "letters"}
    for name in ("train", "held"):
        rows = [{**row, "prompt": f"{name} {i}"} for i in range(6)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return [
        str(tmp_path / "base"),
        *("--prompts.data", str(tmp_path / "train.jsonl"), "--prompts.held-out", str(tmp_path / "held.jsonl")),
        *("--rollout.prompts", "2", "--rollout.group", "4", "--rollout.max-new-tokens", "2", "--rollout.no-thinking"),
        *("--rollout.memory-gib", "0.02", "--learn.steps", "2", "--device", "cpu", "--run", str(tmp_path / "run")),
    ]


def test_a_dry_run_says_all_and_keeps_nothing(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rl", "reason", *options, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "letters: 6, 100% of the mixture; 6 held out" in out
    assert "of one group of 4 answers" in out
    assert "learns from up to 16 answers" in out
    assert not (tmp_path / "run").exists()


def test_runs_and_their_curves(options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rl", "reason", *options]) == 0
    out = capsys.readouterr().out
    assert "learned   2 steps from" in out
    assert "held out  letters:" in out
    assert f"glm5 chat {tmp_path / 'run' / 'model'}" in out
    assert main(["watch", str(tmp_path / "run"), "--once"]) == 0
    assert "reward" in capsys.readouterr().out
    assert main(["rl", "reason", *options]) == 0  # a finished run is not run again, and says the same
    assert capsys.readouterr().out == out

    taught = [*options[:-1], str(tmp_path / "taught")]
    assert main(["distill", *taught, "--teachers", f"letters={tmp_path / 'run' / 'model'}"]) == 0
    out = capsys.readouterr().out
    assert "learned   2 steps from 4 prompts" in out
    assert (tmp_path / "taught" / "model" / "model.safetensors").exists()


def test_mistakes_are_one_message(options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rl"]) == 0
    assert "learn from verified answers" in capsys.readouterr().out
    assert main(["rl", "reasn"]) == 2
    assert "no kind 'reasn'" in capsys.readouterr().err
    (tmp_path / "train.jsonl").write_text('{"prompt": "x"}\n{"prompt": 3}\n')
    assert main(["rl", "reason", *options]) == 2
    err = capsys.readouterr().err
    assert "2 of 2 rows cannot be used" in err
    assert "line 2" in err
    assert main(["distill", *options]) == 2
    assert "must name a teacher for every domain" in capsys.readouterr().err
