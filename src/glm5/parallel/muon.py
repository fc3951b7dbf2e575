"""Muon across ranks: every matrix is orthogonalised once, by its owner, and only what the owner lacks is sent.

Parameters lie as data, tensor and expert parallelism left them (DTensors, or plain copies), and so do their momenta;
AdamW works on shards as they are. A matrix that is to be orthogonalised (a head of W_UQ, one expert's gate) must be
whole somewhere. Its owner is a rank that holds it whole, where there is one: then nothing is sent but the result, to
other copies. Otherwise it is one of those that hold a part, and the parts travel:

    storage layout -> owner    the Nesterov input, in the state's dtype (fp32)      one all-to-all for each bucket
    owner: Newton-Schulz
    owner -> storage layout    the orthogonal factor, in the iteration's dtype      one all-to-all for each bucket

While one bucket is computed, the next one's inputs and the last one's results are on their way. Owners are balanced by
counted operations (longest first, to the least loaded). Matrices that lie in one place are never sent, so where
shards end between heads or experts there is no communication at all.

The update is the one-process update, bit for bit: the bits of a product depend on how many matrices the kernel takes at
once, so an owner fills its batches with zero matrices up to the size that one process would have used. Source: report
section 2.4.1; the longest-first rule: Graham 1969. Read next: `glm5.train.optim`, which calls it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

# Bytes of inputs that one owner takes in one all-to-all.
BUCKET_BYTES = 64 << 20

# The part of a parameter, seen as [slices, rows, columns], that a rank holds: (first, past the last) of each axis.
Box = tuple[tuple[int, int], tuple[int, int], tuple[int, int]]


def local_box(t: Tensor) -> Box:
    """Where this rank's part of a parameter lies in the whole."""
    shape: tuple[int, ...] = tuple(t.shape)
    offset: tuple[int, ...] = (0,) * t.ndim
    if isinstance(t, DTensor):
        shape, offset = compute_local_shape_and_global_offset(t.shape, t.device_mesh, t.placements)
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


@dataclass(frozen=True)
class Matrix:
    """One matrix that is orthogonalised whole.

    Attributes:
        parameter: its parameter's number. runs: (slice, first row, past the last) of the parameter seen as [slices,
            rows, columns], which together, in this order, are its rows.
        batch: how many matrices of its shape the kernel takes at once in one process.
    """

    parameter: int
    runs: tuple[tuple[int, int, int], ...]
    columns: int
    batch: int
    dtype: torch.dtype = torch.float32

    @property
    def height(self) -> int:
        return sum(stop - start for _, start, stop in self.runs)

    @property
    def shape(self) -> tuple[int, int]:
        """The short side, then the long one."""
        short, long = sorted((self.height, self.columns))
        return short, long

    def oriented(self, x_AB: Tensor) -> Tensor:
        """[height, columns], sharing memory with the matrix [short, long] of a batch."""
        return x_AB.mT if self.height > self.columns else x_AB


class Piece(NamedTuple):
    """A rectangle of a matrix that a rank holds: its corner in the matrix, and in the rank's part of the parameter."""

    matrix: int
    row: int
    column: int
    slice: int
    top: int
    left: int
    rows: int
    columns: int

    @property
    def numel(self) -> int:
        return self.rows * self.columns

    def of(self, held: Tensor) -> Tensor:
        """The rectangle of the rank's part of the parameter."""
        x = held if held.ndim == 3 else held.unsqueeze(0)
        return x[self.slice, self.top : self.top + self.rows, self.left : self.left + self.columns]

    def within(self, x_AB: Tensor) -> Tensor:
        """The rectangle of the whole matrix [height, columns]."""
        return x_AB[self.row : self.row + self.rows, self.column : self.column + self.columns]


class Unit(NamedTuple):
    """Matrices of one shape that `owner` orthogonalises in one call, filled up to `size` with zeros."""

    owner: int
    matrices: tuple[int, ...]
    size: int


