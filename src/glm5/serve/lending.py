"""Pages that an engine fetches from other workers, and those that it keeps for them.

Loads: the scheduler lets a sequence wait whose prompt another worker has read (`Request.source`); `fetch` brings the
pages, and `end_load` says how that ended. Leases: the pages of a prompt that was read for another worker stay until it
returns them, and longer while it reads them. All of it is called in the engine's thread; bytes travel in `transfer`.

Source: report section 3 (disaggregated rollouts). Read next: `transfer`, `scheduler`.
"""

from __future__ import annotations

from collections.abc import Callable

from glm5.model.paged import PagedCache
from glm5.serve.request import PageSource
from glm5.serve.scheduler import Scheduler
from glm5.serve.sequence import Item, Lease, Sequence
from glm5.serve.speculate import Drafter
from glm5.serve.transfer import Load, PageBytes


class Lending:
    """Loads and leases of one engine: the `transfer.Keeper` of its pages.

    Args:
        scheduler, cache: the engine's. drafter: where it drafts. page_bytes: `PageBytes`, or what writes on all ranks.
        changed: called when what waits for pages may be able to go on.

    Attributes:
        fetch: begins to bring the pages of a load, as `transfer.Fetcher.start` does; None where nobody can.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        cache: PagedCache,
        drafter: Drafter | None,
        changed: Callable[[], None],
        page_bytes: Callable[[PagedCache], PageBytes] = PageBytes,
    ) -> None:
        self.fetch: Callable[[Load], None] | None = None
        self._scheduler, self._cache, self._drafter, self._changed = scheduler, cache, drafter, changed
        self._page_bytes = page_bytes
        self._loads: dict[Sequence, Load] = {}
        self._ends: dict[str, bytes] = {}  # the trunk's hidden state of each lease's last slot

    # ------------------------------------------------------------------ pages of other workers
    def begin_load(self, item: Item, source: PageSource, version: str) -> None:
        """Order the pages of an item, which weights of this version must have written."""
        if self.fetch is None or item.sequence.state == "finished":
            self._scheduler.end_load(item, filled=False)
            self._changed()
            return
        load = Load(item, source, version, self._page_bytes(self._cache))
        self._loads[item.sequence] = load
        self.fetch(load)

    def end_load(self, load: Load, *, filled: bool) -> None:
        """A load is over, one way or the other. Its second end is no error."""
        sequence = load.item.sequence
        if self._loads.get(sequence) is not load:
            return
        load.cancel()
        del self._loads[sequence]
        if filled and self._drafter is not None:
            self._drafter.arrive(sequence, load.source.tokens, load.hidden)
        self._scheduler.end_load(load.item, filled=filled)
        self._changed()

    def give_up(self, sequence: Sequence) -> None:
        """Whoever waits for this sequence's pages has gone."""
        if sequence in self._loads:
            self.end_load(self._loads[sequence], filled=False)

    def end_loads(self) -> None:
        """What waits for pages reads its prompt itself: afterwards nothing is in flight."""
        for item, _ in self._scheduler.take_loads():
            self._scheduler.end_load(item, filled=False)
        for load in list(self._loads.values()):
            self.end_load(load, filled=False)

    @property
    def loading(self) -> int:
        """Sequences that wait for pages."""
        return len(self._loads)

    # ------------------------------------------------------------------ pages for other workers
    def keep_end(self, answer: Sequence) -> None:
        """An answer has finished: if its pages are leased, keep what a drafter goes on from."""
        if answer.request.rid in self._scheduler.leases and self._drafter is not None:
            self._ends[answer.request.rid] = self._drafter.state_at_end(answer)

    def borrow(self, name: str) -> tuple[Lease, bytes] | None:
        """The pages of a lease, which stay as they are until `give_back`, and the hidden state of its last slot."""
        lease = self._scheduler.leases.get(name)
        if lease is None:
            return None
        self._scheduler.pin(lease)
        return lease, self._ends.get(name, b"")

    def give_back(self, lease: Lease) -> None:
        """A reader is done with it."""
        self._scheduler.unpin(lease)
        self._changed()

    def return_lease(self, name: str) -> None:
        """Nobody will fetch these pages any more. An unknown name is no error."""
        self._scheduler.return_lease(name)
        self._ends.pop(name, None)
        self._changed()
