"""Collectives that gradients pass through, each the transpose of its partner.

    copied       identity          gradient: sum over the group        before a product cut by columns
    summed       sum over group    gradient: identity                  after a product cut by rows
    split_rows   own rows          gradient: all rows, gathered        where ranks share the same rows' work out
    joined_rows  all rows          gradient: own rows                  and where it comes together again
    exchanged    rows to ranks     gradient: the same way back         experts; `Exchange` does it beside other work
    gathered     all ranks' rows   gradient: own rows of the sum       experts of few ranks: each reads all tokens,
    scattered_sum  own rows of the sum  gradient: all ranks' rows      and answers with its experts' part of the sum

In a tensor-parallel group everything outside of these pairs is the same on every rank, gradients included. Source:
Megatron-LM's f and g (arXiv:1909.08053). Read next: `expert`, `tensor`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"  # renamed in 2.13
_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


def copied(x: Tensor, group: ProcessGroup) -> Tensor:
    """x itself; its gradient is summed over the group."""
    out: Tensor = _Copied.apply(x, group)
    return out


def summed(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of every rank's x; each rank's gradient is the result's."""
    out: Tensor = _Summed.apply(x, group)
    return out


def row_range(rows: int, group: ProcessGroup) -> tuple[int, int]:
    """First and past-the-last of this rank's rows: chunks of equal size, the last ones shorter or empty."""
    size = -(-rows // group.size())
    first = min(rows, group.rank() * size)
    return first, min(rows, first + size)


def split_rows(x: Tensor, group: ProcessGroup) -> Tensor:
    """This rank's rows of an x that is the same on all; the gradient is gathered from all."""
    out: Tensor = _SplitRows.apply(x, group)
    return out


def joined_rows(x: Tensor, rows: int, group: ProcessGroup) -> Tensor:
    """All `rows` rows from every rank's share; the gradient is its own rows of the result's."""
    out: Tensor = _JoinedRows.apply(x, rows, group)
    return out


def exchanged(x: Tensor, received: Sequence[int], sent: Sequence[int], group: ProcessGroup) -> Tensor:
    """All-to-all of rows: `sent[r]` rows to rank r, in order, and `received[r]` rows from it, by rank."""
    out: Tensor = _Exchanged.apply(x, list(received), list(sent), group)
    return out


class Exchange:
    """`exchanged`, beside which other things are computed, in the forward pass and in the backward pass:

    rows = exchange.leaving(rows)             the gradient arrives here
    exchange.start(rows, received, sent)
    ...                                       what does not depend on it
    arrived = exchange.arrived(rows)          the gradient sets out here, beside what stands between
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self._splits: tuple[list[int], list[int]] = ([], [])
        self._under_way: tuple[Any, Tensor, Tensor] | None = None  # the source is kept until it has left

    def leaving(self, x: Tensor) -> Tensor:
        """x itself, whose gradient is waited for."""
        out: Tensor = _Leaving.apply(x, self)
        return out

    def start(self, x: Tensor, received: Sequence[int] = (), sent: Sequence[int] = ()) -> None:
        """Send rows as `exchanged` does, and wait for nothing."""
        self._splits = list(received), list(sent)
        self._there(x.detach())

    def arrived(self, x: Tensor) -> Tensor:
        """What other ranks have sent; x is what was given to `start`."""
        out: Tensor = _Arrived.apply(x, self)
        return out

    def _there(self, x: Tensor) -> Tensor:
        return self._send(x, *self._splits)

    def _back(self, grad: Tensor) -> Tensor:
        return self._send(grad, *reversed(self._splits))

    def _send(self, x: Tensor, received: list[int], sent: list[int]) -> Tensor:
        source, out = x.contiguous(), x.new_empty(sum(received), *x.shape[1:])
        work = dist.all_to_all_single(out, source, received, sent, group=self.group, async_op=True)
        self._under_way = work, source, out
        return out

    def _wait(self) -> Tensor:
        assert self._under_way is not None
        (work, _, out), self._under_way = self._under_way, None
        work.wait()
        return out


class Gathering(Exchange):
    """The same of an all-gather: every rank's x, of one shape, one behind the other; gradients are summed."""

    def _there(self, x: Tensor) -> Tensor:
        source, out = x.contiguous(), x.new_empty(self.group.size() * x.shape[0], *x.shape[1:])
        self._under_way = getattr(dist, _GATHER)(out, source, group=self.group, async_op=True), source, out
        return out

    def _back(self, grad: Tensor) -> Tensor:
        source, out = grad.contiguous(), grad.new_empty(grad.shape[0] // self.group.size(), *grad.shape[1:])
        self._under_way = getattr(dist, _SCATTER)(out, source, group=self.group, async_op=True), source, out
        return out


def gathered(x: Tensor, group: ProcessGroup) -> Tensor:
    """Every rank's x, of one shape, one behind the other; gradients are summed."""
    out: Tensor = _Gathered.apply(x, group)
    return out


def scattered_sum(x: Tensor, group: ProcessGroup) -> Tensor:
    """This rank's rows, of as many as any other's, of the sum of every rank's x; all rows get its gradient."""
    out: Tensor = _ScatteredSum.apply(x, group)
    return out


@torch.no_grad()
def gathered_heads(x_BTHX: Tensor, group: ProcessGroup) -> Tensor:
    """[B, T, all heads, X] from every rank's heads, without gradient."""
    if group.size() == 1:
        return x_BTHX
    own = x_BTHX.movedim(2, 0).contiguous()
    return all_gather(own, group).movedim(0, 2)


def all_gather(x: Tensor, group: ProcessGroup) -> Tensor:
    """Every rank's x, of one shape, side by side along the first axis; without gradient."""
    out = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    getattr(dist, _GATHER)(out, x, group=group)
    return out


def _scattered(x: Tensor, group: ProcessGroup) -> Tensor:
    out = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    getattr(dist, _SCATTER)(out, x.contiguous(), group=group)
    return out


def _all_reduced(x: Tensor, group: ProcessGroup) -> Tensor:
    out = x.contiguous().clone()
    dist.all_reduce(out, group=group)
    return out


def _all_rows(x: Tensor, rows: int, group: ProcessGroup) -> Tensor:
    size = -(-rows // group.size())
    padded = F.pad(x, [0, 0] * (x.ndim - 1) + [0, size - len(x)]).contiguous()
    out = all_gather(padded, group)
    return out if rows == len(out) else out[:rows].clone()  # no view: FSDP hangs its hooks on results


def _sent(x: Tensor, received: list[int], sent: list[int], group: ProcessGroup) -> Tensor:
    out = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
    return out


class _Leaving(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.exchange._wait()
        return grad, None


class _Arrived(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange._wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange._back(grad), None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return all_gather(x.contiguous(), group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _scattered(grad, ctx.group), None


class _ScatteredSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _scattered(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_gather(grad.contiguous(), ctx.group), None


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_reduced(grad, ctx.group), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        return _all_reduced(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _SplitRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.rows, ctx.group = len(x), group
        first, last = row_range(len(x), group)
        return x[first:last].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_rows(grad, ctx.rows, ctx.group), None


class _JoinedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: int, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_rows(x, rows, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        first, last = row_range(len(grad), ctx.group)
        return grad[first:last].clone(), None, None


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, received: list[int], sent: list[int], group: ProcessGroup) -> Tensor:
        ctx.received, ctx.sent, ctx.group = received, sent, group
        return _sent(x, received, sent, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _sent(grad, ctx.sent, ctx.received, ctx.group), None, None, None
