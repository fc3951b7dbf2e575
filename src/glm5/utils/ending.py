"""Waits at an end that end themselves. Read next: `glm5.posttrain.engines`, which ends by them.

A cancellation can be missed: where one comes in the very step of the event loop in which an HTTP client has connected,
anyio before 4.16 takes it for its own. A loop that misses it goes on for ever, and whoever waits for it, too. So tasks
are cancelled again, and who does not end is named and left.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Iterable
from typing import Any

log = logging.getLogger(__name__)

AGAIN_S, TIMES = 5.0, 3
END_S = 60.0


async def ended(tasks: Iterable[asyncio.Future[Any]], who: str, again_s: float = AGAIN_S) -> None:
    """Cancel tasks and wait for them, whatever they raise; those that go on are cancelled again, and after `TIMES`
    times left.

    Args:
        who: for the warning. again_s: how long they may take to clean up.
    """
    tasks = set(tasks)
    left = {task for task in tasks if not task.done()}
    _heard(tasks - left)
    for _ in range(TIMES):
        if not left:
            return
        for task in left:
            task.cancel()
        done, left = await asyncio.wait(left, timeout=again_s)
        _heard(done)
    if left:
        log.warning("%s: %d did not end in %g s, and are left: %s", who, len(left), TIMES * again_s, _names(left))


async def bounded(work: Awaitable[Any], who: str, within_s: float = END_S) -> None:
    """Wait for something at the end, and no longer than this; its exception is raised here."""
    task = asyncio.ensure_future(work)
    done, _ = await asyncio.wait({task}, timeout=within_s)
    if not done:
        task.cancel()
        log.warning("%s did not end in %g s, and is left", who, within_s)
        return
    task.result()


def _heard(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """What they raised is nobody else's concern."""
    for task in tasks:
        if not task.cancelled():
            task.exception()


def _names(tasks: Iterable[asyncio.Future[Any]]) -> str:
    """Where each stands, the first few of them."""
    shown = sorted({getattr(t.get_coro(), "__qualname__", "") for t in tasks if isinstance(t, asyncio.Task)})
    return ", ".join(shown[:4]) or "no tasks of this program"
