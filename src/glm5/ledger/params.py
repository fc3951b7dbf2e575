"""Every tensor of a GLM-5 checkpoint, and the parameter counts that follow, straight from the configuration.

The list follows the published safetensors layout (one tensor per expert, the MTP block as one more layer), so a
sum over it is the element count of the files. Sources: config.json, Table 10 of the report. `[out, in]` shapes
throughout. Read next: `figures`, which turns these counts into the rows of the ledger.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

from glm5.model.config import ModelConfig

Group = Literal[
    "embedding",
    "head",
    "attention",
    "indexer",
    "norms",
    "dense_ffn",
    "routed_experts",
    "shared_experts",
    "router",
    "mtp_fusion",
]
GROUPS: tuple[Group, ...] = Group.__args__  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Tensor:
    """One tensor of the checkpoint, or `copies` alike (the experts of one layer).

    Args:
        name: its name, with `*` for the expert's number.
        shape: `(out, in)` of a matrix, `(size,)` of a vector.
        group: what it belongs to.
        units: into how many equal parts tensor parallelism may cut it (heads, widths, vocabulary rows);
            0 for a tensor that every rank holds whole.
        copies: how many tensors of this shape the name stands for; expert parallelism divides these.
        fp32: stored in fp32 whatever the model's dtype (the router's correction bias).
        quantized: a matrix that the low-precision formats store in 8 or 4 bits.
    """

    name: str
    shape: tuple[int, ...]
    group: Group
    units: int = 0
    copies: int = 1
    fp32: bool = False
    quantized: bool = False

    @property
    def numel(self) -> int:
        """Elements, all copies together."""
        return self.copies * prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        """Whether a token is multiplied by it (an embedding is looked up instead)."""
        return len(self.shape) == 2 and self.group != "embedding"


def layer_tensors(config: ModelConfig, layer: int) -> list[Tensor]:
    """Tensors of one block: attention, indexer, norms, and a dense or MoE feed-forward part.

    `layer` runs from 0 to `num_cache_layers - 1`; the last is the MTP block, whose own tensors follow its block.
    """
    c, p = config, f"model.layers.{layer}"
    out = _mla(c, p) if c.attention == "mla" else _gqa(c, p)
    out += [
        Tensor(f"{p}.input_layernorm.weight", (c.hidden_size,), "norms"),
        Tensor(f"{p}.post_attention_layernorm.weight", (c.hidden_size,), "norms"),
    ]
    out += _moe(c, p) if c.is_moe(layer) else _ffn(c, f"{p}.mlp", c.intermediate_size, "dense_ffn")
    if layer >= c.num_hidden_layers:
        d = c.hidden_size
        out += [
            Tensor(f"{p}.eh_proj.weight", (d, 2 * d), "mtp_fusion"),
            Tensor(f"{p}.enorm.weight", (d,), "mtp_fusion"),
            Tensor(f"{p}.hnorm.weight", (d,), "mtp_fusion"),
            Tensor(f"{p}.shared_head.norm.weight", (d,), "mtp_fusion"),
        ]
    return out


def embedding_tensor(config: ModelConfig) -> Tensor:
    """The token embedding, which the MTP block shares."""
    return Tensor(
        "model.embed_tokens.weight",
        (config.vocab_size, config.hidden_size),
        "embedding",
        units=config.vocab_size,
    )


def final_tensors(config: ModelConfig) -> list[Tensor]:
    """The final norm, and the output head unless it is tied to the embedding."""
    d, v = config.hidden_size, config.vocab_size
    out = [Tensor("model.norm.weight", (d,), "norms")]
    if not config.tie_word_embeddings:
        out.append(Tensor("lm_head.weight", (v, d), "head", units=v))
    return out


def checkpoint_tensors(config: ModelConfig) -> Iterator[Tensor]:
    """Every tensor of the checkpoint, in reading order."""
    yield embedding_tensor(config)
    for layer in range(config.num_cache_layers):
        yield from layer_tensors(config, layer)
    yield from final_tensors(config)


def count(tensors: Iterable[Tensor]) -> int:
    """Elements of all `tensors`."""
    return sum(t.numel for t in tensors)


def by_group(tensors: Iterable[Tensor]) -> dict[Group, int]:
    """Elements per group, every group present."""
    out: dict[Group, int] = dict.fromkeys(GROUPS, 0)
    for t in tensors:
        out[t.group] += t.numel
    return out


@dataclass(frozen=True)
class Parameters:
    """Parameter counts of one model, in elements (the fp32 correction biases included).

    `trunk` is all layers and the final norm; `tensors` counts tensors of the files, not elements.
    """

    trunk: int
    embedding: int
    head: int
    mtp: int
    fp32: int
    tensors: int

    @property
    def total(self) -> int:
        """Everything that the checkpoint stores."""
        return self.trunk + self.embedding + self.head + self.mtp


def parameters(config: ModelConfig) -> Parameters:
    """Count the checkpoint of `config`."""
    final = final_tensors(config)
    everything = list(checkpoint_tensors(config))
    head = count(t for t in final if t.group == "head")
    mtp_layers = range(config.num_hidden_layers, config.num_cache_layers)
    return Parameters(
        trunk=sum(count(layer_tensors(config, i)) for i in range(config.num_hidden_layers)) + count(final) - head,
        embedding=embedding_tensor(config).numel,
        head=head,
        mtp=sum(count(layer_tensors(config, i)) for i in mtp_layers),
        fp32=count(t for t in everything if t.fp32),
        tensors=sum(t.copies for t in everything),
    )


@dataclass(frozen=True)
class Active:
    """Parameters that one token passes through, in elements: all but the experts that it is not routed to.

    `trunk` and `mtp` have no vocabulary matrices; `head` is the matrix that makes the logits (tied or not).
    `macs` is the number of multiply-accumulates of the trunk's matrices and the head, for one token.
    """

    trunk: int
    mtp: int
    head: int
    macs: int


def active_parameters(config: ModelConfig) -> Active:
    """Count what one token uses: `num_experts_per_tok` routed experts a MoE layer, and everything else."""

    def used(t: Tensor) -> int:
        return t.numel // t.copies * config.num_experts_per_tok if t.group == "routed_experts" else t.numel

    n = config.num_hidden_layers
    trunk = [t for i in range(n) for t in layer_tensors(config, i)]
    trunk += [t for t in final_tensors(config) if t.group != "head"]
    mtp = [t for i in range(n, config.num_cache_layers) for t in layer_tensors(config, i)]
    # The gates' matrices score all experts, so the router counts whole.
    head = config.vocab_size * config.hidden_size
    return Active(
        trunk=sum(map(used, trunk)),
        mtp=sum(map(used, mtp)),
        head=head,
        macs=sum(used(t) for t in trunk if t.is_matrix) + head,
    )


# --------------------------------------------------------------------------- the parts of a block
def _mla(c: ModelConfig, prefix: str) -> list[Tensor]:
    """MLA's five projections and two latent norms, and the indexer's own."""
    p, d, h = f"{prefix}.self_attn", c.hidden_size, c.num_attention_heads
    q, kv = c.q_lora_rank, c.kv_lora_rank
    out = [
        Tensor(f"{p}.q_a_proj.weight", (q, d), "attention", quantized=True),
        Tensor(f"{p}.q_a_layernorm.weight", (q,), "attention"),
        Tensor(f"{p}.q_b_proj.weight", (h * c.qk_head_dim, q), "attention", units=h, quantized=True),
        Tensor(f"{p}.kv_a_proj_with_mqa.weight", (c.latent_dim, d), "attention", quantized=True),
        Tensor(f"{p}.kv_a_layernorm.weight", (kv,), "attention"),
        Tensor(
            f"{p}.kv_b_proj.weight",
            (h * (c.qk_nope_head_dim + c.v_head_dim), kv),
            "attention",
            units=h,
            quantized=True,
        ),
        Tensor(f"{p}.o_proj.weight", (d, h * c.v_head_dim), "attention", units=h, quantized=True),
    ]
    if c.attention_bias:
        out += [
            Tensor(f"{p}.q_a_proj.bias", (q,), "attention"),
            Tensor(f"{p}.kv_a_proj_with_mqa.bias", (c.latent_dim,), "attention"),
            Tensor(f"{p}.o_proj.bias", (d,), "attention"),
        ]
    i, j = c.index_head_dim, c.index_n_heads
    # Replicated under tensor parallelism: every rank must select the same positions.
    out += [
        Tensor(f"{p}.indexer.wq_b.weight", (j * i, q), "indexer", quantized=True),
        Tensor(f"{p}.indexer.wk.weight", (i, d), "indexer"),
        Tensor(f"{p}.indexer.k_norm.weight", (i,), "indexer"),
        Tensor(f"{p}.indexer.k_norm.bias", (i,), "indexer"),
        Tensor(f"{p}.indexer.weights_proj.weight", (j, d), "indexer"),
    ]
    return out


def _gqa(c: ModelConfig, prefix: str) -> list[Tensor]:
    """Grouped-query attention; without a query latent there is no indexer, so it attends densely."""
    p, d, w = f"{prefix}.self_attn", c.hidden_size, c.head_dim
    h, g = c.num_attention_heads, c.num_key_value_heads
    out = [
        Tensor(f"{p}.q_proj.weight", (h * w, d), "attention", units=h, quantized=True),
        Tensor(f"{p}.k_proj.weight", (g * w, d), "attention", units=g, quantized=True),
        Tensor(f"{p}.v_proj.weight", (g * w, d), "attention", units=g, quantized=True),
        Tensor(f"{p}.o_proj.weight", (d, h * w), "attention", units=h, quantized=True),
    ]
    if c.attention_bias:
        out += [
            Tensor(f"{p}.q_proj.bias", (h * w,), "attention", units=h),
            Tensor(f"{p}.k_proj.bias", (g * w,), "attention", units=g),
            Tensor(f"{p}.v_proj.bias", (g * w,), "attention", units=g),
            Tensor(f"{p}.o_proj.bias", (d,), "attention"),
        ]
    return out


def _ffn(c: ModelConfig, prefix: str, width: int, group: Group, copies: int = 1) -> list[Tensor]:
    """SwiGLU: gate and up projections, then down."""
    d = c.hidden_size
    up, down = (width, d), (d, width)
    return [
        Tensor(f"{prefix}.gate_proj.weight", up, group, width, copies, quantized=True),
        Tensor(f"{prefix}.up_proj.weight", up, group, width, copies, quantized=True),
        Tensor(f"{prefix}.down_proj.weight", down, group, width, copies, quantized=True),
    ]


def _moe(c: ModelConfig, prefix: str) -> list[Tensor]:
    """Router, routed experts and shared experts (stored as one feed-forward part of their joint width)."""
    p = f"{prefix}.mlp"
    out = [
        Tensor(f"{p}.gate.weight", (c.n_routed_experts, c.hidden_size), "router"),
        Tensor(f"{p}.gate.e_score_correction_bias", (c.n_routed_experts,), "router", fp32=True),
    ]
    out += _ffn(c, f"{p}.experts.*", c.moe_intermediate_size, "routed_experts", c.n_routed_experts)
    if c.n_shared_experts:
        width = c.moe_intermediate_size * c.n_shared_experts
        out += _ffn(c, f"{p}.shared_experts", width, "shared_experts")
    return out
