"""Schedules: known points, monotony, and exact integers for the batch warm-up."""

import math
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm5.train.schedule import BatchWarmup, LearningRate
from glm5.utils.errors import ConfigError


def rates(lr: LearningRate, steps: int, at: Iterable[int]) -> list[float]:
    return [lr.at(s, steps) for s in at]


def test_warmup_is_linear_and_its_first_update_moves():
    lr = LearningRate(peak=2e-4, final=4e-5, warmup_steps=4)
    assert rates(lr, 100, range(4)) == pytest.approx([0.5e-4, 1e-4, 1.5e-4, 2e-4])


def test_cosine_known_points():
    lr = LearningRate(peak=2e-4, final=4e-5, warmup_steps=4)
    assert lr.at(4, 104) == 2e-4
    assert lr.at(54, 104) == pytest.approx(1.2e-4, rel=1e-12)
    assert lr.at(29, 104) == pytest.approx(4e-5 + 1.6e-4 * 0.5 * (1 + math.sqrt(0.5)), rel=1e-12)
    assert lr.at(104, 104) == lr.at(10**9, 104) == 4e-5


def test_warmup_may_be_empty_everything_or_longer():
    assert LearningRate(1.0, 0.5).at(0, 10) == 1.0
    for warmup_steps in (4, 9):
        assert rates(LearningRate(1.0, 0.5, warmup_steps), 4, (0, 3, 4)) == [0.25, 1.0, 0.5]


def test_linear_and_constant():
    lr = LearningRate(4e-5, 1e-5, shape="linear")
    assert rates(lr, 3, range(5)) == pytest.approx([4e-5, 3e-5, 2e-5, 1e-5, 1e-5])
    assert (lr.at(0, 3), lr.at(3, 3)) == (4e-5, 1e-5)
    assert rates(LearningRate(1e-5, 0.0, shape="constant"), 10, (0, 9, 12345)) == [1e-5] * 3


def test_batch_warmup_by_hand():
    ramp = BatchWarmup(initial=4, final=12, ramp=40, multiple=4)
    assert [ramp.batch(s) for s in (0, 19, 20, 39, 40, 99)] == [4, 4, 8, 8, 12, 12]
    # 4 x 5 = 20, then 8 + 8 + 8 = 44, then twelves.
    assert [ramp.seen(s) for s in range(11)] == [0, 4, 8, 12, 16, 20, 28, 36, 44, 56, 68]


@given(
    multiple=st.integers(1, 8),
    initial=st.integers(1, 6),
    growth=st.integers(0, 20),
    ramp=st.integers(0, 2000),
    step=st.integers(0, 300),
)
def test_batch_warmup_properties(multiple, initial, growth, ramp, step):
    b = BatchWarmup(initial * multiple, (initial + growth) * multiple, ramp, multiple)
    seen, sizes = 0, []
    for _ in range(step):
        sizes.append(b.batch(seen))
        seen += sizes[-1]
    assert b.seen(step) == seen
    assert all(x <= y for x, y in pairwise(sizes))
    assert all(s % multiple == 0 and b.initial <= s <= b.final for s in sizes)


@given(
    peak=st.floats(1e-6, 1.0),
    fraction=st.floats(0, 1),
    total=st.integers(1, 500),
    warm=st.floats(0, 1),
)
def test_warmup_cosine_rises_then_falls_inside_its_bounds(peak, fraction, total, warm):
    lr = LearningRate(peak, peak * fraction, warmup_steps=int(warm * total))
    values = rates(lr, total, range(total + 2))
    top = max(lr.warmup_steps - 1, 0)
    slack = 1e-12 * peak
    assert all(a <= b + slack for a, b in pairwise(values[: top + 1]))
    assert all(a >= b - slack for a, b in pairwise(values[top:]))
    assert all(0 <= v <= peak + slack for v in values)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: BatchWarmup(5, 8, 100, multiple=4), "initial"),
        (lambda: BatchWarmup(8, 4, 100), "final"),
        (lambda: BatchWarmup(0, 4, 100), "initial"),
        (lambda: LearningRate(1.0, 0.1, warmup_steps=-1), "warmup_steps"),
        (lambda: BatchWarmup(1, 2, 3).batch(-1), "seen"),
    ],
)
def test_bad_values_are_named(make, field):
    with pytest.raises(ConfigError, match=field):
        make()
