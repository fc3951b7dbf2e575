"""The router: bounds, who moves when engines come and go, versions, heartbeats; prefixes that stay warm, counted."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from glm5.serve.client import Unavailable
from glm5.serve.gateway.router import Lease, Router
from glm5.utils.errors import ConfigError


def fleet(count: int, **options: float) -> Router:
    router = Router("1", **options)
    for i in range(count):
        router.beat(f"e{i}", "1", 0.0)
    return router


def homes(router: Router, rollouts: int) -> dict[str, str]:
    """Where each goes while nothing else runs."""
    found = {}
    for i in range(rollouts):
        lease = router.route(f"r{i}", 0.0)
        router.release(lease)
        found[f"r{i}"] = lease.engine
    return found


def test_a_rollout_stays_and_another_process_agrees() -> None:
    router = fleet(8)
    first = homes(router, 300)
    assert homes(router, 300) == first
    assert router.moves == 0
    assert homes(fleet(8), 300) == first
    counts = [list(first.values()).count(f"e{i}") for i in range(8)]
    assert min(counts) > 10, "the ring is even enough"


@given(st.integers(2, 9), st.integers(0, 8))
@settings(max_examples=8, deadline=None)
def test_losing_an_engine_moves_only_its_rollouts(count: int, gone: int) -> None:
    gone %= count
    before, router = homes(fleet(count), 120), fleet(count)
    homes(router, 120)
    router.remove(f"e{gone}")
    after = homes(router, 120)
    assert all(after[r] == engine for r, engine in before.items() if engine != f"e{gone}")
    assert router.moves == list(before.values()).count(f"e{gone}")
    router.beat(f"e{gone}", "1", 0.0)
    assert homes(router, 120) == after, "nobody leaves a warm prefix because an engine has come"


@given(st.integers(1, 6), st.lists(st.integers(0, 9), max_size=60), st.sampled_from([1.01, 1.25, 2.0]))
@settings(max_examples=30, deadline=None)
def test_loads_are_bounded(count: int, rollouts: list[int], slack: float) -> None:
    router = fleet(count, slack=slack)
    for held, rollout in enumerate(rollouts):
        lease = router.route(f"r{rollout}", 0.0)
        assert router.engines[lease.engine].load <= math.ceil(slack * (held + 1) / count)


def test_one_hot_rollout_spills_over() -> None:
    router = fleet(4)
    for _ in range(40):
        router.route("hot", 0.0)
    assert max(engine.load for engine in router.engines.values()) <= math.ceil(1.25 * 40 / 4)
    single = fleet(4, slack=math.inf)
    assert len({single.route("hot", 0.0).engine for _ in range(40)}) == 1


# ------------------------------------------------------------------------------------------------- health
def test_rollouts_that_nobody_asks_for_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glm5.serve.gateway.router.HOMES", 5)
    router = fleet(2)
    for i in range(50):
        for rollout in ("busy", f"r{i}"):
            router.release(router.route(rollout, 0.0))
    assert len(router._homes) == 5
    assert ("decode", "busy") in router._homes


def test_silent_engines_leave_and_come_back_at_the_current_version() -> None:
    router = fleet(2)
    router.beat("e0", "1", 8.0)
    assert [e.name for e in router.routable(9.0)] == ["e0", "e1"]
    assert [e.name for e in router.routable(11.0)] == ["e0"]
    router.beat("e0", "1", 15.0)
    router.beat("e1", "base", 15.0)  # recovered, with the weights that it was started with
    assert [e.name for e in router.routable(15.0)] == ["e0"]
    router.beat("e1", "1", 16.0)
    assert [e.name for e in router.routable(16.0)] == ["e0", "e1"]


def test_a_quick_restart_is_noticed() -> None:
    router = Router("7")
    router.beat("e", "7", 0.0, boot="a")
    lease = router.route("r", 0.0)
    router.beat("e", "0", 1.0, boot="b")
    with pytest.raises(Unavailable, match="weights 7"):
        router.route("r", 1.0)
    router.beat("e", "7", 2.0, boot="b")
    assert router.engines["e"].load == 0
    router.release(lease)  # of the process before
    assert router.engines["e"].load == 0
    assert router.route("r", 2.0).moved, "its prefix is gone"


def test_a_push_keeps_all_at_work_and_ends_with_those_that_confirmed() -> None:
    router = fleet(3)
    router.beat("e0", "2", 1.0)
    assert len(router.routable(1.0)) == 3
    router.beat("e1", "2", 2.0)
    assert router.set_version("2") == ["e2"]
    assert {e.name for e in router.routable(2.0)} == {"e0", "e1"}
    router.beat("e2", "1", 3.0)
    assert len(router.routable(3.0)) == 2
    router.beat("e2", "2", 4.0)
    assert len(router.routable(4.0)) == 3


def test_a_failed_request_goes_elsewhere() -> None:
    router = fleet(3)
    lease = router.route("r", 0.0)
    router.release(lease)
    router.lost(lease.engine)
    again = router.route("r", 0.0)
    assert again.moved
    assert again.engine != lease.engine
    assert router.route("x", 0.0, avoid={again.engine}).engine not in {lease.engine, again.engine}
    with pytest.raises(Unavailable):
        router.route("r", 0.0, avoid={"e0", "e1", "e2"})
    assert lease.engine in router.set_version("1"), "it must beat first"


def test_pools_and_options() -> None:
    router = Router("1")
    router.beat("p", "1", 0.0, pool="prefill")
    router.beat("d", "1", 0.0)
    assert router.route("r", 0.0, pool="prefill").engine == "p"
    assert router.route("r", 0.0).engine == "d"
    router.forget("r")
    assert not router._homes
    for options in ({"slack": 1.0}, {"silent_s": 0.0}):
        with pytest.raises(ConfigError):
            Router("1", **options)


class Life(RuleBasedStateMachine):
    """Engines come, fall silent, restart and change weights while rollouts go on."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.now, self.version = Router("0"), 0.0, 0
        self.heard: dict[str, float] = {}
        self.held: list[Lease] = []

    @rule(engine=st.integers(0, 3), version=st.integers(0, 3), boot=st.integers(0, 1))
    def beat(self, engine: int, version: int, boot: int) -> None:
        self.router.beat(f"e{engine}", str(version), self.now, boot=str(boot))
        self.heard[f"e{engine}"] = self.now

    @rule(seconds=st.floats(0, 15))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(version=st.integers(0, 3))
    def push(self, version: int) -> None:
        late = self.router.set_version(str(version))
        assert all(e.version == str(version) for e in self.router.engines.values() if e.name not in late)

    @rule(rollout=st.integers(0, 9))
    def ask(self, rollout: int) -> None:
        try:
            lease = self.router.route(f"r{rollout}", self.now)
        except Unavailable:
            assert not self.router.routable(self.now)
            return
        assert self.now - self.heard[lease.engine] <= self.router.silent_s
        self.held.append(lease)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.router.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @precondition(lambda self: self.held)
    @rule()
    def fail(self) -> None:
        name = self.held[-1].engine
        self.router.lost(name)
        assert name not in [e.name for e in self.router.routable(self.now)]

    @invariant()
    def loads_are_what_is_held(self) -> None:
        for engine in self.router.engines.values():
            mine = [x for x in self.held if (x.engine, x.life) == (engine.name, engine.life)]
            assert engine.load == len(mine)


