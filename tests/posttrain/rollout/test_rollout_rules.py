"""What the orchestrator makes of services that fail, hang, leave and come back, of a full disk, and of a slow learner.

In virtual time, with the real gateway before a scripted engine (`Desk`).
"""

from __future__ import annotations

import asyncio
import gc
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from glm5.agents.protocol import Rollout, bearer
from glm5.agents.service import Hosted, Policy, Result, TaskService, judged
from glm5.posttrain.outcome import Outcome, State
from glm5.posttrain.rollout import held_out
from glm5.posttrain.rollout.desk import create_desk, serve
from glm5.posttrain.rollout.options import RolloutOptions
from glm5.posttrain.rollout.orchestrator import Orchestrator
from glm5.posttrain.rollout.sample import Job
from glm5.posttrain.rollout.sessions import Sessions
from glm5.posttrain.store import Sample, Store
from glm5.serve.gateway.app import GatewayOptions, create_gateway
from glm5.serve.gateway.session import Session
from glm5.serve.gateway.turn import Turn
from glm5.utils.errors import ConfigError, FileError, UserError
from support import virtual
from support.rollouts import ScriptedEngine
from support.virtual import Network

SMALL = RolloutOptions(
    group=2, concurrency=8, max_open=16, beat_s=1.0, silent_s=4.0, grace_s=6.0, patience_s=30.0, retries=2, losses=3
)


class Talk(TaskService):
    """One turn of `seconds`, then judged as `judge` says."""

    name, timeout_s, concurrency = "talk", 20.0, 8

    def __init__(self, groups: int | None = 1, seconds: float = 1.0, judge: Callable[[Rollout], Result] | None = None):
        self.groups, self.seconds, self.begun = groups, seconds, Counter[str]()
        self.judge = judge or (lambda asked: judged(float(asked.member)))

    async def rollout(self, asked: Rollout, policy: Policy) -> Result:
        self.begun[asked.sample] += 1
        await policy.chat([{"role": "user", "content": asked.group}])
        await asyncio.sleep(self.seconds)
        return self.judge(asked)


class Desk:
    """An orchestrator with a gateway, and services that a test makes."""

    def __init__(self, path: Path, options: RolloutOptions = SMALL, key: str | None = None) -> None:
        self.network, self.options, self.path = Network(), options, path
        self.engine = ScriptedEngine()
        self.begin_gateway()
        self.store = Store(path)
        self.orchestrator = Orchestrator(self.store, "http://gateway", options, http=self.network.client(), key=key)
        self.network.hosts["desk"] = create_desk(self.orchestrator)
        self.hosted: dict[str, Hosted] = {}

    def begin_gateway(self) -> None:
        self.network.hosts["gateway"] = create_gateway(self.engine, GatewayOptions())

    def serve(self, service: TaskService, name: str | None = None) -> None:
        """A service's process begins."""
        hosted = self.hosted[name or service.name] = Hosted(service, self.network.client())
        self.network.hosts[name or service.name] = hosted.app()

    async def offer(self, name: str, **changes: Any) -> httpx.Response:
        """It says that it is there."""
        offer = {"name": name, "url": f"http://{name}", "timeout_s": 20.0, **changes}
        if name in self.hosted:
            offer = {**self.hosted[name].offer(f"http://{name}").to_json(), **changes}
        return await self.network.client("http://desk").post("/services", json=offer)

    async def beat(self, name: str) -> None:
        while True:
            with suppress(httpx.HTTPError):
                await self.offer(name)
            await asyncio.sleep(1.0)

    def samples(self) -> dict[str, Sample]:
        return {sample.id: sample for sample in self.store.samples()}

    async def until(self, what: Callable[[], Any]) -> None:
        async with asyncio.timeout(10_000):
            while not what():
                await asyncio.sleep(0.1)


def played(path: Path, play: Callable[[Desk], Any], *services: TaskService, options: RolloutOptions = SMALL) -> Desk:
    """A desk at which these services are heard all the time, and which ran while `play` did."""

    async def main() -> Desk:
        desk = Desk(path, options)
        running = asyncio.ensure_future(desk.orchestrator.run())
        beats = []
        for service in services:
            desk.serve(service)
            beats.append(asyncio.ensure_future(desk.beat(service.name)))
        await play(desk)
        for task in (*beats, running):
            task.cancel()
        await asyncio.wait({running, *beats})
        assert running.cancelled()
        return desk

    return virtual.run(main())


