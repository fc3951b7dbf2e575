"""Faults that implementations of this architecture have had, one test for each, and proof that each test sees its own.

Every test names a check (mostly those of `support.checks`, which also make up `test_parity`) and puts the fault into
our code: `catches` demands that the check passes on the sound code and fails on the faulty one. Where a fault hides
from a weaker check, the test shows that too, since that is how it once got through. Here are the indexer, masks,
caches and ragged batches (1 to 13); the rest is in `test_faults_numerics`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from glm5.kernels import attention, basic
from glm5.kernels import indexer as indexer_kernels
from glm5.kernels.visibility import Visibility
from glm5.model import indexer as indexer_module
from glm5.model import mla as mla_module
from glm5.model.cache import Cache
from glm5.model.glm5 import GLM5
from glm5.model.indexer import Indexer
from glm5.model.mla import MLA
from glm5.model.mtp import MTPBlock
from glm5.utils.errors import UserError
from support import checks
from support.checks import FORMS, LOGITS, form, worst
from support.faults import catches, half_split, replaced, together, wrapped
from support.golden import Golden, show
from support.tiny import tiny_model

K = 24  # index_topk of the tiny model

pytestmark = pytest.mark.usefixtures("specification")  # faults are put into the plain PyTorch versions


# --------------------------------------------------------------------------- the indexer
def test_copied_convention(golden: Golden) -> None:
    """1. The indexer rotates half-split pairs, as the sister model's does. Rows of at most k positions look right."""
    fault = replaced(indexer_module, "rope_interleaved", half_split)
    catches(lambda: checks.check_layers(golden), fault)
    catches(lambda: checks.check_logits(golden), fault)
    with fault():
        checks.check_logits(golden, K)


def test_fix_lost_on_one_path(golden: Golden) -> None:
    """2. The same fault again, on one path only: every path that makes index keys or queries is compared."""

    def on_decode(original: Any, x: Tensor, rotation: Tensor) -> Tensor:
        return (half_split if x.shape[1] == 1 else original)(x, rotation)

    def on_chunks(original: Any, x: Tensor, rotation: Tensor) -> Tensor:
        return (half_split if 1 < x.shape[1] < K else original)(x, rotation)

    def in_mtp(original: Any, *args: Any, **options: Any) -> Tensor:
        with replaced(indexer_module, "rope_interleaved", half_split)():
            return original(*args, **options)

    decode, chunks = (wrapped(indexer_module, "rope_interleaved", f) for f in (on_decode, on_chunks))
    mtp = wrapped(MTPBlock, "predict", in_mtp)
    catches(lambda: checks.check_chunks(golden, [K + 8, 1, 1]), decode)
    catches(lambda: checks.check_chunks(golden, [K + 8, 5, 5]), chunks)
    catches(lambda: checks.check_mtp(golden), mtp)
    for fault in (decode, chunks, mtp):
        with fault():
            checks.check_prefill(golden)  # which is why prefill alone proves too little


