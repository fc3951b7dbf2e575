"""Several processes on gloo, for tests of `glm5.parallel`.

    results = run_ranks(4, "dp=2,tp=2", check, argument)       codes = exit_codes(...)

calls `check(world, argument)` on every rank and returns what they return, in rank order. An exception on any rank is
raised here with its traceback, and nothing outlives its time-out. Processes are forked from a clean server that has
imported torch already, so that a launch costs about a second; still, one launch should carry many checks.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from glm5.parallel.mesh import Mesh, World, open_world

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch.distributed.fsdp", "glm5.train.loop", "glm5.parallel.mesh"])


def run_ranks(ranks: int, mesh: str | Mesh, check: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
    """`check(world, *args)` on so many ranks, results in rank order; `check` is a function of a module.

    Raises:
        AssertionError: a rank raised, died, or did not end in time; the message has its traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = _start(ranks, mesh, check, args, timeout, folder)
        try:
            return _collect(pipes, timeout)
        finally:
            _end(processes, 5)


def exit_codes(ranks: int, mesh: str | Mesh, check: Callable[..., Any], *args: Any, timeout: float = 60) -> list[int]:
    """How every rank ended that was started as by `run_ranks`, when all have, or were killed after the time-out."""
    with tempfile.TemporaryDirectory() as folder:
        _, processes = _start(ranks, mesh, check, args, timeout, folder)
        _end(processes, timeout)
        return [process.exitcode for process in processes]


@contextmanager
def as_launched(world: World) -> Iterator[None]:
    """Let this rank look as torchrun's processes do, for commands that ask."""
    before = dict(os.environ)
    os.environ |= {"RANK": str(world.rank), "WORLD_SIZE": str(world.size), "MASTER_ADDR": "none", "MASTER_PORT": "1"}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _start(
    ranks: int, mesh: str | Mesh, check: Callable[..., Any], args: Any, timeout: float, folder: str
) -> tuple[list[Any], list[Any]]:
    pipes, processes = [], []
    for rank in range(ranks):
        here, there = _CONTEXT.Pipe(duplex=False)
        process = _CONTEXT.Process(
            target=_child, args=(there, rank, ranks, str(Path(folder) / "store"), mesh, check, args, timeout)
        )
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    return pipes, processes


def _end(processes: list[Any], patience: float) -> None:
    end = time.monotonic() + patience
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


def _collect(pipes: list[Any], timeout: float) -> list[Any]:
    found: dict[int, Any] = {}
    end = time.monotonic() + timeout
    while len(found) < len(pipes):
        left = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in found}
        ready = wait(list(left), max(0.0, end - time.monotonic()))
        if not ready:
            raise AssertionError(f"ranks {sorted(left.values())} did not end in {timeout} s")
        for pipe in ready:
            rank = left[pipe]
            try:
                ok, value = torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False)
            except EOFError:
                raise AssertionError(f"rank {rank} died") from None
            if not ok:
                raise AssertionError(f"rank {rank}:\n{value}")
            found[rank] = value
    return [found[rank] for rank in range(len(pipes))]


def _child(
    pipe: Any, rank: int, ranks: int, store: str, mesh: str | Mesh, check: Callable[..., Any], args: Any, timeout: float
) -> None:
    from datetime import timedelta

    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout)
        )
        with open_world(Mesh.parse(mesh) if isinstance(mesh, str) else mesh, "cpu") as world:
            _send(pipe, (True, check(world, *args)))
        dist.destroy_process_group()
    except BaseException:
        _send(pipe, (False, traceback.format_exc()))


def _send(pipe: Any, value: Any) -> None:
    # By bytes: torch would hand over shared memory, which ends with this process.
    buffer = io.BytesIO()
    torch.save(value, buffer)
    pipe.send_bytes(buffer.getvalue())