def over(count: int) -> Callable[[Desk], Any]:
    async def play(desk: Desk) -> None:
        await desk.until(lambda: desk.orchestrator.figures.finished >= count)

    return play


def test_a_cancellation_that_a_client_missed_does_not_hold_up_the_end(tmp_path: Path) -> None:
    async def main() -> None:
        desk, missed, asked = Desk(tmp_path / "t"), asyncio.Event(), asyncio.Event()

        async def miss(request: httpx.Request) -> None:
            if request.url.path == "/health" and desk.orchestrator._ready.is_set() and not missed.is_set():
                asked.set()
                try:
                    await asyncio.sleep(1e6)
                except asyncio.CancelledError:
                    missed.set()  # and the request goes on

        desk.network.before = miss
        running = asyncio.ensure_future(desk.orchestrator.run())
        await asked.wait()
        running.cancel()
        await asyncio.wait({running}, timeout=100)
        assert missed.is_set()
        assert running.cancelled(), "whoever watches the versions does so for ever"

    virtual.run(main())


def test_a_rollout_whose_time_is_up_is_not_ended_for_staleness_too() -> None:
    async def main() -> None:
        job, loop, told = Job("t-0-0", "t", 0, 0), asyncio.get_running_loop(), []

        def stale() -> None:  # in the moment in which the time is up, before the rollout hears of it
            assert job.limit is not None
            told.append(job.limit.expired())
            job.abort_stale()

        loop.set_exception_handler(lambda _, context: told.append(context["exception"]))
        with suppress(TimeoutError):
            async with asyncio.timeout(0) as job.limit:
                loop.call_soon(stale)
                await asyncio.Event().wait()
        assert told == [True]
        assert not job.stale

    asyncio.run(main())


# ------------------------------------------------------------------------------------------------ outcomes, retries
def test_what_the_policy_had_no_part_in_is_tried_again(tmp_path: Path) -> None:
    def judge(asked: Rollout) -> Result:
        if asked.member == 0 and asked.attempt < 2:
            raise OSError("no such container")
        if asked.member == 1:
            return Result(Outcome.VERIFIER_NO_VERDICT, detail="killed")
        return judged(1.0)

    talk = Talk(judge=judge)
    desk = played(tmp_path / "t", over(2), talk)
    found = desk.samples()
    assert found["talk-0-0"].outcome is Outcome.OK
    assert (found["talk-0-1"].outcome, found["talk-0-1"].reward) == (Outcome.VERIFIER_NO_VERDICT, None)
    assert talk.begun == {"talk-0-0": 3, "talk-0-1": 3}
    assert len(desk.store.records("talk-0-0")) == 1, "of the last attempt alone"
    retries = desk.orchestrator.figures.tasks["talk"].retries
    assert retries == {"env_crash": 2, "verifier_no_verdict": 2}


def test_what_the_policy_had_a_part_in_is_not(tmp_path: Path) -> None:
    talk = Talk(judge=lambda asked: Result(Outcome.TIMEOUT) if asked.member else judged(0.25))
    desk = played(tmp_path / "t", over(2), talk)
    found = desk.samples()
    assert (found["talk-0-0"].outcome, found["talk-0-0"].reward) == (Outcome.TASK_FAILED, 0.25)
    assert (found["talk-0-1"].outcome, found["talk-0-1"].reward) == (Outcome.TIMEOUT, 0.0)
    assert set(talk.begun.values()) == {1}


