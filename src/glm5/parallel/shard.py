"""Data parallelism through FSDP2: parameters, gradients and optimizer state cut over the data ranks, whole when needed.

Each trunk block is one unit: gathered before its forward, freed after it, gathered again for its backward, its
gradients summed over the data ranks into each rank's shard. Where `replicate` is above 1 the shards have copies (hybrid
sharding), whose gradients are summed as well. What is used outside of block calls (embedding, final norm, head, the MTP
block's own projection and norms) belongs to the root unit and stays whole for the length of a step. Experts are units
over their own axis, `edp`; the indexers are units of their own, since in warm-up only they have a backward pass.

Gradients are sums, never means: every loss is divided by global counts already. They are reduced in fp32.

Source: report section 2.4. Read next: `expert`, `tensor`, `glm5.train.loop`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from glm5.model.glm5 import GLM5
from glm5.model.indexer import Indexer
from glm5.model.moe import MoE
from glm5.model.mtp import MTPBlock
from glm5.parallel.expert import SpreadExperts, local, spread_experts
from glm5.parallel.mesh import World
from glm5.parallel.tensor import split_tensors


def parallelize(model: GLM5, world: World, *, reshard: bool = True) -> GLM5:
    """Place a model on the ranks of a world, in place: tensor, expert and data parallel, as its mesh says.

    Args:
        model: the same whole model on every rank, on the world's device, in the dtype that it trains in, with
            `requires_grad` as it will be.
        reshard: free a block's parameters between its forward and backward. Schedules that split a backward pass in two
            need False: with True their gradients are silently wrong.

    Raises:
        ConfigError: the model cannot be divided so.
    """
    world.mesh.check_model(model.config)
    split_tensors(model, world)
    spread_experts(model, world)
    for module in list(model.modules()):
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
    return model


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


# --------------------------------------------------------------------------- whole tensors from parts
def whole(t: Tensor) -> Tensor:
    """All of a tensor, on every rank: a collective where it is a DTensor."""
    return t.full_tensor() if isinstance(t, DTensor) else t


def placed_like(t: Tensor, like: Tensor) -> Tensor:
    """A whole tensor, the same on every rank, as `like` is placed. No communication."""
    if not isinstance(like, DTensor):
        return t
    return distribute_tensor(t.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def gather_state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Name and whole tensor of everything in a state dict, one after the other, on every rank."""
    for name, t in model.state_dict().items():
        yield name, whole(t.detach())


# --------------------------------------------------------------------------- norms
@torch.no_grad()
def sums_of_squares(tensors: Iterable[Tensor]) -> Tensor:
    """The squared L2 norm of each (DTensor or plain), fp32 [n]: equal on all ranks that hold a part of it.

    Shards are added up over the axes that they are cut along, and only over those.
    """
    tensors = list(tensors)
    squares = torch.stack([_square(local(t)) for t in tensors]) if tensors else torch.zeros(0)
    by_mesh: dict[tuple[DeviceMesh, int], list[int]] = defaultdict(list)
    for i, t in enumerate(tensors):
        if isinstance(t, DTensor):
            for dim, placement in enumerate(t.placements):
                if not placement.is_replicate() and t.device_mesh.size(dim) > 1:  # a strided shard is no `is_shard`
                    by_mesh[t.device_mesh, dim].append(i)
    for (mesh, dim), members in by_mesh.items():
        part = squares[members]
        dist.all_reduce(part, group=mesh.get_group(dim))
        squares[members] = part
    return squares


def _square(t: Tensor) -> Tensor:
    if t.numel() == 0:
        return torch.zeros((), device=t.device)
    if t.is_cuda or t.ndim < 2:
        return torch.linalg.vector_norm(t, dtype=torch.float32).square()
    # One long fp32 sum loses digits on a CPU; norms of rows, then of those, do not.
    return torch.linalg.vector_norm(torch.linalg.vector_norm(t, dim=-1, dtype=torch.float32)).square()


@torch.no_grad()
def global_norm(tensors: Iterable[Tensor]) -> float:
    """The L2 norm of all together, each counted once however it is placed; not finite where one entry is not."""
    squares = sums_of_squares(tensors)
    return math.sqrt(float(squares.sum())) if len(squares) else 0.0
