"""Training one long row over context-parallel ranks: time, memory and balance of a step.

    torchrun --nproc-per-node 4 benchmarks/context.py --tokens 16384 202752           # GPUs
    torchrun --nproc-per-node 2 benchmarks/context.py --small --tokens 4096           # CPUs, gloo

A small model of GLM-5's attention widths (512 + 64 latent, top-2,048, an indexer of 16 heads) in the sparse stage:
cross-entropy and the indexers' loss, backward, Muon Split. Without torchrun it runs on one device. Prints a line for
each length and cut of the row, as it comes: spans by cost, and equal pieces in order. "slowest / mean" is of the ranks'
own time in attention, measured in a forward pass with waits around every layer. `docs/long-sequences.md` quotes it.
"""

from __future__ import annotations

import argparse
import os
import time
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from glm5.data.balance import context_spans
from glm5.kernels.cross_entropy import linear_cross_entropy
from glm5.ledger.compute import training_cost
from glm5.model.config import ModelConfig
from glm5.model.glm5 import GLM5
from glm5.model.mla import MLA
from glm5.model.presets import mini, nano
from glm5.parallel.context import ContextRows
from glm5.parallel.holdings import Holdings
from glm5.parallel.mesh import Mesh, World, open_world
from glm5.parallel.shard import parallelize, reshard
from glm5.train.optim import MuonSplit, parameter_roles


def wide(tokens: int, layers: int) -> ModelConfig:
    """A model of some 300 million parameters with the published attention's widths."""
    return mini(
        num_hidden_layers=layers,
        max_position_embeddings=tokens,
        num_attention_heads=16,
        num_key_value_heads=16,
        kv_lora_rank=512,
        index_topk=2048,
        index_n_heads=16,
        num_nextn_predict_layers=0,
    )


class Clock:
    """Adds up the time inside attention's own part, between its rows being there and its output."""

    def __init__(self, model: GLM5, device: torch.device) -> None:
        self.seconds, self.device = 0.0, device
        self.layers = [m for m in model.modules() if isinstance(m, MLA)]

    def _wait(self) -> float:
        if self.device.type == "cpu":
            return time.process_time()  # which other processes disturb less
        torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def __enter__(self) -> Clock:
        for layer in self.layers:
            attend = layer._attend

            def timed(*args: object, attend: object = attend) -> Tensor:
                began = self._wait()
                out = attend(*args)  # type: ignore[operator]
                self.seconds += self._wait() - began
                return out

            layer._attend = timed  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        for layer in self.layers:
            del layer._attend


def run(world: World, args: argparse.Namespace) -> None:
    """All lengths, with one model."""
    config = nano(index_topk=512) if args.small else wide(max(args.tokens), args.layers)
    dtype = torch.float32 if world.device.type == "cpu" else torch.bfloat16
    with torch.device(world.device):  # one host's CPUs would draw hundreds of millions of numbers for each rank
        model = GLM5(config)
    model = parallelize(model.to(dtype), world)
    roles = parameter_roles(model, config)
    holdings = Holdings([r.parameter for r in roles], world.group("stage"), world.group("world"))
    optimizer = MuonSplit(roles, 2e-4, holdings=holdings)
    for tokens in args.tokens:
        measure(world, model, optimizer, tokens, args.steps)


def measure(world: World, model: GLM5, optimizer: MuonSplit, tokens: int, steps: int) -> None:
    """One length: every cut."""
    ids = torch.randint(0, model.config.vocab_size, (1, tokens + 1), generator=torch.Generator().manual_seed(0))
    ids = ids.to(world.device)
    first_BS = torch.zeros_like(ids)
    ranks, cuda = world.count("cp"), world.device.type == "cuda"
    ways = world.group("cp") if ranks > 1 else None
    cost_T = training_cost(model.config).queries(np.arange(1, tokens + 1))
    edges = np.linspace(0, tokens, ranks + 1).astype(int).tolist()
    cuts = {"by cost": context_spans(cost_T, ranks)}
    if ranks > 1:
        cuts["in order"] = tuple(((a, b),) for a, b in pairwise(edges))

    def step(rows: ContextRows) -> float:
        aux = rows.aux(indexer=True)
        hidden = model.hidden(rows.own(ids[:, :-1]), cache=rows, sparse=True, aux=aux)
        loss = linear_cross_entropy(hidden[0], model.lm_head.weight, rows.own(ids[:, 1:])[0]).loss_sum
        ((loss + aux.indexer_kl()) / tokens).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        total = loss.detach() / tokens
        dist.all_reduce(total, group=world.group("world"))
        return float(total)

    for name, spans in cuts.items():
        rows = ContextRows(spans, first_BS, ways)
        losses = [step(rows)]
        world.barrier()
        if cuda:
            torch.cuda.reset_peak_memory_stats(world.device)
        began = time.perf_counter()
        losses += [step(rows) for _ in range(steps)]
        world.barrier()
        seconds = (time.perf_counter() - began) / steps
        peak = torch.cuda.max_memory_allocated(world.device) / 2**30 if cuda else 0.0
        with Clock(model, world.device) as clock, torch.no_grad():
            model.hidden(rows.own(ids[:, :-1]), cache=rows, sparse=True)
        reshard(model)
        found = world.gather_objects((clock.seconds, peak))
        if world.main:
            own = [s for s, _ in found]
            print(
                f"{ranks} ranks, {tokens:,} tokens, {name}: {seconds:.2f} s a step, {tokens / seconds:,.0f} "
                f"tokens/s, attention slowest / mean {max(own) / (sum(own) / len(own)):.2f}, peak memory "
                f"{max(p for _, p in found):.1f} GiB, loss {losses[0]:.4f} -> {losses[-1]:.4f}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16_384, 65_536, 202_752])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="nano's widths, for CPUs")
    args = parser.parse_args()
    torch.manual_seed(0)
    with open_world(Mesh(cp=int(os.environ.get("WORLD_SIZE", "1")))) as world:
        run(world, args)


if __name__ == "__main__":
    main()
