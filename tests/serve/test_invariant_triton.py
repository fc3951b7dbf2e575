"""The invariant mode as a GPU runs it: in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from support import triton_interpreter

triton_interpreter.ask()

from glm5.kernels.triton import fixed
from glm5.model.glm5 import GLM5
from glm5.model.paged import PagedCache, Run
from glm5.model.presets import nano
from glm5.serve import invariant
from glm5.serve.graphs import Graphs, recorder_for
from glm5.utils.errors import ConfigError

triton_interpreter.mend()

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTHS = dict(
    vocab_size=96,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    q_lora_rank=64,
    kv_lora_rank=128,
    qk_nope_head_dim=64,
    qk_rope_head_dim=16,
    v_head_dim=128,
    index_n_heads=16,
    index_head_dim=16,
    index_topk=24,
    intermediate_size=64,
    moe_intermediate_size=64,
    n_routed_experts=4,
    max_position_embeddings=256,
    initializer_range=0.08,
)


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariant, "on_gpu", lambda model: True)
    if DEVICE == "cpu":  # the interpreter takes its time for what is masked, too
        monkeypatch.setattr(fixed, "SHARE", 64)


def read(model: GLM5, cache: PagedCache, *runs: tuple[list[int], list[int], int, int]) -> list[Tensor]:
    """Hidden states of ids[start:stop] of each text, whose pages are given."""
    made = [Run(table, start, stop - start) for _, table, start, stop in runs]
    with torch.inference_mode():
        return invariant.hidden(model, cache, made, [ids[start:stop] for ids, _, start, stop in runs])


@pytest.mark.slow
def test_no_bit_depends_on_batch_or_chunks() -> None:
    model = GLM5(nano(**WIDTHS), seed=1).eval().to(DEVICE)
    make = torch.Generator().manual_seed(2)
    long, short = (torch.randint(1, 96, (n,), generator=make).tolist() for n in (33, 5))
    cache = PagedCache(model.config, 8, size=16, device=DEVICE)
    alone = [read(model, cache, (ids, table, 0, len(ids)))[0] for ids, table in ((long, [0, 1, 2]), (short, [3]))]
    # Read again: in pieces, the last of them together with the other text, whose end comes in the call after.
    table = [5, 4, 6]
    read(model, cache, (long, table, 0, 25))
    parts = [read(model, cache, (long, table, 25, 32), (short, [7], 0, 4))]
    parts.append(read(model, cache, (long, table, 32, 33), (short, [7], 4, 5)))
    for place, (whole, begin) in enumerate(zip(alone, (25, 0), strict=True)):
        assert torch.equal(torch.cat([part[place] for part in parts]), whole[begin:])
    for layer in cache.layers:
        for pool in layer:
            pages = pool[0].view(8, 16, -1)
            assert torch.equal(pages[table].flatten(0, 1)[:33], pages[:3].flatten(0, 1)[:33])
    plain = model(torch.tensor([long], device=DEVICE)).logits[0]
    torch.testing.assert_close(invariant.head(model, alone[0]), plain, rtol=0, atol=2e-4)


def test_a_trainer_has_the_same_bits() -> None:
    model = GLM5(nano(**WIDTHS), seed=1).eval().to(DEVICE)
    ids = torch.randint(1, 96, (9,), generator=torch.Generator().manual_seed(2)).tolist()
    cache = PagedCache(model.config, 1, size=64, device=DEVICE)
    first, last = read(model, cache, (ids, [0], 0, 7))[0], read(model, cache, (ids, [0], 7, 8))[0]
    scored = invariant.head(model, torch.cat((first, last))).log_softmax(-1)
    expected = scored.gather(-1, torch.tensor(ids[1:], device=DEVICE)[:, None])[:, 0]
    assert torch.equal(invariant.logprobs(model, ids), expected)


def test_a_recorded_step_has_the_same_bits() -> None:
    model = GLM5(nano(**WIDTHS), seed=1).eval().to(DEVICE)
    ids = torch.randint(1, 96, (6,), generator=torch.Generator().manual_seed(2)).tolist()
    cache = PagedCache(model.config, 4, size=16, device=DEVICE)
    read(model, cache, (ids, [1], 0, 5))
    expected = read(model, cache, (ids, [1], 5, 6))[0]
    plainly = recorder_for(cache.hidden.device) or (lambda run: run)
    graphs = Graphs(model, cache, spare=3, most=2, context=48, record=plainly, fixed=True)
    with torch.inference_mode():
        found = graphs([Run([1], 5, 1)], [ids[5:]])
        assert found is not None
        assert torch.equal(found[0], expected)
        assert torch.equal(found[1], invariant.head(model, expected))


def test_widths_that_no_tile_fits_are_refused() -> None:
    with pytest.raises(ConfigError, match="latent=64"):
        invariant.check(GLM5(nano(**{**WIDTHS, "kv_lora_rank": 64}), seed=1))