def test_a_reward_for_nothing_is_none(tmp_path: Path) -> None:
    """The service says that the task is solved, and the policy was never asked."""

    class Idle(Talk):
        async def rollout(self, asked: Rollout, policy: Policy) -> Result:
            self.begun[asked.sample] += 1
            return judged(1.0)

    idle = Idle()
    desk = played(tmp_path / "t", over(2), idle)
    assert set(idle.begun.values()) == {1 + SMALL.retries}
    assert {sample.outcome for sample in desk.samples().values()} == {Outcome.ENV_CRASH}
    assert "drew nothing" in desk.samples()["talk-0-0"].detail


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (PlainTextResponse("<html>", 200), "no result"),
        (PlainTextResponse("oops", 500), "said 500: oops"),
        (JSONResponse({"outcome": "great", "reward": 1}), "outcome='great'"),
        (JSONResponse({"outcome": "ok"}), "no reward"),
        (JSONResponse({"outcome": "env_crash", "reward": 1.0}), "Leave it out"),
    ],
)
def test_an_answer_that_is_none_is_the_environment_s_fault(answer: Response, said: str, tmp_path: Path) -> None:
    """A service in any language: it has one route, and no more."""

    async def rollouts(request: Request) -> Response:
        return answer

    async def play(desk: Desk) -> None:
        desk.network.hosts["other"] = Starlette(routes=[Route("/rollouts", rollouts, methods=["POST"])])
        beats = asyncio.ensure_future(beaten(desk, "other", groups=1))
        await over(2)(desk)
        beats.cancel()

    found = played(tmp_path / "t", play).samples().values()
    assert {sample.outcome for sample in found} == {Outcome.ENV_CRASH}
    assert all(said in sample.detail for sample in found)


async def beaten(desk: Desk, name: str, **changes: Any) -> None:
    while True:
        await desk.offer(name, **changes)
        await asyncio.sleep(1.0)


def deaf(turns: bool) -> Callable[[Desk], Starlette]:
    """A service that never answers, though it is there."""

    def made(desk: Desk) -> Starlette:
        async def rollouts(request: Request) -> Response:
            asked = await request.json()
            if turns:
                body = {"messages": [{"role": "user", "content": "hi"}]}
                await desk.network.client().post(f"{asked['base_url']}/chat/completions", json=body)
            await asyncio.sleep(1e6)
            raise AssertionError

        return Starlette(routes=[Route("/rollouts", rollouts, methods=["POST"])])

    return made


@pytest.mark.parametrize("turns", [True, False])
def test_a_service_that_hangs_is_not_waited_for(turns: bool, tmp_path: Path) -> None:
    """Heard all the while, it may be the agent that goes on for ever: that is a time-out, if it drew anything."""

    async def play(desk: Desk) -> None:
        desk.network.hosts["deaf"] = deaf(turns)(desk)
        beats = asyncio.ensure_future(beaten(desk, "deaf", groups=1))
        await over(2)(desk)
        beats.cancel()

    desk = played(tmp_path / "t", play)
    expected = (Outcome.TIMEOUT, 0.0) if turns else (Outcome.ENV_CRASH, None)
    assert {(s.outcome, s.reward) for s in desk.samples().values()} == {expected}


def test_a_service_that_is_silent_too_is_lost(tmp_path: Path) -> None:
    async def play(desk: Desk) -> None:
        desk.network.hosts["deaf"] = deaf(True)(desk)
        await desk.offer("deaf", groups=1)  # once
        await desk.until(lambda: desk.orchestrator.figures.of("deaf").retries)
        assert desk.orchestrator.figures.of("deaf").retries == {"env_crash": 2}
        await over(2)(desk)

    found = played(tmp_path / "t", play).samples()
    assert {sample.outcome for sample in found.values()} == {Outcome.ENV_CRASH}
    assert found["deaf-0-0"].detail == "the service is away"


def test_one_that_hangs_when_it_is_met_holds_up_no_other(tmp_path: Path) -> None:
    talk = Talk(groups=2)

    async def never(request: Request) -> Response:
        await asyncio.Event().wait()
        raise AssertionError

    async def play(desk: Desk) -> None:
        desk.network.hosts["hung"] = Starlette(routes=[Route("/rollouts", never, methods=["GET"])])
        asked = [asyncio.ensure_future(desk.offer("hung", joins=True)) for _ in range(20)]
        await asyncio.sleep(0)
        desk.serve(talk)
        beats = asyncio.ensure_future(desk.beat("talk"))
        await over(4)(desk)
        assert asyncio.get_running_loop().time() < SMALL.silent_s
        assert not any(one.done() for one in asked)
        assert (await asked[0]).status_code == 503
        for one in (*asked, beats):
            one.cancel()

    played(tmp_path / "t", play)


