"""`glm5 sft` from the command line: a dry run that keeps nothing, a run, and bad rows in one message."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from glm5.cli.main import main
from glm5.model.weights import save_model
from support.conversations import tokenizer
from support.training import tiny


@pytest.fixture
def given(tmp_path: Path) -> list[str]:
    t = tokenizer()
    model = type(tiny())(tiny().config.replace(vocab_size=384), seed=0)
    save_model(model, tmp_path / "base", tokenizer=t)
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": c}]} for c in "xyz"]
    (tmp_path / "talk.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    options = ["--train.steps", "2", "--train.batch.initial", "2", "--train.batch.final", "2", "--device", "cpu"]
    return [
        "sft",
        str(tmp_path / "base"),
        *("--data", str(tmp_path / "talk.jsonl")),
        *("--run", str(tmp_path / "run"), "--seq-len", "32"),
        *options,
    ]


def test_a_dry_run_says_all_and_keeps_nothing(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*given, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "talk.jsonl: 3 conversations in 1 rows of 23; 100% of the mixture, 4 passes" in out
    assert "tokens are learned" in out
    assert "memory    about" in out
    assert not (tmp_path / "run").exists()


def test_a_run_says_what_comes_next(given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(given) == 0
    out = capsys.readouterr().out
    assert "trained   2 steps" in out
    assert f"glm5 chat {tmp_path / 'run' / 'model'}" in out
    assert (tmp_path / "run" / "model" / "chat_template.jinja").exists()
    assert main(given) == 0  # a finished run is not run again, and says the same
    assert "trained   2 steps" in capsys.readouterr().out


def test_mistakes_are_one_message(given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "talk.jsonl").write_text('{"messages": []}\n{"messages": 3}\n')
    assert main(given) == 2
    err = capsys.readouterr().err
    assert "2 of 2 rows cannot be used" in err
    assert "line 1: messages" in err
    assert "line 2: messages" in err
    assert main(["sft"]) == 2
    assert "glm5 sft CHECKPOINT" in capsys.readouterr().err
    assert main(["sft", str(tmp_path / "base")]) == 2
    assert "--data FILE" in capsys.readouterr().err
