"""Compiling kernels: once, with the time told, and never for ever."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from glm5.kernels import compile
from glm5.kernels.compile import KernelBuildError, shared_library

COMPILER = shutil.which("c++")
FLAGS = ("-O1", "-fPIC")


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.setenv("GLM5_CACHE", str(tmp_path / "cache"))
    for name in ("seven", "eight"):
        (tmp_path / f"{name}.cpp").write_text(f'extern "C" int {name}() {{ return {7 + (name == "eight")}; }}')
    return [tmp_path / "seven.cpp", tmp_path / "eight.cpp"]


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler on PATH")
def test_compiles_once_and_tells_how_long_it_took(sources: list[Path], caplog: pytest.LogCaptureFixture) -> None:
    assert COMPILER is not None
    with caplog.at_level(logging.INFO):
        library = shared_library("numbers", COMPILER, FLAGS, sources)
        assert (library.seven(), library.eight()) == (7, 8)
        assert shared_library("numbers", COMPILER, FLAGS, sources).seven() == 7
    (said,) = caplog.messages
    assert said.startswith("compiled numbers kernels into ")
    assert said.endswith(" seconds")
    sources[0].write_text('extern "C" int seven() { return 70; }')
    assert shared_library("numbers", COMPILER, FLAGS, sources).seven() == 70


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler on PATH")
def test_what_the_compiler_says_is_told(sources: list[Path]) -> None:
    assert COMPILER is not None
    sources[1].write_text("no such language")
    with pytest.raises(KernelBuildError, match=r"(?s)c\+\+ failed:.*eight\.cpp"):
        shared_library("numbers", COMPILER, FLAGS, sources)
    assert not list((sources[0].parent / "cache").iterdir())


def test_a_compiler_that_never_ends_is_ended(sources: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile, "UP_TO", 0.3)
    forever = sources[0].parent / "forever"
    forever.write_text(f"#!/bin/sh\necho $$ >> {forever}.pids\nexec sleep 600\n")
    forever.chmod(0o755)
    with pytest.raises(KernelBuildError, match=r"took longer than 0 seconds\. Compile on a machine that is less busy"):
        shared_library("numbers", str(forever), (), sources)
    pids = Path(f"{forever}.pids")
    for pid in pids.read_text().split() if pids.exists() else ():
        assert not Path(f"/proc/{pid}").exists()
