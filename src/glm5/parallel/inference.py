"""A model divided for inference: a rank reads and holds its part as plain tensors, so that every operator still runs.

Tensor parallel, over the axis `tp`: a rank has some heads of attention and a share of every feed-forward's inner width,
the routed experts' included, so that a layer has two sums, one after attention and one after the feed-forward. Expert
parallel, over the axis `ep`: a rank has some of the experts, whole or by its share of their width, and tokens travel to
them and back (`expert`); or, where sizes must be known beforehand or sums keep to one order, every rank reads all
tokens, and answers with its experts' part of each one's sum. The head is divided by its rows; whoever wants logits
brings the parts together. MLA's low-rank projections, the indexer, the router, the norms and the embedding are whole on
every rank: the ranks of a `tp` group read the same tokens, compute the same latent rows, scores and selections from the
same bits, and keep pages of their own.

`tensor`, `expert` and `shard` divide a model that trains: as DTensors, with gradients. Read next: `glm5.serve.ranks`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from glm5.kernels.fits import FEW
from glm5.kernels.moe import grouped_swiglu
from glm5.model.config import ModelConfig
from glm5.model.glm5 import GLM5
from glm5.model.layers import Linear, SwiGLU
from glm5.model.mla import MLA
from glm5.model.moe import MoE
from glm5.parallel.collectives import all_gather
from glm5.parallel.expert import SpreadExperts
from glm5.parallel.mesh import Mesh, World
from glm5.utils.errors import ConfigError

# By public names: what is cut along its rows, and what along its columns.
_ROWS = re.compile(r".*\.(self_attn\.(q_b_proj|kv_b_proj)|gate_proj|up_proj)\.weight|lm_head\.weight")
_COLUMNS = re.compile(r".*\.(self_attn\.o_proj|down_proj)\.weight")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")
_FUSED = re.compile(r".*\.experts\.(gate_up_proj|down_proj)")


class SummedLinear(Linear):
    """A Linear with this rank's columns: the products are summed, then the whole bias is added."""

    group: ProcessGroup
    ordered: bool

    def forward(self, x: Tensor) -> Tensor:
        y = _summed(F.linear(x, self.weight), self.group, self.ordered)
        return y if self.bias is None else y + self.bias


class SummedSwiGLU(SwiGLU):
    """SwiGLU with this rank's share of the inner width."""

    group: ProcessGroup
    ordered: bool

    def forward(self, x: Tensor) -> Tensor:
        return _summed(super().forward(x), self.group, self.ordered)


class SummedMoE(MoE):
    """A MoE whose experts, the shared one included, are here with a share of their width: one sum for all of them."""

    group: ProcessGroup
    ordered: bool

    def forward(self, x_BTD: Tensor, **options: Any) -> Tensor:
        return _summed(super().forward(x_BTD, **options), self.group, self.ordered)

    def _at_once(self, x_ND: Tensor) -> Tensor | None:
        return None if isinstance(self.experts, ExchangedExperts) else super()._at_once(x_ND)


class ExchangedExperts(SpreadExperts):
    """Some of the experts; every rank of the `ep` group has tokens of its own, maybe none."""

    share: Share

    def forward(
        self, x_ND: Tensor, expert_NM: Tensor, weight_NM: Tensor, other: Callable[[], None] | None = None
    ) -> Tensor:
        if self.share.room is None:
            return self._routed(x_ND, expert_NM, weight_NM, other)
        return self._in_room(x_ND, expert_NM, weight_NM, self.share.room)

    def _in_room(self, x_ND: Tensor, expert_NM: Tensor, weight_NM: Tensor, room: int) -> Tensor:
        """The same from all ranks' tokens, `room` of each, by exchanges whose sizes the host knows: a rank answers with
        its experts' part of every token's sum, in the order of the token's choices, rounded to x's dtype; the parts
        are added in the order of the ranks, in fp32. A: tokens of all ranks."""
        group, own = self.world.group("ep"), len(self.gate_up_proj)
        said = [t.contiguous().view(torch.uint8) for t in (x_ND, weight_NM, expert_NM.to(torch.int32))]
        heard = all_gather(F.pad(torch.cat(said, 1), (0, 0, 0, room - len(x_ND))), group)
        parts = heard.split([t.shape[1] for t in said], 1)
        kinds = x_ND.dtype, torch.float32, torch.int32
        x_AD, weight_AM, expert_AM = (p.contiguous().view(kind) for p, kind in zip(parts, kinds, strict=True))
        local_AM = expert_AM.long() - group.rank() * own
        held_AM = (local_AM >= 0) & (local_AM < own)
        # What is others' weighs nothing here, and reads an expert that is read anyway.
        local_AM = torch.where(held_AM, local_AM, torch.where(held_AM, local_AM, 0).amax())
        weight_AM = weight_AM * held_AM
        # On a CPU the operators that compute each row by itself take few at a time.
        each = FEW if self.share.ordered and not x_ND.is_cuda else len(x_AD)
        chosen = zip(x_AD.split(each), local_AM.split(each), weight_AM.split(each), strict=True)
        out = [grouped_swiglu(x, self.gate_up_proj, self.down_proj, expert, weight) for x, expert, weight in chosen]
        sent = torch.cat(out)
        back = torch.empty_like(sent)
        dist.all_to_all_single(back, sent, group=group)
        return _added(back.unflatten(0, (group.size(), room)))[: len(x_ND)]


