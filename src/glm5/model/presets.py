"""Named shapes: the published GLM-5, two small ones, and the attention variants of the report's Table 1.

A preset is a function that returns a `ModelConfig`. This module needs no torch. Read next: `glm5`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from glm5.model.config import ModelConfig
from glm5.utils.errors import ConfigError


def glm5(**changes: Any) -> ModelConfig:
    """The published GLM-5: 753,864,139,008 parameters, about 40B active a token."""
    return ModelConfig(**changes)


def mini(**changes: Any) -> ModelConfig:
    """About 1B parameters, for one GPU: GLM-5's head geometry and ratios at a fifth of its width."""
    return ModelConfig(
        **{
            **dict(
                vocab_size=32_768,
                hidden_size=1024,
                num_hidden_layers=12,
                max_position_embeddings=32_768,
                num_attention_heads=12,
                num_key_value_heads=12,
                q_lora_rank=512,
                kv_lora_rank=256,
                index_topk=512,
                index_n_heads=8,
                intermediate_size=4096,
                moe_intermediate_size=512,
                n_routed_experts=48,
                num_experts_per_tok=4,
                first_k_dense_replace=1,
                eos_token_id=(0,),
                pad_token_id=0,
            ),
            **changes,
        }
    )


def nano(**changes: Any) -> ModelConfig:
    """A few million parameters, for two CPU cores: every part of GLM-5, each small."""
    return ModelConfig(
        **{
            **dict(
                vocab_size=2048,
                hidden_size=256,
                num_hidden_layers=4,
                max_position_embeddings=65_536,
                num_attention_heads=4,
                num_key_value_heads=4,
                q_lora_rank=128,
                kv_lora_rank=64,
                qk_nope_head_dim=48,
                qk_rope_head_dim=16,
                v_head_dim=64,
                index_topk=128,
                index_n_heads=4,
                index_head_dim=32,
                intermediate_size=512,
                moe_intermediate_size=128,
                n_routed_experts=16,
                num_experts_per_tok=2,
                first_k_dense_replace=1,
                dtype="float32",
                eos_token_id=(0,),
                pad_token_id=0,
            ),
            **changes,
        }
    )


PRESETS: dict[str, Callable[..., ModelConfig]] = {"glm5": glm5, "mini": mini, "nano": nano}


def preset(name: str, **changes: Any) -> ModelConfig:
    """The preset called `name`, with fields changed.

    Raises:
        ConfigError: there is no such preset.
    """
    if name not in PRESETS:
        raise ConfigError("preset", name, f"must be one of {', '.join(PRESETS)}")
    return PRESETS[name](**changes)


# --------------------------------------------------------------------------- Table 1's attention variants
def mla_256(base: ModelConfig) -> ModelConfig:
    """MLA with GLM-5's geometry: head width 3/4 non-rotary and 1/4 rotary, values as wide as queries."""
    return base.replace(attention="mla")


def mla_192(base: ModelConfig) -> ModelConfig:
    """MLA with the earlier geometry: heads narrower by a quarter, and half as many again.

    For GLM-5 this gives 96 heads of 128 + 64 with values of 128, DeepSeek-V3's head; other widths scale alike.
    """
    heads = base.num_attention_heads * 3 // 2
    nope = base.qk_head_dim * 3 // 4 - base.qk_rope_head_dim
    return base.replace(
        attention="mla",
        num_attention_heads=heads,
        num_key_value_heads=heads,
        qk_nope_head_dim=nope,
        v_head_dim=nope,
    )


def gqa_8(base: ModelConfig) -> ModelConfig:
    """Grouped-query attention with 8 key-value groups, or as many as divide the heads of a small model.

    For GLM-5 this gives 96 heads of 128 and a cache of 2 x 8 x 128 = 2,048 elements a token and layer.
    """
    heads = base.num_attention_heads * 3 // 2
    groups = next(g for g in (8, 4, 2, 1) if g < heads and heads % g == 0)
    return base.replace(
        attention="gqa", num_attention_heads=heads, num_key_value_heads=groups, head_dim=base.qk_head_dim // 2
    )


VARIANTS: dict[str, Callable[[ModelConfig], ModelConfig]] = {
    "gqa-8": gqa_8,
    "mla-192": mla_192,
    "mla-256": mla_256,
}
