"""The small operators: RMSNorm, LayerNorm, rotary embedding, SwiGLU. Precision as the public implementation's.

Source: the published implementation of GLM-5 (statistics in fp32, result cast back, then the gain). Read next:
`visibility`, then `attention`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis: fp32 statistics, cast back to x's dtype, then times `weight`."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    return F.rms_norm(x.float(), (x.shape[-1],), None, eps).to(x.dtype) * weight


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
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return F.silu(gate) * up
