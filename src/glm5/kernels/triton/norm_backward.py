"""RMSNorm with its gradient in Triton: alone, behind the sum that it follows, and of a latent beside its rotary key.

One pass over memory each way. In the backward pass every program walks over many rows and keeps its part of the gain's
gradient in registers; the parts are added in a fixed order. (torch's own takes a second pass for that, which at widths
of a thousand costs more than all else.) Source: report section 2.1. Read next: `glm5.kernels.basic`, the specification.
"""

# mypy: disallow-untyped-defs=false, disallow-incomplete-defs=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 528  # of a backward pass, whatever the device, so that its sums are the same on every one
ELEMENTS = 4096  # of a program's block of rows


@triton.jit
def _forward(
    x_ptr, y_ptr, weight_ptr, sum_ptr, out_ptr, inverse_ptr, rotation_ptr, rows, width, turned, x_stride, y_stride, eps,
    ADD: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """out = norm of x (+ y), beside it `turned` further columns of x, rotated by pairs."""
    row_R = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    col_W = tl.arange(0, WIDTH)
    real = (row_R < rows)[:, None] & (col_W < width)[None, :]
    x = tl.load(x_ptr + row_R[:, None] * x_stride + col_W[None, :], mask=real, other=0.0)
    kind = x.dtype
    if ADD:
        y = tl.load(y_ptr + row_R[:, None] * y_stride + col_W[None, :], mask=real, other=0.0)
        x = (x.to(tl.float32) + y.to(tl.float32)).to(kind)
        tl.store(sum_ptr + row_R[:, None] * width + col_W[None, :], x, mask=real)
    x = x.to(tl.float32)
    inverse_R = 1.0 / tl.sqrt_rn(tl.sum(x * x, 1) / width + eps)
    tl.store(inverse_ptr + row_R, inverse_R, mask=row_R < rows)
    weight = tl.load(weight_ptr + col_W, mask=col_W < width, other=0.0).to(tl.float32)
    to = out_ptr + row_R[:, None] * (width + turned)
    tl.store(to + col_W[None, :], (x * inverse_R[:, None] * weight[None, :]).to(kind), mask=real)
    if PAIRS > 0:
        _turn(x_ptr + width, to + width, rotation_ptr, row_R, rows, turned, x_stride, 1.0, ROWS, PAIRS)


@triton.jit
def _turn(
    x_ptr, to_R1, rotation_ptr, row_R, rows, turned, x_stride, sign, ROWS: tl.constexpr, PAIRS: tl.constexpr
):  # fmt: skip
    """Rotate columns 0 … turned of x by pairs into `to`."""
    col_P = tl.arange(0, 2 * PAIRS)
    pair_P = 2 * tl.arange(0, PAIRS)
    real = (row_R < rows)[:, None] & (col_P < turned)[None, :]
    half = (row_R < rows)[:, None] & (pair_P < turned)[None, :]
    x = tl.load(x_ptr + row_R[:, None] * x_stride + col_P[None, :], mask=real, other=0.0)
    even, odd = tl.split(tl.reshape(x.to(tl.float32), [ROWS, PAIRS, 2]))
    at = rotation_ptr + row_R[:, None] * turned + pair_P[None, :]
    cos = tl.load(at, mask=half, other=1.0).to(x.dtype).to(tl.float32)
    sin = sign * tl.load(at + 1, mask=half, other=0.0).to(x.dtype).to(tl.float32)
    out = tl.reshape(tl.join(even * cos - odd * sin, odd * cos + even * sin), [ROWS, 2 * PAIRS])
    tl.store(to_R1 + col_P[None, :], out.to(x.dtype), mask=real)


@triton.jit
def _backward(
    grad_ptr, x_ptr, weight_ptr, inverse_ptr, beside_ptr, dx_ptr, dweight_ptr, rotation_ptr, rows, width, turned,
    grad_stride, x_stride, beside_stride,
    BESIDE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """dx = the norm's gradient (+ what came past it), and this program's part of dweight."""
    col_W = tl.arange(0, WIDTH)
    weight = tl.load(weight_ptr + col_W, mask=col_W < width, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros([WIDTH], tl.float32)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row_R = (first + tl.arange(0, ROWS)).to(tl.int64)
        real = (row_R < rows)[:, None] & (col_W < width)[None, :]
        x = tl.load(x_ptr + row_R[:, None] * x_stride + col_W[None, :], mask=real, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + row_R[:, None] * grad_stride + col_W[None, :], mask=real, other=0.0).to(tl.float32)
        inverse = tl.load(inverse_ptr + row_R, mask=row_R < rows, other=0.0)[:, None]
        normed = x * inverse
        total += tl.sum(grad * normed, 0)
        scaled = grad * weight
        dx = (scaled - normed * (tl.sum(scaled * normed, 1)[:, None] / width)) * inverse
        if BESIDE:
            at = beside_ptr + row_R[:, None] * beside_stride + col_W[None, :]
            dx += tl.load(at, mask=real, other=0.0).to(tl.float32)
        to = dx_ptr + row_R[:, None] * (width + turned)
        tl.store(to + col_W[None, :], dx.to(dx_ptr.dtype.element_ty), mask=real)
        if PAIRS > 0:
            _turn(grad_ptr + width, to + width, rotation_ptr, row_R, rows, turned, grad_stride, -1.0, ROWS, PAIRS)
    tl.store(dweight_ptr + tl.program_id(0) * width + col_W, total, mask=col_W < width)


def _rows(x: Tensor) -> Tensor:
    """[rows, columns] with contiguous columns and one stride."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 else flat.contiguous()


def _shape(width: int, turned: int) -> dict[str, int]:
    wide = triton.next_power_of_2(width)
    pairs = triton.next_power_of_2(turned) // 2 if turned else 0
    return dict(ROWS=max(1, ELEMENTS // wide), WIDTH=wide, PAIRS=pairs, num_warps=8 if wide > ELEMENTS else 4)


def _normed(
    x: Tensor, y: Tensor | None, weight: Tensor, eps: float, rotation: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """x (+ y), the norm, and 1 / RMS of each row."""
    rows, width = len(x), len(weight)
    turned, shape = x.shape[1] - width, _shape(width, x.shape[1] - width)
    total = x if y is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    inverse = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        _forward[(triton.cdiv(rows, shape["ROWS"]),)](
            x, x if y is None else y, weight, total, out, inverse, inverse if rotation is None else rotation,
            rows, width, turned, x.stride(0), x.stride(0) if y is None else y.stride(0), eps,
            ADD=y is not None, **shape,
        )  # fmt: skip
    return total, out, inverse


def _differentiated(
    grad: Tensor, beside: Tensor | None, x: Tensor, weight: Tensor, inverse: Tensor, rotation: Tensor | None
) -> tuple[Tensor, Tensor]:
    rows, width = len(x), len(weight)
    turned, shape = grad.shape[1] - width, _shape(width, grad.shape[1] - width)
    dx = torch.empty(grad.shape, dtype=x.dtype, device=x.device)
    programs = max(1, min(PROGRAMS, triton.cdiv(rows, shape["ROWS"])))
    parts = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    _backward[(programs,)](
        grad, x, weight, inverse, grad if beside is None else beside, dx, parts,
        inverse if rotation is None else rotation, rows, width, turned,
        grad.stride(0), x.stride(0), grad.stride(0) if beside is None else beside.stride(0),
        BESIDE=beside is not None, **shape,
    )  # fmt: skip
    return dx, parts.sum(0).to(weight.dtype)


class Norm(torch.autograd.Function):
    """`basic.rms_norm`, rounded once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = _rows(x)
        _, out, inverse = _normed(rows, None, weight, eps, None)
        ctx.save_for_backward(rows, weight, inverse)
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        dx, dweight = _differentiated(_rows(grad), None, x, weight, inverse, None)
        return dx.view(grad.shape), dweight, None


class NormBeside(torch.autograd.Function):
    """`basic.rms_norm_beside`: x itself and its norm, so that both gradients come together in one pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        rows = _rows(x)
        _, out, inverse = _normed(rows, None, weight, eps, None)
        ctx.save_for_backward(rows, weight, inverse)
        return x.view_as(x), out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, beside: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        dx, dweight = _differentiated(_rows(grad), _rows(beside), x, weight, inverse, None)
        return dx.view(grad.shape), dweight, None


class AddNorm(torch.autograd.Function):
    """`basic.add_rms_norm`: x + y, rounded, and its norm. Both inputs get the same gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total, out, inverse = _normed(_rows(x), _rows(y), weight, eps, None)
        ctx.save_for_backward(total, weight, inverse)
        return total.view(x.shape), out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, beside: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        total, weight, inverse = ctx.saved_tensors
        dx, dweight = _differentiated(_rows(grad), _rows(beside), total, weight, inverse, None)
        dx = dx.view(grad.shape)
        return dx, dx, dweight, None


class LatentRows(torch.autograd.Function):
    """`basic.latent_rows`: of [B, T, L + R] the first L columns normed, the others rotated by [B, T, R / 2]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rotation: Tensor, eps: float) -> Tensor:
        rows, ctx.rotation = _rows(x), torch.view_as_real(rotation.contiguous()).flatten(-2)
        _, out, inverse = _normed(rows, None, weight, eps, ctx.rotation)
        ctx.save_for_backward(rows, weight, inverse)
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight, inverse = ctx.saved_tensors
        dx, dweight = _differentiated(_rows(grad), None, x, weight, inverse, ctx.rotation)
        return dx.view(grad.shape), dweight, None, None
