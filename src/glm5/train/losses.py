"""Losses of pre-training: next token, multi-token prediction, and expert balance.

Everything here is a sum. The caller adds up the sums of all micro-batches and ranks and divides once by a global
count, so that a gradient does not depend on how a batch was split. Sources: the report, section 2.1 (shared MTP) and
GLM-4.5 (MTP weight, bias rate, balance weight), which take the forms from DeepSeek-V3. Read next:
`kernels.cross_entropy`, `kernels.balance`, then the loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from glm5.kernels.balance import sequence_balance_loss
from glm5.kernels.cross_entropy import linear_cross_entropy

__all__ = [
    "LanguageModelLoss",
    "language_model_loss",
    "mtp_targets",
    "router_bias_update",
    "sequence_balance_loss",
]


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


def mtp_targets(
    ids_BS: Tensor, documents_BS: Tensor | None = None, depth: int = 0, queries: int | None = None
) -> tuple[Tensor, Tensor]:
    """What the hidden states of one depth predict: position t predicts token t + depth + 1 of its own document.

    Args:
        ids_BS: int64 [B, S], tokens of the row; S may exceed the number of queries, so that the last ones have
            targets too.
        documents_BS: [B, S], for packed rows: the slot where each token's document begins. None is one document.
        depth: 0 for the main head, 1, 2, 3 for MTP.
        queries: how many positions T have hidden states; by default S - depth, as many as `GLM5.mtp_hidden` gives.

    Returns:
        targets_BT, int64 (0 where there is none), and weights_BT, fp32: 1 for a target inside the document, else 0.
    """
    if depth < 0:
        raise ValueError(f"depth={depth}: must be at least 0")
    batch, slots = ids_BS.shape
    queries = slots - depth if queries is None else queries
    shift = depth + 1
    # Pad behind, so that every query has a target slot; the padding's weight is 0.
    missing = max(0, queries + shift - slots)
    targets_BT = F.pad(ids_BS, (0, missing))[:, shift : shift + queries]
    inside_T = torch.arange(shift, shift + queries, device=ids_BS.device) < slots
    weights_BT = inside_T.expand(batch, queries)
    if documents_BS is not None:
        if documents_BS.shape != ids_BS.shape:
            raise ValueError(f"documents {list(documents_BS.shape)} and ids {list(ids_BS.shape)} differ in shape")
        theirs_BT = F.pad(documents_BS, (0, missing), value=-1)[:, shift : shift + queries]
        weights_BT = weights_BT & (theirs_BT == F.pad(documents_BS, (0, missing), value=-1)[:, :queries])
    return targets_BT, weights_BT.float()


def language_model_loss(
    hidden: Sequence[Tensor],
    head_VD: Tensor,
    ids_BS: Tensor,
    documents_BS: Tensor | None = None,
    token_weights_BS: Tensor | None = None,
    *,
    mtp_weight: float = 0.0,
    chunk: int | None = None,
) -> LanguageModelLoss:
    """Cross-entropy of the main head and of D MTP depths, in one pass over the shared head.

    All depths go through `linear_cross_entropy` together, so that the head's gradient is added up in fp32 once,
    however many depths share it.

    Args:
        hidden: [B_d, T_d, D] for d = 0 (the trunk) ... D, after their final norms; any T_d, aligned at position 0, of
            the first B_d rows.
        head_VD: the shared head.
        ids_BS, documents_BS: as in `mtp_targets`.
        token_weights_BS: weight of each token of the row as a target (a loss mask); None is 1 for all.
        mtp_weight: lambda; each of the D depths weighs lambda / D.
        chunk: tokens to a chunk of logits.
    """
    depths = len(hidden) - 1
    targets, weights, factors = [], [], []
    for depth, hidden_BTD in enumerate(hidden):
        rows, queries = hidden_BTD.shape[:2]
        documents = None if documents_BS is None else documents_BS[:rows]
        targets_BT, weights_BT = mtp_targets(ids_BS[:rows], documents, depth, queries)
        if token_weights_BS is not None:
            shifted = F.pad(token_weights_BS[:rows].float(), (0, max(0, queries + depth + 1 - ids_BS.shape[1])))
            weights_BT = weights_BT * shifted[:, depth + 1 : depth + 1 + queries]
        targets.append(targets_BT.reshape(-1))
        weights.append(weights_BT.reshape(-1))
        factors.append(1.0 if depth == 0 else mtp_weight / depths)
    scaled_N = torch.cat([w * f for w, f in zip(weights, factors, strict=True)])
    hidden_ND = torch.cat([h.flatten(0, 1) for h in hidden]) if depths else hidden[0].flatten(0, 1)
    out = linear_cross_entropy(hidden_ND, head_VD, torch.cat(targets), scaled_N, chunk=chunk)
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
