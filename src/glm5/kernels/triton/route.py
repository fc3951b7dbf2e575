"""The router's choice in Triton: sigmoid, bias, the best experts in order, and their weights, in one launch.

A program takes a token: one register row of all experts, from which the best is taken as often as a token has experts.
Source: report section 2.1, DeepSeek-V3. Read next: `moe`; `glm5.kernels.moe.route` for the specification.
"""

# mypy: disallow-untyped-defs=false, disallow-incomplete-defs=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _route(
    logit_ptr, bias_ptr, expert_ptr, weight_ptr, score_ptr, logit_stride, scaling,
    E: tl.constexpr, P: tl.constexpr, M: tl.constexpr, MP: tl.constexpr, NORMALISE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot_P = tl.arange(0, P)
    real_P = slot_P < E
    logit_P = tl.load(logit_ptr + token * logit_stride + slot_P, mask=real_P, other=0.0).to(tl.float32)
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
    tokens, experts = logits_NE.shape
    device = logits_NE.device
    expert = torch.empty(tokens, top_k, dtype=torch.int64, device=device)
    weight = torch.empty(tokens, top_k, dtype=torch.float32, device=device)
    score = torch.empty(tokens, experts, dtype=torch.float32, device=device)
    if tokens:
        _route[(tokens,)](
            logits_NE, bias_E, expert, weight, score, logits_NE.stride(0), scaling,
            E=experts, P=triton.next_power_of_2(experts), M=top_k, MP=triton.next_power_of_2(top_k),
            NORMALISE=normalise, num_warps=1,
        )  # fmt: skip
    return expert, weight, score
