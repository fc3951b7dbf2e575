"""Lightning-indexer scores on Hopper, and the selection by them. The kernel is `index_scores.cu`.

It is made for prefill; a few queries a sequence are bound by the keys' bytes, which `glm5.kernels.triton.index_scores`
reads at full speed. Read next: `index_scores.cu`, `topk`.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from glm5.kernels import triton
from glm5.kernels.cuda.build import check, library, multiprocessors
from glm5.kernels.cuda.topk import stable_topk
from glm5.kernels.formats import E4M3
from glm5.kernels.pages import Pages

HEADS, WIDTH, QUERIES, KEYS, GROUPS = 32, 128, 4, 64, 3
_P, _I, _L = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64


def index_scores(
    q_BTJI: Tensor,
    w_BTJ: Tensor,
    k_BSI: Tensor,
    first_BT: Tensor,
    last_BT: Tensor,
    *,
    fill: bool = True,
    out: Tensor | None = None,
    parts: int | None = None,
    pages: Pages | None = None,
    key_scale_BS: Tensor | None = None,
) -> Tensor:
    """Index scores fp32 [B, T, S], -inf outside each query's interval.

    Args:
        q_BTJI: bf16 or e4m3 [B, T, 32, 128], contiguous columns. w_BTJ: fp32 head weights with every scale folded in,
            contiguous columns. k_BSI: [B, S, 128] in the same type, contiguous columns; strides multiples of 16 bytes.
        first_BT, last_BT: int32 [B, T], contiguous, inclusive bounds.
        fill: write -inf outside the intervals; without it those elements keep what `out` held.
        out: contiguous fp32 [B, T, S] to write into.
        parts: pieces into which the keys of 4 queries are cut; None chooses.
        pages: k_BSI is a pool [1, R, I], and a sequence's keys are where they say, in pages of 64; S is then the slots
            of its row of the table.
        key_scale_BS: of e4m3 keys, fp32 [B, S], or with pages [1, R], contiguous columns.

    Raises:
        ValueError: a shape, stride or dtype that the kernel does not take.
    """
    batch, queries, heads, width = q_BTJI.shape
    rows = k_BSI.shape[1]
    slots = rows if pages is None else pages.table_BP.shape[1] * pages.size
    if pages is not None and (pages.size != KEYS or not pages.table_BP.is_contiguous()):
        raise ValueError(f"index_scores takes a contiguous table and pages of {KEYS} keys, not of {pages.size}")
    if (heads, width) != (HEADS, WIDTH) or k_BSI.shape != (batch if pages is None else 1, rows, WIDTH):
        raise ValueError(f"index_scores takes {HEADS} heads of {WIDTH}, not {heads} of {width}")
    kind = torch.bfloat16 if key_scale_BS is None else E4M3
    if q_BTJI.dtype != kind or k_BSI.dtype != kind or w_BTJ.dtype != torch.float32:
        raise ValueError(f"index_scores takes queries and keys in {kind} and float32 weights")
    if key_scale_BS is not None and (
        key_scale_BS.shape != k_BSI.shape[:2] or key_scale_BS.dtype != torch.float32 or key_scale_BS.stride(1) != 1
    ):
        raise ValueError("index_scores takes a float32 scale for every key, contiguous columns")
    if q_BTJI.stride(3) != 1 or w_BTJ.stride(2) != 1 or k_BSI.stride(2) != 1:
        raise ValueError("index_scores takes contiguous columns")
    q_bytes, k_bytes = ([s * x.element_size() for s in x.stride()[:-1]] for x in (q_BTJI, k_BSI))
    aligned = q_BTJI.data_ptr() % 16 == 0 and k_BSI.data_ptr() % 16 == 0
    if not aligned or any(s % 16 for s in (*q_bytes, *k_bytes)):
        raise ValueError("index_scores takes rows aligned to 16 bytes")
    for bound_BT in (first_BT, last_BT):
        if bound_BT.dtype != torch.int32 or not bound_BT.is_contiguous():
            raise ValueError("index_scores takes contiguous int32 bounds")
    if out is None:
        out = torch.empty(batch, queries, slots, dtype=torch.float32, device=q_BTJI.device)
    if out.numel() == 0:
        return out
    processors = multiprocessors(q_BTJI.device.index or 0)
    blocks = batch * -(-queries // QUERIES)
    if parts is None:
        parts = choose_parts(blocks, -(-slots // (KEYS * GROUPS)), processors)
    status = _launcher()(
        q_BTJI.data_ptr(), w_BTJ.data_ptr(), k_BSI.data_ptr(), 0 if key_scale_BS is None else key_scale_BS.data_ptr(),
        first_BT.data_ptr(), last_BT.data_ptr(),
        0 if pages is None else pages.table_BP.data_ptr(), out.data_ptr(),
        batch, queries, slots, rows, 0 if pages is None else pages.table_BP.shape[1], *q_bytes, *w_BTJ.stride()[:2],
        *k_bytes, 0 if key_scale_BS is None else key_scale_BS.stride(0), fill, parts,
        min(processors, blocks * parts),
        torch.cuda.current_stream(q_BTJI.device).cuda_stream,
    )  # fmt: skip
    check(status, "index_scores")
    return out


@functools.cache
def choose_parts(blocks: int, rounds: int, processors: int) -> int:
    """Cut each block's keys so that whole waves fill the chip; entering a piece costs about 6 rounds of tiles."""
    return min(range(1, 33), key=lambda parts: -(-blocks * parts // processors) * (rounds / parts + 6))


def index_select(
    q_BTJI: Tensor,
    w_BTJ: Tensor,
    k_BSI: Tensor,
    first_BT: Tensor,
    last_BT: Tensor,
    k: int,
    *,
    pages: Pages | None = None,
    key_scale_BS: Tensor | None = None,
    tile_bytes: int = 2**28,
) -> Tensor:
    """Score and select tile by tile of queries: int32 [B, T, min(k, S)], ascending, -1 padded.

    Scores of at most `tile_bytes` exist at a time. Arguments as in `index_scores`.
    """
    # The selection's launch may begin while that of the scores ends: it waits by itself.
    early = functools.partial(triton.index_scores, early=True)
    scores: Callable[..., Tensor] = index_scores if q_BTJI.shape[1] >= QUERIES else early
    if key_scale_BS is not None:
        scores = functools.partial(scores, key_scale_BS=key_scale_BS)
    return triton.index_select(
        q_BTJI, w_BTJ, k_BSI, first_BT, last_BT, k, topk=stable_topk, scores=scores, pages=pages, tile_bytes=tile_bytes
    )


@functools.cache
def _launcher() -> Callable[..., int]:
    function = library().index_scores
    function.argtypes = [_P] * 8 + [_I] * 5 + [_L] * 8 + [_I] * 3 + [_P]
    function.restype = _I
    return function
