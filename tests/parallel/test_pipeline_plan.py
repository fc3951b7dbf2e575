"""Layouts, orders of computation and their costs: all that a pipeline decides without processes."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from glm5.ledger.params import active_parameters
from glm5.model.glm5 import GLM5
from glm5.model.presets import glm5, mini, nano
from glm5.parallel.compat import Kind
from glm5.parallel.pipeline.layout import Costs, PipelineLayout, _partition
from glm5.parallel.pipeline.offload import _rounded
from glm5.parallel.pipeline.schedule import SCHEDULES, computations, orders, rank_of_stage, with_reductions
from glm5.parallel.pipeline.simulate import Times, bubble, gradient_bytes, in_flight, simulate
from glm5.parallel.pipeline.stage import StageModel
from glm5.utils.errors import ConfigError


# --------------------------------------------------------------------------- layouts
def test_layout_of_text() -> None:
    layout = PipelineLayout.parse("E D M | M*2 N P | H", nano())
    assert [s.layers for s in layout.stages] == [(0, 1), (2, 3), ()]
    assert [s.copies_embedding for s in layout.stages] == [False, True, False]
    assert (layout.holder("embedding"), layout.holder("mtp"), layout.holder("head")) == (0, 1, 2)
    assert PipelineLayout.parse(str(layout), nano()) == layout


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("E D M*3 N P | H |", "a stage is empty"),
        ("E M*4 N P | H", "part 2 is M, and the model's is D (a dense layer)"),
        ("E D M*3 | N H", "part 7 is H, and the model's is P (the MTP block)"),
        ("E D M*3 N P", "has 7 parts, and the model 8: E D M*3 N P H"),
        ("E D X*3", "'X*3' is no part"),
        ("E D M*0", "'M*0' is no part"),
    ],
)
def test_layouts_that_do_not_fit(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as found:
        PipelineLayout.parse(text, nano())
    assert says in str(found.value)


def test_balanced_layouts() -> None:
    assert str(PipelineLayout.balanced(nano(), 1)) == "E D M*3 N P H"
    assert str(PipelineLayout.balanced(nano(), 2)) == "E D M*3 N P | H"
    assert str(PipelineLayout.balanced(nano(num_nextn_predict_layers=0), 2)) == "E D M | M*2 N H"
    published = PipelineLayout.balanced(glm5(), 16)
    assert published.stages[-2].mtp
    assert published.stages[-1].head
    assert not published.stages[-1].layers
    with pytest.raises(ConfigError, match="must be from 1 to 6"):
        PipelineLayout.balanced(nano(), 7)


def test_partition_is_the_best_of_all() -> None:
    draw = random.Random(0)  # noqa: S311
    for _ in range(60):
        weights = [draw.randint(0, 9) for _ in range(draw.randint(1, 8))]
        parts = draw.randint(1, len(weights))

        def score(cuts: list[int], weights: list[int] = weights) -> tuple[int, int]:
            sums = [sum(weights[a:b]) for a, b in itertools.pairwise(cuts)]
            return max(sums), sum(x * x for x in sums)

        inner = itertools.combinations(range(1, len(weights)), parts - 1)
        best = min(score([0, *cuts, len(weights)]) for cuts in inner)
        assert score(_partition(weights, parts)) == best


def test_ranks_of_several_stages_are_evened_out() -> None:
    costs, load = Costs.count(mini()), {}
    for held in ([], [0, 1, 1, 0]):
        layout = PipelineLayout.balanced(mini(), 4, costs, rank_of_stage=held)
        assert PipelineLayout.parse(str(layout), mini()) == layout
        assert layout.stages[2].mtp
        assert layout.stages[3].head
        each = [costs.stage(parts, layout.kinds) for parts in layout.stages]
        load[len(held)] = max(each[0] + each[3], each[1] + each[2])
    # The MTP block stands with stage 2's layers and the heads are with stage 0's rank: the best of all cuts.
    layers = [costs.dense] + [costs.moe] * 11
    best = min(max(sum(layers[:a]) + costs.head, sum(layers[a:]) + costs.mtp) for a in range(1, 11))
    assert load[4] == best < load[0]
    spread = PipelineLayout.balanced(glm5(), 32, rank_of_stage=rank_of_stage("zbv", 16, 32))
    assert len(spread) == 32


@pytest.mark.parametrize("make", [nano, mini, glm5])
def test_costs_are_the_ledgers(make) -> None:
    config = make()
    active, costs = active_parameters(config), Costs.count(config, depths=1)
    kinds = config.layer_types
    trunk = kinds.count("dense") * costs.dense + kinds.count("sparse") * costs.moe
    assert trunk + costs.head / 2 == pytest.approx(active.macs, rel=1e-4)  # the ledger counts the indexers' norms in


def test_stages_hold_the_model_once() -> None:
    model = GLM5(nano())
    layout = PipelineLayout.parse("E D | M*2 | M N P | H", model.config)
    stages = [StageModel(model, parts) for parts in layout.stages]
    whole = dict(model.named_parameters())
    found: dict[str, torch.Tensor] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            if parameter is stage.replica:
                assert name == "model.embed_tokens.weight"
                assert torch.equal(parameter, whole[name])
            else:
                assert parameter is whole[name]
                assert name not in found
                found[name] = parameter
    assert found.keys() == whole.keys()
    assert [stage.replica is not None for stage in stages] == [False, False, True, False]


# --------------------------------------------------------------------------- orders
GRID = [("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zero-bubble", 1), ("zero-bubble", 2), ("zbv", 2)]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("name", "each"), [*GRID, ("dualpipev", 2)])
def test_orders_are_whole_and_run(name: str, each: int, ranks: int) -> None:
    stages, micro = ranks * each, 4 * ranks
    found = orders(name, ranks, stages, micro)
    held = rank_of_stage(name, ranks, stages)
    done = [(kind, stage, i, rank) for rank in found for kind, stage, i in computations(found[rank])]
    assert all(held[stage] == rank for _, stage, _, rank in done)
    forward = {(stage, i) for kind, stage, i, _ in done if kind == "F"}
    backward = [(stage, i) for kind, stage, i, _ in done if kind in "BW"]
    assert forward == set(backward) == set(itertools.product(range(stages), range(micro)))
    assert len(backward) == stages * micro
    assert any(kind == "W" for kind, *_ in done) == SCHEDULES[name].splits
    played = simulate(found, [Times(1, 1, 1)] * stages)
    assert played.in_flight == tuple(in_flight(name, ranks, each, rank) for rank in range(ranks))


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(("name", "each"), GRID)
@pytest.mark.parametrize("times", [Times(1, 1, 1), Times(1, 1.2, 0.8), Times(2, 2, 2)])
def test_bubbles_are_the_formulas(name: str, each: int, ranks: int, times: Times) -> None:
    played = simulate(orders(name, ranks, ranks * each, 2 * ranks), [times] * (ranks * each))
    if name == "zbv" and times.inputs != times.weights:
        with pytest.raises(ConfigError, match="simulate"):
            bubble(name, ranks, times)
        return
    assert played.idle == pytest.approx(bubble(name, ranks, times), abs=1e-9)
    assert played.bubble == pytest.approx(1 - sum(played.busy) / ranks / played.makespan)
    if name == "1f1b":  # the share of the published formula
        assert played.bubble == pytest.approx((ranks - 1) / (2 * ranks + ranks - 1))


def test_orders_that_cannot_be() -> None:
    for name, ranks, stages, micro, says in [
        ("zbv", 2, 2, 4, "zbv runs 2 on each of the 2 ranks"),
        ("1f1b", 2, 3, 4, "must be a multiple of the 2 pipeline ranks"),
        ("interleaved", 2, 4, 5, "multiple of the number of rounds"),
        ("dualpipev", 2, 4, 2, "at least as many microbatches"),
        ("gpipe", 2, 2, 2, "must be one of 1f1b"),
        ("1f1b", 2, 2, 0, "must be at least 1"),
    ]:
        with pytest.raises(ConfigError) as found:
            orders(name, ranks, stages, micro)
        assert says in str(found.value)
    with pytest.raises(ConfigError, match="cannot run"):
        simulate({0: orders("1f1b", 2, 2, 2)[0][::-1], 1: []}, [Times(1, 1, 1)] * 2)


@pytest.mark.parametrize("every", [0, 1, 2])
@pytest.mark.parametrize(("name", "each"), [*GRID, ("dualpipev", 2), ("interleaved", 4)])
def test_reductions_leave_two_stages_with_full_gradients(name: str, each: int, every: int) -> None:
    ranks, micro = 2, 8
    for order in orders(name, ranks, ranks * each, micro).values():
        holding: set[int] = set()
        added, seen, most = dict.fromkeys(range(ranks * each), 0), 0, 0
        for action in with_reductions(order, every):
            if action.computation_type == Kind.REDUCE_GRAD:
                assert action.stage_index in holding
                holding.remove(action.stage_index)
                seen += 1
            for kind, stage, _ in computations([action]):
                if kind != "F":
                    holding.add(stage)
                added[stage] += kind in "BW"
            most = max(most, len(holding))
        assert not holding  # all that was added up was reduced
        assert most == each if every == 0 else 1 <= most <= min(2, each)
        assert [a for a in added.values() if a] == [micro] * each
        if every and each < 3:  # without evictions, exactly so many
            assert seen == each * micro // every


def test_gradient_bytes() -> None:
    found = gradient_bytes([100, 60, 90], data_ranks=4)
    assert found.full == 4 * 190
    assert found.shards == 4 * (25 + 15 + 23)
    assert gradient_bytes([100, 60, 90], data_ranks=4, zero2=False).full == 4 * 250


def test_host_buffers_have_few_sizes() -> None:
    draw = random.Random(0)  # noqa: S311
    for _ in range(2000):
        size = draw.randint(1, 1 << draw.randint(1, 34))
        assert size <= _rounded(size) <= 1.125 * size + 4096
    assert len({_rounded(size) for size in range(1 << 20, 1 << 21, 97)}) <= 9
