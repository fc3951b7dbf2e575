"""The faults of `test_faults`, continued: ties, sums and precision, MTP, loaders, and what is counted (14 to 28)."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from glm5.kernels import attention
from glm5.kernels import indexer as indexer_kernels
from glm5.kernels.indexer import index_select
from glm5.kernels.topk import stable_topk
from glm5.kernels.visibility import Visibility
from glm5.ledger.memory import cache_bytes
from glm5.model import config as config_module
from glm5.model import mla as mla_module
from glm5.model import moe as moe_module
from glm5.model import weights
from glm5.model.cache import Cache, cache_widths
from glm5.model.config import ModelConfig
from glm5.model.glm5 import GLM5
from glm5.model.mla import MLA
from glm5.model.moe import MoE, Router
from glm5.model.mtp import MTPBlock
from glm5.model.presets import glm5
from glm5.model.trace import Trace
from glm5.utils.errors import CheckpointError, UserError
from support import checks, naive
from support.checks import LOGITS, form, worst
from support.faults import catches, replaced, together, wrapped
from support.golden import Golden
from support.tiny import fuse_experts, tiny_config, tiny_model, tiny_tensors, write_public_checkpoint

K = 24  # index_topk of the tiny model

pytestmark = pytest.mark.usefixtures("specification")  # faults are put into the plain PyTorch versions


# --------------------------------------------------------------------------- ties, sums and precision
def test_nondeterministic_ties() -> None:
    """14. ReLU makes plateaus of exact zeros. The earliest positions win, whatever the run; here every score ties."""
    model = tiny_model(2)
    for block in model.blocks:
        nn.init.zeros_(block.self_attn.indexer.wq_b.weight)
    ids = torch.randint(6, 320, (2, 3 * K), generator=torch.Generator().manual_seed(0))
    first = torch.arange(K, dtype=torch.int32)

    @torch.no_grad()
    def lowest_first() -> None:
        for sizes in ([3 * K], [K + 5, *[1] * 10]):
            cache, at = model.new_cache(2), 0
            for size in sizes:
                trace = Trace(scores=True)
                model(ids[:, at : at + size], cache=cache, trace=trace)
                at += size
                for scores, selected in zip(trace.index_scores, trace.selected, strict=True):
                    assert set(scores.unique().tolist()) <= {0.0, -torch.inf}
                    assert bool((selected[:, -1] == first).all())

    def highest_first(scores: Tensor, k: int) -> Tensor:
        flipped = stable_topk(scores.flip(-1), k)
        return torch.where(flipped < 0, -1, scores.shape[-1] - 1 - flipped).sort(-1).values.int()

    generator = torch.Generator().manual_seed(0)

    def racing(scores: Tensor, k: int) -> Tensor:
        return stable_topk(scores + 1e-9 * torch.rand(scores.shape, generator=generator), k)

    catches(lowest_first, *(replaced(indexer_kernels, "stable_topk", f) for f in (highest_first, racing)))


def test_silent_zeros_in_a_long_reduction() -> None:
    """15. A library product that returns zeros past some length: tiles over 4,000 keys against float64 over all."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 3, 2, 8, generator=generator)
    w = torch.rand(1, 3, 2, generator=generator)
    k = torch.randn(1, 4000, 8, generator=generator)

    def check(slots: int) -> None:
        visible = Visibility.causal(1, 3, offset=slots - 3)
        ours = index_select(q, w, k, visible, 64)
        mask = naive.interval_mask(visible, slots)
        exact = naive.index_scores(q, w, k[:, :slots]).masked_fill(~mask, -torch.inf)
        assert ours[0].tolist() == [naive.topk_positions(row, 64) for row in exact[0].tolist()]
        keys, values = torch.randn(2, 1, slots, 1, 8, generator=torch.Generator().manual_seed(1))
        mixed = attention.dense_attention(q, keys, values, visible, 0.1)
        assert worst(mixed, naive.attention(q, keys, values, mask, 0.1)) < 1e-5

    def zeros_in_scores(original: Any, *args: Any) -> Tensor:
        scores = original(*args)
        scores[..., 2048:] *= 0.0
        return scores.nan_to_num(-torch.inf)

    def zeros_in_values(original: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
        v = v.clone()
        v[:, 2048:] = 0
        return original(q, k, v, *rest)

    faults = [
        wrapped(indexer_kernels, "index_scores", zeros_in_scores),
        wrapped(attention, "_flash_tile", zeros_in_values),
    ]
    catches(lambda: check(4000), *faults)
    for fault in faults:
        with fault():
            check(2000)  # too short to see it


def test_scores_rounded_to_bf16(golden: Golden) -> None:
    """16. Head weights, queries and keys enter the score in fp32; rounded, they drift and tie."""

    def rounded(*which: int) -> Any:
        def scores(original: Any, *args: Any) -> Tensor:
            q_w_k = [t.bfloat16().float() if i in which else t for i, t in enumerate(args[:3])]
            return original(*q_w_k, *args[3:])

        return together(*(wrapped(m, "index_scores", scores) for m in (indexer_kernels, mla_module)))

    catches(lambda: checks.check_layers(golden), rounded(0), rounded(1), rounded(2))


def test_router_bias_in_bf16(golden: Golden) -> None:
    """17. Biases near 7 with a spread of 0.1 collapse in bf16. They stay fp32 through a cast of the model."""

    def collapsed(original: Any, logits: Tensor, bias: Tensor, **settings: Any) -> Any:
        return original(logits, bias.bfloat16().float(), **settings)

    biases = [t for name, t in golden.tensors.items() if name.endswith("e_score_correction_bias")]
    assert all(6 < b.mean() < 8 and b.std() < 0.2 for b in biases)
    catches(lambda: checks.check_layers(golden), wrapped(moe_module, "route", collapsed))

    def cast_model() -> None:
        model = tiny_model(1).to(torch.bfloat16)
        for layer in (1, 2):
            gate = model.blocks[layer].mlp.gate
            for tensor in (gate.weight, gate.e_score_correction_bias):
                assert tensor.dtype == torch.float32
            name = f"model.layers.{layer}.mlp.gate"
            assert torch.equal(gate.e_score_correction_bias, golden.tensors[f"{name}.e_score_correction_bias"])
            assert torch.equal(gate.weight, golden.tensors[f"{name}.weight"])

    catches(cast_model, replaced(Router, "_apply", nn.Module._apply))


def test_cancellation_in_the_router() -> None:
    """18. Scores near 1e-26 beside a bias of 7: recovered by subtracting the bias they are zero, and 0 / 0 is NaN."""
    config = tiny_config()
    layer = MoE(config)
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, 0.0, 0.1, generator=generator)
    nn.init.constant_(layer.gate.weight, -60.0 / config.hidden_size)
    layer.gate.e_score_correction_bias.fill_(7.0)

    @torch.no_grad()
    def check() -> None:
        trace = Trace()
        out = layer(torch.ones(1, 5, config.hidden_size), trace=trace)
        assert bool(out.isfinite().all())
        logits, weight, _ = trace.router[0]
        assert worst(logits, torch.full_like(logits, -60.0)) < 1e-3
        score = logits[:, :3].double().sigmoid()
        exact = 2.5 * score / (score.sum(-1, keepdim=True) + 1e-20)
        torch.testing.assert_close(weight, exact.float(), rtol=1e-5, atol=0)

    def subtracting(logits: Tensor, bias: Tensor, top_k: int, *, scaling: float, **_: Any) -> Any:
        choice = logits.sigmoid() + bias
        expert = choice.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
        weight = choice.gather(-1, expert) - bias[expert]
        return expert, weight / weight.sum(-1, keepdim=True) * scaling, choice - bias

    catches(check, replaced(moe_module, "route", subtracting))


