"""How evenly the router spreads tokens: the sequence-wise balance loss.

Source: DeepSeek-V3, whose form GLM-4.5 and GLM-5 keep (weight 1e-4, beside the bias that balances without a loss; see
`train.losses.router_bias_update`). Read next: `model.moe`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from glm5.kernels.dispatch import pick
from glm5.kernels.moe import expert_loads


def loads_and_balance(
    scores_BTE: Tensor,
    experts_BTM: Tensor,
    valid_BT: Tensor | None = None,
    total: Callable[[Tensor], Tensor] | None = None,
    sequences: tuple[Tensor, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """`moe.expert_loads`, int64 [E], and `sequence_balance_loss` of the same choice."""
    plain = total is None and sequences is None
    fast = pick("train_balance", scores_BTE) if plain and scores_BTE.requires_grad else None
    if fast is not None:
        both: tuple[Tensor, Tensor] = fast(scores_BTE, experts_BTM, valid_BT)
        return both
    loads_E = expert_loads(experts_BTM, scores_BTE.shape[-1], valid_BT)
    return loads_E, sequence_balance_loss(scores_BTE, experts_BTM, valid_BT, total, sequences)


def sequence_balance_loss(
    scores_BTE: Tensor,
    experts_BTM: Tensor,
    valid_BT: Tensor | None = None,
    total: Callable[[Tensor], Tensor] | None = None,
    sequences: tuple[Tensor, int] | None = None,
) -> Tensor:
    """sum_e f_e P_e of each sequence, summed over sequences; perfect balance gives 1 for each.

    f_e = E / (M T) times how often the sequence's tokens chose expert e; P_e is the mean over its tokens of e's share
    of the scores. The gradient flows through P alone. The caller multiplies by alpha (1e-4) and divides by the
    global number of sequences.

    Args:
        scores_BTE: sigmoid scores of the router, without the selection bias.
        experts_BTM: integer ids of the M chosen experts of each token.
        valid_BT: bool, False for padding, which counts neither in f nor in P nor in T. A row of padding gives 0.
        total: where other processes hold other tokens of the same sequences: sums a tensor of counts over all of them.
            f and T are then the whole sequence's, P has the tokens here, and the losses of all processes add up to the
            sequences'.
        sequences: int64 [B, T], the number of each token's sequence, and how many sequences there are; by default every
            row is one. One without tokens here gives 0.
    """
    batch, _, experts = scores_BTE.shape
    scores_BTE = scores_BTE.float()
    share_BTE = scores_BTE / scores_BTE.sum(-1, keepdim=True)
    if sequences is not None:
        return _of_parts(share_BTE, experts_BTM, valid_BT, total, *sequences)
    experts_BX = experts_BTM.long().flatten(1)
    once_BX = torch.ones_like(experts_BX)
    tokens_B1 = torch.full_like(experts_BX[:, :1], experts_BTM.shape[1])
    if valid_BT is not None:
        share_BTE = share_BTE.masked_fill(~valid_BT[..., None], 0.0)
        once_BX = valid_BT[..., None].expand_as(experts_BTM).flatten(1).long()
        tokens_B1 = valid_BT.sum(-1, keepdim=True)
    count_BE = experts_BX.new_zeros((batch, experts)).scatter_add_(1, experts_BX, once_BX)
    if total is not None:
        count_BE, tokens_B1 = total(torch.cat((count_BE, tokens_B1), dim=1)).split((experts, 1), dim=1)
    tokens_B1 = tokens_B1.clamp(min=1)
    frequency_BE = count_BE * experts / (experts_BTM.shape[-1] * tokens_B1)
    return (frequency_BE * (share_BTE.sum(1) / tokens_B1)).sum()


def _of_parts(
    share_BTE: Tensor,
    experts_BTM: Tensor,
    valid_BT: Tensor | None,
    total: Callable[[Tensor], Tensor] | None,
    number_BT: Tensor,
    sequences: int,
) -> Tensor:
    """The same where rows are cut into n sequences, numbered from 0 over all rows. N tokens."""
    choices, experts = experts_BTM.shape[-1], share_BTE.shape[-1]
    member_nN = number_BT.flatten() == torch.arange(sequences, device=number_BT.device)[:, None]
    if valid_BT is not None:
        member_nN = member_nN & valid_BT.flatten()
    # A product, not a scattered sum: the same bits at every run.
    share_nE = member_nN.to(share_BTE.dtype) @ share_BTE.flatten(0, 1)
    number_NM = number_BT.flatten()[:, None].expand(-1, choices)
    once_NM = member_nN.any(0).long()[:, None].expand(-1, choices)
    count_nE = number_NM.new_zeros(sequences * experts)
    count_nE.scatter_add_(0, (number_NM * experts + experts_BTM.long().flatten(0, 1)).flatten(), once_NM.flatten())
    count_nE, tokens_n1 = count_nE.view(sequences, experts), member_nN.sum(1, keepdim=True)
    if total is not None:
        count_nE, tokens_n1 = total(torch.cat((count_nE, tokens_n1), dim=1)).split((experts, 1), dim=1)
    tokens_n1 = tokens_n1.clamp(min=1)
    return (count_nE * experts / (choices * tokens_n1) * (share_nE / tokens_n1)).sum()
