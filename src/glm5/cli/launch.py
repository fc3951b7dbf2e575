"""Start a command in several processes of this host, as torchrun does. Read next: `glm5.parallel.mesh`."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence


def start(command: str, processes: int, argv: Sequence[str], *, on_gpus: bool) -> int:
    """Run `glm5 COMMAND argv` in so many processes; returns the worst exit status, and 0 after Ctrl-C.

    Ctrl-C and SIGTERM are passed on, and the processes have half a minute to end. When one of them dies the others are
    ended.

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
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # what it knows is said below
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id=f"glm5-{os.getpid()}",
        max_restarts=0,
        monitor_interval=0.5,
    )
    try:
        elastic_launch(launch, sys.executable)("-m", "glm5.cli.main", command, *argv)
    except ChildFailedError as e:
        killed = [f"rank {rank} was ended by signal {-f.exitcode}" for rank, f in e.failures.items() if f.exitcode < 0]
        failed = [f"rank {rank} ended with status {f.exitcode}" for rank, f in e.failures.items() if f.exitcode != 2]
        for cause in (killed or failed)[:1]:  # with status 2 it has said why itself
            print(f"error: {cause}, and so all have ended", file=sys.stderr)
        return max((f.exitcode if f.exitcode > 0 else 1) for f in e.failures.values())
    except SignalException as e:
        return 0 if e.sigval == signal.SIGINT else 128 + int(e.sigval)
    return 0
