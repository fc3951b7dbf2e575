"""Where task services register, and where one sees how rollouts go: a small application beside the orchestrator.

    POST   /services        an `Offer`; answered by {"beat_s": ...}: how often to send it again
    DELETE /services/NAME   the service leaves
    GET    /status          all figures, JSON          GET /metrics   the same for Prometheus

`serve` runs both in one event loop. Read next: `glm5.agents.protocol`, `figures`.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Collection

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from glm5.agents.protocol import Offer, require_key
from glm5.posttrain.rollout.figures import prometheus, write
from glm5.posttrain.rollout.orchestrator import Orchestrator
from glm5.serve.http.guard import Guard
from glm5.utils.ending import END_S, ended
from glm5.utils.errors import DataError
from glm5.utils.runlog import RunLog

MAX_BODY, BODY_S = 1 << 16, 10.0  # of a request: a service that trickles is sent away


def create_desk(of: Orchestrator) -> Starlette:
    """The application. Requests must bear the orchestrator's `key`, if there is one."""

    async def offer(request: Request) -> Response:
        try:
            offered = Offer.from_json(await request.json())
        except (DataError, ValueError) as error:
            return JSONResponse({"error": str(error)}, 400)
        try:
            await of.offered(offered)
        except (httpx.HTTPError, DataError) as error:
            what = f"the service cannot be asked at {offered.url}: {error or type(error).__name__}"
            return JSONResponse({"error": what}, 503)
        return JSONResponse({"beat_s": of.options.beat_s})

    async def leave(request: Request) -> Response:
        of.left(request.path_params["name"])
        return JSONResponse({})

    async def status(request: Request) -> Response:
        return JSONResponse(of.figures.snapshot(of, time.time()))

    async def metrics(request: Request) -> Response:
        return PlainTextResponse(prometheus(of.figures.snapshot(of, time.time())))

    return Starlette(
        routes=[
            Route("/services", offer, methods=["POST"]),
            Route("/services/{name}", leave, methods=["DELETE"]),
            Route("/status", status, methods=["GET"]),
            Route("/metrics", metrics, methods=["GET"]),
        ],
        middleware=[Middleware(Guard, api_key=of.key, max_body_bytes=MAX_BODY, body_timeout_s=BODY_S)],
    )


async def serve(
    of: Orchestrator,
    listening: socket.socket,
    *,
    log: RunLog | None = None,
    until_done: Collection[str] = (),
    ready: Callable[[], None] | None = None,
) -> None:
    """Run an orchestrator and its desk until the orchestrator ends, the task is cancelled, or SIGTERM or Ctrl-C comes.

    Args:
        listening: where services reach it. log: for the figures. until_done: as `Orchestrator.run` has it.
        ready: called when services may register.

    Raises:
        UserError: other machines reach the desk, and the orchestrator has no key.
    """
    require_key(of.key, listening.getsockname()[0])
    app = create_desk(of)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", ws="none", timeout_graceful_shutdown=1))
    running = asyncio.ensure_future(of.run(until_done=until_done))
    serving = asyncio.ensure_future(server.serve([listening]))
    writing = asyncio.ensure_future(write(of, log)) if log is not None else None
    try:
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        if ready is not None and server.started:
            ready()
        await asyncio.wait({running, serving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        server.should_exit = True
        if writing is not None:
            writing.cancel()
        await ended({running}, "the orchestrator", END_S)
        await asyncio.gather(serving, *([writing] if writing is not None else ()), return_exceptions=True)
    if running.done() and not running.cancelled() and (error := running.exception()) is not None:
        raise error
    if not serving.cancelled() and (error := serving.exception()) is not None:
        raise error
