"""What a training run will need, before it runs: parameters, memory, tokens. Needs no memory itself.

States are exact sums over the parameters and their roles. Activations are what the forward pass keeps for the backward
pass, by a formula for each kind of layer; `tests/train/test_pretrain.py` compares it with what autograd really saves.
The library's own memory (a few hundred MiB) and short-lived buffers come on top. `glm5 ledger --training` plans the
report's layouts, which recompute every layer (section 2.4). Read next: `pretrain`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from glm5.kernels.cross_entropy import CHUNK_ELEMENTS
from glm5.model.config import ModelConfig
from glm5.model.glm5 import GLM5
from glm5.parallel.mesh import Mesh
from glm5.train.config import TrainConfig
from glm5.train.roles import ParamRole, parameter_roles


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
    gathered: int = 0

    @property
    def total(self) -> int:
        """Bytes on the device."""
        held = self.weights + self.gradients + self.optimizer
        return held + self.activations + self.logits + self.gathered


def estimate(
    config: ModelConfig,
    train: TrainConfig,
    seq_len: int,
    *,
    device: str,
    mesh: Mesh | None = None,
    recompute: Sequence[str] = (),
    gather_once: bool = False,
) -> Estimate:
    """Of one stage on each device of a mesh. `tokens`: slots that go through the model in all steps, padding included.

    With pipeline stages it is that of an even share of the layers, and of one micro-batch in flight.

    Args:
        mesh: None is one device.
        recompute: parts of layers that keep their input alone; what one layer keeps while it runs again comes on top.
        gather_once: parameters stay gathered for a step, and gradients whole in fp32.
    """
    mesh = Mesh() if mesh is None else mesh
    with torch.device("meta"):
        model = GLM5(config, seed=None)
    bf16 = train.precision == "bf16" or (train.precision == "auto" and device.startswith("cuda"))
    weights = gradients = optimizer = 0.0
    units: dict[str, float] = defaultdict(float)  # what is gathered together: bytes of a block's share, and of the root
    wide: dict[str, float] = defaultdict(float)  # elements of their gradients
    for role in parameter_roles(model, config):
        n, own = _share(role, mesh)
        width = 2 if bf16 and not role.name.endswith("mlp.gate.weight") else 4  # the router stays fp32
        weights += own * width
        unit = _unit_of(role.name, config)
        units[unit] += n * width
        if not (train.trains_indexer if ".indexer." in role.name else train.trains_model):
            continue
        wide[unit] += n
        gradients += own * width
        optimizer += own * (4 if width == 2 else 0) + (own * 4 if role.optimizer == "muon" else own * 8 + 8)
    gathered = 0.0
    if mesh.data > 1 and not (gather_once and mesh.sharded == mesh.pp == 1):  # where all is whole already
        blocks = sorted((n for unit, n in units.items() if unit), reverse=True)
        whole = gather_once or mesh.pp > 1
        # The root's stays for a step; of the blocks one that runs and the next. Gradients are reduced in fp32, two at
        # a time: what goes in, and what comes out.
        gathered = sum(units.values()) if whole else units[""] + sum(blocks[:2])
        gathered += 4 * sum(wide.values()) if whole else 4 * 2 * max(wide.values(), default=0.0)
    together, own = _tokens_at_once(train, seq_len, mesh)
    width = 2 if bf16 else 4
    kept = list(_kept_elements(config, train, seq_len))
    if recompute:
        largest = max(kept[: config.num_hidden_layers])
        kept[: config.num_hidden_layers] = [_again(config, x, recompute) for x in kept[: config.num_hidden_layers]]
        kept.append(largest)
    activations = own * sum(kept) * width / mesh.pp
    if together > own and config.attention == "mla":  # every layer keeps the latent rows of all positions, gathered
        row = config.latent_dim + (config.index_head_dim if train.trains_indexer else 0)
        layers = 1 if "layer" in recompute or "attention" in recompute else config.num_hidden_layers
        activations += together * row * width * (layers / mesh.pp + 2)  # and of one the fp32 gradient
    chunk = CHUNK_ELEMENTS["cuda" if device.startswith("cuda") else "cpu"]
    samples = train.batch.seen(train.steps)
    head = config.vocab_size // mesh.tp
    return Estimate(
        parameters=count_parameters(model),
        active_parameters=_active(model, config),
        tokens=samples * seq_len,
        weights=round(weights),
        gradients=round(gradients),
        optimizer=round(optimizer),
        activations=round(activations),
        # fp32 logits of a chunk and their gradient, and the head's gradient while it is added up.
        logits=round(2 * 4 * min(chunk, own * head) + 4 * head * config.hidden_size),
        gathered=round(gathered),
    )


def _tokens_at_once(train: TrainConfig, seq_len: int, mesh: Mesh) -> tuple[float, float]:
    """Tokens of a micro-batch that ranks share, at most, and those of them that a rank runs."""
    if train.context_groups:
        return train.context_groups * mesh.dp, train.context_groups
    rows = min(train.micro_batch, train.batch.final // mesh.dp)
    return rows * seq_len, rows * seq_len / mesh.cp


def _share(role: ParamRole, mesh: Mesh) -> tuple[float, float]:
    """Elements of a parameter on a rank when it is gathered, padding included, and those of the largest shard.

    Tensor and expert parallelism divide an axis evenly. FSDP then cuts the rows of what is left into chunks of one
    size, of which the last may be short or missing.
    """
    rows, ways = role.parameter.shape[0], mesh.sharded
    rest = role.parameter.numel() / rows / mesh.pp
    if ".experts." in role.name:
        if mesh.ep * mesh.tp > 1:
            rows, ways = rows // mesh.ep, mesh.edp
    elif re.search(r"(q_b_proj|kv_b_proj|gate_proj|up_proj|lm_head)\.weight$", role.name):
        rows //= mesh.tp
    elif re.search(r"(o_proj|down_proj)\.weight$", role.name):
        rest /= mesh.tp
    chunk = -(-rows // ways)
    return chunk * ways * rest, chunk * rest


def _unit_of(name: str, config: ModelConfig) -> str:
    """The layer whose parameters are gathered with this one; empty for what stays for the whole step."""
    found = re.match(r"model\.layers\.(\d+)\.", name)
    return "" if found is None or int(found[1]) >= config.num_hidden_layers else found[1]


def _again(config: ModelConfig, kept: float, recompute: Sequence[str]) -> float:
    """What a layer keeps of a token, of which parts run again."""
    if "layer" in recompute:
        return config.hidden_size
    share = {"attention": 0.5, "feed-forward": 0.5}  # of a layer, about
    return kept * (1 - sum(share[part] for part in set(recompute))) + config.hidden_size * len(set(recompute))


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
