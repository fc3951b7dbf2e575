"""What a step reads: rows of packed documents on the device, and whether a stage can train a model on them.

Read next: `loop`; `glm5.data.packing` for what a row is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from glm5.data.loader import Batch, TokenDataset
from glm5.data.packing import first_and_positions
from glm5.kernels.visibility import Layout, Visibility, inside
from glm5.model.config import ModelConfig
from glm5.train.config import TrainConfig
from glm5.utils.errors import ConfigError, DataError

if TYPE_CHECKING:
    from glm5.parallel.context import ContextRows


@dataclass(frozen=True)
class Rows:
    """A micro-batch on the device. T queries, S = T + ahead slots; see `glm5.data.loader.Batch`.

    Args:
        targets: (target_BT, weight_BT) of the trunk and of every MTP depth that the slots ahead allow.
        plain: every slot is of one document, which begins with its row.
        held: the positions that this process holds, where others hold the rest: targets, inputs and what is valid are
            then of those, while ids and documents are the whole rows'.
        sequences: where above 0, how many sequences the rows hold, which are their documents, numbered from 0; else
            every row is one.
        layouts: of rows of several documents on a GPU: how they lie for the trunk, and for every MTP depth.
    """

    ids_BS: Tensor
    document_BS: Tensor
    first_BS: Tensor
    targets: tuple[tuple[Tensor, Tensor], ...]
    plain: bool
    held: ContextRows | None = None
    sequences: int = 0
    layouts: tuple[Layout, ...] = ()

    @classmethod
    def of(cls, batch: Batch, device: torch.device) -> Rows:
        first_BS = torch.from_numpy(first_and_positions(batch.document_BS)[0]).long()
        ahead = batch.ids_BS.shape[1] - batch.seq_len
        targets = [tuple(map(torch.from_numpy, batch.targets(depth))) for depth in range(1, ahead + 1)]

        def there(x: Tensor) -> Tensor:  # from pinned memory, where the host need not wait for the device
            return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)

        plain = bool((first_BS == 0).all())
        layouts: tuple[Layout, ...] = ()
        if device.type == "cuda" and not plain:
            seen = [first_BS[:, : batch.seq_len], *(inside(first_BS, d, batch.seq_len) for d in range(1, ahead))]
            layouts = tuple(Layout.of(first_BT, device) for first_BT in seen)
        return cls(
            there(torch.from_numpy(batch.ids_BS)),
            there(torch.from_numpy(batch.document_BS)),
            there(first_BS),
            tuple((there(target_BT), there(weight_BT)) for target_BT, weight_BT in targets),
            plain,
            layouts=layouts,
        )

    def shared(self, held: ContextRows) -> Rows:
        """What this process does of whole rows that others share."""
        targets = tuple((held.own(t), held.own(w)) for t, w in self.targets)
        return replace(self, targets=targets, held=held, layouts=())

    @property
    def seq_len(self) -> int:
        """Queries of a whole row."""
        return self.targets[0][0].shape[1] if self.held is None else self.held.tokens

    @property
    def total(self) -> Callable[[Tensor], Tensor] | None:
        """Sums counts of sequences over the processes that share them; None where each is one process's."""
        return None if self.held is None else self.held.total

    @property
    def tensors(self) -> list[Tensor]:
        """All that lies on the device."""
        edges = [layout.edges for layout in self.layouts]
        return [self.ids_BS, self.document_BS, self.first_BS, *(t for pair in self.targets for t in pair), *edges]

    def copied(self) -> Rows:
        """The same, in memory of its own."""
        return replace(
            self,
            ids_BS=self.ids_BS.clone(),
            document_BS=self.document_BS.clone(),
            first_BS=self.first_BS.clone(),
            targets=tuple((target_BT.clone(), weight_BT.clone()) for target_BT, weight_BT in self.targets),
            layouts=tuple(replace(x, edges=x.edges.clone()) for x in self.layouts),
        )

    @property
    def sequence_BT(self) -> tuple[Tensor, int] | None:
        """As `glm5.model.trace.Aux` takes it."""
        if not self.sequences:
            return None
        return self._own(self.document_BS[:, : self.seq_len]).clamp(min=0).long(), self.sequences

    def _own(self, x_BT: Tensor) -> Tensor:
        return x_BT if self.held is None else self.held.own(x_BT)

    def counts(self, topk: int) -> Tensor:
        """int64 [4] of the positions held here: targets of the trunk that count, queries that see something, what they
        see, and of it what is left where each query keeps at most `topk`."""
        valid_BT = self.valid_BT()
        first_BT = self._own(self.first_BS[:, : self.seq_len])
        slot_BT = self._own(torch.arange(self.seq_len, device=valid_BT.device).expand(len(self.ids_BS), -1))
        seen_BT = (slot_BT - first_BT + 1) * valid_BT
        selected = seen_BT.clamp(max=topk).sum()
        return torch.stack((self.targets[0][1].sum().long(), valid_BT.sum(), seen_BT.sum(), selected))

    def valid_BT(self, depth: int = 0) -> Tensor:
        """Queries that have a token `depth` ahead in their own document: all but padding, and at an MTP depth (which
        embeds that token) all but a document's last ones."""
        here_BT = self.document_BS[:, : self.seq_len]
        return self._own((here_BT >= 0) & (self.document_BS[:, depth : depth + self.seq_len] == here_BT))

    @property
    def input_BT(self) -> Tensor:
        return self._own(self.ids_BS[:, : self.seq_len])

    @property
    def documents_BS(self) -> Tensor | None:
        """The slot where each slot's document begins, for `mtp_hidden`; None if all rows are of one document.

        Such rows are plainly causal, the fused kernel's case. Rows with padding are not, since the indexer's loss
        counts every query that sees a key. Positions held here know their documents.
        """
        return None if self.plain or self.held is not None else self.first_BS

    @property
    def documents_BT(self) -> Tensor | None:
        """The same for `hidden`, of the queries."""
        return None if self.documents_BS is None else self.first_BS[:, : self.seq_len]

    def visible(self, depth: int = 0) -> Visibility | None:
        """What the queries see, at an MTP depth those that have a token `depth` ahead in their document; None where
        `documents_BT` and `documents_BS` say it."""
        return self._seen(depth) if self.layouts else None

    def _seen(self, depth: int) -> Visibility:
        """What the queries of the whole rows see, as `visible`."""
        first_BS, queries = self.first_BS, self.seq_len
        if self.plain:
            return Visibility.causal(len(first_BS), queries, device=first_BS.device)
        first_BT = inside(first_BS, depth, queries) if depth else first_BS[:, :queries]
        return Visibility.documents(first_BT, self.layouts[depth] if self.layouts else None)

    @property
    def seen(self) -> tuple[Visibility, ...]:
        """What the queries of whole rows see, then at every MTP depth that the slots ahead allow."""
        return tuple(self._seen(depth) for depth in range(len(self.targets)))

    def head(self, rows: int, counted: int | None = None) -> Rows:
        """The first so many rows, of which all after the first `counted` are turned into padding."""
        counted = rows if counted is None else counted
        if rows == counted == len(self.ids_BS):
            return self
        targets = tuple((target_BT[:rows], weight_BT[:rows]) for target_BT, weight_BT in self.targets)
        document_BS, first_BS, plain = self.document_BS[:rows], self.first_BS[:rows], self.plain
        if counted < rows:
            live = torch.arange(rows, device=first_BS.device)[:, None] < counted
            targets = tuple((target_BT, weight_BT * live) for target_BT, weight_BT in targets)
            document_BS = document_BS.masked_fill(~live, -1)
            past = torch.arange(1, first_BS.shape[1] + 1, device=first_BS.device)
            first_BS, plain = torch.where(live, first_BS, past), False
        held = None if self.held is None else self.held.of(first_BS)
        return Rows(self.ids_BS[:rows], document_BS, first_BS, targets, plain, held)


