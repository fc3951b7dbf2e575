"""Training on several ranks beside training in one process, for tests.

of = make(world, directory, micro_batch=1)      a Trainer on a rank; `world=None` in one process
found, metrics = gradients(of)                  one step, and the whole gradients that it took
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glm5.data.loader import Loader, TokenDataset
from glm5.parallel.mesh import World
from glm5.parallel.shard import whole
from glm5.train.config import TrainConfig
from glm5.train.loop import Trainer
from glm5.train.ranks import PipelineOptions
from glm5.train.schedule import BatchWarmup, LearningRate
from support.training import SEQ_LEN, tiny

# Figures of time, and those measured on a rank's own rows.
APART = ("tokens_per_second", "tflops_per_device", "memory_mib", "indexer_kl", "indexer_recall", "attention_logit_max")


def make(world: World | None, directory: str | Path, run: str = "run", **changes: Any) -> Trainer:
    """A trainer of `tiny` on the tokens in `directory`, the same in every process.

    `rows`: in a step. `crowd`: added to the router's bias of expert 0, which then gets every token. `gather_once`,
    `by_heads`: of the Trainer. `recompute`: parts of layers, and `layout`: of stages, on ranks alone. `seq_len`,
    `strategy`: of the dataset. Other changes are fields of `TrainConfig`, or with `model_` before their name of
    `ModelConfig`.
    """
    rows, crowd, once = changes.pop("rows", 4), changes.pop("crowd", 0.0), changes.pop("gather_once", False)
    parts, layout, heads = changes.pop("recompute", ()), changes.pop("layout", ""), changes.pop("by_heads", True)
    of_rows = changes.pop("seq_len", SEQ_LEN), 4, changes.pop("strategy", "best-fit")
    shape = {k.removeprefix("model_"): changes.pop(k) for k in list(changes) if k.startswith("model_")}
    settings: dict[str, Any] = dict(
        steps=6,
        batch=BatchWarmup(rows, rows, 0),
        micro_batch=2,
        lr=LearningRate(1e-2, 1e-3),
        balance_weight=0.3,
        measure_every=2,
        save_every=2,
    )
    config = TrainConfig(**{**settings, **changes})
    model = tiny(**shape)
    for name, bias in model.named_buffers():
        if crowd and name.endswith("e_score_correction_bias"):
            bias[0] += crowd
    data = TokenDataset.open(Path(directory) / "tokens", *of_rows)
    how = PipelineOptions() if world is None else PipelineOptions(recompute=parts, layout=layout)
    options = dict(gather_once=once, by_heads=heads)
    return Trainer(config, model, Loader(data, config.seed), Path(directory) / run, world, how, **options)


def gradients(of: Trainer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Whole gradients of the next step before its update, of the parameters that are here, and its metrics."""
    found: dict[str, Tensor] = {}
    step = of.optimizer.step

    def catch(**options: Any) -> Any:
        for name, p in of._parts.named_parameters():
            if p.grad is not None:
                found[name] = whole(p.grad).clone()
        return step(**options)

    of.optimizer.step = catch  # type: ignore[method-assign]
    metrics = of.step()
    of.optimizer.step = step  # type: ignore[method-assign]
    return found, metrics


def weights(of: Trainer) -> dict[str, Tensor]:
    """Everything that the model, or its stages here, hold; whole."""
    return {name: whole(t.detach()).clone() for name, t in of.state.weights().items()}


def optimizer_state(of: Trainer) -> dict[str, Tensor]:
    """Everything that the optimizer holds, whole."""
    return {name: whole(t.detach()).clone() for name, t in of.optimizer.named_state().items()}


def apart(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float) -> list[str]:
    """Names whose largest difference exceeds the tolerance times the larger of 0.001 and their largest entry."""
    assert sorted(a) == sorted(b)
    out = []
    for name in a:
        scale = max(1e-3, float(a[name].abs().max()))
        off = float((a[name].double() - b[name].double()).abs().max()) / scale
        if not off <= tolerance:
            out.append(f"{name} {off:.1e}")
    return out


def unlike(
    of: Trainer, own: dict[str, Tensor], figures: dict[str, Any], expected: tuple[Any, ...], tolerance: float
) -> list[str]:
    """What of a step (`gradients`) is not one process's: gradients, figures that are no measurement, router biases.

    Args:
        expected: one process's gradients, figures and biases.
    """
    found, metrics, biases = expected
    wrong = [f"gradient of {w}" for w in apart(found, own, tolerance)]
    if not all(map(torch.equal, biases, (r.e_score_correction_bias for r in of.routers))):
        wrong.append("router biases")
    for key, value in metrics.items():
        close = isinstance(value, float) and abs(figures[key] - value) <= 1e-4 * abs(value) + 1e-7
        if isinstance(value, float) and key not in APART and not close:
            wrong.append(f"{key} is {figures[key]}, not {value}")
    return wrong
