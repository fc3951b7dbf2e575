"""What training calls of the fast operators: the specifications' arguments in, gradients made by kernels.

`dispatch` names these functions; each imports its kernels when first called. Where
`torch.use_deterministic_algorithms` is on, sums over queries run in a fixed order, at some cost in time and memory;
else the last bits of the latent rows' and index keys' gradients depend on a race. Read next:
`cuda.sparse_mla_backward`, `triton.moe_backward`, `triton.cross_entropy`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from glm5.kernels.visibility import Visibility


def sparse_attention(q: Tensor, k: Tensor, v: Tensor, selected: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Absorbed sparse attention and its log-sum-exp [B, T, H]; the rows' gradient arrives through k alone."""
    from glm5.kernels import library

    out: tuple[Tensor, Tensor] = library.sparse_mla(q, k[:, :, 0], selected.contiguous(), scale)
    return out


def indexer_loss(
    iq: Tensor,
    iw: Tensor,
    ik: Tensor,
    q: Tensor,
    k: Tensor,
    selected: Tensor,
    scale: float,
    lse: Tensor | None,
    wants_grad: bool,
) -> tuple[Tensor | None, ...]:
    """KL, mass and logit maxima over a selection that the top-k holds whole, then gradients to iq, iw and ik."""
    from glm5.kernels.cuda import sparse_mla, sparse_mla_target
    from glm5.kernels.triton import indexer_loss as kernels

    rows, selected = k[:, :, 0], selected.contiguous()
    if lse is None:
        lse = sparse_mla(q, rows, selected, value_dim=512, scale=scale)[1]
    target, top = sparse_mla_target(q, rows, selected, lse, scale=scale)
    fixed = torch.are_deterministic_algorithms_enabled()
    kl, mass, *grads = kernels.selected_loss(iq, iw, ik, selected, target, grad=wants_grad, deterministic=fixed)
    return kl, mass, top.amax((0, 1)), *grads


def interval_loss(
    iq: Tensor,
    iw: Tensor,
    ik: Tensor,
    q: Tensor,
    k: Tensor,
    visible: Visibility,
    scale: float,
    topk: int,
    wants_grad: bool,
) -> tuple[Tensor | None, ...]:
    """The same over whole intervals and expanded keys, for the warm-up."""
    from glm5.kernels.cuda import stable_topk
    from glm5.kernels.triton import indexer_warmup as kernels

    bounds = (visible.first_BT, visible.last_BT, visible.slots)
    return kernels.interval_loss(iq, iw, ik, q, k, *bounds, scale, topk, grad=wants_grad, select=stable_topk)


def grouped_swiglu(x: Tensor, gate_up: Tensor, down: Tensor, expert: Tensor, weight: Tensor) -> Tensor:
    """As `moe.grouped_swiglu`."""
    from glm5.kernels.triton.moe_backward import GroupedSwiGLU

    out: Tensor = GroupedSwiGLU.apply(x, gate_up, down, expert, weight)
    return out


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    weights: Tensor | None,
    with_entropy: bool,
    grad_hidden: bool,
    grad_weight: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Log-probabilities, entropies, and gradients of -sum(weights * log p) to hidden and weight."""
    from glm5.kernels.triton import cross_entropy

    return cross_entropy.linear_cross_entropy(
        hidden,
        weight,
        targets.contiguous(),
        None if weights is None else weights.contiguous(),
        with_entropy=with_entropy,
        grad_hidden=grad_hidden,
        grad_weight=grad_weight,
    )


def scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """x * factor in fp32, rounded once to dtype."""
    from glm5.kernels.triton import cross_entropy

    return cross_entropy.scaled(x, factor, dtype)


def newton_schulz(x_NAB: Tensor, steps: int, coefficients: tuple[float, float, float]) -> Tensor:
    """The iteration of `newton_schulz.newton_schulz` on scaled matrices with A <= B."""
    from glm5.kernels.triton import newton_schulz as kernels

    return kernels.iterate(x_NAB, steps, coefficients)


def nesterov(grad: Tensor, momentum: Tensor, mu: float, out: Tensor, *, move: bool) -> None:
    """As `newton_schulz.nesterov_input`."""
    from glm5.kernels.triton import muon

    muon.nesterov(grad, momentum, mu, out, move=move)


def move_momentum(grad: Tensor, momentum: Tensor, mu: float) -> None:
    """As `newton_schulz.move_momentum`."""
    from glm5.kernels.triton import muon

    muon.momentum(grad, momentum, mu)


def move_weights(weight: Tensor, factor: Tensor, keep: float, rate: float) -> None:
    """As `newton_schulz.move_weights`."""
    from glm5.kernels.triton import muon

    muon.update(weight, factor, keep, rate)


def divided(x_NAB: Tensor, norm_N: Tensor, dtype: torch.dtype) -> Tensor:
    """Every matrix over its number, rounded once to dtype."""
    from glm5.kernels.triton import muon

    return muon.divided(x_NAB, norm_N, dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `basic.rms_norm`, rounded once."""
    from glm5.kernels.triton.norm_backward import Norm

    out: Tensor = Norm.apply(x, weight, eps)
    return out


