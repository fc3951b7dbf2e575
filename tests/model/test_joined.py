"""Joined matrices are a copy, and a copy can be stale: whatever changes a weight must show in the next decode."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from glm5.model.glm5 import GLM5
from support.tiny import tiny_model

IDS = torch.randint(0, 300, (1, 14), generator=torch.Generator().manual_seed(0))


def decode(model: GLM5) -> Tensor:
    """Logits of a short prompt and of single tokens after it: every call joins."""
    cache = model.new_cache(1)
    with torch.no_grad():
        parts = [model(IDS[:, :6], cache=cache).logits]
        parts += [model(IDS[:, i : i + 1], cache=cache).logits for i in range(6, 14)]
    return torch.cat(parts, dim=1)


def apart(model: GLM5) -> Tensor:
    """The same with gradients, where nothing is joined."""
    return model(IDS).logits.detach()


def step(model: GLM5, **kind: bool) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **kind)
    model(IDS).logits.square().mean().backward()
    optimizer.step()


def through_data(model: GLM5) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(1.2)


CHANGES: dict[str, Callable[[GLM5], object]] = {
    "data": through_data,
    "fused optimizer": lambda model: step(model, fused=True),
    "foreach optimizer": lambda model: step(model, foreach=True),
    "load": lambda model: model.load_state_dict(tiny_model(5).state_dict()),
    "assign": lambda model: model.load_state_dict(tiny_model(5).state_dict(), assign=True),
    "cast and back": lambda model: model.half().float(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_weights_shows_in_the_next_sequence(change: str) -> None:
    model = tiny_model()
    before = decode(model)
    CHANGES[change](model)
    after = decode(model)
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, apart(model), atol=1e-4, rtol=0)


def test_copies_do_not_share_what_was_joined() -> None:
    model = tiny_model()
    expected = decode(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301 (made here)
        assert torch.equal(decode(other), expected)
        through_data(other)
        torch.testing.assert_close(decode(other), apart(other), atol=1e-4, rtol=0)
    assert torch.equal(decode(model), expected)


def test_weights_made_in_inference_mode_are_read() -> None:
    with torch.inference_mode():
        model = tiny_model()
        torch.testing.assert_close(decode(model), decode(tiny_model()), atol=1e-5, rtol=0)


def test_threads_decode_one_model() -> None:
    model = tiny_model()
    expected = list(model.generate(IDS, max_new_tokens=12, stop_ids=()))
    found: list[list[int]] = []

    def run() -> None:
        found.append(list(model.generate(IDS, max_new_tokens=12, stop_ids=())))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 4