# --------------------------------------------------------------------------- MTP
def predict(block: MTPBlock, embedded: Tensor, hidden: Tensor, *args: Any, **options: Any) -> Tensor:
    """One depth without its last norm."""
    return block(block.eh_proj(torch.cat((block.enorm(embedded), block.hnorm(hidden)), dim=-1)), *args, **options)


def test_wrong_tap_of_the_recycled_hidden(golden: Golden) -> None:
    """19. What the next depth reads is the normed hidden. The first depth, which recycles nothing, looks right."""
    before_norm: dict[
        int, tuple[Tensor, Tensor]
    ] = {}  # with what its key is the place of, so that nothing else lies there

    def recycled(self: MTPBlock, embedded: Tensor, hidden: Tensor, *args: Any, **options: Any) -> Tensor:
        _, raw = before_norm.get(hidden.untyped_storage().data_ptr(), (None, hidden))
        raw = predict(self, embedded, raw[:, : hidden.shape[1]], *args, **options)
        out = self.shared_head.norm(raw)
        before_norm[out.untyped_storage().data_ptr()] = out, raw
        return out

    fault = replaced(MTPBlock, "predict", recycled)
    catches(lambda: checks.check_mtp(golden), fault)
    catches(lambda: checks.check_mtp(golden, 2), fault)
    before_norm.clear()
    with fault():
        checks.check_mtp(golden, 1)


def test_missing_head_norm(golden: Golden) -> None:
    """20. The MTP block has its own norm before the shared head; neither none nor the trunk's will do."""

    def trunks(self: MTPBlock, *args: Any, **options: Any) -> Tensor:
        return golden.model.model.norm(predict(self, *args, **options))

    catches(
        lambda: checks.check_mtp(golden, 1),
        replaced(MTPBlock, "predict", predict),
        replaced(MTPBlock, "predict", trunks),
    )


