"""Which prompts a run has taken, and what became of each: one JSON line a prompt, in RUN/samples.jsonl.

A prompt's number counts the run's draws from 0, without gaps. Each stands here once, with its one final state: trained,
or dropped for a reason that has a name (`glm5.posttrain.outcome.State`). Lines of a step are written before its
checkpoint; a resumed run drops those past the checkpoint and makes them again, the same ones, since a step is a
function of what the checkpoint holds. So the ledger of a run that was killed equals that of one that was not. Read
next: `learner`.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from glm5.utils.errors import DataError
from glm5.utils.files import file_errors, write_bytes

SAMPLES = "samples.jsonl"


class SampleLedger:
    """Args:
    directory: of the run. writes: False on a rank that only counts along; the file is another's.

    Attributes:
        next: the number of the next prompt. states: how many prompts ended in which state.
    """

    def __init__(self, directory: str | Path, *, writes: bool = True) -> None:
        self.path, self.writes = Path(directory) / SAMPLES, writes
        self.next = 0
        self.states: Counter[str] = Counter()

    def resume(self, step: int, count: int) -> None:
        """Keep the lines of the first `step` steps, which must be those of `count` prompts.

        Raises:
            DataError: they are not: the ledger was changed by someone else.
        """
        kept = [line for line in read_samples(self.path) if line["step"] <= step] if self.path.exists() else []
        if [line["number"] for line in kept] != list(range(count)):
            what = f"{self.path} does not hold prompts 0 to {count - 1} of the checkpoint's {step} steps"
            raise DataError(what, "Bring its lines back, or begin again in another directory")
        if self.writes:
            write_bytes(self.path, b"".join(map(_line, kept)))
        self.next, self.states = count, Counter(line["state"] for line in kept)

    def add(self, step: int, samples: Iterable[Mapping[str, Any]]) -> None:
        """Write a step's prompts, durably. Each has its `number` and `state`.

        Raises:
            ValueError: a number is not the next one.
        """
        lines = []
        for sample in samples:
            if sample["number"] != self.next:
                raise ValueError(f"prompt {sample['number']} after {self.next - 1}: each is in the ledger once")
            self.next += 1
            self.states[str(sample["state"])] += 1
            lines.append(_line({"step": step, **sample}))
        if not self.writes:
            return
        with file_errors(self.path, "write"), self.path.open("ab") as f:
            f.write(b"".join(lines))
            f.flush()
            os.fsync(f.fileno())


def read_samples(path: str | Path) -> list[dict[str, Any]]:
    """All whole lines of a ledger; one that a kill has torn is left out."""
    with file_errors(path, "read"):
        data = Path(path).read_bytes()
    return [json.loads(line) for line in data.split(b"\n")[:-1]]


def _line(sample: Mapping[str, Any]) -> bytes:
    return json.dumps(sample, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode() + b"\n"
