"""The router in Triton, in two launches: logits in fp32 from bf16 tokens; the best experts in order, and their weights.

**Logits.** The router's weights are fp32, and no tensor core multiplies those. Each is the sum of three bf16 numbers,
hi + mid + lo, to its last bit, so three bf16 products that add up in fp32 give fp32's result at many times its speed.
Where programs are few the width is divided over them too, and the next launch adds the shares in a fixed order. With
many tokens the weights are divided into their thirds once, by a launch of its own, and tiles come by the copy engine.
**Choice.** A program takes a token: one register row of all experts, from which the best is taken as often as a token
has experts. Source: report section 2.1, DeepSeek-V3. Read next: `moe`; `glm5.kernels.moe.route` for the specification.
"""

# mypy: disallow-untyped-defs=false, disallow-incomplete-defs=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from glm5.kernels.triton.early import begin, early

FEW = 256  # tokens up to which programs divide the weights themselves
BLOCK_D = 64
RUN = 6  # steps of as many columns that the tensor cores add by themselves


@triton.jit
def _head(x, KIND: tl.constexpr):
    """The first bits of fp32 x, in fp32 and in KIND; what remains is exact. Cutting off is faster than rounding."""
    if KIND == tl.bfloat16:  # noqa: SIM300
        bits = x.to(tl.int32, bitcast=True)
        return (bits & -65536).to(tl.float32, bitcast=True), (bits >> 16).to(tl.int16).to(KIND, bitcast=True)
    else:
        return x.to(KIND).to(tl.float32), x.to(KIND)


@triton.jit
def _thirds(w, KIND: tl.constexpr):
    """fp32 w as a sum of three numbers of KIND."""
    high, hi = _head(w, KIND)
    middle, mid = _head(w - high, KIND)
    _, lo = _head(w - high - middle, KIND)
    return hi, mid, lo


