"""Stable top-k on Hopper: argument checks, the choice of cluster, and the launch. The kernel is `topk.cu`.

Read next: `topk.cu`, and `glm5.kernels.topk` for the specification.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from glm5.kernels.cuda.build import check, library

LARGEST_K = 2048
LARGEST_ROW = 700_000  # two bitmaps over the row and the list of candidates fill a block's shared memory
_P, _I, _L = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64


def stable_topk(
    scores_NS: Tensor,
    k: int,
    first_N: Tensor | None = None,
    last_N: Tensor | None = None,
    *,
    cluster: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Positions of the k highest scores of each row, ties to the lower position, ascending.

    Args:
        scores_NS: fp32 [N, S], columns contiguous; `-inf` marks invisible slots. No NaN.
        k: 1 to 2,048.
        first_N, last_N: int32 [N], inclusive bounds of what a row sees; slots outside are not read. None: all.
        cluster: blocks a row, 1, 2, 4, 8 or 16; None chooses. The result does not depend on it.
        out: int32 [N, min(k, S)] to write into, contiguous.

    Returns:
        int32 [N, min(k, S)], -1 padded at the end.

    Raises:
        ValueError: a shape, stride or dtype that the kernel does not take.
    """
    rows, slots = scores_NS.shape
    if scores_NS.dtype != torch.float32 or scores_NS.stride(1) != 1 or slots > LARGEST_ROW:
        raise ValueError(f"stable_topk takes fp32 rows of at most {LARGEST_ROW} contiguous scores")
    if not 1 <= k <= LARGEST_K:
        raise ValueError(f"stable_topk takes k from 1 to {LARGEST_K}, not {k}")
    for bound_N in (first_N, last_N):
        if bound_N is not None and (bound_N.dtype != torch.int32 or bound_N.shape != (rows,) or bound_N.stride(0) != 1):
            raise ValueError("stable_topk takes contiguous int32 bounds, one a row")
    width = min(k, slots)
    if out is None:
        out = torch.empty(rows, width, dtype=torch.int32, device=scores_NS.device)
    if rows == 0 or slots == 0:
        return out
    if cluster is None:
        cluster = choose_cluster(rows, slots)
    status = _launcher()(
        scores_NS.data_ptr(),
        0 if first_N is None else first_N.data_ptr(),
        0 if last_N is None else last_N.data_ptr(),
        out.data_ptr(), rows, slots, k, width, scores_NS.stride(0), cluster,
        torch.cuda.current_stream(scores_NS.device).cuda_stream,
    )  # fmt: skip
    check(status, "stable_topk")
    return out


def choose_cluster(rows: int, slots: int) -> int:
    """Enough blocks to fill the chip, but at least 2,048 scores each, and of up to 16,384 one block.

    Larger clusters must fit into one group of multiprocessors, which leaves some idle: of clusters of 4 or more, an
    H200 places about 112 blocks at once, and a second round costs more than a smaller cluster.
    """
    cluster = 1
    while cluster < 16 and slots > 16384 and slots // (cluster * 2) >= 2048:
        if rows * cluster * 2 > (132 if cluster == 1 else 112):
            break
        cluster *= 2
    return cluster


@functools.cache
def _launcher() -> Callable[..., int]:
    function = library().stable_topk
    function.argtypes = [_P] * 4 + [_I] * 4 + [_L, _I, _P]
    function.restype = _I
    return function
