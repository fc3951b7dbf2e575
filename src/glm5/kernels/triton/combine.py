"""Shares of an attention's positions put together, in the order of the shares. Read next: `mla`."""

# mypy: disallow-untyped-defs=false, disallow-incomplete-defs=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

LOG2E = 1.4426950408889634


@triton.jit
def _combine(
    part_ptr, part_lse_ptr, out_ptr, lse_ptr, heads, C: tl.constexpr, SPLITS: tl.constexpr, PADDED: tl.constexpr
):
    """out = sum over splits of 2^(lse_split - lse) out_split, in the order of the splits."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split_P = tl.arange(0, PADDED)
    real_P = split_P < SPLITS
    lse_P = tl.load(part_lse_ptr + (row * SPLITS + split_P) * heads + head, mask=real_P, other=-float("inf"))
    top = tl.max(lse_P, 0)
    shift = tl.where(top == -float("inf"), 0.0, top)
    total = tl.sum(tl.exp2(lse_P - shift), 0)
    safe = tl.where(total == 0.0, 1.0, total)  # a NaN stays one
    col_C = tl.arange(0, C)
    acc_C = tl.zeros([C], tl.float32)
    for split in tl.static_range(SPLITS):
        at = (row * SPLITS + split) * heads + head
        weight = tl.exp2(tl.load(part_lse_ptr + at) - shift) / safe
        acc_C += weight * tl.load(part_ptr + at * C + col_C)
    at = row * heads + head
    tl.store(out_ptr + at * C + col_C, acc_C.to(out_ptr.dtype.element_ty))
    tl.store(lse_ptr + at, tl.where(total == 0.0, -float("inf"), (shift + tl.log2(safe)) * 0.6931471805599453))


def combine(part_NPHC: Tensor, lse_NPH: Tensor, out: Tensor, lse: Tensor) -> None:
    """Sum shares, fp32 with log-sum-exps in log2, into out [..., H, C] and the natural log-sum-exp [..., H]."""
    rows, splits, heads, width = part_NPHC.shape
    _combine[(rows, heads)](
        part_NPHC, lse_NPH, out, lse, heads, C=width, SPLITS=splits, PADDED=triton.next_power_of_2(splits)
    )
