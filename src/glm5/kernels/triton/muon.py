"""Muon's elementwise parts in Triton: momentum with Nesterov's input, the scaled input, and the weights' update.

Each is one pass over memory, of matrices [P, R, C] at any strides: a batch may hold them transposed. In plain PyTorch
they are two or three, which read bf16 beside fp32 slowly. Every rounding is that of the steps in `glm5.train.optim`, so
that an update does not depend on who makes it. Read first: `glm5.train.optim`.
"""

# mypy: disallow-untyped-defs=false, disallow-incomplete-defs=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 64  # rows and columns of a program, square because either may be the fast axis


@triton.jit
def _nesterov(
    g_ptr, m_ptr, x_ptr, mu, rows, columns, g0, g1, g2, m0, m1, m2, x0, x1, x2, MOVE: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """m = mu m + g if MOVE, and x = g + mu m."""
    p = tl.program_id(2).to(tl.int64)
    r = (tl.program_id(1) * TILE + tl.arange(0, TILE)).to(tl.int64)[:, None]
    c = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)[None, :]
    real = (r < rows) & (c < columns)
    at = m_ptr + p * m0 + r * m1 + c * m2
    m = tl.load(at, mask=real, other=0.0)
    g = tl.load(g_ptr + p * g0 + r * g1 + c * g2, mask=real, other=0.0).to(m.dtype)
    if MOVE:
        m = m * mu + g
        tl.store(at, m, mask=real)
    tl.store(x_ptr + p * x0 + r * x1 + c * x2, tl.fma(m, tl.zeros_like(m) + mu, g), mask=real)


@triton.jit
def _momentum(g_ptr, m_ptr, mu, count, BLOCK: tl.constexpr):
    """m = mu m + g, of tensors that lie in one piece each."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = tl.load(m_ptr + at, mask=at < count, other=0.0)
    g = tl.load(g_ptr + at, mask=at < count, other=0.0).to(m.dtype)
    tl.store(m_ptr + at, m * mu + g, mask=at < count)


@triton.jit
def _update(
    w_ptr, o_ptr, keep, rate, rows, columns, w0, w1, w2, o0, o1, o2, TILE: tl.constexpr
):  # fmt: skip
    """w = keep w + rate o."""
    p = tl.program_id(2).to(tl.int64)
    r = (tl.program_id(1) * TILE + tl.arange(0, TILE)).to(tl.int64)[:, None]
    c = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)[None, :]
    real = (r < rows) & (c < columns)
    at = w_ptr + p * w0 + r * w1 + c * w2
    w = tl.load(at, mask=real, other=0.0) * keep
    o = tl.load(o_ptr + p * o0 + r * o1 + c * o2, mask=real, other=0.0).to(w.dtype)
    tl.store(at, tl.fma(o, tl.zeros_like(w) + rate, w), mask=real)


@triton.jit
def _divide(x_ptr, norm_ptr, out_ptr, size, x_step, BLOCK: tl.constexpr):
    """out[n] = x[n] / norm[n], of matrices that lie in one piece each."""
    n = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + n * x_step + at, mask=at < size, other=0.0)
    out = tl.math.div_rn(x, tl.zeros_like(x) + tl.load(norm_ptr + n))
    tl.store(out_ptr + n * size + at, out.to(out_ptr.dtype.element_ty), mask=at < size)


def nesterov(g_PRC: Tensor, m_PRC: Tensor, mu: float, out_PRC: Tensor, *, move: bool) -> None:
    """out = g + mu m, after m = mu m + g if `move`. g of any floating dtype, m and out fp32."""
    periods, rows, columns = m_PRC.shape
    if m_PRC.numel():
        _nesterov[(triton.cdiv(columns, TILE), triton.cdiv(rows, TILE), periods)](
            g_PRC, m_PRC, out_PRC, mu, rows, columns, *g_PRC.stride(), *m_PRC.stride(), *out_PRC.stride(),
            MOVE=move, TILE=TILE, enable_fp_fusion=False,
        )  # fmt: skip


def momentum(g: Tensor, m: Tensor, mu: float) -> None:
    """m = mu m + g. g of any floating dtype, m fp32, both contiguous."""
    if m.numel():
        _momentum[(triton.cdiv(m.numel(), 4096),)](g, m, mu, m.numel(), BLOCK=4096, num_warps=8, enable_fp_fusion=False)


def update(w_PRC: Tensor, o_PRC: Tensor, keep: float, rate: float) -> None:
    """w = keep w + rate o. w fp32, o of any floating dtype."""
    periods, rows, columns = w_PRC.shape
    if w_PRC.numel():
        _update[(triton.cdiv(columns, TILE), triton.cdiv(rows, TILE), periods)](
            w_PRC, o_PRC, keep, rate, rows, columns, *w_PRC.stride(), *o_PRC.stride(),
            TILE=TILE, enable_fp_fusion=False,
        )  # fmt: skip


def divided(x_NAB: Tensor, norm_N: Tensor, dtype: torch.dtype) -> Tensor:
    """Every matrix over its number, in fp32, rounded once: [N, A, B] of `dtype`. x fp32, contiguous."""
    out = torch.empty(x_NAB.shape, dtype=dtype, device=x_NAB.device)
    size = x_NAB[0].numel()
    _divide[(triton.cdiv(size, 4096), len(x_NAB))](x_NAB, norm_N, out, size, size, BLOCK=4096, num_warps=8)
    return out
