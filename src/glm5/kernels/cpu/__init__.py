"""A decode step's operators on a CPU in C++: a few queries, where calls into torch would cost more than the work.

Compiled on first use by the machine's C++ compiler, called through ctypes with raw pointers; without a compiler the
plain PyTorch versions run, and a warning says so. Read next: `operators`, `few.cpp`.
"""

from __future__ import annotations

from glm5.kernels.cpu.build import available
from glm5.kernels.cpu.operators import grouped_swiglu, index_select, route, sparse_attention

__all__ = ["available", "grouped_swiglu", "index_select", "route", "sparse_attention"]