def _added(parts: Iterable[Tensor]) -> Tensor:
    """Their sum, added in their order in fp32 and rounded once."""
    first, *others = parts
    total = first.float()
    for part in others:
        total = total + part
    return total.to(first.dtype)


def _summed(x: Tensor, group: ProcessGroup, ordered: bool) -> Tensor:
    """The sum over the group, in place of x, the same bits on every rank.

    Args:
        ordered: add in the order of the ranks, in fp32, wherever a number lies in x: an all-reduce takes parts of x in
            different orders.
    """
    if group.size() == 1:
        return x
    if ordered:
        return _added(_gathered(x, group))
    x = x.contiguous()
    dist.all_reduce(x, group=group)
    return x


def check(mesh: Mesh, config: ModelConfig) -> None:
    """Whether a model can be served by such a mesh.

    Raises:
        ConfigError: heads, widths or experts do not divide, or an axis is one of training only.
    """
    for axis in ("pp", "shard"):
        if getattr(mesh, axis) > 1:
            rule = "is of training only: serve with tp, cp, dp and ep"
            raise ConfigError(f"mesh.{axis}", getattr(mesh, axis), rule)
    if mesh.cp > 1 and mesh.ep > 1:
        raise ConfigError("mesh.cp", mesh.cp, "is served without ep: leave one of them out")
    mesh.check_model(config)
    if config.attention != "mla" and mesh.size > 1:
        raise ConfigError("mesh", str(mesh), f"the attention {config.attention} is not served on several ranks")
    if config.moe_intermediate_size % mesh.tp:
        rule = f"must divide moe_intermediate_size={config.moe_intermediate_size}"
        raise ConfigError("mesh.tp", mesh.tp, rule)


