"""Weight gradients that wait: nothing is lost or changed, and the input's gradient comes first."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from glm5.kernels.deferral import linear
from glm5.kernels.moe import grouped_swiglu


class Later:
    """Keeps what is deferred, in order."""

    def __init__(self, *weights: nn.Parameter) -> None:
        self.waiting: list[tuple[Tensor, Callable[[], Tensor]]] = []
        for weight in weights:
            weight.defer = lambda w, compute: self.waiting.append((w, compute))  # type: ignore[attr-defined]

    @torch.no_grad()
    def run(self) -> None:
        for weight, compute in self.waiting:
            weight.grad = compute() if weight.grad is None else weight.grad + compute()


@pytest.mark.parametrize("recompute", [False, True])
def test_linear(recompute: bool) -> None:
    torch.manual_seed(0)
    weight, bias = nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(5))
    x = torch.randn(2, 4, 3, requires_grad=True)

    def twice(x: Tensor) -> Tensor:  # a weight that is used twice, as the shared MTP block's are
        return linear(F.pad(linear(x, weight, bias), (0, -2)), weight, bias)

    expected = torch.autograd.grad(twice(x).square().sum(), (x, weight, bias))
    later = Later(weight)
    out = checkpoint(twice, x, use_reentrant=False) if recompute else twice(x)
    out.square().sum().backward()
    assert weight.grad is None
    assert len(later.waiting) == 2
    torch.testing.assert_close(x.grad, expected[0])
    torch.testing.assert_close(bias.grad, expected[2])
    later.run()
    torch.testing.assert_close(weight.grad, expected[1])


def test_experts() -> None:
    torch.manual_seed(0)
    gate_up, down = nn.Parameter(torch.randn(4, 6, 5)), nn.Parameter(torch.randn(4, 5, 3))
    x = torch.randn(7, 5, requires_grad=True)
    expert = torch.randint(0, 3, (7, 2))  # the last expert has no token
    mixture = torch.rand(7, 2)

    def loss() -> Tensor:
        return grouped_swiglu(x, gate_up, down, expert, mixture).square().sum()

    expected = torch.autograd.grad(loss(), (x, gate_up, down))
    later = Later(gate_up, down)
    loss().backward()
    assert gate_up.grad is None
    assert down.grad is None
    assert torch.equal(x.grad, expected[0])
    later.run()
    assert torch.equal(gate_up.grad, expected[1])
    assert torch.equal(down.grad, expected[2])
    assert not gate_up.grad[3].any()


class _Two(torch.autograd.Function):
    """Two outputs of one shape; their gradients must not be taken for one another's."""

    @staticmethod
    def forward(ctx, x: Tensor) -> tuple[Tensor, Tensor]:
        return 2 * x, 3 * x

    @staticmethod
    def backward(ctx, first: Tensor, second: Tensor) -> Tensor:
        return 2 * first + 3 * second


def test_after_a_node_of_two_outputs() -> None:
    torch.manual_seed(0)
    left, right = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(4, 3))
    x = torch.randn(5, 3, requires_grad=True)

    def loss() -> Tensor:
        a, b = _Two.apply(x)
        return (linear(a, left) * linear(b, right)).sum()

    expected = torch.autograd.grad(loss(), (x, left, right))
    later = Later(left, right)
    loss().backward()
    later.run()
    for found, wanted in zip((x.grad, left.grad, right.grad), expected, strict=True):
        torch.testing.assert_close(found, wanted)
