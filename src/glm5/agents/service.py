"""The base class of a task service: write `rollout`, and it is served, joined, timed out and registered.

    class Sums(TaskService):
        name = "sums"

        async def rollout(self, asked: Rollout, policy: Policy) -> Result:
            a, b = random.Random(asked.seed).sample(range(100), 2)
            told = await policy.chat([{"role": "user", "content": f"{a} + {b} = ?"}])
            return judged(float(told["content"].strip() == str(a + b)))

    serve(Sums(), "http://127.0.0.1:9100")  # the orchestrator; or: orchestrator.host(Sums()), in its own process

A rollout that blocks is written as a plain `def`: it runs in a thread, and asks by `policy.chat_now`. What goes wrong
is named by one rule: an engine that does not answer is `engine_lost`, a context that is full is `task_failed`, the time
limit is `timeout`, and any other exception is `env_crash` with its words. An agent with a client of its own needs no
`Policy`: `asked.base_url` is its base URL. Needs the extra `serve`. Source: the report, section 4.1. Read next:
`protocol`; `glm5.posttrain.rollout`, the other end.
"""

from __future__ import annotations

import asyncio
import hmac
import inspect
import logging
import os
import secrets
import threading
import traceback
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from glm5.agents.protocol import KEY, Offer, Result, Rollout, bearer, judged, require_key
from glm5.utils.ending import ended
from glm5.utils.errors import DataError, UserError
from glm5.utils.http import client
from glm5.utils.outcome import Outcome

__all__ = ["ContextFull", "EngineLost", "Hosted", "Policy", "Result", "Rollout", "TaskService", "judged", "serve"]

log = logging.getLogger(__name__)

KEPT = 10_000  # results that nobody told to forget
GRACE_S = 20  # for rollouts that are under way when the service ends; then they are broken off
ASKED_AGAIN = 4  # how often a request is sent again before the engine counts as lost


class EngineLost(Exception):
    """The model cannot be asked any more."""


class ContextFull(Exception):
    """The conversation has no room for another answer."""


class Policy:
    """The model behind one session of the gateway, as a rollout asks it.

    Args:
        asked: the rollout. http: without time limits of its own.
    """

    def __init__(self, asked: Rollout, http: httpx.AsyncClient) -> None:
        self.base_url, self._http = asked.base_url.rstrip("/"), http
        self._headers = bearer(asked.api_key)
        self._loop = asyncio.get_running_loop()
        self._lock, self._over = threading.Lock(), False
        self._waited: set[Future[dict[str, Any]]] = set()  # for by threads

    async def chat(self, messages: Sequence[dict[str, Any]], **body: Any) -> dict[str, Any]:
        """The assistant's message, in OpenAI's form, to be put into the history as it is.

        Args:
            body: other fields of the request: tools, max_tokens, ...

        Raises:
            EngineLost: nothing answers, or only failures. ContextFull: there is no room. UserError: it is refused.
        """
        headers = {**self._headers, "X-Request-ID": secrets.token_hex(8)}  # sent again, it is the same turn
        request = {"messages": list(messages), **body}
        reason = ""
        for again in range(ASKED_AGAIN + 1):
            if again:
                await asyncio.sleep(0.1 * 2**again)
            try:
                answer = await self._http.post(f"{self.base_url}/chat/completions", json=request, headers=headers)
            except httpx.HTTPError as error:
                reason = f"{type(error).__name__}: {error}"
                continue
            if answer.status_code < 300:
                told: dict[str, Any] = answer.json()["choices"][0]["message"]
                return told
            reason = f"status {answer.status_code}: {answer.text[:300]}"
            if answer.status_code < 500:
                break
        if "context_length_exceeded" in reason:
            raise ContextFull(reason)
        if reason.startswith("status 4") and "session_ended" not in reason:
            raise UserError(f"the gateway refuses: {reason}", "Mend the request")
        raise EngineLost(reason)

    def chat_now(self, messages: Sequence[dict[str, Any]], **body: Any) -> dict[str, Any]:
        """`chat` for a rollout that runs in a thread. Raises EngineLost, too, once the rollout is over."""
        with self._lock:
            if self._over:
                raise EngineLost("the rollout is over")
            told = asyncio.run_coroutine_threadsafe(self.chat(messages, **body), self._loop)
            self._waited.add(told)
        try:
            return told.result()
        except CancelledError:
            raise EngineLost("the rollout is over") from None
        finally:
            self._waited.discard(told)

    def end(self) -> None:
        """Nobody asks any more: a thread that still waited would wait for ever when the event loop has ended, and the
        process for it."""
        with self._lock:
            self._over = True
            waited = list(self._waited)
        for told in waited:
            told.cancel()


