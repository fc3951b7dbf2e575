"""Pages from one worker to another: all caches of a page together, page by page, fetched by the one that needs them.

    reader (decode)                        keeper (prefill)
    want  load, lease, first page    ->    pins the lease's pages once more
                                     <-    have  load, tokens, version, hidden state   or   gone  load, why
                                     <-    page  load, index, slot or bytes      at most WINDOW without an ack
    ack   index is written           ->    the slot may be used again
    done  load (or stop, at any time) ->   takes its pins back

Nobody ever writes into another worker's pages: the keeper copies a page into a slot of memory that both map (on one
host; over TCP into the message), the reader from there into pages of its own. The rest are rules:

- The keeper's pages stay as they are until `done`, `stop` or the end of the connection, even if the lease was returned,
  the prefix tree flushed or the weights replaced meanwhile. A slot is used again only after its `ack`. A reader that is
  owed nothing and says nothing for `PATIENCE` times `SILENCE_S` loses its connection, so that it cannot hold pages.
- The reader's pages belong to the sequence that waits for them. A load that is cancelled writes nothing from then on
  (a lock, held while a page is written), so that they can be given to others at once; pages that still arrive are
  acknowledged and dropped.
- A load ends: filled; or when the keeper has no such lease, has other weights, is gone, or was silent for `SILENCE_S`.
  Then the reader reads the prompt itself, which gives the same tokens.

Source: report section 3 (disaggregated rollouts). Read next: `fleet`, which decides who reads where.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import mmap
import os
import tempfile
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from glm5.model.paged import PagedCache
from glm5.serve.client import Unavailable
from glm5.serve.request import PageSource
from glm5.serve.sequence import Item, Lease
from glm5.serve.wire import Wire, WireClosed, as_type, connect, is_path

T = TypeVar("T")
WINDOW = 16  # pages on their way on one connection
SILENCE_S, PATIENCE = 10.0, 3
log = logging.getLogger(__name__)


class PageBytes:
    """A page of every cached tensor, in one piece of bytes, and back.

    Attributes:
        size: bytes of a page. layout: what both sides must agree on.
    """

    def __init__(self, cache: PagedCache) -> None:
        self._pools = [pool for layer in cache.layers for pool in layer]
        self._hidden, self._slots = cache.hidden, cache.size
        self.size = cache.nbytes_per_page()
        shapes = [(str(t.dtype), t.shape[-1]) for t in (*self._pools, self._hidden)]
        self.layout = f"{self._slots} slots of {shapes}"

    def _parts(self, page: int) -> list[Tensor]:
        at = page * self._slots
        return [pool[0, at : at + self._slots] for pool in self._pools] + [self._hidden[page]]

    def read(self, page: int, out: Tensor) -> None:
        """Copy a page into `out`, uint8 [size]."""
        out.copy_(torch.cat([part.reshape(-1).view(torch.uint8) for part in self._parts(page)]))

    def write(self, page: int, data: Tensor) -> None:
        """Copy `data`, uint8 [size], into a page."""
        parts = self._parts(page)
        sizes = [part.numel() * part.element_size() for part in parts]
        for part, piece in zip(parts, data.to(self._hidden.device).split(sizes), strict=True):
            part.copy_(piece.clone().view(part.dtype).view(part.shape))  # a copy, since a piece may begin anywhere


@dataclass(eq=False)
class Load:
    """Pages on their way into the slots of `item`, and what comes with them.

    Attributes:
        version: of the weights that must have written them. hidden: the trunk's state of the last slot, bytes.
    """

    item: Item
    source: PageSource
    version: str
    pages: PageBytes
    hidden: bytes = b""
    _over: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def first(self) -> int:
        """The first page of the sequence that is wanted."""
        return self.item.start // self.pages._slots

    def write(self, index: int, data: Tensor) -> None:
        """Fill page `index` of the sequence, unless the load is over."""
        with self._lock:
            if not self._over:
                self.pages.write(self.item.pages[index], data)

    @property
    def over(self) -> bool:
        """Whether it was cancelled."""
        return self._over

    def cancel(self) -> None:
        """Nothing is written after this returns."""
        with self._lock:
            self._over = True


class Keeper(Protocol):
    """What a worker's engine answers about leases, between two steps. `borrow` pins, `give_back` unpins."""

    def borrow(self, name: str) -> tuple[Lease, bytes] | None: ...
    def give_back(self, lease: Lease) -> None: ...
    def return_lease(self, name: str) -> None: ...


Between = Callable[[Callable[[], Any]], Any]  # carries out a function in the engine's thread, awaited


