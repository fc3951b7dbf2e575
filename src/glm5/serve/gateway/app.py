"""The gateway's application: OpenAI's chat and responses, Anthropic's messages, and ids; each request in a session.

An agent attaches by its base URL, `http://HOST:PORT/sessions/NAME/v1` (Anthropic's client: without `/v1`), or sends the
name as `X-Session-ID` (or `X-SMG-Routing-Key`, as slime does). Whatever it asks, the gateway asks the engine for every
id's log-probability, and for the kept set where draws are cut; the agent sees what it asked for.

    POST   /sessions         {"id"?, "sampling"?}: begin one; `sampling` counts whatever the agent asks for.
                             Its `started` tells it from one of this name in a gateway that began anew
    GET    /sessions         the names of all
    GET    /sessions/NAME    all turns and trajectories (`session`)
    DELETE /sessions/NAME    the same, and forget it; what runs is ended

A request may carry a name, `X-Request-ID` or `Idempotency-Key`: sent again, it hears the same turn from the beginning,
which is generated once. The official clients' retries are known by their own header. Nothing of the engine's control
plane is here. Read next: `session`, `turn`.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import Response
from pydantic import Field
from starlette.types import ASGIApp, Receive, Scope, Send

from glm5.serve.client import Backend, Stream, Unavailable
from glm5.serve.gateway.session import Plan, Session
from glm5.serve.http import anthropic, chat, errors, native, responses, tokens
from glm5.serve.http.app import Lifespan, lifespan
from glm5.serve.http.bodies import Body, Name
from glm5.serve.http.errors import ApiError, Json
from glm5.serve.http.guard import Guard
from glm5.serve.http.server import HttpOptions, Server
from glm5.serve.request import Request
from glm5.text.messages import Message, Tool
from glm5.utils.errors import UserError
from glm5.utils.outcome import Outcome

SESSION_NAME = re.compile(r"[\w.:@-]{1,200}")
SESSION_HEADERS = ("x-session-id", "x-smg-routing-key")
REQUEST_HEADERS = ("x-request-id", "idempotency-key")
RETRIES = "x-stainless-retry-count"  # of the official clients


@dataclass(frozen=True)
class GatewayOptions(HttpOptions):
    """How the gateway listens, and what it keeps."""

    max_sessions: int = 10_000
    """Kept at once; more are refused with status 503 until some are ended."""
    grace_s: float = 30.0
    """How long a turn goes on when its client is gone, for the client to ask again."""


class Gateway(Server):
    """The state behind the application. `sessions` by name."""

    def __init__(self, backend: Backend, options: GatewayOptions, forget: Callable[[str], None]) -> None:
        super().__init__(backend, options)
        self._forget = forget
        self.gateway_options = options
        self.sessions: dict[str, Session] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()  # the last ones, so that a straggler begins nothing

    def of(self, http: HttpRequest) -> Server:
        """The server of the request's session, which begins with its first request."""
        name = http.scope.get("session") or next((v for h in SESSION_HEADERS if (v := http.headers.get(h))), None)
        if name is None:
            message = "no session is named. Use the base URL /sessions/NAME/v1, or send the header X-Session-ID"
            raise ApiError(400, message, param="X-Session-ID")
        return _Here(self, self.sessions.get(name) or self.begin(name), http)

    def begin(self, name: str, sampling: dict[str, Any] | None = None) -> Session:
        """A new session.

        Raises:
            ApiError: the name is none, in use or used up, or there are too many sessions.
        """
        if not SESSION_NAME.fullmatch(name):
            raise ApiError(400, f"session {name[:80]!r}: give 1 to 200 letters, digits, or any of _.:@-", param="id")
        if name in self.sessions:
            raise ApiError(400, f"session {name!r} is there. Choose another name", param="id", code="session_exists")
        if name in self._ended:
            raise ApiError(404, f"session {name!r} was ended. Begin another", param="id", code="session_ended")
        if len(self.sessions) >= self.gateway_options.max_sessions:
            message = f"{len(self.sessions)} sessions are kept. End some (DELETE /sessions/NAME)"
            raise ApiError(503, message, code="too_many_sessions")
        made = self.sessions[name] = Session(name, self.backend.tokenizer, sampling)
        return made

    def find(self, name: str) -> Session:
        """The session of this name. Raises ApiError 404 if there is none."""
        if name not in self.sessions:
            raise ApiError(404, f"there is no session {name[:80]!r}", param="id", code="no_such_session")
        return self.sessions[name]

    def end(self, name: str) -> Session:
        """Forget a session, and end what runs of it."""
        found = self.find(name)
        del self.sessions[name]
        self._ended[name] = None
        while len(self._ended) > self.gateway_options.max_sessions:
            self._ended.popitem(last=False)
        found.cancel()
        self._forget(name)
        return found