# ------------------------------------------------------------------------------------------------ deaths
def test_a_service_that_dies_begins_its_rollouts_anew(tmp_path: Path) -> None:
    talk = Talk(groups=2, seconds=5.0)

    async def play(desk: Desk) -> None:
        await desk.until(lambda: sum(talk.begun.values()) == 4)
        desk.network.kill("talk")
        await asyncio.sleep(2.0)
        desk.serve(talk)
        await over(4)(desk)

    desk = played(tmp_path / "t", play, talk)
    assert set(talk.begun.values()) == {2}
    assert {sample.outcome for sample in desk.samples().values()} == {Outcome.OK, Outcome.TASK_FAILED}
    assert all(len(desk.store.records(sample)) == 1 for sample in desk.samples())


def test_a_connection_that_breaks_is_joined_again(tmp_path: Path) -> None:
    talk = Talk(groups=2, seconds=5.0)

    async def play(desk: Desk) -> None:
        await desk.until(lambda: sum(talk.begun.values()) == 4)
        app = desk.network.hosts["talk"]
        desk.network.kill("talk")  # its network; its process lives
        await asyncio.sleep(2.0)
        desk.network.hosts["talk"] = app
        await over(4)(desk)

    desk = played(tmp_path / "t", play, talk)
    assert set(talk.begun.values()) == {1}
    assert desk.orchestrator.figures.tasks["talk"].retries == {}


def test_a_gateway_that_dies_takes_its_sessions_with_it(tmp_path: Path) -> None:
    """The agent goes on in a session of the same name, whose history nobody drew there: it must not be learned from."""

    class Long(Talk):
        async def rollout(self, asked: Rollout, policy: Policy) -> Result:
            self.begun[asked.sample] += 1
            history: list[dict[str, Any]] = [{"role": "user", "content": asked.group}]
            for turn in range(4):
                history += [await policy.chat(history), {"role": "user", "content": str(turn)}]
                await asyncio.sleep(1.0)
            return judged(1.0)

    talk = Long()

    async def play(desk: Desk) -> None:
        await asyncio.sleep(2.5)
        desk.network.kill("gateway")
        await asyncio.sleep(0.2)
        desk.begin_gateway()
        await over(2)(desk)

    desk = played(tmp_path / "t", play, talk)
    assert talk.begun == {"talk-0-0": 2, "talk-0-1": 2}
    assert desk.orchestrator.figures.tasks["talk"].retries == {"engine_lost": 2}
    for sample in desk.samples():
        (record,) = desk.store.records(sample)
        assert len(record.turns) == 4, "all of one session"


def test_an_orchestrator_that_begins_anew_joins_what_runs(tmp_path: Path) -> None:
    talk = Talk(groups=2, seconds=10.0)

    async def main() -> None:
        desk = Desk(tmp_path / "t")
        desk.serve(talk)
        first = asyncio.ensure_future(desk.orchestrator.run())
        beats = asyncio.ensure_future(desk.beat("talk"))
        await desk.until(lambda: sum(talk.begun.values()) == 4)
        first.cancel()
        await asyncio.wait({first})
        await asyncio.sleep(0.5)
        second = Orchestrator(desk.store, "http://gateway", SMALL, http=desk.network.client())
        desk.network.hosts["desk"] = create_desk(second)
        await second.run(until_done=["talk"])
        beats.cancel()
        assert set(talk.begun.values()) == {1}
        assert {sample.status for sample in desk.samples().values()} == {"delivered"}
        assert (await desk.network.client("http://gateway").get("/sessions")).json() == {"sessions": []}
        assert (await desk.network.client("http://talk").get("/rollouts")).json() == {"rollouts": []}

    virtual.run(main())


def test_a_disk_that_is_full_holds_everything_up_and_loses_nothing(tmp_path: Path) -> None:
    class Full(Store):
        full = False

        def start(self, *args: Any) -> Any:
            self._check()
            return super().start(*args)

        def deliver(self, *args: Any) -> Any:
            self._check()
            return super().deliver(*args)

        def _check(self) -> None:
            if self.full:
                raise FileError("cannot write: the disk is full", "Free some space")

    talk = Talk(groups=6, seconds=2.0)

    async def play(desk: Desk) -> None:
        store = desk.orchestrator.store = Full(desk.path)
        await desk.until(lambda: talk.begun)
        store.full = True
        begun = sum(talk.begun.values())
        await asyncio.sleep(60)
        assert sum(talk.begun.values()) <= begun + 8, "nothing new is begun"
        assert desk.orchestrator.figures.finished == 0
        assert desk.orchestrator.figures.disk_errors > 50
        store.full = False
        await over(12)(desk)
        store.close()

    desk = played(tmp_path / "t", play, talk)
    assert {sample.status for sample in desk.samples().values()} == {"delivered"}
    assert set(talk.begun.values()) == {1}


