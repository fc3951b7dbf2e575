"""What stands before every handler: the key, the origin, and limits on a body's size and on the time it may take.

Plain ASGI, so that handlers still hear of a client that goes away. Read next: `app`.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from glm5.serve.http.errors import ApiError, response_of

# Answer without a key: they tell only whether the server lives, and how busy it is.
OPEN_PATHS = frozenset({"/", "/health", "/health_generate", "/ping", "/metrics"})
# Change something although they may be asked for by GET, as a page does for an image: browsers then say no origin.
CHANGING_PATHS = frozenset({"/flush_cache"})


class Guard:
    """Refuses before a handler runs.

    Args:
        api_key: expected as `Authorization: Bearer KEY` or `x-api-key: KEY`; None lets everyone in.
        max_body_bytes, body_timeout_s: of one request's body.
        origins: web pages of these origins may call (beside the server's own); others' requests that could change
            anything are refused, since a browser would send them for any page that the user visits.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_key: str | None,
        max_body_bytes: int,
        body_timeout_s: float,
        origins: tuple[str, ...] = (),
    ) -> None:
        self.app, self.origins = app, origins
        self.max_body_bytes, self.body_timeout_s = max_body_bytes, body_timeout_s
        self._key = None if api_key is None else _digest(api_key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            headers = Headers(scope=scope)
            self._check_key(scope["path"], headers)
            self._check_origin(scope["method"], scope["path"], headers)
            receive = await self._with_body(headers, receive)
        except ApiError as error:
            await response_of(error, scope["path"])(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _check_key(self, path: str, headers: Headers) -> None:
        if self._key is None or path in OPEN_PATHS:
            return
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        if not hmac.compare_digest(_digest(given.encode("latin-1", "replace")), self._key):
            raise ApiError(401, "the API key is missing or wrong. Send it as a bearer token", code="invalid_api_key")

    def _check_origin(self, method: str, path: str, headers: Headers) -> None:
        origin = headers.get("origin")
        if path in CHANGING_PATHS and headers.get("sec-fetch-site") in ("cross-site", "same-site") and origin is None:
            raise ApiError(403, "pages of other origins may not call this server")
        if origin is None or method in ("GET", "HEAD", "OPTIONS") or origin in self.origins:
            return
        if not self._is_own(origin, headers.get("host", "")):
            raise ApiError(
                403, f"pages of {origin[:200]!r} may not call this server. Allow that origin when starting it"
            )

    def _is_own(self, origin: str, host: str) -> bool:
        """Whether it is this server's own page. Without a key a name is not believed: its owner can point it here."""
        try:
            parts = urlsplit(origin)
            if parts.netloc != host or self._key is not None or parts.hostname == "localhost":
                return parts.netloc == host
            ip_address(parts.hostname or "")
        except ValueError:
            return False
        return True

    async def _with_body(self, headers: Headers, receive: Receive) -> Receive:
        """The whole body, read within the limits; `receive` then gives it in one piece."""
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > self.max_body_bytes:
            raise self._too_large()
        parts: list[bytes] = []
        size, more = 0, True
        try:
            async with asyncio.timeout(self.body_timeout_s):
                while more:
                    message = await receive()
                    if message["type"] != "http.request":
                        break
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > self.max_body_bytes:
                        raise self._too_large()
                    more = message.get("more_body", False)
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {self.body_timeout_s:g} s. Send it faster") from None
        body: Message | None = {"type": "http.request", "body": b"".join(parts), "more_body": False}

        async def replay() -> Message:
            nonlocal body
            if body is not None:
                message, body = body, None
                return message
            return await receive()

        return replay

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body exceeds {self.max_body_bytes} bytes. Send less", code="body_too_large")


def _digest(key: bytes) -> bytes:
    """Of one length for every key, so that comparing takes the same time for all."""
    return hashlib.sha256(key).digest()
