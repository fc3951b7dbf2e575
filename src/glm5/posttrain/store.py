"""The trajectory store: what every sample was made of, and the ledger of what became of each. SQLite, one file.

A sample is started, delivered once, and closed with exactly one final state; the database itself refuses anything else,
so the states and the samples still open always add up to those started. Every method is one transaction: a process that
is killed anywhere leaves either all of it or nothing, and a full disk is one `FileError` after which the ledger is as
it was. Deliveries and closings may be repeated, since whoever sent one may have died before it heard the answer.

    started -> delivered -> trained | zero_variance | stale | group_dropped | environment_failed
       \\-> cancelled (also once delivered) | environment_failed | stale

A learner writes down which groups an update reads before it makes it, so that one that starts again from a checkpoint
makes the same updates. Several processes may hold the store open. Order is that of starting, never of the clock.
Source: the report, section 4.1. Read next: `record`, `intake`.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from glm5.posttrain.outcome import Outcome, State
from glm5.posttrain.record import Record
from glm5.utils.errors import DataError, FileError, UserError
from glm5.utils.files import make_directory

FORMAT = 2  # of the file; another one is refused
BUSY_S = 30.0  # how long to wait for another process's transaction

_FULL = ("the disk is full, or a limit on the file's size is reached", "Free some space and go on: nothing is lost")

_SCHEMA = """
CREATE TABLE samples (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    grp TEXT NOT NULL,
    task TEXT NOT NULL,
    started REAL NOT NULL,
    delivered REAL,
    outcome TEXT,
    reward REAL,
    detail TEXT NOT NULL DEFAULT '',
    oldest INTEGER,
    digest BLOB,
    repeats INTEGER NOT NULL DEFAULT 0,
    state TEXT CHECK (state IN ({states})),
    closed REAL,
    step INTEGER,
    CHECK ((state IS NULL) = (closed IS NULL)),
    CHECK ((delivered IS NULL) = (outcome IS NULL) AND (delivered IS NULL) = (digest IS NULL)),
    CHECK (delivered IS NOT NULL OR state IS NULL OR state IN ('cancelled', 'environment_failed', 'stale')),
    CHECK ((step IS NOT NULL) = (state IS NOT NULL AND state = 'trained'))
);
CREATE INDEX by_group ON samples (grp);
CREATE INDEX open_samples ON samples (number) WHERE state IS NULL;
CREATE TABLE records (
    number INTEGER NOT NULL REFERENCES samples,
    part INTEGER NOT NULL,
    ids BLOB NOT NULL, drawn BLOB NOT NULL, logprobs BLOB NOT NULL, versions BLOB NOT NULL,
    kept_sizes BLOB, kept_ids BLOB,
    rest TEXT NOT NULL,
    PRIMARY KEY (number, part)
) WITHOUT ROWID;
CREATE TABLE plans (
    grp TEXT PRIMARY KEY,
    step INTEGER NOT NULL,
    place INTEGER NOT NULL,
    UNIQUE (step, place)
) WITHOUT ROWID;
CREATE VIEW ledger AS
SELECT number, id, grp, task, started, delivered, outcome, reward, detail, oldest, repeats, state, closed, step,
    COALESCE(state, CASE WHEN delivered IS NULL THEN 'running' ELSE 'delivered' END) AS status
