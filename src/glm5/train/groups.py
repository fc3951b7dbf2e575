"""Documents of all lengths in one batch: data-parallel ranks divide into context-parallel groups of different sizes.

For every step `glm5.data.balance.plan_groups` cuts the batch's documents into micro-steps, and in each the ranks into
groups of 1, 2, 4, ... neighbours. A group's documents follow each other in one row, whose positions its ranks share by
cost; a rank without a group runs a row of padding, since parameters are gathered and experts asked by all together.
Losses are sums, divided once by the counts of the whole batch, so that the gradient is that of any other division:
one process's, which packs the same documents into rows of its own. The plan depends on lengths and settings alone.
Source: report section 2.4.2. Read next: `loop`, `glm5.parallel.context`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from glm5.data.balance import BatchPlan, CostModel, context_spans, plan_groups, plan_uniform
from glm5.data.loader import TokenDataset
from glm5.train.config import TrainConfig
from glm5.train.ranks import Ranks
from glm5.train.rows import Rows
from glm5.utils.errors import ConfigError

# A row's length is a multiple of so many tokens for each of its ranks: few shapes, and shares of one size.
MULTIPLE = 16


def rows_for(stage: TrainConfig, data: TokenDataset) -> TokenDataset:
    """The rows that a stage trains on: packed as they are, or whole documents."""
    if not stage.context_groups or data.strategy == "whole":
        return data
    return TokenDataset(data.store, data.seq_len, data.ahead, "whole")


class Groups:
    """Plans each step of a stage, and makes this rank's rows of it.

    Args:
        capacity: tokens that a rank holds at once. dataset: of "whole" rows. cost: what work costs.
        ranks: of which those along `dp` form groups. model: whose experts are told that ranks differ.

    Raises:
        ConfigError: rows are packed, or the longest do not fit on all ranks together.
    """

    def __init__(self, capacity: int, dataset: TokenDataset, cost: CostModel, ranks: Ranks, model: Any) -> None:
        self.capacity, self.dataset, self.cost, self.ranks = capacity, dataset, cost, ranks
        if dataset.strategy != "whole":
            rule = f"needs rows of whole documents, and these are {dataset.strategy}"
            raise ConfigError("context_groups", capacity, rule)
        count = ranks.count("dp")
        if capacity * count < dataset.seq_len:
            least = -(-dataset.seq_len // count)
            rule = f"must be at least {least}: {count} ranks together hold a document of {dataset.seq_len:,} tokens"
            raise ConfigError("context_groups", capacity, rule)
        self._found: dict[int, dict[str, Any]] = {}
        if ranks.groups is not None:
            from glm5.parallel.expert import SpreadExperts

            for module in model.modules():
                if isinstance(module, SpreadExperts):
                    module.alike = False

    def plan(self, numbers: NDArray[np.int64]) -> BatchPlan:
        """Who does what of these rows; groups name them by their place in `numbers`."""
        return plan_groups(self.dataset.lengths(numbers), self.ranks.count("dp"), self.capacity, self.cost)

    def rows(self, first: int, numbers: NDArray[np.int64], device: torch.device) -> list[Rows]:
        """This rank's micro-batches of the step that begins with sample `first` and has these rows."""
        plan = self.plan(numbers)
        self._found[first] = self._figures(plan, self.dataset.lengths(numbers))
        place = 0 if self.ranks.world is None else self.ranks.world.place("dp")
        made = []
        for step in range(len(plan.steps)):
            group = plan.group_of(step, place)
            own = numbers[list(group.sequences)] if group is not None else numbers[:0]
            size, of = (1, 0) if group is None else (group.size, group.first)
            made.append(self._row(own, size, of, device))
        return made

    def _row(self, numbers: NDArray[np.int64], size: int, first: int, device: torch.device) -> Rows:
        """The row of a group of so many ranks from place `first` on, or this rank's positions of it."""
        multiple = MULTIPLE * size
        used = int(self.dataset.lengths(numbers).sum()) if len(numbers) else 0
        batch = self.dataset.end_to_end(numbers, max(1, -(-used // multiple)) * multiple)
        rows = replace(Rows.of(batch, device), sequences=max(1, len(numbers)))
        if size == 1:
            return rows
        from glm5.parallel.context import ContextRows

        assert self.ranks.groups is not None
        seen_T = np.maximum(np.arange(1, batch.seq_len + 1) - batch.first_BT[0], 0)
        spans = context_spans(self.cost.queries(seen_T), size)
        seen = rows.seen if self.ranks.by_heads else ()
        return rows.shared(ContextRows(spans, rows.first_BS, self.ranks.groups.ways(first, size), seen=seen))

    def _figures(self, plan: BatchPlan, lengths: NDArray[np.int64]) -> dict[str, Any]:
        sizes = [group.size for step in plan.steps for group in step]
        uniform = plan_uniform(lengths, plan.ranks, self.capacity)
        return {
            "context_groups": {str(size): sizes.count(size) for size in sorted(set(sizes))},
            "context_steps": len(plan.steps),
            "imbalance": plan.time(lengths, self.cost),
            "imbalance_uniform": uniform.time(lengths, self.cost),
        }

    def figures(self, first: int) -> dict[str, Any]:
        """Metrics of the step that began with this sample: groups by size, micro-steps, and the time of the step over
        that of its work spread evenly, by counts: as planned, and with the usual groups of one size."""
        found = self._found[first]
        self._found = {at: x for at, x in self._found.items() if at > first}
        return found
