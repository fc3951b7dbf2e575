"""Connections send at once, and an address that cannot be had is said in a line."""

from __future__ import annotations

import asyncio
import socket

import pytest

from glm5.utils.errors import UserError
from glm5.utils.listening import listen


def test_what_a_server_writes_is_sent_at_once() -> None:
    """Of the connections that asyncio makes of it, not of the socket alone."""

    async def go() -> None:
        with listen("127.0.0.1", 0) as listening:
            made = asyncio.get_running_loop().create_future()
            server = await asyncio.start_server(lambda _, writer: made.set_result(writer), sock=listening)
            _, there = await asyncio.open_connection(*listening.getsockname())
            here = await asyncio.wait_for(made, 60)
            for writer in (here, there):
                found = writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                assert found != 0
                writer.close()
            server.close()

    asyncio.run(go())


def test_what_cannot_be_listened_on() -> None:
    with listen("127.0.0.1", 0) as taken, pytest.raises(UserError, match=r"cannot listen on 127\.0\.0\.1:"):
        listen(*taken.getsockname())
    with pytest.raises(UserError, match=r"cannot listen on 127\.0\.0\.1:70000: "):
        listen("127.0.0.1", 70000)