class TaskService(ABC):
    """A task. The attributes are those of `Offer`; set them in the class or in an instance."""

    name: str
    ratio: float = 1.0
    timeout_s: float = 600.0
    concurrency: int = 64
    groups: int | None = None

    @abstractmethod
    def rollout(self, asked: Rollout, policy: Policy) -> Result | Awaitable[Result]:
        """One attempt, from its prompt to its reward: `async def`, or a `def` that may block.

        Args:
            asked: `seed` and `index` say which prompt: the same for all members of a group.
        """

    async def start(self) -> None:  # noqa: B027  (most services need neither)
        """Before the first rollout."""

    async def stop(self) -> None:  # noqa: B027
        """After the last one."""


class Keyed:
    """An application to whoever bears the key."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self.app, self._expected = app, bearer(key)["Authorization"].encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given = Headers(scope=scope).get("authorization", "")
            if not hmac.compare_digest(given.encode(), self._expected):
                await JSONResponse({"error": "the key is missing or wrong"}, 401)(scope, receive, send)
                return
        await self.app(scope, receive, send)


class Hosted:
    """A service as an application: what `protocol` asks of one. The state of one process.

    Args:
        service: whose rollouts these are. http: by which the policy is asked; None makes one.
    """

    def __init__(self, service: TaskService, http: httpx.AsyncClient | None = None) -> None:
        self.service, self.boot = service, secrets.token_hex(6)
        self._http, self._given = http, http
        self._runs: OrderedDict[str, tuple[Rollout, asyncio.Task[Result]]] = OrderedDict()
        self._crashes: set[tuple[type[Exception], str, int | None]] = set()  # whose traceback was shown
        self._blocks = not inspect.iscoroutinefunction(service.rollout)

    def offer(self, url: str) -> Offer:
        """What is told to an orchestrator."""
        s = self.service
        return Offer(s.name, url, self.boot, s.ratio, s.timeout_s, s.concurrency, s.groups, joins=True)

    async def start(self) -> None:
        """Before anything is asked."""
        if self._http is None:
            self._http = client(self.service.concurrency, timeout=None)
        await self.service.start()

    async def stop(self) -> None:
        """End what runs."""
        await ended([run for _, run in self._runs.values()], f"rollouts of {self.service.name}")
        await self.service.stop()
        if self._http is not None and self._given is None:
            await self._http.aclose()
            self._http = None

    # -------------------------------------------------------------------------------------------------- rollouts
    async def ask(self, asked: Rollout) -> Result:
        """The result of a rollout, which is begun unless it is there."""
        if asked.session not in self._runs:
            self._runs[asked.session] = asked, asyncio.ensure_future(self._run(asked))
            while len(self._runs) > KEPT and next(iter(self._runs.values()))[1].done():
                self._runs.popitem(last=False)
        return await asyncio.shield(self._runs[asked.session][1])

    async def _run(self, asked: Rollout) -> Result:
        assert self._http is not None
        policy = Policy(asked, self._http)
        try:
            async with asyncio.timeout(asked.time_s) as limit:
                if self._blocks:
                    made = await _in_a_thread(lambda: self.service.rollout(asked, policy), asked.session)
                else:
                    made = self.service.rollout(asked, policy)
                found = await made if inspect.isawaitable(made) else made
                if not isinstance(found, Result):
                    raise TypeError(f"rollout gave {found!r}, and a Result is needed: return judged(reward)")
                return found
        except EngineLost as error:
            return Result(Outcome.ENGINE_LOST, detail=str(error))
        except ContextFull as error:
            return judged(0.0, f"the context is full: {error}")
        except Exception as error:  # of whatever the environment is made of
            if isinstance(error, TimeoutError) and limit.expired():
                return Result(Outcome.TIMEOUT, detail=f"after {asked.time_s:g} s")
            told = f"{type(error).__name__}: {error}"
            place = traceback.extract_tb(error.__traceback__)[-1]
            new = (where := (type(error), place.filename, place.lineno)) not in self._crashes
            self._crashes.add(where)
            log.warning("rollout %s crashed: %s", asked.session, told, exc_info=error if new else None)
            return Result(Outcome.ENV_CRASH, detail=told)
        finally:
            policy.end()

    def app(self, key: str | None = None) -> Starlette:
        """The application. Requests must bear `key`, if there is one."""

        async def ask(request: Request) -> Response:
            try:
                asked = Rollout.from_json(await request.json())
            except (DataError, ValueError) as error:
                return JSONResponse({"error": str(error)}, 400)
            try:
                return JSONResponse((await self.ask(asked)).to_json())
            except asyncio.CancelledError:
                if (task := asyncio.current_task()) is None or not task.cancelling():  # it was the rollout's own
                    return JSONResponse({"error": "the rollout was ended"}, 410)
                raise

        async def show(request: Request) -> Response:
            return JSONResponse({"rollouts": [asked.to_json() for asked, _ in self._runs.values()]})

        async def end(request: Request) -> Response:
            found = self._runs.pop(request.path_params["session"], None)
            if found is None:
                return JSONResponse({"error": "there is no such rollout"}, 404)
            found[1].cancel()
            return JSONResponse({})

        return Starlette(
            routes=[
                Route("/rollouts", ask, methods=["POST"]),
                Route("/rollouts", show, methods=["GET"]),
                Route("/rollouts/{session}", end, methods=["DELETE"]),
            ],
            middleware=[] if key is None else [Middleware(Keyed, key=key)],
        )


async def _in_a_thread(work: Callable[[], Any], name: str) -> Any:
    """Carry out `work` in a thread of its own. A thread cannot be ended: at the time limit its result is dropped, and
    it asks no more. One that hangs for good takes nobody's place, and does not hold up the end of the process."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if done.done():  # nobody waits any more
            return
        if error is None:
            done.set_result(result)
        else:  # a future takes no StopIteration
            done.set_exception(RuntimeError(repr(error)) if isinstance(error, StopIteration) else error)

    def run() -> None:
        result: Any = None
        error: BaseException | None = None
        try:
            result = work()
        except BaseException as caught:  # SystemExit, too: it would end this thread alone, without a word
            error = caught if isinstance(caught, Exception) else RuntimeError(repr(caught))
        with suppress(RuntimeError):  # the event loop has ended
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await done


