"""One thread; operators by their specification; and two faults: a read-only directory and a disk that fills up."""

from __future__ import annotations

import os

os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # before torch: as the command line, for cores that are shared

import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is first imported, by whomever

torch.set_num_threads(1)  # products this small gain nothing from a second thread, and wait for it on a busy machine

# A shell's background jobs, and all that they start, ignore Ctrl-C: tests that press it would wait for nothing.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def specification(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators run in plain PyTorch, also where fast versions would."""
    monkeypatch.setenv("GLM5_KERNELS", "torch")


@pytest.fixture
def read_only() -> Callable[[Path], AbstractContextManager[None]]:
    """`with read_only(directory):` nothing can be made in it, not even by a test that runs as the superuser."""
    return _read_only


@pytest.fixture
def file_size_limit() -> Callable[[int], AbstractContextManager[None]]:
    """`with file_size_limit(n):` the kernel refuses, in the middle of a write, to grow any file past n bytes."""
    return _file_size_limit


@contextmanager
def _read_only(path: Path) -> Iterator[None]:
    is_root = os.geteuid() == 0
    mode = path.stat().st_mode
    path.chmod(0o555)
    # Permission bits do not bind the superuser, so become another user, to whom pytest's directories must open.
    opened = [(p, p.stat().st_mode) for p in path.parents if is_root and not p.stat().st_mode & 0o001]
    for parent, parent_mode in opened:
        parent.chmod(parent_mode | 0o011)
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
        for parent, parent_mode in opened:
            parent.chmod(parent_mode)
        path.chmod(mode)


@contextmanager
def _file_size_limit(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
