"""Random generators continue, after a checkpoint, exactly as they would have."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from glm5.train.checkpoint import CheckpointStore
from glm5.train.random_state import capture_random_state, restore_random_state
from glm5.utils.errors import CheckpointError


def draw() -> list[Any]:
    return [
        torch.randn(3).tolist(),
        torch.randperm(9).tolist(),
        np.random.standard_normal(3).tolist(),  # noqa: NPY002
        np.random.randint(0, 1000, 5).tolist(),  # noqa: NPY002
        random.random(),  # noqa: S311
        random.gauss(0, 1),
    ]


def test_random_state_continues_through_a_checkpoint(tmp_path: Path) -> None:
    torch.manual_seed(1)
    np.random.seed(2)  # noqa: NPY002
    random.seed(3)
    draw()  # leaves a cached normal in numpy's and Python's generators, which belongs to their state
    random_tensors, random_json = capture_random_state()
    CheckpointStore(tmp_path).save(1, {"random": random_tensors}, {"random": random_json})
    expected = [draw(), draw()]
    torch.manual_seed(99)
    np.random.seed(99)  # noqa: NPY002
    random.seed(99)
    found = CheckpointStore(tmp_path).load(1)
    restore_random_state(found.tensors["random"], found.state["random"])
    assert [draw(), draw()] == expected


def test_random_state_of_more_devices_is_refused() -> None:
    tensors, state = capture_random_state()
    here = torch.cuda.device_count()
    tensors |= {f"torch.cuda.{i}": tensors["torch.cpu"] for i in range(here + 1)}
    before = torch.get_rng_state()
    torch.rand(1)
    moved = torch.get_rng_state()
    with pytest.raises(CheckpointError, match=f"{here + 1} CUDA devices; here are {here}"):
        restore_random_state(tensors, state)
    assert torch.equal(torch.get_rng_state(), moved)
    assert not torch.equal(before, moved)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_device_tensors_and_device_generators_continue(tmp_path: Path) -> None:
    torch.cuda.manual_seed_all(1)
    torch.randn(3, device="cuda")
    weights = {"w": torch.randn(64, 64, device="cuda", dtype=torch.bfloat16).t(), "e": torch.zeros(0, device="cuda")}
    tensors, state = capture_random_state()
    CheckpointStore(tmp_path).save(1, {"weights": weights, "random": tensors}, {"random": state})
    expected = torch.randn(9, device="cuda")
    torch.cuda.manual_seed_all(99)
    found = CheckpointStore(tmp_path).load(1, "cuda")
    restore_random_state(found.tensors["random"], found.state["random"])
    assert torch.equal(torch.randn(9, device="cuda"), expected)
    assert found.tensors["weights"]["w"].is_cuda
    assert torch.equal(found.tensors["weights"]["w"], weights["w"])
