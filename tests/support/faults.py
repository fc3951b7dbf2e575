"""Putting faults in: a check is worth something when it fails on a model that is wrong in the way it is meant to see.

catches(check, fault, ...)      check passes; with each fault put in, it fails; afterwards it passes again
replaced(owner, name, new)      a fault: `owner.name` is `new`
wrapped(owner, name, wrapper)   a fault: `owner.name` is `wrapper(original, *arguments)`
together(*faults)               one fault made of several
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

Fault = Callable[[], AbstractContextManager[Any]]


def replaced(owner: Any, name: str, new: Any) -> Fault:
    return lambda: patch.object(owner, name, new)


def wrapped(owner: Any, name: str, wrapper: Callable[..., Any]) -> Fault:
    """`wrapper` gets the original first, then the call's arguments (for a method, `self` among them)."""
    original = getattr(owner, name)
    return lambda: patch.object(owner, name, lambda *args, **kwargs: wrapper(original, *args, **kwargs))


def together(*faults: Fault) -> Fault:
    @contextmanager
    def all_of_them() -> Iterator[None]:
        with ExitStack() as stack:
            for fault in faults:
                stack.enter_context(fault())
            yield

    return all_of_them


def catches(
    check: Callable[[], None],
    *faults: Fault,
    error: type[BaseException] | tuple[type[BaseException], ...] = AssertionError,
) -> None:
    """Fail unless `check` passes on the sound code and raises `error` with each of the faults put in."""
    assert faults
    check()
    for fault in faults:
        with fault(), pytest.raises(error):
            check()
    check()


def half_split(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotary embedding that pairs element i with i + R / 2: right for the sister model's indexer, wrong here."""
    low, high = x.chunk(2, dim=-1)
    cos, sin = rotation.real, rotation.imag
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
