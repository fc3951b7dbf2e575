"""Newton-Schulz's symmetric products in Triton: only tiles on and below the diagonal are computed.

Of a step's three products two are symmetric, X X^T and its square; each is computed by halves and mirrored, so that the
result is symmetric to the last bit. The third is cuBLAS's. For matrices [A, B] with A <= B a step then takes
3 A^2 B + A^3 multiply-adds instead of 4 and 2 times. Read next: `glm5.kernels.newton_schulz`, the specification.
"""

# mypy: disallow-untyped-defs=false, disallow-incomplete-defs=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

TILE = (128, 256, 64, 8, 4)  # rows, columns, depth, warps, stages


@triton.jit
def _symmetric(
    left_desc, right_desc, add_ptr, out_ptr, A, B, alpha, beta,
    ADD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out = beta * add + alpha * X X^T of each matrix, of which the lower half is computed; `add` is symmetric."""
    matrix = tl.program_id(2)
    first = tl.program_id(1) * BLOCK_M
    column = tl.program_id(0) * BLOCK_N
    if column >= first + BLOCK_M:
        return
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, B, BLOCK_K):
        left = left_desc.load([matrix * A + first, k])
        acc = tl.dot(left, right_desc.load([matrix * A + column, k]).T, acc)
    row_M1 = first + tl.arange(0, BLOCK_M)[:, None]
    col_1N = column + tl.arange(0, BLOCK_N)[None, :]
    base = matrix.to(tl.int64) * A * A
    lower = (row_M1 < A) & (col_1N <= row_M1)
    acc = acc * alpha
    if ADD:
        acc += beta * tl.load(add_ptr + base + row_M1 * A + col_1N, mask=lower, other=0.0).to(tl.float32)
    value = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + base + row_M1 * A + col_1N, value, mask=lower)
    tl.store(out_ptr + base + col_1N * A + row_M1, value, mask=lower & (col_1N < row_M1))


def symmetric_product(x_NAB: Tensor, add_NAA: Tensor | None = None, *, alpha: float = 1.0, beta: float = 0.0) -> Tensor:
    """beta * add + alpha * X X^T for every matrix, exactly symmetric: [N, A, A].

    Args:
        x_NAB: bf16, fp16 or fp32, contiguous; rows of multiples of 16 bytes. add_NAA: symmetric, contiguous.
    """
    n, a, b = x_NAB.shape
    out = x_NAB.new_empty(n, a, a)
    rows, columns, depth, warps, stages = TILE
    flat = x_NAB.view(n * a, b)
    _symmetric[(triton.cdiv(a, columns), triton.cdiv(a, rows), n)](
        TensorDescriptor.from_tensor(flat, [rows, depth]), TensorDescriptor.from_tensor(flat, [columns, depth]),
        x_NAB if add_NAA is None else add_NAA, out, a, b, alpha, beta,
        ADD=add_NAA is not None, BLOCK_M=rows, BLOCK_N=columns, BLOCK_K=depth, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def iterate(x_NAB: Tensor, steps: int, coefficients: tuple[float, float, float]) -> Tensor:
    """`steps` times X <- (a I + b X X^T + c (X X^T)^2) X of scaled matrices [N, A, B], A <= B."""
    a, b, c = coefficients
    x = x_NAB.contiguous()
    for _ in range(steps):
        gram = symmetric_product(x)
        poly = symmetric_product(gram, gram, alpha=c, beta=b)
        poly.diagonal(dim1=-2, dim2=-1).add_(a)
        x = torch.bmm(poly, x)
    return x
