"""The Triton operators against fp32 oracles: on a GPU where there is one, else in Triton's interpreter.

Skipped, saying so, where triton is not installed (`pip install glm5[gpu]`). The interpreter has no bfloat16, so it
runs fp32 and fp16. Outputs are poisoned where the operator writes into memory that we hand it.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from support import triton_interpreter
from support.naive import relative_error

triton_interpreter.ask()

from glm5.kernels import triton as fast
from glm5.kernels.moe import route
from glm5.kernels.topk import stable_topk

triton_interpreter.mend()

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
DTYPE = torch.bfloat16 if CUDA else torch.float16
TOLERANCE = 5e-3


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _attention_oracle(q: Tensor, kv: Tensor, selected: Tensor, value_dim: int, scale: float) -> tuple[Tensor, Tensor]:
    batch = torch.arange(q.shape[0], device=q.device)[:, None, None]
    rows = kv.float()[batch, selected.clamp(min=0).long()]
    logits = torch.einsum("bthx,btkx->bthk", q.float(), rows) * scale
    logits = logits.masked_fill((selected < 0)[:, :, None], -torch.inf)
    out = torch.einsum("bthk,btkc->bthc", logits.softmax(-1).nan_to_num(0.0), rows[..., :value_dim])
    return out, logits.logsumexp(-1)


def _selection(batch: int, queries: int, slots: int, keys: int, seed: int) -> Tensor:
    """Ascending distinct slots; some rows short, one empty."""
    order = torch.rand(batch, queries, slots, generator=_generator(seed)).argsort(-1)[..., :keys].sort(-1).values
    count = torch.randint(1, keys + 1, (batch, queries), generator=_generator(seed + 1))
    count[0, 0], count[-1, -1] = keys, 0
    return torch.where(torch.arange(keys) < count[..., None], order, -1).to(torch.int32)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("batch", "queries", "heads", "keys"), [(1, 3, 16, 40), (2, 2, 5, 70)])
def test_sparse_mla_matches_the_oracle(batch: int, queries: int, heads: int, keys: int, splits: int) -> None:
    generator = _generator(batch * 10 + splits)
    q = torch.randn(batch, queries, heads, 48, generator=generator).to(DEVICE, DTYPE)
    kv = torch.randn(batch, 90, 48, generator=generator).to(DEVICE, DTYPE)
    selected = _selection(batch, queries, 90, keys, seed=splits).to(DEVICE)
    out, lse = fast.sparse_mla(q, kv, selected, value_dim=32, scale=0.3, splits=splits)
    oracle, oracle_lse = _attention_oracle(q, kv, selected, 32, 0.3)
    assert relative_error(out, oracle) < TOLERANCE
    torch.testing.assert_close(lse, oracle_lse, atol=2e-3, rtol=2e-3)
    assert (out[-1, -1] == 0).all(), "a query that selects nothing must give zeros"
    assert (lse[-1, -1] == -torch.inf).all()


def test_sparse_mla_refuses_widths_that_it_cannot_tile() -> None:
    q, kv = torch.zeros(1, 1, 4, 60, device=DEVICE), torch.zeros(1, 8, 60, device=DEVICE)
    with pytest.raises(ValueError, match="powers of two"):
        fast.sparse_mla(q, kv, torch.zeros(1, 1, 4, dtype=torch.int32, device=DEVICE), value_dim=40, scale=1.0)


def _index_inputs(batch: int, queries: int, slots: int, seed: int) -> tuple[Tensor, ...]:
    generator = _generator(seed)
    q = torch.randn(batch, queries, 16, 16, generator=generator).to(DEVICE, DTYPE)
    w = torch.randn(batch, queries, 16, generator=generator).to(DEVICE)
    k = torch.randn(batch, slots, 16, generator=generator).to(DEVICE, DTYPE)
    last = torch.randint(0, slots, (batch, queries), generator=generator)
    first = (last.float() * torch.rand(batch, queries, generator=generator)).long()
    first[-1, -1] = slots  # one sees nothing, another sees to the end
    first[0, 0], last[0, 0] = min(first[0, 0], slots - 1), slots - 1
    return q, w, k, first.to(DEVICE, torch.int32), last.to(DEVICE, torch.int32)


def _scores_oracle(q: Tensor, w: Tensor, k: Tensor, first: Tensor, last: Tensor) -> Tensor:
    dots = torch.einsum("btji,bsi->btjs", q.float(), k.float()).relu()
    scores = torch.einsum("btjs,btj->bts", dots, w.float())
    slot = torch.arange(k.shape[1], device=k.device)
    return scores.masked_fill((slot < first[..., None]) | (slot > last[..., None]), -torch.inf)


@pytest.mark.parametrize(("batch", "queries", "slots"), [(1, 1, 300), (2, 9, 150), (1, 20, 129)])
def test_index_scores_match_the_oracle(batch: int, queries: int, slots: int) -> None:
    inputs = _index_inputs(batch, queries, slots, seed=slots)
    poison = torch.full((batch, queries, slots), torch.nan, device=DEVICE)
    scores = fast.index_scores(*inputs, out=poison, block_s=32, programs=8)
    oracle = _scores_oracle(*inputs)
    assert torch.equal(scores == -torch.inf, oracle == -torch.inf)
    seen = oracle > -torch.inf
    assert relative_error(scores[seen], oracle[seen]) < 1e-3


@pytest.mark.parametrize("batch", [1, 2])
def test_index_select_tiles_agree_with_the_whole(batch: int) -> None:
    inputs = _index_inputs(batch, 11, 140, seed=7)

    def topk(scores: Tensor, k: int, first: Tensor, last: Tensor, out: Tensor | None) -> Tensor:
        slot = torch.arange(scores.shape[1], device=scores.device)
        outside = (slot < first[:, None]) | (slot > last[:, None])
        chosen = stable_topk(scores.masked_fill(outside, -torch.inf), k)
        return chosen if out is None else out.copy_(chosen)

    picked = fast.index_select(*inputs, 24, topk=topk, tile_bytes=4 * batch * 140 * 3)
    whole = fast.index_scores(*inputs)
    assert torch.equal(picked, stable_topk(whole.flatten(0, 1), 24).view_as(picked))


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("tokens", "experts", "choices"), [(1, 8, 2), (37, 5, 3), (90, 4, 2)])
def test_grouped_swiglu_matches_the_oracle(tokens: int, experts: int, choices: int, wide: bool) -> None:
    generator = _generator(tokens)
    width, inner = 96, 80  # neither a multiple of the tiles
    x = torch.randn(tokens, width, generator=generator).to(DEVICE, DTYPE)
    gate_up = (torch.randn(experts, 2 * inner, width, generator=generator) * width**-0.5).to(DEVICE, DTYPE)
    down = (torch.randn(experts, width, inner, generator=generator) * inner**-0.5).to(DEVICE, DTYPE)
    expert = torch.rand(tokens, experts, generator=generator)[:, : experts - 1].argsort(-1)[:, :choices]  # last: empty
    expert = expert.contiguous().to(DEVICE)
    weight = torch.rand(tokens, choices, generator=generator).to(DEVICE)
    tile = (16, 32, 32, 4, 2)
    y = fast.grouped_swiglu(x, gate_up, down, expert, weight, tiles=(tile, tile), wide=wide)
    gate, up = torch.einsum("nd,nmfd->nmf", x.float(), gate_up.float()[expert]).chunk(2, -1)
    oracle = torch.einsum("nmf,nmdf,nm->nd", torch.nn.functional.silu(gate) * up, down.float()[expert], weight)
    assert relative_error(y, oracle) < TOLERANCE


@pytest.mark.parametrize("shared", [False, True])
def test_the_moe_of_one_token_matches_the_oracle(shared: bool) -> None:
    experts, width, inner, wide, choices = 7, 600, 24, 20, 2  # a row in more than one piece
    generator = _generator(5)

    def matrix(*size: int) -> Tensor:
        return (torch.randn(*size, generator=generator) * size[-1] ** -0.5).to(DEVICE, DTYPE)

    x, router = matrix(1, width) * 20, torch.randn(experts, width, generator=generator).to(DEVICE) * 0.05
    bias = torch.rand(experts, generator=generator).to(DEVICE)
    routed = matrix(experts, 2 * inner, width), matrix(experts, width, inner)
    beside = (matrix(wide, width), matrix(wide, width), matrix(width, wide)) if shared else None
    how = dict(normalise=True, scaling=2.5)
    y = fast.moe_row(x, (router, bias), routed, beside, top_k=choices, **how)
    expert, weight, _ = route(x.float() @ router.T, bias, choices, **how)
    gate, up = torch.einsum("d,mfd->mf", x[0].float(), routed[0][expert[0]].float()).chunk(2, -1)
    hidden = torch.nn.functional.silu(gate) * up
    oracle = torch.einsum("mf,mdf,m->d", hidden, routed[1][expert[0]].float(), weight[0])
    if beside is not None:
        gate, up, down = (m.float() for m in beside)
        oracle += down @ (torch.nn.functional.silu(gate @ x[0].float()) * (up @ x[0].float()))
    assert relative_error(y[0], oracle) < TOLERANCE
    assert torch.equal(y, fast.moe_row(x, (router, bias), routed, beside, top_k=choices, **how)), "one order of sums"