class Slots:
    """Memory that two processes of one host map: `WINDOW` pages, in a file that loses its name once both have it."""

    def __init__(self, handle: int, path: str) -> None:
        size = os.fstat(handle).st_size
        self.page, self.path = size // WINDOW, path
        self._bytes = torch.frombuffer(mmap.mmap(handle, size), dtype=torch.uint8)
        os.close(handle)

    @classmethod
    def make(cls, page: int, directory: str) -> Slots:
        """New ones, in a file in `directory`."""
        handle, path = tempfile.mkstemp(prefix="pages-", dir=directory)
        os.ftruncate(handle, WINDOW * page)
        return cls(handle, path)

    @classmethod
    def map(cls, path: str) -> Slots:
        """Those that another process has made."""
        return cls(os.open(path, os.O_RDWR), path)

    def __getitem__(self, slot: int) -> Tensor:
        return self._bytes[slot * self.page : (slot + 1) * self.page]

    def forget_name(self) -> None:
        Path(self.path).unlink(missing_ok=True)


async def keep(wire: Wire, keeper: Keeper, between: Between, pages: PageBytes, directory: str = "") -> None:
    """Serve one reader until it goes: the left column's requests, the right column's answers.

    Args:
        directory: for the file that both map, where the reader is on the same host; empty sends pages as messages.
    """
    slots = Slots.make(pages.size, directory) if directory else None
    free: asyncio.Queue[int] = asyncio.Queue()
    for slot in range(WINDOW):
        free.put_nowait(slot)
    sending: dict[int, asyncio.Task[None]] = {}
    lent: dict[int, Lease] = {}

    async def send(load: int, name: str, first: int) -> None:
        try:
            await send_pages(load, name, first)
            await asyncio.sleep(PATIENCE * SILENCE_S)  # unless it says that it is done
            await wire.close()
        except (WireClosed, TimeoutError):
            await wire.close()  # so that `receive` ends, too
        except Exception as error:
            log.exception("the pages of %s cannot be sent", name)
            wire.post("gone", load, f"{type(error).__name__}: {error}")

    async def borrow(load: int, name: str) -> tuple[Lease, bytes] | None:
        found: tuple[Lease, bytes] | None = await between(partial(keeper.borrow, name))
        if found is not None:
            lent[load] = found[0]
        return found

    async def send_pages(load: int, name: str, first: int) -> None:
        found = await _whole(borrow(load, name))
        if found is None:
            wire.post("gone", load, f"there is no lease {name}")
            return
        lease, hidden = found
        wire.post("have", load, lease.tokens, lease.version, hidden)
        for index in range(first, len(lease.pages)):
            async with asyncio.timeout(PATIENCE * SILENCE_S):
                slot = await free.get()
            page = slots[slot] if slots is not None else torch.empty(pages.size, dtype=torch.uint8)
            try:
                await _whole(asyncio.to_thread(pages.read, lease.pages[index], page))
            except BaseException:
                free.put_nowait(slot)
                raise
            async with asyncio.timeout(PATIENCE * SILENCE_S):
                await wire.send("page", load, index, slot, b"" if slots is not None else page.numpy().tobytes())
        wire.post("end", load)

    async def settle(load: int) -> None:
        task = sending.pop(load, None)
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
        lease = lent.pop(load, None)
        if lease is not None:
            with suppress(Unavailable):  # then the engine has ended, and its pages with it
                await between(partial(keeper.give_back, lease))

    try:
        await wire.send("layout", pages.layout, slots.path if slots is not None else "")
        while True:
            match await wire.receive():
                case ["mapped"]:
                    if slots is not None:
                        slots.forget_name()
                case ["want", int(load), str(name), int(first)] if load not in sending and first >= 0:
                    sending[load] = asyncio.ensure_future(send(load, name, first))
                case ["ack", int(slot)] if 0 <= slot < WINDOW:
                    free.put_nowait(slot)
                case ["done", int(load), str(name)]:
                    await settle(load)
                    await between(partial(keeper.return_lease, name))
                case ["stop", int(load)]:
                    await settle(load)
                case other:
                    raise WireClosed(f"unknown message {str(other)[:100]}")
    except Unavailable:
        pass  # the engine has ended: so does the connection
    finally:
        if slots is not None:
            slots.forget_name()
        for load in [*sending, *lent]:
            await settle(load)


