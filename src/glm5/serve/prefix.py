"""Prefix reuse: a radix tree over token ids in whole pages, so that a text that was read once is not read again.

Every node is one page of ids below the pages before it; its cache entries depend on those ids and on nothing else
but the weights, so each weight version has a root of its own. A node's page is on the device, or was offloaded to a
host slot; above a node on the device all nodes are on the device. What only the tree holds may go, leaves first: from
the device to the host while that has room, from the host for good. Whatever a page table holds stays.

Callers give ids as page keys (`page_keys`), which a sequence computes once. Source: RadixAttention (Zheng et al.,
2024), at page granularity. Read next: `scheduler`.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from itertools import count
from typing import Literal

from glm5.serve.pages import PageError, PagePool
from glm5.utils.errors import ConfigError

Policy = Literal["lru", "frequency"]
Rank = tuple[int, int]


def page_keys(ids: Sequence[int], page_size: int, start: int = 0) -> list[bytes]:
    """One key for each whole page of `ids` from page `start` on: equal keys are equal ids."""
    return [
        array("i", ids[at : at + page_size]).tobytes()
        for at in range(start * page_size, len(ids) - page_size + 1, page_size)
    ]


class Node:
    """One page of ids after those of its parents. Exactly one of `page` and `slot` is set, except in a root."""

    __slots__ = ("children", "key", "page", "parent", "resident", "slot", "used", "uses")

    def __init__(self, key: bytes = b"", parent: Node | None = None) -> None:
        self.key, self.parent = key, parent
        self.children: dict[bytes, Node] = {}
        self.page: int | None = None
        self.slot: int | None = None
        self.resident = 0  # children whose page is on the device
        self.used, self.uses = 0, 1


class PrefixTree:
    """The pages of texts that were read, by weight version.

    Args:
        pool: whose pages these are.
        policy: what goes first: "lru", used longest ago; "frequency", used least often, then longest ago.
        version: of the weights.

    Attributes:
        queries, hits: tokens asked for and found; `count` adds to them.
    """

    def __init__(self, pool: PagePool, *, policy: Policy = "lru", version: str = "0") -> None:
        if policy not in ("lru", "frequency"):
            raise ConfigError("policy", policy, "must be lru or frequency")
        self.pool, self.policy, self.version = pool, policy, version
        self.queries = self.hits = 0
        self._roots = {version: Node()}
        self._clock = 0
        self._clear_order()

    # ------------------------------------------------------------------ reading
    def match(self, keys: Sequence[bytes]) -> list[Node]:
        """The nodes of the longest known beginning. They stay only if `acquire`d before anything else happens."""
        node, found = self._roots[self.version], []
        for key in keys:
            child = node.children.get(key)
            if child is None:
                break
            found.append(child)
            node = child
        return found

    def acquire(self, nodes: Sequence[Node]) -> None:
        """Take a reference to the page or slot of each node."""
        for node in nodes:
            if node.page is not None:
                self.pool.device.share(node.page)
            else:
                self.pool.host.share(_slot(node))

    def abandon(self, nodes: Sequence[Node]) -> None:
        """Give back what `acquire` took."""
        for node in nodes:
            if node.page is not None:
                self.pool.device.release(node.page)
            else:
                self.pool.host.release(_slot(node))

    def restore(self, node: Node, page: int) -> None:
        """Bring an acquired node back from the host into `page`, a new page of the caller's."""
        slot = _slot(node)
        self.pool.restore(slot, page)
        self.pool.host.release(slot)
        self._settle(node, page)

    def touch(self, nodes: Sequence[Node]) -> None:
        """Mark nodes as used now."""
        self._clock += 1
        for node in nodes:
            node.used = self._clock
            node.uses += 1

    def count(self, queries: int, hits: int) -> None:
        """Add to the statistics: tokens asked for, and those that need not be read again."""
        self.queries += queries
        self.hits += hits

    # ------------------------------------------------------------------ writing
    def insert(self, keys: Sequence[bytes], pages: Sequence[int]) -> list[int]:
        """Make pages known under their keys.

        Returns:
            The pages that hold this text from now on: where the tree knew another page of the same ids, that one, and
            the caller's reference has moved to it.
        """
        self._clock += 1
        node, held = self._roots[self.version], []
        for key, page in zip(keys, pages, strict=True):
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = Node(key, node)
                self._settle(child, page)
            elif child.page is None:
                self._settle(child, page)
            elif child.page != page:
                self.pool.device.share(child.page)
                self.pool.device.release(page)
            child.used = self._clock
            assert child.page is not None
            held.append(child.page)
            node = child
        return held

    def evict(self, n: int) -> int:
        """Free up to n device pages, leaves first; returns how many were freed."""
        freed = 0
        with closing(self._device_order.drain()) as leaves:
            while freed < n and (node := next(leaves, None)) is not None:
                self._offload(node)
                freed += 1
        return freed

    def forget(self, keys: Sequence[bytes]) -> None:
        """Drop everything that begins with the first page of a text whose entries turned out to be bad."""
        top = self._roots[self.version].children.get(keys[0]) if keys else None
        if top is not None:
            self._drop(top)

    def flush(self) -> None:
        """Drop everything, of all versions. Page tables keep what they hold."""
        for node in list(self.nodes()):
            if node.page is not None:
                self.pool.device.uncache(node.page)
            else:
                self.pool.host.uncache(_slot(node))
        self._roots = {self.version: Node()}
        self._clear_order()

    def set_version(self, version: str, *, keep: bool = False) -> None:
        """Match and insert under new weights. Nodes of old ones are dropped, or, with `keep`, stay until evicted."""
        if not keep:
            self.version = version
            self.flush()
            return
        self._roots = {v: root for v, root in self._roots.items() if root.children}
        self.version = version
        self._roots.setdefault(version, Node())

    # ------------------------------------------------------------------ looking
    def nodes(self) -> Iterator[Node]:
        """All nodes, of all versions, parents before children."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check(self) -> None:
        """Verify the tree's rules and that it holds just the pages that the pool says it holds.

        Raises:
            PageError: a rule is broken.
        """
        pages, slots = [], []
        roots = set(map(id, self._roots.values()))
        for node in self.nodes():
            assert node.parent is not None
            on_device = node.page is not None
            if on_device == (node.slot is not None):
                raise PageError("a node must be in one tier")
            if on_device and id(node.parent) not in roots and node.parent.page is None:
                raise PageError("a node on the device lies below one that is not")
            if node.resident != sum(c.page is not None for c in node.children.values()):
                raise PageError("a node counts its children on the device wrong")
            if node.page is not None:
                pages.append(node.page)
            else:
                slots.append(_slot(node))
            if node.page is not None and node.resident == 0 and node not in self._device_order:
                raise PageError("a leaf on the device could never be evicted")
            if node.slot is not None and not node.children and node not in self._host_order:
                raise PageError("a leaf on the host could never be evicted")
        for tier, held in ((self.pool.device, pages), (self.pool.host, slots)):
            if sorted(held) != [p for p in range(tier.count) if tier.cached[p]]:
                raise PageError(f"{tier.name}: the tree holds {sorted(held)}, the pool says otherwise")

    # ------------------------------------------------------------------ moving
    def _settle(self, node: Node, page: int) -> None:
        """Put a node on the device, from the host or new."""
        assert node.parent is not None
        if node.slot is not None:
            self.pool.host.uncache(node.slot)
            node.slot = None
        self.pool.device.cache(page)
        node.page = page
        node.parent.resident += 1
        self._device_order.add(node)

    def _offload(self, node: Node) -> None:
        """Move a leaf of the device to the host, or drop it where the host has no room."""
        assert node.page is not None
        host = self.pool.host
        if not host.free:
            with closing(self._host_order.drain()) as leaves:
                oldest = next(leaves, None)
            if oldest is not None:
                self._drop(oldest)
        if not host.free:
            self._drop(node)
            return
        slot = self.pool.offload(node.page)
        host.cache(slot)
        host.release(slot)
        node.slot = slot
        self._leave_device(node)
        self._host_order.add(node)

    def _leave_device(self, node: Node) -> None:
        assert node.parent is not None
        assert node.page is not None
        self.pool.device.uncache(node.page)
        node.page = None
        node.parent.resident -= 1
        self._device_order.add(node.parent)

    def _drop(self, top: Node) -> None:
        """Drop a node and all below it."""
        assert top.parent is not None
        stack = [top]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if node.page is not None:
                self._leave_device(node)
            else:
                self.pool.host.uncache(_slot(node))
                node.slot = None
        del top.parent.children[top.key]
        self._host_order.add(top.parent)

    def _clear_order(self) -> None:
        device, host = self.pool.device, self.pool.host
        self._device_order = _Order(
            self._rank,
            lambda node: node.page is not None and node.resident == 0,
            lambda node: node.page is not None and device.is_idle(node.page),
        )
        self._host_order = _Order(
            self._rank,
            lambda node: node.slot is not None and not node.children,
            lambda node: node.slot is not None and host.is_idle(node.slot),
        )

    def _rank(self, node: Node) -> Rank:
        return (node.uses, node.used) if self.policy == "frequency" else (node.used, 0)


class _Order:
    """Leaves in the order in which they should go.

    A heap that is put right lazily: a node enters when it becomes a leaf; one that is no leaf any more is thrown out
    when it comes up, and one that was used since goes back to its new place. So a use costs nothing here.
    """

    def __init__(
        self, rank: Callable[[Node], Rank], is_leaf: Callable[[Node], bool], is_idle: Callable[[Node], bool]
    ) -> None:
        self._rank, self._is_leaf, self._is_idle = rank, is_leaf, is_idle
        self._heap: list[tuple[Rank, int, Node]] = []
        self._members: set[Node] = set()
        self._serial = count()  # equal ranks: in order of arrival, and nodes are never compared

    def __contains__(self, node: Node) -> bool:
        return node in self._members

    def add(self, node: Node) -> None:
        if node not in self._members and self._is_leaf(node):
            self._members.add(node)
            heapq.heappush(self._heap, (self._rank(node), next(self._serial), node))

    def drain(self) -> Generator[Node, None, None]:
        """The idle leaves, one by one; each is taken out. Those that are held, at most one a page table, stay."""
        held = []
        try:
            while self._heap:
                rank, serial, node = heapq.heappop(self._heap)
                now = self._rank(node)
                if not self._is_leaf(node):
                    self._members.remove(node)
                elif rank != now:
                    heapq.heappush(self._heap, (now, serial, node))
                elif not self._is_idle(node):
                    held.append((rank, serial, node))
                else:
                    self._members.remove(node)
                    yield node
        finally:
            for entry in held:
                heapq.heappush(self._heap, entry)


def _slot(node: Node) -> int:
    assert node.slot is not None
    return node.slot