def newton_schulz_operations(short: int, long: int, steps: int = 5) -> int:
    """Multiply-adds, counted twice, of a short x long matrix: X Xᵀ, its square, and one product with X, each step."""
    return steps * (4 * short * short * long + 2 * short**3)


def pieces_of(matrices: Sequence[Matrix], boxes: Sequence[Box]) -> Iterator[Piece]:
    """What a rank with these parts of the parameters holds of the matrices."""
    for number, m in enumerate(matrices):
        (s0, s1), (r0, r1), (c0, c1) = boxes[m.parameter]
        row = 0
        for index, start, stop in m.runs:
            first, last = max(start, r0), min(stop, r1)
            if s0 <= index < s1 and first < last and c0 < c1:
                yield Piece(number, row + first - start, c0, index - s0, first - r0, 0, last - first, c1 - c0)
            row += stop - start


def assign(matrices: Sequence[Matrix], held: Sequence[dict[int, int]]) -> list[Unit]:
    """Who orthogonalises what.

    Args:
        held: for each matrix, how many elements of it each rank holds (ranks without any are left out).

    Returns:
        Units that cover every matrix once. An owner holds its matrices whole if anyone does, and else a part.
    """
    alike: dict[tuple[tuple[int, int], torch.dtype, int, tuple[int, ...]], list[int]] = defaultdict(list)
    for i, m in enumerate(matrices):
        whole = [rank for rank, n in held[i].items() if n == m.height * m.columns]
        alike[m.shape, m.dtype, m.batch, tuple(sorted(whole or held[i]))].append(i)
    work = []
    for (_, _, size, candidates), members in alike.items():
        for start in range(0, len(members), size):
            unit = tuple(members[start : start + size])
            work.append((size * newton_schulz_operations(*matrices[unit[0]].shape), candidates, unit, size))
    # What cannot move first, then the longest first.
    work.sort(key=lambda w: (len(w[1]) > 1, -w[0], w[2]))
    load: dict[int, int] = defaultdict(int)
    units = []
    for cost, candidates, unit, size in work:
        owner = min(candidates, key=lambda r: (load[r], -sum(held[i].get(r, 0) for i in unit), r))
        load[owner] += cost
        units.append(Unit(owner, unit, size))
    return units


@dataclass(frozen=True)
class _Bucket:
    """What one all-to-all carries to the owners, and another one back.

    inputs, results: for each rank, the pieces that it sends to each rank, in order: [from][to].
    """

    units: tuple[Unit, ...]
    dtype: torch.dtype
    inputs: list[list[list[Piece]]]
    results: list[list[list[Piece]]]


Read = Callable[[Piece, Tensor], None]
Iterate = Callable[[tuple[int, ...], Tensor], Tensor]
Write = Callable[[Piece, Tensor], None]
Factor = Callable[[torch.dtype], torch.dtype]
Arrivals = Callable[[], Iterator[tuple[Piece, Tensor]]]


