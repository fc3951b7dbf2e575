"""Pages in FP8: their bytes, what rounding costs, and the same answers whichever way they were filled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from glm5.kernels import latent_rows
from glm5.kernels.hadamard import hadamard
from glm5.model.glm5 import GLM5
from glm5.model.mla import MLA
from glm5.model.packed import pack_rows, row_bytes, unpack_rows
from glm5.model.paged import PagedBatch, PagedCache, Run
from glm5.model.presets import glm5, nano
from glm5.serve.config import EngineConfig
from glm5.serve.engine import Engine
from glm5.serve.llm import Answer
from glm5.serve.request import Request, SamplingParams
from glm5.serve.transfer import PageBytes
from glm5.utils.errors import ConfigError
from support.engines import answered
from support.tiny import tiny_model

CONFIG = EngineConfig(pages=24, context=500, kv_cache_dtype="fp8_e4m3")
GREEDY = SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True, logprobs=0)
TABLE = [3, 1, 0, 2, 4]


@pytest.fixture(scope="module")
def model() -> GLM5:
    """Looks at 128 of up to 300 positions."""
    return GLM5(nano(initializer_range=0.06, num_hidden_layers=3), seed=1).eval()


def ids_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(1, 2000, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_a_position_has_the_published_bytes() -> None:
    """656 and 132 of each layer: 60.0 KiB a token of GLM-5's 78 layers."""
    config = glm5()
    made = PagedCache(config, 1, fp8=True, device="meta")
    assert row_bytes(config.kv_lora_rank, config.qk_rope_head_dim) == latent_rows.ROW_BYTES == 656
    assert made.nbytes_per_page() == 64 * (656 + 132) * config.num_hidden_layers
    assert made.nbytes_per_page() / 64 / 1024 == pytest.approx(60.0, abs=0.05)


def test_rows_have_the_layout_that_the_kernels_read() -> None:
    rows = torch.randn(3, 5, 576, generator=torch.Generator().manual_seed(0))
    assert torch.equal(pack_rows(rows, 512), latent_rows.pack_rows(rows))
    assert torch.equal(unpack_rows(pack_rows(rows, 512), 512), latent_rows.unpack_rows(latent_rows.pack_rows(rows)))


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_scales_are_of_each_row(size: float) -> None:
    """A row beside one a million times larger keeps its digits, and none saturates."""
    rows = torch.randn(2, 200, generator=torch.Generator().manual_seed(0))
    rows[1] *= size
    back = unpack_rows(pack_rows(rows, 184), 184)
    assert float(((back - rows).norm(dim=-1) / rows.norm(dim=-1)).max()) < 0.04


def read(model: GLM5, cache: PagedCache, ids: list[int], *cuts: int) -> Tensor:
    """Log-probabilities after each id, read in pieces."""
    states = []
    with torch.inference_mode():
        for start, stop in zip((0, *cuts), (*cuts, len(ids)), strict=True):
            batch = PagedBatch(cache, [Run(TABLE, start, stop - start)])
            states.append(model.hidden(torch.tensor([ids[start:stop]]), cache=batch)[0])
        return model.lm_head(torch.cat(states)).float().log_softmax(-1)


def test_rounding_costs_little(model: GLM5) -> None:
    """What is told of one question, in FP8 and in full: a few times what bfloat16 costs, and no garbage."""
    ids, wide = ids_of(300), PagedCache(model.config, 5)
    full = read(model, wide, ids)
    narrow = PagedCache(model.config, 5, fp8=True)
    rounded = read(model, narrow, ids, 200, 290, 299)
    kl = (full.exp() * (full - rounded)).sum(-1)
    assert 1e-4 < float(kl.mean()) < 0.15
    half = GLM5(model.config, seed=1).eval().to(torch.bfloat16)
    cost = (full.exp() * (full - read(half, PagedCache(model.config, 5, dtype=torch.bfloat16), ids))).sum(-1)
    assert float(kl.mean()) < 6 * float(cost.mean())
    # The first layer's entries come from the embedding alone, so they differ by rounding only.
    rows, keys = (pool[0, : 5 * 64] for pool in wide.layers[0])
    held, values, scale = (pool[0, : 5 * 64] for pool in narrow.layers[0])
    back = unpack_rows(held, narrow.latent), hadamard(values.float() * scale)
    for true, found in zip((rows, keys), back, strict=True):
        seen = true.norm(dim=-1) > 0
        assert int(seen.sum()) == 300
        assert float(((found - true)[seen].norm(dim=-1) / true[seen].norm(dim=-1)).max()) < 0.04


def run(engine: Engine, prompts: list[list[int]]) -> list[Answer]:
    return answered(engine, [Request(ids, GREEDY) for ids in prompts])


