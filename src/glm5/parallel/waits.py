"""Exposed communication: how long a rank's computation stands still for a collective.

    with Waits(device) as waits:
        ...                                a step
    waits.seconds()                        on this rank; synchronizes

On a GPU, CUDA events stand around every collective that is called on the stream that computes, which waits for it, and
around FSDP's waits for what it gathers and reduces on streams of its own, with the copies that belong to them. What
runs beside computation is not counted, and neither are a pipeline's sends: waiting for those is its bubble. On a CPU a
collective is waited for where it is called, so that all of it counts. Source: report section 2.4. Read next:
`compat.waiting`, then `glm5.train.meter`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

from glm5.parallel.compat import waiting

_NAMES = ("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
_NEWER = ("all_gather_single", "reduce_scatter_single")  # of torch 2.13
COLLECTIVES = tuple(name for name in (*_NAMES, *_NEWER) if hasattr(dist, name))


class Waits:
    """Times the waits of this process while the block runs; use one at a time."""

    def __init__(self, device: torch.device) -> None:
        self._cuda, self._device = device.type == "cuda", device
        self._spans: list[tuple[Any, Any]] = []
        self._inside = threading.local()  # a backward pass has threads of its own

    def __enter__(self) -> Waits:
        self._stream = torch.cuda.current_stream(self._device) if self._cuda else None
        self._plain: list[tuple[Any, str, Any]] = [(dist, name, getattr(dist, name)) for name in COLLECTIVES]
        self._plain += [(owner, name, getattr(owner, name)) for owner, name in waiting()]
        for owner, name, plain in self._plain:
            setattr(owner, name, self._timed(plain))
        return self

    def __exit__(self, *_: object) -> None:
        for owner, name, plain in self._plain:
            setattr(owner, name, plain)

    def seconds(self) -> float:
        """All waits together. One inside another counts once."""
        if self._cuda:
            torch.cuda.synchronize(self._device)
            return sum(begin.elapsed_time(end) for begin, end in self._spans) / 1e3
        return sum(end - begin for begin, end in self._spans)

    def _timed(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(plain)
        def timed(*args: Any, **options: Any) -> Any:
            with self._span():
                work = plain(*args, **options)
            return _Awaited(work, self) if options.get("async_op") and work is not None else work

        return timed

    @contextmanager
    def _span(self) -> Iterator[None]:
        elsewhere = self._cuda and torch.cuda.current_stream(self._device) != self._stream
        if elsewhere or getattr(self._inside, "now", False):
            yield
            return
        self._inside.now = True
        begin = self._now()
        try:
            yield
        finally:
            self._spans.append((begin, self._now()))
            self._inside.now = False

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class _Awaited(dist.Work):
    """A collective under way, whose wait is timed. It is a `Work`, since FSDP waits for nothing else."""

    def __init__(self, work: dist.Work, waits: Waits) -> None:
        super().__init__()
        self._work, self._waits = work, waits

    def wait(self, *args: Any) -> Any:
        with self._waits._span():
            return self._work.wait(*args)

    def __getattribute__(self, name: str) -> Any:
        own = name in ("wait", "_work", "_waits") or name.startswith("__")
        return object.__getattribute__(self, name) if own else getattr(self._work, name)
