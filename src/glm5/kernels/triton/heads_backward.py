"""MLA's heads put together for dense attention, with gradients: one pass over memory for each of q, k, dq and dkv.

In plain PyTorch a rotation is nine small steps and a concatenation, and their gradients as many. Here queries are
rotated as they are copied, keys are joined from their expanded part and the one rotary key that all heads share, and
values stay where the product put them. Source: report section 2.1. Read next: `glm5.model.mla`, which calls it.
"""

# mypy: disallow-untyped-defs=false, disallow-incomplete-defs=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _turn(
    x_ptr, rotation_ptr, out_ptr, heads, width, still, sign, x_row, x_head,
    HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """One row of some heads, whose columns from `still` on are rotated by pairs."""
    row = tl.program_id(0).to(tl.int64)
    head_H1 = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column_1W = tl.arange(0, 2 * PAIRS)[None, :]
    inside = (head_H1 < heads) & (column_1W < width)
    x_HW = tl.load(x_ptr + row * x_row + head_H1 * x_head + column_1W, mask=inside, other=0.0)
    kind = x_HW.dtype
    even_HP, odd_HP = tl.split(tl.reshape(x_HW.to(tl.float32), [HEADS, PAIRS, 2]))
    pair_P = tl.arange(0, PAIRS)
    turns_P = (2 * pair_P >= still) & (2 * pair_P < width)
    at_P = rotation_ptr + row * (width - still) + 2 * pair_P - still
    cos_P = tl.load(at_P, mask=turns_P, other=1.0).to(kind).to(tl.float32)[None, :]
    sin_P = sign * tl.load(at_P + 1, mask=turns_P, other=0.0).to(kind).to(tl.float32)[None, :]
    turned_HP2 = tl.join(even_HP * cos_P - odd_HP * sin_P, odd_HP * cos_P + even_HP * sin_P)
    out_HW = tl.reshape(turned_HP2, [HEADS, 2 * PAIRS]).to(kind)
    tl.store(out_ptr + row * heads * width + head_H1 * width + column_1W, out_HW, mask=inside)


