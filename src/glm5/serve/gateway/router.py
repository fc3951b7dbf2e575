"""Which engine answers a rollout: the same one every turn, so that its prefix is warm there, unless load or health
speaks against it. Plain Python: no clock and no network of its own.

Consistent hashing with bounded loads: engines lie on a ring of hashes, many points each; a rollout goes to the first
engine after its own hash whose load stays within `slack` times the mean (arXiv:1608.01350). It then stays there, until
that engine is full, silent or out of date: adding or losing an engine moves few rollouts.

An engine may be routed to while it beats and once it has confirmed the current weights. One that was silent, or began
anew, must confirm them again: a recovered engine never answers with the weights that it woke up with. During a push all
go on; `set_version` ends it, and leaves out who did not confirm. Source: the report, section 4.1. Read next: `app`.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import math
from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from glm5.serve.client import Unavailable
from glm5.utils.errors import ConfigError

Pool = Literal["decode", "prefill"]
POINTS = 64  # of an engine on the ring
HOMES = 1 << 16  # rollouts whose engine is remembered; of more, those that were not asked for longest are forgotten


@dataclass
class EngineState:
    """What is known of an engine.

    Attributes:
        boot: changes whenever its process begins anew. version: of its weights, as it said last.
        beaten: when it was last heard. life: no other process had this number here. load: requests that it has now.
        admitted: it confirmed the current weights.
    """

    name: str
    pool: Pool
    boot: str
    version: str
    beaten: float
    life: int
    load: int = 0
    admitted: bool = False


@dataclass(frozen=True)
class Lease:
    """A request's place at an engine, to be given back once. `life`: of the engine that it counts at."""

    engine: str
    life: int
    rollout: str
    moved: bool


class Router:
    """See the module. Times are seconds of one monotonic clock, given by the caller.

    Args:
        version: of the weights that engines must have.
        silent_s: an engine that was not heard for longer is not routed to.
        slack: how far above the mean an engine's load may be: 1.25 is a quarter. Infinity never moves a rollout.

    Attributes:
        moves: how many rollouts had to leave an engine.
    """

    def __init__(self, version: str, *, silent_s: float = 10.0, slack: float = 1.25) -> None:
        if not slack > 1:
            raise ConfigError("slack", slack, "must be above 1")
        if not silent_s > 0:
            raise ConfigError("silent_s", silent_s, "must be above 0")
        self.version, self.silent_s, self.slack = version, silent_s, slack
        self.engines: dict[str, EngineState] = {}
        self.moves = 0
        self._lives = itertools.count()
        self._ring: list[tuple[int, str]] = []
        self._homes: OrderedDict[tuple[Pool, str], tuple[str, int]] = OrderedDict()  # engine and life, by rollout

    # -------------------------------------------------------------------------------------------------- engines
    def beat(self, name: str, version: str, now: float, *, boot: str = "", pool: Pool = "decode") -> None:
        """An engine says that it lives, and with which weights."""
        engine = self.engines.get(name)
        if engine is None or engine.boot != boot or engine.pool != pool:
            if engine is None:
                self._ring = sorted([*self._ring, *((_hash(f"{name}\0{i}"), name) for i in range(POINTS))])
            engine = self.engines[name] = EngineState(name, pool, boot, version, now, next(self._lives))
        elif now - engine.beaten > self.silent_s:
            engine.admitted = False
        engine.beaten, engine.version = now, version
        engine.admitted = engine.admitted or version == self.version

    def lost(self, name: str) -> None:
        """A request to it failed: leave it out until it beats and confirms its weights anew."""
        if (engine := self.engines.get(name)) is not None:
            engine.admitted, engine.beaten = False, -math.inf

    def remove(self, name: str) -> None:
        """Forget an engine; its rollouts go elsewhere."""
        self.engines.pop(name, None)
        self._ring = [point for point in self._ring if point[1] != name]

    def set_version(self, version: str) -> list[str]:
        """A push has ended: the current weights are these. Returns the engines that have not confirmed them, which are
        left out until they do."""
        self.version = version
        for engine in self.engines.values():
            engine.admitted = engine.version == version and math.isfinite(engine.beaten)
        return [engine.name for engine in self.engines.values() if not engine.admitted]

    def routable(self, now: float, pool: Pool = "decode") -> list[EngineState]:
        """The engines that may be asked."""
        return [e for e in self.engines.values() if e.pool == pool and e.admitted and now - e.beaten <= self.silent_s]

    # -------------------------------------------------------------------------------------------------- rollouts
    def route(self, rollout: str, now: float, *, pool: Pool = "decode", avoid: Collection[str] = ()) -> Lease:
        """Where a rollout's next request goes.

        Args:
            avoid: engines that failed at this request.

        Raises:
            Unavailable: no engine may be asked.
        """
        there = {engine.name: engine for engine in self.routable(now, pool) if engine.name not in avoid}
        if not there:
            raise Unavailable(f"no engine of pool {pool} is alive with weights {self.version}")
        total = sum(engine.load for engine in there.values())
        limit = math.inf if math.isinf(self.slack) else math.ceil(self.slack * (total + 1) / len(there))
        before = self._homes.get((pool, rollout))
        home = there.get(before[0]) if before is not None else None
        if home is None or (home.name, home.life) != before or home.load >= limit:
            home = next(there[name] for name in self._from(rollout) if name in there and there[name].load < limit)
        moved = before is not None and before != (home.name, home.life)
        self.moves += moved
        self._homes[pool, rollout] = (home.name, home.life)
        self._homes.move_to_end((pool, rollout))
        if len(self._homes) > HOMES:
            self._homes.popitem(last=False)
        home.load += 1
        return Lease(home.name, home.life, rollout, moved)

    def release(self, lease: Lease) -> None:
        """A request has ended. An engine that began anew meanwhile has no more of it."""
        engine = self.engines.get(lease.engine)
        if engine is not None and engine.life == lease.life:
            engine.load -= 1

    def forget(self, rollout: str) -> None:
        """A rollout has ended."""
        self._homes.pop(("decode", rollout), None)
        self._homes.pop(("prefill", rollout), None)

    def _from(self, rollout: str) -> Iterator[str]:
        """The engines in the order of the ring, from the rollout's place on."""
        at = bisect.bisect(self._ring, (_hash(rollout), ""))
        seen: set[str] = set()
        for place in range(len(self._ring)):
            name = self._ring[(at + place) % len(self._ring)][1]
            if name not in seen:
                seen.add(name)
                yield name


def _hash(text: str) -> int:
    """The same in every process, unlike Python's own."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
