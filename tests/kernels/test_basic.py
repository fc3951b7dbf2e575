"""Norms, rotary embedding and SwiGLU against their formulas in float64."""

from __future__ import annotations

import math

import pytest
import torch

from glm5.kernels.basic import layer_norm, rms_norm, rope_interleaved, rotations, swiglu

GENERATOR = torch.Generator().manual_seed(0)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("eps", [1e-6, 1e-5])
def test_rms_norm(scale: float, eps: float) -> None:
    x, gain = random(5, 48) * scale, random(48)
    exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + eps).sqrt() * gain.double()
    torch.testing.assert_close(rms_norm(x, gain, eps), exact.float(), rtol=2e-6, atol=1e-6)


def test_rms_norm_casts_before_the_gain() -> None:
    """In bf16 the normalised value is rounded, then multiplied by the gain in bf16: the published order."""
    x, gain = random(64, 48).bfloat16(), random(48).bfloat16()
    normed = (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)).bfloat16()
    assert torch.equal(rms_norm(x, gain, 1e-5), normed * gain)
    one_rounding = (normed.float() * gain.float()).bfloat16()
    late = (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5) * gain.float()).bfloat16()
    assert torch.equal(normed * gain, one_rounding)
    assert not torch.equal(late, one_rounding)  # so the order is visible here


@pytest.mark.parametrize(("scale", "offset", "tolerance"), [(1.0, 0.0, 2e-6), (1e-3, 0.5, 1e-4)])
def test_layer_norm(scale: float, offset: float, tolerance: float) -> None:
    """The second case has a variance (1e-6) as small as eps, and a mean far above it."""
    x, gain, bias = random(5, 26) * scale + offset, random(26), random(26)
    centred = x.double() - x.double().mean(-1, keepdim=True)
    exact = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * gain.double() + bias.double()
    torch.testing.assert_close(layer_norm(x, gain, bias), exact.float(), rtol=tolerance, atol=tolerance)
    half = layer_norm(x.bfloat16(), gain.bfloat16(), bias.bfloat16())
    assert half.dtype == torch.bfloat16


def test_rope_rotates_neighbouring_pairs() -> None:
    """Pair i of position p turns by p * theta^(-2 i / dim), as complex numbers."""
    dim, theta = 12, 1e6
    positions = torch.tensor([[0, 1, 5, 1000]])
    rotation = rotations(positions, dim, theta)
    assert rotation.shape == (1, 4, dim // 2)
    x = random(1, 4, dim)
    out = rope_interleaved(x, rotation)
    for t, position in enumerate(positions[0].tolist()):
        for i in range(dim // 2):
            angle = position * theta ** (-2 * i / dim)
            turned = complex(x[0, t, 2 * i], x[0, t, 2 * i + 1]) * complex(math.cos(angle), math.sin(angle))
            assert abs(complex(out[0, t, 2 * i], out[0, t, 2 * i + 1]) - turned) < 1e-4
    assert torch.equal(out[:, 0], x[:, 0])


def test_rope_scores_depend_on_the_distance_only() -> None:
    q, k = random(16), random(16)

    def score(at: int, to: int) -> float:
        here, there = rotations(torch.tensor([at, to]), 16, 1e4)
        return float(rope_interleaved(q, here) @ rope_interleaved(k, there))

    assert score(7, 3) == pytest.approx(score(107, 103), abs=1e-4)
    assert score(7, 3) != pytest.approx(score(3, 7), abs=1e-2)


def test_rope_angles_are_fp32_whatever_the_activations() -> None:
    """At position 200,001 a bf16 angle would be wrong by hundreds of radians."""
    turned = rope_interleaved(torch.tensor([[1.0, 0.0]]).bfloat16(), rotations(torch.tensor([200_001]), 2, 1e6))
    assert turned.dtype == torch.bfloat16
    assert turned[0, 0].item() == pytest.approx(math.cos(200_001.0), abs=0.01)


def test_swiglu() -> None:
    gate, up = random(3, 10), random(3, 10)
    exact = gate.double() / (1 + torch.exp(-gate.double())) * up.double()
    torch.testing.assert_close(swiglu(gate, up), exact.float())
