"""Which version of each operator runs: decided in this one place, and told by `glm5 doctor`.

Every operator has a plain-PyTorch version, which is its specification and runs anywhere. A fast version stands here
with the conditions under which it may take its place. `pick(operator, …)` is called once per call of an operator; a
fast version that cannot take a call says why, and the reason is logged once, so that nothing falls back in silence.
(On a CPU the fast versions are for fp32 without gradients; other calls are torch's by design, and not remarked on.)
Set GLM5_KERNELS=torch to run the specifications everywhere. Read next: `attention`, `indexer`, `moe` for the
specifications; `cpu`, `cuda` and `triton` for the fast versions.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from glm5.kernels.pages import Pages
from glm5.kernels.visibility import Visibility

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Fast:
    """A fast version.

    Attributes:
        name: as `glm5 doctor` shows it; its first word is the room. `cpu` is for CPU tensors, the others for CUDA.
        available: whether it can run on this machine, and why (not).
        refuses: given the operator's leading tensors, why it cannot take them; None if it can.
        load: imports it and returns the callable, whose signature is the specification's.
        trains: whether it has gradients.
    """

    name: str
    available: Callable[[], tuple[bool, str]]
    refuses: Callable[..., str | None]
    load: Callable[[], Callable[..., Any]]
    trains: bool = False

    @property
    def on_cpu(self) -> bool:
        return self.name.startswith("cpu.")


# --------------------------------------------------------------------------- availability
def _cuda() -> tuple[bool, str]:
    return torch.cuda.is_available(), "CUDA device" if torch.cuda.is_available() else "no CUDA device"


@cache
def _triton() -> tuple[bool, str]:
    if not torch.cuda.is_available():  # where its interpreter could run, which is for tests
        return False, "no CUDA device"
    from glm5.kernels.triton import available

    return available()


@cache
def _hopper() -> tuple[bool, str]:
    from glm5.kernels.cuda.build import available

    return available()


@cache
def _both() -> tuple[bool, str]:
    ok, why = _hopper()
    return (ok, why) if not ok else _triton()


@cache
def _compiler() -> tuple[bool, str]:
    from glm5.kernels.cpu.build import available

    return available()


# --------------------------------------------------------------------------- conditions
def _plain_fp32(*tensors: Tensor) -> str | None:
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


def _cpu_attention(q_BTHX: Tensor, k_BSGX: Tensor, v_BSGV: Tensor) -> str | None:
    if not _is_absorbed(k_BSGX, v_BSGV):
        return NOT_ABSORBED
    if q_BTHX.shape[2] * q_BTHX.shape[3] > QUERY_UP_TO:
        return f"written for queries of up to {QUERY_UP_TO} elements"
    return _plain_fp32(q_BTHX, k_BSGX)


def _cpu_norm(x: Tensor, weight: Tensor) -> str | None:
    if x.numel() > TOKENS_UP_TO * x.shape[-1]:
        return f"written for up to {TOKENS_UP_TO} rows"
    if x.stride(-1) != 1 or not (x.ndim == 2 or x.shape[0] == 1 or x.is_contiguous()):
        return "takes rows at one stride"
    return _plain_fp32(x, weight)


def _cpu_experts(x_ND: Tensor, gate_up_EFD: Tensor, down_EDF: Tensor) -> str | None:
    if not (gate_up_EFD.is_contiguous() and down_EDF.is_contiguous()):
        return "takes contiguous weights"
    if x_ND.shape[0] > TOKENS_UP_TO:
        return f"written for up to {TOKENS_UP_TO} tokens"
    return _plain_fp32(x_ND, gate_up_EFD, down_EDF)


def _cpu_absorbed(q_nope: Tensor, *others: Tensor) -> str | None:
    if q_nope.shape[0] * q_nope.shape[1] > FEW:
        return f"written for up to {FEW} tokens"
    return _plain_fp32(q_nope, *others)


def _cpu_few(x: Tensor, *weights: Tensor) -> str | None:
    if x.numel() > FEW * x.shape[-1]:
        return f"written for up to {FEW} tokens"
    for w in weights:
        if not w.is_contiguous():
            return "takes contiguous weights"
    return _plain_fp32(x, *weights)


def _plain_bf16(*tensors: Tensor) -> str | None:
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


def _sparse_mla(q_BTHX: Tensor, k_BSGX: Tensor, v_BSGV: Tensor) -> str | None:
    return _mla_shape(q_BTHX, k_BSGX, v_BSGV) or _plain_bf16(q_BTHX, k_BSGX)


def _index_select(q_BTJI: Tensor, w_BTJ: Tensor, k_BSI: Tensor) -> str | None:
    if q_BTJI.shape[2:] != (32, 128):
        return f"takes 32 index heads of 128, not {q_BTJI.shape[2]} of {q_BTJI.shape[3]}"
    return _plain_bf16(q_BTJI, k_BSI)


def _moe_row(x_1D: Tensor, router_ED: Tensor, *weights: Tensor) -> str | None:
    if router_ED.dtype != torch.float32 or not all(w.is_contiguous() for w in (router_ED, *weights)):
        return "takes an fp32 router and contiguous weights"
    return _plain_bf16(x_1D, *weights)


# In 8 bits.
def _e4m3(*tensors: Tensor) -> str | None:
    wrong = next((t.dtype for t in tensors if t.dtype != torch.float8_e4m3fn), None)
    return None if wrong is None else f"written for e4m3, not {wrong}"


def _index_select_fp8(q_BTJI: Tensor, w_BTJ: Tensor, k_BSI: Tensor, scale_BS: Tensor) -> str | None:
    if q_BTJI.shape[2:] != (32, 128):
        return f"takes 32 index heads of 128, not {q_BTJI.shape[2]} of {q_BTJI.shape[3]}"
    return _e4m3(q_BTJI, k_BSI)


def _powers_of_two(q_BTJI: Tensor) -> str | None:
    if any(n < 16 or n & (n - 1) for n in q_BTJI.shape[2:]):
        return f"takes powers of two from 16, not {q_BTJI.shape[2]} index heads of {q_BTJI.shape[3]}"
    return None


def _stream_select(q_BTJI: Tensor, w_BTJ: Tensor, k_BSI: Tensor) -> str | None:
    return _powers_of_two(q_BTJI) or _plain_bf16(q_BTJI, k_BSI)


def _stream_select_fp8(q_BTJI: Tensor, w_BTJ: Tensor, k_BSI: Tensor, scale_BS: Tensor) -> str | None:
    if torch.cuda.get_device_capability(q_BTJI.device) < (8, 9):
        return "e4m3 products need compute capability 8.9"
    if q_BTJI.shape[3] < 32:
        return f"e4m3 products take index heads from 32 wide, not {q_BTJI.shape[3]}"
    return _powers_of_two(q_BTJI) or _e4m3(q_BTJI, k_BSI)


def _sparse_mla_fp8(q_BTHX: Tensor, rows_BSY: Tensor) -> str | None:
    return _mla_heads(q_BTHX.shape[2], q_BTHX.shape[3], 512) or _plain_bf16(q_BTHX)


def _experts(x_ND: Tensor, gate_up_EFD: Tensor, down_EDF: Tensor) -> str | None:
    if not (gate_up_EFD.is_contiguous() and down_EDF.is_contiguous()):
        return "takes contiguous weights"
    return _plain_bf16(x_ND, gate_up_EFD, down_EDF)


def _experts_fp8(x_ND: Tensor, gate_up_EFD: Tensor, down_EDF: Tensor) -> str | None:
    if any(n % 128 for n in down_EDF.shape[1:]) or not (gate_up_EFD.is_contiguous() and down_EDF.is_contiguous()):
        return "takes contiguous weights whose widths are multiples of 128"
    return _e4m3(gate_up_EFD, down_EDF) or _plain_bf16(x_ND)


def _rows_at_one_stride(x: Tensor, *weights: Tensor) -> str | None:
    dense = x.stride(-1) == 1 and (x.ndim == 2 or x.shape[:-2].numel() == 1 or x.is_contiguous())
    return _plain_bf16(x, *weights) if dense else "takes rows at one stride"


def _add_norm(x: Tensor, y: Tensor, weight: Tensor) -> str | None:
    return _plain_bf16(x, y, weight) if x.is_contiguous() and y.is_contiguous() else "takes contiguous rows"


def _store(row_N: Tensor, *others: Tensor) -> str | None:
    return None if all(t.stride(-1) == 1 for t in (row_N, *others)) else "takes contiguous columns"


def _next_rows(start_B: Tensor, table_BP: Tensor) -> str | None:
    return None if table_BP.stride(1) == 1 else "takes contiguous tables"


def _project(x: Tensor, *weights: Tensor) -> str | None:
    rotary = weights[3].shape[0] - weights[4].shape[0]
    if rotary & (rotary - 1):
        return f"takes rotary widths that are powers of two, not {rotary}"
    return _rows_at_one_stride(x, *weights)


def _absorbed(q_nope: Tensor, rows: Tensor, up: Tensor) -> str | None:
    wrong = _mla_heads(q_nope.shape[2], rows.shape[-1], up.shape[2])
    if wrong is not None:
        return wrong
    nope, value = q_nope.shape[3], up.shape[1] - q_nope.shape[3]
    if nope % 64 or value % 64:
        return f"takes heads of multiples of 64, not {nope} and {value}"
    return _plain_bf16(q_nope, rows, up)


# Of training: with gradients, bf16 as well.
def _bf16(*tensors: Tensor) -> str | None:
    wrong = next((t.dtype for t in tensors if t.dtype != torch.bfloat16), None)
    return None if wrong is None else f"written for bfloat16, not {wrong}"


def _train_sparse(q_BTHX: Tensor, k_BSGX: Tensor, v_BSGV: Tensor) -> str | None:
    return _mla_shape(q_BTHX, k_BSGX, v_BSGV) or _bf16(q_BTHX, k_BSGX)


def _train_indexer(iq_BTJI: Tensor, ik_BSI: Tensor, q_BTHX: Tensor, k_BSGX: Tensor) -> str | None:
    if k_BSGX.shape[2] != 1 or q_BTHX.shape[-1] != 576 or q_BTHX.shape[2] > 64:
        return "takes the absorbed form of up to 64 heads of 576/512, and a selection"
    if any(n < 16 or n & (n - 1) for n in iq_BTJI.shape[2:]):
        return f"takes powers of two from 16, not {iq_BTJI.shape[2]} index heads of {iq_BTJI.shape[3]}"
    return _bf16(iq_BTJI, ik_BSI, q_BTHX, k_BSGX)


def _train_intervals(iq_BTJI: Tensor, ik_BSI: Tensor, q_BTHX: Tensor, k_BSGX: Tensor) -> str | None:
    if k_BSGX.shape[2] != q_BTHX.shape[2] or q_BTHX.shape[-1] > 256:
        return "takes a key head of up to 256 for each query head"
    if iq_BTJI.shape[3] < 16 or iq_BTJI.shape[3] & (iq_BTJI.shape[3] - 1):
        return f"takes index heads of powers of two from 16, not {iq_BTJI.shape[3]}"
    return _bf16(iq_BTJI, ik_BSI, q_BTHX, k_BSGX)


def _train_experts(x_ND: Tensor, gate_up_EFD: Tensor, down_EDF: Tensor) -> str | None:
    if not (gate_up_EFD.is_contiguous() and down_EDF.is_contiguous()) or any(n % 8 for n in down_EDF.shape[1:]):
        return "takes contiguous weights whose widths are multiples of 8"
    return _bf16(x_ND, gate_up_EFD, down_EDF)


def _train_rows(x: Tensor, *others: Tensor) -> str | None:
    return _bf16(x, *others) if x.stride(-1) == 1 else "takes contiguous columns"


# Columns up to which a row stays in a program's registers, beside what its gradient needs.
NORM_UP_TO = 8192


def _train_norm(x: Tensor, *others: Tensor) -> str | None:
    if x.shape[-1] > NORM_UP_TO:
        return f"written for up to {NORM_UP_TO} columns"
    return _train_rows(x, *others)


def _train_router(x_ND: Tensor, weight_ED: Tensor) -> str | None:
    if weight_ED.dtype != torch.float32 or not weight_ED.is_contiguous():
        return "takes contiguous fp32 weights"
    return _train_rows(x_ND)


def _train_heads(x_BTHX: Tensor, *others: Tensor) -> str | None:
    return _bf16(x_BTHX, *others) if x_BTHX.is_contiguous() else "takes contiguous heads"


# Rows from which the symmetric products by halves are faster than cuBLAS's whole ones (13% at 2,048, slower at 512).
ROWS_FROM = 1024


def _newton_schulz(x_NAB: Tensor) -> str | None:
    if x_NAB.shape[1] < ROWS_FROM or any(n % 8 for n in x_NAB.shape[1:]):
        return f"written for matrices of at least {ROWS_FROM} rows, in multiples of 8"
    return _plain_bf16(x_NAB)


def _fp32(*tensors: Tensor) -> str | None:
    wrong = next((t.dtype for t in tensors if t.dtype != torch.float32), None)
    return None if wrong is None else f"written for float32, not {wrong}"


def _momentum(momentum: Tensor, grad: Tensor) -> str | None:
    return _fp32(momentum) if momentum.is_contiguous() and grad.is_contiguous() else "takes contiguous tensors"


def _divided(x_NAB: Tensor) -> str | None:
    return _fp32(x_NAB) if x_NAB.is_contiguous() else "takes contiguous matrices"


def _scaled(x: Tensor) -> str | None:
    return "works in float32" if x.dtype == torch.float64 else None


def trains_absorbed(rows: Tensor, value: int) -> bool:
    """Whether sparse attention over these latent rows [B, S, X] has a fast gradient in the absorbed form."""
    fits = rows.is_cuda and rows.dtype == torch.bfloat16 and (rows.shape[-1], value) == (576, 512)
    return fits and os.environ.get("GLM5_KERNELS") != "torch" and _both()[0]


def _router(x_ND: Tensor, weight_ED: Tensor) -> str | None:
    if weight_ED.dtype != torch.float32 or not weight_ED.is_contiguous():
        return "takes contiguous fp32 weights"
    return _rows_at_one_stride(x_ND, weight_ED)


def _route(logits_NE: Tensor, bias_E: Tensor) -> str | None:
    if torch.is_grad_enabled() and logits_NE.requires_grad:
        return "has no backward"
    return None if logits_NE.stride(1) == 1 else "takes contiguous logits"


# --------------------------------------------------------------------------- the fast versions
def _load_sparse_mla() -> Callable[..., Any]:
    from glm5.kernels.cuda import sparse_mla

    def attend(
        q: Tensor, k: Tensor, v: Tensor, selected: Tensor, visible: Visibility, scale: float, pages: Pages | None
    ) -> Tensor:
        rows, value = k[:, :, 0], v.shape[-1]
        return sparse_mla(q, rows, selected, value_dim=value, scale=scale, pages=pages)[0]  # without the log-sum-exp

    return attend


def _load_index_select(room: str) -> Callable[[], Callable[..., Any]]:
    def load() -> Callable[..., Any]:
        from glm5.kernels import cuda, triton

        choose: Callable[..., Tensor] = cuda.index_select if room == "cuda" else triton.stream_select

        def select(
            q: Tensor, w: Tensor, keys: Tensor, visible: Visibility, k: int, pages: Pages | None, **scale: Tensor
        ) -> Tensor:
            if pages is None:
                keys, scale = keys[:, : visible.slots], {n: t[:, : visible.slots] for n, t in scale.items()}
            first, last = visible.narrow
            return choose(q, w, keys, first, last, min(k, visible.slots), pages=pages, **scale)

        return select

    return load


def _load_index_select_fp8(room: str) -> Callable[[], Callable[..., Any]]:
    def load() -> Callable[..., Any]:
        choose = _load_index_select(room)()

        def select(
            q: Tensor, w: Tensor, keys: tuple[Tensor, Tensor], visible: Visibility, k: int, pages: Pages | None
        ) -> Tensor:
            found: Tensor = choose(q, w, keys[0], visible, k, pages, key_scale_BS=keys[1])
            return found

        return select

    return load


def _load_sparse_mla_fp8(room: str) -> Callable[[], Callable[..., Any]]:
    def load() -> Callable[..., Any]:
        from glm5.kernels import cuda, triton

        def attend(
            q: Tensor, rows: Tensor, selected: Tensor, scale: float, pages: Pages | None
        ) -> tuple[Tensor, Tensor]:
            selected = selected.contiguous()
            pair: tuple[Tensor, Tensor]
            if room == "cuda":
                pair = cuda.sparse_mla(q, rows, selected, value_dim=512, scale=scale, pages=pages)
            else:
                pair = triton.sparse_mla_fp8(q, rows, selected, scale=scale, pages=pages)
            return pair

        return attend

    return load


def _load_cuda(operator: str) -> Callable[[], Callable[..., Any]]:
    def load() -> Callable[..., Any]:
        from glm5.kernels import cuda

        found: Callable[..., Any] = getattr(cuda, operator)
        return found

    return load


def _load_absorbed() -> Callable[..., Any]:
    from glm5.kernels.cuda import sparse_mla
    from glm5.kernels.triton import by_head

    def attend(
        q_nope: Tensor, q_rope: Tensor, up: Tensor, rows: Tensor, selected: Tensor, scale: float, pages: Pages | None
    ) -> Tensor:
        (batch, queries, _, nope), latent = q_nope.shape, up.shape[2]
        q = by_head(q_nope.flatten(0, 1), up[:, :nope], q_rope.flatten(0, 1)).unflatten(0, (batch, queries))
        mixed = sparse_mla(q, rows, selected, value_dim=latent, scale=scale, pages=pages)[0]
        return by_head(mixed.flatten(0, 1), up[:, nope:].transpose(1, 2)).unflatten(0, (batch, queries))

    return attend


def _load_triton(operator: str) -> Callable[[], Callable[..., Any]]:
    def load() -> Callable[..., Any]:
        from glm5.kernels import triton

        found: Callable[..., Any] = getattr(triton, operator)
        return found

    return load


def _load_training(operator: str) -> Callable[[], Callable[..., Any]]:
    def load() -> Callable[..., Any]:
        from glm5.kernels import training

        found: Callable[..., Any] = getattr(training, operator)
        return found

    return load


def _load_cpu(operator: str) -> Callable[[], Callable[..., Any]]:
    def load() -> Callable[..., Any]:
        from glm5.kernels import cpu

        found: Callable[..., Any] = getattr(cpu, operator)
        return found

    return load


OPERATORS: dict[str, tuple[Fast, ...]] = {
    "rms_norm": (
        Fast("triton.rms_norm", _triton, _rows_at_one_stride, _load_triton("rms_norm")),
        Fast("cpu.rms_norm", _compiler, _cpu_norm, _load_cpu("rms_norm")),
    ),
    "add_rms_norm": (Fast("triton.add_rms_norm", _triton, _add_norm, _load_triton("add_rms_norm")),),
    "store": (Fast("triton.store", _triton, _store, _load_triton("store")),),
    "next_rows": (Fast("triton.next_rows", _triton, _next_rows, _load_triton("next_rows")),),
    "project": (
        Fast("triton.project", _triton, _project, _load_triton("project")),
        Fast("cpu.project", _compiler, _cpu_few, _load_cpu("project")),
    ),
    "project_into": (Fast("triton.project", _triton, _project, _load_triton("project")),),
    "dense_attention": (),
    "sparse_attention": (
        Fast("cuda.sparse_mla", _hopper, _sparse_mla, _load_sparse_mla),
        Fast("cpu.sparse_attention", _compiler, _cpu_attention, _load_cpu("sparse_attention")),
    ),
    "index_select": (
        Fast("cuda.index_select", _both, _index_select, _load_index_select("cuda")),
        Fast("triton.stream_select", _triton, _stream_select, _load_index_select("triton")),
        Fast("cpu.index_select", _compiler, _plain_fp32, _load_cpu("index_select")),
    ),
    "index_select_fp8": (
        Fast("cuda.index_select", _both, _index_select_fp8, _load_index_select_fp8("cuda")),
        Fast("triton.stream_select", _triton, _stream_select_fp8, _load_index_select_fp8("triton")),
    ),
    "sparse_attention_fp8": (
        Fast("cuda.sparse_mla", _hopper, _sparse_mla_fp8, _load_sparse_mla_fp8("cuda")),
        Fast("triton.sparse_mla_fp8", _triton, _sparse_mla_fp8, _load_sparse_mla_fp8("triton")),
    ),
    "grouped_swiglu_fp8": (
        Fast("cuda.grouped_swiglu_fp8", _both, _experts_fp8, _load_cuda("grouped_swiglu_fp8")),
        Fast("triton.grouped_swiglu_fp8", _triton, _experts_fp8, _load_triton("grouped_swiglu_fp8")),
    ),
    "packed_matmul": (),
    "absorbed_attention": (
        Fast("cuda.absorbed_attention", _both, _absorbed, _load_absorbed),
        Fast("cpu.absorbed_attention", _compiler, _cpu_absorbed, _load_cpu("absorbed_attention")),
    ),
    "train_sparse_attention": (
        Fast("cuda.sparse_mla_backward", _hopper, _train_sparse, _load_training("sparse_attention"), trains=True),
    ),
    "indexer_loss": (Fast("triton.indexer_loss", _both, _train_indexer, _load_training("indexer_loss"), trains=True),),
    "router": (Fast("triton.router", _triton, _router, _load_triton("router")),),
    "route": (
        Fast("triton.route", _triton, _route, _load_triton("route")),
        Fast("cpu.route", _compiler, _plain_fp32, _load_cpu("route")),
    ),
    "grouped_swiglu": (
        Fast("cuda.grouped_swiglu", _both, _experts, _load_cuda("grouped_swiglu")),
        Fast("triton.grouped_swiglu", _triton, _plain_bf16, _load_triton("grouped_swiglu")),
        Fast("cpu.grouped_swiglu", _compiler, _cpu_experts, _load_cpu("grouped_swiglu")),
    ),
    "swiglu": (
        Fast("triton.swiglu", _triton, _rows_at_one_stride, _load_triton("swiglu")),
        Fast("cpu.swiglu", _compiler, _cpu_few, _load_cpu("swiglu")),
    ),
    "moe": (Fast("cpu.moe", _compiler, _cpu_few, _load_cpu("moe")),),
    "moe_row": (Fast("triton.moe_row", _triton, _moe_row, _load_triton("moe_row")),),
    "interval_loss": (
        Fast("triton.indexer_warmup", _both, _train_intervals, _load_training("interval_loss"), trains=True),
    ),
    "train_grouped_swiglu": (
        Fast("triton.moe_backward", _triton, _train_experts, _load_training("grouped_swiglu"), trains=True),
    ),
    "train_rms_norm": (
        Fast("triton.norm_backward", _triton, _train_norm, _load_training("rms_norm"), trains=True),
        Fast("torch.rms_norm", _cuda, _train_rows, _load_training("torch_rms_norm"), trains=True),
    ),
    "train_rms_norm_beside": (
        Fast("triton.norm_backward", _triton, _train_norm, _load_training("rms_norm_beside"), trains=True),
    ),
    "train_add_rms_norm": (
        Fast("triton.norm_backward", _triton, _train_norm, _load_training("add_rms_norm"), trains=True),
    ),
    "train_latent_rows": (
        Fast("triton.norm_backward", _triton, _train_norm, _load_training("latent_rows"), trains=True),
    ),
    "train_rows_by_pair": (Fast("triton.pairs", _triton, _train_rows, _load_training("rows_by_pair"), trains=True),),
    "train_sum_by_token": (Fast("triton.pairs", _triton, _train_rows, _load_training("sum_by_token"), trains=True),),
    "train_router": (Fast("triton.routing_backward", _triton, _train_router, _load_training("router"), trains=True),),
    "train_balance": (Fast("triton.balance", _triton, _fp32, _load_training("loads_and_balance"), trains=True),),
    "train_swiglu": (Fast("triton.basic_backward", _triton, _train_rows, _load_training("swiglu"), trains=True),),
    "train_rope_heads": (
        Fast("triton.heads_backward", _triton, _train_heads, _load_training("rope_heads"), trains=True),
    ),
    "train_keys_and_values": (
        Fast("triton.heads_backward", _triton, _train_heads, _load_training("keys_and_values"), trains=True),
    ),
    "linear_cross_entropy": (
        Fast("triton.cross_entropy", _triton, _train_rows, _load_training("linear_cross_entropy"), trains=True),
    ),
    "scaled": (Fast("triton.scaled", _triton, _scaled, _load_training("scaled")),),
    "nesterov": (Fast("triton.muon", _triton, _fp32, _load_training("nesterov")),),
    "move_momentum": (Fast("triton.muon", _triton, _momentum, _load_training("move_momentum")),),
    "move_weights": (Fast("triton.muon", _triton, _fp32, _load_training("move_weights")),),
    "divided": (Fast("triton.muon", _triton, _divided, _load_training("divided")),),
    "newton_schulz": (Fast("triton.newton_schulz", _both, _newton_schulz, _load_training("newton_schulz")),),
}


# Looked up some forty times a decode step.
_ON_CPU = {operator: next((f for f in versions if f.on_cpu), None) for operator, versions in OPERATORS.items()}


@cache
def _tell_once(operator: str, why: str) -> None:
    log.warning("%s runs as plain PyTorch: %s", operator, why)


@cache
def _loaded(fast: Fast) -> Callable[..., Any]:
    return fast.load()


_INSTEAD: ContextVar[Mapping[str, Callable[..., Any]] | None] = ContextVar("instead", default=None)


@contextmanager
def instead(versions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Inside it, in this thread, these versions run by their operators' names, and of other operators the
    specification, whatever the tensors: whoever gives them knows what they take."""
    token = _INSTEAD.set(versions)
    try:
        yield
    finally:
        _INSTEAD.reset(token)


