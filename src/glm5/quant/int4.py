"""Training at INT4: products read the experts' matrices as INT4 holds them, and the matrices themselves learn.

What is read is `kernels.formats.rounded`, packing and unpacking in one: each group of columns of a row shares the scale
largest / 7, values are whole numbers from -7 to 7, rounded half to even. So the weights that a run exports, packed by
`kernels.formats.pack`, hold what training saw, to the bit. The gradient passes the rounding as if it were not there
(straight through): no value lies outside of its group's range, so none is held back.

Only routed experts are rounded, where nearly all parameters are: the report's W4A8 has experts in 4 bits, attention and
other feed-forward layers in 8. It names no group size; 128 is that of public kernels for such training.
Source: report, sections 2.4.3 and 5. Read next: `glm5.kernels.formats`, `glm5.model.moe`, `glm5.posttrain.sft`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from glm5.kernels.formats import Packed, pack, rounded
from glm5.model.config import ModelConfig
from glm5.model.glm5 import GLM5
from glm5.model.moe import Experts
from glm5.utils.errors import ConfigError

GROUP = 128
MARK = "glm5_qat"  # field of a config.json: how the weights were trained last


class _Straight(Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, group: int) -> Tensor:
        return rounded(weight, "int4", columns=group).to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def read_at_int4(weight: Tensor, group: int) -> Tensor:
    """What products read of a weight [..., R, C], in its dtype; its gradient is the weight's."""
    defer: Callable[..., None] | None = getattr(weight, "defer", None)
    if defer is None:
        out: Tensor = _Straight.apply(weight, group)
        return out
    # A pipeline asks for the product that makes the gradient, and adds it to the weight's own: no graph in between.
    leaf = rounded(weight.detach(), "int4", columns=group).to(weight.dtype).requires_grad_(weight.requires_grad)
    leaf.defer = lambda _, compute: defer(weight, compute)  # type: ignore[attr-defined]
    return leaf


def train_at_int4(model: GLM5, group: int) -> frozenset[str]:
    """Let a model read its experts at INT4 from now on, in place; names and values of its weights stay. It is said in
    the configuration that it saves.

    Args:
        group: columns that share a scale.

    Returns:
        The names of the parameters that are rounded.

    Raises:
        ConfigError: as `check`.
    """
    check(model.config, group)
    names = set()
    for name, module in model.named_modules():
        if isinstance(module, Experts):
            module.through = partial(read_at_int4, group=group)
            names |= {f"{name}.{own}" for own, _ in module.named_parameters(recurse=False)}
    model.config = marked(model.config, group)
    return frozenset(names)


def check(config: ModelConfig, group: int) -> None:
    """Whether a model can be trained so.

    Raises:
        ConfigError: it has no experts, or a row of theirs is no whole number of groups.
    """
    if not any(map(config.is_moe, range(config.num_cache_layers))):
        raise ConfigError("qat", "int4", "rounds routed experts, and this model has none: leave it out")
    widths = (config.hidden_size, config.moe_intermediate_size)
    if group < 2 or group % 2 or any(width % group for width in widths):
        rule = f"must be even and divide the rows of the experts' matrices, of {widths[0]} and {widths[1]} columns"
        raise ConfigError("qat_group", group, rule)


def marked(config: ModelConfig, group: int | None) -> ModelConfig:
    """The configuration with the mark of this group size, or without one, as weights that learn otherwise have it."""
    others = {name: value for name, value in config.extra.items() if name != MARK}
    mark = {} if group is None else {MARK: {"format": "int4", "group": group, "weights": "experts"}}
    return config.replace(extra={**others, **mark})


@torch.no_grad()
def pack_experts(experts: Experts, group: int) -> tuple[Packed, Packed]:
    """gate_up_proj and down_proj in INT4, as training at INT4 has read them."""
    gate_up, down = (pack(w, "int4", columns=group) for w in (experts.gate_up_proj, experts.down_proj))
    return gate_up, down
