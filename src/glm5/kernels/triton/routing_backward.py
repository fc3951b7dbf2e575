"""The router for training: fp32 logits and the best experts as in inference, and the logits' gradient on tensor cores.

A gradient in fp32 is taken apart into bf16 numbers, as the weights are in `routing`: two of them hold 16 of its bits,
which is what sums of bf16 tokens deserve, and each product runs at many times fp32's speed. Read first: `routing`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from glm5.kernels.cross_entropy import product
from glm5.kernels.triton.routing import router


class RouterLogits(torch.autograd.Function):
    """logits_NE = x weight^T in fp32, with gradients, and expert_NM, without: the `top_k` best of score + bias."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_ED: Tensor, bias_E: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        logits_NE, expert_NM, _, _ = router(x_ND, weight_ED, bias_E, top_k, normalise=False, scaling=1.0)
        ctx.save_for_backward(x_ND, weight_ED)
        ctx.mark_non_differentiable(expert_NM)
        return logits_NE, expert_NM

    @staticmethod
    def backward(ctx: Any, grad_NE: Tensor, _: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x_ND, weight_ED = ctx.saved_tensors
        dx = dweight = None
        high, low = _apart(grad_NE, x_ND.dtype)
        if ctx.needs_input_grad[0]:  # (high + low) (up + down) without the last of the four
            up, down = _apart(weight_ED, x_ND.dtype)
            dx = torch.mm(torch.cat((high, low, high), 1), torch.cat((up, up, down)))
        if ctx.needs_input_grad[1]:
            both = weight_ED.new_empty(2 * weight_ED.shape[0], weight_ED.shape[1])
            product(torch.cat((high, low), 1).t(), x_ND, out=both)
            dweight = both.unflatten(0, (2, -1)).sum(0)
        return dx, dweight, None, None


def _apart(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Two numbers of `dtype` whose sum is x, but for its last bits."""
    high = x.to(dtype)
    return high, (x - high).to(dtype)
