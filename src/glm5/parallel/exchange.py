"""All-to-all in two steps, within a host and then between hosts: fewer and larger messages on the slow links.

Of R ranks on hosts of L, a flat all-to-all sends every rank of another host its own message. Here the ranks of one host
first collect, each for one place among the L, what the whole host has for the ranks at that place; then ranks of equal
place on different hosts exchange it. A rank sends R / L - 1 messages to other hosts in place of R - L, of L times the
size; the bytes between hosts are the same. The result is the flat one's, bit for bit. `HeadExchange` uses it to turn
shards of the sequence into shards of heads (queries, keys, values) and back, tensor after tensor, so that the step
within the host of one tensor runs beside the step between hosts of the one before.

Latents are the same for all heads, so every rank wants all of them: `gather` gets each from another host once and
spreads it within, and its transpose `scatter_sum` adds up gradients within the host before they leave it. Both save a
factor L of the bytes between hosts. Source: report section 2.4.2. Read next: `context`.

Legend: R ranks · L ranks of one host · T local positions · H heads · h local heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from glm5.parallel.collectives import all_gather
from glm5.utils.errors import ConfigError

__all__ = ["HeadExchange", "Hierarchy", "Ways", "all_to_all", "gather", "hierarchical_all_to_all", "scatter_sum"]


@dataclass(frozen=True)
class Hierarchy:
    """Process groups of one rank: all R, those of its host, and those of its place on every host.

    Ranks of a host are neighbours in the order of `all`: rank = host x L + place.
    """

    all: ProcessGroup
    within: ProcessGroup
    across: ProcessGroup

    @classmethod
    def build(cls, ranks: Sequence[int], per_host: int) -> Hierarchy | None:
        """The groups over the global `ranks`, for the ranks among them; None for others.

        Every process of the world calls this, with the same arguments, in the same order.

        Raises:
            ConfigError: the ranks don't fill hosts of `per_host`.
        """
        if per_host < 1 or len(ranks) % per_host:
            raise ConfigError("per_host", per_host, f"must divide the {len(ranks)} ranks that exchange")
        hosts = [list(ranks[i : i + per_host]) for i in range(0, len(ranks), per_host)]
        whole = dist.new_group(list(ranks))
        within = [dist.new_group(host) for host in hosts]
        across = [dist.new_group([host[place] for host in hosts]) for place in range(per_host)]
        me = dist.get_rank()
        if me not in ranks:
            return None
        host, place = divmod(list(ranks).index(me), per_host)
        return cls(whole, within[host], across[place])

    @property
    def per_host(self) -> int:
        return self.within.size()

    @property
    def hosts(self) -> int:
        return self.across.size()


# How ranks reach each other: all alike, or within and between hosts.
Ways = ProcessGroup | Hierarchy


def place_in(ways: Ways) -> tuple[int, int]:
    """This rank's place, and the number of ranks."""
    group = ways.all if isinstance(ways, Hierarchy) else ways
    return group.rank(), group.size()


def gather(x: Tensor, ways: Ways) -> Tensor:
    """Every rank's x, [R, *x.shape], in rank order; without gradient. The same bits either way."""
    if not isinstance(ways, Hierarchy):
        return all_gather(x[None], ways)
    of_place = all_gather(x[None], ways.across)  # [host, X]: from ranks of our place
    return all_gather(of_place[None], ways.within).transpose(0, 1).flatten(0, 1)


def scatter_sum(x_RX: Tensor, ways: Ways) -> Tensor:
    """The sum over ranks of what each has for this one, added in rank order (within the host first); no gradient."""
    if not isinstance(ways, Hierarchy):
        return _start(x_RX.contiguous(), ways)().sum(0)
    return _start(_first(x_RX, ways)().sum(0), ways.across)().sum(0)


def hierarchical_all_to_all(send_RX: Tensor, hierarchy: Hierarchy) -> Tensor:
    """Row r of `send_RX` to rank r; row r of the result came from rank r. Equal to `all_to_all` over `hierarchy.all`.

    Differentiable: the gradient takes the same way back.
    """
    result: Tensor = _AllToAll.apply(send_RX, lambda x: _second(_first(x, hierarchy), hierarchy)())
    return result


