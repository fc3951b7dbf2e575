"""One connection of the HTTP server: uvicorn's, which also limits how long a request's head may take.

Without that, whoever opens connections and sends half a head each keeps them for good, until the process may open no
more. A head of more than 64 KiB is refused by the parser, and a body that does not come is `guard`'s to refuse. Between
two requests a connection may idle as long as uvicorn lets it. Read next: `app`.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from glm5.serve.http.errors import ApiError, body_of, dumps


def connection_class(head_timeout_s: float) -> type[asyncio.Protocol]:
    """What uvicorn is to make of each connection.

    Args:
        head_timeout_s: from a connection's beginning, or a later request's first byte, to the end of the head.
    """

    class Connection(H11Protocol):
        """See the module."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._alarm: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._expect()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._forget()  # the head is here
            elif self._alarm is None:
                self._expect()

        def connection_lost(self, exc: Exception | None) -> None:
            self._forget()
            super().connection_lost(exc)

        def _expect(self) -> None:
            self._alarm = self.loop.call_later(head_timeout_s, self._refuse)

        def _forget(self) -> None:
            if self._alarm is not None:
                self._alarm.cancel()
                self._alarm = None

        def _refuse(self) -> None:
            self._alarm = None
            if self.transport.is_closing():
                return
            error = ApiError(408, f"the head of a request did not arrive within {head_timeout_s:g} s. Send it faster")
            body = dumps(body_of(error, ""))
            head = f"HTTP/1.1 408 Request Timeout\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            self.transport.write(head.encode() + b"Connection: close\r\n\r\n" + body)
            self.transport.close()

    return Connection