async def _whole(work: Coroutine[Any, Any, T]) -> T:
    """The result of what cannot be stopped in its middle: a cancellation is raised when it is over."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


class Fetcher:
    """The reader's side: fetches what an engine orders, one connection a keeper, in the event loop of `loop`.

    Args:
        front: the host at which the front is seen, where an address names a port alone: its own workers are there.
        done: called in the engine's thread when a load is over, with whether all its slots were filled.
        between: see `Between`.
    """

    def __init__(
        self,
        key: bytes,
        loop: asyncio.AbstractEventLoop,
        between: Between,
        done: Callable[[Load, bool], None],
        front: str = "",
    ) -> None:
        self._front = front
        self._key, self._loop, self._between, self._done = key, loop, between, done
        self._peers: dict[str, _Peer] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, load: Load) -> None:
        """Begin to fetch; from any thread."""
        self._loop.call_soon_threadsafe(self._start, load)

    def _start(self, load: Load) -> None:
        task = asyncio.ensure_future(self._fetch(load))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _fetch(self, load: Load) -> None:
        filled = False
        try:
            address = load.source.address
            peer = self._peers.get(address)
            if peer is None or peer.closed:
                where = self._front + address if address.startswith(":") else address
                peer = self._peers[address] = _Peer(where, self._key)
            filled = await peer.fetch(load)
        except (WireClosed, TimeoutError, OSError) as error:
            log.warning("pages of %s do not come (%s): the prompt is read here", load.source.lease, error)
        with suppress(Unavailable):
            await self._between(partial(self._done, load, filled))

    async def close(self) -> None:
        """End all connections."""
        for peer in self._peers.values():
            await peer.close()


class _Peer:
    """A connection to one keeper."""

    def __init__(self, address: str, key: bytes) -> None:
        self._address, self._key = address, key
        self._loads: dict[int, asyncio.Queue[list[Any]]] = {}
        self._numbers = itertools.count()
        self._wire: Wire | None = None
        self._slots: Slots | None = None
        self._layout = ""
        self._reading: asyncio.Task[None] | None = None
        self._opening = asyncio.Lock()
        self.closed = False

    async def fetch(self, load: Load) -> bool:
        """Fill the load's pages. Whether they are all there."""
        async with asyncio.timeout(SILENCE_S), self._opening:
            wire = self._wire or await self._open()
        if self.closed:
            raise WireClosed(f"{self._address} is gone")
        if load.pages.layout != self._layout:
            raise WireClosed(f"{self._address} has pages of another form: {self._layout}, here {load.pages.layout}")
        number, inbox = next(self._numbers), asyncio.Queue[list[Any]]()
        self._loads[number] = inbox
        wire.post("want", number, load.source.lease, load.first)
        filled = False
        try:
            filled = await self._follow(load, inbox, wire)
        finally:
            del self._loads[number]
            while not inbox.empty():
                _drop(inbox.get_nowait(), wire)
            wire.post(*(("done", number, load.source.lease) if filled else ("stop", number)))
        return filled

    async def _follow(self, load: Load, inbox: asyncio.Queue[list[Any]], wire: Wire) -> bool:
        missing = set(range(load.first, len(load.item.pages)))
        while not load.over:
            async with asyncio.timeout(SILENCE_S):
                message = await inbox.get()
            match message:
                case ["have", _, int(tokens), str(version), bytes(hidden)]:
                    if (tokens, version) != (load.source.tokens, load.version):
                        raise WireClosed(f"{tokens} tokens of weights {version}, where {load.version} run")
                    load.hidden = hidden
                case ["page", _, int(index), int(slot), bytes(data)]:
                    if index in missing:
                        page = self._slots[slot] if self._slots is not None else _tensor(data)
                        await asyncio.to_thread(load.write, index, page)
                        missing.discard(index)
                    wire.post("ack", slot)
                case ["end", _]:
                    return not missing
                case other:
                    raise WireClosed(str(other[-1]))
        return False

    async def _open(self) -> Wire:
        try:
            wire = await connect(self._address, self._key)
            message = await wire.receive()
            self._layout, path = as_type(message[1:], tuple[str, str])
            if path and is_path(self._address):
                self._slots = Slots.map(path)
                wire.post("mapped")
        except (WireClosed, OSError):
            self.closed = True
            raise
        self._wire = wire
        self._reading = asyncio.ensure_future(self._read(wire))
        return wire

    async def _read(self, wire: Wire) -> None:
        try:
            while True:
                message = await wire.receive()
                inbox = self._loads.get(message[1]) if len(message) > 1 else None
                if inbox is not None:
                    inbox.put_nowait(message)
                else:
                    _drop(message, wire)
        except WireClosed as error:
            for inbox in self._loads.values():
                inbox.put_nowait(["lost", str(error)])
        finally:
            self.closed = True
            await wire.close()

    async def close(self) -> None:
        self.closed = True
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait({self._reading})


def _drop(message: list[Any], wire: Wire) -> None:
    """A message to a load that was given up."""
    if message[0] == "page":
        wire.post("ack", message[3])


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
