"""Mixture of experts: the router's choice, and the chosen experts' SwiGLU, without padding or dropped tokens.

Source: report section 2.1, DeepSeek-V3 (auxiliary-loss-free balance). Selection uses score + bias, the mixture
weights the scores alone. Tokens are sorted by expert, each expert's segment is one pair of products, and results
return by the inverse permutation, so that the sum over a token's experts has a fixed order. Read next:
`glm5.model.moe`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from glm5.kernels.deferral import weight_gradient
from glm5.kernels.dispatch import pick


def route(
    logits_NE: Tensor,
    bias_E: Tensor,
    top_k: int,
    *,
    normalise: bool = True,
    scaling: float = 1.0,
    n_group: int = 1,
    topk_group: int = 1,
    given_NM: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sigmoid routing with selection bias, in fp32.

    Args:
        logits_NE: router logits of N tokens. bias_E: e_score_correction_bias, fp32, moves the choice only.
        n_group, topk_group: experts come from the topk_group groups whose two best biased scores sum highest.
        given_NM: int64, experts to take instead of those chosen here, as another pass recorded them; -1 in a token's
            first place leaves the choice to this call. The weights are this call's scores of them, with gradient.

    Returns:
        expert_NM int64 (ties to the lower expert), weight_NM fp32, score_NE fp32 (sigmoid).
    """
    fast = pick("route", logits_NE, bias_E) if n_group == 1 and given_NM is None else None
    if fast is not None:
        routed: tuple[Tensor, Tensor, Tensor] = fast(logits_NE, bias_E, top_k, normalise=normalise, scaling=scaling)
        return routed
    score_NE = logits_NE.float().sigmoid()
    choice_NE = score_NE.detach() + bias_E.float()
    if n_group > 1:
        grouped = choice_NE.view(-1, n_group, choice_NE.shape[-1] // n_group)
        group_score = grouped.topk(2, dim=-1).values.sum(-1)
        kept = group_score.sort(dim=-1, descending=True, stable=True).indices[:, :topk_group]
        alive = torch.zeros_like(group_score, dtype=torch.bool).scatter_(-1, kept, True)
        choice_NE = grouped.masked_fill(~alive[..., None], -torch.inf).flatten(1)
    expert_NM = choice_NE.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    if given_NM is not None:
        expert_NM = torch.where(given_NM[:, :1] >= 0, given_NM, expert_NM)
    return expert_NM, mixture(score_NE, expert_NM, normalise=normalise, scaling=scaling), score_NE


def mixture(score_NE: Tensor, expert_NM: Tensor, *, normalise: bool = True, scaling: float = 1.0) -> Tensor:
    """What each of a token's experts weighs, of the scores of all: weight_NM."""
    weight_NM = score_NE.gather(-1, expert_NM)
    if normalise:
        weight_NM = weight_NM / (weight_NM.sum(-1, keepdim=True) + 1e-20)
    return weight_NM * scaling


def expert_loads(expert_BTM: Tensor, experts: int, valid_BT: Tensor | None = None) -> Tensor:
    """Tokens per expert, int64 [E], exact however many there are; padding (valid False) does not count."""
    valid_BT = torch.ones_like(expert_BTM[..., 0], dtype=torch.bool) if valid_BT is None else valid_BT
    counted = valid_BT[..., None].expand_as(expert_BTM).flatten().long()
    # Neither a mask as an index nor `bincount`, which would wait for the device.
    return counted.new_zeros(experts).scatter_add_(0, expert_BTM.flatten(), counted)


def rows_by_pair(x_ND: Tensor, order_P: Tensor, place_NM: Tensor, held_NM: Tensor | None = None) -> Tensor:
    """Each token once for every expert of its own, in a given order of those pairs: [P, D].

    Args:
        order_P: the pairs n * M + m in that order. place_NM: its inverse, where each pair went.
        held_NM: fp32, 1 for the pairs that are in `order_P` and 0 for those that are not, whose place is any; None is
            all.
    """
    fast = pick("train_rows_by_pair", x_ND) if x_ND.requires_grad else None
    if fast is not None:
        rows: Tensor = fast(x_ND, order_P, place_NM, held_NM)
        return rows
    return x_ND.index_select(0, order_P.div(place_NM.shape[1], rounding_mode="floor"))


def sum_by_token(part_PD: Tensor, order_P: Tensor, place_NM: Tensor, weight_NM: Tensor) -> Tensor:
    """What belongs to each token's pairs, weighted and added up in fp32 in the order of its experts: [N, D]. The weight
    of pairs that are not in `order_P` must be 0."""
    fast = pick("train_sum_by_token", part_PD) if part_PD.requires_grad else None
    if fast is not None:
        found: Tensor = fast(part_PD, order_P, place_NM, weight_NM)
        return found
    part_NMD = part_PD.index_select(0, place_NM.flatten()).unflatten(0, place_NM.shape)
    return (part_NMD.float() * weight_NM[..., None]).sum(1).to(part_PD.dtype)


def grouped_swiglu(x_ND: Tensor, gate_up_EFD: Tensor, down_EDF: Tensor, expert_NM: Tensor, weight_NM: Tensor) -> Tensor:
    """Sum over each token's M experts of weight * down(silu(gate x) * up x).

    Args:
        x_ND: tokens. gate_up_EFD: [E, 2F, D], gate rows then up rows. down_EDF: [E, D, F].
        expert_NM: int64 ids. weight_NM: fp32.

    Returns:
        [N, D] in x's dtype; the sum over experts is taken in fp32.
    """
    n, m = expert_NM.shape
    inputs = (x_ND, gate_up_EFD, down_EDF, weight_NM)
    if x_ND.is_cuda and torch.is_grad_enabled() and any(t.requires_grad for t in inputs):
        fast = pick("train_grouped_swiglu", *inputs[:3])
    else:
        fast = pick("grouped_swiglu", *inputs[:3])
    if fast is not None:
        return fast(x_ND, gate_up_EFD, down_EDF, expert_NM.contiguous(), weight_NM.contiguous())
    order = expert_NM.flatten().argsort(stable=True)
    counts = torch.bincount(expert_NM.flatten(), minlength=gate_up_EFD.shape[0]).tolist()
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    rows = x_ND.index_select(0, order.div(m, rounding_mode="floor"))
    outputs = _Experts.apply(rows, gate_up_EFD, down_EDF, counts)
    chosen = outputs.index_select(0, inverse).view(n, m, -1)
    return (chosen.float() * weight_NM[..., None]).sum(1).to(x_ND.dtype)


class _Experts(torch.autograd.Function):
    """Every expert on its contiguous segment of rows. Saves the products' inputs; recomputes SwiGLU in backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, gate_up: Tensor, down: Tensor, counts: list[int]) -> Tensor:
        hidden = rows.new_empty(rows.shape[0], gate_up.shape[1])
        out = rows.new_empty(rows.shape[0], down.shape[1])
        for e, a, b in _segments(counts):
            torch.mm(rows[a:b], gate_up[e].t(), out=hidden[a:b])
            gate, up = hidden[a:b].chunk(2, dim=-1)
            torch.mm(F.silu(gate).mul_(up), down[e].t(), out=out[a:b])
        ctx.save_for_backward(rows, hidden, gate_up, down)
        ctx.counts, ctx.weights = counts, (gate_up, down)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        rows, hidden, gate_up, down = ctx.saved_tensors
        grad_out = grad_out.contiguous()
        drows, dhidden = torch.empty_like(rows), torch.empty_like(hidden)
        half = gate_up.shape[1] // 2
        gate, up = hidden.float().chunk(2, dim=-1)
        sigmoid = gate.sigmoid()
        act = gate * sigmoid
        mixed = (act * up).to(rows.dtype)
        for e, a, b in _segments(ctx.counts):
            dmixed = (grad_out[a:b] @ down[e]).float()
            dhidden[a:b, half:] = dmixed * act[a:b]
            s = sigmoid[a:b]
            dhidden[a:b, :half] = dmixed * up[a:b] * (s + act[a:b] * (1 - s))
            torch.mm(dhidden[a:b], gate_up[e], out=drows[a:b])
        counts, (own_gate_up, own_down) = ctx.counts, ctx.weights
        return (
            drows,
            weight_gradient(own_gate_up, lambda: _outer(dhidden, rows, counts)),
            weight_gradient(own_down, lambda: _outer(grad_out, mixed, counts)),
            None,
        )


def _outer(left_NX: Tensor, right_NY: Tensor, counts: list[int]) -> Tensor:
    """[E, X, Y]: left.T @ right over each expert's segment of rows; zero where it has none."""
    out = left_NX.new_empty(len(counts), left_NX.shape[1], right_NY.shape[1])
    for expert, count in enumerate(counts):
        if count == 0:
            out[expert].zero_()
    for expert, a, b in _segments(counts):
        torch.mm(left_NX[a:b].t(), right_NY[a:b], out=out[expert])
    return out


def _segments(counts: list[int]) -> Iterator[tuple[int, int, int]]:
    """(expert, first row, past the last) of every expert that has rows."""
    start = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, start, start + count
        start += count
