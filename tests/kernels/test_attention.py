"""Attention, in every form and path, against float64 over whole matrices: values, gradients, empty intervals."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from glm5.kernels import attention, tiling
from glm5.kernels.attention import dense_attention, sparse_attention
from glm5.kernels.indexer import index_select
from glm5.kernels.visibility import Visibility
from support import naive

BATCH, HEADS, WIDTH, VALUE = 2, 4, 12, 10
SCALE = 0.3


@pytest.fixture(params=["flash", "plain"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both tile functions, in tiles of a few queries: the CPU's blocked one, and the one of plain products."""
    monkeypatch.setattr(tiling, "TILE_ELEMENTS", 600)
    if request.param == "plain":
        monkeypatch.setattr(attention, "_flash_tile", attention._plain_tile)
        monkeypatch.setattr(attention, "_flash_tile_backward", attention._plain_tile_backward)


@dataclass
class Case:
    """Inputs of one call; `slots` past `visible.slots` hold garbage, as a cache with room to spare does."""

    q: Tensor
    k: Tensor
    v: Tensor
    visible: Visibility

    def mask(self) -> Tensor:
        return naive.interval_mask(self.visible, self.k.shape[1])

    def selected(self, k: int = 5) -> Tensor:
        """Random visible positions, at most k, through the real selection."""
        generator = torch.Generator().manual_seed(5)
        iq = torch.randn(BATCH, self.q.shape[1], 2, 6, generator=generator)
        ik = torch.randn(BATCH, self.k.shape[1], 6, generator=generator)
        return index_select(iq, torch.ones(iq.shape[:3]), ik, self.visible, k)


def interval(name: str) -> tuple[Visibility, int, int]:
    """A visibility by name, with its queries and the slots of the key tensor."""
    if name == "causal":
        return Visibility.causal(BATCH, 40), 40, 40
    if name == "single":
        return Visibility.causal(BATCH, 1), 1, 1
    if name == "cached":
        return Visibility.causal(BATCH, 9, offset=25), 9, 50
    if name == "decode":
        return Visibility.causal(BATCH, 1, offset=25), 1, 50
    if name == "documents":
        begins = torch.tensor([[0] * 7 + [7] * 1 + [8] * 20, [0] * 28])
        return Visibility.documents(begins), 28, 28
    # "ragged": row 0 is left-padded by 6, row 1 right-padded by 9; padding sees nothing.
    first = torch.tensor([[6] * 30, [0] * 30])
    last = torch.arange(30).repeat(2, 1)
    last[0, :6] = -1
    last[1, 21:] = -1
    return Visibility(first, last, 30), 30, 33


INTERVALS = ["causal", "single", "cached", "decode", "documents", "ragged"]


def case(name: str, groups: int, *, seed: int = 0, dtype: torch.dtype = torch.float32, grad: bool = False) -> Case:
    visible, queries, slots = interval(name)
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(BATCH, queries, HEADS, WIDTH, generator=generator).to(dtype)
    k = torch.randn(BATCH, slots, groups, WIDTH, generator=generator).to(dtype)
    v = torch.randn(BATCH, slots, groups, VALUE, generator=generator).to(dtype)
    return Case(*(x.requires_grad_(grad) for x in (q, k, v)), visible)


def grads(out: Tensor, case: Case) -> list[Tensor]:
    """Of a fixed random direction."""
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return list(torch.autograd.grad((out.double() * direction).sum(), (case.q, case.k, case.v)))


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("groups", [HEADS, 2, 1])
@pytest.mark.parametrize("name", INTERVALS)
def test_dense(name: str, groups: int) -> None:
    c = case(name, groups, grad=True)
    out = dense_attention(c.q, c.k, c.v, c.visible, SCALE)
    exact = naive.attention(c.q, c.k, c.v, c.mask(), SCALE)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, exact.float(), rtol=1e-5, atol=1e-5)
    for ours, right in zip(grads(out, c), grads(exact, c), strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-4, atol=2e-5)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("groups", [HEADS, 2, 1])
