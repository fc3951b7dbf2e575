"""Grouped SwiGLU experts with e4m3 weights in Triton: the launches of `moe`, and one that rounds the tokens.

Products are of e4m3 by e4m3, 128 columns at a time, each piece scaled by its block of weights and by its token. Tokens
are rounded into the order of their experts, so that the tiles of both sides come by the copy engine, and the scales of
a tile's tokens lie side by side: addresses of gathered rows and scales took the registers that sums need. A program of
the gate-up product makes 128 of an expert's hidden numbers for a tile of tokens, which is just what shares a scale: it
rounds them itself, and neither the products nor what SwiGLU gives exist in 16 bits. Source: DeepSeek-V3, section 3.3.2.
Read next: `glm5.kernels.moe_fp8`, the specification; `moe`.
"""

# mypy: disallow-untyped-defs=false, disallow-incomplete-defs=false

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from glm5.kernels.formats import BLOCK, E4M3, Packed
from glm5.kernels.triton.segments import find_tile, mix, segments

LARGEST = tl.constexpr(448.0)
SMALLEST_SCALE = tl.constexpr(2.0**-126)


@triton.jit
def _round(x, AXIS: tl.constexpr):
    """x in e4m3 with one scale along AXIS, and the scales. A NaN stays one."""
    large = tl.max(tl.abs(x), AXIS)
    scale = tl.where(large < LARGEST * SMALLEST_SCALE, SMALLEST_SCALE, large / LARGEST)
    y = x / tl.expand_dims(scale, AXIS)
    y = tl.where(y > LARGEST, LARGEST, tl.where(y < -LARGEST, -LARGEST, y))
    return y.to(tl.float8e4nv), scale