def warm(engine: Engine, prompts: list[list[int]]) -> list[Answer]:
    run(engine, prompts)
    again = run(engine, prompts)
    assert [a.cached_tokens for a in again] == [(len(ids) - 1) // 64 * 64 for ids in prompts]
    return again


def from_host(engine: Engine, prompts: list[list[int]]) -> list[Answer]:
    run(engine, prompts)
    for seed in range(6):
        run(engine, [ids_of(300, seed=50 + seed)])
    found = [run(engine, [ids])[0] for ids in prompts]
    assert found[-1].cached_tokens > 0
    return found


def after_release(engine: Engine, prompts: list[list[int]]) -> list[Answer]:
    run(engine, prompts)
    engine.release_memory(("kv_cache",))
    engine.resume_memory(("kv_cache",))
    return run(engine, prompts)


WAYS: dict[str, tuple[dict[str, Any], Callable[[Engine, list[list[int]]], list[Answer]]]] = {
    "warm": ({}, warm),
    "in chunks": ({"chunk": 37}, run),
    "from host memory": ({"pages": 8, "host_pages": 60}, from_host),
    "with drafts": ({"drafts": 2}, run),
    "after release": ({}, after_release),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_same(way: str) -> None:
    """Up to what an ulp becomes when it is rounded to 8 bits; the model's ids are far enough apart for that."""
    model = GLM5(nano(initializer_range=0.02, num_hidden_layers=2), seed=3).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(40)
    prompts = [ids_of(n, seed=n) for n in (5, 64, 65, 150, 220)]
    changes, answer = WAYS[way]
    plain = [run(Engine(model, CONFIG), [ids])[0] for ids in prompts]
    found = answer(Engine(model, replace(CONFIG, **changes)), prompts)
    for a, b in zip(found, plain, strict=True):
        assert a.ids == b.ids
        torch.testing.assert_close(torch.tensor(a.logprobs), torch.tensor(b.logprobs), rtol=0, atol=0.05)


def test_all_of_a_page_moves_between_workers(model: GLM5) -> None:
    one, other = (PagedCache(model.config, 5, draft=True, fp8=True) for _ in range(2))
    read(model, one, ids_of(300))
    pages = PageBytes(one), PageBytes(other)
    assert pages[0].layout == pages[1].layout != PageBytes(PagedCache(model.config, 1, draft=True)).layout
    data = torch.empty(pages[0].size, dtype=torch.uint8)
    for page in range(5):
        pages[0].read(page, data)
        pages[1].write(page, data)
    for a, b in zip(one.tensors(), other.tensors(), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    assert bool(one.layers[0][2].any())


@pytest.mark.parametrize("fp8", [False, True])
def test_all_of_a_page_moves_to_the_host_and_back(fp8: bool, model: GLM5) -> None:
    """The trunk's hidden state at its end included, from which the next page's first draft is made."""
    cache = PagedCache(model.config, 3, 2, draft=True, fp8=fp8)
    make = torch.Generator().manual_seed(0)
    for tensor in cache.tensors():
        tensor.view(torch.uint8).random_(1, 50, generator=make)
    parts = [tensor.view(3, -1) if tensor is cache.hidden else tensor.view(3, 64, -1) for tensor in cache.tensors()]
    before = [part.clone() for part in parts]
    cache.copy("to_host", 2, 1)
    cache.copy("to_device", 1, 0)
    cache.copy("within", 2, 1)
    for part, old in zip(parts, before, strict=True):
        assert not torch.equal(old[0].view(torch.uint8), old[2].view(torch.uint8))
        assert all(torch.equal(part[page].view(torch.uint8), old[2].view(torch.uint8)) for page in range(3))


def test_what_cannot_be_packed_is_refused(model: GLM5) -> None:
    with pytest.raises(ConfigError, match="power of two"):
        Engine(tiny_model(0).eval(), replace(CONFIG, context=128))
    with pytest.raises(ConfigError, match="invariant"):
        Engine(model, replace(CONFIG, invariant=True))
    with pytest.raises(ConfigError, match="kv_cache_dtype"):
        Engine(model, replace(CONFIG, kv_cache_dtype="int8"))  # type: ignore[arg-type]


def test_packed_rows_are_read_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the widths of the operator for packed rows, a few queries read the selected ones alone: as if unpacked."""
    sizes = dict(kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=64, index_head_dim=64, index_topk=16)
    model = GLM5(nano(initializer_range=0.05, num_hidden_layers=2, **sizes), seed=1).eval()
    ids, calls = ids_of(100), [0]
    plain = latent_rows.sparse_attention_fp8

    def counted(*given: Any) -> Any:
        calls[0] += 1
        return plain(*given)

    monkeypatch.setattr(latent_rows, "sparse_attention_fp8", counted)
    found = read(model, PagedCache(model.config, 5, fp8=True), ids, 98, 99)
    assert calls[0] > 0
    monkeypatch.setattr(MLA, "_reads_packed", False)
    expected = read(model, PagedCache(model.config, 5, fp8=True), ids, 98, 99)
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-3)
    assert not torch.equal(found, expected)
