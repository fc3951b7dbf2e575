"""Reverse KL to a teacher over the whole vocabulary, or over the likeliest ids: distillation without chance.

At each token of the policy's own answers

    KL(π_θ ‖ π_teacher) = Σ_v π_θ(v) (log π_θ(v) - log π_teacher(v))

takes the place of one drawn token's advantage; in the mean over draws the two have one gradient (a test adds them up).
`top` sums over the policy's likeliest ids and takes all others as one, which is never more than the whole. Both are of
the distribution that was drawn from: temperature and kept sets as in `logprobs`. No tensor of tokens × vocabulary
outlives a chunk. A teacher behind an engine names its own likeliest ids, which take the place of the policy's: again
all others are one, so that the sum is never more than the whole. Source: report, section 3.5, whose Eq. 2 has drawn
tokens. Read next: `distill`, `update`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from glm5.kernels.cross_entropy import CHUNK_ELEMENTS
from glm5.model.glm5 import GLM5
from glm5.posttrain.logprobs import Kept
from glm5.posttrain.losses import LossMetrics, policy_loss
from glm5.posttrain.rows import PolicyRows
from glm5.posttrain.update import PolicyUpdate, own_micro_batches

# Divergences of equal weights are smaller, where rows are cut otherwise; they must not move a policy (see `distill`).
ROUNDING = 1e-6


def reverse_kl(
    hidden_ND: Tensor,
    head_VD: Tensor,
    teacher_ND: Tensor,
    teacher_head_VD: Tensor,
    *,
    temperature_N: Tensor | None = None,
    kept: Kept | None = None,
    vocab_size: int | None = None,
    top: int = 0,
    chunk: int | None = None,
) -> Tensor:
    """KL(π_θ ‖ π_teacher) at each of N states, in nats, with gradient to `hidden_ND` and `head_VD`; at least fp32.

    Args:
        hidden_ND, head_VD: the policy's final states and head. teacher_ND, teacher_head_VD: the teacher's, constants.
        temperature_N, kept, vocab_size, chunk: as in `action_logprobs`.
        top: sum over so many of the policy's likeliest ids, all others as one; 0 is over all.
    """
    vocab = vocab_size or len(head_VD)
    accum = torch.promote_types(hidden_ND.dtype, torch.float32)
    heat_N1 = (hidden_ND.new_ones(len(hidden_ND)) if temperature_N is None else temperature_N).to(accum)[:, None]
    device = hidden_ND.device.type
    chunk = chunk or max(1, CHUNK_ELEMENTS.get(device, CHUNK_ELEMENTS["cuda"]) // vocab)

    def log_probs(states_cD: Tensor, head: Tensor, start: int, stop: int) -> Tensor:
        logits_cV = states_cD.to(accum) @ head[:vocab].to(accum).T / heat_N1[start:stop]
        if kept is not None:
            logits_cV = logits_cV.masked_fill(~kept.mask(start, stop, vocab), float("-inf"))
        return logits_cV.log_softmax(-1)

    def part(states_cD: Tensor, head: Tensor, start: int, stop: int) -> Tensor:
        own_cV = log_probs(states_cD, head, start, stop)
        with torch.no_grad():
            teacher_cV = log_probs(teacher_ND[start:stop], teacher_head_VD, start, stop)
        if not 0 < top < vocab:
            return _summed(own_cV, teacher_cV)
        ids_cK = own_cV.detach().topk(top, dim=-1).indices
        own_cK, teacher_cK = own_cV.gather(-1, ids_cK), teacher_cV.gather(-1, ids_cK)
        rest_c, teacher_rest_c = _rest(own_cK), _rest(teacher_cK)
        return _summed(own_cK, teacher_cK) + rest_c.exp() * (rest_c - teacher_rest_c)

    found = []
    for start in range(0, len(hidden_ND), chunk):
        stop = min(start + chunk, len(hidden_ND))
        found.append(checkpoint(part, hidden_ND[start:stop], head_VD, start, stop, use_reentrant=False))
    return torch.cat(found) if found else hidden_ND.sum(-1).to(accum)


def told_kl(
    hidden_ND: Tensor,
    head_VD: Tensor,
    ids_NK: Tensor,
    told_NK: Tensor,
    *,
    vocab_size: int | None = None,
    chunk: int | None = None,
) -> Tensor:
    """`reverse_kl` to a teacher of which only some log-probabilities are known, at temperature 1 over all ids.

    Args:
        ids_NK, told_NK: those ids at each state, and their log-probabilities.
    """
    vocab = vocab_size or len(head_VD)
    accum = torch.promote_types(hidden_ND.dtype, torch.float32)
    device = hidden_ND.device.type
    chunk = chunk or max(1, CHUNK_ELEMENTS.get(device, CHUNK_ELEMENTS["cuda"]) // vocab)

    def part(states_cD: Tensor, head: Tensor, start: int, stop: int) -> Tensor:
        own_cV = (states_cD.to(accum) @ head[:vocab].to(accum).T).log_softmax(-1)
        own_cK, teacher_cK = own_cV.gather(-1, ids_NK[start:stop]), told_NK[start:stop].to(accum)
        return _summed(own_cK, teacher_cK) + _summed(_rest(own_cK)[:, None], _rest(teacher_cK)[:, None])

    found = []
    for start in range(0, len(hidden_ND), chunk):
        stop = min(start + chunk, len(hidden_ND))
        found.append(checkpoint(part, hidden_ND[start:stop], head_VD, start, stop, use_reentrant=False))
    return torch.cat(found) if found else hidden_ND.sum(-1).to(accum)


def _summed(own_cV: Tensor, teacher_cV: Tensor) -> Tensor:
    """Σ p (log p - log q); an id that was not kept has no part in it."""
    apart_cV = (own_cV - teacher_cV).masked_fill(own_cV.detach().isneginf(), 0.0)
    return (own_cV.exp() * apart_cV).sum(-1)


def _rest(log_cK: Tensor) -> Tensor:
    """log of what these probabilities leave of 1, which is never quite nothing."""
    return torch.log1p(-log_cK.exp().sum(-1).clamp(max=1 - 1e-7))


class DivergenceUpdate(PolicyUpdate):
    """An update by the teachers' whole distributions. The loss's objective and correction have no part in it: a mean of
    divergences, weighed as its `mean` says.

    Args:
        base: whose model, optimizer and settings this takes up.
        teachers: which `PolicyRows.teacher_BT` numbers; None is one that an engine serves, of which the rows know.
        top: as in `reverse_kl`.
    """

    def __init__(self, base: PolicyUpdate, teachers: Sequence[GLM5 | None], top: int) -> None:
        settings: dict[str, Any] = dict(micro_batch=base.micro_batch, clip=base.clip, sparse=base.sparse)
        super().__init__(base.model, base.optimizer, base.loss, **settings, ranks=base.ranks, holdings=base.holdings)
        self.teachers, self.top = teachers, top

    def __call__(
        self, rows: PolicyRows, rollouts: int, *, old_BT: Tensor | None = None, reference_BT: Tensor | None = None
    ) -> dict[str, float]:
        """As `PolicyUpdate`; "loss" is the mean divergence. What was remembered of older policies is not needed."""
        counts = rows.counts(rollouts)
        metrics, total, moving = LossMetrics(), 0.0, 0.0
        self.optimizer.zero_grad(set_to_none=True)
        for numbers in own_micro_batches(rows, self.micro_batch, self.ranks):
            part = rows.take(numbers)
            at_A = part.mask_BT.flatten().nonzero().squeeze(1)
            hidden_AD = part.hidden(self.model, sparse=self.sparse).flatten(0, 1)[at_A]
            kl_A = self._divergence(part, hidden_AD, at_A)
            apart_A = kl_A.detach() > ROUNDING
            ones_A = torch.ones_like(apart_A)
            weights_A = counts.weights(self.loss, ones_A, part.rollout_BT.flatten()[at_A]).to(kl_A.dtype)
            loss = (weights_A * kl_A.where(apart_A, 0.0)).sum()
            with torch.no_grad():  # before the backward pass, which lets go of a head that lies over several ranks
                actions = part.actions(part.found(self.model, hidden_AD, at_A, with_entropy=True))
                metrics.add(policy_loss(self.loss, actions, counts).metrics)
            loss.backward()
            total, moving = total + float(loss.detach()), moving + float(apart_A.sum())
        total, moving = self.everyone(total, moving)
        metrics.over(self.ranks)
        return {**metrics.values(), "loss": total, **self.finish(total, moving)}

    def _divergence(self, part: PolicyRows, hidden_AD: Tensor, at_A: Tensor) -> Tensor:
        assert part.teacher_BT is not None
        teacher_A = part.teacher_BT.flatten()[at_A]
        head_VD, accum = self.model.lm_head.weight, torch.promote_types(hidden_AD.dtype, torch.float32)
        # Zeros with a gradient, also of the head: an empty row has them, so that all ranks have the same gradients.
        found_A = 0 * (hidden_AD.sum(-1) + head_VD.sum()).to(accum)
        for number, teacher in enumerate(self.teachers):
            mine_M = (teacher_A == number).nonzero().squeeze(1)
            if not len(mine_M):
                continue
            if teacher is None:
                assert part.told_ids_BTK is not None
                assert part.told_logprobs_BTK is not None
                ids_MK, told_MK = (t.flatten(0, 1)[at_A[mine_M]] for t in (part.told_ids_BTK, part.told_logprobs_BTK))
                kl_M = told_kl(hidden_AD[mine_M], head_VD, ids_MK, told_MK, vocab_size=part.vocab_size)
                found_A = found_A.index_put((mine_M,), kl_M)
                continue
            with torch.no_grad():
                states_MD = part.without_replay().hidden(teacher).flatten(0, 1)[at_A[mine_M]]
            kl_M = reverse_kl(
                hidden_AD[mine_M],
                head_VD,
                states_MD,
                teacher.lm_head.weight,
                temperature_N=part.temperature_BT.flatten()[at_A[mine_M]],
                kept=None if part.kept is None else part.kept.select(at_A[mine_M]),
                vocab_size=part.vocab_size,
                top=self.top,
            )
            found_A = found_A.index_put((mine_M,), kl_M)
        return found_A
