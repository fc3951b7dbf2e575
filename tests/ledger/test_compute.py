"""Pairs by counting them, FLOP by hand, and the bounds that planners use."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm5.ledger import compute
from glm5.ledger.devices import DEVICES, device
from glm5.ledger.params import layer_tensors
from glm5.ledger.step import StepFlops, named_device, step_flops
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


# --------------------------------------------------------------------------- a step of training
def test_a_step_of_pretraining_is_what_the_ledger_counts_without_the_indexers() -> None:
    config, length = mini(), 4096
    found = step_flops(
        config,
        "pretrain",
        tokens=length,
        pairs=compute.dense_pairs(length),
        selected=compute.sparse_pairs(length, config.index_topk),
        mtp=3.0,
    )
    indexers = sum(
        t.numel
        for i in range(config.num_cache_layers)
        for t in layer_tensors(config, i)
        if t.group == "indexer" and t.is_matrix
    )
    trunk = sum(
        t.numel
        for i in range(config.num_hidden_layers)
        for t in layer_tensors(config, i)
        if t.group == "indexer" and t.is_matrix
    )
    unused = 3 * 2 * length * (trunk + 3 * (indexers - trunk))
    norms = (
        3 * 2 * length * 3 * sum(t.numel for t in layer_tensors(config, config.num_hidden_layers) if not t.is_matrix)
    )  # which `mtp_flops` counts as matrices
    whole = compute.training_flops(config, length, sparse=False, mtp_depths=3)
    assert found.total == whole - unused - norms
    assert found.sparse_attention == found.indexer == 0
    assert found.dense_attention == 3 * (config.num_hidden_layers + 3) * compute.dense_pairs(
        length
    ) * compute.pair_flops(config, absorbed=False)


def test_the_stages_of_a_step_by_hand() -> None:
    """One token more, or one pair more, costs what its kind costs."""
    config = glm5()

    def cost(stage: str, **more: int) -> StepFlops:
        counts = {"tokens": 0, "pairs": 0, "selected": 0, **more}
        return step_flops(config, stage, mtp=0.0, **counts)

    assert cost("warmup", pairs=1) == StepFlops(0, 78 * 2 * 64 * 512, indexer=3 * 78 * 2 * 32 * 128)
    assert cost("sparse", pairs=1) == StepFlops(0, indexer=78 * 2 * 32 * 128)
    assert cost("sparse", selected=1) == StepFlops(
        0, sparse_attention=3 * 78 * 2 * 64 * 1088, indexer=2 * 78 * 2 * 32 * 128
    )
    assert cost("pretrain", selected=1) == StepFlops(0)
    one = cost("pretrain", tokens=1).matrices
    assert cost("warmup", tokens=1).matrices * 3 == one == cost("sparse", tokens=1).matrices
    index = 78 * (2048 * 32 * 128 + 6144 * 128 + 6144 * 32)  # W_q, W_k and the heads' weights
    assert cost("sparse", tokens=1).indexer == 2 * 2 * index
    assert one == 6 * (compute.linear_flops(config) // 2 - index)


def test_shares_of_a_peak_add_up_and_devices_are_known_by_their_drivers_names() -> None:
    found = StepFlops(600, dense_attention=200).shares(2.0, devices=4, peak=1000.0)
    assert found == {"all": 0.1, "matrices": 0.075, "dense_attention": 0.025}
    assert named_device("NVIDIA H200") is DEVICES["h200"]
    assert named_device("NVIDIA A100-SXM4-80GB") is DEVICES["a100-80"]
    assert named_device("NVIDIA GeForce RTX 4090") is None
    assert named_device("cpu") is None
