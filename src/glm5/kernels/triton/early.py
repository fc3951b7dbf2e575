"""Launches that begin while the one before ends: Hopper's programmatic dependent launch, for chains of short kernels.

A kernel that calls `begin` first waits until all launches before it are done and their results can be read, and lets
the next one start: that one's blocks are then placed while this one works. Read next:
`row`, `preparation`.
"""

# mypy: disallow-untyped-defs=false, disallow-incomplete-defs=false

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def begin(EARLY: tl.constexpr):
    """What comes before may read nothing that an earlier launch writes, and write nothing."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


def early(x: Tensor) -> dict[str, bool]:
    """The options of a launch whose kernel calls `begin`: EARLY for the kernel, and one for the launch."""
    on = x.is_cuda and _hopper(x.device.index or 0)
    return {"EARLY": on, "launch_pdl": on}


@functools.cache
def _hopper(device: int) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)
