"""One sample, from its start to what became of it: attempts at its service, sessions at the gateway, retries by rule.

    begin a session -> ask the service -> fetch the session -> an `Ending`, or once more

What the policy had no part in is tried again, in a session of its own: `retries` times if the environment or the
verifier failed, `losses` times if a process was lost (service, gateway, engine). What the policy had a part in is never
tried again. Read next: `services`, `sessions`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Self

from glm5.agents.protocol import Offer, Result, Rollout
from glm5.posttrain.outcome import Outcome, reward_of
from glm5.posttrain.record import Record, records_of_session
from glm5.posttrain.rollout.options import RolloutOptions
from glm5.posttrain.rollout.services import Broken, Gone, Services
from glm5.posttrain.rollout.sessions import SessionLost, Sessions
from glm5.utils.errors import DataError

log = logging.getLogger(__name__)

SAMPLE = re.compile(r"([\w.]{1,64})-(\d{1,12})-(\d{1,6})")
PAUSE_S, LONGEST_S = 0.1, 10.0  # before another attempt
CLOSE_S = 5.0
RETRIED = (Outcome.ENV_CRASH, Outcome.VERIFIER_NO_VERDICT, Outcome.ENGINE_LOST)


def group_name(task: str, index: int) -> str:
    """The group of a task's prompt in the ledger. Its samples have the member's number behind it."""
    return f"{task}-{index}"


def seed_of(run: int, task: str, index: int) -> int:
    """The seed of a group, the same in every process."""
    return int.from_bytes(hashlib.blake2b(f"{run}/{task}/{index}".encode(), digest_size=8).digest(), "big") >> 11


@dataclass
class Job:
    """A sample that is open.

    Attributes:
        joined: an attempt that an earlier orchestrator began, if its service has it. strays: sessions of other ones.
        attempt: number of the one under way. asked: what it is. version: no older weights have drawn in it.
        limit: of the time that it may take. stale: it is to be ended, since its weights are too old.
    """

    sample: str
    task: str
    index: int
    member: int
    joined: Rollout | None = None
    strays: list[str] = field(default_factory=list)
    attempt: int = 0
    asked: Rollout | None = None
    version: int | None = None
    limit: asyncio.Timeout | None = None
    stale: bool = False

    @classmethod
    def of(cls, sample: str) -> Self | None:
        """By its name in the ledger; None for another program's sample."""
        found = SAMPLE.fullmatch(sample)
        return None if found is None else cls(sample, found[1], int(found[2]), int(found[3]))

    @property
    def group(self) -> str:
        return self.sample.rpartition("-")[0]

    def abort_stale(self) -> None:
        """End it: it would be dropped."""
        if self.limit is not None and not self.limit.expired() and not self.stale:
            self.stale = True
            self.limit.reschedule(asyncio.get_running_loop().time())


@dataclass(frozen=True)
class Ending:
    """What became of an attempt, or of a sample.

    Args:
        lost: a process was lost, which says nothing about the task. cancelled: nobody wants it any more.
    """

    outcome: Outcome
    reward: float | None = None
    detail: str = ""
    records: Sequence[Record] = ()
    lost: bool = False
    cancelled: bool = False
    final: bool = False
    result: Result | None = None


