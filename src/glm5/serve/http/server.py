"""What every handler shares: the backend, the limits, and the one way in which a request reaches the backend.

`Server.start` refuses what cannot be served before a byte is answered, names the request among those alive, stops it
at the time limit and counts it. Read next: `answers`.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Request as HttpRequest
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from glm5.serve.client import Backend, Stream, Unavailable
from glm5.serve.http.errors import ApiError, ClientGone, as_api_error, body_of, dumps
from glm5.serve.http.metrics import Metrics
from glm5.serve.request import Delta, Request, check
from glm5.text.chat import render
from glm5.text.messages import Message, Tool
from glm5.utils.errors import ConfigError, UserError

T = TypeVar("T")
Events = AsyncGenerator[bytes, None]  # server-sent events
LONG_BODY = 64 << 10  # bytes that are encoded in about ten milliseconds


@dataclass(frozen=True)
class HttpOptions:
    """How the server listens, and what it bears."""

    host: str = "127.0.0.1"
    """Address to listen on. The default is reached from this machine only."""
    port: int = 8000
    """0 takes a free one."""
    api_key: str | None = None
    """Clients must send it; None lets everyone in who reaches the port."""
    served_names: tuple[str, ...] = ()
    """Names of the model beside its own that requests may use."""
    origins: tuple[str, ...] = ()
    """Origins of web pages that may call the server, beside its own page."""
    max_body_bytes: int = 64 << 20
    """Of one request."""
    head_timeout_s: float = 20.0
    """In which the head of a request must have arrived."""
    body_timeout_s: float = 60.0
    """In which a request's body must have arrived."""
    request_timeout_s: float = 3600.0
    """After which a request is ended."""
    probe_timeout_s: float = 20.0
    """In which a step must have run for /health_generate to say that all is well."""
    max_requests: int = 4096
    """Alive at once; more are refused with status 503."""
    drain_s: float = 60.0
    """After SIGTERM: how long requests that run may still take."""

    def __post_init__(self) -> None:
        above = "max_body_bytes head_timeout_s body_timeout_s request_timeout_s probe_timeout_s max_requests"
        for name in above.split():
            if not getattr(self, name) > 0:
                raise ConfigError(name, getattr(self, name), "must be above 0")
        if not 0 <= self.port < 65536:
            raise ConfigError("port", self.port, "must lie in [0, 65535]")
        if not self.drain_s >= 0:
            raise ConfigError("drain_s", self.drain_s, "must be at least 0")
        if self.api_key is not None and not self.api_key:
            raise UserError("api_key is empty", "Give a key, or leave it out to let everyone in")


class Server:
    """The state behind one application.

    Attributes:
        draining: no new requests are accepted. live: names of the requests under way.
    """

    def __init__(self, backend: Backend, options: HttpOptions) -> None:
        self.backend, self.options = backend, options
        self.metrics = Metrics(backend)
        self.draining = False
        self.live: set[str] = set()
        self.started = int(time.time())

    @property
    def names(self) -> tuple[str, ...]:
        """What the model is called, its own name first."""
        return (self.backend.model_name, *self.options.served_names)

    def check_model(self, name: str | None) -> str:
        """The name under which to answer. Raises ApiError 404 for a model that is not here."""
        if name is None:
            return self.names[0]
        if name not in self.names:
            message = f"the model {name[:200]!r} does not exist here. Ask for {self.names[0]!r}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return name

    def check_alive(self) -> None:
        """Raises ApiError or Unavailable, both 503, if the server will not accept a request again."""
        if self.draining:
            raise ApiError(503, "the server is shutting down. Ask another", code="draining")
        if self.backend.failure:
            raise Unavailable(self.backend.failure)

    def _check_room(self) -> None:
        if len(self.live) >= self.options.max_requests:
            raise ApiError(503, f"{len(self.live)} requests are under way. Try again later", code="overloaded")

    def room(self, prompt_tokens: int) -> int:
        """Tokens that an answer to such a prompt may have."""
        return self.backend.context - prompt_tokens

    def of(self, http: HttpRequest) -> Server:
        """The server as one request meets it: a gateway has one for each session."""
        return self

    def prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        *,
        enable_thinking: bool,
        clear_thinking: bool | None,
        parallel: bool,
    ) -> Sequence[int]:
        """The ids of a conversation, up to where the model goes on.

        Args:
            clear_thinking: None is what the server does unless told. parallel: an answer may make several calls.
        """
        return render(
            self.backend.tokenizer,
            messages,
            tools,
            enable_thinking=enable_thinking,
            clear_thinking=clear_thinking is not False,
            add_generation_prompt=True,
        ).ids

    async def start(self, request: Request) -> Stream:
        """Hand a request to the backend; what comes of it, and the end at the time limit.

        Raises:
            UserError, ApiError, Unavailable: it was refused, and nothing has to be closed.
        """
        self.check_alive()
        self._check_room()
        context, size = self.backend.context, len(request.input_ids)
        if size >= context:
            message = f"a prompt of {size} tokens leaves no room in a context of {context}. Shorten the prompt"
            raise ApiError(400, message, code="context_length_exceeded")
        check(request, vocab_size=self.backend.vocab_size, context=context)
        asked, room = request.params.max_new_tokens, self.room(size)
        if asked is not None and asked > room:
            message = (
                f"{size} tokens of prompt and {asked} of answer exceed the context of {context}. Shorten the prompt, "
                f"or ask for at most {room} tokens"
            )
            raise ApiError(400, message, param="max_tokens", code="context_length_exceeded")
        if request.rid in self.live:
            raise ApiError(400, f"rid={request.rid[:200]!r} is in use. Choose another, or leave it out", param="rid")
        self.live.add(request.rid)
        try:
            stream = await self.backend.generate(request)
        except BaseException:
            self.live.discard(request.rid)
            raise
        return _Watched(self, request, stream)

    async def abort(self, rid: str | None) -> None:
        """End a request, or all; `rid` also names the requests of a batch, which are called `rid_0`, `rid_1`, ..."""
        if rid is None:
            await self.backend.abort(None)
            return
        for one in [r for r in self.live if r == rid or (r.startswith(f"{rid}_") and r[len(rid) + 1 :].isdecimal())]:
            await self.backend.abort(one)


