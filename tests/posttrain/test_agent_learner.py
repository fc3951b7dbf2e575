"""The asynchronous learner: what it takes, what it forgets, and that one who dies anywhere ends as one who did not."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from glm5.model.glm5 import GLM5
from glm5.posttrain.agent import AgentLearner, IntakeConfig
from glm5.posttrain.learner import LearnConfig
from glm5.posttrain.losses import glm5_agentic
from glm5.posttrain.outcome import Outcome, State
from glm5.posttrain.record import Record
from glm5.posttrain.store import Store
from glm5.train.ranks import Ranks
from glm5.train.schedule import LearningRate
from glm5.utils.errors import ConfigError, UserError
from glm5.utils.runlog import read_metrics
from support.training import tiny

VOCAB, STEPS, UPDATES, GROUPS = 32, 5, 2, 2


def policy() -> GLM5:
    return tiny(vocab_size=VOCAB)


class Killed(BaseException):
    """As a kill: nothing of the learner runs after it."""


class Drawers:
    """Stands for engines and everyone who draws: with each push, what is delivered from then on (`arrive`)."""

    def __init__(self, arrive: Callable[[int], None] = lambda version: None) -> None:
        self.pushed: list[int] = []
        self.weights: dict[int, dict[str, Tensor]] = {}
        self.arrive = arrive

    def push(self, model: GLM5, version: int) -> None:
        self.pushed.append(version)
        now = {name: p.detach().clone() for name, p in model.named_parameters()}
        if version in self.weights:  # pushed again by a learner that began again: it must be the same
            assert all(torch.equal(now[name], p) for name, p in self.weights[version].items())
        self.weights[version] = now
        self.arrive(version)

    def begin(self) -> None:
        pass

    def check(self) -> None:
        pass

    def figures(self) -> dict[str, Any]:
        return {"engine/idle": 0.25}


def learner(
    directory: Path, store: Store | None, drawers: Drawers | None, ranks: Ranks | None = None, **changes: Any
) -> AgentLearner:
    config = LearnConfig(
        **{**dict(steps=STEPS, updates=UPDATES, lr=LearningRate(1e-3, 1e-3), save_every=2, row_tokens=64), **changes}
    )
    intake = IntakeConfig(GROUPS, max_staleness=2)
    return AgentLearner(config, intake, policy(), glm5_agentic(), directory, "data", VOCAB, store, drawers, ranks)


def run(of: AgentLearner) -> AgentLearner:
    of.run(resolved=of.config, title="test")
    return of


def drawn(rng: random.Random, version: int) -> Record:
    length = rng.randrange(6, 14)
    marks = [False, False, *(rng.random() < 0.7 for _ in range(length - 3)), True]
    return Record(
        [rng.randrange(VOCAB) for _ in marks],
        marks,
        [-3.0 - rng.random() if d else 0.0 for d in marks],
        [max(0, version - rng.randrange(2)) if d else -1 for d in marks],
    )


def deliver(store: Store, rng: random.Random, name: str, version: int, members: int = 4) -> None:
    """A group with failures, duplicates and equal rewards among others."""
    ids = [f"{name}/{i}" for i in range(members)]
    store.start(name, "sums", ids)
    for id in ids:
        outcome = rng.choice([*[Outcome.OK, Outcome.TASK_FAILED] * 4, Outcome.ENV_CRASH, Outcome.TIMEOUT])
        reward = None if outcome.leaves_group else float(outcome is Outcome.OK)
        store.deliver(id, outcome, reward, [drawn(rng, version) for _ in range(rng.choice((1, 1, 2)))])


def ledger(store: Store) -> list[tuple[str, State | None, int | None]]:
    return [(s.id, s.state, s.step) for s in store.samples()]


def filled(path: Path) -> tuple[Store, Callable[[int], None]]:
    """A store, and what arrives with each version: also a group that was started first and takes very long."""
    store = Store(path)
    store._db.execute("PRAGMA synchronous = OFF")  # no power is cut here
    slow = [f"slow/{i}" for i in range(3)]
    store.start("slow", "sums", slow)

    def arrive(version: int) -> None:
        if store.group(f"{version}-0"):
            return  # a learner that began again pushed this version before
        rng = random.Random(100 + version)  # noqa: S311
        for number in range(8):
            deliver(store, rng, f"{version}-{number}", version)
        if version == 3:
            for i, id in enumerate(slow):
                store.deliver(id, Outcome.OK, float(i), [drawn(rng, 2)])

    return store, arrive


def test_it_learns_from_what_is_there_and_every_sample_has_one_state(tmp_path: Path) -> None:
    store, arrive = filled(tmp_path / "t")
    drawers = Drawers(arrive)
    with store:
        of = run(learner(tmp_path / "run", store, drawers))
        assert drawers.pushed == list(range(STEPS + 1))
        assert of.updates == STEPS * UPDATES
        trained = store.samples(status=State.TRAINED)
        assert {s.step for s in trained} == set(range(1, of.updates + 1))
        for sample in trained:  # the bound, to the letter: of the weights that the update trained
            assert sample.step is not None
            assert sample.oldest is not None
            assert 0 <= (sample.step - 1) // UPDATES - sample.oldest <= 2
        counts = store.counts()
        assert all(counts.by_status[state] for state in (State.ZERO_VARIANCE, State.ENVIRONMENT_FAILED, State.STALE))
        records = read_metrics(tmp_path / "run")
        assert [r["step"] for r in records] == list(range(1, STEPS + 1))
        assert sum(r["samples/trained"] for r in records) == len(trained)
        for r in records:
            assert sum(r["staleness"].values()) == r["samples/trained"]
            assert {"reward", "is_masked_positive", "is_masked_negative", "idle/trainer", "queue/age_max"} <= r.keys()
            assert r["engine/idle"] == 0.25
        assert not of.optimizer.state, "forgotten after each push"
        before, after = drawers.weights[0], drawers.weights[STEPS]
        assert any(not torch.equal(before[name], p) for name, p in after.items())


class Whole(NamedTuple):
    """An undisturbed run: its ledger, the versions that it pushed, its weights."""

    ledger: list[tuple[str, State | None, int | None]]
    versions: set[int]
    weights: dict[str, Tensor]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    directory = tmp_path_factory.mktemp("whole")
    store, arrive = filled(directory / "t")
    with store:
        run(learner(directory / "run", store, drawers := Drawers(arrive)))
        return Whole(ledger(store), set(drawers.weights), drawers.weights[STEPS])


@pytest.mark.parametrize("place", ["plan", "update", "close", "push", "save"])
def test_killed_anywhere_it_makes_the_same_updates_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Whole, place: str
) -> None:
    store, arrive = filled(tmp_path / "cut.sqlite")
    again = Drawers(arrive)
    # After these calls, counted over all starts, the process is gone: also twice from one checkpoint.
    deaths = {"plan": {3, 8}, "update": {1, 7, 11}, "close": {6, 7, 12}, "push": {4, 7}, "save": {1, 2}}[place]
    owner, name = {
        "plan": (Store, "plan"),
        "update": (AgentLearner, "learn"),
        "close": (Store, "close_samples"),
        "push": (Drawers, "push"),
        "save": (AgentLearner, "save"),
    }[place]
    calls = 0
    real = getattr(owner, name)

    def dying(*given: Any, **named: Any) -> Any:
        nonlocal calls
        if place == "close" and "step" not in named:
            return real(*given, **named)
        calls += 1
        found = real(*given, **named)
        if calls in deaths:
            raise Killed
        return found

    monkeypatch.setattr(owner, name, dying)
    died = 0
    with store:
        while True:
            try:
                of = run(learner(tmp_path / "cut", store, again))
                break
            except Killed:
                died += 1
        assert died == len(deaths)
        assert ledger(store) == whole.ledger
    assert set(again.weights) == whole.versions
    for name, p in of.model.named_parameters():
        assert torch.equal(p, whole.weights[name]), name


def test_without_a_plan_it_would_be_another_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Whole
) -> None:
    """The fault that the plan is there for can be seen: the slow group is ready when the updates are made again."""

    def dying(self: Drawers, model: GLM5, version: int) -> None:
        push(self, model, version)
        if version == 3:
            raise Killed

    monkeypatch.setattr(Store, "plan", lambda *_: None)
    store, arrive = filled(tmp_path / "t")
    push = Drawers.push
    with store:
        with monkeypatch.context() as patch:
            patch.setattr(Drawers, "push", dying)
            with pytest.raises(Killed):
                run(learner(tmp_path / "run", store, Drawers(arrive)))
        run(learner(tmp_path / "run", store, Drawers(arrive)))
        assert ledger(store) != whole.ledger


def test_a_stop_while_it_waits_ends_it_at_once_and_keeps_all(tmp_path: Path) -> None:
    with Store(tmp_path / "t") as store:
        of = learner(tmp_path / "run", store, Drawers())
        asked = iter([False, False, True])
        assert of.step(lambda: next(asked)) is None
        assert of.updates == 0
        # A stop between two updates of a step ends the step: what was learned is pushed and counts.
        for group in range(GROUPS):
            ids = [f"{group}/{i}" for i in range(2)]
            store.start(f"g{group}", "sums", ids)
            for i, id in enumerate(ids):
                store.deliver(id, Outcome.OK, float(i), [drawn(random.Random(i), 0)])  # noqa: S311
        metrics = of.step(lambda: True)
        assert metrics is not None
        assert of.updates == 1


def test_who_waits_hears_that_nothing_will_come(tmp_path: Path) -> None:
    class Broken(Drawers):
        def check(self) -> None:
            raise Killed

    with Store(tmp_path / "t") as store, pytest.raises(Killed):
        learner(tmp_path / "run", store, Broken()).step(lambda: False)


def useless(tmp_path: Path, match: str, deliver: Callable[[Store, int], object]) -> None:
    """A learner whose patience ends with four groups of one rollout each, delivered so."""
    with Store(tmp_path / "t") as store:
        of = learner(tmp_path / "run", store, Drawers())
        of.intake = IntakeConfig(GROUPS, patience=3)
        for group in range(4):
            store.start(f"g{group}", "sums", [f"{group}"])
            deliver(store, group)
        with pytest.raises(UserError, match=match):
            of.step(lambda: False)


def test_rollouts_that_teach_nothing_for_long_are_an_error(tmp_path: Path) -> None:
    def failed(store: Store, group: int) -> None:
        store.deliver(f"{group}", Outcome.TASK_FAILED, 0.0, [drawn(random.Random(group), 0)])  # noqa: S311

    useless(tmp_path, "4 groups in a row teach nothing", failed)


def test_rollouts_that_always_crash_are_said_to(tmp_path: Path) -> None:
    def crashed(store: Store, group: int) -> None:
        store.deliver(f"{group}", Outcome.ENV_CRASH, None, [], "KeyError: 'city'")

    useless(tmp_path, r"4 environment_failed; 0 so: KeyError: 'city'.*mend the task", crashed)


def test_what_cannot_be_is_said() -> None:
    for wrong in (dict(groups=0), dict(max_staleness=-1), dict(patience=0)):
        with pytest.raises(ConfigError):
            IntakeConfig(**wrong)
