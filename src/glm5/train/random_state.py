"""The state of every random generator, as tensors and JSON, so that a resumed run draws what it would have drawn.

Covers the global generators of torch (CPU and every CUDA device), numpy and Python. No pickle. Read next:
`checkpoint`, which stores both halves.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from glm5.utils.errors import CheckpointError


def seed_random_state(seed: int) -> None:
    """Set the global generators (torch on every device, numpy, Python) to a state that follows from `seed` alone.

    Left alone they begin at random, and a run's checkpoints would never be the same bytes twice.
    """
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    random.seed(seed)


def capture_random_state() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state of all generators now.

    Returns:
        (tensors, state): a group of tensors and a JSON-able dict for `CheckpointStore.save`; both are copies.
    """
    tensors = {"torch.cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        for i, cuda_state in enumerate(torch.cuda.get_rng_state_all()):
            tensors[f"torch.cuda.{i}"] = cuda_state
    numpy_state = np.random.get_state(legacy=False)  # noqa: NPY002 (the global one is what to save)
    assert isinstance(numpy_state, dict)
    if numpy_state["bit_generator"] != "MT19937":
        raise ValueError(f"numpy's global generator is {numpy_state['bit_generator']}, and only MT19937 is saved")
    version, words, gauss_next = random.getstate()
    tensors["numpy"] = torch.from_numpy(numpy_state["state"]["key"].astype(np.int64))
    tensors["python"] = torch.tensor(words, dtype=torch.int64)
    state = {
        "numpy": {
            "pos": int(numpy_state["state"]["pos"]),
            "has_gauss": int(numpy_state["has_gauss"]),
            "gauss": float(numpy_state["gauss"]),
        },
        "python": {"version": version, "gauss_next": gauss_next},
    }
    return tensors, state


def restore_random_state(tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Set all generators to what `capture_random_state` saw.

    Args:
        tensors, state: its two results.

    Raises:
        CheckpointError: here are fewer CUDA devices than at the capture, so that the run could not continue as it would
            have; nothing was changed.
    """
    cuda = sorted(n for n in tensors if n.startswith("torch.cuda."))
    if len(cuda) > torch.cuda.device_count():
        raise CheckpointError(
            f"the checkpoint has random states of {len(cuda)} CUDA devices; here are {torch.cuda.device_count()}",
            "Resume on as many devices; the weights alone can be loaded anywhere",
        )
    torch.set_rng_state(tensors["torch.cpu"].cpu())
    for name in cuda:
        torch.cuda.set_rng_state(tensors[name].cpu(), int(name.removeprefix("torch.cuda.")))
    key = tensors["numpy"].cpu().numpy().astype(np.uint32)
    np.random.set_state(  # noqa: NPY002
        {
            "bit_generator": "MT19937",
            "state": {"key": key, "pos": state["numpy"]["pos"]},
            "has_gauss": state["numpy"]["has_gauss"],
            "gauss": state["numpy"]["gauss"],
        }
    )
    words = tuple(tensors["python"].tolist())
    random.setstate((state["python"]["version"], words, state["python"]["gauss_next"]))
