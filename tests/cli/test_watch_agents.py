"""What is shown of an asynchronous run."""

from __future__ import annotations

from pathlib import Path

import pytest

from glm5.cli.watch import WatchOptions, watch
from glm5.cli.watch_agents import agents
from glm5.utils.runlog import RunLog


def step(stale: int) -> dict[str, object]:
    task = {"share": 0.625, "target": 0.6, "running": 7, "delivered": 3, "queue_s": 12.4, "there": 0}
    return {
        "reward": 0.5, "samples/trained": 16, "samples/stale": stale, "samples/zero_variance": 8,
        "staleness": {"0": 12, "2": 4}, "queue/ready": 5, "queue/age_mean": 3.0, "queue/age_max": 75.0,
        "idle/trainer": 0.125, "engine/idle": 0.25, "is_masked_positive": 0.0125, "is_masked_negative": 0.5,
        "engine/routable": 1.0, "engine/count": 2.0, "engine/prefix_hit_rate": 0.83, "engine/spec_accept_length": 1.914,
        "rollouts": {"running": 7, "tasks": {"sums": task}},
    }  # fmt: skip


def test_the_state_of_queues_engines_and_tasks_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunLog(tmp_path) as log:
        log.log(1, **step(0))
        log.log(2, **step(3))
    assert watch(WatchOptions(str(tmp_path), once=True)) == 0
    shown = capsys.readouterr().out
    for line in (
        "samples   32 trained, 3 stale, 16 zero variance",
        "staleness 0: 12  2: 4  (versions behind",
        "queue     5 groups are ready; taken after 3s, at most 1m15s",
        "idle      trainer 12%, engines 25%",
        "masked    1.25% of tokens to be raised, 50.00% of those to be lowered",
        "engines   1 of 2 healthy, prefix hits 83%, accept length 1.91",
        "task      sums: 62% of samples (target 60%), 7 run, 3 delivered, the oldest for 12s; AWAY",
    ):
        assert line in shown


def test_of_another_run_nothing_is_shown() -> None:
    assert agents([{"step": 1, "reward": 0.5}]) == []
