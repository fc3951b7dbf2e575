"""Pipeline parallelism on GPUs of one host: schedules, where MTP stands, pipeline ZeRO-2, offloading, recomputation.

    torchrun --nproc-per-node 2 benchmarks/pipeline.py [--parts check,schedules,placement,memory,zero2,layouts]
                               [--layers 12] [--experts 48] [--queries 4096] [--rows 1] [--micro 8] [--budget SECONDS]
                               [--layouts "zbv/2=E D M*5 | M*4 | M*2 N P | H" ...]

The model has `mini`'s widths. A step is forward and backward passes of random rows, MTP at three depths, without the
optimizer. Times of computations are CUDA events on the stream that computes (waiting for a receive is not in them), so
busy time is theirs, the bubble is the rest, and the prediction is `simulate` with these times. Memory is
`max_memory_allocated` over a step, per rank; predicted for it is what lay there before, gradients included, and what
autograd saves by the schedule's order, with the bytes of one micro-batch on each stage. "check" compares gradients,
fp32, with those of one process; "layouts" runs the given ones and one GPU alone, whose time over that of all ranks is
the efficiency. Every result is a JSON line as soon as it is there; what fails is one, too, and what the budget leaves
no time for is left out.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from glm5.model.config import ModelConfig
from glm5.model.glm5 import GLM5
from glm5.model.presets import mini
from glm5.model.trace import Aux
from glm5.parallel.compat import gathered_gradient_bytes
from glm5.parallel.mesh import Mesh, World, open_world
from glm5.parallel.pipeline.engine import Pipeline, build
from glm5.parallel.pipeline.layout import PipelineLayout
from glm5.parallel.pipeline.offload import Activations, When, chosen
from glm5.parallel.pipeline.schedule import computations, orders
from glm5.parallel.pipeline.simulate import Times, gradient_bytes, simulate
from glm5.parallel.pipeline.stage import Pass, Work
from glm5.parallel.shard import parallelize
from glm5.train.losses import language_model_loss
from glm5.train.rows import Rows

DEPTHS, MIB = 3, 2**20
# Of `mini` on two ranks, by measured times of its parts: a layer 1, the MTP block at three depths 3.2, the heads 2.8.
LAYOUTS = (
    "1f1b/1=E D M*9 | M*2 N P H",
    "interleaved/2=E D M*3 | M*6 | M*2 N P | H",
    "zero-bubble/2=E D M*3 | M*6 | M*2 N P | H",
    "zbv/2=E D M*5 | M*4 | M*2 N P | H",
)


def make_rows(
    config: ModelConfig, count: int, queries: int, device: torch.device, seed: int = 0, rows: int = 1
) -> list[Rows]:
    """Micro-batches of some rows of one document each."""
    generator = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(count):
        ids = torch.randint(0, config.vocab_size, (rows, queries + DEPTHS + 1), generator=generator).to(device)
        zero = torch.zeros_like(ids)
        ahead = range(1, DEPTHS + 2)
        ones = torch.ones(rows, queries, device=device)
        targets = tuple((ids[:, d : d + queries].contiguous(), ones) for d in ahead)
        out.append(Rows(ids, zero, zero, targets, plain=True))
    return out


def objective(count: int, args: argparse.Namespace) -> Any:
    """The loss of a stage, over the counts of all micro-batches."""
    tokens = count * args.rows * args.queries

    def loss(done: Pass) -> Tensor | None:
        terms = [1e-4 * b / (count * args.rows) for b in (*done.trunk.balance_losses, *done.mtp.balance_losses)]
        if done.head_VD is not None:
            targets = done.rows.targets[: len(done.hidden)]
            terms.append(language_model_loss(done.hidden, done.head_VD, targets, mtp_weight=0.3).loss_sum / tokens)
        return torch.stack(terms).sum() if terms else None

    return loss


def make_model(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> GLM5:
    with torch.device("meta"):
        model = GLM5(config, seed=None).to(dtype)
    model = model.to_empty(device=device).train()
    model.init_weights(0)
    for buffer in model.buffers():
        buffer.zero_()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".indexer." not in name)
    return model


@contextmanager
def saved_bytes() -> Iterator[dict[int, float]]:
    """What a micro-batch saves on each stage of this rank, of the steps in the block; their pipelines count it."""
    saved: dict[int, float] = {}
    plain = Activations.done

    def counted(self: Activations, stage: int, micro: int) -> None:
        before = self.device_bytes
        plain(self, stage, micro)
        saved[stage] = max(saved.get(stage, 0), before - self.device_bytes)

    Activations.done = counted  # type: ignore[method-assign]
    try:
        yield saved
    finally:
        Activations.done = plain  # type: ignore[method-assign]


def played(order: Sequence[Any], each: dict[int, float], when: When) -> float:
    """The most bytes on the device if a stage's micro-batch saves `each[stage]` and those that leave come back while
    the computation before their own runs."""
    listed, moved = computations(order), chosen(order, when)
    held = most = 0.0
    for i, (kind, stage, micro) in enumerate(listed):
        coming = listed[i + 1] if i + 1 < len(listed) else ("", -1, -1)
        if coming[0] in ("I", "B") and coming[1:] in moved:
            held += each[coming[1]]
        if kind == "F":
            most = max(most, held + each[stage])
            held += 0.0 if (stage, micro) in moved else each[stage]
        most = max(most, held)
        if kind in ("I", "B"):
            held -= each[stage]
    return most


class Watch:
    """CUDA events around every computation of a pipeline's stages."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.events: list[tuple[str, int, int, Any, Any]] = []
        assert pipeline._runner is not None
        for stage in pipeline._runner[2]:
            self._wrap(stage, "forward_one_chunk", lambda _: "F")
            self._wrap(stage, "backward_one_chunk", lambda options: "B" if options.get("full_backward", True) else "I")
            self._wrap(stage, "backward_weight_one_chunk", lambda _: "W")

    def _wrap(self, stage: Any, name: str, kind: Any) -> None:
        plain = getattr(stage, name)

        def timed(micro: int, *args: Any, **options: Any) -> Any:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            out = plain(micro, *args, **options)
            end.record()
            self.events.append((kind(options), stage.stage_index, micro, begin, end))
            return out

        setattr(stage, name, timed)

    def times(self) -> tuple[dict[tuple[str, int], float], float, float]:
        """Mean of each kind and stage, busy time and span of this rank, milliseconds."""
        sums, counts, busy = defaultdict(float), defaultdict(int), 0.0
        first, last = self.events[0][3], self.events[-1][4]
        for kind, stage, _, begin, end in self.events:
            took = begin.elapsed_time(end)
            sums[kind, stage] += took
            counts[kind, stage] += 1
            busy += took
        span = first.elapsed_time(last)
        self.events.clear()
        return {key: sums[key] / counts[key] for key in sums}, busy, span


