"""Compile the .cu files beside this module with nvcc, once per source text, and load them with ctypes.

The library goes to `$GLM5_CACHE` (default `~/.cache/glm5`) under a name made of the sources' hash, written to a
temporary name and renamed, so that parallel processes never load half a file. Read next: `sparse_mla`.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from glm5.utils.errors import UserError

SOURCES = ("sparse_mla.cu", "topk.cu", "index_scores.cu")
HEADERS = ("hopper.cuh",)
FLAGS = ("-std=c++17", "-O3", "-shared", "-Xcompiler", "-fPIC", "-gencode", "arch=compute_90a,code=sm_90a")


class KernelBuildError(UserError):
    """nvcc is missing or refused the sources."""


def available() -> tuple[bool, str]:
    """Whether these kernels can run here, and why not."""
    if not torch.cuda.is_available():
        return False, "no CUDA device"
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) != (9, 0):
        return False, f"needs compute capability 9.0 (Hopper), this device has {major}.{minor}"
    if _nvcc() is None:
        return False, "nvcc is not on PATH nor under CUDA_HOME"
    return True, "Hopper device and nvcc found"


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled kernels. First use on a machine compiles, about 20 seconds on 16 cores.

    Raises:
        KernelBuildError: no nvcc, or it failed; the message ends with its output.
    """
    here = Path(__file__).parent
    texts = [(here / name).read_bytes() for name in (*SOURCES, *HEADERS)]
    digest = hashlib.sha256(b"\0".join([*texts, " ".join(FLAGS).encode()])).hexdigest()[:16]
    cache = Path(os.environ.get("GLM5_CACHE", Path.home() / ".cache" / "glm5"))
    target = cache / f"kernels-{digest}.so"
    if not target.exists():
        _compile(here, target)
    return ctypes.CDLL(str(target))


@functools.cache
def multiprocessors(device: int) -> int:
    """How many blocks of a whole multiprocessor each run at the same time."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def check(status: int, what: str) -> None:
    """Raise RuntimeError if a launcher returned a CUDA error code."""
    if status:
        raise RuntimeError(f"{what}: CUDA error {status}")


def _compile(here: Path, target: Path) -> None:
    nvcc = _nvcc()
    if nvcc is None:
        raise KernelBuildError("nvcc was not found", "Put it on PATH or set CUDA_HOME")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        # One compiler per source, side by side; then one link.
        objects = [Path(folder) / f"{name}.o" for name in SOURCES]
        flags = [flag for flag in FLAGS if flag != "-shared"]
        jobs = [
            subprocess.Popen(
                [nvcc, *flags, "-c", str(here / name), "-o", str(out)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for name, out in zip(SOURCES, objects, strict=True)
        ]
        outputs = [job.communicate()[0] for job in jobs]
        if any(job.returncode for job in jobs):
            raise KernelBuildError("nvcc failed:\n" + "\n".join(outputs)[-4000:])
        built = Path(folder) / target.name
        link = subprocess.run(
            [nvcc, *FLAGS, "-o", str(built), *map(str, objects)], capture_output=True, text=True, check=False
        )
        if link.returncode:
            raise KernelBuildError("nvcc failed to link:\n" + (link.stdout + link.stderr)[-4000:])
        os.replace(built, target)


def _nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("nvcc") or shutil.which("nvcc", path=str(Path(home) / "bin"))
