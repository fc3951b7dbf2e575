"""What the learner takes: staleness at consumption, failures, half-full groups, equal rewards; a learner that dies."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from glm5.posttrain.intake import settle, take
from glm5.posttrain.outcome import Outcome, State
from glm5.posttrain.record import Record
from glm5.posttrain.store import Sample, Store
from glm5.utils.errors import ConfigError


def sample(id: str, outcome: Outcome | None = Outcome.OK, reward: float | None = 1.0, oldest: int = 5) -> Sample:
    if outcome is not None and outcome.leaves_group:
        reward = None
    delivered = None if outcome is None else 0.0
    return Sample(id, "g", "t", 0.0, delivered, outcome, reward, "", oldest, 0, None, None, None)


def test_the_bound_of_staleness_is_kept_to_the_letter() -> None:
    group = [sample("a", reward=1.0, oldest=5), sample("b", reward=0.0, oldest=4), sample("c", reward=0.5, oldest=3)]
    assert settle(group, 7, 4).closed == {}
    assert settle(group, 8, 4).closed == {"c": State.STALE}
    both = settle(group, 9, 4)
    assert both.closed == {"a": State.GROUP_DROPPED, "b": State.STALE, "c": State.STALE}
    assert both.taken == []


def test_failures_leave_and_valid_samples_are_repeated() -> None:
    group = [
        sample("a", reward=1.0),
        sample("b", Outcome.ENV_CRASH),
        sample("c", Outcome.TIMEOUT, reward=0.0),
        sample("d", Outcome.TASK_FAILED, reward=0.2),
        sample("e", Outcome.ABORTED_STALE),
    ]
    made = settle(group, 5, 0)
    assert made.closed == {"b": State.ENVIRONMENT_FAILED, "e": State.STALE}
    (taken,) = made.taken
    assert [(t.sample.id, t.copies) for t in taken] == [("a", 2), ("c", 2), ("d", 1)]
    assert [t.advantage for t in taken] == pytest.approx([0.6, -0.4, -0.2]), "of each sample once"
    assert made.trained == dict.fromkeys("acd", State.TRAINED)


def test_half_is_not_more_than_half_and_equal_rewards_teach_nothing() -> None:
    half = [sample("a"), sample("b", reward=0.0), sample("c", Outcome.ENGINE_LOST), sample("d", Outcome.ENV_CRASH)]
    assert settle(half, 5, 0).closed["a"] == State.GROUP_DROPPED
    equal = [sample("a"), sample("b"), sample("c", Outcome.VERIFIER_NO_VERDICT)]
    assert settle(equal, 5, 0).closed == {
        "a": State.ZERO_VARIANCE, "b": State.ZERO_VARIANCE, "c": State.ENVIRONMENT_FAILED,
    }  # fmt: skip
    with pytest.raises(ConfigError, match="still runs"):
        settle([sample("a", None, None)], 5, 0)


def test_a_whole_life_ends_with_every_sample_in_one_state(tmp_path: Path) -> None:
    """Thousands of deliveries by seed, duplicates and failures among them, and a learner that dies between taking and
    closing, or after closing and before its checkpoint: the ledger is that of a learner that never died."""

    def life(path: Path, deaths: bool) -> tuple[dict[str, State | None], Counter[str]]:
        rng = random.Random(3)  # noqa: S311
        deaths_rng = random.Random(4)  # noqa: S311
        step = saved = version = 0
        with Store(path) as store:
            store._db.execute("PRAGMA synchronous = OFF")  # no power is cut here
            for number in range(250):
                ids = [f"s{number}-{i}" for i in range(4)]
                store.start(f"g{number}", "t", ids)
                for id in ids:
                    outcome = rng.choice([*[Outcome.OK, Outcome.TASK_FAILED] * 3, *Outcome])
                    reward = None if outcome.leaves_group else float(outcome is Outcome.OK)
                    record = Record([1, 2], [False, True], [0, -1.0], [-1, max(0, version - rng.randrange(4))])
                    for _ in range(rng.choice((1, 1, 2))):
                        store.deliver(id, outcome, reward, [record])
                if rng.random() < 0.05:
                    store.start(f"h{number}", "t", [f"h{number}"])
                    store.close_samples({f"h{number}": State.CANCELLED})
                if number % 5 == 4:
                    while (made := take(store, 2, version, 2)).taken:
                        if deaths and deaths_rng.random() < 0.3:
                            continue  # it dies before the update is told: the same are taken again
                        step += 1
                        store.close_samples(made.trained, step=step)
                        if deaths and deaths_rng.random() < 0.3:
                            store.rewind(saved)  # it dies before its checkpoint
                            step = saved
                            continue
                        saved = step
                    version += 1
            counts = store.counts()
            assert counts.open == 0
            assert sum(counts.by_status.values()) == counts.started
            return {s.id: s.state for s in store.samples()}, Counter(counts.by_status)

    plain, counts = life(tmp_path / "plain", deaths=False)
    assert len(plain) >= 1000
    assert all(counts[state] > 0 for state in State), counts
    assert life(tmp_path / "deaths", deaths=True)[0] == plain


def test_what_is_taken_again_is_the_same(tmp_path: Path) -> None:
    with Store(tmp_path / "t") as store:
        for g in range(3):
            store.start(f"g{g}", "t", [f"{g}a", f"{g}b"])
            for i, one in enumerate("ab"):
                store.deliver(f"{g}{one}", Outcome.OK, float(i), [Record([1, 2], [False, True], [0, -1.0], [-1, g])])
        first = take(store, 2, 2, 1)
        assert first.closed == {"0a": State.STALE, "0b": State.STALE}
        again = take(store, 2, 2, 1)
        assert again.taken == first.taken
        assert len(again.taken) == 2
        store.close_samples(again.trained, step=1)
        assert take(store, 2, 2, 1).taken == []


def test_a_group_that_is_ready_late_is_taken_once_and_moves_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older group is delivered between two looks of one call."""
    with Store(tmp_path / "t") as store:
        for g in range(3):
            store.start(f"g{g}", "t", [f"{g}a", f"{g}b"])

        def deliver(g: int) -> None:
            for i, one in enumerate("ab"):
                store.deliver(f"{g}{one}", Outcome.OK, float(i), [Record([1, 2], [False, True], [0, -1.0], [-1, 0])])

        deliver(1)
        deliver(2)
        ready = Store.ready

        def late(self: Store, limit: int) -> list[list[Sample]]:
            found = ready(self, limit)
            deliver(0)
            return found

        monkeypatch.setattr(Store, "ready", late)
        for _ in range(2):  # the second time by its plan
            made = take(store, 3, 0, 1, step=1)
            assert [group[0].sample.group for group in made.taken] == ["g1", "g0", "g2"]
