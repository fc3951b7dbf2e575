"""Messages between the processes of one server: frames of MessagePack over a stream whose two ends hold one key.

A frame is eight bytes of length and a list: the message's kind, then its parts. Before the first one each side proves,
with an HMAC over both sides' random numbers, that it knows the key; nothing is unpickled, so a peer can say only what
the types allow. Streams are Unix sockets on one host and TCP between hosts. The content of TCP streams is not
encrypted: use a private network. Read next: `remote`, `transfer`.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import socket
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec

from glm5.utils.errors import UserError

T = TypeVar("T")
GREETING = b"glm5 workers 1"
LARGEST = 1 << 36  # bytes of a frame: a model's weights may come in one
HANDSHAKE_S = 10.0


class WireClosed(ConnectionError):
    """The other side is gone, does not know the key, or says what is no message."""


class Wire:
    """One connection. `post` never waits; `send` does while the other side is slow."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._encoder = msgspec.msgpack.Encoder()

    @property
    def local_host(self) -> str:
        """The address of this end, as the other end reaches it; empty on a Unix socket."""
        name = self._writer.get_extra_info("sockname")
        return str(name[0]) if isinstance(name, tuple) else ""

    def post(self, kind: str, *parts: Any) -> None:
        """Queue a message of numbers, text, bytes, lists and dataclasses. After the end it goes nowhere."""
        body = self._encoder.encode((kind, *parts))
        self._writer.write(len(body).to_bytes(8, "big"))
        self._writer.write(body)

    async def send(self, kind: str, *parts: Any) -> None:
        """`post`, and wait until the other side keeps up."""
        self.post(kind, *parts)
        try:
            await self._writer.drain()
        except OSError as error:
            raise WireClosed(str(error)) from None

    async def receive(self) -> list[Any]:
        """The next message: kind and parts, of built-in types; `as_type` makes dataclasses of them again.

        Raises:
            WireClosed: there will be none.
        """
        try:
            size = int.from_bytes(await self._reader.readexactly(8), "big")
            if size > LARGEST:
                raise WireClosed(f"a message of {size} bytes")
            message = msgspec.msgpack.decode(await self._reader.readexactly(size))
        except (OSError, EOFError, msgspec.DecodeError) as error:
            raise WireClosed(str(error) or type(error).__name__) from None
        if not (isinstance(message, list) and message and isinstance(message[0], str)):
            raise WireClosed("what came is no message")
        return message

    async def close(self) -> None:
        """Close this end. What was posted is still sent while the other side takes it."""
        self._writer.close()
        try:
            async with asyncio.timeout(1.0):
                await self._writer.wait_closed()
        except (OSError, TimeoutError):
            pass

    async def prove(self, key: bytes, *, first: bool) -> None:
        """Show the key and see the other side's proof.

        Raises:
            WireClosed: the other side doesn't have the key, or took too long.
        """
        mine = secrets.token_bytes(32)
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                self._writer.write(GREETING + mine)
                head = await self._reader.readexactly(len(GREETING) + 32)
                theirs = head[len(GREETING) :]
                one, other = (b"first", b"second") if first else (b"second", b"first")
                self._writer.write(_proof(key, one + mine + theirs))
                shown = await self._reader.readexactly(32)
        except (OSError, EOFError, TimeoutError) as error:
            raise WireClosed(f"no greeting: {error or type(error).__name__}") from None
        if not head.startswith(GREETING) or not hmac.compare_digest(shown, _proof(key, other + theirs + mine)):
            raise WireClosed("the other side has another key")


def _proof(key: bytes, text: bytes) -> bytes:
    return hmac.digest(key, text, hashlib.sha256)


def as_type(value: Any, kind: type[T]) -> T:
    """A received part as what it was. Raises WireClosed if it cannot have been that."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise WireClosed(f"no {getattr(kind, '__name__', kind)}: {error}") from None


async def connect(address: str, key: bytes) -> Wire:
    """Open a connection to `address`, a path (Unix socket) or host:port.

    Raises:
        WireClosed: nobody is there, or they have another key.
    """
    try:
        if is_path(address):
            reader, writer = await asyncio.open_unix_connection(address)
        else:
            host, port = host_and_port(address)
            reader, writer = await asyncio.open_connection(host, port)
            writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError as error:
        raise WireClosed(f"cannot reach {address}: {error.strerror or error}") from None
    wire = Wire(reader, writer)
    try:
        await wire.prove(key, first=True)
    except WireClosed:
        await wire.close()
        raise
    return wire


async def listen(address: str, key: bytes, serve: Callable[[Wire], Awaitable[None]]) -> asyncio.Server:
    """Serve connections to `address`, each in a task of its own, once it has shown the key.

    Raises:
        UserError: the address cannot be listened on.
    """

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire = Wire(reader, writer)
        try:
            await wire.prove(key, first=False)
            await serve(wire)
        except (WireClosed, asyncio.CancelledError):  # nobody waits; Python 3.11 logs a cancelled one as a failure
            pass
        finally:
            await wire.close()

    try:
        if is_path(address):
            return await asyncio.start_unix_server(accepted, address)
        return await asyncio.start_server(accepted, *host_and_port(address))
    except OSError as error:
        raise UserError(f"cannot listen on {address}: {error.strerror or error}", "Choose another address") from None


def is_path(address: str) -> bool:
    """Whether an address names a Unix socket."""
    return "/" in address


def host_and_port(address: str) -> tuple[str, int]:
    """The two parts of host:port; an IPv6 host stands in brackets."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise UserError(f"{address!r} is no address", "Give host:port, or the path of a Unix socket")
    return host.strip("[]"), int(port)
