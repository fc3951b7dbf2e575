"""A socket that a server listens on. Read next: `glm5.serve.http.app`."""

from __future__ import annotations

import socket

from glm5.utils.errors import UserError


def listen(host: str, port: int) -> socket.socket:
    """Listen on an address; port 0 takes a free one.

    What is written is sent at once. Without that, the kernel holds an answer's body back until its head is confirmed,
    which a client that waits for the body puts off for 40 ms. asyncio sees to it only for sockets that it made itself.

    Raises:
        UserError: the address cannot be listened on.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        made = socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        what = f"cannot listen on {host}:{port}: {getattr(error, 'strerror', None) or error}"
        raise UserError(what, "Choose another port (0 takes a free one) or address") from None
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # connections inherit it
    return made
