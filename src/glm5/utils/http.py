"""An HTTP client for many requests at once. Read next: `glm5.agents.service`, which asks a gateway by it.

httpx keeps its connections in one list and looks at the socket of each idle one at every request and every answer:
with some hundred of them that is most of what a request costs. Here are many small pools instead, filled one after
another, so that a request looks at a few connections only.
"""

from __future__ import annotations

from typing import Any

import httpx

POOL = 4  # requests at once in one pool


class Pools(httpx.AsyncBaseTransport):
    """Sends each request by the first pool that has room, or by the one with the fewest requests under way.

    Args:
        most: requests at once that have a place; more crowd the pools, none is refused.
    """

    def __init__(self, most: int) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=POOL)
        trusted = httpx.create_ssl_context()
        self.pools = [httpx.AsyncHTTPTransport(verify=trusted, limits=limits) for _ in range(-(-most // POOL))]
        self.under_way = [0] * len(self.pools)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        roomy = next((i for i, n in enumerate(self.under_way) if n < POOL), None)
        which = min(range(len(self.pools)), key=self.under_way.__getitem__) if roomy is None else roomy
        self.under_way[which] += 1
        try:
            return await self.pools[which].handle_async_request(request)
        finally:
            self.under_way[which] -= 1

    async def aclose(self) -> None:
        for pool in self.pools:
            await pool.aclose()


def client(most: int, **about: Any) -> httpx.AsyncClient:
    """A client for about `most` requests at once. It asks no proxy. about: as httpx.AsyncClient has it."""
    return httpx.AsyncClient(transport=Pools(most), **about)
