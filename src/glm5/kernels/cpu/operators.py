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


def project(
    x_BTD: Tensor,
    rope: Tensor,
    query: tuple[Tensor, Tensor, Tensor],
    latent: tuple[Tensor, Tensor],
    indexer: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    heads: tuple[int, int],
    eps: tuple[float, float, float],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Everything that an attention layer makes of x up to attention, for a few tokens.

    Args:
        rope: rotations [B, T, R / 2].
        query: q_a [Q, D], its norm's gain [Q], q_b [H * (N + R), Q]. latent: kv_a [L + R, D], its norm's gain [L].
        indexer: wq_b [J * I, Q], wk [I, D], its norm's gain and bias [I], weights_proj [J, D].
        heads: H and J. eps: of the three norms, in that order.

    Returns:
        q [B, T, H, N + R], its last columns rotated, rows [B, T, L + R], index_keys [B, T, I], index_q [B, T, J, I],
        and head weights [B, T, J] with both scales in.
    """
    (batch, tokens, width), (main, index) = x_BTD.shape, heads
    x, turn, rotary = x_BTD.contiguous(), rope.contiguous(), 2 * rope.shape[-1]
    (q_latent, head), index_width = (query[0].shape[0], query[2].shape[0] // main), indexer[1].shape[0]
    row = latent[0].shape[0]
    shapes = ((main, head), (row,), (index_width,), (index, index_width), (index,))
    outs = [torch.empty(batch, tokens, *shape) for shape in shapes]
    _function("glm5_project", 17, 10, 3)(
        *(t.data_ptr() for t in (x, turn, *query, *latent, *indexer, *outs)),
        *(batch * tokens, width, q_latent, main, head - rotary, rotary, row - rotary, index, index_width),
        *(torch.get_num_threads(), *eps),
    )
    q, rows, keys, index_q, weights = outs
    return q, rows, keys, index_q, weights


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


def absorbed_attention(
    q_nope_BTHN: Tensor,
    q_rope_BTHR: Tensor,
    up_HXL: Tensor,
    rows_BSX: Tensor,
    selected_BTK: Tensor,
    scale: float,
    pages: Pages | None = None,
) -> Tensor:
    """`sparse_attention` with W_UK before it and W_UV behind it, for a few queries: [B, T, H, V].

    Args:
        up_HXL: [H, N + V, L], each head's W_UK, then its W_UV.
    """
    (batch, queries, heads, nope), rotary = q_nope_BTHN.shape, q_rope_BTHR.shape[-1]
    value, latent = up_HXL.shape[1] - nope, up_HXL.shape[2]
    q_nope, q_rope = _dense(q_nope_BTHN), _dense(q_rope_BTHR)
    rows, selected = _dense(rows_BSX), selected_BTK.contiguous()
    out = torch.empty(batch, queries, heads, value)
    table, paging = _paging(pages)
    _function("glm5_absorbed_attention", 7, 19, 1)(
        *(q_nope.data_ptr(), q_rope.data_ptr(), up_HXL.data_ptr(), rows.data_ptr(), selected.data_ptr(), table),
        *(out.data_ptr(), batch, queries, heads, nope, rotary, latent, value, selected.shape[-1]),
        *(*q_nope.stride()[:3], *q_rope.stride()[:3], *_strides(rows, pages), *paging, _threads(batch * queries)),
        scale,
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
        *(out.data_ptr(), tokens, chosen, width, inner, torch.get_num_threads()),
    )
    return out


def moe(
    x_ND: Tensor,
    router: tuple[Tensor, Tensor],
    routed: tuple[Tensor, Tensor],
    shared: tuple[Tensor, Tensor, Tensor] | None,
    top_k: int,
    *,
    normalise: bool,
    scaling: float,
) -> Tensor:
    """A whole MoE of a few tokens, [N, D]: `route`, `grouped_swiglu`, and the shared expert.

    Args:
        router: weight [E, D] and bias [E]. routed: gate_up [E, 2F, D] and down [E, D, F].
        shared: gate and up [F', D] and down [D, F'], if there is one.
    """
    (tokens, width), (gate_up, down) = x_ND.shape, routed
    x, out = x_ND.contiguous(), torch.empty(tokens, width)
    extra = (None, None, None) if shared is None else tuple(w.data_ptr() for w in shared)
    _function("glm5_moe", 9, 8, 1)(
        *(x.data_ptr(), router[0].data_ptr(), router[1].data_ptr(), gate_up.data_ptr(), down.data_ptr()),
        *(*extra, out.data_ptr(), tokens, gate_up.shape[0], top_k, width, down.shape[-1]),
        *(0 if shared is None else shared[0].shape[0], normalise, torch.get_num_threads(), scaling),
    )
    return out


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """down(silu(gate x) * up x) of a few tokens, in x's shape. gate, up: [F, D]; down: [D, F]."""
    x, out = x.contiguous(), torch.empty(x.shape)
    width = x.shape[-1]
    _function("glm5_swiglu", 5, 4, 0)(
        *(x.data_ptr(), gate.data_ptr(), up.data_ptr(), down.data_ptr(), out.data_ptr()),
        *(x.numel() // width, width, gate.shape[0], torch.get_num_threads()),
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
