"""Expert parallelism: each rank holds some of the experts, and tokens travel to them and back.

A token goes to each of its experts' ranks by an all-to-all of uneven splits, sorted by expert so that rows leave in the
order in which they are wanted; the experts run as grouped products on whatever arrived; the way back is the same
exchange, and the weighted sum over a token's experts is taken where the token lives, in fp32 and in a fixed order. No
token is dropped, nothing is padded. Ranks of one tensor-parallel group hold the same tokens; each sends its share
of them, and the results are gathered.

In training, groups of no more ranks than a token has experts gather all tokens instead: each rank answers with its
experts' part of every token's sum, which is rounded to the model's dtype before the ranks' parts are added. Source:
report section 2.4; DeepSeek-V3. Read next: `glm5.kernels.moe`, `shard`.

Legend: N tokens · M experts of a token · E experts · e experts of this rank · R ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from glm5.kernels.moe import grouped_swiglu, rows_by_pair, sum_by_token
from glm5.model.glm5 import GLM5
from glm5.model.moe import Experts, MoE
from glm5.parallel.collectives import (
    Exchange,
    Gathering,
    all_gather,
    exchanged,
    gathered,
    joined_rows,
    scattered_sum,
    split_rows,
)
from glm5.parallel.mesh import World


class ShardedMoE(MoE):
    """A MoE whose parameters are gathered module by module, so that it never reads its parts' weights itself."""

    def _at_once(self, x_ND: Tensor) -> None:
        return None

    def _both(self, x_ND: Tensor, expert_NM: Tensor, weight_NM: Tensor) -> tuple[Tensor, Tensor | None]:
        experts, shared = self.experts, self.shared_experts
        if shared is None or not isinstance(experts, SpreadExperts):
            return super()._both(x_ND, expert_NM, weight_NM)
        found: list[Tensor] = []
        routed = experts(x_ND, expert_NM, weight_NM, lambda: found.append(shared(x_ND)))
        return routed, found[0]


class SpreadExperts(Experts):
    """Experts of which this rank holds `E / R`: parameters are DTensors, Shard(0) over the axis `ep`."""

    world: World
    alike = True  # in training, data ranks run as many tokens as each other

    def held(self) -> tuple[Tensor, Tensor]:
        return _working(self.gate_up_proj), _working(self.down_proj)

    def forward(
        self, x_ND: Tensor, expert_NM: Tensor, weight_NM: Tensor, other: Callable[[], None] | None = None
    ) -> Tensor:
        """As `Experts.forward`. `other` is called while tokens are on their way: what it gives the device to do is done
        meanwhile, and its backward pass while their gradients are on the way back."""
        tensor, ranks = self.world.group("tp"), self.world.count("ep")
        # With few ranks it is less to give all to everyone, where each has as many tokens.
        alike = self.alike and tensor.size() == self.world.count("cp") == 1 and torch.is_grad_enabled()
        if alike and ranks <= expert_NM.shape[1]:
            return self._everyone(x_ND, expert_NM, weight_NM, other)
        if tensor.size() == 1:
            return self._routed(x_ND, expert_NM, weight_NM, other)
        own_ND, expert_NM, weight_NM = (split_rows(x, tensor) for x in (x_ND, expert_NM, weight_NM))
        return joined_rows(self._routed(own_ND, expert_NM, weight_NM, other), len(x_ND), tensor)

    def _routed(
        self, x_ND: Tensor, expert_NM: Tensor, weight_NM: Tensor, other: Callable[[], None] | None = None
    ) -> Tensor:
        """The same for tokens that no other rank has."""
        group = self.world.group("ep")
        gate_up, down = self.read()
        tokens, chosen = expert_NM.shape
        # Two bytes are sorted in a quarter of eight's launches.
        sorted_ids, order = expert_NM.flatten().to(torch.int16).sort(stable=True)
        # Counted in what is sorted: `bincount` would wait for the device.
        edges = torch.arange(group.size() * len(gate_up) + 1, dtype=torch.int16, device=x_ND.device)
        sent_Re = torch.searchsorted(sorted_ids, edges).diff().view(group.size(), -1)
        received_Re = torch.empty_like(sent_Re)
        dist.all_to_all_single(received_Re, sent_Re, group=group)
        splits = _ToHost(torch.stack((sent_Re.sum(1), received_Re.sum(1))))
        place_NM = torch.empty_like(order)
        place_NM[order] = torch.arange(len(order), device=order.device)
        place_NM = place_NM.view(tokens, chosen)
        exchange = Exchange(group)
        rows = exchange.leaving(rows_by_pair(x_ND, order, place_NM))  # which the device does while the host waits
        sent, received = splits.value().tolist()
        exchange.start(rows, received, sent)
        if other is not None:
            other()
        arrived = exchange.arrived(rows)
        mine = torch.arange(len(gate_up), device=x_ND.device).repeat(group.size())
        expert = mine.repeat_interleave(received_Re.flatten(), output_size=sum(received))
        out = _apart(arrived, expert, gate_up, down)
        back = exchanged(out, sent, received, group)
        return sum_by_token(back, order, place_NM, weight_NM)

    def _everyone(
        self, x_ND: Tensor, expert_NM: Tensor, weight_NM: Tensor, other: Callable[[], None] | None = None
    ) -> Tensor:
        """The same by giving all tokens to every rank, which answers with the part of its experts: R - 1 copies of a
        token leave in place of one for each expert elsewhere, and shapes are known beforehand."""
        group = self.world.group("ep")
        gate_up, down = self.read()
        own, choices = len(gate_up), expert_NM.shape[1]
        gathering = Gathering(group)
        x_ND = gathering.leaving(x_ND)
        gathering.start(x_ND)
        local_AM = all_gather(expert_NM.contiguous(), group) - group.rank() * own  # A: of all ranks
        weight_AM = gathered(weight_NM, group)
        held_AM = (local_AM >= 0) & (local_AM < own)
        sorted_ids, order = torch.where(held_AM, local_AM, own).flatten().to(torch.int16).sort(stable=True)
        count = _ToHost(held_AM.sum())
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        if other is not None:
            other()
        here = int(count.value())
        order_P, place_AM = order[:here], place.clamp(max=max(here - 1, 0)).view(-1, choices)
        x_AD, weight = gathering.arrived(x_ND), weight_AM * held_AM
        out = _apart(rows_by_pair(x_AD, order_P, place_AM, held_AM.float()), sorted_ids[:here].long(), gate_up, down)
        if here == 0:
            out, order_P = F.pad(out, (0, 0, 0, 1)), order[:1]
        return scattered_sum(sum_by_token(out, order_P, place_AM, weight), group)


