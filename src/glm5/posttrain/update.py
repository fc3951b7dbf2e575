"""One update of a policy from packed rows, in micro-batches; and scores of rows under a model.

It is the part of reinforcement learning between rollouts and weights: counts of the whole batch once, a loss for each
micro-batch, then clip and step, or no step where nothing is to be learned. On several ranks each has all rows and
reads its share of them; the model is whole on each, which step by the sum of all gradients, or lies over them
(`glm5.parallel.shard`). Read next: `losses`, `rows`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from glm5.model.glm5 import GLM5
from glm5.model.trace import Aux
from glm5.posttrain.losses import BatchCounts, LossConfig, LossMetrics, mismatch_ratio, policy_loss, sequence_log_ratio
from glm5.posttrain.rows import PolicyRows, micro_batches
from glm5.train.optim import clip_grad_norm
from glm5.train.ranks import Ranks
from glm5.utils.errors import NumericalError

if TYPE_CHECKING:
    from glm5.parallel.muon import Holdings


def freeze_indexers(model: GLM5) -> None:
    """Let the indexers rest, as the report does in reinforcement learning: what a token sees is then the same in the
    engine and in every later pass of the trainer, as far as weights go."""
    for name, parameter in model.named_parameters():
        if ".indexer." in name:
            parameter.requires_grad_(False)


@torch.no_grad()
def score(
    model: GLM5, rows: PolicyRows, *, micro_batch: int = 1, sparse: bool | None = None, ranks: Ranks | None = None
) -> Tensor:
    """log π of every action under a model, fp32 [B, T], 0 elsewhere: for the old policy, a reference or a teacher.

    ranks: that share the rows out; all have all of them, before and after.
    """
    ranks = ranks or Ranks()
    found_BT = torch.zeros_like(rows.logprobs_BT)
    for numbers in own_micro_batches(rows, micro_batch, ranks):
        part = rows.take(numbers)
        logprobs = part.logprobs(model, sparse=sparse).logprobs_N
        held = [n for n in numbers if n >= 0]
        here = torch.zeros_like(part.logprobs_BT)
        here[part.mask_BT] = logprobs.to(here.dtype)
        found_BT[held] = here[: len(held)]
    free(model, ranks)
    return ranks.sum(found_BT)


def free(model: GLM5, ranks: Ranks) -> None:
    """Let go of what was gathered for a forward pass that no backward follows: weights that change stay behind else."""
    if ranks.world is not None:
        from glm5.parallel.shard import reshard

        reshard(model)


def own_micro_batches(rows: PolicyRows, size: int, ranks: Ranks) -> Iterator[list[int]]:
    """This rank's of all, by their rows' numbers. A batch may take long, so that each tells the watch."""
    place = 0 if ranks.world is None else ranks.world.place("dp")
    for numbers in micro_batches(len(rows), size, ranks.count("dp"))[place]:
        ranks.beat()
        yield numbers


class PolicyUpdate:
    """Updates of one policy.

    Args:
        model: trained in place. optimizer: of its parameters. loss: which.
        micro_batch: rows at once. clip: largest global gradient norm, 0 for none.
        sparse: attention of the trainer's passes; None is what the model was trained for, as in the engine.
        indexer_weight: of the indexers' KL beside the policy's loss, a mean over queries; 0 lets them rest.
        ranks: that share the rows out, on a mesh of data ranks; each calls with the same model and rows.
        holdings: which rank holds what of a model that lies over them; None where each has all of it.

    `skipped` counts batches that had nothing to learn from.
    """

    def __init__(
        self,
        model: GLM5,
        optimizer: torch.optim.Optimizer,
        loss: LossConfig,
        *,
        micro_batch: int = 1,
        clip: float = 1.0,
        sparse: bool | None = None,
        indexer_weight: float = 0.0,
        ranks: Ranks | None = None,
        holdings: Holdings | None = None,
    ) -> None:
        self.model, self.optimizer, self.loss = model, optimizer, loss
        self.micro_batch, self.clip, self.sparse = micro_batch, clip, sparse
        self.indexer_weight, self.ranks, self.holdings = indexer_weight, ranks or Ranks(), holdings
        self.skipped = 0

    def __call__(
        self,
        rows: PolicyRows,
        rollouts: int,
        *,
        old_BT: Tensor | None = None,
        reference_BT: Tensor | None = None,
    ) -> dict[str, float]:
        """One update; returns the figures of `LossMetrics`, "loss", "grad_norm" and "stepped" (1 or 0), and where the
        indexers learn "indexer_kl".

        Args:
            rows: the batch. rollouts: how many its rollouts are numbered to.
            old_BT: `score` under the weights that made the rollouts; None is now, for the first update on a batch.
            reference_BT: `score` under the reference of the KL term.

        Raises:
            NumericalError: the loss or a gradient is not finite; the weights are those of before.
        """
        counts = rows.counts(rollouts)
        log_s, ratio_BT = self._of_sequences(rows, counts, old_BT)
        metrics, total, moving, kl = LossMetrics(), 0.0, 0.0, 0.0
        queries = max(1, rows.queries)
        self.optimizer.zero_grad(set_to_none=True)
        for numbers in own_micro_batches(rows, self.micro_batch, self.ranks):
            part, held = rows.take(numbers), [max(n, 0) for n in numbers]
            at, aux = part.mask_BT, Aux(indexer=True) if self.indexer_weight else None
            actions = part.actions(
                part.logprobs(self.model, sparse=self.sparse, with_entropy=True, aux=aux),
                old_logprobs=None if old_BT is None else old_BT[held][at],
                reference_logprobs=None if reference_BT is None else reference_BT[held][at],
                log_s=log_s,
                ratio=None if ratio_BT is None else ratio_BT[held][at],
            )
            found = policy_loss(self.loss, actions, counts)
            value, loss = float(found.loss.detach()), found.loss
            if aux is not None:
                indexer_kl = aux.indexer_kl() / queries
                loss, kl = loss + self.indexer_weight * indexer_kl, kl + float(indexer_kl.detach())
            loss.backward()
            metrics.add(found.metrics)
            total, moving = total + value, moving + float(found.moving)
        total, moving, kl = self.everyone(total, moving, kl)
        metrics.over(self.ranks)
        learned = {"indexer_kl": kl} if self.indexer_weight else {}
        return {**metrics.values(), **learned, "loss": total, **self.finish(total, moving)}

    def everyone(self, *numbers: float) -> list[float]:
        """Each number's sum over the ranks."""
        return self.ranks.sum(torch.tensor(numbers, dtype=torch.float64, device=self.ranks.device)).tolist()

    def finish(self, loss: float, moving: float) -> dict[str, float]:
        """Clip and step, where a gradient moves something: those of all ranks.

        Args:
            loss, moving: of all ranks together.

        Raises:
            NumericalError: the loss is not finite; the weights stay.
        """
        if not math.isfinite(loss):
            self.optimizer.zero_grad(set_to_none=True)
            raise NumericalError(f"the policy's loss is {loss}", "Lower the learning rate, or look at the rollouts")
        norm = 0.0
        if self.holdings is None and self.ranks.count("dp") > 1:
            for parameter in self.model.parameters():  # every rank read as many rows, so that all have the same ones
                if parameter.grad is not None:
                    self.ranks.sum(parameter.grad)
        if moving:
            norm = clip_grad_norm(list(self.model.named_parameters()), self.clip or math.inf, self.holdings)
            self.optimizer.step()
        else:  # momentum and weight decay would move the weights without any gradient
            self.skipped += 1
        self.optimizer.zero_grad(set_to_none=True)
        return {"grad_norm": norm, "stepped": float(moving > 0)}

    def _of_sequences(
        self, rows: PolicyRows, counts: BatchCounts, old_BT: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """What needs all rows of a sequence: GSPO's mean ratios, and a correction that is no token's own."""
        loss, mask_N, rollout_N = self.loss, rows.mask_BT.flatten(), rows.rollout_BT.flatten()
        by_sequence = loss.correction != "none" and loss.correction_level != "token"
        if loss.objective != "sequence_clip" and not by_sequence:
            return None, None
        now_BT = score(self.model, rows, micro_batch=self.micro_batch, sparse=self.sparse, ranks=self.ranks)
        before_N = (now_BT if old_BT is None else old_BT).flatten()
        log_s = sequence_log_ratio(now_BT.flatten(), before_N, rollout_N, mask_N, counts.actions_S)
        engine_N = rows.logprobs_BT.flatten()
        arguments = (before_N, engine_N, rollout_N, mask_N, counts.actions_S, loss.correction_level)
        return log_s, mismatch_ratio(*arguments).view_as(now_BT)