def test_wrong_sharing_of_the_selection(golden: Golden) -> None:
    """21. The MTP block selects with its own indexer; the positions of the trunk's last layer are others."""
    last_layer = golden.config.num_hidden_layers - 1
    kept: list[Tensor] = []

    def shared(original: Any, self: MLA, *args: Any) -> Any:
        selected = original(self, *args)
        if self.layer == last_layer:
            kept[:] = [selected]
        elif self.layer > last_layer:
            trace: Trace = args[-1]
            selected = kept[0][:, : selected.shape[1]]
            trace.selected[-1] = selected
        return selected

    catches(lambda: checks.check_mtp(golden, 1), wrapped(MLA, "_select", shared))


# --------------------------------------------------------------------------- loaders and configuration
def test_loader_loses_or_invents_tensors(tmp_path: Path) -> None:
    """22. Every tensor on disk is in the model and the reverse, MTP's included, there and back; the embedding and
    head that MTP shares are not on disk a second time and are not expected there."""
    written = write_public_checkpoint(tmp_path / "public", seed=1)

    def round_trip() -> None:
        model = weights.load_model(tmp_path / "public")
        weights.save_model(model, tmp_path / "ours", overwrite=True)
        again: dict[str, Tensor] = {}
        for file in (tmp_path / "ours").glob("*.safetensors"):
            again |= load_file(file)
        assert set(again) == set(written)
        assert all(torch.equal(again[name], tensor) for name, tensor in written.items())
        assert not any(name.startswith("model.layers.3.") and "embed" in name for name in again)

    def without_mtp(original: Any, model: GLM5) -> Any:
        return ((name, tensor) for name, tensor in original(model) if ".layers.3." not in name)

    def with_shared(original: Any, model: GLM5) -> Any:
        yield from original(model)
        yield "model.layers.3.embed_tokens.weight", model.model.embed_tokens.weight.clone()

    catches(round_trip, *(wrapped(weights, "disk_tensors", f) for f in (without_mtp, with_shared)))
    with wrapped(weights, "disk_tensors", with_shared)():
        weights.save_model(weights.load_model(tmp_path / "public"), tmp_path / "ours", overwrite=True)
    with pytest.raises(CheckpointError, match=r"extra: model\.layers\.3\.embed_tokens\.weight"):
        weights.load_model(tmp_path / "ours")


def test_loader_drops_what_it_does_not_know(tmp_path: Path) -> None:
    """23. Experts apart and experts fused both load; experts by any other name are an error, not random weights."""
    write_public_checkpoint(tmp_path / "apart", seed=1, shards=1)
    tensors = tiny_tensors(1)
    for name, renamed in (("fused", fuse_experts(tensors)), ("packed", {})):
        (tmp_path / name).mkdir()
        for key, tensor in tensors.items():
            if name == "packed":
                renamed[key.replace("gate_proj", "w1") if ".experts." in key else key] = tensor
        save_file({k: t.contiguous() for k, t in renamed.items()}, str(tmp_path / name / "model.safetensors"))
        (tmp_path / name / "config.json").write_text((tmp_path / "apart" / "config.json").read_text())
    sound = tiny_model(1).state_dict()

    def check() -> None:
        for name in ("apart", "fused"):
            loaded = weights.load_model(tmp_path / name).state_dict()
            assert all(torch.equal(loaded[key], tensor) for key, tensor in sound.items())
        try:
            weights.load_model(tmp_path / "packed")
        except CheckpointError as error:
            lines = str(error).splitlines()
            assert sum("missing: " in line and "gate_proj" in line for line in lines) == 3 * 10
            assert sum("extra: " in line and "w1" in line for line in lines) == 3 * 10
        else:
            raise AssertionError("unknown names were dropped in silence")

    def lenient(path: Path, model: GLM5, stored: dict[str, Any], problems: list[str]) -> dict[str, str]:
        fused = {o: o for o in model.state_dict() if o in stored}
        apart = {n: o for o, t in model.state_dict().items() if o not in fused for n, _ in weights.public_tensors(o, t)}
        for name in set(stored) - set(fused) - set(apart):
            del stored[name]
        return fused | apart

    catches(check, replaced(weights, "_fit", lenient))


