"""Operators on a CPU in C++: a decode step's, where calls into torch cost more than the work, and sparse prefill's.

Compiled on first use by the machine's C++ compiler, called through ctypes with raw pointers; without a compiler the
plain PyTorch versions run, and a warning says so. Read next: `operators`, `operators.cpp`.
"""

from __future__ import annotations

from glm5.kernels.cpu.build import available
from glm5.kernels.cpu.operators import (
    absorbed_attention,
    grouped_swiglu,
    index_select,
    moe,
    project,
    rms_norm,
    route,
    sparse_attention,
    swiglu,
)

__all__ = [
    "absorbed_attention",
    "available",
    "grouped_swiglu",
    "index_select",
    "moe",
    "project",
    "rms_norm",
    "route",
    "sparse_attention",
    "swiglu",
]
