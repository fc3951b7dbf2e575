"""Plans of who works on what: costs against sums by hand, coverage and bounds by hypothesis, known plans, JSON."""

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5.data.balance import (
    BatchPlan,
    CostModel,
    Group,
    context_spans,
    deal,
    dealt_time,
    imbalance,
    in_turn,
    plan_groups,
    plan_uniform,
)
from glm5.ledger.compute import training_cost, training_flops
from glm5.model.presets import glm5, gqa_8
from glm5.utils.errors import ConfigError, DataError
from support.training import dataset

DSA = CostModel(token=100.0, pair=3.0, score=0.5, topk=8)
DENSE = CostModel(token=100.0, pair=3.0)


# --------------------------------------------------------------------------- cost
@pytest.mark.parametrize("model", [DSA, DENSE], ids=["dsa", "dense"])
@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 50])
def test_cost_of_a_sequence_is_the_sum_over_its_queries(model, length):
    by_hand = 0.0
    for seen in range(1, length + 1):
        by_hand += 100.0 + 3.0 * (min(seen, 8) if model is DSA else seen) + (0.5 * seen if model is DSA else 0.0)
    assert model.sequences([length])[0] == pytest.approx(by_hand)
    assert model.queries(np.arange(1, length + 1)).sum() == pytest.approx(by_hand)


def test_only_the_indexer_stays_quadratic():
    long = CostModel(0.0, 3.0, 0.0, 8).sequences([1000, 2000])
    assert long[1] / long[0] == pytest.approx(2, rel=0.01)
    scores = CostModel(0.0, 0.0, 0.5, 8).sequences([1000, 2000])
    assert scores[1] / scores[0] == pytest.approx(4, rel=0.01)


@pytest.mark.parametrize("config", [glm5(), gqa_8(glm5())], ids=["mla", "gqa"])
@pytest.mark.parametrize("sparse", [True, False])
def test_a_models_cost_is_the_ledgers_count(config, sparse):
    model = training_cost(config, sparse)
    for length in (1, 2048, 5000, 202_752):
        assert model.sequences([length])[0] == pytest.approx(training_flops(config, length, sparse), rel=1e-12)
    assert model.moved > 0 or config.attention == "gqa"


def test_imbalance():
    assert imbalance([1, 1, 2]) == 1.5
    assert imbalance([0.0, 0.0]) == 1.0


# --------------------------------------------------------------------------- rows
def test_a_dealt_batch_puts_like_with_like():
    costs = [9, 1, 8, 2, 5, 6]
    plan = deal(costs, ranks=2)
    assert plan.tolist() == [[[0], [2]], [[5], [4]], [[3], [1]]]
    assert dealt_time(plan, costs) == pytest.approx((9 + 6 + 2) / (31 / 2))
    # In the order given, each micro-batch waits for its long row.
    assert dealt_time(np.arange(6).reshape(3, 2, 1), costs) == pytest.approx((9 + 8 + 6) / (31 / 2))


def test_an_uneven_batch_leaves_places_empty():
    assert deal([3.0, 1.0, 2.0], ranks=2, each=1).tolist() == [[[0], [2]], [[1], [-1]]]
    assert deal([], ranks=2).shape == (0, 2, 1)
    for bad in ({"ranks": 0}, {"ranks": 1, "each": 0}):
        with pytest.raises(ConfigError, match="must be at least 1"):
            deal([1.0], **bad)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 1000), max_size=40), st.integers(1, 5), st.integers(1, 4))
def test_a_dealt_batch_holds_every_row_once(costs, ranks, each):
    plan = deal(costs, ranks, each)
    assert sorted(r for r in plan.flatten().tolist() if r >= 0) == list(range(len(costs)))
    assert plan.tolist() == deal(list(costs), ranks, each).tolist()
    work = np.array([*costs, 0.0])[plan].sum(-1)
    for step in work:  # each got something before any got too much: apart by at most the dearest row
        assert step.max() - step.min() <= max(costs)


