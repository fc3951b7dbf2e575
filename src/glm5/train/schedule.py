"""Schedules: learning rate by step and batch size by samples, as pure functions of progress.

Nothing here keeps state, so a resumed run asks with the step (or the samples seen) and gets the same value. The
report gives the rates' ends (sections 2.1.1 and 2.3); the length of the warm-up, the line in the indexers' warm-up and
the shape of the batch's growth are our choices. Needs no torch. Read next: `config`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from glm5.utils.errors import ConfigError

Shape = Literal["cosine", "linear", "constant"]


@dataclass(frozen=True)
class LearningRate:
    """Learning rate by step. The report: 0 → 2e-4 → 4e-5 by cosine; 5e-3 → 2e-4 in warm-up; 1e-5 in adaptation."""

    peak: float = 2e-4
    """Highest value (constant: the value)."""
    final: float = 4e-5
    """Value that the run ends at."""
    warmup_steps: int = 0
    """Steps of linear warm-up from 0 (cosine only)."""
    shape: Shape = "cosine"
    """Course after the warm-up."""

    def __post_init__(self) -> None:
        for name in ("peak", "final"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(name, getattr(self, name), "must be a finite number of at least 0")
        if self.warmup_steps < 0:
            raise ConfigError("warmup_steps", self.warmup_steps, "must be at least 0")

    def at(self, step: int, steps: int) -> float:
        """The rate of update `step`, counted from 0, of a run of `steps`; `final` (constant: `peak`) after its end.

        The first update already moves: that of step s of the warm-up has (s + 1) / warmup_steps of the peak.
        """
        if self.shape == "constant":
            return self.peak
        if step >= steps:
            return self.final
        if self.shape == "linear":
            return self.peak + (self.final - self.peak) * (step / steps)
        warmup = min(self.warmup_steps, steps)
        if step < warmup:
            return self.peak * (step + 1) / warmup
        progress = (step - warmup) / (steps - warmup)
        return self.final + (self.peak - self.final) * 0.5 * (1.0 + math.cos(math.pi * progress))


@dataclass(frozen=True)
class BatchWarmup:
    """Samples in a step, growing with the samples seen: integers only, so that a resumed run is exact.

    The batch grows linearly in the samples seen, from `initial` to `final` at `ramp` (the shape is our choice; GLM-4.5
    gives the ends and the length), rounded down to `multiple`, which is what the layout can split (devices times
    micro-batch).
    """

    initial: int
    """Rows in the first step."""
    final: int
    """Rows in a step at the end."""
    ramp: int
    """Rows seen when the growth ends; 0 begins with `final`."""
    multiple: int = 1
    """Of what every batch is a multiple."""

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
