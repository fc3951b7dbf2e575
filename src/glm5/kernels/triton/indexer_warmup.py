"""The indexer's loss over whole intervals, for the dense warm-up, in Triton: a tile of queries at a time.

Expanded form: one key head per query head. First each head's log-sum-exp; then, tile by tile, the attention's
distribution averaged over heads beside the indexer's scores; then the KL by rows, whose slope replaces the scores; then
the gradients of index queries and weights by query tiles, and of index keys by key tiles. Every sum has one order. Read
next: `glm5.kernels.indexer_loss`, the specification.
"""

# mypy: disallow-untyped-defs=false, disallow-incomplete-defs=false

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.kernels.topk import stable_topk

LOG2E = 1.4426950408889634
SCRATCH = 1 << 29  # bytes of scores and distribution that are held at a time


@triton.jit
def _log_sum_exp(
    q_ptr, k_ptr, first_ptr, last_ptr, lse_ptr, top_ptr,
    queries, heads, slots, scale_log2, q_batch, q_row, q_head, k_batch, k_row, k_head,
    X: tl.constexpr, XP: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """lse (log2 units) and largest scaled product of every query and head: [B, H, T]."""
    batch = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1)
    t = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    x = tl.arange(0, XP)
    first = tl.load(first_ptr + batch * queries + t, mask=t < queries, other=slots)
    last = tl.load(last_ptr + batch * queries + t, mask=t < queries, other=-1)
    q_at = q_ptr + batch * q_batch + head * q_head + t[:, None].to(tl.int64) * q_row + x[None, :]
    q = tl.load(q_at, mask=(t < queries)[:, None] & (x < X)[None, :], other=0.0)
    top = tl.full([BLOCK_Q], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    begin = tl.min(first, 0) // BLOCK_S * BLOCK_S
    for start in range(begin, tl.minimum(tl.max(last, 0) + 1, slots), BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        k_at = k_ptr + batch * k_batch + head * k_head + s[None, :].to(tl.int64) * k_row + x[:, None]
        k = tl.load(k_at, mask=(s < slots)[None, :] & (x < X)[:, None], other=0.0)
        seen = (s[None, :] >= first[:, None]) & (s[None, :] <= last[:, None])
        logit = tl.where(seen, tl.dot(q, k) * scale_log2, -float("inf"))
        new = tl.maximum(top, tl.max(logit, 1))
        shift = tl.where(new == -float("inf"), 0.0, new)
        total = total * tl.exp2(top - shift) + tl.sum(tl.exp2(logit - shift[:, None]), 1)
        top = new
    to = (batch * heads + head) * queries + t
    safe = tl.where(total > 0.0, total, 1.0)
    tl.store(lse_ptr + to, tl.where(total > 0.0, top + tl.log2(safe), 0.0), mask=t < queries)
    tl.store(top_ptr + to, top, mask=t < queries)


@triton.jit
def _distribution(
    q_ptr, k_ptr, iq_ptr, iw_ptr, ik_ptr, first_ptr, last_ptr, lse_ptr, target_ptr, score_ptr,
    begin, count, queries, heads, slots, scale_log2, q_row, q_head, k_row, k_head, ik_row,
    X: tl.constexpr, XP: tl.constexpr, J: tl.constexpr, I: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Of one sequence's queries begin .. begin + count: the attention's mean distribution, and the index scores."""
    row = tl.program_id(1) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    t = begin + row
    s = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    real = row < count
    first = tl.load(first_ptr + t, mask=real, other=slots)
    last = tl.load(last_ptr + t, mask=real, other=-1)
    seen = (s[None, :] >= first[:, None]) & (s[None, :] <= last[:, None])
    to = row[:, None].to(tl.int64) * slots + s[None, :]
    inside = real[:, None] & (s < slots)[None, :]
    if tl.max(seen.to(tl.int32)) == 0:
        tl.store(target_ptr + to, tl.zeros([BLOCK_Q, BLOCK_S], tl.float32), mask=inside)
        tl.store(score_ptr + to, tl.full([BLOCK_Q, BLOCK_S], -float("inf"), tl.float32), mask=inside)
        return
    x = tl.arange(0, XP)
    target = tl.zeros([BLOCK_Q, BLOCK_S], tl.float32)
    for head in range(heads):
        q_at = q_ptr + head * q_head + t[:, None].to(tl.int64) * q_row + x[None, :]
        q = tl.load(q_at, mask=real[:, None] & (x < X)[None, :], other=0.0)
        k_at = k_ptr + head * k_head + s[None, :].to(tl.int64) * k_row + x[:, None]
        k = tl.load(k_at, mask=(s < slots)[None, :] & (x < X)[:, None], other=0.0)
        lse = tl.load(lse_ptr + head * queries + t, mask=real, other=0.0)
        target += tl.exp2(tl.where(seen, tl.dot(q, k) * scale_log2 - lse[:, None], -float("inf")))
    i = tl.arange(0, I)
    ik = tl.load(ik_ptr + s[None, :].to(tl.int64) * ik_row + i[:, None], mask=(s < slots)[None, :], other=0.0)
    score = tl.zeros([BLOCK_Q, BLOCK_S], tl.float32)
    for j in range(J):
        iq = tl.load(iq_ptr + (t[:, None].to(tl.int64) * J + j) * I + i[None, :], mask=real[:, None], other=0.0)
        w = tl.load(iw_ptr + t * J + j, mask=real, other=0.0).to(tl.float32)
        score += tl.maximum(tl.dot(iq, ik), 0.0) * w[:, None]
    tl.store(target_ptr + to, target / heads, mask=inside)
    tl.store(score_ptr + to, tl.where(seen, score, -float("inf")), mask=inside)


@triton.jit
def _slope(target_ptr, score_ptr, kl_ptr, slots, BLOCK: tl.constexpr):
    """KL of a row; its slope, softmax(score) - target, replaces the scores."""
    row = tl.program_id(0).to(tl.int64)
    top = -float("inf")
    total = 0.0
    for start in range(0, slots, BLOCK):
        s = start + tl.arange(0, BLOCK)
        score = tl.load(score_ptr + row * slots + s, mask=s < slots, other=-float("inf"))
        new = tl.maximum(top, tl.max(score, 0))
        shift = tl.where(new == -float("inf"), 0.0, new)
        total = total * tl.exp(top - shift) + tl.sum(tl.exp(score - shift), 0)
        top = new
    lse = tl.where(total > 0.0, top + tl.log(tl.where(total > 0.0, total, 1.0)), 0.0)
    kl = 0.0
    for start in range(0, slots, BLOCK):
        s = start + tl.arange(0, BLOCK)
        score = tl.load(score_ptr + row * slots + s, mask=s < slots, other=-float("inf"))
        target = tl.load(target_ptr + row * slots + s, mask=s < slots, other=0.0)
        guess = tl.where(score == -float("inf"), 0.0, score - lse)
        log = tl.log(tl.where(target > 0.0, target, 1.0))
        kl += tl.sum(tl.where(target > 0.0, target * (log - guess), 0.0), 0)
        slope = tl.where(score == -float("inf"), 0.0, tl.exp(guess) - target)
        tl.store(score_ptr + row * slots + s, slope, mask=s < slots)
    tl.store(kl_ptr + row, kl)


@triton.jit
def _query_gradients(
    iq_ptr, iw_ptr, ik_ptr, first_ptr, last_ptr, slope_ptr, diq_ptr, diw_ptr, begin, count, slots, ik_row,
    J: tl.constexpr, I: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    j = tl.program_id(0)
    row = tl.program_id(1) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    t = begin + row
    real = row < count
    i = tl.arange(0, I)
    iq = tl.load(iq_ptr + (t[:, None].to(tl.int64) * J + j) * I + i[None, :], mask=real[:, None], other=0.0)
    w = tl.load(iw_ptr + t * J + j, mask=real, other=0.0).to(tl.float32)
    from_slot = tl.min(tl.load(first_ptr + t, mask=real, other=slots), 0) // BLOCK_S * BLOCK_S
    past = tl.minimum(tl.max(tl.load(last_ptr + t, mask=real, other=-1), 0) + 1, slots)
    diq = tl.zeros([BLOCK_Q, I], tl.float32)
    diw = tl.zeros([BLOCK_Q], tl.float32)
    for start in range(from_slot, past, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        ik = tl.load(ik_ptr + s[:, None].to(tl.int64) * ik_row + i[None, :], mask=(s < slots)[:, None], other=0.0)
        at = slope_ptr + row[:, None].to(tl.int64) * slots + s[None, :]
        slope = tl.load(at, mask=real[:, None] & (s < slots)[None, :], other=0.0)
        dots = tl.dot(iq, tl.trans(ik))
        diw += tl.sum(tl.maximum(dots, 0.0) * slope, 1)
        slope = tl.where(dots > 0.0, slope * w[:, None], 0.0).to(ik.dtype)
        diq = tl.dot(slope, ik, acc=diq)
    tl.store(diq_ptr + (t[:, None].to(tl.int64) * J + j) * I + i[None, :], diq, mask=real[:, None])
    tl.store(diw_ptr + t * J + j, diw, mask=real)


@triton.jit
def _key_gradients(
    iq_ptr, iw_ptr, ik_ptr, first_ptr, last_ptr, slope_ptr, dik_ptr, begin, count, slots, ik_row,
    J: tl.constexpr, I: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """dik += what these queries give; one program owns its keys."""
    s = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    i = tl.arange(0, I)
    ik = tl.load(ik_ptr + s[:, None].to(tl.int64) * ik_row + i[None, :], mask=(s < slots)[:, None], other=0.0)
    to = dik_ptr + s[:, None].to(tl.int64) * I + i[None, :]
    dik = tl.load(to, mask=(s < slots)[:, None], other=0.0)
    for start in range(0, count, BLOCK_Q):
        row = start + tl.arange(0, BLOCK_Q)
        t = begin + row
        real = row < count
        first = tl.load(first_ptr + t, mask=real, other=slots)
        last = tl.load(last_ptr + t, mask=real, other=-1)
        seen = (s[:, None] >= first[None, :]) & (s[:, None] <= last[None, :])
        if tl.max(seen.to(tl.int32)) > 0:
            at = slope_ptr + row[None, :].to(tl.int64) * slots + s[:, None]
            slope_SQ = tl.load(at, mask=real[None, :] & (s < slots)[:, None], other=0.0)
            for j in range(J):
                iq_at = iq_ptr + (t[:, None].to(tl.int64) * J + j) * I + i[None, :]
                iq = tl.load(iq_at, mask=real[:, None], other=0.0)
                w = tl.load(iw_ptr + t * J + j, mask=real, other=0.0).to(tl.float32)
                dots = tl.dot(ik, tl.trans(iq))
                slope = tl.where(dots > 0.0, slope_SQ * w[None, :], 0.0).to(ik.dtype)
                dik = tl.dot(slope, iq, acc=dik)
    tl.store(to, dik, mask=(s < slots)[:, None])


# (queries, slots, warps, stages) of the four kernels that work on tiles.
LSE, TARGET, QUERY, KEY = (128, 64, 8, 2), (128, 64, 8, 2), (64, 128, 4, 2), (64, 64, 4, 2)


def interval_loss(
    iq_BTJI: Tensor,
    iw_BTJ: Tensor,
    ik_BSI: Tensor,
    q_BTHX: Tensor,
    k_BSHX: Tensor,
    first_BT: Tensor,
    last_BT: Tensor,
    slots: int,
    scale: float,
    topk: int,
    *,
    grad: bool = True,
    select: Callable[[Tensor, int], Tensor] = stable_topk,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """sum over queries of KL(mean attention || softmax of index scores) over [first, last], and its gradients.

    Args:
        iq_BTJI, iw_BTJ, ik_BSI: as in `indexer.index_scores`; I is a power of two from 16. q_BTHX, k_BSHX: expanded
            queries and keys, contiguous columns. first_BT, last_BT: inclusive bounds, below `slots`. select: a top-k.

    Returns:
        kl, the attention's mass on the indexer's own top-k, logit_max_H; diq_BTJI, diw_BTJ, dik_BSI fp32 or None.
    """
    batch, queries, heads, width = q_BTHX.shape
    index_heads, index_width = iq_BTJI.shape[2:]
    new = iq_BTJI.new_empty
    first, last = (x.to(torch.int32).contiguous() for x in (first_BT, last_BT))
    iq, iw = iq_BTJI.contiguous(), iw_BTJ.contiguous()
    lse, top = (new((batch, heads, queries), dtype=torch.float32) for _ in range(2))
    padded = max(16, triton.next_power_of_2(width))
    bq, bs, warps, stages = LSE
    _log_sum_exp[(triton.cdiv(queries, bq), heads, batch)](
        q_BTHX, k_BSHX, first, last, lse, top, queries, heads, slots, scale * LOG2E,
        q_BTHX.stride(0), q_BTHX.stride(1), q_BTHX.stride(2), k_BSHX.stride(0), k_BSHX.stride(1), k_BSHX.stride(2),
        X=width, XP=padded, BLOCK_Q=bq, BLOCK_S=bs, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    diq = new(iq_BTJI.shape if grad else 0, dtype=torch.float32)
    diw = new(iw_BTJ.shape if grad else 0, dtype=torch.float32)
    dik = torch.zeros(ik_BSI.shape if grad else 0, dtype=torch.float32, device=iq.device)
    kl, mass = new(batch, queries, dtype=torch.float32), torch.zeros((), device=iq.device)
    tile = min(queries, max(1, SCRATCH // (8 * slots)))
    tile = tile if tile < 128 else tile // 128 * 128
    target, score = (new((tile, slots), dtype=torch.float32) for _ in range(2))
    widths = {"J": index_heads, "I": index_width}
    for b in range(batch):
        for begin in range(0, queries, tile):
            count = min(tile, queries - begin)
            bounds = (first[b], last[b])
            bq, bs, warps, stages = TARGET
            _distribution[(triton.cdiv(slots, bs), triton.cdiv(count, bq))](
                q_BTHX[b], k_BSHX[b], iq[b], iw[b], ik_BSI[b], *bounds, lse[b], target, score,
                begin, count, queries, heads, slots, scale * LOG2E,
                q_BTHX.stride(1), q_BTHX.stride(2), k_BSHX.stride(1), k_BSHX.stride(2), ik_BSI.stride(1),
                X=width, XP=padded, **widths, BLOCK_Q=bq, BLOCK_S=bs, num_warps=warps, num_stages=stages,
            )  # fmt: skip
            picked = select(score[:count], topk)
            chosen = target[:count].gather(1, picked.clamp(min=0).long())
            mass += chosen.masked_fill_(picked < 0, 0.0).sum()
            _slope[(count,)](target, score, kl[b, begin : begin + count], slots, BLOCK=4096, num_warps=8)
            if not grad:
                continue
            bq, bs, warps, stages = QUERY
            _query_gradients[(index_heads, triton.cdiv(count, bq))](
                iq[b], iw[b], ik_BSI[b], *bounds, score, diq[b], diw[b], begin, count, slots, ik_BSI.stride(1),
                **widths, BLOCK_Q=bq, BLOCK_S=bs, num_warps=warps, num_stages=stages,
            )  # fmt: skip
            bq, bs, warps, stages = KEY
            _key_gradients[(triton.cdiv(slots, bs),)](
                iq[b], iw[b], ik_BSI[b], *bounds, score, dik[b], begin, count, slots, ik_BSI.stride(1),
                **widths, BLOCK_Q=bq, BLOCK_S=bs, num_warps=warps, num_stages=stages,
            )  # fmt: skip
    logit_max = top.amax((0, 2)) / LOG2E
    return kl.sum(), mass, logit_max, *((diq, diw, dik) if grad else (None, None, None))