class Share:
    """This rank's part of a model: a `glm5.model.weights.Share`.

    Args:
        ordered: sums between ranks have one order for every row, more slowly.

    Attributes:
        room: tokens of each rank in exchanges of experts; None if each has its own number (see `with_room`).
    """

    def __init__(self, world: World, config: ModelConfig, *, ordered: bool = False) -> None:
        check(world.mesh, config)
        self.world, self.ordered, self._tied = world, ordered, config.tie_word_embeddings
        self.tp, self._tp_place = world.count("tp"), world.place("tp")
        self.ep, self._ep_place = world.count("ep"), world.place("ep")
        each = config.n_routed_experts // self.ep
        self._experts = range(self._ep_place * each, (self._ep_place + 1) * each)
        self.room: int | None = None

    @contextmanager
    def with_room(self, tokens: int | None) -> Iterator[None]:
        """Inside it all ranks of an `ep` group exchange so many tokens each, at least as many as any of them has."""
        before, self.room = self.room, tokens
        try:
            yield
        finally:
            self.room = before

    # ------------------------------------------------------------------ the model
    def cut(self, model: GLM5) -> None:
        """See `glm5.model.weights.Share`."""
        for block in model.model.layers:
            attention, mlp = block.self_attn, block.mlp
            assert isinstance(attention, MLA)
            attention.heads //= self.tp
            self._shrink(attention.q_b_proj, attention.kv_b_proj, attention.o_proj)
            self._become(attention.o_proj, SummedLinear)
            if isinstance(mlp, SwiGLU):
                self._shrink(mlp.gate_proj, mlp.up_proj, mlp.down_proj)
                self._become(mlp, SummedSwiGLU)
                continue
            assert isinstance(mlp, MoE)
            if mlp.shared_experts is not None:
                shared = mlp.shared_experts
                self._shrink(shared.gate_proj, shared.up_proj, shared.down_proj)
            for name, whole in list(mlp.experts.named_parameters()):
                setattr(mlp.experts, name, nn.Parameter(self._fused(name, whole).contiguous()))
            if self.ep > 1:
                mlp.experts.__class__ = ExchangedExperts
                mlp.experts.world, mlp.experts.share = self.world, self  # type: ignore[assignment]
            self._become(mlp, SummedMoE)
        if not self._tied:
            model.lm_head.weight = nn.Parameter(self._rows(model.lm_head.weight).contiguous())

    def _shrink(self, *linears: nn.Linear) -> None:
        """All but the last have this rank's rows, the last its columns."""
        for linear in linears[:-1]:
            linear.weight = nn.Parameter(self._rows(linear.weight).contiguous())
        linears[-1].weight = nn.Parameter(linears[-1].weight.chunk(self.tp, 1)[self._tp_place].contiguous())

    def _become(self, module: nn.Module, kind: type[nn.Module]) -> None:
        module.__class__ = kind
        module.group = self.world.group("tp")  # type: ignore[assignment]
        module.ordered = self.ordered  # type: ignore[assignment]

    def head(self, model: GLM5, hidden_ND: Tensor) -> Tensor:
        """This rank's part of the logits, [N, V / tp]."""
        weight = model.lm_head.weight
        return F.linear(hidden_ND, self._rows(weight) if self._tied else weight)

    def run_empty(self, model: GLM5, *, draft: bool) -> None:
        """Take part in the exchanges of a call of the trunk, or of the MTP block, without tokens of one's own."""
        width, chosen = model.config.hidden_size, model.config.num_experts_per_tok
        x_ND = torch.empty(0, width, dtype=model.dtype, device=model.device)
        expert_NM = torch.empty(0, chosen, dtype=torch.int64, device=model.device)
        weight_NM = torch.empty(0, chosen, dtype=torch.float32, device=model.device)
        for block in [model.mtp] if draft else model.blocks:
            if isinstance(block.mlp, MoE):
                block.mlp.experts(x_ND, expert_NM, weight_NM)

    # ------------------------------------------------------------------ its tensors
    def read(self, name: str, stored: Any) -> tuple[str, Tensor] | None:
        """See `glm5.model.weights.Share`. `stored` may be a tensor, too."""
        if fused := _FUSED.fullmatch(name):
            return name, self._fused(fused[1], stored[:])
        at, place, of = name, self._tp_place, self.tp
        if expert := _EXPERT.fullmatch(name):
            number = int(expert[2])
            if number not in self._experts:
                return None
            at = f"{expert[1]}.{number - self._experts.start}.{expert[3]}"
        shape = stored.shape if isinstance(stored, Tensor) else stored.get_shape()
        if _ROWS.fullmatch(name) and not (self._tied and name == "lm_head.weight"):
            each = shape[0] // of
            return at, stored[place * each : (place + 1) * each]
        if _COLUMNS.fullmatch(name):
            each = shape[1] // of
            return at, stored[:, place * each : (place + 1) * each]
        return at, stored[:]

    def whole(self, name: str, part: Tensor) -> Tensor:
        """A tensor of the model again, by its name there, from all ranks' parts; on all of them."""
        tensor = self.world.group("tp")
        if fused := _FUSED.fullmatch(name):
            if fused[1] == "gate_up_proj":
                part = torch.cat(_gathered(part.unflatten(1, (2, -1)), tensor), 2).flatten(1, 2)
            else:
                part = torch.cat(_gathered(part, tensor), 2)
            return torch.cat(_gathered(part, self.world.group("ep")))
        if _ROWS.fullmatch(name) and not (self._tied and name == "lm_head.weight"):
            return torch.cat(_gathered(part, tensor))
        return torch.cat(_gathered(part, tensor), 1) if _COLUMNS.fullmatch(name) else part

    def _rows(self, whole: Tensor) -> Tensor:
        return whole.chunk(self.tp)[self._tp_place]

    def _fused(self, kind: str, whole: Tensor) -> Tensor:
        """Of the experts here, this rank's share of the width."""
        mine = whole[self._experts.start : self._experts.stop]
        if kind == "down_proj":
            return mine.chunk(self.tp, 2)[self._tp_place]
        return mine.unflatten(1, (2, -1)).chunk(self.tp, 2)[self._tp_place].flatten(1, 2)


def _gathered(part: Tensor, group: ProcessGroup) -> list[Tensor]:
    """Every rank's part, in order."""
    if group.size() == 1:
        return [part]
    part = part.contiguous()
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part, group=group)
    return parts
