"""Saves checkpoints in children that are killed, over and over, and checks after each kill what is left.

Run by test_checkpoint.py in a process of its own, which forks (so that torch is imported once):

    python saving_victim.py DIRECTORY operations    a kill at every single file operation of a save
    python saving_victim.py DIRECTORY times ROUNDS  kills at random times while saves run without a pause
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from glm5.train.checkpoint import CheckpointStore


def content(step: int) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any]]:
    """What the checkpoint of `step` must hold."""
    base = torch.arange(20_000, dtype=torch.int32) + step
    return {"weights": {"w": base.float()}, "optimizer": {"m": base, "n": base.bfloat16()}}, {"position": step * 7}


def check(directory: Path, at_least: int) -> int:
    """The newest checkpoint is whole, unwarned, and not older than the last save that was acknowledged."""
    store = CheckpointStore(directory)
    for path in store.list():
        store.load(int(path.name.removeprefix("step-")))  # also those before: none half removed
    found = store.load_newest()
    if found is None:
        assert at_least < 0, f"nothing left, and step {at_least} was saved"
        return -1
    assert found.warnings == (), found.warnings
    assert found.step >= at_least, (found.step, at_least)
    tensors, state = content(found.step)
    assert found.state == state
    for group, named in tensors.items():
        assert named.keys() == found.tensors[group].keys()
        for name, t in named.items():
            assert torch.equal(t, found.tensors[group][name])
    return found.step


def kill_me_at(n: int) -> None:
    """SIGKILL this process just before its n-th file operation (opening, renaming, removing, syncing...)."""
    left = n

    def count() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(lambda event, _: count() if event == "open" or event.startswith(("os.", "shutil.")) else None)
    fsync = os.fsync

    def counted_fsync(fd: int) -> None:
        count()
        fsync(fd)

    os.fsync = counted_fsync


def every_operation(directory: Path) -> None:
    """Kill the k-th save of a store at its n-th operation, for n = 1, 2, ... until a save survives."""
    kills, n, newest = 0, 0, -1
    while True:
        n += 1
        step = newest + 1
        child = os.fork()
        if child == 0:
            kill_me_at(n)
            CheckpointStore(directory, keep=2).save(step, *content(step))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        found = check(directory, newest)
        assert found in (newest, step)
        # A kill after the rename leaves the new step, of which the next child must not make a second attempt.
        newest = found
        # The first two saves have nothing to prune; an uninterrupted save later ends the loop.
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            if newest >= 3:
                break
            n = 0
            continue
        assert os.WTERMSIG(status) == signal.SIGKILL
        kills += 1
    left = sorted(p.name for p in directory.iterdir())
    assert left == [".lock", f"step-{newest - 1:08d}", f"step-{newest:08d}"], left
    print(f"kills {kills}, newest {newest}")


def random_times(directory: Path, rounds: int) -> None:
    """Kill a child that saves without a pause after a random time, `rounds` times."""
    rng = random.Random(0)  # noqa: S311
    newest = -1
    during = 0
    for _ in range(rounds):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            store, step = CheckpointStore(directory, keep=2), newest
            while True:
                step += 1
                store.save(step, *content(step))
                os.write(writer, step.to_bytes(4, "little"))
        os.close(writer)
        time.sleep(rng.uniform(0.0, 0.05))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with os.fdopen(reader, "rb") as f:
            acknowledged = f.read()
        during += any(p.name.startswith(".saving-") for p in directory.glob(".*"))
        at_least = int.from_bytes(acknowledged[-4:], "little") if acknowledged else newest
        newest = check(directory, at_least)
    print(f"kills {rounds}, during a save {during}, newest {newest}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[2] == "operations":
        every_operation(Path(sys.argv[1]))
    else:
        random_times(Path(sys.argv[1]), int(sys.argv[3]))
