"""Trains a tiny model in children that are killed, over and over, and compares what is left with an undisturbed run.

Run by test_resume.py in a process of its own, which forks (so that torch is imported once):

    python resume_victim.py DIRECTORY STAGE PRECISION KILLS

Kills come in turn at a random file operation after a start's first step (which is often inside a save, the first time
always), at a random micro-batch (always outside one), and after a random time.
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

from glm5.data.loader import Batch, TokenDataset
from glm5.train.loop import Trainer
from glm5.train.schedule import BatchWarmup
from glm5.utils.runlog import read_metrics
from support.training import dataset, trainer

STEPS = 10
TIMED = ("time", "tokens_per_second", "tflops_per_device", "memory_mib", "memory")


Kill = tuple[str, int] | None
"""("operation" or "batch", which one), or None: nothing inside the child kills it."""


def kill_me_at_batch(n: int) -> None:
    """SIGKILL this process when it asks for its n-th micro-batch."""
    load, left = TokenDataset.batch, n

    def counted(self: TokenDataset, *args: Any) -> Batch:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return load(self, *args)

    TokenDataset.batch = counted  # type: ignore[method-assign]


def train(directory: Path, data: TokenDataset, stage: Any, precision: Any, kill: Kill) -> None:
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
    kind, number = kill or ("", 0)
    pending = [number] if kind == "operation" else []
    if kind == "batch":
        kill_me_at_batch(number)

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


def child(directory: Path, data: TokenDataset, stage: str, precision: str, kill: Kill) -> int:
    """Fork a child that trains, quietly, and kills itself where it is told to. Returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    with (directory / "errors").open("a") as errors, contextlib.redirect_stderr(errors):
        train(directory, data, stage, precision, kill)
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
        before = unfinished(broken)
        operation = rng.randrange(10, 20) if n == 0 else rng.randrange(5, 45)
        kill: Kill = (("operation", operation), ("batch", rng.randrange(6, 10)), None)[n % 3]
        pid = child(broken, data, stage, precision, kill)
        if kill is None:
            time.sleep(rng.uniform(0.2, 0.8) * duration)
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
