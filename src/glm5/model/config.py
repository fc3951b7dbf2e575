"""The shape of a GLM-5: one frozen dataclass that reads and writes the public `config.json`.

Sources: the published config of GLM-5 and Table 10 of the report. Field names are the public ones, and two are ours:
`attention`, for the report's comparisons, and `latent_norm_eps`. This module needs no torch. Read next: `presets`,
then `glm5`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from glm5.utils.errors import ConfigError
from glm5.utils.files import file_errors, write_json

# Public fields that are kept on a round trip but that only one value of is implemented. `None` also passes.
_FIXED: dict[str, tuple[Any, str]] = {
    "hidden_act": ("silu", "only SwiGLU (silu) is defined for GLM-5"),
    "attention_dropout": (0.0, "GLM-5 trains without dropout"),
    "rope_interleave": (True, "GLM-5 rotates interleaved pairs; the half-split layout is another model's"),
    "scoring_func": ("sigmoid", "GLM-5 routes by sigmoid scores"),
    "topk_method": ("noaux_tc", "GLM-5 selects by score plus correction bias"),
    "moe_layer_freq": (1, "every layer after the dense ones is a MoE layer"),
    "mlp_bias": (False, "GLM-5's feed-forward layers have no bias"),
    "model_type": ("glm_moe_dsa", "another model family's checkpoint"),
    "index_topk_freq": (1, "sharing indices between layers came after GLM-5 and is not implemented"),
}
# Absent is true, as GLM-5 has it: interleaved pairs.
_INDEXER_ROPE = "indexer_rope_interleave"
# Public names for one field.
_ALIASES = {
    "num_experts": "n_routed_experts",
    "num_local_experts": "n_routed_experts",
    "torch_dtype": "dtype",
}
# Fields that a config.json may leave null.
_OPTIONAL = {"pad_token_id", "eos_token_id", "mlp_layer_types", "head_dim", "num_key_value_heads"}


@dataclass(frozen=True)
class ModelConfig:
    """Every size of a GLM-5 (widths in elements, counts in units). Defaults are the published GLM-5.

    Raises:
        ConfigError: at construction, when a field breaks a rule; it names the field, the value and the rule.
    """

    vocab_size: int = 154_880
    """Rows of the embedding: the tokenizer's ids, padded or not."""
    hidden_size: int = 6144
    """Width of the residual stream."""
    num_hidden_layers: int = 78
    """Layers of the trunk, without the MTP block."""
    max_position_embeddings: int = 202_752
    """Tokens that a context may hold."""

    attention: Literal["mla", "gqa"] = "mla"
    """mla is GLM-5's; gqa is the report's comparison (Table 1), with head_dim as its head width."""
    num_attention_heads: int = 64
    """Query heads."""
    num_key_value_heads: int = 64
    """Key heads of gqa; mla has as many as queries."""
    q_lora_rank: int = 2048
    """Width of the query latent."""
    kv_lora_rank: int = 512
    """Width of the latent that is cached."""
    qk_nope_head_dim: int = 192
    """Part of a query or key head that is not rotated."""
    qk_rope_head_dim: int = 64
    """Part that is rotated; the key's is shared by all heads."""
    v_head_dim: int = 256
    """Width of a value head."""
    head_dim: int = 64
    """Width of a head of gqa; of mla, as published, its rotated part."""
    attention_bias: bool = False
    """Biases on the down and output projections."""
    rope_theta: float = 1_000_000.0
    """Base of the rotary frequencies."""

    index_topk: int = 2048
    """Positions that each query attends to in sparse attention."""
    index_n_heads: int = 32
    """Heads of the lightning indexer."""
    index_head_dim: int = 128
    """Width of its heads and of its key."""

    intermediate_size: int = 12_288
    """Inner width of the dense layers."""
    moe_intermediate_size: int = 2048
    """Inner width of an expert."""
    n_routed_experts: int = 256
    """Experts that the router chooses from."""
    n_shared_experts: int = 1
    """Experts that always run."""
    num_experts_per_tok: int = 8
    """Experts that a token is sent to."""
    n_group: int = 1
    """Groups of experts; 1 chooses among all."""
    topk_group: int = 1
    """Groups that a token's experts may come from."""
    norm_topk_prob: bool = True
    """Make a token's weights sum to routed_scaling_factor."""
    routed_scaling_factor: float = 2.5
    """Factor on the routed experts' sum."""
    first_k_dense_replace: int = 3
    """Layers at the beginning that are dense, the rest being MoE."""
    mlp_layer_types: tuple[str, ...] | None = None
    """dense or sparse for each layer, in place of first_k_dense_replace."""

    num_nextn_predict_layers: int = 1
    """Multi-token-prediction blocks stored (1 or none), however many depths reuse it."""

    rms_norm_eps: float = 1e-5
    """Of the RMSNorms."""
    latent_norm_eps: float = 1e-6
    """Of the latents' norms: 1e-6 in transformers, 1e-5 in vLLM and SGLang."""

    tie_word_embeddings: bool = False
    """The head is the embedding."""
    initializer_range: float = 0.02
    """Standard deviation of initial matrices."""
    dtype: str = "bfloat16"
    """Of the weights."""
    eos_token_id: tuple[int, ...] = (154_820, 154_827, 154_829)
    """Ids that end a text or turn."""
    pad_token_id: int | None = 154_820
    """Id of padding."""

    # Fields of a config.json that this class does not interpret, kept for the round trip.
    extra: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False, hash=False)

    # ------------------------------------------------------------------ derived
    @property
    def half_split_indexer(self) -> bool:
        """The checkpoint that this was read from has indexers that rotate halves, as DeepSeek-V3.2's. Loading puts
        their rows into the order of interleaved pairs, which is what a model holds and saves."""
        return self.extra.get(_INDEXER_ROPE) is False

    @property
    def qk_head_dim(self) -> int:
        """Width of one query or key head: non-rotary plus rotary."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Elements that MLA caches per token and layer: latent plus shared rotary key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def layer_types(self) -> tuple[str, ...]:
        """Feed-forward kind ("dense" or "sparse") of every trunk layer."""
        if self.mlp_layer_types is not None:
            return self.mlp_layer_types
        dense = min(self.first_k_dense_replace, self.num_hidden_layers)
        return ("dense",) * dense + ("sparse",) * (self.num_hidden_layers - dense)

    @property
    def num_cache_layers(self) -> int:
        """Layers that hold a cache: the trunk and the MTP block."""
        return self.num_hidden_layers + self.num_nextn_predict_layers

    @property
    def sparse(self) -> bool:
        """Whether the indexer is trained: False for a GQA model, and for one that was only pretrained here.

        `glm5 pretrain` marks what it writes with `glm5_attention: "dense"`, since its indexers have learned nothing
        yet; `glm5 sparsify` turns the mark. Published checkpoints have no mark, and are sparse.
        """
        return self.attention == "mla" and self.extra.get("glm5_attention") != "dense"

    def is_moe(self, layer: int) -> bool:
        """Whether `layer` has routed experts; the MTP block (layer >= num_hidden_layers) always has."""
        return layer >= self.num_hidden_layers or self.layer_types[layer] == "sparse"

    def replace(self, **changes: Any) -> ModelConfig:
        """A copy with `changes`, validated again."""
        return replace(self, **changes)

    # ------------------------------------------------------------------ validation
    def __post_init__(self) -> None:
        positive = (
            "vocab_size hidden_size num_hidden_layers max_position_embeddings num_attention_heads "
            "num_key_value_heads q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim head_dim "
            "index_topk index_n_heads index_head_dim intermediate_size moe_intermediate_size n_routed_experts "
            "num_experts_per_tok n_group topk_group"
        ).split()
        for name in positive:
            value = getattr(self, name)
            self._check(name, _is_int(value) and 0 < value < 2**31, "must be a positive integer below 2^31")
        for name in ("num_hidden_layers", "n_routed_experts"):  # more would take minutes only to be listed
            self._check(name, getattr(self, name) <= 10_000, "must be at most 10000")
        for name in ("first_k_dense_replace", "num_nextn_predict_layers", "n_shared_experts"):
            value = getattr(self, name)
            self._check(name, _is_int(value) and 0 <= value < 2**31, "must be an integer of at least 0, below 2^31")
        for name in "rms_norm_eps latent_norm_eps rope_theta routed_scaling_factor initializer_range".split():
            value = getattr(self, name)
            self._check(name, _is_number(value) and value > 0, "must be a positive number")
        for name in ("attention_bias", "tie_word_embeddings", "norm_topk_prob"):
            self._check(name, isinstance(getattr(self, name), bool), "must be true or false")
        mtp, rotary, index = self.num_nextn_predict_layers, self.qk_rope_head_dim, self.index_head_dim
        self._check("num_nextn_predict_layers", mtp <= 1, "GLM-5 stores at most one, shared MTP block")
        self._check("attention", self.attention in ("mla", "gqa"), "must be 'mla' or 'gqa'")
        self._check("qk_rope_head_dim", rotary % 2 == 0, "must be even: RoPE rotates pairs")
        rule = f"must be at least qk_rope_head_dim={rotary}, which the indexer rotates"
        self._check("index_head_dim", index >= rotary, rule)
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        self._check("num_key_value_heads", heads % groups == 0, f"must divide num_attention_heads={heads}")
        if self.attention == "mla":
            # Derived in MLA (releases differ in what they print here); GQA alone reads it.
            object.__setattr__(self, "head_dim", rotary)
            self._check("num_key_value_heads", groups == heads, f"MLA has one per head: {heads}")
        else:
            self._check("head_dim", self.head_dim % 2 == 0, "must be even: RoPE rotates pairs")
            self._check("head_dim", self.head_dim >= rotary, f"must be at least qk_rope_head_dim={rotary}")
        self._check_experts()
        self._check_layer_types()
        self._check_ids()
        dtypes = ("float32", "bfloat16", "float16")
        self._check("dtype", self.dtype in dtypes, "must be float32, bfloat16 or float16")

    def _check_experts(self) -> None:
        experts, chosen, groups = self.n_routed_experts, self.num_experts_per_tok, self.n_group
        self._check("num_experts_per_tok", chosen <= experts, f"must be at most n_routed_experts={experts}")
        self._check("n_group", experts % groups == 0, f"must divide n_routed_experts={experts}")
        self._check("topk_group", self.topk_group <= groups, f"must be at most n_group={groups}")
        if groups > 1:
            each = experts // groups
            self._check("n_group", each >= 2, "each group needs at least 2 experts")
            rule = "the kept groups hold fewer experts than num_experts_per_tok"
            self._check("topk_group", self.topk_group * each >= chosen, rule)

    def _check_layer_types(self) -> None:
        kinds, n = self.mlp_layer_types, self.num_hidden_layers
        if kinds is None:
            return
        self._check("mlp_layer_types", isinstance(kinds, list | tuple), "must be a list")
        object.__setattr__(self, "mlp_layer_types", tuple(kinds))
        self._check("mlp_layer_types", len(kinds) == n, f"must list num_hidden_layers={n} entries")
        known = all(kind in ("dense", "sparse") for kind in kinds)
        self._check("mlp_layer_types", known, "entries are 'dense' or 'sparse'")

    def _check_ids(self) -> None:
        def inside(value: Any) -> bool:
            return _is_int(value) and 0 <= value < self.vocab_size

        given: Any = self.eos_token_id
        listed = given is None or _is_int(given) or isinstance(given, list | tuple)
        self._check("eos_token_id", listed, "must be one id, or a list of ids")
        object.__setattr__(self, "eos_token_id", (given,) if _is_int(given) else tuple(given or ()))
        within = f"lie in [0, vocab_size={self.vocab_size})"
        self._check("eos_token_id", all(map(inside, self.eos_token_id)), f"ids must {within}")
        padding = self.pad_token_id
        self._check("pad_token_id", padding is None or inside(padding), f"must be null or {within}")

    def _check(self, name: str, holds: bool, rule: str) -> None:
        if not holds:
            raise ConfigError(name, getattr(self, name), rule)

    # ------------------------------------------------------------------ config.json
    @classmethod
    def from_dict(cls, public: Mapping[str, Any]) -> ModelConfig:
        """Read the public layout. Unknown fields are kept in `extra`; see `to_dict`.

        Raises:
            ConfigError: a field has a value that this model does not implement, or RoPE's base is missing.
        """
        known = {f.name for f in fields(cls)} - {"extra"}
        values: dict[str, Any] = {}
        extra: dict[str, Any] = {}
        for key, value in public.items():
            name = _ALIASES.get(key, key)
            if name in known and name != "rope_theta":
                if name in values and values[name] != value:
                    raise ConfigError(key, value, f"contradicts its alias {name}={values[name]!r}")
                values[name] = value
            else:
                extra[key] = value
            if key in _FIXED and value is not None and value != _FIXED[key][0]:
                raise ConfigError(key, value, f"must be {_FIXED[key][0]!r}: {_FIXED[key][1]}")
            if key == _INDEXER_ROPE and not (value is None or isinstance(value, bool)):
                raise ConfigError(key, value, "must be true or false")
        _reject_shared_indexers(public)
        for name, value in values.items():
            if value is None and name not in _OPTIONAL:
                raise ConfigError(name, None, "is null; give it a value, or leave it out for GLM-5's own")
        values = {k: v for k, v in values.items() if v is not None or k == "pad_token_id"}
        values["rope_theta"] = _read_rope_theta(public)
        values.setdefault("eos_token_id", ())
        if isinstance(values.get("dtype"), str):
            values["dtype"] = values["dtype"].removeprefix("torch.")
        config = cls(**values, extra=extra)
        if public.get("qk_head_dim") not in (None, config.qk_head_dim):
            rule = f"must equal qk_nope_head_dim + qk_rope_head_dim = {config.qk_head_dim}"
            raise ConfigError("qk_head_dim", public["qk_head_dim"], rule)
        return config

    def to_dict(self) -> dict[str, Any]:
        """The public layout, which transformers reads; unknown fields of the source come back unchanged."""
        out: dict[str, Any] = {
            "architectures": ["GlmMoeDsaForCausalLM"],
            "model_type": "glm_moe_dsa",
            "hidden_act": "silu",
            "attention_dropout": 0.0,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "moe_layer_freq": 1,
            "ep_size": 1,
            "pretraining_tp": 1,
            "use_cache": True,
            "rope_interleave": True,
        }
        rope = self.extra.get("rope_parameters") or {"rope_type": "default"}
        out.update(self.extra)
        for f in fields(self):
            if f.name not in ("extra", "rope_theta"):
                out[f.name] = getattr(self, f.name)
        out["qk_head_dim"] = self.qk_head_dim
        out[_INDEXER_ROPE] = True
        out["eos_token_id"] = list(self.eos_token_id) or None
        out["mlp_layer_types"] = list(self.mlp_layer_types) if self.mlp_layer_types else None
        out["rope_parameters"] = {**rope, "rope_theta": self.rope_theta}
        for key in ("rope_theta", "torch_dtype", "rope_scaling"):
            out.pop(key, None)
        return {k: v for k, v in out.items() if v is not None or k in self.extra or k == "pad_token_id"}

    @classmethod
    def load(cls, path: str | Path) -> ModelConfig:
        """Read `config.json`, given the file or the directory that holds it.

        Raises:
            ConfigError: the file is missing or is not JSON, or a field is wrong.
            FileError: the file cannot be read.
        """
        path = Path(path)
        path = path / "config.json" if path.is_dir() else path
        if not path.exists():
            raise ConfigError("config.json", str(path), "no such file: give a checkpoint's directory")
        try:
            with file_errors(path, "read"):
                public = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as e:  # RecursionError: brackets in brackets by the thousand
            raise ConfigError("config.json", str(path), f"is not valid JSON ({e})") from None
        if not isinstance(public, dict):
            raise ConfigError("config.json", str(path), "must hold one JSON object")
        return cls.from_dict(public)

    def save(self, path: str | Path) -> Path:
        """Write `config.json` into the directory `path` (or to the file, if it ends in .json), atomically.

        Raises:
            FileError: the file cannot be written.
        """
        path = Path(path)
        path = path if path.suffix == ".json" else path / "config.json"
        write_json(path, self.to_dict())
        return path


def _read_rope_theta(public: Mapping[str, Any]) -> float:
    """RoPE's base from `rope_parameters`, or from the older `rope_theta` and `rope_scaling`."""
    nested = public.get("rope_parameters") or public.get("rope_scaling") or {}
    if not isinstance(nested, Mapping):
        raise ConfigError("rope_parameters", nested, "must be an object with rope_theta and rope_type")
    kind = nested.get("rope_type", nested.get("type", "default"))
    if kind != "default":
        raise ConfigError("rope_parameters.rope_type", kind, "GLM-5 uses plain RoPE ('default')")
    theta, legacy = nested.get("rope_theta"), public.get("rope_theta")
    if theta is not None and legacy is not None and theta != legacy:
        raise ConfigError("rope_theta", legacy, f"contradicts rope_parameters.rope_theta={theta!r}")
    theta = theta if theta is not None else legacy
    if theta is None:
        raise ConfigError(
            "rope_parameters.rope_theta", None, "is missing; GLM-5 uses 1000000 and libraries guess 10000"
        )
    return float(theta) if _is_number(theta) else theta


def _reject_shared_indexers(public: Mapping[str, Any]) -> None:
    """Later models let layers reuse the indices of an earlier one; in GLM-5 every layer has its own indexer."""
    for key, own in (("indexer_types", "full"), ("index_topk_pattern", "F")):
        given = public.get(key)
        if given is None:
            continue
        if not isinstance(given, list | tuple | str) or any(kind != own for kind in given):
            raise ConfigError(key, given, f"every GLM-5 layer owns its indexer ({own!r} for each)")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return isfinite(value)
    except OverflowError:  # an integer beyond what a float holds
        return False
