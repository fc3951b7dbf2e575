"""Tokens laid out by pairs of token and expert, and pairs summed up to tokens again, with gradients, in one pass each.

What expert parallelism does before it sends tokens to their experts' ranks, and after they came back. Sums run in fp32
over a token's choices in their order. Read first: `glm5.kernels.moe.rows_by_pair`, the specification; `moe_backward`.
"""

# mypy: disallow-untyped-defs=false, disallow-incomplete-defs=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.kernels.triton.moe_backward import _combined, _gathered


@triton.jit
def _spread(
    grad_ptr, part_ptr, order_ptr, weight_ptr, dpart_ptr, dweight_ptr, D, M: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Of the pair at one place: dpart = weight * grad[token], dweight = <grad[token], part>."""
    place = tl.program_id(0).to(tl.int64)
    pair = tl.load(order_ptr + place).to(tl.int64)
    weight = tl.load(weight_ptr + pair)
    total = 0.0
    for first in range(0, D, BLOCK):
        col = first + tl.arange(0, BLOCK)
        grad = tl.load(grad_ptr + pair // M * D + col, mask=col < D, other=0.0).to(tl.float32)
        part = tl.load(part_ptr + place * D + col, mask=col < D, other=0.0).to(tl.float32)
        total += tl.sum(grad * part, 0)
        tl.store(dpart_ptr + place * D + col, (grad * weight).to(dpart_ptr.dtype.element_ty), mask=col < D)
    tl.store(dweight_ptr + pair, total)


class RowsByPair(torch.autograd.Function):
    """As `moe.rows_by_pair`."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, order_P: Tensor, place_NM: Tensor, held_NM: Tensor | None) -> Tensor:
        ctx.place_NM, ctx.held_NM = place_NM, held_NM
        return _gathered(x_ND, order_P, place_NM.shape[1])

    @staticmethod
    def backward(ctx: Any, grad_PD: Tensor) -> tuple[Tensor, None, None, None]:
        return _combined(grad_PD.contiguous(), ctx.place_NM, ctx.held_NM, *ctx.place_NM.shape), None, None, None


class SumByToken(torch.autograd.Function):
    """As `moe.sum_by_token`."""

    @staticmethod
    def forward(ctx: Any, part_PD: Tensor, order_P: Tensor, place_NM: Tensor, weight_NM: Tensor) -> Tensor:
        part_PD, weight_NM = part_PD.contiguous(), weight_NM.contiguous()
        ctx.save_for_backward(part_PD, order_P, weight_NM)
        return _combined(part_PD, place_NM, weight_NM, *place_NM.shape)

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None, None, Tensor]:
        part_PD, order_P, weight_NM = ctx.saved_tensors
        dpart, dweight = torch.empty_like(part_PD), torch.zeros_like(weight_NM)  # of pairs that are not here
        pairs, width = part_PD.shape
        if pairs:
            block = min(2048, triton.next_power_of_2(width))
            _spread[(pairs,)](
                grad_ND.contiguous(), part_PD, order_P, weight_NM, dpart, dweight, width,
                M=weight_NM.shape[1], BLOCK=block,
            )  # fmt: skip
        return dpart, None, None, dweight
