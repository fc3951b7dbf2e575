"""A calculator for the ledger's formulas, apart from the code that makes them, and configurations to try them on."""

from __future__ import annotations

import ast
import re
from fractions import Fraction

from hypothesis import strategies as st

from glm5.model.config import ModelConfig


def evaluate(formula: str) -> Fraction:
    """The value of a formula of digits, + − × / and brackets; anything else is an error."""
    text = formula.replace("×", "*").replace("−", "-").replace(",", "")
    assert re.fullmatch(r"[\d .+\-*/()]+", text), formula
    return _value(ast.parse(text.strip(), mode="eval").body, text.strip())


def _value(node: ast.expr, text: str) -> Fraction:
    if isinstance(node, ast.Constant):
        return Fraction(ast.get_source_segment(text, node) or "")
    assert isinstance(node, ast.BinOp), ast.dump(node)
    left, right = _value(node.left, text), _value(node.right, text)
    match node.op:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.Div():
            return left / right
    raise AssertionError(ast.dump(node))


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    """Small configurations of every kind: both attentions, all-dense to all-MoE, tied, biased, with and without MTP."""

    def small(low: int, high: int) -> int:
        return draw(st.integers(low, high))

    layers, rope = small(1, 5), 2 * small(1, 4)
    heads = draw(st.sampled_from([1, 2, 4, 6]))
    attention = draw(st.sampled_from(["mla", "gqa"]))
    groups = heads if attention == "mla" else draw(st.sampled_from([g for g in (1, 2, 4) if heads % g == 0]))
    experts = small(1, 8)
    types = draw(st.none() | st.lists(st.sampled_from(["dense", "sparse"]), min_size=layers, max_size=layers))
    return ModelConfig(
        attention=attention,
        vocab_size=small(8, 64),
        hidden_size=small(4, 40),
        num_hidden_layers=layers,
        max_position_embeddings=small(8, 500),
        num_attention_heads=heads,
        num_key_value_heads=groups,
        q_lora_rank=small(3, 20),
        kv_lora_rank=small(3, 20),
        qk_nope_head_dim=small(1, 12),
        qk_rope_head_dim=rope,
        v_head_dim=small(1, 12),
        head_dim=rope + 2 * small(0, 3),
        attention_bias=draw(st.booleans()),
        index_topk=small(1, 64),
        index_n_heads=small(1, 4),
        index_head_dim=rope + small(0, 5),
        intermediate_size=small(3, 20),
        moe_intermediate_size=small(3, 20),
        n_routed_experts=experts,
        n_shared_experts=small(0, 2),
        num_experts_per_tok=small(1, experts),
        first_k_dense_replace=small(0, 6),
        mlp_layer_types=None if types is None else tuple(types),
        num_nextn_predict_layers=small(0, 1),
        tie_word_embeddings=draw(st.booleans()),
        dtype=draw(st.sampled_from(["bfloat16", "float32"])),
        eos_token_id=(0,),
        pad_token_id=0,
    )
