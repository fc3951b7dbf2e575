"""What the report's items (section 2.4) save, in bytes: without each, as its formula predicts, and as it was counted.

    torchrun --nproc-per-node 4 benchmarks/savings.py [--preset nano] [--micro 8] [--queries 128] [--json FILE]

Runs on CPUs: bytes are counted where they are held or sent (what autograd saves between a stage's forward and backward
pass, gradients that lie whole, payloads of Muon's exchange), not read from an allocator, so that they are the same on
any device but for the width of a number: fp32 here. Each line is of the rank that has most. Times and peaks of an
allocator are `benchmarks/pipeline.py`'s, on GPUs. `docs/parallel.md` quotes the table.

Predictions: activations by the schedule's formula, or by playing its order, with the bytes of one micro-batch on one
stage; gradients by `simulate.gradient_bytes`, a bound; Muon by its plan, beside bringing every matrix to every rank.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from glm5.model.config import ModelConfig
from glm5.model.presets import preset
from glm5.parallel.compat import gathered_gradient_bytes
from glm5.parallel.holdings import Holdings
from glm5.parallel.mesh import Mesh, World, open_world
from glm5.parallel.pipeline import offload
from glm5.parallel.pipeline.engine import Pipeline, RunningStage, build
from glm5.parallel.pipeline.layout import Costs, PipelineLayout
from glm5.parallel.pipeline.schedule import orders
from glm5.parallel.pipeline.simulate import gradient_bytes, in_flight
from glm5.parallel.pipeline.stage import Work
from glm5.parallel.shard import parallelize
from glm5.train.optim import MuonSplit
from glm5.train.roles import parameter_roles
from pipeline import DEPTHS, make_model, make_rows, objective, played, saved_bytes

MIB = 2**20


@dataclass(frozen=True)
class Row:
    """One item: MiB without it, predicted and counted with it."""

    item: str
    case: str
    without: float
    predicted: float
    counted: float

    def __str__(self) -> str:
        return f"{self.item:34}{self.case:44}{self.without:>10.2f}{self.predicted:>11.2f}{self.counted:>10.2f}"


@dataclass(frozen=True)
class Lab:
    """The ranks, and a step's work."""

    world: World
    config: ModelConfig
    args: argparse.Namespace

    def on(self, mesh: str) -> World:
        return World(Mesh.parse(mesh), self.world.device)

    def most(self, value: float) -> float:
        return max(self.world.gather_objects(value))

    def step(self, world: World, micro: int, **options: Any) -> Pipeline:
        """A pipeline after one step of so many micro-batches."""
        pipeline = build(make_model(self.config, world.device, torch.float32), world, **options)
        rows = make_rows(self.config, micro, self.args.queries, world.device, seed=world.place("dp"))
        count = micro * world.count("dp")
        pipeline.step(Work(rows, objective(count, self.args), depths=DEPTHS, balance=True))
        return pipeline

    def held(self, world: World, micro: int, **options: Any) -> int:
        """Bytes that autograd had saved at once on this rank."""
        activations = self.step(world, micro, count_activations=True, **options).activations
        assert activations is not None
        return activations.peak_device


def activations(lab: Lab) -> Iterator[Row]:
    """1F1B's micro-batches in flight; host memory; running again."""
    world, micro = lab.on("pp=4"), lab.args.micro
    rank = world.place("pp")
    layout = str(PipelineLayout.balanced(lab.config, 4))
    one = lab.held(world, 1, layout=layout)
    counted = lab.held(world, micro, layout=layout)
    predicted = min(micro, in_flight("1f1b", 4, 1, rank)) * one
    yield Row("1F1B", "4 ranks", lab.most(micro * one), lab.most(predicted), lab.most(counted))

    world = lab.on("pp=2,dp=2,shard=1")
    rank = world.place("pp")
    options: dict[str, Any] = dict(schedule="interleaved", stages_per_rank=2)
    order = orders("interleaved", 2, 4, micro)[rank]
    plain = lab.held(world, micro, **options)
    each = stage_bytes(lab, world, options)
    for when in ("warmup", "far"):
        counted = lab.held(world, micro, offload=when, **options)
        predicted = played(order, each, when)  # type: ignore[arg-type]
        yield Row("activations in host memory", f"interleaved, {when}", *map(lab.most, (plain, predicted, counted)))
    for parts in (("attention",), ("layer",)):
        counted = lab.held(world, micro, recompute=parts, **options)
        fewer = stage_bytes(lab, world, {**options, "recompute": parts})
        predicted = played(order, fewer, "never")
        yield Row("recomputation", f"interleaved, {parts[0]}", *map(lab.most, (plain, predicted, counted)))


def stage_bytes(lab: Lab, world: World, options: dict[str, Any]) -> dict[int, float]:
    """What one micro-batch saves on each of this rank's stages: of one that goes through alone."""
    with saved_bytes() as saved:
        lab.step(world, 2, count_activations=True, **options)
    return saved


