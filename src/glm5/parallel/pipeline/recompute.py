"""Fine-grained recomputation: which parts of a layer keep only their input, and run again in the backward pass.

    attention       projections, indexer and attention: no length-long queries, keys and values are kept
    feed-forward    router, experts and shared expert, or the dense feed-forward
    layer           all of it

A part that runs again must not count again: what it reports to `Aux` (loads, losses) the second time is thrown away.
Source: report section 2.4.1. Read next: `offload`, for what is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal, get_args

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from glm5.model.block import Block
from glm5.model.trace import Aux
from glm5.utils.errors import ConfigError

Part = Literal["attention", "feed-forward", "layer"]
PARTS: tuple[Part, ...] = get_args(Part)


def recompute(model: nn.Module, parts: Iterable[str]) -> None:
    """Let these parts of every block under `model` run again in the backward pass.

    Raises:
        ConfigError: an unknown part.
    """
    wanted = set(parts)
    for part in sorted(wanted - set(PARTS)):
        raise ConfigError("recompute", part, f"must be of {', '.join(PARTS)}")
    for block in model.modules():
        if not isinstance(block, Block):
            continue
        parts_of = {"attention": block.self_attn, "feed-forward": block.mlp}
        chosen = [block] if "layer" in wanted else [parts_of[name] for name in parts_of if name in wanted]
        for module in chosen:
            module.forward = partial(_again, module.forward)  # type: ignore[method-assign]


def _again(forward: Callable[..., Tensor], x: Tensor, *rest: Any, aux: Aux | None = None, **options: Any) -> Tensor:
    runs = 0
    # `valid` is read now: for the next MTP depth it will be another.
    thrown_away = None
    if aux is not None:
        thrown_away = Aux(indexer=aux.indexer, balance=aux.balance, logits=aux.logits, valid=aux.valid, total=aux.total)
        thrown_away.sequences = aux.sequences
        if aux.experts is not None:
            thrown_away.experts = aux.experts[len(aux.loads) :]  # of the layer that runs again

    def run(x: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        return forward(x, *rest, **_given(aux if runs == 1 else thrown_away), **options)

    out: Tensor = checkpoint(run, x, use_reentrant=False, preserve_rng_state=False)  # nothing here draws
    return out


def _given(aux: Aux | None) -> dict[str, Aux]:
    return {} if aux is None else {"aux": aux}
