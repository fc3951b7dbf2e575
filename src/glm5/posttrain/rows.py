"""Rollouts to packed rows: the one place where a token's figures are moved to the query that predicts it.

Outside, everything stands at its token: id, whether the policy drew it, the engine's log-probability, the kept set. In
`PolicyRows` everything stands at the query before it, as the model's outputs do, so entry t is about token t + 1 of its
document, and nothing else ever shifts. A rollout may be several trajectories, where its context was folded or forked
(report, section 4.1): they share its number, and weigh together as one. Read next: `losses`, `logprobs`,
`glm5.data.packing`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from glm5.data.packing import first_and_positions, plan_rows
from glm5.model.glm5 import GLM5
from glm5.model.trace import Aux
from glm5.posttrain.logprobs import ActionLogprobs, Kept, action_logprobs
from glm5.posttrain.losses import Actions, BatchCounts
from glm5.serve.request import TokenInfo
from glm5.utils.errors import ConfigError, DataError


@dataclass(frozen=True)
class Trajectory:
    """Ids that only grew, and which of them the policy drew. All sequences have L entries, one a token.

    Args:
        ids: prompt, answers, observations, in order.
        drawn: True where the policy drew the id, and it is to be learned from.
        logprobs: the engine's for drawn ids, of the distribution that it drew from; whatever else elsewhere.
        rollout: number of the rollout that this is all or a part of.
        advantages: one for all drawn tokens, or one a token.
        temperature: of the draws.
        kept: the ids that each drawn one was drawn from (None: all).
        experts: int16 [L - 1, X, M], where the engine's X MoE layers sent each id but the last (None: not known).
    """

    ids: Sequence[int]
    drawn: Sequence[bool]
    logprobs: Sequence[float]
    rollout: int
    advantages: float | Sequence[float] = 0.0
    temperature: float = 1.0
    kept: Sequence[Sequence[int] | None] | None = None
    experts: Tensor | None = None

    def __post_init__(self) -> None:
        length = len(self.ids)
        per_token: dict[str, object] = {"drawn": self.drawn, "logprobs": self.logprobs, "kept": self.kept}
        if not isinstance(self.advantages, float | int):
            per_token["advantages"] = self.advantages
        for name, values in per_token.items():
            if isinstance(values, Sequence) and len(values) != length:
                raise DataError(f"{name} has {len(values)} entries for {length} ids", "Give one for each id")
        if self.experts is not None and len(self.experts) != length - 1:
            what = f"experts has {len(self.experts)} entries for {length} ids"
            raise DataError(what, "Give one for each id but the last")
        if length and self.drawn[0]:
            raise DataError("drawn[0] is True, and nothing comes before it", "Begin with the prompt")
        if not 0 < self.temperature < float("inf"):
            rule = "must be above 0: a greedy answer has no log-probability to learn from"
            raise ConfigError("temperature", self.temperature, rule)

    @classmethod
    def sampled(
        cls,
        prompt: Sequence[int],
        answer: Sequence[int],
        info: Sequence[TokenInfo],
        rollout: int,
        *,
        drawn: Sequence[bool] = (),
        advantages: float = 0.0,
        temperature: float = 1.0,
        experts: Tensor | None = None,
    ) -> Trajectory:
        """One prompt and an engine's answer to it, asked for with `logprobs=0` and, where draws are cut,
        `kept_set=True`. drawn: of the answer's ids; by default all."""
        before = len(prompt)
        return cls(
            ids=[*prompt, *answer],
            drawn=[*[False] * before, *(drawn or [True] * len(answer))],
            logprobs=[0.0] * before + [x.logprob - x.kept_logprob for x in info],
            rollout=rollout,
            advantages=advantages,
            temperature=temperature,
            kept=[*[None] * before, *(x.kept for x in info)],
            experts=experts,
        )


