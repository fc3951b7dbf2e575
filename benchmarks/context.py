"""Training one long row over context-parallel ranks: time, memory and balance of a step.

    torchrun --nproc-per-node 4 benchmarks/context.py --tokens 16384 202752           # GPUs
    torchrun --nproc-per-node 2 benchmarks/context.py --small --tokens 4096           # CPUs, gloo

A small model of GLM-5's attention widths (512 + 64 latent, top-2,048, the indexer's 32 heads of 128) in the sparse
stage: cross-entropy and the indexers' loss, backward, Muon Split. Without torchrun it runs on one device. Prints JSON
lines as they come: what was begun, each length's first step (which compiles kernels), then for each cut of the row
(spans by cost, equal pieces in order) time, peak memory beside what `glm5.train.estimate` says, and balance: "slowest
/ mean" is of the ranks' own time in attention, in a forward pass with waits around every layer. With --dense attention
is dense, without the indexers' loss, and the cuts are spans by cost whose latents travel ("positions"), and whose
queries, keys and values do ("heads"). A length that would take longer than --budget seconds, by the growth of the one
before, is left out. `docs/long-sequences.md` quotes it.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from glm5.data.balance import context_spans
from glm5.kernels.cross_entropy import linear_cross_entropy
from glm5.kernels.visibility import Visibility
from glm5.ledger.compute import training_cost
from glm5.model.config import ModelConfig
from glm5.model.glm5 import GLM5
from glm5.model.mla import MLA
from glm5.model.presets import mini, nano
from glm5.parallel.context import ContextRows
from glm5.parallel.holdings import Holdings
from glm5.parallel.mesh import Mesh, World, open_world
from glm5.parallel.pipeline.recompute import recompute
from glm5.parallel.shard import parallelize, reshard
from glm5.train.config import TrainConfig
from glm5.train.estimate import estimate
from glm5.train.optim import MuonSplit, parameter_roles
from glm5.train.schedule import BatchWarmup


def wide(tokens: int, layers: int) -> ModelConfig:
    """A model of some 300 million parameters with the published attention's widths: those that fast operators take."""
    return mini(
        num_hidden_layers=layers,
        max_position_embeddings=tokens,
        num_attention_heads=16,
        num_key_value_heads=16,
        kv_lora_rank=512,
        index_topk=2048,
        index_n_heads=32,
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


class Bench:
    """All lengths, with one model."""

    def __init__(self, world: World, args: argparse.Namespace) -> None:
        self.world, self.args, self.began = world, args, time.perf_counter()
        self.cuda = world.device.type == "cuda"
        self.config = nano(index_topk=512) if args.small else wide(max(args.tokens), args.layers)
        with torch.device(world.device):  # one host's CPUs would draw hundreds of millions of numbers for each rank
            model = GLM5(self.config)
        self.model = parallelize(model.to(torch.bfloat16 if self.cuda else torch.float32), world)
        recompute(self.model, args.recompute)
        roles = parameter_roles(self.model, self.config)
        holdings = Holdings([r.parameter for r in roles], world.group("stage"), world.group("world"))
        self.optimizer = MuonSplit(roles, 2e-4, holdings=holdings)
        self.say(begun=str(world.mesh), parameters=sum(p.numel() for p in self.model.parameters()))

    def say(self, **what: object) -> None:
        if self.world.main:
            print(json.dumps({"at": round(time.perf_counter() - self.began, 1), **what}), flush=True)

    def run(self) -> None:
        before: tuple[int, float] | None = None
        for tokens in sorted(self.args.tokens):
            left = self.args.budget - (time.perf_counter() - self.began)
            # Dense work grows with the length, index scores with its square.
            growth = 0.0 if before is None else before[1] * (tokens / before[0]) ** 1.5
            if any(self.world.gather_objects(growth > left)):
                self.say(tokens=tokens, left_out=f"would take about {growth:.0f} s, and {left:.0f} s are left")
                continue
            before = tokens, self.measure(tokens)

    def measure(self, tokens: int) -> float:
        """One length: every cut. What it would take again, in seconds: without what first steps compile."""
        world, model = self.world, self.model
        ids = torch.randint(0, self.config.vocab_size, (1, tokens + 1), generator=torch.Generator().manual_seed(0))
        ids = ids.to(world.device)
        ranks = world.count("cp")
        ways = world.group("cp") if ranks > 1 else None
        cost_T = training_cost(self.config).queries(np.arange(1, tokens + 1))
        edges = np.linspace(0, tokens, ranks + 1).astype(int).tolist()
        sparse, whole = not self.args.dense, Visibility.causal(1, tokens, device=world.device)
        by_cost = context_spans(cost_T, ranks)
        cuts = {"by cost": by_cost} if sparse else {"heads": by_cost, "positions": by_cost}
        if sparse and ranks > 1 and not self.args.by_cost_only:
            cuts["in order"] = tuple(((a, b),) for a, b in pairwise(edges))

        def step(rows: ContextRows) -> float:
            aux = rows.aux(indexer=sparse)
            hidden = model.hidden(rows.own(ids[:, :-1]), cache=rows, sparse=sparse, aux=aux)
            loss = linear_cross_entropy(hidden[0], model.lm_head.weight, rows.own(ids[:, 1:])[0]).loss_sum
            ((loss + aux.indexer_kl() if sparse else loss) / tokens).backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            total = loss.detach() / tokens
            dist.all_reduce(total, group=world.group("world"))
            return float(total)

        again = 0.0
        for name, spans in cuts.items():
            rows = ContextRows(spans, torch.zeros_like(ids), ways, seen=[whole] * (name == "heads"))
            began = time.perf_counter()
            losses = [step(rows)]
            self.say(tokens=tokens, cut=name, first_step_s=round(time.perf_counter() - began, 2), loss=losses[0])
            world.barrier()
            warm = time.perf_counter()
            if self.cuda:
                torch.cuda.reset_peak_memory_stats(world.device)
            began = time.perf_counter()
            losses += [step(rows) for _ in range(self.args.steps)]
            world.barrier()
            seconds = (time.perf_counter() - began) / self.args.steps
            again += seconds
            peak = torch.cuda.max_memory_allocated(world.device) / 2**30 if self.cuda else 0.0
            row = dict(ranks=ranks, tokens=tokens, cut=name, step_s=round(seconds, 3))
            said = self.predicted(tokens) / 2**30
            most = max(world.gather_objects(peak))
            self.say(**row, tokens_per_s=round(tokens / seconds), peak_gib=round(most, 2), estimate_gib=round(said, 2))
            if name == "heads":  # which does not wait for rows
                self.say(**row, losses=losses)
                again += time.perf_counter() - warm
                continue
            with Clock(model, world.device) as clock, torch.no_grad():
                model.hidden(rows.own(ids[:, :-1]), cache=rows, sparse=sparse)
            reshard(model)
            own = world.gather_objects(clock.seconds)
            slowest = max(own) / (sum(own) / len(own))
            self.say(**row, attention_s=round(max(own), 3), slowest_over_mean=round(slowest, 3), losses=losses)
            again += time.perf_counter() - warm
        return again

    def predicted(self, tokens: int) -> float:
        """Bytes on one rank by formula."""
        train = TrainConfig(
            stage="pretrain" if self.args.dense else "sparse",
            batch=BatchWarmup(1, 1, 0),
            micro_batch=1,
            mtp_depths=0,
            precision="bf16" if self.cuda else "fp32",
        )
        device, parts = self.world.device.type, tuple(self.args.recompute)
        return estimate(self.config, train, tokens, device=device, mesh=self.world.mesh, recompute=parts).total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16_384, 65_536, 202_752])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--budget", type=float, default=600.0, help="seconds, from the first line on")
    parser.add_argument("--recompute", nargs="*", default=[], help="attention, feed-forward, layer")
    parser.add_argument("--by-cost-only", action="store_true", help="leave out the cut in order")
    parser.add_argument("--dense", action="store_true", help="dense attention, by heads and by positions")
    parser.add_argument("--small", action="store_true", help="nano's widths, for CPUs")
    args = parser.parse_args()
    torch.manual_seed(0)
    mesh = Mesh(cp=int(os.environ.get("WORLD_SIZE", "1")))
    with open_world(mesh, timeout=max(60.0, args.budget)) as world:
        Bench(world, args).run()


if __name__ == "__main__":
    main()
