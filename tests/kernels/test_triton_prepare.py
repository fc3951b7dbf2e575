"""The Triton operators around attention against their specifications: on a GPU, else in Triton's interpreter in fp32.

Skipped, saying so, where triton is not installed (`pip install glm5[gpu]`).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from support import triton_interpreter
from support.naive import relative_error

triton_interpreter.ask()

from glm5.kernels import triton as fast
from glm5.kernels.basic import rms_norm, rope_interleaved, rotations, swiglu
from glm5.kernels.moe import route
from glm5.kernels.pages import Pages

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
DTYPE = torch.bfloat16 if CUDA else torch.float32
TOLERANCE = 5e-3 if CUDA else 1e-6

pytestmark = pytest.mark.usefixtures("specification")  # what is compared with is plain PyTorch


def _random(*size: int, seed: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*size, generator=torch.Generator().manual_seed(seed)) * scale).to(DEVICE, DTYPE)


@pytest.mark.parametrize("width", [16, 200])
def test_rms_norm_of_rows_at_a_stride(width: int) -> None:
    x = _random(1, 5, width + 24, seed=width)[..., 8 : 8 + width]
    gain = _random(width, seed=1)
    assert relative_error(fast.rms_norm(x, gain, 1e-5), rms_norm(x.float(), gain.float(), 1e-5)) < TOLERANCE


def test_add_rms_norm_is_a_sum_and_its_norm() -> None:
    x, y, gain = _random(2, 3, 80, seed=21), _random(2, 3, 80, seed=22, scale=30.0), _random(80, seed=23)
    total, normed = fast.add_rms_norm(x, y, gain, 1e-5)
    assert torch.equal(total, x + y)
    assert relative_error(normed, rms_norm((x + y).float(), gain.float(), 1e-5)) < TOLERANCE


def test_store_writes_rows_of_both_pools_and_no_others() -> None:
    pools = _random(9, 20, seed=24), _random(9, 6, seed=25)
    expected = pools[0].clone(), pools[1].clone()
    new = _random(3, 24, seed=26)[:, 2:22], _random(3, 6, seed=27)
    row_N = torch.tensor([7, 0, 4], device=DEVICE)
    fast.store(row_N, (pools[0], new[0]), (pools[1], new[1]))
    for pool, before, rows in zip(pools, expected, new, strict=True):
        assert torch.equal(pool, before.index_copy(0, row_N, rows))


@pytest.mark.parametrize(("queries", "first"), [(1, 0), (3, 1)])
def test_next_rows_are_what_pages_say(queries: int, first: int) -> None:
    start_B = torch.tensor([[5, 0], [62, 0], [128, 0]], device=DEVICE)[:, 0]
    pages = Pages(torch.tensor([[4, 0, 9], [7, 3, 1], [2, 6, 5]], device=DEVICE), 64)
    last_BT = start_B[:, None] + torch.arange(queries, device=DEVICE)
    ours = fast.next_rows(start_B, pages.table_BP, pages.size, queries, first)
    for a, b in zip(ours, (torch.full_like(last_BT, first), last_BT, pages.rows(last_BT)), strict=True):
        assert torch.equal(a.long(), b)
    assert ours[0].dtype == ours[1].dtype == torch.int32


def test_rms_norm_keeps_nan_to_its_row() -> None:
    x = _random(3, 32, seed=2)
    x[1, 7] = torch.nan
    out = fast.rms_norm(x, torch.ones(32, device=DEVICE, dtype=DTYPE), 1e-5)
    assert out.isnan().any(-1).tolist() == [False, True, False]


def test_swiglu_of_halves_of_one_product() -> None:
    gate, up = _random(1, 3, 2 * 300, seed=3, scale=3.0).chunk(2, dim=-1)
    assert relative_error(fast.silu_times(gate, up), swiglu(gate.float(), up.float())) < TOLERANCE


@pytest.mark.parametrize(("heads", "index_heads"), [(5, 3), (17, 2)])
def test_prepare_matches_the_separate_operators(heads: int, index_heads: int) -> None:
    batch, tokens, nope, rotary, latent, index_width, eps = 1, 3, 12, 8, 24, 20, 1e-6
    up = _random(batch, tokens, heads * (nope + rotary) + index_heads * index_width, seed=4)
    down = _random(batch, tokens, 7 + latent + rotary + index_width + index_heads, seed=5)
    kv_gain, k_gain, k_bias = _random(latent, seed=6), _random(index_width, seed=7), _random(index_width, seed=8)
    rope = rotations(torch.tensor([[0, 5, 4000]], device=DEVICE), rotary, 1e6)
    q, index_q = up.split_with_sizes((heads * (nope + rotary), index_heads * index_width), -1)
    _, kv, index_k, index_w = down.split_with_sizes((7, latent + rotary, index_width, index_heads), -1)

    qs = q.float().unflatten(-1, (heads, -1))
    q_oracle = torch.cat((qs[..., :nope], rope_interleaved(qs[..., nope:], rope.unsqueeze(-2))), -1)
    iqs = index_q.float().unflatten(-1, (index_heads, -1))
    iq_oracle = torch.cat((rope_interleaved(iqs[..., :rotary], rope.unsqueeze(-2)), iqs[..., rotary:]), -1)
    kvs = kv.float()
    rows = torch.cat((rms_norm(kvs[..., :latent], kv_gain.float(), eps), rope_interleaved(kvs[..., latent:], rope)), -1)
    key = torch.nn.functional.layer_norm(index_k.float(), (index_width,), k_gain.float(), k_bias.float(), eps)
    keys = torch.cat((rope_interleaved(key[..., :rotary], rope), key[..., rotary:]), -1)
    weights = index_w.float() * (index_heads * index_width) ** -0.5

    made = fast.prepare(
        (q, index_q), (kv, index_k, index_w), rope, (kv_gain, eps), (k_gain, k_bias, eps), (heads, index_heads)
    )
    for ours, oracle in zip(made, (q_oracle, rows, keys, iq_oracle, weights), strict=True):
        assert relative_error(ours, oracle) < TOLERANCE
    assert made[0].data_ptr() == q.data_ptr(), "queries are rotated where they are"


@pytest.mark.parametrize(
    ("rows", "width", "normed"), [(7, 40, True), (33, 1500, True), (7, 40, False), (33, 1500, False), (5, 2500, False)]
)
def test_row_product_with_and_without_a_norm_before_it(rows: int, width: int, normed: bool) -> None:
    x, weight, gain = (
        _random(1, 1, width + 8, seed=31)[..., 3:-5],
        _random(rows, width, seed=32),
        _random(width, seed=33),
    )
    before = rms_norm(x.float(), gain.float(), 1e-5) if normed else x.float()
    ours = fast.row_product(x, weight, gain if normed else None, 1e-5)
    # A few numbers, rounded twice before the product.
    assert relative_error(ours, before @ weight.float().T) < 1.5 * TOLERANCE


def test_project_of_one_token_is_project_of_many() -> None:
    def stack(*sizes: tuple[int, int], seed: int) -> list[Tensor]:
        whole = _random(sum(n for n, _ in sizes), sizes[0][1], seed=seed, scale=0.1)
        return list(whole.split([n for n, _ in sizes]))

    width, heads, index_heads = 48, 3, 2
    q_a, kv_a, wk, weights = stack((32, width), (24, width), (20, width), (index_heads, width), seed=41)
    q_b, wq_b = stack((heads * 20, 32), (index_heads * 20, 32), seed=42)
    gains = [_random(n, seed=n) for n in (32, 16, 20, 19)]
    query, latent = (q_a, gains[0], q_b), (kv_a, gains[1])
    indexer = (wq_b, wk, gains[2], _random(20, seed=50), weights)
    x, rope = _random(1, 3, width, seed=43), rotations(torch.tensor([[4, 90, 7]], device=DEVICE), 8, 1e6)
    many = fast.project(x, rope, query, latent, indexer, (heads, index_heads), (1e-6,) * 3)
    for t in range(3):
        one = fast.project(
            x[:, t : t + 1], rope[:, t : t + 1], query, latent, indexer, (heads, index_heads), (1e-6,) * 3
        )
        for a, b in zip(one, many, strict=True):
            assert relative_error(a[0, 0], b[0, t]) < 4 * TOLERANCE
    place_N = torch.tensor([6, 0, 3], device=DEVICE)
    pools = [torch.full((1, 8, made.shape[-1]), 7.0, device=DEVICE, dtype=DTYPE) for made in many[1:3]]
    into = fast.project(
        x, rope, query, latent, indexer, (heads, index_heads), (1e-6,) * 3, into=(place_N, pools[0], pools[1])
    )
    for pool, given, made in zip(pools, into[1:3], many[1:3], strict=True):
        assert given is pool
        assert torch.equal(pool[0], torch.full_like(pool[0], 7.0).index_copy(0, place_N, made[0]))
    for a, b in zip((into[0], *into[3:]), (many[0], *many[3:]), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("normalise", [True, False])
def test_route_ties_go_to_the_lower_expert(normalise: bool) -> None:
    logits = torch.randn(9, 20, generator=torch.Generator().manual_seed(9)).to(DEVICE)
    logits[3] = 0.0
    logits[4] = logits[4].round()
    bias = torch.linspace(-0.5, 0.5, 20).round(decimals=1).to(DEVICE)
    ours = fast.route(logits, bias, 6, normalise=normalise, scaling=2.5)
    theirs = route(logits, bias, 6, normalise=normalise, scaling=2.5)
    assert torch.equal(ours[0], theirs[0])
    torch.testing.assert_close(ours[1:], theirs[1:], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("tokens", [1, 20, 257])
def test_router_has_the_precision_of_fp32(tokens: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 72, generator=generator).to(torch.bfloat16).to(DEVICE, DTYPE)  # values that bf16 holds
    weight = torch.randn(20, 72, generator=generator).to(DEVICE)
    bias = torch.zeros(20, device=DEVICE)
    logits, expert, share, score = fast.router(x, weight, bias, 5, normalise=True, scaling=2.5)
    exact = x.double() @ weight.double().T
    assert float((logits.double() - exact).norm() / exact.norm()) < 1e-6
    again = route(logits, bias, 5, scaling=2.5)
    assert torch.equal(expert, again[0])
    torch.testing.assert_close((share, score), again[1:], atol=1e-6, rtol=1e-6)


def test_route_of_nan_stays_inside_and_is_nan() -> None:
    logits = torch.zeros(2, 12, device=DEVICE)
    logits[1] = torch.nan
    expert, weight, _ = fast.route(logits, torch.zeros(12, device=DEVICE), 3, normalise=True, scaling=1.0)
    assert expert[0].tolist() == [0, 1, 2]
    assert int(expert.max()) < 12
    assert weight.isnan().any(-1).tolist() == [False, True]


@pytest.mark.parametrize(
    ("tokens", "rotary", "turned"), [(1, 16, True), (1, 16, False), (5, 0, True), (5, 16, False), (70, 16, True)]
)
def test_by_head_writes_beside_the_rotated_part(tokens: int, rotary: int, turned: bool) -> None:
    x = _random(tokens, 3, 64 + 16, seed=tokens)
    weight = _random(3, 128, 64, seed=11, scale=0.1).transpose(1, 2)
    weight = weight if turned else weight.contiguous()
    rope = x[..., 64:] if rotary else None
    ours = fast.by_head(x[..., :64], weight, rope)
    oracle = torch.einsum("nhx,hxy->nhy", x[..., :64].double(), weight.double())
    assert relative_error(ours[..., :128], oracle) < TOLERANCE
    if rotary:
        assert torch.equal(ours[..., 128:], x[..., 64:])
