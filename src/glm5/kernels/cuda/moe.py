"""Grouped SwiGLU experts on Hopper: argument checks and launches. The products are `moe.cu`.

Many tokens an expert take these products, few take Triton's; the launches around them are the same, but that tokens are
copied into the order of their experts first. Read next: `moe.cu`; `moe_fp8`; `glm5.kernels.moe` for the specification.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from glm5.kernels import triton
from glm5.kernels.cuda.build import check, library, multiprocessors

MANY = 48  # pairs an expert, on average, from which these products are faster than Triton's
LARGEST_EXPERTS = 1024
_P, _I = ctypes.c_void_p, ctypes.c_int


def grouped_swiglu(
    x_ND: Tensor, gate_up_EFD: Tensor, down_EDF: Tensor, expert_NM: Tensor, weight_NM: Tensor, *, many: int = MANY
) -> Tensor:
    """Sum over each token's M experts of weight * down(silu(gate x) * up x). No gradient.

    Arguments, result and errors as in `triton.grouped_swiglu`. many: pairs an expert from which this file's products
    run; they take bf16, D in multiples of 512, F in multiples of 256 and at most 1,024 experts.
    """
    tokens, width = x_ND.shape
    experts, _, inner = down_EDF.shape
    choices = expert_NM.shape[1]
    fits = width % 512 == 0 and inner % 256 == 0 and experts <= LARGEST_EXPERTS and x_ND.dtype == torch.bfloat16
    if not fits or tokens == 0 or tokens * choices < many * experts:
        few: Tensor = triton.grouped_swiglu(x_ND, gate_up_EFD, down_EDF, expert_NM, weight_NM)
        return few
    if x_ND.stride(1) != 1 or not all(t.is_contiguous() for t in (gate_up_EFD, down_EDF, expert_NM, weight_NM)):
        raise ValueError("grouped_swiglu takes contiguous weights, ids and mixture weights, and contiguous token rows")
    from glm5.kernels.triton.segments import in_order, mix, segments  # imports triton

    offset, pair, position = segments(expert_NM, experts)
    x = in_order(x_ND, position)
    hidden, part = x.new_empty(len(pair), inner), torch.empty_like(x)
    products((x, None), (gate_up_EFD, None), (hidden, None), (down_EDF, None), offset, pair, part)
    y_ND = torch.empty_like(x_ND, memory_format=torch.contiguous_format)
    mix(part, weight_NM, y_ND)
    return y_ND


Scaled = tuple[Tensor, Tensor | None]  # bf16, or e4m3 and its scales


def products(
    x: Scaled, gate_up: Scaled, hidden: Scaled, down: Scaled, offset: Tensor, pair: Tensor, part: Tensor
) -> None:
    """hidden[position] = silu(gate x) * up x and part[pair[position]] = down hidden, of tokens in segments."""
    (pairs, width), (experts, _, inner) = x[0].shape, down[0].shape
    blocks = multiprocessors(part.device.index or 0) // 2 * 2
    stream = torch.cuda.current_stream(part.device).cuda_stream
    status = _launcher("experts_gate_up")(
        *map(_address, (*x, *gate_up, offset, *hidden)), pairs, experts, width, inner, blocks, stream
    )
    check(status, "experts_gate_up")
    status = _launcher("experts_down")(
        *map(_address, (*hidden, *down, offset, pair, part)), pairs, experts, inner, width, blocks, stream
    )
    check(status, "experts_down")


def _address(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


@functools.cache
def _launcher(name: str) -> Callable[..., int]:
    function: Callable[..., int] = getattr(library(), name)
    function.argtypes = [_P] * 7 + [_I] * 5 + [_P]  # type: ignore[attr-defined]
    function.restype = _I  # type: ignore[attr-defined]
    return function
