"""The fp8 cache row of sparse MLA, and attention over such rows: 656 bytes a position instead of 1,152.

A row is the 512 latent numbers in e4m3 with one fp32 scale for each 128 of them, then the 64 rotary numbers, which stay
bfloat16: 512 + 16 + 128 bytes. The layout is FlashMLA's, so that its kernel reads the same cache. Attention over 2,048
random rows changes by 3.4% of its 2-norm. Source: DeepSeek-V3.2; FlashMLA's notes on its fp8 cache. Read next:
`attention`; `triton.mla_fp8`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from glm5.kernels.dispatch import pick
from glm5.kernels.formats import BLOCK, E4M3, Packed, pack, unpack
from glm5.kernels.pages import Pages
from glm5.kernels.tiling import tile_of

LATENT, ROTARY = 512, 64
GROUPS = LATENT // BLOCK
ROW_BYTES = LATENT + 4 * GROUPS + 2 * ROTARY


def pack_rows(rows: Tensor) -> Tensor:
    """Latent rows [..., 576] as uint8 [..., 656]."""
    p = pack(rows[..., :LATENT], "fp8", columns=BLOCK)
    parts = (p.values, p.scale, rows[..., LATENT:].to(torch.bfloat16).contiguous())
    return torch.cat([part.view(torch.uint8) for part in parts], -1)


def split_rows(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views of packed rows: e4m3 [..., 512], scales fp32 [..., 4] and rotary bf16 [..., 64]. Strides stay the rows'."""
    at = LATENT + 4 * GROUPS
    return rows[..., :LATENT].view(E4M3), rows[..., LATENT:at].view(torch.float32), rows[..., at:].view(torch.bfloat16)


def unpack_rows(rows: Tensor) -> Tensor:
    """Packed rows [..., 656] in fp32 [..., 576]."""
    values, scale, rotary = split_rows(rows)
    return torch.cat((unpack(Packed("fp8", values, scale, 1, BLOCK)), rotary.float()), -1)


def sparse_attention_fp8(
    q_BTHX: Tensor, rows_BSY: Tensor, selected_BTK: Tensor, scale: float, pages: Pages | None = None
) -> tuple[Tensor, Tensor]:
    """softmax(scale * q.k) v over the selected rows of an fp8 cache, without a gradient.

    Args:
        q_BTHX: bf16 [B, T, H, 576]. rows_BSY: uint8 [B, S, 656]; with `pages` a pool [1, rows, 656].
        selected_BTK: int32 slots, -1 = none.

    Returns:
        out [B, T, H, 512] in q's dtype, zeros where nothing is selected; log-sum-exp fp32 [B, T, H], -inf there.
    """
    batch, queries, heads, width = q_BTHX.shape
    fast = pick("sparse_attention_fp8", q_BTHX, rows_BSY)
    if fast is not None:
        pair: tuple[Tensor, Tensor] = fast(q_BTHX, rows_BSY, selected_BTK, scale, pages)
        return pair
    if pages is not None:
        index_BTK, pool = pages.rows(selected_BTK), rows_BSY[0]
    else:
        start_B11 = torch.arange(batch, device=q_BTHX.device)[:, None, None] * rows_BSY.shape[1]
        index_BTK, pool = torch.where(selected_BTK < 0, -1, selected_BTK + start_B11), rows_BSY.reshape(-1, ROW_BYTES)
    index_NK, q_NHX = index_BTK.flatten(0, 1), q_BTHX.flatten(0, 1)
    out_NHC = q_BTHX.new_empty(batch * queries, heads, LATENT)
    lse_NH = q_BTHX.new_empty(batch * queries, heads, dtype=torch.float32)
    tile = tile_of(index_NK.shape[-1] * (width + heads), q_BTHX.device)
    for start in range(0, batch * queries, tile):
        part = slice(start, start + tile)
        out_NHC[part], lse_NH[part] = _attend(q_NHX[part].float(), pool, index_NK[part], scale)
    return out_NHC.view(batch, queries, heads, LATENT), lse_NH.view(batch, queries, heads)


def _attend(q_NHX: Tensor, pool_RY: Tensor, index_NK: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    none_NK = index_NK < 0
    # What -1 reads must be finite though it counts nothing: a row that the query reads anyway, else zeros.
    index_NK = torch.where(none_NK, index_NK[:, :1], index_NK).clamp(min=0)
    rows_NKX = unpack_rows(pool_RY.index_select(0, index_NK.flatten())).view(*index_NK.shape, -1)
    rows_NKX = rows_NKX.masked_fill(none_NK.all(-1)[:, None, None], 0.0)
    logits = torch.bmm(q_NHX, rows_NKX.mT).mul_(scale).masked_fill_(none_NK[:, None], -torch.inf)
    # With no position at all the softmax is 0 / 0; a NaN of a row that is read must stay one.
    probs = logits.softmax(-1).masked_fill(none_NK.all(-1)[:, None, None], 0.0)
    return torch.bmm(probs, rows_NKX[..., :LATENT]), logits.logsumexp(-1)
