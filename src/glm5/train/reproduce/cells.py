"""Training the cells of a table: each a run of its own, resumed where it stopped, reused when it is done.

A cell is a variant with a seed. Its directory holds the run's own record (see `glm5.utils.runlog`) and, once it is
measured, `result.json`; a cell whose result is there is neither trained nor measured again. Weights are removed when
no later cell begins with them. Several processes may run one comparison: each takes cells that no other is at. Read
next: `table1`.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm5.data.loader import Loader, TokenDataset
from glm5.model.config import ModelConfig
from glm5.model.glm5 import GLM5
from glm5.train.config import TrainConfig
from glm5.train.loop import Trainer
from glm5.train.reproduce.settings import Settings
from glm5.train.schedule import BatchWarmup
from glm5.utils.config_io import to_dict
from glm5.utils.errors import FileError
from glm5.utils.files import exclusive, file_errors, make_directory, read_json, write_json
from glm5.utils.runlog import read_metrics, refuse_changes

RESULT = "result.json"
POLL_S = 0.5
Measured = dict[str, Any]


@dataclass(frozen=True)
class Text:
    """What is trained on, and measured with."""

    training: TokenDataset
    held_out: TokenDataset

    def prompts(self, count: int) -> list[list[int]]:
        """Beginnings of up to `count` held-out documents, spread over them, of half a row at most."""
        store = self.held_out.store
        documents = range(0, len(store.lengths), max(1, len(store.lengths) // count))[:count]
        longest = max(1, self.held_out.seq_len // 2)
        return [store.read(d, 0, min(longest, int(store.lengths[d]) - 1)).tolist() for d in documents]


@dataclass(frozen=True)
class Cell:
    """One variant with one seed; the seed draws the initial weights and the order of the data.

    Args:
        variant: a name that can be a directory's.
        model, train: what is trained, and how.
        settings: the table's, so that a result is never taken for another size's.
        corpus: fingerprint of the training tokens.
        parent: the cell whose weights this one begins with; None begins with fresh ones.
    """

    variant: str
    seed: int
    model: ModelConfig
    train: TrainConfig
    settings: Settings
    corpus: str
    parent: Cell | None = None

    @property
    def name(self) -> str:
        return f"{self.variant}-seed{self.seed}"

    @property
    def ancestors(self) -> list[Cell]:
        """The parent, its parent, and so on."""
        return [] if self.parent is None else [self.parent, *self.parent.ancestors]


class Lab:
    """Trains and measures cells below one directory.

    Args:
        directory: of the comparison.
        text: the corpus.
        settings: sizes and lengths, the same for all cells.
        device: torch device's name.
        note: prints a line for whoever waits.
        keep: leave the checkpoints of finished cells.
    """

    def __init__(
        self,
        directory: Path,
        text: Text,
        settings: Settings,
        *,
        device: str = "cpu",
        note: Callable[[str], None] = lambda _: None,
        keep: bool = False,
    ) -> None:
        self.directory, self.text, self.settings = directory, text, settings
        self.device, self.note, self.keep = device, note, keep

    def cell(
        self,
        variant: str,
        seed: int,
        model: ModelConfig,
        *,
        parent: Cell | None = None,
        data_seed: int | None = None,
        **changes: Any,
    ) -> Cell:
        """A cell of this comparison: dense pretraining, but for `changes`, which are fields of `TrainConfig`.

        Args:
            data_seed: of the order of the rows; by default `seed`, which also draws the initial weights.
        """
        s = self.settings
        options: dict[str, Any] = dict(
            steps=s.steps,
            batch=BatchWarmup(s.rows, s.rows, 0),
            micro_batch=s.micro_batch,
            lr=s.lr,
            mtp_depths=0,
            # Named, so that no cell is finished on another kind of device than the rest.
            precision="fp32" if self.device == "cpu" else "bf16",
            measure_every=s.steps,  # the tables measure what they need
            save_every=100,
            keep=1,
        )
        train = TrainConfig(**{**options, **changes}, seed=seed if data_seed is None else data_seed)
        return Cell(variant, seed, model, train, s, self.text.training.store.fingerprint, parent)

    def results(
        self,
        cells: Sequence[Cell],
        measure: Callable[[Cell, GLM5], Measured],
        watch: Callable[[Cell], Callable[[Trainer], None]] | None = None,
    ) -> dict[tuple[str, int], Measured]:
        """What `measure` finds on every cell, by (variant, seed); parents stand before their children.

        Args:
            watch: makes what is called after each step of a cell's training.

        Raises:
            ConfigError: a cell's directory holds a run with other settings, or on another corpus.
        """
        make_directory(self.directory)
        found: dict[tuple[str, int], Measured] = {}
        left = list(cells)
        while left:
            before = len(left)
            for cell in list(left):
                if all(self._recorded(ancestor) is not None for ancestor in cell.ancestors):
                    with self._alone(cell) as ours:
                        if ours:
                            where = f"{cells.index(cell) + 1} of {len(cells)}  {cell.variant}, seed {cell.seed}"
                            found[cell.variant, cell.seed] = self._result(cell, where, measure, watch)
                            left.remove(cell)
                            self._drop_weights(cells)
            if len(left) == before:
                time.sleep(POLL_S)  # other processes are at all of them
        return found

    def _result(
        self,
        cell: Cell,
        where: str,
        measure: Callable[[Cell, GLM5], Measured],
        watch: Callable[[Cell], Callable[[Trainer], None]] | None,
    ) -> Measured:
        """What is recorded of a cell, or is measured now."""
        recorded = self._recorded(cell)
        self.note(where if recorded is None else f"{where}: done before")
        if recorded is None:
            model = self._train(cell, watch).model
            model.requires_grad_(False).eval()
            recorded = measure(cell, model)
            write_json(self.directory / cell.name / RESULT, {"cell": to_dict(cell), "measured": recorded})
        return recorded

    @contextmanager
    def _alone(self, cell: Cell) -> Iterator[bool]:
        """Hold a cell; False where another process holds it."""
        path = self.directory / f".{cell.name}.lock"
        with ExitStack() as held:
            try:
                held.enter_context(exclusive(path, patience_s=0.0))
            except FileError:
                if not os.access(path, os.W_OK):
                    raise
                yield False
                return
            yield True

    def _train(self, cell: Cell, watch: Callable[[Cell], Callable[[Trainer], None]] | None) -> Trainer:
        """The cell's trainer after its last step, from the cell's newest checkpoint if there is one."""
        if cell.parent is None:
            model = GLM5(cell.model, seed=cell.seed)
        else:
            # Another child may be at it, in another process.
            with exclusive(self.directory / f".{cell.parent.name}.lock", patience_s=3600.0):
                model = self._train(cell.parent, watch).fp32_model().requires_grad_(True)
        loader = Loader(self.text.training, cell.train.seed)
        trainer = Trainer(cell.train, model.to(self.device), loader, self.directory / cell.name)
        trainer.run(resolved=cell, title=cell.name, on_step=None if watch is None else watch(cell))
        return trainer

    def curve(self, variant: str, seed: int, metric: str) -> list[tuple[float, float]]:
        """Points (step, value) of a metric of a cell's training."""
        records = read_metrics(self.directory / f"{variant}-seed{seed}")
        return [(float(r["step"]), float(r[metric])) for r in records if metric in r]

    # ------------------------------------------------------------------ what is there
    def _recorded(self, cell: Cell) -> Measured | None:
        path = self.directory / cell.name / RESULT
        if not path.exists():
            return None
        record = read_json(path)
        refuse_changes(record["cell"], to_dict(cell))
        return record["measured"]

    def _drop_weights(self, cells: Sequence[Cell]) -> None:
        """Remove those of measured cells with which no cell begins that is yet to be measured."""
        if self.keep:
            return
        needed = {a.name for cell in cells if self._recorded(cell) is None for a in cell.ancestors}
        with exclusive(self.directory / ".weights.lock", patience_s=600.0):
            for cell in cells:
                checkpoints = self.directory / cell.name / "checkpoints"
                if cell.name not in needed and self._recorded(cell) is not None and checkpoints.exists():
                    with file_errors(checkpoints, "remove"):
                        shutil.rmtree(checkpoints)


def by_seed(
    found: Mapping[tuple[str, int], Measured], variant: str, seeds: Sequence[int], *path: str | int
) -> list[float]:
    """One figure of a variant's results, by seed: `path` leads to it through the result."""
    values = []
    for seed in seeds:
        value: Any = found[variant, seed]
        for step in path:
            value = value[step]
        values.append(float(value))
    return values
