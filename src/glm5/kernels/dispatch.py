"""Which version of each operator runs, decided in this one place and told by `glm5 doctor`.

Every operator has a plain-PyTorch version, which is its specification and runs anywhere. A fast version registers
here with the condition under which it may stand in. Model code calls `pick(operator, *tensors)` once per call; a
fast version that cannot take a call says why, and the reason is told once, so that nothing falls back in silence.
Read next: `attention`, `indexer`, `moe` for the specifications, `triton` for the fast versions.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fast:
    """A fast version: where it lives, and a rule that returns why it cannot take these tensors (None: it can)."""

    module: str
    function: str
    refuses: Callable[..., str | None]


def _needs_bf16_cuda(*tensors: Tensor) -> str | None:
    if not all(t.is_cuda for t in tensors):
        return "tensors are not on a CUDA device"
    if tensors[0].dtype != torch.bfloat16:
        return f"written for bfloat16, not {tensors[0].dtype}"
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return "has no backward"
    return None


# operator -> (module of the specification, fast versions in order of preference)
OPERATORS: dict[str, tuple[str, tuple[Fast, ...]]] = {
    "dense_attention": ("glm5.kernels.attention", ()),
    "sparse_attention": ("glm5.kernels.attention", ()),
    "index_select": ("glm5.kernels.indexer", ()),
    "stable_topk": ("glm5.kernels.topk", ()),
    "indexer_loss": ("glm5.kernels.indexer_loss", ()),
    "route": ("glm5.kernels.moe", ()),
    "grouped_swiglu": ("glm5.kernels.moe", ()),
    "linear_cross_entropy": ("glm5.kernels.cross_entropy", ()),
    "newton_schulz": ("glm5.kernels.newton_schulz", ()),
}


@cache
def fast_available() -> tuple[bool, str]:
    """Whether fast versions can run on this machine at all, and why (not)."""
    if not torch.cuda.is_available():
        return False, "no CUDA device"
    if importlib.util.find_spec("triton") is None:
        return False, "triton is not installed: pip install 'glm5[gpu]'"
    major, minor = torch.cuda.get_device_capability()
    if major != 9:
        return False, f"written for Hopper (capability 9.0), this device has {major}.{minor}"
    return True, f"Triton on {torch.cuda.get_device_name()}"


@cache
def _tell_once(operator: str, why: str) -> None:
    log.warning("%s runs as plain PyTorch: %s", operator, why)


def pick(operator: str, *tensors: Tensor) -> Callable[..., Any] | None:
    """The fast version of `operator` for these tensors, or None: run the specification.

    Tensors on the CPU always run the specification; on a CUDA device a refusal is logged once with its reason.
    """
    if not tensors[0].is_cuda:
        return None
    ok, why = fast_available()
    if ok:
        reasons = []
        for fast in OPERATORS[operator][1]:
            refusal = fast.refuses(*tensors)
            if refusal is None:
                return getattr(importlib.import_module(fast.module), fast.function)
            reasons.append(refusal)
        why = "; ".join(reasons) or "no fast version yet"
    _tell_once(operator, why)
    return None


def describe() -> list[dict[str, str]]:
    """Per operator: `operator`, `version` ("torch" or the fast module), and `why`, for this machine."""
    ok, why = fast_available()
    rows = []
    for operator, (_, fast) in OPERATORS.items():
        if ok and fast:
            rows.append({"operator": operator, "version": fast[0].module, "why": f"{why}; bf16, no gradient needed"})
        else:
            reason = why if not ok else "no fast version yet"
            rows.append({"operator": operator, "version": "torch", "why": reason})
    return rows
