"""Lightning-indexer scores in Triton: I(t, s) = sum_j w(t, j) ReLU(q(t, j) . k(s)), and the selection by them.

Source: report section 2.1.1, DeepSeek-V3.2. In bf16, or in e4m3 with a scale for every key. The product is transposed:
keys are the rows of the matrix instruction, (query, head) pairs its columns, so that the weighted sum over heads runs
along a thread's own accumulators. A program keeps a few queries and walks over key tiles. Tiles that no query of the
program sees are not computed.
Read next: `select` for both in one launch; `glm5.kernels.topk` for what the selection means.
"""

# mypy: disallow-untyped-defs=false, disallow-incomplete-defs=false

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.kernels.pages import Pages
from glm5.kernels.triton.early import begin
from glm5.kernels.triton.scoring import score_tile


@triton.jit
def _scores(
    q_ptr, w_ptr, k_ptr, scale_ptr, first_ptr, last_ptr, table_ptr, out_ptr,
    queries, slots, tiles_each, table_stride,
    q_batch_stride, q_stride, q_head_stride, w_batch_stride, w_stride, k_batch_stride, k_stride,
    scale_batch_stride, scale_stride, out_stride,
    J: tl.constexpr, I: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_S: tl.constexpr, FILL: tl.constexpr,
    SCALED: tl.constexpr, PAGE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    group = tl.program_id(0)
    part = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    pair_P = tl.arange(0, BLOCK_Q * J)
    query_P = group * BLOCK_Q + pair_P // J
    head_P = pair_P % J
    real_P = query_P < queries
    col_I = tl.arange(0, I)
    q_PI = tl.load(
        q_ptr + batch * q_batch_stride + query_P[:, None] * q_stride + head_P[:, None] * q_head_stride + col_I[None, :],
        mask=real_P[:, None], other=0.0,
    )  # fmt: skip
    w_P = tl.load(w_ptr + batch * w_batch_stride + query_P * w_stride + head_P, mask=real_P, other=0.0).to(tl.float32)
    query_Q = group * BLOCK_Q + tl.arange(0, BLOCK_Q)
    real_Q = query_Q < queries
    first_Q = tl.load(first_ptr + batch * queries + query_Q, mask=real_Q, other=2147483647)
    last_Q = tl.load(last_ptr + batch * queries + query_Q, mask=real_Q, other=-1)
    lowest = tl.min(first_Q, 0)
    highest = tl.max(last_Q, 0)
    out_Q = out_ptr + (batch * queries + query_Q.to(tl.int64)) * out_stride
    if FILL:
        origin = part * tiles_each * BLOCK_S
    else:  # what is seen decides, and not how much there could be
        lowest = tl.minimum(lowest, slots) // BLOCK_S * BLOCK_S
        tiles_each = tl.cdiv(tl.cdiv(tl.maximum(highest + 1 - lowest, 0), BLOCK_S), tl.num_programs(1))
        origin = lowest + part * tiles_each * BLOCK_S
    end = tl.minimum(slots, origin + tiles_each * BLOCK_S)
    seen_from = tl.maximum(origin, lowest // BLOCK_S * BLOCK_S)
    seen_to = tl.minimum(end, highest + 1)
    if FILL:
        for start in range(origin, tl.minimum(seen_from, end), BLOCK_S):
            s_S = start + tl.arange(0, BLOCK_S)
            blank = tl.full([BLOCK_S, BLOCK_Q], -float("inf"), tl.float32)
            tl.store(out_Q[None, :] + s_S[:, None], blank, mask=(s_S < slots)[:, None] & real_Q[None, :])
    for start in range(seen_from, seen_to, BLOCK_S):
        s_S = start + tl.arange(0, BLOCK_S)
        score_SQ = score_tile(
            q_PI, w_P, first_Q, last_Q, k_ptr + batch * k_batch_stride, scale_ptr + batch * scale_batch_stride,
            table_ptr + batch * table_stride, start, slots, k_stride, scale_stride,
            J, I, BLOCK_Q, BLOCK_S, SCALED, PAGE,
        )  # fmt: skip
        tl.store(out_Q[None, :] + s_S[:, None], score_SQ, mask=(s_S < slots)[:, None] & real_Q[None, :])
    if FILL:
        after = tl.maximum(origin, tl.cdiv(tl.maximum(seen_to, 0), BLOCK_S) * BLOCK_S)
        after = tl.where(seen_to > seen_from, after, tl.maximum(origin, tl.minimum(seen_from, end)))
        for start in range(after, end, BLOCK_S):
            s_S = start + tl.arange(0, BLOCK_S)
            blank = tl.full([BLOCK_S, BLOCK_Q], -float("inf"), tl.float32)
            tl.store(out_Q[None, :] + s_S[:, None], blank, mask=(s_S < slots)[:, None] & real_Q[None, :])


def index_scores(
    q_BTJI: Tensor,
    w_BTJ: Tensor,
    k_BSI: Tensor,
    first_BT: Tensor,
    last_BT: Tensor,
    *,
    fill: bool = True,
    out: Tensor | None = None,
    block_q: int | None = None,
    block_s: int | None = None,
    warps: int | None = None,
    stages: int | None = None,
    programs: int = 132 * 2,
    pages: Pages | None = None,
    key_scale_BS: Tensor | None = None,
    early: bool = False,
) -> Tensor:
    """Index scores fp32 [B, T, S], -inf outside each query's interval.

    Args:
        q_BTJI: [B, T, J, I], contiguous columns; J and I powers of two, at least 16. w_BTJ: head weights with every
            scale folded in, contiguous columns. k_BSI: [B, S, I], the same dtype, contiguous columns.
        first_BT, last_BT: int32 [B, T], contiguous, inclusive bounds.
        fill: write -inf outside the intervals; without it those elements keep what `out` held.
        out: contiguous fp32 [B, T, S] to write into.
        block_q, block_s, warps, stages, programs: the launch; None takes what was measured best (docs/kernels.md).
        pages: k_BSI is a pool [1, R, I], and a sequence's keys are where they say; S is then the slots of its row of
            the table.
        key_scale_BS: fp32 [B, S] (with pages [1, R]), of keys in e4m3; each score is multiplied by its key's.
        early: begin while the launch before ends, and let the next do so (see `early`).

    Raises:
        ValueError: widths or strides that the kernel does not take.
    """
    batch, queries, heads, width = q_BTJI.shape
    slots = k_BSI.shape[1] if pages is None else pages.table_BP.shape[1] * pages.size
    if any(n < 16 or n & (n - 1) for n in (heads, width)):
        raise ValueError(f"index_scores takes heads and widths that are powers of two from 16, not {heads} x {width}")
    if q_BTJI.stride(3) != 1 or w_BTJ.stride(2) != 1 or k_BSI.stride(2) != 1:
        raise ValueError("index_scores takes contiguous columns")
    if not (first_BT.is_contiguous() and last_BT.is_contiguous()) or first_BT.dtype != torch.int32:
        raise ValueError("index_scores takes contiguous int32 bounds")
    if out is None:
        out = torch.empty(batch, queries, slots, dtype=torch.float32, device=q_BTJI.device)
    if out.numel() == 0:
        return out
    decode = queries * heads <= 64
    block_q = block_q or (max(1, triton.next_power_of_2(queries)) if decode else max(1, 128 // heads))
    block_s = block_s or (256 if queries * heads <= 32 and key_scale_BS is not None else 128)
    warps, stages = warps or 4, stages or (3 if decode else 2)
    groups, tiles = triton.cdiv(queries, block_q), triton.cdiv(slots, block_s)
    parts = max(1, min(tiles, programs // (groups * batch)))
    each = triton.cdiv(tiles, parts)
    scale = w_BTJ if key_scale_BS is None else key_scale_BS
    _scores[(groups, triton.cdiv(tiles, each), batch)](
        q_BTJI, w_BTJ, k_BSI, scale, first_BT, last_BT, first_BT if pages is None else pages.table_BP, out,
        queries, slots, each, 0 if pages is None else pages.table_BP.stride(0),
        q_BTJI.stride(0), q_BTJI.stride(1), q_BTJI.stride(2), w_BTJ.stride(0), w_BTJ.stride(1),
        k_BSI.stride(0) if pages is None else 0, k_BSI.stride(1),
        scale.stride(0) if pages is None else 0, scale.stride(1), slots,
        J=heads, I=width, BLOCK_Q=block_q, BLOCK_S=block_s, FILL=fill, SCALED=key_scale_BS is not None,
        PAGE=0 if pages is None else pages.size, EARLY=early, launch_pdl=early, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def index_select(
    q_BTJI: Tensor,
    w_BTJ: Tensor,
    k_BSI: Tensor,
    first_BT: Tensor,
    last_BT: Tensor,
    k: int,
    *,
    topk: Callable[..., Tensor],
    scores: Callable[..., Tensor] = index_scores,
    pages: Pages | None = None,
    tile_bytes: int = 2**28,
) -> Tensor:
    """Score and select tile by tile of queries: int32 [B, T, min(k, S)], ascending, -1 padded. S as in `index_scores`.

    Scores of at most `tile_bytes` exist at a time. `topk(scores, k, first, last, out=…)` is a stable top-k that reads
    only the slots inside the bounds and writes to `out` if there is one; `scores` is called like `index_scores`.
    """
    batch, queries = first_BT.shape
    slots = k_BSI.shape[1] if pages is None else pages.table_BP.shape[1] * pages.size
    tile = min(queries, max(1, tile_bytes // (4 * batch * max(1, slots))))
    if tile >= queries:
        scored = scores(q_BTJI, w_BTJ, k_BSI, first_BT, last_BT, fill=False, pages=pages)
        chosen = topk(scored.flatten(0, 1), k, first_BT.flatten(), last_BT.flatten(), out=None)
        return chosen.view(batch, queries, -1)
    picked = torch.empty(batch, queries, min(k, slots), dtype=torch.int32, device=q_BTJI.device)
    for start in range(0, queries, tile):
        part = slice(start, min(start + tile, queries))
        first, last = first_BT[:, part].contiguous(), last_BT[:, part].contiguous()
        scored = scores(q_BTJI[:, part], w_BTJ[:, part], k_BSI, first, last, fill=False, pages=pages)
        place = picked[0, part] if batch == 1 else None
        chosen = topk(scored.flatten(0, 1), k, first.flatten(), last.flatten(), out=place)
        del scored  # so that the next tile's take its place
        if place is None:
            picked[:, part] = chosen.view(batch, -1, chosen.shape[-1])
    return picked
