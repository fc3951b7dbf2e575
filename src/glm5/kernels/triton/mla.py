"""Sparse MLA in Triton: heads share one gathered latent row per position; split over positions, then combined.

Absorbed form (report section 2.1, DeepSeek-V3.2): keys are whole rows of C + R columns, values their first C. One
program takes a query, a block of heads and a share of the positions; shares are combined in a fixed order by a
second kernel, so that results are the same on every run. For Hopper at GLM-5's widths `glm5.kernels.cuda` is faster.
Read next: `indexing`.
"""

# mypy: disallow-untyped-defs=false, disallow-incomplete-defs=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.kernels.triton.combine import LOG2E, combine


@triton.jit
def _attend(
    q_ptr, kv_ptr, selected_ptr, out_ptr, lse_ptr,
    heads, keys, queries, scale_log2,
    q_stride, q_head_stride, kv_batch_stride, kv_stride,
    C: tl.constexpr, R: tl.constexpr, SPLITS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Partial softmax over one share of the positions: out fp32 (or the final dtype if SPLITS is 1), lse in log2."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    head_H = tl.program_id(2) * BLOCK_H + tl.arange(0, BLOCK_H)
    col_C = tl.arange(0, C)
    col_R = tl.arange(0, R)
    real_H = head_H < heads
    q_base = q_ptr + row * q_stride + head_H[:, None] * q_head_stride
    q_HC = tl.load(q_base + col_C[None, :], mask=real_H[:, None], other=0.0)
    q_HR = tl.load(q_base + C + col_R[None, :], mask=real_H[:, None], other=0.0)
    kv_base = kv_ptr + (row // queries) * kv_batch_stride
    steps = tl.cdiv(keys, BLOCK_K)
    begin = steps * split // SPLITS
    end = steps * (split + 1) // SPLITS
    top_H = tl.full([BLOCK_H], -float("inf"), tl.float32)
    sum_H = tl.zeros([BLOCK_H], tl.float32)
    acc_HC = tl.zeros([BLOCK_H, C], tl.float32)
    for step in range(begin, end):
        at_K = step * BLOCK_K + tl.arange(0, BLOCK_K)
        slot_K = tl.load(selected_ptr + row * keys + at_K, mask=at_K < keys, other=-1)
        real_K = slot_K >= 0
        row_K = kv_base + tl.maximum(slot_K, 0).to(tl.int64) * kv_stride
        kv_KC = tl.load(row_K[:, None] + col_C[None, :], mask=real_K[:, None], other=0.0)
        kv_KR = tl.load(row_K[:, None] + C + col_R[None, :], mask=real_K[:, None], other=0.0)
        s_HK = tl.dot(q_HC, tl.trans(kv_KC), input_precision="ieee")
        s_HK = tl.dot(q_HR, tl.trans(kv_KR), acc=s_HK, input_precision="ieee") * scale_log2
        s_HK = tl.where(real_K[None, :], s_HK, -float("inf"))
        new_H = tl.maximum(top_H, tl.max(s_HK, 1))
        shift_H = tl.where(new_H == -float("inf"), 0.0, new_H)
        alpha_H = tl.exp2(top_H - shift_H)
        p_HK = tl.exp2(s_HK - shift_H[:, None])
        sum_H = sum_H * alpha_H + tl.sum(p_HK, 1)
        acc_HC = tl.dot(p_HK.to(kv_KC.dtype), kv_KC, acc=acc_HC * alpha_H[:, None], input_precision="ieee")
        top_H = new_H
    safe_H = tl.where(sum_H > 0.0, sum_H, 1.0)
    lse_H = tl.where(sum_H > 0.0, top_H + tl.log2(safe_H), -float("inf"))
    part = (row * SPLITS + split) * heads + head_H
    if SPLITS == 1:
        lse_H = lse_H * 0.6931471805599453
    tl.store(lse_ptr + part, lse_H, mask=real_H)
    out_HC = acc_HC / safe_H[:, None]
    tl.store(out_ptr + part[:, None] * C + col_C[None, :], out_HC.to(out_ptr.dtype.element_ty), mask=real_H[:, None])


def sparse_mla(
    q_BTHX: Tensor,
    kv_BSX: Tensor,
    selected_BTK: Tensor,
    *,
    value_dim: int,
    scale: float,
    splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(scale * q.k) v over selected rows; keys are whole rows, values their first `value_dim` columns.

    Args:
        q_BTHX: [B, T, H, X], bf16, fp16 or fp32, any strides with B and T collapsible and contiguous columns.
        kv_BSX: [B, S, X], same dtype, contiguous columns.
        selected_BTK: int32 [B, T, K], contiguous, slots below S; -1 entries select nothing.
        value_dim: C, a power of two, at least 16; X - C too.
        splits: shares of the positions; None chooses enough for 132 programs. Fix it for batch-invariant results.

    Returns:
        out_BTHC in q's dtype, zeros where nothing is selected; lse_BTH fp32, natural log, -inf there.

    Raises:
        ValueError: widths or strides that the kernel does not take.
    """
    batch, queries, heads, width = q_BTHX.shape
    keys, rotary = selected_BTK.shape[-1], width - value_dim
    if any(n < 16 or n & (n - 1) for n in (value_dim, rotary)):
        raise ValueError(f"sparse_mla takes widths that are powers of two from 16, not {value_dim} + {rotary}")
    if q_BTHX.stride(3) != 1 or kv_BSX.stride(2) != 1 or not selected_BTK.is_contiguous():
        raise ValueError("sparse_mla takes contiguous columns and contiguous positions")
    if batch > 1 and queries > 1 and q_BTHX.stride(0) != queries * q_BTHX.stride(1):
        raise ValueError("sparse_mla takes queries whose B and T dimensions collapse into one")
    rows = batch * queries
    q_stride = q_BTHX.stride(0) if queries == 1 else q_BTHX.stride(1)
    block_h = min(64, max(16, triton.next_power_of_2(heads)))
    wide = value_dim > 128
    block_k = 32 if wide else 64
    blocks = triton.cdiv(heads, block_h)
    if splits is None:
        splits = max(1, min(16, 132 // max(1, rows * blocks), triton.cdiv(keys, block_k)))
    out = q_BTHX.new_empty(batch, queries, heads, value_dim)
    lse = q_BTHX.new_empty(batch, queries, heads, dtype=torch.float32)
    if rows == 0:
        return out, lse
    if splits == 1:
        part, part_lse = out, lse
    else:
        part = q_BTHX.new_empty(rows, splits, heads, value_dim, dtype=torch.float32)
        part_lse = q_BTHX.new_empty(rows, splits, heads, dtype=torch.float32)
    _attend[(rows, splits, blocks)](
        q_BTHX, kv_BSX, selected_BTK, part, part_lse,
        heads, keys, queries, scale * LOG2E,
        q_stride, q_BTHX.stride(2), kv_BSX.stride(0), kv_BSX.stride(1),
        C=value_dim, R=rotary, SPLITS=splits, BLOCK_H=block_h, BLOCK_K=block_k,
        num_warps=8 if wide else 4, num_stages=3 if wide else 2,
    )  # fmt: skip
    if splits > 1:
        combine(part, part_lse, out, lse)
    return out, lse