def test_layout(golden: Golden) -> None:
    """3. The rotated part of an index head comes first; the main attention's comes last."""

    def keys(self: Indexer, x: Tensor, rope: Tensor) -> Tensor:
        k = self.k_norm(self.wk(x))
        return torch.cat((k[..., : -self.rotary], basic.rope_interleaved(k[..., -self.rotary :], rope)), dim=-1)

    def queries(self: Indexer, x: Tensor, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        q = self.wq_b(latent).unflatten(-1, (self.heads, -1))
        turned = basic.rope_interleaved(q[..., -self.rotary :], rope.unsqueeze(-2))
        w = self.weights_proj(x).float() * (self.heads * self.width) ** -0.5
        return torch.cat((q[..., : -self.rotary], turned), dim=-1), w

    assert golden.config.index_head_dim != 2 * golden.config.qk_rope_head_dim
    fault = together(replaced(Indexer, "keys", keys), replaced(Indexer, "queries", queries))
    catches(lambda: checks.check_layers(golden), fault)
    catches(lambda: checks.check_logits(golden), fault)


def test_wrong_tap_of_the_query_latent(golden: Golden) -> None:
    """4. The indexer reads the query latent after its norm. Without gains the selection could not tell (ReLU is
    homogeneous, and a norm only scales a row), so the fixture has gains, and scores are compared too."""
    owner = {m.indexer: m for m in golden.model.modules() if isinstance(m, MLA)}

    def unnormalised(original: Any, self: Indexer, x: Tensor, _latent: Tensor, rope: Tensor) -> Any:
        return original(self, x, owner[self].q_a_proj(x), rope)

    fault = wrapped(Indexer, "queries", unnormalised)
    catches(lambda: checks.check_layers(golden), fault)
    catches(lambda: checks.check_logits(golden), fault)


def test_wrong_norm_of_the_index_key(golden: Golden) -> None:
    """5. The key norm is a LayerNorm with bias, eps 1e-6: neither RMSNorm (with or without the bias) nor eps 1e-5."""
    layer_norm = basic.layer_norm
    assert golden.tensors["model.layers.0.self_attn.indexer.k_norm.bias"].abs().max() > 0.1
    catches(
        lambda: checks.check_layers(golden),
        replaced(basic, "layer_norm", lambda x, w, b, eps: basic.rms_norm(x, w, eps)),
        replaced(basic, "layer_norm", lambda x, w, b, eps: basic.rms_norm(x, w, eps) + b),
        replaced(basic, "layer_norm", lambda x, w, b, eps: layer_norm(x, w, torch.zeros_like(b), eps)),
        replaced(basic, "layer_norm", lambda x, w, b, eps: layer_norm(x, w, b, 1e-5)),
    )


def test_hidden_default_epsilon(golden: Golden) -> None:
    """6. The latent norms have their own epsilon, visible where latents are small; it is a switch of the config."""
    parts = [m for m in golden.model.modules() if isinstance(m, MLA)]
    q_norms, kv_norms = [m.q_a_layernorm for m in parts], [m.kv_a_layernorm for m in parts]
    main = [m for b in golden.model.blocks for m in (b.input_layernorm, b.post_attention_layernorm)]
    assert {m.eps for m in (*q_norms, *kv_norms)} == {1e-6}
    assert {m.eps for m in main} == {1e-5}
    catches(
        lambda: checks.check_logits(golden),
        together(*(replaced(m, "eps", 1e-5) for m in q_norms)),
        together(*(replaced(m, "eps", 1e-5) for m in kv_norms)),
        together(*(replaced(m, "eps", 1e-6) for m in main)),
    )
    other = tiny_model(1, latent_norm_eps=1e-5).blocks[0].self_attn
    assert other.q_a_layernorm.eps == other.kv_a_layernorm.eps == 1e-5


def test_missing_operation_in_the_scores(golden: Golden) -> None:
    """7. ReLU before the sum over heads, a sum and not the best head, and a mask that knows what was cached."""

    def scores(kind: str) -> Any:
        def faulty(q: Tensor, w: Tensor, k: Tensor, visible: Visibility) -> Tensor:
            dots = torch.einsum("btji,bsi->btjs", q, k[:, : visible.slots])
            dots = dots if kind == "no relu" else dots.relu()
            parts = w[..., None] * dots
            total = parts.amax(2) if kind == "per head" else parts.sum(2)
            return total.masked_fill(~visible.mask_BTS(), -torch.inf)

        return together(*(replaced(m, "index_scores", faulty) for m in (indexer_kernels, mla_module)))

    def square(self: Visibility) -> Tensor:  # the chunk's own triangle, as if nothing came before
        return torch.arange(self.slots) <= torch.arange(self.last_BT.shape[1])[None, :, None]

    catches(lambda: checks.check_layers(golden), scores("no relu"), scores("per head"))
    catches(lambda: checks.check_logits(golden), scores("no relu"), scores("per head"))
    with scores("neither")():
        checks.check_layers(golden)  # the stand-in itself is sound
    # Too few slots seem visible then, so that either the positions differ or -1 is read as one.
    error = (AssertionError, IndexError)
    catches(lambda: checks.check_chunks(golden, [20, 20, 20]), replaced(Visibility, "mask_BTS", square), error=error)
    with replaced(Visibility, "mask_BTS", square)():
        checks.check_logits(golden)  # one chunk is square


# --------------------------------------------------------------------------- masks, caches and ragged batches
@pytest.mark.parametrize("name", FORMS)
def test_mask_contract(golden: Golden, name: str) -> None:
    """8. Padding is masked on every path, and a boolean mask is never added to logits as a number."""

    def additive(original: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Any:
        return *original(q, k, v, mask)[:3], mask.unsqueeze(1).to(q.dtype)

    no_padding = replaced(
        Visibility, "mask_BTS", lambda self: torch.arange(self.slots) <= self.last_BT.clamp(min=0)[..., None]
    )
    with form(name):
        catches(lambda: checks.check_padding(golden, (30, 20), "left"), no_padding)
        catches(lambda: checks.check_padding(golden, (20, 9), "left"), no_padding)
        catches(lambda: checks.check_chunks(golden, [9, 8]), wrapped(attention, "_flash_inputs", additive))


def test_state_ownership(golden: Golden) -> None:
    """9. Index keys live in the cache with the latents: written, cropped and reordered together."""
    tokens = 2 * K

    @torch.no_grad()
    def draft_reject_continue() -> None:
        cache = golden.model.new_cache(2)
        golden.model(golden.ids[:, :tokens], cache=cache)
        golden.model(golden.ids[:, 10:14], cache=cache)  # a draft of four that is rejected but for its place
        cache.crop(tokens)
        more = [
            golden.model(golden.ids[:, at : at + n], cache=cache).logits for at, n in ((tokens, 3), (tokens + 3, 1))
        ]
        assert worst(torch.cat(more, dim=1), golden.out.logits[:, tokens : tokens + 4]) < LOGITS

    @torch.no_grad()
    def swap_rows() -> None:
        cache = golden.model.new_cache(2)
        golden.model(golden.ids[:, :tokens], cache=cache)
        cache.reorder(torch.tensor([1, 0, 1]))
        logits = golden.model(golden.ids[[1, 0, 1], tokens : tokens + 2], cache=cache).logits
        assert worst(logits, golden.out.logits[[1, 0, 1], tokens : tokens + 2]) < LOGITS

    def reset_when_many(original: Any, self: Cache, layer: int, slot: Any, start: Any, *values: Tensor) -> Any:
        if start and values[1].shape[1] > 1:
            self.layers[layer][1][:, :start] = 0
        return original(self, layer, slot, start, *values)

    def never_cropped(original: Any, self: Cache, layer: int, slot: Any, start: int, *values: Tensor) -> Any:
        rows, keys = original(self, layer, slot, start, *values)
        ends = self.__dict__.setdefault("ends", {})
        at = ends.get(layer, 0)
        self.layers[layer][1] = keys = keys.clone()
        keys[:, start : start + values[1].shape[1]] = 0
        keys[:, at : at + values[1].shape[1]] = values[1]
        ends[layer] = at + values[1].shape[1]
        return [rows, keys]

    def left_behind(original: Any, self: Cache, rows: Tensor) -> None:
        index_keys = [layer[1] for layer in self.layers]
        original(self, rows)
        for layer, keys in zip(self.layers, index_keys, strict=True):
            layer[1] = keys[[0, 1, 0]]

    catches(draft_reject_continue, wrapped(Cache, "write", reset_when_many), wrapped(Cache, "write", never_cropped))
    catches(swap_rows, wrapped(Cache, "reorder", left_behind))


def test_ragged_offsets(golden: Golden) -> None:
    """10. In a batch of unequal rows, each row's own length places its tokens, not the longest row's."""

    def longest_position(original: Any, *args: Any) -> Any:
        place = original(*args)
        return replace(place, position_BT=place.slot_BT.amax(0, keepdim=True).expand_as(place.slot_BT))

    def longest_interval(original: Any, *args: Any) -> Any:
        place = original(*args)
        last = place.visible.last_BT
        last = torch.where(last < 0, last, last.amax(0, keepdim=True))
        return replace(place, visible=replace(place.visible, last_BT=last))

    def slot_for_position(original: Any, self: GLM5, ids: Tensor, *args: Any) -> Any:
        place = original(self, ids, *args)
        return replace(place, position_BT=place.slot_BT) if ids.shape[1] == 1 else place

    faults = [wrapped(GLM5, "_place_ragged", f) for f in (longest_position, longest_interval, slot_for_position)]
    catches(lambda: checks.check_padding(golden, (50, 31), "right"), *faults[:2])
    catches(lambda: checks.check_padding(golden, (50, 31), "left"), faults[2])


def test_range_off_by_the_offset(golden: Golden) -> None:
    """11. After a cached prefix, ranges count the prefix and the new tokens: cut at every point around k."""
    causal = Visibility.causal.__func__  # type: ignore[attr-defined]

    def before_the_update(cls: type, batch: int, queries: int, offset: int = 0, device: Any = None) -> Visibility:
        out = causal(cls, batch, queries, offset, device)
        return replace(out, last_BT=out.last_BT - 1) if offset else out

    def of_the_chunk(cls: type, batch: int, queries: int, offset: int = 0, device: Any = None) -> Visibility:
        out = causal(cls, batch, queries, offset, device)
        return replace(out, slots=max(queries, K)) if offset else out

    catches(
        lambda: checks.check_every_split(golden),
        replaced(Visibility, "causal", classmethod(before_the_update)),
        replaced(Visibility, "causal", classmethod(of_the_chunk)),
        error=(AssertionError, RuntimeError, IndexError),
    )


def test_bound_of_short_inputs(golden: Golden) -> None:
    """12. k may exceed the positions there are: one token, one short of k, k, one more."""

    def every_length() -> None:
        for tokens in (1, K - 1, K, K + 1):
            checks.check_prefill(golden, tokens)

    def unbounded(scores: Tensor, k: int) -> Tensor:
        return scores.topk(k, dim=-1).indices.int().sort(-1).values

    def filled_up(scores: Tensor, k: int) -> Tensor:  # with slots that are not visible
        return scores.topk(min(k, scores.shape[-1]), dim=-1).indices.int().sort(-1).values

    catches(every_length, replaced(indexer_kernels, "stable_topk", unbounded), error=RuntimeError)
    catches(every_length, replaced(indexer_kernels, "stable_topk", filled_up), error=(AssertionError, RuntimeError))


def test_sentinels(golden: Golden) -> None:
    """13. A row that is all padding gives finite numbers and continues; an eos id inside a prompt is a token."""
    mask = torch.tensor([[1] * 30, [0] * 30])

    @torch.no_grad()
    def padded_row() -> None:
        for name in FORMS:
            with form(name):
                cache = golden.model.new_cache(2)
                logits = golden.model(golden.ids[:, :30], attention_mask=mask, cache=cache).logits
                assert bool(logits.isfinite().all())
                assert worst(logits[0], golden.out.logits[0, :30]) < LOGITS
                ids = torch.stack((golden.ids[0, 30:60], golden.ids[1, :30]))
                logits = golden.model(ids, cache=cache).logits
                assert worst(logits[0], golden.out.logits[0, 30:60]) < LOGITS
                assert worst(logits[1], golden.out.logits[1, :30]) < LOGITS

    def unguarded(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        logits = attention.tile_logits(q, k, mask, scale)
        return attention._mix(logits.softmax(-1).to(v.dtype), v), logits.logsumexp(-1)

    catches(padded_row, replaced(attention, "_flash_tile", unguarded))

    prompt = golden.ids[:, :K].clone()
    prompt[:, 0] = golden.config.pad_token_id
    prompt[:, 9] = golden.config.eos_token_id[1]
    theirs = show(golden.reference, prompt).logits

    @torch.no_grad()
    def eos_in_prompt() -> None:
        assert worst(golden.model(prompt).logits, theirs) < LOGITS

    def from_ids(original: Any, self: GLM5, ids: Tensor, given: Any, *rest: Any) -> Any:
        return original(self, ids, (ids != self.config.pad_token_id).long() if given is None else given, *rest)

    catches(eos_in_prompt, wrapped(GLM5, "_place", from_ids), error=(AssertionError, UserError))