def run(args: argparse.Namespace, world: World, config: ModelConfig, micro: int | None = None, **options: Any) -> dict:
    """A step whose saved bytes are counted, a warm one and a measured one."""
    micro = micro or args.micro
    model = make_model(config, world.device, torch.bfloat16)
    pipeline = build(model, world, count_activations=True, **options)
    del model
    gc.collect()  # modules and schedules of the run before refer to each other
    torch.cuda.empty_cache()
    rows, losses = make_rows(config, micro, args.queries, world.device, rows=args.rows), objective(micro, args)

    def step() -> None:
        for _, parameter in pipeline.named_parameters():
            parameter.grad = None
        pipeline.step(Work(rows, losses, depths=DEPTHS, balance=True))

    with saved_bytes() as saved:
        step()
    if pipeline.memory.offload == "never":  # counting takes the host time
        pipeline.memory, pipeline._runner = replace(pipeline.memory, count=False), None
        step()
    watch = Watch(pipeline)
    step()
    torch.cuda.synchronize()
    watch.events.clear()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    world.barrier()
    began = time.perf_counter()
    step()
    torch.cuda.synchronize()
    world.barrier()
    took = 1e3 * (time.perf_counter() - began)
    means, busy, span = watch.times()
    order = orders(pipeline.schedule, world.count("pp"), len(pipeline.layout), micro)[world.place("pp")]
    predicted = held + played(order, saved, pipeline.memory.offload)
    found = world.gather_objects(
        {
            "busy_ms": round(busy, 1),
            "span_ms": round(span, 1),
            "peak_mib": round(torch.cuda.max_memory_allocated() / MIB),
            "held_mib": round(held / MIB),
            "predicted_mib": round(predicted / MIB),
            "host_mib": round(pipeline.activations.peak_host / MIB) if pipeline.activations else 0,
            "late": pipeline.activations.late if pipeline.activations else 0,
            "means": means,
        }
    )
    each: dict[tuple[str, int], float] = {}
    for other in found:
        each |= other.pop("means")
    stages = range(len(pipeline.layout))
    split = any(kind == "W" for kind, _ in each)

    def times(stage: int) -> Times:
        whole = each.get(("B", stage))
        inputs = each.get(("I", stage), whole or 0.0)
        weights = each.get(("W", stage), 0.0)
        return Times(each["F", stage], inputs, weights if split and ("W", stage) in each else 0.0)

    timeline = simulate(orders(pipeline.schedule, world.count("pp"), len(stages), micro), [times(s) for s in stages])
    busy_all = sum(f["busy_ms"] for f in found)
    return {
        "layout": str(pipeline.layout),
        "step_ms": round(took, 1),
        "bubble": round(1 - busy_all / len(found) / took, 3),
        "predicted_ms": round(timeline.makespan, 1),
        "predicted_bubble": round(timeline.bubble, 3),
        "in_flight": timeline.in_flight,
        "stage_ms": {f"{k}{s}": round(v, 1) for (k, s), v in sorted(each.items(), key=lambda x: x[0][::-1])},
        "ranks": found,
    }


