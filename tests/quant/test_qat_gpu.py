"""INT4 on a GPU has a CPU's bits: training there, and packing anywhere, agree."""

from __future__ import annotations

import pytest
import torch

from glm5.kernels.formats import pack
from glm5.quant.int4 import read_at_int4

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_are_those_of_a_cpu(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    size = 10.0 ** torch.randint(-5, 3, (4, 64, 1), generator=generator)
    weight = torch.randn(4, 64, 1024, generator=generator) * size
    weight[:, :, ::7] = (weight[:, :, ::7] * 4).round() / 4  # many that lie halfway
    weight = weight.to(dtype)
    assert torch.equal(read_at_int4(weight.cuda(), 128).cpu(), read_at_int4(weight, 128))
    here, there = pack(weight, "int4", columns=128), pack(weight.cuda(), "int4", columns=128)
    assert torch.equal(here.values, there.values.cpu())
    assert torch.equal(here.scale, there.scale.cpu())
