"""Gradient of sparse MLA on Hopper: argument checks, the two ways to sum a row's gradients, and the launch.

A row is selected by many queries. Fast: every query adds its part to fp32 gradients in device memory, in any order.
Deterministic: queries store their parts in bf16, and an inverse index (the entries that selected a row, sorted) gives
the order of the sum, tile by tile of queries. The kernel is `sparse_mla_backward.cu`; read it next.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from glm5.kernels.cuda.build import check, library, multiprocessors
from glm5.kernels.cuda.sparse_mla import VALUE, WIDTH
from glm5.kernels.inverse import inverse_index

# Queries, in units of what the device runs at once, whose stored parts are summed together (1.2 GB at 2,048 positions).
WAVES = 4
_P, _I, _L = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64


def sparse_mla_backward(
    q_BTHX: Tensor,
    kv_BSX: Tensor,
    selected_BTK: Tensor,
    out_BTHC: Tensor,
    lse_BTH: Tensor,
    grad_BTHC: Tensor,
    *,
    scale: float,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]:
    """Gradients of `sparse_mla` for its query and its rows.

    Args:
        q_BTHX, kv_BSX, selected_BTK, scale: as given to `sparse_mla`. out_BTHC, lse_BTH: what it returned.
        grad_BTHC: bf16, of the output.
        deterministic: the same bits on every run, by summing in a fixed order.

    Returns:
        dq_BTHX bf16, contiguous; drows_BSX fp32, contiguous: keys' and values' gradients together.

    Raises:
        ValueError: a shape, stride or dtype that the kernel does not take.
    """
    batch, queries, heads, width = q_BTHX.shape
    keys, slots = selected_BTK.shape[-1], kv_BSX.shape[1]
    if width != WIDTH or out_BTHC.shape != (batch, queries, heads, VALUE) or grad_BTHC.shape != out_BTHC.shape:
        raise ValueError(f"sparse_mla_backward takes heads of {WIDTH}/{VALUE}, not {width}/{out_BTHC.shape[-1]}")
    if any(x.dtype != torch.bfloat16 for x in (q_BTHX, kv_BSX, out_BTHC, grad_BTHC)):
        raise ValueError("sparse_mla_backward takes bfloat16 tensors")
    if not (selected_BTK.is_contiguous() and out_BTHC.is_contiguous() and lse_BTH.is_contiguous()):
        raise ValueError("sparse_mla_backward takes contiguous positions, outputs and log-sum-exps")
    if batch > 1 and queries > 1 and q_BTHX.stride(0) != queries * q_BTHX.stride(1):
        raise ValueError("sparse_mla_backward takes queries whose B and T dimensions collapse into one")
    grad_BTHC = grad_BTHC.contiguous()
    rows = batch * queries
    dq = torch.empty(q_BTHX.shape, dtype=q_BTHX.dtype, device=q_BTHX.device)
    drows = torch.zeros(batch, slots, WIDTH, dtype=torch.float32, device=q_BTHX.device)
    if rows == 0 or keys == 0:
        return dq.zero_(), drows
    q_stride = q_BTHX.stride(0) if queries == 1 else q_BTHX.stride(1)
    strides = (q_stride, q_BTHX.stride(2), kv_BSX.stride(0), kv_BSX.stride(1), slots)
    stream = torch.cuda.current_stream(q_BTHX.device).cuda_stream

    def launch(start: int, count: int, of: Tensor, target: Tensor, add: bool) -> None:
        status = _launcher()(
            q_BTHX.data_ptr() + start * q_stride * 2, kv_BSX.data_ptr(), of.data_ptr(),
            out_BTHC.data_ptr() + start * heads * VALUE * 2, lse_BTH.data_ptr() + start * heads * 4,
            grad_BTHC.data_ptr() + start * heads * VALUE * 2, dq.data_ptr() + start * heads * WIDTH * 2,
            target.data_ptr(),
            count, heads, keys, queries, start, *strides, scale, int(add), stream,
        )  # fmt: skip
        check(status, "sparse_mla_backward")

    if not deterministic:
        launch(0, rows, selected_BTK, drows, True)
        return dq, drows
    tile = min(rows, WAVES * multiprocessors(q_BTHX.device.index or 0))
    parts = torch.empty(tile, keys, WIDTH, dtype=q_BTHX.dtype, device=q_BTHX.device)
    flat_NK = selected_BTK.view(rows, keys)
    for start in range(0, rows, tile):
        of = flat_NK[start : start + tile]
        launch(start, of.shape[0], of, parts, False)
        order, starts = inverse_index(of, queries, batch, slots, start)
        status = _summer()(
            parts.data_ptr(), order.data_ptr(), starts.data_ptr(), drows.data_ptr(), batch * slots, stream
        )
        check(status, "sparse_mla_sum_rows")
    return dq, drows


@functools.cache
def _launcher() -> Callable[..., int]:
    function = library().sparse_mla_backward
    function.argtypes = [_P] * 8 + [_I] * 5 + [_L] * 5 + [ctypes.c_float, _I, _P]
    function.restype = _I
    return function


@functools.cache
def _summer() -> Callable[..., int]:
    function = library().sparse_mla_sum_rows
    function.argtypes = [_P] * 4 + [_I, _P]
    function.restype = _I
    return function
