"""Plans: lines that add up, answers that are the boundary, and options that contradict each other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from glm5.ledger.devices import Device, device
from glm5.ledger.memory import Layout, LayoutError
from glm5.ledger.plan import Plan, Work, plan
from glm5.model.config import ModelConfig
from glm5.model.presets import glm5, gqa_8, mini, nano
from glm5.utils.errors import UserError

H200 = device("h200")
EIGHT = Layout(tp=8, ep=8)


def test_cache_lines_of_glm5_are_the_audits_bytes_with_the_mtp_block() -> None:
    found = plan(glm5(), EIGHT, Work(1, 202_752, "fp8", "bf16"), H200, search=False)
    (stage,) = found.stages
    assert stage.of("cache") == 79 * 202_752 * 2 * (576 + 128)
    without = plan(glm5(num_nextn_predict_layers=0), EIGHT, Work(1, 202_752, "fp8"), H200, search=False)
    assert without.stages[0].of("cache") == 22_267_035_648


def test_published_recipe_holds_one_longest_sequence_and_its_weights() -> None:
    """FP8 on eight H200 is the recipe that the model's own README gives."""
    found = plan(glm5(), EIGHT, Work(1, 202_752, "fp8", "bf16"), H200)
    assert found.fits
    assert 95e9 < found.worst.of("weights") < 98e9
    assert found.largest_context == 202_752
    assert not plan(glm5(), EIGHT, Work(1, 4096, "bf16"), H200, search=False).fits


def test_w4a8_fits_one_atlas_node_of_16_dies() -> None:
    found = plan(glm5(), Layout(tp=16, ep=16), Work(1, 131_072, "w4a8"), device("ascend-910c"))
    assert found.fits
    assert not plan(glm5(), Layout(tp=16, ep=16), Work(1, 131_072, "fp8"), device("ascend-910c"), search=False).fits


CASES: list[tuple[ModelConfig, Layout, Work, Device]] = [
    (glm5(), Layout(ep=64, dp=64), Work(64, 65_536, "fp8", "fp8"), H200),
    (glm5(), Layout(tp=2, ep=8, pp=4, cp=2, dp=2), Work(4, 131_072, "fp8", "fp8"), H200),
    (mini(), Layout(), Work(2, 8192), device("rtx4090")),
    (nano(), Layout(), Work(1, 4096, "fp32", "fp32"), device("cpu:1")),
    (gqa_8(mini()), Layout(tp=2, ep=2), Work(2, 8192), device("l40s")),
]


@pytest.mark.parametrize(("config", "layout", "work", "on"), CASES)
def test_largest_batch_and_context_are_the_boundary(
    config: ModelConfig, layout: Layout, work: Work, on: Device
) -> None:
    found = plan(config, layout, work, on)
    assert found.fits

    def fits(**change: int) -> bool:
        return plan(config, layout, replace(work, **change), on, search=False).fits  # type: ignore[arg-type]

    batch, context = found.largest_batch, found.largest_context
    assert batch is not None
    assert context is not None
    assert batch % layout.dp == context % layout.cp == 0
    assert fits(batch=batch)
    assert not fits(batch=batch + layout.dp)
    assert fits(context=context)
    assert context + layout.cp > config.max_position_embeddings or not fits(context=context + layout.cp)


