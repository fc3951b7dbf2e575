"""The operators as torch operators, `torch.ops.glm5.*`: torch.compile and export carry them as they are.

Each is named with its shapes (a fake implementation); sparse MLA with its gradient, which is an operator as well. The
gradients of experts are not: those of their weights may wait (`deferral`), which an operator's could not. Sparse MLA in
bf16 is the Hopper kernel; the others run what `dispatch` picks. Importing this module registers them and imports
neither triton nor a compiler. Read next: `dispatch`, `training`; `cuda.sparse_mla`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

VALUE = 512  # of a latent row's 576 columns, those that are values


def _op(name: str, schema: str) -> Any:
    return torch.library.custom_op(f"glm5::{name}", mutates_args=(), schema=schema)


# --------------------------------------------------------------------------- sparse MLA
@_op("sparse_mla", "(Tensor q, Tensor rows, Tensor selected, float scale) -> (Tensor, Tensor)")
def sparse_mla(q: Tensor, rows: Tensor, selected: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """out [B, T, H, 512] and log-sum-exp [B, T, H] of `cuda.sparse_mla`; the latter has no gradient."""
    from glm5.kernels.cuda import sparse_mla as kernel

    return kernel(q, rows, selected, value_dim=VALUE, scale=scale)


@sparse_mla.register_fake
def _(q: Tensor, rows: Tensor, selected: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:3], VALUE), q.new_empty(q.shape[:3], dtype=torch.float32)


@_op(
    "sparse_mla_backward",
    "(Tensor q, Tensor rows, Tensor selected, Tensor out, Tensor lse, Tensor grad, float scale, bool deterministic)"
    " -> (Tensor, Tensor)",
)
def sparse_mla_backward(
    q: Tensor, rows: Tensor, selected: Tensor, out: Tensor, lse: Tensor, grad: Tensor, scale: float, deterministic: bool
) -> tuple[Tensor, Tensor]:
    """dq and the rows' gradient, in the inputs' dtype."""
    from glm5.kernels.cuda import sparse_mla_backward as kernel

    dq, drows = kernel(q, rows, selected, out, lse, grad, scale=scale, deterministic=deterministic)
    return dq, drows.to(rows.dtype)


@sparse_mla_backward.register_fake
def _(
    q: Tensor, rows: Tensor, selected: Tensor, out: Tensor, lse: Tensor, grad: Tensor, scale: float, deterministic: bool
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), rows.new_empty(rows.shape)


def _keep_sparse_mla(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _differentiate_sparse_mla(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    fixed = torch.are_deterministic_algorithms_enabled()
    return *sparse_mla_backward(*ctx.saved_tensors, grad, ctx.scale, fixed), None, None


sparse_mla.register_autograd(_differentiate_sparse_mla, setup_context=_keep_sparse_mla)


@_op("sparse_mla_target", "(Tensor q, Tensor rows, Tensor selected, Tensor lse, float scale) -> (Tensor, Tensor)")
def sparse_mla_target(q: Tensor, rows: Tensor, selected: Tensor, lse: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The heads' mean attention over a selection, and each head's largest logit: `cuda.sparse_mla_target`."""
    from glm5.kernels.cuda import sparse_mla_target as kernel

    return kernel(q, rows, selected, lse, scale=scale)


