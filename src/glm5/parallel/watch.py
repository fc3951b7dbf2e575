"""What happens when a rank fails, stands still or runs other code: one error on rank 0, within seconds, never a hang.

A thread of every rank keeps a small file in the run's directory, beside all collectives: its pulse, and what its rank
is doing. A rank that raises leaves the cause there; rank 0 prints it with the rank's name and ends, and so do the
others, who would wait for the lost one until their time-outs. A rank that dies without a word is missed by its pulse;
if that is rank 0, rank 1 says so. Where no rank gets on for `hang_seconds`, all write stack traces, and rank 0 says who
is behind and in which line: a rank that waits for one that gets on does not stand still. The launcher then starts all
ranks again if it was told to (`--restarts`, or torchrun's `--max-restarts`). Read next: `glm5.train.pretrain`.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import re
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import torch

import glm5
from glm5.parallel.mesh import ParallelError, World
from glm5.utils.errors import UserError, out_of_memory

# Seconds between two looks at the files, and without a new pulse before a rank counts as dead. Rank 0 has so many times
# as long: alone it prepares text and writes exports, in calls that may not let its thread run.
LOOK, SILENCE, PATIENCE = 0.5, 30.0, 4
# How long a rank leaves another's error to be raised on itself too, as errors are that all find together.
GRACE = 3.0
MEND = "See to that rank; the same command goes on from the newest checkpoint"
DEAD = "died without a word (killed, or its host is lost)"
# What gloo and NCCL say of a peer that has gone.
_LOST = re.compile(r"[Cc]onnection (reset|closed|refused)|Broken pipe|gloo/transport|NCCL|ncclRemoteError")


class Watch:
    """One rank's thread.

    Args:
        world: whose ranks all make one.
        directory: for the files, which all ranks see; emptied first.
        hang_seconds: without `at` or `beat` being called on any rank, after which all stand still.
        out: where rank 0 says what happened.
    """

    def __init__(self, world: World, directory: Path, hang_seconds: float, out: TextIO | None = None) -> None:
        self.world, self.directory, self.hang_seconds = world, directory, hang_seconds
        self.out = out or sys.stderr
        if world.main:
            directory.mkdir(parents=True, exist_ok=True)
            for file in directory.glob("*.json"):
                file.unlink()
        world.barrier()
        self._doing, self._since, self._told = (-1, "0 start"), time.monotonic(), False
        self._hangs = 0  # that were told
        self._pulses: dict[int, tuple[Any, float]] = {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="watch")
        self._thread.start()

    def at(self, step: int, phase: str) -> None:
        """This rank begins a phase, "number name", of a step; outside of steps, -1, nothing is timed."""
        self._doing, self._since, self._told = (step, phase), time.monotonic(), False

    def beat(self) -> None:
        """This rank gets on in the phase that it is in. From any thread."""
        self._since, self._told = time.monotonic(), False

    def fail(self, error: BaseException) -> UserError | None:
        """Leave word of this rank's failure, and wait a little for rank 0 to tell it.

        Returns:
            What to raise in its place: where memory was full, or where it only says that another rank was lost.
        """
        self.close()
        lost = isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None
        said = out_of_memory(error)
        if lost:
            self._write(f"rank-{self.world.rank:05d}", [-1, *self._doing, 0.0, True, "a lost connection"])
        elif not self.world.main:
            known = error if isinstance(error, UserError) else said
            cause = (describe(error), MEND) if known is None else (known.what, known.mend or MEND)
            self._write("failed", [self.world.rank, *(" ".join(text.split())[:500] for text in cause)])
        pulses, end = self._all_pulses(), time.monotonic() + GRACE + 4 * LOOK
        while time.monotonic() < end and (lost or not self.world.main):
            found = self._read("failed")
            if lost and found:
                return ParallelError(f"rank {found[0]}: {found[1]}", found[2])
            if self._read("told"):
                break
            time.sleep(LOOK / 5)
        if not lost:
            return said and ParallelError(f"rank {self.world.rank}: {said.what}", said.mend)
        if "imed out" in str(error):
            return ParallelError(f"{self._behind()}, and the others waited in vain ({describe(error)[:200]})", MEND)
        after = self._all_pulses()  # a rank that has noticed the loss itself has left a pulse of -1
        dead = [rank for rank, pulse in after.items() if pulse[0] != -1 and pulse == pulses[rank]]
        who = ", ".join(f"rank {rank}" for rank in dead)
        return ParallelError(f"{who}: {DEAD}" if dead else f"another rank was lost ({describe(error)[:200]})", MEND)

    def close(self) -> None:
        """End the thread."""
        self._end.set()
        self._thread.join(10)

    # ------------------------------------------------------------------ the thread
    def _run(self) -> None:
        beat = 0
        while not self._end.wait(LOOK):
            beat += 1
            age = time.monotonic() - self._since
            try:
                if beat % 4 == 1:
                    self._write(f"rank-{self.world.rank:05d}", [beat, *self._doing, round(age, 1), *_here()])
                failed = self._read("failed")
                if failed:
                    self._heard(*failed)
                hangs = self._read("hang") or 0
                if hangs > self._hangs or (not self._told and self._stands(age)):
                    self._told, self._hangs = True, max(hangs, self._hangs + 1)
                    self._hang()
                if self.world.rank < 2:
                    self._miss()
            except OSError as e:
                print(f"warning: rank {self.world.rank} cannot watch the others: {e}", file=self.out, flush=True)
                return

    def _heard(self, rank: int, cause: str, mend: str) -> None:
        speaks = self.world.rank == (1 if rank == 0 else 0)
        if self._end.wait(GRACE if speaks else GRACE + 4 * LOOK):  # it has found an error, too
            return
        if speaks:
            print(f"error: rank {rank}: {cause} / mend: {mend}", file=self.out, flush=True)
            self._write("told", True)
        os._exit(2)  # that is: it has been said

    def _miss(self) -> None:
        """Whether a pulse has stopped: rank 0 looks after all others, and rank 1 after rank 0."""
        now = time.monotonic()
        for rank in range(1, self.world.size) if self.world.main else (0,):
            pulse = self._read(f"rank-{rank:05d}")
            if rank not in self._pulses or self._pulses[rank][0] != pulse:
                self._pulses[rank] = pulse, now
            elif now - self._pulses[rank][1] > (SILENCE if rank else PATIENCE * SILENCE):
                self._write("failed", [rank, DEAD, MEND])

    def _stands(self, age: float) -> bool:
        """Whether no rank gets on; `age` is this rank's."""
        if age <= self.hang_seconds or self._doing[0] < 0:
            return False
        return all(pulse[3] > self.hang_seconds for pulse in self._all_pulses().values())

    def _hang(self) -> None:
        """Write this rank's stack traces; on rank 0 also say who is behind."""
        self._write("hang", self._hangs)
        with (self.directory / f"rank-{self.world.rank:05d}.txt").open("a") as f:
            f.write(f"step {self._doing[0]}, {self._doing[1]}, for {time.monotonic() - self._since:.0f} s\n")
            f.flush()
            faulthandler.dump_traceback(f, all_threads=True)
        if self.world.main:
            self._end.wait(8 * LOOK)  # for every rank's next pulse
            text = f"no progress for {self.hang_seconds:.0f} s: {self._behind()}; stack traces in {self.directory}"
            print(f"warning: {text}", file=self.out, flush=True)

    def _behind(self) -> str:
        """Who is behind, and where: those in the earliest phase who don't wait in a collective, if some do."""
        found = self._all_pulses()
        step, phase = min((pulse[1], pulse[2]) for pulse in found.values())
        behind = [rank for rank, pulse in found.items() if (pulse[1], pulse[2]) == (step, phase)]
        behind = [rank for rank in behind if not found[rank][4]] or behind
        who = "all ranks" if len(behind) == self.world.size else "rank " + ", ".join(map(str, behind))
        where = f", in {found[behind[0]][5]}" if len(behind) == 1 else ""
        return f"{who} in step {step} at {phase.partition(' ')[2]}{where}"

    def _all_pulses(self) -> dict[int, list[Any]]:
        """By rank: number, step, phase, its seconds, whether it waits in a collective, line."""
        start = [0, -1, "0 start", 0.0, False, "its start"]
        return {rank: self._read(f"rank-{rank:05d}") or start for rank in range(self.world.size)}

    def _write(self, name: str, value: Any) -> None:
        path = self.directory / f"{name}.json"
        own = path.with_suffix(f".{self.world.rank}")
        own.write_text(json.dumps(value))
        os.replace(own, path)

    def _read(self, name: str) -> Any:
        try:
            return json.loads((self.directory / f"{name}.json").read_text())
        except FileNotFoundError:
            return None


