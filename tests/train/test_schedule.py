"""Schedules: known points, monotony, and exact integers for the batch warm-up."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm5.train.schedule import BatchWarmup, Constant, LinearDecay, WarmupCosine
from glm5.utils.errors import ConfigError


def test_warmup_is_linear_and_its_first_update_moves():
    lr = WarmupCosine(peak=2e-4, final=4e-5, total_steps=100, warmup_steps=4)
    assert [lr.at(s) for s in range(4)] == pytest.approx([0.5e-4, 1e-4, 1.5e-4, 2e-4])


def test_cosine_known_points():
    lr = WarmupCosine(peak=2e-4, final=4e-5, total_steps=104, warmup_steps=4)
    assert lr.at(4) == 2e-4
    assert lr.at(54) == pytest.approx(1.2e-4, rel=1e-12)
    assert lr.at(29) == pytest.approx(4e-5 + 1.6e-4 * 0.5 * (1 + math.sqrt(0.5)), rel=1e-12)
    assert lr.at(104) == lr.at(10**9) == 4e-5


def test_warmup_may_be_empty_or_everything():
    assert WarmupCosine(peak=1.0, final=0.5, total_steps=10).at(0) == 1.0
    whole = WarmupCosine(peak=1.0, final=0.5, total_steps=4, warmup_steps=4)
    assert [whole.at(s) for s in (3, 4)] == [1.0, 0.5]


def test_linear_decay_and_constant():
    lr = LinearDecay(4e-5, 1e-5, 3)
    assert [lr.at(s) for s in range(5)] == pytest.approx([4e-5, 3e-5, 2e-5, 1e-5, 1e-5])
    assert (lr.at(0), lr.at(3)) == (4e-5, 1e-5)
    assert Constant(1e-5).at(12345) == 1e-5


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
    lr = WarmupCosine(peak, peak * fraction, total, warmup_steps=int(warm * total))
    values = [lr.at(s) for s in range(total + 2)]
    top = max(lr.warmup_steps - 1, 0)
    slack = 1e-12 * peak
    assert all(a <= b + slack for a, b in pairwise(values[: top + 1]))
    assert all(a >= b - slack for a, b in pairwise(values[top:]))
    assert all(0 <= v <= peak + slack for v in values)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: WarmupCosine(1.0, 0.1, total_steps=0), "total_steps"),
        (lambda: WarmupCosine(1.0, 0.1, total_steps=5, warmup_steps=6), "warmup_steps"),
        (lambda: LinearDecay(1.0, 0.1, 0), "total_steps"),
        (lambda: BatchWarmup(5, 8, 100, multiple=4), "initial"),
        (lambda: BatchWarmup(8, 4, 100), "final"),
        (lambda: BatchWarmup(0, 4, 100), "initial"),
        (lambda: Constant(1.0).at(-1), "step"),
        (lambda: LinearDecay(1.0, 0.0, 5).at(2.0), "step"),
        (lambda: BatchWarmup(1, 2, 3).batch(-1), "seen"),
    ],
)
def test_bad_values_are_named(make, field):
    with pytest.raises(ConfigError, match=field):
        make()