@sparse_mla_target.register_fake
def _(q: Tensor, rows: Tensor, selected: Tensor, lse: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return lse.new_empty(selected.shape), lse.new_empty(lse.shape)


# --------------------------------------------------------------------------- selection
@_op("index_select", "(Tensor q, Tensor w, Tensor keys, Tensor first, Tensor last, int k) -> Tensor")
def index_select(q: Tensor, w: Tensor, keys: Tensor, first: Tensor, last: Tensor, k: int) -> Tensor:
    """`indexer.index_select`: the k best slots of each query within [first, last], int32 [B, T, min(k, S)]."""
    from glm5.kernels.indexer import index_select as select
    from glm5.kernels.visibility import Visibility

    return select(q, w, keys, Visibility(first, last, keys.shape[1]), k)


@index_select.register_fake
def _(q: Tensor, w: Tensor, keys: Tensor, first: Tensor, last: Tensor, k: int) -> Tensor:
    return q.new_empty(*q.shape[:2], min(k, keys.shape[1]), dtype=torch.int32)


# --------------------------------------------------------------------------- experts
@_op("grouped_swiglu", "(Tensor x, Tensor gate_up, Tensor down, Tensor expert, Tensor weight) -> Tensor")
def grouped_swiglu(x: Tensor, gate_up: Tensor, down: Tensor, expert: Tensor, weight: Tensor) -> Tensor:
    """`moe.grouped_swiglu`: every token's weighted sum over its experts, without a gradient."""
    from glm5.kernels.moe import grouped_swiglu as experts

    with torch.no_grad():
        return experts(x, gate_up, down, expert, weight)


@grouped_swiglu.register_fake
def _(x: Tensor, gate_up: Tensor, down: Tensor, expert: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape)


# --------------------------------------------------------------------------- in 8 bits
@_op("sparse_mla_fp8", "(Tensor q, Tensor rows, Tensor selected, float scale) -> (Tensor, Tensor)")
def sparse_mla_fp8(q: Tensor, rows: Tensor, selected: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """`latent_rows.sparse_attention_fp8`: out [B, T, H, 512] and log-sum-exp, without a gradient."""
    from glm5.kernels.latent_rows import sparse_attention_fp8

    return sparse_attention_fp8(q, rows, selected, scale)


@sparse_mla_fp8.register_fake
def _(q: Tensor, rows: Tensor, selected: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:3], VALUE), q.new_empty(q.shape[:3], dtype=torch.float32)


@_op(
    "index_select_fp8",
    "(Tensor q, Tensor w, Tensor keys, Tensor scale, Tensor first, Tensor last, int k) -> Tensor",
)
def index_select_fp8(q: Tensor, w: Tensor, keys: Tensor, scale: Tensor, first: Tensor, last: Tensor, k: int) -> Tensor:
    """`indexer_fp8.index_select_fp8` over keys [B, S, I] and their scales: int32 [B, T, min(k, S)]."""
    from glm5.kernels.indexer_fp8 import IndexKeys
    from glm5.kernels.indexer_fp8 import index_select_fp8 as select
    from glm5.kernels.visibility import Visibility

    return select(q, w, IndexKeys(keys, scale), Visibility(first, last, keys.shape[1]), k)


@index_select_fp8.register_fake
def _(q: Tensor, w: Tensor, keys: Tensor, scale: Tensor, first: Tensor, last: Tensor, k: int) -> Tensor:
    return q.new_empty(*q.shape[:2], min(k, keys.shape[1]), dtype=torch.int32)


@_op(
    "grouped_swiglu_fp8",
    "(Tensor x, Tensor gate_up, Tensor gate_up_scale, Tensor down, Tensor down_scale, Tensor expert, Tensor weight)"
    " -> Tensor",
)
def grouped_swiglu_fp8(
    x: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    expert: Tensor,
    weight: Tensor,
) -> Tensor:
    """`moe_fp8.grouped_swiglu_fp8` of e4m3 weights with scales by 128 x 128."""
    from glm5.kernels.formats import BLOCK, Packed
    from glm5.kernels.moe_fp8 import grouped_swiglu_fp8 as experts

    first = Packed("fp8", gate_up, gate_up_scale, BLOCK, BLOCK)
    return experts(x, first, Packed("fp8", down, down_scale, BLOCK, BLOCK), expert, weight)


@grouped_swiglu_fp8.register_fake
def _(
    x: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    expert: Tensor,
    weight: Tensor,
) -> Tensor:
    return x.new_empty(x.shape)