class MuonExchange:
    """The plan of one set of matrices over the ranks of a group, and the exchange that carries it out.

    Args:
        matrices: the same on every rank.
        boxes: [rank][parameter], as `Holdings.of`; `Matrix.parameter` counts its parameters.
    """

    def __init__(self, matrices: Sequence[Matrix], boxes: Sequence[Sequence[Box]], group: ProcessGroup) -> None:
        self.matrices, self.group, self.rank = list(matrices), group, group.rank()
        self.ranks = ranks = len(boxes)
        held: list[dict[int, int]] = [{} for _ in matrices]
        pieces: list[list[tuple[int, Piece]]] = [[] for _ in matrices]
        for rank, theirs in enumerate(boxes):
            for piece in pieces_of(matrices, theirs):
                held[piece.matrix][rank] = held[piece.matrix].get(rank, 0) + piece.numel
                pieces[piece.matrix].append((rank, piece))
        self.units = assign(matrices, held)
        self._pieces = pieces
        stays = [all(set(held[i]) == {u.owner} for i in u.matrices) for u in self.units]
        self._local = [u for u, s in zip(self.units, stays, strict=True) if s and u.owner == self.rank]
        self._buckets = self._bucket([u for u, s in zip(self.units, stays, strict=True) if not s], ranks)

    def _bucket(self, moving: list[Unit], ranks: int) -> list[_Bucket]:
        """Units in turn, so that every bucket gives every owner about as much to do."""
        turns: dict[tuple[torch.dtype, int], list[Unit]] = defaultdict(list)
        filled: dict[tuple[torch.dtype, int], tuple[int, int]] = {}  # of each owner: its last bucket, bytes in it
        for unit in moving:
            first = self.matrices[unit.matrices[0]]
            size = len(unit.matrices) * first.height * first.columns * first.dtype.itemsize
            turn, full = filled.get((first.dtype, unit.owner), (0, 0))
            turn, full = (turn + 1, 0) if full and full + size > BUCKET_BYTES else (turn, full)
            filled[first.dtype, unit.owner] = turn, full + size
            turns[first.dtype, turn].append(unit)
        out = []
        for (dtype, _), units in turns.items():
            inputs: list[list[list[Piece]]] = [[[] for _ in range(ranks)] for _ in range(ranks)]
            results: list[list[list[Piece]]] = [[[] for _ in range(ranks)] for _ in range(ranks)]
            for unit in units:
                for i in unit.matrices:
                    for source, piece in self._sources(i, unit.owner):
                        inputs[source][unit.owner].append(piece)
                    for holder, piece in self._pieces[i]:
                        results[unit.owner][holder].append(piece)
            out.append(_Bucket(tuple(units), dtype, inputs, results))
        return out

    def _sources(self, matrix: int, owner: int) -> Iterator[tuple[int, Piece]]:
        """Every element once: from the owner itself where it can be, of other copies from the first."""
        taken: set[tuple[int, int]] = set()
        for rank, piece in sorted(self._pieces[matrix], key=lambda p: p[0] != owner):
            if (piece.row, piece.column) not in taken:
                taken.add((piece.row, piece.column))
                yield rank, piece

    @property
    def communicates(self) -> bool:
        """Whether anything is ever sent, by any rank."""
        return bool(self._buckets)

    def wire_bytes(self, factor: Factor) -> list[int]:
        """Bytes that each rank sends to others in one step: inputs in the state's dtype, factors in `factor(dtype)`."""
        sent = [0] * self.ranks
        for bucket in self._buckets:
            for table, dtype in ((bucket.inputs, bucket.dtype), (bucket.results, factor(bucket.dtype))):
                size = dtype.itemsize
                for source, row in enumerate(table):
                    sent[source] += sum(p.numel * size for to, ps in enumerate(row) if to != source for p in ps)
        return sent

    def loads(self) -> list[int]:
        """Newton-Schulz operations of each rank, the zeros that fill batches included."""
        out = [0] * self.ranks
        for unit in self.units:
            out[unit.owner] += unit.size * newton_schulz_operations(*self.matrices[unit.matrices[0]].shape)
        return out

    def run(self, read: Read, iterate: Iterate, write: Write, factor: Factor, device: torch.device) -> None:
        """Orthogonalise every matrix. Every rank of the group calls it.

        Args:
            read(piece, out): write the input's rectangle `piece.of(...)` into `out`.
            iterate(matrices, x_NAB): the orthogonal factors of a batch whose first entries are these matrices, their
                short side first.
            write(piece, o): apply the factor's rectangle to this rank's part of the parameter.
            factor(dtype): the dtype of the factors of matrices whose state is of `dtype`; the same on every rank.
        """
        coming = self._start(self._buckets[0].inputs, self._buckets[0].dtype, read, device) if self._buckets else None
        for unit in self._local:
            batch, whole = self._batch(unit, device)
            mine = [p for i in unit.matrices for rank, p in self._pieces[i] if rank == self.rank]
            for piece in mine:
                read(piece, piece.within(whole[piece.matrix]))
            factors = self._split(unit, iterate(unit.matrices, batch))
            for piece in mine:
                write(piece, piece.within(factors[piece.matrix]))
        going: Arrivals | None = None
        for turn, bucket in enumerate(self._buckets):
            assert coming is not None
            arrived, coming = coming, None
            if turn + 1 < len(self._buckets):
                after = self._buckets[turn + 1]
                coming = self._start(after.inputs, after.dtype, read, device)
            factors = self._own(bucket, arrived, read, iterate, device)
            if going is not None:
                for piece, part in going():
                    write(piece, part)

            def pack(piece: Piece, out: Tensor, factors: dict[int, Tensor] = factors) -> None:
                out.copy_(piece.within(factors[piece.matrix]))

            going = self._start(bucket.results, factor(bucket.dtype), pack, device)
            for piece in bucket.results[self.rank][self.rank]:
                write(piece, piece.within(factors[piece.matrix]))
        if going is not None:
            for piece, part in going():
                write(piece, part)

    def _own(
        self, bucket: _Bucket, arrived: Arrivals, read: Read, iterate: Iterate, device: torch.device
    ) -> dict[int, Tensor]:
        """Fill this rank's matrices of a bucket from what arrived and what it holds, and orthogonalise them."""
        batches, whole = [], {}
        for unit in bucket.units:
            if unit.owner == self.rank:
                batch, matrices = self._batch(unit, device)
                batches.append((unit, batch))
                whole.update(matrices)
        for piece in bucket.inputs[self.rank][self.rank]:
            read(piece, piece.within(whole[piece.matrix]))
        for piece, part in arrived():
            piece.within(whole[piece.matrix]).copy_(part)
        factors: dict[int, Tensor] = {}
        for unit, batch in batches:
            factors.update(self._split(unit, iterate(unit.matrices, batch)))
        return factors

    def _batch(self, unit: Unit, device: torch.device) -> tuple[Tensor, dict[int, Tensor]]:
        """A batch [size, short, long] to be filled, zero where no matrix is, and its matrices [height, columns]."""
        first = self.matrices[unit.matrices[0]]
        x_NAB = torch.empty(unit.size, *first.shape, dtype=first.dtype, device=device)
        x_NAB[len(unit.matrices) :].zero_()
        return x_NAB, self._split(unit, x_NAB)

    def _split(self, unit: Unit, x_NAB: Tensor) -> dict[int, Tensor]:
        return {i: self.matrices[i].oriented(x_NAB[n]) for n, i in enumerate(unit.matrices)}

    def _start(self, table: list[list[list[Piece]]], dtype: torch.dtype, pack: Read, device: torch.device) -> Arrivals:
        """Begin to send pieces to other ranks. What it gives waits for those from others."""
        leaving = [[] if to == self.rank else pieces for to, pieces in enumerate(table[self.rank])]
        arriving = [[] if source == self.rank else row[self.rank] for source, row in enumerate(table)]
        to_send, to_receive = ([sum(p.numel for p in pieces) for pieces in side] for side in (leaving, arriving))
        send = torch.empty(sum(to_send), dtype=dtype, device=device)
        received = torch.empty(sum(to_receive), dtype=dtype, device=device)
        for piece, part in _parts(leaving, send):
            pack(piece, part)
        work = dist.all_to_all_single(received, send, to_receive, to_send, group=self.group, async_op=True)

        def arrivals(kept: Tensor = send) -> Iterator[tuple[Piece, Tensor]]:
            work.wait()  # `kept` must live until then
            return _parts(arriving, received)

        return arrivals


def _parts(pieces: list[list[Piece]], buffer: Tensor) -> Iterator[tuple[Piece, Tensor]]:
    """Every piece with its place in a buffer of them all."""
    start = 0
    for piece in (p for some in pieces for p in some):
        yield piece, buffer[start : start + piece.numel].view(piece.rows, piece.columns)
        start += piece.numel
