"""Learns in children that are killed, over and over, at random file operations, and compares what is left with an
undisturbed run.

Run by test_rl_kills.py in a process of its own, which forks (so that torch is imported once):

    python rl_victim.py DIRECTORY reason|general|distill KILLS
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from test_reason import checkpoint as small_policy

from glm5.posttrain.distill import DistillConfig, distill
from glm5.posttrain.general import GeneralConfig, general
from glm5.posttrain.learner import LearnConfig, Learner
from glm5.posttrain.reason import PromptConfig, ReasonConfig, reason
from glm5.posttrain.rollouts import RolloutConfig
from glm5.train.schedule import LearningRate
from glm5.utils.runlog import read_metrics

STEPS = 4
SPENT = ("time", "time/rollout", "time/verify", "time/weight_sync")


def rows(path: Path, more: dict[str, Any]) -> str:
    """A file of prompts of two domains."""
    made = [{"id": f"{path.stem}-{i}", "prompt": f"word {i}", "domain": "ab"[i % 2], **more} for i in range(10)]
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return str(path)


def commands(directory: Path) -> dict[str, tuple[Any, Callable[..., Any]]]:
    """Configurations and what runs them; the run's directory is set later."""
    base, teacher = small_policy(directory / "base", 2), small_policy(directory / "teacher", 3)
    learn = LearnConfig(steps=STEPS, lr=LearningRate(1e-2, 1e-2), save_every=2, row_tokens=128)
    rollout = RolloutConfig(
        prompts=3, group=4, max_new_tokens=2, thinking=False, memory_gib=0.02, verifiers=1, verifier_timeout=120.0
    )
    common: dict[str, Any] = dict(checkpoint=base, learn=learn, rollout=rollout, device="cpu", eval_every=2)
    judged = {"answer": "x", "verifier": "verifiers:even"}

    def prompts(name: str, more: dict[str, Any]) -> PromptConfig:
        held = rows(directory / f"{name}-held.jsonl", more)
        return PromptConfig(data=(rows(directory / f"{name}.jsonl", more),), held_out=(held,), tasks=())

    rules = {"rules": {"max_words": 1, "min_words": 1}}
    one = replace(rollout, prompts=8, group=1)
    return {
        "reason": (ReasonConfig(**common, prompts=prompts("reason", judged), page_every=2), reason),
        "general": (GeneralConfig(**common, prompts=prompts("general", rules)), general),
        "distill": (
            DistillConfig(
                **{**common, "rollout": one},
                prompts=prompts("distill", judged),
                teachers=(f"a={teacher}", f"b={teacher}"),
                teacher_engines=True,
                teacher_memory_gib=0.02,
            ),
            distill,
        ),
    }


def kill_me_at(n: int, run: Path) -> None:
    """SIGKILL this process just before its n-th file operation in the run's directory (opening, renaming, ...)."""
    left, root, fsync = n, str(run), os.fsync

    def count() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(event: str, given: tuple[Any, ...]) -> None:
        named = (event == "open" or event.startswith(("os.", "shutil."))) and given and str(given[0]).startswith(root)
        if named:
            count()

    def counted_fsync(fd: int) -> None:
        count()
        fsync(fd)

    os.fsync = counted_fsync
    sys.addaudithook(watch)


def child(given: Any, run: Callable[..., Any], errors: Path, kill: int, at_once: bool = False) -> int:
    """Fork a child that learns, quietly, and kills itself at the `kill`-th file operation after its steps begin, or
    after its start. 0 is never. Returns how it ended."""
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    with errors.open("a") as f, contextlib.redirect_stderr(f):
        if kill and at_once:
            kill_me_at(kill, Path(given.run))
        elif kill:
            resume = Learner.resume

            def armed(self: Learner) -> list[str]:
                found = resume(self)
                kill_me_at(kill, Path(given.run))
                return found

            Learner.resume = armed  # type: ignore[method-assign]
        run(given, lambda _: None)
    os._exit(0)


def result(run: Path) -> dict[str, Any]:
    """Checksums of the newest checkpoint's and the model's files and of the ledger; and metrics but for times."""
    newest = max((run / "checkpoints").iterdir())
    files = [*newest.iterdir(), run / "model" / "model.safetensors", run / "samples.jsonl", run / "result.json"]
    records = [{k: v for k, v in r.items() if k not in SPENT} for r in read_metrics(run)]
    assert [r["step"] for r in records] == list(range(STEPS + 1))
    return {
        "files": {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(files)},
        "metrics": records,
    }


def main(directory: Path, kind: str, kills: int) -> None:
    given, run = commands(directory)[kind]
    whole, cut = directory / "whole", directory / "cut"
    assert child(replace(given, run=str(whole)), run, directory / "errors", 0) == 0, (directory / "errors").read_text()
    rng = random.Random(kind)  # noqa: S311
    died = 0
    for n in range(kills):
        kill = rng.randrange(20, 150)
        status = child(replace(given, run=str(cut)), run, directory / "errors", kill, at_once=n % 3 == 2)
        assert os.WIFSIGNALED(status) or status == 0, (directory / "errors").read_text()
        died += os.WIFSIGNALED(status)
    assert child(replace(given, run=str(cut)), run, directory / "errors", 0) == 0, (directory / "errors").read_text()
    expected, found = result(whole), result(cut)
    assert found["metrics"] == expected["metrics"]
    differing = [name for name, digest in expected["files"].items() if found["files"].get(name) != digest]
    assert not differing, differing
    print(f"killed {died} times")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
