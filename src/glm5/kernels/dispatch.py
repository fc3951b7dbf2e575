"""Which version of each operator runs: decided in this one place, and told by `glm5 doctor`.

Every operator has a plain-PyTorch version, which is its specification and runs anywhere. A fast version stands here
with the conditions under which it may take its place. `pick(operator, …)` is called once per call of an operator; a
fast version that cannot take a call says why, and the reason is logged once, so that nothing falls back in silence.
(On a CPU the fast versions are for fp32 without gradients; other calls are torch's by design, and not remarked on.)
Set GLM5_KERNELS=torch to run the specifications everywhere. Read next: `attention`, `indexer`, `moe` for the
specifications; `fits` for the conditions; `cpu`, `cuda` and `triton` for the fast versions.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from glm5.kernels import fits
from glm5.kernels.pages import Pages
from glm5.kernels.visibility import Visibility

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Fast:
    """A fast version.

    Attributes:
        name: as `glm5 doctor` shows it; its first word is the room. `cpu` is for CPU tensors, the others for CUDA.
        available: whether it can run on this machine, and why (not).
        refuses: given the operator's leading tensors, why it cannot take them; None if it can.
        load: imports it and returns the callable, whose signature is the specification's.
        trains: whether it has gradients.
    """

    name: str
    available: Callable[[], tuple[bool, str]]
    refuses: Callable[..., str | None]
    load: Callable[[], Callable[..., Any]]
    trains: bool = False

    @property
    def on_cpu(self) -> bool:
        return self.name.startswith("cpu.")


# --------------------------------------------------------------------------- availability
def _cuda() -> tuple[bool, str]:
    return torch.cuda.is_available(), "CUDA device" if torch.cuda.is_available() else "no CUDA device"


@cache
def _triton() -> tuple[bool, str]:
    if not torch.cuda.is_available():  # where its interpreter could run, which is for tests
        return False, "no CUDA device"
    from glm5.kernels.triton import available

    return available()


@cache
def _hopper() -> tuple[bool, str]:
    from glm5.kernels.cuda.build import available

    return available()


@cache
def _both() -> tuple[bool, str]:
    ok, why = _hopper()
    return (ok, why) if not ok else _triton()


@cache
def _compiler() -> tuple[bool, str]:
    from glm5.kernels.cpu.build import available

    return available()


def trains_absorbed(rows: Tensor, value: int) -> bool:
    """Whether sparse attention over these latent rows [B, S, X] has a fast gradient in the absorbed form."""
    written_for = rows.is_cuda and rows.dtype == torch.bfloat16 and (rows.shape[-1], value) == (576, 512)
    return written_for and os.environ.get("GLM5_KERNELS") != "torch" and _both()[0]


# --------------------------------------------------------------------------- the fast versions
def _load_sparse_mla() -> Callable[..., Any]:
    from glm5.kernels.cuda import sparse_mla

    def attend(
        q: Tensor, k: Tensor, v: Tensor, selected: Tensor, visible: Visibility, scale: float, pages: Pages | None
    ) -> Tensor:
        rows, value = k[:, :, 0], v.shape[-1]
        return sparse_mla(q, rows, selected, value_dim=value, scale=scale, pages=pages)[0]  # without the log-sum-exp

    return attend


def _load_index_select(room: str) -> Callable[[], Callable[..., Any]]:
    def load() -> Callable[..., Any]:
        from glm5.kernels import cuda, triton

        choose: Callable[..., Tensor] = cuda.index_select if room == "cuda" else triton.stream_select

        def select(
            q: Tensor, w: Tensor, keys: Tensor, visible: Visibility, k: int, pages: Pages | None, **scale: Tensor
        ) -> Tensor:
            if pages is None:
                keys, scale = keys[:, : visible.slots], {n: t[:, : visible.slots] for n, t in scale.items()}
            first, last = visible.narrow
            return choose(q, w, keys, first, last, min(k, visible.slots), pages=pages, **scale)

        return select

    return load


def _load_index_select_fp8(room: str) -> Callable[[], Callable[..., Any]]:
    def load() -> Callable[..., Any]:
        choose = _load_index_select(room)()

        def select(
            q: Tensor, w: Tensor, keys: tuple[Tensor, Tensor], visible: Visibility, k: int, pages: Pages | None
        ) -> Tensor:
            found: Tensor = choose(q, w, keys[0], visible, k, pages, key_scale_BS=keys[1])
            return found

        return select

    return load


def _load_sparse_mla_fp8(room: str) -> Callable[[], Callable[..., Any]]:
    def load() -> Callable[..., Any]:
        from glm5.kernels import cuda, triton

        def attend(
            q: Tensor, rows: Tensor, selected: Tensor, scale: float, pages: Pages | None
        ) -> tuple[Tensor, Tensor]:
            selected = selected.contiguous()
            pair: tuple[Tensor, Tensor]
            if room == "cuda":
                pair = cuda.sparse_mla(q, rows, selected, value_dim=512, scale=scale, pages=pages)
            else:
                pair = triton.sparse_mla_fp8(q, rows, selected, scale=scale, pages=pages)
            return pair

        return attend

    return load


def _load_cuda(operator: str) -> Callable[[], Callable[..., Any]]:
    def load() -> Callable[..., Any]:
        from glm5.kernels import cuda

        found: Callable[..., Any] = getattr(cuda, operator)
        return found

    return load


def _load_absorbed() -> Callable[..., Any]:
    from glm5.kernels.cuda import sparse_mla
    from glm5.kernels.triton import by_head

    def attend(
        q_nope: Tensor, q_rope: Tensor, up: Tensor, rows: Tensor, selected: Tensor, scale: float, pages: Pages | None
    ) -> Tensor:
        (batch, queries, _, nope), latent = q_nope.shape, up.shape[2]
        q = by_head(q_nope.flatten(0, 1), up[:, :nope], q_rope.flatten(0, 1)).unflatten(0, (batch, queries))
        mixed = sparse_mla(q, rows, selected, value_dim=latent, scale=scale, pages=pages)[0]
        return by_head(mixed.flatten(0, 1), up[:, nope:].transpose(1, 2)).unflatten(0, (batch, queries))

    return attend


def _load_triton(operator: str) -> Callable[[], Callable[..., Any]]:
    def load() -> Callable[..., Any]:
        from glm5.kernels import triton

        found: Callable[..., Any] = getattr(triton, operator)
        return found

    return load


def _load_training(operator: str) -> Callable[[], Callable[..., Any]]:
    def load() -> Callable[..., Any]:
        from glm5.kernels import training

        found: Callable[..., Any] = getattr(training, operator)
        return found

    return load


def _load_cpu(operator: str) -> Callable[[], Callable[..., Any]]:
    def load() -> Callable[..., Any]:
        from glm5.kernels import cpu

        found: Callable[..., Any] = getattr(cpu, operator)
        return found

    return load


OPERATORS: dict[str, tuple[Fast, ...]] = {
    "rms_norm": (
        Fast("triton.rms_norm", _triton, fits.rows_at_one_stride, _load_triton("rms_norm")),
        Fast("cpu.rms_norm", _compiler, fits.cpu_norm, _load_cpu("rms_norm")),
    ),
    "add_rms_norm": (Fast("triton.add_rms_norm", _triton, fits.add_norm, _load_triton("add_rms_norm")),),
    "store": (Fast("triton.store", _triton, fits.store, _load_triton("store")),),
    "next_rows": (Fast("triton.next_rows", _triton, fits.next_rows, _load_triton("next_rows")),),
    "project": (
        Fast("triton.project", _triton, fits.project, _load_triton("project")),
        Fast("cpu.project", _compiler, fits.cpu_few, _load_cpu("project")),
    ),
    "project_into": (Fast("triton.project", _triton, fits.project, _load_triton("project")),),
    "dense_attention": (),
    "sparse_attention": (
        Fast("cuda.sparse_mla", _hopper, fits.sparse_mla, _load_sparse_mla),
        Fast("cpu.sparse_attention", _compiler, fits.cpu_attention, _load_cpu("sparse_attention")),
    ),
    "index_select": (
        Fast("cuda.index_select", _both, fits.index_select, _load_index_select("cuda")),
        Fast("triton.stream_select", _triton, fits.stream_select, _load_index_select("triton")),
        Fast("cpu.index_select", _compiler, fits.plain_fp32, _load_cpu("index_select")),
    ),
    "index_select_fp8": (
        Fast("cuda.index_select", _both, fits.index_select_fp8, _load_index_select_fp8("cuda")),
        Fast("triton.stream_select", _triton, fits.stream_select_fp8, _load_index_select_fp8("triton")),
    ),
    "sparse_attention_fp8": (
        Fast("cuda.sparse_mla", _hopper, fits.sparse_mla_fp8, _load_sparse_mla_fp8("cuda")),
        Fast("triton.sparse_mla_fp8", _triton, fits.sparse_mla_fp8, _load_sparse_mla_fp8("triton")),
    ),
    "grouped_swiglu_fp8": (
        Fast("cuda.grouped_swiglu_fp8", _both, fits.experts_fp8, _load_cuda("grouped_swiglu_fp8")),
        Fast("triton.grouped_swiglu_fp8", _triton, fits.experts_fp8, _load_triton("grouped_swiglu_fp8")),
    ),
    "packed_matmul": (),
    "absorbed_attention": (
        Fast("cuda.absorbed_attention", _both, fits.absorbed, _load_absorbed),
        Fast("cpu.absorbed_attention", _compiler, fits.cpu_absorbed, _load_cpu("absorbed_attention")),
    ),
    "train_sparse_attention": (
        Fast("cuda.sparse_mla_backward", _hopper, fits.train_sparse, _load_training("sparse_attention"), trains=True),
    ),
    "indexer_loss": (
        Fast("triton.indexer_loss", _both, fits.train_indexer, _load_training("indexer_loss"), trains=True),
    ),
    "router": (Fast("triton.router", _triton, fits.router, _load_triton("router")),),
    "route": (
        Fast("triton.route", _triton, fits.route, _load_triton("route")),
        Fast("cpu.route", _compiler, fits.plain_fp32, _load_cpu("route")),
    ),
    "grouped_swiglu": (
        Fast("cuda.grouped_swiglu", _both, fits.experts, _load_cuda("grouped_swiglu")),
        Fast("triton.grouped_swiglu", _triton, fits.plain_bf16, _load_triton("grouped_swiglu")),
        Fast("cpu.grouped_swiglu", _compiler, fits.cpu_experts, _load_cpu("grouped_swiglu")),
    ),
    "swiglu": (
        Fast("triton.swiglu", _triton, fits.rows_at_one_stride, _load_triton("swiglu")),
        Fast("cpu.swiglu", _compiler, fits.cpu_few, _load_cpu("swiglu")),
    ),
    "moe": (Fast("cpu.moe", _compiler, fits.cpu_few, _load_cpu("moe")),),
    "moe_row": (Fast("triton.moe_row", _triton, fits.moe_row, _load_triton("moe_row")),),
    "interval_loss": (
        Fast("triton.indexer_warmup", _both, fits.train_intervals, _load_training("interval_loss"), trains=True),
    ),
    "train_grouped_swiglu": (
        Fast("triton.moe_backward", _triton, fits.train_experts, _load_training("grouped_swiglu"), trains=True),
    ),
    "train_rms_norm": (
        Fast("triton.norm_backward", _triton, fits.train_norm, _load_training("rms_norm"), trains=True),
        Fast("torch.rms_norm", _cuda, fits.train_rows, _load_training("torch_rms_norm"), trains=True),
    ),
    "train_rms_norm_beside": (
        Fast("triton.norm_backward", _triton, fits.train_norm, _load_training("rms_norm_beside"), trains=True),
    ),
    "train_add_rms_norm": (
        Fast("triton.norm_backward", _triton, fits.train_norm, _load_training("add_rms_norm"), trains=True),
    ),
    "train_latent_rows": (
        Fast("triton.norm_backward", _triton, fits.train_norm, _load_training("latent_rows"), trains=True),
    ),
    "train_rows_by_pair": (
        Fast("triton.pairs", _triton, fits.train_rows, _load_training("rows_by_pair"), trains=True),
    ),
    "train_sum_by_token": (
        Fast("triton.pairs", _triton, fits.train_rows, _load_training("sum_by_token"), trains=True),
    ),
    "train_router": (
        Fast("triton.routing_backward", _triton, fits.train_router, _load_training("router"), trains=True),
    ),
    "train_balance": (Fast("triton.balance", _triton, fits.fp32, _load_training("loads_and_balance"), trains=True),),
    "train_swiglu": (Fast("triton.basic_backward", _triton, fits.train_rows, _load_training("swiglu"), trains=True),),
    "train_rope_heads": (
        Fast("triton.heads_backward", _triton, fits.train_heads, _load_training("rope_heads"), trains=True),
    ),
    "train_keys_and_values": (
        Fast("triton.heads_backward", _triton, fits.train_heads, _load_training("keys_and_values"), trains=True),
    ),
    "linear_cross_entropy": (
        Fast("triton.cross_entropy", _triton, fits.train_rows, _load_training("linear_cross_entropy"), trains=True),
    ),
    "scaled": (Fast("triton.scaled", _triton, fits.scaled, _load_training("scaled")),),
    "nesterov": (Fast("triton.muon", _triton, fits.fp32, _load_training("nesterov")),),
    "move_momentum": (Fast("triton.muon", _triton, fits.momentum, _load_training("move_momentum")),),
    "move_weights": (Fast("triton.muon", _triton, fits.fp32, _load_training("move_weights")),),
    "divided": (Fast("triton.muon", _triton, fits.divided, _load_training("divided")),),
    "newton_schulz": (Fast("triton.newton_schulz", _both, fits.newton_schulz, _load_training("newton_schulz")),),
}


# Looked up some forty times a decode step.
_ON_CPU = {operator: next((f for f in versions if f.on_cpu), None) for operator, versions in OPERATORS.items()}


@cache
def _tell_once(operator: str, why: str) -> None:
    log.warning("%s runs as plain PyTorch: %s", operator, why)


@cache
def _loaded(fast: Fast) -> Callable[..., Any]:
    return fast.load()


_INSTEAD: ContextVar[Mapping[str, Callable[..., Any]] | None] = ContextVar("instead", default=None)


@contextmanager
def instead(versions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Inside it, in this thread, these versions run by their operators' names, and of other operators the
    specification, whatever the tensors: whoever gives them knows what they take."""
    token = _INSTEAD.set(versions)
    try:
        yield
    finally:
        _INSTEAD.reset(token)


