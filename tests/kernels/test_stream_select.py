"""Score and select in one launch: the stable top-k of the scores, whatever they are. Triton's interpreter, or a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from support import triton_interpreter

triton_interpreter.ask()

from glm5.kernels import triton as fast
from glm5.kernels.dispatch import OPERATORS
from glm5.kernels.indexer_fp8 import round_keys, round_queries
from glm5.kernels.pages import Pages
from glm5.kernels.topk import stable_topk
from glm5.kernels.visibility import Visibility

triton_interpreter.mend()

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float16
BLOCK = 32


def _inputs(batch: int, queries: int, slots: int, kind: str) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(slots)
    q = torch.randn(batch, queries, 16, 32, generator=generator)
    w = torch.randn(batch, queries, 16, generator=generator)
    keys = torch.randn(batch, slots, 32, generator=generator)
    if kind == "ties":
        q, w, keys = q.round(), w.round(), keys.round().clamp(-1, 1)
    elif kind == "plateau":
        w = w * 0
    elif kind == "negative":
        w = -w.abs()
    elif kind == "rising":  # every key beats all before it, so that every list overflows again and again
        q, w = torch.ones_like(q), torch.ones_like(w)
        keys = torch.arange(slots).view(1, slots, 1) / 64 * torch.ones(batch, 1, 32)
    elif kind == "extreme":
        w = w * 10 ** torch.randint(-20, 30, w.shape, generator=generator)
    last = torch.randint(0, slots, (batch, queries), generator=generator)
    first = (last * torch.rand(batch, queries, generator=generator)).long()
    first[0, 0], last[0, 0] = 0, slots - 1
    first[-1, -1], last[-1, -1] = 0, -1  # padding
    if queries > 2:
        first[0, 1], last[0, 1] = slots // 2, slots // 2 + 3  # fewer than k
    narrow = (first.to(DEVICE, torch.int32), last.to(DEVICE, torch.int32))
    return (q.to(DEVICE, DTYPE), w.to(DEVICE), keys.to(DEVICE, DTYPE), *narrow)


@pytest.mark.parametrize("kind", ["random", "ties", "plateau", "negative", "rising", "extreme"])
@pytest.mark.parametrize(("batch", "queries", "parts"), [(1, 5, 1), (2, 1, 3)])
def test_the_selection_is_that_of_a_stable_sort(batch: int, queries: int, parts: int, kind: str) -> None:
    inputs = _inputs(batch, queries, 300, kind)
    picked = fast.stream_select(*inputs, 24, parts=parts, block_s=BLOCK, capacity=64)
    block_q = 1 if queries == 1 else 8
    scores = fast.index_scores(*inputs, block_q=block_q, block_s=BLOCK)
    assert torch.equal(picked, stable_topk(scores.flatten(0, 1), 24).view_as(picked))


@pytest.mark.parametrize(("slots", "k"), [(20, 24), (24, 24), (25, 24), (300, 1), (64, 32)])
def test_short_rows_and_edges(slots: int, k: int) -> None:
    inputs = _inputs(1, 3, slots, "ties")
    for parts in (1, 2):
        picked = fast.stream_select(*inputs, k, parts=parts, block_s=BLOCK)
        scores = fast.index_scores(*inputs, block_q=8, block_s=BLOCK)
        assert torch.equal(picked, stable_topk(scores.flatten(0, 1), k).view_as(picked))


def test_tiles_of_queries_agree_with_the_whole() -> None:
    inputs = _inputs(2, 11, 70, "ties")
    whole = fast.stream_select(*inputs, 12, block_s=BLOCK, parts=1)
    assert torch.equal(fast.stream_select(*inputs, 12, block_s=BLOCK, parts=1, tile_bytes=8 * 2 * 64 * 8), whole)


def test_fp8_keys_in_pages() -> None:
    q, w, keys, first, last = _inputs(2, 3, 200, "random")
    (q8, w8), (k8, scale) = round_queries(q, w), round_keys(keys)
    options = dict(block_s=BLOCK, parts=2)
    picked = fast.stream_select(q8, w8, k8, first, last, 24, key_scale_BS=scale, **options)
    scores = fast.index_scores(q8, w8, k8, first, last, key_scale_BS=scale, block_q=4, block_s=BLOCK)
    assert torch.equal(picked, stable_topk(scores.flatten(0, 1), 24).view_as(picked))
    order = torch.randperm(2 * 4 + 1, generator=torch.Generator().manual_seed(0))
    table = order[:8].view(2, 4).to(DEVICE)
    values, scales = torch.full((9 * 64, 32), torch.nan), torch.full((9 * 64,), torch.nan)
    for b in range(2):
        for p in range(4):
            part, at = slice(p * 64, min(200, p * 64 + 64)), int(table[b, p]) * 64
            values[at : at + part.stop - part.start] = k8[b, part].float().cpu()
            scales[at : at + part.stop - part.start] = scale[b, part].cpu()
    pool = values.to(DEVICE, torch.float8_e4m3fn)[None]
    pages = Pages(table.contiguous(), 64)
    paged = fast.stream_select(
        q8, w8, pool, first, last, 24, key_scale_BS=scales.to(DEVICE)[None], pages=pages, **options
    )
    assert torch.equal(paged, picked)


def test_dispatch_calls_it_as_the_specification() -> None:
    q, w, keys, first, last = _inputs(2, 3, 100, "ties")
    longer = torch.cat((keys, torch.full_like(keys[:, :7], torch.nan)), 1)  # more slots than any query sees
    last.clamp_(max=89)
    visible = Visibility(first.long(), last.long(), 90)
    plain = next(f for f in OPERATORS["index_select"] if f.name == "triton.stream_select")
    ours = plain.load()(q, w, longer, visible, 24, None)
    scores = fast.index_scores(q, w, keys[:, :90].contiguous(), first, last, block_q=4)
    assert torch.equal(ours, stable_topk(scores.flatten(0, 1), 24).view_as(ours))
    assert plain.refuses(q[..., :9, :], w, keys) == "takes powers of two from 16, not 9 index heads of 32"
    (q8, w8), held = round_queries(q, w), round_keys(longer)
    ours = next(f for f in OPERATORS["index_select_fp8"] if f.name == "triton.stream_select").load()(
        q8, w8, held, visible, 24, None
    )
    scores = fast.index_scores(
        q8, w8, held.values[:, :90].contiguous(), first, last, block_q=4, key_scale_BS=held.scale[:, :90].contiguous()
    )
    assert torch.equal(ours, stable_topk(scores.flatten(0, 1), 24).view_as(ours))


def test_what_it_cannot_do_is_refused() -> None:
    inputs = _inputs(1, 3, 100, "random")
    for options in ({"k": 0}, {"k": 2049}, {"k": 8, "capacity": 48}, {"k": 8, "capacity": 32}, {"k": 8, "parts": 9}):
        with pytest.raises(ValueError, match="stream_select"):
            fast.stream_select(*inputs, **options, block_s=BLOCK)