def test_mixed_representation_in_the_cache(golden: Golden) -> None:
    """24. A fast path for short prompts that caches index keys in another basis shows only once decode passes k."""
    width = golden.config.index_head_dim
    basis = torch.linalg.qr(torch.randn(width, width, generator=torch.Generator().manual_seed(0)))[0]

    def fast_path(original: Any, self: Cache, layer: int, slot: Any, start: int, rows: Tensor, keys: Tensor) -> Any:
        short = start + keys.shape[1] <= K
        return original(self, layer, slot, start, rows, keys @ basis if short else keys)

    fault = wrapped(Cache, "write", fast_path)
    catches(lambda: checks.check_chunks(golden, [K - 5, *[1] * 15]), fault)
    with fault():
        checks.check_chunks(golden, [K - 5, *[1] * 5])  # still within k
        checks.check_chunks(golden, [K + 5, *[1] * 15])  # never on the fast path


def test_path_mismatch(golden: Golden) -> None:
    """25. The absorbed form on the latent rows and the expanded form on expanded keys are one function."""

    @torch.no_grad()
    def both_forms_agree() -> None:
        outs = []
        for name in ("expanded", "absorbed"):
            with form(name):
                chunks = checks.in_chunks(golden.model, golden.ids, [10, 30, *[1] * 6, 32])
                outs += [golden.model(golden.ids).logits, golden.model(golden.ids, sparse=False).logits, chunks]
        for expanded, absorbed in zip(outs[:3], outs[3:], strict=True):
            assert worst(expanded, absorbed) < LOGITS
        assert worst(outs[0], golden.out.logits) < LOGITS

    def other_columns(original: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        return original(q, k, k[..., -v.shape[-1] :] if k.shape[2] == 1 else v, *rest)

    def unnormalised(original: Any, self: MLA, rows: Tensor) -> Any:
        return original(self, rows * 1.01)

    catches(
        both_forms_agree,
        together(*(wrapped(mla_module, f"{n}_attention", other_columns) for n in ("dense", "sparse"))),
        wrapped(MLA, "_expand", unnormalised),
    )


def test_theta_only_nested(golden: Golden) -> None:
    """26. RoPE's base stands in rope_parameters alone; a default of 10,000 gives another model. A config without any
    is refused."""
    public = json.loads((golden.directory / "config.json").read_text())
    assert "rope_theta" not in public
    assert public["rope_parameters"]["rope_theta"] == 1e6

    @torch.no_grad()
    def check() -> None:
        config = ModelConfig.load(golden.directory)
        assert config.rope_theta == 1e6
        model = GLM5(config, seed=None)
        model.load_state_dict(golden.model.state_dict())
        assert worst(model(golden.ids).logits, golden.out.logits) < LOGITS

    catches(check, replaced(config_module, "_read_rope_theta", lambda public: public.get("rope_theta", 10_000.0)))
    with pytest.raises(UserError, match="rope_theta"):
        ModelConfig.from_dict({k: v for k, v in public.items() if k != "rope_parameters"})


def test_cache_accounting(golden: Golden) -> None:
    """27. A token's cache is latent, rotary key and index key: 704 elements a layer in GLM-5, 107.25 KiB over 78
    layers in bf16. What is counted is what is allocated."""

    @torch.no_grad()
    def check() -> None:
        config = golden.config
        cache = golden.model.new_cache(2, capacity=50)
        golden.model(golden.ids[:, :40], cache=cache)
        per_token = 4 * (28 + 12 + 26) * 4  # fp32; three layers and the MTP block
        assert cache.nbytes() == 80 * per_token
        assert cache.nbytes(used=False) == 100 * per_token
        assert cache.nbytes(used=False) == sum(t.untyped_storage().nbytes() for layer in cache.layers for t in layer)
        assert per_token == cache_bytes(config, "fp32").total * config.num_cache_layers
        assert sum(cache_widths(glm5())) == 512 + 64 + 128
        trunk = 78 * cache_bytes(glm5(), "bf16").total
        assert trunk == 2 * 78 * sum(cache_widths(glm5())) == 107.25 * 1024

    def no_index_keys(original: Any, self: Cache, *, used: bool = True) -> int:
        rows_only = SimpleNamespace(
            layers=[layer[:1] for layer in self.layers],
            length_B=self.length_B,
            batch=self.batch,
            capacity=self.capacity,
        )
        return original(rows_only, used=used)

    catches(check, wrapped(Cache, "nbytes", no_index_keys))


def test_sparse_that_is_secretly_dense(golden: Golden) -> None:
    """28. Beyond k, sparse attention must differ from dense, or no test of it means anything; up to k it must not."""

    @torch.no_grad()
    def check() -> None:
        sparse, dense = golden.model(golden.ids).logits, golden.model(golden.ids, sparse=False).logits
        assert worst(sparse[:, :K], dense[:, :K]) < LOGITS
        assert (sparse - dense)[:, K + 8 :].abs().amax(-1).median() > 1e-2
        assert worst(dense, golden.out.logits) > 0.1  # and the reference's is the sparse one

    inactive = replaced(MLA, "_select", lambda *_: None)
    catches(check, inactive)
    catches(lambda: checks.check_logits(golden), inactive)
