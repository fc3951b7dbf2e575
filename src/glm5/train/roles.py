"""Which optimizer moves each parameter, and how Muon Split cuts each matrix: one table, by name.

GLM-4.5 puts every parameter on Muon except word embeddings, biases and norms (and, here, the untied head). GLM-5
adds Muon Split (report, section 2.1): W_UQ, W_UK and W_UV are orthogonalised head by head. Roles follow from the public
checkpoint's names, never from a tensor's number of dimensions: an expert bank has three and is a batch of matrices,
an embedding has two and is none. A parameter that the table does not know is an error, not a guess.
Read next: `optim`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from glm5.model.config import ModelConfig
from glm5.utils.errors import ConfigError, UserError


@dataclass(frozen=True)
class Cut:
    """The rows of one parameter that form matrices of one kind.

    Seen as [periods, period, columns], the parameter gives rows `start : start + rows` of every period: kv_b_proj has
    one period for each head, its first N rows W_UK and its last V rows W_UV.

    Attributes:
        group: the name under which metrics report it.
        merge: the rows of all periods form one matrix (plain Muon); otherwise each period has its own.
    """

    group: str
    periods: int
    period: int
    start: int
    rows: int
    merge: bool = False

    @property
    def matrices(self) -> int:
        """How many matrices are orthogonalised."""
        return 1 if self.merge else self.periods

    @property
    def height(self) -> int:
        """Rows of one of them."""
        return self.rows * self.periods if self.merge else self.rows

    def runs(self, matrix: int) -> tuple[tuple[int, int], ...]:
        """(first, past the last) of the parameter's rows, leading axes flattened, that make up one of them."""
        periods = range(self.periods) if self.merge else (matrix,)
        return tuple((p * self.period + self.start, p * self.period + self.start + self.rows) for p in periods)

    def view(self, tensor: Tensor) -> Tensor:
        """[periods, rows, columns], sharing the memory of a contiguous `tensor` of the parameter's shape."""
        return tensor.view(self.periods, self.period, tensor.shape[-1])[:, self.start : self.start + self.rows]


@dataclass(frozen=True)
class ParamRole:
    """What the optimizer does with one parameter.

    Attributes:
        name: the public checkpoint's, but for the fused experts.
        optimizer: "muon" or "adamw".
        group: the name under which metrics report an AdamW parameter.
        blocks: for Muon, the cuts; together they cover the parameter once.
        decay: whether weight decay applies. Vectors (norms, biases) have none.
    """

    name: str
    parameter: nn.Parameter
    optimizer: Literal["muon", "adamw"]
    group: str
    blocks: tuple[Cut, ...] = ()
    decay: bool = True


_LAYER = re.compile(r"model\.layers\.\d+\.")
# Matrices that are orthogonalised whole, by their name inside a layer.
_WHOLE = {
    **dict.fromkeys(("q_a_proj", "kv_a_proj_with_mqa", "o_proj"), ("self_attn.", "attention")),
    **dict.fromkeys(("wq_b", "wk", "weights_proj"), ("self_attn.indexer.", "indexer")),
    **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), ("mlp.", "dense")),
}
_WHOLE_TAILS = {f"{prefix}{module}.weight": group for module, (prefix, group) in _WHOLE.items()} | {
    "mlp.gate.weight": "router",
    "mlp.shared_experts.gate_proj.weight": "shared_experts",
    "mlp.shared_experts.up_proj.weight": "shared_experts",
    "mlp.shared_experts.down_proj.weight": "shared_experts",
    "eh_proj.weight": "mtp",
}
_ADAMW = {"model.embed_tokens.weight": "embedding", "lm_head.weight": "head"}


def parameter_roles(model: nn.Module, config: ModelConfig, *, split_heads: bool = True) -> list[ParamRole]:
    """The role of every parameter of `model`, in the model's order.

    Args:
        split_heads: Muon Split. False is plain Muon: W_UQ, W_UK and W_UV (or, with GQA, the query, key and value
            projections) are each one matrix of all heads, as in the baseline of the report's Table 1.

    Raises:
        UserError: a parameter has no role.
        ConfigError: a parameter's shape contradicts the configuration.
    """
    roles, unknown = [], []
    for name, parameter in model.named_parameters():
        tail = _LAYER.sub("", name, count=1)
        blocks = _blocks(tail, parameter, config, merge=not split_heads)
        if blocks:
            _check_cover(name, parameter, blocks)
            roles.append(ParamRole(name, parameter, "muon", blocks[0].group, blocks))
        elif name in _ADAMW:
            roles.append(ParamRole(name, parameter, "adamw", _ADAMW[name]))
        elif tail.endswith(("norm.weight", ".bias")):
            roles.append(ParamRole(name, parameter, "adamw", "vectors", decay=False))
        else:
            unknown.append(name)
    if unknown:
        raise UserError(
            f"no optimizer role for {len(unknown)} parameters: {', '.join(unknown)}",
            "Add their names to the table in glm5.train.roles",
        )
    return roles


def _blocks(tail: str, parameter: Tensor, config: ModelConfig, *, merge: bool) -> tuple[Cut, ...]:
    """The cuts of a Muon parameter; empty for others."""
    if tail in _WHOLE_TAILS:
        rows = parameter.shape[0]
        return (Cut(_WHOLE_TAILS[tail], 1, rows, 0, rows),)
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    nope, query, value = config.qk_nope_head_dim, config.qk_head_dim, config.v_head_dim
    inner, experts, width = config.moe_intermediate_size, config.n_routed_experts, config.hidden_size
    match tail:
        case "self_attn.q_b_proj.weight":
            return (Cut("w_uq", heads, query, 0, query, merge),)
        case "self_attn.kv_b_proj.weight":
            period = nope + value
            return (Cut("w_uk", heads, period, 0, nope, merge), Cut("w_uv", heads, period, nope, value, merge))
        case "self_attn.q_proj.weight":
            return (Cut("w_q", heads, config.head_dim, 0, config.head_dim, merge),)
        case "self_attn.k_proj.weight":
            return (Cut("w_k", groups, config.head_dim, 0, config.head_dim, merge),)
        case "self_attn.v_proj.weight":
            return (Cut("w_v", groups, config.head_dim, 0, config.head_dim, merge),)
        case "mlp.experts.gate_up_proj":
            gate = Cut("experts", experts, 2 * inner, 0, inner)
            return (gate, Cut("experts", experts, 2 * inner, inner, inner))
        case "mlp.experts.down_proj":
            return (Cut("experts", experts, width, 0, width),)
    return ()


def _check_cover(name: str, parameter: Tensor, blocks: tuple[Cut, ...]) -> None:
    rows = parameter.numel() // max(parameter.shape[-1], 1)
    expected = blocks[0].periods * blocks[0].period
    covered = sum(cut.periods * cut.rows for cut in blocks)
    if parameter.ndim not in (2, 3) or rows != expected or covered != expected:
        raise ConfigError(name, tuple(parameter.shape), f"the configuration gives it {expected} rows in all")