@dataclass(frozen=True)
class PolicyRows:
    """Packed rows: B rows of T queries. See the module for where things stand.

    Args:
        input_BT, target_BT: int64, what each query reads and what comes after it.
        first_BT: the slot where each query's document begins; past its own for padding.
        mask_BT: whether the target is an action. rollout_BT: its rollout, -1 in padding.
        advantages_BT, logprobs_BT (the engine's), temperature_BT: of the target, fp32.
        kept: of the B·T targets; None where no draw was cut.
        vocab_size: ids below it could be drawn; None is all that the model's head has.
        experts_BTXM: int16, the experts that each of X MoE layers takes for the query's own id, whatever its router
            says (router replay); -1 leaves it to the router. None: all are left to it.
        teacher_BT: int64, the number of the teacher that the target is learned from; -1 none. None: there are none.
        told_ids_BTK, told_logprobs_BTK: the ids that a served teacher finds likeliest there, int64, and their
            log-probabilities, fp32; zeros where it was not asked. None: none was.
    """

    input_BT: Tensor
    target_BT: Tensor
    first_BT: Tensor
    mask_BT: Tensor
    rollout_BT: Tensor
    advantages_BT: Tensor
    logprobs_BT: Tensor
    temperature_BT: Tensor
    kept: Kept | None
    vocab_size: int | None = None
    experts_BTXM: Tensor | None = None
    teacher_BT: Tensor | None = None
    told_ids_BTK: Tensor | None = None
    told_logprobs_BTK: Tensor | None = None

    def __len__(self) -> int:
        return len(self.input_BT)

    def _with(self, of: dict[str, Any], kept: Kept | None) -> PolicyRows:
        return replace(self, **of, kept=kept)

    def _tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def to(self, device: torch.device) -> PolicyRows:
        kept = None if self.kept is None else self.kept.to(device)
        return self._with({name: t.to(device) for name, t in self._tensors().items()}, kept)

    def take(self, rows: Sequence[int]) -> PolicyRows:
        """These rows; -1 is an empty row, which goes through the model as padding does, and trains nothing."""
        index = torch.tensor(list(rows), dtype=torch.int64, device=self.input_BT.device)
        found = {name: t[index.clamp(min=0)] for name, t in self._tensors().items()}
        found["mask_BT"] = found["mask_BT"] & (index >= 0)[:, None]
        found["first_BT"] = found["first_BT"].masked_fill((index < 0)[:, None], self.input_BT.shape[1])
        kept = self.kept
        if kept is not None:
            slots = torch.arange(self.input_BT.shape[1], device=index.device)
            kept = kept.select((index.clamp(min=0)[:, None] * self.input_BT.shape[1] + slots).flatten())
        return self._with(found, kept)

    def counts(self, rollouts: int) -> BatchCounts:
        """Actions of each of the whole batch's rollouts in these rows."""
        return BatchCounts.of(self.mask_BT.flatten(), self.rollout_BT.flatten(), rollouts)

    @property
    def queries(self) -> int:
        """Queries that are no padding: those that an indexer's loss counts."""
        return int((self.first_BT < torch.arange(1, self.input_BT.shape[1] + 1, device=self.first_BT.device)).sum())

    def logprobs(
        self, model: GLM5, *, sparse: bool | None = None, with_entropy: bool = False, aux: Aux | None = None
    ) -> ActionLogprobs:
        """The model's log π of the A actions of these rows, in the order of `mask_BT`, as they were drawn.

        aux: what else to gather on the way; without any, nothing.
        """
        at_A = self.mask_BT.flatten().nonzero().squeeze(1)
        hidden_AD = self.hidden(model, sparse=sparse, aux=aux).flatten(0, 1)[at_A]
        return self.found(model, hidden_AD, at_A, with_entropy=with_entropy)

    def hidden(self, model: GLM5, *, sparse: bool | None = None, aux: Aux | None = None) -> Tensor:
        """The model's final states of these rows, [B, T, D], with the experts that are to be replayed."""
        if self.experts_BTXM is not None:
            aux = aux or Aux()
            aux.experts = [e_BTM.long() for e_BTM in self.experts_BTXM.unbind(2)]
        return model.hidden(self.input_BT, documents=self.first_BT, sparse=sparse, aux=aux)

    def without_replay(self) -> PolicyRows:
        """The same for another model, whose routers choose for themselves."""
        return replace(self, experts_BTXM=None)

    def found(self, model: GLM5, hidden_AD: Tensor, at_A: Tensor, *, with_entropy: bool = False) -> ActionLogprobs:
        """`logprobs` from the states of the actions, whose places in the flat rows are `at_A`."""
        return action_logprobs(
            hidden_AD,
            model.lm_head.weight,
            self.target_BT.flatten()[at_A],
            temperature_N=self.temperature_BT.flatten()[at_A],
            kept=None if self.kept is None else self.kept.select(at_A),
            vocab_size=self.vocab_size,
            with_entropy=with_entropy,
        )

    def actions(self, found: ActionLogprobs, **more: Tensor | None) -> Actions:
        """What a loss reads, of the A actions that `logprobs` gave; `more` are further fields of `Actions`, [A] too."""
        at_A = self.mask_BT.flatten()
        return Actions(
            logprobs=found.logprobs_N,
            mask=torch.ones_like(found.logprobs_N, dtype=torch.bool),
            sequence=self.rollout_BT.flatten()[at_A],
            advantages=self.advantages_BT.flatten()[at_A],
            rollout_logprobs=self.logprobs_BT.flatten()[at_A],
            entropy=found.entropy_N,
            **more,
        )


