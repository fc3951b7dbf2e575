"""Micro-batches as CUDA graphs: forward and backward passes of rows that are alike, recorded once and replayed.

A pass is some hundred launches a layer, and a host that makes them slower than the device runs them is what a step
waits for. Replayed it is one launch. What is recorded reads its rows, and the count that its loss is divided by, from
buffers; its gradients are added to those that the parameters have, which therefore stay where they are from step to
step. The first micro-batch of each kind runs as it is: it compiles and allocates what must not happen in a recording.

Recorded is pre-training on one device, or on several that hold the whole model each: others wait for each other between
layers. Rows of several documents are of one kind where as many of them are whole and about as many documents lie in the
others. Rows that are put together anew for each step (`groups`) are not recorded: hardly two of them are of one length.
Read next: `recorder`, `objective`, `loop`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from glm5.model.glm5 import GLM5
from glm5.train.config import TrainConfig
from glm5.train.objective import Objective
from glm5.train.ranks import Ranks
from glm5.train.recorder import Recorder
from glm5.train.rows import Rows

# Kinds of micro-batches that are recorded; rows of several documents come in many.
MOST_KINDS = 32

log = logging.getLogger(__name__)


def records(config: TrainConfig, ranks: Ranks) -> bool:
    """Whether a stage's micro-batches can be recorded."""
    whole = ranks.alone or (ranks.copies and ranks.count("cp") == ranks.count("tp") == ranks.count("ep") == 1)
    return whole and config.stage == "pretrain" and not config.context_groups


class _Recording:
    """One micro-batch's passes: what they read, and what they made of it when they last ran."""

    def __init__(self, model: GLM5, objective: Objective, rows: Rows, first: int) -> None:
        assert objective.denominator is not None
        self._model, self._objective, self._rows, self._first = model, objective, rows, first
        self._tokens = objective.denominator
        self.loss, self.totals = self._tokens, objective.totals
        self.again: Callable[[], None] = self.run

    def run(self) -> None:
        self.totals = self._objective.totals.empty()
        loss = replace(self._objective, totals=self.totals).of(self._model, self._rows, self._first)
        loss.backward()
        self.loss = loss.detach()

    def load(self, rows: Rows, tokens: Tensor) -> None:
        """Copy other rows into what is read."""
        for into, t in zip(self._rows.tensors, rows.tensors, strict=True):
            into.copy_(t)
        self._tokens.copy_(tokens)


class MicroBatches:
    """Runs the micro-batches of one stage of one model, recorded where they can be."""

    def __init__(self, model: GLM5, recorder: Recorder) -> None:
        self.model, self.recorder = model, recorder
        self._kinds: dict[Any, _Recording | None] = {}
        self._waiting: set[Any] = set()  # kinds that cannot be recorded
        self._step: Any = None  # what a step says of itself

    def zero_grad(self, parameters: Iterable[nn.Parameter]) -> None:
        """Gradients of zero for the parameters that have had any, where they lie."""
        grads = [p.grad for p in parameters if p.grad is not None]
        if grads:
            torch._foreach_zero_(grads)

    def run(self, objective: Objective, rows: Rows, first: int) -> Tensor:
        """The loss of one micro-batch; its gradients and sums are added. Arguments as `Objective.of`."""
        tokens = torch.full((), objective.counts.tokens, dtype=torch.float32, device=self.model.device)
        step = self._of_step(objective)
        if step != self._step:  # another batch size, or another weight of MTP: from now on
            self._step = step
            self._kinds.clear()
        kind = self._kind(objective, rows, first)
        known = self._kinds.get(kind)
        if known is not None:
            known.load(rows, tokens)
            known.again()
        else:
            new = kind not in self._kinds
            own = rows if new or kind is None else rows.copied()  # what is recorded is written over
            known = _Recording(self.model, replace(objective, denominator=tokens), own, first)
            if kind is None or kind in self._waiting or (new and len(self._kinds) == MOST_KINDS):
                known.run()
            elif new:
                self._kinds[kind] = None
                if self.recorder.waits(known.run):
                    self._waiting.add(kind)
                    log.warning("micro-batches are not recorded: a part of them waits for the device (`glm5 doctor`)")
            else:
                self._kinds[kind] = known
                known.again = self.recorder.record(known.run)
        objective.totals.add(known.totals)
        return known.loss.clone()

    @staticmethod
    def _of_step(objective: Objective) -> Any:
        """What a recording fixes that is the same for all micro-batches of a step."""
        counts = objective.counts
        return counts.rows, counts.mtp_rows, objective.config.mtp_weight_at(objective.tokens)

    @staticmethod
    def _kind(objective: Objective, rows: Rows, first: int) -> Any:
        """What else it fixes; None where there can be none."""
        if rows.held is not None or not (rows.plain or rows.layouts):
            return None
        lie = tuple((x.whole, len(x.edges), x.padded) for x in rows.layouts)
        return rows.ids_BS.shape, lie, objective.ranks.mtp_rows(objective.counts.mtp_rows, first, len(rows.ids_BS))
