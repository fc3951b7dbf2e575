"""Our model against the public implementation, fp32, on weights and ids made for this run (`support.golden`)."""

from __future__ import annotations

import pytest
import torch

from support import checks
from support.checks import FORMS, LOGITS, form, worst
from support.golden import Golden, decided_ids, new_cache, show
from support.tiny import tiny_model

K = 24  # index_topk of the tiny model


@pytest.fixture(autouse=True, params=["as dispatched", "specifications"])
def _kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs here, with fast versions for few tokens; and plain PyTorch throughout."""
    if request.param == "specifications":
        monkeypatch.setenv("GLM5_KERNELS", "torch")


def test_the_fixture_is_worth_comparing(golden: Golden) -> None:
    """Rows pass k, logits vary, decisions are clear, and no gain is one nor bias zero."""
    assert golden.config.index_topk == K < golden.ids.shape[1] // 3
    assert golden.out.logits.std() > 0.5
    for layer, (scores, chosen) in enumerate(zip(golden.out.scores, golden.out.selected, strict=True)):
        assert chosen.shape[-1] == K, layer
        dropped = (scores > -torch.inf).sum(-1) - K
        assert dropped.max() > K
    for name, tensor in golden.tensors.items():
        if "norm" in name and name.endswith("weight"):
            assert (tensor - 1).abs().max() > 0.1, name
        if name.endswith("bias"):
            assert tensor.abs().min() > 0, name


# --------------------------------------------------------------------------- one pass
@pytest.mark.parametrize("name", FORMS)
def test_prefill(golden: Golden, name: str) -> None:
    with form(name):
        checks.check_prefill(golden)
        checks.check_logits(golden)


@pytest.mark.parametrize("name", FORMS)
def test_every_layer_on_the_reference_hidden_state(golden: Golden, name: str) -> None:
    with form(name):
        checks.check_layers(golden)


@pytest.mark.parametrize("tokens", [1, 2, K - 1, K, K + 1, 3 * K])
@pytest.mark.parametrize("name", FORMS)
def test_lengths_around_k(golden: Golden, tokens: int, name: str) -> None:
    with form(name):
        checks.check_prefill(golden, tokens)


def test_prefill_with_gradients_enabled(golden: Golden) -> None:
    """Training runs the same forward pass, through other operators."""
    out = golden.model(golden.ids)
    assert out.logits.requires_grad
    assert worst(out.logits, golden.out.logits) < LOGITS


def test_sdpa_reference_agrees_too(golden: Golden) -> None:
    """The reference's other attention path, so that no quirk of its eager one is copied."""
    golden.reference.set_attn_implementation("sdpa")
    try:
        logits = show(golden.reference, golden.ids).logits
    finally:
        golden.reference.set_attn_implementation("eager")
    with torch.no_grad():
        assert worst(golden.model(golden.ids).logits, logits) < LOGITS


