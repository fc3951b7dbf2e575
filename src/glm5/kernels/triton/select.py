"""Score and select in one launch: a program streams over a query's keys and never holds more than a short list of them.

A program scores tiles of keys for a few queries, in the order of positions, and appends to a list of each query what
lies above the query's floor. A list that could overflow is cut to its k best, and their least score becomes the floor:
a later key with the same score loses to all of them, so that only what is strictly above still counts. Lists stay in
the order of positions, the cut keeps the first of what ties, and so the result is the stable top-k, exactly, whatever
the scores are; no row takes another path. k (1 + ln(S / k)) scores are appended where positions come in no order.
Few rows are divided into parts of their keys, whose k best another launch merges in the same way. Scores of a row exist
for a tile only. Source: report sections 2.1.1 and 3.2. Read next: `indexing`, `glm5.kernels.topk`.
"""

# mypy: disallow-untyped-defs=false, disallow-incomplete-defs=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.kernels.pages import Pages
from glm5.kernels.triton.scoring import score_tile

MOST_PARTS = 8
LARGEST_K = 2048


@triton.jit
def _cut(score_ptr, slot_ptr, target_ptr, count, k, width, CAPACITY: tl.constexpr, LAST: tl.constexpr):
    """Keep the k best of a list's `count` entries, in their order: (least score kept, entries kept).

    The last time slots go to `target_ptr` instead, padded to `width` with -1.
    """
    at = tl.arange(0, CAPACITY)
    score = tl.load(score_ptr + at, mask=at < count, other=0.0) + 0.0  # -0 and +0 tie
    slot = tl.load(slot_ptr + at, mask=at < count, other=0)
    bits = score.to(tl.int32, bitcast=True)
    # An order-preserving unsigned key; 0 is below that of any number.
    key = ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) ^ -0x80000000).to(tl.uint32, bitcast=True)
    key = tl.where(at < count, key, 0)
    # Two bits at a time, the largest key that k entries reach; 0 if there are fewer. One sum counts for three trials.
    kth = tl.full([], 0, tl.uint32)
    digit = tl.full([], 1 << 30, tl.uint32)
    for _ in range(16):
        reached = (key >= kth + digit).to(tl.int64)
        reached += (key >= kth + 2 * digit).to(tl.int64) << 16
        reached += (key >= kth + 3 * digit).to(tl.int64) << 32
        counts = tl.sum(reached, 0)
        enough = ((counts & 0xFFFF) >= k).to(tl.uint32)
        enough += ((counts >> 16 & 0xFFFF) >= k).to(tl.uint32)
        enough += ((counts >> 32) >= k).to(tl.uint32)
        kth += enough * digit
        digit = digit >> 2
    above = key > kth
    tied = (key == kth) & (at < count)
    room = k - tl.sum(above.to(tl.int32), 0)
    keep = above | (tied & (tl.cumsum(tied.to(tl.int32), 0) <= room))
    to = tl.cumsum(keep.to(tl.int32), 0) - 1
    kept = tl.sum(keep.to(tl.int32), 0)
    least = tl.min(tl.where(keep, score, float("inf")), 0)
    tl.debug_barrier()  # everything is read before anything is written
    if LAST:
        tl.store(target_ptr + to, slot, mask=keep)
        tl.store(target_ptr + at, -1, mask=(at >= kept) & (at < width))
    else:
        tl.store(score_ptr + to, score, mask=keep)
        tl.store(slot_ptr + to, slot, mask=keep)
    tl.debug_barrier()
    return least, kept


