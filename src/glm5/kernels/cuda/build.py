"""Compile the .cu files beside this module with nvcc. Read next: `sparse_mla`; `glm5.kernels.compile` for the cache."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
from pathlib import Path

import torch

from glm5.kernels.compile import KernelBuildError, shared_library

SOURCES = (
    "sparse_mla.cu",
    "sparse_mla_fp8.cu",
    "sparse_mla_backward.cu",
    "sparse_mla_target.cu",
    "topk.cu",
    "index_scores.cu",
    "moe.cu",
)
HEADERS = ("hopper.cuh", "latent.cuh", "sparse_mla.cuh")
FLAGS = ("-std=c++17", "-O3", "-Xcompiler", "-fPIC", "-gencode", "arch=compute_90a,code=sm_90a")


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
    """The compiled kernels. First use on a machine compiles, about 30 seconds on 16 cores.

    Raises:
        KernelBuildError: no nvcc, or it failed; the message ends with its output.
    """
    nvcc = _nvcc()
    if nvcc is None:
        raise KernelBuildError("nvcc was not found", "Put it on PATH or set CUDA_HOME")
    here = Path(__file__).parent
    return shared_library("cuda", nvcc, FLAGS, [here / n for n in SOURCES], [here / n for n in HEADERS])


@functools.cache
def multiprocessors(device: int) -> int:
    """How many blocks of a whole multiprocessor each run at the same time."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def check(status: int, what: str) -> None:
    """Raise RuntimeError if a launcher returned a CUDA error code."""
    if status:
        raise RuntimeError(f"{what}: CUDA error {status}")


def _nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("nvcc") or shutil.which("nvcc", path=str(Path(home) / "bin"))
