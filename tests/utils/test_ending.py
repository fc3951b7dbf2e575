"""Ends wait for what misses its cancellation, and for nothing for ever."""

from __future__ import annotations

import asyncio
import logging

import pytest

from glm5.utils.ending import bounded, ended


async def deaf(misses: int, heard: list[int]) -> None:
    """Misses so many cancellations."""
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            heard.append(1)
            if len(heard) > misses:
                raise


def test_a_task_that_missed_it_is_cancelled_again() -> None:
    async def main() -> list[int]:
        heard: list[int] = []
        task = asyncio.ensure_future(deaf(2, heard))
        await asyncio.sleep(0)
        await asyncio.wait_for(ended([task], "the task", again_s=0.01), 60)
        assert task.cancelled()
        return heard

    assert len(asyncio.run(main())) == 3


def test_who_never_ends_is_named_and_left(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        heard: list[int] = []
        task = asyncio.ensure_future(deaf(4, heard))
        await asyncio.sleep(0)
        await asyncio.wait_for(ended([task], "the guests", again_s=0.01), 60)
        assert not task.done()
        await asyncio.wait_for(bounded(asyncio.shield(task), "the last guest", 0.01), 60)
        while not task.done():
            task.cancel()
            await asyncio.sleep(0)

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert "the guests: 1 did not end in 0.03 s, and are left: deaf" in caplog.text
    assert "the last guest did not end in 0.01 s, and is left" in caplog.text


def test_what_goes_wrong_at_the_end_is_told() -> None:
    async def wrong() -> None:
        raise OSError("no such engine")

    async def main() -> None:
        await ended([], "nobody", again_s=60)
        with pytest.raises(OSError, match="no such engine"):
            await bounded(wrong(), "the engine")

    asyncio.run(main())
