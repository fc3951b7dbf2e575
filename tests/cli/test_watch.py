"""`glm5 watch`: right curves, for running, finished and interrupted runs, on a terminal and piped."""

from __future__ import annotations

import math
import os
import pty
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm5.cli import watch
from glm5.utils.errors import UserError
from glm5.utils.runlog import RunLog


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory whose runs/demo is a run of 100 steps."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "60")
    with RunLog("runs/demo") as log:
        for step in range(1, 101):
            log.log(step, loss=4 / step, grad_norm=1.0, load={"a": [step, -step]})
    return tmp_path


# --------------------------------------------------------------------------- drawing
@pytest.mark.parametrize(
    ("points", "columns", "rows", "lines"),
    [
        ([(0, 0.0), (1, 1.0)], 2, 1, ["⡠⠊"]),  # the diagonal of a 4 x 4 field of dots
        ([(0, 1.0), (1, 0.0)], 2, 1, ["⠑⢄"]),
        ([(0, 0.0), (1, 0.0)], 3, 1, ["⣀⣀⣀"]),
        ([(0, 1.0), (1, 1.0)], 3, 2, ["⠉⠉⠉", "   "]),
        ([(0, 0.0), (0, 1.0)], 1, 2, ["⡇", "⡇"]),
        ([(0.0, 0.0), (0.4, math.nan), (1, 0.0)], 3, 1, ["⡀ ⢀"]),
        ([], 2, 1, ["  "]),
    ],
)
def test_braille(points: list[tuple[float, float]], columns: int, rows: int, lines: list[str]) -> None:
    assert watch.braille(points, columns, rows, (0, 1), (0, 1)) == lines


@given(
    points=st.lists(st.tuples(st.floats(-1e9, 1e9), st.floats(allow_nan=True)), max_size=20),
    width=st.integers(1, 80),
    height=st.integers(1, 12),
)
def test_curve_has_its_height_for_any_points(points: list[tuple[float, float]], width: int, height: int) -> None:
    points.sort(key=lambda p: p[0])
    lines = watch.curve(points, width, height)
    if any(math.isfinite(y) for _, y in points):
        assert len(lines) == height + 1
        assert any(0x2800 < ord(c) < 0x2900 for c in "".join(lines))
        assert all(len(line) <= max(width, 40) + 24 for line in lines)
    else:
        assert lines == ["  (no finite value)"]


def test_axis_shows_the_range(here: Path) -> None:
    lines = watch.curve([(1, 0.25), (10, 8.0)], 40, 4)
    assert lines[0].startswith("    8 │")
    assert lines[3].startswith(" 0.25 │")
    assert lines[4].split() == ["1", "10"]