@pytest.mark.parametrize("name", INTERVALS)
def test_sparse(name: str, groups: int) -> None:
    c = case(name, groups, grad=True)
    selected = c.selected()
    mask = naive.selection_mask(selected, c.k.shape[1])
    assert not (mask & ~c.mask()).any()
    out = sparse_attention(c.q, c.k, c.v, selected, c.visible, SCALE)
    exact = naive.attention(c.q, c.k, c.v, mask, SCALE)
    torch.testing.assert_close(out, exact.float(), rtol=1e-5, atol=1e-5)
    for ours, right in zip(grads(out, c), grads(exact, c), strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-4, atol=2e-5)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("shared", [False, True], ids=["values apart", "values in the keys"])
@pytest.mark.parametrize("name", INTERVALS)
def test_gathered(name: str, shared: bool) -> None:
    """The absorbed form without gradients gathers; values may be the keys' first columns."""
    c = case(name, 1)
    v = c.k[..., :VALUE] if shared else c.v
    selected = c.selected()
    mask = naive.selection_mask(selected, c.k.shape[1])
    out = sparse_attention(c.q, c.k, v, selected, c.visible, SCALE)
    exact = naive.attention(c.q, c.k, v, mask, SCALE)
    torch.testing.assert_close(out, exact.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("name", INTERVALS)
def test_values_inside_the_keys(name: str) -> None:
    """The absorbed form's dense and differentiable paths, where values are a view of the keys."""
    c = case(name, 1, grad=True)
    for selected in (None, c.selected()):
        mask = c.mask() if selected is None else naive.selection_mask(selected, c.k.shape[1])
        v = c.k[..., :VALUE]
        if selected is None:
            out = dense_attention(c.q, c.k, v, c.visible, SCALE)
        else:
            out = sparse_attention(c.q, c.k, v, selected, c.visible, SCALE)
        exact = naive.attention(c.q, c.k, v, mask, SCALE)
        torch.testing.assert_close(out, exact.float(), rtol=1e-5, atol=1e-5)
        direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        ours = torch.autograd.grad((out.double() * direction).sum(), (c.q, c.k))
        right = torch.autograd.grad((exact * direction).sum(), (c.q, c.k))
        for a, b in zip(ours, right, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)
    with torch.no_grad():
        v = c.k[..., :VALUE]
        torch.testing.assert_close(
            dense_attention(c.q, c.k, v, c.visible, SCALE),
            naive.attention(c.q, c.k, v, c.mask(), SCALE).float(),
            rtol=1e-5,
            atol=1e-5,
        )


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("groups", [HEADS, 1])
@pytest.mark.parametrize("sparse", [False, True])
def test_empty_intervals_give_zeros_and_no_gradient(groups: int, sparse: bool) -> None:
    """A padding query neither divides by zero nor pulls at any key, even beside infinite garbage in unused slots."""
    c = case("ragged", groups, grad=True)
    selected = c.selected()
    with torch.no_grad():
        c.k[:, c.visible.slots :] = torch.inf
        c.v[:, c.visible.slots :] = torch.nan
    if sparse:
        out = sparse_attention(c.q, c.k, c.v, selected, c.visible, SCALE)
    else:
        out = dense_attention(c.q, c.k, c.v, c.visible, SCALE)
    padding = c.visible.count_BT() == 0
    assert padding.sum() == 15
    assert torch.equal(out[padding], torch.zeros_like(out[padding]))
    dq, dk, dv = torch.autograd.grad(out.square().sum(), (c.q, c.k, c.v))
    for gradient in (dq, dk, dv):
        assert bool(gradient.isfinite().all())
    assert torch.equal(dq[padding], torch.zeros_like(dq[padding]))
    assert dq[~padding].abs().mean() > 0.01
    assert torch.equal(dk[:, c.visible.slots :], torch.zeros_like(dk[:, c.visible.slots :]))
    assert torch.equal(dk[0, :6], torch.zeros_like(dk[0, :6]))  # left padding is nobody's key


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("groups", [HEADS, 1])
@pytest.mark.parametrize("name", ["cached", "ragged", "documents"])
def test_gradcheck(name: str, groups: int) -> None:
    """Finite differences in float64, through the operator itself and not a fused stand-in."""
    visible, queries, slots = interval(name)
    visible = visible.tile(max(0, queries - 12), queries)
    generator = torch.Generator().manual_seed(1)
    shapes = [
        (BATCH, visible.first_BT.shape[1], 2, 3),
        (BATCH, slots, min(groups, 2), 3),
        (BATCH, slots, min(groups, 2), 2),
    ]
    inputs = [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]
    iq, ik = torch.randn(*shapes[0][:2], 1, 4, generator=generator), torch.randn(BATCH, slots, 4, generator=generator)
    for selected in (None, index_select(iq, torch.ones(iq.shape[:3]), ik, visible, 4)):
        assert torch.autograd.gradcheck(
            lambda q, k, v, chosen=selected: attention._Attention.apply(q, k, v, visible, chosen, SCALE),
            inputs,
            fast_mode=True,
        )


@pytest.mark.usefixtures("path")
def test_large_logits_do_not_overflow() -> None:
    c = case("cached", HEADS)
    out = dense_attention(c.q * 1e4, c.k * 1e3, c.v, c.visible, SCALE)
    exact = naive.attention(c.q * 1e4, c.k * 1e3, c.v, c.mask(), SCALE)
    torch.testing.assert_close(out, exact.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("groups", [HEADS, 1])
@pytest.mark.parametrize("name", ["causal", "ragged"])
def test_bf16(name: str, groups: int) -> None:
    """Within a few roundings of the exact result on the same bf16 inputs, forward and backward."""
    c = case(name, groups, dtype=torch.bfloat16, grad=True)
    exact_case = Case(*(x.detach().double().requires_grad_() for x in (c.q, c.k, c.v)), c.visible)
    exact = naive.attention(exact_case.q, exact_case.k, exact_case.v, c.mask(), SCALE)
    right = grads(exact, exact_case)
    out = dense_attention(c.q, c.k, c.v, c.visible, SCALE)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), exact, rtol=2e-2, atol=2e-2)
    for ours, theirs in zip(grads(out, c), right, strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours.double() - theirs).norm() < 0.02 * theirs.norm()