def pick(operator: str, *tensors: Tensor) -> Callable[..., Any] | None:
    """The fast version of `operator` for these tensors, or None: run the specification.

    On a CUDA device a refusal is logged once with its reason; on a CPU, that there is no compiler.
    """
    given = _INSTEAD.get()
    if given is not None:
        return given.get(operator)
    if tensors[0].is_cpu:
        fast = _ON_CPU[operator]
        if fast is None or fast.refuses(*tensors) is not None or os.environ.get("GLM5_KERNELS") == "torch":
            return None
        ok, why = fast.available()
        if ok:
            return _loaded(fast)
        _tell_once(operator, f"{fast.name}: {why}")
        return None
    if not tensors[0].is_cuda or os.environ.get("GLM5_KERNELS") == "torch":
        return None
    reasons = []
    for fast in OPERATORS[operator]:
        if fast.on_cpu:
            continue
        ok, why = fast.available()
        refusal = why if not ok else fast.refuses(*tensors)
        if refusal is None:
            return _loaded(fast)
        reasons.append(f"{fast.name}: {refusal}")
    if reasons:
        _tell_once(operator, "; ".join(reasons))
    return None


def describe() -> list[dict[str, str]]:
    """Per operator: `operator`, `version` that runs here where its conditions hold, and `why`."""
    on_cpu = not torch.cuda.is_available()
    rows = []
    for operator, versions in OPERATORS.items():
        version, why = "torch", "the only version" if not versions else ""
        for fast in versions:
            ok, reason = fast.available()
            if os.environ.get("GLM5_KERNELS") == "torch":
                why = "GLM5_KERNELS=torch"
            elif ok and fast.on_cpu == on_cpu:
                kind = f"{'fp32' if on_cpu else 'bf16'} tensors{'' if fast.trains else ' without gradients'}"
                version, why = fast.name, f"{reason}; for {kind}, else torch"
                break
            elif not why:
                why = f"{fast.name}: {reason}"
        rows.append({"operator": operator, "version": version, "why": why})
    return rows
