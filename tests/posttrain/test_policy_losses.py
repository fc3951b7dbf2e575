"""Losses of reinforcement learning: values by hand, gradients against finite differences, parts that add up."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from glm5.posttrain import losses
from glm5.posttrain.losses import Actions, BatchCounts, LossConfig, LossMetrics, policy_loss
from glm5.utils.errors import ConfigError


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def logs(*values: float) -> Tensor:
    return f64(*values).log()


def actions(
    new: Tensor, old: Tensor, rollout: Tensor, advantages: Tensor, sequence: list[int], mask: list[bool] | None = None
) -> tuple[Actions, BatchCounts]:
    """Actions with the counts of all of them."""
    s = torch.tensor(sequence)
    m = torch.ones(len(s), dtype=torch.bool) if mask is None else torch.tensor(mask)
    return Actions(new, m, s, advantages, rollout, old), BatchCounts.of(m, s, int(s.max()) + 1)


# ------------------------------------------------------------------------------------------------ terms, by hand
@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "slope"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.25, 2.0, -2.5, -2.5),  # inside [0.8, 1.28]
        (1.5, 2.0, -2.56, 0.0),  # clipped above: 1.28 · 2
        (1.5, -2.0, 3.0, 3.0),  # no clip above for what should become rarer
        (0.5, 2.0, -1.0, -1.0),  # nor below for what should become more likely
        (0.5, -2.0, 1.6, 0.0),  # clipped below: 0.8 · 2
    ],
)
def test_the_clipped_surrogate(ratio: float, advantage: float, expected: float, slope: float) -> None:
    log_ratio = logs(ratio).requires_grad_()
    term = losses.clipped(log_ratio, f64(advantage), 0.2, 0.28)
    term.sum().backward()
    assert term.item() == pytest.approx(expected)
    assert log_ratio.grad is not None
    assert log_ratio.grad.item() == pytest.approx(slope)


def test_pop_keeps_the_ratio_on_the_closed_band() -> None:
    rho = f64(0.49999, 0.5, 1.0, 1.7, 2.0, 2.00001)
    assert losses.icepop(rho, 2.0).tolist() == [0.0, 0.5, 1.0, 1.7, 2.0, 0.0]
    assert losses.masked(rho, 0.6, 1.7).tolist() == [0.0, 0.0, 1.0, 1.7, 0.0, 0.0]
    assert losses.truncated(rho, 1.7).tolist() == [0.49999, 0.5, 1.0, 1.7, 1.7, 1.7]


def test_the_double_sided_band_is_open_and_its_weight_a_constant() -> None:
    ratio = f64(0.7, 0.75, 1.0, 1.5, 2.0, 2.5)  # ε of 0.25 and 1: the ends are 0.75 and 2, exact in binary
    new = ratio.log().requires_grad_()
    rollout = torch.zeros(6, dtype=torch.float64)
    term = losses.double_sided(new, rollout, torch.full((6,), 3.0, dtype=torch.float64), 0.25, 1.0)
    inside = f64(0, 0, 1, 1.5, 0, 0)
    torch.testing.assert_close(term, -inside * 3 * new)
    (grad,) = torch.autograd.grad(term.sum(), new)
    torch.testing.assert_close(grad, -inside * 3)  # and not -f·Â·(1 + log π)
    surrogate = -torch.where(inside > 0, (new - rollout).exp(), 0.0) * 3  # the masked surrogate has the same gradient
    torch.testing.assert_close(torch.autograd.grad(surrogate.sum(), new)[0], grad)


def test_kl_estimators() -> None:
    new, reference = logs(0.5, 0.2), logs(0.25, 0.4)
    torch.testing.assert_close(losses.kl(new, reference, "k1"), f64(math.log(2), -math.log(2)))
    torch.testing.assert_close(losses.kl(new, reference, "k2"), f64(*[0.5 * math.log(2) ** 2] * 2))
    torch.testing.assert_close(losses.kl(new, reference, "k3"), f64(0.5 - 1 + math.log(2), 2 - 1 - math.log(2)))


def test_kl_estimators_in_the_mean_and_their_gradients() -> None:
    """Over all tokens, weighted by their probability: k1 and k3 are the KL, k1's gradient is 0, k2's is the KL's."""
    logits = f64(0.3, -1.0, 0.7, 0.1).requires_grad_()
    reference = f64(0.0, 0.5, 0.2, -0.4).log_softmax(0)
    new = logits.log_softmax(0)
    true = (new.exp() * (new - reference)).sum()
    probs = new.detach().exp()
    means = {k: (probs * losses.kl(new, reference, k)).sum() for k in ("k1", "k2", "k3")}
    torch.testing.assert_close(means["k1"], true)
    torch.testing.assert_close(means["k3"], true)
    grads = {k: torch.autograd.grad(mean, logits, retain_graph=True)[0] for k, mean in means.items()}
    (of_kl,) = torch.autograd.grad(true, logits, retain_graph=True)
    torch.testing.assert_close(grads["k1"], torch.zeros_like(logits))
    torch.testing.assert_close(grads["k2"], of_kl)
    (reverse,) = torch.autograd.grad((reference.exp() * (reference - new)).sum(), logits)
    torch.testing.assert_close(grads["k3"], reverse)