def test_rows_in_turn():
    costs = [9, 1, 8, 2, 5, 6, 7]
    assert in_turn(costs, 2).tolist() == [0, 2, 5, 6, 4, 3, 1]
    order = in_turn(costs, 3)
    assert sorted(order.tolist()) == list(range(7))
    assert [sum(costs[i] for i in order[r:6:3]) for r in range(3)] == [9 + 2, 8 + 5, 7 + 6]
    assert in_turn(costs, 1).tolist() == [0, 2, 6, 5, 4, 3, 1]
    assert in_turn([], 4).tolist() == []


def test_work_of_packed_rows_is_that_of_what_their_queries_see(tmp_path):
    data = dataset(tmp_path)
    rows = np.arange(data.rows)
    batch = data.batch(rows)
    seen = np.maximum(np.arange(1, batch.seq_len + 1) - batch.first_BT, 0)
    empty = (batch.document_BS[:, : batch.seq_len] < 0) | (seen == 0)
    # A document's last token in a row is only read, and the work of predicting from it is not counted.
    by_query = np.where(empty, 0.0, DSA.queries(seen))
    counted = data.work(rows, DSA)
    assert (counted <= by_query.sum(-1) + 1e-9).all()
    assert counted == pytest.approx(by_query.sum(-1), rel=0.15)
    assert data.work([3, 0], DSA).tolist() == counted[[3, 0]].tolist()
    full = [r for r in rows if (batch.document_BS[r] == batch.document_BS[r, 0]).all()]
    assert full
    assert counted[full] == pytest.approx(by_query.sum(-1)[full])


# --------------------------------------------------------------------------- groups
def test_a_long_sequence_gets_many_ranks_and_short_ones_run_beside_it():
    lengths, model = [100, 20, 24, 30, 22], CostModel(1.0, 0.0, moved=0.05, step=5.0)
    plan = plan_groups(lengths, ranks=8, capacity=30, model=model)
    (step,) = plan.steps
    assert [(g.first, g.size, g.sequences) for g in step] == [
        (0, 4, (0,)),
        (4, 1, (3,)),
        (5, 1, (2,)),
        (6, 1, (4,)),
        (7, 1, (1,)),
    ]
    # The four ranks take 25 and 5 for what they gather, the fifth 30, and the step 5 more.
    assert plan.time(lengths, model) == pytest.approx(35 / (196 / 8))
    # One size for all: the second group of four packs the short ones, and gathers them for nothing.
    usual = plan_uniform(lengths, ranks=8, capacity=30)
    assert [[(g.size, g.sequences) for g in step] for step in usual.steps] == [[(4, (0, 1)), (4, (2, 3, 4))]]
    assert usual.time(lengths, model) == pytest.approx((120 / 4 + 6 + 5) / (196 / 8))
    assert plan.group_of(0, 3) == Group(0, 4, (0,))
    assert plan.group_of(0, 7) == Group(7, 1, (1,))


def test_short_sequences_fill_a_step_up_to_the_ranks_memory():
    # A step costs as much as ten tokens: better one of 40 than four of 10.
    plan = plan_groups([10] * 8, ranks=2, capacity=40, model=CostModel(1.0, 0.0, moved=0.1, step=10.0))
    assert [[len(g.sequences) for g in step] for step in plan.steps] == [[4, 4]]


def test_a_group_grows_where_ranks_would_rest():
    # One sequence alone: all ranks share it, although two could hold it.
    plan = plan_groups([50], ranks=8, capacity=30, model=DSA)
    assert plan.steps == ((Group(0, 8, (0,)),),)
    assert plan_uniform([50], 8, 30).steps == ((Group(0, 2, (0,)),),)
    assert BatchPlan(2, ((Group(0, 1, (0,)),),)).group_of(0, 1) is None


