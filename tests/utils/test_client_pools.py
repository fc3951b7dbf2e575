"""Many requests at once by small pools: all are answered, by connections that are used again."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from glm5.utils.http import POOL, Pools, client


class Server:
    """Answers when as many requests as `together` are there. opened: connections that were made to it."""

    def __init__(self, together: int) -> None:
        self.opened, self.here = 0, 0
        self.together = together
        self.all_here = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.opened += 1
        while await reader.readline():
            while (await reader.readline()).strip():
                pass
            self.here += 1
            if self.here >= self.together:
                self.all_here.set()
            await self.all_here.wait()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        writer.close()


@pytest.mark.parametrize("most", [1, POOL, 40])
def test_each_pool_has_few_connections_and_they_are_used_again(most: int) -> None:
    async def main() -> None:
        of = Server(40)
        server = await asyncio.start_server(of.serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        transport = Pools(most)
        async with httpx.AsyncClient(transport=transport, timeout=60) as http:
            found = await asyncio.gather(*(http.get(url) for _ in range(40)))
            assert [one.text for one in found] == ["ok"] * 40
            assert of.opened == 40
            assert transport.under_way == [0] * len(transport.pools)
            crowded = [len(pool._pool.connections) for pool in transport.pools]
            assert max(crowded) <= -(-40 // -(-most // POOL))
            for _ in range(20):  # one after another: the first pool's connections do
                await http.get(url)
            assert of.opened == 40 + max(0, 1 - crowded[0])
        server.close()

    asyncio.run(main())


def test_a_request_that_fails_or_is_given_up_leaves_its_place() -> None:
    async def main() -> None:
        server = await asyncio.start_server(Server(2).serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        transport = Pools(8)
        async with httpx.AsyncClient(transport=transport, timeout=60) as http:
            waiting = asyncio.ensure_future(http.get(url))
            while transport.under_way != [1, 0]:
                await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            with pytest.raises(httpx.ConnectError):
                await http.get("http://127.0.0.1:1/")
            assert transport.under_way == [0, 0]
        server.close()

    asyncio.run(main())


def test_a_client_takes_what_httpx_takes() -> None:
    assert client(8, timeout=3.0).timeout == httpx.Timeout(3.0)
