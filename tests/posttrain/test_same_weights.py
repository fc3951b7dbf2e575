"""Whether an engine in this process has the weights that it was sent: any tensor that has not is named, the first."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from glm5.model.weights import failed
from glm5.posttrain.pushing import require_same
from glm5.utils.errors import CheckpointError


def weights() -> dict[str, Tensor]:
    return {"a": torch.arange(4.0), "b": torch.ones(2, 2), "c": torch.zeros(3)}


def test_the_same_weights_pass_and_so_do_rounded_ones() -> None:
    require_same(weights(), weights(), 1)
    sent = {"a": torch.tensor([1.0, 1 / 3])}
    require_same({"a": sent["a"].bfloat16()}, sent, 1)
    with pytest.raises(CheckpointError, match="the engine's a is not"):
        require_same({"a": sent["a"].bfloat16().float()}, sent, 1)  # rounded, by an engine that should not


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"b": torch.tensor([[1.0, 1.0], [1.0, 1.0000001]])}, "b"),
        ({"c": torch.tensor([0.0, torch.nan, 0.0])}, "c"),
        ({"c": torch.zeros(1)}, "c"),  # would be the same if it were spread
        ({"c": torch.zeros(1), "b": torch.zeros(2, 2)}, "b"),
        ({"aa": torch.zeros(1)}, "aa"),
    ],
)
def test_what_differs_is_named(change: dict[str, Tensor], named: str) -> None:
    for there, sent in ((weights() | change, weights()), (weights(), weights() | change)):
        with pytest.raises(CheckpointError, match=f"the engine's {named} is not what was sent as version 7"):
            require_same(there, sent, 7)


def test_weights_that_are_missing_are_named() -> None:
    without = {name: t for name, t in weights().items() if name != "b"}
    for there, sent in ((without, weights()), (weights(), without)):
        with pytest.raises(CheckpointError, match="the engine's b is not"):
            require_same(there, sent, 7)


def test_all_checks_that_fail_are_told_in_their_order() -> None:
    values = {"x": 1.0, "y": torch.inf, "z": 2.0, "v": torch.nan}
    checks = {name: torch.tensor(value).isfinite() for name, value in values.items()}
    assert failed(checks) == ["y", "v"]
    assert failed({}) == []
