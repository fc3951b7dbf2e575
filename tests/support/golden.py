"""Reference outputs, made afresh in the tests: the public implementation runs the checkpoint of `tiny`.

transformers' `GlmMoeDsaForCausalLM` loads the public files and shows here what it doesn't return: index scores,
selected positions, router outputs. It knows no MTP, so its decoder layer is put into the fusion that DeepSeek-V3
describes (`reference_mtp`). Two implementations may round a close decision differently and then differ wholly, so
`decided_ids` searches for ids whose every top-k and router decision is clear by a margin: on those, plain closeness
is a fair demand.

    fixture = make(directory)  ->  Golden(model, reference, ids, out, mtp)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from glm5.model.config import ModelConfig
from glm5.model.glm5 import GLM5
from support.tiny import fuse_experts, tiny_config, tiny_model, write_public_checkpoint

# Rounding moves a score by at most about 1e-5 here; every decision of `decided_ids` is clearer than this.
MARGIN = 2e-4


@dataclass
class Shown:
    """What one pass of the reference computed. Scores are -inf outside the causal mask (and at padding)."""

    logits: Tensor
    hidden: list[Tensor]
    scores: list[Tensor] = field(default_factory=list)
    selected: list[Tensor] = field(default_factory=list)
    router: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)


class _TopkInputs(TorchFunctionMode):
    """Keeps what `topk` is given while active."""

    def __init__(self, kept: list[Tensor]) -> None:
        super().__init__()
        self.kept = kept

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") == "topk":
            self.kept.append(args[0].detach().clone())
        return function(*args, **(kwargs or {}))


class Watch:
    """`with Watch(layers) as seen:` collects scores, selections and router outputs of the reference's layers."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.layers = layers
        self.scores: list[Tensor] = []
        self.selected: list[Tensor] = []
        self.router: list[tuple[Tensor, Tensor, Tensor]] = []

    def __enter__(self) -> Watch:
        self.hooks = []
        for layer in self.layers:
            self._wrap(layer.self_attn.indexer)
            if hasattr(layer.mlp, "gate"):
                self.hooks.append(layer.mlp.gate.register_forward_hook(self._routed))
        return self

    def __exit__(self, *_: Any) -> None:
        for hook in self.hooks:
            hook.remove()
        for layer in self.layers:
            del layer.self_attn.indexer.forward  # the class's own method shows again

    def _wrap(self, indexer: nn.Module) -> None:
        original = indexer.forward

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            with _TopkInputs(self.scores):
                chosen = original(*args, **kwargs)
            # A masked slot holds -inf, or the lowest float; beyond any real score either way.
            self.scores[-1].masked_fill_(self.scores[-1] < -1e30, -torch.inf)
            self.selected.append(chosen.clone())
            return chosen

        indexer.forward = forward  # type: ignore[method-assign]

    def _routed(self, _module: nn.Module, _args: Any, out: tuple[Tensor, ...]) -> None:
        self.router.append((out[0].clone(), out[1].clone(), out[2].clone()))


