"""Parameter counts against the figures that the public checkpoint's index gives, and against themselves."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from glm5.ledger import params
from glm5.ledger.published import glm_4_5
from glm5.model.config import ModelConfig
from glm5.model.presets import glm5, gqa_8, mini, mla_192, nano
from support.ledger import configs


def test_checkpoint_groups_of_glm5() -> None:
    counted = params.parameters(glm5())
    assert counted.trunk == 742_008_052_992
    assert counted.embedding == counted.head == 951_582_720
    assert counted.mtp == 9_952_920_576
    assert counted.total == 753_864_139_008
    assert counted.fp32 == 19_456
    assert counted.total - counted.fp32 == 753_864_119_552
    assert counted.tensors == 59_870


@pytest.mark.parametrize(
    ("layer", "group", "elements"),
    [
        (0, "attention", 165_022_208),
        (0, "indexer", 9_371_904),
        (0, "norms", 12_288),
        (0, "dense_ffn", 226_492_416),
        (3, "routed_experts", 9_663_676_416),
        (3, "shared_experts", 37_748_736),
        (3, "router", 1_573_120),
        (77, "dense_ffn", 0),
        (78, "mtp_fusion", 75_497_472 + 18_432),
        (78, "routed_experts", 9_663_676_416),
    ],
)
def test_groups_of_one_layer_of_glm5(layer: int, group: params.Group, elements: int) -> None:
    assert params.by_group(params.layer_tensors(glm5(), layer))[group] == elements


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("self_attn.q_a_proj", (2048, 6144)),
        ("self_attn.q_b_proj", (16384, 2048)),
        ("self_attn.kv_a_proj_with_mqa", (576, 6144)),
        ("self_attn.kv_b_proj", (28672, 512)),
        ("self_attn.o_proj", (6144, 16384)),
        ("self_attn.indexer.wq_b", (4096, 2048)),
        ("self_attn.indexer.wk", (128, 6144)),
        ("self_attn.indexer.weights_proj", (32, 6144)),
        ("mlp.experts.*.gate_proj", (2048, 6144)),
        ("mlp.experts.*.down_proj", (6144, 2048)),
        ("mlp.gate", (256, 6144)),
    ],
)
def test_shapes_follow_the_public_checkpoint(name: str, shape: tuple[int, ...]) -> None:
    found = {t.name: t.shape for t in params.layer_tensors(glm5(), 5)}
    assert found[f"model.layers.5.{name}.weight"] == shape


def test_active_parameters_of_glm5() -> None:
    active = params.active_parameters(glm5())
    experts_unused = 248 * 3 * 6144 * 2048
    assert active.trunk == 742_008_052_992 - 75 * experts_unused == 39_881_563_392
    assert active.mtp == 9_952_920_576 - experts_unused == 591_234_048
    assert active.head == 951_582_720


def test_macs_leave_out_vectors_and_the_embedding() -> None:
    c = nano()
    vectors = 2 * 256 + 128 + 64 + 2 * 32  # block norms, latent norms, index key norm
    biases = 3 * 16
    active = params.active_parameters(c)
    assert active.macs == active.trunk - 4 * vectors - biases - 256 + 2048 * 256


def test_sizes_of_the_small_presets_are_what_their_docstrings_say() -> None:
    assert 0.9e9 < params.parameters(mini()).total < 1.2e9
    assert params.parameters(nano()).total < 10e6


def test_a_checkpoint_of_other_widths_has_the_elements_that_were_written() -> None:
    """A four-layer model saved by transformers in the public layout held 560,456 elements, 444,536 without MTP."""
    config = ModelConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=40,
        num_hidden_layers=4,
        first_k_dense_replace=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=48,
        kv_lora_rank=32,
        qk_nope_head_dim=24,
        qk_rope_head_dim=16,
        v_head_dim=20,
        n_routed_experts=8,
        num_experts_per_tok=2,
        index_n_heads=8,
        index_head_dim=28,
        eos_token_id=(3,),
        pad_token_id=3,
    )
    assert params.parameters(config).total == 560_456
    assert params.parameters(config.replace(num_nextn_predict_layers=0)).total == 444_536


def test_glm_4_5_has_its_published_size_when_mtp_counts_and_the_vocabulary_does_not() -> None:
    counted, active = params.parameters(glm_4_5()), params.active_parameters(glm_4_5())
    assert round((counted.trunk + counted.mtp) / 1e9) == 355
    assert round((active.trunk + active.mtp) / 1e9) == 32


def test_attention_bias_adds_to_the_down_projections_and_the_output() -> None:
    plain, biased = (params.parameters(nano(attention_bias=b)).total for b in (False, True))
    assert biased - plain == 5 * (128 + (64 + 16) + 256)
    gqa = gqa_8(nano())
    plain, biased = (params.parameters(gqa.replace(attention_bias=b)).total for b in (False, True))
    assert biased - plain == 5 * (6 * 32 + 2 * 2 * 32 + 256)


def test_a_tied_head_is_stored_once_and_used_twice() -> None:
    tied = nano(tie_word_embeddings=True)
    assert params.parameters(tied).head == 0
    assert params.parameters(nano()).total - params.parameters(tied).total == 2048 * 256
    assert params.active_parameters(tied).macs == params.active_parameters(nano()).macs


def test_shared_experts_widen_one_feed_forward_part() -> None:
    none, one, three = (params.parameters(nano(n_shared_experts=n)) for n in (0, 1, 3))
    blocks = 3 + 1
    assert one.total - none.total == blocks * 3 * 256 * 128
    assert three.total - none.total == 3 * (one.total - none.total)
    assert one.tensors - none.tensors == three.tensors - none.tensors == 3 * blocks


def test_listed_layer_types_win_over_the_count_of_dense_layers() -> None:
    listed = nano(mlp_layer_types=("sparse", "dense", "dense", "sparse"))
    names = {t.name for t in params.checkpoint_tensors(listed)}
    assert "model.layers.0.mlp.gate.weight" in names
    assert "model.layers.1.mlp.gate.weight" not in names
    assert "model.layers.2.mlp.up_proj.weight" in names
    assert "model.layers.4.mlp.gate.weight" in names  # the MTP block is MoE whatever the list says


def test_a_variant_without_mtp_and_without_indexer() -> None:
    config = gqa_8(nano(num_nextn_predict_layers=0))
    assert params.parameters(config).mtp == 0
    assert not any("indexer" in t.name or "eh_proj" in t.name for t in params.checkpoint_tensors(config))


def test_the_earlier_geometry_has_96_heads_of_192() -> None:
    shapes = {
        t.name.removeprefix("model.layers.0.self_attn."): t.shape for t in params.layer_tensors(mla_192(glm5()), 0)
    }
    assert shapes["q_b_proj.weight"] == (96 * 192, 2048)
    assert shapes["kv_b_proj.weight"] == (96 * (128 + 128), 512)


@settings(max_examples=60, deadline=None)
@given(configs())
def test_groups_and_parts_add_up(config: ModelConfig) -> None:
    counted = params.parameters(config)
    tensors = list(params.checkpoint_tensors(config))
    assert counted.total == params.count(tensors) == sum(params.by_group(tensors).values())
    assert len({t.name for t in tensors}) == len(tensors)
    active = params.active_parameters(config)
    assert 0 < active.trunk <= counted.trunk
    assert active.mtp <= counted.mtp


@settings(max_examples=30, deadline=None)
@given(configs())
def test_all_experts_active_means_all_parameters_active(config: ModelConfig) -> None:
    config = config.replace(num_experts_per_tok=config.n_routed_experts)
    counted, active = params.parameters(config), params.active_parameters(config)
    assert (active.trunk, active.mtp) == (counted.trunk, counted.mtp)