def _here() -> tuple[bool, str]:
    """Whether this process' main thread is in one of torch's collectives, and its innermost function and line."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return False, "nothing"
    path = Path(frame.f_code.co_filename)
    return "distributed" in path.parts, f"{frame.f_code.co_name} ({path.name}:{frame.f_lineno})"


def describe(error: BaseException) -> str:
    """An error in one line."""
    full = out_of_memory(error)
    if full is not None:
        return full.what
    text = " ".join(str(error).split())[:500]
    return text if type(error).__name__ in text or hasattr(error, "mend") else f"{type(error).__name__}: {text}"


@contextmanager
def watched(world: World, directory: Path, hang_seconds: float, out: TextIO | None = None) -> Iterator[Watch]:
    """Watch over all ranks while the block runs; what a rank raises in it ends all of them. Arguments as `Watch`'s."""
    watch = Watch(world, directory, hang_seconds, out)
    world.watch = watch
    try:
        yield watch
    except BaseException as e:
        found = watch.fail(e)
        if found is not None:
            raise found from e
        raise
    finally:
        world.watch = None
        watch.close()


# --------------------------------------------------------------------------- stragglers
def slowest(world: World) -> tuple[int, float]:
    """The rank that computes most slowly, and its time over the median's, of a product that each makes alone.

    In a step all ranks take the time of the slowest, so that the step's own time says nothing of who it is.
    """
    times = world.gather_objects(_product_seconds(world.device))
    rank = max(range(world.size), key=times.__getitem__)
    return rank, times[rank] / statistics.median(times)


