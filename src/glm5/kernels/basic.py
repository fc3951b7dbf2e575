"""The small operators: RMSNorm, LayerNorm, rotary embedding, SwiGLU. Precision as the public implementation's.

Source: the published implementation of GLM-5 (statistics in fp32, result cast back, then the gain). Read next:
`visibility`, then `attention`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis: fp32 statistics, cast back to x's dtype, then times `weight`."""
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _RMSNorm.apply(x, weight, eps)
    return (x * _inverse_rms(x, eps)).to(x.dtype) * weight


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x ** 2) + eps) over the last axis, kept, in fp32 (float64 for float64)."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


class _RMSNorm(torch.autograd.Function):
    """Saves x and one statistic per row. torch's own is differentiated as a dozen elementwise steps on a CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        inverse = _inverse_rms(x, eps)
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).to(x.dtype) * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        dx = dweight = None
        normed = x * inverse
        if ctx.needs_input_grad[1]:
            dweight = (grad * normed).flatten(0, -2).sum(0).to(weight.dtype)
        if ctx.needs_input_grad[0]:
            scaled = grad * weight
            along = (scaled * normed).sum(-1, keepdim=True).div_(-x.shape[-1])
            dx = torch.addcmul(scaled, normed, along).mul_(inverse).to(x.dtype)
        return dx, dweight, None


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-6) -> Tensor:
    """LayerNorm over the last axis (the indexer's key norm: with gain and bias, eps 1e-6)."""
    return F.layer_norm(x.float(), (x.shape[-1],), weight.float(), bias.float(), eps).to(x.dtype)


def rope_tables(positions: Tensor, dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin, each positions.shape + [dim / 2]; angles in fp32, cast to `dtype` at the end."""
    exponent = torch.arange(0, dim, 2, dtype=torch.float32, device=positions.device) / dim
    angle = positions[..., None].float() * (1.0 / theta**exponent)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rope_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (0, 1), (2, 3), … of the last axis.

    Args:
        x: [..., R]; cos, sin: broadcastable to [..., R / 2] (for heads, unsqueeze the head axis first).
    """
    pairs = x.unflatten(-1, (-1, 2))
    if x.dtype == torch.float32:  # one complex product: the same four products, in one pass
        rotated = torch.view_as_complex(pairs.contiguous()) * torch.complex(cos, sin)
        return torch.view_as_real(rotated).flatten(-2)
    even, odd = pairs.unbind(-1)
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return F.silu(gate) * up
