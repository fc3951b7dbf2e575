"""What a training run will need, before it runs: parameters, memory, tokens. Needs no memory itself.

States are exact sums over the parameters and their roles. Activations are what the forward pass keeps for the backward
pass, by a formula for each kind of layer; `tests/train/test_pretrain.py` compares it with what autograd really saves.
The library's own memory (a few hundred MiB) and short-lived buffers come on top. Nothing is recomputed in this loop,
unlike in the report's (section 2.4), which `glm5 ledger --training` plans. Read next: `pretrain`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from glm5.kernels.cross_entropy import CHUNK_ELEMENTS
from glm5.model.config import ModelConfig
from glm5.model.glm5 import GLM5
from glm5.train.config import TrainConfig
from glm5.train.roles import parameter_roles


@dataclass(frozen=True)
class Estimate:
    """Counts of parameters and tokens; bytes of everything else."""

    parameters: int
    active_parameters: int
    tokens: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits


def estimate(config: ModelConfig, train: TrainConfig, seq_len: int, *, device: str) -> Estimate:
    """Of one stage on one device. `tokens`: slots that go through the model in all steps, padding included."""
    with torch.device("meta"):
        model = GLM5(config, seed=None)
    bf16 = train.precision == "bf16" or (train.precision == "auto" and device.startswith("cuda"))
    weights = gradients = optimizer = 0
    for role in parameter_roles(model, config):
        n = role.parameter.numel()
        width = 2 if bf16 and not role.name.endswith("mlp.gate.weight") else 4  # the router stays fp32
        weights += n * width
        if not (train.trains_indexer if ".indexer." in role.name else train.trains_model):
            continue
        gradients += n * width
        optimizer += n * (4 if role.optimizer == "muon" else 8) + (4 * n if width == 2 else 0)
    rows = min(train.micro_batch, train.batch.final)
    kept = sum(_kept_elements(config, train, seq_len))
    chunk = CHUNK_ELEMENTS["cuda" if device.startswith("cuda") else "cpu"]
    samples = train.batch.seen(train.steps)
    return Estimate(
        parameters=count_parameters(model),
        active_parameters=_active(model, config),
        tokens=samples * seq_len,
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=round(rows * seq_len * kept * (2 if bf16 else 4)),
        # fp32 logits of a chunk and their gradient, and the head's gradient while it is added up.
        logits=2 * 4 * min(chunk, rows * seq_len * config.vocab_size) + 4 * config.vocab_size * config.hidden_size,
    )


def count_parameters(model: GLM5) -> int:
    """Elements of a checkpoint: parameters, and the routers' biases."""
    return sum(t.numel() for t in (*model.parameters(), *model.buffers()))


def _active(model: GLM5, config: ModelConfig) -> int:
    """Parameters that one token meets: of the routed experts, the chosen ones. The MTP block is not counted."""
    total = 0
    mtp = f"model.layers.{config.num_hidden_layers}."
    for name, p in model.named_parameters():
        if not name.startswith(mtp):
            share = config.num_experts_per_tok / config.n_routed_experts if ".experts." in name else 1
            total += round(p.numel() * share)
    return total


def _kept_elements(config: ModelConfig, train: TrainConfig, seq_len: int) -> Iterator[float]:
    """Elements that each part keeps for the backward pass, for each token."""
    c = config
    if not train.trains_model:
        # Only the indexers' own graph: its queries, keys and weights, and their inputs.
        index = c.hidden_size + c.q_lora_rank + 2 * c.index_n_heads * (c.index_head_dim + 1) + 3 * c.index_head_dim
        yield index * (c.num_hidden_layers + train.mtp_depths * train.mtp_share)
        return
    heads, query, value = c.num_attention_heads, c.qk_head_dim, c.v_head_dim
    if c.attention == "gqa":
        groups, width = c.num_key_value_heads, c.head_dim
        attention = 2 * width * (heads + groups)
    else:
        attention = 2 * c.q_lora_rank + 2 * c.latent_dim + heads * (2 * query + c.qk_rope_head_dim)
        attention += heads * (c.qk_nope_head_dim + 2 * value)
    if train.trains_indexer:
        attention += 2 * c.index_n_heads * (c.index_head_dim + 1) + 3 * c.index_head_dim + min(c.index_topk, seq_len)
    dense = 4 * c.intermediate_size
    moe = c.num_experts_per_tok * (2 * c.hidden_size + 2 * c.moe_intermediate_size) + 3 * c.n_routed_experts
    moe += 4 * c.moe_intermediate_size * c.n_shared_experts
    for layer in range(c.num_hidden_layers):
        yield 4 * c.hidden_size + attention + (moe if c.is_moe(layer) else dense)
    yield 3 * c.hidden_size  # the final norm, the head's input and its gradient
    yield train.mtp_depths * train.mtp_share * (9 * c.hidden_size + attention + moe)