def _product_seconds(device: torch.device) -> float:
    """Seconds of a matrix product: the best of a few."""
    size, dtype = (4096, torch.bfloat16) if device.type == "cuda" else (256, torch.float32)
    x = torch.ones(size, size, device=device, dtype=dtype)
    found = []
    for _ in range(5):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        torch.mm(x, x)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - began)
    return min(found)


# --------------------------------------------------------------------------- the same on all ranks
def check_alike(world: World, configuration: Mapping[str, Any]) -> None:
    """Whether all ranks run the same code with the same configuration.

    Raises:
        ParallelError: they don't, on every rank; it names a rank and what differs.
    """
    own = {"the package's code": _code(), "torch": torch.__version__, **{k: repr(v) for k, v in configuration.items()}}
    found = world.gather_objects(own)
    for rank, other in enumerate(found):
        differ = [name for name in found[0] | other if found[0].get(name) != other.get(name)]
        if differ:
            name = differ[0]
            values = (
                f": {other.get(name)}, and {found[0].get(name)} on rank 0" if len(found[0].get(name, "")) < 100 else ""
            )
            raise ParallelError(
                f"rank {rank} differs in {', '.join(differ[:5])}{values}",
                "Start all ranks with one command, from the same files",
            )


def _code() -> str:
    """A checksum of the package's sources."""
    root = Path(glm5.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]
