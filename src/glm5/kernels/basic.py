"""The small operators: RMSNorm, LayerNorm, rotary embedding, SwiGLU. Precision as the public implementation's.

Source: the published implementation of GLM-5 (statistics in fp32, result cast back, then the gain). Read next:
`visibility`, then `attention`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from glm5.kernels.dispatch import pick


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis: fp32 statistics, cast back to x's dtype, then times `weight`."""
    grad = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    fast = pick("train_rms_norm" if grad else "rms_norm", x, weight)
    if fast is not None:
        normed: Tensor = fast(x, weight, eps)
        return normed
    if grad:
        return _RMSNorm.apply(x, weight, eps)
    return (x * _inverse_rms(x, eps)).to(x.dtype) * weight


def rms_norm_beside(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x itself and its `rms_norm`: a residual, and what goes into the layer beside it."""
    trained = torch.is_grad_enabled() and x.requires_grad
    fast = pick("train_rms_norm_beside", x, weight) if trained else None
    if fast is not None:
        both: tuple[Tensor, Tensor] = fast(x, weight, eps)
        return both
    return x, rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + y, and its `rms_norm`: a residual and the norm that follows it."""
    grad = torch.is_grad_enabled()
    trained = grad and (x.requires_grad or y.requires_grad or weight.requires_grad)
    fast = pick("train_add_rms_norm", x, y, weight) if trained else None if grad else pick("add_rms_norm", x, y, weight)
    if fast is not None:
        both: tuple[Tensor, Tensor] = fast(x, y, weight, eps)
        return both
    x = x + y
    return x, rms_norm(x, weight, eps)


def latent_rows(x_BTX: Tensor, weight: Tensor, rotation_BTR: Tensor, eps: float) -> Tensor:
    """A latent, normed, and its rotary key, rotated by [B, T, R / 2]: [B, T, L + R], with L the width of the gain."""
    fast = pick("train_latent_rows", x_BTX, weight) if x_BTX.requires_grad else None
    if fast is not None:
        out: Tensor = fast(x_BTX, weight, rotation_BTR, eps)
        return out
    latent, rotary = x_BTX.split_with_sizes((len(weight), x_BTX.shape[-1] - len(weight)), -1)
    return torch.cat((rms_norm(latent, weight, eps), rope_interleaved(rotary, rotation_BTR)), dim=-1)


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x ** 2) + eps) over the last axis, kept, in fp32 (float64 for float64)."""
    wide = x.dtype if x.dtype in (torch.float32, torch.float64) else torch.float32
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
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


def rotations(positions: Tensor, dim: int, theta: float) -> Tensor:
    """RoPE's rotations e^(i angle) as complex64, positions.shape + [dim / 2]; angles are computed in fp32."""
    frequencies, one = _frequencies(dim, theta, positions.device)
    return torch.polar(one, positions[..., None] * frequencies)  # the product makes whole positions fp32


@functools.lru_cache(maxsize=16)
def _frequencies(dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Of each pair; and a one, of which `polar` makes as many as it needs."""
    with torch.inference_mode(False):  # kept, so that any mode may use it
        exponent = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
        return 1.0 / theta**exponent, torch.ones(1, device=device)


def rope_interleaved(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate the pairs (0, 1), (2, 3), … of the last axis.

    Args:
        x: [..., R]. rotation: of `rotations`, broadcastable to [..., R / 2] (for heads, unsqueeze their axis first);
            cos and sin are rounded to x's dtype first, as in the public implementation.
    """
    if x.dtype == torch.float32:  # one complex product: the same four products, in one pass
        if not torch.is_grad_enabled():
            return (_even(x).view(torch.complex64) * rotation).view(torch.float32)
        return torch.view_as_real(torch.view_as_complex(_even(x).unflatten(-1, (-1, 2))) * rotation).flatten(-2)
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = rotation.real.to(x.dtype), rotation.imag.to(x.dtype)
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)


def rope_heads(x_BTHX: Tensor, rotation_BTR: Tensor) -> Tensor:
    """Heads whose last columns are rotated by `rope_interleaved`: [B, T, H, X], by rotations [B, T, R / 2]."""
    fast = pick("train_rope_heads", x_BTHX) if x_BTHX.requires_grad else None
    if fast is not None:
        out: Tensor = fast(x_BTHX, rotation_BTR)
        return out
    rotary = 2 * rotation_BTR.shape[-1]
    still, turning = x_BTHX.split_with_sizes((x_BTHX.shape[-1] - rotary, rotary), -1)
    return torch.cat((still, rope_interleaved(turning, rotation_BTR.unsqueeze(-2))), dim=-1)