def all_to_all(send_RX: Tensor, group: ProcessGroup) -> Tensor:
    """The flat form: one message to each rank. Differentiable."""
    result: Tensor = _AllToAll.apply(send_RX, lambda x: _start(x, group)())
    return result


class _AllToAll(torch.autograd.Function):
    """With equal parts, an all-to-all is its own transpose."""

    @staticmethod
    def forward(ctx: Any, send_RX: Tensor, move: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.move = move
        return move(send_RX.contiguous())

    @staticmethod
    def backward(ctx: Any, grad_RX: Tensor) -> tuple[Tensor, None]:
        return ctx.move(grad_RX.contiguous()), None


def _start(send: Tensor, group: ProcessGroup) -> Callable[[], Tensor]:
    """Begin an all-to-all of equal parts along the first axis. What it gives waits for the result."""
    received = torch.empty_like(send)
    work = dist.all_to_all_single(received, send, group=group, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return received

    return finish


def _first(send_RX: Tensor, hierarchy: Hierarchy) -> Callable[[], Tensor]:
    """Within the host: to the rank at place p, what is meant for place p of every host."""
    hosts, local = hierarchy.hosts, hierarchy.per_host
    by_place = send_RX.unflatten(0, (hosts, local)).transpose(0, 1).contiguous()  # [to place, to host, X]
    return _start(by_place, hierarchy.within)


def _second(first: Callable[[], Tensor], hierarchy: Hierarchy) -> Callable[[], Tensor]:
    """Between hosts, once the first step is there: to every host, what this host has for ranks of our place."""
    collected = first()  # [from place, to host, X]
    finish = _start(collected.transpose(0, 1).contiguous(), hierarchy.across)
    # [from host, from place, X]
    return lambda: finish().flatten(0, 1)


class HeadExchange:
    """Between two ways of sharding [B, T, H, X]: by positions (all heads here) and by heads (all positions here).

    Args:
        ways: how the ranks that share a sequence reach each other.

    All tensors of one call travel as a pipeline: while one is between hosts, the next moves within its host.
    """

    def __init__(self, ways: Ways) -> None:
        self.ways = ways

    def to_heads(self, *tensors_BTHX: Tensor) -> list[Tensor]:
        """Each [B, T, H, X] of this rank's positions becomes [B, R T, H / R, X] of its heads, in rank order.

        Raises:
            ConfigError: heads don't divide among the ranks.
        """
        ranks = place_in(self.ways)[1]
        for x in tensors_BTHX:
            if x.shape[2] % ranks:
                raise ConfigError("heads", x.shape[2], f"must be a multiple of the {ranks} ranks that share a sequence")
        return list(_Exchange.apply(self.ways, True, *tensors_BTHX))

    def to_positions(self, *tensors_BShX: Tensor) -> list[Tensor]:
        """The way back: each [B, R T, h, X] becomes [B, T, R h, X]."""
        return list(_Exchange.apply(self.ways, False, *tensors_BShX))


class _Exchange(torch.autograd.Function):
    """Several tensors, pipelined; the gradients go back as one pipeline, too."""

    @staticmethod
    def forward(ctx: Any, ways: Ways, heads: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.ways, ctx.heads = ways, heads
        return _pipeline(ways, heads, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, *_pipeline(ctx.ways, not ctx.heads, grads)


def _pipeline(ways: Ways, heads: bool, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    ranks = place_in(ways)[1]
    # Cut along the axis that is whole here: heads on the way out, positions on the way back.
    parts = [torch.stack(x.chunk(ranks, 2 if heads else 1)) for x in tensors]
    if isinstance(ways, Hierarchy):
        firsts = [_first(part, ways) for part in parts]
        lasts = [_second(first, ways) for first in firsts]
    else:
        lasts = [_start(part, ways) for part in parts]
    # Join along the axis that was cut: positions of all ranks, or heads of all ranks.
    return tuple(torch.cat(finish().unbind(0), dim=1 if heads else 2) for finish in lasts)
