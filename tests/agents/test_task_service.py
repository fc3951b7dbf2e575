"""The base class of task services: what goes wrong is named by rule; a rollout that is asked for again is joined."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from glm5.agents import service
from glm5.agents.protocol import KEY, Offer, Result, Rollout, bearer, require_key
from glm5.agents.service import EngineLost, Hosted, Policy, TaskService, attend, judged, serve
from glm5.utils.errors import DataError, UserError
from glm5.utils.outcome import Outcome
from support.listening import listening

ASKED = Rollout("t-0-0", "t-0", "t", 0, 0, 0, 5, "t-0-0:1", "http://gateway/sessions/t-0-0:1/v1", 30.0)
HI = [{"role": "user", "content": "hi"}]


class Made(TaskService):
    """A service of one function."""

    name = "t"

    def __init__(self, play: Callable[[Rollout, Policy], Any]) -> None:
        self.play = play

    async def rollout(self, asked: Rollout, policy: Policy) -> Result:
        made: Result = await self.play(asked, policy)
        return made


def policy_of(*answers: tuple[int, Any]) -> tuple[httpx.AsyncClient, list[Request]]:
    """A gateway that gives these answers, and what it was asked; None instead of a status breaks the connection."""
    seen: list[Request] = []

    async def chat(request: Request) -> Response:
        await request.body()
        seen.append(request)
        status, body = answers[min(len(seen), len(answers)) - 1]
        if status == 0:
            raise ConnectionError("broken")
        return JSONResponse(body, status)

    app = Starlette(routes=[Route("/sessions/{name}/v1/chat/completions", chat, methods=["POST"])])
    return httpx.AsyncClient(transport=httpx.ASGITransport(app, raise_app_exceptions=False)), seen


def said(content: str) -> tuple[int, Any]:
    return 200, {"choices": [{"message": {"role": "assistant", "content": content}}]}


def error(status: int, code: str) -> tuple[int, Any]:
    return status, {"error": {"message": code, "code": code}}


def played(service: TaskService, http: httpx.AsyncClient, asked: Rollout = ASKED) -> Result:
    async def main() -> Result:
        hosted = Hosted(service, http)
        await hosted.start()
        client = httpx.AsyncClient(transport=httpx.ASGITransport(hosted.app()), base_url="http://t", timeout=60)
        answer = await client.post("/rollouts", json=asked.to_json())
        await hosted.stop()
        return Result.from_json(answer.json())

    return asyncio.run(main())


async def ask(asked: Rollout, policy: Policy) -> Result:
    told = await policy.chat(HI, max_tokens=7)
    return judged(float(told["content"] == "yes"), "why", turns=1)


@pytest.mark.parametrize(("content", "outcome"), [("yes", Outcome.OK), ("no", Outcome.TASK_FAILED)])
def test_a_judged_rollout(content: str, outcome: Outcome) -> None:
    http, seen = policy_of(said(content))
    assert played(Made(ask), http) == Result(outcome, float(content == "yes"), "why", {"turns": 1.0})
    assert asyncio.run(seen[0].json()) == {"messages": HI, "max_tokens": 7}


def test_a_rollout_that_blocks() -> None:
    class Blocking(TaskService):
        name = "t"

        def rollout(self, asked: Rollout, policy: Policy) -> Result:
            time.sleep(0.01)
            return judged(float(policy.chat_now(HI)["content"] == "yes"))

    assert played(Blocking(), policy_of(said("yes"))[0]).outcome is Outcome.OK


def test_a_rollout_that_blocks_does_not_outlive_its_service() -> None:
    begun, ended, told = threading.Event(), threading.Event(), []

    class Blocking(TaskService):
        name = "t"

        def rollout(self, asked: Rollout, policy: Policy) -> Result:
            try:
                begun.set()
                policy.chat_now(HI)
            except EngineLost as error:
                told.append(str(error))
                with pytest.raises(EngineLost, match="over"):
                    policy.chat_now(HI)
                raise
            finally:
                ended.set()
            raise AssertionError

    async def never(request: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async def main() -> None:
        hosted = Hosted(Blocking(), httpx.AsyncClient(transport=httpx.MockTransport(never)))
        await hosted.start()
        asking = asyncio.ensure_future(hosted.ask(ASKED))
        await asyncio.to_thread(begun.wait, 60)
        await hosted.stop()
        assert asking.cancelled() or asking.done()

    asyncio.run(main())
    assert ended.wait(60), "its thread waits for an answer that nobody gives"
    assert told == ["the rollout is over"]


def test_threads_that_hang_for_good_take_nobody_s_place() -> None:
    """Three of two places hang; the next one is judged, and one that raises what no future takes ends at once."""
    free, begun = threading.Event(), threading.Semaphore(0)

    class Hanging(TaskService):
        name, concurrency = "t", 2

        def rollout(self, asked: Rollout, policy: Policy) -> Result:
            if asked.index < 3:
                begun.release()
                free.wait(300)
            if asked.index == 4:
                raise StopIteration
            return judged(1.0)

    async def main() -> None:
        hosted = Hosted(Hanging(), policy_of(said("yes"))[0])
        await hosted.start()
        given = [replace(ASKED, session=f"s{i}", index=i, time_s=0.05 if i < 3 else 120.0) for i in range(5)]
        hung = await asyncio.gather(*(hosted.ask(one) for one in given[:3]))
        assert {result.outcome for result in hung} == {Outcome.TIMEOUT}
        for _ in hung:
            assert await asyncio.to_thread(begun.acquire, timeout=60)
        assert (await hosted.ask(given[3])).outcome is Outcome.OK
        assert "StopIteration" in (await hosted.ask(given[4])).detail
        await hosted.stop()

    try:
        asyncio.run(main())
    finally:
        free.set()


HANGS = """
import asyncio, threading, time
from glm5.agents.service import Hosted, Policy, Result, Rollout, TaskService

