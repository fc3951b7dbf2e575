"""Several sources at stated ratios: which of them, and which of its rows, is sample i of a run; and rows of them all.

A source is a corpus in mid-training, a file of conversations in fine-tuning, a domain in reinforcement learning.
Report: sections 2.3 and 3.1, which mix at ratios that they don't state. Read next: `glm5.train.midtrain`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from glm5.data.balance import CostModel
from glm5.data.hashing import permutation
from glm5.data.loader import Batch, Loader, TokenDataset
from glm5.utils.errors import ConfigError

Figures = TypeVar("Figures", NDArray[np.float64], NDArray[np.int64])


@dataclass(frozen=True)
class Source:
    """A file or directory, and its weight in the mixture."""

    path: str
    ratio: float = 1.0

    @classmethod
    def parse(cls, text: str) -> Source:
        """`FILE` or `FILE=RATIO`."""
        path, equals, ratio = text.rpartition("=")
        if not equals:
            return cls(text)
        try:
            return cls(path, float(ratio))
        except ValueError:
            return cls(text)  # a file's name may hold the sign


class Mixture:
    """A function of the sample's number alone, so that a resumed run goes on with the same samples.

    Sample j of a source is due at time (j + 1/2) / share; samples come in the order of their times, and where these are
    equal in the order of the sources. Of any first n samples each source thus has its share to within half the number
    of sources, and no chance is involved.

    Args:
        ratios: weight of each source, above 0; only their proportion counts.

    Raises:
        ConfigError: there is no source, or a ratio that is not above 0.
    """

    def __init__(self, ratios: Mapping[str, float]) -> None:
        if not ratios:
            raise ConfigError("ratios", {}, "must name at least one source")
        for name, ratio in ratios.items():
            if not 0 < ratio < float("inf"):
                raise ConfigError(f"ratios[{name}]", ratio, "must be above 0")
        total = math.fsum(ratios.values())
        self.shares = {name: ratio / total for name, ratio in ratios.items()}

    def samples(self, index: int, count: int) -> list[tuple[str, int]]:
        """(source, number within the source) of samples `index` to `index + count - 1`.

        Raises:
            ConfigError: `index` is negative.
        """
        if index < 0:
            raise ConfigError("index", index, "must be 0 or more")
        # Up to this time at most `index` samples were due; from here on they are put in order.
        start = max(0.0, index - len(self.shares))
        taken = {name: max(0, math.ceil(share * start - 0.5)) for name, share in self.shares.items()}
        found: list[tuple[str, int]] = []
        at = sum(taken.values())
        while at < index + count:
            name = min(taken, key=lambda n: (taken[n] + 0.5) / self.shares[n])  # of equals the first
            if at >= index:
                found.append((name, taken[name]))
            taken[name] += 1
            at += 1
        return found


def order_of(source: str, size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """In what order a source's samples come in an epoch: sources of one size do not go together."""
    own = int.from_bytes(hashlib.sha256(source.encode()).digest()[:4], "little")
    return permutation(size, seed ^ own, epoch)


# --------------------------------------------------------------------------- rows
class TaskDataset(TokenDataset):
    """A dataset in which the rows of each source follow each other; `task_rows` has the half-open range of each."""

    task_rows: dict[str, tuple[int, int]]


