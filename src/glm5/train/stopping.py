"""Stopping a run between two updates: Ctrl-C and SIGTERM as a question that the loop asks. Read next: `loop`."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def stop_requests(note: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM as a question, "was a stop requested?", for as long as the block runs.

    The first signal only marks it, so that an update is never cut in half; the second acts as usual. Outside the main
    thread, where Python delivers no signals, nothing is changed.
    """
    asked = False

    def ask(number: int, _frame: Any) -> None:
        nonlocal asked
        asked = True
        for n, handler in before.items():
            signal.signal(n, handler)
        note(f"{signal.Signals(number).name}: finishing this step, then saving; once more stops at once")

    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before = {n: signal.signal(n, ask) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)
