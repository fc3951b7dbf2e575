"""Which fast versions operators were carried out by."""

from __future__ import annotations

import pytest

from glm5.kernels import dispatch


def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of fast versions, one for each call from now on; calls that run in plain PyTorch leave none."""
    used: list[str] = []
    original = dispatch._loaded
    monkeypatch.setattr(dispatch, "_loaded", lambda fast: used.append(fast.name) or original(fast))
    return used
