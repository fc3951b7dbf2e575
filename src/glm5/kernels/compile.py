"""Compile a room's C++ or CUDA sources once per source text, and load the result with ctypes.

Libraries go to `$GLM5_CACHE` (default `~/.cache/glm5`) under a name made of a hash of sources, flags and machine; they
are written to a temporary name and renamed, so that parallel processes never load half a file. Plain C interfaces
with raw pointers need none of torch's headers, and compile in seconds. Read next: `cpu`, `cuda`.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from glm5.utils.errors import UserError


class KernelBuildError(UserError):
    """The compiler is missing, or refused the sources."""


def shared_library(
    name: str, compiler: str, flags: Sequence[str], sources: Sequence[Path], headers: Sequence[Path] = (), key: str = ""
) -> ctypes.CDLL:
    """The library of these sources, compiled if this machine has not done so before.

    Args:
        name: how its file's name begins. flags: for compiling; linking adds `-shared`.
        headers: what the sources include. key: what else the result depends on, such as the processor.

    Raises:
        KernelBuildError: the compiler failed; the message ends with its output.
    """
    texts = [path.read_bytes() for path in (*sources, *headers)]
    digest = hashlib.sha256(b"\0".join([*texts, compiler.encode(), " ".join(flags).encode(), key.encode()]))
    cache = Path(os.environ.get("GLM5_CACHE", Path.home() / ".cache" / "glm5"))
    target = cache / f"{name}-{digest.hexdigest()[:16]}.so"
    if not target.exists():
        _compile(compiler, flags, sources, target)
    return ctypes.CDLL(str(target))


def _compile(compiler: str, flags: Sequence[str], sources: Sequence[Path], target: Path) -> None:
    """One compiler process per source, side by side; then one link."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            objects = [Path(folder) / f"{path.name}.o" for path in sources]
            jobs = [
                subprocess.Popen(
                    [compiler, *flags, "-c", str(path), "-o", str(out)],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
                for path, out in zip(sources, objects, strict=True)
            ]
            outputs = [job.communicate()[0] for job in jobs]
            if any(job.returncode for job in jobs):
                raise KernelBuildError(f"{compiler} failed:\n" + "\n".join(outputs)[-4000:])
            built = Path(folder) / target.name
            command = [compiler, *flags, "-shared", "-o", str(built), *map(str, objects)]
            link = subprocess.run(command, capture_output=True, text=True, check=False)
            if link.returncode:
                raise KernelBuildError(f"{compiler} failed to link:\n" + (link.stdout + link.stderr)[-4000:])
            os.replace(built, target)
    except OSError as error:
        what = f"cannot compile kernels into {target.parent}: {error}"
        raise KernelBuildError(what, "Set GLM5_CACHE to a directory that can be written") from error