def torch_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The same of rows of any width."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def rms_norm_beside(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `basic.rms_norm_beside`."""
    from glm5.kernels.triton.norm_backward import NormBeside

    pair: tuple[Tensor, Tensor] = NormBeside.apply(x, weight, eps)
    return pair


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `basic.add_rms_norm`."""
    from glm5.kernels.triton.norm_backward import AddNorm

    pair: tuple[Tensor, Tensor] = AddNorm.apply(x, y, weight, eps)
    return pair


def latent_rows(x: Tensor, weight: Tensor, rotation: Tensor, eps: float) -> Tensor:
    """As `basic.latent_rows`."""
    from glm5.kernels.triton.norm_backward import LatentRows

    out: Tensor = LatentRows.apply(x, weight, rotation, eps)
    return out


def rows_by_pair(x: Tensor, order: Tensor, place: Tensor, held: Tensor | None) -> Tensor:
    """As `moe.rows_by_pair`."""
    from glm5.kernels.triton.pairs import RowsByPair

    out: Tensor = RowsByPair.apply(x, order, place, held)
    return out


def sum_by_token(part: Tensor, order: Tensor, place: Tensor, weight: Tensor) -> Tensor:
    """As `moe.sum_by_token`."""
    from glm5.kernels.triton.pairs import SumByToken

    out: Tensor = SumByToken.apply(part, order, place, weight)
    return out


def router(
    x: Tensor, weight: Tensor, bias: Tensor, top_k: int, normalise: bool, scaling: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits, the experts that are best with the bias, their weights, and scores."""
    from glm5.kernels.triton.routing_backward import Routed

    routed: tuple[Tensor, Tensor, Tensor, Tensor] = Routed.apply(x, weight, bias, top_k, normalise, scaling)
    return routed


def loads_and_balance(scores: Tensor, experts: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """As `balance.loads_and_balance`."""
    from glm5.kernels.triton.balance import SequenceBalance

    pair: tuple[Tensor, Tensor] = SequenceBalance.apply(scores, experts, valid)
    return pair


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """As `basic.swiglu`."""
    from glm5.kernels.triton.basic_backward import SwiGLU

    out: Tensor = SwiGLU.apply(gate, up)
    return out


def rope_heads(x: Tensor, rotation: Tensor) -> Tensor:
    """As `basic.rope_heads`, rounded once."""
    from glm5.kernels.triton.heads_backward import Turned

    out: Tensor = Turned.apply(x, rotation)
    return out


def keys_and_values(up: Tensor, rotary: Tensor, nope: int) -> tuple[Tensor, Tensor]:
    """As `basic.keys_and_values`; values are a view of `up`."""
    from glm5.kernels.triton.heads_backward import KeysAndValues

    pair: tuple[Tensor, Tensor] = KeysAndValues.apply(up, rotary, nope)
    return pair