def test_a_plan_survives_json():
    plan = plan_groups([100, 20, 3, 30, 22, 75, 8], ranks=4, capacity=32, model=DSA)
    assert BatchPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_what_cannot_be_planned_is_named():
    with pytest.raises(ConfigError, match="ranks=6: must be a power of two"):
        plan_groups([1], 6, 10, DSA)
    with pytest.raises(ConfigError, match="capacity=0"):
        plan_groups([1], 4, 0, DSA)
    with pytest.raises(DataError, match="41 tokens does not fit on 4 ranks of 10"):
        plan_groups([3, 41], 4, 10, DSA)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.one_of(st.integers(1, 12), st.integers(1, 160)), max_size=30),
    st.sampled_from((1, 2, 4, 8)),
    st.sampled_from((DSA, DENSE, CostModel(1.0, 0.0, moved=0.02, step=20.0))),
)
def test_plans_cover_every_sequence_once_within_capacity(lengths, ranks, model):
    capacity = max(20, -(-max(lengths, default=1) // ranks))
    plan = plan_groups(lengths, ranks, capacity, model)
    for each in (plan, plan_uniform(lengths, ranks, capacity)):
        assert sorted(i for step in each.steps for g in step for i in g.sequences) == list(range(len(lengths)))
        for step in each.steps:
            taken = [r for g in step for r in range(g.first, g.first + g.size)]
            assert len(taken) == len(set(taken))
            assert max(taken) < ranks
            for g in step:
                assert g.size & (g.size - 1) == 0
                assert g.first % g.size == 0
                assert sum(lengths[i] for i in g.sequences) <= g.size * capacity
                assert g.sequences
    assert plan == plan_groups(list(lengths), ranks, capacity, model)
    time = plan.time(lengths, model)
    assert time >= 1 - 1e-9
    # A greedy plan is not always better than the usual one, but never far behind.
    assert time <= plan_uniform(lengths, ranks, capacity).time(lengths, model) * 1.3


# --------------------------------------------------------------------------- positions
def test_one_causal_document_is_cut_into_heads_and_tails():
    seen = np.arange(1, 33)
    spans = context_spans(CostModel(0.0, 1.0).queries(seen), 4)
    assert spans == (((0, 4), (28, 32)), ((4, 8), (24, 28)), ((8, 12), (20, 24)), ((12, 20),))
    # Where attention is nothing, so are the ranks' differences: any equal cut will do.
    assert [sum(b - a for a, b in s) for s in context_spans(np.ones(32), 4)] == [8, 8, 8, 8]
    assert context_spans(np.ones(5), 1) == (((0, 5),),)
    with pytest.raises(ConfigError, match="ranks=0"):
        context_spans(np.ones(5), 0)


def test_packed_documents_are_cut_by_what_they_cost():
    seen = np.concatenate([np.arange(1, 49), np.arange(1, 9), np.arange(1, 9)])  # one long document, two short ones
    cost = CostModel(1.0, 1.0).queries(seen)
    spans = context_spans(cost, 4)
    balanced = imbalance([sum(cost[a:b].sum() for a, b in s) for s in spans])
    by_order = imbalance([cost[i * 16 : i * 16 + 16].sum() for i in range(4)])
    assert by_order > 1.6
    assert balanced < 1.05


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=120), st.integers(1, 6))
def test_spans_cover_every_position_once(cost, ranks):
    spans = context_spans(cost, ranks)
    assert len(spans) == ranks
    covered = sorted(t for own in spans for a, b in own for t in range(a, b))
    assert covered == list(range(len(cost)))
    for own in spans:
        held = sum(b - a for a, b in own)
        assert held <= -(-len(cost) // ranks) + 16  # equally many, but for rounding
        assert held == len(cost) // ranks or len(cost) % (2 * ranks)
        assert all(a < b for a, b in own)
        assert all(x[1] < y[0] for x, y in pairwise(own))