def keys_and_values(up_BSHX: Tensor, rotary_BSR: Tensor, nope: int) -> tuple[Tensor, Tensor]:
    """Keys [B, S, H, N + R] and values [B, S, H, V] of expanded latents [B, S, H, N + V] and the heads' rotary key."""
    fast = pick("train_keys_and_values", up_BSHX, rotary_BSR) if up_BSHX.requires_grad else None
    if fast is not None:
        pair: tuple[Tensor, Tensor] = fast(up_BSHX, rotary_BSR, nope)
        return pair
    k_nope, values = up_BSHX.split_with_sizes((nope, up_BSHX.shape[-1] - nope), -1)
    k_rope = rotary_BSR.unsqueeze(-2).expand(*k_nope.shape[:-1], -1)
    return torch.cat((k_nope, k_rope), dim=-1), values


def _even(x: Tensor) -> Tensor:
    """The tensor itself if its pairs can be viewed as complex numbers, else a copy."""
    *outer, last = x.stride()
    if last == 1 and x.storage_offset() % 2 == 0:
        for stride in outer:
            if stride % 2:
                return x.contiguous()
        return x
    return x.contiguous()


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    fast = pick("train_swiglu", gate, up) if gate.requires_grad or up.requires_grad else None
    if fast is not None:
        out: Tensor = fast(gate, up)
        return out
    return F.silu(gate) * up


def lay_side_by_side(*weights: Tensor) -> None:
    """Move matrices [out_i, in] of one device and dtype behind each other in memory, so that they multiply as one.

    Takes the memory of all of them once more, for a moment. Moving or casting them later undoes it. Matrices made in
    inference mode stay where they are: nothing may take their place.
    """
    if any(w.is_inference() for w in weights):
        return
    with torch.inference_mode(False), torch.no_grad():
        together = torch.cat([w.detach() for w in weights])
        for w, part in zip(weights, together.split([w.shape[0] for w in weights]), strict=True):
            w.data = part


def side_by_side(*weights: Tensor) -> Tensor | None:
    """The matrices [out_i, in] as one, stacked, where they lie like that in memory; else None. Copies nothing."""
    first = weights[0]
    storage, end = first.untyped_storage().data_ptr(), first.data_ptr()
    for w in weights:
        if w.data_ptr() != end or w.untyped_storage().data_ptr() != storage or not w.is_contiguous():
            return None
        end += w.numel() * w.element_size()
    return first.as_strided((sum(w.shape[0] for w in weights), first.shape[1]), first.stride())


# Tokens up to which small products are joined; beyond, a wider result only takes memory.
JOIN_UP_TO = 16


class Joined:
    """Matrices that multiply the same input, as one, kept until one of them changes. For inference.

    A decode step is a row of small products: one call for four of them saves three launches, and costs a copy of
    the matrices. A change is noticed by torch's in-place counters. Fused optimizers and edits through `.data` pass
    them by: the owner therefore calls `forget` with gradients, with more tokens, and where a new sequence begins.
    """

    def __init__(self) -> None:
        # The joined matrix; its sources, held, so that their memory cannot come back as another's; their addresses
        # and counters. Replaced as one, since several threads may read.
        self._kept: tuple[Tensor, tuple[Tensor, ...], tuple[tuple[int, int], ...]] | None = None

    @staticmethod
    def pays(x_BTD: Tensor) -> bool:
        """Whether calls outweigh the products: few tokens, and no gradients to separate. On a GPU a copy would have to
        outlive every graph that was recorded with it; there, `lay_side_by_side` joins without one."""
        return x_BTD.is_cpu and x_BTD.numel() <= JOIN_UP_TO * x_BTD.shape[-1] and not torch.is_grad_enabled()

    def forget(self) -> None:
        """Read the weights again at the next call."""
        self._kept = None

    def of(self, *weights: Tensor) -> Tensor:
        """The weights [out_i, in], stacked: [sum of out_i, in]."""
        kept = self._kept
        if kept is not None:
            for w, (address, version) in zip(weights, kept[2], strict=True):
                if w.data_ptr() != address or w._version != version:
                    break
            else:
                return kept[0]
        if any(w.is_inference() for w in weights):  # made in inference mode, where nothing counts changes
            return torch.cat(weights)
        with torch.inference_mode(False), torch.no_grad():
            sources = tuple(w.detach() for w in weights)
            joined = torch.cat(sources)
        self._kept = (joined, sources, tuple((w.data_ptr(), w._version) for w in weights))
        return joined
