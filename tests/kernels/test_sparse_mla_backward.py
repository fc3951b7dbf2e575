"""The gradient of sparse MLA on Hopper against float64: short and empty rows, ragged widths, both ways to sum rows.

Runs on a Hopper GPU with nvcc only; elsewhere the tests skip, saying what is missing.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from glm5.kernels import cuda as fast
from glm5.kernels.attention import sparse_attention, sparse_attention_lse
from glm5.kernels.visibility import Visibility

RUNS, WHY = fast.available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not RUNS, reason=f"Hopper kernels go untested here: {WHY}")]
SCALE = 1 / 16
CASES = [(1, 1, 64, 4096, 2048), (2, 5, 64, 500, 100), (1, 3, 16, 200, 33), (2, 150, 64, 900, 256), (1, 2, 1, 70, 64)]


def _inputs(batch: int, queries: int, heads: int, slots: int, keys: int, seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    kind = {"generator": generator, "device": "cuda", "dtype": torch.bfloat16}
    q, kv = torch.randn(batch, queries, heads, 576, **kind), torch.randn(batch, slots, 576, **kind)
    order = torch.rand(batch, queries, slots, generator=generator, device="cuda").argsort(-1)[..., :keys]
    count = torch.randint(1, keys + 1, (batch, queries), generator=generator, device="cuda")
    count[0, 0] = keys
    if batch * queries > 1:
        count[-1, -1] = 0
    selected = torch.where(torch.arange(keys, device="cuda") < count[..., None], order.sort(-1).values, -1).int()
    return q, kv, selected, torch.randn(batch, queries, heads, 512, **kind)


def _oracle(q: Tensor, kv: Tensor, selected: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    dq, drows = torch.zeros_like(q, dtype=torch.float64), torch.zeros_like(kv, dtype=torch.float64)
    for b in range(q.shape[0]):
        for t in range(q.shape[1]):
            index = selected[b, t][selected[b, t] >= 0].long()
            rows, query, g = kv[b, index].double(), q[b, t].double(), grad[b, t].double()
            p = (query @ rows.T * SCALE).softmax(-1)
            dp = g @ rows[:, :512].T
            ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * SCALE
            dq[b, t] = ds @ rows
            drow = ds.T @ query
            drow[:, :512] += p.T @ g
            drows[b].index_add_(0, index, drow)
    return dq, drows


def _error(ours: Tensor, oracle: Tensor) -> float:
    assert not ours.isnan().any()
    return float((ours.double() - oracle).norm() / oracle.norm())


def _backward(*inputs: Tensor, **options: bool) -> tuple[Tensor, Tensor]:
    q, kv, selected, grad = inputs
    out, lse = fast.sparse_mla(q, kv, selected, value_dim=512, scale=SCALE)
    return fast.sparse_mla_backward(q, kv, selected, out, lse, grad, scale=SCALE, **options)


WAYS = [{"deterministic": False}, {"deterministic": True}]


@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_gradients(case: tuple[int, ...], options: dict[str, bool]) -> None:
    inputs = _inputs(*case, seed=case[-1])
    dq, drows = _backward(*inputs, **options)
    oracle_dq, oracle_drows = _oracle(*inputs)
    assert _error(dq, oracle_dq) < 5e-3
    assert _error(drows, oracle_drows) < 5e-3
    unselected = oracle_drows.abs().sum(-1) == 0
    assert (drows[unselected] == 0).all()


def test_extreme_logits_and_unused_memory() -> None:
    q, kv, selected, grad = _inputs(2, 3, 64, 2000, 1000, seed=5)
    q[:, :, ::2] *= 30.0  # one position takes all the weight
    kv[:, ::7] *= 3.0
    never = torch.ones(2, 2000, dtype=torch.bool, device="cuda")
    for b in range(2):
        never[b, selected[b][selected[b] >= 0].long()] = False
    kv[never] = torch.nan  # rows that nobody selected are not read
    for options in WAYS:
        dq, drows = _backward(q, kv, selected, grad, **options)
        oracle_dq, oracle_drows = _oracle(q, kv, selected, grad)
        # The kernel subtracts dO * O, whose O was rounded to bf16, from dO * V: almost equal where one weight is 1. It
        # enters dq times rows of up to 3, and the rows' gradient times queries of up to 30 times the usual size.
        assert _error(dq, oracle_dq) < 1e-2
        assert _error(drows, oracle_drows) < 2e-2


def test_deterministic_gradients_have_the_same_bits() -> None:
    inputs = _inputs(1, 700, 64, 300, 256, seed=3)  # more queries than are summed together, many to a row
    first, second = (_backward(*inputs, deterministic=True) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


@pytest.mark.parametrize("case", CASES)
def test_the_distribution_over_heads(case: tuple[int, ...]) -> None:
    q, kv, selected, _ = _inputs(*case, seed=case[-1])
    _, lse = fast.sparse_mla(q, kv, selected, value_dim=512, scale=SCALE)
    target, top = fast.sparse_mla_target(q, kv, selected, lse, scale=SCALE)
    chosen = kv.float()[torch.arange(len(kv), device="cuda")[:, None, None], selected.clamp(min=0).long()]
    logits = torch.einsum("bthx,btkx->bthk", q.float(), chosen) * SCALE
    logits = logits.masked_fill((selected < 0)[:, :, None], -torch.inf)
    assert _error(target, logits.softmax(-1).nan_to_num(0.0).mean(2).double()) < 5e-3
    assert (target[selected < 0] == 0).all()
    torch.testing.assert_close(top, logits.amax(-1), atol=2e-3, rtol=1e-4)


def test_attention_differentiates_in_the_absorbed_form() -> None:
    q, kv, selected, grad = _inputs(1, 40, 64, 300, 64, seed=8)
    visible = Visibility(torch.zeros(1, 40, device="cuda"), torch.full((1, 40), 299, device="cuda"), 300)
    leaves = [x.clone().requires_grad_() for x in (q, kv)]
    keys = leaves[1][:, :, None]
    out, lse = sparse_attention_lse(leaves[0], keys, keys[..., :512], selected, visible, SCALE)
    assert lse is not None
    out.backward(grad)
    oracle = _oracle(q, kv, selected, grad)
    for leaf, wanted in zip(leaves, oracle, strict=True):
        assert leaf.grad is not None
        assert _error(leaf.grad, wanted) < 5e-3
    torch.testing.assert_close(out, sparse_attention(q, kv[:, :, None], kv[:, :, None, :512], selected, visible, SCALE))
