"""Keys read from pages where they lie: the same bits as from contiguous memory. Triton's interpreter, or a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from support import triton_interpreter

triton_interpreter.ask()

from glm5.kernels import cuda, triton
from glm5.kernels.pages import Pages

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
DTYPE = torch.bfloat16 if CUDA else torch.float16
HOPPER, WHY = cuda.available()
needs_hopper = pytest.mark.skipif(not HOPPER, reason=WHY)
SIZE = 64


def _paged(keys_BSX: Tensor, seed: int) -> tuple[Tensor, Pages]:
    """A pool whose pages hold the keys in random order among pages of NaN, and the table that finds them."""
    batch, slots, width = keys_BSX.shape
    each = -(-slots // SIZE)
    order = torch.randperm(batch * each + 3, generator=torch.Generator().manual_seed(seed))
    table = order[: batch * each].view(batch, each).to(keys_BSX.device)
    pool = torch.full((len(order), SIZE, width), torch.nan, device=keys_BSX.device, dtype=keys_BSX.dtype)
    for b in range(batch):
        for p in range(each):
            part = keys_BSX[b, p * SIZE : (p + 1) * SIZE]
            pool[table[b, p], : len(part)] = part
    return pool.view(1, -1, width), Pages(table.contiguous(), SIZE)


def _index_inputs(
    batch: int, queries: int, heads: int, width: int, slots: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(slots)
    q = torch.randn(batch, queries, heads, width, generator=generator).to(DEVICE, DTYPE)
    w = torch.randn(batch, queries, heads, generator=generator).to(DEVICE)
    keys = torch.randn(batch, slots, width, generator=generator).to(DEVICE, DTYPE)
    last = torch.randint(0, slots, (batch, queries), generator=generator)
    last[0, 0] = slots - 1
    first = torch.minimum(torch.full_like(last, 3), last)
    first[-1, -1], last[-1, -1] = 0, -1  # padding, which sees nothing
    return q, w, keys, first.to(DEVICE, torch.int32), last.to(DEVICE, torch.int32)


@pytest.mark.parametrize("fill", [True, False])
@pytest.mark.parametrize(("batch", "queries", "slots"), [(3, 1, 200), (1, 5, 130)])
def test_triton_index_scores_read_pages(batch: int, queries: int, slots: int, fill: bool) -> None:
    q, w, keys, first, last = _index_inputs(batch, queries, 16, 16, slots)
    pool, pages = _paged(keys, seed=slots)
    scores = torch.full((batch, queries, pages.table_BP.shape[1] * SIZE), -torch.inf, device=DEVICE)
    triton.index_scores(q, w, pool, first, last, pages=pages, fill=fill, out=scores, block_s=32, programs=6)
    expected = triton.index_scores(q, w, keys, first, last, block_s=32)
    assert torch.equal(scores[..., :slots], expected)
    assert (scores[..., slots:] == -torch.inf).all()


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(("batch", "queries", "slots"), [(2, 37, 5000), (1, 300, 4096), (3, 4, 129)])
def test_cuda_index_select_reads_pages(batch: int, queries: int, slots: int) -> None:
    q, w, keys, first, last = _index_inputs(batch, queries, 32, 128, slots)
    pool, pages = _paged(keys, seed=slots)
    ours = cuda.index_select(q, w, pool, first, last, 100, pages=pages)
    assert torch.equal(ours, cuda.index_select(q, w, keys, first, last, 100))


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("splits", [None, 1, 6])
@pytest.mark.parametrize(("batch", "queries"), [(1, 1), (3, 2), (1, 150)])
def test_cuda_sparse_mla_reads_pages(batch: int, queries: int, splits: int | None) -> None:
    generator = torch.Generator().manual_seed(batch)
    slots, keys = 1000, 300
    q = torch.randn(batch, queries, 64, 576, generator=generator).to(DEVICE, DTYPE)
    kv = torch.randn(batch, slots, 576, generator=generator).to(DEVICE, DTYPE)
    order = torch.rand(batch, queries, slots, generator=generator).argsort(-1)[..., :keys].sort(-1).values
    count = torch.randint(0, keys + 1, (batch, queries, 1), generator=generator)
    selected = torch.where(torch.arange(keys) < count, order, -1).to(DEVICE, torch.int32)
    pool, pages = _paged(kv, seed=queries)
    options = dict(value_dim=512, scale=0.05, splits=splits)
    ours = cuda.sparse_mla(q, pool, selected, pages=pages, **options)
    expected = cuda.sparse_mla(q, kv, selected, **options)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
