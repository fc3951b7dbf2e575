"""Operators that keep to one order: right, and the same bits for a row alone, among others, and in any place."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from support import triton_interpreter

triton_interpreter.ask()

from glm5.kernels.moe import route
from glm5.kernels.pages import Pages
from glm5.kernels.triton import fixed
from glm5.kernels.visibility import Visibility

triton_interpreter.mend()

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
DTYPE = torch.bfloat16 if CUDA else torch.float32
CLOSE = dict(rtol=2e-2, atol=2e-2) if CUDA else dict(rtol=1e-4, atol=1e-4)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, DTYPE)


@pytest.mark.parametrize(
    ("rows", "inner", "columns", "bias"),
    [(70, 100, 130, True), (3, 64, 64, False), (70, 1100, 70, False), (150, 1030, 70, True)],
)
def test_linear(rows: int, inner: int, columns: int, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows, whose shares are computed apart, and many, in wider tiles where there are two of them."""
    monkeypatch.setattr(fixed, "WIDE_FROM", 2)
    x, weight = randn(rows, inner), randn(columns, inner, seed=1)
    offset = randn(columns, seed=2) if bias else None
    whole = fixed.linear(x, weight, offset)
    # In float64, since cuBLAS may add up shares in bf16; a result in bf16 is off by 2^-8 of itself at most.
    exact = F.linear(x.double(), weight.double(), None if offset is None else offset.double())
    torch.testing.assert_close(whole.double(), exact, rtol=2**-8 if CUDA else 1e-5, atol=1e-3 if CUDA else 1e-4)
    for at in (0, 1, rows - 1):
        assert torch.equal(fixed.linear(x[at : at + 1], weight, offset)[0], whole[at])
    moved = torch.cat((randn(5, inner, seed=3), x))
    assert torch.equal(fixed.linear(moved, weight, offset)[5:], whole)
    strided = torch.cat((x, x), 1)[None, :, :inner]
    assert torch.equal(fixed.linear(strided, weight, offset)[0], whole)
    assert fixed.linear(x[:0], weight).shape == (0, columns)


def test_by_head() -> None:
    x, weight, rope = randn(70, 2, 64), randn(2, 64, 128, seed=1), randn(70, 2, 16, seed=2)
    whole = fixed.by_head(x, weight, rope)
    torch.testing.assert_close(whole[..., :128], torch.einsum("nhx,hxy->nhy", x, weight), **CLOSE)
    assert torch.equal(whole[..., 128:], rope)
    for at in (0, 69):
        assert torch.equal(fixed.by_head(x[at : at + 1], weight, rope[at : at + 1])[0], whole[at])


@pytest.mark.parametrize("chosen", [5, 64, 130])
def test_attention_does_not_depend_on_how_much_others_see(chosen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor on how many rows go at once: with shares of 64 positions, among up to 4 of them."""
    q, rows = randn(5, 2, 48), randn(200, 48, seed=1)
    index = torch.full((5, 130), -1, dtype=torch.int32, device=DEVICE)
    for row, n in enumerate((chosen, 1, 130, 0, 77)):
        place = torch.randperm(200, generator=torch.Generator().manual_seed(row))[:n].sort().values
        index[row, :n] = place.to(index)
    out = fixed.attend(q, rows, index, 32, 0.2, share=64)
    for row in range(5):
        seen = rows[index[row][index[row] >= 0].long()].float()
        probs = (q[row].float() @ seen.t() * 0.2).softmax(-1)
        expected = probs @ seen[:, :32] if len(seen) else torch.zeros(2, 32, device=DEVICE)
        torch.testing.assert_close(out[row].float(), expected, **CLOSE)
    alone = fixed.attend(q[:1], rows, index[:1, :chosen], 32, 0.2, share=64)
    assert torch.equal(alone[0], out[0])
    monkeypatch.setattr(fixed, "PARTS_UP_TO", 1)
    assert torch.equal(fixed.attend(q, rows, index, 32, 0.2, share=64), out)


def test_selection_is_the_same_in_any_batch() -> None:
    batch, slots, k = 3, 128, 20
    q, keys = randn(batch, 5, 16, 16), randn(1, batch * slots, 16, seed=1)
    w = randn(batch, 5, 16, seed=2).float()
    table = torch.randperm(batch * 2, generator=torch.Generator().manual_seed(3)).view(batch, 2).to(DEVICE)
    last = torch.tensor([[3, 4, 5, 6, 7], [90, 91, 92, 93, 94], [120, 121, 122, 123, 124]], device=DEVICE)
    visible = Visibility(torch.zeros_like(last), last, slots)
    choose = fixed.versions()["index_select"]
    whole = choose(q, w, keys, visible, k, Pages(table, 64))
    for row in range(batch):
        for part in (slice(0, 5), slice(2, 3)):
            seen = Visibility(
                torch.zeros_like(last[:1, part]), last[row : row + 1, part], int(last[row, part].max()) + 1
            )
            alone = choose(
                q[row : row + 1, part], w[row : row + 1, part], keys, seen, k, Pages(table[row : row + 1], 64)
            )
            assert torch.equal(alone[0], whole[row, part, : alone.shape[-1]])
    from glm5.kernels.indexer import index_select

    assert torch.equal(whole[..., :k], index_select(q, w, keys, visible, k, Pages(table, 64)))


def test_experts_have_one_tile() -> None:
    experts = fixed.versions()["grouped_swiglu"]
    x, up, down = randn(70, 64), randn(4, 128, 64, seed=1), randn(4, 64, 64, seed=2)
    make = torch.Generator().manual_seed(3)
    chosen = torch.stack([torch.randperm(4, generator=make)[:2] for _ in range(70)]).to(DEVICE)
    weight = torch.rand(70, 2, generator=make).to(DEVICE)
    whole = experts(x, up, down, chosen, weight)
    for at in (0, 33, 69):
        one = slice(at, at + 1)
        assert torch.equal(experts(x[one], up, down, chosen[one], weight[one])[0], whole[at])


HALF = torch.bfloat16 if CUDA else torch.float16  # the interpreter multiplies no bf16


@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_router_divides_its_width_alike(dtype: torch.dtype) -> None:
    x, weight = randn(70, 1000).to(dtype), randn(8, 1000, seed=1).float() * 0.1
    bias = randn(8, seed=2).float()
    settings = dict(top_k=2, normalise=True, scaling=2.5)
    whole = fixed.versions()["router"](x, weight, bias, **settings)
    torch.testing.assert_close(whole[0], F.linear(x.float(), weight), rtol=1e-5, atol=1e-5)
    expert, gate, score = route(F.linear(x.float(), weight), bias, **settings)
    assert torch.equal(whole[1], expert)
    torch.testing.assert_close(whole[2], gate, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(whole[3], score, rtol=1e-4, atol=1e-4)
    for one in (slice(0, 1), slice(69, 70), slice(7, 71)):
        for alone, together in zip(fixed.router(x[one], weight, bias, **settings), whole, strict=True):
            assert torch.equal(alone, together[one])


def test_widths_that_no_tile_fits() -> None:
    fits = dict(latent=512, rotary=64, nope=192, value=256, index_heads=32, index_width=128)
    assert fixed.refuses(fits) is None
    assert "latent=576" in (fixed.refuses({**fits, "latent": 576}) or "")
    assert "nope=48" in (fixed.refuses({**fits, "nope": 48}) or "")
