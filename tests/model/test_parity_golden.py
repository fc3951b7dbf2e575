"""Our model against stored outputs of the public implementation, for developers who have such a directory.

    GLM5_GOLDEN=/path/to/golden python -m pytest tests/model/test_parity_golden.py

The directory holds `ckpt-fp32` and `ckpt-bf16` (public layout) and `golden-*.safetensors`: a strict case (every
decision clear), a short one, a long one with tied scores, a left-padded one, the cache, greedy ids, three MTP depths,
and the long case in bf16. `test_parity` needs none of it: it makes its own.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from glm5.model.config import ModelConfig
from glm5.model.glm5 import GLM5
from glm5.model.trace import Trace
from support.checks import (
    FORMS,
    LOGITS,
    SCORES,
    SCORES_END_TO_END,
    Bf16Layer,
    check_bf16_layer,
    form,
    in_chunks,
    run_block,
    same_routing,
    same_scores,
    same_selection,
    visible_only,
    worst,
)
from support.tiny import fuse_experts

GOLDEN = os.environ.get("GLM5_GOLDEN")
if GOLDEN is None:
    message = "GLM5_GOLDEN is not set: stored outputs of the public implementation are not compared (fresh ones are)"
    warnings.warn(message, stacklevel=1)
    pytest.skip(message, allow_module_level=True)
ROOT = Path(GOLDEN)
LAYERS = range(4)


def golden_file(name: str) -> dict[str, Tensor]:
    out = load_file(ROOT / f"golden-{name}.safetensors")
    for key, tensor in out.items():
        if key.startswith("index_scores"):
            tensor.masked_fill_(tensor < -1e30, -torch.inf)  # the reference adds the lowest float
    return out


def load(name: str, dtype: torch.dtype) -> GLM5:
    tensors: dict[str, Tensor] = {}
    for shard in sorted((ROOT / name).glob("*.safetensors")):
        tensors |= load_file(shard)
    model = GLM5(ModelConfig.load(ROOT / name), seed=None).to(dtype)
    model.load_state_dict({name: t.to(model.state_dict()[name].dtype) for name, t in fuse_experts(tensors).items()})
    return model.eval()


@pytest.fixture(scope="module")
def model() -> GLM5:
    return load("ckpt-fp32", torch.float32)


@pytest.fixture(scope="module")
def strict() -> dict[str, Tensor]:
    return golden_file("strict-fp32-eager")


@pytest.fixture(scope="module")
def long() -> dict[str, Tensor]:
    return golden_file("long-fp32-eager")


def routing(g: dict[str, Tensor]) -> list[tuple[Tensor, Tensor, Tensor]]:
    return [(g[f"router_logits.{i}"], g[f"router_weights.{i}"], g[f"router_topk.{i}"]) for i in range(3)]


@pytest.mark.parametrize("file", ["strict-fp32-eager", "short-fp32-eager"])
@pytest.mark.parametrize("name", FORMS)
@torch.no_grad()
def test_decided_prefill(model: GLM5, file: str, name: str) -> None:
    g = golden_file(file)
    trace = Trace(scores=True)
    with form(name):
        out = model(g["input_ids"], trace=trace)
    assert worst(out.logits, g["logits"]) < LOGITS
    for i, hidden in enumerate(trace.hidden):
        assert worst(hidden, g[f"hidden.{i}"]) < LOGITS
    for i in LAYERS:
        same_scores(trace.index_scores[i], g[f"index_scores.{i}"], SCORES_END_TO_END)
        same_selection(trace.selected[i], g[f"topk.{i}"], g[f"index_scores.{i}"])
    same_routing(trace.router, routing(g))


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("file", ["strict-fp32-eager", "short-fp32-eager"])
def test_layer_on_the_golden_hidden_state(model: GLM5, file: str, layer: int) -> None:
    g = golden_file(file)
    trace = Trace(scores=True)
    out = run_block(model, layer, g[f"hidden.{layer}"], trace)
    same_scores(trace.index_scores[0], g[f"index_scores.{layer}"], SCORES)
    same_selection(trace.selected[0], g[f"topk.{layer}"], g[f"index_scores.{layer}"])
    assert worst(out, g[f"hidden.{layer + 1}"]) < LOGITS


@pytest.mark.parametrize("sizes", [(40, 30, 26), (64, *[1] * 32), (32, 32, 32), (1, 94, 1)], ids=str)
def test_chunks_and_decode(model: GLM5, strict: dict[str, Tensor], sizes: tuple[int, ...]) -> None:
    assert worst(in_chunks(model, strict["input_ids"], sizes), strict["logits"]) < LOGITS


@pytest.mark.parametrize("layer", LAYERS)
def test_tied_scores_by_layer(model: GLM5, long: dict[str, Tensor], layer: int) -> None:
    """Where the k-th place is tied, either choice is right: the sets differ only at scores equal to the k-th."""
    trace = Trace(scores=True)
    run_block(model, layer, long[f"hidden.{layer}"], trace)
    scores = long[f"index_scores.{layer}"]
    same_scores(trace.index_scores[0], scores, SCORES)
    slots, k = scores.shape[-1], model.config.index_topk
    ours = torch.zeros(2, slots, slots + 1, dtype=torch.bool)
    ours.scatter_(-1, torch.where(trace.selected[0] < 0, slots, trace.selected[0]).long(), True)
    ours = ours[..., :slots]
    theirs = torch.zeros(2, slots, slots, dtype=torch.bool).scatter_(-1, long[f"topk.{layer}"].long(), True)
    theirs &= scores > -torch.inf
    differs = ours != theirs
    kth = scores.sort(-1, descending=True).values[..., k - 1 : k].expand_as(scores)
    assert worst(scores[differs], kth[differs]) < 2 * SCORES
    assert differs.any(-1).sum() <= 10
    assert torch.equal(ours.sum(-1), theirs.sum(-1))


@pytest.mark.parametrize("name", FORMS)
@torch.no_grad()
def test_long_with_replayed_positions(model: GLM5, long: dict[str, Tensor], name: str) -> None:
    trace = Trace(replay=[visible_only(long[f"topk.{i}"]) for i in LAYERS])
    with form(name):
        out = model(long["input_ids"], trace=trace)
    assert worst(out.logits, long["logits"]) < LOGITS
    for i, hidden in enumerate(trace.hidden):
        assert worst(hidden, long[f"hidden.{i}"]) < LOGITS
    same_routing(trace.router, routing(long))


@pytest.mark.parametrize("name", FORMS)
@torch.no_grad()
def test_left_padding_with_replayed_positions(model: GLM5, name: str) -> None:
    g = golden_file("leftpad-fp32-sdpa")
    mask = g["attention_mask"]
    real = mask.bool()
    trace = Trace(replay=[visible_only(g[f"topk.{i}"], mask.argmax(-1)) for i in LAYERS])
    with form(name):
        out = model(g["input_ids"], attention_mask=mask, trace=trace)
    assert worst(out.logits[real], g["logits"][real]) < LOGITS
    for i, hidden in enumerate(trace.hidden):
        assert worst(hidden[real], g[f"hidden.{i}"][real]) < LOGITS
    assert bool(out.logits.isfinite().all())


@torch.no_grad()
def test_cache_contents(model: GLM5, long: dict[str, Tensor]) -> None:
    """Latent, rotary key (stored there evens first, then odds) and index key of every layer."""
    g = golden_file("cache-fp32")
    cache = model.new_cache(2)
    model(long["input_ids"], cache=cache, trace=Trace(replay=[visible_only(long[f"topk.{i}"]) for i in LAYERS]))
    latent, rotary = model.config.kv_lora_rank, model.config.qk_rope_head_dim
    order = torch.cat((torch.arange(0, rotary, 2), torch.arange(1, rotary, 2)))
    for i in LAYERS:
        rows, index_keys = (t[:, :512] for t in cache.layers[i])
        assert worst(rows[..., :latent], g[f"l{i}.keys"][:, 0]) < LOGITS
        assert worst(rows[..., latent:][..., order], g[f"l{i}.values"][:, 0]) < LOGITS
        assert worst(index_keys[..., :rotary][..., order], g[f"l{i}.indexer_keys"][..., :rotary]) < LOGITS
        assert worst(index_keys[..., rotary:], g[f"l{i}.indexer_keys"][..., rotary:]) < LOGITS


@torch.no_grad()
def test_greedy(model: GLM5) -> None:
    g = golden_file("greedy-fp32")
    step, cache, ours = g["prompt"], model.new_cache(1), [g["prompt"]]
    for _ in range(g["greedy"].shape[1] - g["prompt"].shape[1]):
        step = model(step, cache=cache, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)
        ours.append(step)
    assert torch.equal(torch.cat(ours, dim=1), g["greedy"])


@torch.no_grad()
def test_mtp(model: GLM5, strict: dict[str, Tensor]) -> None:
    g = golden_file("mtp-strict-fp32")
    trace = Trace(scores=True)
    hidden = model.hidden(strict["input_ids"])
    for i, ours in enumerate(model.mtp_hidden(hidden, strict["input_ids"], 3, trace=trace)):
        assert worst(ours, g[f"mtp{i + 1}.hidden"]) < LOGITS
        assert worst(model.lm_head(ours), g[f"mtp{i + 1}.logits"]) < LOGITS
        same_selection(trace.selected[i], g[f"mtp{i + 1}.topk"], trace.index_scores[i])


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("name", FORMS)
def test_bf16_layer(layer: int, name: str) -> None:
    model, exact = load("ckpt-bf16", torch.bfloat16), load("ckpt-bf16", torch.float32)
    g = golden_file("long-bf16-eager")
    router = routing(g)[layer - 1] if layer else None
    given = Bf16Layer(layer, g[f"hidden.{layer}"], g[f"hidden.{layer + 1}"], g[f"topk.{layer}"], router)
    with form(name):
        check_bf16_layer(model, exact, given)
    assert torch.equal(model.lm_head(g["hidden.4"]), g["logits"])
