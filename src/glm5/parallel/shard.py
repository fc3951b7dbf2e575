"""Data parallelism through FSDP2: parameters, gradients and optimizer state cut over the data ranks, whole when needed.

Each trunk block is one unit: gathered before its forward, freed after it, gathered again for its backward, its
gradients summed over the data ranks into each rank's shard. Where `replicate` is above 1 the shards have copies (hybrid
sharding), whose gradients are summed as well. What is used outside of block calls (embedding, final norm, head, the MTP
block's own projection and norms) belongs to the root unit and stays whole for the length of a step. Experts are units
over their own axis, `edp`; the indexers are units of their own, since in warm-up only they have a backward pass.

Gradients are sums, never means: every loss is divided by global counts already. They are reduced in fp32.

Where every data rank has room for the whole model, FSDP may be left out (`copies`): nothing is gathered, passes are one
process's, and gradients are summed once a step.

Source: report section 2.4. Read next: `expert`, `tensor`, `glm5.train.loop`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from glm5.model.glm5 import GLM5
from glm5.model.indexer import Indexer
from glm5.model.mla import MLA
from glm5.model.moe import MoE
from glm5.model.mtp import MTPBlock
from glm5.parallel.compat import part_of, tolerate_unused_units
from glm5.parallel.expert import SpreadExperts, local, spread_experts
from glm5.parallel.mesh import World
from glm5.parallel.tensor import ShardedMLA, split_tensors
from glm5.parallel.vocab import split_head
from glm5.utils.errors import ConfigError

BUCKET = 1 << 25  # elements of gradients that copies exchange at once


def parallelize(model: GLM5, world: World, *, reshard: bool = True, prefetch: int = 1, copies: bool = False) -> GLM5:
    """Place a model on the ranks of a world, in place: tensor, expert and data parallel, as its mesh says.

    Args:
        model: the same whole model on every rank, on the world's device, in the dtype that it trains in, with
            `requires_grad` as it will be.
        reshard: free a block's parameters between its forward and backward. Schedules that split a backward pass in two
            need False: with True their gradients are silently wrong.
        prefetch: how many blocks ahead parameters are on their way while a block computes. 0 leaves it to FSDP, which
            asks for a block's when the host comes to it: too late where the host's launches are the limit.
        copies: on a mesh of shard=1, leave parameters whole on every data rank, without FSDP: whoever trains then calls
            `sum_gradients` after a step's last backward pass.

    Raises:
        ConfigError: the model cannot be divided so.
    """
    if prefetch < 0:
        raise ConfigError("prefetch", prefetch, "must be at least 0")
    if copies and world.count("shard") > 1:
        raise ConfigError("mesh.shard", world.count("shard"), "must be 1 where parameters are copies")
    world.mesh.check_model(model.config)
    tolerate_unused_units()
    split_tensors(model, world)
    if hasattr(model, "lm_head"):  # a pipeline's stage may have none
        split_head(model, world)
    spread_experts(model, world)
    if copies:
        return model
    for module in list(model.modules()):
        if isinstance(module, MLA) and not isinstance(module, ShardedMLA):
            module.__class__ = ShardedMLA
        if isinstance(module, Indexer):
            _unit(module, data_mesh(world), reshard=False)
            for method in ("keys", "queries"):
                register_fsdp_forward_method(module, method)
        elif isinstance(module, MoE):
            if module.gate.weight.dtype != next(module.experts.parameters()).dtype:
                _unit(module.gate, data_mesh(world), reshard=reshard)  # a unit has one dtype
            if isinstance(module.experts, SpreadExperts):
                _unit(module.experts, world.expert["edp"], reshard=reshard)
    for block in model.model.layers:
        if isinstance(block, MTPBlock):  # it runs once a depth: gathered once for all
            _unit(block.self_attn, data_mesh(world), reshard=False)
            _unit(block.mlp, data_mesh(world), reshard=False)
        else:
            _unit(block, data_mesh(world), reshard=reshard)
    _unit(model, data_mesh(world), reshard=False)
    register_fsdp_forward_method(model, "hidden")
    _ask_ahead(model, prefetch)
    return model


def _ask_ahead(model: GLM5, blocks: int) -> None:
    """Let each block's units gather those of so many blocks after it in a forward pass, and before it in a backward."""
    units = [
        [m for m in block.modules() if isinstance(m, FSDPModule) and not isinstance(m, Indexer)]
        for block in model.model.layers
        if not isinstance(block, MTPBlock)
    ]
    for i, own in enumerate(units):
        after, before = units[i + 1 : i + 1 + blocks], units[max(0, i - blocks) : i]
        own[0].set_modules_to_forward_prefetch([m for some in after for m in some])
        own[0].set_modules_to_backward_prefetch([m for some in reversed(before) for m in some])