# --------------------------------------------------------------------------- parts
SCHEDULES = (("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zero-bubble", 1), ("zero-bubble", 2), ("zbv", 2))


Results = Iterator[tuple[str, Callable[[], Any]]]  # a name, and what measures it


def check(args: argparse.Namespace, world: World) -> Results:
    """Worst difference of a gradient from one process's, as a share of its largest entry."""
    config = mini(num_hidden_layers=5, hidden_size=256, vocab_size=512, n_routed_experts=8, dtype="float32")
    micro, queries = 4, 256
    args = argparse.Namespace(rows=1, queries=queries)
    rows = make_rows(config, micro, queries, world.device)
    model = make_model(config, world.device, torch.float32)
    for i, row in enumerate(rows):
        trunk, mtp = (Aux(balance=True, valid=row.valid_BT()) for _ in range(2))
        hidden = [model.hidden(row.input_BT, sparse=False, aux=trunk)]
        hidden += model.mtp_hidden(hidden[0], row.ids_BS, DEPTHS, sparse=False, aux=mtp)
        done = Pass(i, row, 1, hidden, model.lm_head.weight, trunk, mtp)
        objective(micro, args)(done).backward()
    wanted = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    def worst(name: str, each: int, offload: str, recompute: tuple[str, ...]) -> float:
        own = make_model(config, world.device, torch.float32)
        pipeline = build(own, world, schedule=name, stages_per_rank=each, offload=offload, recompute=recompute)
        pipeline.step(Work(rows, objective(micro, args), depths=DEPTHS, balance=True))
        torch.cuda.synchronize()
        apart = max(
            float((p.grad - wanted[n]).abs().max() / wanted[n].abs().max())
            for n, p in pipeline.named_parameters()
            if p.requires_grad
        )
        return max(world.gather_objects(apart))

    for name, each in (*SCHEDULES, ("dualpipev", 2)):
        for offload, recompute in (("never", ()), ("far", ("attention",))):
            yield f"{name}/{each}/{offload}", partial(worst, name, each, offload, recompute)


def schedules(args: argparse.Namespace, world: World) -> Results:
    for name, each in (*SCHEDULES, ("dualpipev", 2)):
        yield f"{name}/{each}", partial(run, args, world, shape(args), schedule=name, stages_per_rank=each)


def placement(args: argparse.Namespace, world: World) -> Results:
    """The MTP block on the stage before the heads', and with them; as many trunk layers on a rank either way."""
    config = shape(args)
    for where in ("before", "last"):
        layout = PipelineLayout.balanced(config, 2 * world.count("pp"), mtp=where)
        options = dict(layout=layout, schedule="interleaved", stages_per_rank=2)
        yield where, partial(run, args, world, config, **options)


