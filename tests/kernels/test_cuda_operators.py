"""The Hopper kernels in CUDA C++ against fp32 oracles: fresh inputs, poisoned outputs, ties, short and empty rows.

They run on a Hopper GPU with nvcc only; elsewhere the tests skip, saying what is missing.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from glm5.kernels import cuda as fast
from glm5.kernels import triton
from glm5.kernels.topk import stable_topk as specification

RUNS, WHY = fast.available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not RUNS, reason=f"Hopper kernels go untested here: {WHY}")]
SCALE = 1 / 16


def _generator(seed: int) -> torch.Generator:
    return torch.Generator(device="cuda").manual_seed(seed)


def _mla_inputs(batch: int, queries: int, heads: int, slots: int, keys: int, seed: int) -> tuple[Tensor, ...]:
    generator = _generator(seed)
    q = torch.randn(batch, queries, heads, 576, generator=generator, device="cuda", dtype=torch.bfloat16)
    kv = torch.randn(batch, slots, 576, generator=generator, device="cuda", dtype=torch.bfloat16)
    order = (
        torch.rand(batch, queries, slots, generator=generator, device="cuda").argsort(-1)[..., :keys].sort(-1).values
    )
    count = torch.randint(1, keys + 1, (batch, queries), generator=generator, device="cuda")
    count[0, 0] = keys
    if batch * queries > 1:
        count[-1, -1] = 0
    selected = torch.where(torch.arange(keys, device="cuda") < count[..., None], order, -1).int()
    return q, kv, selected


def _mla_oracle(q: Tensor, kv: Tensor, selected: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = [], []
    for b in range(q.shape[0]):
        for t in range(q.shape[1]):
            rows = kv[b, selected[b, t].clamp(min=0).long()].double()
            logits = (q[b, t].double() @ rows.T * SCALE).masked_fill(selected[b, t] < 0, -torch.inf)
            out.append(logits.softmax(-1).nan_to_num(0.0) @ rows[:, :512])
            lse.append(logits.logsumexp(-1))
    return torch.stack(out).view(*q.shape[:3], 512), torch.stack(lse).view(q.shape[:3])


@pytest.mark.parametrize("splits", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16])
@pytest.mark.parametrize(
    ("batch", "queries", "heads", "slots", "keys"),
    [(1, 1, 64, 4096, 2048), (3, 1, 64, 3000, 2048), (2, 5, 64, 500, 100), (1, 3, 16, 200, 33), (2, 150, 64, 900, 256)],
)
def test_sparse_mla(batch: int, queries: int, heads: int, slots: int, keys: int, splits: int) -> None:
    q, kv, selected = _mla_inputs(batch, queries, heads, slots, keys, seed=keys + splits)
    out = torch.full((batch, queries, heads, 512), torch.nan, device="cuda", dtype=torch.bfloat16)
    lse = torch.full((batch, queries, heads), torch.nan, device="cuda")
    fast.sparse_mla(q, kv, selected, value_dim=512, scale=SCALE, splits=splits, out=(out, lse))
    oracle, oracle_lse = _mla_oracle(q, kv, selected)
    assert not out.isnan().any()
    assert (out.double() - oracle).norm() / oracle.norm() < 5e-3
    torch.testing.assert_close(lse.double(), oracle_lse, atol=2e-3, rtol=1e-4)
    again, _ = fast.sparse_mla(q, kv, selected, value_dim=512, scale=SCALE, splits=splits)
    assert torch.equal(out, again), "the same bits on every run"


def test_sparse_mla_extreme_logits() -> None:
    q, kv, selected = _mla_inputs(2, 2, 64, 2000, 1000, seed=5)
    q[:, :, ::2] *= 30.0  # one position takes all the weight; the running maximum jumps
    kv[:, ::7] *= 3.0
    for splits in (1, 4):
        out, _ = fast.sparse_mla(q, kv, selected, value_dim=512, scale=SCALE, splits=splits)
        oracle, _ = _mla_oracle(q, kv, selected)
        assert not out.isnan().any()
        assert (out.double() - oracle).norm() / oracle.norm() < 5e-3


def test_sparse_mla_takes_views_of_larger_caches() -> None:
    q, kv, selected = _mla_inputs(2, 1, 64, 300, 64, seed=9)
    cache = torch.full((2, 400, 640), torch.nan, device="cuda", dtype=torch.bfloat16)
    cache[:, :300, :576] = kv
    out, _ = fast.sparse_mla(q, cache[:, :300, :576], selected, value_dim=512, scale=SCALE)
    expected, _ = fast.sparse_mla(q, kv, selected, value_dim=512, scale=SCALE)
    assert torch.equal(out, expected)


def _check_topk(
    scores: Tensor, k: int, cluster: int | None, first: Tensor | None = None, last: Tensor | None = None
) -> None:
    out = torch.full((scores.shape[0], min(k, scores.shape[1])), -7, dtype=torch.int32, device="cuda")
    fast.stable_topk(scores, k, first, last, cluster=cluster, out=out)
    if first is not None and last is not None:
        slot = torch.arange(scores.shape[1], device="cuda")
        scores = scores.masked_fill((slot < first[:, None]) | (slot > last[:, None]), -torch.inf)
    expected = specification(scores, k)
    wrong = (out != expected).any(-1).nonzero().flatten().tolist()
    assert not wrong, f"rows {wrong[:8]} of {scores.shape[0]}"


@pytest.mark.parametrize("cluster", [None, 1, 2, 4, 8, 16])
@pytest.mark.parametrize("slots", [1, 100, 2048, 2049, 4863, 5000, 8190, 32768, 131072, 202752])
def test_topk_of_random_rows(slots: int, cluster: int | None) -> None:
    scores = torch.randn(3, slots, generator=_generator(slots), device="cuda")
    for k in (1, 100, 2048):
        _check_topk(scores, k, cluster)


@pytest.mark.parametrize("cluster", [1, 4, 16])
@pytest.mark.parametrize("slots", [3000, 20000, 70001])
def test_topk_of_hard_rows(slots: int, cluster: int) -> None:
    generator = _generator(slots)
    noise = torch.randn(slots, generator=generator, device="cuda")
    ramp = torch.arange(slots, device="cuda").float()
    rows = [
        torch.zeros(slots, device="cuda"),  # all tie
        (noise * 2).round(),  # a few distinct values
        noise.relu(),  # a plateau of exact zeros
        -noise.relu(),  # the plateau straddles the k-th place; -0 and +0 tie
        torch.where(torch.rand(slots, generator=generator, device="cuda") < 0.5, 0.0, -0.0),
        ramp,
        -ramp,
        noise.masked_fill(ramp % 50 > 0, -torch.inf),  # fewer finite scores than k
        torch.full_like(noise, -torch.inf),
        noise * 1e30,
        noise * 1e-42,  # denormals
        noise.exp().exp(),  # heavy tail
        (ramp % 97 == 0).float() * 5 + noise * 1e-3,  # structure that a sample can miss
        torch.where(ramp < 2100, noise + 100, noise),  # all winners side by side
    ]
    _check_topk(torch.stack(rows), 2048, cluster)
    _check_topk(torch.stack(rows), 700, cluster)


@pytest.mark.parametrize("cluster", [1, 2, 8])
def test_topk_respects_bounds_and_strides(cluster: int) -> None:
    generator = _generator(11)
    wide = torch.randn(40, 9000, generator=generator, device="cuda")
    plateaus = (wide * 2).round()
    for scores in (wide, wide[:, 3:8500], wide[:, :8191].contiguous(), plateaus, plateaus[:, 3:8500]):
        last = torch.randint(0, scores.shape[1], (40,), generator=generator, device="cuda", dtype=torch.int32)
        first = (last * torch.rand(40, generator=generator, device="cuda")).int()
        first[0], last[0] = 5, 4  # sees nothing
        first[1], last[1] = 0, scores.shape[1] - 1
        _check_topk(scores, 2048, cluster, first, last)


@pytest.mark.parametrize("fill", [True, False])
@pytest.mark.parametrize(("batch", "queries", "slots"), [(1, 1, 300), (2, 9, 150), (1, 64, 1000), (3, 130, 777)])
def test_index_scores(batch: int, queries: int, slots: int, fill: bool) -> None:
    generator = _generator(slots)
    q = torch.randn(batch, queries, 32, 128, generator=generator, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(batch, queries, 32, generator=generator, device="cuda")
    k = torch.randn(batch, slots, 128, generator=generator, device="cuda", dtype=torch.bfloat16)
    last = torch.randint(0, slots, (batch, queries), generator=generator, device="cuda", dtype=torch.int32)
    first = (last * torch.rand(batch, queries, generator=generator, device="cuda")).int()
    first[-1, -1] = slots  # sees nothing
    first[0, 0], last[0, 0] = 0, slots - 1
    slot = torch.arange(slots, device="cuda")
    seen = (slot >= first[..., None]) & (slot <= last[..., None])
    oracle = torch.einsum("btji,bsi->btjs", q.double(), k.double()).relu()
    oracle = torch.einsum("btjs,btj->bts", oracle, w.double())
    for parts in (None, 1, 5):
        out = torch.full((batch, queries, slots), torch.nan if fill else 7.0, device="cuda")
        fast.index_scores(q, w, k, first, last, fill=fill, out=out, parts=parts)
        assert (out[seen].double() - oracle[seen]).norm() / oracle[seen].norm() < 1e-4
        assert (out[~seen] == (-torch.inf if fill else 7.0)).all()


@pytest.mark.parametrize("queries", [1, 37])
def test_index_select_tiles_agree_with_the_whole(queries: int) -> None:
    generator = _generator(queries)
    q = torch.randn(2, queries, 32, 128, generator=generator, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(2, queries, 32, generator=generator, device="cuda")
    k = torch.randn(2, 6000, 128, generator=generator, device="cuda", dtype=torch.bfloat16)
    last = torch.arange(6000 - queries, 6000, device="cuda", dtype=torch.int32).expand(2, queries).contiguous()
    first = torch.zeros_like(last)
    picked = fast.index_select(q, w, k, first, last, 2048, tile_bytes=4 * 2 * 6000 * 10)
    scores = (fast.index_scores if queries > 1 else triton.index_scores)(q, w, k, first, last)
    assert torch.equal(picked, specification(scores.flatten(0, 1), 2048).view_as(picked))
