"""Attention over a visible interval, dense or restricted to selected positions, in tiles of queries.

Two forms share these operators. Expanded (multi-head): keys and values have one head per query head. Absorbed
(multi-query): one 512 + 64 wide latent row per position serves all heads, as keys whole and as values by its
first 512 columns. `dense_attention` and `sparse_attention` take either. Both are exact, differentiable, and hold
at most a tile of probabilities, forward and backward. Source: report section 2.1; FlashAttention's recomputation.
Read next: `indexer_loss`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from glm5.kernels.dispatch import pick
from glm5.kernels.pages import Pages
from glm5.kernels.tiling import tile_of
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
    if visible.packed and _flash_takes(q_BTHX, v_BSGV):
        return _fused_rows(q_BTHX, k_BSGX, v_BSGV, visible, scale)
    return _Attention.apply(q_BTHX, k_BSGX, v_BSGV, visible, None, scale)


def sparse_attention(
    q_BTHX: Tensor,
    k_BSGX: Tensor,
    v_BSGV: Tensor,
    selected_BTK: Tensor,
    visible: Visibility,
    scale: float,
    pages: Pages | None = None,
) -> Tensor:
    """softmax over the selected positions only (int32, -1 = none), which must lie in each query's interval.

    The absorbed form (G = 1) gathers rows; the expanded form masks. Shapes as in `dense_attention`; with `pages`, in
    the absorbed form only, keys and values are those of a pool, [1, rows, 1, width].
    """
    if pages is None and torch.is_grad_enabled() and (q_BTHX.requires_grad or k_BSGX.requires_grad):
        return sparse_attention_lse(q_BTHX, k_BSGX, v_BSGV, selected_BTK, visible, scale)[0]
    fast = pick("sparse_attention", q_BTHX, k_BSGX, v_BSGV)
    if fast is not None:
        out: Tensor = fast(q_BTHX, k_BSGX, v_BSGV, selected_BTK, visible, scale, pages)
        return out
    if pages is not None:  # every query reads its own rows, so that sequences need not be told apart
        selected_BTK = pages.rows(selected_BTK).flatten(0, 1)[None]
        rows = Visibility(*(selected_BTK[..., 0],) * 2, k_BSGX.shape[1])
        flat = q_BTHX.flatten(0, 1)[None]
        return _gathered(flat, k_BSGX[:, :, 0], v_BSGV[:, :, 0], selected_BTK, rows, scale).view(*q_BTHX.shape[:3], -1)
    if k_BSGX.shape[2] == 1:
        return _gathered(q_BTHX, k_BSGX[:, :, 0], v_BSGV[:, :, 0], selected_BTK, visible, scale)
    return _Attention.apply(q_BTHX, k_BSGX, v_BSGV, visible, selected_BTK, scale)


def sparse_attention_lse(
    q_BTHX: Tensor, k_BSGX: Tensor, v_BSGV: Tensor, selected_BTK: Tensor, visible: Visibility, scale: float
) -> tuple[Tensor, Tensor | None]:
    """`sparse_attention` for training, and the log-sum-exp [B, T, H] of its logits where what runs has it, fp32."""
    fast = pick("train_sparse_attention", q_BTHX, k_BSGX, v_BSGV)
    if fast is not None:
        pair: tuple[Tensor, Tensor] = fast(q_BTHX, k_BSGX, v_BSGV, selected_BTK, scale)
        return pair
    return _Attention.apply(q_BTHX, k_BSGX, v_BSGV, visible, selected_BTK, scale), None


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


def _flash_takes(q_BTHX: Tensor, v_BSGV: Tensor) -> bool:
    """Whether torch's fused kernel for rows of several documents can run: half precision on CUDA."""
    half, widest = q_BTHX.dtype in (torch.bfloat16, torch.float16), max(q_BTHX.shape[-1], v_BSGV.shape[-1])
    return q_BTHX.is_cuda and half and widest <= 256


def _fused_rows(q_BTHX: Tensor, k_BSGX: Tensor, v_BSGV: Tensor, visible: Visibility, scale: float) -> Tensor:
    """Rows of one document, at the beginning of a batch, by the causal kernel, which is the faster one (on an H200 at
    widths of 256 by 1.6); the others by documents."""
    whole, others = visible.whole_first
    rest = len(q_BTHX) - whole
    if rest == 0:
        return _fused_causal(q_BTHX, k_BSGX, v_BSGV, scale)
    if whole == 0:
        return _fused_documents(q_BTHX, k_BSGX, v_BSGV, visible, scale)
    (q, q_rest), (k, k_rest), (v, v_rest) = (x.split_with_sizes((whole, rest)) for x in (q_BTHX, k_BSGX, v_BSGV))
    return torch.cat((_fused_causal(q, k, v, scale), _fused_documents(q_rest, k_rest, v_rest, others, scale)))


