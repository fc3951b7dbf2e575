"""Losses of pre-training, next token and multi-token prediction; and the router's bias, which balances without one.

Everything here is a sum. The caller adds up the sums of all micro-batches and ranks and divides once by a global
count, so that a gradient does not depend on how a batch was split. Sources: the report, section 2.1 (shared MTP) and
GLM-4.5 (MTP weight, bias rate), which take the forms from DeepSeek-V3. Read next: `kernels.cross_entropy`,
`kernels.balance`, then the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from glm5.kernels.cross_entropy import LinearCrossEntropy, linear_cross_entropy


@dataclass(frozen=True)
class LanguageModelLoss:
    """The summed loss of one micro-batch.

    Attributes:
        loss_sum: scalar with gradient: CE_0 + (lambda / D) * (CE_1 + ... + CE_D), each a weighted sum in nats. Divide
            by the global sum of `tokens[0]`: as in DeepSeek-V3 every depth shares the main head's denominator.
        ce_sums: fp32 [1 + D], without gradient: CE_0 ... CE_D. Divide each by its own `tokens` for a metric.
        tokens: fp32 [1 + D], sum of the weights of each depth's targets.
    """

    loss_sum: Tensor
    ce_sums: Tensor
    tokens: Tensor


def language_model_loss(
    hidden: Sequence[Tensor],
    head_VD: Tensor,
    targets: Sequence[tuple[Tensor, Tensor]],
    *,
    mtp_weight: float = 0.0,
    chunk: int | None = None,
    cross_entropy: Callable[..., LinearCrossEntropy] = linear_cross_entropy,
) -> LanguageModelLoss:
    """Cross-entropy of the main head and of D MTP depths, in one pass over the shared head.

    All depths go through `linear_cross_entropy` together, so that the head's gradient is added up in fp32 once,
    however many depths share it.

    Args:
        hidden: [B_d, T_d, D] for d = 0 (the trunk) ... D, after their final norms.
        head_VD: the shared head.
        targets: for each of them (target_BT, weight_BT): the token d + 1 ahead, int64, and its weight, 0 where it does
            not count. `glm5.data.packing.targets_at_depth` makes them of packed rows.
        mtp_weight: lambda; each of the D depths weighs lambda / D.
        chunk: tokens to a chunk of logits.
        cross_entropy: another one of the same arguments, for a head of which this process has some rows only:
            `glm5.parallel.vocab.Vocabulary.cross_entropy`.
    """
    depths = len(hidden) - 1
    weights = [weight_BT.flatten() for _, weight_BT in targets]
    factors = [1.0] + [mtp_weight / depths] * depths if depths else [1.0]
    scaled_N = torch.cat([w * f for w, f in zip(weights, factors, strict=True)])
    hidden_ND = torch.cat([h.flatten(0, 1) for h in hidden]) if depths else hidden[0].flatten(0, 1)
    out = cross_entropy(hidden_ND, head_VD, torch.cat([t.flatten() for t, _ in targets]), scaled_N, chunk=chunk)
    logprobs = out.logprobs_N.split([len(w) for w in weights])
    with torch.no_grad():
        ce_sums = torch.stack([-(lp @ w.to(lp.dtype)) for lp, w in zip(logprobs, weights, strict=True)])
        tokens = torch.stack([w.sum() for w in weights])
    return LanguageModelLoss(out.loss_sum, ce_sums, tokens)


def router_bias_update(bias_E: Tensor, counts_E: Tensor, rate: float) -> Tensor:
    """The router's selection bias after one step: up by `rate` below the mean load, down above it, else unchanged.

    Args:
        bias_E: fp32; a bf16 bias near its usual size cannot hold steps of 0.001.
        counts_E: int64 tokens per expert, summed over the whole global batch first. The comparison with the mean is
            exact, in integers: rounded counts would flip signs near balance.

    Returns:
        A new tensor; the caller copies it into the buffer.

    Raises:
        TypeError: another dtype.
    """
    if bias_E.dtype != torch.float32 or counts_E.dtype != torch.int64:
        raise TypeError(f"need an fp32 bias and int64 counts, got {bias_E.dtype} and {counts_E.dtype}")
    direction_E = torch.sign(counts_E.sum(-1, keepdim=True) - counts_E * counts_E.shape[-1])
    return bias_E + rate * direction_E.float()
