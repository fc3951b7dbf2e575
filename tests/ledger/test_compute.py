"""Pairs by counting them, FLOP by hand, and the bounds that planners use."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm5.ledger import compute
from glm5.ledger.devices import DEVICES, device
from glm5.model.presets import glm5, gqa_8, mini, nano
from glm5.utils.errors import UserError

LENGTH = 202_752


@given(st.integers(1, 300), st.integers(1, 400))
def test_pairs_are_what_a_loop_counts(length: int, k: int) -> None:
    assert compute.dense_pairs(length) == sum(t for t in range(1, length + 1))
    assert compute.sparse_pairs(length, k) == sum(min(t, k) for t in range(1, length + 1))


def test_pairs_at_the_longest_context() -> None:
    assert compute.dense_pairs(LENGTH) == 20_554_288_128
    assert compute.sparse_pairs(LENGTH, 2048) == 413_139_968


def test_flops_of_a_pair_in_both_forms() -> None:
    assert compute.pair_flops(glm5(), absorbed=True) == 2 * 64 * (576 + 512)
    assert compute.pair_flops(glm5(), absorbed=False) == 2 * 64 * (256 + 256)
    assert compute.indexer_pair_flops(glm5()) == 2 * 32 * 128
    gqa = gqa_8(glm5())
    assert compute.pair_flops(gqa, absorbed=True) == compute.pair_flops(gqa, absorbed=False) == 2 * 96 * (128 + 128)
    assert compute.indexer_pair_flops(gqa) == 0


def test_decode_reads_the_selection_and_scores_everything() -> None:
    found = compute.decode_attention_flops(glm5(), LENGTH)
    assert found.main == 78 * 2048 * 2 * 64 * 1088
    assert found.indexer == 78 * LENGTH * 2 * 32 * 128
    dense = compute.decode_attention_flops(glm5(), LENGTH, sparse=False)
    assert dense.total == 99 * found.main


def test_below_k_the_selection_is_everything() -> None:
    assert compute.decode_attention_flops(glm5(), 2000).main == compute.decode_attention_flops(glm5(), 2000, False).main


def test_training_is_three_forward_passes() -> None:
    assert compute.training_flops(nano(), 64) == 3 * compute.forward_flops(nano(), 64)
    drafts = compute.training_flops(nano(), 64, mtp_depths=3) - compute.training_flops(nano(), 64)
    assert drafts == 9 * compute.mtp_flops(nano(), 64)
    # A depth is one MoE layer and the head again, so less than the four layers of the trunk and its head.
    assert compute.forward_flops(nano(), 64) / 4 < compute.mtp_flops(nano(), 64) < compute.forward_flops(nano(), 64)
    dense = compute.forward_flops(nano(), 64, sparse=False)
    assert dense == 64 * compute.linear_flops(nano()) + 4 * (64 * 65 // 2) * 2 * 4 * (64 + 64)


@pytest.mark.parametrize("config", [glm5(), mini(), nano()])
def test_crossover_is_the_first_length_at_which_sparse_costs_less(config) -> None:  # type: ignore[no-untyped-def]
    length = compute.crossover_length(config)
    assert length is not None

    def gain(n: int) -> int:
        dense, sparse = (compute.prefill_attention_flops(config, n, s).total for s in (False, True))
        return dense - sparse

    assert gain(length) > 0 >= gain(length - 1)
    assert gain(10 * length) > gain(2 * length) > gain(length)


def test_no_crossover_without_an_indexer_or_with_a_dear_one() -> None:
    assert compute.crossover_length(gqa_8(glm5())) is None
    assert compute.crossover_length(nano(index_n_heads=64)) is None


def test_expected_experts() -> None:
    assert compute.expected_experts(256, 8, 1) == 8
    assert compute.expected_experts(256, 8, 2) == 256 * (1 - Fraction(248, 256) ** 2)
    assert 101 < compute.expected_experts(256, 8, 16) < 103
    assert compute.expected_experts(256, 8, 10**6) == 256


def test_roofline_takes_the_slower_side() -> None:
    h200 = DEVICES["h200"]
    bound = compute.roofline(h200, flops=989e12, bytes_read=2 * 4.8e12)
    assert bound is not None
    assert (bound.seconds, bound.bound) == (2.0, "memory")
    assert compute.roofline(device("cpu:8"), 1.0, 1.0) is None


@pytest.mark.parametrize(("name", "gb"), [("H200", 141), ("h100", 80), ("ascend-910c", 64), ("cpu:3.5", 3.5)])
def test_devices_by_name(name: str, gb: float) -> None:
    assert device(name).memory == gb * 10**9


@pytest.mark.parametrize("name", ["h999", "cpu", "cpu:", "cpu:-1", "cpu:nan", "cpu:many", ""])
def test_unknown_devices_say_what_to_write(name: str) -> None:
    with pytest.raises(UserError, match="cpu:NN"):
        device(name)