def _fused_documents(q_BTHX: Tensor, k_BSGX: Tensor, v_BSGV: Tensor, visible: Visibility, scale: float) -> Tensor:
    """Every document as a sequence of its own; what padding sees is cut off again. Keys and values that heads share are
    repeated: not all versions of the kernel take fewer of them than queries have."""
    from torch.nn.attention.varlen import varlen_attn

    k_BSGX, v_BSGV = (_by_head(x, q_BTHX.shape[2]) for x in (k_BSGX, v_BSGV))
    widths = [x.shape[-1] for x in (q_BTHX, k_BSGX, v_BSGV)]
    wide = -(-max(widths) // 8) * 8
    same = min(widths) == wide  # a pad by nothing would be a copy
    q, k, v = (
        (x if same else F.pad(x, (0, wide - w))).flatten(0, 1)
        for x, w in zip((q_BTHX, k_BSGX, v_BSGV), widths, strict=True)
    )
    edges, longest, padded = visible.segments
    out = varlen_attn(q, k, v, edges, edges, longest, longest, scale=scale, window_size=(-1, 0))
    assert isinstance(out, Tensor)  # it is a pair only where asked for more
    out = out.unflatten(0, q_BTHX.shape[:2])[..., : widths[2]]
    return out.masked_fill((visible.first_BT > visible.last_BT)[..., None, None], 0.0) if padded else out


def _by_head(x_BSGX: Tensor, heads: int) -> Tensor:
    """Keys or values of groups of heads, repeated for each head: [B, S, H, X]."""
    groups = x_BSGX.shape[2]
    if groups == heads:
        return x_BSGX
    return x_BSGX.unsqueeze(3).expand(-1, -1, -1, heads // groups, -1).flatten(2, 3)


def _gathered(
    q_BTHX: Tensor, k_BSX: Tensor, v_BSV: Tensor, selected_BTK: Tensor, visible: Visibility, scale: float
) -> Tensor:
    """Absorbed form, no gradient: gather each query's rows and attend among them, in tiles of queries."""
    batch, queries, heads, width = q_BTHX.shape
    tile = tile_of(batch * selected_BTK.shape[-1] * (width + heads), q_BTHX.device)
    if tile >= queries:
        return _gathered_tile(q_BTHX, k_BSX, v_BSV, selected_BTK, visible, scale)
    out = torch.empty(batch, queries, heads, v_BSV.shape[-1], dtype=q_BTHX.dtype, device=q_BTHX.device)
    for start in range(0, queries, tile):
        part = slice(start, min(start + tile, queries))
        seen = visible.tile(part.start, part.stop)
        out[:, part] = _gathered_tile(q_BTHX[:, part], k_BSX, v_BSV, selected_BTK[:, part], seen, scale)
    return out


def _gathered_tile(
    q: Tensor, k_BSX: Tensor, v_BSV: Tensor, selected: Tensor, visible: Visibility, scale: float
) -> Tensor:
    batch, queries, heads, width = q.shape
    rows, chosen, value = batch * queries, selected.shape[-1], v_BSV.shape[-1]
    # Where the first query already sees as many slots as are chosen, no entry is -1.
    full = visible.offset is not None and visible.offset + 1 >= chosen
    # Else what -1 reads, weighted with zero, must be finite: a row that the query reads anyway.
    index = selected if full else torch.where(selected < 0, selected[..., :1], selected).clamp_(min=0)
    if batch > 1:
        index = index + torch.arange(batch, device=q.device)[:, None, None] * k_BSX.shape[1]
    index = index.flatten()
    keys = k_BSX.reshape(-1, width).index_select(0, index).view(rows, chosen, width)
    if v_BSV.data_ptr() == k_BSX.data_ptr():  # values are the keys' first columns: gathered already
        values = keys[..., :value]
    else:
        values = v_BSV.reshape(-1, value).index_select(0, index).view(rows, chosen, value)
    logits = torch.bmm(q.reshape(rows, heads, width), keys.transpose(1, 2)).to(accumulator(q.dtype)).mul_(scale)
    if full:
        probs = logits.softmax(-1)
    else:  # a query with nothing selected gives zeros
        probs = logits.masked_fill_((selected < 0).view(rows, 1, -1), -torch.inf).softmax(-1).nan_to_num_(0.0)
    return torch.bmm(probs.to(values.dtype), values).view(batch, queries, heads, value)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """What logits, softmax and sums are held in: fp32, or float64 for float64 inputs."""
    return torch.promote_types(dtype, torch.float32)


def tile_mask(visible: Visibility, selected_BtK: Tensor | None) -> Tensor:
    """Boolean [B, t, slots] of a tile: its interval, or its selected positions."""
    if selected_BtK is None:
        return visible.mask_BTS()
    batch, queries = selected_BtK.shape[:2]
    return positions_to_mask(selected_BtK.flatten(0, 1), visible.slots).view(batch, queries, -1)


def tile_logits(q_BtHX: Tensor, k_BSGX: Tensor, mask_BtS: Tensor, scale: float) -> Tensor:
    """Logits [B, H, t, S] of a tile in fp32 (float64 for float64), -inf outside the mask."""
    batch, queries, heads, width = q_BtHX.shape
    groups = k_BSGX.shape[2]
    q = q_BtHX.transpose(1, 2).reshape(batch, groups, heads // groups * queries, width)
    logits = torch.matmul(q, k_BSGX.permute(0, 2, 3, 1)).to(accumulator(q.dtype)).view(batch, heads, queries, -1)
    return logits.mul_(scale).masked_fill_(~mask_BtS[:, None], -torch.inf)


@torch.no_grad()
def attention_logit_max(
    q_BTHX: Tensor, k_BSGX: Tensor, visible: Visibility, selected_BTK: Tensor | None, scale: float
) -> Tensor:
    """Largest logit scale * q.k of each head over all visible (or selected) pairs, fp32 [H]; -inf without a pair.

    For measuring training's stability: attention itself never holds its logits. Shapes as in `dense_attention`.
    """
    batch, queries, heads, _ = q_BTHX.shape
    largest_H = torch.full((heads,), -torch.inf, dtype=accumulator(q_BTHX.dtype), device=q_BTHX.device)
    tile = tile_of(batch * heads * visible.slots, q_BTHX.device)
    for start in range(0, queries, tile):
        stop = min(start + tile, queries)
        seen = visible.tile(start, stop)
        mask = tile_mask(seen, None if selected_BTK is None else selected_BTK[:, start:stop])
        logits = tile_logits(q_BTHX[:, start:stop], k_BSGX[:, : seen.slots], mask, scale)
        largest_H = torch.maximum(largest_H, logits.amax((0, 2, 3)))
    return largest_H


class _Attention(torch.autograd.Function):
    """Tiles of queries, each over the keys it may see; backward makes the probabilities again, tile by tile."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, visible: Visibility, selected: Tensor | None, scale: float
    ) -> Tensor:
        batch, queries, heads, _ = q.shape
        out = torch.empty(batch, queries, heads, v.shape[-1], dtype=q.dtype, device=q.device)
        lse = torch.empty(batch, heads, queries, dtype=accumulator(q.dtype), device=q.device)
        attend = _flash_tile if q.device.type == "cpu" else _plain_tile
        for start, stop, seen, mask in _tiles(q, visible, selected):
            tile = attend(q[:, start:stop], k[:, : seen.slots], v[:, : seen.slots], mask, scale)
            out[:, start:stop], lse[:, :, start:stop] = tile
        ctx.save_for_backward(q, k, v, out, lse, *(() if selected is None else (selected,)))
        ctx.visible, ctx.scale = visible, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *rest = ctx.saved_tensors
        dq = torch.empty_like(q)
        dk, dv = torch.zeros_like(k, dtype=lse.dtype), torch.zeros_like(v, dtype=lse.dtype)
        differentiate = _flash_tile_backward if q.device.type == "cpu" else _plain_tile_backward
        for start, stop, seen, mask in _tiles(q, ctx.visible, rest[0] if rest else None):
            part = slice(start, stop)
            keys, values = k[:, : seen.slots], v[:, : seen.slots]
            tile = (q[:, part], keys, values, out[:, part], lse[:, :, part], grad_out[:, part])
            dq[:, part], dk_tile, dv_tile = differentiate(*tile, mask, ctx.scale)
            dk[:, : seen.slots] += dk_tile
            dv[:, : seen.slots] += dv_tile
        return dq, dk.to(k.dtype), dv.to(v.dtype), None, None, None


def _plain_tile(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """out [B, t, H, V] and log-sum-exp [B, H, t] of one tile."""
    logits = tile_logits(q, k, mask, scale)
    peak = logits.amax(-1, keepdim=True).clamp_(min=-1e30)  # finite, so that an empty row gives zeros
    weights = logits.sub_(peak).exp_()
    total = weights.sum(-1, keepdim=True)
    lse = (peak + total.log()).squeeze(-1)
    return _mix((weights / total.clamp_(min=1e-30)).to(v.dtype), v), lse


def _plain_tile_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor, mask: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    batch, queries, heads, width = q.shape
    groups, value = k.shape[2], v.shape[-1]
    fold = (batch, groups, heads // groups * queries)
    delta = (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1).transpose(1, 2)[..., None]
    logits = tile_logits(q, k, mask, scale)
    probs = torch.exp(logits - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    g = grad_out.transpose(1, 2).reshape(*fold, value)
    dprobs = torch.matmul(g, v.permute(0, 2, 3, 1)).to(lse.dtype).view_as(probs)
    dlogits = (probs * (dprobs - delta)).mul_(scale).to(q.dtype).view(*fold, -1)
    dq = torch.matmul(dlogits, k.transpose(1, 2)).view(batch, heads, queries, width).transpose(1, 2)
    dk = torch.matmul(dlogits.transpose(2, 3), q.transpose(1, 2).reshape(*fold, width)).transpose(1, 2)
    dv = torch.matmul(probs.to(g.dtype).view(*fold, -1).transpose(2, 3), g).transpose(1, 2)
    return dq, dk, dv


# On the CPU, torch's blocked kernel takes an additive mask and gives the log-sum-exp, but only below the public
# function, which would keep each tile's mask alive until backward. Same arithmetic, a quarter of the time.
_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _flash_tile(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    value = v.shape[-1]
    qf, kf, vf, bias = _flash_inputs(q, k, v, mask)
    out, lse = _FLASH(qf, kf, vf, 0.0, False, attn_mask=bias, scale=scale)
    return out.transpose(1, 2)[..., :value], lse


def _flash_tile_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor, mask: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    batch, slots, groups, width = k.shape
    value = v.shape[-1]
    qf, kf, vf, bias = _flash_inputs(q, k, v, mask)
    pad = (0, qf.shape[-1] - value)
    of, gf = (F.pad(x, pad).transpose(1, 2) for x in (out, grad_out))
    dq, dk, dv = _FLASH_BACKWARD(gf, qf, kf, vf, of, lse.contiguous(), 0.0, False, attn_mask=bias, scale=scale)
    dk, dv = (x.view(batch, groups, -1, slots, x.shape[-1]).sum(2).transpose(1, 2) for x in (dk, dv))
    return dq.transpose(1, 2)[..., :width], dk[..., :width], dv[..., :value]


def _flash_inputs(q: Tensor, k: Tensor, v: Tensor, mask_BtS: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Heads first, one key head per query head, equal widths (zeros change neither products nor gradients)."""
    wide = max(q.shape[-1], v.shape[-1])
    if q.shape[-1] < wide:
        q, k = F.pad(q, (0, wide - q.shape[-1])), F.pad(k, (0, wide - k.shape[-1]))
    if v.data_ptr() == k.data_ptr() and not v.requires_grad:
        v = k  # absorbed form: the values are the keys' first columns, and the rest of the output is dropped
    elif v.shape[-1] < wide:
        v = F.pad(v, (0, wide - v.shape[-1]))
    repeat = q.shape[2] // k.shape[2]
    if repeat > 1:
        k, v = (x.unsqueeze(3).expand(-1, -1, -1, repeat, -1).flatten(2, 3) for x in (k, v))
    bias = torch.zeros(mask_BtS.shape, dtype=q.dtype).masked_fill_(~mask_BtS, -torch.inf).unsqueeze(1)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), bias


def _mix(probs_BHtS: Tensor, v_BSGV: Tensor) -> Tensor:
    batch, heads, queries, slots = probs_BHtS.shape
    groups = v_BSGV.shape[2]
    out = torch.matmul(probs_BHtS.reshape(batch, groups, -1, slots), v_BSGV.transpose(1, 2))
    return out.view(batch, heads, queries, -1).transpose(1, 2)


def _tiles(q: Tensor, visible: Visibility, selected: Tensor | None) -> Iterator[tuple[int, int, Visibility, Tensor]]:
    """Yield (start, stop, visibility, mask) of query tiles whose largest temporary stays within a tile."""
    batch, queries, heads, _ = q.shape
    per_query = batch * visible.slots * (1 if q.device.type == "cpu" else heads)
    tile = tile_of(per_query, q.device)
    for start in range(0, queries, tile):
        stop = min(start + tile, queries)
        seen = visible.tile(start, stop)
        yield start, stop, seen, tile_mask(seen, None if selected is None else selected[:, start:stop])
