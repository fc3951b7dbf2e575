"""An event loop whose time is what its timers say, and a network inside of a process: hours pass in a moment, and the
same seed gives the same run.

    run(main())                    as asyncio.run, in virtual time; threads are not used
    network = Network(); network.hosts["a"] = app; network.client()
    network.kill("a")              its connections break, and it refuses others until it is back in `hosts`
"""

from __future__ import annotations

import asyncio
import selectors
from collections import defaultdict
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import httpx

T = TypeVar("T")


class _Selector(selectors.SelectSelector):
    """Waits by moving the clock."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("nothing will ever happen: all tasks wait, and no timer is set")
        self.now += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now

    def run_in_executor(self, executor: Any, function: Callable[..., Any], *args: Any) -> Any:
        done = self.create_future()
        try:
            done.set_result(function(*args))
        except Exception as error:
            done.set_exception(error)
        return done


def run(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


class Network(httpx.AsyncBaseTransport):
    """Applications by the names of their hosts.

    Attributes:
        before: awaited with each request before it is sent, and `after` before its answer is given back: to put faults
            in, by raising.
    """

    def __init__(self) -> None:
        self.hosts: dict[str, Any] = {}
        self.before: Callable[[httpx.Request], Coroutine[Any, Any, None]] | None = None
        self.after: Callable[[httpx.Request], Coroutine[Any, Any, None]] | None = None
        self._flights: dict[str, set[asyncio.Task[httpx.Response]]] = defaultdict(set)

    def client(self, base_url: str = "") -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=self, base_url=base_url, timeout=None)  # noqa: S113

    def kill(self, host: str) -> None:
        self.hosts.pop(host, None)
        for flight in self._flights[host]:
            flight.cancel()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if self.before is not None:
            await self.before(request)
        host = request.url.host
        if host not in self.hosts:
            raise httpx.ConnectError(f"{host}: connection refused")
        transport = httpx.ASGITransport(self.hosts[host], raise_app_exceptions=False)
        flight = asyncio.ensure_future(transport.handle_async_request(request))
        self._flights[host].add(flight)
        limit = request.extensions.get("timeout", {}).get("read")
        try:
            await asyncio.wait({flight}, timeout=limit)
        except asyncio.CancelledError:
            flight.cancel()
            raise
        finally:
            self._flights[host].discard(flight)
        if not flight.done():
            flight.cancel()
            raise httpx.ReadTimeout(f"{host}: no answer in {limit} s")
        if flight.cancelled():
            raise httpx.ReadError(f"{host}: connection reset")
        if self.after is not None:
            await self.after(request)
        return flight.result()
