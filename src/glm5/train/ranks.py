"""What one rank of a training run asks of the others; alone, every answer is its own and nothing is sent.

Which rows of a step are its share, sums over all data ranks, one decision for all, one rank that writes. With it
`Trainer.step` reads the same on one process and on many. Read next: `loop`, `glm5.parallel.mesh`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor, nn

from glm5.data.balance import CostModel, context_spans
from glm5.data.loader import Batch
from glm5.kernels.cross_entropy import LinearCrossEntropy, LinearLogprobs, linear_cross_entropy, linear_logprobs
from glm5.model.glm5 import GLM5
from glm5.parallel.mesh import Mesh, ParallelError, World
from glm5.parallel.pipeline.recompute import Part
from glm5.parallel.pipeline.schedule import Name as ScheduleName
from glm5.train.checkpoint import CheckpointStore
from glm5.train.config import TrainConfig
from glm5.train.rows import Rows
from glm5.utils.errors import ConfigError, UserError

if TYPE_CHECKING:
    from glm5.parallel.context import ContextGroups
    from glm5.parallel.exchange import Ways
    from glm5.parallel.muon import Holdings
    from glm5.parallel.pipeline.engine import Pipeline

T = TypeVar("T")
Item = TypeVar("Item")


class Head(NamedTuple):
    """The operators of `glm5.kernels.cross_entropy`, or those of a head that is divided over ranks."""

    cross_entropy: Callable[..., LinearCrossEntropy]
    logprobs: Callable[..., LinearLogprobs]


@dataclass(frozen=True)
class PipelineOptions:
    """How a model's stages run, where the mesh has pipeline ranks, and what runs again. The result stays the same."""

    schedule: ScheduleName = "1f1b"
    """In which order a rank runs its stages' micro-batches."""
    layout: str = ""
    """Stages as text, like "E D M*2 | M*3 N P | H"; by default balanced by counted work."""
    stages_per_rank: int = 1
    """Stages on each rank, where the schedule leaves it open."""
    reduce_every: int = 0
    """Pipeline ZeRO-2: reduce gradients into shards after so many micro-batches; 0 is after the last."""
    offload: Literal["never", "warmup", "far"] = "never"
    """Which micro-batches' activations wait in host memory."""
    recompute: tuple[Part, ...] = ()
    """What runs again in the backward pass, in place of being kept. Also on one device and on meshes without stages."""

    def __post_init__(self) -> None:
        for name, least in (("stages_per_rank", 1), ("reduce_every", 0)):
            if getattr(self, name) < least:
                raise ConfigError(name, getattr(self, name), f"must be at least {least}")


