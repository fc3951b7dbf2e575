"""Newton-Schulz against the SVD, against the scalar polynomial, and on the inputs that break a batch."""

import pytest
import torch

from glm5.kernels.newton_schulz import COEFFICIENTS, newton_schulz, orthogonal_factor_svd


def _random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _quintic(s, steps=5):
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    return s


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (7, 3), (16, 16), (5, 8, 24), (2, 3, 24, 8)])
def test_singular_vectors_are_kept_and_values_follow_the_quintic(shape):
    m = _random(*shape)
    p, s, qt = torch.linalg.svd(m, full_matrices=False)
    scaled = s / (torch.linalg.vector_norm(m, dim=(-2, -1)).unsqueeze(-1) + 1e-7)
    expected = (p * _quintic(scaled).unsqueeze(-2)) @ qt
    torch.testing.assert_close(newton_schulz(m), expected, atol=1e-9, rtol=1e-9)


def test_the_quintic_ends_in_the_stated_bands():
    s = torch.logspace(-3, 0, 100_001, dtype=torch.float64)
    for least, high in ((0.01, 1.135), (0.002, 1.203)):
        values = _quintic(s[s >= least])
        assert values.min() > 0.68
        assert high - 0.001 < values.max() < high


@pytest.mark.parametrize(("dtype", "slack"), [(torch.float32, 0.005), (torch.bfloat16, 0.05)])
def test_values_end_in_the_known_band_and_the_direction_is_the_exact_factor(dtype, slack):
    # Values spread over a factor of 50: the widest that five steps bring into the band at this size.
    p, q = (torch.linalg.qr(_random(6, 48, 48, seed=s))[0] for s in (1, 2))
    m = p @ torch.diag(torch.logspace(0, -1.7, 48, dtype=torch.float64)) @ q
    out = newton_schulz(m.float(), dtype=dtype)
    assert out.dtype == dtype
    values = torch.linalg.svdvals(out.double())
    assert values.min() > 0.68 - slack
    assert values.max() < 1.13 + slack
    exact = orthogonal_factor_svd(m)
    cosine = (out.double() * exact).sum((-2, -1)) / (out.double().norm(dim=(-2, -1)) * exact.norm(dim=(-2, -1)))
    assert cosine.min() > 0.98


def test_reference_factor_is_orthogonal_and_leaves_out_absent_directions():
    m = _random(9, 4)
    factor = orthogonal_factor_svd(m)
    torch.testing.assert_close(factor.mT @ factor, torch.eye(4, dtype=torch.float64), atol=1e-12, rtol=0)
    rank_one = torch.outer(_random(5, seed=1), _random(3, seed=2))
    expected = rank_one / rank_one.norm()
    torch.testing.assert_close(orthogonal_factor_svd(rank_one), expected, atol=1e-12, rtol=0)
    assert not orthogonal_factor_svd(torch.zeros(3, 4)).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transposing_the_input_transposes_the_output(dtype):
    m = _random(3, 12, 40, dtype=torch.float32)
    assert torch.equal(newton_schulz(m.mT, dtype=dtype), newton_schulz(m, dtype=dtype).mT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zero_matrix_stays_zero_and_a_nan_stays_in_its_matrix(dtype):
    m = _random(4, 8, 16, dtype=torch.float32)
    m[0] = 0
    clean = newton_schulz(m, dtype=dtype)
    assert not clean[0].any()
    m[2, 3, 5] = float("nan")
    out = newton_schulz(m, dtype=dtype)
    assert out[2].isnan().any()
    others = [0, 1, 3]
    assert torch.equal(out[others], clean[others])


def test_scale_of_the_input_does_not_matter_until_it_fades():
    m = _random(8, 16)
    torch.testing.assert_close(newton_schulz(m * 1e6), newton_schulz(m), atol=1e-5, rtol=0)
    assert newton_schulz(m * 1e-14).abs().max() < 1e-2


def test_input_is_not_changed_and_empty_batches_pass():
    m = _random(2, 6, 4, dtype=torch.float32)
    before = m.clone()
    newton_schulz(m)
    assert torch.equal(m, before)
    assert newton_schulz(torch.zeros(0, 4, 4)).shape == (0, 4, 4)


def test_wrong_inputs_are_refused():
    with pytest.raises(ValueError, match=r"\[\.\.\., A, B\]"):
        newton_schulz(torch.zeros(3))
    with pytest.raises(ValueError, match="floating"):
        newton_schulz(torch.zeros(3, 3, dtype=torch.int64))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", [(64, 256, 2048), (8, 512, 192)])
def test_values_end_in_the_band_on_a_gpu(shape):
    m = _random(*shape, dtype=torch.float32).cuda()
    values = torch.linalg.svdvals(newton_schulz(m, dtype=torch.bfloat16).float())
    assert values.min() > 0.63
    assert values.max() < 1.18
