"""Each head's own matrix in Triton, for a few tokens: W_UK before absorbed attention and W_UV behind it.

A product per head of a few rows is bound by the bytes of the matrix; programs divide its columns, so that all
multiprocessors read. The result goes where the next operator wants it: beside the rotated part of a query, or as rows
of the output projection. Many tokens are cuBLAS's. Read next: `glm5.model.mla`, the specification.
"""

# mypy: disallow-untyped-defs=false, disallow-incomplete-defs=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.kernels.triton.early import begin, early

FEW = 64  # tokens up to which the Triton kernels run


@triton.jit
def _by_head(
    x_ptr, w_ptr, out_ptr, rope_ptr, tokens,
    x_stride, x_head, w_head, w_in, w_out, out_stride, out_head, rope_stride, rope_head,
    X: tl.constexpr, Y: tl.constexpr, R: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_Y: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """out[t, h, :Y] = x[t, h] W[h]; out[t, h, Y : Y + R] = rope[t, h], by the program past the last columns."""
    head = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    token_T = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    real_T = (token_T < tokens)[:, None]
    row_T = token_T.to(tl.int64)[:, None]
    begin(EARLY)
    if block * BLOCK_Y >= Y:
        col_R = tl.arange(0, R)[None, :]
        value = tl.load(rope_ptr + row_T * rope_stride + head * rope_head + col_R, mask=real_T, other=0.0)
        tl.store(out_ptr + row_T * out_stride + head * out_head + Y + col_R, value, mask=real_T)
    else:
        col_Y = block * BLOCK_Y + tl.arange(0, BLOCK_Y)[None, :]
        acc_TY = tl.zeros([BLOCK_T, BLOCK_Y], tl.float32)
        for start in range(0, X, BLOCK_X):
            col_X = start + tl.arange(0, BLOCK_X)
            x_TX = tl.load(x_ptr + row_T * x_stride + head * x_head + col_X[None, :], mask=real_T, other=0.0)
            w_XY = tl.load(w_ptr + head * w_head + col_X[:, None] * w_in + col_Y * w_out)
            acc_TY = tl.dot(x_TX, w_XY, acc=acc_TY, input_precision="ieee")
        tl.store(
            out_ptr + row_T * out_stride + head * out_head + col_Y, acc_TY.to(out_ptr.dtype.element_ty), mask=real_T
        )


@triton.jit
def _row_by_head(
    x_ptr, w_ptr, out_ptr, rope_ptr, x_head, w_head, w_in, w_out, out_head, rope_head,
    X: tl.constexpr, Y: tl.constexpr, R: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_Y: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """`_by_head` of one token, without the matrix instruction. A program's piece of the matrix is on its way before the
    launch waits for the one before it: the selection, or attention of one query, which leave the memory idle."""
    head = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    if block * BLOCK_Y >= Y:
        begin(EARLY)
        col_R = tl.arange(0, R)
        tl.store(out_ptr + head * out_head + Y + col_R, tl.load(rope_ptr + head * rope_head + col_R))
    else:
        col_X = tl.arange(0, BLOCK_X)
        col_Y = block * BLOCK_Y + tl.arange(0, BLOCK_Y)
        real_X = col_X < X
        weight = tl.load(
            w_ptr + head * w_head + col_X[:, None] * w_in + col_Y[None, :] * w_out, mask=real_X[:, None], other=0.0
        )
        begin(EARLY)
        x_X = tl.load(x_ptr + head * x_head + col_X, mask=real_X, other=0.0).to(tl.float32)
        out_Y = tl.sum(weight.to(tl.float32) * x_X[:, None], 0)
        tl.store(out_ptr + head * out_head + col_Y, out_Y.to(out_ptr.dtype.element_ty))


@triton.jit
def _beside(
    x_ptr, out_ptr, x_stride, x_head, out_stride, out_head,
    H: tl.constexpr, R: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """out[t, h] = x[t, h], a token a program."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK_H)[:, None]
    col = tl.arange(0, BLOCK_R)[None, :]
    real = (head < H) & (col < R)
    value = tl.load(x_ptr + token * x_stride + head * x_head + col, mask=real)
    tl.store(out_ptr + token * out_stride + head * out_head + col, value, mask=real)


def by_head(x_NHX: Tensor, weight_HXY: Tensor, rope_NHR: Tensor | None = None) -> Tensor:
    """Every head's rows times its own matrix: [N, H, Y], and `rope_NHR` behind, [N, H, Y + R].

    Args:
        x_NHX, rope_NHR: contiguous columns, any other strides. weight_HXY: any strides; the launch just before may not
            write it, since it is read before that is waited for.

    Raises:
        ValueError: widths that the kernels do not tile: X and Y are multiples of 64, R is a power of two.
    """
    (tokens, heads, width), columns = x_NHX.shape, weight_HXY.shape[2]
    rotary = 0 if rope_NHR is None else rope_NHR.shape[-1]
    out = x_NHX.new_empty(tokens, heads, columns + rotary)
    if tokens == 0:
        return out
    if tokens > FEW:
        torch.bmm(x_NHX.transpose(0, 1), weight_HXY, out=out[..., :columns].transpose(0, 1))
        if rope_NHR is not None:
            _beside[(tokens,)](
                rope_NHR, out[..., columns:], rope_NHR.stride(0), rope_NHR.stride(1), out.stride(0), out.stride(1),
                H=heads, R=rotary, BLOCK_H=triton.next_power_of_2(heads), BLOCK_R=triton.next_power_of_2(rotary),
            )  # fmt: skip
        return out
    block_x, block_y = 128 if width % 128 == 0 else 64, 64
    if width % block_x or columns % block_y or rotary & (rotary - 1):
        raise ValueError(f"by_head takes widths that are multiples of 64, not {width} and {columns} + {rotary}")
    rope = x_NHX if rope_NHR is None else rope_NHR
    if tokens == 1:
        # Small pieces, of which all fit on the chip at once: whole lines where columns lie side by side.
        block_y, warps = (64, 4) if weight_HXY.stride(2) == 1 else (8, 2)
        _row_by_head[(heads, columns // block_y + (rotary > 0))](
            x_NHX, weight_HXY, out, rope,
            x_NHX.stride(1), *weight_HXY.stride(), out.stride(1), rope.stride(1),
            X=width, Y=columns, R=max(rotary, 1), BLOCK_X=triton.next_power_of_2(width), BLOCK_Y=block_y,
            num_warps=warps, **early(x_NHX),
        )  # fmt: skip
        return out
    block_t = max(16, min(64, triton.next_power_of_2(tokens)))
    _by_head[(heads, columns // block_y + (rotary > 0), triton.cdiv(tokens, block_t))](
        x_NHX, weight_HXY, out, rope, tokens,
        x_NHX.stride(0), x_NHX.stride(1), *weight_HXY.stride(), out.stride(0), out.stride(1),
        rope.stride(0), rope.stride(1),
        X=width, Y=columns, R=max(rotary, 1), BLOCK_T=block_t, BLOCK_X=block_x, BLOCK_Y=block_y,
        num_warps=4, num_stages=3, **early(x_NHX),
    )  # fmt: skip
    return out
