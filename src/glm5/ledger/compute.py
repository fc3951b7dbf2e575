"""Attention pairs, floating-point operations and lower bounds on time, from the configuration.

One multiply-accumulate is 2 FLOP; norms, activations, softmax and top-k are left out, as is usual. Sources: the
attention forms of MLA (expanded to full heads, or absorbed into the latent) and DSA's indexer, report section 2.
Read next: `memory`.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from glm5.data.balance import CostModel
from glm5.ledger.devices import Device
from glm5.ledger.params import active_parameters
from glm5.model.config import ModelConfig


# --------------------------------------------------------------------------- pairs of query and key
def dense_pairs(length: int) -> int:
    """Query-key pairs of causal attention over `length` tokens: 1 + 2 + … + length."""
    return length * (length + 1) // 2


def sparse_pairs(length: int, k: int) -> int:
    """Pairs that remain when each query keeps at most `k` positions: Σ min(t, k) for t = 1 … length."""
    short = min(length, k)
    return short * (short + 1) // 2 + (length - short) * k


# --------------------------------------------------------------------------- FLOP
def pair_flops(config: ModelConfig, absorbed: bool) -> int:
    """FLOP of one query-key pair in one layer, all heads: the score and the weighted sum.

    Absorbed MLA works on the latent (`latent_dim` for the score, `kv_lora_rank` for the sum); the expanded form
    and GQA on full heads.
    """
    if config.attention == "gqa":
        return 2 * config.num_attention_heads * 2 * config.head_dim
    widths = config.latent_dim + config.kv_lora_rank if absorbed else config.qk_head_dim + config.v_head_dim
    return 2 * config.num_attention_heads * widths


def indexer_pair_flops(config: ModelConfig) -> int:
    """FLOP of one index score in one layer: the dot products of all index heads. 0 without an indexer."""
    return 0 if config.attention == "gqa" else 2 * config.index_n_heads * config.index_head_dim


def linear_flops(config: ModelConfig) -> int:
    """FLOP that one token spends in the trunk's matrices and the head, forward."""
    return 2 * active_parameters(config).macs


@dataclass(frozen=True)
class AttentionFlops:
    """FLOP of all trunk layers for the pairs of one query or one sequence."""

    main: int
    indexer: int

    @property
    def total(self) -> int:
        return self.main + self.indexer


def decode_attention_flops(config: ModelConfig, context: int, sparse: bool = True) -> AttentionFlops:
    """Attention of one new token that sees `context` positions, absorbed. GQA is dense whatever `sparse` says."""
    layers = config.num_hidden_layers
    if config.attention == "gqa" or not sparse:
        return AttentionFlops(layers * context * pair_flops(config, absorbed=True), 0)
    return AttentionFlops(
        main=layers * min(context, config.index_topk) * pair_flops(config, absorbed=True),
        indexer=layers * context * indexer_pair_flops(config),
    )


def prefill_attention_flops(config: ModelConfig, length: int, sparse: bool = True) -> AttentionFlops:
    """Attention of `length` tokens: expanded when dense, absorbed over the selection when sparse."""
    layers = config.num_hidden_layers
    if config.attention == "gqa" or not sparse:
        return AttentionFlops(layers * dense_pairs(length) * pair_flops(config, absorbed=False), 0)
    return AttentionFlops(
        main=layers * sparse_pairs(length, config.index_topk) * pair_flops(config, absorbed=True),
        indexer=layers * dense_pairs(length) * indexer_pair_flops(config),
    )


def forward_flops(config: ModelConfig, length: int, sparse: bool = True) -> int:
    """FLOP of one forward pass over a sequence of `length` tokens, every token's logits included."""
    return length * linear_flops(config) + prefill_attention_flops(config, length, sparse).total


def mtp_flops(config: ModelConfig, length: int, sparse: bool = True) -> int:
    """FLOP of one MTP depth over a sequence, forward: its block, and the head again. Norms count as matrices."""
    active = active_parameters(config)
    attention = prefill_attention_flops(config, length, sparse).total // config.num_hidden_layers
    return length * 2 * (active.mtp + active.head) + attention


def training_flops(config: ModelConfig, length: int, sparse: bool = True, mtp_depths: int = 0) -> int:
    """FLOP of forward and backward over one sequence: three times the forward pass, without recomputation."""
    return 3 * (forward_flops(config, length, sparse) + mtp_depths * mtp_flops(config, length, sparse))


def training_cost(config: ModelConfig, sparse: bool = True) -> CostModel:
    """What `glm5.data.balance` weighs work by: FLOP of the trunk, forward and backward, as `training_flops` counts.

    Gathering a token's latent row and index key for a layer, and summing their gradients in fp32, is counted at the
    FLOP that a device of 400 TFLOP/s would do while they travel at 300 GB/s. A micro-step costs as much as 256 tokens.
    """
    layers = config.num_hidden_layers
    token = 3 * linear_flops(config)
    row = (config.latent_dim + (config.index_head_dim if sparse else 0)) if config.attention == "mla" else 0
    moved = layers * row * (2 + 4) * (400e12 / 300e9)
    searched = sparse and config.attention == "mla"
    pair = 3 * layers * pair_flops(config, absorbed=searched)
    score = 3 * layers * indexer_pair_flops(config) if searched else 0
    return CostModel(token, pair, score, config.index_topk if searched else None, moved, 256 * token)


def crossover_length(config: ModelConfig) -> int | None:
    """Shortest prefill whose sparse attention, indexer included, costs less than dense. None if none does.

    Below it a planner runs dense: the absorbed form pays more for each pair.
    """
    if config.attention == "gqa" or indexer_pair_flops(config) >= pair_flops(config, absorbed=False):
        return None

    def sparse_wins(length: int) -> bool:
        sparse = prefill_attention_flops(config, length, sparse=True).total
        return sparse < prefill_attention_flops(config, length, sparse=False).total

    high = 1
    while not sparse_wins(high):
        high *= 2
    low = high // 2
    while high - low > 1:  # the gain, once positive, grows with length
        middle = (low + high) // 2
        low, high = (low, middle) if sparse_wins(middle) else (middle, high)
    return high


# --------------------------------------------------------------------------- lower bounds on time
def expected_experts(n_experts: int, per_token: int, tokens: int) -> Fraction:
    """Experts that `tokens` tokens touch on average when routing is uniform: E·(1 − (1 − k/E)^tokens)."""
    miss = Fraction(n_experts - per_token, n_experts)
    # Past a few thousand tokens the exact power is huge and the answer is E to every printed digit.
    return Fraction(n_experts) if tokens > 4096 else n_experts * (1 - miss**tokens)


@dataclass(frozen=True)
class Roofline:
    """Least time of a step: the slower of reading `bytes` and doing `flops`. A floor, not a forecast. Seconds."""

    compute_s: float
    memory_s: float

    @property
    def seconds(self) -> float:
        return max(self.compute_s, self.memory_s)

    @property
    def bound(self) -> str:
        return "compute" if self.compute_s > self.memory_s else "memory"


def roofline(device: Device, flops: float, bytes_read: float) -> Roofline | None:
    """Lower bound on `device`, or None if its peak rates are not listed."""
    if device.bf16_flops is None or device.bandwidth is None:
        return None
    return Roofline(flops / device.bf16_flops, bytes_read / device.bandwidth)
