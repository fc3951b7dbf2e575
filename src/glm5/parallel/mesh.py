"""Which rank does what: a mesh as text, checked against model and devices, and built into torch's process groups.

    Mesh.parse("dp=2,ep=2,pp=2")         a description; needs no torch and no devices
    with open_world(mesh, "cpu") as w:   this process's place in it: groups, coordinates, device meshes

Ranks are numbered pipeline stage first, then data, context and tensor parallel, so that the ranks that talk most are
neighbours. Two axes are folds of the data ranks (dp x cp), not further factors: `shard`, over which FSDP cuts
parameters (the rest replicates them), and `ep`, over which experts are spread. For the experts the remaining data ranks
and the tensor ranks hold copies: axis `edp`. Source: report section 2.4. Read next: `shard`, `expert`, `tensor`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from glm5.utils.errors import ConfigError, UserError

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from glm5.model.config import ModelConfig
    from glm5.parallel.watch import Watch

# How long a collective may wait for a rank before the run ends with an error.
TIMEOUT_SECONDS = 600.0
# The same where the others wait for one that reads or writes files, such as a corpus to be tokenized.
FILES_TIMEOUT_SECONDS = 4 * 3600.0


class ParallelError(UserError):
    """Ranks cannot start, or do not fit together. The message names rank and cause."""


@dataclass(frozen=True)
class Mesh:
    """How many ways each kind of parallelism divides the work.

    Attributes:
        dp: data parallel: rows of a step. pp: pipeline stages. cp: context parallel: positions of a row. tp: tensor
            parallel: heads and widths of dense layers. Their product is the number of processes.
        ep: expert parallel, a fold of the dp x cp ranks.
        shard: how many of the dp x cp ranks share one copy of the parameters (FSDP); 0 is all of them.
    """

    dp: int = 1
    pp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    shard: int = 0

    def __post_init__(self) -> None:
        for axis in fields(self):
            value = getattr(self, axis.name)
            least = 0 if axis.name == "shard" else 1
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"mesh.{axis.name}", value, f"must be an integer of at least {least}")
        for name in ("ep", "shard"):
            value = getattr(self, name)
            if value and self.data % value:
                rule = f"must divide dp x cp = {self.data}, the ranks that it folds on"
                raise ConfigError(f"mesh.{name}", value, rule)

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """The mesh of "dp=2,ep=2"; axes that are not named are 1, and the empty text is one process.

        Raises:
            ConfigError: an axis is unknown, given twice, or no positive integer, or the axes do not fit together.
        """
        known = [axis.name for axis in fields(cls)]
        values: dict[str, int] = {}
        for part in text.replace(" ", "").split(",") if text.strip() else []:
            found = re.fullmatch(r"([a-z]+)=(-?\d+)", part)
            if found is None:
                raise ConfigError("mesh", text, f"{part!r} is no axis=number; write it like dp=2,ep=2,pp=2")
            name = found[1]
            if name not in known:
                raise ConfigError("mesh", text, f"unknown axis {name!r}; there are {', '.join(known)}")
            if name in values:
                raise ConfigError("mesh", text, f"axis {name!r} is given twice")
            values[name] = int(found[2])
        return cls(**values)

    def __str__(self) -> str:
        values = {axis.name: getattr(self, axis.name) for axis in fields(self)}
        named = [f"{name}={value}" for name, value in values.items() if value != (0 if name == "shard" else 1)]
        return ",".join(named) or "dp=1"

    @property
    def data(self) -> int:
        """Ranks that see different tokens of a step: dp x cp."""
        return self.dp * self.cp

    @property
    def sharded(self) -> int:
        """Ranks that share one copy of the parameters."""
        return self.shard or self.data

    @property
    def replicas(self) -> int:
        """Copies of the parameters over the data ranks."""
        return self.data // self.sharded

    @property
    def edp(self) -> int:
        """Copies of each expert: what is left of the data ranks, times the tensor ranks."""
        return self.data // self.ep * self.tp

    @property
    def size(self) -> int:
        """Processes."""
        return self.pp * self.data * self.tp

    def check_devices(self, count: int) -> None:
        """Whether so many processes are what it takes.

        Raises:
            ConfigError: they are not; it says how to start them.
        """
        if count != self.size:
            parts = " x ".join(f"{n}={getattr(self, n)}" for n in ("pp", "dp", "cp", "tp"))
            start = f"start it with torchrun --nproc-per-node {self.size}"
            rule = f"{parts} needs {self.size} processes, and here {'is' if count == 1 else 'are'} {count}: {start}"
            raise ConfigError("mesh", str(self), rule)

    def check_model(self, model: ModelConfig) -> None:
        """Whether a model can be divided so.

        Raises:
            ConfigError: experts, heads or widths do not divide, or there are more stages than layers.
        """
        routed = any(kind == "sparse" for kind in model.layer_types) or model.num_nextn_predict_layers > 0
        if self.ep > 1 and (not routed or model.n_routed_experts % self.ep):
            rule = f"must divide n_routed_experts={model.n_routed_experts}" if routed else "this model has no experts"
            raise ConfigError("mesh.ep", self.ep, rule)
        names = ["num_attention_heads", "intermediate_size", "vocab_size"]
        names += ["num_key_value_heads"] if model.attention != "mla" else []
        for name in names if self.tp > 1 else []:
            if getattr(model, name) % self.tp:
                raise ConfigError("mesh.tp", self.tp, f"must divide {name}={getattr(model, name)}")
        shared = model.moe_intermediate_size * model.n_shared_experts
        if shared % self.tp:
            raise ConfigError("mesh.tp", self.tp, f"must divide the shared expert's width {shared}")
        if self.pp > model.num_hidden_layers:
            rule = f"must be at most num_hidden_layers={model.num_hidden_layers}"
            raise ConfigError("mesh.pp", self.pp, rule)


class World:
    """This process's place in a mesh that runs: coordinates, process groups, torch device meshes.

    Axes by name: `pp`, `dp`, `cp`, `tp`, `data` (dp x cp), `stage` (all of one pipeline stage), `replicate`, `shard`,
    `ep`, `edp` and `world`; `files` is the world again, on CPUs, where main threads wait for one that reads or writes
    files; threads that write beside training have groups of their own (`glm5.train.sharded`).

    Attributes:
        mesh, device, rank, size.
        dense: DeviceMesh ("pp", "replicate", "shard", "tp"), for all parameters but the experts.
        expert: DeviceMesh ("pp", "edp", "ep"), for the experts.
    """

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        """Every rank makes all groups, in one order."""
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import DeviceMesh

        self.mesh, self.device = mesh, device
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.watch: Watch | None = None
        ranks = torch.arange(mesh.size)
        base = ranks.view(mesh.pp, mesh.dp, mesh.cp, mesh.tp)
        expert = ranks.view(mesh.pp, mesh.data // mesh.ep, mesh.ep, mesh.tp).transpose(2, 3)

        def build(grid: torch.Tensor, *names: str) -> DeviceMesh:
            return DeviceMesh(device.type, grid.reshape(grid.shape[: len(names)]), mesh_dim_names=names)

        self.base = build(base, "pp", "dp", "cp", "tp")
        self.dense = build(base.view(mesh.pp, mesh.replicas, mesh.sharded, mesh.tp), "pp", "replicate", "shard", "tp")
        self.expert = build(expert.reshape(mesh.pp, mesh.edp, mesh.ep), "pp", "edp", "ep")
        data = build(base.view(mesh.pp, mesh.data, mesh.tp), "stages", "data", "tensor")
        stage = build(base.view(mesh.pp, mesh.data * mesh.tp), "stages", "stage")
        self._homes: dict[str, DeviceMesh] = dict.fromkeys(("pp", "dp", "cp", "tp"), self.base)
        self._homes |= {"replicate": self.dense, "shard": self.dense, "ep": self.expert, "edp": self.expert}
        self._homes |= {"data": data, "stage": stage}
        self._files = dist.new_group(backend="gloo", timeout=timedelta(seconds=FILES_TIMEOUT_SECONDS))

    def group(self, axis: str) -> ProcessGroup:
        """The process group of the ranks that differ from this one along `axis` only."""
        import torch.distributed as dist

        if axis == "world":
            assert dist.group.WORLD is not None
            return dist.group.WORLD
        if axis == "files":
            return self._files
        return self._home(axis).get_group(axis)

    def count(self, axis: str) -> int:
        """Ranks along an axis."""
        return self.size if axis in ("world", "files") else self._home(axis)[axis].size()

    def place(self, axis: str) -> int:
        """This rank's place along an axis, from 0."""
        return self.rank if axis in ("world", "files") else self._home(axis).get_local_rank(axis)

    def ranks(self, axis: str) -> list[int]:
        """Global ranks of the group, in order."""
        import torch.distributed as dist

        return dist.get_process_group_ranks(self.group(axis))

    def _home(self, axis: str) -> DeviceMesh:
        if axis not in self._homes:
            raise KeyError(f"no axis {axis!r}: there are {', '.join(self._homes)} and world")
        return self._homes[axis]

    @property
    def main(self) -> bool:
        """Whether this is rank 0, which speaks and writes."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait for all ranks."""
        import torch.distributed as dist

        if self.device.type == "cuda":
            dist.barrier(device_ids=[self.device.index or 0])
        else:
            dist.barrier()

    def gather_objects(self, value: Any, axis: str = "world") -> list[Any]:
        """Every rank's `value`, on every rank, in the order of the axis. Pickled between our own processes."""
        import torch.distributed as dist

        out: list[Any] = [None] * self.count(axis)
        dist.all_gather_object(out, value, group=self.group(axis))
        return out


