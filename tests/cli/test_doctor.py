"""`glm5 doctor`: says what is here, which operator version runs and why, and what is wrong."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from rich.console import Console

from glm5.cli import doctor
from glm5.kernels import dispatch


def test_json_has_every_operator_with_a_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = doctor.main(["--json", "--directory", str(tmp_path)])
    found = json.loads(capsys.readouterr().out)
    assert status == bool(found["problems"])
    assert {o["operator"] for o in found["operators"]} == set(dispatch.OPERATORS)
    assert all(o["why"] for o in found["operators"])
    assert found["environment"]["python"] == platform.python_version()
    assert found["environment"]["packages"]["torch"] == torch.__version__
    assert found["cpu"]["threads"] == torch.get_num_threads()
    assert found["cpu"]["cores"] == len(os.sched_getaffinity(0))
    assert found["cpu"]["memory_bytes"] > 1 << 28
    assert len(found["cuda"]) == torch.cuda.device_count()
    assert found["disk"]["free_bytes"] > 0
    assert "matmul" not in found


def test_plain_text_shows_versions_operators_and_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    doctor.main([])
    out = capsys.readouterr().out
    for text in (platform.python_version(), torch.__version__, "sparse_attention", "newton_schulz", "free in"):
        assert text in out
    assert "\x1b" not in out


def test_a_terminal_gets_the_same(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "Console", lambda **kw: Console(force_terminal=True, width=120, **kw))
    doctor.main([])
    out = capsys.readouterr().out
    assert "\x1b[" in out
    for operator in dispatch.OPERATORS:
        assert operator in out


def test_a_fast_version_is_shown_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"operator": "sparse_attention", "version": "glm5.kernels.fast", "why": "a device is there"}
    monkeypatch.setattr(dispatch, "describe", lambda: [row])
    doctor.main([])
    assert "sparse_attention  glm5.kernels.fast  a device is there" in capsys.readouterr().out


def test_matmul_rate_is_of_the_right_size() -> None:
    rates = doctor.measure_matmul(seconds=0.05)
    assert set(rates) == {"cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))}
    for rate in rates["cpu"].values():
        assert 1e-4 < rate < 100  # any processor that runs this lies between; wrong units would not
    assert set(rates["cpu"]) == {"float32", "bfloat16"}


def test_problems_are_named_and_change_the_status(
    tmp_path: Path,
    read_only: Callable[[Path], AbstractContextManager[None]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with read_only(tmp_path):
        assert doctor.main(["--directory", str(tmp_path / "runs")]) == 1
    assert "problem: cannot write to" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "_memory", lambda: 1 << 30)
    assert doctor.main([]) == 1
    assert "problem: only 1.0 GiB of memory" in capsys.readouterr().out


def test_looking_makes_no_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    doctor.main(["--directory", str(tmp_path / "a" / "b")])
    assert list(tmp_path.iterdir()) == []


def test_too_many_threads_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 10_000)
    assert any("OMP_NUM_THREADS" in p for p in doctor.examine()["problems"])
