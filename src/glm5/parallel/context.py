"""Context parallelism: the ranks of a group share the positions of the same rows, and DSA works across them.

Each rank runs its positions through the whole model. Only attention looks at others: a layer's latent rows and index
keys (704 numbers a position in GLM-5; expanded keys and values would be 32,768) are gathered from all ranks in one
exchange, and every rank scores, selects and attends for its own queries over all of them. Positions keep their slots in
the whole row: causality, documents, rotary angles and the top-k's ties (to the lower position) are those of one
process, so the selection is the same. Backward adds up the ranks' gradients of each row in fp32.

Dense attention has no selection to share and looks at everything. There queries, keys and values travel instead, in one
all-to-all each: every rank attends for some of the heads over the whole rows, by the operators of one process, and
sends the results back. Whatever measures logits or the indexers' loss needs all heads, and takes the latents.

    spans   = context_spans(cost of each position, ranks)              who holds what: glm5.data.balance
    rows    = ContextRows(spans, first_BS, group)
    hidden  = model.hidden(rows.own(ids), cache=rows, aux=rows.aux(...))
    depths  = model.mtp_hidden(hidden, ids, depths, cache=rows)        whole ids: MTP's shift is made before the cut

Losses are sums over the positions held here; their sum over ranks is the one-process sum (cross-entropy, the indexers'
KL, and the balance loss through `Aux.total`). Groups may differ from step to step: `ContextGroups` makes all groups of
neighbours that plans use, once. Source: report section 2.4.2. Read first: `glm5.model.cache.SharedRows`, `exchange`.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from glm5.data.balance import Span
from glm5.kernels.attention import dense_attention
from glm5.kernels.visibility import Visibility
from glm5.model.cache import Part, SharedRows
from glm5.model.trace import Aux
from glm5.parallel.exchange import HeadExchange, Hierarchy, Ways, gather, place_in, scatter_sum
from glm5.parallel.mesh import World
from glm5.utils.errors import ConfigError


@dataclass(frozen=True)
class SpanVisibility(Visibility):
    """Visibility of queries that stand at `spans` of the rows, in order: tiles know the last slot that they reach."""

    spans: tuple[Span, ...] = ()

    def tile(self, start: int, stop: int) -> Visibility:
        """As `Visibility.tile`."""
        spans, at = [], 0
        for a, b in self.spans:
            first, last = max(start, at), min(stop, at + b - a)
            if first < last:
                spans.append((a + first - at, a + last - at))
            at += b - a
        bounds = self.first_BT[:, start:stop], self.last_BT[:, start:stop]
        return SpanVisibility(*bounds, spans[-1][1] if spans else 0, spans=tuple(spans))


class ContextRows(SharedRows):
    """Rows shared by the ranks of a group, and the positions of them that this rank holds.

    Args:
        spans: for each rank of the group, its (start, stop) spans in order; they cover the rows' T positions once.
        first_BS: int64 [B, S], S >= T, the slot where each slot's document begins, past itself for padding. For MTP,
            `depths` more slots than T.
        ways: the group, or the groups within and between hosts; None for one rank alone.
        indexed: whether index keys are wanted: not in dense training without an indexer's loss.
        seen: what the positions of the whole rows see, then at each MTP depth; with it, dense attention is divided by
            heads where they divide.

    Attributes:
        tokens: T.

    Raises:
        ConfigError: the spans are for another number of ranks, or leave out positions or hold one twice.
    """

    def __init__(
        self,
        spans: Sequence[Sequence[Span]],
        first_BS: Tensor,
        ways: Ways | None,
        *,
        indexed: bool = True,
        seen: Sequence[Visibility] = (),
    ) -> None:
        place, ranks = (0, 1) if ways is None else place_in(ways)
        if len(spans) != ranks:
            raise ConfigError("spans", f"for {len(spans)} ranks", f"must be for the {ranks} that share the rows")
        tokens = sum(b - a for own in spans for a, b in own)
        held = [torch.cat([torch.arange(a, b) for a, b in own] or [torch.arange(0)]) for own in spans]
        everyone = torch.cat(held)
        if not torch.equal(everyone.sort().values, torch.arange(tokens)) or tokens > first_BS.shape[1]:
            rule = f"must cover the {first_BS.shape[1]} slots of a row from 0 on, each once"
            raise ConfigError("spans", list(map(list, spans)), rule)
        device = first_BS.device
        self._ways, self._indexed, self._seen = ways, indexed, tuple(seen)
        self._spans, self._first_BS, self.tokens = spans, first_BS.long(), tokens
        # Ranks' shares are gathered at one length; where each slot is then found.
        self._share = max(len(h) for h in held)
        found = torch.empty(tokens, dtype=torch.int64)
        for rank, here in enumerate(held):
            found[here] = rank * self._share + torch.arange(len(here))
        self._found_S = found.to(device)
        self.slot_T = held[place].to(device)
        own = tuple((a, b) for a, b in spans[place])
        last_BT = self.slot_T.expand(len(first_BS), -1)
        reach = own[-1][1] if own else 0
        self.visible: SpanVisibility = SpanVisibility(self._first_BS[:, self.slot_T], last_BT, reach, spans=own)

    def of(self, first_BS: Tensor) -> ContextRows:
        """The same positions of other rows of this length: some of them, or some turned into padding."""
        return ContextRows(self._spans, first_BS, self._ways, indexed=self._indexed)

    def own(self, x_BS: Tensor) -> Tensor:
        """What is held here of a tensor of whole rows, [B, T, …]."""
        return x_BS[:, self.slot_T]

    def aux(self, **options: Any) -> Aux:
        """An `Aux` for calls on these rows; `valid`, where given, is of the positions held here."""
        return Aux(**options, total=self.total)

    def total(self, counts: Tensor) -> Tensor:
        """Counts of sequences, summed over the ranks that share them."""
        if self._ways is None:
            return counts
        counts = counts.clone()
        dist.all_reduce(counts, group=self._ways.all if isinstance(self._ways, Hierarchy) else self._ways)
        return counts

    def store(
        self, layer: int, slot_BT: Tensor | None, visible: Visibility, rows_BTX: Tensor, index_BTI: Tensor
    ) -> list[Part]:
        """As `SharedRows`; latent rows and index keys travel together."""
        if self._ways is None:
            return [Part(visible, rows_BTX, index_BTI)]
        if not self._indexed:
            rows = _Gathered.apply(rows_BTX, self)
            return [Part(visible, rows, rows)]
        both = _Gathered.apply(torch.cat((rows_BTX, index_BTI), dim=-1), self)
        return [Part(visible, *both.split((rows_BTX.shape[-1], index_BTI.shape[-1]), dim=-1))]

    def by_heads(self, *heads: int) -> bool:
        """As `SharedRows`."""
        ranks = 1 if self._ways is None else place_in(self._ways)[1]
        return bool(self._seen) and not any(count % ranks for count in heads)

    def attend(self, q_BTHX: Tensor, k_BTGX: Tensor, v_BTGV: Tensor, scale: float) -> Tensor:
        """As `SharedRows`."""
        here, shares = q_BTHX.shape[1], [q_BTHX, k_BTGX, v_BTGV]
        if here < self._share:
            shares = [F.pad(x, (0, 0, 0, 0, 0, self._share - here)) for x in shares]
        exchange = None if self._ways is None else HeadExchange(self._ways)
        of_heads = shares if exchange is None else exchange.to_heads(*shares)
        q, k, v = (x.index_select(1, self._found_S) for x in of_heads)
        out = dense_attention(q, k, v, self._seen[0], scale)
        found = out.new_zeros(len(out), of_heads[0].shape[1], *out.shape[2:]).index_copy(1, self._found_S, out)
        back = found if exchange is None else exchange.to_positions(found)[0]
        return back[:, :here]

    def ahead(self, depth: int) -> ContextRows:
        """As `SharedRows`.

        Raises:
            ConfigError: `first_BS` has fewer slots after the positions.
        """
        ahead = self._first_BS.shape[1] - self.tokens
        if depth > ahead:
            raise ConfigError("depth", depth, f"these rows have {ahead} slots after their positions")
        here_BT, there_BT = self._first_BS[:, self.slot_T], self._first_BS[:, self.slot_T + depth]
        seen_BT = here_BT.masked_fill(here_BT != there_BT, self.tokens)
        other = copy.copy(self)
        other.visible = replace(self.visible, first_BT=seen_BT)
        other._seen = self._seen[depth:]
        return other


class _Gathered(torch.autograd.Function):
    """[B, T, X] of the positions here to [B, S, X] of all; backward sums every rank's gradient, in fp32."""

    @staticmethod
    def forward(ctx: Any, x_BTX: Tensor, rows: ContextRows) -> Tensor:
        assert rows._ways is not None
        ctx.rows, ctx.tokens = rows, x_BTX.shape[1]
        own = F.pad(x_BTX.transpose(0, 1), (0, 0, 0, 0, 0, rows._share - ctx.tokens)).contiguous()
        return gather(own, rows._ways).flatten(0, 1).index_select(0, rows._found_S).transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, grad_BSX: Tensor) -> tuple[Tensor, None]:
        rows: ContextRows = ctx.rows
        assert rows._ways is not None
        ranks = place_in(rows._ways)[1]
        batch, _, width = grad_BSX.shape
        wide = grad_BSX.transpose(0, 1).to(torch.promote_types(grad_BSX.dtype, torch.float32))
        sent = wide.new_zeros(ranks * rows._share, batch, width).index_copy_(0, rows._found_S, wide)
        own = scatter_sum(sent.view(ranks, rows._share, batch, width), rows._ways)
        return own[: ctx.tokens].transpose(0, 1).to(grad_BSX.dtype), None


