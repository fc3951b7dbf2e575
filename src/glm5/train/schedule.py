"""Schedules: learning rate by step and batch size by samples, as pure functions of progress.

Nothing here keeps state, so a resumed run asks with the step (or the samples seen) and gets the same value. The
report's own values stand in `config`, their source; what it leaves open (length of the warm-up, shape of the ramps)
is an argument or is marked as our choice. Needs no torch. Read next: `config`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from glm5.utils.errors import ConfigError


class Schedule(Protocol):
    """A value for every step; steps count from 0, and the value at step s is the one that update s uses."""

    def at(self, step: int) -> float:
        """The value at `step`."""


@dataclass(frozen=True)
class Constant:
    """The same value at every step."""

    value: float

    def at(self, step: int) -> float:
        """`value`."""
        _check_progress("step", step)
        return self.value


@dataclass(frozen=True)
class WarmupCosine:
    """Linear from 0 to `peak` over `warmup_steps`, then half a cosine to `final`, reached at `total_steps`.

    The first update already moves: step s of the warm-up has (s + 1) / warmup_steps of the way behind it. After
    `total_steps` the value stays `final`.
    """

    peak: float
    final: float
    total_steps: int
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        _check_positive("total_steps", self.total_steps)
        if not 0 <= self.warmup_steps <= self.total_steps:
            raise ConfigError("warmup_steps", self.warmup_steps, f"must lie in [0, total_steps={self.total_steps}]")

    def at(self, step: int) -> float:
        """The value at `step`."""
        _check_progress("step", step)
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if step >= self.total_steps:
            return self.final
        progress = (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        return self.final + (self.peak - self.final) * 0.5 * (1.0 + math.cos(math.pi * progress))


@dataclass(frozen=True)
class LinearDecay:
    """A straight line from `start` at step 0 to `end` at `total_steps`, and `end` from there on."""

    start: float
    end: float
    total_steps: int

    def __post_init__(self) -> None:
        _check_positive("total_steps", self.total_steps)

    def at(self, step: int) -> float:
        """The value at `step`."""
        _check_progress("step", step)
        if step >= self.total_steps:
            return self.end
        return self.start + (self.end - self.start) * (step / self.total_steps)


@dataclass(frozen=True)
class BatchWarmup:
    """Samples in a step, growing with the samples seen: integers only, so that a resumed run is exact.

    The batch grows linearly in the samples seen, from `initial` to `final` at `ramp` (the shape is our choice; GLM-4.5
    gives the ends and the length), rounded down to `multiple`, which is what the layout can split (devices times
    micro-batch).
    """

    initial: int
    final: int
    ramp: int
    multiple: int = 1

    def __post_init__(self) -> None:
        for name in ("initial", "final", "multiple"):
            _check_positive(name, getattr(self, name))
        _check_progress("ramp", self.ramp)
        for name in ("initial", "final"):
            if getattr(self, name) % self.multiple:
                raise ConfigError(name, getattr(self, name), f"must be a multiple of {self.multiple}")
        if self.final < self.initial:
            raise ConfigError("final", self.final, f"must be at least initial={self.initial}")

    def batch(self, seen: int) -> int:
        """Size of the step that begins after `seen` samples."""
        _check_progress("seen", seen)
        if seen >= self.ramp:
            return self.final
        size = self.initial + (self.final - self.initial) * seen // self.ramp
        return size // self.multiple * self.multiple

    def seen(self, step: int) -> int:
        """Samples seen before `step`, from 0."""
        _check_progress("step", step)
        total = 0
        while step > 0 and total < self.ramp:
            total += self.batch(total)
            step -= 1
        return total + step * self.final


def _check_positive(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(name, value, "must be a positive integer")


def _check_progress(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(name, value, "must be an integer of at least 0")
