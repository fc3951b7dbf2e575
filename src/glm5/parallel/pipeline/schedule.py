"""Schedules: who computes what when, as torch.distributed.pipelining orders it, and what such an order costs.

    1f1b            one stage a rank          bubble (p - 1)(F + B)
    interleaved     several stages a rank     the same over the number of stages a rank
    zero-bubble     any number a rank         weight gradients fill the gaps: (p - 1)(F + I - W) with one stage a rank
    zbv             two a rank, as a V        none, where F = I = W
    dualpipev       two a rank, as a V        as zbv, with forward and backward passes paired

p ranks; F, I, W the times of a stage's forward pass, input gradients and weight gradients; B = I + W. `orders` gives
the computations of every rank without any process, `simulate` plays them with given times. Source: report section
2.4.2; arXiv:2104.04473, arXiv:2401.10241. Read next: `simulate`, `engine`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

from torch import nn

from glm5.utils.errors import ConfigError

Name = Literal["1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev"]
FIELD = "pipeline.schedule"
FULL_BUFFERS = 2  # stages of a rank that hold full gradients at once


@dataclass(frozen=True)
class Schedule:
    """What sets a schedule apart.

    Attributes:
        torch: name of the class in torch; None for our own order. stages: a rank's number of them, None for any.
        v: stages run down the ranks and up again; otherwise round and round. splits: it defers weight gradients.
    """

    torch: str | None
    stages: int | None
    v: bool = False
    splits: bool = False


SCHEDULES: dict[str, Schedule] = {
    "1f1b": Schedule(None, 1),
    "interleaved": Schedule("Interleaved1F1B", None),
    "zero-bubble": Schedule("InterleavedZeroBubble", None, splits=True),
    "zbv": Schedule("ZBVZeroBubble", 2, v=True, splits=True),
    "dualpipev": Schedule("DualPipeV", 2, v=True, splits=True),
}


def schedule(name: str) -> Schedule:
    """The schedule called `name`.

    Raises:
        ConfigError: there is none.
    """
    if name not in SCHEDULES:
        raise ConfigError(FIELD, name, f"must be one of {', '.join(SCHEDULES)}")
    return SCHEDULES[name]


def rank_of_stage(name: str, ranks: int, stages: int) -> list[int]:
    """Which rank runs each stage.

    Raises:
        ConfigError: this schedule cannot place so many stages on so many ranks.
    """
    kind = schedule(name)
    if stages < ranks or stages % ranks:
        raise ConfigError("pipeline stages", stages, f"must be a multiple of the {ranks} pipeline ranks")
    if kind.stages not in (None, stages // ranks):
        rule = f"{name} runs {kind.stages} on each of the {ranks} ranks: give {kind.stages * ranks} stages"
        raise ConfigError("pipeline stages", stages, rule)
    if kind.v:
        return [*range(ranks), *reversed(range(ranks))]
    return [stage % ranks for stage in range(stages)]


def orders(name: str, ranks: int, stages: int, micro_batches: int) -> dict[int, list[Any]]:
    """Every rank's computations in order (torch's actions; None where it idles on purpose).

    Raises:
        ConfigError: the schedule cannot run so many micro-batches.
    """
    from torch.distributed.pipelining.schedules import get_schedule_class

    kind, held = schedule(name), rank_of_stage(name, ranks, stages)
    if micro_batches < 1:
        raise ConfigError("micro-batches", micro_batches, "must be at least 1")
    if kind.torch is None:
        return _one_forward_one_backward(ranks, micro_batches)
    own = [stage for stage, rank in enumerate(held) if rank == 0]
    stand_ins = [
        SimpleNamespace(stage_index=i, num_stages=stages, group_size=ranks, group_rank=0, submod=nn.Identity())
        for i in own
    ]
    try:
        made = get_schedule_class(kind.torch)(stand_ins, micro_batches, loss_fn=_no_loss)
    except ValueError as e:
        rule = f"{name} on {ranks} ranks with {stages} stages: {' '.join(str(e).split())}"
        raise ConfigError("micro-batches", micro_batches, rule) from None
    return {rank: [a for a in order if a is not None] for rank, order in made.pipeline_order.items()}


def _no_loss(*_: Any) -> Any:
    raise AssertionError("an order is not run")


def _one_forward_one_backward(ranks: int, micro_batches: int) -> dict[int, list[Any]]:
    from glm5.parallel.compat import Action, Kind

    out: dict[int, list[Any]] = {}
    for rank in range(ranks):
        ahead = min(ranks - 1 - rank, micro_batches)
        order = [Action(rank, Kind.FORWARD, i) for i in range(ahead)]
        for i in range(micro_batches):
            if i + ahead < micro_batches:
                order.append(Action(rank, Kind.FORWARD, i + ahead))
            order.append(Action(rank, Kind.FULL_BACKWARD, i))
        out[rank] = order
    return out


def computations(order: Sequence[Any]) -> list[tuple[str, int, int]]:
    """(F, I, W or B; stage; micro-batch) of every computation of an order; overlapped ones one after the other."""
    out = []
    for action in order:
        for part in (action.sub_actions or (action,)) if action is not None else ():
            if part.computation_type.value in "FIWB":
                out.append((part.computation_type.value, part.stage_index, part.microbatch_index))
    return out


def forward_only(order: Sequence[Any]) -> list[Any]:
    """A lowered order without its backward passes and what they send."""
    from glm5.parallel.compat import Kind

    kept = (Kind.FORWARD, Kind.SEND_F, Kind.RECV_F, Kind.UNSHARD, Kind.RESHARD)
    return [part for action in order for part in action.sub_actions or (action,) if part.computation_type in kept]


def with_reductions(order: Sequence[Any], every: int, makes: str = "IWB") -> list[Any]:
    """A rank's order with gradient reductions put in: at 0 after each stage's last micro-batch, else pipeline ZeRO-2.

    That reduces a stage's gradients after each `every` of its micro-batches, and where a third stage is about to begin,
    those of the stage that was used longest ago: two of a rank's stages at most hold full gradients. Source: report
    section 2.4.1.

    Args:
        makes: the kinds of computation that make gradients: "IWB", or "F" where a forward pass has its own backward.
    """
    from glm5.parallel.compat import Action, Kind

    ends = "F" if makes == "F" else "BW"
    order = [action for action in order if action.computation_type != Kind.REDUCE_GRAD]
    total = Counter(stage for kind, stage, _ in computations(order) if kind in ends)
    finished: Counter[int] = Counter()
    out: list[Any] = []
    holding: list[int] = []  # stages with full gradients, the longest unused first
    for action in order:
        worked = [(kind, stage) for kind, stage, _ in computations([action]) if kind in makes]
        for _, stage in worked:
            if stage in holding:
                holding.remove(stage)
            elif every and len(holding) == FULL_BUFFERS:
                out.append(Action(holding.pop(0), Kind.REDUCE_GRAD, None))
            holding.append(stage)
        out.append(action)
        for kind, stage in worked:
            if kind not in ends:
                continue
            finished[stage] += 1
            due = finished[stage] == total[stage] or (every and finished[stage] % every == 0)
            if due and stage in holding:
                holding.remove(stage)
                out.append(Action(stage, Kind.REDUCE_GRAD, None))
    return out
