"""Batch-invariant mode: what a sequence gets is the same to the last bit, whatever runs beside it, in any pieces.

Reinforcement learning compares log-probabilities of the rollout with those of a later pass of the same weights. Here
both are functions of the weights and the ids up to the position, and of nothing else: not of the batch, of chunks, of
cached prefixes, preemption or drafts. It holds by the order in which numbers are added. Attention has one form:
absorbed, over a selection, of all that is seen where the indexer selects nothing. On a CPU, in fp32:

- Rows go through the model `FEW` at a time, so that projections, norms, routing, experts, selection and attention run
  in the C++ operators, where each row is computed by itself in one fixed order (`kernels/cpu/operators.cpp`).
- The products that are left to torch (attention's output, the head) always have `FEW` rows, padded with zeros: one
  kernel, one shape, in which a row's sum has one order (`check` tries it out). Which one differs between machines.

On a GPU cuBLAS promises nothing of that kind, so every product and attention itself run in Triton, with reductions that
are never split by the number of rows, and one tile (`kernels/triton/fixed.py`); then any number of rows may go at once.

`logprobs` is the trainer's side: the same bits for a sequence that is known. It has no gradient: these operators have
none, so a loss computed with gradients agrees within rounding only. Read next: `executor`, `glm5.model.paged`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from glm5.kernels.cpu.build import available
from glm5.kernels.dispatch import instead
from glm5.kernels.fits import FEW
from glm5.model.glm5 import GLM5
from glm5.model.mla import MLA
from glm5.model.paged import PagedBatch, PagedCache, Run
from glm5.utils.errors import ConfigError


class _Linear(TorchFunctionMode):
    """Inside it a linear map is computed by `linear`, which takes the arguments of torch's."""

    def __init__(self, linear: Callable[..., Tensor]) -> None:
        super().__init__()
        self._linear = linear

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return (self._linear if func is F.linear else func)(*args, **(kwargs or {}))


def _few_rows(x: Tensor, *weights: Tensor, **more: Tensor) -> Tensor:
    """A linear map of `FEW` rows at a time, never more or fewer."""
    rows = x.reshape(-1, x.shape[-1])
    outs = [F.linear(_padded(part), *weights, **more)[: len(part)] for part in rows.split(FEW)]
    return torch.cat(outs).view(*x.shape[:-1], -1)


def _padded(rows_NX: Tensor) -> Tensor:
    return rows_NX if len(rows_NX) == FEW else F.pad(rows_NX, (0, 0, 0, FEW - len(rows_NX)))


def on_gpu(model: GLM5) -> bool:
    """Whether the operators are Triton's."""
    return model.device.type == "cuda"


@contextmanager
def operators(model: GLM5) -> Iterator[None]:
    """Inside it, in this thread, the model's operators and linear maps are those that keep to one order."""
    if not on_gpu(model):
        with _Linear(_few_rows):
            yield
        return
    from glm5.kernels import cuda
    from glm5.kernels.triton import fixed

    given = {"topk": cuda.stable_topk} if cuda.available()[0] else {}
    with instead(fixed.versions(**given)), _Linear(fixed.linear):
        yield


def check(model: GLM5) -> None:
    """Refuse what this mode cannot promise.

    Raises:
        ConfigError: of a GPU: no Triton, or widths; of a CPU: the dtype, a bias, or no C++ operators here.
    """
    if model.config.attention != "mla":
        raise ConfigError("invariant", True, f"is written for mla, not {model.config.attention}")
    if model.config.n_group > 1:
        raise ConfigError("invariant", True, "is written for routing without groups")
    wrong = _gpu_refuses(model) if on_gpu(model) else _cpu_refuses(model)
    if wrong is not None:
        raise ConfigError("invariant", True, wrong)
    outputs = [module.o_proj.weight for module in model.modules() if isinstance(module, MLA)]
    with operators(model):
        for weight in (outputs[0], model.lm_head.weight):
            if not _by_row(weight):
                raise ConfigError("invariant", True, "products depend on a row's place here: use another build")


def _cpu_refuses(model: GLM5) -> str | None:
    built, why = available()
    for wrong, rule in (
        (model.device.type != "cpu", f"needs a CPU or a CUDA device, and the model is on {model.device}"),
        (model.dtype != torch.float32, f"needs weights in float32, not {model.dtype}: set dtype"),
        (model.config.attention_bias, "is written for attention without biases"),
        (not built, f"needs the C++ operators: {why}"),
        (os.environ.get("GLM5_KERNELS") == "torch", "needs the C++ operators, and GLM5_KERNELS=torch forbids them"),
    ):
        if wrong:
            return rule
    return None


