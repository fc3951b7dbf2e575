"""The store against a model of it in plain dictionaries; killed at random; on a full disk; by several processes."""

from __future__ import annotations

import random
import resource
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule
from store_victim import final, record_of

from glm5.posttrain.outcome import Outcome, State
from glm5.posttrain.record import Record
from glm5.posttrain.store import STATUSES, Queue, Store
from glm5.utils.errors import DataError, FileError, UserError

R = record_of(3)


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with Store(tmp_path / "t.sqlite") as opened:
        yield opened


def test_a_record_comes_back_to_the_bit(store: Store) -> None:
    kept = [None, None, [5, 6], [], None]
    one = Record([9, 2**31 - 1, 5, 7, 8], [False, False, True, True, False], [0, 0, -0.1, -1 / 3, 0],
                 [-1, -1, 4, 7, -1], kept, 0.7, [{"request": "r", "finish": "stop"}])  # fmt: skip
    store.start("g", "t", ["a"])
    assert store.deliver("a", Outcome.OK, 0.25, [one, R]) == "taken"
    first, second = store.records("a")
    assert first.to_json() == one.to_json()
    assert Record.from_json(second.to_json()) == second
    assert second.kept is None
    assert (store.sample("a").oldest, first.oldest) == (3, 4)
    made = first.trajectory(rollout=2)
    assert list(made.kept or ()) == kept
    assert made.temperature == 0.7


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"versions": [-1]}, "1 entries for 2"),
        ({"drawn": [True, True]}, "nothing comes before"),
        ({"logprobs": [0.0, float("nan")]}, "needs a log-probability"),
        ({"logprobs": [0.0, 0.5]}, "needs a log-probability"),
        ({"versions": [-1, -1]}, "needs its weights"),
        ({"ids": [1, -2]}, "no token id"),
    ],
)
def test_a_record_without_a_figure_is_refused(change: dict[str, Any], said: str) -> None:
    whole = {"ids": [1, 2], "drawn": [False, True], "logprobs": [0.0, -1.0], "versions": [-1, 3]}
    Record(**whole)
    with pytest.raises(DataError, match=said):
        Record(**{**whole, **change})


def test_deliveries_may_be_repeated_and_the_first_counts(store: Store) -> None:
    store.start("g", "t", ["a", "b"])
    assert store.start("g", "t", ["a", "b"]) == []
    assert store.deliver("a", Outcome.OK, 1.0, [R]) == "taken"
    assert store.deliver("a", Outcome.OK, 1.0, [R], detail="again") == "repeated"
    assert store.deliver("a", Outcome.OK, 0.0, [R]) == "other"
    store.close_samples({"b": State.CANCELLED})
    assert store.deliver("b", Outcome.OK, 1.0, [R]) == "late"
    assert (store.sample("a").reward, store.sample("a").repeats) == (1.0, 2)
    assert store.records("b") == []
    assert store.counts().by_status == {**dict.fromkeys(STATUSES, 0), "delivered": 1, "cancelled": 1}


def test_what_is_refused_changes_nothing(store: Store) -> None:
    store.start("g", "t", ["a", "b"])
    store.deliver("a", Outcome.OK, 1.0, [R])
    before = store.samples()
    for call, said in (
        (lambda: store.start("g", "t", ["a"]), "other samples"),
        (lambda: store.start("h", "t", ["c", "a"]), "in another group"),
        (lambda: store.start("h", "t", ["c", "c"]), "its own name"),
        (lambda: store.deliver("x", Outcome.OK, 1.0, [R]), "never started"),
        (lambda: store.deliver("b", Outcome.OK, None, [R]), "no reward"),
        (lambda: store.deliver("b", Outcome.ENV_CRASH, 0.0, [R]), "It has none"),
        (lambda: store.deliver("b", Outcome.OK, float("nan"), [R]), "no verdict"),
        (lambda: store.deliver("b", Outcome.OK, 1.0, []), "drew nothing"),
        (lambda: store.close_samples({"a": State.TRAINED, "b": State.TRAINED}, step=1), "was not delivered"),
        (lambda: store.close_samples({"a": State.TRAINED}), "without a step"),
        (lambda: store.close_samples({"a": State.STALE, "x": State.STALE}), "never started"),
    ):
        with pytest.raises(UserError, match=said):
            call()
        assert store.samples() == before
    assert store.deliver("b", Outcome.ENV_CRASH, None, []) == "taken"