class _ToHost:
    """A tensor on its way to the host: waiting for it waits for nothing that the device was given later."""

    def __init__(self, x: Tensor) -> None:
        self._copy = x.to("cpu", non_blocking=True)
        self._done = torch.cuda.Event() if x.is_cuda else None
        if self._done is not None:
            self._done.record()

    def value(self) -> Tensor:
        if self._done is not None:
            self._done.synchronize()
        return self._copy


def _apart(rows: Tensor, expert: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Each row through its expert. Without rows, a row of zeros keeps the weights' gradients: zeros, not none."""
    empty = len(rows) == 0
    if empty:
        rows, expert = F.pad(rows, (0, 0, 0, 1)), F.pad(expert, (0, 1))
    ones = torch.ones(len(rows), 1, device=rows.device)
    out = grouped_swiglu(rows, gate_up, down, expert[:, None], ones)
    return out[:0] if empty else out


def spread_experts(model: GLM5, world: World) -> None:
    """Keep this rank's experts of every MoE layer. Parameters become DTensors; names and global shapes stay.

    Args:
        model: the same whole model on every rank.
    """
    mesh = world.expert["ep"]
    place, ranks = world.place("ep"), world.count("ep")
    for module in model.modules():
        if not isinstance(module, MoE):
            continue
        module.__class__ = ShardedMoE
        if world.count("ep") == world.count("tp") == 1:
            continue
        experts = module.experts
        for name, parameter in list(experts.named_parameters(recurse=False)):
            own = parameter.detach().chunk(ranks)[place].clone()
            whole = DTensor.from_local(
                own, mesh, [Shard(0)], run_check=False, shape=parameter.shape, stride=parameter.stride()
            )
            setattr(experts, name, nn.Parameter(whole, requires_grad=parameter.requires_grad))
        experts.__class__ = SpreadExperts
        experts.world = world  # type: ignore[assignment]


def _working(weight: Tensor) -> Tensor:
    """This rank's part of the experts, to multiply with. If the whole's gradient may wait, then so may the part's."""
    part, defer = local(weight), getattr(weight, "defer", None)
    if defer is None or not isinstance(weight, DTensor):
        return part
    mesh, placements, shape, stride = weight.device_mesh, weight.placements, weight.shape, weight.stride()

    def later(_: Tensor, compute: Callable[[], Tensor]) -> None:
        def whole() -> Tensor:
            return DTensor.from_local(compute(), mesh, placements, run_check=False, shape=shape, stride=stride)

        defer(weight, whole)

    leaf = part.detach().requires_grad_()  # no gradient flows back through the part: it all waits
    leaf.defer = later  # type: ignore[attr-defined]
    return leaf


def local(t: Tensor) -> Tensor:
    """What this rank holds of a tensor: all of a plain one."""
    return t.to_local() if isinstance(t, DTensor) else t
