"""Sparse MLA over an fp8 cache in Triton: rows of 656 bytes, gathered and never written out in full.

A row's four scales stay out of its elements: each is multiplied into the 64 x K logits of its 128 columns, and into the
probabilities before they meet those columns. What is left of the conversion is e4m3 to the products' 16-bit type, which
loses nothing. Value scales are taken relative to the largest so far, which the output is rescaled by as it is by the
running maximum: fp16 products can neither overflow nor fade. For the same reason queries enter divided by the power of
two of their largest element, which loses nothing either. Shares of the positions are combined in a fixed order. Source:
DeepSeek-V3.2; FlashMLA's account of its fp8 decode, where conversion costs more than the products. Read next:
`glm5.kernels.latent_rows`, `mla`.
"""

# mypy: disallow-untyped-defs=false, disallow-incomplete-defs=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.kernels.latent_rows import GROUPS, LATENT, ROTARY, ROW_BYTES, split_rows
from glm5.kernels.pages import Pages
from glm5.kernels.triton.combine import LOG2E, combine

assert GROUPS == 4  # the kernel names them one by one


@triton.jit
def _logits(q_HG, v_ptr, row_K, real_K, scale_ptr, G: tl.constexpr, FIRST: tl.constexpr, KIND: tl.constexpr):
    """q . row over the G columns from FIRST, unscaled by q's factor; the columns, and the row's scale for them."""
    v_KG = tl.load(v_ptr + row_K[:, None] + FIRST + tl.arange(0, G)[None, :], mask=real_K[:, None], other=0.0).to(KIND)
    scale_K = tl.load(scale_ptr + row_K // 4 + FIRST // G, mask=real_K, other=0.0)
    return tl.dot(q_HG, tl.trans(v_KG)) * scale_K[None, :], v_KG, scale_K


@triton.jit
def _attend(
    q_ptr, v_ptr, scale_ptr, rope_ptr, selected_ptr, table_ptr, out_ptr, lse_ptr,
    heads, keys, queries, scale_log2, q_stride, q_head_stride, batch_stride, row_stride, table_stride,
    C: tl.constexpr, R: tl.constexpr, WHOLE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr,
    KIND: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Partial softmax over one share of the positions: out fp32 and lse in log2, or if WHOLE the result.

    Strides of rows in bytes: scales are at a quarter, rotary columns at half of them."""
    G: tl.constexpr = C // 4
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    head_H = tl.program_id(2) * BLOCK_H + tl.arange(0, BLOCK_H)
    real_H = head_H < heads
    col_G = tl.arange(0, G)
    q_HG = q_ptr + row * q_stride + head_H[:, None] * q_head_stride + col_G[None, :]
    q0 = tl.load(q_HG, mask=real_H[:, None], other=0.0).to(tl.float32)
    q1 = tl.load(q_HG + G, mask=real_H[:, None], other=0.0).to(tl.float32)
    q2 = tl.load(q_HG + 2 * G, mask=real_H[:, None], other=0.0).to(tl.float32)
    q3 = tl.load(q_HG + 3 * G, mask=real_H[:, None], other=0.0).to(tl.float32)
    q_HR = tl.load(
        q_ptr + row * q_stride + head_H[:, None] * q_head_stride + C + tl.arange(0, R)[None, :],
        mask=real_H[:, None], other=0.0,
    )  # fmt: skip
    large_H = tl.maximum(tl.max(tl.maximum(tl.abs(q0), tl.abs(q1)), 1), tl.max(tl.maximum(tl.abs(q2), tl.abs(q3)), 1))
    # The power of two below it: division by that loses no bit of a bf16 query.
    large_H = (large_H.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    large_H = tl.where(large_H > 0.0, large_H, 1.0)
    q0 = (q0 / large_H[:, None]).to(KIND)
    q1 = (q1 / large_H[:, None]).to(KIND)
    q2 = (q2 / large_H[:, None]).to(KIND)
    q3 = (q3 / large_H[:, None]).to(KIND)
    batch = row // queries
    steps = tl.cdiv(keys, BLOCK_K)
    begin = steps * split // splits
    end = steps * (split + 1) // splits
    top_H = tl.full([BLOCK_H], -float("inf"), tl.float32)
    sum_H = tl.zeros([BLOCK_H], tl.float32)
    most = tl.full([], 1e-30, tl.float32)  # the largest scale so far, that the accumulators are relative to
    acc0 = tl.zeros([BLOCK_H, G], tl.float32)
    acc1 = tl.zeros([BLOCK_H, G], tl.float32)
    acc2 = tl.zeros([BLOCK_H, G], tl.float32)
    acc3 = tl.zeros([BLOCK_H, G], tl.float32)
    for step in range(begin, end):
        at_K = step * BLOCK_K + tl.arange(0, BLOCK_K)
        slot_K = tl.load(selected_ptr + row * keys + at_K, mask=at_K < keys, other=-1)
        real_K = slot_K >= 0
        slot_K = tl.maximum(slot_K, 0).to(tl.int64)
        if PAGE:
            page_K = tl.load(table_ptr + batch * table_stride + slot_K // PAGE, mask=real_K, other=0)
            slot_K = page_K * PAGE + slot_K % PAGE
        row_K = tl.multiple_of(batch * batch_stride + slot_K * row_stride, 16)
        s0, v0, c0 = _logits(q0, v_ptr, row_K, real_K, scale_ptr, G, 0, KIND)
        s1, v1, c1 = _logits(q1, v_ptr, row_K, real_K, scale_ptr, G, G, KIND)
        s2, v2, c2 = _logits(q2, v_ptr, row_K, real_K, scale_ptr, G, 2 * G, KIND)
        s3, v3, c3 = _logits(q3, v_ptr, row_K, real_K, scale_ptr, G, 3 * G, KIND)
        half_K = tl.multiple_of(row_K // 2, 8)
        rope_KR = tl.load(rope_ptr + half_K[:, None] + tl.arange(0, R)[None, :], mask=real_K[:, None], other=0.0)
        s_HK = (s0 + s1 + s2 + s3) * large_H[:, None] + tl.dot(q_HR, tl.trans(rope_KR.to(q_HR.dtype)))
        s_HK = tl.where(real_K[None, :], s_HK * scale_log2, -float("inf"))
        new_H = tl.maximum(top_H, tl.max(s_HK, 1))
        shift_H = tl.where(new_H == -float("inf"), 0.0, new_H)
        alpha_H = tl.exp2(top_H - shift_H)
        p_HK = tl.exp2(s_HK - shift_H[:, None])
        sum_H = sum_H * alpha_H + tl.sum(p_HK, 1)
        top_H = new_H
        larger = tl.maximum(most, tl.max(tl.maximum(tl.maximum(c0, c1), tl.maximum(c2, c3)), 0))
        alpha_H = alpha_H * (most / larger)
        most = larger
        acc0 = tl.dot((p_HK * (c0 / most)[None, :]).to(KIND), v0, acc=acc0 * alpha_H[:, None])
        acc1 = tl.dot((p_HK * (c1 / most)[None, :]).to(KIND), v1, acc=acc1 * alpha_H[:, None])
        acc2 = tl.dot((p_HK * (c2 / most)[None, :]).to(KIND), v2, acc=acc2 * alpha_H[:, None])
        acc3 = tl.dot((p_HK * (c3 / most)[None, :]).to(KIND), v3, acc=acc3 * alpha_H[:, None])
    # Comparisons that a NaN fails would hide it: only a sum of exactly nothing is replaced.
    safe_H = tl.where(sum_H == 0.0, 1.0, sum_H)
    lse_H = tl.where(sum_H == 0.0, -float("inf"), top_H + tl.log2(safe_H))
    if WHOLE:
        lse_H = lse_H * 0.6931471805599453
    part_H = (row * splits + split) * heads + head_H
    tl.store(lse_ptr + part_H, lse_H, mask=real_H)
    out_HG = out_ptr + part_H[:, None] * C + col_G[None, :]
    factor_H1 = (most / safe_H)[:, None]
    kind = out_ptr.dtype.element_ty
    tl.store(out_HG, (acc0 * factor_H1).to(kind), mask=real_H[:, None])
    tl.store(out_HG + G, (acc1 * factor_H1).to(kind), mask=real_H[:, None])
    tl.store(out_HG + 2 * G, (acc2 * factor_H1).to(kind), mask=real_H[:, None])
    tl.store(out_HG + 3 * G, (acc3 * factor_H1).to(kind), mask=real_H[:, None])


def sparse_mla_fp8(
    q_BTHX: Tensor,
    rows_BSY: Tensor,
    selected_BTK: Tensor,
    *,
    scale: float,
    splits: int | None = None,
    pages: Pages | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    kind: torch.dtype = torch.float16,
    block_h: int = 64,
    block_k: int = 32,
    warps: int = 8,
    stages: int = 3,
) -> tuple[Tensor, Tensor]:
    """softmax(scale * q.k) v over selected rows of an fp8 cache.

    Args:
        q_BTHX: bf16, fp16 or fp32 [B, T, H, 576], contiguous columns, B and T collapsible.
        rows_BSY: uint8 [B, S, 656] of `latent_rows.pack_rows`, contiguous columns, strides multiples of 16. With
            `pages` a pool [1, R, 656].
        selected_BTK: int32 [B, T, K], contiguous, slots below S; -1 entries select nothing.
        splits: shares of the positions; None chooses enough for the chip. Fix it for batch-invariant results.
        out: (out_BTHC, lse_BTH) to write into, contiguous.
        kind: of the latent products, fp16 or bf16: both hold e4m3 exactly. Rotary products are in q's type.

    Returns:
        out_BTHC [B, T, H, 512] in q's dtype, zeros where nothing is selected; lse_BTH fp32, natural log, -inf there.

    Raises:
        ValueError: a width or stride that the kernel does not take.
    """
    batch, queries, heads, width = q_BTHX.shape
    keys = selected_BTK.shape[-1]
    if width != LATENT + ROTARY or rows_BSY.shape[-1] != ROW_BYTES or rows_BSY.dtype != torch.uint8:
        raise ValueError(f"sparse_mla_fp8 takes queries of {LATENT + ROTARY} and uint8 rows of {ROW_BYTES}")
    strides = rows_BSY.stride()
    if q_BTHX.stride(3) != 1 or strides[2] != 1 or strides[1] % 16 or strides[0] % 16:
        raise ValueError("sparse_mla_fp8 takes contiguous columns, and rows aligned to 16 bytes")
    if not selected_BTK.is_contiguous() or (
        batch > 1 and queries > 1 and q_BTHX.stride(0) != queries * q_BTHX.stride(1)
    ):
        raise ValueError("sparse_mla_fp8 takes contiguous positions, and queries whose B and T collapse into one")
    rows = batch * queries
    block_h = min(block_h, max(16, triton.next_power_of_2(heads)))
    blocks = triton.cdiv(heads, block_h)
    if splits is None:
        splits = max(1, min(16, 2 * 132 // max(1, rows * blocks), triton.cdiv(keys, block_k)))
    if out is None:
        out = (
            q_BTHX.new_empty(batch, queries, heads, LATENT),
            q_BTHX.new_empty(batch, queries, heads, dtype=torch.float32),
        )
    if rows == 0:
        return out
    part, part_lse = out
    if splits > 1:
        part = q_BTHX.new_empty(rows, splits, heads, LATENT, dtype=torch.float32)
        part_lse = q_BTHX.new_empty(rows, splits, heads, dtype=torch.float32)
    values, scales, rotary = split_rows(rows_BSY)
    _attend[(rows, splits, blocks)](
        q_BTHX, values, scales, rotary, selected_BTK, selected_BTK if pages is None else pages.table_BP, part, part_lse,
        heads, keys, queries, scale * LOG2E, q_BTHX.stride(0) if queries == 1 else q_BTHX.stride(1), q_BTHX.stride(2),
        strides[0] if pages is None else 0, strides[1], 0 if pages is None else pages.table_BP.stride(0),
        C=LATENT, R=ROTARY, WHOLE=splits == 1, BLOCK_H=block_h, BLOCK_K=block_k,
        KIND={torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}[kind],
        PAGE=0 if pages is None else pages.size, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if splits > 1:
        combine(part, part_lse, *out)
    return out