def test_other_weights_and_sizes(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Another seed, two dense layers, groups of experts and two shared experts."""
    from support.golden import build_mtp, load_reference, show_mtp
    from support.tiny import tiny_config, write_public_checkpoint

    changes = dict(
        num_hidden_layers=4,
        first_k_dense_replace=2,
        n_routed_experts=12,
        n_group=4,
        topk_group=2,
        n_shared_experts=2,
        routed_scaling_factor=1.5,
        index_topk=16,
        rope_theta=500_000.0,
    )
    directory = tmp_path_factory.mktemp("other")
    tensors = write_public_checkpoint(directory, 7, **changes)
    config = tiny_config(**changes)
    reference = load_reference(directory)
    mtp = build_mtp(reference, tensors, config)
    ids = decided_ids(reference, mtp, config, 2, 40, seed=3)
    theirs = show(reference, ids)
    model = tiny_model(7, **changes)
    with torch.no_grad():
        out = model(ids)
        assert worst(out.logits, theirs.logits) < LOGITS
        for ours, depth in zip(
            model.mtp_hidden(out.hidden, ids, 3), show_mtp(reference, mtp, ids, theirs.hidden[-1]), strict=True
        ):
            assert worst(ours, depth.hidden) < LOGITS


def test_attention_bias(tmp_path_factory: pytest.TempPathFactory) -> None:
    from support.golden import load_reference
    from support.tiny import write_public_checkpoint

    directory = tmp_path_factory.mktemp("bias")
    tensors = write_public_checkpoint(directory, 2, attention_bias=True)
    assert any(name.endswith("q_a_proj.bias") for name in tensors)
    ids = torch.randint(6, 320, (1, K), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = tiny_model(2, attention_bias=True)(ids).logits
    assert worst(ours, show(load_reference(directory), ids).logits) < LOGITS


# --------------------------------------------------------------------------- through the cache
@pytest.mark.parametrize("name", FORMS)
def test_decode_token_by_token(golden: Golden, name: str) -> None:
    with form(name):
        checks.check_decode(golden)


@pytest.mark.parametrize("sizes", [(40, 30, 8), (K, K, K), (1, K, 1, 2 * K), (K - 1, 2, 50, 1)], ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_chunked_prefill(golden: Golden, sizes: tuple[int, ...], name: str) -> None:
    with form(name):
        checks.check_chunks(golden, sizes)


@pytest.mark.parametrize("name", FORMS)
def test_every_split_point(golden: Golden, name: str) -> None:
    with form(name):
        checks.check_every_split(golden)


def test_the_reference_in_the_same_chunks(golden: Golden) -> None:
    checks.check_reference_chunks(golden, (K - 2, 7, 30, 1, 1))


def test_cache_contents(golden: Golden) -> None:
    """Latents, rotary keys and index keys are the reference's, whose rotated pairs lie evens first, then odds."""
    theirs = new_cache(golden.reference)
    show(golden.reference, golden.ids, cache=theirs)
    ours = golden.model.new_cache(2)
    with torch.no_grad():
        golden.model(golden.ids, cache=ours)
    rotary, latent = golden.config.qk_rope_head_dim, golden.config.kv_lora_rank
    order = torch.cat((torch.arange(0, rotary, 2), torch.arange(1, rotary, 2)))
    tokens = golden.ids.shape[1]
    for layer in range(golden.config.num_hidden_layers):
        rows, index_keys = (t[:, :tokens] for t in ours.layers[layer])
        public = theirs.layers[layer]
        assert worst(rows[..., :latent], public.keys[:, 0]) < LOGITS
        assert worst(rows[..., latent:][..., order], public.values[:, 0]) < LOGITS
        assert worst(index_keys[..., :rotary][..., order], public.indexer_keys[..., :rotary]) < LOGITS
        assert worst(index_keys[..., rotary:], public.indexer_keys[..., rotary:]) < LOGITS


# --------------------------------------------------------------------------- batches of unequal length
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("lengths", [(60, 41), (30, 5), (K + 1, K), (50, 1)], ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_padding(golden: Golden, lengths: tuple[int, int], side: str, name: str) -> None:
    with form(name):
        checks.check_padding(golden, lengths, side)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_against_the_padded_reference(golden: Golden, side: str) -> None:
    checks.check_padding_reference(golden, (60, 41), side)


# --------------------------------------------------------------------------- MTP
@pytest.mark.parametrize("name", FORMS)
def test_mtp_training_form(golden: Golden, name: str) -> None:
    with form(name):
        checks.check_mtp(golden)


@pytest.mark.parametrize("name", FORMS)
def test_mtp_serving_form(golden: Golden, name: str) -> None:
    with form(name):
        checks.check_drafts(golden)


# --------------------------------------------------------------------------- generation
@pytest.mark.parametrize("tokens", [5, K, 40])
def test_greedy_generation(golden: Golden, tokens: int) -> None:
    """The same ids as the reference's `generate`, over a prompt and continuation that cross k."""
    prompt = golden.ids[:1, :tokens]
    theirs = golden.reference.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=32,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=golden.config.pad_token_id,
    )
    cache, step, ours = golden.model.new_cache(1), prompt, [prompt]
    with torch.no_grad():
        for _ in range(32):
            step = golden.model(step, cache=cache, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)
            ours.append(step)
    assert torch.equal(torch.cat(ours, dim=1), theirs)
    for speculate in (0, 2):
        streamed = golden.model.generate(prompt, max_new_tokens=32, stop_ids=(), speculate=speculate)
        assert list(streamed) == theirs[0, tokens:].tolist()