def placement(lab: Lab) -> Iterator[Row]:
    """Parameters with their gradients, and what micro-batches save, on the heads' stage and on the first of four."""
    world, micro, costs = lab.on("pp=4"), lab.args.micro, Costs.count(lab.config, depths=DEPTHS)
    rank, found = world.place("pp"), {}
    for where in ("last", "before"):
        layout = PipelineLayout.balanced(lab.config, 4, costs, mtp=where)  # type: ignore[arg-type]
        one = lab.held(world, 1, layout=layout)
        pipeline = lab.step(world, micro, layout=layout, count_activations=True)
        assert pipeline.activations is not None
        state = sum(8 * p.numel() for _, p in pipeline.named_parameters() if p.requires_grad)
        own = state + in_flight("1f1b", 4, 1, rank) * one, state + pipeline.activations.peak_device
        found[where] = world.gather_objects(own, "pp")
    for name, stage in (("the heads' stage", 3), ("the first stage", 0)):
        yield Row(
            "MTP block before the heads' stage", f"4 ranks, {name}", found["last"][stage][1], *found["before"][stage]
        )


def zero2(lab: Lab) -> Iterator[Row]:
    """Full gradients on a rank of three stages."""
    world, found = lab.on("pp=2,dp=2"), {}
    plain = RunningStage._after_weights
    for every in (0, 2):
        most, parts = 0, list[Any]()

        def wrap(stage: Any, parts: list[Any] = parts) -> None:
            parts.append(parallelize(stage, world, reshard=False))

        def watched(stage: RunningStage, parts: list[Any] = parts) -> None:
            nonlocal most
            plain(stage)
            most = max(most, sum(map(gathered_gradient_bytes, parts)))

        RunningStage._after_weights = watched  # type: ignore[method-assign]
        try:
            options: dict[str, Any] = dict(schedule="interleaved", stages_per_rank=3, reduce_every=every)
            lab.step(world, lab.args.micro, wrap=wrap, **options)
        finally:
            RunningStage._after_weights = plain  # type: ignore[method-assign]
        counts = [sum(p.numel() for p in part.parameters() if p.requires_grad) for part in parts]
        found[every] = lab.most(gradient_bytes(counts, 2, zero2=every > 0).full), lab.most(most)
    yield Row(
        "pipeline ZeRO-2, full gradients", "3 stages a rank, every 2 (predicted: at most)", found[0][1], *found[2]
    )


def muon(lab: Lab) -> Iterator[Row]:
    """Bytes that a rank sends in a step of the optimizer."""
    plain = dist.all_to_all_single
    for mesh in ("dp=4", "dp=2,tp=2"):
        world = lab.on(mesh)
        model = parallelize(make_model(lab.config, world.device, torch.float32), world)
        roles = parameter_roles(model, lab.config)
        holdings = Holdings([role.parameter for role in roles], world.group("stage"))
        optimizer = MuonSplit(roles, 1e-3, holdings=holdings, ns_dtype=torch.bfloat16)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        sent = 0

        def counted(out: Any, x: Any, to_receive: Any, to_send: Any, group: Any, **options: Any) -> Any:
            nonlocal sent
            sent += (sum(to_send) - to_send[group.rank()]) * x.element_size()
            return plain(out, x, to_receive, to_send, group=group, **options)

        dist.all_to_all_single = counted
        try:
            optimizer.step()
        finally:
            dist.all_to_all_single = plain
        assert optimizer._spread is not None
        predicted = optimizer._spread.exchange.wire_bytes(lambda _: torch.bfloat16)[world.rank]
        live = [r.parameter for r in roles if r.optimizer == "muon" and r.parameter.requires_grad]
        everywhere = sum(4 * holdings.local(p).numel() / holdings.replicas(p) * 3 for p in live)
        yield Row("Muon, sent by a rank", mesh, *map(lab.most, (everywhere, predicted, sent)))


PARTS = (activations, placement, zero2, muon)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="nano")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--queries", type=int, default=128)
    parser.add_argument("--micro", type=int, default=8)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.rows = 1
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    config = preset(args.preset, num_hidden_layers=args.layers)
    offload.LEAST_BYTES = 0
    rows = []
    with open_world(Mesh(dp=4), "cpu") as world:
        if world.main:
            print(f"{'MiB':78}{'without':>10}{'predicted':>11}{'counted':>10}", flush=True)
        for part in PARTS:
            for row in part(Lab(world, config, args)):
                row = Row(row.item, row.case, *(x / MIB for x in (row.without, row.predicted, row.counted)))
                rows.append(row)
                if world.main:
                    print(row, flush=True)
        if world.main and args.json:
            args.json.write_text(json.dumps({"options": sys.argv[1:], "rows": [asdict(r) for r in rows]}, indent=1))


if __name__ == "__main__":
    main()