def check_stage(config: TrainConfig, model: ModelConfig, dataset: TokenDataset) -> None:
    """Whether a stage can train such a model on such rows.

    Raises:
        ConfigError: options contradict each other, the model or the dataset. DataError: ids outside the vocabulary.
    """
    if config.mtp_depths and not model.num_nextn_predict_layers:
        raise ConfigError("mtp_depths", config.mtp_depths, "this model has no MTP block: give 0")
    if config.mtp_depths >= dataset.ahead:
        raise ConfigError("mtp_depths", config.mtp_depths, f"the dataset keeps {dataset.ahead} tokens ahead")
    if config.trains_indexer and model.attention != "mla":
        raise ConfigError("stage", config.stage, "a GQA model has no indexer to train")
    if dataset.seq_len > model.max_position_embeddings:
        rule = f"must be at most max_position_embeddings={model.max_position_embeddings}"
        raise ConfigError("seq_len", dataset.seq_len, rule)
    if config.sparse and dataset.seq_len <= model.index_topk:
        rule = f"must exceed index_topk={model.index_topk}: no query of the sparse stage would leave anything out"
        raise ConfigError("seq_len", dataset.seq_len, rule)
    if dataset.store.max_id >= model.vocab_size:
        raise DataError(
            f"the tokens in {dataset.store.directory} hold id {dataset.store.max_id}, outside the model's vocabulary "
            f"of {model.vocab_size}",
            "Tokenize the corpus with the model's own tokenizer, or enlarge the model's vocab_size",
        )
