"""How rollouts are run: sizes, limits, patience. Read next: `orchestrator`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from glm5.utils.errors import ConfigError


@dataclass(frozen=True)
class RolloutOptions:
    """How rollouts of all tasks are run."""

    group: int = 8
    """Samples of a group: rollouts of one prompt."""
    concurrency: int = 1024
    """Rollouts at once, of all tasks together."""
    max_open: int = 8192
    """Samples that may be started and not yet closed by the learner."""
    samples_per_version: int | None = None
    """Samples that the learner takes between two pushes of weights: with it, no more samples are open than it takes
    within `max_staleness` + 1 versions, so that none has to wait until it is stale. None: only `max_open` counts."""
    max_staleness: int = 4
    """The learner's: a rollout whose oldest token is more versions behind is ended."""
    lead: int | None = None
    """Samples by which a task may be ahead of its share. None: two groups."""
    retries: int = 2
    """How often a sample is tried again whose environment or verifier failed."""
    losses: int = 8
    """How often a sample is tried again whose engine, gateway or service was lost."""
    grace_s: float = 20.0
    """How much longer than its time limit a rollout is waited for: longer than `silent_s`, so that it shows whether the
    service or the agent is slow."""
    beat_s: float = 2.0
    """How often services are to say that they are there."""
    silent_s: float = 15.0
    """A service that was not heard for so long is away."""
    patience_s: float = 600.0
    """How long samples wait for a service that is away; then they have failed, or are cancelled if it said that it
    left."""
    look_s: float = 0.5
    """How often the ledger is looked at for what the learner has taken."""
    seed: int = 0
    """Of the prompts."""

    def __post_init__(self) -> None:
        for name in ("group", "concurrency", "max_open", "samples_per_version", "lead"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(name, value, "must be at least 1")
        for name in ("max_staleness", "retries", "losses"):
            if getattr(self, name) < 0:
                raise ConfigError(name, getattr(self, name), "must be at least 0")
        for name in ("grace_s", "beat_s", "silent_s", "patience_s", "look_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(name, getattr(self, name), "must be above 0")
        if self.grace_s <= self.silent_s:
            raise ConfigError("grace_s", self.grace_s, f"must be above silent_s, {self.silent_s:g}")
        if self.open_limit < self.group:
            raise ConfigError("max_open", self.open_limit, f"a group of {self.group} samples does not fit")

    @property
    def open_limit(self) -> int:
        """Samples that may be open at once.

        They are taken in the order of their start. So a sample that is started while this many are open is taken by an
        update that reads at most `max_staleness` versions more than there are now.
        """
        if self.samples_per_version is None:
            return self.max_open
        return min(self.max_open, (self.max_staleness + 1) * self.samples_per_version)
