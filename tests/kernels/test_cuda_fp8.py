"""The Hopper kernels over 8-bit caches against their specifications; they run on a Hopper GPU with nvcc only."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from glm5.kernels import cuda as fast
from glm5.kernels import triton
from glm5.kernels.indexer_fp8 import IndexKeys, index_scores_fp8, round_keys, round_queries
from glm5.kernels.latent_rows import pack_rows, unpack_rows
from glm5.kernels.pages import Pages
from glm5.kernels.topk import stable_topk as specification
from glm5.kernels.visibility import Visibility

RUNS, WHY = fast.available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not RUNS, reason=f"Hopper kernels go untested here: {WHY}")]
SCALE = 1 / 16


def _generator(seed: int) -> torch.Generator:
    return torch.Generator(device="cuda").manual_seed(seed)


def _paged(rows_BSX: Tensor) -> tuple[Tensor, Pages]:
    """A pool of shuffled pages of 64 among pages of NaN, whatever the type: bytes of 255 are NaN in all of them."""
    batch, slots, width = rows_BSX.shape
    each = -(-slots // 64)
    order = torch.randperm(batch * each + 3, generator=_generator(slots), device="cuda")
    table = order[: batch * each].view(batch, each)
    pool = torch.full((len(order), 64, width), 255, dtype=torch.uint8, device="cuda")
    pool = pool.repeat_interleave(rows_BSX.element_size(), -1).view(rows_BSX.dtype)
    for b in range(batch):
        for p in range(each):
            part = rows_BSX[b, p * 64 : (p + 1) * 64]
            pool[table[b, p], : len(part)] = part
    return pool.view(1, -1, width), Pages(table.contiguous(), 64)


def _mla_inputs(batch: int, queries: int, heads: int, slots: int, keys: int) -> tuple[Tensor, ...]:
    generator = _generator(keys)
    q = torch.randn(batch, queries, heads, 576, generator=generator, device="cuda", dtype=torch.bfloat16)
    q[..., 1, :512] = 0  # only the rotary columns speak
    rows = torch.randn(batch, slots, 576, generator=generator, device="cuda")
    rows[:, ::7, :512] *= 30  # scales that differ by row and by group
    rows[:, ::5, 128:256] *= 1e-4
    rows[:, ::3, 384:512] = 0
    order = torch.rand(batch, queries, slots, generator=generator, device="cuda").argsort(-1)[..., :keys]
    count = torch.randint(1, keys + 1, (batch, queries, 1), generator=generator, device="cuda")
    count[0, 0] = keys
    if batch * queries > 1:
        count[-1, -1] = 0
    selected = torch.where(torch.arange(keys, device="cuda") < count, order.sort(-1).values, -1)
    return q, pack_rows(rows), selected.int()


def _mla_oracle(q: Tensor, packed: Tensor, selected: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = [], []
    for b in range(q.shape[0]):
        for t in range(q.shape[1]):
            rows = unpack_rows(packed[b, selected[b, t].clamp(min=0).long()]).double()
            logits = (q[b, t].double() @ rows.T * SCALE).masked_fill(selected[b, t] < 0, -torch.inf)
            out.append(logits.softmax(-1).nan_to_num(0.0) @ rows[:, :512])
            lse.append(logits.logsumexp(-1))
    return torch.stack(out).view(*q.shape[:3], 512), torch.stack(lse).view(q.shape[:3])


VERSIONS = [("cuda", n) for n in (1, 2, 3, 8, 16)] + [("triton fp16", 1), ("triton fp16", 3), ("triton bf16", 1)]


@pytest.mark.parametrize(("version", "splits"), VERSIONS)
@pytest.mark.parametrize(
    ("batch", "queries", "heads", "slots", "keys"),
    [(1, 1, 64, 4096, 2048), (3, 1, 64, 3000, 2048), (2, 5, 64, 500, 100), (1, 3, 16, 200, 33), (2, 150, 64, 900, 256)],
)
def test_sparse_mla_over_an_fp8_cache(
    batch: int, queries: int, heads: int, slots: int, keys: int, splits: int, version: str
) -> None:
    q, packed, selected = _mla_inputs(batch, queries, heads, slots, keys)
    oracle, oracle_lse = _mla_oracle(q, packed, selected)
    pool, pages = _paged(packed)

    def run(rows: Tensor, pages: Pages | None) -> tuple[Tensor, Tensor]:
        out = torch.full((batch, queries, heads, 512), torch.nan, device="cuda", dtype=torch.bfloat16)
        lse = torch.full((batch, queries, heads), torch.nan, device="cuda")
        options = dict(scale=SCALE, splits=splits, pages=pages, out=(out, lse))
        if version == "cuda":
            return fast.sparse_mla(q, rows, selected, value_dim=512, **options)
        kind = torch.float16 if version.endswith("fp16") else torch.bfloat16
        return triton.sparse_mla_fp8(q, rows, selected, kind=kind, **options)

    out, lse = run(packed, None)
    assert not out.isnan().any()
    assert (out.double() - oracle).norm() / oracle.norm() < (5e-3 if version == "cuda" else 8e-3)
    # Tensor cores keep some 13 bits of a sum of e4m3 products: what may be lost is a share of the largest |q| |k|.
    largest = unpack_rows(packed).double().norm(dim=-1).amax() * q.double().norm(dim=-1) * SCALE
    seen = oracle_lse > -torch.inf
    assert torch.equal(lse > -torch.inf, seen)
    assert ((lse.double() - oracle_lse).abs()[seen] < (1e-3 + largest * 2**-13)[seen]).all()
    for rows, table in ((packed, None), (pool, pages)):  # the same bits again, and from pages
        again = run(rows, table)
        assert torch.equal(again[0], out)
        assert torch.equal(again[1], lse)


def _index_inputs(batch: int, queries: int, slots: int) -> tuple[Tensor, Tensor, IndexKeys, Visibility]:
    generator = _generator(slots)
    q = torch.randn(batch, queries, 32, 128, generator=generator, device="cuda")
    w = torch.randn(batch, queries, 32, generator=generator, device="cuda")
    k = torch.randn(batch, slots, 128, generator=generator, device="cuda")
    k *= torch.rand(batch, slots, 1, generator=generator, device="cuda") * 10
    last = torch.randint(0, slots, (batch, queries), generator=generator, device="cuda")
    first = (last * torch.rand(batch, queries, generator=generator, device="cuda")).long()
    first[0, 0], last[0, 0] = 0, slots - 1
    first[-1, -1] = slots  # sees nothing
    return *round_queries(q, w), round_keys(k), Visibility(first, last, slots)


@pytest.mark.parametrize("fill", [True, False])
@pytest.mark.parametrize(("batch", "queries", "slots"), [(1, 5, 300), (2, 9, 150), (1, 64, 1000), (3, 130, 777)])
def test_index_scores_of_e4m3(batch: int, queries: int, slots: int, fill: bool) -> None:
    q, w, keys, visible = _index_inputs(batch, queries, slots)
    oracle = index_scores_fp8(q, w, keys, visible)
    seen = oracle > -torch.inf
    for parts in (None, 1, 5):
        out = torch.full((batch, queries, slots), torch.nan if fill else 7.0, device="cuda")
        fast.index_scores(q, w, keys.values, *visible.narrow, key_scale_BS=keys.scale, fill=fill, out=out, parts=parts)
        assert (out[seen] - oracle[seen]).norm() / oracle[seen].norm() < 1e-3
        assert (out[~seen] == (-torch.inf if fill else 7.0)).all()


@pytest.mark.parametrize("queries", [1, 37])
def test_index_select_of_e4m3_in_pages(queries: int) -> None:
    q, w, keys, visible = _index_inputs(2, queries, 6000)
    bounds, options = visible.narrow, dict(key_scale_BS=keys.scale)
    picked = fast.index_select(q, w, keys.values, *bounds, 2048, tile_bytes=4 * 2 * 6000 * 10, **options)
    scores = (fast.index_scores if queries >= 4 else triton.index_scores)(q, w, keys.values, *bounds, **options)
    assert torch.equal(picked, specification(scores.flatten(0, 1), 2048).view_as(picked))
    (values, pages), (scale, _) = _paged(keys.values), _paged(keys.scale[..., None])
    paged = fast.index_select(q, w, values, *bounds, 2048, pages=pages, key_scale_BS=scale[..., 0])
    assert torch.equal(paged, picked)


@pytest.mark.parametrize(("batch", "queries", "parts"), [(1, 1, 8), (3, 2, 4), (1, 70, 1)])
def test_streamed_selection_at_full_width(batch: int, queries: int, parts: int) -> None:
    q, w, keys, visible = _index_inputs(batch, queries, 20000)
    bounds, options = visible.narrow, dict(key_scale_BS=keys.scale)
    block_q = min(4, max(1, queries if queries < 3 else 4))
    for factor in (1.0, 0.0):  # random scores; one plateau
        picked = triton.stream_select(
            q, w * factor, keys.values, *bounds, 2048, parts=parts, block_q=block_q, **options
        )
        scores = triton.index_scores(q, w * factor, keys.values, *bounds, block_q=block_q, **options)
        assert torch.equal(picked, specification(scores.flatten(0, 1), 2048).view_as(picked))
