"""Files that survive a kill: atomic writes, checksums, locks, and errors that say how to mend them.

A file appears under its name whole or not at all: it is written beside its destination, flushed to the disk,
then renamed over it. Whatever the operating system refuses (a full disk, a read-only directory, a missing
file) becomes a `FileError` that names the path and the mend. Read next: `glm5.train.checkpoint`, which does the
same for directories.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from glm5.utils.errors import FileError

_MENDS = {
    errno.ENOSPC: ("the disk is full", "Free some space there, or choose a directory on another disk"),
    errno.EDQUOT: ("your disk quota is used up", "Free some of your space, or choose another directory"),
    errno.EFBIG: ("the file would be larger than allowed", "Raise `ulimit -f`, or choose another file system"),
    errno.EROFS: ("the file system is read-only", "Choose a directory that can be written"),
    errno.EACCES: ("permission denied", "Change its permissions, or choose a path that you own"),
    errno.EPERM: ("the system does not permit it", "Change its permissions, or choose a path that you own"),
    errno.ENOENT: ("no such file or directory", "Check the path"),
    errno.ENOTDIR: ("a part of the path is a file, not a directory", "Check the path"),
    errno.EISDIR: ("it is a directory, and a file is needed", "Give the path of a file"),
    errno.EEXIST: ("it is there already", "Choose another path, or remove it"),
    errno.EIO: ("the disk reports an error", "Check the disk, and choose another one"),
    errno.EMFILE: ("this process has too many open files", "Raise `ulimit -n`"),
}


@contextmanager
def file_errors(path: str | Path, doing: str) -> Iterator[None]:
    """Turn any `OSError` of the block into a `FileError`: "cannot {doing} {path}: reason", and the mend."""
    try:
        yield
    except OSError as e:
        reason, mend = _MENDS.get(e.errno or 0, (e.strerror or str(e), "Check the path and the disk"))
        raise FileError(f"cannot {doing} {path}: {reason}", mend) from e


def fsync_directory(path: str | Path) -> None:
    """Make the names in directory `path` durable (a rename is durable only after this)."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_directory(path: str | Path) -> Path:
    """Make directory `path` and its parents; being there already is no error.

    Raises:
        FileError: it cannot be made, or a file has its name.
    """
    path = Path(path)
    with file_errors(path, "make the directory"):
        path.mkdir(parents=True, exist_ok=True)
    return path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path beside `path` for the block to write; then it takes the place of `path`, durably, or is removed.

    Whoever writes it, the file has the permissions that the umask gives: safetensors makes files for their owner only.

    Raises:
        FileError: the write failed. The file that was there is untouched and nothing is left beside it.
    """
    temporary = path.parent / f".{path.name}.{secrets.token_hex(4)}"
    with file_errors(path, "write"):
        try:
            temporary.touch(exist_ok=False)
            mode = temporary.stat().st_mode & 0o777
            yield temporary
            temporary.chmod(mode)
            with temporary.open("rb") as f:
                os.fsync(f.fileno())
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
        fsync_directory(path.parent)


def write_bytes(path: str | Path, data: bytes) -> None:
    """Write `data` to `path` atomically and durably, replacing what is there; parents are made.

    Raises:
        FileError: as in `replacing`.
    """
    path = Path(path)
    make_directory(path.parent)
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def write_text(path: str | Path, text: str) -> None:
    """`write_bytes` of `text` in UTF-8."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: str | Path, value: Any) -> None:
    """`write_text` of `value` as indented JSON.

    Raises:
        ValueError: `value` holds a NaN or an infinity, which JSON has no words for.
        TypeError: `value` holds something else than dicts, lists, strings, numbers, booleans and None.
    """
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    try:
        data = text.encode()
    except UnicodeEncodeError:  # a lone surrogate, which JSON can spell and UTF-8 cannot
        data = json.dumps(value, indent=2, allow_nan=False).encode()
    write_bytes(path, data + b"\n")


def read_json(path: str | Path) -> Any:
    """The value of a JSON file.

    Raises:
        FileError: the file is missing or unreadable, or is not JSON in UTF-8.
    """
    with file_errors(path, "read"):
        data = Path(path).read_bytes()
    try:
        return json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as e:  # RecursionError: brackets in brackets by the thousand
        raise FileError(f"{path} is not valid JSON ({e})", "Correct it, or make it again") from None


def sha256_file(path: str | Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with file_errors(path, "read"), Path(path).open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def require_space(directory: str | Path, size: int) -> None:
    """Refuse to begin a write of `size` bytes that does not fit on `directory`'s disk.

    Raises:
        FileError: fewer than `size` bytes are free; it names both numbers.
    """
    with file_errors(directory, "measure the free space of"):
        free = shutil.disk_usage(directory).free
    if free < size:
        what = f"cannot write to {directory}: {format_bytes(size)} needed, {format_bytes(free)} free"
        raise FileError(what, "Free some space there, or choose a directory on another disk")


def require_writable(directory: str | Path) -> Path:
    """Make `directory` and prove that a file can be made in it, before hours of work depend on it.

    Raises:
        FileError: it cannot be made or written.
    """
    directory = make_directory(directory)
    # A real file, since permission bits say nothing about a read-only mount, a quota or the superuser.
    with file_errors(directory, "write to"), tempfile.TemporaryFile(dir=directory) as f:
        f.write(b"\0")
        f.flush()
    return directory


@contextmanager
def exclusive(path: str | Path, *, patience_s: float = 1.0) -> Iterator[None]:
    """Hold a lock on the file `path` (made if missing); the system drops it when this process dies, however.

    Args:
        path: the lock file. Its contents mean nothing and it stays.
        patience_s: seconds to wait for another holder.

    Raises:
        FileError: another process still holds it after `patience_s`, or it cannot be opened.
    """
    with file_errors(path, "lock"):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        deadline = time.monotonic() + patience_s
        while not _try_lock(fd, path, fcntl.LOCK_EX):
            if time.monotonic() >= deadline:
                what = f"another process is writing to {Path(path).parent}"
                raise FileError(what, "Wait for it or stop it, or choose another directory")
            time.sleep(0.02)
        yield
    finally:
        os.close(fd)


def is_held(path: str | Path) -> bool:
    """Whether a living process holds the lock `path` (see `exclusive`). False if there is no such file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not _try_lock(fd, path, fcntl.LOCK_SH)
    finally:
        os.close(fd)


def _try_lock(fd: int, path: str | Path, kind: int) -> bool:
    with file_errors(path, "lock"):
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def format_bytes(size: float) -> str:
    """`size` bytes for a reader, in binary units: 3_221_225_472 is "3.0 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
