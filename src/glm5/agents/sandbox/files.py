"""Files on their way into a sandbox or a container, as one archive. Read next: `bubblewrap`, `container`."""

from __future__ import annotations

import io
import posixpath
import tarfile
from collections.abc import Mapping
from pathlib import Path

from glm5.agents.sandbox.host import SandboxError


def read_tree(directory: Path) -> dict[str, tuple[bytes, int]]:
    """The files below a directory of the host: relative name -> bytes and mode. Links are refused.

    Raises:
        SandboxError: there is a link, or something else that is no file.
    """
    found = {}
    for path in sorted(directory.rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise SandboxError(f"{path} is neither file nor directory", "Remove it, or put a copy in its place")
        if path.is_file():
            found[path.relative_to(directory).as_posix()] = (path.read_bytes(), path.stat().st_mode & 0o777)
    return found


def pack(files: Mapping[str, tuple[bytes, int]]) -> bytes:
    """A tar archive of files: relative name -> bytes and mode."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, (data, mode) in sorted(files.items()):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), mode
            tar.addfile(entry, io.BytesIO(data))
    return packed.getvalue()


def unpack(data: bytes) -> dict[str, tuple[bytes, int]]:
    """The plain files of a tar archive. What is none, and what would lie elsewhere, is left out."""
    found = {}
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for entry in tar:
            name = posixpath.normpath(entry.name)
            content = tar.extractfile(entry) if entry.isfile() else None
            if content is not None and not name.startswith(("/", "..")):
                found[name] = (content.read(), entry.mode & 0o777)
    return found
