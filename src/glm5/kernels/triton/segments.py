"""Pairs of a token and an expert in segments by expert, and what comes of them summed by token. Read next: `moe`."""

# mypy: disallow-untyped-defs=false, disallow-incomplete-defs=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.kernels.triton.early import begin, early


@triton.jit
def _count(
    expert_ptr, offset_ptr, cursor_ptr, pairs, E: tl.constexpr, P: tl.constexpr, CHUNK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """offset[e] = pairs of experts before e (offset[E] = all of them); cursor = offset, for the scatter."""
    begin(EARLY)
    slot_P = tl.arange(0, P)
    count_P = tl.zeros([P], tl.int32)
    for start in range(0, pairs, CHUNK):
        at = start + tl.arange(0, CHUNK)
        real = at < pairs
        expert = tl.load(expert_ptr + at, mask=real, other=0).to(tl.int32)
        count_P += tl.histogram(expert, P, mask=real)
    upto_P = tl.cumsum(count_P, 0)
    tl.store(offset_ptr + slot_P, upto_P - count_P, mask=slot_P < E)
    tl.store(cursor_ptr + slot_P, upto_P - count_P, mask=slot_P < E)
    tl.store(offset_ptr + 1 + slot_P, upto_P, mask=slot_P == E - 1)


@triton.jit
def _scatter(expert_ptr, cursor_ptr, pair_ptr, position_ptr, pairs, CHUNK: tl.constexpr, EARLY: tl.constexpr):
    """pair[position] = index of a (token, choice) pair, grouped by expert; position[pair] the other way round."""
    begin(EARLY)
    at = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    real = at < pairs
    expert = tl.load(expert_ptr + at, mask=real, other=0)
    position = tl.atomic_add(cursor_ptr + expert, 1, mask=real)
    tl.store(pair_ptr + position, at, mask=real)
    tl.store(position_ptr + at, position, mask=real)


@triton.jit
def find_tile(offset_ptr, tile, E: tl.constexpr, P: tl.constexpr, BLOCK_M: tl.constexpr):
    """The expert of a tile of BLOCK_M pairs, and the tile's first and past-the-last position; expert E if none."""
    slot_P = tl.arange(0, P)
    from_P = tl.load(offset_ptr + slot_P, mask=slot_P < E, other=0)
    to_P = tl.load(offset_ptr + slot_P + 1, mask=slot_P < E, other=0)
    tiles_P = tl.where(slot_P < E, tl.cdiv(to_P - from_P, BLOCK_M), 0)
    upto_P = tl.cumsum(tiles_P, 0)
    expert = tl.sum((upto_P <= tile).to(tl.int32), 0)
    before = tl.sum(tl.where(slot_P < expert, tiles_P, 0), 0)
    first = tl.sum(tl.where(slot_P == expert, from_P, 0), 0) + (tile - before) * BLOCK_M
    past = tl.sum(tl.where(slot_P == expert, to_P, 0), 0)
    return tl.minimum(expert, E), first, past


@triton.jit
def _in_order(x_ptr, position_ptr, out_ptr, D, x_stride, M: tl.constexpr, BLOCK_D: tl.constexpr):
    """out[position[token, m]] = x[token]."""
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    x = tl.load(x_ptr + token * x_stride + col, mask=col < D, other=0.0)
    for m in tl.static_range(M):
        position = tl.load(position_ptr + token * M + m).to(tl.int64)
        tl.store(out_ptr + position * D + col, x, mask=col < D)


@triton.jit
def _mix(part_ptr, weight_ptr, y_ptr, D, M: tl.constexpr, BLOCK_D: tl.constexpr, EARLY: tl.constexpr):
    """y[token] = sum over its choices of weight * part, in fp32, in the order of the choices."""
    begin(EARLY)
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    real = col < D
    acc = tl.zeros([BLOCK_D], tl.float32)
    for m in tl.static_range(M):
        weight = tl.load(weight_ptr + token * M + m)
        acc += weight * tl.load(part_ptr + (token * M + m) * D + col, mask=real, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * D + col, acc.to(y_ptr.dtype.element_ty), mask=real)


def segments(expert_NM: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """offset int32 [E + 1], where each expert's segment begins; pair int32 [N M], the pairs by expert; and position
    int32 [N, M], where each pair is in that order.

    The order of pairs in a segment is a race. expert_NM: contiguous ids below E.
    """
    pairs, device = expert_NM.numel(), expert_NM.device
    offset = torch.empty(experts + 1, dtype=torch.int32, device=device)
    cursor = torch.empty(experts, dtype=torch.int32, device=device)
    pair = torch.empty(pairs, dtype=torch.int32, device=device)
    position = torch.empty(expert_NM.shape, dtype=torch.int32, device=device)
    chunk = 1024 if pairs <= 4096 else 8192
    padded = triton.next_power_of_2(experts)
    _count[(1,)](
        expert_NM, offset, cursor, pairs, E=experts, P=padded, CHUNK=chunk, num_warps=8 if chunk == 1024 else 16,
        **early(expert_NM),
    )  # fmt: skip
    _scatter[(triton.cdiv(pairs, 256),)](expert_NM, cursor, pair, position, pairs, CHUNK=256, **early(expert_NM))
    return offset, pair, position


def in_order(x_ND: Tensor, position_NM: Tensor) -> Tensor:
    """Every token's row at each of its positions: [N M, D]."""
    (tokens, choices), width = position_NM.shape, x_ND.shape[1]
    out = x_ND.new_empty(tokens * choices, width)
    if out.numel():
        _in_order[(tokens, triton.cdiv(width, 2048))](
            x_ND, position_NM, out, width, x_ND.stride(0), M=choices, BLOCK_D=2048
        )
    return out


def mix(part: Tensor, weight_NM: Tensor, y_ND: Tensor) -> None:
    """y[token] = the sum over its pairs' rows of `part` [N M, D], weighted, in the order of its choices."""
    (tokens, width), choices = y_ND.shape, weight_NM.shape[1]
    _mix[(tokens, triton.cdiv(width, 2048))](part, weight_NM, y_ND, width, M=choices, BLOCK_D=2048, **early(part))