# ------------------------------------------------------------------------------------------------ whole losses, by hand
def test_glm5_equation_1_by_hand() -> None:
    """Two answers, of three tokens and of one. ρ: 1, 1.6, 0.4 (gone), 0.6; r as below."""
    old = logs(0.5, 0.4, 0.2, 0.3)
    rollout = logs(0.5, 0.25, 0.5, 0.5)
    new = old + logs(1.1, 1.5, 1.0, 0.7)
    batch, counts = actions(new, old, rollout, f64(1, 1, 1, -2), [0, 0, 0, 1])
    found = policy_loss(losses.glm5_reasoning(), batch, counts)
    first = (1 * 1.1 + 1.6 * 1.28 + 0) / 3  # 1.5 is clipped at 1.28
    second = 0.6 * (0.8 * -2)  # 0.7 is clipped at 0.8
    assert found.loss.item() == pytest.approx(-(first + second) / 2)
    assert found.moving.item() == 1
    values = found.metrics.values()
    assert values["is_masked_low"] == 0.25
    assert values["is_masked_high"] == 0
    assert values["is_masked_positive"] == pytest.approx(1 / 3)
    assert values["is_masked_negative"] == 0
    assert (values["clip_frac_low"], values["clip_frac_high"]) == (0.25, 0.25)
    assert (values["ratio_min"], values["ratio_max"]) == (pytest.approx(0.4), pytest.approx(1.6))
    assert values["train_rollout_logprob_abs_diff_max"] == pytest.approx(math.log(2.5))
    rho = [1, 1.6, 0.4, 0.6]
    assert values["mismatch_k3"] == pytest.approx(sum(r - 1 - math.log(r) for r in rho) / 4)
    assert values["mismatch_k1"] == pytest.approx(-sum(map(math.log, rho)) / 4)
    assert values["mismatch_chi2"] == pytest.approx(sum(r * r for r in rho) / 4 - 1)
    assert values["rollout_is_eff_sample_size"] == pytest.approx(sum(rho) ** 2 / sum(r * r for r in rho) / 4)
    assert values["train_rollout_logprob_abs_diff"] == pytest.approx(sum(abs(math.log(r)) for r in rho) / 4)
    ratios = [1.1, 1.5, 1.0, 0.7]
    assert values["ppo_kl"] == pytest.approx(sum(r - 1 - math.log(r) for r in ratios) / 4)


def test_grpo_with_kl_and_entropy_by_hand() -> None:
    old = logs(0.5, 0.4)
    batch, counts = actions(old + logs(1.3, 0.9), old, old, f64(1, -1), [0, 1])
    batch = replace(batch, reference_logprobs=old, entropy=f64(0.7, 0.3))
    found = policy_loss(LossConfig(kl_weight=0.5, entropy_weight=0.1), batch, counts)
    kl = [1 / r - 1 + math.log(r) for r in (1.3, 0.9)]
    expected = (-1.2 + 0.9) / 2 + 0.5 * sum(kl) / 2 - 0.1 * 0.5
    assert found.loss.item() == pytest.approx(expected)
    assert found.metrics.values()["entropy"] == pytest.approx(0.5)
    assert found.metrics.values()["kl_ref"] == pytest.approx(sum(kl) / 2)