class Hanging(TaskService):
    name = "t"

    def rollout(self, asked: Rollout, policy: Policy) -> Result:
        print("begun", flush=True)
        threading.Event().wait()

async def main():
    hosted = Hosted(Hanging())
    await hosted.start()
    asked = Rollout("t-0-0", "t-0", "t", 0, 0, 0, 5, "s", "http://127.0.0.1:9", 0.3)
    print((await hosted.ask(asked)).outcome, flush=True)
    await hosted.stop()

asyncio.run(main())
"""


def test_a_process_ends_though_a_rollout_hangs_in_it_for_good() -> None:
    done = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "begun\ntimeout\n"


def test_a_request_that_failed_is_sent_again_under_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: _now())
    http, seen = policy_of(error(503, "engine_lost"), (0, None), said("yes"))
    assert played(Made(ask), http).outcome is Outcome.OK
    assert len(seen) == 3
    assert len({request.headers["x-request-id"] for request in seen}) == 1


async def _now() -> None: ...


@pytest.mark.parametrize(
    ("answer", "outcome", "detail"),
    [
        (error(503, "engine_lost"), Outcome.ENGINE_LOST, "status 503"),
        (error(404, "session_ended"), Outcome.ENGINE_LOST, "session_ended"),
        (error(400, "context_length_exceeded"), Outcome.TASK_FAILED, "the context is full"),
        (error(400, "bad_tool"), Outcome.ENV_CRASH, "the gateway refuses: status 400"),
    ],
)
def test_what_a_policy_s_failures_are(
    answer: tuple[int, Any], outcome: Outcome, detail: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: _now())
    made = played(Made(ask), policy_of(answer)[0])
    assert (made.outcome, detail in made.detail) == (outcome, True), made
    assert made.reward == (0.0 if outcome is Outcome.TASK_FAILED else None)


def test_whose_time_was_up() -> None:
    async def slow(asked: Rollout, policy: Policy) -> Result:
        await asyncio.Event().wait()
        raise AssertionError

    async def impatient(asked: Rollout, policy: Policy) -> Result:
        async with asyncio.timeout(0):  # of the environment's own
            await asyncio.Event().wait()
        raise AssertionError

    http, _ = policy_of(said("yes"))
    brief = Rollout(**{**ASKED.__dict__, "time_s": 0.05})
    assert played(Made(slow), http, brief) == Result(Outcome.TIMEOUT, None, "after 0.05 s")
    assert played(Made(impatient), http).outcome is Outcome.ENV_CRASH


def test_the_first_cause_is_told() -> None:
    async def crash(asked: Rollout, policy: Policy) -> Result:
        raise OSError("no such container")

    assert played(Made(crash), policy_of(said(""))[0]) == Result(Outcome.ENV_CRASH, None, "OSError: no such container")


def test_a_crash_s_traceback_is_shown_once(caplog: pytest.LogCaptureFixture) -> None:
    async def crash(asked: Rollout, policy: Policy) -> Result:
        raise OSError(f"no such container: {asked.seed}")

    async def main() -> None:
        hosted = Hosted(Made(crash), policy_of(said(""))[0])
        await hosted.start()
        for seed in range(3):
            await hosted.ask(Rollout(**{**ASKED.__dict__, "seed": seed, "session": f"s{seed}"}))
        await hosted.stop()

    asyncio.run(main())
    crashes = [r for r in caplog.records if "crashed: OSError: no such container" in r.getMessage()]
    assert [r.exc_info is not None for r in crashes] == [True, False, False]


def test_what_is_no_result_is_the_services_fault() -> None:
    async def bare(asked: Rollout, policy: Policy) -> Any:
        return 0.5

    made = played(Made(bare), policy_of(said(""))[0])
    assert made.outcome is Outcome.ENV_CRASH
    assert "rollout gave 0.5, and a Result is needed" in made.detail


def test_asked_again_it_is_the_same_run_until_it_is_forgotten() -> None:
    async def main() -> None:
        runs, gate = [], asyncio.Event()

        async def play(asked: Rollout, policy: Policy) -> Result:
            runs.append(asked.attempt)
            await gate.wait()
            return judged(1.0)

        hosted = Hosted(Made(play), policy_of(said(""))[0])
        await hosted.start()
        client = httpx.AsyncClient(transport=httpx.ASGITransport(hosted.app()), base_url="http://t", timeout=60)
        path = f"/rollouts/{ASKED.session}"
        twice = [asyncio.ensure_future(client.post("/rollouts", json=ASKED.to_json())) for _ in range(2)]
        while not runs:
            await asyncio.sleep(0)
        twice[0].cancel()  # its connection broke
        gate.set()
        assert (await twice[1]).json()["outcome"] == "ok"
        assert (await client.post("/rollouts", json=ASKED.to_json())).json()["outcome"] == "ok"
        assert len(runs) == 1
        assert (await client.get("/rollouts")).json() == {"rollouts": [ASKED.to_json()]}
        assert (await client.delete(path)).status_code == 200
        assert (await client.delete(path)).status_code == 404
        gate.clear()
        again = asyncio.ensure_future(client.post("/rollouts", json=ASKED.to_json()))
        while len(runs) < 2:
            await asyncio.sleep(0)
        assert (await client.delete(path)).status_code == 200
        assert (await again).status_code == 410, "somebody ended it"
        assert (await client.get("/rollouts")).json() == {"rollouts": []}
        await hosted.stop()

    asyncio.run(main())


def test_a_service_with_a_key_is_asked_with_it() -> None:
    async def play(asked: Rollout, policy: Policy) -> Result:
        return judged(1.0)

    async def main() -> None:
        hosted = Hosted(Made(play))
        await hosted.start()
        transport = httpx.ASGITransport(hosted.app("a key"))
        statuses = []
        for headers in (
            {},
            bearer("another"),
            {"Authorization": "a key"},
            {"Authorization": b"Bearer \xff"},
            bearer("a key"),
        ):
            async with httpx.AsyncClient(transport=transport, base_url="http://t", headers=headers) as client:
                made = [await client.post("/rollouts", json=ASKED.to_json()), await client.get("/rollouts")]
                statuses.append([answer.status_code for answer in made])
        assert statuses == [[401, 401]] * 4 + [[200, 200]]
        await hosted.stop()

    asyncio.run(main())


def test_a_service_whose_key_the_orchestrator_does_not_take_ends() -> None:
    async def refuse(request: Request) -> Response:
        return JSONResponse({"error": "the API key is missing or wrong"}, 401)

    async def main() -> None:
        app = Starlette(routes=[Route("/services", refuse, methods=["POST"])])
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
            with pytest.raises(UserError, match="key is missing or wrong") as told:
                await attend(Hosted(Made(None)), "http://t", "http://desk", client)  # type: ignore[arg-type]
        assert KEY in told.value.mend

    asyncio.run(main())


def test_a_service_that_ends_does_not_wait_for_a_rollout_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "GRACE_S", 1)
    ready, begun, told = threading.Event(), threading.Event(), []
    at: list[str] = []

    async def hang(asked: Rollout, policy: Policy) -> Result:
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def offer(request: Request) -> Response:
        return JSONResponse({"beat_s": 0.01}) if not begun.is_set() else JSONResponse({"error": "go"}, 400)

    def run(orchestrator: str) -> None:
        try:
            serve(Made(hang), orchestrator, ready=lambda url: (at.append(url), ready.set()))
        except UserError as error:
            told.append(error)

    app = Starlette(routes=[Route("/services", offer, methods=["POST"])])
    with listening(app) as orchestrator:
        serving = threading.Thread(target=run, args=(orchestrator,), daemon=True)
        serving.start()
        assert ready.wait(60)

        def ask() -> None:
            with suppress(httpx.HTTPError):
                httpx.post(f"{at[0]}/rollouts", json=ASKED.to_json(), timeout=120)

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        serving.join(120)
        assert not serving.is_alive(), "it waits for the rollout"
        asking.join(120)
        assert "refuses" in str(told[0])


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.7", "::", "node7", ""])  # noqa: S104
def test_nobody_listens_for_other_machines_without_a_key(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "")
    with pytest.raises(UserError, match="reached from other machines") as told:
        serve(Made(None), "http://desk", host=host)  # type: ignore[arg-type]
    assert KEY in told.value.mend
    require_key("a key", host)
    for own in ("127.0.0.1", "127.8.8.8", "::1", "localhost"):
        require_key(None, own)


def test_what_is_no_message_is_refused() -> None:
    for given, words in (
        ([], "is no Rollout"),
        ({**ASKED.to_json(), "seed": "5"}, "seed='5'"),
        ({**ASKED.to_json(), "member": True}, "member='True'"),
        ({name: value for name, value in ASKED.to_json().items() if name != "session"}, "no 'session'"),
    ):
        with pytest.raises(DataError, match=words):
            Rollout.from_json(given)
    assert Rollout.from_json({**ASKED.to_json(), "newer": 1}) == ASKED
    assert Offer.from_json({"name": "t", "url": "http://t"}) == Offer("t", "http://t")
    with pytest.raises(DataError, match="ratio=inf"):
        Offer("t", "http://t", ratio=float("inf"))
    with pytest.raises(DataError, match="reward=nan"):
        Result(Outcome.OK, float("nan"))