# ------------------------------------------------------------------------------------------------ coming and going
def test_one_that_leaves_may_come_back(tmp_path: Path) -> None:
    talk = Talk(groups=None)

    async def play(desk: Desk) -> None:
        desk.serve(talk)
        await desk.offer("talk")
        await desk.until(lambda: desk.orchestrator.figures.finished > 4)
        await desk.network.client("http://desk").delete("/services/talk")
        await asyncio.sleep(10)
        count = len(desk.samples())
        assert all(sample.status == "delivered" for sample in desk.samples().values()), "what ran has ended"
        await asyncio.sleep(10)
        assert len(desk.samples()) == count
        desk.store.close_samples(dict.fromkeys(desk.samples(), State.ZERO_VARIANCE))
        await desk.offer("talk")
        await desk.until(lambda: len(desk.samples()) > count)

    played(tmp_path / "t", play)


@pytest.mark.parametrize("says", [True, False])
def test_samples_of_one_that_does_not_come_back_are_ended(says: bool, tmp_path: Path) -> None:
    """Cancelled if it said that it leaves; otherwise its environment has failed. No group stays open for ever."""

    async def play(desk: Desk) -> None:
        talk = Talk(groups=None, seconds=8.0)
        talk.concurrency = 3  # so that one sample waits
        desk.serve(talk)
        await desk.offer("talk")
        await desk.until(lambda: sum(talk.begun.values()) == 3)
        if says:
            await desk.network.client("http://desk").delete("/services/talk")
        desk.network.kill("talk")
        await desk.until(lambda: desk.orchestrator.figures.finished == 4)
        assert asyncio.get_running_loop().time() > SMALL.patience_s

    desk = played(tmp_path / "t", play)
    statuses = Counter(str(sample.state or sample.outcome) for sample in desk.samples().values())
    assert statuses == ({"cancelled": 4} if says else {"env_crash": 4})


def test_what_a_service_may_say(tmp_path: Path) -> None:
    async def play(desk: Desk) -> None:
        for changes, said in (
            ({"ratio": 0}, "ratio=0"),
            ({"url": "nowhere"}, "url='nowhere'"),
            ({"concurrency": "many"}, "concurrency='many'"),
            ({"timeout_s": True}, "timeout_s='True'"),
        ):
            answer = await desk.offer("x", **changes)
            assert (answer.status_code, said in answer.text) == (400, True), answer.text
        assert (await desk.offer("a/b")).status_code == 400
        answer = await desk.offer("x", joins=True)
        assert (answer.status_code, "cannot be asked at http://x" in answer.text) == (503, True)

    played(tmp_path / "t", play)


# ------------------------------------------------------------------------------------------------ pressure, staleness
def test_a_key_is_shown_by_either(tmp_path: Path) -> None:
    async def main() -> None:
        desk = Desk(tmp_path / "t", key="a key")
        running = asyncio.ensure_future(desk.orchestrator.run())
        hosted = Hosted(Talk(), desk.network.client())
        offer = hosted.offer("http://talk").to_json()
        statuses = []
        for asked, shown in (("a key", "another"), ("another", "a key"), ("a key", "a key")):
            desk.network.hosts["talk"] = hosted.app(asked)
            client = desk.network.client("http://desk")
            statuses.append((await client.post("/services", json=offer, headers=bearer(shown))).status_code)
        assert statuses == [401, 503, 200], "of the desk, of a service that is not to be had, and of one that is"
        await desk.until(lambda: desk.orchestrator.figures.finished == 2)
        running.cancel()
        await asyncio.wait({running})
        assert {sample.outcome for sample in desk.samples().values()} == {Outcome.OK, Outcome.TASK_FAILED}

    virtual.run(main())


