"""A pipeline that runs: this rank's stages, torch's schedule over them, and what they share.

    pipeline = build(model, world, layout="E D M*2 | M*3 N P | H", schedule="1f1b")
    losses = pipeline.step(Work(rows, objective, depths=3))       # gradients are in .grad, as after backward()

The optimizer sees `pipeline.named_parameters()`: every parameter that this rank owns, under its name in the whole
model. Where the MTP block stands apart from the embedding it reads a copy. The copy is nobody's parameter: it is
refreshed before each step, and its gradient is added to the embedding's after it. So one optimizer moves it, it counts
once in the norm, and the two can't drift. Source: report section 2.4. Read next: `layout`, `stage`, `schedule`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from glm5.model.config import ModelConfig
from glm5.model.glm5 import GLM5
from glm5.parallel.compat import LeanStage, Runtime, hold_gradients, lower, reduce_gradients, settle_gradients
from glm5.parallel.mesh import ParallelError, World
from glm5.parallel.pipeline.clock import Clock, played
from glm5.parallel.pipeline.deferred import WeightGradients
from glm5.parallel.pipeline.layout import PipelineLayout
from glm5.parallel.pipeline.offload import Activations, When
from glm5.parallel.pipeline.recompute import recompute
from glm5.parallel.pipeline.schedule import forward_only, orders, rank_of_stage, schedule, with_reductions
from glm5.parallel.pipeline.stage import StageModel, Work
from glm5.utils.errors import ConfigError


def build(
    model: GLM5,
    world: World,
    *,
    layout: str | PipelineLayout = "",
    schedule: str = "1f1b",
    stages_per_rank: int = 1,
    reduce_every: int = 0,
    offload: When = "never",
    recompute: Sequence[str] = (),
    count_activations: bool = False,
    wrap: Callable[[StageModel], object] | None = None,
) -> Pipeline:
    """Cut a model into stages and keep this rank's.

    Args:
        model: the same whole model on every rank, `requires_grad` as it will be. It is taken apart: use the pipeline.
        layout: as text or made; by default balanced for `stages_per_rank` stages on every pipeline rank.
        schedule: a key of `schedule.SCHEDULES`.
        reduce_every: pipeline ZeRO-2: with FSDP, reduce a stage's gradients into shards after so many micro-batches,
            and let two stages of a rank at most hold full ones. 0 is off: they are reduced after the last.
        offload: which micro-batches' activations wait in host memory; see `offload.chosen`.
        recompute: parts of layers that run again in the backward pass; see `recompute.PARTS`.
        count_activations: keep count of their bytes (`Pipeline.activations`) also without offloading.
        wrap: decorates each stage in place, with FSDP for instance. Gathered parameters stay until the step ends,
            whatever it asks for: freed between a forward and a split backward pass they would give wrong gradients.

    Raises:
        ConfigError: layout, schedule, model and ranks do not fit together.
        ParallelError: ranks were told different things.
    """
    memory = Memory(reduce_every, offload, tuple(recompute), count_activations)
    return Pipeline(model, world, layout, schedule, stages_per_rank, memory, wrap)


def laid_out(
    config: ModelConfig, ranks: int, layout: str | PipelineLayout, name: str, stages_per_rank: int
) -> PipelineLayout:
    """The stages of a model on so many pipeline ranks; the arguments are those of `build`.

    Raises:
        ConfigError: layout, schedule, model and ranks do not fit together.
    """
    if layout == "":
        count = ranks * (schedule(name).stages or stages_per_rank)
        layout = PipelineLayout.balanced(config, count, rank_of_stage=rank_of_stage(name, ranks, count))
    elif isinstance(layout, str):
        layout = PipelineLayout.parse(layout, config)
    rank_of_stage(name, ranks, len(layout))
    if config.tie_word_embeddings and layout.stages[0] is not layout.stages[-1]:
        raise ConfigError("tie_word_embeddings", True, "a head that is the embedding cannot stand on another stage")
    return layout


@dataclass(frozen=True)
class Memory:
    """The savings of memory that a pipeline was asked for; see `build`."""

    reduce_every: int
    offload: When
    recompute: tuple[str, ...]
    count: bool

    def __post_init__(self) -> None:
        if self.reduce_every < 0:
            raise ConfigError("reduce_every", self.reduce_every, "must be at least 0")
        if self.offload not in get_args(When):
            raise ConfigError("offload", self.offload, f"must be one of {', '.join(get_args(When))}")


class Pipeline:
    """See `build`.

    Attributes:
        layout, schedule: as resolved. stages: this rank's, by index.
        activations: what is counted and moved, once a step ran; None if nothing is.
        clock: set one, and the next steps' computations are timed.
    """

    def __init__(
        self,
        model: GLM5,
        world: World,
        layout: str | PipelineLayout,
        name: str,
        stages_per_rank: int,
        memory: Memory,
        wrap: Callable[[StageModel], object] | None,
    ) -> None:
        ranks = world.count("pp")
        layout = laid_out(model.config, ranks, layout, name, stages_per_rank)
        self.layout, self.schedule, self.world, self.memory = layout, name, world, memory
        self.rank_of_stage = rank_of_stage(name, ranks, len(layout))
        self._agree()
        own = [i for i, rank in enumerate(self.rank_of_stage) if rank == world.place("pp")]
        self.stages = {i: StageModel(model, layout.stages[i]) for i in own}
        self._weight_gradients: dict[int, WeightGradients] = {}
        for i, stage in self.stages.items():
            if wrap is not None:
                wrap(stage)
            for module in stage.modules():
                if isinstance(module, FSDPModule):
                    module.set_reshard_after_forward(False, recurse=False)
            recompute(stage, memory.recompute)
            if schedule(name).splits:
                self._weight_gradients[i] = WeightGradients()
                self._weight_gradients[i].watch(stage)
        self.activations: Activations | None = None
        self.clock: Clock | None = None
        self._runner: tuple[Any, Any, list[RunningStage]] | None = None

    def _agree(self) -> None:
        mine = (str(self.layout), self.schedule, self.memory)
        for rank, other in enumerate(self.world.gather_objects(mine, "pp")):
            if other != mine:
                what = f"pipeline rank {rank} was given {other}, and rank {self.world.place('pp')} {mine}"
                raise ParallelError(what, "Start all ranks with the same options and configuration")

    # ------------------------------------------------------------------ what it holds
    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's own parameters, by their names in the whole model; copies of another stage's are left out."""
        for stage in self.stages.values():
            for name, parameter in stage.named_parameters():
                if parameter is not stage.replica:
                    yield name, parameter

    def modules(self) -> Iterator[nn.Module]:
        """All modules of this rank's stages."""
        for stage in self.stages.values():
            yield from stage.modules()

    # ------------------------------------------------------------------ one step
    def step(self, work: Work) -> list[Tensor]:
        """All micro-batches forward and backward; gradients are added to `.grad`.

        Returns:
            This rank's parts of the loss, detached scalars: their sum over the pipeline's ranks is the step's loss.

        Raises:
            ConfigError: the schedule cannot run so many micro-batches.
        """
        made, stages = self._running(work)
        if work.depths:
            self._refresh_copy()
        for stage in stages:
            stage.begin(work, self.clock)
        target = torch.zeros(len(work.rows))  # torch asks for one; the stage of the heads makes the loss itself
        with nullcontext() if self.clock is None else self.clock.timing("step", -1):
            (made.step if work.joint else made.eval)(target=target, return_outputs=False)
        if work.joint and any(work.kept(i) for i in range(len(work.rows)) if work.depths):
            self._add_copys_gradient()
        return work.losses

    def bubble(self) -> dict[str, float]:
        """Of the last step, which had a clock: the share of its time in which the pipeline's ranks idle ("bubble"), and
        that of its schedule with the measured times of each stage's computations, if sends took none ("played"). All
        ranks of the pipeline call it."""
        assert self.clock is not None
        assert self._runner is not None
        self.clock.read()
        each = self.world.gather_objects((self.clock.busy, self.clock.span, self.clock.means), "pp")
        found = {"bubble": 1 - sum(busy for busy, _, _ in each) / sum(span for _, span, _ in each)}
        count, _, joint = self._runner[0]
        if joint:
            means = {key: seconds for _, _, means in each for key, seconds in means.items()}
            planned = orders(self.schedule, self.world.count("pp"), len(self.layout), count)
            found["played"] = played(planned, means, len(self.layout))
        return found

    def _running(self, work: Work) -> tuple[Any, list[RunningStage]]:
        count = len(work.rows)
        key = (count, work.depths, work.joint)
        if self._runner is None or self._runner[0] != key:
            self._runner = None  # its buffers first
            ranks = self.world.count("pp")
            planned = orders(self.schedule, ranks, len(self.layout), count)
            stages = [self._running_stage(i, work) for i in self.stages]
            place = self.world.place("pp")
            self.activations = None
            if self.memory.offload != "never" or self.memory.count:
                self.activations = Activations(self.world.device, planned[place], self.memory.offload)
            for stage in stages:
                stage.activations = self.activations
            made = Runtime(stages, count, loss_fn=_own_loss, scale_grads=False)
            lower(made, planned)
            lowered, every = made.pipeline_order_with_comms, self.memory.reduce_every
            if work.joint:
                lowered[place] = with_reductions(lowered[place], every)
            else:
                lowered[place] = with_reductions(forward_only(lowered[place]), every, makes="F")
            self._runner = (key, made, stages)
        return self._runner[1:]

    def _running_stage(self, index: int, work: Work) -> RunningStage:
        gradients = self._weight_gradients.get(index)
        return RunningStage(
            self.stages[index],
            index,
            len(self.layout),
            self.world.device,
            received=self._states(index - 1, work, 0),
            sent=self._states(index, work, 0),
            group=self.world.group("pp"),
            dw_builder=None if gradients is None else gradients.take,
            states=self._states,
            gradients=gradients,
        )

    def _states(self, stage: int, work: Work, micro: int) -> tuple[Tensor, ...]:
        """Like what leaves a stage: the trunk's states and, after the MTP block, each depth's; the loss at the end."""
        last, mtp = len(self.layout) - 1, self.layout.holder("mtp")
        if stage in (-1, last):
            return () if stage < 0 else (torch.empty((), device="meta", requires_grad=True),)
        model = next(iter(self.stages.values()))
        count = 1 + (work.depths if mtp is not None and mtp <= stage else 0)
        like = torch.empty(
            (*work.rows[micro].input_BT.shape, model.config.hidden_size),
            dtype=model.dtype,
            device="meta",
            requires_grad=True,
        )
        return (like,) * count

    # ------------------------------------------------------------------ the MTP block's copy of the embedding
    def _copy(self) -> tuple[int, int] | None:
        """The stages of the embedding and of its copy; None if there is no copy."""
        mtp = self.layout.holder("mtp")
        if mtp is None or not self.layout.stages[mtp].copies_embedding:
            return None
        return 0, mtp

    @torch.no_grad()
    def _refresh_copy(self) -> None:
        if (found := self._copy()) is None:
            return
        source, target = found
        original = self._embedding(source)
        copied = self._embedding(target)
        moved = self._move(None if original is None else _local(original), source, target, copied)
        if copied is not None and moved is not None:
            _local(copied).copy_(moved)

    @torch.no_grad()
    def _add_copys_gradient(self) -> None:
        if (found := self._copy()) is None:
            return
        target, source = found
        original, copied = self._embedding(target), self._embedding(source)
        given = copied if copied is not None else original
        if given is not None and not given.requires_grad:
            return
        grad = None if copied is None or copied.grad is None else _local(copied.grad)
        moved = self._move(grad, source, target, None if original is None else original.grad)
        if original is not None and moved is not None:
            assert original.grad is not None
            _local(original.grad).add_(moved)
        if copied is not None:
            copied.grad = None

    def _embedding(self, stage: int) -> nn.Parameter | None:
        held = self.stages.get(stage)
        return None if held is None else held.model.embed_tokens.weight  # type: ignore[return-value]

    def _move(self, tensor: Tensor | None, source: int, target: int, like: Tensor | None) -> Tensor | None:
        """A tensor from one stage to another: the same where one rank has both."""
        here, ranks, group = self.world.place("pp"), self.world.ranks("pp"), self.world.group("pp")
        sender, receiver = self.rank_of_stage[source], self.rank_of_stage[target]
        if sender == receiver:
            return tensor
        found = None
        if here == sender:
            assert tensor is not None
            operation = dist.P2POp(dist.isend, tensor.contiguous(), ranks[receiver], group)
        elif here == receiver:
            assert like is not None
            found = torch.empty_like(_local(like), memory_format=torch.contiguous_format)
            operation = dist.P2POp(dist.irecv, found, ranks[sender], group)
        else:
            return None
        for sent in dist.batch_isend_irecv([operation]):
            sent.wait()
        return found


