"""The router for training: choice and weights as in inference, and the logits' gradient on tensor cores.

One kernel turns the gradients of weights and scores into that of the logits, and takes it apart into two bf16 numbers,
which hold 16 of fp32's bits: what sums of bf16 tokens deserve, at many times the speed of fp32 products. Read first:
`routing`. Read next: `balance`, whose gradient arrives at the scores.
"""

# mypy: disallow-untyped-defs=false, disallow-incomplete-defs=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.kernels.cross_entropy import product
from glm5.kernels.triton.routing import router

ROWS = 16  # tokens of a program


@triton.jit
def _logits_gradient(
    score_ptr, expert_ptr, dweight_ptr, dscore_ptr, dlogit_ptr, out_ptr, tokens, scaling,
    E: tl.constexpr, P: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr,
    WEIGHT: tl.constexpr, SCORE: tl.constexpr, LOGIT: tl.constexpr, NORMALISE: tl.constexpr,
):  # fmt: skip
    """out[token] = [high, low, high] of the gradient of its E logits."""
    row_R = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    real_R = row_R < tokens
    slot_P = tl.arange(0, P)
    real = real_R[:, None] & (slot_P < E)[None, :]
    at = row_R[:, None] * E + slot_P[None, :]
    score = tl.load(score_ptr + at, mask=real, other=0.0)
    grad = tl.zeros([ROWS, P], tl.float32)
    if SCORE:
        grad += tl.load(dscore_ptr + at, mask=real, other=0.0)
    if WEIGHT:
        total_R = tl.zeros([ROWS], tl.float32) + 1e-20
        along_R = tl.zeros([ROWS], tl.float32)
        for m in tl.static_range(M):
            expert_R = tl.load(expert_ptr + row_R * M + m, mask=real_R, other=0)
            own_R = tl.load(score_ptr + row_R * E + expert_R, mask=real_R, other=0.0)
            total_R += own_R
            along_R += own_R * tl.load(dweight_ptr + row_R * M + m, mask=real_R, other=0.0)
        for m in tl.static_range(M):
            expert_R = tl.load(expert_ptr + row_R * M + m, mask=real_R, other=0)
            d_R = tl.load(dweight_ptr + row_R * M + m, mask=real_R, other=0.0)
            if NORMALISE:
                d_R = (d_R - along_R / total_R) / total_R
            grad += tl.where(slot_P[None, :] == expert_R[:, None], (d_R * scaling)[:, None], 0.0)
    grad = grad * score * (1.0 - score)
    if LOGIT:
        grad += tl.load(dlogit_ptr + at, mask=real, other=0.0)
    high = grad.to(out_ptr.dtype.element_ty)
    low = (grad - high.to(tl.float32)).to(out_ptr.dtype.element_ty)
    to = out_ptr + row_R[:, None] * 3 * E + slot_P[None, :]
    tl.store(to, high, mask=real)
    tl.store(to + E, low, mask=real)
    tl.store(to + 2 * E, high, mask=real)


class Routed(torch.autograd.Function):
    """As `model.moe.Router`: logits_NE = x weight^T, expert_NM of the `top_k` best of score + bias, weight_NM and
    score_NE; all but the ids fp32, with gradients."""

    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, weight_ED: Tensor, bias_E: Tensor, top_k: int, normalise: bool, scaling: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        found = router(x_ND, weight_ED, bias_E, top_k, normalise=normalise, scaling=scaling)
        ctx.save_for_backward(x_ND, weight_ED, found[1], found[3])
        ctx.how = normalise, scaling
        ctx.mark_non_differentiable(found[1])
        ctx.set_materialize_grads(False)
        return found

    @staticmethod
    def backward(
        ctx: Any, dlogit_NE: Tensor | None, _: Any, dweight_NM: Tensor | None, dscore_NE: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        x_ND, weight_ED, expert_NM, score_NE = ctx.saved_tensors
        tokens, experts = score_NE.shape
        given = [g if g is None else g.contiguous() for g in (dweight_NM, dscore_NE, dlogit_NE)]
        parts = x_ND.new_empty(tokens, 3 * experts)
        if tokens:
            _logits_gradient[(triton.cdiv(tokens, ROWS),)](
                score_NE, expert_NM, *(score_NE if g is None else g for g in given), parts, tokens, ctx.how[1],
                E=experts, P=triton.next_power_of_2(experts), M=expert_NM.shape[1], ROWS=ROWS,
                WEIGHT=given[0] is not None, SCORE=given[1] is not None, LOGIT=given[2] is not None,
                NORMALISE=ctx.how[0],
            )  # fmt: skip
        dx = dweight = None
        if ctx.needs_input_grad[0]:  # (high + low) (up + down) without the last of the four
            up = weight_ED.to(x_ND.dtype)
            dx = torch.mm(parts, torch.cat((up, up, (weight_ED - up).to(x_ND.dtype))))
        if ctx.needs_input_grad[1]:
            both = weight_ED.new_empty(2 * experts, weight_ED.shape[1])
            product(parts[:, : 2 * experts].t(), x_ND, out=both)
            dweight = both.unflatten(0, (2, -1)).sum(0)
        return dx, dweight, None, None, None, None
