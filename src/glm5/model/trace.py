"""What a forward pass can show or be told, beside its result: `Trace` for tests and tools, `Aux` for training.

Both are handed in explicitly and filled in layer order. Read next: `mla`, `moe`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from glm5.kernels.indexer_loss import IndexerLoss


@dataclass
class Trace:
    """Records intermediate tensors and can replay selected positions.

    Args:
        replay: per layer, selected_BTK to use in place of the indexer's own choice (-1 pads).
        scores: also record index scores. This makes full [B, T, S] tensors: for short inputs only.

    After a pass: `hidden` (embeddings, then each layer's output, then the normed last), `selected` and
    `index_scores` per layer that has an indexer, `router` (logits, weights, experts) per MoE layer.
    """

    replay: Sequence[Tensor] | None = None
    scores: bool = False
    hidden: list[Tensor] = field(default_factory=list)
    selected: list[Tensor] = field(default_factory=list)
    index_scores: list[Tensor] = field(default_factory=list)
    router: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)


class Aux:
    """What training gathers from the layers, as sums; the caller divides once by global counts.

    Args:
        indexer: compute the indexer's loss (its gradient reaches the indexer only).
        balance: compute the sequence-wise balance loss of every MoE layer.
        logits: measure the largest attention logit per head, of MLA and GQA alike.
        valid: bool [B, T], False for padding, which then counts neither in loads nor in balance.
        experts: of each MoE layer, int64 [B, T, M]: to take in place of its router's choice, as `kernels.moe.route` has
            it.
        total: where other processes hold other positions of the same sequences: sums a tensor of counts over them.
        sequences: for the balance loss, as `kernels.balance` has it; by default every row is a sequence.

    After a pass, in layer order: `indexer_losses`; `balance_losses`, each summed over sequences; `loads`, int64
    tokens per expert, for the router bias; `logit_maxima`, fp32 [H].
    """

    # No dataclass: FSDP hands modules copies of those that hold tensors with gradients, and would fill in the copies.
    def __init__(
        self,
        *,
        indexer: bool = False,
        balance: bool = False,
        logits: bool = False,
        valid: Tensor | None = None,
        experts: Sequence[Tensor] | None = None,
        total: Callable[[Tensor], Tensor] | None = None,
        sequences: tuple[Tensor, int] | None = None,
    ) -> None:
        self.indexer, self.balance, self.logits, self.valid, self.total = indexer, balance, logits, valid, total
        self.sequences = sequences
        self.experts = experts
        self.indexer_losses: list[IndexerLoss] = []
        self.balance_losses: list[Tensor] = []
        self.loads: list[Tensor] = []
        self.logit_maxima: list[Tensor] = []

    def indexer_kl(self) -> Tensor:
        """Sum of the layers' KL sums; zero where no layer gave one."""
        kls = [x.kl for x in self.indexer_losses]
        return torch.stack(kls).sum() if kls else torch.zeros(())
