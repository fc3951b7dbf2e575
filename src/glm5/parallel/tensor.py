"""Tensor parallelism: attention by heads, dense feed-forwards and the shared expert by their inner width.

Megatron's pairs: a product cut by columns, whose input's gradient is summed, then one cut by rows, whose output is
summed. MLA's low-rank projections, its latent row, the norms, the router and the whole indexer are small and stay whole
on every rank; a rank expands the latent into its own heads' keys and values only. The rotary key is shared by all
heads, so its gradient is summed beside the latent's: one sum for the row of both. The indexer learns from all heads'
attention, so for its loss the heads are gathered. What is whole has the same values and gradients on every rank of the
group. Source: report section 2.4; arXiv:1909.08053. Read next: `collectives`, `glm5.model.mla`.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Shard

from glm5.kernels.basic import swiglu
from glm5.kernels.visibility import Visibility
from glm5.model.cache import Part
from glm5.model.glm5 import GLM5
from glm5.model.gqa import GQA
from glm5.model.layers import SwiGLU
from glm5.model.mla import MLA
from glm5.model.trace import Aux
from glm5.parallel.collectives import copied, gathered_heads, summed
from glm5.parallel.expert import local
from glm5.parallel.mesh import World
from glm5.utils.errors import ConfigError


class LocalLinear(nn.Linear):
    """A Linear that multiplies by this rank's part of its weight: no communication of its own, and no bias."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, local(self.weight))


class ColumnLinear(LocalLinear):
    """A Linear whose outputs are divided over the group: each rank has its own."""

    group: ProcessGroup

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(copied(x, self.group))


class RowLinear(LocalLinear):
    """A Linear whose inputs are divided over the group: the products are summed, then the whole bias is added."""

    group: ProcessGroup

    def forward(self, x: Tensor) -> Tensor:
        y = summed(super().forward(x), self.group)
        return y if self.bias is None else y + self.bias


class ShardedMLA(MLA):
    """MLA whose indexer's parameters are gathered when it is called, so that it never reads its weights itself."""

    def _few(self, x_BTD: Tensor, rope: Tensor, into: object) -> None:
        return None


class TensorMLA(ShardedMLA):
    """MLA with this rank's heads."""

    group: ProcessGroup

    def _expand(self, rows_BSX: Tensor) -> tuple[Tensor, Tensor]:
        return super()._expand(copied(rows_BSX, self.group))

    def _prefers_absorbed(self, queries: int, visible: Visibility, selected: Tensor | None) -> bool:
        return False  # the absorbed form reads the whole kv_b_proj

    def _observe(
        self,
        aux: Aux,
        part: Part,
        index_q: tuple[Tensor, Tensor] | None,
        q_BTHX: Tensor,
        keys_BSHX: Tensor,
        selected: Tensor | None,
        lse_BTH: Tensor | None = None,  # of this rank's heads only
    ) -> None:
        q_BTHX, keys_BSHX = gathered_heads(q_BTHX, self.group), gathered_heads(keys_BSHX, self.group)
        super()._observe(aux, part, index_q, q_BTHX, keys_BSHX, selected)


class TensorSwiGLU(SwiGLU):
    """SwiGLU with this rank's share of the inner width: one sum of the input's gradient, one of the output."""

    group: ProcessGroup

    def forward(self, x: Tensor) -> Tensor:
        x = copied(x, self.group)
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


def split_tensors(model: GLM5, world: World) -> None:
    """Keep this rank's heads and widths. Parameters become DTensors over the axis `tp`; names and global shapes stay.

    Args:
        model: the same whole model on every rank.

    Raises:
        ConfigError: the attention is one that is not divided.
    """
    ranks = world.count("tp")
    if ranks == 1:
        return
    for module in list(model.modules()):
        if isinstance(module, GQA):
            raise ConfigError("mesh.tp", ranks, "GQA, the report's baseline, is not divided: use tp=1")
        if isinstance(module, MLA):
            module.heads //= ranks
            _become(module, TensorMLA, world)
            _cut(module.q_b_proj, ColumnLinear, 0, world)
            _cut(module.kv_b_proj, LocalLinear, 0, world)
            _cut(module.o_proj, RowLinear, 1, world)
        elif isinstance(module, SwiGLU):
            _become(module, TensorSwiGLU, world)
            _cut(module.gate_proj, LocalLinear, 0, world)
            _cut(module.up_proj, LocalLinear, 0, world)
            _cut(module.down_proj, RowLinear, 1, world)


def _become(module: nn.Module, kind: type[nn.Module], world: World) -> None:
    """Give a module the class that knows its group; its parameters and their names stay."""
    module.__class__ = kind
    module.group = world.group("tp")  # type: ignore[assignment]


def _cut(linear: nn.Linear, kind: type[nn.Linear], dim: int, world: World) -> None:
    """Keep one chunk of a weight along `dim`."""
    weight = linear.weight
    own = weight.detach().chunk(world.count("tp"), dim)[world.place("tp")].contiguous().clone()
    whole = DTensor.from_local(
        own, world.dense["tp"], [Shard(dim)], run_check=False, shape=weight.shape, stride=weight.stride()
    )
    linear.weight = nn.Parameter(whole, requires_grad=weight.requires_grad)
    _become(linear, kind, world)