@pytest.mark.parametrize(("config", "layout", "work", "on"), CASES)
def test_more_work_never_needs_less(config: ModelConfig, layout: Layout, work: Work, on: Device) -> None:
    def total(**change: int) -> int:
        return plan(config, layout, replace(work, **change), on, search=False).worst.total  # type: ignore[arg-type]

    base = total()
    assert total(batch=2 * work.batch) > base
    assert total(context=work.context // 2) < base
    assert total(chunk=2 * work.chunk) >= base


def test_nothing_fits_when_the_weights_do_not() -> None:
    found = plan(glm5(), Layout(), Work(1, 128), device("rtx4090"))
    assert (found.fits, found.largest_batch, found.largest_context) == (False, 0, 0)


def test_utilization_is_what_may_be_filled() -> None:
    found = plan(nano(), Layout(), Work(), device("cpu:2"), utilization=0.5)
    assert found.usable == 10**9


# --------------------------------------------------------------------------- training
def training(config: ModelConfig, layout: Layout, work: Work) -> Plan:
    return plan(config, layout, replace(work, training=True), H200, search=False)


def test_training_states_of_one_device_by_hand() -> None:
    """Beside the bf16 weight: gradient 4, master 4, then momentum 4 on Muon or moments 8 on AdamW."""
    config = mini(num_nextn_predict_layers=0)
    (stage,) = training(config, Layout(), Work(1, 4096)).stages
    elements = 1_106_202_176 - 86_833_200
    d, layers, ranks = 1024, 12, 512 + 256 + 2 * 128
    vectors = layers * (2 * d + ranks) + 11 * 48 + d
    adamw = 2 * 32_768 * d + vectors
    assert stage.of("gradients") == 4 * elements
    assert stage.of("optimizer") == 4 * elements + 4 * (elements - adamw) + 8 * adamw


def test_states_are_sharded_over_replicas_and_weights_are_not() -> None:
    one, four = (training(mini(), Layout(dp=dp), Work(dp, 4096)).worst for dp in (1, 4))
    assert four.of("weights") == one.of("weights")
    assert 0.25 <= four.of("optimizer") / one.of("optimizer") < 0.2501


def test_pipeline_stages_hold_as_many_microbatches_as_follow_them() -> None:
    found = training(mini(), Layout(pp=4), Work(16, 4096))
    kept = [next(x for x in s.lines if x.label == "inputs of recomputed layers") for s in found.stages]
    # 3 layers a stage; the third stage also runs the MTP block at three depths.
    assert [x.bytes for x in kept] == [n * layers * 4096 * 1024 * 2 for n, layers in ((4, 3), (3, 3), (2, 6), (1, 3))]
    few = training(mini(), Layout(pp=4), Work(1, 4096))
    assert next(x for x in few.stages[0].lines if x.label == "inputs of recomputed layers").bytes * 4 == kept[0].bytes


def test_training_has_no_largest_batch() -> None:
    found = plan(mini(), Layout(), Work(1, 4096, training=True), H200)
    assert found.largest_batch is None
    assert found.largest_context
    assert found.decode_floor is None


# --------------------------------------------------------------------------- floors and errors
def test_decode_floor_by_hand_for_a_dense_attention_model() -> None:
    config = gqa_8(nano(n_routed_experts=2, num_experts_per_tok=2, num_nextn_predict_layers=0, dtype="bfloat16"))
    found = plan(config, Layout(), Work(3, 1000), H200, search=False)
    read = found.stages[0].of("weights") - 2 * 2048 * 256 + 3 * 4 * 1000 * 2 * 2 * 2 * 32
    assert found.decode_floor is not None
    assert found.decode_floor.memory_s == pytest.approx(read / 4.8e12)
    assert found.decode_floor.bound == "memory"


def test_decode_floor_falls_with_more_devices() -> None:
    def floor(layout: Layout) -> float:
        found = plan(glm5(), layout, Work(8, 65_536, "fp8"), H200, search=False).decode_floor
        assert found is not None
        return found.seconds

    assert floor(Layout(tp=8, ep=8)) < floor(Layout(tp=4, ep=4)) < floor(Layout(tp=2, ep=2))


@pytest.mark.parametrize(
    ("layout", "work", "message"),
    [
        (Layout(dp=3), Work(4, 128), "--batch 6"),
        (Layout(cp=3), Work(1, 128), "--context 129"),
        (Layout(), Work(0, 128), "batch=0"),
        (Layout(), Work(1, 0), "context=0"),
        (Layout(), Work(1, 128, chunk=0), "chunk=0"),
        (Layout(), Work(1, 10**6), "max_position_embeddings=65536"),
        (Layout(), Work(1, 128, "fp8", training=True), "--dtype bf16"),
    ],
)
def test_work_that_cannot_be_done_says_so(layout: Layout, work: Work, message: str) -> None:
    with pytest.raises(UserError) as caught:
        plan(nano(), layout, work, H200)
    assert message in str(caught.value)


def test_layout_errors_reach_the_planner() -> None:
    with pytest.raises(LayoutError, match="num_attention_heads=64"):
        plan(glm5(), Layout(tp=5), Work(), H200)


@pytest.mark.parametrize("share", [0.0, -1.0, 1.01, float("nan")])
def test_utilization_is_a_share(share: float) -> None:
    with pytest.raises(UserError, match="utilization"):
        plan(nano(), Layout(), Work(), H200, utilization=share)
