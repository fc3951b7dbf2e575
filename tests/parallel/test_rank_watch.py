"""A rank that raises, dies, stands still or runs something else: named on rank 0, in seconds, and nothing hangs."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from glm5.parallel import watch
from glm5.parallel.mesh import ParallelError, World
from glm5.parallel.watch import check_alike, watched
from support.ranks import exit_codes, run_ranks


def quick() -> None:
    watch.LOOK, watch.GRACE, watch.SILENCE = 0.1, 0.5, 3.0


def _run(world: World, directory: str, what: str) -> None:
    quick()
    with Path(directory, f"said.{world.rank}").open("w") as out, watched(world, Path(directory), 9.0, out):
        if world.rank == 1:
            if what == "raises":
                raise MemoryError("no room for 4 GiB")
            os._exit(9)
        time.sleep(60)  # as in a collective that waits for a rank which won't come


@pytest.mark.parametrize(
    ("what", "said", "code"),
    [("raises", "rank 1: MemoryError: no room for 4 GiB / mend: ", 0), ("dies", "rank 1: died without a word", 9)],
)
def test_a_lost_rank_ends_the_run(what: str, said: str, code: int, tmp_path: Path) -> None:
    assert exit_codes(3, "dp=3", _run, str(tmp_path), what, timeout=40) == [1, code, 1]
    assert f"error: {said}" in (tmp_path / "said.0").read_text()
    assert not (tmp_path / "said.2").read_text()


def _stand_still(world: World, directory: str) -> None:
    quick()
    with Path(directory, f"said.{world.rank}").open("w") as out, watched(world, Path(directory), 1.0, out) as watching:
        time.sleep(1.3)  # what is no step is not timed
        watching.at(7, "0 rows")
        if world.rank == 1:
            _read_a_broken_disk()
        else:
            watching.at(7, "1 forward and backward")
        world.barrier()


def _read_a_broken_disk() -> None:
    time.sleep(4)


def test_a_rank_that_stands_still_is_named_with_its_stack(tmp_path: Path) -> None:
    run_ranks(2, "dp=2", _stand_still, str(tmp_path))
    said = (tmp_path / "said.0").read_text()
    assert "warning: no progress for 1 s: rank 1 in step 7 at rows; stack traces in" in said
    stacks = (tmp_path / "rank-00001.txt").read_text()
    assert "step 7, 0 rows, for" in stacks
    assert "_read_a_broken_disk" in stacks
    assert "barrier" in (tmp_path / "rank-00000.txt").read_text()


def _differ(world: World, configuration: dict[str, Any]) -> str:
    own = dict(configuration)
    if world.rank == 1:
        own["lr"] = 2.0
    try:
        check_alike(world, own)
    except ParallelError as e:
        return str(e)
    return "alike"


def test_ranks_that_run_something_else_are_refused() -> None:
    for said in run_ranks(2, "dp=2", _differ, {"lr": 1.0, "steps": 3}):
        assert said.startswith("rank 1 differs in lr: 2.0, and 1.0 on rank 0. Start all ranks with one command")


def _slow(world: World) -> tuple[int, float]:
    if world.rank == 2:
        fast = watch._product_seconds
        watch._product_seconds = lambda device: 1e6 * fast(device)  # type: ignore[assignment]
    return watch.slowest(world)


def test_the_slowest_rank_is_known_to_all() -> None:
    found = run_ranks(3, "dp=3", _slow)
    assert {rank for rank, _ in found} == {2}
    assert all(pace > 100 for _, pace in found)
