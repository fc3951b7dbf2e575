"""Advantages by hand, groups that are not whole, and what rewards become by length."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from glm5.posttrain.advantage import (
    distillation_advantages,
    group_advantages,
    overlong_penalty,
    repair,
    repaired_advantages,
    reward_figures,
)
from glm5.utils.errors import ConfigError


def test_group_baselines_by_hand() -> None:
    rewards = [1.0, 0.0, 0.0, 1.0, 0.0]  # mean 0.4, deviation √0.24
    assert group_advantages(rewards, "mean") == pytest.approx([0.6, -0.4, -0.4, 0.6, -0.4])
    std = math.sqrt(0.24)
    assert group_advantages(rewards) == pytest.approx([x / std for x in (0.6, -0.4, -0.4, 0.6, -0.4)], rel=1e-5)
    others = [1 - 1 / 4, 0 - 2 / 4, 0 - 2 / 4, 1 - 1 / 4, 0 - 2 / 4]
    assert group_advantages(rewards, "leave_one_out") == pytest.approx(others)


@pytest.mark.parametrize("baseline", ["std", "mean", "leave_one_out"])
def test_groups_without_differences_have_no_advantage(baseline: str) -> None:
    assert group_advantages([0.1] * 3, baseline) == [0.0] * 3  # type: ignore[arg-type]  # whose mean is not 0.1
    assert group_advantages([5.0], baseline) == [0.0]  # type: ignore[arg-type]
    assert group_advantages([], baseline) == []  # type: ignore[arg-type]


def test_a_missing_verdict_is_no_reward() -> None:
    with pytest.raises(ConfigError, match="finite"):
        group_advantages([1.0, float("nan")])


def test_groups_of_equal_rewards_are_counted_by_what_they_say() -> None:
    found = reward_figures([[1, 1], [0, 1], [0, 0], [], [0.5, 0.5], [0.2, 0.4], [1]])
    assert (found["zero_std/count_1"], found["zero_std/count_0"]) == (2, 2)
    assert found["frac_reward_zero_std"] == 4 / 6
    assert found["reward"] == pytest.approx(5.6 / 11)
    assert found["reward_std"] == pytest.approx(statistics.pstdev([1, 1, 0, 1, 0, 0, 0.5, 0.5, 0.2, 0.4, 1]))
    assert reward_figures([[], []]) == {}


@pytest.mark.parametrize(
    ("valid", "members"),
    [
        ("1111", [0, 1, 2, 3]),
        ("1101", [0, 1, 3, 0]),
        ("0111", [1, 2, 3, 1]),
        ("10110", [0, 2, 3, 0, 2]),
        ("1100", []),  # half is not more than half
        ("00100", []),
        ("0", []),
        ("1", [0]),
        ("", []),
    ],
)
def test_repair_by_the_rule_of_half(valid: str, members: list[int]) -> None:
    found = repair([c == "1" for c in valid])
    assert found.members == members
    assert found.dropped == (not members)


def test_advantages_are_made_before_repetition() -> None:
    """Of [1, invalid, 0, 0] the first is repeated; it must not count twice in the mean, 1/3."""
    found = repaired_advantages([1.0, None, 0.0, 0.0], "mean")
    assert found is not None
    advantages, times = found
    assert advantages == pytest.approx({0: 2 / 3, 2: -1 / 3, 3: -1 / 3})
    assert times == {0: 2, 2: 1, 3: 1}
    assert repaired_advantages([1.0, None, None, 0.0]) is None


def test_overlong_penalty() -> None:
    lengths = (0, 80, 85, 90, 100, 200)
    assert [overlong_penalty(n, 100, 20) for n in lengths] == [0, 0, -0.25, -0.5, -1, -1]
    assert [overlong_penalty(n, 100, 0) for n in (99, 100, 101)] == [0, 0, -1]
    with pytest.raises(ConfigError, match="longest"):
        overlong_penalty(5, 100, 101)


def test_distillation_pulls_towards_the_teacher() -> None:
    """In the mean over all tokens, Â·∇log π is minus the gradient of KL(π_θ ‖ π_teacher)."""
    logits = torch.tensor([0.3, -1.0, 0.7], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([0.1, 0.8, -0.2], dtype=torch.float64).log_softmax(0)
    new = logits.log_softmax(0)
    advantages = distillation_advantages(teacher, new)
    assert not advantages.requires_grad
    (policy,) = torch.autograd.grad((new.detach().exp() * advantages * new).sum(), logits, retain_graph=True)
    (kl,) = torch.autograd.grad((new.exp() * (new - teacher)).sum(), logits)
    torch.testing.assert_close(policy, -kl)
    torch.testing.assert_close(distillation_advantages(teacher, new, 0.5), 0.5 * advantages)
