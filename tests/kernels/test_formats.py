"""Low-bit formats: stated bounds, exact round trips, corners; the Hadamard rotation against its matrix."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5.kernels.formats import E4M3, LARGEST, Packed, pack, packed_matmul, unpack
from glm5.kernels.hadamard import hadamard


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    # Rows of very different size, a few outliers, and zeros.
    x = torch.randn(*shape, generator=generator) * 10 ** torch.randint(-6, 6, (*shape[:-1], 1), generator=generator)
    x[torch.rand(*shape, generator=generator) < 0.02] *= 100
    return x.masked_fill_(torch.rand(*shape, generator=generator) < 0.05, 0.0)


def _spread(p: Packed, x: torch.Tensor) -> torch.Tensor:
    row, column = torch.arange(x.shape[-2]) // p.rows, torch.arange(x.shape[-1]) // p.columns
    return p.scale[..., row[:, None], column]


@pytest.mark.parametrize(("rows", "columns"), [(1, None), (1, 16), (32, 16), (128, 128)])
@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_every_element_is_within_half_a_step(kind: str, rows: int, columns: int | None) -> None:
    x = _random(3, 70, 84, seed=rows)
    p = pack(x, kind, rows, columns)
    assert p.shape == x.shape
    back, scale = unpack(p), _spread(p, x)
    assert p.scale.shape == (3, -(-70 // rows), -(-84 // p.columns))
    step = torch.maximum(x.abs() / 16, scale / 1024) if kind == "fp8" else scale / 2
    assert ((back - x).abs() <= step * 1.0001).all()
    assert (back[x == 0] == 0).all()
    # Every block uses the whole range: its largest element meets the largest number.
    for block in (x[0, :rows, : p.columns],):
        assert p.scale[0, 0, 0] == pytest.approx(float(block.abs().max()) / LARGEST[kind])


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(["fp8", "int8", "int4"]))
def test_packing_again_changes_nothing(seed: int, kind: str) -> None:
    once = unpack(pack(_random(4, 32, seed=seed), kind))
    twice = unpack(pack(once, kind))
    torch.testing.assert_close(twice, once, rtol=1e-6, atol=0)


def test_known_numbers() -> None:
    p = pack(torch.tensor([[448.0, 1.0, 1.0625, 1.1875, -0.3, 2.0**-9, 2.0**-10, 0.0]]), "fp8")
    assert p.scale.item() == 1.0
    # Ties go to even; the smallest step is 2^-9, and half of it rounds to zero.
    assert unpack(p)[0].tolist() == [448.0, 1.0, 1.0, 1.25, -0.3125, 2.0**-9, 0.0, 0.0]
    p = pack(torch.tensor([[7.0, -7.0, 3.4, -3.6, 0.0, 1.0]]), "int4")
    assert unpack(p)[0].tolist() == [7.0, -7.0, 3.0, -4.0, 0.0, 1.0]
    assert p.values.tolist() == [[0x97, 0xC3, 0x10]]  # the even column in the low half


def test_corners_of_the_range() -> None:
    for kind in LARGEST:
        for value in (0.0, 1e-42, 1e-30, 1e30, 3e38):
            back = unpack(pack(torch.full((2, 8), value), kind))
            torch.testing.assert_close(back, torch.full((2, 8), value), rtol=1e-5, atol=1e-38)
        for bad in (float("nan"), float("inf"), -float("inf")):
            x = torch.ones(3, 16)
            x[1, 5] = bad
            back = unpack(pack(x, kind, columns=8))
            assert back[1, 5].isnan()
            assert back[[0, 2]].eq(1).all()
            assert back[1, 8:].eq(1).all(), "only its own block is spoiled"


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_packed_matmul_is_the_product_with_the_unpacked(kind: str) -> None:
    generator = torch.Generator().manual_seed(3)
    x, w = torch.randn(2, 5, 96, generator=generator), torch.randn(40, 96, generator=generator)
    p = pack(w, kind, columns=32)
    found = packed_matmul(x.bfloat16(), p)
    assert found.dtype == torch.bfloat16
    exact = x.bfloat16().double() @ unpack(p).double().T
    assert (found.double() - exact).norm() < 3e-3 * exact.norm()
    bound = {"fp8": 0.04, "int8": 0.01, "int4": 0.15}[kind]
    assert (packed_matmul(x, p) - x @ w.T).norm() < bound * (x @ w.T).norm()


def test_unknown_formats_are_refused() -> None:
    with pytest.raises(ValueError, match="int3"):
        pack(torch.ones(2, 2), "int3")
    with pytest.raises(ValueError, match="even"):
        pack(torch.ones(2, 3), "int4")


@pytest.mark.parametrize("n", [1, 2, 16, 128])
def test_hadamard_is_its_own_inverse(n: int) -> None:
    index = torch.arange(n)
    parity = torch.zeros(n, n, dtype=torch.int64)
    for bit in range(8):
        parity += (index[:, None] & index) >> bit & 1
    matrix = (-1.0) ** (parity % 2)
    whole = torch.randint(-1000, 1000, (5, n), generator=torch.Generator().manual_seed(n)).float()
    assert torch.equal(hadamard(whole, normalise=False), whole @ matrix)
    # Whole numbers stay whole, so that turning twice is exact.
    assert torch.equal(hadamard(hadamard(whole, normalise=False), normalise=False), whole * n)
    torch.testing.assert_close(hadamard(hadamard(whole)), whole, rtol=1e-5, atol=1e-3)
    q, k = _random(9, n, seed=1), torch.randn(7, n, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(hadamard(q) @ hadamard(k).T, q @ k.T, rtol=1e-4, atol=1e-4 * float(q.abs().max()))


def test_hadamard_spares_a_row_with_an_outlier() -> None:
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    x[:, 7] *= 300
    q = torch.randn(64, 128, generator=torch.Generator().manual_seed(1))
    q[:, 7] = 0  # what the outlier hides
    exact = q @ x.T
    plain = q @ unpack(pack(x, "int8")).T
    turned = hadamard(q) @ unpack(pack(hadamard(x), "int8")).T
    assert (turned - exact).norm() < 0.7 * (plain - exact).norm()
    with pytest.raises(ValueError, match="powers of two"):
        hadamard(torch.ones(3, 12))


def test_formats_are_the_hardware_s() -> None:
    assert torch.finfo(E4M3).max == LARGEST["fp8"]
