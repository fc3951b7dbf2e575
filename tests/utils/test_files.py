"""Atomic writes, locks, and errors that name the path and the mend."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from glm5.utils import files
from glm5.utils.errors import FileError, UserError

Fault = Callable[..., AbstractContextManager[None]]


def test_written_file_is_read_back_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "deep" / "value.json"
    files.write_json(path, {"a": [1, 2.5, None, "文"]})
    assert files.read_json(path) == {"a": [1, 2.5, None, "文"]}
    assert [p.name for p in path.parent.iterdir()] == ["value.json"]
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_file_has_the_umasks_permissions_whoever_writes_it(tmp_path: Path) -> None:
    """safetensors, for one, replaces its file by one for the owner only."""
    before = os.umask(0o027)
    try:
        with files.replacing(tmp_path / "a") as temporary:
            temporary.unlink()
            os.close(os.open(temporary, os.O_CREAT | os.O_WRONLY, 0o600))
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640


def test_json_refuses_nan(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        files.write_json(tmp_path / "x.json", {"loss": float("nan")})
    assert not list(tmp_path.iterdir())


def test_read_json_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "torn.json").write_text('{"a": ')
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    for name in ("torn.json", "binary.json", "missing.json"):
        with pytest.raises(FileError, match=name):
            files.read_json(tmp_path / name)


def test_sha256_known_value(tmp_path: Path) -> None:
    (tmp_path / "abc").write_bytes(b"abc")
    assert files.sha256_file(tmp_path / "abc") == hashlib.sha256(b"abc").hexdigest()
    assert files.sha256_file(tmp_path / "abc").startswith("ba7816bf")


def test_full_disk_keeps_the_old_file(tmp_path: Path, file_size_limit: Fault) -> None:
    path = tmp_path / "state"
    files.write_bytes(path, b"old")
    with file_size_limit(1000), pytest.raises(FileError, match=f"cannot write {path}.*larger than allowed"):
        files.write_bytes(path, b"x" * 5000)
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_fsync_failure_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def fail(fd: int) -> None:
        raise OSError(code, os.strerror(code))

    (tmp_path / "state").write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(FileError) as e:
        files.write_bytes(tmp_path / "state", b"new")
    assert "disk" in e.value.what
    assert e.value.mend
    assert (tmp_path / "state").read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 1


def test_read_only_directory(tmp_path: Path, read_only: Fault) -> None:
    directory = tmp_path / "ro"
    directory.mkdir()
    (directory / "kept").write_bytes(b"old")
    with read_only(directory):
        for attempt in (
            lambda: files.write_bytes(directory / "kept", b"new"),
            lambda: files.require_writable(directory),
            lambda: files.require_writable(directory / "sub"),
        ):
            with pytest.raises(FileError, match="permission denied"):
                attempt()
    assert (directory / "kept").read_bytes() == b"old"


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (lambda p: files.write_bytes(p / "file" / "x", b""), "file"),
        (lambda p: files.make_directory(p / "file"), "there already"),
        (lambda p: files.write_bytes(p / "dir", b""), "directory"),
        (lambda p: files.sha256_file(p / "missing"), "no such file"),
        (lambda p: files.require_space(p / "missing", 1), "no such file"),
    ],
)
def test_refusals_are_user_errors(tmp_path: Path, act: Callable[[Path], object], reason: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "dir").mkdir()
    with pytest.raises(UserError, match=reason) as e:
        act(tmp_path)
    assert e.value.mend


def test_require_space_names_both_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = files.require_writable(tmp_path)
    files.require_space(free, 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda p: shutil._ntuple_diskusage(10, 8, 2048))
    with pytest.raises(FileError, match=r"3\.0 GiB needed, 2\.0 KiB free"):
        files.require_space(tmp_path, 3 << 30)


def test_lock_excludes_another_process_and_dies_with_its_holder(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    assert not files.is_held(lock)
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, time\nfrom glm5.utils.files import exclusive\n"
            "with exclusive(sys.argv[1]):\n print('held', flush=True)\n time.sleep(60)",
            str(lock),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert files.is_held(lock)
        with pytest.raises(FileError, match="another process is writing"), files.exclusive(lock, patience_s=0):
            pass
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    assert not files.is_held(lock)
    with files.exclusive(lock, patience_s=0):
        assert files.is_held(lock)
    assert not files.is_held(lock)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB"), (1 << 50, "1024.0 TiB")],
)
def test_format_bytes(size: int, text: str) -> None:
    assert files.format_bytes(size) == text