@triton.jit
def _stream(
    q_ptr, w_ptr, k_ptr, scale_ptr, first_ptr, last_ptr, table_ptr, score_ptr, slot_ptr, count_ptr, out_ptr,
    queries, slots, k, width, table_stride,
    q_batch_stride, q_stride, q_head_stride, w_batch_stride, w_stride, k_batch_stride, k_stride,
    scale_batch_stride, scale_stride,
    J: tl.constexpr, I: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_S: tl.constexpr, CAPACITY: tl.constexpr,
    SCALED: tl.constexpr, PAGE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    part = tl.program_id(1)
    parts = tl.num_programs(1)
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
    lane_Q = tl.arange(0, BLOCK_Q)
    query_Q = group * BLOCK_Q + lane_Q
    real_Q = query_Q < queries
    first_Q = tl.load(first_ptr + batch * queries + query_Q, mask=real_Q, other=2147483647)
    last_Q = tl.load(last_ptr + batch * queries + query_Q, mask=real_Q, other=-1)
    # The tiles that any of these queries sees, in parts of whole tiles.
    lowest = tl.minimum(tl.min(first_Q, 0), slots) // BLOCK_S
    highest = tl.cdiv(tl.minimum(tl.max(last_Q, 0) + 1, slots), BLOCK_S)
    tiles = tl.maximum(highest - lowest, 0)
    begin = (lowest + tiles * part // parts) * BLOCK_S
    end = (lowest + tiles * (part + 1) // parts) * BLOCK_S

    list_Q = ((batch * queries + query_Q.to(tl.int64)) * parts + part) * CAPACITY
    floor_Q = tl.full([BLOCK_Q], -float("inf"), tl.float32)
    count_Q = tl.zeros([BLOCK_Q], tl.int32)
    CHUNK: tl.constexpr = CAPACITY // 2 // BLOCK_S * BLOCK_S  # keys that a list of k has room for
    for chunk in range(begin, end, CHUNK):
        for start in range(chunk, tl.minimum(chunk + CHUNK, end), BLOCK_S):
            score_SQ = score_tile(
                q_PI, w_P, first_Q, last_Q, k_ptr + batch * k_batch_stride, scale_ptr + batch * scale_batch_stride,
                table_ptr + batch * table_stride, start, slots, k_stride, scale_stride,
                J, I, BLOCK_Q, BLOCK_S, SCALED, PAGE,
            )  # fmt: skip
            hit_SQ = score_SQ > floor_Q[None, :]
            to_SQ = list_Q[None, :] + count_Q[None, :] + tl.cumsum(hit_SQ.to(tl.int32), 0) - 1
            slot_SQ = tl.broadcast_to((start + tl.arange(0, BLOCK_S))[:, None], [BLOCK_S, BLOCK_Q])
            tl.store(score_ptr + to_SQ, score_SQ, mask=hit_SQ)
            tl.store(slot_ptr + to_SQ, slot_SQ, mask=hit_SQ)
            count_Q += tl.sum(hit_SQ.to(tl.int32), 0)
        if tl.max(count_Q, 0) > CAPACITY - CHUNK:
            tl.debug_barrier()
            for i in range(BLOCK_Q):
                count = tl.sum(tl.where(lane_Q == i, count_Q, 0), 0)
                if count > k:
                    base = ((batch * queries + group * BLOCK_Q + i) * parts + part) * CAPACITY
                    least, kept = _cut(score_ptr + base, slot_ptr + base, out_ptr, count, k, width, CAPACITY, False)
                    floor_Q = tl.where(lane_Q == i, least, floor_Q)
                    count_Q = tl.where(lane_Q == i, kept, count_Q)
    tl.debug_barrier()
    for i in range(BLOCK_Q):
        row = batch * queries + group * BLOCK_Q + i
        if group * BLOCK_Q + i < queries:
            count = tl.sum(tl.where(lane_Q == i, count_Q, 0), 0)
            base = (row * parts + part) * CAPACITY
            if WHOLE:
                _cut(score_ptr + base, slot_ptr + base, out_ptr + row * width, count, k, width, CAPACITY, True)
            else:
                if count > k:
                    least, count = _cut(score_ptr + base, slot_ptr + base, out_ptr, count, k, width, CAPACITY, False)
                tl.store(count_ptr + row * parts + part, count)


@triton.jit
def _merge(
    score_ptr, slot_ptr, count_ptr, out_ptr, parts, k, width,
    CAPACITY: tl.constexpr, MERGED: tl.constexpr,
):  # fmt: skip
    """The k best of all parts of a row, in the order of the parts, which is that of positions."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, MERGED)
    part = at // k
    inside = part < parts
    count = tl.load(count_ptr + row * parts + part, mask=inside, other=0)
    inside = inside & (at % k < count)
    from_ptr = (row * parts + part) * CAPACITY + at % k
    score = tl.load(score_ptr + from_ptr, mask=inside, other=0.0)
    slot = tl.load(slot_ptr + from_ptr, mask=inside, other=0)
    to = row * parts * CAPACITY + tl.cumsum(inside.to(tl.int32), 0) - 1
    total = tl.sum(inside.to(tl.int32), 0)
    tl.debug_barrier()  # the parts' lists become one, in place
    tl.store(score_ptr + to, score, mask=inside)
    tl.store(slot_ptr + to, slot, mask=inside)
    tl.debug_barrier()
    base = row * parts * CAPACITY
    _cut(score_ptr + base, slot_ptr + base, out_ptr + row * width, total, k, width, MERGED, True)


def stream_select(
    q_BTJI: Tensor,
    w_BTJ: Tensor,
    k_BSI: Tensor,
    first_BT: Tensor,
    last_BT: Tensor,
    k: int,
    *,
    key_scale_BS: Tensor | None = None,
    pages: Pages | None = None,
    parts: int | None = None,
    block_q: int | None = None,
    block_s: int = 128,
    capacity: int | None = None,
    warps: int | None = None,
    stages: int | None = None,
    tile_bytes: int = 2**28,
) -> Tensor:
    """The k best slots of each query within [first, last]: int32 [B, T, min(k, S)], ascending, -1 padded.

    Arguments as in `index_scores.index_scores`, and:
        k: at most 2,048. key_scale_BS: of keys in e4m3.
        parts: into which the keys of a query are divided, at most 8; None chooses. No result depends on it, but by the
            last bits of scores where the tile of queries differs.
        capacity: entries of a list, a power of two, at least twice k and twice block_s.
        tile_bytes: lists of at most so many bytes exist at a time.

    Raises:
        ValueError: k, parts or capacity out of range.
    """
    batch, queries, heads, width = q_BTJI.shape
    slots = k_BSI.shape[1] if pages is None else pages.table_BP.shape[1] * pages.size
    capacity = capacity or max(2 * triton.next_power_of_2(k), 2 * block_s)
    if not 1 <= k <= LARGEST_K:
        raise ValueError(f"stream_select takes k from 1 to {LARGEST_K}, not {k}")
    if capacity & (capacity - 1) or capacity < 2 * max(k, block_s):
        raise ValueError(f"stream_select takes lists of a power of two from {2 * max(k, block_s)}, not {capacity}")
    if any(n < 16 or n & (n - 1) for n in (heads, width)):
        raise ValueError(f"stream_select takes heads and widths that are powers of two from 16, not {heads} x {width}")
    decode = queries * heads <= 64
    block_q = block_q or (max(1, triton.next_power_of_2(queries)) if decode else max(1, 128 // heads))
    warps, stages = warps or (4 if decode else 8), stages or (3 if decode else 2)
    picked = torch.empty(batch, queries, min(k, slots), dtype=torch.int32, device=q_BTJI.device)
    if picked.numel() == 0:
        return picked
    if parts is None:
        parts = max(1, min(MOST_PARTS, 2 * 132 // (batch * triton.cdiv(queries, block_q))))
    if not 1 <= parts <= MOST_PARTS:
        raise ValueError(f"stream_select takes 1 to {MOST_PARTS} parts, not {parts}")
    scale = w_BTJ if key_scale_BS is None else key_scale_BS
    tile = max(block_q, tile_bytes // (8 * batch * parts * capacity) // block_q * block_q)
    for start in range(0, queries, tile):
        n = min(tile, queries - start)
        rows = slice(start, start + n)
        q, w, first, last = q_BTJI[:, rows], w_BTJ[:, rows], first_BT[:, rows], last_BT[:, rows]
        first, last = first.contiguous(), last.contiguous()
        whole = n == queries or batch == 1
        out = picked[:, rows] if whole else picked.new_empty(batch, n, picked.shape[-1])
        scores = torch.empty(batch * n, parts, capacity, dtype=torch.float32, device=q.device)
        listed = torch.empty(batch * n, parts, capacity, dtype=torch.int32, device=q.device)
        count = torch.empty(batch * n, parts, dtype=torch.int32, device=q.device)
        _stream[(triton.cdiv(n, block_q), parts, batch)](
            q, w, k_BSI, scale, first, last, first if pages is None else pages.table_BP, scores, listed, count, out,
            n, slots, k, out.shape[-1], 0 if pages is None else pages.table_BP.stride(0),
            q.stride(0), q.stride(1), q.stride(2), w.stride(0), w.stride(1),
            k_BSI.stride(0) if pages is None else 0, k_BSI.stride(1),
            scale.stride(0) if pages is None else 0, scale.stride(1),
            J=heads, I=width, BLOCK_Q=block_q, BLOCK_S=block_s, CAPACITY=capacity,
            SCALED=key_scale_BS is not None, PAGE=0 if pages is None else pages.size, WHOLE=parts == 1,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
        if parts > 1:
            merged = triton.next_power_of_2(parts * k)
            _merge[(batch * n,)](
                scores, listed, count, out, parts, k, out.shape[-1], CAPACITY=capacity, MERGED=merged,
                num_warps=min(16, max(4, merged // 512)),
            )  # fmt: skip
        if not whole:
            picked[:, rows] = out
    return picked
