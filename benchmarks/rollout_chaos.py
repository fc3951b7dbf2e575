"""Rollouts by the thousand while everything dies: does each sample end in the one state that is known beforehand?

    python benchmarks/rollout_chaos.py --samples 10000
    python benchmarks/rollout_chaos.py --samples 2000 --seeds 1,2,3,4,5 --out DIR

The real orchestrator, gateway, router, store and intake, in processes of their own, with a scripted engine, scripted
tasks and a scripted learner. At random moments by seed parts are killed (SIGKILL), stopped for a while, starved of
disk; their clocks jump, connections trickle, deliveries come twice, rollouts hang until their time is up. Prints what
was done and how long it took; ends with status 1 if the ledger is not the expected one. `--every` is the number of
samples from one fault to the next (inf: none). `--timeout` must be longer than a rollout ever takes on this machine.
With `--virtual` the same parts run in one process whose time is made of timers: no rollout that hangs costs any.
Several seeds run beside each other, each so many samples in processes of its own. With `--out` what was written stays:
SIGTERM ends a run, what is over by then is judged, and the same command goes on with the rest.
`tests/posttrain/rollout/test_rollout_chaos.py` is the same with 40 samples and faults by script.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from glm5.posttrain.rollout.options import RolloutOptions
from glm5.posttrain.store import Store
from support import virtual
from support.chaos import Chaos, TaskSpec, expected
from support.rollout_world import World

GROUP = 8
COUNTS = "samples", "started", "over", "wrong", "again"


def specs_of(seed: int, samples: int, concurrency: int, seconds: float, limit: float) -> list[TaskSpec]:
    """Three tasks. What becomes of a sample follows from its name, and so from the seed, too."""
    groups = samples // GROUP
    shell, web = groups * 2 // 5, groups * 2 // 5
    about = {"timeout_s": limit, "hang_s": math.inf, "concurrency": concurrency}
    return [
        TaskSpec(f"shell_{seed}", shell, seconds / 10, **about),
        TaskSpec(f"web_{seed}", web, seconds, inside=True, **about),
        TaskSpec(f"edit_{seed}", groups - shell - web, seconds / 3, ratio=0.5, **about),
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


def judged(chaos: Chaos) -> dict[str, Any]:
    """Whether the ledger is the expected one, of what is over."""
    with Store(chaos.path) as store:
        counts, found = store.counts(), store.samples()
    known = expected(chaos.specs, GROUP)
    over = [s for s in found if s.state is not None]
    wrong = [(s.id, s.outcome, s.detail, s.state) for s in over if known[s.id] != (s.outcome, s.reward, s.state)]
    return {
        "samples": len(known),
        "started": counts.started,
        "over": len(over),
        "wrong": len(wrong),
        "again": sum(sample.repeats for sample in found),
        "faults": dict(chaos.faults),
        "states": dict(Counter(str(s.state) for s in over)),
        "outcomes": dict(Counter(str(s.outcome) for s in over)),
        "wrong ones": wrong[:10],
    }


def told(found: dict[str, Any]) -> bool:
    """Print it. Whether every sample is over, as expected."""
    started, over, samples = found["started"], found["over"], found["samples"]
    print(f"{started:,} of {samples:,} samples, {started - over} of them open; {found['again']} deliveries came again")
    for name in ("faults", "states", "outcomes"):
        print(f"{name} {sum(found[name].values()):,}: {found[name]}")
    wrong = found["wrong"]
    print(f"WRONG: {wrong}, as {found['wrong ones']}" if wrong else "all that are over are as expected")
    return not wrong and over == samples


def one_seed(given: argparse.Namespace, seed: int, directory: Path) -> bool:
    """Run until all samples are over, or as long as it may. Whether they are, as expected."""
    directory.mkdir(parents=True, exist_ok=True)
    options = RolloutOptions(
        group=GROUP, concurrency=given.concurrency, max_open=4 * given.concurrency, look_s=1.0, losses=1000
    )
    specs = specs_of(seed, given.samples, given.concurrency, given.seconds, given.timeout)
    chaos = Chaos(directory, specs, options, seed, given.every, engines=2, limit_s=24 * 3600)
    kept, began = directory / "faults.json", time.monotonic()
    before = json.loads(kept.read_text()) if kept.exists() else {}
    chaos.faults.update(before.get("faults", {}))
    try:
        # About twenty samples a second.
        virtually(chaos, given.every / 20) if given.virtual else processes(chaos)
    except KeyboardInterrupt:
        print("ended before its time")
    seconds = before.get("seconds", 0.0) + time.monotonic() - began
    found = {"seed": seed, "seconds": seconds, **judged(chaos)}
    kept.write_text(json.dumps(found, indent=1))
    return told(found)


def several(seeds: list[int], directory: Path) -> bool:
    """A process for each seed, all at once, and the sum of what they found."""
    runs = []
    for seed in seeds:
        command = [sys.executable, "-u", __file__, *sys.argv[1:], "--seeds", str(seed), "--out", str(directory)]
        with (directory / f"seed-{seed}.txt").open("w") as said:
            runs.append(subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True))
    try:
        for run in runs:
            run.wait()
    except KeyboardInterrupt:
        for run in runs:
            run.terminate()
        for run in runs:
            run.wait()
    for seed, run in zip(seeds, runs, strict=True):
        if run.returncode:
            print(f"seed {seed} ended with {run.returncode}:\n{(directory / f'seed-{seed}.txt').read_text()[-3000:]}")
    files = [directory / f"seed-{seed}" / "faults.json" for seed in seeds]
    each = [json.loads(file.read_text()) for file in files if file.exists()]
    print(f"{'seed':>4}{'over':>8}{'faults':>8}{'wrong':>7}{'seconds':>9}")
    for one in each:
        faults = sum(one["faults"].values())
        print(f"{one['seed']:>4}{one['over']:>8,}{faults:>8}{one['wrong']:>7}{one['seconds']:>9.0f}")
    total: dict[str, Any] = {name: sum(one[name] for one in each) for name in COUNTS}
    for name in ("faults", "states", "outcomes"):
        total[name] = dict(sum((Counter(one[name]) for one in each), Counter()))
    total["wrong ones"] = [wrong for one in each for wrong in one["wrong ones"]]
    whole = told(total)
    return whole and all(run.returncode == 0 for run in runs)


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10_000, help="of each seed")
    parser.add_argument("--seeds", default="1", help="one or, with commas between, several")
    parser.add_argument("--every", type=float, default=40.0)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a rollout of the slowest task")
    parser.add_argument("--timeout", type=float, default=300.0, help="of a rollout, in seconds")
    parser.add_argument("--virtual", action="store_true", help="in one process, in virtual time")
    parser.add_argument("--out", help="keep the ledgers here, and go on from what is there")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, interrupted)
    seeds = [int(one) for one in given.seeds.split(",")]
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(given.out or scratch)
        directory.mkdir(parents=True, exist_ok=True)
        good = several(seeds, directory) if seeds[1:] else one_seed(given, seeds[0], directory / f"seed-{seeds[0]}")
        sys.exit(int(not good))
