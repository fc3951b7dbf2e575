"""The orchestrator: groups of all tasks are begun, run, delivered to the store, and never more of them than are wanted.

    store <- start of a group <- steering: whose turn is it?  <- services: who is there?
    store <- delivery         <- sample: attempts, retries    <- services, gateway

All that it knows is in the store, in the services and in the gateway: begun anew after a death at any point, it finds
the samples that are open, asks services which of them they have, fetches these, and runs the others again. Every call
of the store may be repeated. A disk that is full holds everything up, and loses nothing.

Source: the report, sections 3.6 and 4.1. Read next: `steering`, `sample`, `desk` (where services register).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Any, ParamSpec, TypeVar

import httpx

from glm5.agents.protocol import Offer
from glm5.agents.service import Hosted, TaskService
from glm5.posttrain.outcome import Outcome, State
from glm5.posttrain.record import records_of_session
from glm5.posttrain.rollout.figures import Figures
from glm5.posttrain.rollout.options import RolloutOptions
from glm5.posttrain.rollout.sample import Ending, Job, Sampling, group_name
from glm5.posttrain.rollout.services import Services
from glm5.posttrain.rollout.sessions import SessionLost, Sessions
from glm5.posttrain.rollout.steering import Steering
from glm5.posttrain.store import Queue, Store
from glm5.utils.ending import ended
from glm5.utils.errors import DataError, FileError, UserError
from glm5.utils.http import client

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

DISK_S = 1.0  # before a store that could not be written is tried again
ROOM_S = 0.05  # until it is looked again whether a service has room


class Orchestrator:
    """See the module. One event loop; the store is called in a thread of its own.

    Args:
        store: of the run. gateway: its address. sampling: what counts in every session (`POST /sessions`).
        api_key: that the gateway asks for. key: that services ask for, and the desk of them.
        http: to reach gateway and services; None makes one.
        clock: monotonic seconds; None is the event loop's.
    """

    def __init__(
        self,
        store: Store,
        gateway: str,
        options: RolloutOptions | None = None,
        *,
        sampling: dict[str, Any] | None = None,
        api_key: str | None = None,
        key: str | None = None,
        http: httpx.AsyncClient | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.store, self.options = store, options or RolloutOptions()
        self.clock = clock or (lambda: asyncio.get_running_loop().time())
        o = self.options
        self._http, self._given = http or client(o.concurrency, timeout=60), http is not None
        self.key = key
        self.services = Services(self._http, self.clock, silent_s=o.silent_s, patience_s=o.patience_s, key=key)
        self.sessions = Sessions(gateway, self._http, sampling=sampling, api_key=api_key)
        run = hashlib.blake2b(str(store.path.absolute()).encode(), digest_size=4).hexdigest()
        self.sampling = Sampling(self.services, self.sessions, o, run, lambda: self.version, self._retried)
        self.steering = Steering(o.lead or 2 * o.group)
        self.figures = Figures(o.concurrency)
        self.version: int | None = None
        self.queues: dict[str, Queue] = {}
        self.open = 0
        self.waiting: dict[str, deque[Job]] = {}  # started and not yet asked for, by task
        self.running: dict[str, Job] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._groups: dict[str, int] = {}  # started so far, by task
        self._hosted: list[Hosted] = []
        self._thread = ThreadPoolExecutor(1, "store")
        self._news = asyncio.Event()
        self._failure: BaseException | None = None
        self._blocked_until = self._looked = float("-inf")
        self._ready = asyncio.Event()
        self._meeting: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # one that hangs holds up no other
        self._under_way: Counter[str] = Counter()  # of `running`, and of what has `room`, by task
        self._kept_free: Counter[str] = Counter()  # for what waits for `room`

    # -------------------------------------------------------------------------------------------------- services
    async def offered(self, offer: Offer, http: httpx.AsyncClient | None = None) -> None:
        """A service is there, or is heard again. One whose process began since is asked first which rollouts it has.

        Raises:
            httpx.HTTPError: it cannot be reached where it says that it is.
        """
        await self._ready.wait()
        async with self._meeting[offer.name]:
            before = self.services.known.get(offer.name)
            if before is None or before.offer.boot != offer.boot or before.offer.url != offer.url or not before.there:
                await self._meet(offer, http)
            if not self.services.there(offer.name):
                log.info("task %s is there: ratio %g, %d at once", offer.name, offer.ratio, offer.concurrency)
            self.services.add(offer, http)
            if self._more(offer.name):
                self.steering.join(offer.name, offer.ratio)
            else:
                self.steering.leave(offer.name)
            self._news.set()

    async def _meet(self, offer: Offer, http: httpx.AsyncClient | None) -> None:
        """Find out which rollouts a service has: those of open samples go on, others are ended."""
        for asked in await self.services.rollouts(offer, http):
            if asked.sample in self.running:
                mine = self.running[asked.sample].asked
                if mine is not None and mine.session == asked.session:
                    continue
            job = next((one for one in self.waiting.get(offer.name, ()) if one.sample == asked.sample), None)
            if job is None or job.joined is not None:
                self.sampling.forget_session(offer.name, asked.session)
            else:
                job.joined = asked
                job.strays = [session for session in job.strays if session != asked.session]

    def left(self, name: str) -> None:
        """A service has said that it leaves."""
        log.info("task %s leaves", name)
        self.services.leave(name)
        self.steering.leave(name)
        self._news.set()

    async def host(self, service: TaskService) -> None:
        """Run a service in this process: the same protocol, without a network."""
        hosted = Hosted(service, self._http)
        await hosted.start()
        self._hosted.append(hosted)
        url = f"http://{service.name}.inside"
        http = httpx.AsyncClient(transport=httpx.ASGITransport(hosted.app()), base_url=url, timeout=None)  # noqa: S113
        await self.offered(hosted.offer(url), http)

    # -------------------------------------------------------------------------------------------------- the loop
    async def run(self, *, until_done: Collection[str] = ()) -> None:
        """Begin, run and deliver groups until cancelled; what is open then can be picked up.

        Args:
            until_done: end when these tasks have registered and given all of their groups, and all are delivered.

        Raises:
            UserError: the gateway refuses what a session asks for.
        """
        try:
            await self._pick_up()
            self._spawn(self._watch_version())
            while True:
                self._news.clear()
                await self._look()
                await self._fill()
                if self._failure is not None:
                    raise self._failure
                if until_done and self._done(until_done):
                    return
                with suppress(TimeoutError):
                    async with asyncio.timeout(self.options.look_s):
                        await self._news.wait()
        finally:
            await self.close()

    async def close(self) -> None:
        """End what runs, without a word to the ledger."""
        await ended(self._tasks, "rollouts of the orchestrator")
        await self.sampling.close()
        for hosted in self._hosted:
            await hosted.stop()
        self._hosted.clear()
        self._under_way.clear()  # whoever waits for room need not any more
        self._thread.shutdown()
        if not self._given:
            await self._http.aclose()

    async def _pick_up(self) -> None:
        """Find the samples that are open, and what an earlier orchestrator has left at the gateway."""
        self._groups = await self._call(self.store.groups)
        known: dict[str, Job] = {}
        for sample in await self._call(self.store.samples, status="running"):
            job = Job.of(sample.id)
            if job is not None and job.group == sample.group:
                known[job.sample] = job
                self.waiting.setdefault(job.task, deque()).append(job)
                self.steering.began(job.task, [job.sample], self.clock())
        for session in await self.sessions.names():
            name, _, rest = session.partition(":")
            if not rest.startswith(f"{self.sampling.run_name}:"):
                continue
            if name in known:
                known[name].strays.append(session)
            else:  # delivered
                self.sampling.forget_session(name.partition("-")[0], session)
        if known:
            log.info("%d samples are open, and picked up", len(known))
        self.version = await self.sessions.version()
        self._ready.set()

    def _done(self, tasks: Collection[str]) -> bool:
        """Whether nothing is left to do."""
        if any(name not in self.services.known or self._more(name) for name in tasks):
            return False
        return not self.running and not any(self.waiting.values())

    async def _look(self) -> None:
        """See what the learner has taken, and who is silent."""
        if self.clock() - self._looked < self.options.look_s:
            return
        self._looked = self.clock()
        try:
            self.queues = await self._call(self.store.queues)
        except FileError as error:
            self._blocked(error)
        self.open = sum(queue.running + queue.delivered for queue in self.queues.values())
        for name in [name for name in self.services.known if not self.services.there(name)]:
            self.steering.leave(name)
        for name, jobs in self.waiting.items():
            if jobs and (gone := self.services.gone(name)) is not None:
                while jobs:
                    self._take(jobs.popleft(), Ending(Outcome.ENV_CRASH, detail=str(gone), cancelled=gone.left))

    async def _watch_version(self) -> None:
        """Hear which weights the engines have, and end rollouts that the learner would drop."""
        while True:
            version = await self.sessions.version()
            if version is not None:
                changed, self.version = version != self.version, version
                await self._end_stale(version, changed)
            await asyncio.sleep(self.options.look_s)

    async def _end_stale(self, version: int, changed: bool) -> None:
        """Look at those that may be too old. One that was joined may have been so before."""
        for job in list(self.running.values()):
            if job.version is None or (changed and version - job.version > self.options.max_staleness):
                await self._end_if_stale(job)

    async def _end_if_stale(self, job: Job) -> None:
        """End a rollout that the learner would drop: its oldest token is too old already."""
        asked, version = job.asked, self.version
        if asked is None or version is None:
            return
        try:
            records = records_of_session(await self.sessions.show(asked.session, asked.begun))
        except (SessionLost, DataError, httpx.HTTPError):
            return  # whoever runs the sample will hear of it
        oldest = min((record.oldest for record in records if record.oldest is not None), default=version)
        if job.asked is asked:
            job.version = oldest
            if version - oldest > self.options.max_staleness:
                job.abort_stale()

    async def _fill(self) -> None:
        """Ask for samples that wait, and begin groups, until there is no room, or nobody's turn."""
        while True:
            now = self.clock()
            # Rollouts of a service that is away take nobody's place.
            busy = sum(count for task, count in self._under_way.items() if self.services.there(task))
            if busy >= self.options.concurrency:
                return self.figures.held("", now)
            job = self._next()
            if job is not None:
                self._take(job)
                continue
            able = [task for task in self.steering.there if self._able(task)]
            task = self.steering.choose(able, now)
            if task is None:
                return self.figures.held("services" if not able else "steering", now)
            if self.open + self.options.group > self.options.open_limit:
                return self.figures.held("open", now)
            if now < self._blocked_until or not await self._begin(task):
                return self.figures.held("disk", now)

    def _next(self) -> Job | None:
        """A sample that waits and can be asked for."""
        for task, jobs in self.waiting.items():
            if jobs and self._room(task):
                return jobs.popleft()
        return None

    def _able(self, task: str) -> bool:
        """Whether a task that takes part could begin a group now."""
        return not self.waiting.get(task) and self._room(task)

    def _more(self, task: str) -> bool:
        """Whether a task has more groups than were begun."""
        groups = self.services.known[task].offer.groups
        return groups is None or self._groups.get(task, 0) < groups

    def _room(self, task: str) -> bool:
        """Whether a service would take another sample's rollout."""
        taken = self._under_way[task] + self._kept_free[task]
        return self.services.there(task) and taken < self.services.known[task].offer.concurrency

    @asynccontextmanager
    async def room(self, task: str) -> AsyncIterator[None]:
        """Room at a service for a rollout that is no sample's. Samples that have not begun wait for it."""
        self._kept_free[task] += 1
        try:
            while self._under_way[task] >= self.services.known[task].offer.concurrency:
                await asyncio.sleep(ROOM_S)
        finally:
            self._kept_free[task] -= 1
        self._under_way[task] += 1
        try:
            yield
        finally:
            self._under_way[task] -= 1
            self._news.set()

    async def _begin(self, task: str) -> bool:
        """Start a group; False if the disk refuses."""
        index = self._groups.get(task, 0)
        jobs = [Job(f"{group_name(task, index)}-{member}", task, index, member) for member in range(self.options.group)]
        try:
            await self._call(self.store.start, group_name(task, index), task, [job.sample for job in jobs])
        except FileError as error:
            self._blocked(error)
            return False
        self._groups[task] = index + 1
        self.open += len(jobs)
        self.steering.began(task, [job.sample for job in jobs], self.clock())
        if not self._more(task):  # the others must not wait for one that has given all
            self.steering.leave(task)
        self.waiting.setdefault(task, deque()).extend(jobs)
        return True

    # -------------------------------------------------------------------------------------------------- a sample
    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = error
        self._news.set()

    def _take(self, job: Job, ending: Ending | None = None) -> None:
        """Run a sample; or end it, if it is known what becomes of it."""
        self.running[job.sample] = job
        self._under_way[job.task] += 1
        self._spawn(self._run(job, ending))

    async def _run(self, job: Job, ending: Ending | None) -> None:
        begun = self.clock()
        ending = ending or await self.sampling.run(job)
        await self._keep(job, ending)
        self.sampling.forget(job)
        del self.running[job.sample]
        self._under_way[job.task] -= 1
        now = self.clock()
        self.steering.ended(job.task, job.sample, now, of_use=not (ending.cancelled or ending.outcome.leaves_group))
        self.figures.ended(job, ending, self.version, now - begun)

    async def _keep(self, job: Job, ending: Ending) -> None:
        """Write down what became of a sample, as soon as the disk lets us."""
        detail = ending.detail[:2000]
        while True:
            try:
                if ending.cancelled:
                    with suppress(UserError):  # a sample that has another final state already
                        await self._call(self.store.close_samples, {job.sample: State.CANCELLED})
                else:
                    said = await self._call(
                        self.store.deliver, job.sample, ending.outcome, ending.reward, ending.records, detail
                    )
                    if said != "taken":
                        log.info("sample %s was there: %s", job.sample, said)
                return
            except FileError as error:
                self._blocked(error)
                await asyncio.sleep(DISK_S)
            except DataError as error:  # of what nobody foresaw: it must not be open for ever
                ending, detail = Ending(Outcome.ENV_CRASH), f"{error}. {detail}"[:2000]

    def _retried(self, job: Job, ending: Ending) -> None:
        self.figures.retried(job.task, ending)

    def _blocked(self, error: FileError) -> None:
        if self.clock() >= self._blocked_until:
            log.warning("%s; tried again in %g s", error, DISK_S)
        self._blocked_until = self.clock() + DISK_S
        self.figures.disk_errors += 1

    async def _call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """A call of the store, in its thread, one after another."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: function(*args, **kwargs))
