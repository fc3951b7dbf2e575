"""Real processes, killed, stopped, starved of disk, whose clocks jump: the ledger is the one that is known beforehand.

`benchmarks/rollout_chaos.py` does the same with 10,000 samples, at random.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from glm5.posttrain.rollout.options import RolloutOptions
from glm5.posttrain.store import Store
from support import virtual
from support.chaos import Chaos, TaskSpec, expected
from support.rollout_world import World
from support.rollouts import ledger

SPECS = [
    TaskSpec("shell", 4, seconds=0.05),
    TaskSpec("web", 4, seconds=0.3, inside=True),
    TaskSpec("edit", 2, seconds=0.1, ratio=0.5),
]
OPTIONS = RolloutOptions(
    group=4, concurrency=12, max_open=16, beat_s=0.5, silent_s=15.0, grace_s=30.0, patience_s=300.0, losses=100
)
# The first five at the latest while 16 samples are open and nobody takes any.
SCRIPT = ["kill shell", "kill orchestrator", "hang engine0", "kill gateway", "disk orchestrator"]
LATER = ["loris gateway", "kill engine0", "kill learner", "kill orchestrator"]


@pytest.mark.timeout(900)  # processes that share their cores with much else take long to begin
def test_processes_that_die(tmp_path: Path) -> None:
    chaos = Chaos(
        tmp_path, SPECS, OPTIONS, seed=7, every=3.0, script=[*SCRIPT, *LATER], first=len(SCRIPT), limit_s=800.0
    )
    try:
        chaos.run()
    except BaseException as error:
        raise AssertionError(f"{error}\n{chaos.said()}") from error
    known = expected(SPECS, OPTIONS.group)
    with Store(chaos.path, read_only=True) as store:
        counts, samples = store.counts(), store.samples()
    assert counts.started == sum(counts.by_status.values()) == len(known) == 40
    assert {s.id: (s.outcome, s.reward, s.state) for s in samples} == known
    assert chaos.faults.keys() >= {"kill shell", "kill orchestrator", "hang", "kill gateway", "disk"}

    async def undisturbed() -> None:
        await World(tmp_path / "undisturbed.sqlite", [spec.made() for spec in SPECS], OPTIONS).finish()

    virtual.run(undisturbed())
    assert ledger(chaos.path) == ledger(tmp_path / "undisturbed.sqlite"), "to the last token"
