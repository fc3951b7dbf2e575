"""What a pipeline changes for the trainer: how it is told, what its stages add up, and how the model comes together.

`glm5.parallel.pipeline` runs the stages; the loss of each is the trainer's. Counts, loads and maxima are kept by layer
here, since a rank has some of them, and are brought together for the metrics. Read first: `loop`, `totals`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from glm5.model.config import ModelConfig
from glm5.model.glm5 import GLM5
from glm5.model.trace import Aux
from glm5.parallel.mesh import World
from glm5.parallel.pipeline.engine import Pipeline, build
from glm5.parallel.pipeline.layout import Parts
from glm5.parallel.pipeline.stage import Pass, Work
from glm5.parallel.shard import parallelize, whole
from glm5.train.objective import Objective
from glm5.train.ranks import PipelineOptions, Ranks
from glm5.train.rows import Rows
from glm5.train.totals import Totals
from glm5.utils.errors import CheckpointError


def placed(model: GLM5, world: World, options: PipelineOptions) -> Pipeline:
    """This rank's stages of a model, laid out over the ranks of each stage."""
    return build(
        model,
        world,
        layout=options.layout,
        schedule=options.schedule,
        stages_per_rank=options.stages_per_rank,
        reduce_every=options.reduce_every,
        offload=options.offload,
        recompute=options.recompute,
        wrap=lambda stage: parallelize(stage, world, reshard=False),
    )


class StageTotals(Totals):
    """Sums over a step's micro-batches, of the layers that this rank holds."""

    def __init__(self, pipeline: Pipeline, config: ModelConfig) -> None:
        super().__init__(0, config.num_hidden_layers)
        self._routed = [kind == "sparse" for kind in config.layer_types]
        self._mtp = config.num_hidden_layers
        layers = [i for stage in pipeline.stages.values() for i in stage.parts.layers if self._routed[i]]
        layers += [self._mtp for stage in pipeline.stages.values() if stage.parts.mtp]
        device = next(p.device for _, p in pipeline.named_parameters())
        zero = torch.zeros(config.n_routed_experts, dtype=torch.int64, device=device)
        self._loads = {layer: zero.clone() for layer in sorted(layers)}
        self._maxima: dict[int, Tensor] = {}

    def add_stage(self, parts: Parts, trunk: Aux, mtp: Aux) -> None:
        """What one pass over a stage gathered."""
        routed = [i for i in parts.layers if self._routed[i]]
        pairs = [*zip(routed, trunk.loads, strict=True), *((self._mtp, load) for load in mtp.loads)]
        for layer, load in pairs:
            self._loads[layer] += load
        losses = [*zip(parts.layers, trunk.indexer_losses, strict=False), *((self._mtp, x) for x in mtp.indexer_losses)]
        if losses:
            kept = self.indexers.maxima
            self.indexers.add([x for _, x in losses])
            self.indexers.maxima = kept
        for layer, x in losses:
            here = x.logit_max_H.amax()
            self._maxima[layer] = torch.maximum(self._maxima[layer], here) if layer in self._maxima else here

    @property
    def own_loads(self) -> list[Tensor]:
        return list(self._loads.values())

    def over(self, ranks: Ranks) -> None:
        """Add up over the data ranks, and bring the stages' together."""
        assert ranks.world is not None
        for x in (self.ce, self.ce_tokens, self.indexers.sums):
            if x is not None:
                ranks.sum(x)
        if self._loads:
            summed = ranks.sum(torch.stack(self.own_loads))
            self._loads = dict(zip(self._loads, summed, strict=True))
        if self._maxima:
            largest = ranks.largest(torch.stack(list(self._maxima.values())), "stage")
            self._maxima = dict(zip(self._maxima, largest, strict=True))
        mine = (self.ce, self.ce_tokens, self.indexers.sums, self._loads, self._maxima)
        stages = ranks.world.gather_objects(_on_cpu(mine), "pp")
        self.ce, self.ce_tokens = next(((s[0], s[1]) for s in stages if s[0] is not None), (None, None))
        sums = [s[2] for s in stages if s[2] is not None]
        self.indexers.sums = torch.stack(sums).sum(0) if sums else None
        if self.indexers.sums is not None and self.ce is None and self.indexers.sums[2] == 0:
            self.indexers.sums = None
        self.loads = [t for _, t in sorted((layer, t) for s in stages for layer, t in s[3].items())]
        self.indexers.maxima = [t for _, t in sorted((layer, t) for s in stages for layer, t in s[4].items())]


