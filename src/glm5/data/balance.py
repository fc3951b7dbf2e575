"""Who works on what, so that no rank waits: sequences ordered by work, ranks grouped by length, positions cut by cost.

Token counts do not tell how long a sequence takes. A token costs the same everywhere in the matrices; its attention
costs what it sees, and under DSA that is min(k, seen) selected pairs plus one index score for every position seen. So
the model of cost is

    cost(L) = a L  +  b sum_t min(t, k)  +  c sum_t t          t = 1 ... L

whose quadratic part is the indexer's alone. With it, for one batch:

- `deal` and `in_turn` order rows so that the ranks of a step get about equal work (rows of one length, packed).
- `plan_groups` takes sequences of any length: ranks form groups of 1, 2, 4, … that share a sequence (context
  parallelism), for each step as its sequences need it. A long one gets many ranks, short ones run beside it.
- `context_spans` cuts the positions of a row for the ranks of a group: the late positions of a document see more.

Every plan is a function of its arguments alone, the same on every rank, and becomes JSON for a checkpoint. Plans move
sequences, not weights: losses are sums over tokens, divided once by the tokens of the whole batch, whoever had them.
Sources: report section 2.4.2; ByteScale (arXiv:2502.21231) and FlexSP for groups of several sizes. Read next:
`glm5.parallel.context`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glm5.utils.errors import ConfigError, DataError

I64 = NDArray[np.int64]
F64 = NDArray[np.float64]
Span = tuple[int, int]

# Spans a rank may get, tried in this order until the positions are balanced to `EVEN`.
CHUNKS = (2, 4, 8, 16)
EVEN = 1.01
# Bounds tried on the time of a step, in times of its dearest sequence.
STRETCHES = (1.0, 1.5, 2.0, 4.0, 16.0, float("inf"))


@dataclass(frozen=True)
class CostModel:
    """Work of a sequence in any unit, FLOP for one.

    Attributes:
        token: of one token in matrices. pair: of one attended pair. score: of one index score. topk: pairs a query
            keeps at most; None attends to all and has no indexer.
        moved: of one token whose rows a rank gathers from others of its group. step: what any micro-step costs, however
            little it does (weights gathered, kernels launched). With both at 0, all ranks would share every sequence.
    """

    token: float
    pair: float
    score: float = 0.0
    topk: int | None = None
    moved: float = 0.0
    step: float = 0.0

    def queries(self, seen: I64) -> F64:
        """Work of queries that see so many positions each; one that sees nothing is padding, and costs a token."""
        kept = seen if self.topk is None else np.minimum(seen, self.topk)
        return self.token + self.pair * kept + (0.0 if self.topk is None else self.score) * seen

    def sequences(self, lengths: Sequence[int] | I64) -> F64:
        """Work of whole sequences, by a closed form of the sum over their queries."""
        n = np.asarray(lengths, dtype=np.float64)
        dense = n * (n + 1) / 2
        if self.topk is None:
            return self.token * n + self.pair * dense
        short = np.minimum(n, self.topk)
        kept = short * (short + 1) / 2 + (n - short) * self.topk
        return self.token * n + self.pair * kept + self.score * dense

    def group_time(self, work: float, tokens: int, size: int) -> float:
        """Time that a group takes for sequences of so much work and so many tokens in all."""
        return work / size + (self.moved * tokens if size > 1 else 0.0)


def imbalance(loads: Sequence[float] | F64) -> float:
    """The largest load over the mean: 1 is even, and the time of a step that waits for its slowest rank grows by it."""
    loads = np.asarray(loads, dtype=np.float64)
    return float(loads.max() / loads.mean()) if loads.sum() > 0 else 1.0


# --------------------------------------------------------------------------- rows of a step
def deal(costs: Sequence[float] | F64, ranks: int, each: int = 1) -> I64:
    """Order the rows of a batch by work: like with like in one micro-batch, evenly over its ranks.

    Args:
        costs: of each row. ranks: that take rows at once. each: rows of a rank in one micro-batch.

    Returns:
        [micro-batches, ranks, each]: row numbers, -1 where the last micro-batch has none left.

    Raises:
        ConfigError: `ranks` or `each` is below 1.
    """
    for name, value in (("ranks", ranks), ("each", each)):
        if value < 1:
            raise ConfigError(name, value, "must be at least 1")
    work = np.asarray(costs, dtype=np.float64)
    order = np.argsort(-work, kind="stable")
    out = np.full((-(-len(work) // (ranks * each)), ranks, each), -1, dtype=np.int64)
    for step in range(len(out)):
        load, filled = [0.0] * ranks, [0] * ranks
        for row in order[step * ranks * each : (step + 1) * ranks * each].tolist():
            rank = min((r for r in range(ranks) if filled[r] < each), key=lambda r: (load[r], filled[r], r))
            out[step, rank, filled[rank]] = row
            load[rank] += work[row]
            filled[rank] += 1
    return out


def in_turn(costs: Sequence[float] | F64, ranks: int) -> I64:
    """An order of rows of which each rank takes every `ranks`-th: alike in one round, and about even over rounds.

    Rounds go from dear to cheap, and every other one backwards, so that no rank always has the dearest of its round.
    Unlike with `deal` all ranks have equally many rows, where they divide.
    """
    order = np.argsort(-np.asarray(costs, dtype=np.float64), kind="stable")
    for start in range(ranks, len(order) - ranks + 1, 2 * ranks):
        order[start : start + ranks] = order[start : start + ranks][::-1]
    return order


def dealt_time(plan: I64, costs: Sequence[float] | F64) -> float:
    """Time of such a plan over that of a perfectly even one: each micro-batch waits for its slowest rank."""
    work = np.append(np.asarray(costs, dtype=np.float64), 0.0)  # row -1 costs nothing
    loads = work[plan].sum(-1)
    return float(loads.max(-1).sum() / (loads.sum() / plan.shape[1])) if loads.sum() > 0 else 1.0


# --------------------------------------------------------------------------- groups of ranks
@dataclass(frozen=True)
class Group:
    """Ranks first … first + size - 1, which share these sequences; `first` is a multiple of `size`."""

    first: int
    size: int
    sequences: tuple[int, ...]


@dataclass(frozen=True)
class BatchPlan:
    """The micro-steps of one batch: in each, groups that run side by side. A rank without a group rests."""

    ranks: int
    steps: tuple[tuple[Group, ...], ...]

    def group_of(self, step: int, rank: int) -> Group | None:
        """What a rank does in a step."""
        return next((g for g in self.steps[step] if g.first <= rank < g.first + g.size), None)

    def time(self, lengths: Sequence[int] | I64, model: CostModel) -> float:
        """Time of the whole batch over that of its work spread evenly: each step waits for its slowest group."""
        sizes, costs = np.asarray(lengths, dtype=np.int64), model.sequences(lengths)
        spent = 0.0
        for step in self.steps:
            members = [(list(g.sequences), g.size) for g in step]
            spent += model.step + max(model.group_time(costs[m].sum(), int(sizes[m].sum()), n) for m, n in members)
        return float(spent / (costs.sum() / self.ranks)) if self.steps else 1.0

    def to_json(self) -> dict[str, Any]:
        """For a checkpoint."""
        steps = [[[g.first, g.size, list(g.sequences)] for g in step] for step in self.steps]
        return {"ranks": self.ranks, "steps": steps}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> BatchPlan:
        """What `to_json` gave."""
        steps = tuple(tuple(Group(first, size, tuple(s)) for first, size, s in step) for step in data["steps"])
        return cls(data["ranks"], steps)


def plan_groups(lengths: Sequence[int] | I64, ranks: int, capacity: int, model: CostModel) -> BatchPlan:
    """Divide a batch into steps, and in each step the ranks into groups of powers of two, balanced by work.

    A step begins with the dearest sequence left. For each size of its group, and for several bounds on the time of the
    step, groups are opened for the next sequences and filled up within the bound and the ranks' memory; the step that
    does most work in its time is kept.

    Args:
        lengths: tokens of each sequence. ranks: a power of two. capacity: tokens that one rank can hold in a step.

    Raises:
        ConfigError: `ranks` is no power of two, or `capacity` is below 1.
        DataError: a sequence does not fit on all ranks together.
    """
    sizes, least = _least_groups(lengths, ranks, capacity)
    costs = model.sequences(sizes)
    left = sorted(range(len(sizes)), key=lambda i: (-costs[i], i))
    steps = []
    while left:
        best: tuple[float, list[Group]] | None = None
        size = least[left[0]]
        while size <= ranks:
            for stretch in STRETCHES:
                filling = _Filling(sizes, costs, least, ranks, capacity, model)
                groups, used = filling.fill(left, size, stretch)
                if best is None or used > best[0] * (1 + 1e-9):
                    best = used, groups
            size *= 2
        assert best is not None
        steps.append(tuple(best[1]))
        done = {i for g in best[1] for i in g.sequences}
        left = [i for i in left if i not in done]
    return BatchPlan(ranks, tuple(steps))


def plan_uniform(lengths: Sequence[int] | I64, ranks: int, capacity: int) -> BatchPlan:
    """What is usual, for comparison: groups of one size, that the longest sequence needs, filled in the order given.

    Arguments and errors as `plan_groups`.
    """
    sizes, least = _least_groups(lengths, ranks, capacity)
    size = max(least, default=1)
    packs: list[list[int]] = []
    room = 0
    for i, length in enumerate(sizes.tolist()):
        if length > room:
            packs.append([])
            room = size * capacity
        packs[-1].append(i)
        room -= length
    side = ranks // size
    steps = [packs[i : i + side] for i in range(0, len(packs), side)]
    return BatchPlan(ranks, tuple(tuple(Group(n * size, size, tuple(p)) for n, p in enumerate(s)) for s in steps))


def _least_groups(lengths: Sequence[int] | I64, ranks: int, capacity: int) -> tuple[I64, list[int]]:
    """The lengths, and the smallest group that can hold each."""
    if ranks < 1 or ranks & (ranks - 1):
        raise ConfigError("ranks", ranks, "must be a power of two")
    if capacity < 1:
        raise ConfigError("capacity", capacity, "must be at least 1 token")
    sizes = np.asarray(lengths, dtype=np.int64)
    if len(sizes) and sizes.max() > ranks * capacity:
        raise DataError(
            f"a sequence of {sizes.max():,} tokens does not fit on {ranks} ranks of {capacity:,} tokens each",
            "Use more ranks or a larger capacity, or cut the sequence",
        )
    return sizes, [1 << max(0, -(-n // capacity) - 1).bit_length() for n in sizes.tolist()]


@dataclass(frozen=True)
class _Filling:
    """What filling one step depends on."""

    sizes: I64
    costs: F64
    least: Sequence[int]
    ranks: int
    capacity: int
    model: CostModel

    def fill(self, left: Sequence[int], size: int, stretch: float) -> tuple[list[Group], float]:
        """A step whose first group has this size and takes `stretch` times what its first sequence takes, at most.

        Args:
            left: in falling order of cost, and so of length.

        Returns:
            Its groups, and the share of the ranks' time in which they work.
        """
        limit = self._time([left[0]], size) * stretch * (1 + 1e-9)
        members: list[list[int]] = []
        wide: list[int] = []
        rest, at = [], 0
        for i in left:
            need = size if not members else self.least[i]
            while need < size and self._time([i], need) > limit:
                need *= 2
            if at + need <= self.ranks:  # needs fall along `left`, so groups begin at multiples of their sizes
                members.append([i])
                wide.append(need)
                at += need
            else:
                rest.append(i)
        work = [float(self.costs[m[0]]) for m in members]
        tokens = [int(self.sizes[m[0]]) for m in members]
        time = [self.model.group_time(w, n, g) for w, n, g in zip(work, tokens, wide, strict=True)]
        for i in rest:
            best = None
            for g, group in enumerate(members):
                if tokens[g] + self.sizes[i] <= wide[g] * self.capacity:
                    then = self.model.group_time(work[g] + self.costs[i], tokens[g] + int(self.sizes[i]), wide[g])
                    if then <= limit and (best is None or then < best[0]):
                        best = then, g, group
            if best is not None:
                time[best[1]] = best[0]
                best[2].append(i)
                work[best[1]] += float(self.costs[i])
                tokens[best[1]] += int(self.sizes[i])
        firsts = [sum(wide[:g]) for g in range(len(wide))]
        groups = [Group(f, w, tuple(m)) for f, w, m in zip(firsts, wide, members, strict=True)]
        return groups, sum(work) / (self.ranks * (self.model.step + max(time)))

    def _time(self, sequences: list[int], size: int) -> float:
        return self.model.group_time(float(self.costs[sequences].sum()), int(self.sizes[sequences].sum()), size)


# --------------------------------------------------------------------------- positions of a row
def context_spans(cost_T: Sequence[float] | F64, ranks: int) -> tuple[tuple[Span, ...], ...]:
    """Cut the positions of a row among the ranks that share it: equally many for each, and about equal work.

    The row is cut into small spans of one size; the dearest goes first, to the rank with the least work that may
    still take one. Of one causal document each of R ranks gets a span of the head and its mirror image at the tail.

    Args:
        cost_T: work of each position, of all rows that are cut alike together.

    Returns:
        For each rank its spans (start, stop), in order, neighbours joined. They cover [0, T) once. Every rank has T / R
        positions where 2 R divides T, and else about so many.

    Raises:
        ConfigError: `ranks` is below 1.
    """
    if ranks < 1:
        raise ConfigError("ranks", ranks, "must be at least 1")
    cost = np.asarray(cost_T, dtype=np.float64)
    before = np.concatenate(([0.0], np.cumsum(cost)))
    best: tuple[float, list[list[Span]]] | None = None
    # Spans that divide the row keep the ranks' shares equal.
    even = [c for c in CHUNKS if len(cost) % (ranks * c) == 0]
    for chunks in (even or CHUNKS) if ranks > 1 else (1,):
        size = max(1, -(-len(cost) // (ranks * chunks)))
        spans = [(a, min(a + size, len(cost))) for a in range(0, len(cost), size)]
        spans.sort(key=lambda s: (before[s[0]] - before[s[1]], s))
        owned: list[list[Span]] = [[] for _ in range(ranks)]
        load = [0.0] * ranks
        for a, b in spans:
            rank = min((r for r in range(ranks) if len(owned[r]) < chunks), key=lambda r: (load[r], len(owned[r]), r))
            owned[rank].append((a, b))
            load[rank] += float(before[b] - before[a])
        worst = imbalance(load)
        if best is None or worst < best[0]:
            best = worst, owned
        if worst <= EVEN:
            break
    assert best is not None
    return tuple(_joined(sorted(spans)) for spans in best[1])


def _joined(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Sorted spans, those that touch made one."""
    out: list[Span] = []
    for a, b in spans:
        if out and out[-1][1] == a:
            out[-1] = (out[-1][0], b)
        elif a < b:
            out.append((a, b))
    return tuple(out)
