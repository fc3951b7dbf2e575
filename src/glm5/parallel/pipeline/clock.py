"""How long a rank's computations take while its pipeline runs: the measured bubble, and what its schedule would make.

Waiting for what another stage sends lies between computations, so it is not in their times. On a GPU these are CUDA
events on the stream that computes, read once the step is over. Read next: `simulate`, `engine`.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from glm5.parallel.pipeline.simulate import Times, simulate


class Clock:
    """Times every computation of this rank's stages.

    Attributes:
        busy, span: seconds that this rank computed in a step, and that the step took; after `read`.
        means: mean seconds by kind ("F", "B", "I" or "W") and stage; after `read`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._marks = device, list[tuple[str, int, Any, Any]]()
        self.busy = self.span = 0.0
        self.means: dict[tuple[str, int], float] = {}

    @contextmanager
    def timing(self, kind: str, stage: int) -> Iterator[None]:
        """A computation, or with kind "step" all of them and what lies between."""
        begin = self._now()
        yield
        self._marks.append((kind, stage, begin, self._now()))

    def read(self) -> None:
        """Take the times; waits for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        found: dict[tuple[str, int], list[float]] = defaultdict(list)
        for kind, stage, begin, end in self._marks:
            took = end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3
            found[kind, stage].append(took)
        self._marks.clear()
        self.span = sum(found.pop(("step", -1), []))
        self.busy = sum(map(sum, found.values()))
        self.means = {key: sum(each) / len(each) for key, each in found.items()}

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def played(orders: Mapping[int, Sequence[Any]], means: Mapping[tuple[str, int], float], stages: int) -> float:
    """The bubble of an order whose computations take these times, and whose sends take none."""

    def times(stage: int) -> Times:
        whole, weights = means.get(("B", stage), 0.0), means.get(("W", stage), 0.0)
        return Times(means.get(("F", stage), 0.0), means.get(("I", stage), whole), weights)

    return simulate(orders, [times(stage) for stage in range(stages)]).bubble
