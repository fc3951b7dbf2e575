"""A small GLM-5 in which every width differs and no gain is one and no bias zero, so that a confused axis, a skipped
norm or a dropped bias changes the result. Its public checkpoint is written here without the package's own loader, so
that loader and fixture can disagree.

    tiny_config() -> ModelConfig         tiny_tensors(seed) -> {public name: fp32 tensor}
    tiny_model(seed) -> GLM5             write_public_checkpoint(directory, seed, dtype) -> what was written
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from glm5.model.config import ModelConfig
from glm5.model.glm5 import GLM5


def tiny_config(**changes: Any) -> ModelConfig:
    """Three layers (one dense) and the MTP block, 10 experts of which 3 work, top-k of 24."""
    sizes: dict[str, Any] = dict(
        vocab_size=320,
        hidden_size=48,
        num_hidden_layers=3,
        max_position_embeddings=1024,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=40,
        kv_lora_rank=28,
        qk_nope_head_dim=20,
        qk_rope_head_dim=12,
        v_head_dim=18,
        index_topk=24,
        index_n_heads=6,
        index_head_dim=26,
        intermediate_size=88,
        moe_intermediate_size=36,
        n_routed_experts=10,
        num_experts_per_tok=3,
        first_k_dense_replace=1,
        dtype="float32",
        eos_token_id=(3, 4, 5),
        pad_token_id=3,
    )
    return ModelConfig(**{**sizes, **changes})


def tiny_tensors(seed: int = 0, **changes: Any) -> dict[str, Tensor]:
    """Every tensor of the public layout, fp32, one generator in a fixed order. MLA only."""
    c = tiny_config(**changes)
    generator = torch.Generator().manual_seed(seed)
    out: dict[str, Tensor] = {}

    def linear(name: str, rows: int, columns: int, gain: float = 1.0, bias: bool = False) -> None:
        out[f"{name}.weight"] = torch.randn(rows, columns, generator=generator) * gain / columns**0.5
        if bias:
            out[f"{name}.bias"] = 0.1 * torch.randn(rows, generator=generator)

    def norm(name: str, width: int) -> None:
        out[f"{name}.weight"] = 1.0 + 0.2 * torch.randn(width, generator=generator)

    def swiglu(name: str, inner: int) -> None:
        linear(f"{name}.gate_proj", inner, c.hidden_size)
        linear(f"{name}.up_proj", inner, c.hidden_size)
        linear(f"{name}.down_proj", c.hidden_size, inner)

    out["model.embed_tokens.weight"] = 0.3 * torch.randn(c.vocab_size, c.hidden_size, generator=generator)
    for layer in range(c.num_cache_layers):
        block, attn = f"model.layers.{layer}", f"model.layers.{layer}.self_attn"
        # Small latents, so that a wrong epsilon in their norms shows.
        linear(f"{attn}.q_a_proj", c.q_lora_rank, c.hidden_size, 0.1, c.attention_bias)
        norm(f"{attn}.q_a_layernorm", c.q_lora_rank)
        linear(f"{attn}.q_b_proj", c.num_attention_heads * c.qk_head_dim, c.q_lora_rank, 2.0)
        linear(f"{attn}.kv_a_proj_with_mqa", c.latent_dim, c.hidden_size, 1.0, c.attention_bias)
        out[f"{attn}.kv_a_proj_with_mqa.weight"][: c.kv_lora_rank] *= 0.1
        norm(f"{attn}.kv_a_layernorm", c.kv_lora_rank)
        linear(f"{attn}.kv_b_proj", c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank)
        linear(f"{attn}.o_proj", c.hidden_size, c.num_attention_heads * c.v_head_dim, 1.0, c.attention_bias)
        linear(f"{attn}.indexer.wq_b", c.index_n_heads * c.index_head_dim, c.q_lora_rank)
        linear(f"{attn}.indexer.wk", c.index_head_dim, c.hidden_size, 0.1)
        norm(f"{attn}.indexer.k_norm", c.index_head_dim)
        out[f"{attn}.indexer.k_norm.bias"] = 0.2 * torch.randn(c.index_head_dim, generator=generator)
        linear(f"{attn}.indexer.weights_proj", c.index_n_heads, c.hidden_size)
        norm(f"{block}.input_layernorm", c.hidden_size)
        norm(f"{block}.post_attention_layernorm", c.hidden_size)
        if c.is_moe(layer):
            linear(f"{block}.mlp.gate", c.n_routed_experts, c.hidden_size)
            # As released: a large common offset with a small spread, which bf16 would destroy.
            bias = 7.0 + 0.1 * torch.randn(c.n_routed_experts, generator=generator)
            out[f"{block}.mlp.gate.e_score_correction_bias"] = bias
            for expert in range(c.n_routed_experts):
                swiglu(f"{block}.mlp.experts.{expert}", c.moe_intermediate_size)
            if c.n_shared_experts:
                swiglu(f"{block}.mlp.shared_experts", c.moe_intermediate_size * c.n_shared_experts)
        else:
            swiglu(f"{block}.mlp", c.intermediate_size)
        if layer >= c.num_hidden_layers:
            linear(f"{block}.eh_proj", c.hidden_size, 2 * c.hidden_size)
            for name in ("enorm", "hnorm", "shared_head.norm"):
                norm(f"{block}.{name}", c.hidden_size)
    norm("model.norm", c.hidden_size)
    if not c.tie_word_embeddings:
        linear("lm_head", c.vocab_size, c.hidden_size)
    return out


def fuse_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same weights under the names that the model has in memory: experts stacked, gate rows before up rows."""
    out: dict[str, Tensor] = {}
    parts: dict[str, dict[int, dict[str, Tensor]]] = {}
    for name, tensor in tensors.items():
        head, found, tail = name.partition(".mlp.experts.")
        if not found:
            out[name] = tensor
            continue
        expert, kind, _ = tail.split(".")
        parts.setdefault(head, {}).setdefault(int(expert), {})[kind] = tensor
    for head, experts in parts.items():
        rows = [experts[e] for e in range(len(experts))]
        gate_up = [torch.cat((r["gate_proj"], r["up_proj"])) for r in rows]
        out[f"{head}.mlp.experts.gate_up_proj"] = torch.stack(gate_up)
        out[f"{head}.mlp.experts.down_proj"] = torch.stack([r["down_proj"] for r in rows])
    return out