def launched() -> bool:
    """Whether torchrun (or a launcher with its variables) started this process."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


@contextmanager
def open_world(mesh: Mesh, device: str = "auto", timeout: float = TIMEOUT_SECONDS) -> Iterator[World]:
    """Join the processes that torchrun started, or be a world of one; leave it at the end.

    NCCL on CUDA devices (one a process, by LOCAL_RANK), gloo on CPUs. A process group that is there already is used
    and left as it was.

    Args:
        device: "cpu", "cuda", or "auto": a GPU where there is one.
        timeout: seconds that start-up and each collective may wait for another rank.

    Raises:
        ConfigError: another number of processes than the mesh needs, or more processes on a host than GPUs.
        ParallelError: the processes did not find each other in time.
    """
    import torch
    import torch.distributed as dist

    own = not dist.is_initialized()
    if not own:
        mesh.check_devices(dist.get_world_size())
    else:
        mesh.check_devices(int(os.environ["WORLD_SIZE"]) if launched() else 1)
    where = _device(device)
    if own:
        _join(where, timeout)
    try:
        yield World(mesh, where)
    finally:
        if own and dist.is_initialized():
            if where.type == "cuda":
                torch.cuda.synchronize(where)
            dist.destroy_process_group()


def _device(name: str) -> torch.device:
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    local, here = (int(os.environ.get(n, d)) for n, d in (("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1")))
    check_gpus(max(here, local + 1))
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def check_gpus(processes: int) -> None:
    """Whether this host has a GPU for each of so many processes.

    Raises:
        ConfigError: it has not.
    """
    import torch

    found = torch.cuda.device_count()
    if processes > found:
        rule = f"{processes} processes on this host need as many GPUs, and here are {found}: start fewer, or use cpu"
        raise ConfigError("device", "cuda", rule)


def _join(device: torch.device, timeout: float) -> None:
    import torch.distributed as dist

    backend = "nccl" if device.type == "cuda" else "gloo"
    wait = timedelta(seconds=timeout)
    if not launched():
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=wait)
        return
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # A launcher that starts all again keeps its store, where the addresses of those before would be found.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=wait))
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(f"glm5-{attempt}", store),
            rank=rank,
            world_size=size,
            timeout=wait,
            device_id=device if device.type == "cuda" else None,
        )
    except (dist.DistStoreError, dist.DistNetworkError, RuntimeError, ValueError) as e:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        what = f"rank {rank} of {size} did not find the others at {address} within {timeout:.0f} s: {_first_line(e)}"
        raise ParallelError(what, "Start all ranks with the same torchrun command, and look for one that died") from e


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:200] or type(error).__name__
