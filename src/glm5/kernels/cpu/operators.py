"""The C++ kernels as operators with the specification's signatures, for fp32 tensors without gradients.

Read next: `operators.cpp`.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from glm5.kernels.cpu.build import library
from glm5.kernels.pages import Pages
from glm5.kernels.visibility import Visibility

POINTER, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
ROWS_PER_THREAD = 4


@functools.cache
def _function(name: str, pointers: int, integers: int, floats: int) -> Callable[..., None]:
    function = getattr(library(), name)
    function.argtypes = (POINTER,) * pointers + (INT,) * integers + (FLOAT,) * floats
    function.restype = None
    return function


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `glm5.kernels.basic.rms_norm`, where all axes but the last can be viewed as one."""
    width = x.shape[-1]
    rows = x if x.ndim == 2 else x.view(-1, width)
    out = torch.empty(x.shape)
    _function("glm5_rms_norm", 3, 3, 1)(
        *(rows.data_ptr(), weight.data_ptr(), out.data_ptr(), rows.shape[0], width, rows.stride(0), eps)
    )
    return out


def prepare(
    up: tuple[Tensor, Tensor],
    down: tuple[Tensor, Tensor, Tensor],
    rope: Tensor,
    kv_norm: tuple[Tensor, float],
    k_norm: tuple[Tensor, Tensor, float],
    heads: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Everything between an attention layer's projections and attention, for rows whose products were made as one.

    Args:
        up: q [B, T, H * (N + R)] and index_q [B, T, J * I], parts of one contiguous product; rotated in place.
        down: kv [B, T, L + R], index_k [B, T, I] and index_w [B, T, J], parts of another.
        rope: rotations [B, T, R / 2]. kv_norm: gain, eps. k_norm: gain, bias, eps. heads: H and J.

    Returns:
        q [B, T, H, N + R], rows [B, T, L + R], index_keys [B, T, I], index_q [B, T, J, I], and head weights [B, T, J]
        with both scales in.
    """
    (q, index_q), (kv, index_k, index_w), (main, index) = up, down, heads
    batch, tokens = q.shape[:2]
    rotary, index_width = 2 * rope.shape[-1], index_k.shape[-1]
    latent, nope = kv.shape[-1] - rotary, q.shape[-1] // main - rotary
    rope = rope.contiguous()
    rows, keys = torch.empty(batch, tokens, latent + rotary), torch.empty(batch, tokens, index_width)
    weights = torch.empty(batch, tokens, index)
    (kv_gain, kv_eps), (k_gain, k_bias, k_eps) = kv_norm, k_norm
    _function("glm5_prepare", 12, 9, 2)(
        *(q.data_ptr(), index_q.data_ptr(), kv.data_ptr(), index_k.data_ptr(), index_w.data_ptr(), rope.data_ptr()),
        *(kv_gain.data_ptr(), k_gain.data_ptr(), k_bias.data_ptr()),
        *(rows.data_ptr(), keys.data_ptr(), weights.data_ptr()),
        *(batch * tokens, q.stride(1), kv.stride(1), main, nope, rotary, latent, index, index_width, kv_eps, k_eps),
    )
    return q.unflatten(-1, (main, -1)), rows, keys, index_q.unflatten(-1, (index, -1)), weights


def index_select(
    q_BTJI: Tensor, w_BTJ: Tensor, k_BSI: Tensor, visible: Visibility, k: int, pages: Pages | None = None
) -> Tensor:
    """As `glm5.kernels.indexer.index_select`: int32 [B, T, min(k, slots)], ascending, padded with -1."""
    batch, queries, heads, width = q_BTJI.shape
    q, keys, k = _dense(q_BTJI), _dense(k_BSI), min(k, visible.slots)
    w, first, last = w_BTJ.contiguous(), visible.first_BT.contiguous(), visible.last_BT.contiguous()
    out = torch.empty(batch, queries, k, dtype=torch.int32)
    table, paging = _paging(pages)
    _function("glm5_index_select", 7, 13, 0)(
        *(q.data_ptr(), w.data_ptr(), keys.data_ptr(), first.data_ptr(), last.data_ptr(), table, out.data_ptr()),
        *(batch, queries, heads, width, *q.stride()[:3], *_strides(keys, pages), k, *paging, _threads(batch * queries)),
    )
    return out


def sparse_attention(
    q_BTHX: Tensor,
    k_BSGX: Tensor,
    v_BSGV: Tensor,
    selected_BTK: Tensor,
    visible: Visibility,
    scale: float,
    pages: Pages | None = None,
) -> Tensor:
    """As `glm5.kernels.attention.sparse_attention` in the absorbed form (G = 1): [B, T, H, V]."""
    (batch, queries, heads, width), value = q_BTHX.shape, v_BSGV.shape[-1]
    q, rows, selected = _dense(q_BTHX), _dense(k_BSGX), selected_BTK.contiguous()
    out = torch.empty(batch, queries, heads, value)
    table, paging = _paging(pages)
    _function("glm5_sparse_attention", 5, 14, 1)(
        *(q.data_ptr(), rows.data_ptr(), selected.data_ptr(), table, out.data_ptr()),
        *(batch, queries, heads, width, value, selected.shape[-1], *q.stride()[:3], *_strides(rows, pages)),
        *(*paging, _threads(batch * queries), scale),
    )
    return out


def route(
    logits_NE: Tensor, bias_E: Tensor, top_k: int, *, normalise: bool, scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    """As `glm5.kernels.moe.route` with one group: expert_NM int64, weight_NM, score_NE."""
    tokens, experts = logits_NE.shape
    logits = logits_NE.contiguous()
    expert = torch.empty(tokens, top_k, dtype=torch.int64)
    weight, score = torch.empty(tokens, top_k), torch.empty(tokens, experts)
    _function("glm5_route", 5, 4, 1)(
        *(logits.data_ptr(), bias_E.data_ptr(), expert.data_ptr(), weight.data_ptr(), score.data_ptr()),
        *(tokens, experts, top_k, normalise, scaling),
    )
    return expert, weight, score


def grouped_swiglu(x_ND: Tensor, gate_up_EFD: Tensor, down_EDF: Tensor, expert_NM: Tensor, weight_NM: Tensor) -> Tensor:
    """As `glm5.kernels.moe.grouped_swiglu`: [N, D]."""
    (tokens, width), chosen, inner = x_ND.shape, expert_NM.shape[-1], down_EDF.shape[-1]
    x = x_ND.contiguous()
    out = torch.empty(tokens, width)
    _function("glm5_grouped_swiglu", 6, 5, 0)(
        *(x.data_ptr(), gate_up_EFD.data_ptr(), down_EDF.data_ptr(), expert_NM.data_ptr(), weight_NM.data_ptr()),
        *(out.data_ptr(), tokens, chosen, width, inner, _threads(tokens * chosen)),
    )
    return out


def _paging(pages: Pages | None) -> tuple[int | None, tuple[int, int]]:
    """The table's address; pages of a table, and tokens of a page."""
    return (None, (0, 1)) if pages is None else (pages.table_BP.data_ptr(), (pages.table_BP.shape[1], pages.size))


def _strides(rows: Tensor, pages: Pages | None) -> tuple[int, int]:
    """Of batches and slots; the pages of all sequences lie in one row."""
    return (rows.stride(0) if pages is None else 0), rows.stride(1)


def _threads(rows: int) -> int:
    """A thread more is worth its start, some 15 µs, from a few rows on."""
    return min(torch.get_num_threads(), rows // ROWS_PER_THREAD) or 1


def _dense(x: Tensor) -> Tensor:
    """The tensor with its last axis contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()
