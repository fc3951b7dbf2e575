"""The record of a run: whole lines only, no step twice, one writer."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from glm5.utils import runlog
from glm5.utils.errors import ConfigError, DataError, FileError
from glm5.utils.runlog import (
    MetricsReader,
    RunLog,
    find_runs,
    flatten,
    keep_config,
    read_metrics,
    refuse_changes,
    run_status,
)


@dataclass(frozen=True)
class Config:
    lr: float = 0.1
    steps: int = 5


def steps(directory: Path) -> list[int]:
    return [r["step"] for r in read_metrics(directory)]


def test_metrics_come_back_as_logged(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        log.log(1, loss=2.5, name="文", load={"layer1": torch.tensor([1, 2])})
        log.log(2, loss=torch.tensor(0.5, dtype=torch.bfloat16), n=np.int64(3), none=None)
    first, second = read_metrics(tmp_path)
    assert first == {"step": 1, "time": first["time"], "loss": 2.5, "name": "文", "load": {"layer1": [1, 2]}}
    assert second == {"step": 2, "time": second["time"], "loss": 0.5, "n": 3, "none": None}
    assert 0 <= first["time"] <= second["time"]


def test_each_line_is_strict_json_even_after_divergence(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        log.log(1, loss=math.nan, norms=[math.inf, -math.inf, 1.0])

    def refuse(text: str) -> float:
        raise AssertionError(text)

    json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    (record,) = read_metrics(tmp_path)
    assert math.isnan(record["loss"])
    assert record["norms"] == [math.inf, -math.inf, 1.0]


def test_lines_are_there_without_close(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.log(1, loss=1.0)
    assert steps(tmp_path) == [1]
    log.close()


def test_resume_drops_later_steps_and_keeps_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with RunLog(tmp_path) as log:
        for step in range(1, 8):
            now[0] += 10
            log.log(step, loss=1.0 / step)
        log.finish(loss=0.1)
    before = read_metrics(tmp_path)
    now[0] = 5.0  # another process, another machine: its clock has nothing to do with the first one's
    with RunLog(tmp_path) as log:
        assert log.last_step == 7
        with pytest.raises(ValueError, match="step 5 after step 7"):
            log.log(5)
        log.resume(4)
        assert log.last_step == 4
        assert run_status(tmp_path) == "running"
        for step in range(5, 9):
            now[0] += 1
            log.log(step, loss=9.0)
    after = read_metrics(tmp_path)
    assert [r["step"] for r in after] == list(range(1, 9))
    assert after[:4] == before[:4]
    assert all(r["loss"] == 9.0 for r in after[4:])
    assert [r["time"] for r in after] == [10, 20, 30, 40, 41, 42, 43, 44]
    assert run_status(tmp_path) == "interrupted"


def test_resume_from_before_the_first_checkpoint_starts_again(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        log.log(0, loss=1)
        log.log(1, loss=1)
        log.resume(-1)
        log.log(0, loss=2)
    assert [r["loss"] for r in read_metrics(tmp_path)] == [2]


def test_torn_last_line_is_left_out_and_then_overwritten(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        log.log(1, loss=1.0)
        log.log(2, loss=2.0)
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    for cut in range(1, len(whole) // 2):
        path.write_bytes(whole[:-cut])
        assert steps(tmp_path) == [1]
    with RunLog(tmp_path) as log:
        assert log.last_step == 1
        log.log(2, loss=3.0)
    assert [r["loss"] for r in read_metrics(tmp_path)] == [1.0, 3.0]


def test_damage_before_the_end_is_named(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        for step in (1, 2, 3):
            log.log(step)
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    for bad in (b"garbage\n", b"[1]\n", b'{"time": 1}\n', b"\xff\n", b"\n"):
        path.write_bytes(lines[0] + bad + lines[2])
        with pytest.raises(DataError, match=r"metrics\.jsonl, line 2,"):
            read_metrics(tmp_path)
        with pytest.raises(DataError, match="line 2"):
            RunLog(tmp_path)
        assert run_status(tmp_path) == "interrupted"  # the failed start holds no lock


def test_full_disk_leaves_no_part_of_a_line(
    tmp_path: Path, file_size_limit: Callable[[int], AbstractContextManager[None]]
) -> None:
    with RunLog(tmp_path) as log:
        log.log(1, loss=1.0)
        size = (tmp_path / "metrics.jsonl").stat().st_size
        with file_size_limit(size + 10), pytest.raises(FileError, match=r"cannot write .*metrics\.jsonl"):
            log.log(2, loss=2.0)
        assert (tmp_path / "metrics.jsonl").stat().st_size == size
        log.log(2, loss=3.0)
    assert [r["loss"] for r in read_metrics(tmp_path)] == [1.0, 3.0]


def test_read_only_directory(tmp_path: Path, read_only: Callable[[Path], AbstractContextManager[None]]) -> None:
    with RunLog(tmp_path / "run") as log:
        log.log(1)
    with read_only(tmp_path / "run"):
        with pytest.raises(FileError, match="permission denied"):
            RunLog(tmp_path / "run")
        assert steps(tmp_path / "run") == [1]


def test_one_writer_at_a_time_and_a_killed_one_leaves_no_lock(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom glm5.utils.runlog import RunLog\nlog = RunLog(sys.argv[1])\n"
        "log.log(1, loss=1.0)\nprint('up', flush=True)\ntime.sleep(60)"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "up\n"
        assert run_status(tmp_path) == "running"
        with pytest.raises(FileError, match="another process is writing"):
            RunLog(tmp_path)
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
    assert run_status(tmp_path) == "interrupted"
    with RunLog(tmp_path) as log:
        assert log.last_step == 1


def test_watcher_does_not_block_a_start(tmp_path: Path) -> None:
    RunLog(tmp_path).close()
    code = (
        "import sys, time\nfrom glm5.utils.runlog import run_status\n"
        "end = time.monotonic() + 1.5\nprint('up', flush=True)\n"
        "while time.monotonic() < end: run_status(sys.argv[1])"
    )
    watcher = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert watcher.stdout is not None
    assert watcher.stdout.readline() == "up\n"
    while watcher.poll() is None:
        RunLog(tmp_path).close()
        time.sleep(0.01)
    watcher.communicate()


def test_reader_follows_growth_and_a_resumed_file(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        reader = MetricsReader(tmp_path)
        assert reader.poll() == []
        for step in range(1, 6):
            log.log(step, loss=float(step))
            assert [r["step"] for r in reader.poll()] == list(range(1, step + 1))
        log.resume(2)
        # As many lines as before, and as many bytes: only the new file tells that they are others.
        for step in range(3, 6):
            log.log(step, loss=9.0)
        assert [r["loss"] for r in reader.poll()] == [1.0, 2.0, 9.0, 9.0, 9.0]


def test_config_is_saved_and_a_changed_one_refused(tmp_path: Path) -> None:
    keep_config(tmp_path, Config(lr=0.3), begun=False)
    keep_config(tmp_path, Config(), begun=False)
    keep_config(tmp_path, Config(), begun=True)
    with pytest.raises(ConfigError, match=r"lr=0\.2: this run began with 0\.1"):
        keep_config(tmp_path, Config(lr=0.2), begun=True, may_differ={"steps"})
    keep_config(tmp_path, Config(steps=9), begun=True, may_differ={"steps"})
    assert json.loads((tmp_path / "config.json").read_text()) == {"lr": 0.1, "steps": 9}


def test_fields_may_differ_at_any_depth_by_their_own_name() -> None:
    before = {"a": {"keep": 1, "lr": 0.1}, "keep": 1, "bookkeep": 1}
    refuse_changes(before, {**before, "a": {"keep": 2, "lr": 0.1}, "keep": 3}, {"keep"})
    for now, name in (({**before, "bookkeep": 2}, "bookkeep=2"), ({**before, "a": {"keep": 1, "lr": 1}}, r"a\.lr=1")):
        with pytest.raises(ConfigError, match=f"^{name}: this run began with"):
            refuse_changes(before, now, {"keep"})


def test_environment_grows_by_one_entry_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for command in ("pretrain", "sparsify"):
        monkeypatch.setattr(sys, "argv", ["glm5", command])
        with RunLog(tmp_path) as log:
            log.save_environment()
            log.log(log.last_step + 1)
    starts = json.loads((tmp_path / "environment.json").read_text())["starts"]
    assert [s["last_step"] for s in starts] == [-1, 0]
    assert [s["command"] for s in starts] == [["glm5", "pretrain"], ["glm5", "sparsify"]]
    assert starts[0]["packages"]["torch"] == torch.__version__
    assert starts[0]["threads"] == torch.get_num_threads()


def test_finish(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        log.log(3)
        log.finish(loss=math.nan)
        assert run_status(tmp_path) == "running"
    assert run_status(tmp_path) == "finished"
    assert json.loads((tmp_path / "finished.json").read_text()) == {"step": 3, "loss": "nan"}


def test_runs_are_found_newest_first(tmp_path: Path) -> None:
    assert find_runs(tmp_path / "missing") == []
    for age, name in ((300, "old"), (100, "new/inner"), (200, "middle")):
        with RunLog(tmp_path / name) as log:
            log.log(1)
        then = time.time() - age
        os.utime(tmp_path / name / runlog.METRICS, (then, then))
    (tmp_path / "no run").mkdir()
    assert [p.relative_to(tmp_path).as_posix() for p in find_runs(tmp_path)] == ["new/inner", "middle", "old"]
    with pytest.raises(FileError, match="no run"):
        read_metrics(tmp_path / "no run")


def test_flatten() -> None:
    record = {"step": 1, "loss": 0.5, "ok": True, "name": "x", "load": {"a": [1, 2.5], "b": {"c": 3}}, "none": None}
    assert flatten(record) == {"step": 1, "loss": 0.5, "load.a.0": 1, "load.a.1": 2.5, "load.b.c": 3}
