"""Fast operators written in Triton, one module each; importing this package does not import triton.

`available()` says whether they can run, and `_HOME` lists the operators. They run on any device that Triton compiles
for and, with TRITON_INTERPRET=1, on the CPU. `glm5.kernels.cuda` has faster versions of some for Hopper.
`docs/kernels.md` has ideas and measurements.
Read next: `mla`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

import torch

_HOME = {
    "sparse_mla": "glm5.kernels.triton.mla",
    "index_scores": "glm5.kernels.triton.indexing",
    "index_select": "glm5.kernels.triton.indexing",
    "stream_select": "glm5.kernels.triton.select",
    "grouped_swiglu": "glm5.kernels.triton.moe",
    "grouped_swiglu_fp8": "glm5.kernels.triton.moe_fp8",
    "around_products": "glm5.kernels.triton.moe_fp8",
    "sparse_mla_fp8": "glm5.kernels.triton.mla_fp8",
    "rms_norm": "glm5.kernels.triton.basic",
    "add_rms_norm": "glm5.kernels.triton.basic",
    "store": "glm5.kernels.triton.basic",
    "next_rows": "glm5.kernels.triton.basic",
    "row_product": "glm5.kernels.triton.row",
    "silu_times": "glm5.kernels.triton.basic",
    "product": "glm5.kernels.triton.basic",
    "swiglu": "glm5.kernels.triton.basic",
    "prepare": "glm5.kernels.triton.preparation",
    "project": "glm5.kernels.triton.preparation",
    "route": "glm5.kernels.triton.routing",
    "router": "glm5.kernels.triton.routing",
    "moe_row": "glm5.kernels.triton.moe_one",
    "by_head": "glm5.kernels.triton.absorbed",
}
__all__ = ["available", *_HOME]


def available() -> tuple[bool, str]:
    """Whether these kernels can run here, and why or why not."""
    if importlib.util.find_spec("triton") is None:
        return False, "triton is not installed: pip install 'glm5[gpu]'"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return True, "Triton's interpreter"
    if not torch.cuda.is_available():
        return False, "no CUDA device"
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        return False, f"needs compute capability 8.0 or newer, this device has {major}.{minor}"
    return True, f"CUDA device of compute capability {major}.{minor}"


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # No module has an operator's name: importing it would put the module in the operator's place.
    globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
    return globals()[name]
