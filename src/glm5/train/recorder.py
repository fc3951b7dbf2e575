"""Calls as CUDA graphs: recorded once, then replayed by one launch, on buffers that stay where they are.

`recorded` records micro-batches, `optim` the orthogonalisation of Muon's batches. Read next: either.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from typing import Any, Protocol

import torch
from torch import Tensor


class Recorder(Protocol):
    """How calls are recorded."""

    def waits(self, run: Callable[[], None]) -> bool:
        """Run it once, and say whether it waits for the device, which a recording cannot."""
        ...

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Run it once more, and return what runs it again."""
        ...


class CudaRecorder:
    """Recording into CUDA graphs. They share their memory, since they run one after another."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # A graph of nothing: once all graphs of a pool are given up, torch lets no other be recorded into it.
        self._keeps_pool = torch.cuda.CUDAGraph()
        how: dict[str, Any] = dict(pool=self._pool, capture_error_mode="thread_local")
        with warnings.catch_warnings(record=True), torch.cuda.graph(self._keeps_pool, **how):  # it warns of nothing
            pass

    def waits(self, run: Callable[[], None]) -> bool:
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                run()
        finally:
            torch.cuda.set_sync_debug_mode(before)
        return any("called a synchronizing" in str(w.message) for w in told)

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile: checkpoints are written by one.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run()
        graph.replay()
        return graph.replay


class Recordings:
    """Calls by name: each runs as it is the first time, which compiles, and is recorded the second time."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._known: dict[Hashable, tuple[Callable[[], None], list[Tensor]] | None] = {}

    def run(self, name: Hashable, call: Callable[[], Tensor]) -> Tensor:
        """What `call` returns. From the second time on it lies in one place, and the next time overwrites it."""
        if name not in self._known:
            self._known[name] = None
            return call()
        known = self._known[name]
        if known is None:
            made: list[Tensor] = []

            def run() -> None:
                made[:] = [call()]

            known = self._known[name] = self._recorder.record(run), made
        else:
            known[0]()
        return known[1][0]
