"""`glm5 pretrain --mesh` from one command: it starts its processes, says things once, and survives their failures."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import glm5
from glm5.cli.main import main
from glm5.utils.runlog import read_metrics

OPTIONS = (
    "--suffixes .md --held-out 0.2 --vocab-size 300 --seq-len 32 --model.hidden-size 32 --model.num-hidden-layers 2 "
    "--model.n-routed-experts 4 --model.index-topk 16 --held-out-rows 8 --device cpu --train.batch.initial 4 "
    "--train.batch.final 4 --train.micro-batch 2 --train.mtp-share 0.5 --train.measure-every 1000"
).split()


def command(directory: Path, *options: str) -> list[str]:
    corpus = directory / "corpus"
    corpus.mkdir(exist_ok=True)
    for i in range(12):
        (corpus / f"{i}.md").write_text(f"# Page {i}\n\n" + " ".join(f"word{(i * j) % 97}" for j in range(200)))
    where = ["--corpus", str(corpus), "--run", str(directory / "run")]
    return ["-m", "glm5.cli.main", "pretrain", *where, *OPTIONS, *options]


def run(arguments: list[str], **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        start_new_session=True,
    )


def start(directory: Path, *options: str) -> subprocess.Popen[str]:
    return run(command(directory, *options))


def errors(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("error: ")]


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
    assert "death signal" not in err  # the launcher's own words
    done = len(read_metrics(tmp_path / "run"))
    assert (tmp_path / "run" / "checkpoints" / f"step-{done:08d}").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "mesh", "said"),
    [
        (3, [], "error: train.batch.initial=4: must be a multiple of dp=3, over which rows are dealt"),
        (2, ["--mesh", "dp=2,tp=2"], "error: mesh='dp=2,tp=2': pp=1 x dp=2 x cp=1 x tp=2 needs 4 processes"),
    ],
)
def test_torchrun_with_other_processes_than_it_takes(
    processes: int, mesh: list[str], said: str, tmp_path: Path
) -> None:
    """Said once, by the first rank, though all find it and torchrun ends all with the first that ends."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "--"]
    code, _, err = finished(run([*launch, *command(tmp_path, "--train.steps", "4", *mesh)]))
    assert code != 0
    assert [line.startswith(said) for line in errors(err)] == [True], err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_rank_without_memory_and_a_killed_one_are_named(tmp_path: Path) -> None:
    options = ("--mesh", "dp=2", "--train.steps", "4000", "--train.save-every", "10")
    for fault, said in (("full", "error: rank 1"), ("killed", "error: rank 1 was ended by signal 9")):
        process = start(tmp_path, *options)
        await_step(tmp_path, 8 if fault == "full" else len(read_metrics(tmp_path / "run")) + 8)
        victim = process_of_rank(process.pid, 1)
        if fault == "killed":
            os.kill(victim, signal.SIGKILL)
        else:  # nothing more can be had: whatever asks first fails
            used = re.search(r"VmSize:\s+(\d+)", Path(f"/proc/{victim}/status").read_text())
            assert used is not None
            resource.prlimit(victim, resource.RLIMIT_AS, (int(used[1]) * 1024, resource.RLIM_INFINITY))
        code, _, err = finished(process)
        assert code != 0
        assert errors(err)[0].startswith(said), err
        assert len(errors(err)) == 1, err


def test_other_code_on_a_rank_is_refused(tmp_path: Path) -> None:
    shutil.copytree(Path(glm5.__file__).parent, tmp_path / "other" / "glm5", ignore=shutil.ignore_patterns("_*__"))
    with (tmp_path / "other" / "glm5" / "train" / "losses.py").open("a") as f:
        f.write("# another line\n")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    own, other = str(Path(glm5.__file__).parents[1]), str(tmp_path / "other")
    places = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ask = command(tmp_path, "--mesh", "dp=2", "--train.steps", "4")
    ranks = [run(ask, **places, RANK=str(i), PYTHONPATH=p) for i, p in enumerate((own, other))]
    try:
        code, _, err = finished(ranks[0])
        assert code == 2
        assert errors(err)[0].startswith("error: rank 1 differs in the package's code: "), err
        assert "Start all ranks with one command, from the same files" in err
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        ("dp=2,ep=3", "mesh.ep=3: must divide dp x cp = 2"),
        ("dp=2,xp=3", "unknown axis 'xp'"),
        ("tp=3", "mesh.tp=3: must divide num_attention_heads=4"),
        ("dp=3", "batch.initial=4: must be a multiple of dp=3"),
        ("pp=2 --pipeline.schedule 2f2b", "invalid choice '2f2b' for argument '--pipeline.schedule'"),
        ("pp=2 --pipeline.recompute experts", "invalid choice 'experts' for argument '--pipeline.recompute'"),
        ("pp=2 --pipeline.layout E|H", "pipeline.layout='E|H': part 2 is H, and the model's is D"),
        ("pp=2 --pipeline.schedule interleaved --pipeline.stages-per-rank 9", "pipeline stages=18: "),
        ("pp=2 --pipeline.reduce-every -1", "pipeline.reduce_every=-1: must be at least 0"),
    ],
)
def test_meshes_that_do_not_fit_are_refused(
    mesh: str, said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "a.md").write_text("a " * 2000)
    assert (
        main(["pretrain", *OPTIONS, "--corpus", str(corpus), "--run", str(tmp_path / "run"), "--mesh", *mesh.split()])
        == 2
    )
    assert said in capfd.readouterr().err
    assert not (tmp_path / "run").exists()