Life.TestCase.settings = settings(max_examples=15, stateful_step_count=30, deadline=None)
TestLife = Life.TestCase


# ------------------------------------------------------------------------------------------------- warm prefixes
def hits(choose: Callable[[str], str], done: Callable[[str], None]) -> float:
    """Share of 2,000 turns that meet the engine that had the rollout's last one: 200 rollouts of 10 turns, 40 at once,
    of uneven length."""
    rng = random.Random(0)  # noqa: S311
    last: dict[str, str] = {}
    left = {f"r{i}": 10 for i in range(200)}
    running: list[str] = []
    warm = 0
    while any(left.values()) or running:
        idle = [r for r, turns in left.items() if turns and r not in running][: 40 - len(running)]
        for rollout in idle:
            engine = choose(rollout)
            warm += last.get(rollout) == engine
            last[rollout] = engine
            left[rollout] -= 1
            running.append(rollout)
        for rollout in rng.sample(running, max(1, len(running) // 3)):
            running.remove(rollout)
            done(rollout)
    return warm / 2000


def test_prefixes_stay_warm() -> None:
    router, held = fleet(8), {}

    def choose(rollout: str) -> str:
        held[rollout] = router.route(rollout, 0.0)
        return held[rollout].engine

    ours = hits(choose, lambda rollout: router.release(held.pop(rollout)))
    rng, turn = random.Random(1), iter(range(10**6))  # noqa: S311
    at_random = hits(lambda rollout: f"e{rng.randrange(8)}", lambda rollout: None)
    in_turn = hits(lambda rollout: f"e{next(turn) % 8}", lambda rollout: None)
    assert ours > 0.75  # 0.9 is the most: first turns find nothing
    assert max(at_random, in_turn) < 0.2
