"""What the scheduler and the engine say to each other: sequences, the plan of a step, and what came out of it.

Read next: `scheduler`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from glm5.serve.pages import Copy
from glm5.serve.prefix import page_keys
from glm5.serve.request import Finish, PageSource, Request

State = Literal["waiting", "running", "preempted", "finished"]
Order = tuple[int, float, int, int]  # of going first: priority (negative), arrival, serial number, answer


@dataclass(eq=False)
class Sequence:
    """Answer `index` of a request. Equal only to itself.

    Attributes:
        limit: ids that prompt and answer may hold together.
        ids: of prompt and answer so far. The last one of an answer has no cache entry yet.
        computed: how many of `ids`, from the first, have entries in the cache. settled: how many of those are final:
            the MTP block's entries of drafts that counted are made again in the next step.
        pages: the page table.
        state: "waiting" never ran; "preempted" ran, or was forked, and has no pages now.
        decoding: its last id is all that is left to run, and the hidden state before it is at hand, so drafts can be
            made. siblings: answers that begin when this one's prompt was read. item: what is in flight.
        cached: prompt tokens that need not be read. cache_version: of the weights that wrote its entries; None where
            they are not to be shared.
        oldest_version: of the weights that gave the first id of the answer; None before there is one.
        source: where its pages can be fetched; tried once.
    """

    request: Request
    index: int
    limit: int
    order: Order
    ids: list[int]
    computed: int = 0
    settled: int = 0
    pages: list[int] = field(default_factory=list)
    state: State = "waiting"
    finish: Finish | None = None
    decoding: bool = False
    siblings: tuple[Sequence, ...] = ()
    item: Item | None = None
    cached: int = 0
    cache_version: str | None = None
    oldest_version: str | None = None
    source: PageSource | None = None
    _keys: list[bytes] = field(default_factory=list, repr=False)

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.input_ids)

    @property
    def generated(self) -> int:
        """Ids of the answer so far."""
        return len(self.ids) - self.prompt_tokens

    def keys(self, n: int, page_size: int) -> list[bytes]:
        """The keys of its first n pages; so many must be whole."""
        self._keys += page_keys(self.ids, page_size, len(self._keys))
        return self._keys[:n]


@dataclass(frozen=True, eq=False)
class Item:
    """What one sequence runs in a step: `ids[start : start + count]`, then `drafts` drafts.

    Drafts are made at the beginning of the step that verifies them: their slots are reserved here, nothing more is
    known of them. Which ones were right, `Outcome` says.

    Args:
        pages: its page table for slots [0, start + count + drafts); those from `start` on are its own to write.
        answers: those who get ids from the last row: nobody in the middle of a prompt; the sequence itself; and at the
            end of a prompt with n > 1 all answers to it, each drawing its own.
    """

    sequence: Sequence
    start: int
    count: int
    drafts: int
    pages: tuple[int, ...]
    answers: tuple[Sequence, ...]

    @property
    def slots(self) -> int:
        return self.count + self.drafts


@dataclass(frozen=True)
class Lease:
    """Pages kept for a peer: the entries of a prompt's first `tokens` ids, written by weights of `version`."""

    pages: tuple[int, ...]
    tokens: int
    version: str


@dataclass(frozen=True)
class Plan:
    """One step: make the copies in their order, then run the items in one batch, and begin to fetch the loads.

    A load is an item whose slots another worker has filled; it stays in flight until `Scheduler.end_load`.
    """

    copies: tuple[Copy, ...]
    items: tuple[Item, ...]
    loads: tuple[tuple[Item, PageSource], ...] = ()

    @property
    def tokens(self) -> int:
        return sum(item.slots for item in self.items)


@dataclass(frozen=True)
class Outcome:
    """What an answer got: the accepted drafts and one id more, or fewer if they end it; `finish` if so.

    No ids, with a `finish` of type "error", means that the step's entries are not to be trusted.
    """

    ids: tuple[int, ...]
    finish: Finish | None = None
