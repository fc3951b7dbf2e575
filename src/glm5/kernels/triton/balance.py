"""Loads of experts and the sequence-wise balance loss in two launches, and the scores' gradient in one.

In plain PyTorch these are some thirty steps over small tensors, which cost what their launches cost. A program sums
some tokens of one sequence; a second kernel adds such parts in their order and closes the sequence's sum. Source:
`glm5.kernels.balance`, the specification; read it first.
"""

# mypy: disallow-untyped-defs=false, disallow-incomplete-defs=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK, ROWS = 512, 16  # tokens of a program, and at a time


@triton.jit
def _sum(
    score_ptr, expert_ptr, valid_ptr, share_ptr, count_ptr, length, chunks, valid_row,
    E: tl.constexpr, P: tl.constexpr, M: tl.constexpr, VALID: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Of some tokens of a sequence: the sum of each expert's share of the scores, and how often it was chosen."""
    sequence = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    slot_P = tl.arange(0, P)
    share_P = tl.zeros([P], tl.float32)
    count_P = tl.zeros([P], tl.int32)
    past = tl.minimum(chunk * CHUNK + CHUNK, length)
    for first in range(chunk * CHUNK, past, ROWS):
        token_R = first + tl.arange(0, ROWS)
        real_R = token_R < past
        if VALID:
            real_R = real_R & (tl.load(valid_ptr + sequence * valid_row + token_R, mask=real_R, other=0) != 0)
        row_R = sequence * length + token_R
        real = real_R[:, None] & (slot_P < E)[None, :]
        score = tl.load(score_ptr + row_R[:, None] * E + slot_P[None, :], mask=real, other=0.0)
        total_R = tl.where(real_R, tl.sum(score, 1), 1.0)
        share_P += tl.sum(score / total_R[:, None], 0)
        for m in tl.static_range(M):
            expert_R = tl.load(expert_ptr + row_R * M + m, mask=real_R, other=-1)
            count_P += tl.sum((slot_P[None, :] == expert_R[:, None]).to(tl.int32), 0)
    to = (sequence * chunks + chunk) * E + slot_P
    tl.store(share_ptr + to, share_P, mask=slot_P < E)
    tl.store(count_ptr + to, count_P, mask=slot_P < E)


@triton.jit
def _close(
    share_ptr, count_ptr, loss_ptr, load_ptr, slope_ptr, chunks, E: tl.constexpr, P: tl.constexpr, M: tl.constexpr
):  # fmt: skip
    """Of one sequence: its loss, its loads, and what each expert's share weighs in the loss."""
    sequence = tl.program_id(0).to(tl.int64)
    slot_P = tl.arange(0, P)
    share_P = tl.zeros([P], tl.float32)
    count_P = tl.zeros([P], tl.int32)
    for chunk in range(chunks):
        at = (sequence * chunks + chunk) * E + slot_P
        share_P += tl.load(share_ptr + at, mask=slot_P < E, other=0.0)
        count_P += tl.load(count_ptr + at, mask=slot_P < E, other=0)
    tokens = tl.maximum(tl.sum(count_P, 0) // M, 1).to(tl.float32)
    slope_P = count_P.to(tl.float32) * E / (M * tokens) / tokens
    tl.store(slope_ptr + sequence * E + slot_P, slope_P, mask=slot_P < E)
    tl.store(load_ptr + sequence * E + slot_P, count_P.to(tl.int64), mask=slot_P < E)
    tl.store(loss_ptr + sequence, tl.sum(slope_P * share_P, 0))


@triton.jit
def _backward(
    score_ptr, valid_ptr, slope_ptr, grad_ptr, out_ptr, length, valid_row,
    E: tl.constexpr, P: tl.constexpr, VALID: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """out = grad (slope - <slope, share>) / total, of each token's scores; 0 for padding."""
    sequence = tl.program_id(0).to(tl.int64)
    token_R = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside_R = token_R < length
    slot_P = tl.arange(0, P)
    row_R1 = (sequence * length + token_R)[:, None]
    real = inside_R[:, None] & (slot_P < E)[None, :]
    score = tl.load(score_ptr + row_R1 * E + slot_P[None, :], mask=real, other=0.0)
    slope_P = tl.load(slope_ptr + sequence * E + slot_P, mask=slot_P < E, other=0.0) * tl.load(grad_ptr)
    total_R1 = tl.where(inside_R, tl.sum(score, 1), 1.0)[:, None]
    along_R1 = tl.sum(score * slope_P[None, :], 1)[:, None] / total_R1
    out = (slope_P[None, :] - along_R1) / total_R1
    if VALID:
        valid_R = tl.load(valid_ptr + sequence * valid_row + token_R, mask=inside_R, other=0) != 0
        out = tl.where(valid_R[:, None], out, 0.0)
    tl.store(out_ptr + row_R1 * E + slot_P[None, :], out, mask=real)


class SequenceBalance(torch.autograd.Function):
    """`balance.loads_and_balance` of fp32 scores_BTE, int64 experts_BTM and bool valid_BT (or None): loads_E, loss."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, experts_BTM: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        scores = scores.contiguous()
        batch, length, experts = scores.shape
        chunks, wide, chosen = triton.cdiv(length, CHUNK), triton.next_power_of_2(experts), experts_BTM.shape[-1]
        mask = None if valid is None else valid.view(torch.uint8) if valid.stride(1) == 1 else valid.to(torch.uint8)
        share = scores.new_empty(batch, chunks, experts)
        count = torch.empty(batch, chunks, experts, dtype=torch.int32, device=scores.device)
        loss, slope = scores.new_empty(batch), scores.new_empty(batch, experts)
        load = torch.empty(batch, experts, dtype=torch.int64, device=scores.device)
        ctx.row = 0 if mask is None else mask.stride(0)
        _sum[(batch, chunks)](
            scores, experts_BTM.contiguous(), scores if mask is None else mask, share, count, length, chunks, ctx.row,
            E=experts, P=wide, M=chosen, VALID=mask is not None, CHUNK=CHUNK, ROWS=ROWS,
        )  # fmt: skip
        _close[(batch,)](share, count, loss, load, slope, chunks, E=experts, P=wide, M=chosen)
        ctx.save_for_backward(scores, slope, *(() if mask is None else (mask,)))
        loads = load.sum(0)
        ctx.mark_non_differentiable(loads)
        return loads, loss.sum()

    @staticmethod
    def backward(ctx: Any, _: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        scores, slope, *mask = ctx.saved_tensors
        batch, length, experts = scores.shape
        out = torch.empty_like(scores)
        _backward[(batch, triton.cdiv(length, ROWS))](
            scores, mask[0] if mask else scores, slope, grad.contiguous(), out, length, ctx.row,
            E=experts, P=triton.next_power_of_2(experts), VALID=bool(mask), ROWS=ROWS,
        )  # fmt: skip
        return out, None, None