def pick(operator: str, *tensors: Tensor) -> Callable[..., Any] | None:
    """The fast version of `operator` for these tensors, or None: run the specification.

    On a CUDA device a refusal is logged once with its reason; on a CPU, that there is no compiler.
    """
    given = _INSTEAD.get()
    if given is not None:
        return given.get(operator)
    if tensors[0].is_cpu:
        fast = _ON_CPU[operator]
        if fast is None or fast.refuses(*tensors) is not None or os.environ.get("GLM5_KERNELS") == "torch":
            return None
        ok, why = fast.available()
        if ok:
            return _loaded(fast)
        _tell_once(operator, f"{fast.name}: {why}")
        return None
    if not tensors[0].is_cuda or os.environ.get("GLM5_KERNELS") == "torch":
        return None
    reasons = []
    for fast in OPERATORS[operator]:
        if fast.on_cpu:
            continue
        ok, why = fast.available()
        refusal = why if not ok else fast.refuses(*tensors)
        if refusal is None:
            return _loaded(fast)
        reasons.append(f"{fast.name}: {refusal}")
    if reasons:
        _tell_once(operator, "; ".join(reasons))
    return None


def describe() -> list[dict[str, str]]:
    """Per operator: `operator`, `version` that runs here where its conditions hold, and `why`."""
    on_cpu = not torch.cuda.is_available()
    rows = []
    for operator, versions in OPERATORS.items():
        version, why = "torch", "the only version" if not versions else ""
        for fast in versions:
            ok, reason = fast.available()
            if os.environ.get("GLM5_KERNELS") == "torch":
                why = "GLM5_KERNELS=torch"
            elif ok and fast.on_cpu == on_cpu:
                kind = f"{'fp32' if on_cpu else 'bf16'} tensors{'' if fast.trains else ' without gradients'}"
                version, why = fast.name, f"{reason}; for {kind}, else torch"
                break
            elif not why:
                why = f"{fast.name}: {reason}"
        rows.append({"operator": operator, "version": version, "why": why})
    return rows
