"""The output projection and its loss on a GPU: products by cuBLAS, softmax and its gradient by two small kernels.

Tokens go in blocks whose logits, kept in the inputs' dtype, fit a budget. Each piece of a row is kept relative to its
own maximum, so that what carries probability is kept to a few thousandths, while log-probabilities and entropies come
from the fp32 products. The gradient overwrites the logits in place; both products that use it then run over the whole
vocabulary at once. Source: `glm5.kernels.cross_entropy`, the specification; read it next.
"""

# mypy: disallow-untyped-defs=false, disallow-incomplete-defs=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.kernels.cross_entropy import product

PIECE = 8192  # columns that one program takes
STRIPE = 16384  # columns of one fp32 product
BUDGET = 1 << 30  # bytes of logits, kept and fp32


@triton.jit
def _scan(
    logits_ptr, target_ptr, kept_ptr, peak_ptr, sum_ptr, mean_ptr, picked_ptr,
    first, width, pieces, logits_stride, kept_stride,
    KEEP: tl.constexpr, ENTROPY: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Of one piece: its maximum m, sum exp(x - m), sum exp(x - m) (x - m), the target's logit; keep x - m."""
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    at = piece * PIECE + tl.arange(0, PIECE)
    x = tl.load(logits_ptr + row * logits_stride + at, mask=at < width, other=-float("inf"))
    peak = tl.max(x, 0)
    x = x - tl.where(peak == -float("inf"), 0.0, peak)
    weight = tl.exp(x)
    cell = row * pieces + first // PIECE + piece
    tl.store(peak_ptr + cell, peak)
    tl.store(sum_ptr + cell, tl.sum(weight, 0))
    if ENTROPY:
        tl.store(mean_ptr + cell, tl.sum(tl.where(weight > 0.0, weight * x, 0.0), 0))
    if KEEP:
        tl.store(kept_ptr + row * kept_stride + first + at, x.to(kept_ptr.dtype.element_ty), mask=at < width)
    target = tl.load(target_ptr + row) - first
    if (target >= piece * PIECE) & (target < tl.minimum((piece + 1) * PIECE, width)):
        tl.store(picked_ptr + row, tl.load(logits_ptr + row * logits_stride + target))


@triton.jit
def _differentiate(
    kept_ptr, target_ptr, peak_ptr, lse_ptr, weight_ptr, width, pieces, kept_stride, PIECE: tl.constexpr
):  # fmt: skip
    """kept = weight * (softmax - onehot), in place."""
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    at = piece * PIECE + tl.arange(0, PIECE)
    shift = tl.load(peak_ptr + row * pieces + piece) - tl.load(lse_ptr + row)
    here = kept_ptr + row * kept_stride + at
    x = tl.load(here, mask=at < width, other=-float("inf")).to(tl.float32)
    p = tl.exp(x + shift) - tl.where(at == tl.load(target_ptr + row), 1.0, 0.0)
    tl.store(here, (p * tl.load(weight_ptr + row)).to(kept_ptr.dtype.element_ty), mask=at < width)


@triton.jit
def _scale(x_ptr, factor_ptr, out_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < count, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, (x * tl.load(factor_ptr)).to(out_ptr.dtype.element_ty), mask=at < count)


def scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """x times a factor on the device, in fp32, rounded once: torch would round the factor to x's dtype first."""
    x, factor = x.contiguous(), factor.float()
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if x.numel():
        _scale[(triton.cdiv(x.numel(), 4096),)](x, factor, out, x.numel(), BLOCK=4096, num_warps=8)
    return out


def linear_cross_entropy(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    weights_N: Tensor | None,
    *,
    with_entropy: bool = False,
    grad_hidden: bool = False,
    grad_weight: bool = False,
    budget: int = BUDGET,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """log p(target), entropy, and the gradients of -sum(weights * log p).

    Args:
        hidden_ND, weight_VD: bf16, fp16 or fp32, contiguous columns. targets_N: int64 in [0, V).
        weights_N: fp32; needed for gradients.
        budget: bytes of logits that may be held at a time.

    Returns:
        logprobs_N and entropy_N (or None), fp32; grad_hidden_ND fp32 and grad_weight_VD, or None where not asked for.
        The latter has weight's dtype where the tokens fit one or two blocks, and else is summed in fp32.
    """
    (n, width), vocab = hidden_ND.shape, weight_VD.shape[0]
    keep = grad_hidden or grad_weight
    stripe, pieces = min(STRIPE, vocab), triton.cdiv(vocab, PIECE)
    each = vocab * hidden_ND.element_size() * keep + stripe * 4
    blocks = max(1, triton.cdiv(n * each, budget))
    tokens = max(1, triton.cdiv(n, blocks))
    new = hidden_ND.new_empty
    logprobs_N = new(n, dtype=torch.float32)
    entropy_N = new(n, dtype=torch.float32) if with_entropy else None
    grad_hidden_ND = new((n, width), dtype=torch.float32) if grad_hidden else None
    sum_dtype = weight_VD.dtype if blocks <= 2 else torch.float32
    grad_weight_VD = new((vocab, width), dtype=sum_dtype) if grad_weight else None
    logits = new(tokens * stripe, dtype=torch.float32)
    kept_nV = new((tokens if keep else 0, vocab))
    peak, total, mean = (new((tokens, pieces), dtype=torch.float32) for _ in range(3))
    for start in range(0, n, tokens):
        part = slice(start, min(start + tokens, n))
        hidden_nD, targets_n = hidden_ND[part], targets_N[part]
        rows = hidden_nD.shape[0]
        picked_n = logprobs_N[part]
        for first in range(0, vocab, stripe):
            columns = min(stripe, vocab - first)
            logits_nv = logits[: rows * columns].view(rows, columns)
            product(hidden_nD, weight_VD[first : first + columns].T, out=logits_nv)
            _scan[(rows, triton.cdiv(columns, PIECE))](
                logits_nv, targets_n, kept_nV, peak, total, mean, picked_n,
                first, columns, pieces, columns, vocab,
                KEEP=keep, ENTROPY=with_entropy, PIECE=PIECE, num_warps=8,
            )  # fmt: skip
        peak_n, shares = peak[:rows].amax(-1), (peak[:rows] - peak[:rows].amax(-1, keepdim=True)).exp()
        sum_n = (total[:rows] * shares).sum(-1)
        lse_n = peak_n + sum_n.log()
        if entropy_N is not None:  # log sum - E[x - peak], and x - peak = (x - own peak) + (own peak - peak)
            moved = torch.where(shares > 0, (peak[:rows] - peak_n[:, None]) * total[:rows] + mean[:rows], 0.0)
            entropy_N[part] = sum_n.log() - (moved * shares).sum(-1) / sum_n
        picked_n.sub_(lse_n)
        if not keep or weights_N is None:
            continue
        error_nV = kept_nV[:rows]
        _differentiate[(rows, pieces)](
            error_nV, targets_n, peak, lse_n, weights_N[part], vocab, pieces, vocab, PIECE=PIECE, num_warps=8
        )
        if grad_hidden_ND is not None:
            product(error_nV, weight_VD, out=grad_hidden_ND[part])
        if grad_weight_VD is not None:
            product(error_nV.T, hidden_nD, out=grad_weight_VD, add=start > 0)
    return logprobs_N, entropy_N, grad_hidden_ND, grad_weight_VD