FROM samples;
CREATE TRIGGER no_sample_is_lost BEFORE DELETE ON samples
BEGIN SELECT RAISE(ABORT, 'a sample cannot be deleted'); END;
CREATE TRIGGER a_state_is_final BEFORE UPDATE OF state ON samples
WHEN OLD.state IS NOT NULL AND NEW.state IS NOT NULL AND OLD.state <> NEW.state
BEGIN SELECT RAISE(ABORT, 'a final state cannot change'); END;
""".format(states=", ".join(f"'{state}'" for state in State))


@dataclass(frozen=True)
class Sample:
    """A line of the ledger.

    Args:
        id, group, task: names. started, delivered, closed: seconds since 1970 by the clock of whoever wrote them.
        outcome, reward, detail: as delivered. oldest: version of the weights that drew its oldest id.
        repeats: deliveries after the first. state: the final one; None while it is open. step: that trained on it.
    """

    id: str
    group: str
    task: str
    started: float
    delivered: float | None
    outcome: Outcome | None
    reward: float | None
    detail: str
    oldest: int | None
    repeats: int
    state: State | None
    closed: float | None
    step: int | None

    @property
    def status(self) -> str:
        """Its final state, or `running` or `delivered`."""
        return self.state or ("running" if self.delivered is None else "delivered")

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "status": self.status}


STATUSES = ("running", "delivered", *State)


@dataclass(frozen=True)
class Counts:
    """How many samples are where. started: all. by_status: of `STATUSES`, zeros included."""

    started: int
    by_status: dict[str, int]

    @property
    def open(self) -> int:
        return self.by_status["running"] + self.by_status["delivered"]


@dataclass(frozen=True)
class Queue:
    """A task's samples that are open. running, delivered: how many. running_since, delivered_since: when the oldest of
    them was started, or came; None without any."""

    running: int
    delivered: int
    running_since: float | None
    delivered_since: float | None


class Store:
    """See the module. Any thread may call; the methods take turns.

    Args:
        path: the database's file, made if missing, with `-wal` and `-shm` beside it while it is open.
        read_only: refuse to write, and to make a file.
        clock: seconds since 1970; only shown, never compared.

    Raises:
        FileError: it cannot be opened, or is no store of this format.
    """

    def __init__(self, path: str | Path, *, read_only: bool = False, clock: Callable[[], float] = time.time) -> None:
        self.path, self._clock, self._lock = Path(path), clock, threading.RLock()
        self._writes = 0
        if read_only and not self.path.is_file():
            raise FileError(f"{path}: no such file", "Give the path of a run's trajectory store")
        if not read_only:
            make_directory(self.path.parent)
        with self._told("open"):
            mode = "ro" if read_only else "rwc"
            uri = f"{self.path.absolute().as_uri()}?mode={mode}"
            self._db = sqlite3.connect(
                uri, uri=True, timeout=BUSY_S, isolation_level=None, check_same_thread=False, cached_statements=64
            )
            try:
                self._open(read_only)
            except BaseException:
                self._db.close()
                raise

    def _open(self, read_only: bool) -> None:
        self._db.execute("PRAGMA foreign_keys = ON")
        if not read_only:
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")  # what was told as kept outlives a power cut
        found = self._db.execute("PRAGMA user_version").fetchone()[0]
        if found == 0 and not read_only:
            with self._writing():
                if self._db.execute("PRAGMA user_version").fetchone()[0] == 0:  # nobody was faster
                    if self._db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]:
                        raise FileError(f"{self.path} is another program's database", "Choose another file")
                    for statement in _statements(_SCHEMA):
                        self._db.execute(statement)
                    self._db.execute(f"PRAGMA user_version = {FORMAT}")
            found = FORMAT
        if found != FORMAT:
            raise FileError(f"{self.path}: format {found}, not {FORMAT}", "It is no trajectory store of this version")

    def close(self) -> None:
        """Give the file back. Nothing is written by it."""
        with self._lock:
            self._db.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _told(self, doing: str) -> Iterator[None]:
        """What SQLite cannot do becomes an error that says how to mend it."""
        try:
            yield
        except sqlite3.Error as error:
            name = getattr(error, "sqlite_errorname", None) or ""
            reason, mend = str(error), "Check the path and the disk"
            if name.startswith(("SQLITE_FULL", "SQLITE_IOERR_WRITE")):
                reason, mend = _FULL
            elif name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
                reason, mend = "another process has been writing for long", "Wait for it or stop it"
            elif name.startswith(("SQLITE_NOTADB", "SQLITE_CORRUPT")):
                reason, mend = "it is damaged, or no database", "Choose another file, or restore a copy"
            elif name.startswith("SQLITE_READONLY"):
                reason, mend = "it can only be read", "Change its permissions, or choose another path"
            raise FileError(f"cannot {doing} {self.path}: {reason}", mend) from error

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A transaction: all of the block, or nothing."""
        with self._lock, self._told("write to"):
            self._writes += 1
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    # -------------------------------------------------------------------------------------------------- the ledger
    def start(self, group: str, task: str, ids: Sequence[str]) -> list[str]:
        """Begin the samples of a group, all at once. The same call again changes nothing.

        Returns:
            those that were not there before.

        Raises:
            UserError: one is there as a sample of another group or task, or the group is there with other samples.
        """
        if len(set(ids)) != len(ids) or not ids:
            raise UserError(f"a group of {len(ids)} samples, {len(set(ids))} names", "Give each its own name")
        with self._writing():
            there = {id for (id,) in self._db.execute("SELECT id FROM samples WHERE grp = ?", (group,))}
            if there:
                if there != set(ids):
                    raise UserError(f"group {group!r} is there with other samples", "Give the new group another name")
                return []
            now = self._clock()
            for id in ids:
                if self._db.execute("SELECT 1 FROM samples WHERE id = ?", (id,)).fetchone():
                    raise UserError(f"sample {id!r} is there, in another group", "Give the new sample another name")
                self._db.execute(
                    "INSERT INTO samples (id, grp, task, started) VALUES (?, ?, ?, ?)", (id, group, task, now)
                )
        return list(ids)

    def deliver(
        self, id: str, outcome: Outcome, reward: float | None, records: Sequence[Record], detail: str = ""
    ) -> Literal["taken", "repeated", "other", "late"]:
        """Keep what a rollout gave. The first delivery counts; another one changes nothing but `repeats`.

        Args:
            reward: None where the outcome has none. records: the trajectories of the sample, at least one with a drawn
                id unless its outcome leaves the group.

        Returns:
            taken: it is kept now. repeated: it was, just the same. other: another one was. late: it is closed.

        Raises:
            UserError: there is no such sample. DataError: reward and outcome do not go together, or nothing was drawn.
        """
        _check_delivery(outcome, reward, records)
        blobs = [record.to_blobs() for record in records]
        digest = _digest(outcome, reward, blobs)
        oldest = min((o for record in records if (o := record.oldest) is not None), default=None)
        with self._writing():
            row = self._db.execute("SELECT number, digest, state FROM samples WHERE id = ?", (id,)).fetchone()
            if row is None:
                raise UserError(f"sample {id!r} was never started", "Start it first")
            number, before, state = row
            if before is not None or state is not None:
                self._db.execute("UPDATE samples SET repeats = repeats + 1 WHERE number = ?", (number,))
                return "repeated" if before == digest else "late" if state is not None else "other"
            self._db.execute(
                "UPDATE samples SET delivered = ?, outcome = ?, reward = ?, detail = ?, oldest = ?, digest = ? "
                "WHERE number = ?",
                (self._clock(), outcome, reward, detail, oldest, digest, number),
            )
            self._db.executemany(
                "INSERT INTO records VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [(number, part, *blob) for part, blob in enumerate(blobs)],
            )
        return "taken"

    def close_samples(self, states: dict[str, State], step: int | None = None) -> int:
        """Give samples their final states, all or none; one that has the same state already stays as it is.

        Args:
            step: number of the update that read those that are `trained`.

        Returns:
            how many were open.

        Raises:
            UserError: a sample is unknown, has another final state, or its state needs a delivery that did not come.
        """
        if State.TRAINED in states.values() and step is None:
            raise UserError("trained samples without a step", "Say which update read them")
        closed = 0
        with self._writing():
            for id, state in states.items():
                row = self._db.execute("SELECT state, delivered, step FROM samples WHERE id = ?", (id,)).fetchone()
                if row is None:
                    raise UserError(f"sample {id!r} was never started", "Start it first")
                trained_at = step if state is State.TRAINED else None
                if row[0] is not None:
                    if (row[0], row[2]) != (state, trained_at):
                        raise UserError(f"sample {id!r} is {row[0]} (step {row[2]}), not {state}", "A state is final")
                    continue
                if row[1] is None and state not in (State.CANCELLED, State.ENVIRONMENT_FAILED, State.STALE):
                    raise UserError(f"sample {id!r} cannot be {state}: it was not delivered", "Deliver it first")
                self._db.execute(
                    "UPDATE samples SET state = ?, closed = ?, step = ? WHERE id = ?",
                    (state, self._clock(), trained_at, id),
                )
                closed += 1
        return closed

    def plan(self, step: int, groups: Sequence[str]) -> None:
        """Write down, before an update is made, which groups it reads, in this order. Whoever makes it anew reads the
        same ones (`planned`), whatever was delivered meanwhile.

        Raises:
            UserError: the update has other groups, or another update has one of these.
        """
        with self._writing():
            there = self._plan(step)
            if there and there != list(groups):
                raise UserError(f"update {step} reads {len(there)} other groups", "Ask for them: `planned`")
            if not there:
                for place, name in enumerate(groups):
                    if self._db.execute("SELECT 1 FROM plans WHERE grp = ?", (name,)).fetchone():
                        raise UserError(f"group {name!r} belongs to another update", "A group is read once")
                    self._db.execute("INSERT INTO plans VALUES (?, ?, ?)", (name, step, place))

    def planned(self, step: int) -> list[list[Sample]]:
        """The groups that an update reads, in its order, each with all of its samples; none if nothing was planned."""
        return [self.group(name) for name in self._plan(step)]

    def _plan(self, step: int) -> list[str]:
        return [name for (name,) in self._rows("SELECT grp FROM plans WHERE step = ? ORDER BY place", (step,))]

    def rewind(self, step: int) -> int:
        """Open again what updates after `step` trained on: a learner that starts from its checkpoint of `step` has lost
        those updates. Their plans stay, so that it makes the same ones. Returns how many samples that are."""
        with self._writing():
            cursor = self._db.execute(
                "UPDATE samples SET state = NULL, closed = NULL, step = NULL WHERE state = 'trained' AND step > ?",
                (step,),
            )
            return cursor.rowcount

    # -------------------------------------------------------------------------------------------------- reading
    def counts(self, task: str | None = None) -> Counts:
        """How many samples are where; the statuses add up to those started."""
        with self._lock, self._told("read"):
            self._db.execute("BEGIN")  # both from one moment
            try:
                every = "SELECT COUNT(*) FROM samples WHERE :task IS NULL OR task = :task"
                grouped = "SELECT status, COUNT(*) FROM ledger WHERE :task IS NULL OR task = :task GROUP BY status"
                started: int = self._rows(every, {"task": task})[0][0]
                found: dict[str, int] = dict(self._rows(grouped, {"task": task}))
            finally:
                self._db.execute("COMMIT")
        counts = Counts(started, {status: found.get(status, 0) for status in STATUSES})
        if sum(counts.by_status.values()) != started:
            raise FileError(f"{self.path}: {started} samples, {found}", "It was written by something else")
        return counts

    def mark(self) -> tuple[int, int]:
        """Another one whenever something was written since, here or by another process. Whoever waits need not look as
        long as it is the same."""
        with self._lock:
            return self._writes, self._rows("PRAGMA data_version", ())[0][0]

    def queues(self) -> dict[str, Queue]:
        """What is open of each task that has anything open; as quick when millions are closed."""
        rows = self._rows(
            "SELECT task, SUM(delivered IS NULL), COUNT(delivered), "
            "MIN(CASE WHEN delivered IS NULL THEN started END), MIN(delivered) "
            "FROM samples WHERE state IS NULL GROUP BY task",
            (),
        )
        return {task: Queue(*queue) for task, *queue in rows}

    def groups(self) -> dict[str, int]:
        """How many groups each task has, closed ones too."""
        return dict(self._rows("SELECT task, COUNT(DISTINCT grp) FROM samples GROUP BY task", ()))

    def ready(self, limit: int, task: str | None = None) -> list[list[Sample]]:
        """Groups, oldest first, that have an open sample, wait for none that runs, and are in no update's plan: each
        with all of its samples. What is not asked for stays for the next time."""
        groups = self._rows(
            "SELECT grp FROM samples WHERE grp IN (SELECT grp FROM samples WHERE state IS NULL) "
            "AND grp NOT IN (SELECT grp FROM plans) AND (:task IS NULL OR task = :task) "
            "GROUP BY grp HAVING SUM(state IS NULL AND delivered IS NULL) = 0 ORDER BY MIN(number) LIMIT :limit",
            {"task": task, "limit": limit},
        )
        return [self.group(name) for (name,) in groups]

    def group(self, name: str) -> list[Sample]:
        """The samples of a group in the order of their start; empty if there is none."""
        return [_sample(row) for row in self._rows("SELECT * FROM ledger WHERE grp = ? ORDER BY number", (name,))]

    def sample(self, id: str) -> Sample:
        """One line of the ledger.

        Raises:
            UserError: there is none.
        """
        found = self._rows("SELECT * FROM ledger WHERE id = ?", (id,))
        if not found:
            raise UserError(f"there is no sample {id!r}", "List them with `glm5 trajectories`")
        return _sample(found[0])

    def samples(
        self,
        *,
        status: str | None = None,
        task: str | None = None,
        group: str | None = None,
        outcome: str | None = None,
        min_reward: float | None = None,
        max_reward: float | None = None,
        limit: int | None = None,
    ) -> list[Sample]:
        """The lines of the ledger that fit, in the order of their start."""
        found = self._rows(
            "SELECT * FROM ledger WHERE (:status IS NULL OR status = :status) AND (:task IS NULL OR task = :task) "
            "AND (:group IS NULL OR grp = :group) AND (:outcome IS NULL OR outcome = :outcome) "
            "AND (:least IS NULL OR reward >= :least) AND (:most IS NULL OR reward <= :most) "
            "ORDER BY number LIMIT :limit",
            {
                "status": status,
                "task": task,
                "group": group,
                "outcome": outcome,
                "least": min_reward,
                "most": max_reward,
                "limit": -1 if limit is None else limit,
            },
        )
        return [_sample(row) for row in found]

    def records(self, id: str) -> list[Record]:
        """The trajectories of a sample; empty before its delivery."""
        rows = self._rows(
            "SELECT ids, drawn, logprobs, versions, kept_sizes, kept_ids, rest FROM records "
            "WHERE number = (SELECT number FROM samples WHERE id = ?) ORDER BY part",
            (id,),
        )
        return [Record.from_blobs(*row) for row in rows]

    def _rows(self, query: str, given: Sequence[Any] | Mapping[str, Any]) -> list[Any]:
        with self._lock, self._told("read"):
            return self._db.execute(query, given).fetchall()


