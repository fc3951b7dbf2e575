"""Start a command in several processes of this host, as torchrun does. Read next: `glm5.parallel.mesh`."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from glm5.utils.errors import UserError

if TYPE_CHECKING:
    from glm5.train.together import ProcessConfig


def first() -> bool:
    """Whether this process is alone or the first of several: what it says is true of all."""
    return int(os.environ.get("RANK", "0")) == 0


# Seconds for which another process than the first keeps an error to itself: the launcher ends all with the first that
# ends, and what all have found is to be said by one.
PATIENCE = 15.0


def spoken_once(act: Callable[[Callable[[str], None]], int]) -> int:
    """What a command returns whose `act(say)` runs in every process of a run: the first one speaks for all.

    Raises:
        UserError: the first process', or another's which still runs after PATIENCE: what it found is its own.
    """
    speaks = first()
    try:
        return act(print if speaks else lambda _: None)
    except UserError as e:
        if speaks:
            raise
        time.sleep(PATIENCE)
        raise UserError(f"rank {os.environ['RANK']}: {e.what}", e.mend) from e
    except KeyboardInterrupt:
        if speaks:
            raise
        return 130


def several(command: str, config: ProcessConfig, argv: Sequence[str]) -> int | None:
    """The exit status of `glm5 COMMAND argv` in the processes of its mesh, which are started here.

    None where it is to run in this process: it is alone, or one of them.
    """
    from glm5.parallel.mesh import Mesh, launched

    processes = Mesh.parse(config.mesh).size
    if processes == 1 or launched():
        return None
    return start(command, processes, argv, restarts=config.restarts, on_gpus=config.device != "cpu")


def start(command: str, processes: int, argv: Sequence[str], *, on_gpus: bool, restarts: int = 0) -> int:
    """Run `glm5 COMMAND argv` in so many processes of this host; returns the worst exit status.

    Ctrl-C and SIGTERM are passed on, the processes have half a minute to end, and the status is 128 and the signal's
    number. When one of them dies the others are ended, and up to `restarts` times all are started again.

    For several hosts start `torchrun ... --no-python -- glm5 pretrain ...` on each; without the `--` torchrun takes
    --run for its own.

    Raises:
        ConfigError: there are fewer GPUs.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher import LaunchConfig, elastic_launch

    from glm5.parallel.mesh import check_gpus

    if on_gpus:
        check_gpus(processes)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    for name in list(logging.root.manager.loggerDict):  # each of its modules sets a level of its own
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # what it knows is said below
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id=f"glm5-{os.getpid()}",
        max_restarts=restarts,
        monitor_interval=0.5,
    )
    try:
        elastic_launch(launch, sys.executable)("-m", "glm5.cli.main", command, *argv)
    except ChildFailedError as e:
        statuses = {rank: f.exitcode for rank, f in e.failures.items()}
        cause = cause_of(statuses)
        if cause:
            print(f"error: {cause}, and so all have ended", file=sys.stderr)
        return max((status if status > 0 else 1) for status in statuses.values())
    except SignalException as e:
        return 128 + int(e.sigval)
    return 0


def cause_of(statuses: Mapping[int, int]) -> str:
    """Why all ranks ended, by the exit statuses of those that failed, signals negative; empty where one said it itself.

    With status 2 it did. SIGTERM is how the others are ended, so it counts where there is nothing else only.
    """
    killed = [rank for rank, status in statuses.items() if status < 0 and status != -signal.SIGTERM]
    ended = [] if 2 in statuses.values() else [rank for rank, status in statuses.items() if status == -signal.SIGTERM]
    failed = [rank for rank, status in statuses.items() if status > 0 and status != 2]
    if killed or (ended and not failed):
        rank = (killed or ended)[0]
        why = " (by hand, or by the kernel where memory is full)" if statuses[rank] == -signal.SIGKILL else ""
        return f"rank {rank} was ended by signal {-statuses[rank]}{why}"
    return f"rank {failed[0]} ended with status {statuses[failed[0]]}" if failed else ""