def _gpu_refuses(model: GLM5) -> str | None:
    from glm5.kernels import triton

    runs, why = triton.available()
    if not runs:
        return f"needs Triton: {why}"
    from glm5.kernels.triton import fixed

    config = model.config
    return fixed.refuses(
        {
            "latent": config.kv_lora_rank,
            "rotary": config.qk_rope_head_dim,
            "nope": config.qk_nope_head_dim,
            "value": config.v_head_dim,
            "index_heads": config.index_n_heads,
            "index_width": config.index_head_dim,
        }
    )


@torch.no_grad()
def _by_row(weight_XY: Tensor) -> bool:
    """Whether a row's product is the same in every place among `FEW`, and alone, whatever the others hold."""
    make = torch.Generator().manual_seed(0)
    x_NY = torch.randn(FEW, weight_XY.shape[1], generator=make).to(weight_XY)
    expected, place_N1 = F.linear(x_NY, weight_XY), torch.arange(FEW, device=weight_XY.device)[:, None]
    return all(
        torch.equal(F.linear(torch.where(place_N1 == at, x_NY.roll(at, 0), 1.0), weight_XY)[at], expected[0])
        and torch.equal(F.linear(x_NY[at : at + 1], weight_XY)[0], expected[at])
        for at in range(FEW)
    )


def hidden(model: GLM5, cache: PagedCache, runs: Sequence[Run], ids: Sequence[Sequence[int]]) -> list[Tensor]:
    """The trunk's hidden states of each run's ids, [count, D]; the cache is filled as by one call."""
    parts: list[list[Tensor]] = [[] for _ in runs]
    with operators(model):
        for pieces in [list(enumerate(runs))] if on_gpu(model) else _pieces(runs):
            batch = PagedBatch(cache, [piece for _, piece in pieces], by_row=True)
            some = [ids[i][piece.start - runs[i].start :][: piece.count] for i, piece in pieces]
            flat = model.hidden(batch.flat(some), cache=batch)[0]
            for (i, piece), at in zip(pieces, batch.offsets, strict=True):
                parts[i].append(flat[at : at + piece.count])
    return [torch.cat(part) for part in parts]


def head(model: GLM5, hidden_ND: Tensor) -> Tensor:
    """Logits of rows, [N, V]."""
    with operators(model):
        logits: Tensor = model.lm_head(hidden_ND)
    return logits


def _pieces(runs: Sequence[Run]) -> Iterator[list[tuple[int, Run]]]:
    """The runs in order, cut so that each piece has at most FEW rows: with the number of the run they belong to."""
    piece: list[tuple[int, Run]] = []
    room = FEW
    for i, run in enumerate(runs):
        start, end = run.start, run.start + run.count
        while start < end:
            count = min(room, end - start)
            piece.append((i, Run(run.table, start, count)))
            start, room = start + count, room - count
            if room == 0:
                yield piece
                piece, room = [], FEW
    if piece:
        yield piece


@torch.inference_mode()
def logprobs(model: GLM5, ids: Sequence[int], *, temperature: float = 1.0, vocab_size: int | None = None) -> Tensor:
    """Log-probability of each id but the first, fp32 [len(ids) - 1], with the bits that an engine in this mode gives at
    the same temperature without penalties and bias.

    Args:
        vocab_size: the engine's, where the model's is padded.
    """
    check(model)
    size = 64
    pages = -(-len(ids) // size)
    cache = PagedCache(model.config, pages, size=size, device=model.device, dtype=model.dtype)
    (states,) = hidden(model, cache, [Run(range(pages), 0, len(ids) - 1)], [ids[:-1]])
    out = []
    for at in range(0, len(states), FEW):
        logits = head(model, states[at : at + FEW]).float()
        if vocab_size is not None:
            logits[:, vocab_size:] = -torch.inf
        heat = logits.new_tensor(temperature if temperature > 0 else 1.0)
        scaled = ((logits - logits.amax(-1, keepdim=True)) / heat).log_softmax(-1)
        next_ids = torch.tensor(ids[at + 1 : at + 1 + len(scaled)], device=scaled.device)
        out.append(scaled.gather(-1, next_ids[:, None])[:, 0])
    return torch.cat(out)
