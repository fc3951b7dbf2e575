"""Routing and the routed experts against their formulas in float64, one token and one expert at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from glm5.kernels.moe import grouped_swiglu, route
from support import naive


def by_rule(logits: list[float], bias: list[float], top_k: int, n_group: int = 1, topk_group: int = 1) -> list[int]:
    """Experts by score + bias, best first, ties to the lower; only from the best groups (by their two best)."""
    choice = (torch.tensor(logits).sigmoid() + torch.tensor(bias)).tolist()
    size = len(choice) // n_group
    groups = [choice[g * size : (g + 1) * size] for g in range(n_group)]
    strength = [sum(sorted(group, reverse=True)[:2]) for group in groups]
    kept = sorted(range(n_group), key=lambda g: (-strength[g], g))[:topk_group]
    alive = [e for e in range(len(choice)) if e // size in kept]
    return sorted(alive, key=lambda e: (-choice[e], e))[:top_k]


@pytest.mark.parametrize(("n_group", "topk_group"), [(1, 1), (4, 2), (4, 1), (2, 2)])
@pytest.mark.parametrize("normalise", [True, False])
def test_route(n_group: int, topk_group: int, normalise: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(50, 12, generator=generator)
    bias = 7 + 0.1 * torch.randn(12, generator=generator)
    expert, weight, score = route(
        logits, bias, 3, normalise=normalise, scaling=2.5, n_group=n_group, topk_group=topk_group
    )
    exact = logits.double().sigmoid()
    assert expert.dtype == torch.int64
    assert weight.dtype == score.dtype == torch.float32
    torch.testing.assert_close(score, exact.float())
    for n in range(50):
        assert expert[n].tolist() == by_rule(logits[n].tolist(), bias.tolist(), 3, n_group, topk_group)
        own = exact[n, expert[n]]  # the scores, without the bias
        mixture = 2.5 * own / (own.sum() if normalise else 1.0)
        torch.testing.assert_close(weight[n], mixture.float(), rtol=1e-5, atol=1e-7)


def test_bias_moves_the_choice_and_not_the_weight() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    bias = torch.tensor([0.0, 0.0, 0.0, 9.0])
    expert, weight, _ = route(logits, bias, 2)
    assert expert.tolist() == [[3, 0]]
    own = logits[0, [3, 0]].sigmoid()
    torch.testing.assert_close(weight[0], own / own.sum())


def test_ties_go_to_the_lower_expert() -> None:
    expert, weight, _ = route(torch.zeros(2, 9), torch.zeros(9), 4)
    assert expert.tolist() == [[0, 1, 2, 3]] * 2
    torch.testing.assert_close(weight, torch.full((2, 4), 0.25))


def test_logits_of_minus_sixty_stay_finite() -> None:
    """Scores near 1e-26: no 0/0, and the bias (which a score recovered by subtraction would drown in) still rules."""
    logits = torch.full((3, 6), -60.0)
    expert, weight, score = route(logits, torch.tensor([7.0, 7.1, 7.3, 7.2, 7.0, 7.0]), 2, scaling=2.5)
    assert expert.tolist() == [[2, 3]] * 3
    own = torch.tensor(-60.0, dtype=torch.float64).sigmoid()
    torch.testing.assert_close(score, torch.full((3, 6), float(own)), rtol=1e-5, atol=0)
    torch.testing.assert_close(weight, torch.full((3, 2), float(2.5 * own / (2 * own + 1e-20))), rtol=1e-5, atol=0)
    assert route(torch.full((1, 4), -200.0), torch.zeros(4), 2)[1].tolist() == [[0.0, 0.0]]  # scores underflow: zero


def test_gradient_reaches_the_logits_through_the_weights_only() -> None:
    logits = torch.randn(5, 6, generator=torch.Generator().manual_seed(0), requires_grad=True)
    bias = torch.zeros(6, requires_grad=True)
    expert, weight, _ = route(logits, bias, 2, scaling=2.5)
    direction = torch.randn(5, 2, generator=torch.Generator().manual_seed(1))
    (ours,) = torch.autograd.grad((weight * direction).sum(), logits)
    own = logits.double().sigmoid().gather(-1, expert)
    (exact,) = torch.autograd.grad((2.5 * own / own.sum(-1, keepdim=True) * direction).sum(), logits)
    torch.testing.assert_close(ours, exact)
    assert torch.autograd.grad(route(logits, bias, 2)[1].sum(), bias, allow_unused=True) == (None,)


# --------------------------------------------------------------------------- the experts
EXPERTS, WIDTH, INNER, PER_TOKEN = 6, 10, 7, 2


def experts(tokens: int, seed: int = 0, allowed: int = EXPERTS) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x, gate_up, down, expert ids (distinct per token, below `allowed`), weights."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, WIDTH, generator=generator)
    gate_up = torch.randn(EXPERTS, 2 * INNER, WIDTH, generator=generator) / WIDTH**0.5
    down = torch.randn(EXPERTS, WIDTH, INNER, generator=generator) / INNER**0.5
    chosen = torch.rand(tokens, allowed, generator=generator).argsort(-1)[:, :PER_TOKEN]
    return x, gate_up, down, chosen, torch.rand(tokens, PER_TOKEN, generator=generator)


@pytest.mark.parametrize(("tokens", "allowed"), [(1, EXPERTS), (2, EXPERTS), (40, EXPERTS), (40, 3), (17, 2)])
def test_grouped_swiglu(tokens: int, allowed: int) -> None:
    """Values and all gradients; with few experts allowed, the others stay empty and get exactly zero."""
    x, gate_up, down, chosen, weight = experts(tokens, allowed=allowed)
    inputs = [t.requires_grad_() for t in (x, gate_up, down, weight)]
    out = grouped_swiglu(x, gate_up, down, chosen, weight)
    exact = naive.swiglu_experts(x, gate_up, down, chosen, weight)
    torch.testing.assert_close(out, exact.float(), rtol=1e-5, atol=1e-5)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    ours = torch.autograd.grad((out * direction).sum(), inputs)
    right = torch.autograd.grad((exact * direction.double()).sum(), inputs)
    for a, b in zip(ours, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    for gradient in ours[1:3]:
        assert not gradient[allowed:].any()
    with torch.no_grad():  # another path where there is one token
        torch.testing.assert_close(grouped_swiglu(x, gate_up, down, chosen, weight), out, rtol=1e-5, atol=1e-6)


def test_order_of_tokens_changes_nothing() -> None:
    x, gate_up, down, chosen, weight = experts(30)
    out = grouped_swiglu(x, gate_up, down, chosen, weight)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(0))
    moved = grouped_swiglu(x[order], gate_up, down, chosen[order], weight[order])
    torch.testing.assert_close(moved, out[order], rtol=1e-5, atol=1e-6)
    alone = torch.cat([grouped_swiglu(*_row(n, x, gate_up, down, chosen, weight)) for n in range(30)])
    torch.testing.assert_close(alone, out, rtol=1e-5, atol=1e-6)


def _row(n: int, x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return x[n : n + 1], gate_up, down, chosen[n : n + 1], weight[n : n + 1]


def test_runs_are_identical_bit_for_bit() -> None:
    x, gate_up, down, chosen, weight = experts(40)
    first, second = (grouped_swiglu(x, gate_up, down, chosen, weight) for _ in range(2))
    assert torch.equal(first, second)


def test_bf16_sums_experts_in_fp32() -> None:
    """The sum over a token's experts is rounded once, at its end: nearer to the sum of the experts' own bf16 outputs
    than a sum that rounds at every step."""
    x, gate_up, down, _, _ = (t.bfloat16() for t in experts(60))
    generator = torch.Generator().manual_seed(0)
    chosen, weight = torch.arange(EXPERTS).expand(60, -1), torch.rand(60, EXPERTS, generator=generator)
    out = grouped_swiglu(x, gate_up, down, chosen, weight)
    assert out.dtype == torch.bfloat16
    exact, rounded = torch.zeros(60, WIDTH, dtype=torch.float64), torch.zeros(60, WIDTH, dtype=torch.bfloat16)
    for e in range(EXPERTS):
        gate, up = (x @ gate_up[e].T).chunk(2, dim=-1)
        part = (torch.nn.functional.silu(gate) * up) @ down[e].T
        exact += part.double() * weight[:, e : e + 1]
        rounded += part * weight[:, e : e + 1].bfloat16()
    assert (out - exact).norm() < 0.6 * (rounded - exact).norm()
    naively = naive.swiglu_experts(x, gate_up, down, chosen, weight)
    assert (out - naively).norm() < 0.01 * naively.norm()
