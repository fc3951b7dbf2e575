"""Experts in 8 bits: e4m3 weights with a scale for each 128 x 128, activations rounded to e4m3 by 1 x 128.

That is how the published FP8 checkpoints are meant to run: up to some 4,096 tokens the weights' bytes bind, and these
are half. Products are summed in fp32; each 128 columns of the sum are scaled by both sides' scales. Source:
DeepSeek-V3, section 3.3.2. Read next: `moe`, `formats`; `triton.moe_fp8`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from glm5.kernels.dispatch import pick
from glm5.kernels.formats import BLOCK, Packed, pack, rounded, unpack


def pack_experts(gate_up_EFD: Tensor, down_EDF: Tensor) -> tuple[Packed, Packed]:
    """Both matrices of every expert in e4m3, a scale for each 128 x 128.

    Raises:
        ValueError: the experts' width is not a multiple of 128, so that a block would mix gate and up.
    """
    if down_EDF.shape[2] % BLOCK:
        raise ValueError(f"experts in fp8 take widths that are multiples of {BLOCK}, not {down_EDF.shape[2]}")
    gate_up, down = (pack(w, "fp8", BLOCK, BLOCK) for w in (gate_up_EFD, down_EDF))
    return gate_up, down


def grouped_swiglu_fp8(x_ND: Tensor, gate_up: Packed, down: Packed, expert_NM: Tensor, weight_NM: Tensor) -> Tensor:
    """Sum over each token's M experts of weight * down(silu(gate x) * up x), without a gradient.

    x and what SwiGLU gives are rounded to e4m3 by 1 x 128; everything else is fp32. Arguments as in
    `moe.grouped_swiglu`, weights of `pack_experts`.

    Returns:
        [N, D] in x's dtype.
    """
    fast = pick("grouped_swiglu_fp8", x_ND, gate_up.values, down.values)
    if fast is not None:
        out: Tensor = fast(x_ND, gate_up, down, expert_NM, weight_NM)
        return out
    x = rounded(x_ND)
    y_ND = torch.zeros_like(x)
    for e in range(gate_up.values.shape[0]):
        token, choice = (expert_NM == e).nonzero(as_tuple=True)
        if token.numel():
            gate, up = (x[token] @ _one(gate_up, e).t()).chunk(2, -1)
            part = rounded(F.silu(gate) * up) @ _one(down, e).t()
            y_ND.index_add_(0, token, part * weight_NM[token, choice, None])
    return y_ND.to(x_ND.dtype)


def _one(p: Packed, e: int) -> Tensor:
    """An expert's matrix in fp32."""
    return unpack(Packed(p.kind, p.values[e], p.scale[e], p.rows, p.columns))
