"""Which rank of a group holds which part of which parameter, whatever cut them: FSDP, tensor or expert parallelism.

Read next: `muon`, which plans by it; `glm5.train.optim`, whose state lies as the parameters do.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from glm5.parallel.compat import part_of

# The part of a parameter, seen as [slices, rows, columns], that a rank holds: (first, past the last) of each axis.
Box = tuple[tuple[int, int], tuple[int, int], tuple[int, int]]


def local_box(t: Tensor) -> Box:
    """Where this rank's part of a parameter lies in the whole."""
    shape: tuple[int, ...] = tuple(t.shape)
    offset: tuple[int, ...] = (0,) * t.ndim
    if isinstance(t, DTensor):
        shape, offset = part_of(t)
    spans = [(o, o + n) for o, n in zip(offset, shape, strict=True)]
    front: list[tuple[int, int]] = [(0, 1)] * (3 - len(spans))
    slices, rows, columns = front + spans
    return slices, rows, columns


class Holdings:
    """Which rank of a group holds which part of which parameter.

    Args:
        parameters: of the model as it is laid out; the same ones, in the same order, on every rank of the group.
        group: the ranks that hold the parameters between them: of one pipeline stage.
        everyone: whose sums make a total, by default `group`: all stages, where there are several.
    """

    def __init__(self, parameters: Sequence[Tensor], group: ProcessGroup, everyone: ProcessGroup | None = None) -> None:
        self.group, self.everyone = group, everyone or group
        self.parameters = list(parameters)
        mine = [local_box(p) for p in parameters]
        gathered: list[list[Box]] = [[] for _ in range(group.size())]
        dist.all_gather_object(gathered, mine, group=group)
        self.rank = group.rank()
        self.boxes = gathered
        self._index = {p: i for i, p in enumerate(parameters)}

    def gathered(self, value: Any) -> list[Any]:
        """Everyone's `value`."""
        found: list[Any] = [None] * self.everyone.size()
        dist.all_gather_object(found, value, group=self.everyone)
        return found

    def of(self, parameters: Sequence[Tensor]) -> list[list[Box]]:
        """[rank][parameter]: where these parameters' parts lie."""
        numbers = [self._index[p] for p in parameters]
        return [[boxes[i] for i in numbers] for boxes in self.boxes]

    @cached_property
    def _replicas(self) -> list[int]:
        return [sum(boxes[i] == mine for boxes in self.boxes) for i, mine in enumerate(self.boxes[self.rank])]

    def replicas(self, parameter: Tensor) -> int:
        """Ranks that hold the same part of it as this one, this one included."""
        return self._replicas[self._index[parameter]]

    @staticmethod
    def local(t: Tensor) -> Tensor:
        """What this rank holds of a parameter or of its state; under `no_grad`, sharing its memory."""
        return t.to_local() if isinstance(t, DTensor) else t

    def gradient(self, p: Tensor) -> Tensor:
        """What this rank holds of a gradient, which must lie as its parameter does.

        Raises:
            ValueError: it lies otherwise, as a sum that was not finished does.
        """
        assert p.grad is not None
        if isinstance(p, DTensor) and not (isinstance(p.grad, DTensor) and p.grad.placements == p.placements):
            layout = getattr(p.grad, "placements", "a plain tensor")
            raise ValueError(f"the gradient of a parameter of {p.placements} is {layout}: redistribute it first")
        return self.local(p.grad)

    def laid_out(self, t: Tensor, p: Tensor) -> Tensor:
        """A whole tensor of the parameter's shape, laid out like it; one that is laid out already is returned."""
        if isinstance(t, DTensor) or not isinstance(p, DTensor):
            return t
        part = t[tuple(slice(*span) for span in self.boxes[self.rank][self._index[p]][3 - t.ndim :])].clone()
        return DTensor.from_local(part.to(p.device), p.device_mesh, p.placements, shape=p.shape, stride=p.stride())

    def norm(self, parameters: Sequence[Tensor], norms: Sequence[Tensor]) -> float:
        """The L2 norm of everyone's tensors that lie as these parameters, from the norms of this rank's parts."""
        device = self.parameters[0].device
        squares = [n.double().square() / self.replicas(p) for p, n in zip(parameters, norms, strict=True)]
        zero = torch.zeros((), dtype=torch.float64, device=device)
        return float(self.total(torch.stack([zero, *squares]).sum())) ** 0.5

    def total(self, x: Tensor) -> Tensor:
        """Sum of `x` over everyone. It is changed in place."""
        dist.all_reduce(x, group=self.everyone)
        return x

    def largest(self, x: Tensor) -> Tensor:
        """Elementwise maximum over the group. `x` is changed in place."""
        dist.all_reduce(x, dist.ReduceOp.MAX, group=self.group)
        return x
