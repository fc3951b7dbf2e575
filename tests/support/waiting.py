"""Waiting for what happens elsewhere: bounded, but for a machine on which everything takes long."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(holds: Callable[[], object], what: str = "it did not happen", seconds: float = 120.0) -> None:
    """Return when it holds; `what` is said if that takes longer."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)
