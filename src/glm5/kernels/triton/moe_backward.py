"""Grouped SwiGLU experts with gradients: six grouped products, by Triton through the copy engine or by torch.

Pairs (token, choice) are sorted by expert, stably, so that every sum has one order. Forward saves the gathered rows and
the gate-up products; backward makes SwiGLU again. The mixture weight's gradient is <down^T dy, mixed>, so that no
expert's output is kept. Source: report section 2.1; `glm5.kernels.moe` is the specification. Read next: `moe`, the
version without gradients.
"""

# mypy: disallow-untyped-defs=false, disallow-incomplete-defs=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from glm5.kernels.deferral import weight_gradient
from glm5.kernels.triton.segments import find_tile

# (pairs, columns, depth, warps, stages) of products along rows; (rows, columns, pairs, …) of the weights' gradients.
ROWS, WEIGHTS = (128, 256, 64, 8, 4), (128, 256, 64, 8, 3)
# Pairs an expert from which torch's grouped product is faster along rows of K-major weights (measured on an H200: 13%
# slower at 128, 10% faster at 512). For the weights' gradients it always is; against MN-major weights it never is.
MANY = 384


@triton.jit
def _rows_product(
    a_desc, b_desc, out_ptr, offset_ptr, N, K,
    TALL: tl.constexpr, E: tl.constexpr, P: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[pair] = a[pair] B[expert]^T with B [E N, K], or a[pair] B[expert] with B [E K, N] if TALL."""
    expert, first, past = find_tile(offset_ptr, tl.program_id(1), E, P, BLOCK_M)
    if expert == E:
        return
    col = tl.program_id(0) * BLOCK_N
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, K, BLOCK_K):
        a = a_desc.load([first, k])
        if TALL:
            acc = tl.dot(a, b_desc.load([expert * K + k, col]), acc)
        else:
            acc = tl.dot(a, b_desc.load([expert * N + col, k]).T, acc)
    row_M = first + tl.arange(0, BLOCK_M)
    col_N = col + tl.arange(0, BLOCK_N)
    to = out_ptr + row_M[:, None].to(tl.int64) * N + col_N[None, :]
    tl.store(to, acc.to(out_ptr.dtype.element_ty), mask=(row_M < past)[:, None] & (col_N < N)[None, :])


@triton.jit
def _weights_product(
    left_desc, right_desc, left_ptr, right_ptr, out_ptr, offset_ptr, A, B,
    BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """out[expert] [A, B] = sum over the expert's pairs of left[pair]^T right[pair]; zeros without pairs."""
    expert = tl.program_id(2).to(tl.int64)
    first = tl.load(offset_ptr + expert)
    past = tl.load(offset_ptr + expert + 1)
    a0 = tl.program_id(1) * BLOCK_A
    b0 = tl.program_id(0) * BLOCK_B
    a_A = a0 + tl.arange(0, BLOCK_A)
    b_B = b0 + tl.arange(0, BLOCK_B)
    acc = tl.zeros([BLOCK_A, BLOCK_B], tl.float32)
    whole = first + (past - first) // BLOCK_P * BLOCK_P
    for p in range(first, whole, BLOCK_P):
        left = left_desc.load([p, a0])
        acc = tl.dot(left.T, right_desc.load([p, b0]), acc)
    if whole < past:  # the rows beyond are another expert's
        row_P = whole + tl.arange(0, BLOCK_P)
        real_P1 = (row_P < past)[:, None]
        row_P1 = row_P[:, None].to(tl.int64)
        left = tl.load(left_ptr + row_P1 * A + a_A[None, :], mask=real_P1 & (a_A < A)[None, :], other=0.0)
        right = tl.load(right_ptr + row_P1 * B + b_B[None, :], mask=real_P1 & (b_B < B)[None, :], other=0.0)
        acc = tl.dot(left.T, right, acc)
    to = out_ptr + expert * A * B + a_A[:, None].to(tl.int64) * B + b_B[None, :]
    tl.store(to, acc.to(out_ptr.dtype.element_ty), mask=(a_A < A)[:, None] & (b_B < B)[None, :])


@triton.jit
def _gather(x_ptr, pair_ptr, out_ptr, x_stride, D, M: tl.constexpr, BLOCK: tl.constexpr):
    """out[position] = x[token of the pair at that position]."""
    position = tl.program_id(0).to(tl.int64)
    token = tl.load(pair_ptr + position).to(tl.int64) // M
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + position * D + col, tl.load(x_ptr + token * x_stride + col, mask=col < D), mask=col < D)


