"""`glm5 pretrain --mesh` from one command: it starts its processes, says things once, and survives their failures."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from glm5.cli.main import main
from glm5.utils.runlog import read_metrics

OPTIONS = (
    "--suffixes .md --held-out 0.2 --vocab-size 300 --seq-len 32 --model.hidden-size 32 --model.num-hidden-layers 2 "
    "--model.n-routed-experts 4 --model.index-topk 16 --held-out-rows 8 --device cpu --train.batch.initial 4 "
    "--train.batch.final 4 --train.micro-batch 2 --train.mtp-share 0.5 --train.measure-every 1000"
).split()


def start(directory: Path, *options: str) -> subprocess.Popen[str]:
    corpus = directory / "corpus"
    corpus.mkdir(exist_ok=True)
    for i in range(12):
        (corpus / f"{i}.md").write_text(f"# Page {i}\n\n" + " ".join(f"word{(i * j) % 97}" for j in range(200)))
    command = [sys.executable, "-m", "glm5.cli.main", "pretrain", "--corpus", str(corpus), *OPTIONS, *options]
    return subprocess.Popen(
        [*command, "--run", str(directory / "run")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def finished(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        process.terminate()  # which ends the processes that it started, too
        process.wait(60)
        raise
    return process.returncode, out, err


def await_step(directory: Path, step: int) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if (directory / "run" / "metrics.jsonl").exists() and len(read_metrics(directory / "run")) >= step:
            return
        time.sleep(0.05)
    raise AssertionError(f"step {step} did not come")


def process_of_rank(parent: int, rank: int) -> int:
    for path in Path("/proc").glob("[0-9]*"):
        try:
            own = int((path / "stat").read_text().rpartition(")")[2].split()[1]) == parent
            if own and f"\0RANK={rank}\0".encode() in b"\0" + (path / "environ").read_bytes():
                return int(path.name)
        except (ProcessLookupError, FileNotFoundError, PermissionError):
            continue
    raise AssertionError(f"no process of rank {rank}")


@pytest.mark.slow
def test_one_command_trains_on_a_mesh(tmp_path: Path) -> None:
    code, out, err = finished(start(tmp_path, "--mesh", "dp=2,ep=2", "--train.steps", "4"))
    assert code == 0, err
    assert len(re.findall("^trained ", out, re.M)) == 1  # one process speaks
    assert len(re.findall("^corpus ", out, re.M)) == 1
    result: dict[str, Any] = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["held_out"]["bits_per_byte"] > 0
    assert [m["step"] for m in read_metrics(tmp_path / "run")] == [1, 2, 3, 4]
    # What contradicts the run is said once, and in words, by the processes as well.
    code, out, err = finished(start(tmp_path, "--mesh", "tp=2", "--train.steps", "4", "--train.lr.peak", "0.1"))
    assert code == 2
    assert err.count("error: train.lr.peak=0.1: this run began with 0.02") == 1
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_killed_rank_starts_all_again(tmp_path: Path) -> None:
    options = ("--train.steps", "40", "--train.save-every", "5", "--train.mtp-depths", "1")
    process = start(tmp_path, "--mesh", "dp=2", "--restarts", "1", *options)
    await_step(tmp_path, 8)
    os.kill(process_of_rank(process.pid, 1), signal.SIGKILL)
    code, out, err = finished(process)
    assert code == 0, err
    assert "resumed after step" in err
    assert "trained " in out
    assert [m["step"] for m in read_metrics(tmp_path / "run")] == list(range(1, 41))


def test_ctrl_c_saves_and_ends(tmp_path: Path) -> None:
    process = start(tmp_path, "--mesh", "dp=2", "--train.steps", "4000", "--train.save-every", "4000")
    await_step(tmp_path, 3)
    process.send_signal(signal.SIGINT)  # as a terminal does: the processes that train are in groups of their own
    code, _, err = finished(process)
    assert code == 130
    assert err.count("interrupted") == 1
    assert "Traceback" not in err
    done = len(read_metrics(tmp_path / "run"))
    assert (tmp_path / "run" / "checkpoints" / f"step-{done:08d}").exists()


@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        ("dp=2,ep=3", "mesh.ep=3: must divide dp x cp = 2"),
        ("dp=2,xp=3", "unknown axis 'xp'"),
        ("tp=3", "mesh.tp=3: must divide num_attention_heads=4"),
        ("dp=3", "batch.initial=4: must be a multiple of dp=3"),
    ],
)
def test_meshes_that_do_not_fit_are_refused(
    mesh: str, said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "a.md").write_text("a " * 2000)
    assert main(["pretrain", *OPTIONS, "--corpus", str(corpus), "--mesh", mesh, "--run", str(tmp_path / "run")]) == 2
    assert said in capfd.readouterr().err
