"""Attention over a visible interval, dense or restricted to selected positions, in tiles of queries.

Two forms share these operators. Expanded (multi-head): keys and values have one head per query head. Absorbed
(multi-query): one 512 + 64 wide latent row per position serves all heads, as keys whole and as values by its
first 512 columns. `dense_attention` and `sparse_attention` take either. Both are exact, differentiable, and hold
at most a tile of probabilities, forward and backward. Source: report section 2.1; FlashAttention's recomputation.
Read next: `indexer_loss`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from glm5.kernels.indexer import TILE_ELEMENTS
from glm5.kernels.topk import positions_to_mask
from glm5.kernels.visibility import Visibility


def dense_attention(q_BTHX: Tensor, k_BSGX: Tensor, v_BSGV: Tensor, visible: Visibility, scale: float) -> Tensor:
    """softmax(scale * q.k) v over each query's whole interval.

    Args:
        q_BTHX: [B, T, H, X]. k_BSGX, v_BSGV: [B, S, G, X] and [B, S, G, V] with G = H, or G dividing H (grouped),
            S >= visible.slots. Widths X and V may differ.

    Returns:
        [B, T, H, V] in q's dtype; zeros for a query with an empty interval.
    """
    if visible.offset == 0 and visible.slots == q_BTHX.shape[1] > 1:
        return _fused_causal(q_BTHX, k_BSGX[:, : visible.slots], v_BSGV[:, : visible.slots], scale)
    return _Attention.apply(q_BTHX, k_BSGX, v_BSGV, visible, None, scale)


def sparse_attention(
    q_BTHX: Tensor, k_BSGX: Tensor, v_BSGV: Tensor, selected_BTK: Tensor, visible: Visibility, scale: float
) -> Tensor:
    """softmax over the selected positions only (int32, -1 = none), which must lie in each query's interval.

    The absorbed form (G = 1) gathers rows; the expanded form masks. Shapes as in `dense_attention`.
    """
    if k_BSGX.shape[2] == 1 and not (torch.is_grad_enabled() and (q_BTHX.requires_grad or k_BSGX.requires_grad)):
        return _gathered(q_BTHX, k_BSGX[:, :, 0], v_BSGV[:, :, 0], selected_BTK, scale)
    return _Attention.apply(q_BTHX, k_BSGX, v_BSGV, visible, selected_BTK, scale)


def _fused_causal(q_BTHX: Tensor, k_BSGX: Tensor, v_BSGV: Tensor, scale: float) -> Tensor:
    """torch's fused kernel; unequal widths are padded with zeros, which change neither products nor gradients."""
    width_v, width_q = v_BSGV.shape[-1], q_BTHX.shape[-1]
    if width_v < width_q:
        v_BSGV = F.pad(v_BSGV, (0, width_q - width_v))
    elif width_q < width_v:
        q_BTHX, k_BSGX = F.pad(q_BTHX, (0, width_v - width_q)), F.pad(k_BSGX, (0, width_v - width_q))
    q, k, v = (x.transpose(1, 2) for x in (q_BTHX, k_BSGX, v_BSGV))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=k.shape[1] != q.shape[1])
    return out.transpose(1, 2)[..., :width_v]


