"""What we use of torch's inside, in one place, for torch 2.11 to 2.13: pipeline actions, their runtime, FSDP's units.

Everything here is private there and has moved between releases; `tests/parallel/test_compat.py` says what is relied
upon. Read next: `pipeline.schedule`, `pipeline.stage`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import P2POp
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    _Action,
    _ComputationType,
    _PipelineScheduleRuntime,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

Action = _Action
Kind = _ComputationType
Runtime = _PipelineScheduleRuntime


def lower(runtime: _PipelineScheduleRuntime, orders: dict[int, list[Action | None]]) -> None:
    """Give a runtime its orders of computation, all ranks'; it adds sends, receives and gathers of parameters."""
    runtime._prepare_schedule_with_comms(orders)


class LeanStage(PipelineStage):
    """A `PipelineStage` that holds a receive buffer only from the receive to the use, of its micro-batch's shape.

    torch allocates the buffers of all micro-batches at once, activations and gradients, for as long as the schedule
    lives: at many micro-batches more than the pipeline's own activations. And it wants them of one shape.

    Args:
        received, sent: of any micro-batch, as meta tensors; `receives` and `sends` give those of each.
    """

    def __init__(self, *args: Any, received: tuple[Tensor, ...], sent: tuple[Tensor, ...], **options: Any) -> None:
        options |= {"input_args": received, "output_args": sent}
        super().__init__(*args, **options)

    def receives(self, micro: int) -> tuple[Tensor, ...]:
        """Like what comes from the stage before."""
        raise NotImplementedError

    def sends(self, micro: int) -> tuple[Tensor, ...]:
        """Like what goes to the stage after."""
        raise NotImplementedError

    def _prepare_forward_infra(self, *args: Any, **options: Any) -> Any:
        return self._on_meta(super()._prepare_forward_infra, *args, **options)

    def _prepare_backward_infra(self, *args: Any, **options: Any) -> Any:
        return self._on_meta(super()._prepare_backward_infra, *args, **options)

    def _on_meta(self, prepare: Any, *args: Any, **options: Any) -> Any:
        device, self.device = self.device, torch.device("meta")
        try:
            return prepare(*args, **options)
        finally:
            self.device = device

    def _validate_fwd_outputs(self, outputs: tuple[Tensor, ...]) -> None:
        """torch 2.11 compares them with its one shape."""

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[P2POp]:
        if not self.is_first:
            for info, like in zip(self.args_recv_info[fwd_chunk_id], self.receives(fwd_chunk_id), strict=True):
                info.buffer = torch.empty_like(like, device=self.device).requires_grad_(self.has_backward)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[P2POp]:
        if self.has_backward and not self.is_last:
            for info, like in zip(self.grad_recv_info[bwd_chunk_id], self.sends(bwd_chunk_id), strict=True):
                info.buffer = torch.empty_like(like, device=self.device, requires_grad=False)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        out = super().forward_one_chunk(fwd_chunk_id, *args, **options)
        self._release(self.args_recv_info[fwd_chunk_id])
        return out

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **options: Any) -> None:
        super().backward_one_chunk(bwd_chunk_id, *args, **options)
        if not self.is_last:
            self._release(self.grad_recv_info[bwd_chunk_id])

    def _release(self, infos: Any) -> None:
        for info in infos:
            if hasattr(info, "buffer"):
                info.buffer = None

    def clear_runtime_states(self) -> None:
        self.fwd_cache.clear()
        self.output_chunks.clear()

    def _get_init_p2p_neighbors_ops(self) -> list[P2POp]:
        here = dist.get_rank()  # torch 2.11 greets the next stage of a V also where it is on the same rank
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.peer != here]


# --------------------------------------------------------------------------- DTensor
def part_of(t: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape of what this rank holds of a tensor, and where it begins in the whole, also where it is cut twice."""
    shape, offset = compute_local_shape_and_global_offset(t.shape, t.device_mesh, t.placements)
    return tuple(shape), tuple(offset)


# --------------------------------------------------------------------------- FSDP2
def units(module: nn.Module) -> Iterator[Any]:
    """FSDP's parameter groups under a root module, in its order."""
    if isinstance(module, FSDPModule):
        for state in fully_shard.state(module)._state_ctx.all_states:  # type: ignore[attr-defined]
            if hasattr(state, "_fsdp_param_groups"):  # 2.13; one group a state before
                yield from state._fsdp_param_groups
            elif state._fsdp_param_group:
                yield state._fsdp_param_group


def tolerate_unused_units() -> None:
    """Let units that have never run pass where gradients are added up and not reduced yet.

    FSDP looks there for a gradient of parameters that it has never gathered, and finds not even the parameters: those
    of indexers in dense training, and of the MTP block without depths.
    """
    plain = FSDPParam.to_accumulated_grad_if_needed
    if getattr(plain, "tolerant", False):
        return

    def tolerant(self: FSDPParam) -> None:
        if hasattr(self, "_unsharded_param"):
            plain(self)

    tolerant.tolerant = True  # type: ignore[attr-defined]
    FSDPParam.to_accumulated_grad_if_needed = tolerant  # type: ignore[method-assign]


def waiting() -> list[tuple[type, str]]:
    """FSDP's methods in which the stream that computes waits for collectives of others: their class and name."""
    return [(FSDPParamGroup, "wait_for_unshard"), (FSDPParamGroup, "finalize_backward")]


def hold_gradients(module: nn.Module) -> None:
    """Let backward passes add up full gradients, and leave parameters gathered, until `reduce_gradients`."""
    if isinstance(module, FSDPModule):
        module.set_is_last_backward(False)
        module.set_reshard_after_backward(False)
        module.set_requires_gradient_sync(False)


def reduce_gradients(module: nn.Module, *, last: bool) -> None:
    """Reduce what FSDP units have accumulated into the shards' gradients, and free it.

    Args:
        last: it is the step's last reduction: wait for all of them, and free the parameters, too. The others leave
            parameters gathered, which later micro-batches read.
    """
    assert isinstance(module, FSDPModule)
    module.set_is_last_backward(last)
    module.set_reshard_after_backward(last)
    module.set_requires_gradient_sync(True)
    for unit in units(module):
        unit.post_backward()
    if last:
        fully_shard.state(module)._root_post_backward_final_callback()  # type: ignore[attr-defined]
    module.set_requires_gradient_sync(False)


def gathered_gradient_bytes(module: nn.Module) -> int:
    """Bytes of full gradients that FSDP's units hold now, accumulated and not reduced."""
    total = 0
    for unit in units(module):
        for held in unit.fsdp_params:
            grad = held.unsharded_accumulated_grad
            if grad is None and hasattr(held, "_unsharded_param"):
                grad = held._unsharded_param.grad
            if grad is not None:
                total += grad.numel() * grad.element_size()
    return total


def settle_gradients(module: nn.Module) -> None:
    """Take gradients that were made after the backward pass into FSDP's sums, which may be wider."""
    for unit in units(module):
        for held in unit.fsdp_params:
            if hasattr(held, "_unsharded_param"):
                held.accumulate_unsharded_grad_if_needed()
                held.to_accumulated_grad_if_needed()
