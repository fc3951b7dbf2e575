"""The whole MoE of one token in Triton, in four launches: where nothing but the weights' bytes counts.

With one token there is nothing to sort and no tile to fill: a program multiplies a few rows of a matrix with the one
row that all share, as in `row`. The first launch makes the router's logits, in fp32, and the shared expert's hidden
numbers; the second chooses the experts; the third makes their hidden numbers; the last makes each output from all of
them, weighted and summed in the order of the choices, and adds the shared expert's. Numbers are rounded where the
separate operators round. Source: report section 2.1, DeepSeek-V3. Read next: `row`, `routing`; `glm5.model.moe`, the
specification.
"""

# mypy: disallow-untyped-defs=false, disallow-incomplete-defs=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.kernels.triton.early import begin, early
from glm5.kernels.triton.routing import choose

EXPERTS_EACH = 2  # logits of a program


@triton.jit
def _hidden(
    x_ptr, gate_ptr, up_ptr, out_ptr, block, rows, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """out = silu(gate x) * up x, of a block of rows of both matrices."""
    row_N = block * BLOCK_N + tl.arange(0, BLOCK_N)
    at_N = row_N[:, None].to(tl.int64) * K
    real_N = (row_N < rows)[:, None]
    col_K = tl.arange(0, BLOCK_K)
    gate_NK = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up_NK = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in range(0, K, BLOCK_K):
        col = start + col_K
        inside = (col < K)[None, :]
        gate = tl.load(gate_ptr + at_N + col[None, :], mask=real_N & inside, other=0.0)
        up = tl.load(up_ptr + at_N + col[None, :], mask=real_N & inside, other=0.0)
        x = tl.load(x_ptr + col, mask=col < K, other=0.0).to(tl.float32)[None, :]
        gate_NK += gate.to(tl.float32) * x
        up_NK += up.to(tl.float32) * x
    kind = out_ptr.dtype.element_ty
    gate_N = tl.sum(gate_NK, 1).to(kind).to(tl.float32)
    hidden_N = (gate_N / (1.0 + tl.exp(-gate_N))).to(kind) * tl.sum(up_NK, 1).to(kind)
    tl.store(out_ptr + row_N, hidden_N, mask=row_N < rows)


@triton.jit
def _logits_and_shared(
    x_ptr, router_ptr, logit_ptr, gate_ptr, up_ptr, shared_ptr, experts, rows,
    K: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """logit = router x by the first programs, the shared expert's hidden numbers by the others."""
    begin(EARLY)
    block = tl.program_id(0)
    first = tl.cdiv(experts, BLOCK_E)
    if block >= first:
        _hidden(x_ptr, gate_ptr, up_ptr, shared_ptr, block - first, rows, K, BLOCK_N, BLOCK_K)
    else:
        row_E = block * BLOCK_E + tl.arange(0, BLOCK_E)
        col_K = tl.arange(0, BLOCK_K)
        acc_EK = tl.zeros([BLOCK_E, BLOCK_K], tl.float32)
        for start in range(0, K, BLOCK_K):
            col = start + col_K
            real_EK = (row_E < experts)[:, None] & (col < K)[None, :]
            weight = tl.load(router_ptr + row_E[:, None] * K + col[None, :], mask=real_EK, other=0.0)
            acc_EK += weight * tl.load(x_ptr + col, mask=col < K, other=0.0).to(tl.float32)[None, :]
        tl.store(logit_ptr + row_E, tl.sum(acc_EK, 1), mask=row_E < experts)


@triton.jit
def _gate_up(
    x_ptr, weight_ptr, expert_ptr, hidden_ptr, F,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """hidden[choice]: of that choice's expert."""
    begin(EARLY)
    choice = tl.program_id(1)
    size = F.to(tl.int64) * K
    gate_ptr = weight_ptr + tl.load(expert_ptr + choice) * (2 * size)
    _hidden(x_ptr, gate_ptr, gate_ptr + size, hidden_ptr + choice * F, tl.program_id(0), F, K, BLOCK_N, BLOCK_K)


@triton.jit
def _down_rows(weight_ptr, hidden_ptr, row_N, rows, K: tl.constexpr, BLOCK_K: tl.constexpr, KIND: tl.constexpr):
    """Rows of down times hidden numbers, rounded to KIND."""
    col = tl.arange(0, BLOCK_K)
    real_NK = (row_N < rows)[:, None] & (col < K)[None, :]
    weight = tl.load(weight_ptr + row_N[:, None].to(tl.int64) * K + col[None, :], mask=real_NK, other=0.0)
    hidden = tl.load(hidden_ptr + col, mask=col < K, other=0.0).to(tl.float32)
    return tl.sum(weight.to(tl.float32) * hidden[None, :], 1).to(KIND)


@triton.jit
def _down(
    hidden_ptr, weight_ptr, expert_ptr, share_ptr, shared_hidden_ptr, shared_ptr, y_ptr, D,
    M: tl.constexpr, F: tl.constexpr, S: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr,
    BLOCK_S: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """y = the sum over choices of share * down hidden, plus the shared expert's where S is not 0."""
    begin(EARLY)
    kind = y_ptr.dtype.element_ty
    row_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    sum_N = tl.zeros([BLOCK_N], tl.float32)
    for m in range(M):
        down_ptr = weight_ptr + tl.load(expert_ptr + m) * D * F
        part_N = _down_rows(down_ptr, hidden_ptr + m * F, row_N, D, F, BLOCK_F, kind)
        sum_N += tl.load(share_ptr + m) * part_N.to(tl.float32)
    y_N = sum_N.to(kind)
    if S > 0:
        y_N += _down_rows(shared_ptr, shared_hidden_ptr, row_N, D, S, BLOCK_S, kind)
    tl.store(y_ptr + row_N, y_N, mask=row_N < D)


def moe_row(
    x_1D: Tensor,
    router: tuple[Tensor, Tensor],
    routed: tuple[Tensor, Tensor],
    shared: tuple[Tensor, Tensor, Tensor] | None,
    *,
    top_k: int,
    normalise: bool,
    scaling: float,
    shapes: tuple[tuple[int, int, int], tuple[int, int, int], tuple[int, int]] = ((4, 512, 8), (1, 2048, 4), (2, 2)),
) -> Tensor:
    """The MoE's output for one token, [1, D]. No gradient.

    Args:
        x_1D: contiguous columns. router: fp32 weight [E, D] and bias [E]. routed: gate_up [E, 2F, D], gate rows first,
            and down [E, D, F]. shared: gate [S, D], up [S, D] and down [D, S]. All contiguous.
        shapes: rows and columns of a program and its warps, of the first launch and of the experts' hidden numbers;
            rows and warps of the last.
    """
    (weight_ED, bias_E), (gate_up, down) = router, routed
    gate, up, shared_down = shared or (x_1D, x_1D, x_1D)
    width, experts, inner, on = x_1D.shape[1], weight_ED.shape[0], down.shape[2], early(x_1D)
    wide = 0 if shared is None else gate.shape[0]
    logits = torch.empty(1, 1, experts, dtype=torch.float32, device=x_1D.device)
    shared_hidden, hidden, y = x_1D.new_empty(wide), x_1D.new_empty(top_k, inner), x_1D.new_empty(1, width)
    rows, columns, warps = shapes[0]
    _logits_and_shared[(triton.cdiv(experts, EXPERTS_EACH) + triton.cdiv(wide, rows),)](
        x_1D, weight_ED, logits, gate, up, shared_hidden, experts, wide,
        K=width, BLOCK_E=EXPERTS_EACH, BLOCK_N=rows, BLOCK_K=columns, num_warps=warps, **on,
    )  # fmt: skip
    _, expert, share, _ = choose(logits, bias_E, top_k, normalise, scaling)
    rows, columns, warps = shapes[1]
    _gate_up[(triton.cdiv(inner, rows), top_k)](
        x_1D, gate_up, expert, hidden, inner, K=width, BLOCK_N=rows, BLOCK_K=columns, num_warps=warps, **on
    )
    rows, warps = shapes[2]
    _down[(triton.cdiv(width, rows),)](
        hidden, down, expert, share, shared_hidden, shared_down, y, width,
        M=top_k, F=inner, S=wide, BLOCK_N=rows, BLOCK_F=triton.next_power_of_2(inner),
        BLOCK_S=triton.next_power_of_2(max(1, wide)), num_warps=warps, **on,
    )  # fmt: skip
    return y