async def attend(hosted: Hosted, url: str, orchestrator: str, http: httpx.AsyncClient) -> None:
    """Tell the orchestrator again and again that the service is there, until cancelled; then that it leaves."""
    offer, beat_s = hosted.offer(url).to_json(), 1.0
    try:
        while True:
            try:
                answer = await http.post(f"{orchestrator}/services", json=offer, timeout=10)
                if answer.status_code in _MENDS:
                    raise UserError(f"the orchestrator refuses: {answer.text[:300]}", _MENDS[answer.status_code])
                beat_s = float(answer.raise_for_status().json()["beat_s"])
            except httpx.HTTPStatusError as error:
                log.warning("%s: %s", error, error.response.text[:300])
            except httpx.HTTPError as error:
                log.info("%s does not answer: %s", orchestrator, error or type(error).__name__)
            await asyncio.sleep(beat_s)
    finally:
        with suppress(httpx.HTTPError):
            await http.delete(f"{orchestrator}/services/{hosted.service.name}", timeout=2)


_MENDS = {400: "Mend the service's attributes", 401: f"Set {KEY} to the orchestrator's"}


def serve(
    service: TaskService,
    orchestrator: str,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    key: str | None = None,
    ready: Callable[[str], None] | None = None,
) -> None:
    """Serve a task until SIGTERM or Ctrl-C, known to the orchestrator at this address. What is under way then has
    `GRACE_S` to end; the orchestrator runs the rest anew.

    Args:
        host: under which the orchestrator reaches this machine. port: 0 takes a free one.
        key: that orchestrator and service show each other; None takes it from GLM5_API_KEY, if that is set. It must be
            there unless `host` is this machine alone.
        ready: called with the service's address when it listens.

    Raises:
        UserError: the orchestrator refuses the service, or there is no key where there must be one.
    """
    key = key or os.environ.get(KEY) or None
    require_key(key, host)
    hosted = Hosted(service)

    @asynccontextmanager
    async def around(app: Starlette) -> AsyncIterator[None]:
        await hosted.start()
        yield
        await hosted.stop()

    app = hosted.app(key)
    app.router.lifespan_context = around
    about: dict[str, Any] = dict(log_level="warning", ws="none", timeout_graceful_shutdown=GRACE_S)
    server = uvicorn.Server(uvicorn.Config(app, host=host, port=port, **about))

    async def main() -> None:
        serving = asyncio.ensure_future(server.serve())
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        if serving.done():
            return await serving
        url = f"http://{host}:{server.servers[0].sockets[0].getsockname()[1]}"
        if ready is not None:
            ready(url)
        async with httpx.AsyncClient(headers=bearer(key)) as http:
            attending = asyncio.ensure_future(attend(hosted, url, orchestrator.rstrip("/"), http))
            await asyncio.wait({serving, attending}, return_when=asyncio.FIRST_COMPLETED)
            if attending.done():
                server.should_exit = True
            await ended([attending], f"who tells {orchestrator} of {service.name}")
            await asyncio.wait({serving})
        if attending.done() and not attending.cancelled() and (error := attending.exception()) is not None:
            raise error

    asyncio.run(main())
