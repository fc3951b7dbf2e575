"""Bytes that one device holds: weights, cache and activations for a layout of TP, EP, PP, CP and DP.

Weights and cache are exact sums over tensors. Activations are a stated estimate (formulas in each line): buffers
that must live together at the peak, without allocator waste, communication buffers or kernel workspaces, for which
`utilization` keeps a share of the device free. Sources: report section 2.4 (pipeline ZeRO-2 gradients, recomputation,
chunked head), the FP8 cache row of the public engines (512 fp8 + 4 scales + 64 bf16 for GLM-5). Read next: `plan`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Literal

from glm5.ledger.params import Tensor, embedding_tensor, final_tensors, layer_tensors
from glm5.model.config import ModelConfig
from glm5.utils.errors import UserError

Precision = Literal["fp32", "bf16", "fp8", "w4a8"]
CachePrecision = Literal["fp32", "bf16", "fp8"]

SCALE_BLOCK = 128  # fp8: one fp32 scale a 128 x 128 block; int4: one bf16 scale per 128 inputs
QUERY_TILE = 128  # index scores exist for this many queries at a time
LOSS_CHUNK = 1024  # tokens whose logits exist at once in training


class LayoutError(UserError):
    """A layout does not divide the model or the work. The message names the number and its choices."""


# --------------------------------------------------------------------------- bytes of tensors and caches
def tensor_bytes(tensor: Tensor, precision: Precision) -> int:
    """Bytes of all copies of `tensor` on one device that holds it whole.

    bf16 and fp32 store every element so, except the fp32 correction bias. fp8 stores the quantized matrices in
    1 byte with a 4-byte scale a 128 x 128 block; w4a8 stores routed experts in 4 bits with a 2-byte scale per
    128 inputs of a row, and the other quantized matrices in 1 byte with a 4-byte scale a row. What is not
    quantized (embedding, head, norms, biases, router, MTP fusion, the indexer's key and weight projections)
    stays in bf16.
    """
    if precision == "fp32" or tensor.fp32:
        return 4 * tensor.numel
    if precision == "bf16" or not tensor.quantized:
        return 2 * tensor.numel
    rows, columns = tensor.shape
    blocks = -(-columns // SCALE_BLOCK)
    if precision == "fp8":
        return tensor.copies * (rows * columns + 4 * -(-rows // SCALE_BLOCK) * blocks)
    if tensor.group == "routed_experts":
        return tensor.copies * (-(-rows * columns // 2) + 2 * rows * blocks)
    return tensor.copies * (rows * columns + 4 * rows)


@dataclass(frozen=True)
class CacheBytes:
    """Bytes of one token in one layer: `content` (MLA latent and rotary key, or K and V) and `index` keys."""

    content: int
    index: int

    @property
    def total(self) -> int:
        return self.content + self.index


def cache_bytes(config: ModelConfig, precision: CachePrecision = "bf16", tp: int = 1) -> CacheBytes:
    """Cache of one token and layer. `tp` cuts GQA's key-value heads; MLA's one latent is whole on every rank.

    fp8 keeps the rotary key in bf16 and adds a 4-byte scale per 128 elements; so does the index key.
    """
    wide = 4 if precision == "fp32" else 2
    if config.attention == "gqa":
        heads = max(1, config.num_key_value_heads // tp)
        row = _fp8_row(config.head_dim) if precision == "fp8" else wide * config.head_dim
        return CacheBytes(2 * heads * row, 0)
    if precision == "fp8":
        content = _fp8_row(config.kv_lora_rank) + 2 * config.qk_rope_head_dim
        return CacheBytes(content, _fp8_row(config.index_head_dim))
    return CacheBytes(wide * config.latent_dim, wide * config.index_head_dim)


def _fp8_row(elements: int) -> int:
    return elements + 4 * -(-elements // SCALE_BLOCK)


# --------------------------------------------------------------------------- layouts
@dataclass(frozen=True)
class Layout:
    """How many ways each dimension is cut. Devices: tp · pp · cp · dp; experts reuse those of one stage.

    Args:
        tp: heads, feed-forward widths and vocabulary.
        ep: experts, over the tp · cp · dp ranks of a pipeline stage. Where ep < tp each expert's width is cut
            tp / ep ways too, so that a stage's TP group never holds an expert twice.
        pp: layers. The MTP block sits on the stage before the last, with a copy of the embedding; its head is
            the last stage's.
        cp: sequence positions.
        dp: sequences.
    """

    tp: int = 1
    ep: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1

    @property
    def devices(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def expert_tp(self) -> int:
        """Ways that one expert's width is cut."""
        return self.tp // self.ep if self.ep < self.tp else 1

    @property
    def expert_shards(self) -> int:
        """Ways that the experts of one layer are cut, counting width."""
        return max(self.ep, self.tp)

    @property
    def expert_replicas(self) -> int:
        """Copies of each expert shard within a stage."""
        return self.tp * self.cp * self.dp // self.expert_shards

    def check(self, config: ModelConfig) -> None:
        """Raise LayoutError unless this layout cuts `config` into equal parts (layers may be uneven)."""
        for name in ("tp", "ep", "pp", "cp", "dp"):
            value = getattr(self, name)
            if value < 1:
                raise LayoutError(f"{name}={value} is not a number of parts", f"Give --{name} at least 1")
        self._check_tp(config)
        experts = config.n_routed_experts
        has_moe = "sparse" in config.layer_types or config.num_nextn_predict_layers > 0
        ranks = self.tp * self.cp * self.dp
        if self.ep > 1 and not has_moe:
            raise LayoutError(f"ep={self.ep}, but this model has no MoE layer", "Leave --ep at 1")
        if self.ep > 1 and experts % self.ep:
            raise LayoutError(
                f"ep={self.ep} does not divide n_routed_experts={experts}", _choices("ep", experts, ranks)
            )
        if ranks % self.ep or max(self.ep, self.tp) % min(self.ep, self.tp):
            fitting = [e for e in _divisors(ranks) if experts % e == 0 and not max(e, self.tp) % min(e, self.tp)]
            raise LayoutError(
                f"ep={self.ep} does not fit the tp x cp x dp = {ranks} ranks of a stage (tp={self.tp}): it must "
                "divide them, and divide or be a multiple of tp",
                f"Choose --ep from {', '.join(map(str, fitting))}",
            )
        if self.pp > config.num_hidden_layers:
            raise LayoutError(
                f"pp={self.pp} is more than num_hidden_layers={config.num_hidden_layers}",
                f"Choose --pp from 1 to {config.num_hidden_layers}",
            )

    def _check_tp(self, config: ModelConfig) -> None:
        cut = {"num_attention_heads": config.num_attention_heads, "vocab_size": config.vocab_size}
        if "dense" in config.layer_types:
            cut["intermediate_size"] = config.intermediate_size
        if config.n_shared_experts:
            cut["moe_intermediate_size x n_shared_experts"] = config.moe_intermediate_size * config.n_shared_experts
        for name, size in cut.items():
            if size % self.tp:
                raise LayoutError(f"tp={self.tp} does not divide {name}={size}", _choices("tp", *cut.values()))
        if self.expert_tp > 1 and config.moe_intermediate_size % self.expert_tp:
            raise LayoutError(
                f"tp / ep = {self.expert_tp} does not divide moe_intermediate_size={config.moe_intermediate_size}",
                f"Raise --ep to {self.tp}, or lower --tp",
            )
        groups = config.num_key_value_heads
        if config.attention == "gqa" and groups % self.tp and self.tp % groups:
            raise LayoutError(
                f"tp={self.tp} neither divides num_key_value_heads={groups} nor is a multiple of it",
                _choices("tp", config.num_attention_heads, groups),
            )

    def stages(self, config: ModelConfig) -> list[Stage]:
        """Which layers and vocabulary matrices each pipeline stage holds; early stages take the remainder."""
        each, rest = divmod(config.num_hidden_layers, self.pp)
        out, start = [], 0
        for s in range(self.pp):
            layers = list(range(start, start + each + (s < rest)))
            start += len(layers)
            has_mtp = config.num_nextn_predict_layers > 0 and s == max(0, self.pp - 2)
            if has_mtp:
                layers += range(config.num_hidden_layers, config.num_cache_layers)
            last = s == self.pp - 1
            # A tied head needs the embedding's matrix on the last stage.
            embedding = s == 0 or has_mtp or (last and config.tie_word_embeddings)
            out.append(Stage(s, tuple(layers), embedding, last))
        return out


@dataclass(frozen=True)
class Stage:
    """One pipeline stage: its layers (the MTP block counts as one) and whether it embeds or makes logits."""

    index: int
    layers: tuple[int, ...]
    embedding: bool
    head: bool

    def tensors(self, config: ModelConfig) -> list[Tensor]:
        """Every tensor that the stage's ranks share."""
        out = [embedding_tensor(config)] if self.embedding else []
        for layer in self.layers:
            out += layer_tensors(config, layer)
        return out + (final_tensors(config) if self.head else [])


def shards(tensor: Tensor, layout: Layout) -> int:
    """Into how many equal parts `layout` cuts `tensor` within a stage."""
    if tensor.group == "routed_experts":
        return layout.expert_shards
    return min(layout.tp, tensor.units) if tensor.units else 1


def weight_bytes(tensors: list[Tensor], layout: Layout, precision: Precision) -> int:
    """Bytes of `tensors` on one device. Scales of a quantized matrix are cut with it (rounded up).

    The router's matrix, bf16 in the files, is held in fp32: routing is decided in fp32.
    """

    def held(t: Tensor) -> int:
        return 4 * t.numel if t.group == "router" else tensor_bytes(t, precision)

    return sum(-(-held(t) // shards(t, layout)) for t in tensors)


def weight_elements(tensors: list[Tensor], layout: Layout) -> int:
    """Elements of `tensors` on one device."""
    return sum(t.numel // shards(t, layout) for t in tensors)


# --------------------------------------------------------------------------- activations
@dataclass(frozen=True)
class Buffers:
    """Elements (and fp32 or int32 bytes) that one layer's forward pass makes for `tokens` tokens on one device."""

    residual: int
    attention: int
    attention_bytes: int
    ffn: int

    def peak_bytes(self, width: int) -> int:
        """Attention and feed-forward part run in turn, beside the residual stream and its normed copy."""
        return width * self.residual + max(width * self.attention + self.attention_bytes, width * self.ffn)

    def kept_bytes(self, width: int) -> int:
        """All of it at once: what the backward pass of a recomputed layer needs."""
        return width * (self.residual + self.attention + self.ffn) + self.attention_bytes


def layer_buffers(config: ModelConfig, layout: Layout, tokens: int, keys: int, layers: tuple[int, ...]) -> Buffers:
    """Largest buffers among `layers` for `tokens` new tokens that see `keys` positions on this device."""
    c, n, tp = config, tokens, layout.tp
    h = c.num_attention_heads // tp
    if c.attention == "gqa":
        groups = max(1, c.num_key_value_heads // tp)
        attention, extra = n * c.head_dim * (2 * h + 2 * groups), 0
    else:
        # q latent, absorbed queries, latent outputs, head outputs, index queries; then ids and one tile of scores.
        attention = n * (c.q_lora_rank + h * (c.latent_dim + c.kv_lora_rank + c.v_head_dim))
        attention += n * c.index_n_heads * c.index_head_dim
        extra = 4 * n * min(c.index_topk, keys) + 4 * min(n, QUERY_TILE) * keys
    ffn = 0
    if any(not c.is_moe(i) for i in layers):
        ffn = 3 * n * c.intermediate_size // tp
    if any(c.is_moe(i) for i in layers):
        rows = -(-n * c.num_experts_per_tok // min(layout.ep, tp))  # balanced routing
        moe = rows * (2 * c.hidden_size + 3 * c.moe_intermediate_size // layout.expert_tp)
        moe += 3 * n * c.moe_intermediate_size * c.n_shared_experts // tp
        ffn = max(ffn, moe)
    return Buffers(residual=2 * n * c.hidden_size, attention=attention, attention_bytes=extra, ffn=ffn)


# --------------------------------------------------------------------------- choices for error messages
def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _choices(option: str, *sizes: int) -> str:
    """An instruction that lists the common divisors of `sizes`, the small ones at least."""
    found = _divisors(gcd(*sizes))
    listed = ", ".join(map(str, found[:12])) + (", …" if len(found) > 12 else "")
    return f"Choose --{option} from {listed}"
