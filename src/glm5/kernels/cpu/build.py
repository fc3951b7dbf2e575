"""Compile operators.cpp with the machine's C++ compiler, for its own processor. Read next: `operators`."""

from __future__ import annotations

import ctypes
import functools
import platform
import shutil
from pathlib import Path

from glm5.kernels.compile import KernelBuildError, shared_library

# Sums may be taken in any order, so that they vectorise; NaN, infinity and the rest stay as IEEE has them.
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros")
FLAGS = (*FLAGS, "-fassociative-math", *(("-mprefer-vector-width=512",) if platform.machine() == "x86_64" else ()))


@functools.cache
def _found() -> tuple[ctypes.CDLL | None, str]:
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        return None, "no C++ compiler on PATH"
    why = ""
    for flags in (
        (*FLAGS, "-fopenmp"),
        FLAGS,
    ):  # with torch's threads where the compiler knows OpenMP, else with its own
        try:
            library = shared_library(
                "cpu", compiler, flags, [Path(__file__).parent / "operators.cpp"], key=_processor()
            )
            return library, f"compiled by {compiler}"
        except KernelBuildError as error:
            why = str(error)
    return None, why


def available() -> tuple[bool, str]:
    """Whether these kernels can run here, and why not. The first call on a machine compiles, about two seconds."""
    library, why = _found()
    return library is not None, why


def library() -> ctypes.CDLL:
    """The compiled kernels.

    Raises:
        KernelBuildError: there is no compiler, or it failed.
    """
    library, why = _found()
    if library is None:
        raise KernelBuildError(why, "Install g++ or clang++, or set GLM5_KERNELS=torch")
    return library


def _processor() -> str:
    """What -march=native depends on: a home directory may be shared by machines that differ."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
