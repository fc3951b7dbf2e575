"""Decode steps as CUDA graphs: one launch in place of some hundred, from buffers that stay where they are.

A step in which every sequence runs its last id and its drafts is padded to a known number of sequences, to as many rows
of each as there may be drafts, and to a known length of page tables; for each such pair the model's call is recorded
once, when it is first needed, and replayed from then on. What a step needs (ids, starts, pages that are new) is copied
into the recorded buffers. Padding sequences write to a page that is nobody's, `spare`, and see only themselves; being
equal, they also go to the same few experts. Padding rows of a sequence lie behind its own, in slots that it will write
before it reads them, or in `spare`.

Where nothing can be recorded, as on a CPU, `Graphs` can run the same buffers through the plain call: that is what its
tests do. Steps of other shapes (chunks of prompts, more rows than are recorded) are not its business: it returns None,
and the executor makes its plain call. The MTP block's entries are recorded in the same way. Read next:
`glm5.model.paged`, `executor`.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from glm5.kernels.dispatch import pick
from glm5.kernels.pages import Pages
from glm5.kernels.visibility import Visibility
from glm5.model.glm5 import GLM5
from glm5.model.paged import PagedBatch, PagedCache, Run
from glm5.serve import invariant

log = logging.getLogger(__name__)

ROWS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
# Pages of a table: the operators' work follows what is seen, so that few lengths do.
PAGES = (64, 256, 1024, 4096)
MOST_QUERIES = 8  # rows of a sequence up to which steps are recorded
_ASKING = threading.Lock()  # torch's mode, and who hears of warnings, are one for all threads

Outputs = tuple[Tensor, Tensor]
Recorder = Callable[[Callable[[], Outputs]], Callable[[], Outputs]]


def recorder_for(device: torch.device) -> Recorder | None:
    """How calls are recorded on a device; None where they cannot be."""
    if device.type != "cuda":
        return None
    pool = torch.cuda.graph_pool_handle()

    def record(run: Callable[[], Outputs]) -> Callable[[], Outputs]:
        with torch.cuda.device(device):
            aside = torch.cuda.Stream()
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):  # compiles and allocates what must not happen while recording
                run()
                _refuse_waiting(run)
            torch.cuda.current_stream().wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            # Other threads may go on using the device: pages are fetched and weights arrive there.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                outputs = run()

        def replay() -> Outputs:
            graph.replay()
            return outputs

        return replay

    return record


def _refuse_waiting(run: Callable[[], Outputs]) -> None:
    """Run once; a call that waits for the device is refused here, since a recording that fails leaves torch's own state
    behind: where the widths are not those of the kernels, plain PyTorch looks at what it selected."""
    told: list[str] = []
    own, show = threading.get_ident(), warnings.showwarning

    def hear(message: Warning | str, *more: Any, **others: Any) -> None:
        waits = "called a synchronizing" in str(message)
        if not waits:
            show(message, *more, **others)
        elif threading.get_ident() == own:  # other threads may wait: pages are fetched there
            told.append(str(message))

    with _ASKING, warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = hear
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    if told:
        raise RuntimeError("a part of the model waits for the device (see `glm5 doctor` for its operators)")


class StaticBatch(PagedBatch):
    """A `PagedBatch` of sequences with `queries` rows each, whose places come from tensors.

    Args:
        start_B: int64, the first slot of each sequence's rows. table_BP: int64, its pages. spare: nobody's page.
        first, by_row: see `PagedBatch`.
    """

    def __init__(
        self,
        cache: PagedCache,
        start_B: Tensor,
        table_BP: Tensor,
        queries: int,
        spare: int,
        *,
        first: int = 0,
        by_row: bool = False,
    ) -> None:
        self.cache, self.size, self.spare, self.by_row = cache, cache.size, spare, by_row
        pages, slots = Pages(table_BP, cache.size), table_BP.shape[1] * cache.size
        fast, rows = pick("next_rows", start_B, table_BP), None
        if fast is not None:
            first_BT, last_BT, row_BT = fast(start_B, table_BP, cache.size, queries, first)
            rows = [row_BT]
        else:
            last_BT = start_B[:, None] + torch.arange(queries, device=start_B.device)
            first_BT = torch.full_like(last_BT, first)
        self._place([(Visibility(first_BT, last_BT, slots), pages)], first, rows)

    def keep_hidden(self, hidden_1ND: Tensor) -> None:
        """Keep the trunk's hidden states of slots that end a page, without asking whether there are any."""
        if self.cache.draft:
            page_N = torch.where(self.ends_N, self.row_N // self.size, self.spare)
            self.cache.hidden.index_copy_(0, page_N, hidden_1ND[0])


class _Step:
    """One recorded shape: `rows` sequences with `queries` rows each, whose tables have `pages` pages."""

    first = 0  # the first slot that has an entry

    def __init__(self, graphs: Graphs, shape: tuple[int, int, int]) -> None:
        rows, queries, pages = shape
        self._graphs, self._queries, device = graphs, queries, graphs.cache.hidden.device
        pinned = device.type == "cuda"
        self._host_BX = torch.zeros(rows, 2 + queries, dtype=torch.int64, pin_memory=pinned)  # start, last row, ids
        self._host_BX[:, 0] = self.first
        self._host_table_BP = torch.full((rows, pages), graphs.spare, dtype=torch.int64, pin_memory=pinned)
        self._device_BX, self._table_BP = self._host_BX.to(device), self._host_table_BP.to(device)
        self._tables: list[Sequence[int]] = [()] * rows  # what the host's table holds of each row
        self._copied = torch.cuda.Event() if pinned else None
        self._prepare(rows, device)
        self._replay = graphs.record(self._run)

    def _prepare(self, rows: int, device: torch.device) -> None:
        """Make what else the call reads."""

    def _batch(self, *, by_row: bool = False) -> tuple[StaticBatch, Tensor]:
        """The call's batch, and its ids [1, N]."""
        graphs, start_B = self._graphs, self._device_BX[:, 0]
        places = graphs.cache, start_B, self._table_BP, self._queries, graphs.spare
        return StaticBatch(*places, first=self.first, by_row=by_row), self._device_BX[:, 2:].reshape(1, -1)

    def _run(self) -> Outputs:
        fixed, model = self._graphs.fixed, self._graphs.model
        batch, ids_1N = self._batch(by_row=fixed)
        with invariant.operators(model) if fixed else nullcontext():
            hidden_ND = model.hidden(ids_1N, cache=batch)[0]
            return hidden_ND, model.lm_head(hidden_ND)

    def _fill(self, runs: Sequence[Run], ids: Sequence[Sequence[int]]) -> None:
        if self._copied is not None:
            self._copied.synchronize()  # the device has read what the last step left here
        rows, changed, pages = [], False, self._table_BP.shape[1]
        for row, before in enumerate(self._tables):
            used, last = row < len(runs), row * self._queries
            given = [runs[row].start, last + runs[row].count - 1, *ids[row]] if used else [self.first, last]
            rows.append(given + [0] * (2 + self._queries - len(given)))
            table: Sequence[int] = runs[row].table if used else ()
            if len(table) > pages:
                table = table[:pages]
            if table != before:  # quick where it is the list of which `before` is a copy
                kept = len(before) if table[: len(before)] == before else 0
                self._host_table_BP[row, kept : len(table)] = torch.tensor(table[kept:], dtype=torch.int64)
                self._host_table_BP[row, len(table) :] = self._graphs.spare
                self._tables[row], changed = table[:], True
        self._host_BX.copy_(torch.tensor(rows))
        self._device_BX.copy_(self._host_BX, non_blocking=True)
        if changed:
            self._table_BP.copy_(self._host_table_BP, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def _own(self, runs: Sequence[Run]) -> slice | Tensor:
        """Which rows are the runs' own."""
        if all(run.count == self._queries for run in runs):
            return slice(len(runs) * self._queries)
        own = [row * self._queries + i for row, run in enumerate(runs) for i in range(run.count)]
        return torch.tensor(own, device=self._device_BX.device)

    def __call__(self, runs: Sequence[Run], ids: Sequence[Sequence[int]], hidden: Sequence[Tensor] = ()) -> Outputs:
        self._fill(runs, ids)
        hidden_ND, logits_NV = self._replay()
        own = self._own(runs)
        return hidden_ND[own], logits_NV[own]


class _DraftStep(_Step):
    """The same of the MTP block, which reads a hidden state with each id, and says what follows each sequence."""

    first = 1

    def _prepare(self, rows: int, device: torch.device) -> None:
        width = self._graphs.cache.hidden
        self._read_1ND = torch.zeros(1, rows * self._queries, width.shape[-1], dtype=width.dtype, device=device)

    def _run(self) -> Outputs:
        batch, ids_1N = self._batch()
        model = self._graphs.model
        out_BD = model.draft_hidden(self._read_1ND, ids_1N, batch)[0].index_select(0, self._device_BX[:, 1])
        return out_BD, model.lm_head(out_BD)

    def __call__(self, runs: Sequence[Run], ids: Sequence[Sequence[int]], hidden: Sequence[Tensor] = ()) -> Outputs:
        self._fill(runs, ids)
        if hidden:
            self._read_1ND[0, self._own(runs)] = torch.cat(list(hidden))
        out_BD, logits_BV = self._replay()
        return out_BD[: len(runs)], logits_BV[: len(runs)]


class Graphs:
    """The recorded steps of one engine.

    Args:
        cache: has a page more than is given out, `spare`.
        most: sequences of a step at most. queries: rows of each at most. context: slots of a sequence at most.
        record: see `recorder_for`. fixed: record the operators of the invariant mode.
        draft: record the MTP block's entries, in place of the trunk's.
        agree: whether all ranks that record the same steps have recorded this one, told whether this rank has: those
            that have would wait for the sums of one that has not.

    Attributes:
        replayed: steps that ran from a recording.
    """

    def __init__(
        self,
        model: GLM5,
        cache: PagedCache,
        *,
        spare: int,
        most: int,
        context: int,
        record: Recorder,
        queries: int = 1,
        fixed: bool = False,
        draft: bool = False,
        agree: Callable[[bool], bool] = lambda made: made,
    ) -> None:
        self.fixed, self._queries, self._kind, self._agree = fixed, queries, _DraftStep if draft else _Step, agree
        self.model, self.cache, self.spare, self.record = model, cache, spare, record
        longest = -(-(context + queries - 1) // cache.size)
        self._rows = [*(n for n in ROWS if n < most), min(most, ROWS[-1])]
        self._pages = [*(n for n in PAGES if n < longest), longest]
        self._steps: dict[tuple[int, int, int], _Step] = {}
        self._broken = False
        self.replayed = 0

    def __call__(
        self, runs: Sequence[Run], ids: Sequence[Sequence[int]], hidden: Sequence[Tensor] = ()
    ) -> Outputs | None:
        """The trunk's hidden states [N, D] of all runs' rows after the final norm, and their logits, valid until the
        next step; None if this step has to be run plainly.

        Args:
            hidden: with `draft`: what each run reads, [count, D]. The result is then of each run's last row.
        """
        shape = self.shape(runs)
        return None if shape is None else self.run(shape, runs, ids, hidden)

    def shape(self, runs: Sequence[Run]) -> tuple[int, int] | None:
        """The sequences and the pages of tables of the step that takes these runs; None if it has to be run plainly."""
        queries, slots = self._queries, max(run.start for run in runs) + self._queries
        odd = queries > MOST_QUERIES or any(run.count > queries for run in runs)
        if self._broken or odd or len(runs) > self._rows[-1] or slots > self._pages[-1] * self.cache.size:
            return None
        rows = next(n for n in self._rows if n >= len(runs))
        return rows, next(n for n in self._pages if n * self.cache.size >= slots)

    def run(
        self, shape: tuple[int, int], runs: Sequence[Run], ids: Sequence[Sequence[int]], hidden: Sequence[Tensor] = ()
    ) -> Outputs | None:
        """As the call, in a step of a shape that is large enough: also of no runs at all, for other ranks' sake."""
        rows, pages = shape
        step = self._step((rows, self._queries, pages))
        if step is None:
            return None
        self.replayed += bool(runs)
        return step(runs, ids, hidden)

    def warm(self) -> None:
        """Record every number of sequences at the shortest tables: what has to be compiled is compiled now, and not
        under the first requests."""
        if self._queries > MOST_QUERIES:
            log.warning("steps run plainly: %d rows a sequence, recorded are up to %d", self._queries, MOST_QUERIES)
            return
        for rows in self._rows:
            if self._step((rows, self._queries, self._pages[0])) is None:
                return

    def forget(self) -> None:
        """Give the recordings up, on all devices."""
        self._steps.clear()

    def _step(self, shape: tuple[int, int, int]) -> _Step | None:
        """The recorded step of a shape, recorded now if need be; None if it cannot be."""
        if shape not in self._steps:
            log.info("recording a step of %d sequences, %d rows each, tables of %d pages", *shape)
            made, why = None, "another rank could not record its own"
            try:
                made = self._kind(self, shape)
            except RuntimeError as problem:
                why = str(problem).partition("\n")[0]
            if not self._agree(made is not None) or made is None:
                log.warning("steps run plainly, without CUDA graphs: %s", why)
                self._broken = True
                return None
            self._steps[shape] = made
        return self._steps[shape]