def test_the_database_itself_keeps_the_ledger(store: Store) -> None:
    store.start("g", "t", ["a", "b"])
    store.close_samples({"a": State.CANCELLED})
    with sqlite3.connect(store.path) as other:
        for statement in (
            "DELETE FROM samples",
            "UPDATE samples SET state = 'stale' WHERE id = 'a'",
            "UPDATE samples SET state = 'lost', closed = 1 WHERE id = 'b'",
            "UPDATE samples SET state = 'trained', closed = 1, step = 1 WHERE id = 'b'",
        ):
            with pytest.raises(sqlite3.IntegrityError):
                other.execute(statement)
    other.close()


def test_a_mark_changes_with_whatever_is_written_and_with_nothing_else(tmp_path: Path) -> None:
    with Store(tmp_path / "t") as one, Store(tmp_path / "t") as other:
        marks = [one.mark()]
        for write in (
            lambda: one.start("g", "t", ["a", "b"]),
            lambda: other.start("h", "t", ["c"]),
            lambda: one.close_samples({"a": State.CANCELLED}),
            lambda: other.close_samples({"b": State.CANCELLED}),
        ):
            write()
            assert one.mark() not in marks
            marks.append(one.mark())
            one.ready(4)
            one.counts()
            other.samples()
            assert one.mark() == marks[-1]


def test_ten_ready_four_taken_six_remain(store: Store) -> None:
    for g in range(10):
        store.start(f"g{g}", "t", [f"{g}a", f"{g}b"])
        for one in "ab":
            store.deliver(f"{g}{one}", Outcome.OK, 1.0, [R])
    store.start("late", "t", ["x", "y"])
    store.deliver("x", Outcome.OK, 1.0, [R])  # y still runs
    taken = store.ready(4)
    assert [group[0].group for group in taken] == ["g0", "g1", "g2", "g3"]
    store.close_samples({s.id: State.TRAINED for group in taken for s in group}, step=1)
    assert [group[0].group for group in store.ready(100)] == [f"g{g}" for g in range(4, 10)]
    assert store.ready(100, task="other") == []


def test_an_update_has_the_groups_that_were_planned_for_it(store: Store) -> None:
    for g in range(4):
        store.start(f"g{g}", "t", [f"{g}a"])
        store.deliver(f"{g}a", Outcome.OK, 1.0, [R])
    assert store.planned(1) == []
    store.plan(1, ["g2", "g0"])
    store.plan(1, ["g2", "g0"])  # again
    assert [group[0].group for group in store.planned(1)] == ["g2", "g0"], "in its own order"
    assert [group[0].group for group in store.ready(9)] == ["g1", "g3"]
    with pytest.raises(UserError, match="update 1 reads 2 other groups"):
        store.plan(1, ["g2", "g1"])
    with pytest.raises(UserError, match="'g0' belongs to another update"):
        store.plan(2, ["g1", "g0"])
    assert store.planned(2) == [], "all or none"
    store.close_samples({"2a": State.TRAINED, "0a": State.TRAINED}, step=1)
    store.rewind(0)
    assert [group[0].status for group in store.planned(1)] == ["delivered", "delivered"]
    assert [group[0].group for group in store.ready(9)] == ["g1", "g3"], "what was planned stays so"


def test_what_is_open_of_each_task(tmp_path: Path) -> None:
    now = iter(range(100, 200))
    with Store(tmp_path / "t.sqlite", clock=lambda: float(next(now))) as store:
        assert (store.queues(), store.groups()) == ({}, {})
        store.start("g", "one", ["a", "b", "c"])  # at 100
        store.start("h", "two", ["d"])  # at 101
        store.start("i", "one", ["e"])
        store.deliver("b", Outcome.OK, 1.0, [record_of(1)])  # at 103
        store.deliver("a", Outcome.OK, 1.0, [record_of(1)])
        store.deliver("d", Outcome.ENV_CRASH, None, [])  # at 105
        assert store.queues() == {"one": Queue(2, 2, 100.0, 103.0), "two": Queue(0, 1, None, 105.0)}
        store.close_samples({"d": State.ENVIRONMENT_FAILED, "c": State.CANCELLED})
        assert store.queues() == {"one": Queue(1, 2, 102.0, 103.0)}
        assert store.groups() == {"one": 2, "two": 1}


def test_updates_that_a_learner_lost_are_opened_again(store: Store) -> None:
    for step in (1, 2, 3):
        store.start(f"g{step}", "t", [f"s{step}"])
        store.deliver(f"s{step}", Outcome.OK, 1.0, [R])
        store.close_samples({f"s{step}": State.TRAINED}, step=step)
    assert store.rewind(1) == 2
    assert [s.status for s in store.samples()] == ["trained", "delivered", "delivered"]
    assert [group[0].id for group in store.ready(9)] == ["s2", "s3"]
    store.close_samples({"s2": State.TRAINED}, step=2)
    assert store.close_samples({"s2": State.TRAINED}, step=2) == 0  # told twice
    with pytest.raises(UserError, match="final"):
        store.close_samples({"s2": State.TRAINED}, step=3)


