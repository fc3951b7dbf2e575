"""Operators in which a row's bits do not depend on the rows beside it: what the invariant mode runs on a GPU.

Each adds up in one order, however many rows there are. A product cuts its inner width into shares that its weight alone
decides, and adds them in their order; attention goes over a query's positions in shares of a fixed number, put together
in their order, where shares without positions change nothing; an expert's tile is of one size. So which rows share a
call, and in which places, only decides which program computes them. What is computed row by row anyway (`basic`,
`route`) stands beside these in `versions`. They cost speed where a tile for few rows, or cuBLAS, would be faster.
Read next: `glm5.serve.invariant`, which runs a model on them.
"""

# mypy: disallow-untyped-defs=false, disallow-incomplete-defs=false

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from glm5.kernels.pages import Pages
from glm5.kernels.topk import stable_topk
from glm5.kernels.triton.absorbed import _by_head
from glm5.kernels.triton.basic import add_rms_norm, rms_norm, store
from glm5.kernels.triton.indexing import index_scores, index_select
from glm5.kernels.triton.mla import _attend
from glm5.kernels.triton.moe import grouped_swiglu
from glm5.kernels.triton.routing import RUN, _logits, choose, route
from glm5.kernels.visibility import Visibility

LOG2E = 1.4426950408889634
# Of a product: its tiles with few rows and with many, the latter from so many tiles on. Both add up a share alike.
NARROW = dict(BLOCK_M=64, BLOCK_N=64, BLOCK_K=64, GROUP=1, num_warps=4, num_stages=4)
WIDE = dict(BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, GROUP=8, num_warps=8, num_stages=3)
WIDE_FROM = 128
MOST_SHARES, SHARED_TILES = 4, 384  # of the inner width at most; narrow tiles times shares, about
BY_HEAD = dict(BLOCK_T=64, BLOCK_X=64, BLOCK_Y=128)
EXPERTS = (64, 64, 64, 4, 4), (64, 128, 64, 4, 4)
QUERIES, KEYS = 4, 128  # of a tile of index scores
SHARE = 256  # positions of a share of attention
PARTS_UP_TO = 2**27  # numbers of the shares' results at a time


