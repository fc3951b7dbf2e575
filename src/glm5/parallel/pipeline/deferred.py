"""The weight gradients of one stage that wait for idle time, in the order in which they came.

A split backward pass is one ordinary backward pass in which linear layers and experts leave their weight gradients here
(`glm5.kernels.deferral`), and a later call that makes them. torch's own split, which walks the autograd graph twice, is
wrong or fails for a block that runs at several depths. Source: report section 2.4.2; arXiv:2401.10241. Read next:
`stage`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from glm5.kernels.deferral import linear
from glm5.model.moe import Experts


class WeightGradients:
    """What waits, of the modules that `watch` is given.

    Not deferred, as they are small or sums: norms, biases, embeddings, the router, and the head, whose gradient is made
    with its loss. Linear layers that tensor parallelism has divided get theirs at once, too.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[Tensor, Callable[[], Tensor]]] = []
        self._owners: list[tuple[nn.Module, str]] = []

    def watch(self, module: nn.Module) -> None:
        """Let the linear layers and experts under `module` defer."""
        for part in module.modules():
            if isinstance(part, nn.Linear) and type(part).forward is nn.Linear.forward:
                part.forward = partial(_forward, part)  # type: ignore[method-assign]
                self._owners.append((part, "weight"))
            elif isinstance(part, Experts):
                self._owners += [(part, "gate_up_proj"), (part, "down_proj")]

    def mark(self) -> None:
        """Mark the weights as they are now; FSDP puts other tensors in their place when it gathers them."""
        for part, name in self._owners:
            weight = getattr(part, name)
            if weight.requires_grad:
                weight.defer = self._put

    def _put(self, weight: Tensor, compute: Callable[[], Tensor]) -> None:
        self._waiting.append((weight, compute))

    @property
    def count(self) -> int:
        """Products that wait and are not taken yet."""
        return len(self._waiting)

    def take(self) -> Callable[[], None]:
        """All that waits, as one call that makes it and adds it to `.grad`."""
        taken, self._waiting = self._waiting, []
        return partial(_make, taken)


def _forward(part: nn.Linear, x: Tensor) -> Tensor:
    return linear(x, part.weight, part.bias)


@torch.no_grad()
def _make(waiting: list[tuple[Tensor, Callable[[], Tensor]]]) -> None:
    uses: dict[int, list[Callable[[], Tensor]]] = {}
    weights: dict[int, Tensor] = {}
    for weight, compute in waiting:
        weights[id(weight)] = weight
        uses.setdefault(id(weight), []).append(compute)
    waiting.clear()
    for key, weight in weights.items():
        computes = uses.pop(key)
        total = computes[0]()
        # A weight that several depths use: their gradients first come together, as in an ordinary backward pass.
        for compute in computes[1:]:
            total += compute()
        computes.clear()
        if weight.grad is None:
            weight.grad = total
        else:
            weight.grad += total
