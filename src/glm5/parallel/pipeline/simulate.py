"""What an order of computations costs: idle time and memory, played without devices and by formula.

`simulate` runs every rank's order with given times, a computation beginning when its rank is free and its inputs are
there (sending takes no time). The formulas are the published ones; tests hold the two against each other, and the
measured runs of `benchmarks/pipeline.py` beside both. Sources: arXiv:2104.04473 (1F1B, interleaved), arXiv:2401.10241
(zero bubble), report section 2.4.1 (gradients). Read next: `schedule`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from glm5.parallel.pipeline.schedule import FULL_BUFFERS, computations
from glm5.utils.errors import ConfigError


@dataclass(frozen=True)
class Times:
    """Time of one micro-batch on one stage: forward pass, input gradients, weight gradients."""

    forward: float
    inputs: float
    weights: float

    @property
    def backward(self) -> float:
        return self.inputs + self.weights

    def of(self, kind: str) -> float:
        return {"F": self.forward, "I": self.inputs, "W": self.weights, "B": self.backward}[kind]


@dataclass(frozen=True)
class Timeline:
    """What playing an order found.

    Attributes:
        makespan: from the first computation to the end of the last.
        busy: of each rank, time that it computes. span: from its own first beginning to its own last end.
        in_flight: of each rank, the most micro-batches, summed over its stages, whose activations it holds at once,
            from the forward pass until the weight gradients are made.
    """

    makespan: float
    busy: tuple[float, ...]
    span: tuple[float, ...]
    in_flight: tuple[int, ...]

    @property
    def idle(self) -> float:
        """The longest time that a rank idles between its first and its last computation: the bubble."""
        return max(s - b for s, b in zip(self.span, self.busy, strict=True))

    @property
    def bubble(self) -> float:
        """The share of all ranks' time, until the last one ends, in which they idle."""
        return 1 - sum(self.busy) / (self.makespan * len(self.busy))


def simulate(orders: Mapping[int, Sequence[Any]], times: Sequence[Times]) -> Timeline:
    """Play every rank's order (of `schedule.orders`), `times` by stage.

    Raises:
        ConfigError: the orders wait for each other.
    """
    todo = {rank: computations(order) for rank, order in orders.items()}
    last = len(times) - 1
    ends: dict[tuple[str, int, int], float] = {}
    begun: dict[int, float] = {}
    free, busy = dict.fromkeys(todo, 0.0), dict.fromkeys(todo, 0.0)
    place, held, most = dict.fromkeys(todo, 0), dict.fromkeys(todo, 0), dict.fromkeys(todo, 0)
    while any(place[rank] < len(todo[rank]) for rank in todo):
        moved = False
        for rank, order in todo.items():
            while place[rank] < len(order):
                kind, stage, micro = order[place[rank]]
                needs = _needs(kind, stage, micro, last)
                if any(need not in ends for need in needs):
                    break
                start = max([free[rank], *(ends[need] for need in needs)])
                begun.setdefault(rank, start)
                free[rank] = start + times[stage].of(kind)
                ends[_result(kind), stage, micro] = free[rank]
                busy[rank] += times[stage].of(kind)
                held[rank] += {"F": 1, "I": 0, "W": -1, "B": -1}[kind]
                most[rank] = max(most[rank], held[rank])
                place[rank] += 1
                moved = True
        if not moved:
            raise ConfigError("orders", "all ranks wait", "this order of computations cannot run")
    ranks = sorted(todo)
    return Timeline(
        max(free.values()),
        tuple(busy[r] for r in ranks),
        tuple(free[r] - begun[r] for r in ranks),
        tuple(most[r] for r in ranks),
    )


def _result(kind: str) -> str:
    return "I" if kind == "B" else kind  # what the stage before waits for


def _needs(kind: str, stage: int, micro: int, last: int) -> list[tuple[str, int, int]]:
    if kind == "F":
        return [("F", stage - 1, micro)] if stage else []
    if kind == "W":
        return [("I", stage, micro)]
    return [("F", stage, micro)] + ([("I", stage + 1, micro)] if stage < last else [])


# --------------------------------------------------------------------------- formulas
def bubble(name: str, ranks: int, times: Times) -> float:
    """`Timeline.idle` of equal stages, by formula; enough micro-batches (a multiple of the ranks, at least twice them).

    Args:
        times: of one stage. With several stages a rank a stage is that much smaller, and so are its times.

    Raises:
        ConfigError: there is no closed formula for this schedule.
    """
    t = times
    if name in ("1f1b", "interleaved"):
        return (ranks - 1) * (t.forward + t.backward)
    if name == "zero-bubble":
        return (ranks - 1) * (t.forward + t.inputs - t.weights)
    if name == "zbv" and t.forward == t.inputs == t.weights:
        return 0.0
    raise ConfigError("pipeline.schedule", name, "has no closed formula at these times: simulate it")


def in_flight(name: str, ranks: int, stages_per_rank: int, rank: int) -> int:
    """`Timeline.in_flight` of a rank by formula; enough micro-batches, as for `bubble`.

    One counts a micro-batch on one stage: with several stages a rank, a fraction of the rank's layers.

    Raises:
        ConfigError: there is no closed formula for this schedule.
    """
    match name:
        case "1f1b":
            return ranks - rank
        case "interleaved":
            return ranks * (stages_per_rank - 1) + 2 * (ranks - 1 - rank) + 1
        case "zero-bubble" | "zbv":
            return ranks * stages_per_rank
        case "dualpipev":
            return ranks * stages_per_rank + 1
    raise ConfigError("pipeline.schedule", name, "has no closed formula: simulate it")


@dataclass(frozen=True)
class GradientBytes:
    """Bytes of gradients on one rank: `full` at once at most, while they are added up, and `shards` that persist."""

    full: int
    shards: int


def gradient_bytes(parameters: Sequence[int], data_ranks: int, size: int = 4, *, zero2: bool = True) -> GradientBytes:
    """With pipeline ZeRO-2 two stages of a rank hold full gradients at most, else all; each keeps 1 / `data_ranks`.

    Args:
        parameters: trainable ones of each stage of the rank. size: bytes of an element while it is added up.
    """
    largest = sorted(parameters, reverse=True)[: FULL_BUFFERS if zero2 else None]
    return GradientBytes(size * sum(largest), size * sum(-(-n // data_ranks) for n in parameters))
