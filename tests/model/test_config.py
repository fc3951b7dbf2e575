"""The configuration: the public layout both ways, the rules and the names in their messages, and the presets."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5.model.config import ModelConfig
from glm5.model.presets import PRESETS, VARIANTS, glm5, gqa_8, mini, mla_192, mla_256, nano, preset
from glm5.utils.errors import ConfigError, FileError
from support.ledger import configs

# GLM-5's config.json, as the publisher wrote it (architectures and versions included).
PUBLISHED: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "eos_token_id": [154820, 154827, 154829],
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "head_dim": 64,
    "hidden_size": 6144,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_topk": 2048,
    "indexer_rope_interleave": True,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "kv_lora_rank": 512,
    "max_position_embeddings": 202752,
    "model_type": "glm_moe_dsa",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 78,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 154820,
    "pretraining_tp": 1,
    "q_lora_rank": 2048,
    "qk_head_dim": 256,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_interleave": True,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "transformers_version": "5.0.2.dev0",
    "use_cache": True,
    "v_head_dim": 256,
    "vocab_size": 154880,
}


def changed(**changes: Any) -> dict[str, Any]:
    return {**PUBLISHED, **changes}


def without(*names: str) -> dict[str, Any]:
    return {k: v for k, v in PUBLISHED.items() if k not in names}


# --------------------------------------------------------------------------- the public layout
def test_published_file_is_the_glm5_preset() -> None:
    assert ModelConfig.from_dict(PUBLISHED) == glm5() == ModelConfig()


def test_published_fields_come_back_unchanged() -> None:
    written = ModelConfig.from_dict(PUBLISHED).to_dict()
    for name, value in PUBLISHED.items():
        assert written[name] == value, name
    assert set(written) - set(PUBLISHED) == {"attention", "latent_norm_eps"}


def test_unknown_fields_survive_the_round_trip() -> None:
    public = changed(quantization_config={"fmt": "e4m3"}, note=None, _name_or_path="x", bos_token_id=7)
    again = ModelConfig.from_dict(ModelConfig.from_dict(public).to_dict()).to_dict()
    for name in ("quantization_config", "note", "_name_or_path", "bos_token_id"):
        assert again[name] == public[name]


@settings(max_examples=60, deadline=None)
@given(configs())
def test_any_configuration_survives_json(config: ModelConfig) -> None:
    again = ModelConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config
    assert hash(again) == hash(config)


def test_transformers_reads_what_is_written() -> None:
    import transformers

    for config in (glm5(), nano(n_group=4, topk_group=2, attention_bias=True, tie_word_embeddings=True)):
        public = transformers.AutoConfig.for_model(**config.to_dict())
        for name in (
            "hidden_size",
            "num_hidden_layers",
            "q_lora_rank",
            "qk_head_dim",
            "index_topk",
            "n_routed_experts",
        ):
            assert getattr(public, name) == getattr(config, name)
        assert public.rope_parameters["rope_theta"] == config.rope_theta
        assert tuple(public.mlp_layer_types) == config.layer_types
        assert ModelConfig.from_dict(public.to_dict()).replace(mlp_layer_types=None) == config


def test_files(tmp_path: Path) -> None:
    config = nano(num_hidden_layers=5)
    assert config.save(tmp_path) == tmp_path / "config.json"
    assert ModelConfig.load(tmp_path) == ModelConfig.load(tmp_path / "config.json") == config
    assert config.save(tmp_path / "new" / "other.json").name == "other.json"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "new"]


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, file_size_limit: Callable[[int], AbstractContextManager[None]]
) -> None:
    nano().save(tmp_path)
    before = (tmp_path / "config.json").read_bytes()
    with file_size_limit(100), pytest.raises(FileError):
        mini().save(tmp_path)
    assert (tmp_path / "config.json").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff\xfe", b""])
def test_files_that_hold_no_configuration(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        ModelConfig.load(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        ModelConfig.load(tmp_path / "nowhere")


# --------------------------------------------------------------------------- several names for one field
def test_aliases() -> None:
    public = {**without("n_routed_experts", "dtype"), "num_local_experts": 128, "torch_dtype": "torch.float16"}
    config = ModelConfig.from_dict(public)
    assert (config.n_routed_experts, config.dtype) == (128, "float16")
    assert "num_local_experts" not in config.to_dict()
    assert ModelConfig.from_dict(changed(num_experts=256)).n_routed_experts == 256
    with pytest.raises(ConfigError, match="n_routed_experts=256"):
        ModelConfig.from_dict(changed(num_experts=8))


def test_rope_base_nested_legacy_missing_and_contradicting() -> None:
    assert ModelConfig.from_dict({**without("rope_parameters"), "rope_theta": 5e5}).rope_theta == 5e5
    only_nested = changed(rope_parameters={"rope_theta": 123.0})
    assert ModelConfig.from_dict(only_nested).rope_theta == 123.0
    assert ModelConfig.from_dict(only_nested).to_dict()["rope_parameters"]["rope_theta"] == 123.0
    with pytest.raises(ConfigError, match="is missing"):
        ModelConfig.from_dict(without("rope_parameters"))
    with pytest.raises(ConfigError, match="contradicts"):
        ModelConfig.from_dict(changed(rope_theta=10_000))
    with pytest.raises(ConfigError, match="yarn"):
        ModelConfig.from_dict(changed(rope_parameters={"rope_theta": 1e6, "rope_type": "yarn"}))


def test_listed_layer_types() -> None:
    listed = ["dense"] * 2 + ["sparse"] * 76
    config = ModelConfig.from_dict(changed(mlp_layer_types=listed))
    assert config.layer_types == tuple(listed)
    assert config.to_dict()["mlp_layer_types"] == listed
    assert [config.is_moe(i) for i in (0, 1, 2, 77, 78)] == [False, False, True, True, True]


def test_absent_ids_and_absent_padding() -> None:
    config = ModelConfig.from_dict(changed(eos_token_id=None, pad_token_id=None))
    assert (config.eos_token_id, config.pad_token_id) == ((), None)
    assert ModelConfig.from_dict(changed(eos_token_id=5)).eos_token_id == (5,)
    assert ModelConfig.from_dict(without("eos_token_id")).eos_token_id == ()


def test_head_dim_is_derived_in_mla_and_read_in_gqa() -> None:
    assert ModelConfig.from_dict(changed(head_dim=192)).head_dim == 64
    assert gqa_8(glm5()).head_dim == 128


# --------------------------------------------------------------------------- rules
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", 0),
        ("hidden_size", -1),
        ("hidden_size", 6144.0),
        ("hidden_size", True),
        ("hidden_size", None),
        ("hidden_size", "6144"),
        ("num_nextn_predict_layers", 2),
        ("num_nextn_predict_layers", -1),
        ("n_shared_experts", -1),
        ("first_k_dense_replace", 1.5),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", float("nan")),
        ("routed_scaling_factor", float("inf")),
        ("qk_rope_head_dim", 63),
        ("index_head_dim", 62),
        ("num_key_value_heads", 8),
        ("num_key_value_heads", 5),
        ("num_experts_per_tok", 257),
        ("n_group", 3),
        ("n_group", 256),
        ("topk_group", 2),
        ("mlp_layer_types", ["dense"]),
        ("mlp_layer_types", ["conv"] * 78),
        ("mlp_layer_types", "dense"),
        ("mlp_layer_types", [["dense"]] * 78),
        ("eos_token_id", [154880]),
        ("eos_token_id", [-1]),
        ("eos_token_id", True),
        ("eos_token_id", {"a": 1}),
        ("pad_token_id", 154880),
        ("pad_token_id", 1.0),
        ("dtype", "float8"),
        ("dtype", 16),
        ("attention", "mha"),
        ("attention_bias", "no"),
        ("attention_bias", 1),
        ("tie_word_embeddings", None),
        ("norm_topk_prob", 0),
        ("initializer_range", -0.1),
        ("hidden_act", "gelu"),
        ("attention_dropout", 0.1),
        ("rope_interleave", False),
        ("indexer_rope_interleave", 0),
        ("scoring_func", "softmax"),
        ("topk_method", "greedy"),
        ("moe_layer_freq", 2),
        ("mlp_bias", True),
        ("model_type", "deepseek_v32"),
        ("index_topk_freq", 4),
        ("indexer_types", ["full", "shared"]),
        ("indexer_types", 3),
        ("index_topk_pattern", "FSS"),
        ("qk_head_dim", 192),
        ("rope_parameters", 1e6),
        ("rope_parameters", {"rope_theta": "1e6"}),
    ],
)
def test_a_broken_rule_names_field_and_value(field: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(changed(**{field: value}))
    assert caught.value.field in (field, "rope_theta")
    assert str(caught.value).startswith(f"{caught.value.field}={caught.value.value!r}: ")


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(sorted(PUBLISHED)),
    st.none()
    | st.booleans()
    | st.integers(-2, 300)
    | st.floats()
    | st.text(max_size=3)
    | st.lists(st.integers() | st.text(max_size=3), max_size=3)
    | st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)
def test_no_value_of_any_field_is_a_crash(field: str, value: object) -> None:
    """Whatever stands in a config.json, it is read or it is a ConfigError."""
    try:
        config = ModelConfig.from_dict(changed(**{field: value}))
    except ConfigError:
        return
    assert ModelConfig.from_dict(config.to_dict()) == config


def test_groups_must_hold_the_experts_they_promise() -> None:
    assert nano(n_group=4, topk_group=2).n_group == 4
    with pytest.raises(ConfigError, match="topk_group"):
        nano(n_group=8, topk_group=1, num_experts_per_tok=3)


def test_gqa_heads() -> None:
    with pytest.raises(ConfigError, match="num_key_value_heads"):
        gqa_8(nano()).replace(num_key_value_heads=4)
    with pytest.raises(ConfigError, match="head_dim"):
        gqa_8(nano()).replace(head_dim=33)
    with pytest.raises(ConfigError, match="qk_rope_head_dim=16"):
        gqa_8(nano()).replace(head_dim=8)


def test_replace_validates_again_and_leaves_the_original() -> None:
    config = nano()
    assert config.replace(num_hidden_layers=6).num_hidden_layers == 6
    assert config.num_hidden_layers == 4
    with pytest.raises(ConfigError):
        config.replace(num_hidden_layers=0)


def test_it_is_frozen() -> None:
    with pytest.raises(AttributeError):
        nano().hidden_size = 1  # type: ignore[misc]


# --------------------------------------------------------------------------- presets and variants
def test_derived_sizes_of_glm5() -> None:
    config = glm5()
    assert (config.qk_head_dim, config.latent_dim, config.num_cache_layers) == (256, 576, 79)
    assert config.layer_types == ("dense",) * 3 + ("sparse",) * 75


@pytest.mark.parametrize("name", PRESETS)
def test_presets_by_name_take_changes(name: str) -> None:
    assert preset(name) == PRESETS[name]()
    assert preset(name, index_topk=7).index_topk == 7


def test_an_unknown_preset_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="glm5, mini, nano"):
        preset("macro")


def test_small_presets_keep_every_part_of_glm5() -> None:
    for config in (mini(), nano()):
        assert config.attention == "mla"
        assert {"dense", "sparse"} == set(config.layer_types)
        assert config.num_nextn_predict_layers == 1
        assert config.n_shared_experts == 1
        assert config.index_topk < config.max_position_embeddings
        assert not config.tie_word_embeddings


def test_variants_of_glm5_are_the_reports() -> None:
    old, new, gqa = mla_192(glm5()), mla_256(glm5()), gqa_8(glm5())
    assert new == glm5()
    assert (old.num_attention_heads, old.qk_head_dim, old.v_head_dim, old.latent_dim) == (96, 192, 128, 576)
    assert (gqa.num_attention_heads, gqa.num_key_value_heads, gqa.head_dim) == (96, 8, 128)
    assert new.num_attention_heads * 3 == old.num_attention_heads * 2  # a third fewer


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_every_preset_differ_in_attention_alone(name: str, variant: str) -> None:
    base, changed_ = PRESETS[name](), VARIANTS[variant](PRESETS[name]())
    attention = {
        "attention",
        "num_attention_heads",
        "num_key_value_heads",
        "qk_nope_head_dim",
        "v_head_dim",
        "head_dim",
        "qk_head_dim",
    }
    ours, theirs = base.to_dict(), changed_.to_dict()
    assert {k for k in ours if ours[k] != theirs[k]} <= attention


def test_reading_a_configuration_needs_no_torch() -> None:
    code = "import sys, glm5.model.config, glm5.model.presets as p; p.nano(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_model_without_trained_indexers_is_dense() -> None:
    """What decides how `model(ids)` and `generate` attend when they are not told."""
    assert nano().sparse
    assert not gqa_8(nano()).sparse
    pretrained = ModelConfig.from_dict({**nano().to_dict(), "glm5_attention": "dense"})
    assert not pretrained.sparse
    assert not ModelConfig.from_dict(pretrained.to_dict()).sparse
    assert ModelConfig.from_dict({**pretrained.to_dict(), "glm5_attention": "sparse"}).sparse