def tiny_model(seed: int = 0, **changes: Any) -> GLM5:
    """The model that holds `tiny_tensors(seed)`, fp32, in eval mode."""
    model = GLM5(tiny_config(**changes), seed=None)
    tensors = fuse_experts(tiny_tensors(seed, **changes))
    if model.config.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model.load_state_dict(tensors)
    return model.eval()


def write_public_checkpoint(
    directory: str | Path, seed: int = 0, dtype: torch.dtype = torch.float32, *, shards: int = 2, **changes: Any
) -> dict[str, Tensor]:
    """Write `tiny_tensors(seed)` as published: config.json, `shards` files and their index (one file: no index).

    The router's bias stays fp32 on disk, everything else is `dtype`. Returns the tensors as written.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config = tiny_config(**changes, dtype=str(dtype).removeprefix("torch."))
    written = {
        name: (t if name.endswith("e_score_correction_bias") else t.to(dtype)).contiguous()
        for name, t in tiny_tensors(seed, **changes).items()
    }
    (directory / "config.json").write_text(json.dumps(config.to_dict(), indent=1))
    names = sorted(written)
    weight_map: dict[str, str] = {}
    for i in range(shards):
        file = "model.safetensors" if shards == 1 else f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = names[i * len(names) // shards : (i + 1) * len(names) // shards]
        save_file({name: written[name] for name in part}, str(directory / file), metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    if shards > 1:
        total = sum(t.numel() * t.element_size() for t in written.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    return written
