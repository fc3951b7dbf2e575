"""A rank that raises, dies, stands still or runs something else: named on rank 0, in seconds, and nothing hangs."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from glm5.parallel import watch
from glm5.parallel.mesh import ParallelError, World
from glm5.parallel.watch import check_alike, watched
from glm5.train.together import check_weights
from glm5.utils.errors import FileError
from support.ranks import exit_codes, run_ranks
from support.training import tiny


def quick(grace: float = 0.5) -> None:
    watch.LOOK, watch.GRACE, watch.SILENCE, watch.PATIENCE = 0.1, grace, 6.0, 1


def _run(world: World, directory: str, what: str, whose: int) -> None:
    quick()
    with Path(directory, f"said.{world.rank}").open("w") as out, watched(world, Path(directory), 9.0, out):
        if world.rank == whose:
            if what == "raises":
                raise KeyError("no such tensor")
            if what == "refuses":
                raise FileError("no room for the checkpoint", "Make some")
            if what == "runs out of memory":
                raise MemoryError("no room for 4 GiB")
            os._exit(9)
        time.sleep(60)  # as in a collective that waits for a rank which won't come


@pytest.mark.parametrize(
    ("what", "whose", "said", "codes"),
    [
        ("raises", 1, "rank 1: KeyError: 'no such tensor' / mend: See to that rank", [2, 0, 2]),
        ("refuses", 1, "rank 1: no room for the checkpoint / mend: Make some", [2, 0, 2]),
        ("runs out of memory", 2, "rank 2: out of memory: no room for 4 GiB / mend: Use a smaller model", [2, 2, 0]),
        ("dies", 1, "rank 1: died without a word", [2, 9, 2]),
        ("dies", 0, "rank 0: died without a word", [9, 2, 2]),
    ],
)
def test_a_lost_rank_ends_the_run(what: str, whose: int, said: str, codes: list[int], tmp_path: Path) -> None:
    """Each rank's status: 2 says that the error was said, 0 that it was raised (to whoever tests)."""
    assert exit_codes(3, "dp=3", _run, str(tmp_path), what, whose, timeout=60) == codes
    told = [(tmp_path / f"said.{rank}").read_text() for rank in range(3)]
    assert told[1 if whose == 0 else 0].startswith(f"error: {said}")
    assert sum(map(bool, told)) == 1


def _in_a_collective(world: World, directory: str, what: str) -> str:
    """What a rank raises that waits for rank 2 in a collective."""
    quick(grace=5.0)  # within which all that are left find the loss
    try:
        with Path(directory, f"said.{world.rank}").open("w") as out, watched(world, Path(directory), 600.0, out) as w:
            world.barrier()
            w.at(7, "1 forward and backward")
            if world.rank == 2:
                if what == "dies":
                    os._exit(9)
                _read_a_broken_disk(16.0)
            world.barrier()
    except ParallelError as e:
        return str(e)
    return "nothing"


def _with_a_time_out(world: World, directory: str, what: str) -> str:
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=8), dist.group.WORLD)
    return _in_a_collective(world, directory, what)


def test_a_rank_that_others_wait_for_in_vain_is_named(tmp_path: Path) -> None:
    said = run_ranks(3, "dp=3", _with_a_time_out, str(tmp_path), "stands still")
    for text in said[:2]:
        assert text.startswith("rank 2 in step 7 at forward and backward, in _read_a_broken_disk (test_rank_watch.py:")
        assert "the others waited in vain" in text


def _tell(world: World, directory: str) -> None:
    Path(directory, f"raised.{world.rank}").write_text(_in_a_collective(world, directory, "dies"))


def test_a_rank_that_dies_in_a_collective_is_named(tmp_path: Path) -> None:
    assert exit_codes(3, "dp=3", _tell, str(tmp_path), timeout=60)[2] == 9
    assert (tmp_path / "raised.0").read_text().startswith("rank 2: died without a word")


def _stand_still(world: World, directory: str) -> None:
    quick()
    with Path(directory, f"said.{world.rank}").open("w") as out, watched(world, Path(directory), 1.0, out) as watching:
        time.sleep(1.3)  # what is no step is not timed
        watching.at(7, "0 rows")
        if world.rank == 1:
            _read_a_broken_disk(4.0)
        else:
            watching.at(7, "1 forward and backward")
        world.barrier()


def _read_a_broken_disk(seconds: float) -> None:
    time.sleep(seconds)


def test_a_rank_that_stands_still_is_named_with_its_stack(tmp_path: Path) -> None:
    run_ranks(2, "dp=2", _stand_still, str(tmp_path))
    said = (tmp_path / "said.0").read_text()
    assert "no progress for 1 s: rank 1 in step 7 at rows, in _read_a_broken_disk (test_rank_watch.py:" in said
    stacks = (tmp_path / "rank-00001.txt").read_text()
    assert "step 7, 0 rows, for" in stacks
    assert "_read_a_broken_disk" in stacks
    assert "barrier" in (tmp_path / "rank-00000.txt").read_text()


class _First:
    """The first of three ranks, the others of which are files."""

    rank, size, main = 0, 3, True

    def barrier(self) -> None: ...


def test_a_rank_that_waits_for_one_that_gets_on_does_not_stand_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "LOOK", 0.02)
    watching = watch.Watch(_First(), tmp_path, 1e9, io.StringIO())  # type: ignore[arg-type]
    try:
        # A hang that was told is not told again in the next phase.
        watching.at(7, "0 rows")
        watching._write("hang", 1)
        stacks = tmp_path / "rank-00000.txt"
        _until(stacks.exists)
        watching.at(8, "0 rows")
        beat = watching._all_pulses()[0][0]
        _until(lambda: watching._all_pulses()[0][0] > beat + 12)
        assert stacks.read_text().count("0 rows, for") == 1
        watching._write("hang", 2)  # another one is
        _until(lambda: stacks.read_text().count("0 rows, for") == 2)
    finally:
        watching.close()
    watching.hang_seconds = 300.0
    for ages, stands in (((400, 301, 500), True), ((400, 2, 500), False), ((400, 500, 299), False)):
        for rank, age in enumerate(ages):
            watching._write(f"rank-{rank:05d}", [1, 7, "0 rollouts", age, False, "draw"])
        assert watching._stands(400) == stands
    assert not watching._stands(299)
    watching.beat()
    assert time.monotonic() - watching._since < 60
    watching.at(-1, "4 end")
    assert not watching._stands(400)


def _until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


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


def _other_weights(world: World) -> str:
    model = tiny()
    if world.rank == 1:
        with torch.no_grad():
            model.model.layers[1].mlp.experts.down_proj[3, 2, 1] += 1e-3
    try:
        check_weights(model, world)
    except ParallelError as e:
        return str(e)
    return "alike"


def test_ranks_that_read_other_weights_are_refused() -> None:
    for said in run_ranks(2, "dp=2", _other_weights):
        assert said.startswith(
            "rank 1 read other weights than rank 0: 1 tensors differ, such as model.layers.1.mlp.expe"
        )
