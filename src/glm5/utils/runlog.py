"""The record of a run: its metrics, its resolved configuration, its environment, in plain files of its directory.

    metrics.jsonl     one JSON object a line: "step", "time" (seconds of work, monotonic), and what the loop logs
    config.json       the resolved configuration, which `--config` reads
    environment.json  versions, devices and command of every start and resume
    finished.json     written when the run ends by itself; its absence means running or interrupted

A resumed run drops the lines past the step it resumes from, so a step is never there twice. The curves of the
report's figures are drawn from such files; `glm5 watch` reads them. Read next: `progress`, then `glm5.cli.watch`.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from glm5.utils.config_io import differences, to_dict
from glm5.utils.errors import ConfigError, DataError
from glm5.utils.files import exclusive, file_errors, is_held, read_json, require_writable, write_bytes, write_json

METRICS, CONFIG, ENVIRONMENT, FINISHED, LOCK = (
    "metrics.jsonl",
    "config.json",
    "environment.json",
    "finished.json",
    ".run.lock",
)
# JSON has no words for these, and a diverged run must still be able to say so.
_NOT_FINITE = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


class RunLog:
    """Writes the record of one run; holds the directory's lock, so two processes cannot write one run.

    Args:
        directory: the run's directory, made if missing.

    Raises:
        FileError: it cannot be written, or another process is writing to it.
        DataError: the metrics that are there are damaged before their last line.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = require_writable(directory)
        self._exit = ExitStack()
        self._exit.enter_context(exclusive(self.directory / LOCK))
        try:
            self._open()
        except BaseException:
            self._exit.close()
            raise

    def _open(self) -> None:
        """Continue after the last whole line, and remove a torn one."""
        path = self.directory / METRICS
        with file_errors(path, "open"):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        reader = MetricsReader(self.directory)
        records = reader.poll()
        self._size = reader.offset
        with file_errors(path, "write"):
            os.ftruncate(self._fd, self._size)
        self.last_step = int(records[-1]["step"]) if records else -1
        self._started = time.monotonic() - (records[-1]["time"] if records else 0.0)

    # ------------------------------------------------------------------ metrics
    def resume(self, step: int) -> None:
        """Drop the lines of steps later than `step`; -1 drops all. The clock goes on from the last line kept."""
        kept = [r for r in read_metrics(self.directory) if r["step"] <= step]
        os.close(self._fd)
        # A new file under the old name, so that a watcher who holds the old one notices.
        write_bytes(self.directory / METRICS, b"".join(_line(r) for r in kept))
        self._open()
        with file_errors(self.directory / FINISHED, "remove"):
            (self.directory / FINISHED).unlink(missing_ok=True)

    def log(self, step: int, **metrics: Any) -> None:
        """Append one line and flush it. Log a step before the checkpoint of that step is saved.

        Args:
            step: not lower than any before.
            metrics: name -> number, string, or dict or list of them; scalars of torch and numpy are converted.

        Raises:
            ValueError: the step is lower than the last one logged (a resumed run must call `resume` first).
            FileError: the disk refuses; the line is not there in part.
        """
        if step < self.last_step:
            raise ValueError(f"step {step} after step {self.last_step}: call resume before logging again")
        line = _line({"step": step, "time": round(time.monotonic() - self._started, 4), **metrics})
        with file_errors(self.directory / METRICS, "write"):
            try:
                written = os.write(self._fd, line)
                while written < len(line):
                    written += os.write(self._fd, line[written:])
            except OSError:
                os.ftruncate(self._fd, self._size)
                raise
        self._size += len(line)
        self.last_step = step

    def sync(self) -> None:
        """Make the lines durable against a power cut (a kill never loses them); for use beside a checkpoint."""
        with file_errors(self.directory / METRICS, "write"):
            os.fsync(self._fd)

    # ------------------------------------------------------------------ the rest of the record
    def save_environment(self) -> None:
        """Add this start to environment.json, with this process's arguments."""
        path = self.directory / ENVIRONMENT
        starts = read_json(path)["starts"] if path.exists() else []
        start = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": sys.argv,
            "last_step": self.last_step,
            **describe_environment(),
        }
        write_json(path, {"starts": [*starts, start]})

    def finish(self, **summary: Any) -> None:
        """Mark the run as ended by itself, with its closing figures."""
        write_json(self.directory / FINISHED, _encode({"step": self.last_step, **summary}))

    def close(self) -> None:
        """Release the directory. An interrupted run closes without `finish`."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._exit.close()

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


# --------------------------------------------------------------------------- the configuration
def keep_config(directory: Path, config: Any, *, begun: bool, may_differ: Collection[str] = ()) -> None:
    """Write the resolved configuration (a dataclass) as config.json, atomically.

    Args:
        begun: something depends on the configuration that is there already: only `may_differ` may change.
        may_differ: as in `refuse_changes`.

    Raises:
        ConfigError: as `refuse_changes`. FileError: it is not there, or cannot be written.
    """
    now, path = to_dict(config), directory / CONFIG
    if begun:
        refuse_changes(read_json(path), now, may_differ)
    write_json(path, now)


def refuse_changes(before: Mapping[str, Any], now: Mapping[str, Any], may_differ: Collection[str] = ()) -> None:
    """Refuse to go on with another configuration than a run began with; both are results of `to_dict`.

    Args:
        may_differ: names of fields, at whatever depth, that decide nothing that is computed.

    Raises:
        ConfigError: another field differs.
    """
    for name, (began, value) in differences(before, now).items():
        if name.rpartition(".")[2] not in may_differ:
            rule = f"this run began with {began!r}; resume with that, or choose another directory"
            raise ConfigError(name, value, rule)


# --------------------------------------------------------------------------- reading
def read_metrics(directory: str | Path) -> list[dict[str, Any]]:
    """The records of a run in their order, one dict a line; a torn last line (a write under way) is left out.

    Raises:
        FileError: there is no such run, or its file cannot be read.
        DataError: a line before the last is not a record; it names the file and the line.
    """
    return MetricsReader(directory).poll()


class MetricsReader:
    """Follows a metrics file as it grows, reading each line once.

    Args:
        directory: the run's directory.
    """

    def __init__(self, directory: str | Path) -> None:
        self.path = Path(directory) / METRICS
        self.records: list[dict[str, Any]] = []
        self.offset = 0  # bytes of the whole lines read
        self._inode = -1

    def poll(self) -> list[dict[str, Any]]:
        """All records so far. A file that was rewritten (a resumed run) is read from its start again."""
        with file_errors(self.path, "read"), self.path.open("rb") as f:
            status = os.fstat(f.fileno())
            if status.st_ino != self._inode or status.st_size < self.offset:
                self.records, self.offset, self._inode = [], 0, status.st_ino
            f.seek(self.offset)
            data = f.read()
        for line in data.split(b"\n")[:-1]:  # what follows the last newline is a write under way
            self.records.append(self._decode(line))
            self.offset += len(line) + 1
        return self.records

    def _decode(self, line: bytes) -> dict[str, Any]:
        try:
            record = json.loads(line.decode())
            if not isinstance(record["step"], int) or not isinstance(record["time"], int | float):
                raise TypeError
        except (ValueError, KeyError, TypeError):
            number = len(self.records) + 1
            raise DataError(f"{self.path}, line {number}, is not a record: {line[:60]!r}", "Remove it") from None
        decoded = _decode(record)
        assert isinstance(decoded, dict)
        return decoded


def run_status(directory: str | Path) -> Literal["running", "finished", "interrupted"]:
    """What became of a run, by its lock and its finished.json."""
    directory = Path(directory)
    if is_held(directory / LOCK):
        return "running"
    return "finished" if (directory / FINISHED).exists() else "interrupted"


def find_runs(root: str | Path = "runs") -> list[Path]:
    """Directories under `root` that hold metrics, the most recently written first; none if `root` is missing."""
    found = [path for path in Path(root).rglob(METRICS) if path.is_file()]
    return [path.parent for path in sorted(found, key=lambda p: -p.stat().st_mtime)]


def flatten(record: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a record by dotted name: {"load": {"layer1": [0.5, 2]}} is {"load.layer1.0": 0.5, ...}."""
    flat: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, list):
            value = {str(i): v for i, v in enumerate(value)}
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{name}."))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            flat[f"{prefix}{name}"] = value
    return flat


# --------------------------------------------------------------------------- the environment
def describe_environment() -> dict[str, Any]:
    """Versions and devices of this process, as JSON values. Imports torch.

    Returns:
        keys python, platform, packages (name -> version), cpu_cores, threads, cuda_devices (names).
    """
    import torch  # here, since those who only read a run need none of it

    packages = {"torch": str(torch.__version__)}  # which, unlike its metadata, tells the CUDA build
    for name in ("glm5", "numpy", "safetensors", "tokenizers", "triton", "transformers"):
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "cpu_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cuda_devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


# --------------------------------------------------------------------------- one line
def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(_encode(record), separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode() + b"\n"


def _encode(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _encode(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(v) for v in value]
    if hasattr(value, "tolist"):  # arrays and scalars of torch and numpy
        return _encode(value.tolist())
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    return value


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _decode(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_decode(v) for v in value]
    return _NOT_FINITE.get(value, value) if isinstance(value, str) else value
