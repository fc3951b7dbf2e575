"""A policy's weights on their way to engines, and whether they arrived. Read next: `engines`, `rollouts`."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor

from glm5.model.glm5 import GLM5
from glm5.model.weights import disk_tensors, failed
from glm5.utils.errors import CheckpointError

Sums = Mapping[str, str]


def rounded(model: GLM5, dtype: torch.dtype) -> GLM5:
    """The model in a dtype: itself, or a copy."""
    return model if model.dtype == dtype else copy.deepcopy(model).to(dtype)


def tensors_of(model: GLM5) -> dict[str, Tensor]:
    """Copies of all tensors, the draft block's included, by their public names, on the CPU."""
    return {name: t.detach().cpu().contiguous().clone() for name, t in disk_tensors(model)}


def require_arrived(there: Sums, sent: Sums, version: int) -> None:
    """Whether an engine has what was sent.

    Raises:
        CheckpointError: it has not; it names the first tensor.
    """
    wrong = next((name for name in sorted(sent.keys() | there.keys()) if there.get(name) != sent.get(name)), None)
    if wrong is not None:
        raise _wrong(wrong, version, "Serve in the dtype that is sent (--engine-dtype), or start again")


def require_same(there: Mapping[str, Tensor], sent: Mapping[str, Tensor], version: int) -> None:
    """Whether an engine in this process has what was sent, to the bit, rounded to its own dtype.

    Raises:
        CheckpointError: it has not; it names the first tensor.
    """
    fits = {name for name in sent.keys() & there.keys() if sent[name].shape == there[name].shape}
    wrong = {*failed({name: (there[name] == sent[name].to(there[name].dtype)).all() for name in fits})}
    wrong |= (sent.keys() | there.keys()) - fits
    if wrong:
        raise _wrong(min(wrong), version, "Start again")


def _wrong(name: str, version: int, mend: str) -> CheckpointError:
    return CheckpointError(f"the engine's {name} is not what was sent as version {version}", mend)
