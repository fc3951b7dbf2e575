"""One thread that communicates: who comes as it ends, or after, is told so and does not wait."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from glm5.serve.lockstep import Kind, Lockstep, RankLost

LONG = 60.0


@contextmanager
def alone(kind: type[Lockstep] = Lockstep, **given: Any) -> Iterator[Lockstep]:
    """Without other leaders."""
    options: dict[str, Any] = dict(leaders=None, tick=_nothing, empty=_nothing, recorded=lambda: 0, renew=_nothing)
    steps = kind(**{**options, **given})
    yield steps
    steps.close(_nothing)
    assert not steps._thread.is_alive()


def _nothing(*_: Any) -> None:
    """Nobody is there to be told."""


def test_calls_run_in_one_thread_and_their_errors_reach_the_caller() -> None:
    with alone() as steps:
        names = {steps.run(Kind.LOCAL, lambda _: threading.current_thread().name) for _ in range(3)}
        assert names == {"ranks"}
    with pytest.raises(RankLost, match="is closed"):
        steps.run(Kind.LOCAL, _nothing)
    steps.close(_nothing)  # again is no error


class Slow(Lockstep):
    """Its thread takes its time between its last call and its own end."""

    def __init__(self, **options: Any) -> None:
        self.last, self.go_on = threading.Event(), threading.Event()
        super().__init__(**options)

    def _round(self) -> bool:
        more = super()._round()
        if not more:
            self.last.set()
            assert self.go_on.wait(LONG)
        return more


def test_whoever_comes_as_it_ends_is_told() -> None:
    begun, may_end = threading.Event(), threading.Event()

    def last() -> None:
        begun.set()
        assert may_end.wait(LONG)

    with alone(Slow) as steps, ThreadPoolExecutor(6) as pool:
        assert isinstance(steps, Slow)
        closing = pool.submit(steps.close, last)
        assert begun.wait(LONG)
        behind = [pool.submit(steps.run, Kind.LOCAL, _nothing) for _ in range(4)]  # they wait for their turn
        may_end.set()
        assert steps.last.wait(LONG)
        late = pool.submit(steps.run, Kind.LOCAL, _nothing)  # the thread is there, and will carry out nothing
        for one in (*behind, late):
            with pytest.raises(RankLost, match="is closed"):
                one.result(LONG)
        steps.go_on.set()
        closing.result(LONG)


def test_a_thread_that_fails_tells_all_and_once() -> None:
    told: list[str] = []
    failing: Callable[[Any], None] = lambda _: 1 / 0  # type: ignore[assignment,return-value]  # noqa: E731
    with alone(lost=told.append) as steps:
        for _ in range(2):
            with pytest.raises(RankLost, match="ZeroDivisionError"):
                steps.run(Kind.LOCAL, failing)
        assert steps._thread.join(LONG) is None
    assert len(told) == 1