def load_reference(directory: str | Path, dtype: torch.dtype = torch.float32, attention: str = "eager") -> Any:
    """transformers' model of a public checkpoint; the MTP block stays unread."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = transformers.GlmMoeDsaForCausalLM.from_pretrained(
        str(directory), dtype=dtype, attn_implementation=attention, local_files_only=True
    )
    if dtype != torch.float32:
        model.set_experts_implementation("eager")  # its grouped product wants widths that are multiples of 8
    return model.eval()


@torch.no_grad()
def show(reference: Any, ids: Tensor, mask: Tensor | None = None, cache: Any = None) -> Shown:
    """Run the reference. Left-padded rows count positions from their first real token, as ours do."""
    positions = {}
    if mask is not None:
        positions["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    with Watch(reference.model.layers) as seen:
        out = reference(
            ids,
            attention_mask=mask,
            cache=cache,
            use_cache=cache is not None,
            output_hidden_states=True,
            **positions,
        )
    return Shown(out.logits, list(out.hidden_states), seen.scores, seen.selected, seen.router)


def new_cache(reference: Any) -> Any:
    from transformers import DynamicCache

    return DynamicCache(config=reference.config)


@dataclass
class ReferenceMTP:
    """The reference's decoder layer as the MTP block, with the fusion's weights beside it."""

    layer: nn.Module
    enorm: nn.Module
    hnorm: nn.Module
    head_norm: nn.Module
    eh_proj: Tensor


@dataclass
class Depth:
    """One MTP depth: hidden state after the head norm, logits, index scores and selected positions."""

    hidden: Tensor
    logits: Tensor
    scores: Tensor
    selected: Tensor
    router: tuple[Tensor, Tensor, Tensor]


def build_mtp(reference: Any, tensors: dict[str, Tensor], config: ModelConfig) -> ReferenceMTP:
    """Fill a decoder layer of the reference, one past the trunk's, with the checkpoint's MTP block."""
    from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as public

    index = config.num_hidden_layers
    wider = type(reference.config)(**{**config.to_dict(), "num_hidden_layers": index + 1})
    wider._attn_implementation = "eager"
    prefix = f"model.layers.{index}."
    own = {k.removeprefix(prefix): v for k, v in fuse_experts(tensors).items() if k.startswith(prefix)}

    def norm(name: str) -> nn.Module:
        module = public.GlmMoeDsaRMSNorm(config.hidden_size, config.rms_norm_eps)
        module.load_state_dict({"weight": own.pop(f"{name}.weight")})
        return module

    norms = [norm(name) for name in ("enorm", "hnorm", "shared_head.norm")]
    eh_proj = own.pop("eh_proj.weight")
    layer = public.GlmMoeDsaDecoderLayer(wider, index)
    layer.load_state_dict(own)
    return ReferenceMTP(layer.eval(), *norms, eh_proj)


@torch.no_grad()
def show_mtp(reference: Any, mtp: ReferenceMTP, ids: Tensor, hidden: Tensor, depths: int = 3) -> list[Depth]:
    """Training form: depth d at position i fuses token i + d (first) with the normed hidden of depth d - 1 (second)."""
    out = []
    for depth in range(1, depths + 1):
        n = ids.shape[1] - depth
        token = mtp.enorm(reference.model.embed_tokens(ids[:, depth:]))
        fused = torch.cat((token, mtp.hnorm(hidden[:, :n])), dim=-1) @ mtp.eh_proj.T
        positions = torch.arange(n)[None]
        causal = torch.full((n, n), -torch.inf).triu(1).expand(ids.shape[0], 1, n, n)
        with Watch([mtp.layer]) as seen:
            block, _ = mtp.layer(
                fused,
                attention_mask=causal,
                position_ids=positions,
                position_embeddings=reference.model.rotary_emb(fused, position_ids=positions),
            )
        hidden = mtp.head_norm(block)
        out.append(Depth(hidden, reference.lm_head(hidden), seen.scores[0], seen.selected[0], seen.router[0]))
    return out


# --------------------------------------------------------------------------- ids whose decisions are clear
def topk_gaps(scores_BTS: Tensor, k: int) -> Tensor:
    """Per query, how far the last selected score lies above the first rejected; inf where nothing is rejected."""
    if scores_BTS.shape[-1] <= k:
        return torch.full(scores_BTS.shape[:2], torch.inf)
    ordered = scores_BTS.sort(-1, descending=True).values
    return torch.where(ordered[..., k].isinf(), torch.inf, ordered[..., k - 1] - ordered[..., k])


def router_gaps(logits_NE: Tensor, bias_E: Tensor, top_k: int) -> Tensor:
    """The same for every token's experts."""
    ordered = (logits_NE.sigmoid() + bias_E).sort(-1, descending=True).values
    return ordered[:, top_k - 1] - ordered[:, top_k]


def decided_ids(
    reference: Any, mtp: ReferenceMTP, config: ModelConfig, batch: int, tokens: int, seed: int = 0, depths: int = 3
) -> Tensor:
    """Random ids [batch, tokens] of which every prefix has clear decisions, in the trunk and at every MTP depth.

    A decision at position p reads no token after p (an MTP decision of depth d none after p + d), so the first
    unclear one is mended by drawing that last token anew, and nothing before it changes.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randint(max(config.eos_token_id) + 1, config.vocab_size, shape, generator=generator)

    ids = draw(batch, tokens)
    gates = [layer.mlp.gate for layer in (*reference.model.layers, mtp.layer) if hasattr(layer.mlp, "gate")]
    for _ in range(50 * tokens):
        trunk = show(reference, ids)
        clear = torch.full((batch, tokens), torch.inf)
        for scores in trunk.scores:
            clear = clear.minimum(topk_gaps(scores, config.index_topk))
        for gate, (logits, _, _) in zip(gates, trunk.router, strict=False):
            gaps = router_gaps(logits, gate.e_score_correction_bias, config.num_experts_per_tok)
            clear = clear.minimum(gaps.view(batch, tokens))
        for depth, shown in enumerate(show_mtp(reference, mtp, ids, trunk.hidden[-1], depths), 1):
            bias = gates[-1].e_score_correction_bias
            gaps = router_gaps(shown.router[0], bias, config.num_experts_per_tok).view(batch, -1)
            gaps = gaps.minimum(topk_gaps(shown.scores, config.index_topk))
            clear[:, depth:] = clear[:, depth:].minimum(gaps)
        unclear = clear < MARGIN
        if not unclear.any():
            return ids
        for row in range(batch):
            if unclear[row].any():
                ids[row, int(unclear[row].int().argmax())] = draw(1)
    raise AssertionError("no ids with clear decisions found")


# --------------------------------------------------------------------------- all of it
@dataclass
class Golden:
    """Our model and the reference on one checkpoint, and the reference's outputs on decided ids [2, 3 k + 6]."""

    directory: Path
    config: ModelConfig
    tensors: dict[str, Tensor]
    model: GLM5
    reference: Any
    mtp: ReferenceMTP
    ids: Tensor
    out: Shown
    mtp_out: list[Depth]


def make(directory: Path, *, seed: int = 1, batch: int = 2, tokens: int | None = None) -> Golden:
    """Write a checkpoint under `directory` and run the reference on it."""
    tensors = write_public_checkpoint(directory, seed)
    config = tiny_config()
    reference = load_reference(directory)
    mtp = build_mtp(reference, tensors, config)
    ids = decided_ids(reference, mtp, config, batch, 3 * config.index_topk + 6 if tokens is None else tokens)
    out = show(reference, ids)
    return Golden(
        directory,
        config,
        tensors,
        tiny_model(seed),
        reference,
        mtp,
        ids,
        out,
        show_mtp(reference, mtp, ids, out.hidden[-1]),
    )