@triton.jit
def _scatter_rows(
    part_ptr, place_ptr, weight_ptr, y_ptr, D, M: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr
):
    """y[token] = sum over its choices, in their order, of (weight *) part[place of the pair], in fp32."""
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for m in tl.static_range(M):
        place = tl.load(place_ptr + token * M + m).to(tl.int64)
        part = tl.load(part_ptr + place * D + col, mask=col < D, other=0.0).to(tl.float32)
        if WEIGHTED:
            part = part * tl.load(weight_ptr + token * M + m)
        acc += part
    tl.store(y_ptr + token * D + col, acc.to(y_ptr.dtype.element_ty), mask=col < D)


@triton.jit
def _swiglu(hidden_ptr, mixed_ptr, F, BLOCK: tl.constexpr):
    """mixed = silu(gate) * up; the two halves of a row of `hidden`."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(hidden_ptr + row * 2 * F + col, mask=col < F, other=0.0).to(tl.float32)
    up = tl.load(hidden_ptr + row * 2 * F + F + col, mask=col < F, other=0.0)
    kind = mixed_ptr.dtype.element_ty
    tl.store(mixed_ptr + row * F + col, (gate / (1.0 + tl.exp(-gate))).to(kind) * up, mask=col < F)


@triton.jit
def _swiglu_backward(
    hidden_ptr, dmixed_ptr, pair_ptr, weight_ptr, dhidden_ptr, mixed_ptr, dweight_ptr, F, BLOCK: tl.constexpr
):  # fmt: skip
    """From dmixed before the mixture weight: the gradient of hidden, weight * mixed, and dweight by pair."""
    row = tl.program_id(0).to(tl.int64)
    pair = tl.load(pair_ptr + row).to(tl.int64)
    weight = tl.load(weight_ptr + pair)
    kind = hidden_ptr.dtype.element_ty
    dweight = 0.0
    for start in range(0, F, BLOCK):
        col = start + tl.arange(0, BLOCK)
        gate = tl.load(hidden_ptr + row * 2 * F + col, mask=col < F, other=0.0).to(tl.float32)
        up = tl.load(hidden_ptr + row * 2 * F + F + col, mask=col < F, other=0.0).to(tl.float32)
        grad = tl.load(dmixed_ptr + row * F + col, mask=col < F, other=0.0).to(tl.float32)
        sigmoid = 1.0 / (1.0 + tl.exp(-gate))
        act = gate * sigmoid
        mixed = act * up
        dweight += tl.sum(grad * mixed, 0)
        grad = grad * weight
        tl.store(mixed_ptr + row * F + col, (mixed * weight).to(kind), mask=col < F)
        dgate = grad * up * (sigmoid + act * (1.0 - sigmoid))
        tl.store(dhidden_ptr + row * 2 * F + col, dgate.to(kind), mask=col < F)
        tl.store(dhidden_ptr + row * 2 * F + F + col, (grad * act).to(kind), mask=col < F)
    tl.store(dweight_ptr + pair, dweight)


class GroupedSwiGLU(torch.autograd.Function):
    """`moe.grouped_swiglu` with gradients to tokens, both weights and the mixture weights; the same bits on every run.

    Takes bf16, fp16 or fp32 tokens and contiguous weights [E, 2F, D] and [E, D, F]; D and F are multiples of 8.
    """

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, gate_up: Tensor, down: Tensor, expert_NM: Tensor, weight_NM: Tensor) -> Tensor:
        (tokens, choices), experts = expert_NM.shape, down.shape[0]
        flat = expert_NM.flatten()
        # The pair of each position; `place` is its inverse. Two bytes are sorted by in a quarter of eight's launches.
        pair = flat.to(torch.int16).argsort(stable=True).to(torch.int32)
        place = torch.empty_like(pair)
        place[pair.long()] = torch.arange(pair.numel(), dtype=torch.int32, device=pair.device)
        bounds = torch.arange(experts + 1, device=flat.device, dtype=flat.dtype)
        offset = torch.searchsorted(flat[pair.long()], bounds, out_int32=True)
        weight_NM = weight_NM.contiguous()
        rows = _gathered(x_ND, pair, choices)
        hidden = _along_rows(rows, gate_up, offset, tall=False)
        out = _along_rows(_mixed(hidden), down, offset, tall=False)
        ctx.save_for_backward(rows, hidden, gate_up, down, weight_NM, pair, place, offset)
        ctx.weights = (gate_up, down)
        return _combined(out, place, weight_NM, tokens, choices)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, hidden, gate_up, down, weight_NM, pair, place, offset = ctx.saved_tensors
        tokens, choices = weight_NM.shape
        grads = _gathered(grad.contiguous(), pair, choices)
        dmixed = _along_rows(grads, down, offset, tall=True)
        dhidden, mixed, dweight = (torch.empty_like(t) for t in (hidden, dmixed, weight_NM))
        if rows.shape[0]:
            block = min(2048, triton.next_power_of_2(mixed.shape[1]))
            _swiglu_backward[(rows.shape[0],)](
                hidden, dmixed, pair, weight_NM, dhidden, mixed, dweight, mixed.shape[1], BLOCK=block, num_warps=8
            )
        own_gate_up, own_down = ctx.weights
        dx = ddown = dgate_up = None
        if ctx.needs_input_grad[2]:
            ddown = weight_gradient(own_down, lambda: _of_weights(grads, mixed, offset))
        if ctx.needs_input_grad[1]:
            dgate_up = weight_gradient(own_gate_up, lambda: _of_weights(dhidden, rows, offset))
        if ctx.needs_input_grad[0]:
            dx = _combined(_along_rows(dhidden, gate_up, offset, tall=True), place, None, tokens, choices)
        return dx, dgate_up, ddown, None, dweight


def _gathered(x_ND: Tensor, pair: Tensor, choices: int) -> Tensor:
    out, width = x_ND.new_empty(pair.numel(), x_ND.shape[1]), x_ND.shape[1]
    if pair.numel():
        block = min(2048, triton.next_power_of_2(width))
        grid = (pair.numel(), triton.cdiv(width, block))
        _gather[grid](x_ND, pair, out, x_ND.stride(0), width, M=choices, BLOCK=block)
    return out


def _combined(part: Tensor, place: Tensor, weight_NM: Tensor | None, tokens: int, choices: int) -> Tensor:
    pairs, width = part.shape
    if pairs == 0:  # whose pointer is null
        return part.new_zeros(tokens, width)
    y = part.new_empty(tokens, width)
    if tokens:
        block = min(2048, triton.next_power_of_2(width))
        _scatter_rows[(tokens, triton.cdiv(width, block))](
            part, place, weight_NM, y, width, M=choices, WEIGHTED=weight_NM is not None, BLOCK=block
        )
    return y


def _mixed(hidden: Tensor) -> Tensor:
    pairs, inner = hidden.shape[0], hidden.shape[1] // 2
    mixed = hidden.new_empty(pairs, inner)
    if pairs:
        block = min(2048, triton.next_power_of_2(inner))
        _swiglu[(pairs, triton.cdiv(inner, block))](hidden, mixed, inner, BLOCK=block)
    return mixed


def _along_rows(a: Tensor, weight: Tensor, offset: Tensor, *, tall: bool) -> Tensor:
    """Every row of `a` times its expert's matrix, transposed unless `tall`: [pairs, N]."""
    (pairs, depth), experts = a.shape, weight.shape[0]
    columns = weight.shape[2] if tall else weight.shape[1]
    if not tall and pairs >= MANY * experts and _library_takes(a):
        product: Tensor = torch._grouped_mm(a, weight.transpose(1, 2), offs=offset[1:])
        return product
    out = a.new_empty(pairs, columns)
    if pairs:
        m, n, k, warps, stages = ROWS
        flat = weight.view(-1, weight.shape[2])
        _rows_product[(triton.cdiv(columns, n), min(pairs, pairs // m + experts))](
            TensorDescriptor.from_tensor(a, [m, k]), TensorDescriptor.from_tensor(flat, [k, n] if tall else [n, k]),
            out, offset, columns, depth,
            TALL=tall, E=experts, P=triton.next_power_of_2(experts), BLOCK_M=m, BLOCK_N=n, BLOCK_K=k,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return out


def _library_takes(a: Tensor) -> bool:
    """Whether torch's grouped product runs its own kernel: bf16 on Hopper."""
    return a.is_cuda and a.dtype == torch.bfloat16 and torch.cuda.get_device_capability(a.device) == (9, 0)


def _of_weights(left: Tensor, right: Tensor, offset: Tensor) -> Tensor:
    """Every expert's sum of outer products: [E, A, B]."""
    experts, a, b = offset.numel() - 1, left.shape[1], right.shape[1]
    if left.shape[0] and _library_takes(left):
        product: Tensor = torch._grouped_mm(left.t(), right, offs=offset[1:])
        return product
    out = left.new_empty(experts, a, b)
    if not left.shape[0]:
        return out.zero_()
    block_a, block_b, block_p, warps, stages = WEIGHTS
    _weights_product[(triton.cdiv(b, block_b), triton.cdiv(a, block_a), experts)](
        TensorDescriptor.from_tensor(left, [block_p, block_a]), TensorDescriptor.from_tensor(right, [block_p, block_b]),
        left, right, out, offset, a, b,
        BLOCK_A=block_a, BLOCK_B=block_b, BLOCK_P=block_p, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out
