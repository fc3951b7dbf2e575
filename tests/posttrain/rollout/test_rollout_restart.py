"""The orchestrator dies at any of its steps, and begun anew it ends with the ledger of a run without deaths."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from pathlib import Path

from support import virtual
from support.chaos import TaskSpec, expected
from support.rollout_world import OPTIONS, World
from support.rollouts import ScriptedTask, fate, ledger

TASKS = {"shell": 0.5, "edit": 2.0, "six": 1.0}
SAMPLES = 24  # two groups of four of each of three tasks


def tasks() -> list[ScriptedTask]:
    return [
        ScriptedTask("shell", 2, seconds=0.5, timeout_s=20.0),
        ScriptedTask("edit", 2, seconds=2.0, timeout_s=20.0),
        ScriptedTask("six", 2, seconds=1.0, timeout_s=20.0),
    ]


def test_the_fates_are_of_many_kinds() -> None:
    found = {fate(task.name, index, member) for task in tasks() for index in range(2) for member in range(4)}
    assert len(found) >= 6


def test_dies_at_any_step(tmp_path: Path) -> None:
    async def main() -> None:
        world = World(tmp_path / "whole.sqlite", tasks())
        kept = ("gateway", *world.engines)
        await world.finish(kept)
        expected, steps = ledger(world.path), world.steps
        assert len(expected) == SAMPLES
        assert {row[-1] for row in expected.values()} >= {"trained", "stale", "zero_variance", "group_dropped"}
        assert steps > 200
        for at in range(0, steps, steps // 15):
            world.path = tmp_path / f"{at}.sqlite"
            world.die_at(at)
            await world.finish(kept)
            assert ledger(world.path) == expected, at
            assert world.lives == 2, at
            sessions = (await world.network.client().get("http://gateway/sessions")).json()["sessions"]
            assert sessions == [], "nothing is left behind"

    virtual.run(main())


def test_a_storm(tmp_path: Path) -> None:
    """Everything dies, hangs and is starved at random, again and again; rollouts that hang cost no time here."""
    rng = random.Random(5)  # noqa: S311
    specs = [TaskSpec(name, 4, seconds, timeout_s=60.0, hang_s=math.inf) for name, seconds in TASKS.items()]
    faults: Counter[str] = Counter()

    async def main() -> None:
        made = [spec.made() for spec in specs]
        world = World(tmp_path / "t.sqlite", made, OPTIONS, clock=lambda: rng.choice((0.0, 1e9, -1e9)))
        world.start_all()
        storm = asyncio.ensure_future(world.storm(7, 0.8, faults))
        await world.finish()
        storm.cancel()

    virtual.run(main())
    found = {name: (row[2], row[3], row[6]) for name, row in ledger(tmp_path / "t.sqlite").items()}
    assert found == expected(specs, OPTIONS.group)
    assert sum(faults.values()) >= 6