@triton.jit
def _divide(w_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """out[0], out[1], out[2] = the thirds of w, n numbers each."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    hi, mid, lo = _thirds(tl.load(w_ptr + at, mask=at < n, other=0.0), out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, hi, mask=at < n)
    tl.store(out_ptr + n + at, mid, mask=at < n)
    tl.store(out_ptr + 2 * n + at, lo, mask=at < n)


@triton.jit
def _logits_wide(
    x_desc, thirds_desc, part_ptr, tokens,
    E: tl.constexpr, STEPS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr,
    RUN: tl.constexpr,
):  # fmt: skip
    """`_logits` for many tokens, of weights that are divided already: [3 E, D]."""
    expert, token, share = tl.program_id(0) * BLOCK_E, tl.program_id(1) * BLOCK_T, tl.program_id(2)
    acc_TE = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    for first in range(0, STEPS, RUN):
        run_TE = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
        for step in range(first, min(first + RUN, STEPS)):
            d = (share * STEPS + step) * BLOCK_D
            x = x_desc.load([token, d])
            hi, mid = thirds_desc.load([expert, d]), thirds_desc.load([E + expert, d])
            lo = thirds_desc.load([2 * E + expert, d])
            run_TE = tl.dot(x, tl.trans(lo), acc=run_TE)
            run_TE = tl.dot(x, tl.trans(mid), acc=run_TE)
            run_TE = tl.dot(x, tl.trans(hi), acc=run_TE)
        acc_TE += run_TE
    token_T, expert_E = token + tl.arange(0, BLOCK_T), expert + tl.arange(0, BLOCK_E)
    at = (share * tokens + token_T[:, None].to(tl.int64)) * E + expert_E[None, :]
    tl.store(part_ptr + at, acc_TE, mask=(token_T < tokens)[:, None] & (expert_E < E)[None, :])


@triton.jit
def _logits(
    x_ptr, w_ptr, part_ptr, tokens, D, x_stride,
    E: tl.constexpr, STEPS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr,
    RUN: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """part[share, token, expert] = the share of x w^T of columns [share * STEPS * BLOCK_D, …).

    The tensor cores cut off what they add to a larger sum: after RUN steps theirs is added to one of the program's own.
    """
    begin(EARLY)
    token_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert_E = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    share = tl.program_id(2)
    col_D = share * STEPS * BLOCK_D + tl.arange(0, BLOCK_D)
    x_TD = x_ptr + token_T[:, None].to(tl.int64) * x_stride + col_D[None, :]
    w_ED = w_ptr + expert_E[:, None].to(tl.int64) * D + col_D[None, :]
    acc_TE = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    for first in range(0, STEPS, RUN):
        run_TE = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
        for step in range(first, min(first + RUN, STEPS)):
            inside = (col_D + step * BLOCK_D < D)[None, :]
            x = tl.load(x_TD + step * BLOCK_D, mask=(token_T < tokens)[:, None] & inside, other=0.0)
            w = tl.load(w_ED + step * BLOCK_D, mask=(expert_E < E)[:, None] & inside, other=0.0)
            hi, mid, lo = _thirds(w, x.dtype)
            run_TE = tl.dot(x, tl.trans(lo), acc=run_TE)
            run_TE = tl.dot(x, tl.trans(mid), acc=run_TE)
            run_TE = tl.dot(x, tl.trans(hi), acc=run_TE)
        acc_TE += run_TE
    at = (share * tokens + token_T[:, None].to(tl.int64)) * E + expert_E[None, :]
    tl.store(part_ptr + at, acc_TE, mask=(token_T < tokens)[:, None] & (expert_E < E)[None, :])


@triton.jit
def _route(
    logit_ptr, sum_ptr, bias_ptr, expert_ptr, weight_ptr, score_ptr, logit_stride, share_stride, scaling,
    E: tl.constexpr, P: tl.constexpr, M: tl.constexpr, MP: tl.constexpr, SHARES: tl.constexpr, NORMALISE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Logits are the sum of SHARES parts, which goes to `sum_ptr` where there are several."""
    begin(EARLY)
    token = tl.program_id(0).to(tl.int64)
    slot_P = tl.arange(0, P)
    real_P = slot_P < E
    logit_P = tl.load(logit_ptr + token * logit_stride + slot_P, mask=real_P, other=0.0).to(tl.float32)
    for share in range(1, SHARES):
        logit_P += tl.load(logit_ptr + share * share_stride + token * logit_stride + slot_P, mask=real_P, other=0.0)
    if SHARES > 1:
        tl.store(sum_ptr + token * E + slot_P, logit_P, mask=real_P)
    score_P = 1.0 / (1.0 + tl.exp(-logit_P))
    tl.store(score_ptr + token * E + slot_P, score_P, mask=real_P)
    bias_P = tl.load(bias_ptr + slot_P, mask=real_P, other=0.0).to(tl.float32)
    choice_P = tl.where(real_P, score_P + bias_P, -float("inf"))
    slot_M = tl.arange(0, MP)
    weight_M = tl.zeros([MP], tl.float32)
    for m in tl.static_range(M):
        best = tl.max(choice_P, 0)
        # Ties go to the lower expert. Where all is NaN no entry equals the best: any expert, and the weight is NaN.
        expert = tl.minimum(tl.min(tl.where(choice_P == best, slot_P, E), 0), E - 1)
        weight = tl.sum(tl.where(slot_P == expert, score_P, 0.0), 0)
        weight_M = tl.where(slot_M == m, weight, weight_M)
        choice_P = tl.where(slot_P == expert, -float("inf"), choice_P)
        tl.store(expert_ptr + token * M + m, expert.to(tl.int64))
    if NORMALISE:
        weight_M = weight_M / (tl.sum(weight_M, 0) + 1e-20)
    tl.store(weight_ptr + token * M + slot_M, weight_M * scaling, mask=slot_M < M)


def route(
    logits_NE: Tensor, bias_E: Tensor, top_k: int, *, normalise: bool, scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    """As `glm5.kernels.moe.route` with one group: expert_NM int64, weight_NM and score_NE fp32. Bias is fp32."""
    return choose(logits_NE[None], bias_E, top_k, normalise, scaling)[1:]


def router(
    x_ND: Tensor, weight_ED: Tensor, bias_E: Tensor, top_k: int, *, normalise: bool, scaling: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logits_NE = x weight^T in fp32, and `route` of them.

    Args:
        x_ND: bf16, contiguous columns. weight_ED: fp32, contiguous.
    """
    (tokens, width), experts = x_ND.shape, weight_ED.shape[0]
    device = x_ND.device
    many = tokens > FEW and width % 8 == 0 and x_ND.stride(0) % 8 == 0 and x_ND.data_ptr() % 16 == 0
    if many:
        block_t, block_e = 128 if tokens > 2048 else 64, 128
    else:
        block_t, block_e = min(64, max(16, triton.next_power_of_2(tokens))), 64
    tiles = triton.cdiv(tokens, block_t), triton.cdiv(experts, block_e)
    shares = max(1, min(4 if many else 16, 132 // max(1, tiles[0] * tiles[1])))
    steps = triton.cdiv(triton.cdiv(width, BLOCK_D), shares)
    shares = triton.cdiv(width, steps * BLOCK_D)
    parts = torch.empty(shares, tokens, experts, dtype=torch.float32, device=device)
    sizes = dict(E=experts, STEPS=steps, BLOCK_T=block_t, BLOCK_E=block_e, BLOCK_D=BLOCK_D, RUN=RUN, num_stages=3)
    if many:
        thirds = torch.empty(3 * experts, width, dtype=x_ND.dtype, device=device)
        _divide[(triton.cdiv(weight_ED.numel(), 1024),)](weight_ED, thirds, weight_ED.numel(), BLOCK=1024)
        x_desc = TensorDescriptor.from_tensor(x_ND, [block_t, BLOCK_D])
        thirds_desc = TensorDescriptor.from_tensor(thirds, [block_e, BLOCK_D])
        warps = 8 if block_t == 128 else 4
        _logits_wide[(tiles[1], tiles[0], shares)](x_desc, thirds_desc, parts, tokens, **sizes, num_warps=warps)
    elif tokens:
        _logits[(*tiles, shares)](
            x_ND, weight_ED, parts, tokens, width, x_ND.stride(0), **sizes, num_warps=4, **early(x_ND)
        )
    return choose(parts, bias_E, top_k, normalise, scaling)


def choose(
    parts_SNE: Tensor, bias_E: Tensor, top_k: int, normalise: bool, scaling: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`route` of logits that are the sum of parts [S, N, E], beside that sum."""
    shares, tokens, experts = parts_SNE.shape
    device = parts_SNE.device
    logits = parts_SNE[0] if shares == 1 else torch.empty(tokens, experts, dtype=torch.float32, device=device)
    expert = torch.empty(tokens, top_k, dtype=torch.int64, device=device)
    weight = torch.empty(tokens, top_k, dtype=torch.float32, device=device)
    score = torch.empty(tokens, experts, dtype=torch.float32, device=device)
    if tokens:
        _route[(tokens,)](
            parts_SNE, logits, bias_E, expert, weight, score, parts_SNE.stride(1), parts_SNE.stride(0), scaling,
            E=experts, P=triton.next_power_of_2(experts), M=top_k, MP=triton.next_power_of_2(top_k),
            SHARES=shares, NORMALISE=normalise, num_warps=1, **early(parts_SNE),
        )  # fmt: skip
    return logits, expert, weight, score
