"""Profiler traces on demand: of steps that the configuration names, or of the next one after a file asks for it.

    glm5 pretrain ... --train.profile 10 500      traces of steps 10 and 500
    touch RUN/profile                             of the step that comes next (`glm5 watch RUN --profile` does the same)

    RUN/profiles/step-00000010-rank-0.json.gz     of each rank; for chrome://tracing or ui.perfetto.dev
    RUN/profiles/step-00000010-rank-0.txt         where the time went, by operator

Read next: `loop`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from glm5.train.ranks import Ranks
from glm5.utils.files import file_errors, make_directory, write_text

REQUEST, LINES = "profile", 40


class Profiles:
    """The traces of one run.

    Args:
        directory: of the run. steps: numbers of steps, counted from 1.
    """

    def __init__(self, directory: Path, ranks: Ranks, steps: Collection[int]) -> None:
        self.directory, self.ranks, self.steps = directory, ranks, set(steps)

    @contextmanager
    def tracing(self, step: int) -> Iterator[None]:
        """Trace the block, which is this step, if that is asked for.

        Every rank looks for the file by itself. One that misses it at one step traces the next, or none.

        Raises:
            FileError: the trace cannot be written.
        """
        request = self.directory / REQUEST
        asked = request.exists()
        if not asked and step not in self.steps:
            yield
            return
        cuda = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        with profile(activities=[ProfilerActivity.CPU, *cuda]) as found:
            yield
        if asked and self.ranks.main:
            with file_errors(request, "remove"):
                request.unlink(missing_ok=True)
        rank = 0 if self.ranks.world is None else self.ranks.world.rank
        path = make_directory(self.directory / "profiles") / f"step-{step:08d}-rank-{rank}"
        with file_errors(path, "write the trace"):
            found.export_chrome_trace(f"{path}.json.gz")
        order = "self_cuda_time_total" if cuda else "self_cpu_time_total"
        write_text(f"{path}.txt", found.key_averages().table(sort_by=order, row_limit=LINES))
