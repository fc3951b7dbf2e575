"""The cache in pages: many sequences in one flat call give what each gives alone, in shuffled pages, in any pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from glm5.model.glm5 import GLM5
from glm5.model.paged import PagedBatch, PagedCache, Run
from glm5.model.presets import nano
from glm5.utils.errors import ConfigError
from support.tiny import tiny_config, tiny_model

SIZE = 8
K = 24  # index_topk of the tiny model
LENGTHS = (5, 24, 30, 61)  # below, at and above k, and across pages


@pytest.fixture(autouse=True, params=["as dispatched", "specifications"])
def _kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "specifications":
        monkeypatch.setenv("GLM5_KERNELS", "torch")


@pytest.fixture
def model() -> GLM5:
    return tiny_model()


def texts(model: GLM5) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, model.config.vocab_size, (n,), generator=generator).tolist() for n in LENGTHS]


def tables(seed: int = 0) -> list[list[int]]:
    """Eight pages for each text, none in its place."""
    return torch.randperm(40, generator=torch.Generator().manual_seed(seed))[:32].view(4, 8).tolist()


@torch.no_grad()
def run(model: GLM5, cache: PagedCache, ids: Sequence[list[int]], where: list[list[int]], spans: Any) -> list[Tensor]:
    """Hidden states of the spans [(text, start, stop), ...], in one call."""
    batch = PagedBatch(cache, [Run(where[i], a, b - a) for i, a, b in spans])
    hidden = model.hidden(batch.flat([ids[i][a:b] for i, a, b in spans]), cache=batch)[0]
    return [hidden[at : at + b - a] for at, (_, a, b) in zip(batch.offsets, spans, strict=True)]


PLANS = {
    "whole": [[(0, 0, 5), (1, 0, 24), (2, 0, 30), (3, 0, 61)]],
    "chunks beside decoding": [
        [(0, 0, 4), (3, 0, 20)],
        [(3, 20, 40), (0, 4, 5), (1, 0, 20)],
        [(2, 0, 29), (1, 20, 24), (3, 40, 60)],
        [(3, 60, 61), (2, 29, 30)],
    ],
    "one by one, and drafts": [
        [(i, 0, n - 4) for i, n in enumerate(LENGTHS)],
        [(i, n - 4, n - 3) for i, n in enumerate(LENGTHS)],
        [(i, n - 3, n) for i, n in enumerate(LENGTHS)],
    ],
}


@pytest.mark.parametrize("plan", PLANS)
def test_many_sequences_give_what_each_gives_alone(model: GLM5, plan: str) -> None:
    ids, cache = texts(model), PagedCache(model.config, 40, size=SIZE, draft=True)
    for t in (*(t for layer in cache.layers for t in layer), cache.hidden):
        t.fill_(torch.nan)  # what was never written, or by an earlier holder, must count for nothing
    found: dict[int, list[Tensor]] = {i: [] for i in range(len(ids))}
    for spans in PLANS[plan]:
        for (i, _, _), hidden in zip(spans, run(model, cache, ids, tables(), spans), strict=True):
            found[i].append(hidden)
    for i, text in enumerate(ids):
        with torch.no_grad():
            expected = model.hidden(torch.tensor([text]))[0]
        torch.testing.assert_close(torch.cat(found[i]), expected, rtol=0, atol=2e-5)
        for page in range(len(text) // SIZE):  # the hidden state of every whole page's last slot
            kept = cache.hidden[tables()[i][page]]
            torch.testing.assert_close(kept, expected[page * SIZE + SIZE - 1], rtol=0, atol=2e-5)


def test_drafts_are_the_blocks_own_predictions(model: GLM5) -> None:
    """Entry i + 1 reads the trunk's hidden state i and token i + 1: as `mtp_hidden` has it, one slot on."""
    ids, cache = texts(model), PagedCache(model.config, 40, size=SIZE, draft=True)
    whole = [(i, 0, n) for i, n in enumerate(LENGTHS)]
    hidden = run(model, cache, ids, tables(), whole)
    for pieces in ([(1, None)], [(1, 4), (4, None)]):
        found: dict[int, list[Tensor]] = {i: [] for i in range(len(ids))}
        for a, b in pieces:
            runs = [Run(tables()[i], a, (b or n) - a) for i, n in enumerate(LENGTHS)]
            batch = PagedBatch(cache, runs, first=1)
            flat = torch.empty_like(torch.cat(hidden))[: batch.row_N.shape[0]]
            for i, (at, r) in enumerate(zip(batch.offsets, runs, strict=True)):
                flat[at : at + r.count] = hidden[i][a - 1 : a - 1 + r.count]
            next_ids = batch.flat([ids[i][r.start : r.start + r.count] for i, r in enumerate(runs)])
            with torch.no_grad():
                out = model.draft_hidden(flat[None], next_ids, batch)[0]
            for i, (at, r) in enumerate(zip(batch.offsets, runs, strict=True)):
                found[i].append(out[at : at + r.count])
        for i, text in enumerate(ids):
            with torch.no_grad():
                (expected,) = model.mtp_hidden(hidden[i][None], torch.tensor([text]), 1)
            torch.testing.assert_close(torch.cat(found[i]), expected[0], rtol=0, atol=2e-5)


def test_pages_are_copied_whole(model: GLM5) -> None:
    cache = PagedCache(model.config, 3, 2, size=SIZE, draft=True)
    ids = texts(model)
    run(model, cache, ids, [[], [], [0, 1, 2], []], [(2, 0, 24)])
    before = [[t.clone() for t in layer] for layer in cache.layers]
    kept = cache.hidden.clone()
    cache.copy("to_host", 0, 1)
    cache.copy("within", 1, 0)
    cache.copy("to_device", 1, 2)
    for old, new in zip(before, cache.layers, strict=True):
        for x, y in zip(old, new, strict=True):
            assert torch.equal(y[:, :SIZE], x[:, SIZE : 2 * SIZE])
            assert torch.equal(y[:, 2 * SIZE :], x[:, :SIZE])
    assert torch.equal(cache.hidden, kept[[1, 1, 0]])


def test_bytes_of_a_page() -> None:
    config = nano()
    plain, draft = PagedCache(config, 1), PagedCache(config, 1, draft=True)
    per_token = 4 * (config.latent_dim + config.index_head_dim)
    assert plain.nbytes_per_page() == 64 * 4 * per_token
    assert draft.nbytes_per_page() == 64 * 5 * per_token + 4 * config.hidden_size


def test_only_mla_lies_in_pages() -> None:
    with pytest.raises(ConfigError, match="attention='gqa'"):
        PagedCache(tiny_config(attention="gqa"), 1)