def test_means_by_hand() -> None:
    """Three tokens and one: sequence (a + b + c) / 3 and d, halved; token sum / 4; constant sum / (2 · 10)."""
    terms = f64(-1.0, -2.0, -3.0, -4.0)
    zero = torch.zeros(4, dtype=torch.float64)
    batch, counts = actions(zero, zero, zero, -terms, [0, 0, 0, 1])
    assert policy_loss(LossConfig(), batch, counts).loss.item() == pytest.approx((-2 - 4) / 2)
    assert policy_loss(losses.dapo(), batch, counts).loss.item() == pytest.approx(-10 / 4)
    constant = LossConfig(mean="constant", constant_length=10)
    assert policy_loss(constant, batch, counts).loss.item() == pytest.approx(-10 / 20)


def test_masked_tokens_are_in_no_denominator() -> None:
    """Thirty tokens of which five are cut off: the mean is over 25."""
    mask = [True] * 25 + [False] * 5
    zero = torch.zeros(30, dtype=torch.float64)
    batch, counts = actions(zero, zero, zero, torch.ones(30, dtype=torch.float64), [0] * 30, mask)
    for config in (LossConfig(), losses.dapo()):
        assert policy_loss(config, batch, counts).loss.item() == pytest.approx(-1.0)
    assert counts.tokens == 25


def test_gspo_by_hand() -> None:
    """s = exp(mean of the log ratios): one inside its bounds, one clipped above, one below and not clipped."""
    old = torch.zeros(6, dtype=torch.float64)
    new = f64(0.1, 0.3, 0.5, 0.7, -0.6, -0.8)
    batch, counts = actions(new.requires_grad_(), old, old, f64(1, 1, 2, 2, 3, 3), [0, 0, 1, 1, 2, 2])
    config = LossConfig(objective="sequence_clip", clip_low=0.25, clip_high=0.5)
    found = policy_loss(config, batch, counts)
    s = [math.exp(x) for x in (0.2, 0.6, -0.7)]
    assert found.loss.item() == pytest.approx(-(s[0] * 1 + 1.5 * 2 + s[2] * 3) / 3)
    (grad,) = torch.autograd.grad(found.loss, new)
    expected = [-s[0] / 2 / 3] * 2 + [0.0] * 2 + [-s[2] * 3 / 2 / 3] * 2
    torch.testing.assert_close(grad, f64(*expected))


def test_levels_of_the_mismatch_ratio() -> None:
    old, rollout = logs(0.4, 0.4, 0.3), logs(0.2, 0.1, 0.3)
    batch, counts = actions(old, old, rollout, f64(1, 1, 1), [0, 0, 1])
    arguments = (old, rollout, batch.sequence, batch.mask, counts.actions_S)
    torch.testing.assert_close(losses.mismatch_ratio(*arguments, "token"), f64(2, 4, 1))
    torch.testing.assert_close(losses.mismatch_ratio(*arguments, "sequence"), f64(8, 8, 1))
    torch.testing.assert_close(losses.mismatch_ratio(*arguments, "geometric"), f64(8**0.5, 8**0.5, 1))
    cut = LossConfig(correction="truncate", correction_level="sequence", correction_high=3.0)
    assert policy_loss(cut, batch, counts).loss.item() == pytest.approx(-(3 + 1) / 2)
    gone = LossConfig(correction="mask", correction_level="geometric", correction_low=0.9, correction_high=2.0)
    assert policy_loss(gone, batch, counts).loss.item() == pytest.approx(-(0 + 1) / 2)


# ------------------------------------------------------------------------------------------------ gradients
CONFIGS = {
    "grpo": LossConfig(kl_weight=0.1, entropy_weight=0.05),
    "dapo": losses.dapo(),
    "glm5_reasoning": losses.glm5_reasoning(),
    "glm5_agentic": losses.glm5_agentic(),
    "gspo": LossConfig(objective="sequence_clip", clip_low=0.1, clip_high=0.1),
    "tis": LossConfig(correction="truncate"),
    "mis": LossConfig(correction="mask", correction_level="geometric", correction_low=0.8, correction_high=1.3),
    "dr_grpo": LossConfig(mean="constant", constant_length=9),
    "k2": LossConfig(kl_weight=0.3, kl_estimator="k2"),
}


