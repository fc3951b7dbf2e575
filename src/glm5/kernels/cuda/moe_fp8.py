"""Grouped SwiGLU experts with e4m3 weights on Hopper: `moe`, between tokens that are rounded first and after.

Read next: `moe`; `glm5.kernels.triton.moe_fp8`; `glm5.kernels.moe_fp8` for the specification.
"""

from __future__ import annotations

import torch
from torch import Tensor

from glm5.kernels import triton
from glm5.kernels.cuda.moe import LARGEST_EXPERTS, products
from glm5.kernels.formats import BLOCK, E4M3, Packed

MANY = 32  # pairs an expert, on average, from which these products are faster than Triton's


def grouped_swiglu_fp8(
    x_ND: Tensor, gate_up: Packed, down: Packed, expert_NM: Tensor, weight_NM: Tensor, *, many: int = MANY
) -> Tensor:
    """Sum over each token's M experts of weight * down(silu(gate x) * up x), in 8 bits. No gradient.

    Arguments, result and errors as in `triton.grouped_swiglu_fp8`. many: pairs an expert from which the products of
    `moe.cu` run; they take D in multiples of 256, at most 1,024 experts and bf16 tokens.
    """
    tokens, width = x_ND.shape
    experts, choices = down.values.shape[0], expert_NM.shape[1]
    fits = width % (2 * BLOCK) == 0 and experts <= LARGEST_EXPERTS and x_ND.dtype == torch.bfloat16
    if not fits or tokens * choices < many * experts:
        few: Tensor = triton.grouped_swiglu_fp8(x_ND, gate_up, down, expert_NM, weight_NM)
        return few
    return triton.around_products(x_ND, gate_up, down, expert_NM, weight_NM, _products)


def _products(
    x: Tensor, x_scale: Tensor, gate_up: Packed, down: Packed, offset: Tensor, pair: Tensor, part: Tensor
) -> None:
    pairs, inner = len(x), down.values.shape[2]
    hidden = torch.empty(pairs, inner, dtype=E4M3, device=x.device)
    scale = torch.empty(inner // BLOCK, pairs, dtype=torch.float32, device=x.device)
    of_gate_up, of_down = ((p.values, p.scale) for p in (gate_up, down))
    products((x, x_scale), of_gate_up, (hidden, scale), of_down, offset, pair, part)