def context_ways(world: World) -> Ways:
    """How a mesh's context-parallel ranks reach each other: within and between hosts, where they are on several.

    Ranks that torchrun started on one host are neighbours (LOCAL_WORLD_SIZE of them). Every process calls this.
    """
    mesh, per_host = world.mesh, _per_host(world, world.mesh.cp)
    if per_host is None:
        return world.group("cp")
    mine: Hierarchy | None = None
    for line in world.base.mesh.transpose(2, 3).reshape(-1, mesh.cp).tolist():
        mine = Hierarchy.build(line, per_host) or mine
    assert mine is not None
    return mine


def _per_host(world: World, ranks: int) -> int | None:
    """How many of so many neighbours are on one host; None where all are, or hosts do not divide them."""
    per_host = int(os.environ.get("LOCAL_WORLD_SIZE", world.size)) // world.mesh.tp
    return None if per_host < 2 or ranks <= per_host or ranks % per_host else per_host


def context_groups(world: World) -> ContextGroups:
    """Groups of every size of a mesh's data-parallel ranks. Every process calls this."""
    lines = world.base.mesh.permute(0, 2, 3, 1).reshape(-1, world.mesh.dp).tolist()
    return ContextGroups(lines, _per_host(world, world.mesh.dp))


class ContextGroups:
    """All groups of 2, 4, 8, … neighbouring ranks, made once and in one order: what `glm5.data.balance.Group` names.

    Args:
        lines: lists of equally many global ranks, a power of two: data-parallel ranks that may share rows. Every
            process of the world passes the same lines (one for each place along the other axes).
        per_host: ranks of a line that live on one host; larger groups then exchange within and between hosts.

    Raises:
        ConfigError: a line's length is no power of two, or `per_host` does not divide it.
    """

    def __init__(self, lines: Sequence[Sequence[int]], per_host: int | None = None) -> None:
        self._ways: dict[tuple[int, int], Ways] = {}
        for line in lines:
            ranks = len(line)
            if ranks & (ranks - 1):
                raise ConfigError("ranks", ranks, "must be a power of two, to be halved into groups")
            size = 2
            while size <= ranks:
                for first in range(0, ranks, size):
                    made = self._make(line[first : first + size], per_host)
                    if made is not None:
                        self._ways[first, size] = made
                size *= 2

    @staticmethod
    def _make(ranks: Sequence[int], per_host: int | None) -> Ways | None:
        if per_host is not None and len(ranks) > per_host:
            return Hierarchy.build(ranks, per_host)
        group = dist.new_group(list(ranks))
        return group if isinstance(group, ProcessGroup) and dist.get_rank() in ranks else None

    def ways(self, first: int, size: int) -> Ways | None:
        """The group of so many ranks from place `first` of this rank's line on; None for a rank alone."""
        return None if size == 1 else self._ways[first, size]
