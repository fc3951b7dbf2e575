"""The C++ versions on a CPU: each against its specification, and where they step in."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from glm5.kernels import cpu, dispatch, fits
from glm5.kernels.attention import sparse_attention
from glm5.kernels.basic import rotations
from glm5.kernels.cpu import build
from glm5.kernels.indexer import index_select
from glm5.kernels.moe import grouped_swiglu, route
from glm5.kernels.pages import Pages
from glm5.kernels.visibility import Visibility
from support.taken import taken

needs_compiler = pytest.mark.skipif(not build.available()[0], reason=f"C++ kernels untested: {build.available()[1]}")


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ragged(batch: int, queries: int, slots: int) -> Visibility:
    """Rows that begin and end anywhere, one of them empty."""
    generator = torch.Generator().manual_seed(slots)
    first = torch.randint(0, slots // 2, (batch, queries), generator=generator)
    last = first + torch.randint(0, slots // 2, (batch, queries), generator=generator)
    last[0, -1] = first[0, -1] - 1
    return Visibility(first, last, slots)


# --------------------------------------------------------------------------- selection
@needs_compiler
@pytest.mark.parametrize(("heads", "width"), [(4, 32), (3, 16), (32, 128), (2, 7)])
@pytest.mark.parametrize("k", [1, 9, 64, 500])
def test_selects_as_the_rule_says(heads: int, width: int, k: int, specification: None) -> None:
    """Small integers, so that every sum is exact, ties abound and the selections must be the same."""
    generator = torch.Generator().manual_seed(k)
    q = torch.randint(-2, 3, (2, 3, heads, width), generator=generator).float()
    keys = torch.randint(-2, 3, (2, 350, width), generator=generator).float()[:, :300]
    w = torch.randint(-1, 3, (2, 3, heads), generator=generator).float()
    for visible in (ragged(2, 3, 300), Visibility.causal(2, 3, 297)):
        found = cpu.index_select(q, w, keys, visible, k)
        assert torch.equal(found, index_select(q, w, keys, visible, k))


@needs_compiler
def test_selects_by_scores_of_any_size(specification: None) -> None:
    """Negative scores, huge and tiny ones, and minus zero, which ties with zero."""
    scores = torch.tensor([[-1e30, -1e-30, -0.0, 0.0, 1e-30, 1e30, -3.0, 0.0, 2.0]])
    q, keys = torch.ones(1, 1, 1, 1), scores.abs().T[None].contiguous()
    for k in range(1, 9):
        for sign in (1.0, -1.0):
            visible = Visibility.causal(1, 1, 8)
            w = torch.full((1, 1, 1), sign)
            found = cpu.index_select(q, w, keys, visible, k)
            assert torch.equal(found, index_select(q, w, keys, visible, k))


# --------------------------------------------------------------------------- attention
def attend_absorbed(q: Tensor, rows: Tensor, selected: Tensor, value: int, scale: float) -> Tensor:
    keys = rows.unsqueeze(2)
    visible = Visibility.causal(*selected.shape[:2], rows.shape[1] - selected.shape[1])
    return cpu.sparse_attention(q, keys, keys[..., :value], selected, visible, scale)


@needs_compiler
@pytest.mark.parametrize(("heads", "width", "value"), [(4, 80, 64), (64, 576, 512), (3, 10, 7)])
def test_attends_to_the_selected_rows(heads: int, width: int, value: int) -> None:
    q = normal(2, 3, heads, width).transpose(1, 2).contiguous().transpose(1, 2)  # any strides but the last
    rows = normal(2, 70, width, seed=1)[:, :60]
    selected = torch.full((2, 3, 20), -1, dtype=torch.int32)
    for i, n in enumerate((20, 1, 0, 7, 20, 13)):
        chosen = torch.randperm(60, generator=torch.Generator().manual_seed(i))[:n].sort().values
        selected.view(6, 20)[i, :n] = chosen.int()
    found = attend_absorbed(q, rows, selected, value, 0.2)
    for b in range(2):
        for t in range(3):
            chosen = selected[b, t][selected[b, t] >= 0].long()
            held = rows[b, chosen].double()
            expected = (0.2 * q[b, t].double() @ held.T).softmax(-1) @ held[:, :value]
            torch.testing.assert_close(found[b, t].double(), expected, rtol=2e-5, atol=2e-6)
    assert bool((found[0, 2] == 0).all())


@needs_compiler
@pytest.mark.parametrize("paged", [False, True])
def test_absorbs_the_products_around_attention(paged: bool) -> None:
    heads, nope, rotary, latent, value = 3, 10, 6, 20, 9
    q, up = normal(2, 3, heads, nope + rotary), normal(heads, nope + value, latent, seed=1)
    q_nope, q_rope = q.split_with_sizes((nope, rotary), -1)
    q_rope = q_rope.contiguous()  # other strides than its neighbour's
    pages = Pages(torch.randperm(14, generator=torch.Generator().manual_seed(0))[:10].view(2, 5), 8)
    pool = normal(1, 14 * 8, latent + rotary, seed=2)
    rows = pages.gather(pool, Visibility.causal(2, 40))
    selected = torch.stack([torch.randperm(40)[:12].sort().values for _ in range(6)]).view(2, 3, 12).int()
    selected[1, 2, 5:] = -1
    held = (pool, selected, 0.2, pages) if paged else (rows, selected, 0.2)
    found = cpu.absorbed_attention(q_nope, q_rope, up, *held)
    keys = torch.einsum("bsl,hnl->bshn", rows[..., :latent].double(), up[:, :nope].double())
    values = torch.einsum("bsl,hvl->bshv", rows[..., :latent].double(), up[:, nope:].double())
    for b in range(2):
        for t in range(3):
            chosen = selected[b, t][selected[b, t] >= 0].long()
            logits = torch.einsum("hn,shn->hs", q_nope[b, t].double(), keys[b, chosen])
            logits += q_rope[b, t].double() @ rows[b, chosen, latent:].double().T
            expected = torch.einsum("hs,shv->hv", (0.2 * logits).softmax(-1), values[b, chosen])
            torch.testing.assert_close(found[b, t].double(), expected, rtol=1e-4, atol=1e-5)


@needs_compiler
def test_extreme_logits() -> None:
    """One logit far above the rest, equal ones, and a NaN, which stays in its own query."""
    rows = torch.eye(4)[None].repeat(1, 1, 1)
    selected = torch.arange(4, dtype=torch.int32).expand(1, 3, 4)
    q = torch.tensor([[[[300.0, 0, 0, -300.0]], [[0.0, 0, 0, 0]], [[torch.nan, 0, 0, 0]]]])
    found = attend_absorbed(q, rows, selected, 4, 1.0)
    torch.testing.assert_close(found[0, 0, 0], torch.tensor([1.0, 0, 0, 0]))
    torch.testing.assert_close(found[0, 1, 0], torch.full((4,), 0.25))
    assert bool(found[0, 2].isnan().all())


@pytest.mark.parametrize("version", ["torch", "cpu"])
def test_pages_read_as_rows_do(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both operators give the same bits from shuffled pages of a pool as from contiguous rows."""
    if version == "torch":
        monkeypatch.setenv("GLM5_KERNELS", "torch")
    elif not build.available()[0]:
        pytest.skip(build.available()[1])
    batch, queries, size, slots = 5, 3, 8, 44
    table = torch.randperm(40, generator=torch.Generator().manual_seed(0))[: batch * 6].view(batch, 6)
    pages = Pages(table, size)
    keys, rows = normal(1, 40 * size, 16), normal(1, 40 * size, 12, seed=1)
    everything = Visibility.causal(batch, slots)
    own_keys, own_rows = pages.gather(keys, everything), pages.gather(rows, everything)
    for b in range(batch):
        for s in (0, 7, 8, 43):
            assert torch.equal(own_keys[b, s], keys[0, table[b, s // size] * size + s % size])
    visible = ragged(batch, queries, slots)
    index = (normal(batch, queries, 4, 16, seed=2), normal(batch, queries, 4, seed=3).abs())
    selected = index_select(*index, keys, visible, 9, pages)
    assert torch.equal(selected, index_select(*index, own_keys, visible, 9))
    q, pool, own = normal(batch, queries, 2, 12, seed=4), rows.unsqueeze(2), own_rows.unsqueeze(2)
    found = sparse_attention(q, pool, pool[..., :10], selected, visible, 0.3, pages)
    torch.testing.assert_close(found, sparse_attention(q, own, own[..., :10], selected, visible, 0.3))


# --------------------------------------------------------------------------- mixture of experts
@needs_compiler
@pytest.mark.parametrize("normalise", [True, False])
def test_routes_as_the_rule_says(normalise: bool, specification: None) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(-2, 3, (16, 24), generator=generator).float()  # ties
    bias = torch.randint(0, 3, (24,), generator=generator).float()
    found = cpu.route(logits, bias, 8, normalise=normalise, scaling=2.5)
    expected = route(logits, bias, 8, normalise=normalise, scaling=2.5)
    assert torch.equal(found[0], expected[0])
    for a, b in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0)
    logits[3] = torch.nan
    poisoned = cpu.route(logits, bias, 8, normalise=normalise, scaling=2.5)
    assert bool(poisoned[1][3].isnan().all())
    assert torch.equal(poisoned[0][:3], found[0][:3])


@needs_compiler
@pytest.mark.parametrize(("tokens", "allowed"), [(1, 8), (2, 8), (16, 3), (16, 8)])
def test_sums_the_chosen_experts(tokens: int, allowed: int, specification: None) -> None:
    x, gate_up, down = normal(tokens, 40), normal(8, 2 * 24, 40, seed=1), normal(8, 40, 24, seed=2)
    expert = torch.stack(
        [torch.randperm(allowed, generator=torch.Generator().manual_seed(i))[:3] for i in range(tokens)]
    )
    weight = normal(tokens, 3, seed=3)
    found = cpu.grouped_swiglu(x, gate_up, down, expert, weight)
    expected = grouped_swiglu(x.double(), gate_up.double(), down.double(), expert, weight)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=2e-4)
    for i in range(tokens):  # alone or with others: the same bits
        alone = cpu.grouped_swiglu(x[i : i + 1], gate_up, down, expert[i : i + 1], weight[i : i + 1])
        assert torch.equal(alone[0], found[i])


@needs_compiler
@pytest.mark.parametrize("shared", [0, 20, 33])
@pytest.mark.parametrize("tokens", [1, 5, 16])
@pytest.mark.parametrize("width", [40, 48])
def test_a_whole_moe_is_its_parts(tokens: int, shared: int, width: int, specification: None) -> None:
    x, router, bias = normal(tokens, width), normal(8, width, seed=1), normal(8, seed=2)
    gate_up, down = normal(8, 2 * 24, width, seed=3), normal(8, width, 24, seed=4)
    gate, up, back = normal(shared, width), normal(shared, width, seed=6), normal(width, shared, seed=7)
    rule = dict(normalise=True, scaling=2.5)
    extra = (gate, up, back) if shared else None
    found = cpu.moe(x, (router, bias), (gate_up, down), extra, 3, **rule)
    expert, weight, _ = route(x @ router.T, bias, 3, **rule)
    expected = grouped_swiglu(x.double(), gate_up.double(), down.double(), expert, weight)
    alone = torch.zeros_like(expected)
    if shared:
        wide = [w.double() for w in (x, gate, up, back)]
        alone = (torch.nn.functional.silu(wide[0] @ wide[1].T) * (wide[0] @ wide[2].T)) @ wide[3].T
        torch.testing.assert_close(cpu.swiglu(x, gate, up, back).double(), alone, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(found.double(), expected + alone, rtol=1e-4, atol=1e-3)
    for i in range(tokens):
        assert torch.equal(cpu.moe(x[i : i + 1], (router, bias), (gate_up, down), extra, 3, **rule)[0], found[i])


# --------------------------------------------------------------------------- dispatch
def attend(heads: int = 2, dtype: torch.dtype = torch.float32) -> Tensor:
    keys = normal(1, 9, 1, 6).to(dtype)
    selected = torch.zeros(1, 1, 1, dtype=torch.int32)
    visible = Visibility.causal(1, 1, 8)
    return sparse_attention(normal(1, 1, heads, 6).to(dtype), keys, keys[..., :4], selected, visible, 1.0)


@needs_compiler
def test_steps_in_for_fp32_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    used = taken(monkeypatch)
    attend()
    assert used == ["cpu.sparse_attention"]
    attend(heads=fits.QUERY_UP_TO)
    attend(dtype=torch.bfloat16)
    monkeypatch.setenv("GLM5_KERNELS", "torch")
    attend()
    monkeypatch.delenv("GLM5_KERNELS")
    with torch.enable_grad():
        logits = normal(2, 6).requires_grad_()
        assert route(logits, torch.zeros(6), 2)[1].requires_grad
    assert used == ["cpu.sparse_attention"]
    route(normal(2, 6), torch.zeros(6), 2, n_group=2)
    assert used == ["cpu.sparse_attention"]


@pytest.mark.parametrize("fault", ["no compiler", "it fails"])
def test_without_a_compiler_torch_runs_and_says_so(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    expected = attend()
    if fault == "it fails":
        monkeypatch.setenv("GLM5_CACHE", str(tmp_path))
        monkeypatch.setattr(build, "FLAGS", ("--no-such-flag",))
        monkeypatch.setattr(build.shutil, "which", lambda _: "c++")
    else:
        monkeypatch.setattr(build.shutil, "which", lambda _: None)
    for cached in (build._found, dispatch._compiler, dispatch._tell_once):
        cached.cache_clear()
    with caplog.at_level(logging.WARNING):
        torch.testing.assert_close(attend(), expected)
        attend()
    (said,) = caplog.messages
    assert "sparse_attention runs as plain PyTorch: cpu.sparse_attention: " in said
    assert ("no C++ compiler on PATH" if fault == "no compiler" else "c++ failed") in said
    monkeypatch.undo()
    for cached in (build._found, dispatch._compiler, dispatch._tell_once):
        cached.cache_clear()
    assert not list(tmp_path.iterdir())


# --------------------------------------------------------------------------- before attention
def turned(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate the pairs of the last axis, in float64; x is [N, R] or [N, heads, R]."""
    angle = torch.view_as_real(rope[0]).double()
    cos, sin = angle[..., 0], angle[..., 1]
    if x.ndim == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


def normed(x: Tensor, gain: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * gain.double()


@needs_compiler
@pytest.mark.parametrize(("width", "q_latent"), [(48, 32), (41, 30)])
@pytest.mark.parametrize("tokens", [1, 3, 16])
def test_projects_what_the_layer_projects(tokens: int, width: int, q_latent: int) -> None:
    """Rows at unequal positions, against the same products, norms and rotations in float64; alone, the same bits."""
    heads, nope, rotary, latent, index_heads, index_width = 3, 10, 8, 20, 5, 14
    x = normal(1, tokens, width)
    query = (normal(q_latent, width, seed=1), 1 + normal(q_latent, seed=2), normal(heads * (nope + rotary), q_latent))
    stored = (normal(latent + rotary, width, seed=3), 1 + normal(latent, seed=4))
    wq_b, wk, w_proj = (normal(n, m) for n, m in ((index_heads * index_width, q_latent), (14, width), (5, width)))
    k_gain, k_bias = 1 + normal(index_width, seed=5), normal(index_width, seed=6)
    position = torch.randint(0, 5000, (1, tokens), generator=torch.Generator().manual_seed(7))
    rope = rotations(position, rotary, 1e4)
    weights = (query, stored, (wq_b, wk, k_gain, k_bias, w_proj), (heads, index_heads), (1e-6, 1e-6, 1e-6))
    found = cpu.project(x, rope, *weights)

    wide = x[0].double()
    q_a = normed(wide @ query[0].double().T, query[1])
    q = (q_a @ query[2].double().T).unflatten(-1, (heads, -1))
    index_q = (q_a @ wq_b.double().T).unflatten(-1, (index_heads, -1))
    kv, k = wide @ stored[0].double().T, wide @ wk.double().T
    layer = normed(k - k.mean(-1, keepdim=True), k_gain) + k_bias.double()
    expected = (
        torch.cat((q[..., :nope], turned(q[..., nope:], rope)), -1),
        torch.cat((normed(kv[..., :latent], stored[1]), turned(kv[..., latent:], rope)), -1),
        torch.cat((turned(layer[..., :rotary], rope), layer[..., rotary:]), -1),
        torch.cat((turned(index_q[..., :rotary], rope), index_q[..., rotary:]), -1),
        wide @ w_proj.double().T * (index_heads * index_width) ** -0.5,
    )
    for part, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(part[0].double(), exact, rtol=1e-4, atol=1e-4)
    for i in range(tokens):
        for part, whole in zip(cpu.project(x[:, i : i + 1], rope[:, i : i + 1], *weights), found, strict=True):
            assert torch.equal(part[0, 0], whole[0, i])


@needs_compiler
def test_norms_rows_at_any_stride() -> None:
    x = normal(1, 5, 40)
    gain = 1 + normal(24, seed=1)
    wide = x[..., 8:32].double()
    expected = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * gain.double()
    torch.testing.assert_close(cpu.rms_norm(x[..., 8:32], gain, 1e-5).double(), expected, rtol=1e-5, atol=1e-6)
    flat = x[0, :, 8:32]
    torch.testing.assert_close(cpu.rms_norm(flat, gain, 1e-5).double(), expected[0], rtol=1e-5, atol=1e-6)
