"""Compile a room's C++ or CUDA sources once per source text, and load the result with ctypes.

Libraries go to `$GLM5_CACHE` (default `~/.cache/glm5`) under a name made of a hash of sources, flags and machine; they
are written to a temporary name and renamed, so that parallel processes never load half a file. Plain C interfaces
with raw pointers need none of torch's headers, and compile in seconds; how many is logged. Read next: `cpu`, `cuda`.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from glm5.utils.errors import UserError

log = logging.getLogger(__name__)
UP_TO = 900.0  # seconds for all compilers of one library, side by side; they take some 30 on 16 cores


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
        KernelBuildError: the compiler failed, and the message ends with its output; or it took longer than `UP_TO`.
    """
    texts = [path.read_bytes() for path in (*sources, *headers)]
    digest = hashlib.sha256(b"\0".join([*texts, compiler.encode(), " ".join(flags).encode(), key.encode()]))
    cache = Path(os.environ.get("GLM5_CACHE", Path.home() / ".cache" / "glm5"))
    target = cache / f"{name}-{digest.hexdigest()[:16]}.so"
    if not target.exists():
        begin = time.monotonic()
        _compile(compiler, flags, sources, target)
        log.info("compiled %s kernels into %s in %.1f seconds", name, target, time.monotonic() - begin)
    return ctypes.CDLL(str(target))


def _compile(compiler: str, flags: Sequence[str], sources: Sequence[Path], target: Path) -> None:
    """One compiler process per source, side by side; then one link."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            objects = [Path(folder) / f"{path.name}.o" for path in sources]
            each = zip(sources, objects, strict=True)
            _run_all([[compiler, *flags, "-c", str(path), "-o", str(out)] for path, out in each])
            built = Path(folder) / target.name
            _run_all([[compiler, *flags, "-shared", "-o", str(built), *map(str, objects)]])
            os.replace(built, target)
    except OSError as error:
        what = f"cannot compile kernels into {target.parent}: {error}"
        raise KernelBuildError(what, "Set GLM5_CACHE to a directory that can be written") from error


def _run_all(commands: Sequence[Sequence[str]]) -> None:
    """All of them at once; none outlives the call."""
    end = time.monotonic() + UP_TO
    jobs: list[subprocess.Popen[str]] = []
    try:
        for command in commands:
            jobs.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        outputs = [job.communicate(timeout=max(0.0, end - time.monotonic()))[0] for job in jobs]
    except subprocess.TimeoutExpired as error:
        what = f"{commands[0][0]} took longer than {UP_TO:.0f} seconds"
        raise KernelBuildError(what, "Compile on a machine that is less busy, and share its GLM5_CACHE") from error
    finally:
        for job in jobs:
            if job.poll() is None:
                job.kill()
                job.wait()
    if any(job.returncode for job in jobs):
        raise KernelBuildError(f"{commands[0][0]} failed:\n" + "\n".join(outputs)[-4000:])
