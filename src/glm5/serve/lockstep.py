"""One thread that communicates: a leader's calls, one after the other, and in step with other leaders' calls.

A call that other leaders' experts take part in can only run when they do, too. So before each one all leaders say what
they want (a few numbers each, gathered over gloo), and all take the same choice: drafts if anybody wants drafts,
otherwise the trunk if anybody wants it. Those who want that make their call; the others run the same exchanges without
rows, and say again what they want. So that busy leaders meet instead of taking turns, one whose last call has ended
just now, and who samples or schedules, is waited for, at most `SOON_SECONDS`. Steps of different length, different
numbers of drafts and idle leaders need nothing else. What concerns all ranks' weights (`ALL`) runs when everybody wants
it. A round in which nothing runs is followed by a pause of `PAUSE_SECONDS`, after idle seconds of `LONG_PAUSE_SECONDS`:
so long may a request wait for leaders that have nothing to do.

A recorded call (`rank_graphs`) runs where all who make a call want that recording, in the largest of the sizes that
they want; otherwise they are told that it cannot be, and come again with a plain call. Exchanges are recorded, too, so
all record anew when one of them has lost its recordings.

Without other leaders calls run as they come. Either way followers hear of their leader every `TICK_SECONDS`. Read next:
`ranks`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist

from glm5.parallel.mesh import ParallelError
from glm5.utils.errors import UserError

log = logging.getLogger(__name__)
PAUSE_SECONDS = 0.002
LONG_PAUSE_SECONDS = 0.02
SOON_SECONDS, LOOK_SECONDS = 0.005, 0.0002
TICK_SECONDS = 10.0
# How long a call for all ranks waits for the others to want it.
TOGETHER_SECONDS = 60.0


class RankLost(ParallelError):
    """Another rank of the engine is gone. Nothing can be answered any more."""


class Kind(IntEnum):
    """What a leader wants. LOCAL concerns its own group only, and is not agreed upon."""

    LOCAL = 0
    IDLE = 1
    TRUNK = 2
    DRAFT = 3
    ALL = 4
    END = 5
    SOON = 6


@dataclass(frozen=True)
class Size:
    """How large a call of all leaders is. form: which recording; 0 is a plain call. rows: of a leader at most; of a
    recorded step the sequences. pages: of a recorded step's tables."""

    form: int = 0
    rows: int = 0
    pages: int = 0


@dataclass
class _Job:
    kind: Kind
    work: Callable[[Size], Any]
    topic: str = ""
    size: Size = Size()
    done: Future[Any] = field(default_factory=Future)
    until: float = float("inf")