def test_a_desk_for_other_machines_needs_a_key(tmp_path: Path) -> None:
    async def main(listening: socket.socket) -> None:
        with Store(tmp_path / "t") as store:
            await serve(Orchestrator(store, "http://gateway"), listening)

    with socket.create_server(("0.0.0.0", 0)) as listening, pytest.raises(UserError, match=r"0\.0\.0\.0"):  # noqa: S104
        asyncio.run(main(listening))


def test_it_does_not_run_ahead_of_the_learner(tmp_path: Path) -> None:
    options = RolloutOptions(
        **{**SMALL.__dict__, "max_open": 1000, "samples_per_version": 4, "max_staleness": 1, "grace_s": 6.0}
    )
    assert options.open_limit == 8
    talk = Talk(groups=None)

    async def play(desk: Desk) -> None:
        await desk.until(lambda: desk.orchestrator.figures.finished == 8)
        await asyncio.sleep(30)
        assert desk.store.counts().started == 8
        group = desk.store.ready(1)[0]
        desk.store.close_samples({sample.id: State.ZERO_VARIANCE for sample in group})
        await desk.until(lambda: desk.orchestrator.figures.finished == 10)
        await asyncio.sleep(30)
        counts = desk.store.counts()
        assert (counts.started, counts.open) == (10, 8)
        assert desk.orchestrator.figures.snapshot(desk.orchestrator, 0.0)["held_s"]["open"] > 50

    played(tmp_path / "t", play, talk, options=options)


def test_begun_anew_it_has_the_same_room(tmp_path: Path) -> None:
    """What is open counts, not what was ever started: a ledger of a thousand versions changes nothing."""
    with Store(tmp_path / "t") as store:
        for n in range(50):
            store.start(f"talk-{n}", "talk", [f"talk-{n}-0", f"talk-{n}-1"])
            store.close_samples({f"talk-{n}-{m}": State.CANCELLED for m in range(2)})
    talk = Talk(groups=None)

    async def play(desk: Desk) -> None:
        await asyncio.sleep(60)

    desk = played(tmp_path / "t", play, talk)
    assert desk.store.counts().open == SMALL.open_limit
    assert desk.samples()["talk-50-0"].status == "delivered", "and numbers go on"
    assert "talk-0-0" not in talk.begun


def test_a_rollout_that_would_be_dropped_is_ended(tmp_path: Path) -> None:
    talk = Talk(groups=1, seconds=15.0)

    async def play(desk: Desk) -> None:
        await asyncio.sleep(3)
        desk.engine.weight_version = str(10 + SMALL.max_staleness)
        await asyncio.sleep(3)
        assert desk.orchestrator.figures.finished == 0, "as many versions behind is not too many"
        desk.engine.weight_version = str(11 + SMALL.max_staleness)
        await desk.until(lambda: desk.orchestrator.figures.finished == 2)
        assert asyncio.get_running_loop().time() < 10, "and not at its end"

    desk = played(tmp_path / "t", play, talk)
    assert {sample.outcome for sample in desk.samples().values()} == {Outcome.ABORTED_STALE}
    assert {sample.oldest for sample in desk.samples().values()} == {10}


def test_one_that_is_joined_and_would_be_dropped_is_ended_too(tmp_path: Path) -> None:
    """The weights went on while no orchestrator was there to see it."""
    talk = Talk(groups=1, seconds=15.0)

    async def main() -> None:
        desk = Desk(tmp_path / "t")
        desk.serve(talk)
        first = asyncio.ensure_future(desk.orchestrator.run())
        beats = asyncio.ensure_future(desk.beat("talk"))
        await asyncio.sleep(3)
        first.cancel()
        await asyncio.wait({first})
        desk.engine.weight_version = str(11 + SMALL.max_staleness)
        second = Orchestrator(desk.store, "http://gateway", SMALL, http=desk.network.client())
        desk.network.hosts["desk"] = create_desk(second)
        await second.run(until_done=["talk"])
        beats.cancel()
        assert asyncio.get_running_loop().time() < 10, "and not at its end"
        assert set(talk.begun.values()) == {1}
        assert {sample.outcome for sample in desk.samples().values()} == {Outcome.ABORTED_STALE}

    virtual.run(main())


