"""Batches for training and evaluation: a pure function of a seed and a sample number.

Sample i of a run is row `permutation(epoch)[i mod rows]`, so the whole state of the loader is one integer, the
number of samples consumed. A resumed run sees what an uninterrupted one would, whatever the batch size, its
warm-up, gradient accumulation or the number of processes: each takes its own range of sample numbers.
Read next: `glm5.train`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glm5.data.balance import CostModel
from glm5.data.corpus import Document
from glm5.data.hashing import permutation
from glm5.data.packing import Strategy, first_and_positions, plan_rows, targets_at_depth
from glm5.data.shards import TextTokenizer, TokenStore, write_tokens
from glm5.utils.errors import ConfigError, DataError


@dataclass(frozen=True)
class Batch:
    """Rows of packed documents. T = `seq_len` queries; S = T + `ahead` slots, of which the last hold only targets.

    Args:
        ids_BS: int64 token ids; padding holds the end-of-text id, so never tell it by its id.
        document_BS: int32 number of the document in each slot, -1 for padding.
        loss_BS: whether the slot's token may be a target: not in a document's prefix, nor in padding; of a conversation
            only what the model gives.
        first_BT: int32 first slot that each query sees; the last is its own. Padding sees nothing (`first > last`).
        position_BT: int32 position for RoPE, from 0 at the beginning of each piece of a document.
        num_bytes_BT: int32 bytes of text in the next token, 0 where that does not count.
    """

    ids_BS: NDArray[np.int64]
    document_BS: NDArray[np.int32]
    loss_BS: NDArray[np.bool_]
    first_BT: NDArray[np.int32]
    position_BT: NDArray[np.int32]
    num_bytes_BT: NDArray[np.int32]

    @property
    def seq_len(self) -> int:
        return self.first_BT.shape[1]

    @property
    def input_BT(self) -> NDArray[np.int64]:
        """What the model reads."""
        return self.ids_BS[:, : self.seq_len]

    def whole_first(self) -> Batch:
        """The same rows, those of one document before the others: for kernels that are faster on those."""
        order = np.argsort(self.first_BT.any(1), kind="stable")
        return Batch(**{name: getattr(self, name)[order] for name in Batch.__dataclass_fields__})

    def targets(self, depth: int = 1) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """`(target_BT, weight_BT)` at `depth` tokens ahead: 1 for the next token, d + 1 for MTP depth d.

        Weights are 0 or 1; a target never lies in another document than its query.

        Raises:
            ConfigError: the dataset keeps fewer slots ahead.
        """
        return targets_at_depth(self.ids_BS, self.document_BS, self.loss_BS, depth, self.seq_len)

    def __len__(self) -> int:
        return len(self.ids_BS)


class TokenDataset:
    """Tokens on disk, laid out in rows. Every prediction of every document is made in exactly one row.

    Args:
        store: the tokens.
        seq_len: queries per row.
        ahead: slots kept for targets: 1 + the number of MTP depths. The default serves GLM-5's three.
        strategy: how documents fill rows, see `glm5.data.packing.plan_rows`.

    Raises:
        DataError: the corpus has fewer predictions than one row.
        ConfigError: `seq_len` or `ahead` is below 1.
    """

    def __init__(self, store: TokenStore, seq_len: int, ahead: int = 4, strategy: Strategy = "best-fit") -> None:
        self.store, self.seq_len, self.ahead, self.strategy = store, seq_len, ahead, strategy
        self._plan = plan_rows(store.lengths, seq_len, ahead, strategy)
        predictions = int((store.lengths - 1).sum())
        if predictions < seq_len:
            raise DataError(
                f"the corpus in {store.directory} has {predictions:,} tokens to predict, fewer than one sequence "
                f"of {seq_len:,}",
                f"Use more text, or seq_len={predictions} or less",
            )

    @classmethod
    def build(
        cls,
        documents: Iterable[Document],
        tokenizer: TextTokenizer,
        directory: str | Path,
        seq_len: int,
        ahead: int = 4,
        strategy: Strategy = "best-fit",
    ) -> TokenDataset:
        """Tokenize documents into a new directory and open it. Errors as `write_tokens` and the constructor."""
        return cls(write_tokens(documents, tokenizer, directory), seq_len, ahead, strategy)

    @classmethod
    def open(
        cls,
        directory: str | Path,
        seq_len: int,
        ahead: int = 4,
        strategy: Strategy = "best-fit",
        verify: bool = True,
    ) -> TokenDataset:
        """Open what `build` wrote, at this or another sequence length. Errors as `TokenStore`."""
        return cls(TokenStore(directory, verify), seq_len, ahead, strategy)

    @property
    def rows(self) -> int:
        return self._plan.rows

    @property
    def text_bytes(self) -> int:
        """Bytes of text in all documents, which is also the sum of `num_bytes_BT` over all rows."""
        return int(self.store.text_bytes.sum())

    @property
    def bytes_per_token(self) -> float:
        """Bytes of text for each token that is predicted: what turns a loss into bits per byte."""
        return self.text_bytes / self.store.targets

    def batch(self, rows: Sequence[int] | NDArray[np.int64]) -> Batch:
        """These rows, in this order.

        Raises:
            IndexError: there is no such row.
        """
        shape = (len(rows), self.seq_len + self.ahead)
        ids_BS = np.full(shape, self.store.end_of_text_id, dtype=np.int64)
        document_BS = np.full(shape, -1, dtype=np.int32)
        loss_BS = np.zeros(shape, dtype=bool)
        for n, row in enumerate(rows):
            slot = 0
            for document, ids, learned in self._pieces(int(row)):
                here = slice(slot, slot + len(ids))
                ids_BS[n, here], document_BS[n, here], loss_BS[n, here] = ids, document, learned
                slot += len(ids)
        return self._batch(ids_BS, document_BS, loss_BS, self.seq_len)

    def _pieces(self, row: int) -> Iterator[tuple[int, NDArray[Any], NDArray[np.bool_]]]:
        """Document, ids, and what may be a target, of each piece of a row."""
        if not 0 <= row < self.rows:
            raise IndexError(f"row {row} of {self.rows}")
        plan = self._plan
        for piece in range(plan.row_starts[row], plan.row_starts[row + 1]):
            place = int(plan.document[piece]), int(plan.start[piece]), int(plan.slots[piece])
            yield place[0], self.store.read(*place), self.store.learned(*place)

    def _batch(
        self, ids_BS: NDArray[np.int64], document_BS: NDArray[np.int32], loss_BS: NDArray[np.bool_], seq_len: int
    ) -> Batch:
        first_BT, position_BT = first_and_positions(document_BS[:, :seq_len])
        target_BT, weight_BT = targets_at_depth(ids_BS, document_BS, loss_BS, 1, seq_len)
        num_bytes_BT = np.where(weight_BT > 0, self.store.token_bytes[target_BT], 0).astype(np.int32)
        return Batch(ids_BS, document_BS, loss_BS, first_BT, position_BT, num_bytes_BT)

    def work(self, rows: Sequence[int] | NDArray[np.int64], model: CostModel) -> NDArray[np.float64]:
        """Work of each of these rows, without reading them: the sum over its pieces of documents."""
        plan = self._plan
        pieces = model.sequences(np.minimum(plan.slots - 1, self.seq_len))
        before = np.concatenate(([0.0], np.cumsum(pieces)))
        index = np.asarray(rows, dtype=np.int64)
        return before[plan.row_starts[index + 1]] - before[plan.row_starts[index]]

    def lengths(self, rows: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Slots that documents take of the queries of each of these rows, without reading them."""
        before = np.concatenate(([0], np.cumsum(self._plan.slots)))[self._plan.row_starts]
        index = np.asarray(rows, dtype=np.int64)
        return np.minimum(before[index + 1] - before[index], self.seq_len)

    def end_to_end(self, rows: Sequence[int] | NDArray[np.int64], seq_len: int) -> Batch:
        """One row of so many queries, in which the documents of "whole" rows follow each other, numbered from 0.

        Args:
            rows: none gives a row of padding.

        Raises:
            ConfigError: they do not fit, or rows hold more than one document.
        """
        used = int(self.lengths(rows).sum()) if len(rows) else 0
        if self.strategy != "whole" or used > seq_len:
            rule = f"must hold {used} tokens of whole documents; these rows are {self.strategy}"
            raise ConfigError("seq_len", seq_len, rule)
        shape = (1, seq_len + self.ahead)
        ids_BS = np.full(shape, self.store.end_of_text_id, dtype=np.int64)
        document_BS, loss_BS = np.full(shape, -1, dtype=np.int32), np.zeros(shape, dtype=bool)
        at = 0
        for number, row in enumerate(rows):
            ((_, ids, learned),) = self._pieces(int(row))
            here = slice(at, at + len(ids))
            ids_BS[0, here], document_BS[0, here], loss_BS[0, here] = ids, number, learned
            at = here.stop
        return self._batch(ids_BS, document_BS, loss_BS, seq_len)

    def batches(self, count: int, max_rows: int | None = None) -> Iterator[Batch]:
        """For evaluation: all rows once, or the first `max_rows`, in order, `count` at a time (or what is left)."""
        rows = self.rows if max_rows is None else min(max_rows, self.rows)
        for start in range(0, rows, count):
            yield self.batch(range(start, min(start + count, rows)))


