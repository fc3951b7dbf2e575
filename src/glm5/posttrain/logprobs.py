"""log π of the tokens drawn, as they were drawn: under the rollout's temperature and kept set. In chunks.

A ratio of two policies means something only if both are distributions over the same ids. An engine draws from
softmax(logits / T), over the ids that exist, cut to those that top-k, top-p and min-p kept. So that the same weights
give a ratio of 1 for every token, the trainer repeats all three: it divides by T, leaves out the vocabulary's
padding, and normalises over the very ids that were kept, which the engine reports (`SamplingParams.kept_set`), never
over those that its own probabilities would keep. No tensor of tokens × vocabulary outlives a chunk: the backward pass
makes each chunk's logits again. Draws at temperature 1 from all ids take the operators of pre-training's loss.
Legend: N tokens · D model width · V vocabulary. Source: report, sections 2.4.1 and 3.2. Read next: `rows`,
`glm5.kernels.cross_entropy`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from glm5.kernels.cross_entropy import CHUNK_ELEMENTS, linear_cross_entropy, linear_logprobs
from glm5.utils.errors import DataError


@dataclass(frozen=True)
class Kept:
    """Which ids truncation left to draw from, ragged.

    Args:
        ids: int64, all rows' ids end to end. offsets: int64 [N + 1]; a row without ids kept all.
    """

    ids: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, sets: Sequence[Sequence[int] | None]) -> Kept:
        """From one set a token; None kept all."""
        sizes = [len(s) if s else 0 for s in sets]
        flat = [i for s in sets if s for i in s]
        return cls(torch.tensor(flat, dtype=torch.int64), torch.tensor([0, *sizes], dtype=torch.int64).cumsum(0))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def to(self, device: torch.device) -> Kept:
        return Kept(self.ids.to(device), self.offsets.to(device))

    def select(self, rows_M: Tensor) -> Kept:
        """Of these rows, in this order."""
        starts_M, sizes_M = self.offsets[rows_M], (self.offsets[1:] - self.offsets[:-1])[rows_M]
        offsets = torch.cat((sizes_M.new_zeros(1), sizes_M.cumsum(0)))
        shift_M = torch.repeat_interleave(starts_M - offsets[:-1], sizes_M)
        return Kept(self.ids[torch.arange(len(shift_M), device=self.ids.device) + shift_M], offsets)

    def mask(self, start: int, stop: int, vocab: int) -> Tensor:
        """bool [stop - start, vocab] of rows `start` to `stop` - 1: True where an id may be drawn."""
        offsets = self.offsets[start : stop + 1]
        sizes = offsets[1:] - offsets[:-1]
        keep_NV = (sizes == 0)[:, None].repeat(1, vocab)
        row = torch.repeat_interleave(torch.arange(len(sizes), device=sizes.device), sizes)
        keep_NV[row, self.ids[int(offsets[0]) : int(offsets[-1])]] = True
        return keep_NV


class ActionLogprobs(NamedTuple):
    """logprobs_N: log π of each token, with gradient. entropy_N: of the same distribution, in nats, with gradient; or
    None."""

    logprobs_N: Tensor
    entropy_N: Tensor | None


def action_logprobs(
    hidden_ND: Tensor,
    head_VD: Tensor,
    targets_N: Tensor,
    *,
    temperature_N: Tensor | None = None,
    kept: Kept | None = None,
    vocab_size: int | None = None,
    with_entropy: bool = False,
    chunk: int | None = None,
) -> ActionLogprobs:
    """log π of drawn tokens from the states that predict them; fp32 (fp64 for fp64 states).

    Args:
        hidden_ND: final hidden states. head_VD: the head. targets_N: int64, the tokens drawn.
        temperature_N: of each draw, above 0; None is 1.
        kept: the ids that each was drawn from; None is all.
        vocab_size: ids from here on do not exist (a head's padding); None is V.
        with_entropy: also give entropies.
        chunk: tokens to a chunk of logits.

    Raises:
        DataError: a token lies outside its own kept set or the vocabulary: it cannot have been drawn like that.
    """
    n, vocab = len(targets_N), vocab_size or len(head_VD)
    accum = torch.promote_types(hidden_ND.dtype, torch.float32)
    temperature = hidden_ND.new_ones(n, dtype=accum) if temperature_N is None else temperature_N.to(accum)
    plain = kept is None and bool((temperature == 1).all())
    device = hidden_ND.device.type
    chunk = chunk or max(1, CHUNK_ELEMENTS.get(device, CHUNK_ELEMENTS["cuda"]) // vocab)
    if n and (int(targets_N.min()) < 0 or int(targets_N.max()) >= vocab):
        raise DataError(f"a drawn id lies outside the vocabulary of {vocab}", "Score rollouts with their own model")
    logprobs_N, entropy_N = _ActionLogprobs.apply(
        hidden_ND, head_VD[:vocab], targets_N, temperature, kept, with_entropy, chunk, plain
    )
    if kept is not None and n and not bool(logprobs_N.detach().isfinite().all()):
        at = int((~logprobs_N.detach().isfinite()).nonzero()[0])
        what = f"the id of action {at}, {int(targets_N[at])}, is not in its kept set, or the logits are not finite"
        raise DataError(what, "Keep each token beside its own set: the two may be shifted")
    return ActionLogprobs(logprobs_N, entropy_N)


class _ActionLogprobs(torch.autograd.Function):
    """Keeps states and head; the backward pass makes each chunk's probabilities a second time."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        head_VD: Tensor,
        targets_N: Tensor,
        temperature_N: Tensor,
        kept: Kept | None,
        with_entropy: bool,
        chunk: int,
        plain: bool,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(hidden_ND, head_VD, targets_N, temperature_N)
        ctx.kept, ctx.chunk, ctx.plain = kept, chunk, plain
        ctx.set_materialize_grads(False)
        if plain:
            found = linear_logprobs(hidden_ND, head_VD, targets_N, chunk=chunk, with_entropy=with_entropy)
            return found.logprobs_N, found.entropy_N
        logprobs_N = torch.empty_like(temperature_N)
        entropy_N = torch.empty_like(temperature_N) if with_entropy else None
        for start in range(0, len(targets_N), chunk):
            part = slice(start, min(start + chunk, len(targets_N)))
            exp_cV = _shifted_logits(hidden_ND[part], head_VD, temperature_N[part], kept, part)
            own_c1 = exp_cV.gather(1, targets_N[part, None])
            shifted_cV = exp_cV.clone() if entropy_N is not None else None
            sum_c1 = exp_cV.exp_().sum(-1, keepdim=True)
            logprobs_N[part] = (own_c1 - sum_c1.log()).squeeze(1)
            if entropy_N is not None and shifted_cV is not None:
                mean_c1 = _finite(shifted_cV).mul_(exp_cV).sum(-1, keepdim=True) / sum_c1
                entropy_N[part] = (sum_c1.log() - mean_c1).squeeze(1)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor | None, grad_entropy_N: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_ND, head_VD, targets_N, temperature_N = ctx.saved_tensors
        need_hidden, need_head = ctx.needs_input_grad[:2]
        if ctx.plain and grad_entropy_N is None:
            made = _plain_gradients(hidden_ND, head_VD, targets_N, grad_N, ctx.chunk, need_hidden, need_head)
            return *made, None, None, None, None, None, None
        accum = temperature_N.dtype
        grad_hidden = torch.zeros_like(hidden_ND) if need_hidden else None
        grad_head = head_VD.new_zeros(head_VD.shape, dtype=accum) if need_head else None
        grad_N = torch.zeros_like(temperature_N) if grad_N is None else grad_N
        for start in range(0, len(targets_N), ctx.chunk):
            part = slice(start, min(start + ctx.chunk, len(targets_N)))
            heat_c1, own_c1 = temperature_N[part, None], grad_N[part, None]
            grad_cV = _shifted_logits(hidden_ND[part], head_VD, temperature_N[part], ctx.kept, part)
            log_cV = grad_cV.clone() if grad_entropy_N is not None else None
            sum_c1 = grad_cV.exp_().sum(-1, keepdim=True)
            grad_cV.div_(sum_c1)  # the probabilities, in place
            if grad_entropy_N is None or log_cV is None:
                grad_cV.mul_(-own_c1 / heat_c1)
            else:  # of log p(target): onehot - p; of the entropy: -p (log p + entropy)
                _finite(log_cV.sub_(sum_c1.log()))
                entropy_c1 = -(grad_cV * log_cV).sum(-1, keepdim=True)
                log_cV.add_(entropy_c1).mul_(grad_entropy_N[part, None]).add_(own_c1)
                grad_cV.mul_(log_cV).div_(-heat_c1)
            grad_cV.scatter_add_(1, targets_N[part, None], own_c1 / heat_c1)
            if grad_hidden is not None:
                grad_hidden[part] = _times(grad_cV.to(head_VD.dtype), head_VD, accum).to(grad_hidden.dtype)
            if grad_head is not None:
                grad_head += _times(grad_cV.T.to(hidden_ND.dtype), hidden_ND[part], accum)
        made = grad_hidden, None if grad_head is None else grad_head.to(head_VD.dtype)
        return *made, None, None, None, None, None, None


def _plain_gradients(
    hidden_ND: Tensor,
    head_VD: Tensor,
    targets_N: Tensor,
    grad_N: Tensor | None,
    chunk: int,
    need_hidden: bool,
    need_head: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Those of the cross-entropy whose weights are the (negative) gradients that arrived."""
    if grad_N is None:
        return None, None
    with torch.enable_grad():
        hidden, head = hidden_ND.detach().requires_grad_(need_hidden), head_VD.detach().requires_grad_(need_head)
        loss = linear_cross_entropy(hidden, head, targets_N, -grad_N, chunk=chunk).loss_sum
        loss.backward()
    return hidden.grad, head.grad


def _shifted_logits(
    hidden_cD: Tensor, head_VD: Tensor, temperature_c: Tensor, kept: Kept | None, part: slice
) -> Tensor:
    """A chunk's logits over temperature, [c, V], less each row's largest; -inf where an id was not kept."""
    logits_cV = _times(hidden_cD, head_VD.T, temperature_c.dtype).div_(temperature_c[:, None])
    if kept is not None:
        logits_cV.masked_fill_(~kept.mask(part.start, part.stop, len(head_VD)), float("-inf"))
    return logits_cV.sub_(logits_cV.amax(-1, keepdim=True))


def _finite(log_cV: Tensor) -> Tensor:
    """In place: a probability of 0 times its logarithm is then 0."""
    return log_cV.clamp_min_(torch.finfo(log_cV.dtype).min)


def _times(a: Tensor, b: Tensor, accum: torch.dtype) -> Tensor:
    """a @ b, added up and given in `accum`: on a GPU straight from bf16 operands."""
    if a.is_cuda and a.dtype == b.dtype and a.dtype != accum:
        return torch.mm(a, b, out_dtype=accum)
    return a.to(accum) @ b.to(accum)
