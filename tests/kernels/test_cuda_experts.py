"""The Hopper products of experts against their specifications; they run on a Hopper GPU with nvcc only."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from glm5.kernels import cuda as fast
from glm5.kernels.formats import Packed
from glm5.kernels.moe import grouped_swiglu
from glm5.kernels.moe_fp8 import grouped_swiglu_fp8, pack_experts

RUNS, WHY = fast.available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not RUNS, reason=f"Hopper kernels go untested here: {WHY}")]


def _generator(seed: int) -> torch.Generator:
    return torch.Generator(device="cuda").manual_seed(seed)


def _on_cpu(p: Packed) -> Packed:
    return Packed(p.kind, p.values.cpu(), p.scale.cpu(), p.rows, p.columns)


def _experts(experts: int, width: int, inner: int) -> tuple[Packed, Packed]:
    generator = _generator(experts)
    gate_up = torch.randn(experts, 2 * inner, width, generator=generator, device="cuda") * width**-0.5
    gate_up[:, ::3] *= 8
    gate_up[:, :, :128] *= 1e-3
    return pack_experts(gate_up, torch.randn(experts, width, inner, generator=generator, device="cuda") * inner**-0.5)


# Tokens of each expert: none, one, every width of a tile and its neighbours, and several tiles.
COUNTS = [0, 1, 31, 33, 64, 65, 96, 97, 112, 113, 128, 129, 144, 145, 160, 161, 321, 700, 0]


def _check(x: Tensor, packed: tuple[Packed, Packed], expert: Tensor, weight: Tensor) -> None:
    y = fast.grouped_swiglu_fp8(x, *packed, expert, weight, many=0)
    oracle = grouped_swiglu_fp8(x.cpu().float(), *(_on_cpu(p) for p in packed), expert.cpu(), weight.cpu())
    # A hidden number next to a tie of its rounding may fall to either side: one step of e4m3 each, an eighth at most.
    error = (y.cpu() - oracle).norm(dim=-1) / oracle.norm(dim=-1)
    assert error.mean() < 8e-3
    assert error.max() < 0.125  # no row is another's
    assert torch.equal(fast.grouped_swiglu_fp8(x, *packed, expert, weight, many=0), y)


@pytest.mark.parametrize(("width", "inner"), [(256, 128), (768, 384)])
def test_segments_of_every_length(width: int, inner: int) -> None:
    packed = _experts(len(COUNTS), width, inner)
    generator = _generator(width)
    ids = torch.cat([torch.full((n,), e) for e, n in enumerate(COUNTS)]).cuda()
    ids = ids[torch.randperm(len(ids), generator=generator, device="cuda")]
    ids = torch.cat((ids, ids[: len(ids) % 2]))  # two choices a token
    x = torch.randn(len(ids) // 2, width, generator=generator, device="cuda", dtype=torch.bfloat16)
    x[::5] *= 50
    weight = torch.rand(len(ids) // 2, 2, generator=generator, device="cuda")
    _check(x, packed, ids.view(-1, 2), weight)


@pytest.mark.parametrize(("width", "inner"), [(512, 256), (1024, 768)])
def test_bf16_segments_of_every_length(width: int, inner: int) -> None:
    generator = _generator(width)
    ids = torch.cat([torch.full((n,), e) for e, n in enumerate(COUNTS)]).cuda()
    ids = ids[torch.randperm(len(ids), generator=generator, device="cuda")]
    ids = torch.cat((ids, ids[: len(ids) % 2])).view(-1, 2)  # two choices a token
    x = torch.randn(len(ids), width, generator=generator, device="cuda", dtype=torch.bfloat16)
    weight = torch.rand(len(ids), 2, generator=generator, device="cuda")
    gate_up = torch.randn(len(COUNTS), 2 * inner, width, generator=generator, device="cuda") * width**-0.5
    down = torch.randn(len(COUNTS), width, inner, generator=generator, device="cuda") * inner**-0.5
    matrices = gate_up.bfloat16(), down.bfloat16()
    y = fast.grouped_swiglu(x, *matrices, ids, weight, many=0)
    oracle = grouped_swiglu(x.cpu().float(), *(m.cpu().float() for m in matrices), ids.cpu(), weight.cpu())
    error = (y.cpu() - oracle).norm(dim=-1) / oracle.norm(dim=-1)
    assert error.max() < 8e-3
    assert torch.equal(fast.grouped_swiglu(x, *matrices, ids, weight, many=0), y)
    x[17, 5] = torch.nan
    spoiled = fast.grouped_swiglu(x, *matrices, ids, weight, many=0)
    others = torch.arange(len(x), device="cuda") != 17
    assert spoiled[17].isnan().all()
    assert torch.equal(spoiled[others], y[others])


def test_few_tokens_of_many_experts() -> None:
    packed = _experts(200, 256, 256)
    generator = _generator(3)
    x = torch.randn(40, 256, generator=generator, device="cuda", dtype=torch.bfloat16)
    expert = torch.rand(40, 200, generator=generator, device="cuda").argsort(-1)[:, :8]
    _check(x, packed, expert, torch.rand(40, 8, generator=generator, device="cuda"))


def test_nan_stays_in_its_token() -> None:
    packed = _experts(3, 256, 128)
    generator = _generator(4)
    x = torch.randn(90, 256, generator=generator, device="cuda", dtype=torch.bfloat16)
    expert = torch.randint(0, 3, (90, 1), generator=generator, device="cuda")
    weight = torch.ones(90, 1, device="cuda")
    clean = fast.grouped_swiglu_fp8(x, *packed, expert, weight, many=0)
    x[17, 5] = torch.nan
    y = fast.grouped_swiglu_fp8(x, *packed, expert, weight, many=0)
    assert y[17].isnan().all()
    others = torch.arange(90, device="cuda") != 17
    assert torch.equal(y[others], clean[others])


def test_64k_tokens_at_full_width() -> None:
    """More elements between the products than 32 bits count."""
    generator = _generator(5)
    x = torch.randn(65536, 6144, generator=generator, device="cuda", dtype=torch.bfloat16)
    expert = torch.rand(65536, 8, generator=generator, device="cuda").argsort(-1)
    weight = torch.rand(65536, 8, generator=generator, device="cuda")
    gate_up = torch.randn(8, 4096, 6144, generator=generator, device="cuda") * 6144**-0.5
    down = torch.randn(8, 6144, 2048, generator=generator, device="cuda") * 2048**-0.5
    some = torch.tensor([0, 1, 32767, 40000, 65534, 65535], device="cuda")
    y = fast.grouped_swiglu(x, gate_up.bfloat16(), down.bfloat16(), expert, weight)[some]
    in_8_bits = fast.grouped_swiglu_fp8(x, *pack_experts(gate_up, down), expert, weight)[some]
    gate, up = torch.einsum("nd,efd->nef", x[some].float(), gate_up.bfloat16().float()).chunk(2, -1)
    each = torch.einsum("nef,edf->ned", torch.nn.functional.silu(gate) * up, down.bfloat16().float())
    oracle = torch.einsum("ned,ne->nd", each.gather(1, expert[some, :, None].expand_as(each)), weight[some])
    for found, most in ((y, 8e-3), (in_8_bits, 0.1)):
        assert ((found - oracle).norm(dim=-1) < most * oracle.norm(dim=-1)).all()
