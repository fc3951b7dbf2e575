"""`glm5 pretrain` and `glm5 sparsify` as commands: what they accept, print, leave behind, and go on from."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from glm5.cli import main as cli
from glm5.cli.pretrain import choose, describe, take_option
from glm5.model.presets import mini
from glm5.train.midtrain import MidtrainConfig
from glm5.train.prepare import TextConfig
from glm5.train.pretrain import PretrainConfig
from glm5.utils.config_io import to_dict
from glm5.utils.errors import ConfigError, UserError
from glm5.utils.runlog import read_metrics, run_status

SMALL = (
    "--model.hidden-size 32 --model.num-hidden-layers 2 --model.vocab-size 320 --model.q-lora-rank 16 "
    "--model.kv-lora-rank 16 --model.index-topk 8 --model.intermediate-size 48 --model.moe-intermediate-size 16 "
    "--model.n-routed-experts 4 --seq-len 32 --held-out 0.2 --train.steps 4 --train.save-every 2 "
    "--train.batch.initial 4 --train.batch.final 4"
).split()


@dataclass
class Found:
    """What a command gave."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Found]:
    """`run("pretrain", ...)` is `glm5 pretrain ...` in `here`; in this process, since importing torch takes seconds."""
    monkeypatch.chdir(here)

    def command(*argv: str) -> Found:
        status = cli.main(argv)
        return Found(status, *capsys.readouterr())

    return command


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with a corpus."""
    directory = tmp_path_factory.mktemp("here")
    (directory / "corpus").mkdir()
    names = [f"{a}_{b}" for a in ("read", "write", "open", "close") for b in ("file", "line", "path", "text", "byte")]
    for i, name in enumerate(names):
        words = " ".join(names[(i * k) % len(names)] for k in range(1, 60))
        (directory / "corpus" / f"{name}.py").write_text(f"def {name}(x):\n    return {words}\n")
    return directory


# --------------------------------------------------------------------------- the whole walk, as a user types it
def test_pretrain_sparsify_and_chat_follow_one_another(here: Path, run: Callable[..., Found]) -> None:
    dry = run("pretrain", "--corpus", "corpus", "--run", "runs/a", *SMALL, "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert "training  4 steps of 4 rows of 32: 512 tokens" in dry.stdout
    assert "memory    about" in dry.stdout
    assert not (here / "runs").exists()

    first = run("pretrain", "--corpus", "corpus", "--run", "runs/a", *SMALL)
    assert first.returncode == 0, first.stderr
    assert "bits per byte over" in first.stdout
    assert "pretrain  step 4/4" in first.stderr
    parameters = [line for line in dry.stdout.splitlines() if line.startswith("model     ") and "active" in line]
    trained = [line for line in first.stdout.splitlines() if line.startswith("trained")]
    assert parameters[0].split()[1] == trained[0].split()[1]  # the estimate counts what is trained

    # Its own configuration is a command, too, and finds the run finished.
    again = run("pretrain", "--config", "runs/a/config.json")
    assert again.returncode == 0, again.stderr
    assert "resumed after step 4" in again.stderr
    assert [r["step"] for r in read_metrics(here / "runs" / "a")] == [1, 2, 3, 4]
    other = run("pretrain", "--config", "runs/a/config.json", "--train.lr.peak", "1")
    assert other.returncode == 2
    assert "train.lr.peak=1.0: this run began with 0.02" in other.stderr

    # What it says to do next can be done.
    following = [line.removeprefix("next").strip() for line in first.stdout.splitlines()[-2:]]
    chat, sparsify = (line.split() for line in following)
    assert chat[:2] == ["glm5", "chat"]
    assert run(*chat[1:], "--prompt", "def ", "--max-new-tokens", "4").returncode == 0
    assert sparsify[:2] == ["glm5", "sparsify"]
    steps = "--seq-len 32 --held-out 0.2 --warmup.steps 3 --adapt.steps 2 --recall-rows 8".split()
    sparse = run(*sparsify[1:], *steps)
    assert sparse.returncode == 0, sparse.stderr
    for name in ("dense", "sparse, warm-up only", "sparse, adapted", "after adaptation"):
        assert f"  {name} " in sparse.stdout
    assert "glm5 chat runs/a-sparse/model" in sparse.stdout
    config = json.loads((here / "runs" / "a-sparse" / "model" / "config.json").read_text())
    assert config["glm5_attention"] == "sparse"


def test_a_terminated_run_goes_on_where_it_was_saved(here: Path, tmp_path: Path) -> None:
    argv = ["pretrain", "--corpus", str(here / "corpus"), "--run", "run", *SMALL, "--train.steps", "400"]
    command = [sys.executable, "-m", "glm5.cli.main", *argv, "--train.save-every", "1000"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") > 3):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"which is saved; the same command goes on from it" in said
    assert run_status(tmp_path / "run") == "interrupted"
    # (save_every may differ: it decides nothing that is computed.)
    done = read_metrics(tmp_path / "run")[-1]["step"]
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    assert checkpoint.name == f"step-{done:08d}"
    assert done < 400


# --------------------------------------------------------------------------- options
def test_mistakes_are_one_line_with_the_mend(run: Callable[..., Found]) -> None:
    for argv, message in (
        (("pretrain", "--corpus", "nowhere"), "cannot read the corpus nowhere: no such file"),
        (("pretrain", "--preset", "huge"), "preset='huge': must be one of glm5, mini, nano"),
        (("pretrain", "--preset"), "--preset needs a value"),
        (("pretrain", "--train.step", "3"), "train.step"),
        (("pretrain", "--train.steps", "0"), "steps=0: must be at least 1"),
        (
            ("pretrain", "--train.mtp-depths", "2", "--model.num-nextn-predict-layers", "0"),
            "this model has no MTP block",
        ),
        (("pretrain", "--vocab-size", "512", "--model.vocab_size", "600"), "contradict each other"),
        (("pretrain", "--from", "nowhere"), "nowhere"),
        (("pretrain", "--from", "a", "--preset", "nano"), "--preset nano and --from a both choose the shape"),
        (("pretrain", "--mesh", "pp=2", "--train.micro-batch", "3"), "train.batch.initial=8: must be a multiple of"),
        (("pretrain", "--mesh", "pp=2", "--train.micro-batch", "3"), "make it 9, or micro_batch 2"),
        (("sparsify",), "must name the dense model's directory"),
        (("sparsify", "nowhere", "--corpus", "corpus"), "nowhere: no such directory"),
    ):
        found = run(*argv, *(() if "--corpus" in argv else ("--corpus", "corpus")))
        assert found.returncode == 2, found.stdout
        assert message in found.stderr
        assert len(found.stderr.strip().splitlines()) == 1


def test_presets_and_shapes(tmp_path: Path) -> None:
    chosen = choose("mini", None, [])
    assert chosen.model == mini()
    assert (chosen.seq_len, chosen.train.steps) == (4096, 10_000)
    assert choose(None, None, []).model.hidden_size == 256
    shape = mini(hidden_size=512).save(tmp_path / "shape.json")
    assert choose(None, str(shape), []).model == mini(hidden_size=512)
    with pytest.raises(UserError, match="both choose the shape"):
        choose("nano", str(shape), [])
    with pytest.raises(UserError, match="--config and --preset nano both choose"):
        choose("nano", None, ["--config", "x"])
    with pytest.raises(ConfigError, match="no such file"):
        choose(None, str(tmp_path / "missing.json"), [])


def test_take_option() -> None:
    assert take_option(["--a", "1", "--preset", "nano", "--b"], "--preset") == ("nano", ["--a", "1", "--b"])
    assert take_option(["--model=x.json", "--model.hidden-size", "3"], "--model") == (
        "x.json",
        ["--model.hidden-size", "3"],
    )
    assert take_option([], "--model") == (None, [])
    for argv in (["--model"], ["--model", "--run"], ["--model", "a", "--model=b"]):
        with pytest.raises(UserError, match="--model"):
            take_option(argv, "--model")


def test_a_configuration_is_shown_whole() -> None:
    lines = describe(to_dict(PretrainConfig(corpus="some/where")))
    text: list[Any] = " ".join(lines).split()
    for word in ("corpus=some/where", "hidden_size=256", "batch.final=8", "lr.peak=0.02", "eos_token_id=0"):
        assert word in text
    assert all(len(line) <= 100 for line in lines)
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == ["run", "pipeline", "model", "train"]
    lines = describe(to_dict(MidtrainConfig()))
    assert [line.split()[0] for line in lines if not line.startswith(" ")][-3:] == ["stages.0", "stages.1", "stages.2"]
    assert "seq_len=202752" in " ".join(lines)
    with pytest.raises(ConfigError, match="seq_len=0"):
        TextConfig(seq_len=0)
