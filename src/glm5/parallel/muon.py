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
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from glm5.parallel.holdings import Box, Holdings

__all__ = ["Box", "Holdings", "Matrix", "MuonExchange", "Piece", "Strip", "Unit", "assign", "pieces_of"]

# Bytes of inputs that one owner takes in one all-to-all.
BUCKET_BYTES = 64 << 20


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


class Strip(NamedTuple):
    """The same rectangle of some matrices that follow each other in a batch and in the parameter: moved as one.

    Attributes:
        unit: whose batch. first: the first one's number in the batch. turned: the batch holds them transposed.
        piece: the first one's rectangle. step: slices and rows from one to the next in the parameter.
    """

    parameter: int
    unit: int
    first: int
    turned: bool
    piece: Piece
    matrices: int
    step: tuple[int, int]

    @property
    def numel(self) -> int:
        return self.matrices * self.piece.numel

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.matrices, self.piece.rows, self.piece.columns

    def of(self, held: Tensor) -> Tensor:
        """[matrices, rows, columns] of the rank's part of the parameter, sharing its memory."""
        x, p = held if held.ndim == 3 else held.unsqueeze(0), self.piece
        slices, rows, columns = x.stride()
        start = x.storage_offset() + p.slice * slices + p.top * rows + p.left * columns
        return x.as_strided(self.shape, (self.step[0] * slices + self.step[1] * rows, rows, columns), start)

    def within(self, x_NAB: Tensor) -> Tensor:
        """[matrices, rows, columns] of the batch [N, short, long], sharing its memory."""
        x, p = x_NAB.mT if self.turned else x_NAB, self.piece
        own = x[self.first : self.first + self.matrices]
        return own[:, p.row : p.row + p.rows, p.column : p.column + p.columns]


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

    units: their numbers. inputs, results: what each rank sends to each rank, in order: [from][to].
    """

    units: tuple[int, ...]
    dtype: torch.dtype
    inputs: list[list[list[Strip]]]
    results: list[list[list[Strip]]]


Read = Callable[[Strip, Tensor], None]
Iterate = Callable[[tuple[int, ...], Tensor], Tensor]
Write = Callable[[Strip, Tensor], None]
Factor = Callable[[torch.dtype], torch.dtype]
Arrivals = Callable[[], Iterator[tuple[Strip, Tensor]]]


class MuonExchange:
    """The plan of one set of matrices over the ranks of a group, and the exchange that carries it out.

    Args:
        matrices: the same on every rank.
        boxes: [rank][parameter], as `Holdings.of`; `Matrix.parameter` counts its parameters.
    """

    def __init__(self, matrices: Sequence[Matrix], boxes: Sequence[Sequence[Box]], group: ProcessGroup) -> None:
        self.matrices, self.group, self.rank = list(matrices), group, group.rank()
        self.ranks = len(boxes)
        held: list[dict[int, int]] = [{} for _ in matrices]
        self._pieces: list[list[tuple[int, Piece]]] = [[] for _ in matrices]
        for rank, theirs in enumerate(boxes):
            for piece in pieces_of(matrices, theirs):
                held[piece.matrix][rank] = held[piece.matrix].get(rank, 0) + piece.numel
                self._pieces[piece.matrix].append((rank, piece))
        self.units = assign(matrices, held)
        moving, self._local = [], []
        for number, unit in enumerate(self.units):
            if any(set(held[i]) != {unit.owner} for i in unit.matrices):
                moving.append(number)
            elif unit.owner == self.rank:
                self._local.append((number, self._strips(number, [p for i in unit.matrices for p in self._pieces[i]])))
        self._buckets = self._bucket(moving)

    def _bucket(self, moving: list[int]) -> list[_Bucket]:
        """Units in turn, so that every bucket gives every owner about as much to do."""
        turns: dict[tuple[torch.dtype, int], list[int]] = defaultdict(list)
        filled: dict[tuple[torch.dtype, int], tuple[int, int]] = {}  # of each owner: its last bucket, bytes in it
        for number in moving:
            unit = self.units[number]
            first = self.matrices[unit.matrices[0]]
            size = len(unit.matrices) * first.height * first.columns * first.dtype.itemsize
            turn, full = filled.get((first.dtype, unit.owner), (0, 0))
            turn, full = (turn + 1, 0) if full and full + size > BUCKET_BYTES else (turn, full)
            filled[first.dtype, unit.owner] = turn, full + size
            turns[first.dtype, turn].append(number)
        out = []
        for (dtype, _), numbers in turns.items():
            ranks = range(self.ranks)
            inputs: list[list[list[Strip]]] = [[[] for _ in ranks] for _ in ranks]
            results: list[list[list[Strip]]] = [[[] for _ in ranks] for _ in ranks]
            for number in numbers:
                unit = self.units[number]
                sources = [p for i in unit.matrices for p in self._sources(i, unit.owner)]
                holders = [p for i in unit.matrices for p in self._pieces[i]]
                for rank in ranks:
                    inputs[rank][unit.owner] += self._strips(number, [p for p in sources if p[0] == rank])
                    results[unit.owner][rank] += self._strips(number, [p for p in holders if p[0] == rank])
            out.append(_Bucket(tuple(numbers), dtype, inputs, results))
        return out

    def _sources(self, matrix: int, owner: int) -> Iterator[tuple[int, Piece]]:
        """Every element once: from the owner itself where it can be, of other copies from the first."""
        taken: set[tuple[int, int]] = set()
        for rank, piece in sorted(self._pieces[matrix], key=lambda p: p[0] != owner):
            if (piece.row, piece.column) not in taken:
                taken.add((piece.row, piece.column))
                yield rank, piece

    def _strips(self, number: int, pieces: Sequence[tuple[int, Piece]]) -> list[Strip]:
        """Pieces of one rank in one unit, in the order of its matrices, with neighbours joined."""
        place = {i: n for n, i in enumerate(self.units[number].matrices)}
        by_corner: dict[tuple[int, int], list[Piece]] = defaultdict(list)
        for _, piece in pieces:
            by_corner[piece.row, piece.column].append(piece)
        out: list[Strip] = []
        for some in by_corner.values():
            last: Piece | None = None
            for piece in some:
                m = self.matrices[piece.matrix]
                if last is not None and self._follows(out[-1], last, piece):
                    step = (piece.slice - last.slice, piece.top - last.top)
                    out[-1] = out[-1]._replace(matrices=out[-1].matrices + 1, step=step)
                else:
                    turned = m.height > m.columns
                    out.append(Strip(m.parameter, number, place[piece.matrix], turned, piece, 1, (0, 0)))
                last = piece
        return out

    def _follows(self, strip: Strip, last: Piece, piece: Piece) -> bool:
        """Whether a piece goes on with a strip that ends with `last`."""
        before, m = self.matrices[last.matrix], self.matrices[piece.matrix]
        step = (piece.slice - last.slice, piece.top - last.top)
        return (
            piece.matrix == last.matrix + 1
            and (m.parameter, m.height) == (before.parameter, before.height)
            and (piece.rows, piece.columns, piece.left) == (last.rows, last.columns, last.left)
            and step[0] >= 0
            and step[1] >= 0
            and (strip.matrices == 1 or step == strip.step)
        )

    @property
    def communicates(self) -> bool:
        """Whether anything is ever sent, by any rank."""
        return bool(self._buckets)

    def wire_bytes(self, factor: Factor) -> list[int]:
        """Bytes that each rank sends to others in one step: inputs in the state's dtype, factors in `factor(dtype)`."""
        sent = [0] * self.ranks
        for bucket in self._buckets:
            for table, dtype in ((bucket.inputs, bucket.dtype), (bucket.results, factor(bucket.dtype))):
                for source, row in enumerate(table):
                    own = sum(strip.numel for to, strips in enumerate(row) if to != source for strip in strips)
                    sent[source] += own * dtype.itemsize
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
            read(strip, out): write the input's `strip.of(...)` into `out` [matrices, rows, columns].
            iterate(matrices, x_NAB): the orthogonal factors of a batch whose first entries are these matrices, their
                short side first.
            write(strip, o): apply the factor's [matrices, rows, columns] to `strip.of(...)` of this rank's weights.
            factor(dtype): the dtype of the factors of matrices whose state is of `dtype`; the same on every rank.
        """
        coming = self._start(self._buckets[0].inputs, self._buckets[0].dtype, read, device) if self._buckets else None
        for number, strips in self._local:
            x_NAB = self._batch(number, device)
            for strip in strips:
                read(strip, strip.within(x_NAB))
            o_NAB = iterate(self.units[number].matrices, x_NAB)
            for strip in strips:
                write(strip, strip.within(o_NAB))
        going: Arrivals | None = None
        for turn, bucket in enumerate(self._buckets):
            assert coming is not None
            arrived, coming = coming, None
            if turn + 1 < len(self._buckets):
                after = self._buckets[turn + 1]
                coming = self._start(after.inputs, after.dtype, read, device)
            factors = self._own(bucket, arrived, read, iterate, device)
            if going is not None:
                for strip, part in going():
                    write(strip, part)

            def pack(strip: Strip, out: Tensor, factors: dict[int, Tensor] = factors) -> None:
                out.copy_(strip.within(factors[strip.unit]))

            going = self._start(bucket.results, factor(bucket.dtype), pack, device)
            for strip in bucket.results[self.rank][self.rank]:
                write(strip, strip.within(factors[strip.unit]))
        if going is not None:
            for strip, part in going():
                write(strip, part)

    def _own(
        self, bucket: _Bucket, arrived: Arrivals, read: Read, iterate: Iterate, device: torch.device
    ) -> dict[int, Tensor]:
        """Fill this rank's batches of a bucket from what arrived and what it holds; their factors by unit."""
        batches = {n: self._batch(n, device) for n in bucket.units if self.units[n].owner == self.rank}
        for strip in bucket.inputs[self.rank][self.rank]:
            read(strip, strip.within(batches[strip.unit]))
        for strip, part in arrived():
            strip.within(batches[strip.unit]).copy_(part)
        return {n: iterate(self.units[n].matrices, x_NAB) for n, x_NAB in batches.items()}

    def _batch(self, number: int, device: torch.device) -> Tensor:
        """A batch [size, short, long] to be filled, zero where no matrix is."""
        unit = self.units[number]
        first = self.matrices[unit.matrices[0]]
        x_NAB = torch.empty(unit.size, *first.shape, dtype=first.dtype, device=device)
        x_NAB[len(unit.matrices) :].zero_()
        return x_NAB

    def _start(self, table: list[list[list[Strip]]], dtype: torch.dtype, pack: Read, device: torch.device) -> Arrivals:
        """Begin to send strips to other ranks. What it gives waits for those from others."""
        leaving = [[] if to == self.rank else strips for to, strips in enumerate(table[self.rank])]
        arriving = [[] if source == self.rank else row[self.rank] for source, row in enumerate(table)]
        to_send, to_receive = ([sum(s.numel for s in strips) for strips in side] for side in (leaving, arriving))
        send = torch.empty(sum(to_send), dtype=dtype, device=device)
        received = torch.empty(sum(to_receive), dtype=dtype, device=device)
        for strip, part in _parts(leaving, send):
            pack(strip, part)
        work = dist.all_to_all_single(received, send, to_receive, to_send, group=self.group, async_op=True)

        def arrivals(kept: Tensor = send) -> Iterator[tuple[Strip, Tensor]]:
            work.wait()  # `kept` must live until then
            return _parts(arriving, received)

        return arrivals


def _parts(strips: list[list[Strip]], buffer: Tensor) -> Iterator[tuple[Strip, Tensor]]:
    """Every strip with its place in a buffer of them all."""
    start = 0
    for strip in (s for some in strips for s in some):
        yield strip, buffer[start : start + strip.numel].view(strip.shape)
        start += strip.numel