class _Watched:
    """A stream that is measured, stopped in time, and forgotten by the server when it ends."""

    def __init__(self, server: Server, request: Request, stream: Stream) -> None:
        self._server, self._request, self._stream = server, request, stream
        self._timer = server.metrics.watch(request)
        self._late = False
        self._closing: asyncio.Task[None] | None = None
        self._alarm = asyncio.get_running_loop().call_later(server.options.request_timeout_s, self._stop)

    def _stop(self) -> None:
        async def abort() -> None:
            with suppress(Unavailable):
                await self._server.backend.abort(self._request.rid)

        self._late = True
        self._closing = asyncio.ensure_future(abort())

    def __aiter__(self) -> _Watched:
        return self

    async def __anext__(self) -> Delta:
        try:
            delta = await anext(self._stream)
        except StopAsyncIteration:
            await self.aclose()
            raise
        self._timer.take(delta)
        finish = delta.finish
        if finish is not None and finish.type == "abort" and self._late:
            limit = self._server.options.request_timeout_s
            raise ApiError(504, f"the request ran longer than {limit:g} s. Ask for fewer tokens", code="time_limit")
        return delta

    async def aclose(self) -> None:
        self._alarm.cancel()
        self._server.live.discard(self._request.rid)
        self._timer.close()
        await self._stream.aclose()


async def prepared(http: HttpRequest, work: Callable[[], T]) -> T:
    """The result of `work`, which encodes a body's text: in a thread if that is long, so that nobody else waits."""
    if int(http.headers.get("content-length", LONG_BODY)) < LONG_BODY:
        return work()
    return await asyncio.to_thread(work)


async def start_all(server: Server, requests: list[Request]) -> list[Stream]:
    """Start every request, or none: when one is refused, those before it are ended."""
    streams: list[Stream] = []
    try:
        for request in requests:
            streams.append(await server.start(request))
    except BaseException:
        await close_all(streams)
        raise
    return streams


async def merged(streams: list[Stream]) -> AsyncGenerator[Delta, None]:
    """The deltas of several streams, each as soon as it is there."""
    if len(streams) == 1:
        async for only in streams[0]:
            yield only
        return
    waiting = {asyncio.ensure_future(_next(stream)): stream for stream in streams}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                stream, delta = waiting.pop(task), task.result()
                if delta is not None:
                    waiting[asyncio.ensure_future(_next(stream))] = stream
                    yield delta
    finally:
        for task in waiting:
            task.cancel()


async def _next(stream: Stream) -> Delta | None:
    return await anext(stream, None)


async def close_all(streams: list[Stream]) -> None:
    """Close every stream, whatever the others do."""
    for stream in streams:
        await stream.aclose()


def new_id(prefix: str) -> str:
    """A name that no other answer has."""
    return f"{prefix}{uuid.uuid4().hex}"


# ------------------------------------------------------------------------------------------------- server-sent events
def event(data: dict[str, Any], name: str | None = None) -> bytes:
    """One server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + dumps(data) + b"\n\n"


# For the OpenAPI document: what a route that can stream answers.
STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}}
DONE = b"data: [DONE]\n\n"


class EventStream(StreamingResponse):
    """Server-sent events out of an asynchronous generator of bytes.

    An exception on the way becomes a last event in the shape of the path. Whatever ends the response, a client that
    goes away included, `streams` are closed, also if not one event was sent.
    """

    media_type = "text/event-stream"

    def __init__(self, events: Events, streams: list[Stream], path: str, closing: bytes = b"") -> None:
        self._streams, self._body = streams, self._guarded(events, path, closing)
        super().__init__(self._body, headers={"Cache-Control": "no-cache"})

    async def _guarded(self, events: Events, path: str, closing: bytes) -> Events:
        try:
            async with aclosing(events):
                async for one in events:
                    yield one
        except Exception as error:
            name = "error" if path.startswith("/v1/messages") else None
            yield event(body_of(as_api_error(error), path), name)
        if closing:
            yield closing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._body.aclose()
            await close_all(self._streams)


async def unless_gone(request: HttpRequest, work: Coroutine[Any, Any, T], streams: list[Stream]) -> T:
    """The result of `work`, which is cancelled if the client goes away first. The streams are closed in any case."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        watch.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
        await close_all(streams)


async def _gone(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
