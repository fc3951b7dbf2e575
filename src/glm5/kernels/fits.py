"""What each fast version of an operator can take: a function of the call's leading tensors that says why not, or None.

`dispatch` names one beside each version. Shapes and layouts are those that a version was written for; sizes are those
up to, or from, which it was measured to be faster. Read next: `dispatch`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def plain_fp32(*tensors: Tensor) -> str | None:
    grad = torch.is_grad_enabled()
    for t in tensors:
        if t.dtype != torch.float32:
            return f"written for float32, not {t.dtype}"
        if grad and t.requires_grad:
            return "has no backward"
    return None


# Elements of a query, all heads, up to which it stays in the first cache beside the rows that it meets (measured:
# faster than torch at 3,840, a third as fast at 36,864), tokens of experts up to which torch's products are slower, and
# tokens that are few enough for one call to make products that torch would make faster.
QUERY_UP_TO, TOKENS_UP_TO, FEW = 8192, 64, 16


def _is_absorbed(k_BSGX: Tensor, v_BSGV: Tensor) -> bool:
    return k_BSGX.shape[2] == 1 and v_BSGV.data_ptr() == k_BSGX.data_ptr()


NOT_ABSORBED = "takes the absorbed form, whose values are the keys' first columns"


def cpu_attention(q_BTHX: Tensor, k_BSGX: Tensor, v_BSGV: Tensor) -> str | None:
    if not _is_absorbed(k_BSGX, v_BSGV):
        return NOT_ABSORBED
    if q_BTHX.shape[2] * q_BTHX.shape[3] > QUERY_UP_TO:
        return f"written for queries of up to {QUERY_UP_TO} elements"
    return plain_fp32(q_BTHX, k_BSGX)


def cpu_norm(x: Tensor, weight: Tensor) -> str | None:
    if x.numel() > TOKENS_UP_TO * x.shape[-1]:
        return f"written for up to {TOKENS_UP_TO} rows"
    if x.stride(-1) != 1 or not (x.ndim == 2 or x.shape[0] == 1 or x.is_contiguous()):
        return "takes rows at one stride"
    return plain_fp32(x, weight)


def cpu_experts(x_ND: Tensor, gate_up_EFD: Tensor, down_EDF: Tensor) -> str | None:
    if not (gate_up_EFD.is_contiguous() and down_EDF.is_contiguous()):
        return "takes contiguous weights"
    if x_ND.shape[0] > TOKENS_UP_TO:
        return f"written for up to {TOKENS_UP_TO} tokens"
    return plain_fp32(x_ND, gate_up_EFD, down_EDF)


def cpu_absorbed(q_nope: Tensor, *others: Tensor) -> str | None:
    if q_nope.shape[0] * q_nope.shape[1] > FEW:
        return f"written for up to {FEW} tokens"
    return plain_fp32(q_nope, *others)


def cpu_few(x: Tensor, *weights: Tensor) -> str | None:
    if x.numel() > FEW * x.shape[-1]:
        return f"written for up to {FEW} tokens"
    for w in weights:
        if not w.is_contiguous():
            return "takes contiguous weights"
    return plain_fp32(x, *weights)


def plain_bf16(*tensors: Tensor) -> str | None:
    if tensors[0].dtype != torch.bfloat16:
        return f"written for bfloat16, not {tensors[0].dtype}"
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return "has no backward"
    return None


def _mla_heads(heads: int, width: int, value: int) -> str | None:
    fits = (width, value) == (576, 512) and heads <= 64
    return None if fits else f"takes up to 64 heads of 576/512, not {heads} of {width}/{value}"


def _mla_shape(q_BTHX: Tensor, k_BSGX: Tensor, v_BSGV: Tensor) -> str | None:
    if not _is_absorbed(k_BSGX, v_BSGV):
        return NOT_ABSORBED
    return _mla_heads(q_BTHX.shape[2], q_BTHX.shape[-1], v_BSGV.shape[-1])


def sparse_mla(q_BTHX: Tensor, k_BSGX: Tensor, v_BSGV: Tensor) -> str | None:
    return _mla_shape(q_BTHX, k_BSGX, v_BSGV) or plain_bf16(q_BTHX, k_BSGX)


def index_select(q_BTJI: Tensor, w_BTJ: Tensor, k_BSI: Tensor) -> str | None:
    if q_BTJI.shape[2:] != (32, 128):
        return f"takes 32 index heads of 128, not {q_BTJI.shape[2]} of {q_BTJI.shape[3]}"
    return plain_bf16(q_BTJI, k_BSI)


def moe_row(x_1D: Tensor, router_ED: Tensor, *weights: Tensor) -> str | None:
    if router_ED.dtype != torch.float32 or not all(w.is_contiguous() for w in (router_ED, *weights)):
        return "takes an fp32 router and contiguous weights"
    return plain_bf16(x_1D, *weights)


# In 8 bits.
def _e4m3(*tensors: Tensor) -> str | None:
    wrong = next((t.dtype for t in tensors if t.dtype != torch.float8_e4m3fn), None)
    return None if wrong is None else f"written for e4m3, not {wrong}"


def index_select_fp8(q_BTJI: Tensor, w_BTJ: Tensor, k_BSI: Tensor, scale_BS: Tensor) -> str | None:
    if q_BTJI.shape[2:] != (32, 128):
        return f"takes 32 index heads of 128, not {q_BTJI.shape[2]} of {q_BTJI.shape[3]}"
    return _e4m3(q_BTJI, k_BSI)


def _powers_of_two(q_BTJI: Tensor) -> str | None:
    if any(n < 16 or n & (n - 1) for n in q_BTJI.shape[2:]):
        return f"takes powers of two from 16, not {q_BTJI.shape[2]} index heads of {q_BTJI.shape[3]}"
    return None


def stream_select(q_BTJI: Tensor, w_BTJ: Tensor, k_BSI: Tensor) -> str | None:
    return _powers_of_two(q_BTJI) or plain_bf16(q_BTJI, k_BSI)


def stream_select_fp8(q_BTJI: Tensor, w_BTJ: Tensor, k_BSI: Tensor, scale_BS: Tensor) -> str | None:
    if torch.cuda.get_device_capability(q_BTJI.device) < (8, 9):
        return "e4m3 products need compute capability 8.9"
    if q_BTJI.shape[3] < 32:
        return f"e4m3 products take index heads from 32 wide, not {q_BTJI.shape[3]}"
    return _powers_of_two(q_BTJI) or _e4m3(q_BTJI, k_BSI)


def sparse_mla_fp8(q_BTHX: Tensor, rows_BSY: Tensor) -> str | None:
    return _mla_heads(q_BTHX.shape[2], q_BTHX.shape[3], 512) or plain_bf16(q_BTHX)


def experts(x_ND: Tensor, gate_up_EFD: Tensor, down_EDF: Tensor) -> str | None:
    if not (gate_up_EFD.is_contiguous() and down_EDF.is_contiguous()):
        return "takes contiguous weights"
    return plain_bf16(x_ND, gate_up_EFD, down_EDF)


def experts_fp8(x_ND: Tensor, gate_up_EFD: Tensor, down_EDF: Tensor) -> str | None:
    if any(n % 128 for n in down_EDF.shape[1:]) or not (gate_up_EFD.is_contiguous() and down_EDF.is_contiguous()):
        return "takes contiguous weights whose widths are multiples of 128"
    return _e4m3(gate_up_EFD, down_EDF) or plain_bf16(x_ND)


def rows_at_one_stride(x: Tensor, *weights: Tensor) -> str | None:
    dense = x.stride(-1) == 1 and (x.ndim == 2 or x.shape[:-2].numel() == 1 or x.is_contiguous())
    return plain_bf16(x, *weights) if dense else "takes rows at one stride"


def add_norm(x: Tensor, y: Tensor, weight: Tensor) -> str | None:
    return plain_bf16(x, y, weight) if x.is_contiguous() and y.is_contiguous() else "takes contiguous rows"


def store(row_N: Tensor, *others: Tensor) -> str | None:
    return None if all(t.stride(-1) == 1 for t in (row_N, *others)) else "takes contiguous columns"


def next_rows(start_B: Tensor, table_BP: Tensor) -> str | None:
    return None if table_BP.stride(1) == 1 else "takes contiguous tables"


def project(x: Tensor, *weights: Tensor) -> str | None:
    rotary = weights[3].shape[0] - weights[4].shape[0]
    if rotary & (rotary - 1):
        return f"takes rotary widths that are powers of two, not {rotary}"
    return rows_at_one_stride(x, *weights)


def absorbed(q_nope: Tensor, rows: Tensor, up: Tensor) -> str | None:
    wrong = _mla_heads(q_nope.shape[2], rows.shape[-1], up.shape[2])
    if wrong is not None:
        return wrong
    nope, value = q_nope.shape[3], up.shape[1] - q_nope.shape[3]
    if nope % 64 or value % 64:
        return f"takes heads of multiples of 64, not {nope} and {value}"
    return plain_bf16(q_nope, rows, up)


# Of training: with gradients, bf16 as well.
def _bf16(*tensors: Tensor) -> str | None:
    wrong = next((t.dtype for t in tensors if t.dtype != torch.bfloat16), None)
    return None if wrong is None else f"written for bfloat16, not {wrong}"


def train_sparse(q_BTHX: Tensor, k_BSGX: Tensor, v_BSGV: Tensor) -> str | None:
    return _mla_shape(q_BTHX, k_BSGX, v_BSGV) or _bf16(q_BTHX, k_BSGX)


def train_indexer(iq_BTJI: Tensor, ik_BSI: Tensor, q_BTHX: Tensor, k_BSGX: Tensor) -> str | None:
    if k_BSGX.shape[2] != 1 or q_BTHX.shape[-1] != 576 or q_BTHX.shape[2] > 64:
        return "takes the absorbed form of up to 64 heads of 576/512, and a selection"
    if any(n < 16 or n & (n - 1) for n in iq_BTJI.shape[2:]):
        return f"takes powers of two from 16, not {iq_BTJI.shape[2]} index heads of {iq_BTJI.shape[3]}"
    return _bf16(iq_BTJI, ik_BSI, q_BTHX, k_BSGX)


def train_intervals(iq_BTJI: Tensor, ik_BSI: Tensor, q_BTHX: Tensor, k_BSGX: Tensor) -> str | None:
    if k_BSGX.shape[2] != q_BTHX.shape[2] or q_BTHX.shape[-1] > 256:
        return "takes a key head of up to 256 for each query head"
    if iq_BTJI.shape[3] < 16 or iq_BTJI.shape[3] & (iq_BTJI.shape[3] - 1):
        return f"takes index heads of powers of two from 16, not {iq_BTJI.shape[3]}"
    return _bf16(iq_BTJI, ik_BSI, q_BTHX, k_BSGX)


def train_experts(x_ND: Tensor, gate_up_EFD: Tensor, down_EDF: Tensor) -> str | None:
    if not (gate_up_EFD.is_contiguous() and down_EDF.is_contiguous()) or any(n % 8 for n in down_EDF.shape[1:]):
        return "takes contiguous weights whose widths are multiples of 8"
    return _bf16(x_ND, gate_up_EFD, down_EDF)


def train_rows(x: Tensor, *others: Tensor) -> str | None:
    return _bf16(x, *others) if x.stride(-1) == 1 else "takes contiguous columns"


# Columns up to which a row stays in a program's registers, beside what its gradient needs.
NORM_UP_TO = 8192


def train_norm(x: Tensor, *others: Tensor) -> str | None:
    if x.shape[-1] > NORM_UP_TO:
        return f"written for up to {NORM_UP_TO} columns"
    return train_rows(x, *others)


def train_router(x_ND: Tensor, weight_ED: Tensor) -> str | None:
    if weight_ED.dtype != torch.float32 or not weight_ED.is_contiguous():
        return "takes contiguous fp32 weights"
    return train_rows(x_ND)


def train_heads(x_BTHX: Tensor, *others: Tensor) -> str | None:
    return _bf16(x_BTHX, *others) if x_BTHX.is_contiguous() else "takes contiguous heads"


# Rows from which the symmetric products by halves are faster than cuBLAS's whole ones (13% at 2,048, slower at 512).
ROWS_FROM = 1024


def newton_schulz(x_NAB: Tensor) -> str | None:
    if x_NAB.shape[1] < ROWS_FROM or any(n % 8 for n in x_NAB.shape[1:]):
        return f"written for matrices of at least {ROWS_FROM} rows, in multiples of 8"
    return plain_bf16(x_NAB)


def fp32(*tensors: Tensor) -> str | None:
    wrong = next((t.dtype for t in tensors if t.dtype != torch.float32), None)
    return None if wrong is None else f"written for float32, not {wrong}"


def momentum(momentum: Tensor, grad: Tensor) -> str | None:
    return fp32(momentum) if momentum.is_contiguous() and grad.is_contiguous() else "takes contiguous tensors"


def divided(x_NAB: Tensor) -> str | None:
    return fp32(x_NAB) if x_NAB.is_contiguous() else "takes contiguous matrices"


def scaled(x: Tensor) -> str | None:
    return "works in float32" if x.dtype == torch.float64 else None


def router(x_ND: Tensor, weight_ED: Tensor) -> str | None:
    if weight_ED.dtype != torch.float32 or not weight_ED.is_contiguous():
        return "takes contiguous fp32 weights"
    return rows_at_one_stride(x_ND, weight_ED)


def route(logits_NE: Tensor, bias_E: Tensor) -> str | None:
    if torch.is_grad_enabled() and logits_NE.requires_grad:
        return "has no backward"
    return None if logits_NE.stride(1) == 1 else "takes contiguous logits"
