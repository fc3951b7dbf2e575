"""Exposed communication: each wait once, nothing left behind; and the bubble that measured times would make."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from glm5.parallel import waits
from glm5.parallel.collectives import all_gather
from glm5.parallel.compat import waiting
from glm5.parallel.mesh import Mesh, open_world
from glm5.parallel.pipeline import clock
from glm5.parallel.pipeline.clock import Clock, played
from glm5.parallel.pipeline.schedule import orders
from glm5.parallel.pipeline.simulate import Times, simulate
from glm5.parallel.waits import COLLECTIVES, Waits


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the clock is a second after the one before, so that a span takes as long as looks lie in it."""
    ticks = itertools.count()
    for module in (waits, clock):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))


def test_each_wait_counts_once(ticking: None) -> None:
    plain = [getattr(dist, name) for name in COLLECTIVES] + [getattr(owner, name) for owner, name in waiting()]
    with open_world(Mesh(), "cpu") as world:
        x = torch.ones(4)
        with Waits(world.device) as found:
            dist.all_reduce(x)
            assert found.seconds() == 1
            work = dist.all_to_all_single(torch.empty(4), x, async_op=True)
            assert found.seconds() == 2  # that it is begun
            assert isinstance(work, dist.Work)  # FSDP of torch 2.11 leaves others unwaited for, and reads too early
            torch.mm(torch.ones(8, 8), torch.ones(8, 8))
            work.wait()
            assert found.seconds() == 3
            assert work.is_completed()
            all_gather(x, world.group("world"))
            assert found.seconds() == 4
        dist.all_reduce(x)
        assert found.seconds() == 4
    assert plain == [getattr(dist, name) for name in COLLECTIVES] + [getattr(owner, name) for owner, name in waiting()]


def test_a_wait_inside_another_counts_once(ticking: None, monkeypatch: pytest.MonkeyPatch) -> None:
    class Unit:
        def wait(self) -> None:
            dist.all_reduce(torch.ones(1))

    monkeypatch.setattr(waits, "waiting", lambda: [(Unit, "wait")])
    with open_world(Mesh(), "cpu") as world, Waits(world.device) as found:
        Unit().wait()
        assert found.seconds() == 1


def test_what_fsdp_waits_for_counts(ticking: None) -> None:
    with open_world(Mesh(), "cpu") as world:
        model = nn.Linear(4, 4)
        fully_shard(model, mesh=world.dense["shard"])
        with Waits(world.device) as found:
            model(torch.ones(2, 4)).sum().backward()
        assert found.seconds() >= 2  # gathering before, and reducing at the end


def test_an_error_leaves_nothing_behind() -> None:
    plain = dist.all_reduce
    with pytest.raises(ZeroDivisionError), Waits(torch.device("cpu")):
        raise ZeroDivisionError
    assert dist.all_reduce is plain


def test_busy_time_and_span(ticking: None) -> None:
    of = Clock(torch.device("cpu"))
    with of.timing("step", -1):
        for _ in range(2):
            with of.timing("F", 0):
                pass
        with of.timing("B", 1):
            pass
    of.read()
    assert (of.busy, of.span) == (3, 7)  # two looks for each of three computations, and the last of the step
    assert of.means == {("F", 0): 1, ("B", 1): 1}


@pytest.mark.parametrize("name", ["1f1b", "zero-bubble"])
def test_the_bubble_of_measured_times_is_the_simulated_one(name: str) -> None:
    """Means by kind, as a clock has them, of a backward pass in one or in two."""
    times = [Times(1.0, 1.5, 0.5), Times(1.2, 1.0, 1.0)]
    order = orders(name, 2, 2, 6)
    means: dict[tuple[str, int], float] = {}
    for stage, t in enumerate(times):
        split = {("I", stage): t.inputs, ("W", stage): t.weights}
        means |= {("F", stage): t.forward, **(split if name == "zero-bubble" else {("B", stage): t.backward})}
    assert played(order, means, 2) == pytest.approx(simulate(order, times).bubble)
    assert 0 < played(order, means, 2) < 0.5