class Loader:
    """Endless samples of a dataset, each epoch in its own order.

    Args:
        dataset: the rows.
        seed: decides the orders.
        vocab_size: the model's; ids must lie below it.

    Raises:
        DataError: the dataset holds an id outside the model's vocabulary.
    """

    def __init__(self, dataset: TokenDataset, seed: int, vocab_size: int | None = None) -> None:
        if vocab_size is not None and dataset.store.max_id >= vocab_size:
            raise DataError(
                f"the tokens in {dataset.store.directory} hold id {dataset.store.max_id}, outside the model's "
                f"vocabulary of {vocab_size}",
                f"Set the model's vocab_size to {dataset.store.vocab_size} or more, or tokenize with its own tokenizer",
            )
        self.dataset, self.seed = dataset, seed
        self._order: tuple[int, NDArray[np.int64]] = (0, permutation(dataset.rows, seed, 0))

    def rows(self, index: int, count: int) -> NDArray[np.int64]:
        """The dataset's rows that samples `index .. index + count - 1` are.

        Raises:
            ConfigError: `index` is negative or `count` not positive.
        """
        if index < 0:
            raise ConfigError("index", index, "must be the number of samples consumed, 0 or more")
        if count < 1:
            raise ConfigError("count", count, "must be at least 1")
        samples = np.arange(index, index + count)
        epochs, places = samples // self.dataset.rows, samples % self.dataset.rows
        rows = np.empty(count, dtype=np.int64)
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
            here = epochs == epoch
            rows[here] = self._epoch_order(epoch)[places[here]]
        return rows

    def batch(self, index: int, count: int) -> Batch:
        """Samples `index .. index + count - 1` of the run, counted from 0 over all epochs. Errors as `rows`."""
        return self.dataset.batch(self.rows(index, count))

    def epoch(self, index: int) -> float:
        """How many passes over the data lie before sample `index`."""
        return index / self.dataset.rows

    def _epoch_order(self, epoch: int) -> NDArray[np.int64]:
        if self._order[0] != epoch:
            self._order = (epoch, permutation(self.dataset.rows, self.seed, epoch))
        return self._order[1]