def test_clocks_may_jump(tmp_path: Path) -> None:
    times = iter([100.0, 5.0, -3.0, 1e12, 7.0, 8.0])
    with Store(tmp_path / "t.sqlite", clock=lambda: next(times)) as store:
        for name in "cab":
            store.start(name, "t", [name])
            store.deliver(name, Outcome.OK, 1.0, [R])
        assert [s.id for s in store.samples()] == ["c", "a", "b"]
        assert [g[0].id for g in store.ready(3)] == ["c", "a", "b"]


def test_two_stores_and_many_threads(tmp_path: Path) -> None:
    path = tmp_path / "t.sqlite"
    stores = [Store(path), Store(path)]
    stores[0].start("g", "t", [f"s{n}" for n in range(20)])
    told: list[str] = []

    def deliver(store: Store) -> None:
        for n in range(20):
            told.append(store.deliver(f"s{n}", Outcome.OK, 1.0, [R]))

    threads = [threading.Thread(target=deliver, args=(stores[i % 2],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(told) == ["repeated"] * 60 + ["taken"] * 20
    assert sum(s.repeats for s in stores[1].samples()) == 60
    for store in stores:
        store.close()


# ------------------------------------------------------------------------------------------------- against a model
class Against(RuleBasedStateMachine):
    """Random calls in any order, reopening now and then, against dictionaries."""

    open_samples: Bundle[str] = Bundle("open_samples")

    def __init__(self) -> None:
        super().__init__()
        import tempfile

        self.directory = tempfile.TemporaryDirectory()
        self.path = Path(self.directory.name) / "t.sqlite"
        self.store = Store(self.path)
        self.status: dict[str, str] = {}
        self.step: dict[str, int] = {}
        self.group_of: dict[str, str] = {}

    def teardown(self) -> None:
        self.store.close()
        self.directory.cleanup()

    @rule(target=open_samples, size=st.integers(1, 3))
    def start(self, size: int) -> Any:
        group = f"g{len(self.status)}"
        ids = [f"s{len(self.status) + i}" for i in range(size)]
        assert self.store.start(group, "t", ids) == ids
        self.status |= dict.fromkeys(ids, "running")
        self.group_of |= dict.fromkeys(ids, group)
        return multiple(*ids)

    @rule(id=open_samples, outcome=st.sampled_from(Outcome), reward=st.sampled_from([0.0, 1.0]))
    def deliver(self, id: str, outcome: Outcome, reward: float) -> None:
        told = self.store.deliver(id, outcome, None if outcome.leaves_group else reward, [R])
        if self.status[id] == "running":
            assert told == "taken"
            self.status[id] = "delivered"
        else:
            assert told in ("repeated", "other", "late")

    @rule(id=open_samples, state=st.sampled_from(State), step=st.integers(1, 4))
    def close(self, id: str, state: State, step: int) -> None:
        was = self.status[id]
        early = was == "running" and state not in (State.CANCELLED, State.ENVIRONMENT_FAILED, State.STALE)
        same = was == state and (state != State.TRAINED or self.step[id] == step)
        if early or (was in set(State) and not same):
            with pytest.raises(UserError):
                self.store.close_samples({id: state}, step=step)
        else:
            assert self.store.close_samples({id: state}, step=step) == (was != state)
            self.status[id], self.step[id] = state, step

    @rule(step=st.integers(0, 4))
    def rewind(self, step: int) -> None:
        lost = [id for id, status in self.status.items() if status == State.TRAINED and self.step[id] > step]
        assert self.store.rewind(step) == len(lost)
        self.status |= dict.fromkeys(lost, "delivered")

    @rule(id=consumes(open_samples))
    def forget(self, id: str) -> None:
        """So that later rules meet other samples too."""

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = Store(self.path)

    @invariant()
    def adds_up(self) -> None:
        counts = self.store.counts()
        assert counts.started == len(self.status) == sum(counts.by_status.values())
        assert {s.id: s.status for s in self.store.samples()} == self.status
        waiting = {self.group_of[id] for id, status in self.status.items() if status == "running"}
        expected = {self.group_of[id] for id, status in self.status.items() if status == "delivered"} - waiting
        assert {group[0].group for group in self.store.ready(1000)} == expected


Against.TestCase.settings = settings(max_examples=12, stateful_step_count=25, deadline=None)
TestAgainst = Against.TestCase


# ------------------------------------------------------------------------------------------------- killed
def victim(path: Path, seed: int, groups: int) -> subprocess.Popen[str]:
    script = Path(__file__).with_name("store_victim.py")
    arguments = [sys.executable, str(script), str(path), str(seed), str(groups)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)


def test_killed_at_any_time(tmp_path: Path) -> None:
    """What was told as kept is kept, nothing is there in part, and going on gives the undisturbed ledger."""
    path, groups, killed = tmp_path / "t.sqlite", 60, 0
    rng = random.Random(0)  # noqa: S311
    for attempt in range(5):
        process = victim(path, attempt, groups)
        assert process.stdout is not None
        told = process.stdout.readline()  # it is at work
        time.sleep(rng.uniform(0, 0.1))
        process.send_signal(signal.SIGKILL)
        told += process.stdout.read()
        killed += process.wait() == -signal.SIGKILL
        with Store(path) as store:
            assert store._rows("PRAGMA integrity_check", ()) == [("ok",)]
            status = {s.id: s.status for s in store.samples()}
            assert len(status) % 3 == 0, "a group is started whole"
            assert sum(store.counts().by_status.values()) == len(status)
            for kind, name in (line.split() for line in told.splitlines() if line.count(" ") == 1):
                if kind == "deliver":
                    assert status[name] != "running"
                elif kind == "close":
                    assert all(s.state is not None for s in store.group(name))
            for id, s in status.items():
                found = store.records(id)
                assert [r.to_json() for r in found] == ([] if s == "running" else [record_of(int(id[1:])).to_json()])
    assert killed >= 3, "most were at work when they were killed"
    last = victim(path, 9, groups)
    last.communicate(timeout=60)
    assert last.returncode == 0
    with Store(path) as store:
        assert {s.id: s.state for s in store.samples()} == {f"s{n}": final(n)[1] for n in range(3 * groups)}


# ------------------------------------------------------------------------------------------------- full, damaged
def test_a_full_disk_is_one_error_and_loses_nothing(store: Store) -> None:
    store.start("g", "t", [f"s{n}" for n in range(100)])
    pages = store._rows("PRAGMA page_count", ())[0][0]
    store._db.execute(f"PRAGMA max_page_count = {pages + 64}")
    big = Record(range(2000), [False] + [True] * 1999, [-1.0] * 2000, [1] * 2000)

    def fill() -> None:
        for n in range(100):
            store.deliver(f"s{n}", Outcome.OK, 1.0, [big])

    with pytest.raises(FileError, match="the disk is full"):
        fill()
    kept = store.counts().by_status["delivered"]
    assert 0 < kept < 99
    assert store.records(f"s{kept}") == []
    store._db.execute("PRAGMA max_page_count = 100000")  # space is made
    assert store.deliver(f"s{kept}", Outcome.OK, 1.0, [big]) == "taken"
    assert store.records(f"s{kept}")[0].ids == list(range(2000))


def test_a_limit_of_the_system_is_one_error_and_loses_nothing(tmp_path: Path) -> None:
    """The operating system itself refuses the write, in a process of its own."""
    path = tmp_path / "t.sqlite"
    script = (
        "import resource, sys; from glm5.posttrain.store import Store; from store_victim import record_of\n"
        "from glm5.posttrain.outcome import Outcome; from glm5.utils.errors import FileError\n"
        "store = Store(sys.argv[1]); store.start('g', 't', [f's{n}' for n in range(400)])\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, resource.RLIM_INFINITY)); n = 0\n"
        "try:\n"
        "    for n in range(400): store.deliver(f's{n}', Outcome.OK, 1.0, [record_of(n)]); print(n, flush=True)\n"
        "except FileError as e: print(f'{n} {e}', flush=True)\n"
        "assert store.counts().by_status['delivered'] == n, store.counts()\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)\n"
        "store.deliver(f's{n}', Outcome.OK, 1.0, [record_of(n)])\n"
    )
    here = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {here!r})\n{script}", str(path)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert "the disk is full, or a limit on the file's size" in last
    with Store(path) as store:
        assert store.counts().by_status["delivered"] == int(last.split()[0]) + 1
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


def test_files_that_are_no_store(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no database " * 100)
    with pytest.raises(FileError, match="damaged, or no database"):
        Store(tmp_path / "text")
    with pytest.raises(FileError, match="no such file"):
        Store(tmp_path / "none", read_only=True)
    other = sqlite3.connect(tmp_path / "other")
    other.execute("CREATE TABLE x (y)")
    other.close()
    with pytest.raises(FileError, match="another program's"):
        Store(tmp_path / "other")
    Store(tmp_path / "t").close()
    with Store(tmp_path / "t", read_only=True) as store, pytest.raises(FileError, match="only be read"):
        store.start("g", "t", ["a"])
