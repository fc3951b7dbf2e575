"""Time log-probabilities of drawn tokens, forward and backward, beside pre-training's loss over the same head.

    python benchmarks/action_logprobs.py [--tokens 8192] [--width 2048] [--vocabulary 154880] [--device cuda]

Medians of five calls, bf16 on a GPU and fp32 on a CPU, and the peak of memory above what the inputs take (on a GPU).
Read next: docs/post-training.md.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from glm5.kernels.cross_entropy import linear_cross_entropy
from glm5.posttrain.logprobs import Kept, action_logprobs


def measure(call: Callable[[], torch.Tensor], inputs: list[torch.Tensor], cuda: bool) -> tuple[float, float]:
    """Milliseconds of a forward and a backward pass, and GiB."""
    times, peak = [], 0.0
    for _ in range(6):
        for x in inputs:
            x.grad = None
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        began = time.perf_counter()
        call().backward()
        if cuda:
            torch.cuda.synchronize()
            peak = (torch.cuda.max_memory_allocated() - before) / 2**30
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times[1:]), peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=154880)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    a = parser.parse_args()
    cuda = a.device.startswith("cuda")
    generator = torch.Generator(device=a.device).manual_seed(0)
    dtype = torch.bfloat16 if cuda else torch.float32

    def random(*shape: int) -> torch.Tensor:
        made = torch.randn(shape, generator=generator, device=a.device) / shape[-1] ** 0.5
        return made.to(dtype).requires_grad_()

    hidden, head = random(a.tokens, a.width), random(a.vocabulary, a.width)
    targets = torch.randint(a.vocabulary, (a.tokens,), generator=generator, device=a.device)
    warm = torch.full((a.tokens,), 0.8, device=a.device)
    sets = Kept.of([sorted({*range(50), target}) for target in targets.tolist()]).to(torch.device(a.device))

    def with_entropy() -> torch.Tensor:
        found = action_logprobs(hidden, head, targets, with_entropy=True)
        assert found.entropy_N is not None
        return found.logprobs_N.sum() + found.entropy_N.sum()

    cases: dict[str, Callable[[], torch.Tensor]] = {
        "linear_cross_entropy": lambda: linear_cross_entropy(hidden, head, targets).loss_sum,
        "action_logprobs": lambda: action_logprobs(hidden, head, targets).logprobs_N.sum(),
        "… temperature 0.8": lambda: action_logprobs(hidden, head, targets, temperature_N=warm).logprobs_N.sum(),
        "… kept sets of 51": lambda: action_logprobs(hidden, head, targets, kept=sets).logprobs_N.sum(),
        "… and entropy as a term": with_entropy,
    }
    for name, call in cases.items():
        milliseconds, peak = measure(call, [hidden, head], cuda)
        print(f"{name:<24} {milliseconds:8.1f} ms  {f'{peak:5.2f} GiB' if cuda else ''}")


if __name__ == "__main__":
    main()
