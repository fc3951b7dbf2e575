"""Held-out prompts of every task: rollouts that are measured, by the rules of any sample, and that no ledger knows.

What hangs is ended, what was lost is run anew, and what has no verdict does not count. Read next: `sample`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection
from contextlib import AbstractAsyncContextManager

from glm5.posttrain.outcome import reward_of
from glm5.posttrain.rollout.options import RolloutOptions
from glm5.posttrain.rollout.sample import Job, Sampling
from glm5.posttrain.rollout.services import Services
from glm5.posttrain.rollout.sessions import Sessions

AT_ONCE = 32
HELD = "held-"  # what the names of such samples begin with


async def success(
    services: Services,
    sessions: Sessions,
    options: RolloutOptions,
    tasks: Collection[str],
    count: int,
    room: Callable[[str], AbstractAsyncContextManager[None]],
) -> dict[str, float]:
    """Mean reward of so many prompts of each task; nothing of a task that has no verdict at all.

    Args:
        sessions: with greedy answers. options: `seed` is the prompts' own. room: `Orchestrator.room`.

    Raises:
        UserError: the gateway refuses what a session asks for.
    """
    drawing = Sampling(services, sessions, options, "held", lambda: None, lambda *_: None)
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(task: str, index: int) -> tuple[str, float | None]:
        async with gate, room(task):
            job = Job(f"{HELD}{task}-{index}-0", task, index, 0)
            ending = await drawing.run(job)
            drawing.forget(job)
            return task, reward_of(ending.outcome, ending.reward)

    running = [asyncio.ensure_future(one(task, index)) for task in tasks for index in range(count)]
    try:
        told = await asyncio.gather(*running)
    finally:
        for each in running:
            each.cancel()
        await drawing.close()
    found: dict[str, list[float]] = {}
    for task, reward in told:
        if reward is not None:
            found.setdefault(task, []).append(reward)
    return {task: math.fsum(rewards) / len(rewards) for task, rewards in found.items()}
