"""Grouped SwiGLU experts in Triton: each token's chosen experts, from one token to many thousands.

Source: report section 2.1, DeepSeek-V3. Five launches: count the (token, expert) pairs by expert; scatter them into
segments; gate and up products with SwiGLU; down product; weighted sum over a token's experts. The order of pairs in a
segment is a race, which no result shows: a pair's row is computed by itself, and the last sum runs in the order of the
token's choices. Weights are the rows of the matrix instruction and tokens its columns, so that a segment of 16 tokens
wastes no rows. Read next: `segments` for all but the products;
`glm5.kernels.moe`, the specification.
"""

# mypy: disallow-untyped-defs=false, disallow-incomplete-defs=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from glm5.kernels.triton.early import begin, early
from glm5.kernels.triton.segments import find_tile, mix, segments

TAIL = 32  # pairs up to which an expert's last tile is a small one


@triton.jit
def _gate_up(
    x_ptr, weight_ptr, pair_ptr, offset_ptr, hidden_ptr, D, F, x_stride,
    M: tl.constexpr, E: tl.constexpr, P: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, TAIL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """hidden[position] = silu(gate x) * up x. With TAIL an expert's last tile is so small where that suffices."""
    begin(EARLY)
    expert, first, past = find_tile(offset_ptr, tl.program_id(1), E, P, BLOCK_M)
    if expert == E:
        return
    base = weight_ptr + expert.to(tl.int64) * (2 * F) * D
    if TAIL:
        if past - first <= TAIL:
            _gate_up_rows(x_ptr, base, pair_ptr, hidden_ptr, first, past, D, F, x_stride, M, TAIL, BLOCK_N, BLOCK_D)
        else:
            _gate_up_rows(x_ptr, base, pair_ptr, hidden_ptr, first, past, D, F, x_stride, M, BLOCK_M, BLOCK_N, BLOCK_D)
    else:
        _gate_up_rows(x_ptr, base, pair_ptr, hidden_ptr, first, past, D, F, x_stride, M, BLOCK_M, BLOCK_N, BLOCK_D)


@triton.jit
def _gate_up_rows(
    x_ptr, base, pair_ptr, hidden_ptr, first, past, D, F, x_stride,
    M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`_gate_up` of pairs [first, first + BLOCK_M) of the expert whose matrices begin at `base`."""
    row_M = first + tl.arange(0, BLOCK_M)
    real_M = row_M < past
    token_M = tl.load(pair_ptr + row_M, mask=real_M, other=0) // M
    col_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    col_D = tl.arange(0, BLOCK_D)
    gate_ND = base + col_N[:, None].to(tl.int64) * D + col_D[None, :]
    x_DM = x_ptr + token_M[None, :].to(tl.int64) * x_stride + col_D[:, None]
    gate_NM = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up_NM = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for d in range(0, D, BLOCK_D):
        rest = D - d
        gate = tl.load(gate_ND + d, mask=(col_N < F)[:, None] & (col_D < rest)[None, :], other=0.0)
        up = tl.load(gate_ND + F * D + d, mask=(col_N < F)[:, None] & (col_D < rest)[None, :], other=0.0)
        x = tl.load(x_DM + d, mask=real_M[None, :] & (col_D < rest)[:, None], other=0.0)
        gate_NM = tl.dot(gate, x, acc=gate_NM, input_precision="ieee")
        up_NM = tl.dot(up, x, acc=up_NM, input_precision="ieee")
    # As in the specification: the products are rounded before SwiGLU.
    kind = hidden_ptr.dtype.element_ty
    gate_NM = gate_NM.to(kind).to(tl.float32)
    hidden = (gate_NM / (1.0 + tl.exp(-gate_NM))).to(kind) * up_NM.to(kind)
    target = hidden_ptr + row_M[None, :].to(tl.int64) * F + col_N[:, None]
    tl.store(target, hidden, mask=real_M[None, :] & (col_N < F)[:, None])


@triton.jit
def _down(
    hidden_ptr, weight_ptr, pair_ptr, offset_ptr, part_ptr, D, F,
    E: tl.constexpr, P: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """part[pair] = down hidden."""
    begin(EARLY)
    expert, first, past = find_tile(offset_ptr, tl.program_id(1), E, P, BLOCK_M)
    if expert == E:
        return
    row_M = first + tl.arange(0, BLOCK_M)
    real_M = row_M < past
    pair_M = tl.load(pair_ptr + row_M, mask=real_M, other=0)
    col_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    col_F = tl.arange(0, BLOCK_F)
    weight_NF = weight_ptr + expert.to(tl.int64) * D * F + col_N[:, None].to(tl.int64) * F + col_F[None, :]
    hidden_FM = hidden_ptr + row_M[None, :].to(tl.int64) * F + col_F[:, None]
    acc_NM = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for f in range(0, F, BLOCK_F):
        rest = F - f
        weight = tl.load(weight_NF + f, mask=(col_N < D)[:, None] & (col_F < rest)[None, :], other=0.0)
        hidden = tl.load(hidden_FM + f, mask=real_M[None, :] & (col_F < rest)[:, None], other=0.0)
        acc_NM = tl.dot(weight, hidden, acc=acc_NM, input_precision="ieee")
    target = part_ptr + pair_M[None, :].to(tl.int64) * D + col_N[:, None]
    tl.store(target, acc_NM.to(part_ptr.dtype.element_ty), mask=real_M[None, :] & (col_N < D)[:, None])


@triton.jit
def _down_wide(
    hidden_desc, tail_desc, weight_desc, pair_ptr, offset_ptr, part_ptr, D: tl.constexpr, F: tl.constexpr,
    E: tl.constexpr, P: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr,
    TAIL: tl.constexpr,
):  # fmt: skip
    """`_down` for many tokens: its tiles, here with tokens as rows, come by the copy engine. A tile's last rows, or its
    last columns, may be the next expert's: they are multiplied, and not stored."""
    expert, first, past = find_tile(offset_ptr, tl.program_id(1), E, P, BLOCK_M)
    if expert == E:
        return
    if past - first <= TAIL:
        _down_rows(tail_desc, weight_desc, pair_ptr, part_ptr, expert, first, past, D, F, TAIL, BLOCK_N, BLOCK_F)
    else:
        _down_rows(hidden_desc, weight_desc, pair_ptr, part_ptr, expert, first, past, D, F, BLOCK_M, BLOCK_N, BLOCK_F)


@triton.jit
def _down_rows(
    hidden_desc, weight_desc, pair_ptr, part_ptr, expert, first, past, D: tl.constexpr, F: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """`_down_wide` of pairs [first, first + BLOCK_M)."""
    start = tl.program_id(0) * BLOCK_N
    acc_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for f in range(0, F, BLOCK_F):
        hidden = hidden_desc.load([first, f])
        weight = weight_desc.load([expert * D + start, f])
        acc_MN = tl.dot(hidden, tl.trans(weight), acc=acc_MN, input_precision="ieee")
    row_M = first + tl.arange(0, BLOCK_M)
    pair_M = tl.load(pair_ptr + row_M, mask=row_M < past, other=0)
    col_N = start + tl.arange(0, BLOCK_N)
    target = part_ptr + pair_M[:, None].to(tl.int64) * D + col_N[None, :]
    tl.store(target, acc_MN.to(part_ptr.dtype.element_ty), mask=(row_M < past)[:, None] & (col_N < D)[None, :])


def grouped_swiglu(
    x_ND: Tensor,
    gate_up_EFD: Tensor,
    down_EDF: Tensor,
    expert_NM: Tensor,
    weight_NM: Tensor,
    *,
    tiles: tuple[tuple[int, ...], tuple[int, ...]] | None = None,
    wide: bool | None = None,
) -> Tensor:
    """Sum over each token's M experts of weight * down(silu(gate x) * up x). No gradient.

    Args:
        x_ND: tokens, bf16, fp16 or fp32, contiguous columns. gate_up_EFD: [E, 2F, D] contiguous, gate rows then up
            rows. down_EDF: [E, D, F] contiguous. expert_NM: int32 or int64 ids below E. weight_NM: fp32, contiguous.
        tiles: (tokens, rows of weights, depth, warps, stages) of the gate-up and of the down product; None takes
            what was measured best for the number of tokens an expert gets.
        wide: read the down product's tiles by the copy engine, which takes rows of 16 bytes, and let an expert's last
            tile be small; None does for many tokens.

    Returns:
        [N, D] in x's dtype.
    """
    tokens, width = x_ND.shape
    experts, _, inner = down_EDF.shape
    choices = expert_NM.shape[1]
    y_ND = torch.empty_like(x_ND, memory_format=torch.contiguous_format)
    if tokens == 0:
        return y_ND
    if x_ND.stride(1) != 1 or not all(t.is_contiguous() for t in (gate_up_EFD, down_EDF, expert_NM, weight_NM)):
        raise ValueError("grouped_swiglu takes contiguous weights, ids and mixture weights, and contiguous token rows")
    first, second = tiles or _tiles(tokens * choices / experts)
    if first[0] != second[0]:
        raise ValueError("both products must share the tile of tokens")
    if wide is None:
        wide = tiles is None and first[0] >= 128 and inner * x_ND.element_size() % 16 == 0
    tail = min(TAIL, first[0])
    pairs, block_m, padded = tokens * choices, first[0], triton.next_power_of_2(experts)
    offset, pair, _ = segments(expert_NM, experts)
    hidden = x_ND.new_empty(pairs, inner)
    part = x_ND.new_empty(pairs, width)
    most = min(pairs, pairs // block_m + experts)  # tiles of tokens, each expert's last one partly filled
    _gate_up[(triton.cdiv(inner, first[1]), most)](
        x_ND, gate_up_EFD, pair, offset, hidden, width, inner, x_ND.stride(0),
        M=choices, E=experts, P=padded, BLOCK_M=block_m, BLOCK_N=first[1], BLOCK_D=first[2],
        TAIL=tail if wide else 0, num_warps=first[3], num_stages=first[4], **early(x_ND),
    )  # fmt: skip
    sizes = dict(BLOCK_M=block_m, BLOCK_N=second[1], BLOCK_F=second[2], num_warps=second[3], num_stages=second[4])
    grid = (triton.cdiv(width, second[1]), most)
    if wide:
        hidden_desc, tail_desc = (TensorDescriptor.from_tensor(hidden, [m, second[2]]) for m in (block_m, tail))
        weight_desc = TensorDescriptor.from_tensor(down_EDF.view(-1, inner), [second[1], second[2]])
        _down_wide[grid](
            hidden_desc, tail_desc, weight_desc, pair, offset, part, D=width, F=inner, E=experts, P=padded, TAIL=tail,
            **sizes,
        )  # fmt: skip
    else:
        _down[grid](hidden, down_EDF, pair, offset, part, width, inner, E=experts, P=padded, **sizes, **early(x_ND))
    mix(part, weight_NM, y_ND)
    return y_ND


def _tiles(pairs_each: float) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """By the pairs an expert gets on average."""
    if pairs_each <= 3:
        return (16, 64, 128, 4, 4), (16, 128, 128, 4, 4)
    if pairs_each <= 16:
        return (32, 64, 128, 4, 4), (32, 128, 128, 4, 4)
    if pairs_each <= 48:
        return (64, 64, 64, 4, 4), (64, 128, 64, 4, 4)
    return (128, 128, 64, 8, 4), (128, 256, 64, 8, 4)
