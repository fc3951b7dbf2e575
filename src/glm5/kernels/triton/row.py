"""One row times a matrix in Triton: decode of a single sequence, where nothing but the matrix's bytes counts.

Without the matrix instruction a program needs no tile of tokens: it multiplies a few rows of the matrix with the row
that all programs share, and sums. The RMSNorm of that row costs nothing here, so the launch before is saved. Read
next: `preparation`.
"""

# mypy: disallow-untyped-defs=false, disallow-incomplete-defs=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from glm5.kernels.triton.early import begin, early

WIDEST = 8192  # columns up to which this was measured to be faster than cuBLAS
WIDEST_NORM = 2048


@triton.jit
def _row_product(
    x_ptr, weight_ptr, gain_ptr, out_ptr, rows, eps,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NORM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    col_K = tl.arange(0, BLOCK_K)
    real_N = (row_N < rows)[:, None]
    weight_NK = weight_ptr + row_N[:, None].to(tl.int64) * K + col_K[None, :]
    begin(EARLY)
    acc_NK = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in range(0, K, BLOCK_K):
        inside = start + col_K < K
        weight = tl.load(weight_NK + start, mask=real_N & inside[None, :], other=0.0).to(tl.float32)
        x = tl.load(x_ptr + start + col_K, mask=inside, other=0.0).to(tl.float32)
        if NORM:  # the whole row is at hand; rounded as the specification rounds
            kind = out_ptr.dtype.element_ty
            x = x / tl.sqrt(tl.sum(x * x, 0) / K + eps)
            gain = tl.load(gain_ptr + col_K, mask=inside, other=0.0)
            x = (x.to(kind) * gain.to(kind)).to(tl.float32)
        acc_NK += weight * x[None, :]
    tl.store(out_ptr + row_N, tl.sum(acc_NK, 1).to(out_ptr.dtype.element_ty), mask=row_N < rows)


def row_product(x: Tensor, weight_NK: Tensor, gain: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """x weight^T for x [..., K] that is a single row with contiguous columns; of x's RMSNorm where a gain is given.

    Args:
        weight_NK: contiguous. gain: [K], of a norm over at most WIDEST_NORM columns.
    """
    rows, width = weight_NK.shape
    out = x.new_empty(*x.shape[:-1], rows)
    if gain is not None:
        block_n, block_k, warps = 4, triton.next_power_of_2(width), 4
    elif width <= 2048:
        block_n, block_k, warps = 2, 1024, 4
    else:
        block_n, block_k, warps = 4, 512, 8
    _row_product[(triton.cdiv(rows, block_n),)](
        x, weight_NK, x if gain is None else gain, out, rows, eps,
        K=width, BLOCK_N=block_n, BLOCK_K=block_k, NORM=gain is not None, num_warps=warps, **early(x),
    )  # fmt: skip
    return out


def is_row(x: Tensor, widest: int = WIDEST) -> bool:
    """Whether `row_product` is the faster way to multiply x."""
    return x.numel() == x.shape[-1] <= widest