def _local(t: Tensor) -> Tensor:
    return t.to_local() if isinstance(t, DTensor) else t


def _own_loss(loss: Tensor, _target: Tensor) -> Tensor:
    return loss


class RunningStage(LeanStage):
    """A stage in torch's runtime."""

    def __init__(
        self,
        *args: Any,
        states: Callable[[int, Work, int], tuple[Tensor, ...]],
        gradients: WeightGradients | None,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.states, self.gradients = states, gradients
        self.activations: Activations | None = None
        self.work: Work | None = None
        self.clock: Clock | None = None
        self.left = 0

    def begin(self, work: Work, clock: Clock | None) -> None:
        """Take up a step."""
        self.work = self.submod.work = work  # type: ignore[assignment]
        self.clock = clock
        self.left = len(work.rows)
        hold_gradients(self.submod)

    def receives(self, micro: int) -> tuple[Tensor, ...]:
        assert self.work is not None
        return self.states(self.stage_index - 1, self.work, micro)

    def sends(self, micro: int) -> tuple[Tensor, ...]:
        assert self.work is not None
        return self.states(self.stage_index, self.work, micro)

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True
    ) -> Any:
        self._before("F", fwd_chunk_id)
        if self.gradients is not None:
            self.gradients.mark()
        held = self.activations
        try:
            with self._timing("F"), nullcontext() if held is None else held.saving(self.stage_index, fwd_chunk_id):
                out = super().forward_one_chunk(fwd_chunk_id, (), {"micro": fwd_chunk_id}, save_forward_output=False)
        except RuntimeError as e:
            raise (e if e.__cause__ is None else e.__cause__) from None  # torch wraps whatever a stage raises
        if not self.has_backward:  # the forward pass had its own
            self._after_backward(fwd_chunk_id)
            if self.gradients is not None:
                self.gradients.take()()
            self._after_weights()
        return out

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        kind = "B" if full_backward else "I"
        self._before(kind, bwd_chunk_id)
        with self._timing(kind):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        self._after_backward(bwd_chunk_id)
        if full_backward:
            self._after_weights()

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        self._before("W", bwd_chunk_id)
        with self._timing("W"):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self._after_weights()

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        if isinstance(self.submod, FSDPModule):
            reduce_gradients(self.submod, last=self.left == 0)

    def _timing(self, kind: str) -> AbstractContextManager[None]:
        return nullcontext() if self.clock is None else self.clock.timing(kind, self.stage_index)

    def _before(self, kind: str, micro: int) -> None:
        if self.activations is not None:
            self.activations.before(kind, self.stage_index, micro)

    def _after_backward(self, micro: int) -> None:
        if self.activations is not None:
            self.activations.done(self.stage_index, micro)

    def _after_weights(self) -> None:
        self.left -= 1
        if self.gradients is not None:
            settle_gradients(self.submod)