def memory(args: argparse.Namespace, world: World) -> Results:
    """Offloading and recomputation, by a schedule that holds many micro-batches. Pinning host memory is slow: last."""
    settings = [("never", ()), ("never", ("attention",)), ("never", ("layer",)), ("far", ("layer",))]
    settings += [("far", ("attention",)), ("warmup", ("attention",)), ("far", ()), ("warmup", ())]
    for offload, recompute in settings:
        options = dict(schedule="interleaved", stages_per_rank=max(2, 6 // world.count("pp")), offload=offload)
        options |= dict(recompute=recompute)
        yield f"{offload}/{'+'.join(recompute) or 'none'}", partial(run, args, world, shape(args), **options)


def zero2(args: argparse.Namespace, world: World) -> Results:
    """Bytes of full gradients with four stages on one pipeline rank and all ranks as data ranks."""
    config = shape(args)

    def bytes_held(every: int) -> dict[str, float]:
        model = make_model(config, world.device, torch.bfloat16)
        pipeline = build(
            model,
            world,
            schedule="interleaved",
            stages_per_rank=4,
            reduce_every=every,
            wrap=lambda stage: parallelize(stage, world, reshard=False),
        )
        del model
        rows = make_rows(config, 4, args.queries, world.device, seed=world.rank, rows=args.rows)
        work = Work(rows, objective(4 * world.size, args), depths=DEPTHS, balance=True)
        pipeline.step(work)
        most, parts = 0, tuple(pipeline.stages.values())
        assert pipeline._runner is not None
        for stage in pipeline._runner[2]:
            plain = stage._after_weights

            def watched(plain: Any = plain, parts: Any = parts) -> None:
                nonlocal most
                plain()
                most = max(most, sum(gathered_gradient_bytes(part) for part in parts))

            stage._after_weights = watched
        for _, parameter in pipeline.named_parameters():
            parameter.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        pipeline.step(Work(rows, work.objective, depths=DEPTHS, balance=True))
        torch.cuda.synchronize()
        counts = [sum(p.numel() for p in s.parameters() if p.requires_grad) for s in pipeline.stages.values()]
        formula = gradient_bytes(counts, world.size, 4, zero2=every > 0)
        return {
            "step_ms": round(1e3 * (time.perf_counter() - began), 1),
            "full_mib": round(most / MIB),
            "formula_mib": round(formula.full / MIB),
            "shards_mib": round(formula.shards / MIB),
            "peak_mib": round(torch.cuda.max_memory_allocated() / MIB),
        }

    for every in (0, 4, 1):
        yield f"every {every}", partial(bytes_held, every)


def layouts(args: argparse.Namespace, world: World) -> Results:
    """One GPU alone, then each "schedule/stages a rank=layout"; the efficiency is against that GPU."""
    config, one = shape(args), 0.0

    def alone() -> dict[str, float]:
        nonlocal one
        model = make_model(config, world.device, torch.bfloat16)
        rows, losses = (
            make_rows(config, args.micro, args.queries, world.device, rows=args.rows),
            objective(args.micro, args),
        )
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            torch.cuda.synchronize()
            began = time.perf_counter()
            for i, row in enumerate(rows):
                trunk, mtp = (Aux(balance=True, valid=row.valid_BT()) for _ in range(2))
                hidden = [model.hidden(row.input_BT, sparse=False, aux=trunk)]
                hidden += model.mtp_hidden(hidden[0], row.ids_BS, DEPTHS, sparse=False, aux=mtp)
                losses(Pass(i, row, args.rows, hidden, model.lm_head.weight, trunk, mtp)).backward()
            torch.cuda.synchronize()
            one = 1e3 * (time.perf_counter() - began)
        return {"step_ms": round(one, 1)}

    def staged(name: str, each: int, layout: str) -> dict[str, Any]:
        options = dict(schedule=name, stages_per_rank=each, layout=PipelineLayout.parse(layout, config))
        found = run(args, world, config, **options)
        return {"efficiency": round(one / world.size / found["step_ms"], 3), **found}

    yield "one GPU", alone
    for text in args.layouts:
        kind, layout = text.split("=")
        name, each = kind.split("/")
        yield kind, partial(staged, name, int(each), layout)


def shape(args: argparse.Namespace) -> ModelConfig:
    return mini(num_hidden_layers=args.layers, n_routed_experts=args.experts)


PARTS = {
    "check": check,
    "schedules": schedules,
    "memory": memory,
    "zero2": zero2,
    "placement": placement,
    "layouts": layouts,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--layouts", nargs="*", default=LAYOUTS)
    parser.add_argument("--rows", type=int, default=1, help="rows of a micro-batch")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--experts", type=int, default=48)
    parser.add_argument("--queries", type=int, default=4096)
    parser.add_argument("--micro", type=int, default=8)
    parser.add_argument("--budget", type=float, default=600.0, help="seconds, after which no measurement begins")
    args = parser.parse_args()
    size, local, began = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"]), time.perf_counter()
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local))  # once: the parts' worlds use it
    for part in args.parts.split(","):
        with open_world(Mesh(dp=size) if part == "zero2" else Mesh(pp=size), "cuda") as world:
            for name, measure in PARTS[part](args, world):
                at = time.perf_counter() - began
                if any(world.gather_objects(at > args.budget)):
                    found: Any = "no time left"
                else:
                    try:
                        found = measure()
                    except Exception:
                        found = traceback.format_exc()[-1500:]
                if world.main:
                    print(json.dumps({"at": round(at, 1), "part": part, "of": name, "found": found}), flush=True)
                gc.collect()
                torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
