"""Names of devices: what each means where there is a GPU, two of them, or none."""

from __future__ import annotations

import pytest
import torch

from glm5.utils.devices import resolve_device
from glm5.utils.errors import ConfigError


def with_gpus(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.parametrize(
    ("gpus", "name", "expected"),
    [
        (0, "auto", "cpu"),
        (2, "auto", "cuda"),
        (0, "cpu", "cpu"),
        (2, "cpu", "cpu"),
        (2, "cuda", "cuda"),
        (2, "cuda:1", "cuda:1"),
    ],
)
def test_devices_that_are_here(gpus: int, name: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(gpus, monkeypatch)
    assert resolve_device(name) == expected


@pytest.mark.parametrize(
    ("gpus", "name"),
    [
        (0, "cuda"),
        (0, "cuda:0"),
        (2, "cuda:2"),
        (2, "cuda:99"),
        *((2, name) for name in ("cuda:", "cuda:-1", "cuda:x", "meta", "mps", "xpu", "tpu", "gpu", "Cuda", "cpu ", "")),
    ],
)
def test_devices_that_are_not_here_are_refused(gpus: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(gpus, monkeypatch)
    with pytest.raises(ConfigError, match=f"^device={name!r}: (must be auto|there are {gpus} CUDA devices here)"):
        resolve_device(name)
