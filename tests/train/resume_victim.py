"""Trains a tiny model in children that are killed, over and over, and compares what is left with an undisturbed run.

Run by test_resume.py in a process of its own, which forks (so that torch is imported once):

    python resume_victim.py DIRECTORY STAGE PRECISION KILLS

Every other kill comes after a random time; the rest at a random file operation after a start's first step, which is
often inside a save, the first time always.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from saving_victim import kill_me_at

from glm5.data.loader import TokenDataset
from glm5.train.loop import Trainer
from glm5.train.schedule import BatchWarmup
from glm5.utils.runlog import read_metrics
from support.training import dataset, trainer

STEPS = 10
TIMED = ("time", "tokens_per_second", "memory_mib")


def train(directory: Path, data: TokenDataset, stage: Any, precision: Any, kill_at: int | None) -> None:
    """The run: a growing batch, micro-batches of unequal size, MTP on a part of the rows, a falling learning rate."""
    of = trainer(
        directory,
        data,
        stage=stage,
        precision=precision,
        steps=STEPS,
        batch=BatchWarmup(2, 5, 20),
        micro_batch=2,
        mtp_share=0.6,
        measure_every=3,
        save_every=2,
    )
    pending = [] if kill_at is None else [kill_at]

    def arm(_: Trainer) -> None:
        if pending:
            kill_me_at(pending.pop())

    of.run(on_step=arm)
    of.export(directory / "model")


def result(directory: Path) -> dict[str, Any]:
    """Checksums of the newest checkpoint's and the exported model's files, and the metrics but for times."""
    run = directory / "run"
    newest = max(p for p in (run / "checkpoints").iterdir() if p.name.startswith("step-"))
    assert newest.name == f"step-{STEPS:08d}", newest
    files = [*newest.iterdir(), *(directory / "model").glob("*.safetensors"), directory / "model" / "config.json"]
    records = [{k: v for k, v in r.items() if k not in TIMED} for r in read_metrics(run)]
    assert [r["step"] for r in records] == list(range(1, STEPS + 1))
    return {
        "files": {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(files)},
        "metrics": records,
    }


def child(directory: Path, data: TokenDataset, stage: str, precision: str, kill_at: int | None) -> int:
    """Fork a child that trains, quietly, and kills itself at a file operation if told so. Returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    with (directory / "errors").open("a") as errors, contextlib.redirect_stderr(errors):
        train(directory, data, stage, precision, kill_at)
    os._exit(0)


def unfinished(directory: Path) -> int:
    """When the newest save began that is still unfinished (nanoseconds), 0 if there is none."""
    return max((p.stat().st_mtime_ns for p in (directory / "run" / "checkpoints").glob(".saving-*")), default=0)


def main(directory: Path, stage: str, precision: str, kills: int) -> None:
    data = dataset(directory)
    whole, broken = directory / "whole", directory / "broken"
    for path in (whole, broken):
        path.mkdir()
    began = time.perf_counter()
    _, status = os.waitpid(child(whole, data, stage, precision, None), 0)
    assert status == 0, (whole / "errors").read_text()
    duration = time.perf_counter() - began

    rng = random.Random(stage + precision)  # noqa: S311
    during_save = in_steps = 0
    for n in range(kills):
        timed = n % 2 == 1
        before = unfinished(broken)
        operation = rng.randrange(10, 20) if n == 0 else rng.randrange(5, 45)
        pid = child(broken, data, stage, precision, None if timed else operation)
        if timed:
            time.sleep(rng.uniform(0.4, 1.0) * duration)
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status) or status == 0, (broken / "errors").read_text()
        if os.WIFSIGNALED(status):
            during_save += unfinished(broken) > before
            in_steps += unfinished(broken) <= before
    _, status = os.waitpid(child(broken, data, stage, precision, None), 0)
    assert status == 0, (broken / "errors").read_text()
    starts = json.loads((broken / "run" / "environment.json").read_text())["starts"]
    expected, found = result(whole), result(broken)
    assert found["metrics"] == expected["metrics"]
    differing = [name for name, digest in expected["files"].items() if found["files"].get(name) != digest]
    assert not differing, differing
    resumed = len({s["last_step"] for s in starts})
    print(f"during a save {during_save}, elsewhere {in_steps}, starts {len(starts)}, from {resumed} places")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