def _sample(row: Sequence[Any]) -> Sample:
    """A row of the view `ledger`."""
    values = list(row[1:-1])
    values[5] = None if values[5] is None else Outcome(values[5])
    values[10] = None if values[10] is None else State(values[10])
    return Sample(*values)


def _check_delivery(outcome: Outcome, reward: float | None, records: Sequence[Record]) -> None:
    if reward is not None and not -1e30 < reward < 1e30:
        raise DataError(f"reward={reward!r}", "A verifier that gives no number gave no verdict")
    if outcome.leaves_group:
        if reward is not None:
            raise DataError(f"reward={reward!r} of a sample that is {outcome}", "It has none: leave it out")
    elif reward is None:
        raise DataError(f"no reward of a sample that is {outcome}", "Give one, or say verifier_no_verdict")
    elif all(record.oldest is None for record in records):
        raise DataError(f"a sample that is {outcome} in which the policy drew nothing", "Say what failed instead")


def _digest(outcome: Outcome, reward: float | None, blobs: Sequence[Sequence[bytes | str | None]]) -> bytes:
    """Of what is learned from; timestamps and other notes may differ between two deliveries of one rollout."""
    digest = hashlib.blake2b(json.dumps([outcome, reward]).encode(), digest_size=16)
    for blob in blobs:
        for part in blob[:-1]:
            data = b"" if part is None else part if isinstance(part, bytes) else part.encode()
            digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def _statements(script: str) -> Iterator[str]:
    """Its statements one by one: `executescript` would end the transaction."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