# ------------------------------------------------------------------------------------------------ held-out prompts
async def measured(desk: Desk, count: int, **changes: Any) -> dict[str, float]:
    """What is measured, beside whatever runs; the ledger knows nothing of it."""
    before = desk.samples().keys()
    sessions = Sessions("http://gateway", desk.network.client(), sampling={"temperature": 1e-4})
    options = replace(SMALL, **changes)
    of = desk.orchestrator
    found = await held_out.success(of.services, sessions, options, ["talk"], count, of.room)
    assert not any(name.startswith("held-") for name in desk.samples().keys() - before)
    left = (await desk.network.client("http://gateway").get("/sessions")).json()["sessions"]
    assert not [name for name in left if name.startswith("held-")]
    return found


def test_held_out_prompts_are_counted_by_the_rules_of_any_sample(tmp_path: Path) -> None:
    """Four: solved, hung, crashed for good, and one whose verifier fails once: (1 + 0 + 1) / 3."""

    class Held(Talk):
        async def rollout(self, asked: Rollout, policy: Policy) -> Result:
            if not asked.sample.startswith("held-"):
                return await super().rollout(asked, policy)
            self.begun[asked.sample] += 1
            await policy.chat([{"role": "user", "content": asked.group}])
            if asked.index == 1:
                await asyncio.sleep(1e9)
            if asked.index == 2:
                raise RuntimeError("the environment is broken")
            if asked.index == 3 and not asked.attempt:
                return Result(Outcome.VERIFIER_NO_VERDICT)
            return judged(1.0)

    talk = Held(groups=4)

    async def play(desk: Desk) -> None:
        await desk.until(lambda: desk.orchestrator.services.there("talk"))
        assert await measured(desk, 4) == {"talk": 2 / 3}
        assert talk.begun["held-talk-2-0"] == 1 + SMALL.retries
        assert talk.begun["held-talk-3-0"] == 2
        await over(8)(desk)

    played(tmp_path / "t", play, talk)


def test_held_out_prompts_and_samples_are_together_no_more_than_a_service_bears(tmp_path: Path) -> None:
    """And are not held up by samples, of which there are always more."""

    class Narrow(Talk):
        concurrency, now, most = 3, 0, 0

        async def rollout(self, asked: Rollout, policy: Policy) -> Result:
            self.now += 1
            self.most = max(self.most, self.now)
            try:
                return await super().rollout(asked, policy)
            finally:
                self.now -= 1

    narrow = Narrow(groups=None, judge=lambda asked: judged(1.0))

    async def play(desk: Desk) -> None:
        await desk.until(lambda: narrow.now == 3)
        before, began = desk.orchestrator.figures.finished, asyncio.get_running_loop().time()
        assert await measured(desk, 6) == {"talk": 1.0}
        assert asyncio.get_running_loop().time() - began < 5
        assert narrow.most == 3
        await over(before + 6)(desk)  # samples go on

    played(tmp_path / "t", play, narrow)


def test_nobody_waits_for_room_where_the_orchestrator_has_ended(tmp_path: Path) -> None:
    narrow = Talk(groups=None, seconds=5.0)
    narrow.concurrency = 1

    async def play(desk: Desk) -> None:
        await desk.until(lambda: narrow.begun)
        measuring = asyncio.ensure_future(measured(desk, 1))
        await asyncio.sleep(1.0)
        await desk.orchestrator.close()
        async with asyncio.timeout(60):
            await measuring

    played(tmp_path / "t", play, narrow)


def test_a_measurement_outlives_the_service_s_process_and_its_connections(tmp_path: Path) -> None:
    talk = Talk(groups=0, seconds=5.0, judge=lambda asked: judged(float(asked.index % 2)))

    async def play(desk: Desk) -> None:
        await desk.until(lambda: desk.orchestrator.services.there("talk"))
        measuring = asyncio.ensure_future(measured(desk, 4))
        for _ in range(2):
            await asyncio.sleep(2.5)
            desk.network.kill("talk")  # its process
            await asyncio.sleep(1.0)
            desk.serve(talk)
        await asyncio.sleep(2.5)
        app = desk.network.hosts["talk"]
        desk.network.kill("talk")  # its network
        await asyncio.sleep(1.0)
        desk.network.hosts["talk"] = app
        assert await measuring == {"talk": 0.5}
        assert max(talk.begun.values()) >= 3

    played(tmp_path / "t", play, talk)