@triton.jit
def _round_rows(
    x_ptr, position_ptr, out_ptr, scale_ptr, rows, D, x_stride,
    M: tl.constexpr, G: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """out[position[token, m]] = x[token] in e4m3, scale[group, position]."""
    token = tl.program_id(0).to(tl.int64)
    piece_P = tl.program_id(1) * PIECES + tl.arange(0, PIECES)
    at_PG = piece_P[:, None] * G + tl.arange(0, G)[None, :]
    x = tl.load(x_ptr + token * x_stride + at_PG, mask=at_PG < D, other=0.0).to(tl.float32)
    y, scale = _round(x, 1)
    for m in tl.static_range(M):
        position = tl.load(position_ptr + token * M + m).to(tl.int64)
        tl.store(out_ptr + position * D + at_PG, y, mask=at_PG < D)
        tl.store(scale_ptr + piece_P.to(tl.int64) * rows + position, scale, mask=piece_P * G < D)


@triton.jit
def _gate_up(
    x_desc, x_scale_ptr, weight_desc, scale_ptr, offset_ptr, hidden_ptr, hidden_scale_ptr, pairs,
    D: tl.constexpr, F: tl.constexpr, E: tl.constexpr, P: tl.constexpr, BLOCK_M: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """hidden[position] = silu(gate x) * up x, its columns [G n, G n + G) rounded with one scale."""
    expert, first, past = find_tile(offset_ptr, tl.program_id(1), E, P, BLOCK_M)
    if expert == E:
        return
    n = tl.program_id(0)
    row_M = first + tl.arange(0, BLOCK_M)
    real_M = row_M < past
    gate_row = expert * (2 * F) + n * G
    scale_ptr += (expert * (2 * F // G) + n) * (D // G)
    x_scale_M = x_scale_ptr + row_M
    gate_NM = tl.zeros([G, BLOCK_M], tl.float32)
    up_NM = tl.zeros([G, BLOCK_M], tl.float32)
    for g in range(D // G):
        gate = weight_desc.load([gate_row, g * G])
        up = weight_desc.load([gate_row + F, g * G])
        x = x_desc.load([first, g * G])  # the last rows may be the next expert's, whose results are not stored
        scale_M = tl.load(x_scale_M, mask=real_M, other=0.0)
        x_scale_M += pairs
        gate_NM += tl.dot(gate, tl.trans(x)) * (scale_M * tl.load(scale_ptr + g))[None, :]
        up_NM += tl.dot(up, tl.trans(x)) * (scale_M * tl.load(scale_ptr + (F // G) * (D // G) + g))[None, :]
    hidden, scale_M = _round(gate_NM / (1.0 + tl.exp(-gate_NM)) * up_NM, 0)
    hidden_NM = hidden_ptr + row_M[None, :].to(tl.int64) * F + n * G + tl.arange(0, G)[:, None]
    tl.store(hidden_NM, hidden, mask=real_M[None, :])
    tl.store(hidden_scale_ptr + n.to(tl.int64) * pairs + row_M, scale_M, mask=real_M)


@triton.jit
def _down(
    hidden_desc, hidden_scale_ptr, weight_desc, scale_ptr, pair_ptr, offset_ptr, part_ptr, pairs,
    D: tl.constexpr, F: tl.constexpr, E: tl.constexpr, P: tl.constexpr, BLOCK_M: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """part[pair] = down hidden, G columns of it."""
    expert, first, past = find_tile(offset_ptr, tl.program_id(1), E, P, BLOCK_M)
    if expert == E:
        return
    n = tl.program_id(0)
    row_M = first + tl.arange(0, BLOCK_M)
    real_M = row_M < past
    scale_ptr += (expert * (D // G) + n) * (F // G)
    hidden_scale_M = hidden_scale_ptr + row_M
    acc_NM = tl.zeros([G, BLOCK_M], tl.float32)
    for g in range(F // G):
        weight = weight_desc.load([expert * D + n * G, g * G])
        hidden = hidden_desc.load([first, g * G])
        scale_M = tl.load(hidden_scale_M, mask=real_M, other=0.0)
        hidden_scale_M += pairs
        acc_NM += tl.dot(weight, tl.trans(hidden)) * (scale_M * tl.load(scale_ptr + g))[None, :]
    pair_M = tl.load(pair_ptr + row_M, mask=real_M, other=0).to(tl.int64)
    target = part_ptr + pair_M[None, :] * D + n * G + tl.arange(0, G)[:, None]
    tl.store(target, acc_NM.to(part_ptr.dtype.element_ty), mask=real_M[None, :])


def round_rows(x_ND: Tensor, position_NM: Tensor) -> tuple[Tensor, Tensor]:
    """Every token at each of its positions: e4m3 [N M, D], and scales by 1 x 128, fp32 [D / 128, N M].

    x_ND: contiguous columns, D a multiple of 128.
    """
    (tokens, choices), width = position_NM.shape, x_ND.shape[1]
    rows, groups = tokens * choices, width // BLOCK
    values = torch.empty(rows, width, dtype=E4M3, device=x_ND.device)
    scale = torch.empty(groups, rows, dtype=torch.float32, device=x_ND.device)
    pieces = min(16, triton.next_power_of_2(groups))
    _round_rows[(tokens, triton.cdiv(groups, pieces))](
        x_ND, position_NM, values, scale, rows, width, x_ND.stride(0), M=choices, G=BLOCK, PIECES=pieces
    )
    return values, scale


def grouped_swiglu_fp8(
    x_ND: Tensor,
    gate_up: Packed,
    down: Packed,
    expert_NM: Tensor,
    weight_NM: Tensor,
    *,
    tile: tuple[int, int, int] | None = None,
) -> Tensor:
    """Sum over each token's M experts of weight * down(silu(gate x) * up x), in 8 bits. No gradient.

    Args:
        x_ND: tokens, bf16, fp16 or fp32, contiguous columns. gate_up, down: of `pack_experts`, [E, 2F, D] and
            [E, D, F], contiguous, D and F multiples of 128. expert_NM: int32 or int64 ids below E. weight_NM: fp32.
        tile: (tokens, warps, stages); None chooses by the tokens that an expert gets.

    Returns:
        [N, D] in x's dtype.

    Raises:
        ValueError: a format, width or stride that the kernel does not take.
    """
    experts, _, inner = down.values.shape
    block_m, warps, stages = tile or _tile(expert_NM.numel() / experts)

    def products(
        x: Tensor, x_scale: Tensor, gate_up: Packed, down: Packed, offset: Tensor, pair: Tensor, part: Tensor
    ) -> None:
        pairs, width = x.shape
        hidden = torch.empty(pairs, inner, dtype=E4M3, device=x.device)
        hidden_scale = torch.empty(inner // BLOCK, pairs, dtype=torch.float32, device=x.device)
        most = min(pairs, pairs // block_m + experts)  # tiles of tokens, each expert's last one partly filled
        x_desc, hidden_desc = (TensorDescriptor.from_tensor(rows, [block_m, BLOCK]) for rows in (x, hidden))
        up_desc, down_desc = (
            TensorDescriptor.from_tensor(p.values.flatten(0, 1), [BLOCK, BLOCK]) for p in (gate_up, down)
        )
        sizes = dict(D=width, F=inner, E=experts, P=triton.next_power_of_2(experts), BLOCK_M=block_m, G=BLOCK)
        sizes |= dict(num_warps=warps, num_stages=stages)
        _gate_up[(inner // BLOCK, most)](
            x_desc, x_scale, up_desc, gate_up.scale, offset, hidden, hidden_scale, pairs, **sizes
        )
        _down[(width // BLOCK, most)](
            hidden_desc, hidden_scale, down_desc, down.scale, pair, offset, part, pairs, **sizes
        )

    return around_products(x_ND, gate_up, down, expert_NM, weight_NM, products)


def around_products(
    x_ND: Tensor,
    gate_up: Packed,
    down: Packed,
    expert_NM: Tensor,
    weight_NM: Tensor,
    products: Callable[[Tensor, Tensor, Packed, Packed, Tensor, Tensor, Tensor], None],
) -> Tensor:
    """`grouped_swiglu_fp8` with everything but the two grouped products.

    products(x, x_scale, gate_up, down, offset, pair, part): of `round_rows` and `segments`, writes part [N M, D].
    """
    tokens, width = x_ND.shape
    experts, _, inner = down.values.shape
    choices = expert_NM.shape[1]
    for p in (gate_up, down):
        if (p.kind, p.rows, p.columns) != ("fp8", BLOCK, BLOCK) or not (
            p.values.is_contiguous() and p.scale.is_contiguous()
        ):
            raise ValueError(f"grouped_swiglu_fp8 takes contiguous e4m3 weights with scales by {BLOCK} x {BLOCK}")
    if width % BLOCK or inner % BLOCK:
        raise ValueError(f"grouped_swiglu_fp8 takes widths that are multiples of {BLOCK}, not {width} and {inner}")
    if x_ND.stride(1) != 1:
        raise ValueError("grouped_swiglu_fp8 takes contiguous token rows")
    y_ND = torch.empty_like(x_ND, memory_format=torch.contiguous_format)
    if tokens == 0:
        return y_ND
    expert_NM, weight_NM = expert_NM.contiguous(), weight_NM.contiguous()
    offset, pair, position = segments(expert_NM, experts)
    x, x_scale = round_rows(x_ND, position)
    part = x_ND.new_empty(tokens * choices, width)
    products(x, x_scale, gate_up, down, offset, pair, part)
    mix(part, weight_NM, y_ND)
    return y_ND


def _tile(pairs_each: float) -> tuple[int, int, int]:
    """By the pairs an expert gets on average."""
    if pairs_each <= 3:
        return 16, 4, 4
    if pairs_each <= 16:
        return 32, 4, 4
    return 64, 8, 4
