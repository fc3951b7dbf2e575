"""The fp8 operators' specifications: against fp32 over the unpacked numbers, and their corners."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from glm5.kernels.attention import sparse_attention
from glm5.kernels.indexer import index_scores, index_select
from glm5.kernels.indexer_fp8 import IndexKeys, index_scores_fp8, index_select_fp8, round_keys, round_queries
from glm5.kernels.latent_rows import ROW_BYTES, pack_rows, sparse_attention_fp8, split_rows, unpack_rows
from glm5.kernels.moe import grouped_swiglu
from glm5.kernels.moe_fp8 import grouped_swiglu_fp8, pack_experts
from glm5.kernels.pages import Pages
from glm5.kernels.visibility import Visibility


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _shuffled(rows_BSX: Tensor, size: int, poison: float) -> tuple[Tensor, Pages]:
    """A pool whose pages hold the rows in random order among poisoned pages, and the table that finds them."""
    batch, slots, width = rows_BSX.shape
    each = -(-slots // size)
    order = torch.randperm(batch * each + 2, generator=_generator(slots))
    pool = torch.full((len(order), size, width), poison, dtype=torch.float32).to(rows_BSX.dtype)
    for b in range(batch):
        for p in range(each):
            part = rows_BSX[b, p * size : (p + 1) * size]
            pool[order[b * each + p], : len(part)] = part
    return pool.view(1, -1, width), Pages(order[: batch * each].view(batch, each).contiguous(), size)


# ---- indexer -----------------------------------------------------------------------------------------------------


def _index_inputs(
    batch: int, queries: int, slots: int, ties: bool = False
) -> tuple[Tensor, Tensor, Tensor, Visibility]:
    generator = _generator(slots)
    q = torch.randn(batch, queries, 8, 32, generator=generator)
    w = torch.randn(batch, queries, 8, generator=generator)
    k = torch.randn(batch, slots, 32, generator=generator)
    if ties:
        q, w, k = q.round(), w.round(), k.round().clamp(-1, 1)
    last = torch.randint(0, slots, (batch, queries), generator=generator)
    first = (last * torch.rand(batch, queries, generator=generator)).long()
    first[0, 0], last[0, 0] = 0, slots - 1
    first[-1, -1], last[-1, -1] = 0, -1  # padding
    return q, w, k, Visibility(first, last, slots)


def test_index_scores_in_fp8_are_near() -> None:
    q, w, k, visible = _index_inputs(2, 7, 90)
    exact = index_scores(q, w, k, visible)
    ours = index_scores_fp8(*round_queries(q, w), round_keys(k), visible)
    seen = exact > -torch.inf
    assert torch.equal(seen, ours > -torch.inf)
    assert (ours[seen] - exact[seen]).norm() < 0.06 * exact[seen].norm()


def test_scales_fold_exactly() -> None:
    """Queries and keys that e4m3 holds, not turned: the scores are those of fp32."""
    _, w, _, visible = _index_inputs(1, 5, 40)
    generator = _generator(1)
    q8, k8 = (torch.randint(-8, 9, shape, generator=generator).float() for shape in ((1, 5, 8, 32), (1, 40, 32)))
    factor_q, factor_k = 2.0 ** torch.randint(-3, 4, (1, 5, 8)), 2.0 ** torch.randint(-3, 4, (1, 40))
    exact = index_scores(q8 * factor_q[..., None], w, k8 * factor_k[..., None], visible)
    keys = IndexKeys(k8.to(torch.float8_e4m3fn), factor_k)
    ours = index_scores_fp8(q8.to(torch.float8_e4m3fn), w * factor_q, keys, visible)
    torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("k", [3, 24, 500])
def test_index_select_fp8_chooses_by_its_scores(k: int, ties: bool) -> None:
    q, w, key, visible = _index_inputs(2, 6, 130, ties)
    q8, w8 = round_queries(q, w)
    keys = round_keys(key)
    picked = index_select_fp8(q8, w8, keys, visible, k)
    scores = index_scores_fp8(q8, w8, keys, visible)
    for b in range(2):
        for t in range(6):
            row = scores[b, t]
            order = (
                row.sort(descending=True, stable=True).indices[: min(k, int((row > -torch.inf).sum()))].sort().values
            )
            expected = torch.full((min(k, 130),), -1)
            expected[: len(order)] = order
            assert picked[b, t].tolist() == expected.tolist()
    for size, poison in ((16, torch.nan),):
        values, pages = _shuffled(keys.values.float(), size, poison)
        scale, _ = _shuffled(keys.scale[..., None], size, poison)
        pool = IndexKeys(values.to(torch.float8_e4m3fn), scale[..., 0])
        assert torch.equal(index_select_fp8(q8, w8, pool, visible, k, pages), picked)


def test_selections_in_fp8_agree_mostly() -> None:
    q, w, k, visible = _index_inputs(1, 20, 2000)
    ours = index_select_fp8(*round_queries(q, w), round_keys(k), visible, 200)
    exact = index_select(q, w, k, visible, 200)
    shared = sum(len(set(a.tolist()) & set(b.tolist()) - {-1}) for a, b in zip(ours[0], exact[0], strict=True))
    assert shared > 0.9 * int((exact >= 0).sum())


# ---- sparse MLA --------------------------------------------------------------------------------------------------


def test_the_row_s_layout() -> None:
    rows = torch.randn(3, 5, 576, generator=_generator(0))
    rows[..., :128] *= 1e-4
    rows[..., 256:384] = 0
    packed = pack_rows(rows)
    assert packed.shape == (3, 5, ROW_BYTES)
    assert packed.dtype == torch.uint8
    values, scale, rotary = split_rows(packed)
    assert values.data_ptr() == packed.data_ptr(), "views, no copies"
    assert torch.equal(rotary, rows[..., 512:].bfloat16())
    torch.testing.assert_close(scale[..., 1], rows[..., 128:256].abs().amax(-1) / 448)
    back = unpack_rows(packed)
    assert (back[..., 256:384] == 0).all()
    for group in (slice(0, 128), slice(128, 256), slice(384, 512)):  # a group's error is relative to the group
        assert (back[..., group] - rows[..., group]).norm() < 0.035 * rows[..., group].norm()


def _attention_inputs(batch: int, queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = _generator(keys)
    q = torch.randn(batch, queries, 3, 576, generator=generator)
    rows = torch.randn(batch, 60, 576, generator=generator)
    order = torch.rand(batch, queries, 60, generator=generator).argsort(-1)[..., :keys].sort(-1).values
    count = torch.randint(1, keys + 1, (batch, queries, 1), generator=generator)
    count[0, 0], count[-1, -1] = keys, 0
    return q, rows, torch.where(torch.arange(keys) < count, order, -1).int()


@pytest.mark.parametrize(("batch", "queries", "keys"), [(1, 1, 40), (2, 3, 25)])
def test_sparse_attention_fp8_is_attention_over_the_unpacked(batch: int, queries: int, keys: int) -> None:
    q, rows, selected = _attention_inputs(batch, queries, keys)
    packed = pack_rows(rows)
    out, lse = sparse_attention_fp8(q, packed, selected, 0.06)
    visible = Visibility(torch.zeros(batch, queries).long(), torch.full((batch, queries), 59), 60)
    held = unpack_rows(packed)[:, :, None].double()
    exact = sparse_attention(q.double(), held, held[..., :512], selected, visible, 0.06)
    torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-4)
    if queries > 1 or batch > 1:
        assert (out[-1, -1] == 0).all()
        assert (lse[-1, -1] == -torch.inf).all()
    pool, pages = _shuffled(packed, 16, 255.0)  # bytes of 255 are NaN
    paged, paged_lse = sparse_attention_fp8(q, pool, selected, 0.06, pages)
    assert torch.equal(paged, out)
    assert torch.equal(paged_lse, lse)


def test_a_nan_in_a_row_that_is_read_shows() -> None:
    q, rows, selected = _attention_inputs(1, 2, 20)
    rows[0, int(selected[0, 0, 3]), 100] = torch.nan
    out, _ = sparse_attention_fp8(q, pack_rows(rows), selected, 0.06)
    assert out[0, 0].isnan().any()
    assert not out[0, 1].isnan().any()  # selects nothing


# ---- experts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 30])
def test_experts_in_fp8_are_near_those_in_fp32(tokens: int) -> None:
    generator = _generator(tokens)
    experts, width, inner, choices = 5, 256, 128, 2
    x = torch.randn(tokens, width, generator=generator)
    gate_up = torch.randn(experts, 2 * inner, width, generator=generator) * width**-0.5
    down = torch.randn(experts, width, inner, generator=generator) * inner**-0.5
    expert = torch.rand(tokens, experts - 1, generator=generator).argsort(-1)[:, :choices]  # the last has none
    weight = torch.rand(tokens, choices, generator=generator)
    packed = pack_experts(gate_up, down)
    assert packed[0].scale.shape == (experts, 2, 2)
    ours = grouped_swiglu_fp8(x, *packed, expert, weight)
    exact = grouped_swiglu(x, gate_up, down, expert, weight)
    assert (ours - exact).norm() < 0.12 * exact.norm()
    x[0, 5] = torch.nan
    spoiled = grouped_swiglu_fp8(x, *packed, expert, weight)
    assert spoiled[0].isnan().all()
    assert torch.equal(spoiled[1:], ours[1:])


def test_experts_whose_blocks_would_mix_gate_and_up_are_refused() -> None:
    with pytest.raises(ValueError, match="multiples of 128"):
        pack_experts(torch.ones(2, 192, 128), torch.ones(2, 128, 96))