def random_batch(seed: int, tokens: int = 24, sequences: int = 4) -> tuple[Tensor, Callable[[Tensor], Actions]]:
    """Logits [tokens, 5], and the actions that they give."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, 5, generator=g, dtype=torch.float64)
    targets = torch.randint(5, (tokens, 1), generator=g)
    noise = 0.3 * torch.randn(2, tokens, generator=g, dtype=torch.float64)
    base = logits.log_softmax(-1).gather(1, targets).squeeze(1)
    sequence = torch.arange(tokens) % sequences
    mask = torch.rand(tokens, generator=g) < 0.8
    advantages = torch.randn(sequences, generator=g, dtype=torch.float64)[sequence]

    def make(logits: Tensor) -> Actions:
        log = logits.log_softmax(-1)
        entropy = -(log.exp() * log).sum(-1)
        new = log.gather(1, targets).squeeze(1)
        old, rollout = base + noise[0], base + noise[0] + noise[1]
        return Actions(new, mask, sequence, advantages, rollout, old, base, entropy)

    return logits, make


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_against_finite_differences(name: str) -> None:
    config = CONFIGS[name]
    logits, make = random_batch(3)
    start = make(logits)
    counts = BatchCounts.of(start.mask, start.sequence, 4)

    def loss(x: Tensor) -> Tensor:
        batch = make(x)
        if config.objective == "double_sided":
            # f is a constant to the gradient, so the difference is taken of the surrogate that has this gradient.
            r = (batch.logprobs - batch.rollout_logprobs).exp()
            inside = (r > 1 - config.clip_low) & (r < 1 + config.clip_high)
            terms = -torch.where(inside, r, 0.0) * batch.advantages
            return (counts.weights(config, batch.mask, batch.sequence) * terms).sum()
        return policy_loss(config, batch, counts).loss

    x = logits.clone().requires_grad_()
    (grad,) = torch.autograd.grad(policy_loss(config, make(x), counts).loss, x)
    step = 1e-6
    for at in ((0, 0), (3, 1), (7, 4), (12, 2), (20, 3)):
        up, down = logits.clone(), logits.clone()
        up[at] += step
        down[at] -= step
        difference = (loss(up) - loss(down)).item() / (2 * step)
        if config.objective == "sequence_clip":  # its value has no derivative through the constant; s_i itself has
            difference = _gspo_difference(config, make, counts, logits, at, step)
        assert grad[at].item() == pytest.approx(difference, abs=1e-7)


def _gspo_difference(
    config: LossConfig,
    make: Callable[[Tensor], Actions],
    counts: BatchCounts,
    logits: Tensor,
    at: tuple[int, int],
    step: float,
) -> float:
    def value(x: Tensor) -> float:
        b = make(x)
        assert b.old_logprobs is not None
        total = 0.0
        for i in range(4):
            here = b.mask & (b.sequence == i)
            s = (b.logprobs - b.old_logprobs)[here].mean().exp().item()
            a = b.advantages[here][0].item()
            total -= min(s * a, min(max(s, 1 - config.clip_low), 1 + config.clip_high) * a) / 4
        return total

    up, down = logits.clone(), logits.clone()
    up[at] += step
    down[at] -= step
    return (value(up) - value(down)) / (2 * step)


@pytest.mark.parametrize("name", CONFIGS)
def test_parts_add_up_to_the_whole(name: str) -> None:
    """Any cut into parts gives the same gradient and the same figures, sequences over several parts too."""
    config = CONFIGS[name]
    logits, make = random_batch(5)
    whole = make(logits)
    counts = BatchCounts.of(whole.mask, whole.sequence, 4)
    x = logits.clone().requires_grad_()
    expected = policy_loss(config, make(x), counts)
    (grad,) = torch.autograd.grad(expected.loss, x)
    assert whole.old_logprobs is not None
    ratio = losses.mismatch_ratio(
        whole.old_logprobs,
        whole.rollout_logprobs,
        whole.sequence,
        whole.mask,
        counts.actions_S,
        config.correction_level,
    )
    log_s = losses.sequence_log_ratio(whole.logprobs, whole.old_logprobs, whole.sequence, whole.mask, counts.actions_S)
    for size in (1, 7, 12):
        x = logits.clone().requires_grad_()
        metrics, total, moving = LossMetrics(), 0.0, 0
        for start in range(0, 24, size):
            part = slice(start, start + size)
            batch = make(x)
            cut = {n: t[part] for n, t in vars(batch).items() if isinstance(t, Tensor)}
            found = policy_loss(config, Actions(**cut, log_s=log_s, ratio=ratio[part]), counts)
            found.loss.backward()
            metrics.add(found.metrics)
            total, moving = total + found.loss.item(), moving + int(found.moving)
        assert x.grad is not None
        torch.testing.assert_close(x.grad, grad)
        assert total == pytest.approx(expected.loss.item())
        assert moving == int(expected.moving)
        assert metrics.values() == pytest.approx(expected.metrics.values())


# ------------------------------------------------------------------------------------------------ corners
@pytest.mark.parametrize("name", CONFIGS)
def test_a_batch_without_actions_is_finite_and_does_not_move(name: str) -> None:
    new = f64(-1.0, float("-inf"), float("nan")).requires_grad_()
    bad = f64(float("nan"), float("inf"), 0.0)
    batch = Actions(new, torch.zeros(3, dtype=torch.bool), torch.tensor([0, 0, -1]), bad, bad, bad, bad, bad)
    found = policy_loss(CONFIGS[name], batch, BatchCounts.of(batch.mask, batch.sequence, 1))
    found.loss.backward()
    assert found.loss.item() == 0
    assert found.moving.item() == 0
    assert new.grad is not None
    assert new.grad.tolist() == [0.0, 0.0, 0.0]
    assert found.metrics.values() == {"actions": 0.0}


@pytest.mark.parametrize("name", ["grpo", "dapo", "glm5_reasoning", "glm5_agentic", "gspo", "tis"])
@pytest.mark.parametrize("apart", [-300.0, 300.0])
def test_policies_far_apart_stay_finite(name: str, apart: float) -> None:
    zero = torch.zeros(2, dtype=torch.float32)
    new = torch.full((2,), apart).requires_grad_()
    batch, counts = actions(new, zero, zero - apart, torch.tensor([1.0, -1.0]), [0, 1])
    batch = replace(batch, reference_logprobs=new.detach(), entropy=zero)
    found = policy_loss(CONFIGS[name], batch, counts)
    found.loss.backward()
    assert new.grad is not None
    assert bool(new.grad.isfinite().all())
    assert math.isfinite(found.loss.item())


def test_what_does_not_move() -> None:
    """Advantages of 0, everything masked by the band, everything clipped: each leaves nothing to step for."""
    zero = torch.zeros(2, dtype=torch.float64)
    config = losses.glm5_reasoning()
    for new, rollout, advantages, moving in (
        (zero, zero, f64(0, 0), 0),
        (zero, zero - 5, f64(1, 1), 0),
        (zero + 1, zero, f64(1, 1), 0),
        (zero + 1, zero, f64(1, -1), 1),
    ):
        batch, counts = actions(new, zero, rollout, advantages, [0, 1])
        assert int(policy_loss(config, batch, counts).moving) == moving


def test_without_old_logprobs_the_ratio_is_one_and_the_gradient_goes_on() -> None:
    new = f64(-1.0, -2.0).requires_grad_()
    batch, counts = actions(new, new.detach(), f64(-1.0, -2.0), f64(2.0, -1.0), [0, 1])
    found = policy_loss(losses.glm5_reasoning(), replace(batch, old_logprobs=None), counts)
    (grad,) = torch.autograd.grad(found.loss, new)
    torch.testing.assert_close(grad, f64(-1.0, 0.5))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        (dict(clip_low=-0.1), "clip_low"),
        (dict(correction_low=3.0), "correction_low"),
        (dict(correction="icepop", correction_level="sequence"), "correction_level"),
        (dict(objective="double_sided", correction="mask"), "correction"),
        (dict(mean="constant"), "constant_length"),
        (dict(constant_length=5), "constant_length"),
        (dict(kl_weight=0.1, kl_estimator="k1"), "kl_estimator"),
        (dict(entropy_weight=float("nan")), "entropy_weight"),
    ],
)
def test_configurations_that_mean_nothing(changes: dict, field: str) -> None:
    with pytest.raises(ConfigError) as found:
        LossConfig(**changes)
    assert found.value.field == field
