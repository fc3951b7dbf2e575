"""The registered operators: shapes without running anything, and on a Hopper GPU torch.compile over them."""

from __future__ import annotations

import pkgutil

import pytest
import torch

from glm5.kernels import cuda, dispatch, library, triton
from glm5.kernels.indexer import index_select
from glm5.kernels.latent_rows import pack_rows
from glm5.kernels.moe import grouped_swiglu
from glm5.kernels.moe_fp8 import grouped_swiglu_fp8, pack_experts
from glm5.kernels.visibility import Visibility

RUNS, WHY = cuda.available()


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_shapes_are_known_without_running() -> None:
    q, rows = _meta(2, 3, 64, 576).requires_grad_(), _meta(2, 100, 576).requires_grad_()
    selected = _meta(2, 3, 32, dtype=torch.int32)
    out, lse = library.sparse_mla(q, rows, selected, 0.1)
    assert (out.shape, out.dtype) == ((2, 3, 64, 512), torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((2, 3, 64), torch.float32)
    assert out.requires_grad
    assert not lse.requires_grad
    dq, drows = torch.autograd.grad(out.sum(), (q, rows))
    assert (dq.shape, drows.shape) == (q.shape, rows.shape)

    target, top = library.sparse_mla_target(q, rows, selected, lse, 0.1)
    assert (target.shape, target.dtype) == ((2, 3, 32), torch.float32)
    assert (top.shape, top.dtype) == ((2, 3, 64), torch.float32)

    picked = library.index_select(_meta(2, 3, 32, 128), _meta(2, 3, 32), _meta(2, 100, 128), selected, selected, 2048)
    assert (picked.shape, picked.dtype) == ((2, 3, 100), torch.int32)
    y = library.grouped_swiglu(_meta(9, 64), _meta(4, 64, 64), _meta(4, 64, 32), _meta(9, 2), _meta(9, 2))
    assert y.shape == (9, 64)

    out, lse = library.sparse_mla_fp8(q.detach(), _meta(2, 100, 656, dtype=torch.uint8), selected, 0.1)
    assert (out.shape, lse.shape, lse.dtype) == ((2, 3, 64, 512), (2, 3, 64), torch.float32)
    e4m3, fp32 = torch.float8_e4m3fn, torch.float32
    inputs = (
        _meta(2, 3, 32, 128, dtype=e4m3),
        _meta(2, 3, 32),
        _meta(2, 100, 128, dtype=e4m3),
        _meta(2, 100, dtype=fp32),
    )
    assert library.index_select_fp8(*inputs, selected, selected, 40).shape == (2, 3, 40)


def test_no_module_takes_an_operator_s_name() -> None:
    """Importing such a module would put it where `triton.NAME` was the operator."""
    modules = {found.name for found in pkgutil.iter_modules(triton.__path__)}
    assert "mla" in modules
    assert not modules & set(triton.__all__)


def test_fp8_operators_run_their_specifications_anywhere() -> None:
    generator = torch.Generator().manual_seed(0)
    q, rows = (torch.randn(*shape, generator=generator) for shape in ((1, 2, 3, 576), (1, 20, 576)))
    selected = torch.arange(8, dtype=torch.int32).repeat(1, 2, 1)
    out, _ = torch.ops.glm5.sparse_mla_fp8(q, pack_rows(rows), selected, 0.05)
    exact = ((q[0] @ rows[0, :8].T) * 0.05).softmax(-1) @ rows[0, :8, :512]
    assert (out[0] - exact).norm() < 0.1 * exact.norm()
    x, expert, weight = torch.randn(5, 128, generator=generator), torch.zeros(5, 1, dtype=torch.long), torch.ones(5, 1)
    packed = pack_experts(torch.randn(1, 256, 128, generator=generator), torch.randn(1, 128, 128, generator=generator))
    scaled = (part for p in packed for part in (p.values, p.scale))
    y = torch.ops.glm5.grouped_swiglu_fp8(x, *scaled, expert, weight)
    assert torch.equal(y, grouped_swiglu_fp8(x, *packed, expert, weight))


def test_selection_and_experts_run_what_dispatch_picks() -> None:
    generator = torch.Generator().manual_seed(1)
    x, expert, weight = torch.randn(5, 8, generator=generator), torch.tensor([[0, 2]] * 5), torch.rand(5, 2)
    gate_up, down = torch.randn(3, 12, 8, generator=generator), torch.randn(3, 8, 6, generator=generator)
    inputs = (x, gate_up, down, expert, weight)
    assert torch.equal(torch.ops.glm5.grouped_swiglu(*inputs), grouped_swiglu(*inputs))
    q, w, keys = (torch.randn(1, *shape, generator=generator) for shape in ((4, 2, 16), (4, 2), (30, 16)))
    visible = Visibility(torch.tensor([[0, 0, 3, 9]]), torch.tensor([[2, 29, 11, 8]]), 30)
    picked = torch.ops.glm5.index_select(q, w, keys, visible.first_BT, visible.last_BT, 5)
    assert torch.equal(picked, index_select(q, w, keys, visible, 5))
    with dispatch.instead({"grouped_swiglu": lambda x, *_: x + 1, "index_select": lambda *_: picked + 1}):
        assert torch.equal(torch.ops.glm5.grouped_swiglu(*inputs), x + 1)
        assert torch.equal(torch.ops.glm5.index_select(q, w, keys, visible.first_BT, visible.last_BT, 5), picked + 1)


@pytest.mark.gpu
@pytest.mark.skipif(not RUNS, reason=f"Hopper kernels go untested here: {WHY}")
def test_compile_carries_sparse_attention_and_its_gradient() -> None:
    generator = torch.Generator(device="cuda").manual_seed(1)
    q, rows = (
        torch.randn(*shape, generator=generator, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for shape in ((1, 20, 64, 576), (1, 200, 576))
    )
    selected = torch.rand(1, 20, 200, generator=generator, device="cuda").argsort(-1)[..., :64].sort(-1).values.int()

    def step(q: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return (library.sparse_mla(q * 2, rows, selected, 1 / 16)[0].float() ** 2).sum()

    expected = torch.autograd.grad(step(q, rows), (q, rows))
    found = torch.autograd.grad(torch.compile(step, fullgraph=True)(q, rows), (q, rows))
    for ours, wanted in zip(found, expected, strict=True):
        assert (ours.float() - wanted.float()).norm() < 1e-2 * wanted.float().norm()
    torch.library.opcheck(library.sparse_mla, (q, rows, selected, 1 / 16))
    inputs = (q.detach(), rows.detach(), selected)
    torch.library.opcheck(library.sparse_mla_target, (*inputs, library.sparse_mla(*inputs, 1 / 16)[1], 1 / 16))


@pytest.mark.gpu
@pytest.mark.skipif(not RUNS, reason=f"Hopper kernels go untested here: {WHY}")
def test_a_cuda_graph_holds_forward_and_backward() -> None:
    generator = torch.Generator(device="cuda").manual_seed(2)
    kind = {"generator": generator, "device": "cuda", "dtype": torch.bfloat16}
    q, rows, grad = (
        torch.randn(1, 9, 64, 576, **kind),
        torch.randn(1, 90, 576, **kind),
        torch.randn(1, 9, 64, 512, **kind),
    )
    selected = torch.rand(1, 9, 90, generator=generator, device="cuda").argsort(-1)[..., :48].sort(-1).values.int()

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = library.sparse_mla(q, rows, selected, 1 / 16)
        dq, drows = library.sparse_mla_backward(q, rows, selected, out, lse, grad, 1 / 16, False)
        return dq, drows

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    q.copy_(torch.randn(q.shape, **kind))
    graph.replay()
    for ours, wanted in zip(captured, step(), strict=True):
        assert (ours.float() - wanted.float()).norm() < 1e-2 * wanted.float().norm()
