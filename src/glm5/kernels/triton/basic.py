"""RMSNorm, SwiGLU and the cache's write in Triton, and products of matrices that share an input.

A program takes a row, or a piece of one, and computes it in fp32; it rounds where the specification does. Products are
cuBLAS's. Read next: `preparation`; `glm5.kernels.basic` for the specification.
"""

# mypy: disallow-untyped-defs=false, disallow-incomplete-defs=false

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from glm5.kernels.basic import side_by_side
from glm5.kernels.triton.early import begin, early
from glm5.kernels.triton.row import is_row, row_product


@triton.jit
def _rms_norm(x_ptr, gain_ptr, out_ptr, x_stride, eps, D: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    real = col < D
    x = tl.load(x_ptr + row * x_stride + col, mask=real, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(x * x, 0) / D + eps)
    kind = out_ptr.dtype.element_ty
    gain = tl.load(gain_ptr + col, mask=real, other=0.0)
    tl.store(out_ptr + row * D + col, (x * inverse).to(kind) * gain.to(kind), mask=real)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `glm5.kernels.basic.rms_norm`, for rows of contiguous columns that lie at one stride."""
    width = x.shape[-1]
    rows = x.view(-1, width) if x.is_contiguous() else x.flatten(0, -2)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows.shape[0]:
        block = triton.next_power_of_2(width)
        warps = min(8, max(1, block // 512))
        _rms_norm[(rows.shape[0],)](
            rows, weight, out, rows.stride(0), eps, D=width, BLOCK=block, num_warps=warps, **early(x)
        )
    return out


@triton.jit
def _add_rms_norm(
    x_ptr, y_ptr, gain_ptr, sum_ptr, out_ptr, eps, D: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    real = col < D
    kind = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * D + col, mask=real, other=0.0).to(tl.float32)
    x = (x + tl.load(y_ptr + row * D + col, mask=real, other=0.0).to(tl.float32)).to(kind)
    tl.store(sum_ptr + row * D + col, x, mask=real)
    x = x.to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(x * x, 0) / D + eps)
    gain = tl.load(gain_ptr + col, mask=real, other=0.0)
    tl.store(out_ptr + row * D + col, (x * inverse).to(kind) * gain.to(kind), mask=real)


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `glm5.kernels.basic.add_rms_norm`, for contiguous x and y."""
    width = x.shape[-1]
    total, out = torch.empty_like(x), torch.empty_like(x)
    if x.numel():
        block = triton.next_power_of_2(width)
        warps = min(8, max(1, block // 512))
        _add_rms_norm[(x.numel() // width,)](
            x, y, weight, total, out, eps, D=width, BLOCK=block, num_warps=warps, **early(x)
        )
    return total, out


@triton.jit
def _store(
    row_ptr, a_ptr, a_new_ptr, b_ptr, b_new_ptr, a_stride, a_new_stride, b_stride, b_new_stride,
    A: tl.constexpr, B: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    new = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ptr + new)
    col = tl.arange(0, BLOCK_A)
    value = tl.load(a_new_ptr + new * a_new_stride + col, mask=col < A)
    tl.store(a_ptr + row * a_stride + col, value, mask=col < A)
    col = tl.arange(0, BLOCK_B)
    value = tl.load(b_new_ptr + new * b_new_stride + col, mask=col < B)
    tl.store(b_ptr + row * b_stride + col, value, mask=col < B)


def store(row_N: Tensor, *pools: tuple[Tensor, Tensor]) -> None:
    """Write the rows of both tensors to rows row_N of their pools: ((pool [R, X], rows [N, X]), the other two)."""
    (a, a_new), (b, b_new) = pools
    if row_N.numel():
        _store[(row_N.numel(),)](
            row_N, a, a_new, b, b_new, a.stride(0), a_new.stride(0), b.stride(0), b_new.stride(0),
            A=a.shape[1], B=b.shape[1], BLOCK_A=triton.next_power_of_2(a.shape[1]),
            BLOCK_B=triton.next_power_of_2(b.shape[1]), num_warps=2, **early(a),
        )  # fmt: skip


@triton.jit
def _next_rows(
    start_ptr, table_ptr, first_ptr, last_ptr, row_ptr, start_stride, table_stride, first, rows,
    QUERIES: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = at < rows
    sequence = (at // QUERIES).to(tl.int64)
    slot = tl.load(start_ptr + sequence * start_stride, mask=real, other=0) + at % QUERIES
    page = tl.load(table_ptr + sequence * table_stride + slot // SIZE, mask=real, other=0)
    tl.store(first_ptr + at, tl.zeros([BLOCK], tl.int32) + first, mask=real)
    tl.store(last_ptr + at, slot.to(tl.int32), mask=real)
    tl.store(row_ptr + at, page * SIZE + slot % SIZE, mask=real)


def next_rows(start_B: Tensor, table_BP: Tensor, size: int, queries: int, first: int) -> tuple[Tensor, Tensor, Tensor]:
    """Each sequence's `queries` rows from slot start_B on: the first and the last slot that each sees, int32 [B, T],
    and where it lies in a pool of pages of `size` slots, int64 [B, T].

    Args:
        start_B, table_BP: int64, any strides but the table's contiguous columns, which hold all those slots.
    """
    batch = start_B.shape[0]
    first_BT, last_BT = torch.empty(2, batch, queries, dtype=torch.int32, device=start_B.device).unbind()
    row_BT = torch.empty(batch, queries, dtype=torch.int64, device=start_B.device)
    if row_BT.numel():
        _next_rows[(triton.cdiv(batch * queries, 128),)](
            start_B, table_BP, first_BT, last_BT, row_BT, start_B.stride(0), table_BP.stride(0), first, batch * queries,
            QUERIES=queries, SIZE=size, BLOCK=128, num_warps=4, **early(start_B),
        )  # fmt: skip
    return first_BT, last_BT, row_BT


@triton.jit
def _silu_times(
    gate_ptr, up_ptr, out_ptr, gate_stride, up_stride, F, BLOCK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = col < F
    kind = out_ptr.dtype.element_ty
    gate = tl.load(gate_ptr + row * gate_stride + col, mask=real, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + col, mask=real, other=0.0)
    act = gate / (1.0 + tl.exp(-gate))
    tl.store(out_ptr + row * F + col, act.to(kind) * up, mask=real)


def silu_times(gate: Tensor, up: Tensor) -> Tensor:
    """As `glm5.kernels.basic.swiglu`, for rows of contiguous columns that lie at one stride: contiguous."""
    inner = gate.shape[-1]
    gates, ups = gate.flatten(0, -2), up.flatten(0, -2)
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if gates.shape[0]:
        block = min(2048, triton.next_power_of_2(inner))
        grid = (gates.shape[0], triton.cdiv(inner, block))
        _silu_times[grid](
            gates, ups, out, gates.stride(0), ups.stride(0), inner, BLOCK=block, num_warps=4, **early(gate)
        )
    return out


def product(x: Tensor, *weights: Tensor) -> Tensor:
    """x times each of the matrices [out_i, in], side by side: [..., sum of out_i], contiguous.

    One product where the matrices lie side by side in memory, else one for each, into the same result.
    """
    joined = side_by_side(*weights)
    if joined is not None:
        return linear(x, joined)
    out = x.new_empty(*x.shape[:-1], sum(w.shape[0] for w in weights))
    rows, at = x.flatten(0, -2), 0
    for w in weights:
        torch.mm(rows, w.t(), out=out.flatten(0, -2)[:, at : at + w.shape[0]])
        at += w.shape[0]
    return out


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """down(silu(gate x) * up x), in x's shape. gate, up: [F, D]; down: [D, F]."""
    return linear(silu_times(*product(x, gate, up).chunk(2, dim=-1)), down)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x weight^T, of a single row by the kernel that is faster there."""
    return row_product(x, weight) if is_row(x) and weight.is_contiguous() else F.linear(x, weight)
