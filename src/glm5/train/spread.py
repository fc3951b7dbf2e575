"""Muon's part of a step where parameters are spread over ranks: `MuonSplit` with each matrix in its owner's hands.

`glm5.parallel.muon` plans and moves; here is what it moves: the Nesterov input on the way to the owner, the orthogonal
factor on the way back. Read first: `optim`, then `glm5.parallel.muon`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from glm5.kernels.newton_schulz import move_weights, nesterov_input, newton_schulz
from glm5.parallel.holdings import Holdings
from glm5.parallel.muon import Matrix, MuonExchange, Strip
from glm5.train.optim import Batch, Squares, default_ns_dtype, orthogonalised
from glm5.train.recorder import Recordings
from glm5.utils.errors import UserError


class Spread:
    """The parameters of one optimizer over the ranks of a group.

    Args:
        holdings: which rank holds what.
        batches: the matrices as one process would batch them.
        groups: names under which update sizes of these parameters are reported.
        ns_dtype: as `MuonSplit`'s.
        recordings: of the batches' orthogonalisation; None runs it as it is.
    """

    def __init__(
        self,
        holdings: Holdings,
        batches: Sequence[Batch],
        groups: Sequence[str],
        ns_dtype: torch.dtype | None,
        recordings: Recordings | None = None,
    ) -> None:
        self.holdings, self.batches, self.ns_dtype, self.recordings = holdings, batches, ns_dtype, recordings
        self._buffers: dict[tuple[torch.Size, torch.dtype], Tensor] = {}
        own = {*groups, *(s.cut.group for b in batches for s in b.slices)}
        self.groups = sorted(set().union(*holdings.gathered(sorted(own))))
        self.parameters = list(dict.fromkeys(s.parameter for b in batches for s in b.slices))
        self._plans: dict[tuple[nn.Parameter, ...], tuple[MuonExchange, list[str]]] = {}
        self.exchange = self._plan(self.parameters)[0]

    def muon(
        self,
        group: Mapping[str, Any],
        live: Sequence[nn.Parameter],
        momenta: Sequence[Tensor],
        weights: Sequence[Tensor],
        squares: Squares | None,
    ) -> None:
        """Move the parameters that have gradients; momenta and weights are what this rank holds of them."""
        exchange, names = self._plan(live)
        mu, lr = group["momentum"], group["lr"]
        keep = 1.0 - lr * group["weight_decay"]
        grads = [self.holdings.gradient(p) for p in live]

        def scale(matrix: int) -> float:
            return group["rms"] * math.sqrt(exchange.matrices[matrix].shape[1])

        def read(strip: Strip, out: Tensor) -> None:
            nesterov_input(strip.of(grads[strip.parameter]), strip.of(momenta[strip.parameter]), mu, out, move=False)

        def iterate(matrices: tuple[int, ...], x_NAB: Tensor) -> Tensor:
            o_NAB = self._orthogonalised(x_NAB, group["ns_steps"], factor(x_NAB.dtype))
            if squares is not None:
                square_N = torch.linalg.vector_norm(o_NAB, dim=(-2, -1), dtype=x_NAB.dtype).square()
                for name, together in groupby(enumerate(matrices), key=lambda m: names[m[1]]):
                    places = [n for n, _ in together]
                    part = square_N[places[0] : places[-1] + 1].sum() * scale(matrices[0]) ** 2
                    squares[name].append((part, len(places) * o_NAB[0].numel()))
            return o_NAB

        def write(strip: Strip, o: Tensor) -> None:
            move_weights(strip.of(weights[strip.parameter]), o, keep, -lr * scale(strip.piece.matrix))

        def factor(dtype: torch.dtype) -> torch.dtype:
            return self.ns_dtype or default_ns_dtype(live[0].device, dtype)

        exchange.run(read, iterate, write, factor, live[0].device)

    def _orthogonalised(self, x_NAB: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
        if self.recordings is None:
            return newton_schulz(x_NAB, steps, dtype=dtype)
        # What is recorded reads and writes in one place, while a bucket holds several batches of a shape.
        buffer = self._buffers.setdefault((x_NAB.shape, x_NAB.dtype), x_NAB)
        if buffer is not x_NAB:
            buffer.copy_(x_NAB)
        return orthogonalised(buffer, steps, dtype, self.recordings).clone()

    def total(self, squares: Squares) -> Squares:
        """The sums of all ranks."""
        sums = torch.zeros(len(self.groups), 2, dtype=torch.float64)
        for i, name in enumerate(self.groups):
            for square, count in squares[name]:
                sums[i] += torch.tensor([float(square), count], dtype=torch.float64)
        device = self.parameters[0].device if self.parameters else torch.device("cpu")
        found = self.holdings.total(sums.to(device)).tolist()
        out: Squares = defaultdict(list)
        for name, (square, count) in zip(self.groups, found, strict=True):
            if count:
                out[name].append((torch.tensor(square), count))
        return out

    def _plan(self, live: Sequence[nn.Parameter]) -> tuple[MuonExchange, list[str]]:
        """The exchange of these parameters, kept, and the group of each of its matrices."""
        key = tuple(live)
        if key not in self._plans:
            number = {p: i for i, p in enumerate(live)}
            matrices, names = [], []
            for batch in self.batches:
                slices = [s for s in batch.slices if s.parameter in number]
                size = sum(s.last - s.first for s in slices)  # what one process takes at once
                for s in slices:
                    height, columns = s.parameter.shape[-2:]
                    for i in range(s.first, s.last):
                        runs = tuple((a // height, a % height, a % height + b - a) for a, b in s.cut.runs(i))
                        matrices.append(Matrix(number[s.parameter], runs, columns, size, batch.dtype))
                        names.append(s.cut.group)
            self._plans[key] = MuonExchange(matrices, self.holdings.of(live), self.holdings.group), names
        return self._plans[key]

    def agree(self, live: Sequence[nn.Parameter]) -> None:
        """Check that all ranks have gradients for the same parameters: else they would wait for each other for ever.

        Raises:
            UserError: they don't.
        """
        if not self.exchange.communicates:
            return
        known = set(live)
        has = torch.tensor([[float(p in known) for p in self.parameters]] * 2, device=self.parameters[0].device)
        has[1].neg_()
        most, least = self.holdings.largest(has)
        differ = (most != -least).nonzero().flatten().tolist()
        if differ:
            shapes = ", ".join(str(list(self.parameters[i].shape)) for i in differ)
            raise UserError(
                f"{len(differ)} parameters have a gradient on some ranks only, of shapes {shapes}",
                "Give them a gradient of zeros where no token reached them, or none anywhere",
            )