# Compiled alike for all numbers of rows and shares: a compilation for each would take a server minutes.
@triton.jit(do_not_specialize=["rows", "shares"])
def _linear(
    x_ptr, w_ptr, bias_ptr, out_ptr, rows, columns, K, x_stride, share, shares,
    APART: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """x w^T: `shares` sums of `share` columns each, added in their order, or, APART, one of them to out[i] in fp32."""
    tiles_m = tl.cdiv(rows, BLOCK_M)
    in_group = GROUP * tl.cdiv(columns, BLOCK_N)
    first = tl.program_id(0) // in_group * GROUP  # tiles of rows that share weights run side by side
    size = tl.minimum(tiles_m - first, GROUP)
    row_M = (first + tl.program_id(0) % in_group % size) * BLOCK_M + tl.arange(0, BLOCK_M)
    col_N = tl.program_id(0) % in_group // size * BLOCK_N + tl.arange(0, BLOCK_N)
    begin = tl.program_id(1) * share if APART else 0
    col_K = begin + tl.arange(0, BLOCK_K)
    real_M = (row_M < rows)[:, None]
    real_N = (col_N < columns)[:, None]
    x_MK = x_ptr + row_M[:, None].to(tl.int64) * x_stride + col_K[None, :]
    w_NK = w_ptr + col_N[:, None].to(tl.int64) * K + col_K[None, :]
    total_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for i in range(1 if APART else shares):
        acc_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(i * share, i * share + share, BLOCK_K):
            inside = (col_K < K - k)[None, :]
            x = tl.load(x_MK + k, mask=real_M & inside, other=0.0)
            w = tl.load(w_NK + k, mask=real_N & inside, other=0.0)
            acc_MN = tl.dot(x, tl.trans(w), acc=acc_MN, input_precision="ieee")
        total_MN += acc_MN
    target = out_ptr + row_M[:, None].to(tl.int64) * columns + col_N[None, :]
    if APART:
        target += tl.program_id(1).to(tl.int64) * rows * columns
    elif BIAS:
        total_MN += tl.load(bias_ptr + col_N, mask=col_N < columns, other=0.0).to(tl.float32)[None, :]
    tl.store(target, total_MN.to(out_ptr.dtype.element_ty), mask=real_M & (col_N < columns)[None, :])


@triton.jit(do_not_specialize=["shares"])
def _add_shares(part_ptr, bias_ptr, out_ptr, numbers, columns, shares, BIAS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numbers
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(shares):
        total += tl.load(part_ptr + i * numbers + at, mask=inside, other=0.0)
    if BIAS:
        total += tl.load(bias_ptr + at % columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)


def linear(x: Tensor, weight_OK: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """As `torch.nn.functional.linear`, [..., O] in x's dtype. weight_OK: contiguous, of x's dtype.

    The weight alone decides into how many shares the inner width is cut. Few rows give each share a program of its own,
    so that all multiprocessors read; many rows take wider tiles, whose programs add up all shares themselves. A number
    is the same sum either way.
    """
    rows = x.reshape(-1, x.shape[-1])
    (count, width), columns = rows.shape, weight_OK.shape[0]
    out = rows.new_empty(count, columns)
    if out.numel():
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        shares = max(1, min(MOST_SHARES, SHARED_TILES // triton.cdiv(columns, NARROW["BLOCK_N"]), width // 512))
        share = triton.cdiv(triton.cdiv(width, shares), NARROW["BLOCK_K"]) * NARROW["BLOCK_K"]
        shares = triton.cdiv(width, share)
        wide = triton.cdiv(count, WIDE["BLOCK_M"]) * triton.cdiv(columns, WIDE["BLOCK_N"]) >= WIDE_FROM
        tile, apart = WIDE if wide else NARROW, count <= NARROW["BLOCK_M"] and shares > 1
        bias = weight_OK if bias_O is None else bias_O
        into = rows.new_empty(shares, count, columns, dtype=torch.float32) if apart else out
        tiles = triton.cdiv(count, tile["BLOCK_M"]) * triton.cdiv(columns, tile["BLOCK_N"])
        _linear[tiles, shares if apart else 1](
            rows, weight_OK, bias, into, count, columns, width, rows.stride(0), share, shares,
            APART=apart, BIAS=bias_O is not None, **tile,
        )  # fmt: skip
        if apart:
            _add_shares[(triton.cdiv(out.numel(), 1024),)](
                into, bias, out, out.numel(), columns, shares, BIAS=bias_O is not None, BLOCK=1024
            )
    return out.view(*x.shape[:-1], columns)


def by_head(x_NHX: Tensor, weight_HXY: Tensor, rope_NHR: Tensor | None = None) -> Tensor:
    """As `absorbed.by_head`, for any number of tokens: X a multiple of 64, Y of 128, R a power of two."""
    (tokens, heads, width), columns = x_NHX.shape, weight_HXY.shape[2]
    rotary = 0 if rope_NHR is None else rope_NHR.shape[-1]
    rope = x_NHX if rope_NHR is None else rope_NHR
    out = x_NHX.new_empty(tokens, heads, columns + rotary)
    if tokens:
        grid = heads, columns // BY_HEAD["BLOCK_Y"] + (rotary > 0), triton.cdiv(tokens, BY_HEAD["BLOCK_T"])
        _by_head[grid](
            x_NHX, weight_HXY, out, rope, tokens,
            x_NHX.stride(0), x_NHX.stride(1), *weight_HXY.stride(), out.stride(0), out.stride(1),
            rope.stride(0), rope.stride(1),
            X=width, Y=columns, R=max(rotary, 1), num_warps=4, num_stages=3, **BY_HEAD,
        )  # fmt: skip
    return out


def router(
    x_ND: Tensor, weight_ED: Tensor, bias_E: Tensor, top_k: int, *, normalise: bool, scaling: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `routing.router`: the width is divided into as many shares for one token as for many."""
    if x_ND.dtype == torch.float32:  # which is not the sum of a few products of tensor cores
        return choose(linear(x_ND, weight_ED)[None], bias_E, top_k, normalise, scaling)
    (tokens, width), experts = x_ND.shape, weight_ED.shape[0]
    tile = dict(BLOCK_T=64, BLOCK_E=64, BLOCK_D=64)
    shares = triton.cdiv(width, RUN * 64)
    parts = torch.empty(shares, tokens, experts, dtype=torch.float32, device=x_ND.device)
    if tokens:
        _logits[(triton.cdiv(tokens, 64), triton.cdiv(experts, 64), shares)](
            x_ND, weight_ED, parts, tokens, width, x_ND.stride(0),
            E=experts, STEPS=RUN, RUN=RUN, num_warps=4, num_stages=3, **tile,
        )  # fmt: skip
    return choose(parts, bias_E, top_k, normalise, scaling)


@triton.jit
def _together(part_ptr, lse_ptr, out_ptr, heads, shares, C: tl.constexpr):
    """out = the shares' results weighted by 2^lse, added in the order of the shares."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    top = -float("inf")
    for share in range(shares):
        top = tl.maximum(top, tl.load(lse_ptr + (row * shares + share) * heads + head))
    shift = tl.where(top == -float("inf"), 0.0, top)
    col_C = tl.arange(0, C)
    acc_C = tl.zeros([C], tl.float32)
    total = 0.0
    for share in range(shares):
        at = (row * shares + share) * heads + head
        weight = tl.exp2(tl.load(lse_ptr + at) - shift)
        total += weight
        acc_C += weight * tl.load(part_ptr + at * C + col_C)
    acc_C = acc_C / tl.where(total > 0.0, total, 1.0)
    tl.store(out_ptr + (row * heads + head) * C + col_C, acc_C.to(out_ptr.dtype.element_ty))


def attend(
    q_NHX: Tensor, rows_RX: Tensor, index_NK: Tensor, value_dim: int, scale: float, share: int | None = None
) -> Tensor:
    """softmax(scale * q.k) v over the chosen rows: keys are whole rows, values their first `value_dim` columns.

    Args:
        q_NHX: contiguous columns. rows_RX: contiguous columns, of the same dtype. index_NK: rows of each query, int32;
            what follows the first -1 is -1. share: positions that are attended to by one program; None is `SHARE`.

    Returns:
        [N, H, value_dim] in q's dtype, zeros where nothing is chosen.
    """
    tokens, heads, rotary = *q_NHX.shape[:2], q_NHX.shape[2] - value_dim
    share = SHARE if share is None else share
    # At least two shares, so that one is not put together otherwise; in powers of two, so that few kernels are built.
    shares = max(2, triton.next_power_of_2(triton.cdiv(index_NK.shape[1], share)))
    index_NK = F.pad(index_NK, (0, shares * share - index_NK.shape[1]), value=-1).contiguous()
    wide = value_dim > 128
    block_h, block_k = min(64, max(16, triton.next_power_of_2(heads))), 32 if wide else 64
    out = q_NHX.new_empty(tokens, heads, value_dim)
    most = max(1, PARTS_UP_TO // (shares * heads * value_dim))
    for start in range(0, tokens, most):
        q, index = q_NHX[start : start + most], index_NK[start : start + most]
        n = len(q)
        part = q.new_empty(n, shares, heads, value_dim, dtype=torch.float32)
        lse = q.new_empty(n, shares, heads, dtype=torch.float32)
        _attend[(n, shares, triton.cdiv(heads, block_h))](
            q, rows_RX, index, part, lse, heads, index.shape[1], n, scale * LOG2E,
            q.stride(0), q.stride(1), 0, rows_RX.stride(0),
            C=value_dim, R=rotary, SPLITS=shares, BLOCK_H=block_h, BLOCK_K=block_k,
            num_warps=8 if wide else 4, num_stages=3 if wide else 2,
        )  # fmt: skip
        _together[(n, heads)](part, lse, out[start : start + most], heads, shares, C=value_dim)
    return out


def absorbed_attention(
    q_nope: Tensor, q_rope: Tensor, up: Tensor, rows: Tensor, selected: Tensor, scale: float, pages: Pages | None
) -> Tensor:
    """As MLA's `_absorbed`: every head's mixture of values, [B, T, H, V]."""
    (batch, queries, _, nope), latent = q_nope.shape, up.shape[2]
    if pages is not None:
        index = pages.rows(selected)
    else:
        begin = torch.arange(batch, device=selected.device)[:, None, None] * rows.shape[1]
        index = torch.where(selected < 0, -1, selected + begin)
    q = by_head(q_nope.flatten(0, 1), up[:, :nope], q_rope.flatten(0, 1))
    pool = rows[0] if pages is not None else rows.reshape(-1, rows.shape[-1])
    mixed = attend(q, pool, index.flatten(0, 1).to(torch.int32), latent, scale)
    return by_head(mixed, up[:, nope:].transpose(1, 2)).unflatten(0, (batch, queries))


def select(
    q: Tensor, w: Tensor, keys: Tensor, visible: Visibility, k: int, pages: Pages | None, *, topk: Callable[..., Tensor]
) -> Tensor:
    """As `glm5.kernels.indexer.index_select`. topk: exact, as `triton.index_select` takes it."""
    keys = keys[:, : visible.slots] if pages is None else keys
    first, last = visible.narrow
    scores = partial(index_scores, block_q=QUERIES, block_s=KEYS, warps=4, stages=2)
    return index_select(q, w, keys, first, last, min(k, visible.slots), topk=topk, scores=scores, pages=pages)


def plain_topk(scores_NS: Tensor, k: int, first_N: Tensor, last_N: Tensor, out: Tensor | None = None) -> Tensor:
    """The exact top-k by sorting, of the slots inside the bounds."""
    slot_S = torch.arange(scores_NS.shape[1], device=scores_NS.device)
    seen_NS = (slot_S >= first_N[:, None]) & (slot_S <= last_N[:, None])
    chosen = stable_topk(scores_NS.masked_fill(~seen_NS, -torch.inf), k)
    return chosen if out is None else out.copy_(chosen)


def versions(topk: Callable[..., Tensor] = plain_topk) -> dict[str, Callable[..., Any]]:
    """The operators by the names that `dispatch.pick` is asked for; of others, their specification runs.

    Args:
        topk: exact, so that any version gives the same.
    """
    return {
        "rms_norm": rms_norm,
        "add_rms_norm": add_rms_norm,
        "store": store,
        "route": route,
        "router": router,
        "index_select": partial(select, topk=topk),
        "absorbed_attention": absorbed_attention,
        "grouped_swiglu": partial(grouped_swiglu, tiles=EXPERTS, wide=False),
    }


def refuses(widths: dict[str, int]) -> str | None:
    """Why a model's widths cannot be taken, or None. widths: latent, rotary, nope, value, index_heads, index_width."""
    for name in ("latent", "rotary", "index_heads", "index_width"):
        if widths[name] < 16 or widths[name] & (widths[name] - 1):
            return f"takes powers of two from 16, not {name}={widths[name]}"
    for name, step in (("nope", 64), ("latent", 128), ("value", 128)):
        if widths[name] % step:
            return f"takes multiples of {step}, not {name}={widths[name]}"
    return None