@torch.no_grad()
def sum_gradients(model: nn.Module, world: World) -> None:
    """Add up the gradients of parameters that data ranks hold copies of, in fp32, rounded once; all ranks call it."""
    spread = {p for m in model.modules() if isinstance(m, SpreadExperts) for p in m.parameters()}
    live = [p for p in model.parameters() if p.grad is not None]
    for axis, some in (("data", [p for p in live if p not in spread]), ("edp", [p for p in live if p in spread])):
        if world.count(axis) > 1:
            _sum([local(p.grad) for p in some], world.group(axis))  # type: ignore[arg-type]


def _sum(grads: list[Tensor], group: dist.ProcessGroup) -> None:
    """The sum over a group, in place, of tensors that lie alike on all of its ranks."""
    under_way: list[tuple[dist.Work, Tensor, list[Tensor]]] = []

    def land() -> None:
        work, flat, into = under_way.pop(0)
        work.wait()
        parts = flat.split([g.numel() for g in into])
        torch._foreach_copy_(into, [x.view_as(g) for x, g in zip(parts, into, strict=True)])

    for bucket in _buckets(grads):
        flat = torch.cat([g.flatten() for g in bucket])
        if group.size() > 2:  # the sum of two is rounded once as it is
            flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
        under_way.append((dist.all_reduce(flat, group=group, async_op=True), flat, bucket))
        if len(under_way) == 2:
            land()
    while under_way:
        land()


def _buckets(grads: list[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one dtype that travel together: a whole number of them, of `BUCKET` elements or a little more."""
    for dtype in {g.dtype: None for g in grads}:
        bucket: list[Tensor] = []
        for g in grads:
            if g.dtype == dtype:
                bucket.append(g)
            if sum(x.numel() for x in bucket) >= BUCKET:
                yield bucket
                bucket = []
        if bucket:
            yield bucket


def data_mesh(world: World) -> DeviceMesh:
    """The mesh over which everything but experts is sharded: one dimension, or replicas by shards."""
    return world.dense["shard"] if world.count("replicate") == 1 else world.dense["replicate", "shard"]


def _unit(module: nn.Module, mesh: DeviceMesh, *, reshard: bool) -> None:
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    fully_shard(module, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    assert isinstance(module, FSDPModule)
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum


def reshard(model: nn.Module) -> None:
    """Free all gathered parameters: after a forward pass that no backward follows, before weights change."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def whole(t: Tensor) -> Tensor:
    """All of a tensor, bit for bit, on every rank: a collective where it is a DTensor.

    torch's own gather of tensors that are cut twice fails on some meshes in 2.11. This one adds up bytes that are zero
    everywhere but on the rank that has them.
    """
    if not isinstance(t, DTensor):
        return t
    shape, offset = part_of(t)
    own = t.to_local()
    out = torch.zeros(t.shape, dtype=t.dtype, device=own.device)
    out[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))] = own
    for dim, placement in enumerate(t.placements):
        if not placement.is_replicate() and t.device_mesh.size(dim) > 1:
            dist.all_reduce(out.view(-1).view(torch.uint8), group=t.device_mesh.get_group(dim))
    return out


def laid_out(t: Tensor, like: DTensor) -> DTensor:
    """A whole tensor, the same on every rank, as `like` lies. No communication."""
    shape, offset = part_of(like)
    part = t[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))].to(like.device, copy=True)
    return DTensor.from_local(part, like.device_mesh, like.placements, shape=t.shape, stride=t.stride())
