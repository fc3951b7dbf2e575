"""Speed and equality of meshes on GPUs, started by torchrun with as many processes as the meshes need.

    torchrun --nproc-per-node 2 benchmarks/parallel.py --meshes dp=2 dp=2,ep=2 dp=2,shard=1 tp=2 --prefetch 0 1 2

One GPU alone, then for each mesh: gradients of one fp32 step of a small model against this process's own (the largest
difference as a share of its tensor's largest entry); tokens a second of `mini` in bf16 on rows of one document, as the
Trainer runs it, with each number of blocks gathered ahead and with parameters gathered once (on meshes of shard=1:
copies, without FSDP); and the share of a step that a rank waits for collectives ("exposed"). `--cuda-graphs` records
what can be recorded, on one GPU and on many. Every result is a JSON line as soon as it is there; what fails is one,
too, and what the budget leaves no time for is left out.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from glm5.data.corpus import Document
from glm5.data.loader import Loader, TokenDataset
from glm5.model.glm5 import GLM5
from glm5.model.presets import mini, nano
from glm5.model.trace import Aux
from glm5.parallel.mesh import Mesh, World, open_world
from glm5.parallel.shard import parallelize, whole
from glm5.parallel.waits import Waits
from glm5.train.config import TrainConfig
from glm5.train.loop import Trainer
from glm5.train.losses import language_model_loss
from glm5.train.ranks import Ranks
from glm5.train.schedule import BatchWarmup, LearningRate
from training_peers import RandomTokens

Named = dict[str, torch.Tensor]


def backward(model: GLM5, ranks: Ranks, ids: torch.Tensor, micro: int, tokens: int) -> None:
    """Gradients of the mean next-token loss over `tokens` tokens, of which `ids` are this rank's."""
    count = len(ids) // micro
    for i in range(count):
        ranks.before(i, count, model)
        part = ids[i * micro : (i + 1) * micro]
        hidden = model.hidden(part[:, :-1], sparse=False, aux=Aux(balance=True))
        weight, head = ranks.head(model)
        target = part[:, 1:].contiguous()
        ones = torch.ones(target.shape, device=ids.device)
        loss = language_model_loss([hidden], weight, [(target, ones)], cross_entropy=head.cross_entropy)
        (loss.loss_sum / tokens).backward()
    ranks.after(model)


def made(config: Any, device: torch.device) -> GLM5:
    with device:
        model = GLM5(config, seed=0).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".indexer." not in name and f".layers.{config.num_hidden_layers}." not in name)
    return model


def share(ids: torch.Tensor, world: World | None) -> torch.Tensor:
    return ids if world is None else ids[world.place("dp") :: world.count("dp")]


def difference(world: World, device: torch.device) -> float:
    """Largest difference of a gradient from one process's; on a mesh of shard=1, of copies."""
    config = nano(vocab_size=512)
    ids = torch.randint(0, 512, (4, 129), device=device, generator=torch.Generator(device).manual_seed(1))
    found: list[Named] = []
    for over in (None, world):
        model = made(config, device)
        ranks = Ranks(over, gather_once=over is not None and over.mesh.shard == 1)
        if over is not None:
            parallelize(model, over, copies=ranks.copies)
        backward(model, ranks, share(ids, over), 2, 4 * 128)
        found.append({n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None})
    one, many = found
    return max(float((one[n] - many[n]).abs().max() / one[n].abs().max().clamp(min=1e-3)) for n in one)


def speed(
    world: World | None, device: torch.device, options: argparse.Namespace, once: bool = False, prefetch: int = 1
) -> dict[str, Any]:
    """Median of the last steps, of `rows` rows on each data rank; then one with its waits marked."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    config = mini().replace(num_hidden_layers=options.layers)
    with device:
        model = GLM5(config, seed=0)
    total = options.rows * (1 if world is None else world.count("dp"))
    train = TrainConfig(
        steps=10**6,
        batch=BatchWarmup(total, total, 0),
        micro_batch=options.micro,
        lr=LearningRate(1e-4, 1e-4, shape="constant"),
        mtp_depths=options.mtp_depths,
        measure_every=10**6,
        cuda_graphs=options.cuda_graphs,
    )
    with tempfile.TemporaryDirectory() as place:
        # One document, cut into rows, so that every row is full and sees itself alone.
        document = Document("all", str(4 * total * options.length))
        data = TokenDataset.build([document], RandomTokens(config.vocab_size), place + "/data", options.length)
        trainer = Trainer(train, model, Loader(data, 0), place, world, None, once, prefetch)
        trainer.finished_steps = 1  # the first step measures

        def step() -> float:
            torch.cuda.synchronize()
            began = time.perf_counter()
            trainer.step()
            torch.cuda.synchronize()
            return time.perf_counter() - began

        times = [step() for _ in range(3 + options.steps)]
        found = {"tokens_per_second": round(total * options.length / statistics.median(times[3:]))}
        found["first_s"], found["GiB"] = round(times[0], 2), round(torch.cuda.max_memory_allocated() / 2**30, 2)
        if world is not None:
            with Waits(device) as waits:
                took = step()
            found["exposed"] = round(waits.seconds() / took, 3)
    return found


def measurements(options: argparse.Namespace, device: torch.device) -> Iterator[tuple[Mesh, str, Any]]:
    """Mesh, name, and what measures it in a world."""
    yield Mesh(dp=dist.get_world_size()), "one", lambda _: speed(None, device, options)  # each GPU by itself
    for text in options.meshes:
        mesh = Mesh.parse(text)
        for prefetch in options.prefetch:
            yield mesh, f"{text} prefetch {prefetch}", partial(speed, device=device, options=options, prefetch=prefetch)
        yield mesh, f"{text} gather once", partial(speed, device=device, options=options, once=True)
        if options.check:
            yield mesh, f"{text} difference", partial(difference, device=device)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--meshes", nargs="+", default=["dp=2", "dp=2,ep=2", "dp=2,shard=1", "dp=2,ep=2,shard=1"])
    parser.add_argument("--rows", type=int, default=16, help="on each data rank")
    parser.add_argument("--micro", type=int, default=8, help="rows of a micro-batch")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--mtp-depths", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--cuda-graphs", action="store_true")
    parser.add_argument("--prefetch", type=int, nargs="+", default=[1, 0, 2])
    parser.add_argument("--check", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--budget", type=float, default=600.0, help="seconds, after which no measurement begins")
    options = parser.parse_args()
    device, began = torch.device("cuda", int(os.environ["LOCAL_RANK"])), time.perf_counter()
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=timedelta(seconds=120), device_id=device)
    for mesh, name, measure in measurements(options, device):
        with open_world(mesh, "cuda") as world:
            at = time.perf_counter() - began
            if any(world.gather_objects(at > options.budget)):
                found: Any = "no time left"
            else:
                try:
                    found = measure(world)
                except Exception:
                    found = traceback.format_exc()[-1500:]
            if world.main:
                print(json.dumps({"at": round(at, 1), "of": name, "found": found}), flush=True)
            torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
