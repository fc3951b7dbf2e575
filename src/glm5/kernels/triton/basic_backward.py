"""SwiGLU with its gradient, in Triton: one pass over memory each way. Read next: `glm5.kernels.basic`."""

# mypy: disallow-untyped-defs=false, disallow-incomplete-defs=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _gate(gate_ptr, up_ptr, out_ptr, gate_stride, up_stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_ptr + row * gate_stride + at, mask=at < width, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + at, mask=at < width, other=0.0)
    kind = out_ptr.dtype.element_ty
    tl.store(out_ptr + row * width + at, (gate / (1.0 + tl.exp(-gate))).to(kind) * up, mask=at < width)


@triton.jit
def _gate_backward(
    grad_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, grad_stride, gate_stride, up_stride, width, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = at < width
    grad = tl.load(grad_ptr + row * grad_stride + at, mask=real, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + at, mask=real, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + at, mask=real, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    act = gate * sigmoid
    kind = dgate_ptr.dtype.element_ty
    tl.store(dgate_ptr + row * width + at, (grad * up * (sigmoid + act * (1.0 - sigmoid))).to(kind), mask=real)
    tl.store(dup_ptr + row * width + at, (grad * act).to(kind), mask=real)


class SwiGLU(torch.autograd.Function):
    """`basic.swiglu`. Saves its two inputs."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        width = gate.shape[-1]
        gates, ups = gate.reshape(-1, width), up.reshape(-1, width)
        out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        if gates.shape[0]:
            block = min(2048, triton.next_power_of_2(width))
            grid = (gates.shape[0], triton.cdiv(width, block))
            _gate[grid](gates, ups, out, gates.stride(0), ups.stride(0), width, BLOCK=block)
        ctx.save_for_backward(gates, ups)
        ctx.shape = gate.shape
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gates, ups = ctx.saved_tensors
        rows, width = gates.shape
        flat = grad.reshape(-1, width)
        dgate, dup = (torch.empty(gates.shape, dtype=gates.dtype, device=gates.device) for _ in range(2))
        if rows:
            block = min(2048, triton.next_power_of_2(width))
            strides = flat.stride(0), gates.stride(0), ups.stride(0)
            _gate_backward[(rows, triton.cdiv(width, block))](
                flat, gates, ups, dgate, dup, *strides, width, BLOCK=block
            )
        return dgate.view(ctx.shape), dup.view(ctx.shape)
