"""The fp8 operators in Triton against their specifications: on a GPU where there is one, else in Triton's interpreter.

Interpreted, queries are fp16, since the interpreter has no bfloat16; e4m3 products are its own, in fp32.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from support import triton_interpreter
from support.naive import relative_error

triton_interpreter.ask()

from glm5.kernels import triton as fast
from glm5.kernels.formats import E4M3, Packed, pack
from glm5.kernels.indexer_fp8 import IndexKeys, index_scores_fp8, round_keys, round_queries
from glm5.kernels.latent_rows import pack_rows, unpack_rows
from glm5.kernels.moe_fp8 import grouped_swiglu_fp8, pack_experts
from glm5.kernels.pages import Pages
from glm5.kernels.triton.moe_fp8 import round_rows
from glm5.kernels.visibility import Visibility

triton_interpreter.mend()

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
DTYPE = torch.bfloat16 if CUDA else torch.float16
SCALE = 0.06


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(("batch", "queries", "slots"), [(1, 1, 150), (2, 9, 100)])
def test_index_scores_of_e4m3(batch: int, queries: int, slots: int) -> None:
    generator = _generator(slots)
    q = torch.randn(batch, queries, 16, 32, generator=generator)
    w = torch.randn(batch, queries, 16, generator=generator)
    keys = torch.randn(batch, slots, 32, generator=generator) * 10 ** torch.randn(batch, slots, 1, generator=generator)
    last = torch.randint(0, slots, (batch, queries), generator=generator)
    first = (last * torch.rand(batch, queries, generator=generator)).long()
    (q8, w8), held = round_queries(q.to(DEVICE), w.to(DEVICE)), round_keys(keys.to(DEVICE))
    visible = Visibility(first.to(DEVICE), last.to(DEVICE), slots)
    oracle = index_scores_fp8(q8, w8, IndexKeys(*held), visible)
    poison = torch.full((batch, queries, slots), torch.nan, device=DEVICE)
    ours = fast.index_scores(q8, w8, held.values, *visible.narrow, key_scale_BS=held.scale, out=poison, block_s=32)
    seen = oracle > -torch.inf
    assert torch.equal(ours == -torch.inf, ~seen)
    assert relative_error(ours[seen], oracle[seen]) < 1e-3


def _attention(batch: int, queries: int, heads: int, keys: int, slots: int = 90) -> tuple[Tensor, ...]:
    generator = _generator(keys)
    q = torch.randn(batch, queries, heads, 576, generator=generator)
    rows = torch.randn(batch, slots, 576, generator=generator)
    rows[:, ::7, :512] *= 30  # scales that differ by row and by group
    rows[:, ::5, 128:256] *= 1e-4
    rows[:, ::3, 384:512] = 0
    order = torch.rand(batch, queries, slots, generator=generator).argsort(-1)[..., :keys].sort(-1).values
    count = torch.randint(1, keys + 1, (batch, queries, 1), generator=generator)
    count[0, 0] = keys
    if batch * queries > 1:
        count[-1, -1] = 0
    selected = torch.where(torch.arange(keys) < count, order, -1)
    return q.to(DEVICE, DTYPE), pack_rows(rows).to(DEVICE), selected.to(DEVICE, torch.int32)


def _oracle(q: Tensor, packed: Tensor, selected: Tensor) -> tuple[Tensor, Tensor]:
    batch = torch.arange(q.shape[0], device=q.device)[:, None, None]
    rows = unpack_rows(packed)[batch, selected.clamp(min=0).long()]
    logits = torch.einsum("bthx,btkx->bthk", q.float(), rows) * SCALE
    logits = logits.masked_fill((selected < 0)[:, :, None], -torch.inf)
    out = torch.einsum("bthk,btkc->bthc", logits.softmax(-1).nan_to_num(0.0), rows[..., :512])
    return out, logits.logsumexp(-1)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16 if CUDA else torch.float32])
@pytest.mark.parametrize(("batch", "queries", "heads", "keys", "splits"), [(1, 2, 16, 40, 1), (2, 1, 5, 70, 3)])
def test_sparse_mla_fp8(batch: int, queries: int, heads: int, keys: int, splits: int, kind: torch.dtype) -> None:
    q, packed, selected = _attention(batch, queries, heads, keys)
    out = torch.full((batch, queries, heads, 512), torch.nan, device=DEVICE, dtype=DTYPE)
    lse = torch.full((batch, queries, heads), torch.nan, device=DEVICE)
    fast.sparse_mla_fp8(q, packed, selected, scale=SCALE, splits=splits, kind=kind, out=(out, lse))
    oracle, oracle_lse = _oracle(q, packed, selected)
    assert relative_error(out, oracle) < (5e-3 if kind is not torch.bfloat16 else 8e-3)
    torch.testing.assert_close(lse, oracle_lse, atol=5e-3, rtol=1e-4)  # no operand of the logits is rounded
    assert (out[-1, -1] == 0).all()
    assert (lse[-1, -1] == -torch.inf).all()


def test_sparse_mla_fp8_reads_pages_and_shows_nan() -> None:
    q, packed, selected = _attention(2, 1, 4, 30)
    order = torch.randperm(8, generator=_generator(0))
    table = order[:6].view(2, 3).to(DEVICE)
    pool = torch.full((8, 32, 656), 255, dtype=torch.uint8, device=DEVICE)  # bytes of 255 are NaN
    for b in range(2):
        for p in range(3):
            part = packed[b, p * 32 : (p + 1) * 32]
            pool[table[b, p], : len(part)] = part
    options = dict(scale=SCALE, splits=2)
    out, lse = fast.sparse_mla_fp8(q, packed, selected, **options)
    paged = fast.sparse_mla_fp8(q, pool.view(1, -1, 656), selected, pages=Pages(table.contiguous(), 32), **options)
    assert torch.equal(paged[0], out)
    assert torch.equal(paged[1], lse)
    packed[0, int(selected[0, 0, 3]), 200] = 255
    assert fast.sparse_mla_fp8(q, packed, selected, **options)[0][0, 0].isnan().any()


def test_rows_are_rounded_as_specified() -> None:
    x = torch.randn(5, 384, generator=_generator(0)) * 10 ** torch.randn(5, 1, generator=_generator(1))
    x[0, :128], x[1, 7], x[2, 200] = 0, torch.nan, 1e5
    x = x.to(DEVICE)
    pair = torch.tensor([6, 1, 9, 0, 4, 3, 2, 8, 7, 5], device=DEVICE)  # two to a token
    token = pair // 2
    values, scale = round_rows(x, pair.argsort().view(5, 2).int())
    expected = pack(x[token], "fp8", columns=128)
    real = token != 1  # the one with NaN
    torch.testing.assert_close(scale.T[real], expected.scale[real], rtol=1e-6, atol=0)
    # Division may differ in the last bit, which decides ties.
    step = (values.float() - expected.values.float()).abs()[real]
    assert (step > 0).float().mean() < 1e-2
    assert values[~real].float()[:, 7].isnan().all()
    assert values.dtype == E4M3


@pytest.mark.parametrize(
    ("tokens", "experts", "choices", "width", "inner"), [(1, 4, 2, 128, 128), (37, 5, 3, 256, 128)]
)
def test_grouped_swiglu_fp8(tokens: int, experts: int, choices: int, width: int, inner: int) -> None:
    generator = _generator(tokens)
    x = torch.randn(tokens, width, generator=generator).to(DEVICE, DTYPE)
    gate_up = torch.randn(experts, 2 * inner, width, generator=generator) * width**-0.5
    gate_up[:, :5] *= 20
    down = torch.randn(experts, width, inner, generator=generator) * inner**-0.5
    packed = pack_experts(gate_up.to(DEVICE), down.to(DEVICE))
    expert = torch.rand(tokens, experts - 1, generator=generator).argsort(-1)[:, :choices].to(DEVICE)  # last: empty
    weight = torch.rand(tokens, choices, generator=generator).to(DEVICE)
    y = fast.grouped_swiglu_fp8(x, *packed, expert, weight, tile=(16, 4, 2))
    oracle = grouped_swiglu_fp8(x.cpu().float(), *(_on_cpu(p) for p in packed), expert.cpu(), weight.cpu())
    # A hidden number next to a tie of its rounding may fall to either side: one step of e4m3 each.
    assert relative_error(y.cpu(), oracle) < 8e-3


def _on_cpu(p: Packed) -> Packed:
    return Packed(p.kind, p.values.cpu(), p.scale.cpu(), p.rows, p.columns)
