"""Sparse MLA on Hopper: argument checks, the choice of splits, and the launch. The kernels are `sparse_mla.cu`, and
`sparse_mla_fp8.cu` over an fp8 cache.

Read next: `sparse_mla.cu`, and `glm5.kernels.triton.sparse_mla` for the same operator on other devices.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from glm5.kernels.cuda.build import check, library, multiprocessors
from glm5.kernels.latent_rows import ROW_BYTES
from glm5.kernels.pages import Pages

HEADS, WIDTH, VALUE = 64, 576, 512
SPLITS = (16, 12, 8, 7, 6, 5, 4, 3, 2, 1)
LOG2E = 1.4426950408889634
_P, _I, _L = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64


class _Params(ctypes.Structure):
    """`mla::Params` of sparse_mla.cuh, which says what each is. Strides: of queries in elements, of rows in bytes."""

    _fields_ = (
        *((n, _P) for n in ("q", "kv", "selected", "table", "out", "lse", "partial", "stats")),
        *((n, _I) for n in ("queries", "heads", "keys", "queries_per_batch", "page_shift", "page_mask")),
        *((n, _L) for n in ("q_stride", "q_head_stride", "kv_batch_stride", "kv_stride", "table_stride")),
        ("scale_log2", ctypes.c_float),
    )


def sparse_mla(
    q_BTHX: Tensor,
    kv_BSX: Tensor,
    selected_BTK: Tensor,
    *,
    value_dim: int,
    scale: float,
    splits: int | None = None,
    pages: Pages | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(scale * q.k) v over selected rows; keys are whole rows, values their first `value_dim` columns.

    Args:
        q_BTHX: bf16 [B, T, H, 576], H <= 64, last dimension contiguous, B and T collapsible.
        kv_BSX: bf16 [B, S, 576], or uint8 [B, S, 656] of an fp8 cache (`latent_rows`); last dimension contiguous, row
            and batch strides multiples of 16 bytes. With `pages` a pool [1, R, X], of which a sequence's slots are
            where they say; the size of a page is a power of two.
        selected_BTK: int32 [B, T, K], contiguous, slots below S; -1 only at the end of a row.
        value_dim: 512.
        splits: blocks that share a query, one of SPLITS. None chooses by B * T, so that the choice, and with it
            the rounding, depends on the batch; fix it for batch-invariant results.
        out: (out_BTHC, lse_BTH) to write into, contiguous.

    Returns:
        out_BTHC bf16 [B, T, H, 512], zeros where nothing is selected; lse_BTH fp32, natural log, -inf there.

    Raises:
        ValueError: a shape, stride or dtype that the kernel does not take.
    """
    batch, queries, heads, width = q_BTHX.shape
    if width != WIDTH or value_dim != VALUE or not 1 <= heads <= HEADS:
        raise ValueError(
            f"sparse_mla takes at most {HEADS} heads of {WIDTH}/{VALUE}, not {heads} of {width}/{value_dim}"
        )
    fp8 = kv_BSX.dtype == torch.uint8
    if q_BTHX.dtype != torch.bfloat16 or not (fp8 or kv_BSX.dtype == torch.bfloat16):
        raise ValueError("sparse_mla takes bfloat16 queries, and bfloat16 rows or those of an fp8 cache")
    if selected_BTK.dtype != torch.int32:
        raise ValueError(f"sparse_mla takes int32 positions, not {selected_BTK.dtype}")
    if selected_BTK.shape[:2] != (batch, queries) or not selected_BTK.is_contiguous():
        raise ValueError("sparse_mla takes contiguous positions of shape [B, T, K]")
    sequences = batch if pages is None else 1
    columns = ROW_BYTES if fp8 else WIDTH
    if kv_BSX.shape[0] != sequences or kv_BSX.shape[2] != columns:
        raise ValueError(f"sparse_mla: kv has shape {tuple(kv_BSX.shape)}, expected [{sequences}, S, {columns}]")
    table, wide, shift, mask = 0, 0, 0, 2**31 - 1
    if pages is not None:
        table, wide, shift = pages.table_BP.data_ptr(), pages.table_BP.shape[1], pages.size.bit_length() - 1
        mask = pages.size - 1
        if pages.size != 1 << shift or not pages.table_BP.is_contiguous() or pages.table_BP.shape[0] != batch:
            raise ValueError(f"sparse_mla takes a contiguous table of {batch} rows and pages of a power of two")
    collapsible = batch == 1 or q_BTHX.stride(0) == queries * q_BTHX.stride(1)
    kv_bytes = [s * kv_BSX.element_size() for s in kv_BSX.stride()[:2]]
    strides = (q_BTHX.stride(1), q_BTHX.stride(2), *kv_bytes)
    unit = q_BTHX.stride(3) == 1 and kv_BSX.stride(2) == 1
    even = not any(s % 8 for s in strides[:2]) and not any(s % 16 for s in kv_bytes)
    aligned = q_BTHX.data_ptr() % 16 == 0 and kv_BSX.data_ptr() % 16 == 0 and even
    if not (collapsible and unit and aligned):
        raise ValueError("sparse_mla takes rows with contiguous columns, aligned to 16 bytes, and collapsible B, T")
    rows = batch * queries
    if out is None:
        out = (
            torch.empty(batch, queries, heads, VALUE, dtype=q_BTHX.dtype, device=q_BTHX.device),
            torch.empty(batch, queries, heads, dtype=torch.float32, device=q_BTHX.device),
        )
    if rows == 0:
        return out
    if queries == 1:  # a singleton dimension's stride says nothing
        strides = (q_BTHX.stride(0), *strides[1:])
    if pages is not None:
        strides = (*strides[:2], 0, strides[3])
    device = q_BTHX.device.index or 0
    if splits is None:
        splits = choose_splits(rows, selected_BTK.shape[-1], device, fp8)
    partial, stats = 0, 0
    if fp8 and splits > 1:  # each block's own result, and its maxima and sums
        parts = rows * splits * HEADS
        work = torch.empty(parts * (VALUE * 2 + 8), dtype=torch.uint8, device=q_BTHX.device)
        partial, stats = work.data_ptr(), work.data_ptr() + parts * VALUE * 2
    blocks = min(rows, multiprocessors(device))
    stream = torch.cuda.current_stream(q_BTHX.device).cuda_stream
    params = _Params(
        q_BTHX.data_ptr(), kv_BSX.data_ptr(), selected_BTK.data_ptr(), table, out[0].data_ptr(), out[1].data_ptr(),
        partial, stats, rows, heads, selected_BTK.shape[-1], queries, shift, mask, *strides, wide, scale * LOG2E,
    )  # fmt: skip
    status = _launcher(fp8)(ctypes.byref(params), splits, blocks, stream)
    check(status, "sparse_mla")
    return out


@functools.cache
def choose_splits(rows: int, keys: int, device: int, fp8: bool = False) -> int:
    """The number of blocks per query that ends soonest by a count of steps: work per block times rounds of blocks."""
    steps = -(-keys // (64 if fp8 else 48))
    best, best_cost = 1, float("inf")
    for splits in SPLITS:
        resident = multiprocessors(device) if splits == 1 else clusters_at_once(splits, device)
        if resident < 1:
            continue
        # Entering a block costs about as much as 3 steps, and combining as much again.
        rounds = -(-rows // resident)
        cost = rounds * (-(-steps // splits) + (6 if splits > 1 else 3))
        if cost < best_cost:
            best, best_cost = splits, cost
    return best


@functools.cache
def clusters_at_once(splits: int, device: int) -> int:
    """How many clusters of `splits` blocks the device runs at the same time."""
    with torch.cuda.device(device):
        return library().sparse_mla_capacity(splits)


@functools.cache
def _launcher(fp8: bool) -> Callable[..., int]:
    function = library().sparse_mla_fp8 if fp8 else library().sparse_mla
    function.argtypes = [ctypes.POINTER(_Params), _I, _I, _P]
    function.restype = _I
    return function