@triton.jit
def _join(
    up_ptr, shared_ptr, out_ptr, heads, own, width, up_head, shared_row, HEADS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """One row of keys: of each head its own columns, then those that all heads share."""
    row = tl.program_id(0).to(tl.int64)
    head_H1 = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column_1W = tl.arange(0, WIDTH)[None, :]
    inside = (head_H1 < heads) & (column_1W < width)
    mine = tl.load(up_ptr + row * heads * up_head + head_H1 * up_head + column_1W, mask=inside & (column_1W < own))
    shared = tl.load(shared_ptr + row * shared_row + column_1W - own, mask=(column_1W >= own) & (column_1W < width))
    tl.store(
        out_ptr + row * heads * width + head_H1 * width + column_1W,
        tl.where(column_1W < own, mine, shared),
        mask=inside,
    )


@triton.jit
def _part(
    dk_ptr, dv_ptr, dup_ptr, dshared_ptr, heads, own, width, value, dk_row, dk_head, dv_row, dv_head,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """The gradient of `_join` and of the values beside it; what is shared gets the heads' sum, in fp32."""
    row = tl.program_id(0).to(tl.int64)
    column_W, value_V = tl.arange(0, WIDTH), tl.arange(0, VALUE)
    sum_W = tl.zeros([WIDTH], tl.float32)
    for first in range(0, heads, HEADS):
        head_H1 = first + tl.arange(0, HEADS)[:, None]
        inside = (head_H1 < heads) & (column_W < width)[None, :]
        dk_HW = tl.load(dk_ptr + row * dk_row + head_H1 * dk_head + column_W[None, :], mask=inside, other=0.0)
        sum_W += tl.sum(dk_HW.to(tl.float32), 0)
        to_H1 = dup_ptr + (row * heads + head_H1) * (own + value)
        tl.store(to_H1 + column_W[None, :], dk_HW, mask=inside & (column_W < own)[None, :])
        real = (head_H1 < heads) & (value_V < value)[None, :]
        dv_HV = tl.load(dv_ptr + row * dv_row + head_H1 * dv_head + value_V[None, :], mask=real)
        tl.store(to_H1 + own + value_V[None, :], dv_HV, mask=real)
    to_W = dshared_ptr + row * (width - own) + column_W - own
    tl.store(to_W, sum_W.to(dshared_ptr.dtype.element_ty), mask=(column_W >= own) & (column_W < width))


PART = (16, 2)  # heads at a time, and warps, of `_part`


def _block(heads: int) -> int:
    """Heads that one program takes at a time: as many as registers hold at 256 columns."""
    return min(16, triton.next_power_of_2(heads))


def _turned(x_BTHX: Tensor, rotation_BTR: Tensor, sign: float) -> Tensor:
    heads, width = x_BTHX.shape[2:]
    x = x_BTHX.flatten(0, 1) if x_BTHX.stride(-1) == 1 else x_BTHX.contiguous().flatten(0, 1)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if len(x):
        _turn[(len(x), triton.cdiv(heads, _block(heads)))](
            x, rotation_BTR, out, heads, width, width - rotation_BTR.shape[-1], sign, x.stride(0), x.stride(1),
            HEADS=_block(heads), PAIRS=triton.next_power_of_2(width) // 2,
        )  # fmt: skip
    return out.view(x_BTHX.shape)


class Turned(torch.autograd.Function):
    """Heads [B, T, H, X] with their last R columns rotated by pairs; rotation: complex64 [B, T, R / 2].

    As `basic.rope_interleaved`, cos and sin are rounded to x's dtype; the result is rounded once.
    """

    @staticmethod
    def forward(ctx: Any, x_BTHX: Tensor, rotation: Tensor) -> Tensor:
        ctx.rotation_BTR = torch.view_as_real(rotation.contiguous()).flatten(-2)
        return _turned(x_BTHX, ctx.rotation_BTR, 1.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _turned(grad, ctx.rotation_BTR, -1.0), None


class KeysAndValues(torch.autograd.Function):
    """Keys [B, S, H, N + R] and values [B, S, H, V], a view, of what was expanded, [B, S, H, N + V] contiguous, and the
    rotary key of all heads, [B, S, R]."""

    @staticmethod
    def forward(ctx: Any, up_BSHX: Tensor, shared_BSR: Tensor, nope: int) -> tuple[Tensor, Tensor]:
        batch, slots, heads, wide = up_BSHX.shape
        width = nope + shared_BSR.shape[-1]
        shared = shared_BSR.reshape(-1, shared_BSR.shape[-1])
        keys = up_BSHX.new_empty(batch, slots, heads, width)
        if len(shared):
            _join[(len(shared), triton.cdiv(heads, _block(heads)))](
                up_BSHX, shared, keys, heads, nope, width, wide, shared.stride(0),
                HEADS=_block(heads), WIDTH=triton.next_power_of_2(width),
            )  # fmt: skip
        ctx.nope, ctx.shapes = nope, (up_BSHX.shape, shared_BSR.shape)
        return keys, up_BSHX[..., nope:]

    @staticmethod
    def backward(ctx: Any, dk_BSHX: Tensor, dv_BSHV: Tensor) -> tuple[Tensor, Tensor, None]:
        up, shared = ctx.shapes
        dk, dv = (g.flatten(0, 1) if g.stride(-1) == 1 else g.contiguous().flatten(0, 1) for g in (dk_BSHX, dv_BSHV))
        dup, dshared = dk.new_empty(up), dk.new_empty(shared)
        rows, heads, width = dk.shape
        if rows:
            _part[(rows,)](
                dk, dv, dup, dshared, heads, ctx.nope, width, dv.shape[2],
                dk.stride(0), dk.stride(1), dv.stride(0), dv.stride(1),
                HEADS=min(PART[0], _block(heads)), WIDTH=triton.next_power_of_2(width),
                VALUE=triton.next_power_of_2(dv.shape[2]), num_warps=PART[1],
            )  # fmt: skip
        return dup, dshared, None
