"""Rollouts by the thousand while everything dies: does each sample end in the one state that is known beforehand?

    python benchmarks/rollout_chaos.py --samples 10000 --seed 1

The real orchestrator, gateway, router, store and intake, in processes of their own, with a scripted engine, scripted
tasks and a scripted learner. At random moments by seed parts are killed (SIGKILL), stopped for a while, starved of
disk; their clocks jump, connections trickle, deliveries come twice, rollouts hang until their time is up. Prints what
was done and how long it took; ends with status 1 if the ledger is not the expected one. `--every` is the number of
samples from one fault to the next (inf: none). `--timeout` must be longer than a rollout ever takes on this machine.
With `--virtual` the same parts run in one process whose time is made of timers: no rollout that hangs costs any.
`tests/posttrain/rollout/test_rollout_chaos.py` is the same with 40 samples and faults by script.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from glm5.posttrain.rollout.options import RolloutOptions
from glm5.posttrain.store import Store
from support import virtual
from support.chaos import Chaos, TaskSpec, expected
from support.rollout_world import World

GROUP = 8


def specs_of(samples: int, concurrency: int, seconds: float, limit: float) -> list[TaskSpec]:
    groups = samples // GROUP
    shell, web = groups * 2 // 5, groups * 2 // 5
    about = {"timeout_s": limit, "hang_s": math.inf, "concurrency": concurrency}
    return [
        TaskSpec("shell", shell, seconds / 10, **about),
        TaskSpec("web", web, seconds, inside=True, **about),
        TaskSpec("edit", groups - shell - web, seconds / 3, ratio=0.5, **about),
    ]


def processes(chaos: Chaos) -> None:
    """Real time, real processes."""
    try:
        took = chaos.run()
    finally:
        print(chaos.said()[-4000:])
    print(f"{took:.0f} s, at most {chaos.peak} samples at once")


def virtually(chaos: Chaos, every_s: float) -> None:
    """One process, virtual time: what is killed is a part of it."""
    rng = random.Random(chaos.seed)  # noqa: S311

    async def main() -> float:
        tasks = [spec.made() for spec in chaos.specs]
        world = World(chaos.path, tasks, chaos.options, clock=lambda: rng.choice((0.0, 1e9, -1e9)))
        world.start_all()
        storm = asyncio.ensure_future(world.storm(chaos.seed, every_s, chaos.faults))
        await world.finish()
        storm.cancel()
        return asyncio.get_running_loop().time()

    print(f"{virtual.run(main()):.0f} s of virtual time, {time.process_time():.0f} s of the processor's")


def judged(chaos: Chaos) -> int:
    """Whether the ledger is the expected one, of what is over. The status to exit with."""
    with Store(chaos.path) as store:
        counts, found = store.counts(), store.samples()
    known = expected(chaos.specs, GROUP)
    over = [s for s in found if s.state is not None]
    wrong = [(s.id, s.outcome, s.detail, s.state) for s in over if known[s.id] != (s.outcome, s.reward, s.state)]
    again = sum(sample.repeats for sample in found)
    print(f"{counts.started:,} of {len(known):,} samples, {counts.open} of them open; {again} deliveries came again")
    print(f"{sum(chaos.faults.values())} faults: {dict(chaos.faults)}")
    print(f"states {dict(Counter(str(s.state) for s in over))}")
    print(f"outcomes {dict(Counter(str(s.outcome) for s in over))}")
    print(f"WRONG: {len(wrong)}, as {wrong[:10]}" if wrong else "all that are over are as expected")
    return int(bool(wrong) or counts.open > 0 or counts.started != len(known))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", type=float, default=40.0)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a rollout of the slowest task")
    parser.add_argument("--timeout", type=float, default=300.0, help="of a rollout, in seconds")
    parser.add_argument("--virtual", action="store_true", help="in one process, in virtual time")
    given = parser.parse_args()
    options = RolloutOptions(
        group=GROUP, concurrency=given.concurrency, max_open=4 * given.concurrency, look_s=1.0, losses=1000
    )
    specs = specs_of(given.samples, given.concurrency, given.seconds, given.timeout)
    with tempfile.TemporaryDirectory() as directory:
        chaos = Chaos(Path(directory), specs, options, given.seed, given.every, engines=2, limit_s=24 * 3600)
        try:
            # About twenty samples a second.
            virtually(chaos, given.every / 20) if given.virtual else processes(chaos)
        finally:
            status = judged(chaos)
        sys.exit(status)
