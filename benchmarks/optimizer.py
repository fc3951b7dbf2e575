"""Optimizer and loss: time of a Muon Split step, its share of a training step, and the chunked head's cost.

    python benchmarks/optimizer.py --threads 1           # nano on this CPU
    python benchmarks/optimizer.py --preset mini --device cuda

Prints one line a measurement: the best of `--repeat` runs in milliseconds. With `--threads 1` on a CPU it is the
process's own time, which a busy machine disturbs less. `docs/optimizer.md` quotes these lines.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from glm5.kernels.cross_entropy import linear_cross_entropy
from glm5.model.glm5 import GLM5
from glm5.model.presets import preset
from glm5.train.losses import language_model_loss
from glm5.train.optim import MuonSplit, clip_grad_norm, parameter_roles


def best_ms(run: Callable[[], object], repeat: int, device: str) -> float:
    """Shortest of `repeat` runs after one to warm up."""
    clock = time.process_time if device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    times = []
    for _ in range(repeat + 1):
        start = clock()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(clock() - start)
    return min(times[1:]) * 1e3


def optimizer_step(args: argparse.Namespace) -> None:
    """Muon Split on the whole model, against a forward and backward pass with three MTP depths."""
    config = preset(args.preset)
    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
    model = GLM5(config).to(args.device, dtype)
    ids = torch.randint(0, config.vocab_size, (args.batch, args.length), device=args.device)

    def forward_backward() -> None:
        model.zero_grad()
        trunk = model.hidden(ids, sparse=False)
        depths = list(model.mtp_hidden(trunk, ids, 3, sparse=False))
        targets = [(ids[:, : h.shape[1]], torch.ones(h.shape[:2], device=ids.device)) for h in (trunk, *depths)]
        loss = language_model_loss([trunk, *depths], model.lm_head.weight, targets, mtp_weight=0.3)
        (loss.loss_sum / loss.tokens[0]).backward()

    step = best_ms(forward_backward, args.repeat, args.device)
    print(f"forward + backward, {args.batch} x {args.length} tokens, 3 MTP depths: {step:.0f} ms")
    norm = best_ms(lambda: clip_grad_norm(model.named_parameters(), 1e9), args.repeat, args.device)
    print(f"gradient norm: {norm:.1f} ms")
    for split in (True, False):
        roles = parameter_roles(model, config, split_heads=split)
        for ns_dtype in (torch.float32, torch.bfloat16):
            optimizer = MuonSplit(roles, lr=1e-4, ns_dtype=ns_dtype)
            took = best_ms(optimizer.step, args.repeat, args.device)
            name = f"Muon{' Split' if split else ''} step, {str(ns_dtype).removeprefix('torch.')}"
            print(f"{name}: {took:.0f} ms, {took / (took + step):.0%} of a training step")


def head_and_loss(args: argparse.Namespace, tokens: int, width: int, vocab: int) -> None:
    """Forward and backward of head and loss: full logits by torch, then chunks."""
    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
    hidden = torch.randn(tokens, width, device=args.device).to(dtype).requires_grad_()
    head = (torch.randn(vocab, width, device=args.device) * width**-0.5).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), device=args.device)

    def full() -> None:
        F.cross_entropy((hidden @ head.T).float(), targets, reduction="sum").backward()

    def chunked() -> None:
        linear_cross_entropy(hidden, head, targets).loss_sum.backward()

    for name, run in (("full logits", full), ("chunked", chunked)):
        hidden.grad = head.grad = None
        if args.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            base = torch.cuda.memory_allocated()
        took = best_ms(run, args.repeat, args.device)
        memory = f", {(torch.cuda.max_memory_allocated() - base) / 2**30:.2f} GiB" if args.device == "cuda" else ""
        print(f"head + loss {tokens} x {width} x {vocab}, {name}: {took:.1f} ms{memory}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="nano")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    where = torch.cuda.get_device_name() if args.device == "cuda" else f"CPU, {args.threads} threads"
    print(f"torch {torch.__version__}, {where}")
    head_and_loss(args, 4096, 256, 2048)
    if args.device == "cuda":
        head_and_loss(args, 4096, 6144, 154_880)
    optimizer_step(args)


if __name__ == "__main__":
    main()