def run_stages(pipeline: Pipeline, objective: Objective, rows: list[Rows], totals: StageTotals) -> float:
    """All of a step's micro-batches through this rank's stages, forward and backward. Returns its part of the loss."""
    config = objective.config
    heads = next((stage for stage in pipeline.stages.values() if stage.parts.head), None)

    def loss_of(done: Pass) -> Tensor | None:
        targets = [done.rows.targets[0]]
        if done.kept:
            targets += done.rows.head(done.kept).targets[1 : config.mtp_depths + 1]
        loss = objective.terms(done.hidden, heads, targets, done.trunk, done.mtp)
        totals.add_stage(done.parts, done.trunk, done.mtp)
        return done.head_VD.new_zeros(()) if loss is None and done.head_VD is not None else loss

    work = Work(
        rows,
        loss_of,
        depths=config.mtp_depths,
        mtp_rows=objective.ranks.mtp_rows(objective.counts.mtp_rows, 0, sum(len(r.ids_BS) for r in rows))[0],
        sparse=config.sparse,
        indexer=config.trains_indexer,
        balance=config.trains_model,
        joint=config.trains_model,
    )
    return sum(float(x) for x in pipeline.step(work))


def _on_cpu(values: tuple[object, ...]) -> tuple[object, ...]:
    def moved(x: object) -> object:
        if isinstance(x, Tensor):
            return x.cpu()
        return {k: t.cpu() for k, t in x.items()} if isinstance(x, dict) else x

    return tuple(moved(x) for x in values)


# --------------------------------------------------------------------------- the model in parts
def state(pipeline: Pipeline) -> dict[str, Tensor]:
    """Parameters and buffers of this rank's stages, by their names in the whole model."""
    found: dict[str, Tensor] = {name: p.detach() for name, p in pipeline.named_parameters()}
    for stage in pipeline.stages.values():
        found |= dict(stage.named_buffers())
    return found


@torch.no_grad()
def load_state(pipeline: Pipeline, tensors: Mapping[str, Tensor]) -> None:
    """Fill this rank's stages.

    Raises:
        CheckpointError: tensors are missing, or of other shapes.
    """
    own = state(pipeline)
    wrong = [name for name, t in own.items() if name not in tensors or tensors[name].shape != t.shape]
    if wrong:
        raise CheckpointError(f"it holds another model: {', '.join(wrong[:5])} are missing or of another shape")
    for name, t in own.items():
        t.copy_(tensors[name])


def brought_together(exact: Mapping[str, Tensor], world: World) -> dict[str, Tensor]:
    """Every stage's tensors, whole and on the CPU, on the main rank; empty on the others. All ranks call this."""
    shapes = {name: (tuple(t.shape), t.dtype) for name, t in exact.items()}
    out = {}
    for place, (owner, named) in zip(world.ranks("pp"), enumerate(world.gather_objects(shapes, "pp")), strict=True):
        for name, (shape, dtype) in named.items():
            if owner == world.place("pp"):
                t = whole(exact[name]).to(world.device).contiguous()
            else:
                t = torch.empty(shape, dtype=dtype, device=world.device)
            dist.broadcast(t, src=place, group=world.group("pp"))
            if world.main:
                out[name] = t.cpu()
    return out