class Lockstep:
    """See the module. Its thread runs from the beginning until `close`.

    Args:
        leaders: the leaders that keep step; None where there is nothing to share.
        tick: called when there was nothing to do for a while.
        empty: takes part in others' calls, of the MTP block (True) or of the trunk, of that size.
        recorded: which recordings this leader has: bit `form` of each, and above these bits how often that changed.
        renew: called before a call where a leader's recordings are others than before.
        lost: called once, when a call failed, with what happened. device: of the calls.
    """

    def __init__(
        self,
        *,
        leaders: dist.ProcessGroup | None,
        tick: Callable[[], None],
        empty: Callable[[bool, Size], None],
        recorded: Callable[[], int],
        renew: Callable[[], None],
        lost: Callable[[str], None] | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._leaders, self._tick, self._empty, self._lost = leaders, tick, empty, lost
        self._recorded, self._renew, self._device = recorded, renew, device
        self._all_recorded: list[int] = []
        self._wanted = threading.Condition()
        self._job: _Job | None = None
        self._failure: str | None = None
        self._ended = False
        self._said = self._ran = self._called = time.monotonic()
        self._thread = threading.Thread(target=self._run, daemon=True, name="ranks")
        self._thread.start()

    def run(self, kind: Kind, work: Callable[[Size], Any], topic: str = "", size: Size | None = None) -> Any:
        """Carry out `work` in the thread, when it is its turn. One caller at a time.

        Args:
            work: is given the size that all have agreed upon.
            topic: of a call for all ranks: it runs when all want the same.
            size: what this leader wants.

        Returns:
            What `work` gives; None, without it, if a recorded call was wanted and cannot be now.

        Raises:
            RankLost: the thread failed, now or before. UserError: raised by `work`, or others did not come.
        """
        until = time.monotonic() + TOGETHER_SECONDS if kind is Kind.ALL else float("inf")
        job = _Job(kind, work, topic, size or Size(), until=until)
        with self._wanted:
            while self._job is not None and not self._over:
                self._wanted.wait()
            if self._over:
                raise RankLost(self._failure or "this rank's engine is closed", "Start the server again")
            self._job = job
            self._wanted.notify_all()
        return job.done.result()

    def close(self, last: Callable[[], None]) -> None:
        """End the thread, after `last`. Whoever waits for a turn behind it, or comes later, gets `RankLost`."""
        if not self._over:
            self.run(Kind.END, lambda _: last())
            self._thread.join()

    @property
    def _over(self) -> bool:
        """Whether nothing will be carried out any more."""
        return self._ended or self._failure is not None

    # ------------------------------------------------------------------ the thread
    def _run(self) -> None:
        if self._device is not None and self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        try:
            while self._round():
                pass
        except Exception as error:
            log.debug("the ranks' thread failed", exc_info=True)
            self._fail(f"another rank is lost, or this one failed: {type(error).__name__}: {_first_line(error)}")

    def _fail(self, what: str) -> None:
        with self._wanted:
            self._failure = what
            job, self._job = self._job, None
            self._wanted.notify_all()
        if job is not None and not job.done.done():
            job.done.set_exception(RankLost(what, "Start the server again"))
        if self._lost is not None:
            self._lost(what)

    def _round(self) -> bool:
        """One call, or one agreement; False at the end."""
        job = self._next(0.0 if self._leaders is not None else TICK_SECONDS)
        if self._leaders is None or (job is not None and job.kind is Kind.LOCAL):
            if job is not None:
                self._carry_out(job, job.size)
            else:
                self._keep_in_touch()
            return job is None or job.kind is not Kind.END
        if job is not None and time.monotonic() > job.until:
            self._drop(job)
            job.done.set_exception(UserError("the other ranks were not asked for the same", "Ask all of them"))
            return True
        busy = time.monotonic() - self._called < SOON_SECONDS
        kind, size = self._agree(job or _Job(Kind.SOON if busy else Kind.IDLE, lambda _: None))
        if size is None:  # the call that was chosen would be recorded by some, and plain of others
            if job is not None and job.kind is kind and job.size.form:
                self._drop(job)
                job.done.set_result(None)
                self._called = time.monotonic()
        elif kind is Kind.SOON:
            if job is None:
                self._next(LOOK_SECONDS)
        elif kind is Kind.IDLE:
            self._keep_in_touch()
            pause = PAUSE_SECONDS if time.monotonic() - self._ran < 2.0 else LONG_PAUSE_SECONDS
            if job is None:
                self._next(pause)
            else:
                time.sleep(pause)  # it waits for the others
        elif job is not None and job.kind is kind:
            self._carry_out(job, size)
            self._called = time.monotonic()
            return kind is not Kind.END
        else:
            self._empty(kind is Kind.DRAFT, size)
            self._said = self._ran = time.monotonic()
        return True

    def _agree(self, own: _Job) -> tuple[Kind, Size | None]:
        """What runs now, by what all want, and how large; None if they want different ones."""
        assert self._leaders is not None
        said = own.kind, crc32(own.topic.encode()), own.size.form, own.size.rows, own.size.pages, self._recorded()
        heard = torch.zeros(self._leaders.size(), len(said), dtype=torch.int64)
        heard[self._leaders.rank()] = torch.tensor(said)
        dist.all_reduce(heard, group=self._leaders)
        rows = heard.tolist()
        kinds, recorded = {Kind(row[0]) for row in rows}, [row[5] for row in rows]
        alike = len(kinds) == len({row[1] for row in rows}) == 1
        first = [kind for kind in (Kind.SOON, Kind.DRAFT, Kind.TRUNK) if kind in kinds]
        kind = first[0] if first else kinds.pop() if alike else Kind.IDLE
        wanted = [Size(*row[2:5]) for row in rows if row[0] == kind] or [Size()]
        form = wanted[0].form
        if any(size.form != form for size in wanted) or (form and not all(mask >> form & 1 for mask in recorded)):
            return kind, None
        if (form or kind is Kind.ALL) and recorded != self._all_recorded:
            self._all_recorded = recorded
            self._renew()
        return kind, Size(form, max(size.rows for size in wanted), max(size.pages for size in wanted))

    def _next(self, patience: float) -> _Job | None:
        with self._wanted:
            if self._job is None and patience:
                self._wanted.wait(patience)
            return self._job

    def _carry_out(self, job: _Job, size: Size) -> None:
        self._said = self._ran = time.monotonic()
        try:
            result = job.work(size)
        except UserError as error:  # all ranks have agreed on it
            self._drop(job)
            job.done.set_exception(error)
            return
        self._drop(job)
        job.done.set_result(result)

    def _drop(self, job: _Job) -> None:
        with self._wanted:
            if self._job is job:
                self._job = None
            self._ended = self._ended or job.kind is Kind.END  # at once: nobody may come in between
            self._wanted.notify_all()

    def _keep_in_touch(self) -> None:
        if time.monotonic() - self._said >= TICK_SECONDS:
            self._said = time.monotonic()
            self._tick()


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:200]
