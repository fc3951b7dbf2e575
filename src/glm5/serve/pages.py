"""Pages: who holds which 64 tokens of cache, on the device and in host memory. Plain numbers; needs no torch.

A page is an integer. It stands for the same 64 slots of every cached tensor, the trunk's (MLA latent, index key) and
the MTP block's own, so that all of them are allocated, shared, offloaded and freed together and none can be left
behind. The tensors live in `cache`; what has to move is said here as `Copy` commands, which the engine carries out in
their order before the next forward pass. The order is all that protects a page which is offloaded and given to
another sequence in the same plan.

Every holder has one reference: each page table that names the page, and the prefix tree. A pin is a promise to
someone outside (a peer that still reads the page): it keeps a page from being given out again after its last reference
went. Source: report section 3 (the engine of the rollouts); paged attention (Kwon et al., 2023). Read next: `prefix`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from glm5.utils.errors import ConfigError

PAGE_SIZE = 64


class PageError(AssertionError):
    """A page was freed twice, used after it was freed, or taken where none is left: a bug, never the user's fault."""


@dataclass(frozen=True)
class Copy:
    """Copy one page, all tensors: `to_host` from page to slot, `to_device` from slot to page, `within` page to page."""

    kind: Literal["to_host", "to_device", "within"]
    source: int
    target: int


class Tier:
    """Pages [0, count) of one memory, with their references.

    Attributes:
        refs, pins: by page. cached: whether one of the references is the prefix tree's.
        idle: how many pages only the tree holds, so that they could be freed.
    """

    def __init__(self, count: int, name: str) -> None:
        self.count, self.name, self.idle = count, name, 0
        self.refs, self.pins, self.cached = [0] * count, [0] * count, [False] * count
        self._free = list(range(count - 1, -1, -1))  # a stack: low numbers first, and warm ones again

    @property
    def free(self) -> int:
        """How many pages can be allocated now."""
        return len(self._free)

    def allocate(self, n: int) -> list[int]:
        """n pages with one reference each, the caller's. The caller has made sure that they are free."""
        if not 0 <= n <= self.free:
            raise PageError(f"{self.name}: {n} pages wanted, {self.free} free")
        pages = [self._free.pop() for _ in range(n)]
        for page in pages:
            self.refs[page] = 1
        return pages

    def share(self, page: int) -> None:
        """One reference more."""
        self._held(page)
        self._change(page, refs=1)

    def release(self, page: int) -> None:
        """One reference less; without references and pins the page is free."""
        self._held(page)
        if self.cached[page] and self.refs[page] == 1:
            raise PageError(f"{self.name} page {page}: the tree's reference was released by another")
        self._change(page, refs=-1)

    def cache(self, page: int) -> None:
        """Add the prefix tree's reference."""
        self._held(page)
        if self.cached[page]:
            raise PageError(f"{self.name} page {page}: is in the tree already")
        self._change(page, refs=1, cached=True)

    def uncache(self, page: int) -> None:
        """Take the prefix tree's reference away."""
        self._held(page)
        if not self.cached[page]:
            raise PageError(f"{self.name} page {page}: is not in the tree")
        self._change(page, refs=-1, cached=False)

    def pin(self, page: int) -> None:
        """Don't give the page out again before a matching `unpin`, whoever releases it. It must be held or pinned."""
        if not (0 <= page < self.count and (self.refs[page] or self.pins[page])):
            raise PageError(f"{self.name} page {page}: nobody holds or pins it")
        self._change(page, pins=1)

    def unpin(self, page: int) -> None:
        """Take back one pin."""
        if not (0 <= page < self.count and self.pins[page]):
            raise PageError(f"{self.name} page {page}: is not pinned")
        self._change(page, pins=-1)

    def is_idle(self, page: int) -> bool:
        """Whether only the prefix tree holds the page."""
        return self.cached[page] and self.refs[page] == 1 and self.pins[page] == 0

    def _held(self, page: int) -> None:
        if not (0 <= page < self.count and self.refs[page]):
            raise PageError(f"{self.name} page {page}: nobody holds it")

    def _change(self, page: int, *, refs: int = 0, pins: int = 0, cached: bool | None = None) -> None:
        self.idle -= self.is_idle(page)
        self.refs[page] += refs
        self.pins[page] += pins
        if cached is not None:
            self.cached[page] = cached
        self.idle += self.is_idle(page)
        if self.refs[page] == self.pins[page] == 0:
            self._free.append(page)

    def check(self) -> None:
        """Verify the counts against each other.

        Raises:
            PageError: they contradict each other.
        """
        unheld = {p for p in range(self.count) if self.refs[p] == self.pins[p] == 0}
        if len(self._free) != len(unheld) or set(self._free) != unheld:
            raise PageError(f"{self.name}: free {sorted(self._free)}, but without a holder {sorted(unheld)}")
        if min((*self.refs, *self.pins, 0)) < 0 or any(self.cached[p] > self.refs[p] for p in range(self.count)):
            raise PageError(f"{self.name}: impossible counts")
        if self.idle != sum(map(self.is_idle, range(self.count))):
            raise PageError(f"{self.name}: counts {self.idle} idle pages")


class PagePool:
    """The device's pages, the host's slots, and the copies between them that are still to be made.

    Args:
        pages: on the device. host_pages: slots of the second tier, 0 for none. page_size: tokens of a page.

    Raises:
        ConfigError: a number is out of range.
    """

    def __init__(self, pages: int, host_pages: int = 0, *, page_size: int = PAGE_SIZE) -> None:
        for name, value, least in (("pages", pages, 1), ("host_pages", host_pages, 0), ("page_size", page_size, 1)):
            if value < least:
                raise ConfigError(name, value, f"must be at least {least}")
        self.page_size = page_size
        self.device, self.host = Tier(pages, "device"), Tier(host_pages, "host")
        self._copies: list[Copy] = []

    def pages_for(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.page_size)

    def offload(self, page: int) -> int:
        """Order a copy of `page` to a new host slot, which is returned; one must be free."""
        slot = self.host.allocate(1)[0]
        self._copies.append(Copy("to_host", page, slot))
        return slot

    def restore(self, slot: int, page: int) -> None:
        """Order the copy of host slot `slot` into `page`."""
        self._copies.append(Copy("to_device", slot, page))

    def duplicate(self, page: int, target: int) -> None:
        """Order the copy of `page` into `target`: copy on write, for a page that two sequences would write to."""
        self._copies.append(Copy("within", page, target))

    def take_copies(self) -> tuple[Copy, ...]:
        """The copies ordered since the last call, in their order. The caller carries them out."""
        copies, self._copies = tuple(self._copies), []
        return copies

    def check(self) -> None:
        """Verify both tiers; see `Tier.check`."""
        self.device.check()
        self.host.check()
