"""The application: every route, behind one guard; and how it is served and shut down.

`create_app` makes the ASGI application of a backend. `serve` runs it with uvicorn: on SIGTERM it accepts nothing new
(503, so that a balancer looks elsewhere), lets what runs end for `drain_s` seconds, then ends the rest; on Ctrl-C all
at once. Read next: `server`, then `chat` or `native`.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib.resources import files
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.responses import HTMLResponse
from starlette.middleware.cors import CORSMiddleware

import glm5
from glm5.serve.client import Backend
from glm5.serve.http import anthropic, chat, completions, control, errors, native, responses, tokens
from glm5.serve.http.connection import connection_class
from glm5.serve.http.guard import Guard
from glm5.serve.http.server import HttpOptions, Server
from glm5.utils.listening import listen

log = logging.getLogger(__name__)

Lifespan = Callable[[], Awaitable[None]]


def lifespan(start: Lifespan | None, stop: Lifespan | None) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    """What FastAPI enters while it serves: both are awaited in its event loop."""

    @asynccontextmanager
    async def around(app: FastAPI) -> AsyncIterator[None]:
        if start is not None:
            await start()
        try:
            yield
        finally:
            if stop is not None:
                await stop()

    return around


def create_app(
    backend: Backend,
    options: HttpOptions | None = None,
    *,
    start: Lifespan | None = None,
    stop: Lifespan | None = None,
) -> FastAPI:
    """The application.

    Args:
        start, stop: awaited when the event loop begins and ends, as `Runner` needs it.
    """
    options = options or HttpOptions()
    server = Server(backend, options)

    # No pages of documentation: they load scripts from elsewhere, which could then call everything here.
    app = FastAPI(
        title="glm5",
        version=glm5.__version__,
        lifespan=lifespan(start, stop),
        responses=_documented(),
        docs_url=None,
        redoc_url=None,
    )
    app.state.server = server
    errors.install(app)
    for room in (chat, completions, responses, anthropic, native, control, tokens):
        app.include_router(room.routes(server))

    page = files("glm5.serve.http").joinpath("page.html").read_text(encoding="utf-8")

    @app.get("/", response_class=HTMLResponse)
    async def index() -> HTMLResponse:
        """A page to chat on."""
        return HTMLResponse(page, headers={"Content-Security-Policy": PAGE_POLICY})

    app.add_middleware(
        Guard,
        api_key=options.api_key,
        max_body_bytes=options.max_body_bytes,
        body_timeout_s=options.body_timeout_s,
        origins=options.origins,
    )
    if options.origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(options.origins), allow_methods=["*"], allow_headers=["*"]
        )
    return app


# The page is one file: its style and program are in it, and it talks to nobody but this server.
PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def _documented() -> dict[int | str, dict[str, Any]]:
    """The errors that any route may answer, for the OpenAPI document."""
    statuses = {
        400: "The body or a parameter is wrong",
        401: "The API key is missing or wrong",
        403: "A web page of another origin asked",
        404: "No such model",
        408: "The body came too slowly",
        413: "The body is too large",
        500: "A fault of the server",
        503: "Starting, draining, overloaded or failed",
        504: "The request ran longer than its limit",
    }
    return {status: {"description": text, "model": errors.ErrorAnswer} for status, text in statuses.items()}


class _Uvicorn(uvicorn.Server):
    """Drains before it exits."""

    def __init__(self, config: uvicorn.Config, state: Server) -> None:
        super().__init__(config)
        self._state = state
        self._draining: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._draining is None and self.started:
            self._state.draining = True
            self._captured_signals.append(sig)
            wait_s = self._state.options.drain_s if sig == signal.SIGTERM else 0.0  # Ctrl-C is in a hurry
            self._draining = asyncio.get_running_loop().create_task(self._drain(wait_s))
        else:
            super().handle_exit(sig, frame)

    async def _drain(self, wait_s: float) -> None:
        """Wait so long for what runs; then end it, and let uvicorn exit."""
        state, loop = self._state, asyncio.get_running_loop()
        log.info("draining: %d requests are under way", len(state.live))
        deadline = loop.time() + wait_s
        while state.live and loop.time() < deadline:
            await asyncio.sleep(0.02)
        if state.live:
            log.warning("ending %d requests that did not end by themselves", len(state.live))
            await state.backend.abort(None)
        self.should_exit = True


def serve(app: FastAPI, ready: Callable[[str, int], None] | None = None, log_level: str = "info") -> None:
    """Serve until SIGTERM or Ctrl-C.

    Args:
        ready: called with the address and port when requests are accepted.

    Raises:
        UserError: the address cannot be listened on.
    """
    state: Server = app.state.server
    options = state.options
    config = uvicorn.Config(
        app,
        host=options.host,
        port=options.port,
        log_level=log_level,
        timeout_graceful_shutdown=10,
        timeout_keep_alive=75,  # longer than proxies keep theirs, so that none sends into a connection that closes
        ws="none",
        http=connection_class(options.head_timeout_s),
    )
    server = _Uvicorn(config, state)

    listening = listen(options.host, options.port)

    async def main() -> None:
        task = asyncio.ensure_future(server.serve([listening]))
        while not server.started and not task.done():
            await asyncio.sleep(0.01)
        if server.started and ready is not None:
            host, port = listening.getsockname()[:2]
            ready(host, port)
        await task

    asyncio.run(main())
