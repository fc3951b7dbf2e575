"""The lightning indexer in 8 bits: queries and keys rotated, then rounded to e4m3 with a scale per row.

I(t, s) = c(s) sum_j w'(t, j) ReLU(q8(t, j) . k8(s)), where c is the key's scale and w' the head's weight times its
query's: scales are positive, so that they pass through ReLU. A key takes 132 bytes instead of 256, and the products
run at twice the rate. Source: report section 2.1.1; DeepSeek-V3.2, section 2.1. Read next: `indexer`, `hadamard`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from glm5.kernels.dispatch import pick
from glm5.kernels.formats import pack
from glm5.kernels.hadamard import hadamard
from glm5.kernels.indexer import index_scores
from glm5.kernels.pages import Pages
from glm5.kernels.tiling import tile_of
from glm5.kernels.topk import stable_topk
from glm5.kernels.visibility import Visibility


class IndexKeys(NamedTuple):
    """Rotated e4m3 keys [B, S, I] and their scales, fp32 [B, S]; with pages, pools [1, rows, I] and [1, rows]."""

    values: Tensor
    scale: Tensor


def round_queries(q_BTJI: Tensor, w_BTJ: Tensor) -> tuple[Tensor, Tensor]:
    """Rotated e4m3 queries, and the head weights with the queries' scales folded in, fp32."""
    p = pack(hadamard(q_BTJI), "fp8")
    return p.values, w_BTJ.float() * p.scale.squeeze(-1)


def round_keys(k_BSI: Tensor) -> IndexKeys:
    """The keys as the fp8 cache has them."""
    p = pack(hadamard(k_BSI), "fp8")
    return IndexKeys(p.values, p.scale.squeeze(-1))


def index_scores_fp8(q_BTJI: Tensor, w_BTJ: Tensor, keys: IndexKeys, visible: Visibility) -> Tensor:
    """Scores fp32 [B, T, visible.slots], -inf outside each query's interval. For tiles, as `indexer.index_scores`.

    Args:
        q_BTJI, w_BTJ: of `round_queries`. keys: S >= visible.slots.
    """
    scores = index_scores(q_BTJI, w_BTJ, keys.values, visible)
    # The scale of a slot that nobody sees may be anything.
    return torch.where(scores == -torch.inf, scores, scores * keys.scale[:, None, : visible.slots])


def index_select_fp8(
    q_BTJI: Tensor, w_BTJ: Tensor, keys: IndexKeys, visible: Visibility, k: int, pages: Pages | None = None
) -> Tensor:
    """Score and select, tile by tile: int32 [B, T, min(k, visible.slots)], ascending, padded with -1.

    Arguments as in `index_scores_fp8`; with `pages`, keys are pools.
    """
    batch, queries, heads, _ = q_BTJI.shape
    fast = pick("index_select_fp8", q_BTJI, w_BTJ, keys.values, keys.scale)
    if fast is not None:
        selected: Tensor = fast(q_BTJI, w_BTJ, keys, visible, k, pages)
        return selected
    if pages is not None:
        values = pages.gather(keys.values.view(torch.uint8), visible).view(keys.values.dtype)
        keys = IndexKeys(values, pages.gather(keys.scale[..., None], visible)[..., 0])
    out = torch.full((batch, queries, min(k, visible.slots)), -1, dtype=torch.int32, device=q_BTJI.device)
    tile = tile_of(batch * (heads + 2) * visible.slots, q_BTJI.device)
    for start in range(0, queries, tile):
        part = slice(start, min(start + tile, queries))
        seen = visible.tile(part.start, part.stop)
        scores = index_scores_fp8(q_BTJI[:, part], w_BTJ[:, part], keys, seen)
        picked = stable_topk(scores.flatten(0, 1), k)
        out[:, part, : picked.shape[-1]] = picked.view(batch, -1, picked.shape[-1])
    return out
