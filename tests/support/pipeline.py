"""Training steps for tests of the pipeline: rows of random documents, their loss, and the step in one process.

rows = make_rows(config, micro_batches=4)            config = pipeline_config()
losses, grads = one_process(model, rows, Terms(...)) objective = Terms(...).objective(rows)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from glm5.model.config import ModelConfig
from glm5.model.glm5 import GLM5
from glm5.model.trace import Aux
from glm5.parallel.pipeline.stage import Pass, Work
from glm5.train.losses import language_model_loss
from glm5.train.rows import Rows
from support.tiny import tiny_config

AHEAD = 4


def pipeline_config(**changes: Any) -> ModelConfig:
    """Six layers (one dense) and the MTP block; top-k of 8."""
    return tiny_config(**{**dict(num_hidden_layers=6, index_topk=8, vocab_size=96), **changes})


def make_rows(config: ModelConfig, micro_batches: int, rows: int = 2, queries: int = 16, seed: int = 0) -> list[Rows]:
    """Micro-batches of packed documents, the last slots of the last row padding."""
    generator = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(micro_batches):
        slots = queries + AHEAD
        ids = torch.randint(0, config.vocab_size, (rows, slots), generator=generator)
        begin = int(torch.randint(3, queries - 3, (1,), generator=generator))
        document = (torch.arange(slots) >= begin).long().expand(rows, slots).clone()
        document[-1, -AHEAD - 2 :] = -1
        first = torch.where(document == 1, begin, 0)
        first[document < 0] = slots
        targets = []
        for depth in range(1, AHEAD + 1):
            ahead = document[:, depth : depth + queries]
            weight = ((document[:, :queries] == ahead) & (ahead >= 0)).float()
            targets.append((ids[:, depth : depth + queries].contiguous(), weight))
        out.append(Rows(ids, document, first, tuple(targets), plain=False))
    return out


@dataclass(frozen=True)
class Terms:
    """Which losses a step has. `share` is the part of its rows on which MTP trains."""

    depths: int = 3
    share: float = 1.0
    balance: float = 1e-2
    sparse: bool = False
    indexer: bool = False
    model: bool = True

    def mtp_rows(self, rows: Sequence[Rows]) -> int:
        return max(1, round(self.share * sum(len(r.ids_BS) for r in rows)))

    def work(self, rows: Sequence[Rows]) -> Work:
        return Work(
            rows,
            self.objective(rows),
            depths=self.depths,
            mtp_rows=self.mtp_rows(rows),
            sparse=self.sparse,
            indexer=self.indexer,
            balance=self.model,
            joint=self.model,
        )

    def objective(self, rows: Sequence[Rows]) -> Callable[[Pass], Tensor | None]:
        """The loss of a stage's pass; sums over the whole step's counts, as the trainer's."""
        count = sum(len(r.ids_BS) for r in rows)
        tokens = sum(int(r.counts(1)[0]) for r in rows)
        queries = sum(int(r.valid_BT().sum()) for r in rows)
        scale = count / self.mtp_rows(rows)

        def loss(done: Pass) -> Tensor | None:
            terms: list[Tensor] = []
            per_depth = scale / self.depths if done.kept else 0.0
            if done.head_VD is not None and self.model:
                share = done.rows.head(done.kept) if done.kept else None
                targets = [done.rows.targets[0], *(share.targets[1 : self.depths + 1] if share else [])]
                weight = 0.3 * scale if done.kept else 0.0
                lm = language_model_loss(done.hidden, done.head_VD, targets, mtp_weight=weight)
                terms.append(lm.loss_sum / tokens)
            if self.model:
                terms += [self.balance * b / count for b in done.trunk.balance_losses]
                terms += [self.balance * per_depth * b / count for b in done.mtp.balance_losses]
            if self.indexer:
                terms += [x.kl / queries for x in done.trunk.indexer_losses]
                terms += [per_depth * x.kl / queries for x in done.mtp.indexer_losses]
            if not terms:
                return None if done.head_VD is None else done.head_VD.new_zeros(())
            return torch.stack(terms).sum()

        return loss


def freeze(model: GLM5, terms: Terms) -> GLM5:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(terms.indexer if ".indexer." in name else terms.model)
    return model.train()


def one_process(model: GLM5, rows: Sequence[Rows], terms: Terms) -> tuple[float, dict[str, Tensor]]:
    """The same step without a pipeline: its loss, and every gradient by name."""
    objective, work, total = terms.objective(rows), terms.work(rows), 0.0
    for i, micro in enumerate(rows):
        kept = work.kept(i) if terms.depths else 0
        trunk = Aux(indexer=terms.indexer, balance=terms.model, valid=micro.valid_BT())
        mtp = Aux(indexer=terms.indexer, balance=terms.model)
        hidden = [model.hidden(micro.input_BT, documents=micro.documents_BT, sparse=terms.sparse, aux=trunk)]
        if kept:
            share = micro.head(kept)
            depths = model.mtp_hidden(
                hidden[0][:kept],
                share.ids_BS,
                terms.depths,
                documents=share.documents_BS,
                sparse=terms.sparse,
                aux=mtp,
            )
            for depth in range(1, terms.depths + 1):
                mtp.valid = share.valid_BT(depth)
                hidden.append(next(depths))
        loss = objective(Pass(i, micro, kept, hidden, model.lm_head.weight, trunk, mtp))
        assert loss is not None
        loss.backward()
        total += float(loss.detach())
    return total, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
