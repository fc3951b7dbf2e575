"""Weight gradients that may wait: an operator offers the product, the weight's `defer` says when it is made.

A backward pass makes two products for each matrix: the gradient of the input, which the layers before wait for, and
the gradient of the weight, which only the optimizer does. A pipeline that splits its backward pass (report section
2.4.2, zero-bubble schedules) sets `weight.defer` and makes the second one where it would idle otherwise. A weight
without that attribute gets its gradient at once. Read next: `glm5.parallel.pipeline.deferred`, which sets it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

# Takes a weight, and the function that makes its gradient (to be called under `no_grad`), in the backward pass's order.
Defer = Callable[[Tensor, Callable[[], Tensor]], None]


def weight_gradient(weight: Tensor, compute: Callable[[], Tensor]) -> Tensor | None:
    """What an operator's backward returns for `weight`: its gradient, or None after leaving it to `weight.defer`.

    Hold `weight` itself for this, not what `ctx.saved_tensors` gives back: under activation checkpointing that is
    another tensor, and the gradient would be lost.
    """
    defer: Defer | None = getattr(weight, "defer", None)
    if defer is None:
        return compute()
    defer(weight, compute)
    return None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` whose weight gradient may wait. The bias's gradient, a sum, does not."""
    if not hasattr(weight, "defer"):
        return F.linear(x, weight, bias)
    out: Tensor = _Linear.apply(x, weight)
    return out if bias is None else out + bias


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight = weight
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        dx = grad @ weight if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return dx, None
        rows_ND, grad_NE = x.flatten(0, -2), grad.flatten(0, -2)
        return dx, weight_gradient(ctx.weight, lambda: grad_NE.t() @ rows_ND)
