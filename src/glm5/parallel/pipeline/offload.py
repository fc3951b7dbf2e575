"""Activations of far micro-batches wait in host memory, and what is held where is counted.

In a pipeline's warm-up a rank runs the forward passes of several micro-batches whose backward passes come much later.
What autograd saves for those is copied out to pinned memory while the next ones compute, and copied back, one
computation ahead, before it is read. Copies have streams of their own. A copy back waits for its own copy out, and a
buffer is written again only after it was read: events say so, not luck. Parameters never move. Source: report section
2.4.1. On a CPU the same code runs, its "device" memory being other host memory.

Read next: `recompute`, which leaves less to move.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from glm5.parallel.pipeline.schedule import computations

When = Literal["never", "warmup", "far"]
Key = tuple[int, int]  # stage, micro-batch

LEAST_BYTES = 1 << 16  # smaller tensors stay: a copy's launch costs more than their memory


def chosen(order: Sequence[Any], when: When) -> set[Key]:
    """Which of a rank's forward passes leave their activations to host memory.

    Args:
        when: "warmup" those before the rank's first backward pass, "far" all; in either case without those whose
            backward pass is the next computation but one, which would come back before they had left.
    """
    listed = computations(order)
    backward = {(stage, micro): i for i, (kind, stage, micro) in enumerate(listed) if kind in "IB"}
    first = min(backward.values(), default=0)
    out = set()
    for i, (kind, stage, micro) in enumerate(listed):
        far = kind == "F" and backward.get((stage, micro), i) - i > 2
        if far and (when == "far" or (when == "warmup" and i < first)):
            out.add((stage, micro))
    return out


@dataclass
class _Moved:
    """A saved tensor that lies in host memory, or is on its way from or to there."""

    host: Tensor
    buffer: _Buffer
    device: Tensor | None = None
    ready: Any = None  # event: the copy back is done


@dataclass
class _Buffer:
    """Host memory, and the event after which it may be written again, or read."""

    memory: Tensor
    event: Any = None


class Activations:
    """What autograd saves on one rank, between the forward and the backward pass of each micro-batch and stage.

    Args:
        order: the rank's computations. when: which micro-batches move (see `chosen`).

    Attributes:
        device_bytes, host_bytes: held now. peak_device, peak_host: the most so far. late: tensors that were read before
            their copy back had begun.
    """

    def __init__(self, device: torch.device, order: Sequence[Any], when: When) -> None:
        self.device = device
        self.chosen = chosen(order, when)
        listed = computations(order)
        # While computation i runs, what i + 1 reads comes back.
        self._ahead: dict[tuple[str, int, int], Key] = {}
        for now, (kind, stage, micro) in pairwise(listed):
            if kind in "IB" and (stage, micro) in self.chosen:
                self._ahead[now] = (stage, micro)
        self._moved: dict[Key, list[_Moved]] = defaultdict(list)
        self._staying: dict[Key, int] = defaultdict(int)
        self._free: dict[int, list[_Buffer]] = defaultdict(list)
        on_gpu = device.type == "cuda"
        self._out = torch.cuda.Stream(device) if on_gpu else None
        self._back = torch.cuda.Stream(device) if on_gpu else None
        self.device_bytes = self.host_bytes = self.peak_device = self.peak_host = self.late = 0

    # ------------------------------------------------------------------ forward
    @contextmanager
    def saving(self, stage: int, micro: int) -> Iterator[None]:
        """Around a stage's forward pass."""
        key = (stage, micro)
        moves = key in self.chosen
        # Weak references: the memory of what moved may be another tensor's a moment later, its storage cannot.
        seen: dict[tuple[Any, ...], tuple[StorageWeakRef, _Moved]] = {}
        storages: dict[int, StorageWeakRef] = {}

        def pack(t: Tensor) -> Tensor | _Moved:
            if t.device.type != self.device.type or _is_parameter(t):
                return t
            size, storage = t.numel() * t.element_size(), t.untyped_storage()
            if moves and LEAST_BYTES <= size <= storage.nbytes():  # larger: an expanded view
                held = StorageWeakRef(storage)
                same = (held.cdata, t.storage_offset(), t._version, t.dtype, t.shape, t.stride())
                if same not in seen:
                    seen[same] = (held, self._move_out(t, size))
                    self._moved[key].append(seen[same][1])
                return seen[same][1]
            held = StorageWeakRef(storage)
            if held.cdata not in storages:
                storages[held.cdata] = held
                self._staying[key] += storage.nbytes()
                self._count(device=storage.nbytes())
            return t

        def unpack(packed: Tensor | _Moved) -> Tensor:
            return packed if isinstance(packed, Tensor) else self._read(packed)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    def _move_out(self, t: Tensor, size: int) -> _Moved:
        room = _rounded(size)
        free = self._free[room]
        buffer = free.pop() if free else _Buffer(torch.empty(room, dtype=torch.uint8, pin_memory=self._out is not None))
        flat = buffer.memory[:size].view(t.dtype)
        host = flat.as_strided(t.shape, t.stride()) if _is_dense(t) else flat.view(t.shape)
        if self._out is None:
            host.copy_(t.detach())
        else:
            self._out.wait_stream(torch.cuda.current_stream(self.device))
            if buffer.event is not None:
                self._out.wait_event(buffer.event)  # what was read from it last
            with torch.cuda.stream(self._out):
                host.copy_(t.detach(), non_blocking=True)
                buffer.event = self._out.record_event()
            t.record_stream(self._out)
        self._count(host=room)
        return _Moved(host, buffer)

    # ------------------------------------------------------------------ backward
    def before(self, kind: str, stage: int, micro: int) -> None:
        """A computation is about to begin: fetch what the one after it will read."""
        key = self._ahead.get((kind, stage, micro))
        for moved in self._moved.get(key, ()) if key is not None else ():
            if moved.device is None:
                self._move_back(moved)

    def _move_back(self, moved: _Moved) -> None:
        host = moved.host
        moved.device = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=self.device)
        if self._back is None:
            moved.device.copy_(host)
        else:
            self._back.wait_stream(torch.cuda.current_stream(self.device))  # whose memory it may be
            self._back.wait_event(moved.buffer.event)  # its own copy out
            with torch.cuda.stream(self._back):
                moved.device.copy_(host, non_blocking=True)
                moved.ready = moved.buffer.event = self._back.record_event()
            moved.device.record_stream(self._back)
        self._count(device=host.numel() * host.element_size())

    def _read(self, moved: _Moved) -> Tensor:
        if moved.device is None:
            self.late += 1
            self._move_back(moved)
        assert moved.device is not None
        if moved.ready is not None:
            torch.cuda.current_stream(self.device).wait_event(moved.ready)
        return moved.device

    def done(self, stage: int, micro: int) -> None:
        """The backward pass was made: give all of it back."""
        for moved in self._moved.pop((stage, micro), ()):
            room, size = moved.buffer.memory.numel(), moved.host.numel() * moved.host.element_size()
            self._count(host=-room, device=-size if moved.device is not None else 0)
            moved.device = None
            self._free[room].append(moved.buffer)
        self._count(device=-self._staying.pop((stage, micro), 0))

    def _count(self, device: int = 0, host: int = 0) -> None:
        self.device_bytes += device
        self.host_bytes += host
        self.peak_device = max(self.peak_device, self.device_bytes)
        self.peak_host = max(self.peak_host, self.host_bytes)


def _rounded(size: int) -> int:
    """A size of buffers that fits: an eighth more at most, so that few sizes serve all. Pinning memory is slow."""
    step = max(4096, 1 << max(0, size.bit_length() - 4))
    return -(-size // step) * step


def _is_parameter(t: Tensor) -> bool:
    """A parameter, a view of one, or a stage's input, which the schedule holds anyway."""
    base = t if t._base is None else t._base
    return isinstance(base, nn.Parameter) or (base.is_leaf and base.requires_grad)


def _is_dense(t: Tensor) -> bool:
    """Whether its elements fill one stretch of memory, in any order of the axes."""
    expected = 1
    for stride, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