class Sampling:
    """Runs samples to their ends.

    Args:
        run: short, another one for each ledger: it is part of the sessions' names.
        version: the number of the engines' weights now. retried: told of each attempt that is followed by another.
    """

    def __init__(
        self,
        services: Services,
        sessions: Sessions,
        options: RolloutOptions,
        run: str,
        version: Callable[[], int | None],
        retried: Callable[[Job, Ending], None],
    ) -> None:
        self.services, self.sessions, self.options = services, sessions, options
        self._version, self._retried = version, retried
        self.run_name, self._boot = run, secrets.token_hex(3)  # sessions of another orchestrator have other names
        self._forgetting: set[asyncio.Task[None]] = set()

    async def run(self, job: Job) -> Ending:
        """The sample's end. Its rollout and session are kept until `forget`."""
        for session in job.strays:
            self._later(self._forget(job.task, session))
        job.strays, failures, losses = [], 0, 0
        while True:
            ending = await self._attempt(job)
            again = ending.outcome in RETRIED and not ending.final
            if not again or (losses >= self.options.losses if ending.lost else failures >= self.options.retries):
                return ending
            losses, failures = losses + ending.lost, failures + (not ending.lost)
            log.info("sample %s, attempt %d: %s: %s", job.sample, job.attempt, ending.outcome, ending.detail)
            self._retried(job, ending)
            self.forget(job)
            job.attempt += 1
            await asyncio.sleep(min(PAUSE_S * 2 ** (failures + losses), LONGEST_S))

    async def _attempt(self, job: Job) -> Ending:
        try:
            offer = await self.services.reach(job.task)
            joined, job.joined = job.joined, None
            asked = joined or await self._begin(job, offer)
            # One that is joined may have begun under older weights than there are now.
            job.asked, job.version, job.stale = asked, None if joined else self._version(), False
            try:
                async with asyncio.timeout(offer.timeout_s + self.options.grace_s) as job.limit:
                    result = await self.services.ask(asked)
            except TimeoutError:
                if job.stale:
                    result = Result(Outcome.ABORTED_STALE, detail="its weights were too old before it ended")
                elif self.services.there(job.task):
                    result = Result(Outcome.TIMEOUT, detail=f"no answer in {offer.timeout_s:g} s and more")
                else:
                    raise Broken(f"the service of {job.task} is silent") from None
                await self.services.end(job.task, asked.session)
            finally:
                job.limit = None
            session = await self.sessions.show(asked.session, asked.begun)
            return ending_of(result, records_of_session(session), bool(session["turns"]))
        except Gone as gone:
            return Ending(Outcome.ENV_CRASH, detail=str(gone), cancelled=gone.left, final=True)
        except Broken as broken:
            return Ending(Outcome.ENV_CRASH, detail=str(broken), lost=True)
        except SessionLost as lost:
            return Ending(Outcome.ENGINE_LOST, detail=str(lost), lost=True)
        except DataError as error:
            return Ending(Outcome.ENV_CRASH, detail=f"the session cannot be learned from: {error}")

    async def _begin(self, job: Job, offer: Offer) -> Rollout:
        session = f"{job.sample}:{self.run_name}:{self._boot}:{job.attempt}"
        return Rollout(
            sample=job.sample,
            group=job.group,
            task=job.task,
            index=job.index,
            member=job.member,
            attempt=job.attempt,
            seed=seed_of(self.options.seed, job.task, job.index),
            session=session,
            begun=await self.sessions.begin(session),
            base_url=self.sessions.base_url(session),
            time_s=offer.timeout_s,
            api_key=self.sessions.api_key,
        )

    # -------------------------------------------------------------------------------------------------- forgetting
    def forget(self, job: Job) -> None:
        """Let go of all attempts, at the service and at the gateway, without waiting for it."""
        sessions = [*job.strays, *(asked.session for asked in (job.asked, job.joined) if asked is not None)]
        for session in sessions:
            self._later(self._forget(job.task, session))
        job.strays, job.asked, job.joined = [], None, None

    def forget_session(self, task: str, session: str) -> None:
        """The same for a rollout that no job has."""
        self._later(self._forget(task, session))

    async def _forget(self, task: str, session: str) -> None:
        if task in self.services.known:
            await self.services.end(task, session)
        await self.sessions.end(session)

    def _later(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._forgetting.add(task)
        task.add_done_callback(self._forgetting.discard)

    async def close(self) -> None:
        """Wait a moment until all that is to be forgotten is."""
        if self._forgetting:
            _, late = await asyncio.wait(self._forgetting, timeout=CLOSE_S)
            for task in late:
                task.cancel()


def ending_of(result: Result, records: Sequence[Record], asked: bool) -> Ending:
    """What became of an attempt: the service's word, unless the session says otherwise.

    Args:
        asked: the policy was asked something.
    """
    outcome, detail = result.outcome, result.detail
    if not outcome.leaves_group and not records:  # nothing was drawn that one could learn from
        silent = Outcome.ENGINE_LOST if asked else Outcome.ENV_CRASH
        return Ending(silent, detail=f"{outcome}, and the policy drew nothing. {detail}", lost=asked, result=result)
    reward = reward_of(outcome, result.reward)
    if reward is not None and abs(reward) > 1e30:
        outcome, reward, detail = Outcome.VERIFIER_NO_VERDICT, None, f"a reward of {reward!r}. {detail}"
    return Ending(outcome, reward, detail, records, lost=outcome is Outcome.ENGINE_LOST, result=result)