def check_batch(config: TrainConfig, mesh: Mesh) -> None:
    """Whether every step's rows can be dealt out evenly over the ranks of a mesh.

    Raises:
        ConfigError: they cannot; it names the field.
    """
    if config.context_groups:
        check_groups(config, mesh)
        return
    batch, dealt = config.batch, mesh.dp
    sizes = [("batch.initial", batch.initial), ("batch.final", batch.final)]
    sizes += [("batch.multiple", batch.multiple)] if batch.initial != batch.final and batch.ramp else []
    for name, size in sizes:
        if size % dealt:
            near = max(1, round(size / dealt)) * dealt
            raise ConfigError(
                name, size, f"must be a multiple of dp={dealt}, over which rows are dealt: make it {near}"
            )
        if mesh.pp == 1:
            continue
        whole = dealt * config.micro_batch
        if size % whole:
            rule = f"must be a multiple of dp x micro_batch = {whole} in a pipeline, whose micro-batches have one shape"
            fitting = max(n for n in range(1, size // dealt + 1) if (size // dealt) % n == 0 and n < config.micro_batch)
            raise ConfigError(name, size, f"{rule}: make it {-(-size // whole) * whole}, or micro_batch {fitting}")
        mtp_rows = max(1, round(config.mtp_share * size))
        if config.mtp_depths and mtp_rows % dealt:
            rule = f"{mtp_rows} of {size} rows train MTP, which in a pipeline must be a multiple of dp={dealt}"
            raise ConfigError(
                "mtp_share", config.mtp_share, f"{rule}: make it {-(-mtp_rows // dealt) * dealt / size:g}"
            )


def check_groups(config: TrainConfig, mesh: Mesh) -> None:
    """Whether the data-parallel ranks of a mesh can be divided into groups.

    Raises:
        ConfigError: they cannot.
    """
    if mesh.pp * mesh.cp > 1:
        rule = f"needs a mesh without pp and cp, and this is {mesh}"
        raise ConfigError("context_groups", config.context_groups, rule)
    if mesh.dp & (mesh.dp - 1):
        rule = f"needs dp to be a power of two, and it is {mesh.dp}"
        raise ConfigError("context_groups", config.context_groups, rule)


class Ranks:
    """This process among those that train together.

    Args:
        world: None is one process.
        gather_once: hold all parameters from a step's first micro-batch to its last, and reduce gradients after the
            last: a fraction of the communication, for the memory of whole parameters and fp32 gradients. On a mesh of
            shard=1, where parameters are whole anyway, nothing is then gathered at all.
        prefetch: see `parallelize`.
        by_heads: where rows are shared, divide dense attention by heads (`ContextRows.attend`), not by positions.
    """

    def __init__(
        self, world: World | None = None, *, gather_once: bool = False, prefetch: int = 1, by_heads: bool = True
    ) -> None:
        self.world, self.gather_once, self.prefetch = world, gather_once, prefetch
        self.alone, self.by_heads = world is None, by_heads
        self.copies = world is not None and gather_once and world.count("shard") == world.count("pp") == 1
        self._ways: Ways | None = None  # between context-parallel ranks
        self._groups: ContextGroups | None = None

    @property
    def main(self) -> bool:
        """Whether this process speaks and writes files that are one for all."""
        return self.world is None or self.world.main

    @property
    def device(self) -> torch.device:
        """Where numbers that ranks exchange lie."""
        return torch.device("cpu") if self.world is None else self.world.device

    def count(self, axis: str) -> int:
        """Ranks along an axis of the mesh."""
        return 1 if self.world is None else self.world.count(axis)

    def at(self, step: int, phase: str) -> None:
        """Tell the watch, if there is one, what this rank begins to do: it names who stands still, and where."""
        if self.world is not None and self.world.watch is not None:
            self.world.watch.at(step, phase)

    def beat(self) -> None:
        """Tell it, inside of something long, that this rank gets on. From any thread."""
        if self.world is not None and self.world.watch is not None:
            self.world.watch.beat()

    def pace(self) -> dict[str, float]:
        """Metrics of the slowest rank; none where there is one rank."""
        if self.world is None or self.world.size == 1:
            return {}
        from glm5.parallel.watch import slowest

        rank, times = slowest(self.world)
        return {"slowest_rank": rank, "slowest_pace": times}

    def console(self) -> Console | None:
        """Where progress is shown: nowhere but on the main rank."""
        return None if self.main else Console(quiet=True)

    # ------------------------------------------------------------------ where things lie
    # DTensor takes long to import, and one process has none.
    def place(self, model: GLM5, options: PipelineOptions) -> Pipeline | None:
        """Lay the model out over the ranks, in place; where there are stages, take it apart."""
        if self.world is not None and self.world.count("pp") > 1:
            from glm5.train.piped import placed

            return placed(model, self.world, options)
        if self.world is not None:
            from glm5.parallel.shard import parallelize

            how: dict[str, Any] = dict(reshard=not self.gather_once, prefetch=self.prefetch, copies=self.copies)
            parallelize(model, self.world, **how)
        if options.recompute:
            from glm5.parallel.pipeline.recompute import recompute

            recompute(model, options.recompute)
        return None

    def before(self, micro: int, of: int, model: nn.Module) -> None:
        """Say which of a step's micro-batches comes now."""
        if self.world is not None and self.gather_once and not self.copies:
            from torch.distributed.fsdp import FSDPModule

            assert isinstance(model, FSDPModule)
            last = micro == of - 1
            model.set_is_last_backward(last)
            model.set_requires_gradient_sync(last)
            model.set_reshard_after_backward(last)

    def after(self, model: nn.Module) -> None:
        """Say that the step's last micro-batch is done."""
        if self.world is not None and self.copies:
            from glm5.parallel.shard import sum_gradients

            sum_gradients(model, self.world)

    def head(self, model: GLM5) -> tuple[Tensor, Head]:
        """The output head, or this rank's rows of it, and what computes with it."""
        if self.world is not None and self.world.count("tp") > 1:
            from glm5.parallel.vocab import divided_head

            found = divided_head(model.lm_head)
            if found is not None:
                return found[0], Head(found[1].cross_entropy, found[1].logprobs)
        return model.lm_head.weight, Head(linear_cross_entropy, linear_logprobs)

    def holdings(self, parameters: list[nn.Parameter]) -> Holdings | None:
        """Which rank holds what of them; None where one holds all."""
        if self.world is None:
            return None
        from glm5.parallel.muon import Holdings

        return Holdings(parameters, self.world.group("stage"), self.world.group("world"))

    def local(self, t: Tensor) -> Tensor:
        """What this rank holds of a tensor."""
        if self.world is None:
            return t
        from glm5.parallel.expert import local

        return local(t)

    def whole(self, t: Tensor) -> Tensor:
        """All of a tensor, on every rank; all call this."""
        if self.world is None:
            return t
        from glm5.parallel.shard import whole

        return whole(t)

    def store(self, directory: Path, keep: int, places: Callable[[], Mapping[str, Tensor]]) -> CheckpointStore:
        """Checkpoints of this process, or of all ranks together; see `ShardedStore`."""
        if self.world is None:
            return CheckpointStore(directory, keep)
        from glm5.train.sharded import ShardedStore

        return ShardedStore(directory, keep, self.world, places)

    # ------------------------------------------------------------------ rows
    def share(self, items: NDArray[Any]) -> NDArray[Any]:
        """Every dp-th item, beginning with this rank's place: the first few of a step are spread over all ranks."""
        if self.world is None:
            return items
        return items[self.world.place("dp") :: self.world.count("dp")]

    def shared(self, rows: Rows, batch: Batch, cost: CostModel) -> Rows:
        """What this rank does of rows whose positions the context-parallel ranks share out by cost."""
        if self.world is None or self.world.count("cp") == 1:
            return rows
        from glm5.parallel.context import ContextRows, context_ways

        seen_BT = np.maximum(np.arange(1, batch.seq_len + 1) - batch.first_BT, 0)
        spans = context_spans(cost.queries(seen_BT).sum(0), self.world.count("cp"))
        if self._ways is None:
            self._ways = context_ways(self.world)
        return rows.shared(ContextRows(spans, rows.first_BS, self._ways, seen=rows.seen if self.by_heads else ()))

    @property
    def groups(self) -> ContextGroups | None:
        """Groups of every size of the data-parallel ranks, made on the first call, which all make; None alone."""
        if self.world is None:
            return None
        if self._groups is None:
            from glm5.parallel.context import context_groups

            self._groups = context_groups(self.world)
        return self._groups

    def mtp_rows(self, rows: int, first: int, count: int) -> tuple[int, int]:
        """Of this rank's rows `first .. first + count - 1` of a step: how many run MTP, and how many of those count.

        Args:
            rows: the step's first so many rows, over all ranks, train MTP.

        Every rank runs MTP on as many rows as any other, since they gather its parameters together; where rows don't
        divide evenly, the last ones of some ranks count nothing.
        """
        dealt, place = (1, 0) if self.world is None else (self.world.count("dp"), self.world.place("dp"))
        run = min(count, max(0, -(-rows // dealt) - first))
        return run, min(run, max(0, -(-(rows - place) // dealt) - first))

    # ------------------------------------------------------------------ sums and decisions
    def sum(self, x: Tensor) -> Tensor:
        """The sum over the data ranks, in place."""
        if self.world is not None and self.world.count("data") > 1:
            dist.all_reduce(x, group=self.world.group("data"))
        return x

    def largest(self, x: Tensor, axis: str = "world") -> Tensor:
        """The elementwise maximum over all ranks, in place."""
        if self.world is not None and self.world.count(axis) > 1:
            dist.all_reduce(x, dist.ReduceOp.MAX, group=self.world.group(axis))
        return x

    def any(self, flag: bool) -> bool:
        """Whether it is so on some rank: the same answer on all."""
        if self.world is None or self.world.size == 1:
            return flag
        return bool(self.largest(torch.tensor(int(flag), device=self.device)))

    def first(self, what: str | None) -> str | None:
        """What the first rank that has something to say says, with its name, on all; None where all are silent."""
        if self.world is None or self.world.size == 1:
            return what
        if not self.any(what is not None):
            return None
        said = self.world.gather_objects(what)
        return next(f"rank {rank}: {text}" for rank, text in enumerate(said) if text is not None)

    def on_main(self, act: Callable[[], T]) -> T | None:
        """Do something on the main rank while the others wait. Its result there, None elsewhere; its error on all."""
        if self.world is None:
            return act()
        result, failed = None, None
        if self.main:
            try:
                result = act()
            except UserError as e:
                failed = e
            except Exception as e:
                self._told(ParallelError(f"rank 0: {type(e).__name__}: {e}"))
                raise
        error = self._told(failed)
        if error is not None:
            raise failed or error
        return result

    def from_main(self, act: Callable[[], T]) -> T:
        """`on_main`, with its result on all."""
        mine = self.on_main(act)
        return mine if self.world is None else self.world.gather_objects(mine, "files")[0]  # type: ignore[return-value]

    def _told(self, error: UserError | None) -> UserError | None:
        """The main rank's error on every rank: the class and words of it, or a plain one where it can't be copied."""
        assert self.world is not None
        box = [None if error is None else (error.what, error.mend)]
        dist.broadcast_object_list(box, src=0, group=self.world.group("files"))
        return None if box[0] is None else (error or UserError(*box[0]))

    def together(self, act: Callable[[], T]) -> T:
        """Do something on every rank; a `UserError` on one is raised on all, with the rank's name.

        For what contains no communication: a rank that fails early must not leave the others waiting inside. Ranks may
        take very unequal times, as in drawing answers: they wait in the group that has hours.
        """
        if self.world is None:
            return act()
        result, error = None, None
        try:
            result = act()
        except UserError as e:
            error = e
        found = self.world.gather_objects(None if error is None else (error.what, error.mend), "files")
        for rank, said in enumerate(found):
            if said is not None:
                raise error or UserError(f"rank {rank}: {said[0]}", said[1])
        return result  # type: ignore[return-value]

    def dealt(self, items: Sequence[Item], act: Callable[[Sequence[Item]], list[T]]) -> list[T]:
        """What `act` makes of each of the items, on every rank: each does its share, by turns, `together`."""
        world = self.world
        if world is None:
            return act(items)
        every = world.gather_objects(self.together(lambda: act(items[world.rank :: world.size])), "files")
        return [every[place % world.size][place // world.size] for place in range(len(items))]


class SilentLog:
    """What a `RunLog` is on ranks that don't write."""

    def resume(self, step: int) -> None: ...

    def log(self, step: int, **metrics: Any) -> None: ...

    def sync(self) -> None: ...

    def save_environment(self) -> None: ...

    def finish(self, **summary: Any) -> None: ...

    def __enter__(self) -> SilentLog:
        return self

    def __exit__(self, *_: object) -> None: ...
