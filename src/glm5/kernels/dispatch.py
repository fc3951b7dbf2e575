"""Which version of each operator runs: decided in this one place, and told by `glm5 doctor`.

Every operator has a plain-PyTorch version, which is its specification and runs anywhere. A fast version stands here
with the conditions under which it may take its place. `pick(operator, …)` is called once per call of an operator; a
fast version that cannot take a call says why, and the reason is logged once, so that nothing falls back in silence.
Set GLM5_KERNELS=torch to run the specifications everywhere. Read next: `attention`, `indexer`, `moe` for the
specifications; `cuda` and `triton` for the fast versions.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fast:
    """A fast version.

    Attributes:
        name: as `glm5 doctor` shows it.
        available: whether it can run on this machine, and why (not).
        refuses: given the operator's leading tensors, why it cannot take them; None if it can.
        load: imports it and returns the callable.
    """

    name: str
    available: Callable[[], tuple[bool, str]]
    refuses: Callable[..., str | None]
    load: Callable[[], Callable[..., Any]]


# --------------------------------------------------------------------------- availability
@cache
def _triton() -> tuple[bool, str]:
    if not torch.cuda.is_available():  # where its interpreter could run, which is for tests
        return False, "no CUDA device"
    from glm5.kernels.triton import available

    return available()


@cache
def _hopper() -> tuple[bool, str]:
    from glm5.kernels.cuda.build import available

    return available()


@cache
def _both() -> tuple[bool, str]:
    ok, why = _hopper()
    return (ok, why) if not ok else _triton()


# --------------------------------------------------------------------------- conditions
def _plain_bf16(*tensors: Tensor) -> str | None:
    if tensors[0].dtype != torch.bfloat16:
        return f"written for bfloat16, not {tensors[0].dtype}"
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return "has no backward"
    return None


def _sparse_mla(q_BTHX: Tensor, k_BSGX: Tensor, v_BSGV: Tensor) -> str | None:
    if k_BSGX.shape[2] != 1 or v_BSGV.data_ptr() != k_BSGX.data_ptr():
        return "takes the absorbed form, whose values are the keys' first columns"
    if (q_BTHX.shape[-1], v_BSGV.shape[-1]) != (576, 512) or q_BTHX.shape[2] > 64:
        return f"takes up to 64 heads of 576/512, not {q_BTHX.shape[2]} of {q_BTHX.shape[-1]}/{v_BSGV.shape[-1]}"
    return _plain_bf16(q_BTHX, k_BSGX)


def _index_select(q_BTJI: Tensor, w_BTJ: Tensor, k_BSI: Tensor) -> str | None:
    if q_BTJI.shape[2:] != (32, 128):
        return f"takes 32 index heads of 128, not {q_BTJI.shape[2]} of {q_BTJI.shape[3]}"
    return _plain_bf16(q_BTJI, k_BSI)


# --------------------------------------------------------------------------- the fast versions
def _load_sparse_mla() -> Callable[..., Any]:
    from glm5.kernels.cuda import sparse_mla

    return sparse_mla


def _load_index_select() -> Callable[..., Any]:
    from glm5.kernels.cuda import index_select

    return index_select


def _load_grouped_swiglu() -> Callable[..., Any]:
    from glm5.kernels.triton import grouped_swiglu

    return grouped_swiglu


OPERATORS: dict[str, tuple[Fast, ...]] = {
    "dense_attention": (),
    "sparse_attention": (Fast("cuda.sparse_mla", _hopper, _sparse_mla, _load_sparse_mla),),
    "index_select": (Fast("cuda.index_select", _both, _index_select, _load_index_select),),
    "indexer_loss": (),
    "grouped_swiglu": (Fast("triton.grouped_swiglu", _triton, _plain_bf16, _load_grouped_swiglu),),
    "linear_cross_entropy": (),
    "newton_schulz": (),
}


@cache
def _tell_once(operator: str, why: str) -> None:
    log.warning("%s runs as plain PyTorch: %s", operator, why)


@cache
def _loaded(fast: Fast) -> Callable[..., Any]:
    return fast.load()


def pick(operator: str, *tensors: Tensor) -> Callable[..., Any] | None:
    """The fast version of `operator` for these tensors, or None: run the specification.

    On a CPU that is always None. On a CUDA device a refusal is logged once with its reason.
    """
    if not tensors[0].is_cuda or os.environ.get("GLM5_KERNELS") == "torch":
        return None
    reasons = []
    for fast in OPERATORS[operator]:
        ok, why = fast.available()
        refusal = why if not ok else fast.refuses(*tensors)
        if refusal is None:
            return _loaded(fast)
        reasons.append(f"{fast.name}: {refusal}")
    _tell_once(operator, "; ".join(reasons) or "there is no fast version yet")
    return None


def describe() -> list[dict[str, str]]:
    """Per operator: `operator`, `version` that runs here where its conditions hold, and `why`."""
    rows = []
    for operator, versions in OPERATORS.items():
        version, why = "torch", "the only version" if not versions else ""
        for fast in versions:
            ok, reason = fast.available()
            if os.environ.get("GLM5_KERNELS") == "torch":
                why = "GLM5_KERNELS=torch"
            elif ok:
                version, why = fast.name, f"{reason}; for bf16 tensors without gradients, else torch"
                break
            else:
                why = f"{fast.name}: {reason}"
        rows.append({"operator": operator, "version": version, "why": why})
    return rows
