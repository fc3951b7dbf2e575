"""The loss of a step, micro-batch by micro-batch: what runs forward, and what of it is added up.

Sums over the whole step's counts, so that it does not matter how a step is cut into micro-batches, ranks or stages.
Next tokens and MTP depths weigh as `losses` says; balance and the indexers' KL come from the layers. Read next:
`totals`, `loop`; `piped`, which has the layers' part of it on every stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from glm5.model.glm5 import GLM5
from glm5.model.trace import Aux
from glm5.train.config import TrainConfig
from glm5.train.losses import language_model_loss
from glm5.train.ranks import Ranks
from glm5.train.rows import Rows
from glm5.train.totals import Counts, Totals, weighted


@dataclass(frozen=True)
class Objective:
    """The loss of one step.

    Args:
        config: its stage. tokens: seen before it. counts: of the whole step, over all ranks.
        totals: what its micro-batches add up on the way.
        denominator: `counts.tokens` where it must be read from the device.
    """

    config: TrainConfig
    ranks: Ranks
    tokens: int
    counts: Counts
    totals: Totals
    denominator: Tensor | None = None

    def of(self, model: GLM5, rows: Rows, first: int) -> Tensor:
        """One micro-batch's part, whose rows begin with this rank's row `first` of the step.

        MTP runs on the first `counts.mtp_rows` rows of the step.
        """
        config = self.config
        wanted: dict[str, Any] = dict(indexer=config.trains_indexer, balance=config.trains_model, total=rows.total)
        wanted["sequences"] = rows.sequence_BT
        trunk, mtp = Aux(**wanted, valid=rows.valid_BT()), Aux(**wanted)
        seen = rows.visible()
        hidden = [
            model.hidden(
                rows.input_BT,
                documents=rows.documents_BT if seen is None else None,
                visible=seen,
                cache=rows.held,
                sparse=config.sparse,
                aux=trunk,
                checked=True,
            )
        ]
        targets = [rows.targets[0]]
        if rows.sequences:  # all of them or none, on every rank
            kept = counted = len(rows.ids_BS) if self.counts.mtp_rows else 0
        else:
            kept, counted = self.ranks.mtp_rows(self.counts.mtp_rows, first, len(rows.ids_BS))
        if kept:
            share = rows.head(kept, counted)
            deep = [v for d in range(1, config.mtp_depths + 1) if (v := share.visible(d)) is not None]
            depths = model.mtp_hidden(
                hidden[0][:kept],
                share.ids_BS,
                config.mtp_depths,
                documents=share.documents_BS,
                visible=deep or None,
                cache=share.held,
                sparse=config.sparse,
                aux=mtp,
                checked=True,
            )
            for depth in range(1, config.mtp_depths + 1):
                mtp.valid = share.valid_BT(depth)  # read when the depth is asked for
                hidden.append(next(depths))
                targets.append(share.targets[depth])
        loss = self.terms(hidden, model, targets, trunk, mtp)
        self.totals.add_loads([*trunk.loads, *mtp.loads])
        if config.trains_indexer:
            self.totals.indexers.add([*trunk.indexer_losses, *mtp.indexer_losses])
        return hidden[0].new_zeros((), dtype=torch.float32) if loss is None else loss

    def terms(
        self,
        hidden: list[Tensor],
        model: GLM5 | None,
        targets: list[tuple[Tensor, Tensor]],
        trunk: Aux,
        mtp: Aux,
    ) -> Tensor | None:
        """What heads and layers make of one micro-batch; None where they make nothing.

        Args:
            hidden: of the trunk and of each MTP depth that ran; empty on a stage without heads.
            model: whose head reads them. targets: of each of them.
            trunk, mtp: what layers gathered. MTP's terms are scaled up to all rows, and averaged over the depths.
        """
        config, counts, terms = self.config, self.counts, []
        scale = counts.rows / counts.mtp_rows if counts.mtp_rows else 0.0
        per_depth = scale / config.mtp_depths if counts.mtp_rows else 0.0
        if config.trains_model and hidden:
            assert model is not None
            weight, head = self.ranks.head(model)
            mtp_weight = config.mtp_weight_at(self.tokens) * scale if len(hidden) > 1 else 0.0
            lm = language_model_loss(hidden, weight, targets, mtp_weight=mtp_weight, cross_entropy=head.cross_entropy)
            terms.append(lm.loss_sum / (counts.tokens if self.denominator is None else self.denominator))
            self.totals.add_lm(lm.ce_sums, lm.tokens)
        if balances := [*trunk.balance_losses, *mtp.balance_losses]:
            balance = weighted(balances, len(trunk.balance_losses), per_depth)
            terms.append(config.balance_weight * balance / counts.rows)
        if kls := [x.kl for x in (*trunk.indexer_losses, *mtp.indexer_losses)]:
            kl = weighted(kls, len(trunk.indexer_losses), per_depth)
            terms.append(config.indexer_weight * kl / counts.queries)
        return sum(terms[1:], terms[0]) if terms else None
