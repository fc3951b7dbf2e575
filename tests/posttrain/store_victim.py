"""A process that works through a deterministic list of samples with a store, to be killed at any time.

    python store_victim.py FILE SEED GROUPS

Each round starts a group, delivers its samples (some twice), and closes them. A line on standard output follows each
transaction, so that whoever kills it knows what was told as kept. Started again, it goes through the same list.
"""

from __future__ import annotations

import random
import sys

from glm5.posttrain.outcome import Outcome, State
from glm5.posttrain.record import Record
from glm5.posttrain.store import Store


def record_of(number: int) -> Record:
    drawn = [False, False] + [True] * 40
    return Record(
        [1, 2, *range(number, number + 40)], drawn, [0.0, 0.0] + [-(number + 1) / 7] * 40, [-1, -1] + [number % 5] * 40
    )


def final(number: int) -> tuple[Outcome, State]:
    return [
        (Outcome.OK, State.TRAINED),
        (Outcome.TASK_FAILED, State.ZERO_VARIANCE),
        (Outcome.ENV_CRASH, State.ENVIRONMENT_FAILED),
        (Outcome.TIMEOUT, State.GROUP_DROPPED),
        (Outcome.OK, State.STALE),
    ][number % 5]


def main(path: str, seed: int, groups: int) -> None:
    rng = random.Random(seed)  # noqa: S311
    with Store(path) as store:
        for group in range(groups):
            numbers = range(group * 3, group * 3 + 3)
            store.start(f"g{group}", "task", [f"s{n}" for n in numbers])
            print(f"start g{group}", flush=True)
            for n in numbers:
                outcome = final(n)[0]
                reward = None if outcome.leaves_group else n / 10
                for _ in range(rng.choice((1, 2))):
                    store.deliver(f"s{n}", outcome, reward, [record_of(n)])
                print(f"deliver s{n}", flush=True)
            store.close_samples({f"s{n}": final(n)[1] for n in numbers}, step=group)
            print(f"close g{group}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
