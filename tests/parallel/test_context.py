"""Context parallelism: losses, gradients and selections of one process, on every cut of the rows and group of ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

from glm5.data.balance import CostModel, context_spans, plan_groups
from glm5.kernels.cross_entropy import linear_cross_entropy
from glm5.kernels.visibility import Visibility
from glm5.model.glm5 import GLM5
from glm5.model.presets import gqa_8
from glm5.model.trace import Aux, Trace
from glm5.parallel.context import ContextGroups, ContextRows, SpanVisibility
from glm5.parallel.exchange import Hierarchy, gather, scatter_sum
from glm5.parallel.shard import parallelize
from glm5.parallel.vocab import divided_head
from glm5.utils.errors import ConfigError
from support.ranks import run_ranks
from support.tiny import tiny_config, tiny_model

T, DEPTHS = 92, 2
S = T + DEPTHS + 1
TOPK = 24  # the tiny model's


def _rows(plain=False):
    """Two rows of packed documents, the second one padded; ids of all S slots, firsts, and targets' weights."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(6, 320, (2, S), generator=generator)
    first = torch.zeros(2, S, dtype=torch.int64)
    if not plain:
        first[0, 61:] = 61
        first[1, 10:] = 10
        first[1, 80:] = torch.arange(80, S) + 1  # padding sees nothing
    return ids, first


def _valid(first, depth):
    here = first[:, :T] <= torch.arange(T)
    return here & (first[:, depth : depth + T] == first[:, :T])


def _loss(model, hidden, targets, weights, aux):
    """Everything that training adds up, as sums over the positions given."""
    flat = torch.cat([h.flatten(0, 1) for h in hidden])
    divided = divided_head(model.lm_head)
    head, cross_entropy = (model.lm_head.weight, linear_cross_entropy)
    if divided is not None:
        head, cross_entropy = divided[0], divided[1].cross_entropy
    ce = cross_entropy(flat, head, torch.cat(targets), torch.cat(weights)).loss_sum
    balance = torch.stack(aux.balance_losses).sum() if aux.balance_losses else 0.0
    return ce + 3.0 * aux.indexer_kl() + 0.5 * balance


def _run(model, rows, ids, first, sparse, own=lambda x: x, trace=None):
    """One forward pass with MTP: its loss. `rows` None is one process; `own` takes a rank's share of [B, T]."""
    options = dict(indexer=True, balance=True, logits=True)
    aux = Aux(**options) if rows is None else rows.aux(**options)
    aux.valid = own(_valid(first, 0))
    if rows is None:
        hidden = [model.hidden(ids[:, :T], documents=first[:, :T], sparse=sparse, aux=aux, trace=trace)]
        depths = model.mtp_hidden(hidden[0], ids, DEPTHS, documents=first, sparse=sparse, aux=aux, trace=trace)
    else:
        hidden = [model.hidden(own(ids[:, :T]), cache=rows, sparse=sparse, aux=aux, trace=trace)]
        depths = model.mtp_hidden(hidden[0], ids, DEPTHS, cache=rows, sparse=sparse, aux=aux, trace=trace)
    for depth in range(1, DEPTHS + 1):
        aux.valid = own(_valid(first, depth))
        hidden.append(next(depths))
    targets = [own(ids[:, d + 1 : d + 1 + T]).flatten() for d in range(DEPTHS + 1)]
    weights = [own(_valid(first, d + 1)).flatten().float() for d in range(DEPTHS + 1)]
    return _loss(model, hidden, targets, weights, aux), aux


def _gradients(model):
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def _summed(model):
    for p in model.parameters():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        dist.all_reduce(p.grad)
    return _gradients(model)


def _close(found, expected, scale=1.0):
    for name, want in expected.items():
        error = (found[name] * scale - want).abs().max()
        assert error <= 2e-5 * max(1.0, want.abs().max()), (name, float(error))


def _uneven(ranks, cost):
    if ranks == 2:
        return [[(0, 70)], [(70, T)]]
    return [[(0, 3)], [(3, 50), (60, T)], [(50, 55)], [(55, 60)]]


