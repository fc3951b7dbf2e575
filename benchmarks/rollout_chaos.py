"""Rollouts by the thousand while everything dies: does each sample end in the one state that is known beforehand?

    python benchmarks/rollout_chaos.py --samples 10000 --seed 1

The real orchestrator, gateway, router, store and intake, in processes of their own, with a scripted engine, scripted
tasks and a scripted learner. At random moments by seed parts are killed (SIGKILL), stopped for a while, starved of
disk; their clocks jump, connections trickle, deliveries come twice, rollouts hang until their time is up. Prints what
was done and how long it took; ends with status 1 if the ledger is not the expected one. `--every` is the number of
samples from one fault to the next (inf: none). `--timeout` must be longer than a rollout ever takes on this machine.
`tests/posttrain/rollout/test_rollout_chaos.py` is the same with 240 samples.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from glm5.posttrain.rollout.options import RolloutOptions
from glm5.posttrain.store import Store
from support.chaos import Chaos, TaskSpec, expected

GROUP = 8


def main(samples: int, seed: int, every: float, concurrency: int, seconds: float, limit: float, directory: Path) -> int:
    groups = samples // GROUP
    shell, web = groups * 2 // 5, groups * 2 // 5
    about = {"timeout_s": limit, "hang_s": math.inf, "concurrency": concurrency}
    specs = [
        TaskSpec("shell", shell, seconds / 10, **about),
        TaskSpec("web", web, seconds, inside=True, **about),
        TaskSpec("edit", groups - shell - web, seconds / 3, ratio=0.5, **about),
    ]
    options = RolloutOptions(group=GROUP, concurrency=concurrency, max_open=4 * concurrency, beat_s=0.5, losses=1000)
    chaos = Chaos(directory, specs, options, seed, every, engines=2, limit_s=24 * 3600)
    try:
        took = chaos.run()
    finally:
        print(chaos.said()[-4000:])
    with Store(chaos.path, read_only=True) as store:
        counts, found = store.counts(), store.samples()
    known = expected(specs, GROUP)
    wrong = [(s.id, s.outcome, s.detail, s.state) for s in found if known.get(s.id) != (s.outcome, s.reward, s.state)]
    print(f"{counts.started:,} samples in {took:.0f} s, at most {chaos.peak} at once")
    print(f"{sum(chaos.faults.values())} faults: {dict(chaos.faults)}")
    print(f"states {dict(Counter(str(s.state) for s in found))}")
    print(f"outcomes {dict(Counter(str(s.outcome) for s in found))}; {sum(s.repeats for s in found)} came again")
    fine = not wrong and len(found) == len(known) == sum(counts.by_status.values())
    print("the ledger is the expected one" if fine else f"WRONG: {len(wrong)} of {len(known)}, as {wrong[:10]}")
    return 0 if fine else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", type=float, default=40.0)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a rollout of the slowest task")
    parser.add_argument("--timeout", type=float, default=300.0, help="of a rollout, in seconds")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        g = given
        sys.exit(main(g.samples, g.seed, g.every, g.concurrency, g.seconds, g.timeout, Path(directory)))