class MixedDataset(TaskDataset):
    """The rows of several datasets, one source after the other.

    Args:
        sources: of one row length, and one number of slots ahead. The documents of each keep their own numbers.

    Raises:
        ConfigError: there is none, or their rows differ.
    """

    def __init__(self, sources: Mapping[str, TokenDataset]) -> None:
        shapes = {(d.seq_len, d.ahead, d.strategy) for d in sources.values()}
        if len(shapes) != 1:
            raise ConfigError("sources", list(sources), "must be at least one, all with rows of one length and kind")
        self.sources, ((self.seq_len, self.ahead, self.strategy),) = dict(sources), shapes
        self.store = max((d.store for d in sources.values()), key=lambda store: store.max_id)  # whose ids must fit
        self.task_rows = {}
        for name, dataset in sources.items():
            self.task_rows[name] = (self.rows, self.rows + dataset.rows)

    @property
    def rows(self) -> int:
        return max((last for _, last in self.task_rows.values()), default=0)

    @property
    def text_bytes(self) -> int:
        return sum(d.text_bytes for d in self.sources.values())

    @property
    def bytes_per_token(self) -> float:
        return self.text_bytes / sum(d.store.targets for d in self.sources.values())

    def batch(self, rows: Sequence[int] | NDArray[np.int64]) -> Batch:
        """As `TokenDataset.batch`."""
        index = np.asarray(rows, dtype=np.int64)
        parts: list[tuple[NDArray[np.int64], Batch]] = []
        for name, (first, last) in self.task_rows.items():
            places = np.flatnonzero((index >= first) & (index < last))
            if len(places):
                parts.append((places, self.sources[name].batch(index[places] - first)))
        if sum(len(places) for places, _ in parts) < len(index):
            raise IndexError(f"rows {index.tolist()} of {self.rows}")
        order = np.argsort(np.concatenate([places for places, _ in parts]))
        together = (np.concatenate([getattr(b, f.name) for _, b in parts])[order] for f in fields(Batch))
        return Batch(*together)

    def _pieces(self, row: int) -> Iterator[tuple[int, NDArray[Any], NDArray[np.bool_]]]:
        for name, (first, last) in self.task_rows.items():
            if first <= row < last:
                return self.sources[name]._pieces(row - first)
        raise IndexError(f"row {row} of {self.rows}")

    def work(self, rows: Sequence[int] | NDArray[np.int64], model: CostModel) -> NDArray[np.float64]:
        """As `TokenDataset.work`."""
        return self._by_source(rows, np.zeros(len(rows)), lambda d, own: d.work(own, model))

    def lengths(self, rows: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """As `TokenDataset.lengths`."""
        return self._by_source(rows, np.zeros(len(rows), dtype=np.int64), lambda d, own: d.lengths(own))

    def _by_source(self, rows: Any, out: Figures, of: Callable[[TokenDataset, NDArray[np.int64]], Any]) -> Figures:
        """`out`, filled with what each source says of its rows."""
        index = np.asarray(rows, dtype=np.int64)
        for name, (first, last) in self.task_rows.items():
            here = (index >= first) & (index < last)
            out[here] = of(self.sources[name], index[here] - first)
        return out


class MixedLoader(Loader):
    """Rows of several sources at their ratios, each source shuffled anew in each of its passes.

    Row i of a run is a function of i and the seed, as of every loader: a resumed run goes on with the same rows. Ratios
    are of rows, which are of one length.
    """

    def __init__(self, dataset: TaskDataset, ratios: Mapping[str, float], seed: int) -> None:
        super().__init__(dataset, seed)
        self.tasks, self.mixture = dataset.task_rows, Mixture(ratios)
        self._orders = lru_cache(maxsize=2 * len(ratios))(self._task_order)

    def rows(self, index: int, count: int) -> NDArray[np.int64]:
        """The dataset's rows that samples `index .. index + count - 1` are."""
        if count < 1:
            raise ConfigError("count", count, "must be at least 1")
        found = []
        for task, number in self.mixture.samples(index, count):
            first, last = self.tasks[task]
            epoch, place = divmod(number, last - first)
            found.append(first + int(self._orders(task, epoch)[place]))
        return np.array(found, dtype=np.int64)

    def epochs(self, index: int) -> dict[str, float]:
        """How many passes over each source lie before sample `index`."""
        return {task: self.mixture.shares[task] * index / (last - first) for task, (first, last) in self.tasks.items()}

    def _task_order(self, task: str, epoch: int) -> NDArray[np.int64]:
        first, last = self.tasks[task]
        return order_of(task, last - first, self.seed, epoch)