# --------------------------------------------------------------------------- choosing
def test_piped_picture(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert watch.main(["runs/demo"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].startswith("runs/demo  interrupted  step 100  after ")
    assert "loss 0.04  (lowest 0.04, highest 4)" in out
    assert "grad_norm 1 " in out
    assert "load" not in out
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) <= 60


@pytest.mark.parametrize("argv", [[], ["runs"], ["runs/demo"], ["runs/demo", "--once"]])
def test_run_is_found(here: Path, argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert watch.main(argv) == 0
    assert capsys.readouterr().out.startswith("runs/demo  interrupted")


def test_what_a_run_makes_of_its_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each by its latest figure: some are not measured in every step."""
    kinds = {"all": 0.31, "matrices": 0.25, "dense_attention": 0.06}
    with RunLog(tmp_path / "r") as log:
        memory = {"parameters": 512.0, "gradients": 128.0, "optimizer": 1024.0, "rest": 384.0}
        costs = {"memory": memory, "exposed_communication": 0.08, "bubble": 0.12, "bubble_played": 0.1}
        log.log(1, loss=1.0, tokens_per_second=9e4, memory_mib=2000.0, mfu=kinds, **costs)
        log.log(2, loss=1.0, tokens_per_second=1e5, tflops_per_device=307.2, memory_mib=2048.0, mfu=kinds)
    assert watch.main([str(tmp_path / "r"), "--once"]) == 0
    speed, memory_line = capsys.readouterr().out.splitlines()[1:3]
    assert speed == (
        "speed     100,000 tokens/s, 307 TFLOP/s a device, MFU 31.0% (matrices 25.0%, dense attention 6.0%), "
        "bubble 12% (of its schedule 10%), exposed communication 8%"
    )
    assert memory_line == (
        "memory    at most 2,048 MiB a rank: parameters 512, gradients 128, optimizer 1,024, rest 384"
    )


def test_a_trace_is_asked_of_a_running_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunLog(tmp_path / "r") as log:
        log.log(1, loss=1.0)
        assert watch.main([str(tmp_path / "r"), "--profile"]) == 0
    assert (tmp_path / "r" / "profile").exists()
    assert "asked" in capsys.readouterr().out
    with pytest.raises(UserError, match="does not run"):
        watch.main([str(tmp_path / "r"), "--profile"])


def test_metrics_by_name_or_part_of_one(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert watch.main(["runs/demo", "--metric", "load.a.1", "grad", "--height", "2"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "(lowest" in line]
    assert names == ["load.a.1", "grad_norm"]
    assert watch.main(["runs/demo", "--metric", "load"]) == 0
    assert "load.a.0 100 " in capsys.readouterr().out


def test_status_of_a_finished_and_a_new_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunLog("runs/new") as log:
        watch.main(["runs/new", "--once"])
        log.log(1, loss=math.nan)
        watch.main(["runs/new", "--once"])
        log.finish()
    watch.main(["runs/new", "--once"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "runs/new  running, no metrics yet"
    assert lines[1].startswith("runs/new  running  step 1")
    assert "loss nan" in lines
    assert any(line.startswith("runs/new  finished  step 1") for line in lines)


@pytest.mark.parametrize(
    ("argv", "what", "mend"),
    [
        (["runs/nope"], "there is no run in runs/nope", "Choose one of: runs/demo"),
        (["runs/demo", "--metric", "accuracy"], "no metric 'accuracy'", "It has: loss, grad_norm, load.a.0, load.a.1"),
        (["runs/demo", "--height", "0"], "height=0: must be positive", ""),
        (["runs/demo", "--every", "0"], "every=0.0: must be positive", ""),
        (["runs/demo", "--colour"], "--colour", "glm5 watch --help"),
    ],
)
def test_mistakes(here: Path, argv: list[str], what: str, mend: str) -> None:
    with pytest.raises(UserError) as e:
        watch.main(argv)
    assert what in e.value.what
    assert mend in e.value.mend


def test_of_several_runs_the_most_recent_is_shown_and_none_at_all_is_said(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunLog("runs/other/stage") as log:
        log.log(1)
    os.utime("runs/demo/metrics.jsonl", (1e9, 1e9))
    for argv in ([], ["runs"], ["runs/other"]):
        watch.main(argv)
        assert capsys.readouterr().out.startswith("runs/other/stage ")
    (here / "empty").mkdir()
    monkeypatch.chdir(here / "empty")
    with pytest.raises(UserError, match=r"no run in runs.*glm5 demo"):
        watch.main([])


# --------------------------------------------------------------------------- live
def test_terminal_follows_a_run_until_it_ends(here: Path) -> None:
    ours, theirs = pty.openpty()
    log = RunLog("runs/live")
    log.log(1, loss=1.0)
    command = [sys.executable, "-m", "glm5.cli.main", "watch", "runs/live", "--every", "0.05"]
    watcher = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm"})
    os.close(theirs)
    shown = bytearray()

    def collect() -> None:
        try:
            while data := os.read(ours, 4096):
                shown.extend(data)
        except OSError:
            return  # the terminal's other end was closed: Linux says so with EIO

    reader = threading.Thread(target=collect)
    reader.start()
    try:
        for step in range(2, 1000):
            log.log(step, loss=1.0)
            time.sleep(0.02)
            if shown.count(b"running") > 3:
                break
        assert watcher.poll() is None
        log.finish()
        log.close()
        assert watcher.wait(timeout=20) == 0
    finally:
        watcher.kill()
        watcher.wait()
        reader.join(timeout=20)
        os.close(ours)
    assert b"\x1b[" in shown
    assert b"finished" in shown
    assert f"step {log.last_step:,}".encode() in shown
