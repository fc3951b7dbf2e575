"""Drafts for a batch of sequences: the shared MTP block follows each of them, and guesses before the trunk checks.

    trunk has read L tokens, t is the next one       MTP entry of slot L reads (trunk's hidden L - 1, t) -> draft 1
                                                     MTP entry of slot L + 1 reads (its own output, draft 1) -> draft 2
    trunk reads [t, draft 1 ... draft k] in one call, and `sampler` says how many of them count

Entries that were made from the block's own output are made again from the trunk's, in the call that gives the next
draft 1. Entries of a prompt are made with its chunk, before its pages can be shared. What is wrong or missing in an
entry can only make a draft worse, never a result. Source: report section 2.1 (parameter-shared MTP). Read next:
`glm5.model.paged` for why slot i reads hidden state i - 1; `executor`.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from glm5.model.glm5 import GLM5
from glm5.model.paged import PagedBatch, PagedCache, Run
from glm5.serve.graphs import Graphs, Outputs
from glm5.serve.sampler import Sampler, SamplerState

if TYPE_CHECKING:
    from glm5.serve.scheduler import Item, Sequence


@dataclass(frozen=True)
class _Place:
    """How far the block has followed a sequence: entries of slots below `filled` are made. hidden_CD: the trunk's
    hidden states of slots from `filled` - 1 on, which the next entries read."""

    filled: int
    hidden_CD: Tensor


class Drafter:
    """Keeps the MTP block beside the trunk.

    Args:
        cache: must have been made with `draft`.

    Attributes:
        recorded: of a step's first entries, which follow what the step before accepted, and of those that read a draft;
            None where nothing is recorded.
    """

    def __init__(self, model: GLM5, cache: PagedCache, sampler: Sampler) -> None:
        _ = model.mtp  # raises if there is none
        self.model, self.cache, self.sampler = model, cache, sampler
        self.recorded: tuple[Graphs | None, Graphs | None] = None, None
        self._places: dict[Sequence, _Place] = {}

    def propose(self, items: Seq[Item], states: Seq[SamplerState]) -> list[list[int]]:
        """Drafts of each item, as many as it asks for; before the trunk runs."""
        drafts: list[list[int]] = [[] for _ in items]
        at = [i for i, item in enumerate(items) if item.sequence.decoding]
        if not at:
            return drafts
        runs, ids, hidden = [], [], []
        for i in at:
            sequence, place = items[i].sequence, self._places[items[i].sequence]
            count = len(sequence.ids) - place.filled
            runs.append(Run(items[i].pages, place.filled, count))
            ids.append(sequence.ids[place.filled :])
            hidden.append(place.hidden_CD[:count])
        out_BD, logits_BV = self._guess(self.recorded[0], runs, ids, hidden)
        for depth in range(max(item.drafts for item in items)):
            on = [row for row, i in enumerate(at) if items[i].drafts > depth]
            at, out_BD, logits_BV = [at[row] for row in on], out_BD[on], logits_BV[on]
            guesses = self.sampler.draft(logits_BV, [states[i] for i in at], [drafts[i] for i in at])
            for i, guess in zip(at, guesses, strict=True):
                drafts[i].append(guess)
            rest = [row for row, i in enumerate(at) if items[i].drafts > depth + 1]
            if rest:
                at, out_BD = [at[row] for row in rest], out_BD[rest]
                runs = [Run(items[i].pages, items[i].start + 1 + depth, 1) for i in at]
                last = [[drafts[i][-1]] for i in at]
                out_BD, logits_BV = self._guess(self.recorded[1], runs, last, list(out_BD[:, None]))
        return drafts

    def follow(self, items: Seq[Item], hidden: Seq[Tensor]) -> None:
        """Take in what the trunk read: per item its hidden states [slots, D]. The drafts that counted come later."""
        runs, ids, before = [], [], []
        for item, hidden_TD in zip(items, hidden, strict=True):
            sequence, start, end = item.sequence, item.start, item.start + item.count
            if sequence.decoding:
                self._places[sequence] = _Place(end, hidden_TD.clone())  # of all drafts, whichever will count
                continue
            read = torch.cat((self._before(item), hidden_TD[:-1]))
            if len(read):
                runs.append(Run(item.pages, max(start, 1), len(read)))
                ids.append(sequence.ids[max(start, 1) : end])
                before.append(read)
            for answer in (sequence, *item.answers):
                self._places[answer] = _Place(end, hidden_TD[-1:].clone())
        if runs:
            self._entries(runs, ids, before)

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended, or lost its pages."""
        self._places.pop(sequence, None)

    def state_at_end(self, sequence: Sequence) -> bytes:
        """The trunk's hidden state of the last slot that a sequence has read, for a worker that goes on from there."""
        return self._places[sequence].hidden_CD[-1].view(torch.uint8).cpu().numpy().tobytes()

    def arrive(self, sequence: Sequence, end: int, hidden: bytes) -> None:
        """Entries below `end` came from another worker, whose trunk ended in the state `hidden`."""
        like = self.cache.hidden
        state_D = torch.frombuffer(bytearray(hidden), dtype=like.dtype).to(like.device)
        self._places[sequence] = _Place(end, state_D[None])

    def _before(self, item: Item) -> Tensor:
        """The trunk's hidden state of the slot before an item's, [1, D]; [0, D] at the beginning."""
        if item.start % self.cache.size:
            return self._places[item.sequence].hidden_CD[-1:]
        if item.start == 0:
            return self.cache.hidden[:0]
        page = item.pages[item.start // self.cache.size - 1]
        return self.cache.hidden[page : page + 1]

    def _guess(self, recorded: Graphs | None, runs: list[Run], ids: list[list[int]], hidden: list[Tensor]) -> Outputs:
        """Make entries; the block's output at the last of each run, and its logits."""
        found = recorded(runs, ids, hidden) if recorded is not None else None
        if found is not None:
            return found
        out_BD = self._entries(runs, ids, hidden)
        return out_BD, self.model.lm_head(out_BD)

    def _entries(self, runs: list[Run], ids: list[list[int]], hidden: list[Tensor]) -> Tensor:
        """Make entries of the MTP block; its output at the last of each run, [runs, D]."""
        batch = PagedBatch(self.cache, runs, first=1)
        next_ids = batch.flat(ids)
        read_1ND = torch.cat([hidden[i] for i in batch.order])[None]
        out = self.model.draft_hidden(read_1ND, next_ids, batch)[0]
        return out[[at + run.count - 1 for at, run in zip(batch.offsets, runs, strict=True)]]