class _Here(Server):
    """The gateway as one request of a session meets it."""

    def __init__(self, gateway: Gateway, session: Session, http: HttpRequest) -> None:
        self.__dict__.update(gateway.__dict__)  # the same backend, limits and counters
        self._gateway, self._session, self._http = gateway, session, http
        self._plan: Plan | None = None
        self._begun = False

    def prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        *,
        enable_thinking: bool,
        clear_thinking: bool | None,
        parallel: bool,
    ) -> Sequence[int]:
        """The recorded ids of the turn that the conversation goes on from, and the ids of what is new."""
        self._plan = self._session.plan(
            messages,
            tools,
            enable_thinking=enable_thinking,
            clear_thinking=clear_thinking is True,
            parallel=parallel,
        )
        return self._plan.prompt()

    async def start(self, request: Request) -> Stream:
        """Begin a turn, or find the one that is asked for again."""
        if request.params.n != 1:
            raise ApiError(400, "n: a session's turn has one answer. Ask again for another one", param="n")
        if self._begun:
            raise ApiError(400, "a session's request has one prompt. Send one at a time", param="input_ids")
        self._begun = True
        headers = self._http.headers
        name = next((v[:256] for h in REQUEST_HEADERS if (v := headers.get(h))), None)
        body = await self._http.body()
        digest = hashlib.blake2b(self._http.url.path.encode() + b"\0" + body, digest_size=16).digest()
        try:
            again = self._session.repeated(name, digest, retried=headers.get(RETRIES, "0") != "0")
        except ValueError as error:
            raise ApiError(400, f"{error}. Give each request its own name", code="request_id_reused") from None
        if again is not None:
            return again.listen(request.rid)
        plan = self._plan or self._session.plan_ids(request.input_ids)
        params = replace(request.params, **self._session.sampling)
        cut = params.top_p < 1 or params.top_k > 0 or params.min_p > 0
        params = replace(params, logprobs=params.logprobs or 0, kept_set=params.kept_set or cut)
        asked = replace(request, params=params, route=self._session.id)
        turn = self._session.begin(plan, asked, name=name, digest=digest, grace_s=self._gateway.gateway_options.grace_s)
        stream = turn.listen(request.rid)  # at once: whoever asks again meanwhile finds this turn
        try:
            turn.run(await super().start(asked))
        except BaseException as error:
            if isinstance(error, UserError) or (isinstance(error, ApiError) and error.status < 500):
                self._session.withdraw(turn)
            lost = error if isinstance(error, Exception) else Unavailable("the client was gone before it began")
            turn.stop(Outcome.ENGINE_LOST, lost)
            raise
        return stream


class SessionPath:
    """Takes `/sessions/NAME` off the path of a request to one of the interfaces, and notes the name."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (found := re.fullmatch(r"/sessions/([^/]+)(/.+)", scope["path"])):
            scope = {**scope, "path": found[2], "raw_path": found[2].encode(), "session": found[1]}
        await self.app(scope, receive, send)


class Sampling(Body):
    """What of the sampling counts in a session, whatever its agent asks for."""

    temperature: float | None = Field(default=None, gt=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=2**31 - 1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)


class SessionBody(Body):
    """The body of `POST /sessions`."""

    id: Name | None = None
    sampling: Sampling | None = None


def create_gateway(
    backend: Backend,
    options: GatewayOptions | None = None,
    *,
    start: Lifespan | None = None,
    stop: Lifespan | None = None,
    forget: Callable[[str], None] = lambda _: None,
) -> FastAPI:
    """The application, to be served by `glm5.serve.http.app.serve`.

    Args:
        start, stop: awaited when the event loop begins and ends.
        forget: told the name of each session that has ended, which was its requests' `route`.
    """
    options = options or GatewayOptions()
    gateway = Gateway(backend, options, forget)

    async def end_all() -> None:
        for session in gateway.sessions.values():
            session.cancel()
        if stop is not None:
            await stop()

    app = FastAPI(
        title="glm5 gateway", lifespan=lifespan(start, end_all), docs_url=None, redoc_url=None, openapi_url=None
    )
    app.state.server = gateway
    errors.install(app)

    @app.post("/sessions")
    async def begin(body: SessionBody) -> Response:
        given = body.sampling.model_dump(exclude_none=True) if body.sampling is not None else {}
        session = gateway.begin(body.id or uuid.uuid4().hex, given)
        return Json({"id": session.id, "base_url": f"/sessions/{session.id}/v1", "started": session.started})

    @app.get("/sessions")
    async def names() -> Response:
        return Json({"sessions": list(gateway.sessions)})

    @app.get("/sessions/{name}")
    async def show(name: str) -> Response:
        return Json(gateway.find(name).export())

    @app.delete("/sessions/{name}")
    async def end(name: str) -> Response:
        return Json(gateway.end(name).export())

    @app.get("/health")
    async def health() -> Response:
        gateway.check_alive()
        version = gateway.backend.weight_version
        return Json({"status": "ok", "sessions": len(gateway.sessions), "weight_version": version})

    for room in (chat, responses, anthropic, native, tokens):
        app.include_router(room.routes(gateway))
    app.add_middleware(
        Guard,
        api_key=options.api_key,
        max_body_bytes=options.max_body_bytes,
        body_timeout_s=options.body_timeout_s,
        origins=options.origins,
    )
    app.add_middleware(SessionPath)
    return app
