"""What trains the indexer: KL from the main attention's head-summed distribution to the indexer's.

Source: report section 2.1.1 and DeepSeek-V3.2. The target p(t, .) is the main attention's probabilities summed
over heads and normalised; the loss is the sum over queries of KL(p(t) || softmax(I(t))), over the whole interval in
the dense warm-up, and over the selected set in the sparse stage (the target renormalises within the set). The main
attention gets no gradient: its queries and keys enter as constants. Forward computes the gradients tile by tile, so
memory stays linear in the length. Read next: `glm5.model.mla`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from glm5.kernels.attention import tile_logits, tile_mask
from glm5.kernels.dispatch import pick
from glm5.kernels.tiling import tile_of
from glm5.kernels.topk import topk_mask
from glm5.kernels.visibility import Visibility


@dataclass(frozen=True)
class IndexerLoss:
    """Sums over queries, to be divided by a global count once.

    kl: scalar with gradient to the indexer only. queries: how many counted. recall_sum: attention mass on the
    indexer's own top-k (equals `queries` where it misses nothing). logit_max_H: largest main-attention logit per head.
    """

    kl: Tensor
    queries: Tensor
    recall_sum: Tensor
    logit_max_H: Tensor


def indexer_loss(
    iq_BTJI: Tensor,
    iw_BTJ: Tensor,
    ik_BSI: Tensor,
    q_BTHX: Tensor,
    k_BSGX: Tensor,
    visible: Visibility,
    selected_BTK: Tensor | None,
    scale: float,
    topk: int,
    lse_BTH: Tensor | None = None,
) -> IndexerLoss:
    """KL, recall and logit maxima in one pass. Index tensors as in `indexer.index_scores`; q, k as in `attention`.

    lse_BTH: of the selected logits, if at hand: it saves a fast version that product.
    """
    out = _IndexerLoss.apply(
        iq_BTJI, iw_BTJ, ik_BSI, q_BTHX.detach(), k_BSGX.detach(), visible, selected_BTK, scale, topk, lse_BTH
    )
    return IndexerLoss(*out)


class _IndexerLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        iq: Tensor,
        iw: Tensor,
        ik: Tensor,
        q: Tensor,
        k: Tensor,
        visible: Visibility,
        selected: Tensor | None,
        scale: float,
        topk: int,
        lse: Tensor | None,
    ) -> tuple[Tensor, ...]:
        wants_grad = any(ctx.needs_input_grad[:3])
        fast = None
        if selected is None:
            fast = pick("interval_loss", iq, ik, q, k)
        elif selected.shape[-1] <= topk:  # a selection that the top-k holds whole: nothing need be ranked again
            fast = pick("indexer_loss", iq, ik, q, k)
        if fast is not None and selected is None:
            kl, recall, logit_max, *grads = fast(iq, iw, ik, q, k, visible, scale, topk, wants_grad)
        elif fast is not None:
            kl, recall, logit_max, *grads = fast(iq, iw, ik, q, k, selected, scale, lse, wants_grad)
        else:
            kl, recall, logit_max, *grads = _in_tiles(iq, iw, ik, q, k, visible, selected, scale, topk, wants_grad)
        ctx.save_for_backward(*grads)
        ctx.dtypes = (iq.dtype, iw.dtype, ik.dtype)
        count = (visible.count_BT() > 0).sum().float()
        ctx.mark_non_differentiable(count, recall, logit_max)
        return kl, count, recall, logit_max

    @staticmethod
    def backward(ctx: Any, grad_kl: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        grads = (g.mul(grad_kl).to(dtype) for g, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True))
        return (*grads, None, None, None, None, None, None, None)


def _in_tiles(
    iq: Tensor,
    iw: Tensor,
    ik: Tensor,
    q: Tensor,
    k: Tensor,
    visible: Visibility,
    selected: Tensor | None,
    scale: float,
    topk: int,
    wants_grad: bool,
) -> tuple[Tensor, ...]:
    """KL, recall, logit maxima, and the gradients of the KL to iq, iw and ik, in tiles of queries."""
    batch, queries, heads, _ = q.shape
    index_heads, width = iq.shape[2:]
    diq, diw = torch.zeros_like(iq, dtype=torch.float32), torch.zeros_like(iw, dtype=torch.float32)
    dik = torch.zeros_like(ik, dtype=torch.float32)
    kl = torch.zeros((), dtype=torch.float32, device=q.device)
    recall = torch.zeros_like(kl)
    logit_max = torch.full((heads,), -torch.inf, device=q.device)
    tile = tile_of(batch * (heads + index_heads + 2) * visible.slots, q.device)
    for start in range(0, queries, tile):
        stop = min(start + tile, queries)
        seen = visible.tile(start, stop)
        mask = tile_mask(seen, None if selected is None else selected[:, start:stop])
        alive = mask.any(-1)
        logits = tile_logits(q[:, start:stop], k[:, : seen.slots], mask, scale)
        logit_max = torch.maximum(logit_max, logits.amax((0, 2, 3)))
        target = logits.softmax(-1).nan_to_num_(0.0).mean(1)  # [B, t, S]; the heads' mean is their normalised sum
        keys = ik[:, : seen.slots].float()
        iq_tile, iw_tile = iq[:, start:stop].float(), iw[:, start:stop].float()
        flat_q = iq_tile.reshape(batch, -1, width)
        dots = torch.bmm(flat_q, keys.transpose(1, 2)).relu_().view(batch, stop - start, index_heads, -1)
        scores = torch.matmul(iw_tile.unsqueeze(-2), dots).squeeze(-2)
        masked = scores.masked_fill(~mask, -torch.inf)
        guess = masked.log_softmax(-1).masked_fill(~mask, 0.0)
        entropy = torch.xlogy(target, target).sum(-1)
        kl += ((entropy - (target * guess).sum(-1)) * alive).sum()
        picked = topk_mask(masked.flatten(0, 1), topk).view_as(mask)
        recall += (target * picked).sum()
        if wants_grad:
            dscores = torch.where(mask, guess.exp() - target, 0.0)  # d kl / d scores
            diw[:, start:stop] = torch.matmul(dots, dscores.unsqueeze(-1)).squeeze(-1)
            ddots = (iw_tile.unsqueeze(-1) * dscores.unsqueeze(-2)) * (dots > 0)
            ddots = ddots.view(batch, -1, seen.slots)
            diq[:, start:stop] = torch.bmm(ddots, keys).view_as(iq_tile)
            dik[:, : seen.slots] += torch.bmm(ddots.transpose(1, 2), flat_q)
    return kl, recall, logit_max, diq, diw, dik
