"""Muon Split, GLM-5's optimizer: Muon on matrices, head by head in attention, AdamW on the rest.

Muon (as Moonlight scales it, arXiv:2502.16982) for each matrix W of A x B, with gradient G:

    M <- mu M + G                                momentum
    O <- newton_schulz(G + mu M)                 Nesterov's input, orthogonalised
    W <- W - lr (0.2 sqrt(max(A, B)) O + wd W)   the factor gives O the RMS of a typical AdamW update

GLM-5 (report, section 2.1) orthogonalises W_UQ, W_UK and W_UV one head at a time, which keeps attention logits stable
without clipping. `roles` says how each parameter is cut; A x B is the shape of one cut matrix, and matrices of one
shape, from all layers, go through one batched iteration. Across ranks `glm5.parallel.muon` says who orthogonalises
which matrix; the update stays the same to the last bit. Read next: `docs/optimizer.md`, then the loop.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from glm5.kernels.newton_schulz import move_momentum, move_weights, nesterov_input, newton_schulz
from glm5.train.recorder import Recorder, Recordings
from glm5.train.roles import Cut, ParamRole, parameter_roles
from glm5.utils.errors import CheckpointError, NumericalError

if TYPE_CHECKING:
    from glm5.parallel.holdings import Holdings
    from glm5.train.spread import Spread

__all__ = ["Cut", "MuonSplit", "ParamRole", "clip_grad_norm", "first_nonfinite", "parameter_roles"]

# Elements of one batch of matrices; a single larger matrix is a batch alone. On a GPU 4 times as many are 8% faster in
# one process (`mini`, H200), but a rank among several then fills batches with zeros for up to half its work: with these
# `mini`'s busiest of 4 ranks does 1.16 times its fair share, against 1.62.
BATCH_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 24}

# Of each group: sums of squares, and how many numbers went into each.
Squares = defaultdict[str, list[tuple[Tensor, float]]]


@dataclass(frozen=True)
class Slice:
    """Matrices first .. last - 1 of one cut of one parameter: one run of rows in a batch."""

    parameter: nn.Parameter
    cut: Cut
    first: int
    last: int

    def of(self, tensor: Tensor) -> Tensor:
        """These matrices' rows of a tensor of the parameter's shape: [periods, rows, columns]."""
        view = self.cut.view(tensor)
        return view if self.cut.merge else view[self.first : self.last]

    def like(self, batch_NAB: Tensor) -> Tensor:
        """The same shape as `of`, of the batch [last - first, short, long] that holds these matrices."""
        x = batch_NAB.mT if self.cut.height > self.parameter.shape[-1] else batch_NAB
        return x[0].unflatten(0, (self.cut.periods, self.cut.rows)) if self.cut.merge else x


@dataclass(frozen=True)
class Batch:
    """Matrices of one shape (the short side first), as far as they fit into one batch."""

    short: int
    long: int
    device: torch.device
    dtype: torch.dtype
    slices: tuple[Slice, ...]


class MuonSplit(torch.optim.Optimizer):
    """GLM-5's optimizer. Deterministic; every state is a tensor; a parameter without gradient is left alone.

    Args:
        roles: from `parameter_roles`; those whose parameter needs no gradient now are left out.
        lr: learning rate of Muon and AdamW alike; `set_lr` changes it for the next step.
        weight_decay: of both, decoupled; parameters whose role has `decay=False` have none.
        momentum: Muon's mu.
        ns_steps: Newton-Schulz steps.
        ns_dtype: of the iteration; None is `default_ns_dtype` of the device.
        rms: the RMS that a full-rank orthogonal update is scaled to.
        betas, eps: AdamW's.
        master_weights: keep fp32 copies of bf16 or fp16 parameters and update those. Weights that are loaded into
            the model after the first step do not reach the copies; load them before, or load the state too.
        holdings: which rank holds which part of the parameters, where they are spread over ranks. State lies as its
            parameter does, and every rank of the group takes every step. A parameter then has a gradient on all of
            them or on none, laid out like itself.
        recorder: records the orthogonalisation of each batch, whose launches are most of a step's.

    State for each parameter: Muon `momentum`; AdamW `step` (int64), `exp_avg`, `exp_avg_sq`; either `master`. All
    floating state is fp32 (float64 for float64 parameters), whatever the parameter's dtype.
    """

    def __init__(
        self,
        roles: Sequence[ParamRole],
        lr: float,
        *,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        ns_steps: int = 5,
        ns_dtype: torch.dtype | None = None,
        rms: float = 0.2,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        master_weights: bool = True,
        holdings: Holdings | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        roles = [role for role in roles if role.parameter.requires_grad]
        muon = dict(algorithm="muon", momentum=momentum, ns_steps=ns_steps, rms=rms, weight_decay=weight_decay)
        adamw = dict(algorithm="adamw", betas=betas, eps=eps)
        groups = []
        for settings, members in (
            (muon, [r for r in roles if r.optimizer == "muon"]),
            ({**adamw, "weight_decay": weight_decay}, [r for r in roles if r.optimizer == "adamw" and r.decay]),
            ({**adamw, "weight_decay": 0.0}, [r for r in roles if r.optimizer == "adamw" and not r.decay]),
        ):
            if members:
                groups.append({"params": [(r.name, r.parameter) for r in members], **settings})
        if not groups and holdings is not None:  # a stage of a pipeline may hold nothing that trains
            groups.append({"params": [], "param_names": [], **adamw, "weight_decay": 0.0})
        self._ns_dtype = ns_dtype
        self._master_weights = master_weights
        self._metric_group = {role.parameter: role.group for role in roles}
        self._batches = _plan(role for role in roles if role.optimizer == "muon")
        self._holdings = holdings
        self._recordings = None if recorder is None else Recordings(recorder)
        self._spread: Spread | None = None
        if holdings is not None:
            from glm5.train.spread import Spread

            groups_of = sorted({r.group for r in roles})
            self._spread = Spread(holdings, self._batches, groups_of, ns_dtype, self._recordings)
        self._workspace: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        self.update_rms: dict[str, float] = {}
        super().__init__(groups, dict(lr=lr))

    def set_lr(self, lr: float) -> None:
        """The learning rate of the next step."""
        for group in self.param_groups:
            group["lr"] = lr

    # ------------------------------------------------------------------ one step
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, measure: bool = False) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: as in torch: evaluates the loss again, and its result is returned.
            measure: fill `update_rms`: by group, the RMS of the update before learning rate and weight decay.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        squares: Squares | None = defaultdict(list) if measure else None
        for group in self.param_groups:
            live = [p for p in group["params"] if p.grad is not None]
            if self._spread is not None and group["algorithm"] == "muon":
                self._spread.agree(live)
            if live:
                (self._muon if group["algorithm"] == "muon" else self._adamw)(group, live, squares)
                masters = [p for p in live if "master" in self.state[p]]
                if masters:
                    torch._foreach_copy_([self._local(p) for p in masters], self._states(masters, "master"))
        if squares is not None:
            self.update_rms = _root_mean_squares(squares if self._spread is None else self._spread.total(squares))
        return loss

    def _muon(self, group: dict[str, Any], live: list[nn.Parameter], squares: Squares | None) -> None:
        mu, lr = group["momentum"], group["lr"]
        for p in live:
            if "momentum" not in self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p, dtype=_state_dtype(p))
        momenta, weights = self._states(live, "momentum"), [self._weight(p) for p in live]
        if self._spread is not None:
            for p, momentum in zip(live, momenta, strict=True):  # all of them here, since of several copies one is read
                move_momentum(self._grad(p), momentum, mu)
            self._spread.muon(group, live, momenta, weights, squares)
            return
        weight_of, keep = dict(zip(live, weights, strict=True)), 1.0 - lr * group["weight_decay"]

        for batch in self._batches:
            places, count = [], 0
            for s in batch.slices:
                if s.parameter.grad is not None:
                    places.append((s, slice(count, count + s.last - s.first)))
                    count += s.last - s.first
            if not places:
                continue
            x_NAB = self._space(batch, count)
            for s, place in places:
                momentum = self.state[s.parameter]["momentum"]
                nesterov_input(s.of(self._grad(s.parameter)), s.of(momentum), mu, s.like(x_NAB[place]))
            dtype = self._ns_dtype or default_ns_dtype(batch.device, batch.dtype)
            o_NAB = orthogonalised(x_NAB, group["ns_steps"], dtype, self._recordings)
            scale = group["rms"] * math.sqrt(batch.long)
            for s, place in places:
                move_weights(s.of(weight_of[s.parameter]), s.like(o_NAB[place]), keep, -lr * scale)
                if squares is not None:
                    part = o_NAB[place]
                    norm = torch.linalg.vector_norm(part, dtype=batch.dtype) * scale
                    squares[s.cut.group].append((norm.square(), part.numel()))

    def _adamw(self, group: dict[str, Any], live: list[nn.Parameter], squares: Squares | None) -> None:
        (beta1, beta2), lr = group["betas"], group["lr"]
        buckets: dict[tuple[Any, ...], list[nn.Parameter]] = defaultdict(list)
        for p in live:
            state = self.state[p]
            if "step" not in state:
                state["step"] = torch.zeros((), dtype=torch.int64)
                state["exp_avg"] = torch.zeros_like(p, dtype=_state_dtype(p))
                state["exp_avg_sq"] = torch.zeros_like(p, dtype=_state_dtype(p))
            state["step"] += 1
            buckets[p.device, _state_dtype(p), int(state["step"])].append(p)
        for (_, dtype, step), params in buckets.items():
            grads = [self._grad(p).to(dtype) for p in params]
            weights = [self._weight(p) for p in params]
            exp_avg, exp_avg_sq = self._states(params, "exp_avg"), self._states(params, "exp_avg_sq")
            torch._foreach_lerp_(exp_avg, grads, 1.0 - beta1)
            torch._foreach_mul_(exp_avg_sq, beta2)
            torch._foreach_addcmul_(exp_avg_sq, grads, grads, value=1.0 - beta2)
            denominator = torch._foreach_sqrt(exp_avg_sq)
            torch._foreach_div_(denominator, math.sqrt(1.0 - beta2**step))
            torch._foreach_add_(denominator, group["eps"])
            update = torch._foreach_div(exp_avg, denominator)
            correction = 1.0 - beta1**step
            torch._foreach_mul_(weights, 1.0 - lr * group["weight_decay"])
            torch._foreach_add_(weights, update, alpha=-lr / correction)
            if squares is not None:
                for p, norm in zip(params, torch._foreach_norm(update), strict=True):
                    copies = 1 if self._holdings is None else self._holdings.replicas(p)
                    count = self._local(p).numel() / copies
                    squares[self._metric_group[p]].append(((norm / correction).square() / copies, count))

    def _weight(self, p: Tensor) -> Tensor:
        """The tensor to update: the parameter, or the fp32 copy of a narrower one. What this rank holds of it."""
        if p.dtype == _state_dtype(p) or not self._master_weights:
            return self._local(p)
        state = self.state[p]
        if "master" not in state:
            state["master"] = p.detach().to(_state_dtype(p))
        return self._local(state["master"])

    def _local(self, t: Tensor) -> Tensor:
        """What this rank holds of a parameter or state."""
        return t if self._holdings is None else self._holdings.local(t)

    def _grad(self, p: Tensor) -> Tensor:
        """What this rank holds of a gradient."""
        return _grad(p) if self._holdings is None else self._holdings.gradient(p)

    def _laid_out(self, t: Tensor, p: nn.Parameter) -> Tensor:
        """A state tensor, whole or laid out already, as its parameter lies. Step counts are whole everywhere."""
        return t if self._holdings is None or t.shape != p.shape else self._holdings.laid_out(t, p)

    def _states(self, params: list[nn.Parameter], key: str) -> list[Tensor]:
        """What this rank holds of a state of each."""
        return [self._local(self.state[p][key]) for p in params]

    def _space(self, batch: Batch, count: int) -> Tensor:
        """[count, short, long] of one buffer that all batches of a device and dtype take turns to use."""
        key, needed = (batch.device, batch.dtype), count * batch.short * batch.long
        if key not in self._workspace or self._workspace[key].numel() < needed:
            self._workspace[key] = torch.empty(needed, dtype=batch.dtype, device=batch.device)
        return self._workspace[key][:needed].view(count, batch.short, batch.long)

    # ------------------------------------------------------------------ state
    def named_state(self) -> dict[str, Tensor]:
        """All state as `<parameter>.<key>` -> tensor (not a copy), for a checkpoint of tensors alone."""
        return {f"{name}.{key}": t for name, p, _ in self._named() for key, t in self.state.get(p, {}).items()}

    def reset(self) -> None:
        """Forget momenta, squares and step counts, as after a push of weights in asynchronous learning (report, section
        4.1). fp32 masters are weights, and stay."""
        for _, p, _ in self._named():
            kept = {key: t for key, t in self.state.pop(p, {}).items() if key == "master"}
            if kept:
                self.state[p] = kept

    def load_named_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace all state by copies of `named_state`'s tensors, with their dtypes.

        Raises:
            CheckpointError: tensors are unknown, missing or misshapen, or of another dtype; it lists them all, and
                nothing is changed.
        """
        left = dict(tensors)
        wrong, state = [], {}
        for name, p, algorithm in self._named():
            expected = self._expected(p, algorithm)
            found = {key: left.pop(f"{name}.{key}") for key in expected if f"{name}.{key}" in left}
            moved = found.keys() - {"master"}  # a master may be given before the first update, or rest for ever
            wrong += [f"{name}.{key} is missing" for key in expected if moved and key not in found]
            for key, t in found.items():
                if (t.shape, t.dtype) != expected[key]:
                    shape, dtype = expected[key]
                    wrong.append(f"{name}.{key} is {t.dtype} {list(t.shape)}, not {dtype} {list(shape)}")
            state[p] = found
        wrong += [f"{name} is unknown" for name in left]
        if wrong:
            raise CheckpointError(
                f"optimizer state does not fit: {'; '.join(wrong)}",
                "Resume with the model, the precision and the trainable parameters that it was saved with",
            )
        self.state.clear()
        for p, found in state.items():
            if found:
                self.state[p] = {key: _copy_to(self._laid_out(t, p), p.device) for key, t in found.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """torch's layout. Unlike torch's own, this keeps every dtype: fp32 momentum of a bf16 parameter stays fp32.

        Raises:
            CheckpointError: as `load_named_state`, or the parameter groups differ.
        """
        saved, own = state_dict["param_groups"], self.param_groups
        if [g["param_names"] for g in saved] != [g["param_names"] for g in own]:
            raise CheckpointError(
                "optimizer state does not fit: its parameter groups hold other parameters",
                "Resume with the model and the trainable parameters that it was saved with",
            )
        index_to_name = {i: n for g in saved for i, n in zip(g["params"], g["param_names"], strict=True)}
        self.load_named_state(
            {f"{index_to_name[i]}.{key}": t for i, state in state_dict["state"].items() for key, t in state.items()}
        )
        for group, old in zip(own, saved, strict=True):
            group.update({k: v for k, v in old.items() if k not in ("params", "param_names")})

    def _named(self) -> Iterator[tuple[str, nn.Parameter, str]]:
        for group in self.param_groups:
            for name, p in zip(group["param_names"], group["params"], strict=True):
                yield name, p, group["algorithm"]

    def _expected(self, p: nn.Parameter, algorithm: str) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Shape and dtype of every state tensor that this parameter can have."""
        like, count = (p.shape, _state_dtype(p)), (torch.Size(()), torch.int64)
        keys = {"momentum": like} if algorithm == "muon" else {"step": count, "exp_avg": like, "exp_avg_sq": like}
        return keys | ({"master": like} if self._master_weights and p.dtype != _state_dtype(p) else {})


def orthogonalised(x_NAB: Tensor, steps: int, dtype: torch.dtype, recordings: Recordings | None) -> Tensor:
    """`newton_schulz`, recorded where it can be: of a buffer that is used again and again."""
    if recordings is None:
        return newton_schulz(x_NAB, steps, dtype=dtype)
    name = (x_NAB.data_ptr(), x_NAB.shape, steps, dtype)
    return recordings.run(name, lambda: newton_schulz(x_NAB, steps, dtype=dtype))


def default_ns_dtype(device: torch.device, dtype: torch.dtype = torch.float32) -> torch.dtype:
    """bf16 where the device multiplies it in hardware (CUDA, or a CPU with AMX or AVX-512 BF16), otherwise fp32."""
    if dtype == torch.float64:
        return torch.float64
    fast = device.type != "cpu" or torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if fast else torch.float32


def first_nonfinite(named_tensors: Iterable[tuple[str, Tensor | None]]) -> str | None:
    """The name of the first tensor that holds a NaN or an infinity, or None. Waits for the device once."""
    named = [(n, t) for n, t in named_tensors if t is not None and t.is_floating_point() and t.numel()]
    if not named:
        return None
    device = named[0][1].device
    largest = torch._foreach_norm([t.detach() for _, t in named], math.inf)
    finite = torch.stack([x.to(device, torch.float32) for x in largest]).isfinite().tolist()
    return next((name for (name, _), ok in zip(named, finite, strict=True) if not ok), None)


@torch.no_grad()
def clip_grad_norm(
    named_parameters: Iterable[tuple[str, nn.Parameter]], max_norm: float, holdings: Holdings | None = None
) -> float:
    """Scale all gradients down to a global L2 norm of at most `max_norm`.

    Args:
        holdings: where parameters are spread over ranks: the norm is that of everyone's gradients, each element counted
            once, the same number on every rank. All ranks call this.

    Returns:
        The norm before, in fp32, accumulated in the given order. `max_norm=math.inf` only measures.

    Raises:
        NumericalError: the norm is not finite; it names the first bad gradient. Nothing is scaled then.
    """
    live = [(name, p) for name, p in named_parameters if p.grad is not None]
    if not live and holdings is None:
        return 0.0
    named = [(name, _grad(p) if holdings is None else holdings.gradient(p)) for name, p in live]
    grads = [g for _, g in named]
    if grads and grads[0].is_cuda:
        norms = list(torch._foreach_norm(grads, 2, dtype=torch.float32))
    else:
        # One long fp32 sum loses digits on a CPU; norms of rows, then of those, do not.
        rows = [torch.linalg.vector_norm(g, dim=-1, dtype=torch.float32) for g in grads]
        norms = [torch.linalg.vector_norm(r) for r in rows]
    if holdings is None:
        norm = float(torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms])))
    else:
        norm = holdings.norm([p for _, p in live], norms)
    if not math.isfinite(norm):
        bad = first_nonfinite(named)
        what = f"gradient of {bad} is not finite" if bad else f"gradient norm {norm} overflows fp32"
        what = what if bad or holdings is None else "a gradient is not finite, on another rank"
        raise NumericalError(what, "Lower the learning rate, or look at the batch of this step")
    if norm > max_norm:
        torch._foreach_mul_(grads, max_norm / norm)
    return norm


def _plan(roles: Iterable[ParamRole]) -> list[Batch]:
    """Matrices of one shape, device and precision, from all parameters, in batches of a bounded size."""
    kinds: dict[tuple[Any, ...], list[Slice]] = defaultdict(list)
    for role in roles:
        p = role.parameter
        for cut in role.blocks:
            short, long = sorted((cut.height, p.shape[-1]))
            kinds[short, long, p.device, _state_dtype(p)].append(Slice(p, cut, 0, cut.matrices))
    batches = []
    for (short, long, device, dtype), whole in kinds.items():
        limit = max(1, BATCH_ELEMENTS.get(device.type, BATCH_ELEMENTS["cuda"]) // (short * long))
        part: list[Slice] = []
        room = limit
        for s in whole:
            first = 0
            while first < s.last:
                last = min(s.last, first + room)
                part.append(Slice(s.parameter, s.cut, first, last))
                room -= last - first
                first = last
                if room == 0:
                    batches.append(Batch(short, long, device, dtype, tuple(part)))
                    part, room = [], limit
        if part:
            batches.append(Batch(short, long, device, dtype, tuple(part)))
    return batches


def _grad(p: Tensor) -> Tensor:
    assert p.grad is not None
    return p.grad


def _copy_to(t: Tensor, device: torch.device) -> Tensor:
    # Step counts stay on the CPU, where reading them waits for nothing.
    return t.detach().to("cpu" if t.dtype == torch.int64 else device, copy=True)


def _state_dtype(p: Tensor) -> torch.dtype:
    return torch.promote_types(p.dtype, torch.float32)


def _root_mean_squares(squares: Mapping[str, list[tuple[Tensor, float]]]) -> dict[str, float]:
    out = {}
    for group, parts in sorted(squares.items()):
        total = float(torch.stack([s.cpu() for s, _ in parts]).sum())
        out[group] = math.sqrt(total / sum(n for _, n in parts))
    return out