@pytest.mark.parametrize("groups", [HEADS, 1])
def test_tile_size_changes_nothing_but_rounding(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    c = case("ragged", groups, grad=True)
    whole = dense_attention(c.q, c.k, c.v, c.visible, SCALE)
    whole_grads = grads(whole, c)
    monkeypatch.setattr(tiling, "TILE_ELEMENTS", 1)  # one query at a time
    tiled = dense_attention(c.q, c.k, c.v, c.visible, SCALE)
    torch.testing.assert_close(tiled, whole, rtol=1e-5, atol=1e-6)
    for a, b in zip(grads(tiled, c), whole_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_documents_are_separate_rows() -> None:
    """Packed rows give each document what it gets alone: outputs and gradients."""
    c = case("documents", HEADS, grad=True)
    out = dense_attention(c.q, c.k, c.v, c.visible, SCALE)
    dq, dk, dv = torch.autograd.grad(out.square().sum(), (c.q, c.k, c.v))
    for begin, end in ((0, 7), (7, 8), (8, 28)):
        alone = [x.detach()[:1, begin:end].requires_grad_() for x in (c.q, c.k, c.v)]
        part = dense_attention(*alone, Visibility.causal(1, end - begin), SCALE)
        torch.testing.assert_close(part[0], out[0, begin:end], rtol=1e-5, atol=1e-6)
        for mine, whole in zip(torch.autograd.grad(part.square().sum(), alone), (dq, dk, dv), strict=True):
            torch.testing.assert_close(mine[0], whole[0, begin:end], rtol=1e-4, atol=1e-5)


def packed_rows(whole: int, device: str = "cpu") -> Visibility:
    """Documents of many lengths, padding, and ends that see nothing, behind rows of one document."""
    first = torch.zeros(whole + 2, 300, dtype=torch.int64, device=device)
    for row, starts in enumerate(([0, 7, 8, 100, 260], [0, 150]), whole):
        for start in starts:
            first[row, start:] = start
    first[-2, 290:], first[-1, 148:150] = 300, 300
    return Visibility.documents(first)


def plain_varlen(q: Tensor, k: Tensor, v: Tensor, edges: Tensor, *_: Any, scale: float, window_size: Any) -> Tensor:
    """What `varlen_attn` computes of sequences end to end, causally; as it, it refuses keys that heads share."""
    assert q.shape[1] == k.shape[1] == v.shape[1]
    assert window_size == (-1, 0)
    parts = []
    for begin, end in itertools.pairwise(edges.tolist()):
        causal = torch.ones(end - begin, end - begin, dtype=torch.bool).tril()
        part = (x[begin:end].transpose(0, 1)[None] for x in (q, k, v))
        parts.append(F.scaled_dot_product_attention(*part, attn_mask=causal, scale=scale)[0].transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("whole", [0, 2])
@pytest.mark.parametrize("groups", [4, 2, 1])
def test_documents_of_heads_that_share_keys(groups: int, whole: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way to the fused kernel, with a stand-in for it: what the plain operator gives, gradients too."""
    from torch.nn.attention import varlen

    monkeypatch.setattr(varlen, "varlen_attn", plain_varlen)
    generator, visible = torch.Generator().manual_seed(0), packed_rows(whole)
    shapes = [(whole + 2, 300, 4, 12), (whole + 2, 300, groups, 12), (whole + 2, 300, groups, 8)]
    inputs = [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]
    grad = torch.randn(*shapes[0][:3], 8, generator=generator, dtype=torch.float64)
    found = attention._fused_rows(*inputs, visible, SCALE)
    expected = dense_attention(*inputs, visible, SCALE)
    torch.testing.assert_close(found, expected)
    for a, b in zip(*(torch.autograd.grad(x, inputs, grad) for x in (found, expected)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="fused attention of packed documents: no CUDA device")
@pytest.mark.parametrize("whole", [0, 2])
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize(("width", "value"), [(256, 256), (192, 128), (64, 80), (20, 12)])
def test_documents_by_the_fused_kernel(width: int, value: int, groups: int, whole: int) -> None:
    """Half precision on a GPU, a key head for each query head or for two; values and gradients."""
    generator, visible = torch.Generator(device="cuda").manual_seed(0), packed_rows(whole, "cuda")
    rows, first = whole + 2, visible.first_BT
    shapes = ((4, width), (groups, width), (groups, value))
    q, k, v = (torch.randn(rows, 300, *shape, generator=generator, device="cuda") for shape in shapes)
    grad = torch.randn(rows, 300, 4, value, generator=generator, device="cuda").bfloat16()
    half = [x.bfloat16().requires_grad_() for x in (q, k, v)]
    out = dense_attention(*half, visible, SCALE)
    assert attention._flash_takes(half[0], half[2])
    wide = [x.detach().double().requires_grad_() for x in half]
    expected = dense_attention(*wide, visible, SCALE)
    assert bool((out[first > visible.last_BT] == 0).all())
    for found, exact in zip(
        (out, *torch.autograd.grad(out, half, grad)),
        (expected, *torch.autograd.grad(expected, wide, grad.double())),
        strict=True,
    ):
        assert (found.double() - exact).norm() < 5e-3 * exact.norm()