def pack(
    trajectories: Sequence[Trajectory], seq_len: int, *, packed: bool = True, vocab_size: int | None = None
) -> PolicyRows:
    """Trajectories in rows of `seq_len` queries, best fit first, none reading another; or one to a row.

    Args:
        vocab_size: the tokenizer's, which an engine draws from: a model's head may be padded beyond it.

    Raises:
        DataError: a trajectory is shorter than two tokens, or longer than a row: cut it where it was drawn, for a piece
            would be scored without its beginning.
    """
    lengths = [len(t.ids) for t in trajectories]
    for number, length in enumerate(lengths):
        if not 2 <= length <= seq_len + 1:
            what = f"trajectory {number} has {length} tokens, and a row of {seq_len} queries holds 2 to {seq_len + 1}"
            raise DataError(what, "Use longer rows, or a lower limit for answers")
    if packed and trajectories:
        plan = plan_rows(lengths, seq_len, 1)
        edges = zip(plan.row_starts[:-1].tolist(), plan.row_starts[1:].tolist(), strict=True)
        rows = [plan.document[a:b].tolist() for a, b in edges]
    else:
        rows = [[number] for number in range(len(trajectories))]
    shape = (len(rows), seq_len + 1)
    ids, document = np.zeros(shape, np.int64), np.full(shape, -1, np.int32)
    drawn, rollout = np.zeros(shape, bool), np.full(shape, -1, np.int64)
    advantage, logprob = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    temperature = np.ones(shape, np.float32)
    sets: dict[tuple[int, int], Sequence[int]] = {}
    known = next((t.experts for t in trajectories if t.experts is not None), None)
    experts = None if known is None else known.new_full((len(rows), seq_len, *known.shape[1:]), -1)
    for row, members in enumerate(rows):
        slot = 0
        for number in members:
            t = trajectories[number]
            here = (row, slice(slot, slot + len(t.ids)))
            ids[here], document[here], rollout[here] = t.ids, number, t.rollout
            drawn[here], temperature[here] = t.drawn, t.temperature
            advantage[here], logprob[here] = t.advantages, np.where(t.drawn, np.asarray(t.logprobs, np.float32), 0.0)
            if experts is not None and t.experts is not None:
                experts[row, slot : slot + len(t.experts)] = t.experts  # of the id that a query reads: nothing shifts
            for at, kept in enumerate(t.kept or ()):
                if kept and t.drawn[at]:
                    sets[row, slot + at - 1] = kept
            slot += len(t.ids)
    # From tokens to the queries before them: here, and nowhere else.
    same = document[:, 1:] == document[:, :-1]
    kept_in_order = [sets.get((row, query)) for row in range(shape[0]) for query in range(seq_len)] if sets else []
    return PolicyRows(
        input_BT=torch.from_numpy(ids[:, :-1].copy()),
        target_BT=torch.from_numpy(np.where(same, ids[:, 1:], 0)),
        first_BT=torch.from_numpy(first_and_positions(document[:, :-1])[0]).long(),
        mask_BT=torch.from_numpy(drawn[:, 1:] & same),
        rollout_BT=torch.from_numpy(np.where(same, rollout[:, 1:], -1)),
        advantages_BT=torch.from_numpy(np.where(same, advantage[:, 1:], 0)),
        logprobs_BT=torch.from_numpy(np.where(same, logprob[:, 1:], 0)),
        temperature_BT=torch.from_numpy(np.where(same, temperature[:, 1:], 1)),
        kept=Kept.of(kept_in_order) if sets else None,
        vocab_size=vocab_size,
        experts_BTXM=experts,
    )


def micro_batches(rows: int, size: int, ranks: int = 1) -> list[list[list[int]]]:
    """Which rows each rank reads in each micro-batch: as many micro-batches on every rank, all of as many rows, at most
    `size`.

    What is missing is filled with -1, an empty row (`PolicyRows.take`): ranks that made unequally many would wait for
    each other for ever. Rows are dealt out evenly, so that few are empty, and none on a single rank. Every row is there
    once.
    """
    if size < 1:
        raise ConfigError("size", size, "must be at least 1")
    steps = -(-rows // (size * ranks))
    each = -(-rows // max(1, steps * ranks))
    empty = 0 if ranks == 1 else steps * each * ranks - rows
    numbers = [*range(rows), *[-1] * empty]
    return [[numbers[(step * ranks + rank) * each :][:each] for step in range(steps)] for rank in range(ranks)]
