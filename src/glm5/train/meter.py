"""What a step cost beside its time: FLOP against the devices' peak, exposed communication, bubble, memory by kind.

FLOP are counted from what the rows hold (`glm5.ledger.step`), in every step. The rest is measured with the steps that
`measure_every` names, since it puts marks around collectives and computations. Read next: `loop`, `parallel.waits`.
"""

from __future__ import annotations

import resource
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from glm5.ledger.step import named_device, step_flops
from glm5.model.config import ModelConfig
from glm5.train.config import TrainConfig
from glm5.train.ranks import Ranks
from glm5.train.totals import Counts

if TYPE_CHECKING:
    from glm5.parallel.pipeline.engine import Pipeline
    from glm5.parallel.waits import Waits


class Meter:
    """Measures the steps of one stage.

    Args:
        dtype: of the model; a share of a device's peak is given where that is known, which is in bf16.
    """

    def __init__(
        self, config: TrainConfig, model: ModelConfig, ranks: Ranks, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.config, self.model, self.ranks, self.device = config, model, ranks, device
        known = named_device(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        self.peak = known.bf16_flops if known is not None and dtype == torch.bfloat16 else None
        self._waits: Waits | None = None
        self._pipeline: Pipeline | None = None

    def speed(self, counts: Counts, seconds: float) -> dict[str, Any]:
        """TFLOP/s of each device, and its share of the device's peak by kind, where that is known."""
        mtp = self.config.mtp_depths * counts.mtp_rows / counts.rows
        seen = dict(tokens=counts.queries, pairs=counts.pairs, selected=counts.selected)
        flops = step_flops(self.model, self.config.stage, **seen, mtp=mtp)
        devices = 1 if self.ranks.world is None else self.ranks.world.size
        found: dict[str, Any] = {"tflops_per_device": flops.total / seconds / devices / 1e12}
        return found if self.peak is None else {**found, "mfu": flops.shares(seconds, devices, self.peak)}

    @contextmanager
    def watching(self, pipeline: Pipeline | None, on: bool) -> Iterator[None]:
        """Mark the waits and computations of the block, if `on`; `costs` then says what came of it."""
        if not on or self.ranks.world is None:
            yield
            return
        from glm5.parallel.pipeline.clock import Clock
        from glm5.parallel.waits import Waits

        self._pipeline = pipeline
        if pipeline is not None:
            pipeline.clock = Clock(self.device)
        with Waits(self.device) as self._waits:
            yield

    def costs(self, seconds: float, parameters: Iterable[nn.Parameter], state: Iterable[Tensor]) -> dict[str, Any]:
        """Of the step that was watched; all ranks call it.

        Args:
            seconds: that the step took. parameters: what this rank holds, with the step's gradients. state: the
                optimizer's.

        Returns:
            "memory": MiB of parameters, gradients, optimizer, and of the rest of the peak (activations, buffers; on a
            CPU also the libraries); of "host" memory, where activations wait there: each the most of any rank.
            "exposed_communication": share of the step, of the rank that waits longest. "bubble", and "bubble_played" of
            its schedule with the measured times: of a pipeline.
        """
        ranks, found = self.ranks, dict[str, Any]()
        kinds = memory_of(ranks, parameters, state)
        kinds["rest"] = memory_mib(self.device) - sum(kinds.values())
        if self._pipeline is not None and self._pipeline.activations is not None:
            kinds["host"] = self._pipeline.activations.peak_host / 2**20
        waited = 0.0 if self._waits is None else self._waits.seconds() / seconds
        most = ranks.largest(torch.tensor([waited, *kinds.values()], device=ranks.device)).tolist()
        found["memory"] = dict(zip(kinds, most[1:], strict=True))
        if self._waits is not None:
            found["exposed_communication"] = most[0]
        if self._pipeline is not None:
            times = self._pipeline.bubble()
            found["bubble"] = float(ranks.largest(torch.tensor(times["bubble"], device=ranks.device)))
            if "played" in times:
                found["bubble_played"] = times["played"]
            self._pipeline.clock = None
        self._waits = self._pipeline = None
        return found


def memory_of(ranks: Ranks, parameters: Iterable[nn.Parameter], state: Iterable[Tensor]) -> dict[str, float]:
    """MiB that this rank holds of parameters, of their gradients, and of the optimizer's state."""

    def mib(tensors: Iterable[Tensor | None]) -> float:
        own = [ranks.local(t) for t in tensors if t is not None]
        return sum(t.numel() * t.element_size() for t in own) / 2**20

    held = list(parameters)
    return {"parameters": mib(held), "gradients": mib(p.grad for p in held), "optimizer": mib(state)}


def memory_mib(device: torch.device) -> float:
    """Peak memory: of the device, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
