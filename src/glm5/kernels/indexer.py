"""The lightning indexer: I(t, s) = sum_j w(t, j) * ReLU(q(t, j) . k(s)), and the top-k positions by it.

Source: report section 2.1.1 and DeepSeek-V3.2. Works in tiles of queries, so that no [T, S] tensor of a long
sequence exists. Read next: `topk`, `attention`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from glm5.kernels.dispatch import pick
from glm5.kernels.pages import Pages
from glm5.kernels.tiling import tile_of
from glm5.kernels.topk import racing_topk, stable_topk
from glm5.kernels.visibility import Visibility


def index_scores(q_BTJI: Tensor, w_BTJ: Tensor, k_BSI: Tensor, visible: Visibility) -> Tensor:
    """Scores fp32 [B, T, visible.slots], -inf outside each query's interval. For tiles; see `index_select`.

    Args:
        q_BTJI: index queries, rotated. w_BTJ: head weights, already times J**-0.5 * I**-0.5 (ReLU is positively
            homogeneous, so the scales may be folded). k_BSI: index keys, normed and rotated, S >= visible.slots.
    """
    batch, queries, heads, width = q_BTJI.shape
    k_BIS = k_BSI[:, : visible.slots].float().transpose(1, 2)
    dots = torch.bmm(q_BTJI.float().reshape(batch, queries * heads, width), k_BIS).relu_()
    dots = dots.view(batch * queries, heads, -1)
    scores = torch.bmm(w_BTJ.float().reshape(batch * queries, 1, heads), dots).view(batch, queries, -1)
    if queries == 1 and visible.offset is not None:  # plain decode sees every slot
        return scores
    return scores.masked_fill_(~visible.mask_BTS(), -torch.inf)


def index_select(
    q_BTJI: Tensor,
    w_BTJ: Tensor,
    k_BSI: Tensor,
    visible: Visibility,
    k: int,
    pages: Pages | None = None,
    ties: torch.Generator | None = None,
) -> Tensor:
    """Score and select, tile by tile: each query's k best visible slots, all of them where fewer are visible.

    Args:
        pages: k_BSI is a pool [1, rows, I], and this says which rows of it are whose.
        ties: let ties fall at random (`racing_topk`).

    Returns:
        int32 [B, T, min(k, visible.slots)], ascending, padded with -1.
    """
    batch, queries, heads, _ = q_BTJI.shape
    fast = pick("index_select", q_BTJI, w_BTJ, k_BSI) if ties is None else None
    if fast is not None:
        selected: Tensor = fast(q_BTJI, w_BTJ, k_BSI, visible, k, pages)
        return selected
    if pages is not None:
        k_BSI = pages.gather(k_BSI, visible)
    width = min(k, visible.slots)
    tile = tile_of(batch * (heads + 2) * visible.slots, q_BTJI.device)

    def chosen(scores_BTS: Tensor) -> Tensor:
        scores_NS = scores_BTS.flatten(0, 1)
        return stable_topk(scores_NS, k) if ties is None else racing_topk(scores_NS, k, ties)

    if tile >= queries:
        return chosen(index_scores(q_BTJI, w_BTJ, k_BSI, visible)).view(batch, queries, width)
    out = torch.empty(batch, queries, width, dtype=torch.int32, device=q_BTJI.device)
    for start in range(0, queries, tile):
        stop = min(start + tile, queries)
        seen = visible.tile(start, stop)
        scores = index_scores(q_BTJI[:, start:stop], w_BTJ[:, start:stop], k_BSI, seen)
        picked = chosen(scores).view(batch, stop - start, -1)
        out[:, start:stop, : picked.shape[-1]] = picked
        out[:, start:stop, picked.shape[-1] :] = -1
    return out