def test_a_task_that_stays_away_is_not_measured_and_not_waited_for(tmp_path: Path) -> None:
    talk = Talk(groups=0, seconds=5.0)

    async def play(desk: Desk) -> None:
        await desk.until(lambda: desk.orchestrator.services.there("talk"))
        measuring = asyncio.ensure_future(measured(desk, 2, patience_s=8.0))
        await asyncio.sleep(1.0)
        del desk.network.hosts["desk"]  # it is heard no more
        desk.network.kill("talk")
        desk.orchestrator.services.patience_s = 8.0
        assert await measuring == {}

    played(tmp_path / "t", play, talk)


def test_shares_of_the_real_thing(tmp_path: Path) -> None:
    """A service ten times as slow has its half of what is finished; one in this process, the other behind HTTP."""
    options = RolloutOptions(**{**SMALL.__dict__, "concurrency": 24, "max_open": 1000, "grace_s": 6.0})

    class Slow(Talk):
        name, concurrency = "slow", 32

    async def play(desk: Desk) -> None:
        fast = Talk(groups=None, seconds=0.5)
        fast.concurrency = 32
        await desk.orchestrator.host(fast)
        await desk.until(lambda: desk.orchestrator.figures.finished >= 240)
        told = desk.orchestrator.figures.snapshot(desk.orchestrator, 0.0)["tasks"]
        assert {name: task["target"] for name, task in told.items()} == {"talk": 0.5, "slow": 0.5}
        assert told["slow"]["share"] == pytest.approx(0.5, abs=0.06)

    played(tmp_path / "t", play, Slow(groups=None, seconds=5.0), options=options)


def test_nobody_waits_for_a_task_that_has_given_all(tmp_path: Path) -> None:
    """Two groups, half of whose samples are of no use: it ends far behind the other, which goes on all the same."""

    class Short(Talk):
        name = "short"

    short = Short(2, judge=lambda a: Result(Outcome.ENV_CRASH) if a.member else judged(1.0))

    async def play(desk: Desk) -> None:
        await desk.until(lambda: desk.orchestrator.figures.finished >= 4 + 12)
        progress = desk.orchestrator.steering.there["talk"].progress
        assert progress > 2 + SMALL.group * 2, "by more than it may be ahead of a task that goes on"
        assert list(desk.orchestrator.steering.there) == ["talk"]
        desk.store.close_samples(dict.fromkeys(desk.samples(), State.CANCELLED))
        short.groups = 3  # it has more after all
        await desk.until(lambda: "short-2-1" in desk.samples())

    desk = played(tmp_path / "t", play, short, Talk(groups=None))
    assert Counter(sample.task for sample in desk.samples().values())["short"] == 6


def test_more_than_a_thousand_at_once(tmp_path: Path) -> None:
    options = RolloutOptions(**{**SMALL.__dict__, "group": 8, "concurrency": 1040, "max_open": 2000, "grace_s": 6.0})
    talk = Talk(groups=130, seconds=100.0)
    talk.concurrency, talk.timeout_s = 2000, 1000.0

    def held() -> list[Any]:
        return [one for one in gc.get_objects() if type(one) in (Session, Turn, Job, Rollout)]

    before = held()  # of earlier tests; kept, so that nothing new has their ids

    async def play(desk: Desk) -> None:
        await desk.until(lambda: len(desk.orchestrator.running) == 1040)
        await desk.until(lambda: sum(talk.begun.values()) == 1040)
        assert desk.orchestrator.figures.finished == 0
        await over(1040)(desk)
        assert not desk.orchestrator.running
        await asyncio.sleep(5.0)  # until all is let go of
        gc.collect()
        known = {id(one) for one in before}
        kept = Counter(type(one).__name__ for one in held() if id(one) not in known)
        assert not kept, "what is over is in the store, and nowhere else"

    desk = played(tmp_path / "t", play, talk, options=options)
    assert {sample.status for sample in desk.samples().values()} == {"delivered"}
    assert set(talk.begun.values()) == {1}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"group": 0}, "group=0"),
        ({"max_open": 4}, "a group of 8"),
        ({"samples_per_version": 1}, "a group of 8"),
        ({"retries": -1}, "retries=-1"),
        ({"grace_s": 1.0}, "above silent_s"),
        ({"beat_s": float("inf")}, "beat_s"),
    ],
)
def test_options_that_cannot_be(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        RolloutOptions(**changes)
