"""A tile of index scores, which `index_scores` stores and `select` keeps the best of. Read next: `indexing`."""

# mypy: disallow-untyped-defs=false, disallow-incomplete-defs=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def score_tile(
    q_PI, w_P, first_Q, last_Q, k_ptr, scale_ptr, table_ptr, start, slots, k_stride, scale_stride,
    J: tl.constexpr, I: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_S: tl.constexpr, SCALED: tl.constexpr,
    PAGE: tl.constexpr,
):  # fmt: skip
    """Scores [S, Q] of slots start + [0, BLOCK_S) of one sequence, whose keys, scales and pages begin at the pointers;
    -inf where a query does not look."""
    s_S = start + tl.arange(0, BLOCK_S)
    col_I = tl.arange(0, I)
    row_S = s_S.to(tl.int64)
    if PAGE:
        page_S = tl.load(table_ptr + s_S // PAGE, mask=s_S < slots, other=0)
        row_S = page_S * PAGE + s_S % PAGE
    k_SI = tl.load(k_ptr + row_S[:, None] * k_stride + col_I[None, :], mask=(s_S < slots)[:, None], other=0.0)
    dots_SP = tl.dot(k_SI, tl.trans(q_PI), input_precision="ieee")
    weighted_SP = tl.maximum(dots_SP, 0.0) * w_P[None, :]
    score_SQ = tl.sum(tl.reshape(weighted_SP, [BLOCK_S, BLOCK_Q, J]), 2)
    if SCALED:
        score_SQ *= tl.load(scale_ptr + row_S * scale_stride, mask=s_S < slots, other=0.0)[:, None]
    visible_SQ = (s_S[:, None] >= first_Q[None, :]) & (s_S[:, None] <= last_Q[None, :])
    return tl.where(visible_SQ, score_SQ, -float("inf"))
