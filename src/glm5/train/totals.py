"""What a step adds up over its micro-batches: the counts that sums are divided by, and the metrics they become.

Losses are sums divided once by the whole step's counts, so a gradient does not depend on how a step is cut into
micro-batches. Read next: `loop`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from glm5.kernels.indexer_loss import IndexerLoss
from glm5.train.ranks import Ranks


@dataclass(frozen=True)
class Counts:
    """What a whole step's sums are divided by: rows, rows with MTP, tokens to predict, queries that see something.

    pairs: what the queries see, added up. selected: the same, of each at most what an indexer selects.
    """

    rows: int
    mtp_rows: int
    tokens: int
    queries: int
    pairs: int = 0
    selected: int = 0


def weighted(terms: list[Tensor], trunk: int, per_depth: float) -> Tensor:
    """The sum of the trunk's terms, and of those of the MTP block's depths at their weight."""
    total = torch.stack(terms[:trunk]).sum() if trunk else terms[0].new_zeros(())
    return total + per_depth * torch.stack(terms[trunk:]).sum() if len(terms) > trunk else total


class Totals:
    """Sums over the micro-batches of a step."""

    def __init__(self, routers: int, layers: int) -> None:
        self.ce: Tensor | None = None
        self.ce_tokens: Tensor | None = None
        self.loads: list[Tensor] = []
        self.routers = routers
        self.indexers = IndexerFigures(layers)

    def add_lm(self, ce_sums: Tensor, tokens: Tensor) -> None:
        if self.ce is None or self.ce_tokens is None:
            self.ce, self.ce_tokens = ce_sums, tokens
            return
        # Later micro-batches may have no row for MTP.
        missing = len(self.ce) - len(ce_sums)
        self.ce = self.ce + F.pad(ce_sums, (0, missing))
        self.ce_tokens = self.ce_tokens + F.pad(tokens, (0, missing))

    def add_loads(self, loads: list[Tensor]) -> None:
        """Loads in the order of the layers; the MTP block's of all depths count as one router's."""
        if not loads:
            return
        own = loads[: self.routers]
        for extra in loads[self.routers :]:
            own[-1] = own[-1] + extra
        if len(own) < self.routers:  # MTP did not run: its router keeps its bias
            own += [torch.zeros_like(own[0])] * (self.routers - len(own))
        self.loads = own if not self.loads else [a + b for a, b in zip(self.loads, own, strict=True)]

    def empty(self) -> Totals:
        """Sums of the same kinds, of nothing yet."""
        return Totals(self.routers, self.indexers.layers)

    def add(self, other: Totals) -> None:
        """Add what others have added up, and copy it: they may go on."""
        if other.ce is not None and other.ce_tokens is not None:
            self.add_lm(other.ce.clone(), other.ce_tokens.clone())
        if other.loads:
            self.add_loads(list(torch.stack(other.loads)))

    @property
    def own_loads(self) -> list[Tensor]:
        """Loads of the routers that are here."""
        return self.loads

    def over(self, ranks: Ranks) -> None:
        """Add up over all ranks. Every rank has added the same kinds of sums."""
        for x in (self.ce, self.ce_tokens, self.indexers.sums):
            if x is not None:
                ranks.sum(x)
        if self.loads:
            self.loads = list(ranks.sum(torch.stack(self.loads)))
        if self.indexers.maxima:
            self.indexers.maxima = list(ranks.largest(torch.stack(self.indexers.maxima)))

    def metrics(self, bytes_per_token: float, *, recall: bool) -> dict[str, Any]:
        out: dict[str, Any] = {}
        if self.ce is not None and self.ce_tokens is not None:
            losses = (self.ce / self.ce_tokens.clamp(min=1)).tolist()
            out["loss"] = losses[0]
            out["bits_per_byte"] = losses[0] / math.log(2) / bytes_per_token
            out.update({f"mtp_loss_{d}": x for d, x in enumerate(losses[1:], 1)})
        if self.loads:
            share = torch.stack(self.loads).float()
            share = share / share.sum(-1, keepdim=True).clamp(min=1) * share.shape[-1]
            out["expert_load_max"] = float(share.max())  # 1 is perfect balance
            out["expert_load_min"] = float(share.min())
        out.update(self.indexers.metrics(recall=recall))
        return out


class IndexerFigures:
    """The indexers' figures over the micro-batches of a step: means over queries and layers, maxima by layer."""

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.sums: Tensor | None = None  # KL, recall, queries
        self.maxima: list[Tensor] = []

    def add(self, losses: list[IndexerLoss]) -> None:
        sums = torch.stack([torch.stack((x.kl.detach(), x.recall_sum, x.queries)) for x in losses]).sum(0)
        self.sums = sums if self.sums is None else self.sums + sums
        maxima = [x.logit_max_H.amax() for x in losses]
        if len(maxima) > self.layers:  # the MTP block's depths are one layer
            maxima[self.layers :] = [torch.stack(maxima[self.layers :]).max()]
        paired = zip_longest(self.maxima, maxima)
        self.maxima = [b if a is None else a if b is None else torch.maximum(a, b) for a, b in paired]

    def metrics(self, *, recall: bool = True) -> dict[str, Any]:
        """`recall` is meant of the dense attention: on a selection alone it would always be 1."""
        if self.sums is None:
            return {}
        kl, recalled, queries = self.sums.tolist()
        maxima = torch.stack(self.maxima).tolist()
        out: dict[str, Any] = {"indexer_kl": kl / max(queries, 1)}
        if recall:
            out["indexer_recall"] = recalled / max(queries, 1)
        return {
            **out,
            "attention_logit_max": max(maxima),
            "attention_logit_max_by_layer": [round(x, 3) for x in maxima],
        }