def _in_order(ranks, cost):
    return [[(r * T // ranks, (r + 1) * T // ranks)] for r in range(ranks)]


CUTS = {"in order": _in_order, "uneven": _uneven, "by cost": lambda ranks, cost: context_spans(cost, ranks)}


def _as_one_process(world, modes):
    ways = {"flat": world.group("cp")}
    if world.size == 4:
        ways["two hosts"] = Hierarchy.build(range(4), 2)
    # Few index heads make many scores exactly zero: ties, which go to the lower position.
    for changes, sparse, plain in modes:
        model = tiny_model(**changes)
        ids, first = _rows(plain)
        trace = Trace(scores=True)
        loss, aux = _run(model, None, ids, first, sparse, trace=trace)
        loss.backward()
        expected, selected = _gradients(model), trace.selected
        if changes:
            scores = trace.index_scores[0]
            zeros = (scores == 0).sum(-1)
            assert (zeros > TOPK).any()
        cost = CostModel(1.0, 1.0, 0.1, TOPK).queries(Visibility.documents(first[:, :T]).count_BT().sum(0).numpy())
        for cut, cutter in CUTS.items():
            for way, group in ways.items():
                if way != "flat" and cut != "by cost":
                    continue
                model.zero_grad()
                rows = ContextRows(cutter(world.size, cost), first, group)
                own = Trace()
                part, part_aux = _run(model, rows, ids, first, sparse, rows.own, trace=own)
                part.backward()
                total = part.detach().clone()
                dist.all_reduce(total)
                torch.testing.assert_close(total, loss.detach(), rtol=2e-6, atol=1e-4)
                _close(_summed(model), expected)
                assert len(own.selected) == len(selected) == (3 + DEPTHS if sparse else 0)
                for mine, theirs in zip(own.selected, selected, strict=True):
                    theirs = rows.own(theirs)
                    assert (theirs[..., mine.shape[-1] :] == -1).all()
                    assert torch.equal(mine, theirs[..., : mine.shape[-1]])
                for one, all_ in zip(part_aux.loads, aux.loads, strict=True):
                    load = one.clone()
                    dist.all_reduce(load)
                    assert torch.equal(load, all_)
                for one, all_ in zip(part_aux.indexer_losses, aux.indexer_losses, strict=True):
                    sums = torch.stack([one.kl.detach(), one.queries, one.recall_sum])
                    dist.all_reduce(sums)
                    torch.testing.assert_close(sums, torch.stack([all_.kl.detach(), all_.queries, all_.recall_sum]))
                    largest = one.logit_max_H.clone()
                    dist.all_reduce(largest, dist.ReduceOp.MAX)
                    torch.testing.assert_close(largest, all_.logit_max_H)
    return True


def test_two_ranks_are_one_process():
    run_ranks(2, "cp=2", _as_one_process, [({}, True, False), ({}, False, False), ({"index_n_heads": 1}, True, True)])


def test_four_ranks_and_two_hosts_are_one_process():
    run_ranks(4, "cp=4", _as_one_process, [({"index_n_heads": 1}, True, False), ({}, False, True)])


def _with_others(world):
    """Rows shared by two ranks under FSDP and tensor parallelism: the loss is one process's."""
    ids, first = _rows()
    model = tiny_model()
    loss, _ = _run(model, None, ids, first, True)
    loss.backward()
    expected = _gradients(model)
    placed = parallelize(tiny_model(), world)
    rows = ContextRows(context_spans(np.ones(T), 2), first, world.group("cp"))
    part, _ = _run(placed, rows, ids, first, True, rows.own)
    part.backward()
    total = part.detach().clone()
    dist.all_reduce(total, group=world.group("cp"))
    torch.testing.assert_close(total, loss.detach(), rtol=2e-6, atol=1e-4)
    _close({n: p.grad.full_tensor() for n, p in placed.named_parameters()}, expected)


def test_with_fsdp_and_tensor_parallelism():
    run_ranks(4, "cp=2,tp=2", _with_others)


LENGTHS = [88, 30, 22, 40, 61, 9, 35, 18]


def _groups_of_every_size(world):
    """A batch by plan: each step, ranks alone and in groups; gradients are those of the batch, by tokens."""
    cost = CostModel(1.0, 0.05, 0.01, TOPK, moved=0.2, step=5.0)
    plan = plan_groups(LENGTHS, 4, 40, cost)
    sizes = {g.size for step in plan.steps for g in step}
    assert sizes == {1, 2, 4}
    groups = ContextGroups([range(4)], per_host=2)
    generator = torch.Generator().manual_seed(8)
    texts = [torch.randint(6, 320, (n + 1,), generator=generator) for n in LENGTHS]
    model = tiny_model()
    tokens = sum(LENGTHS)
    for text in texts:
        hidden = model.hidden(text[None, :-1], sparse=True)
        (linear_cross_entropy(hidden[0], model.lm_head.weight, text[1:]).loss_sum / tokens).backward()
    expected = _gradients(model)
    model.zero_grad()
    own = 0
    for step in range(len(plan.steps)):
        group = plan.group_of(step, world.rank)
        if group is None:
            continue
        # The group's texts packed into one row, each a document.
        ids = torch.cat([texts[i][:-1] for i in group.sequences])[None]
        targets = torch.cat([texts[i][1:] for i in group.sequences])[None]
        ends = torch.tensor([LENGTHS[i] for i in group.sequences]).cumsum(0)
        lengths = torch.tensor([LENGTHS[i] for i in group.sequences])
        first = (ends - lengths).repeat_interleave(lengths)[None]
        seen = (torch.arange(ids.shape[1]) - first[0] + 1).numpy()
        spans = context_spans(cost.queries(seen), group.size)
        rows = ContextRows(spans, first, groups.ways(group.first, group.size))
        hidden = model.hidden(rows.own(ids), cache=rows, sparse=True)
        loss = linear_cross_entropy(hidden[0], model.lm_head.weight, rows.own(targets)[0]).loss_sum
        (loss / tokens).backward()
        own += rows.slot_T.numel()
    held = torch.tensor(own)
    dist.all_reduce(held)
    assert int(held) == tokens  # weights by tokens: each counted once, whoever had it
    _close(_summed(model), expected, scale=1.0)
    with pytest.raises(ConfigError, match="ranks=3"):
        ContextGroups([range(3)])


def test_groups_of_several_sizes_give_the_batch_its_gradient():
    run_ranks(4, "dp=4", _groups_of_every_size)


def _grouped_queries(world):
    """The report's baseline shares its keys and values in the same way."""
    model = GLM5(gqa_8(tiny_config()), seed=1)
    ids, first = _rows()
    found = []
    for rows in (None, ContextRows(context_spans(np.ones(T), 4), first, world.group("cp"))):
        model.zero_grad()
        own = ids[:, :T] if rows is None else rows.own(ids[:, :T])
        hidden = model.hidden(own, documents=first[:, :T] if rows is None else None, cache=rows)
        (hidden * torch.arange(hidden.shape[-1])).sum().backward()
        found.append((hidden.detach(), _gradients(model) if rows is None else _summed(model)))
        if rows is not None:
            torch.testing.assert_close(hidden.detach(), rows.own(found[0][0]))
    _close(found[1][1], found[0][1])


def _hierarchical_latents(world):
    _grouped_queries(world)
    hierarchy = Hierarchy.build(range(4), 2)
    generator = torch.Generator().manual_seed(world.rank)
    x = torch.randn(3, 5, generator=generator)
    assert torch.equal(gather(x, hierarchy), gather(x, world.group("cp")))
    for source in range(4):
        theirs = torch.randn(3, 5, generator=torch.Generator().manual_seed(source))
        assert torch.equal(gather(x, hierarchy)[source], theirs)
    parts = torch.randn(4, 3, generator=generator)
    torch.testing.assert_close(scatter_sum(parts, hierarchy), scatter_sum(parts, world.group("cp")))
    everyone = gather(parts, world.group("cp"))
    torch.testing.assert_close(scatter_sum(parts, hierarchy), everyone[:, world.rank].sum(0))
    # Spans that don't fit are refused by every rank, before anything is sent.
    first = torch.zeros(1, 8, dtype=torch.int64)
    group = world.group("cp")
    for spans, why in (
        ([[(0, 8)]], "for 1 ranks"),
        ([[(0, 2)], [(2, 4)], [(4, 6)], [(5, 8)]], "each once"),
        ([[(0, 3)], [(3, 6)], [(6, 9)], [(9, 12)]], "must cover the 8 slots"),
    ):
        with pytest.raises(ConfigError, match=why):
            ContextRows(spans, first, group)
    # Dense training has no use for index keys, and sends none.
    sent = []
    original = dist.all_gather_into_tensor if not hasattr(dist, "all_gather_single") else dist.all_gather_single
    name = original.__name__

    def counted(out, x, group):
        sent.append(x.numel())
        return original(out, x, group=group)

    setattr(dist, name, counted)
    try:
        for indexed in (True, False):
            rows = ContextRows([[(0, 2)], [(2, 4)], [(4, 6)], [(6, 8)]], first, group, indexed=indexed)
            rows.store(0, None, rows.visible, torch.zeros(1, 2, 40), torch.zeros(1, 2, 26))
    finally:
        setattr(dist, name, original)
    assert sent == [2 * 66, 2 * 40]


def test_latents_within_and_between_hosts_and_refusals():
    run_ranks(4, "cp=4", _hierarchical_latents)


def test_one_rank_alone_and_rows_without_slots_ahead():
    rows = ContextRows([[(0, 8)]], torch.zeros(1, 10, dtype=torch.int64), None)
    x = torch.randn(1, 10, 3)
    assert torch.equal(rows.own(x), x[:, :8])
    (part,) = rows.store(0, None, rows.visible, x[:, :8], x[:, :8])
    assert torch.equal(part.rows, x[:, :8])
    assert torch.equal(rows.total(torch.ones(2)), torch.ones(2))
    rows.ahead(2)
    with pytest.raises(ConfigError, match="depth=3: these rows have 2 slots"):
        rows.ahead(3)


def test_tiles_of_spans_know_how_far_they_reach():
    spans = ((4, 8), (20, 24))
    last = torch.tensor([[4, 5, 6, 7, 20, 21, 22, 23]])
    visible = SpanVisibility(torch.zeros_like(last), last, 24, spans=spans)
    for start, stop in ((0, 8), (0, 3), (3, 5), (4, 8), (6, 7)):
        tile = visible.tile(start, stop)
        assert torch.equal(tile.last_BT, last[:, start:stop])
        assert tile.slots == int(last[0, stop - 1]) + 1
        assert tile.tile(1, 2).slots == int(last[0, start + 1]) + 1 if stop - start > 1 else True
        assert torch.equal(tile.mask_BTS(), visible.mask_BTS()[:, start:stop, : tile.slots])
