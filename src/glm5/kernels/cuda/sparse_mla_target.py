"""What the indexer learns from, on Hopper: sparse attention's distribution, averaged over heads.

The kernel is `sparse_mla_target.cu`; read it next, then `glm5.kernels.triton.indexer_loss`, which takes it.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from glm5.kernels.cuda.build import check, library
from glm5.kernels.cuda.sparse_mla import HEADS, WIDTH

_P, _I, _L = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64


def sparse_mla_target(
    q_BTHX: Tensor, kv_BSX: Tensor, selected_BTK: Tensor, lse_BTH: Tensor, *, scale: float
) -> tuple[Tensor, Tensor]:
    """The mean over heads of exp(scale * q.k - lse) at every selected position.

    Args:
        q_BTHX, kv_BSX, selected_BTK, scale: as given to `sparse_mla`. lse_BTH: fp32, what it returned.

    Returns:
        target_BTK fp32, 0 where nothing is selected; logit_max_BTH fp32, each head's largest scale * q.k, -inf without.

    Raises:
        ValueError: a shape, stride or dtype that the kernel does not take.
    """
    batch, queries, heads, width = q_BTHX.shape
    if width != WIDTH or heads > HEADS or any(x.dtype != torch.bfloat16 for x in (q_BTHX, kv_BSX)):
        raise ValueError(
            f"sparse_mla_target takes at most {HEADS} heads of {WIDTH} in bfloat16, not {heads} of {width}"
        )
    if not (selected_BTK.is_contiguous() and lse_BTH.is_contiguous()):
        raise ValueError("sparse_mla_target takes contiguous positions and log-sum-exps")
    if batch > 1 and queries > 1 and q_BTHX.stride(0) != queries * q_BTHX.stride(1):
        raise ValueError("sparse_mla_target takes queries whose B and T dimensions collapse into one")
    target = torch.empty(selected_BTK.shape, dtype=torch.float32, device=q_BTHX.device)
    top = torch.empty(batch, queries, heads, dtype=torch.float32, device=q_BTHX.device)
    if batch * queries == 0:
        return target, top
    status = _launcher()(
        q_BTHX.data_ptr(), kv_BSX.data_ptr(), selected_BTK.data_ptr(), lse_BTH.data_ptr(), target.data_ptr(),
        top.data_ptr(), batch * queries, heads, selected_BTK.shape[-1], queries,
        q_BTHX.stride(0) if queries == 1 else q_BTHX.stride(1), q_BTHX.stride(2), kv_BSX.stride(0), kv_BSX.stride(1),
        scale, torch.cuda.current_stream(q_BTHX.device).cuda_stream,
    )  # fmt: skip
    check(status, "sparse_mla_target")
    return target, top


@functools.cache
def _launcher() -> Callable[..., int]:
    function = library().sparse_mla_target
    function.argtypes = [_P] * 6 + [_I] * 4 + [_L] * 4 + [ctypes.c_float, _P]
    function.restype = _I
    return function