def _gathered(q_BTHX: Tensor, k_BSX: Tensor, v_BSV: Tensor, selected_BTK: Tensor, scale: float) -> Tensor:
    """Absorbed form, no gradient: gather each query's rows and attend among them."""
    batch, queries, heads, width = q_BTHX.shape
    slots, value = k_BSX.shape[1], v_BSV.shape[-1]
    shared = v_BSV.data_ptr() == k_BSX.data_ptr()  # values are the keys' first columns: gather once
    out = torch.empty(batch, queries, heads, value, dtype=q_BTHX.dtype, device=q_BTHX.device)
    tile = max(1, TILE_ELEMENTS // max(1, batch * selected_BTK.shape[-1] * (width + heads)))
    base_B11 = torch.arange(batch, device=q_BTHX.device)[:, None, None] * slots
    for start in range(0, queries, tile):
        stop = min(start + tile, queries)
        picked = selected_BTK[:, start:stop]
        flat = (picked.clamp(min=0) + base_B11).flatten()
        rows = batch * (stop - start)
        keys = k_BSX.reshape(-1, width).index_select(0, flat).view(rows, -1, width)
        values = keys[..., :value] if shared else v_BSV.reshape(-1, value).index_select(0, flat).view(rows, -1, value)
        logits = torch.bmm(q_BTHX[:, start:stop].reshape(rows, heads, width), keys.transpose(1, 2)).float() * scale
        absent = (picked < 0).view(rows, 1, -1)
        logits = logits.masked_fill_(absent, -torch.inf)
        probs = logits.softmax(-1).nan_to_num_(0.0)  # a query with nothing selected gives zeros
        out[:, start:stop] = torch.bmm(probs.to(values.dtype), values).view(batch, stop - start, heads, value)
    return out


def tile_mask(visible: Visibility, selected_BtK: Tensor | None) -> Tensor:
    """Boolean [B, t, slots] of a tile: its interval, or its selected positions."""
    if selected_BtK is None:
        return visible.mask_BTS()
    batch, queries = selected_BtK.shape[:2]
    return positions_to_mask(selected_BtK.flatten(0, 1), visible.slots).view(batch, queries, -1)


def tile_logits(q_BtHX: Tensor, k_BSGX: Tensor, mask_BtS: Tensor, scale: float) -> Tensor:
    """fp32 logits [B, H, t, S] of a tile, -inf outside the mask."""
    batch, queries, heads, width = q_BtHX.shape
    groups = k_BSGX.shape[2]
    q = q_BtHX.transpose(1, 2).reshape(batch, groups, heads // groups * queries, width)
    logits = torch.matmul(q, k_BSGX.permute(0, 2, 3, 1)).float().view(batch, heads, queries, -1)
    return logits.mul_(scale).masked_fill_(~mask_BtS[:, None], -torch.inf)


class _Attention(torch.autograd.Function):
    """Tiled masked attention with recomputation in backward."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, visible: Visibility, selected: Tensor | None, scale: float
    ) -> Tensor:
        batch, queries, heads, _ = q.shape
        out = torch.empty(batch, queries, heads, v.shape[-1], dtype=q.dtype, device=q.device)
        lse = torch.empty(batch, heads, queries, dtype=torch.float32, device=q.device)
        for start, stop, seen, mask in _tiles(queries, batch * heads, visible, selected):
            logits = tile_logits(q[:, start:stop], k[:, : seen.slots], mask, scale)
            peak = logits.amax(-1, keepdim=True).clamp_(min=-1e30)  # finite, so that an empty row gives zeros
            weights = logits.sub_(peak).exp_()
            total = weights.sum(-1, keepdim=True)
            lse[:, :, start:stop] = (peak + total.log()).squeeze(-1)
            out[:, start:stop] = _mix((weights / total.clamp_(min=1e-30)).to(v.dtype), v[:, : seen.slots])
        ctx.save_for_backward(q, k, v, out, lse, *(() if selected is None else (selected,)))
        ctx.visible, ctx.scale = visible, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *rest = ctx.saved_tensors
        selected = rest[0] if rest else None
        visible, scale = ctx.visible, ctx.scale
        batch, queries, heads, width = q.shape
        groups, value = k.shape[2], v.shape[-1]
        dq, dk, dv = (
            torch.empty_like(q),
            torch.zeros_like(k, dtype=torch.float32),
            torch.zeros_like(v, dtype=torch.float32),
        )
        delta = (grad_out.float() * out.float()).sum(-1).transpose(1, 2)[..., None]  # [B, H, T, 1]
        fold = (batch, groups, -1)
        for start, stop, seen, mask in _tiles(queries, batch * heads, visible, selected):
            keys, values = k[:, : seen.slots], v[:, : seen.slots]
            q_tile, g_tile = q[:, start:stop], grad_out[:, start:stop]
            logits = tile_logits(q_tile, keys, mask, scale)
            lse_tile = lse[:, :, start:stop]
            probs = torch.exp(logits - lse_tile.masked_fill(lse_tile == -torch.inf, 0.0)[..., None])
            g = g_tile.transpose(1, 2).reshape(*fold, value)
            dprobs = torch.matmul(g, values.permute(0, 2, 3, 1)).float().view_as(probs)
            dlogits = (probs * (dprobs - delta[:, :, start:stop])).mul_(scale).to(q.dtype)
            flat = dlogits.view(*fold, seen.slots)
            dq[:, start:stop] = torch.matmul(flat, keys.transpose(1, 2)).view(batch, heads, -1, width).transpose(1, 2)
            qf = q_tile.transpose(1, 2).reshape(*fold, width)
            dk[:, : seen.slots] += torch.matmul(flat.transpose(2, 3), qf).transpose(1, 2)
            pf = probs.to(g.dtype).view(*fold, seen.slots)
            dv[:, : seen.slots] += torch.matmul(pf.transpose(2, 3), g).transpose(1, 2)
        return dq, dk.to(k.dtype), dv.to(v.dtype), None, None, None


def _mix(probs_BHtS: Tensor, v_BSGV: Tensor) -> Tensor:
    batch, heads, queries, slots = probs_BHtS.shape
    groups = v_BSGV.shape[2]
    out = torch.matmul(probs_BHtS.reshape(batch, groups, -1, slots), v_BSGV.transpose(1, 2))
    return out.view(batch, heads, queries, -1).transpose(1, 2)


def _tiles(queries: int, rows: int, visible: Visibility, selected: Tensor | None) -> Any:
    """Yield (start, stop, visibility, mask) of query tiles whose [rows, t, S] logits stay within TILE_ELEMENTS."""
    tile = max(1, TILE_ELEMENTS // max(1, rows * visible.slots))
    for start in range(0, queries, tile):
        stop = min(start + tile, queries)
        seen = visible.tile(start, stop)
        yield start, stop, seen, tile_mask(seen, None if selected is None else selected[:, start:stop])
