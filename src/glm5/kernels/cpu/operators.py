"""The C++ kernels as operators with the specification's signatures, for fp32 tensors without gradients.

Read next: `few.cpp`.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from glm5.kernels.cpu.build import library

POINTER, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


@functools.cache
def _function(name: str, pointers: int, integers: int, floats: int) -> Callable[..., None]:
    function = getattr(library(), name)
    function.argtypes = (POINTER,) * pointers + (INT,) * integers + (FLOAT,) * floats
    function.restype = None
    return function


def index_select(q_BTJI: Tensor, w_BTJ: Tensor, k_BSI: Tensor, first_BT: Tensor, last_BT: Tensor, k: int) -> Tensor:
    """As `glm5.kernels.indexer.index_select`: int32 [B, T, k], ascending, padded with -1."""
    batch, queries, heads, width = q_BTJI.shape
    q, keys = _dense(q_BTJI), _dense(k_BSI)
    w, first, last = w_BTJ.contiguous(), first_BT.contiguous(), last_BT.contiguous()
    out = torch.empty(batch, queries, k, dtype=torch.int32)
    _function("glm5_index_select", 6, 10, 0)(
        *(q.data_ptr(), w.data_ptr(), keys.data_ptr(), first.data_ptr(), last.data_ptr(), out.data_ptr()),
        *(batch, queries, heads, width, *q.stride()[:3], *keys.stride()[:2], k),
    )
    return out


def sparse_attention(q_BTHX: Tensor, rows_BSX: Tensor, selected_BTK: Tensor, value_dim: int, scale: float) -> Tensor:
    """As `glm5.kernels.attention.sparse_attention` in the absorbed form: [B, T, H, value_dim]."""
    batch, queries, heads, width = q_BTHX.shape
    q, rows, selected = _dense(q_BTHX), _dense(rows_BSX), selected_BTK.contiguous()
    out = torch.empty(batch, queries, heads, value_dim)
    _function("glm5_sparse_attention", 4, 11, 1)(
        *(q.data_ptr(), rows.data_ptr(), selected.data_ptr(), out.data_ptr()),
        *(batch, queries, heads, width, value_dim, selected.shape[-1], *q.stride()[:3], *rows.stride()[:2]),
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
    _function("glm5_grouped_swiglu", 6, 4, 0)(
        *(x.data_ptr(), gate_up_EFD.data_ptr(), down_EDF.data_ptr(), expert_NM.data_ptr(), weight_NM.data_ptr()),
        *(out.data_ptr(), tokens, chosen, width, inner),
    )
    return out


def _dense(x: Tensor) -> Tensor:
    """The tensor with its last axis contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()
