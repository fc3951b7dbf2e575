"""Pipelines over processes: loss and gradients are one process's, whatever the schedule, placement and memory saving.

fp32. Without data parallelism every gradient is bit for bit one process's, deferred or not, but for the embedding's:
its two parts, from the trunk and from the MTP block's copy, come together at the end of the step.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from glm5.model.glm5 import GLM5
from glm5.parallel.compat import gathered_gradient_bytes
from glm5.parallel.mesh import ParallelError, World
from glm5.parallel.pipeline import engine, offload
from glm5.parallel.pipeline.deferred import WeightGradients
from glm5.parallel.pipeline.engine import Pipeline, build
from glm5.parallel.pipeline.offload import chosen
from glm5.parallel.pipeline.schedule import orders
from glm5.parallel.pipeline.simulate import gradient_bytes, in_flight
from glm5.parallel.shard import parallelize, whole
from glm5.train.rows import Rows
from glm5.utils.errors import ConfigError
from support.pipeline import Terms, freeze, make_rows, one_process, pipeline_config
from support.ranks import run_ranks

SCHEDULES = [("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1), ("zero-bubble", 2), ("zbv", 2), ("dualpipev", 2)]
EMBEDDING = "model.embed_tokens.weight"


def make(terms: Terms, **changes: Any) -> GLM5:
    return freeze(GLM5(pipeline_config(**changes), seed=1), terms)


def differences(pipeline: Pipeline, wanted: dict[str, Tensor]) -> dict[str, float]:
    """Of this rank's gradients: the largest difference as a share of the largest entry; missing ones are infinite."""
    out = {}
    for name, parameter in pipeline.named_parameters():
        if not parameter.requires_grad:
            assert parameter.grad is None, name
            continue
        if parameter.grad is None:
            out[name] = float("inf") if name in wanted and wanted[name].any() else 0.0
        else:
            found = whole(parameter.grad)
            out[name] = float((found - wanted[name]).abs().max() / wanted[name].abs().max().clamp(min=1e-20))
    assert all(stage.replica is None or stage.replica.grad is None for stage in pipeline.stages.values())
    return out


def total(world: World, losses: list[Tensor]) -> float:
    return sum(world.gather_objects(float(sum(losses)), "pp"))


# --------------------------------------------------------------------------- equal to one process
def every_schedule(world: World) -> list[tuple[str, float, float, dict[str, float]]]:
    out = []
    for terms, schedules in (
        (Terms(sparse=True, indexer=True), SCHEDULES),
        (Terms(share=0.4), SCHEDULES[::2]),  # the last micro-batches have MTP on some rows, then on none
        (Terms(depths=0), SCHEDULES[:1]),
        (Terms(model=False, indexer=True), SCHEDULES[1:]),  # warm-up: no gradient flows between stages
    ):
        rows = make_rows(pipeline_config(), 4)
        loss, wanted = one_process(make(terms), rows, terms)
        for name, each in schedules:
            pipeline = build(make(terms), world, schedule=name, stages_per_rank=each)
            for _ in range(1 + (name == "zbv")):  # a second step through the same buffers
                for _, parameter in pipeline.named_parameters():
                    parameter.grad = None
                found = total(world, pipeline.step(terms.work(rows)))
            out.append((f"{terms} {name}/{each}", found, loss, differences(pipeline, wanted)))
    return out


def test_every_schedule_and_stage_of_training() -> None:
    for rank in run_ranks(2, "pp=2", every_schedule):
        for case, found, loss, worst in rank:
            assert found == pytest.approx(loss, rel=1e-6), case
            assert worst.pop(EMBEDDING, 0.0) < 1e-6, case
            assert set(worst.values()) <= {0.0}, case


def every_placement(world: World) -> list[tuple[str, dict[str, float]]]:
    terms, out = Terms(sparse=True, indexer=True), []
    rows = make_rows(pipeline_config(), 8, rows=1)
    wanted = one_process(make(terms), rows, terms)[1]
    plain = Terms(depths=0)
    wanted_plain = one_process(make(plain, num_nextn_predict_layers=0), rows, plain)[1]
    for name, layout in [
        ("1f1b", ""),
        ("1f1b", "E D M*2 | M*3 N | P | H"),
        ("1f1b", "E D M | M*2 | M | M N P H"),
        ("1f1b", "E | D M*5 | N P | H"),  # stages without layers
        ("zero-bubble", "E D | M*3 | M*2 N P | H"),
        ("interleaved", "E | D | M | M | M | M | M N P | H"),
        ("zbv", "E | D | M | M | M | M | M N | P H"),
    ]:
        pipeline = build(make(terms), world, schedule=name, layout=layout)
        pipeline.step(terms.work(rows))
        out.append((f"{name} {pipeline.layout}", differences(pipeline, wanted)))
    uneven = rows[:2] + make_rows(pipeline_config(), 1, rows=3, queries=24, seed=1) + rows[2:4]
    pipeline = build(make(terms), world, schedule="zero-bubble")
    pipeline.step(terms.work(uneven))
    out.append(("uneven micro-batches", differences(pipeline, one_process(make(terms), uneven, terms)[1])))
    pipeline = build(make(plain, num_nextn_predict_layers=0), world, schedule="zero-bubble")
    pipeline.step(plain.work(rows))
    out.append((f"no MTP block: {pipeline.layout}", differences(pipeline, wanted_plain)))
    return out


def test_placements_on_four_ranks() -> None:
    for rank in run_ranks(4, "pp=4", every_placement):
        for case, worst in rank:
            assert worst.pop(EMBEDDING, 0.0) < 1e-6, case
            assert set(worst.values()) <= {0.0}, case


# --------------------------------------------------------------------------- with FSDP, and pipeline ZeRO-2
def share(rows: Rows, place: int, count: int) -> Rows:
    """One data rank's rows of a micro-batch."""
    each = len(rows.ids_BS) // count
    own = slice(place * each, (place + 1) * each)
    targets = tuple((t[own], w[own]) for t, w in rows.targets)
    return Rows(rows.ids_BS[own], rows.document_BS[own], rows.first_BS[own], targets, rows.plain)


def sharded(world: World) -> list[tuple[str, dict[str, float], int, int]]:
    out = []
    three = [("interleaved", 3)]
    for terms, schedules in (
        (Terms(), three + SCHEDULES[::5] + SCHEDULES[3:5]),
        (Terms(model=False, indexer=True), three),
    ):
        rows = make_rows(pipeline_config(), 4)
        wanted = one_process(make(terms), rows, terms)[1]
        for name, each in schedules:
            for every in (0, 2) if name in ("1f1b", "zbv") else (2,):
                # A stage that is asked to free its parameters after forward keeps them all the same.
                pipeline = build(
                    make(terms),
                    world,
                    schedule=name,
                    stages_per_rank=each,
                    reduce_every=every,
                    wrap=lambda stage, keep=every == 0: parallelize(stage, world, reshard=keep),
                )
                work = terms.work(rows)
                work.rows = [share(r, world.place("data"), world.count("data")) for r in rows]
                work.mtp_rows = None
                pipeline.step(work)
                most, formula = held(pipeline, work, zero2=every > 0)
                case = f"{terms} {name}/{each} every {every}"
                out.append((case, differences(pipeline, wanted), most, formula))
    return out


def spread(world: World) -> list[tuple[str, dict[str, float], bool]]:
    terms, out = Terms(), []
    rows = make_rows(pipeline_config(), 4)
    wanted = one_process(make(terms), rows, terms)[1]
    for name, again in (("zbv", ()), ("1f1b", ("feed-forward",))):
        pipeline = build(
            make(terms),
            world,
            schedule=name,
            recompute=again,
            wrap=lambda stage: parallelize(stage, world, reshard=False),
        )
        work = terms.work(rows)
        work.rows, work.mtp_rows = [share(r, world.place("data"), 2) for r in rows], None
        deferred: set[str] = set()
        plain = WeightGradients._put

        def noted(
            self: WeightGradients, weight: Tensor, compute: Any, deferred: Any = deferred, plain: Any = plain
        ) -> None:
            deferred.update([type(weight).__name__] if weight.ndim == 3 else [])
            plain(self, weight, compute)

        WeightGradients._put = noted
        try:
            pipeline.step(work)
        finally:
            WeightGradients._put = plain
        out.append((f"{name} {again}", differences(pipeline, wanted), bool(deferred)))
    return out


def test_experts_that_are_spread_defer_their_gradients() -> None:
    ranks = run_ranks(4, "pp=2,dp=2,ep=2", spread)
    for rank in ranks:
        for case, worst, _ in rank:
            assert max(worst.values()) < 3e-5, case
    deferred = [{case: found for case, _, found in rank} for rank in ranks]
    assert [d["zbv ()"] for d in deferred] == [True] * 4
    assert not any(d["1f1b ('feed-forward',)"] for d in deferred)


def held(pipeline: Pipeline, work: Any, zero2: bool) -> tuple[int, int]:
    """The most bytes of full gradients that a rank holds in a step, and the formula's bound."""
    most, parts = 0, list(pipeline.stages.values())
    plain = engine.RunningStage._after_weights

    def counted(stage: engine.RunningStage) -> None:
        nonlocal most
        plain(stage)
        most = max(most, sum(map(gathered_gradient_bytes, parts)))

    engine.RunningStage._after_weights = counted
    try:
        before = {n: None if p.grad is None else p.grad.clone() for n, p in pipeline.named_parameters()}
        pipeline.step(work)
        for name, parameter in pipeline.named_parameters():
            parameter.grad = before[name]
    finally:
        engine.RunningStage._after_weights = plain
    assert not any(map(gathered_gradient_bytes, parts))  # all of it was reduced
    counts = [sum(p.numel() for p in part.parameters() if p.requires_grad) for part in parts]
    return most, gradient_bytes(counts, 2, zero2=zero2).full


def test_fsdp_under_every_schedule_and_reduction() -> None:
    reached = False
    for rank in run_ranks(4, "pp=2,dp=2", sharded):
        for case, worst, most, formula in rank:
            assert max(worst.values(), default=0.0) < 3e-5, case  # rows are divided: sums run in another order
            assert most <= formula, case
            reached |= most == formula and "every 2" in case
    assert reached  # two stages did hold their full gradients at once


# --------------------------------------------------------------------------- activations
def activations(world: World) -> list[tuple[str, dict[str, float], tuple[int, ...]]]:
    offload.LEAST_BYTES = 0
    terms, out = Terms(sparse=True, indexer=True), []
    rows = make_rows(pipeline_config(), 6, queries=32)
    wanted = one_process(make(terms), rows, terms)[1]
    both = ("feed-forward", "attention")
    for name in ("interleaved", "zbv"):
        for when, again in [(w, ()) for w in ("never", "warmup", "far")] + [
            ("never", ("attention",)),
            ("never", both),
            ("never", ("layer",)),
            ("far", ("attention",)),
        ]:
            pipeline = build(
                make(terms),
                world,
                layout="E D M | M*2 | M*2 N | P H",
                schedule=name,
                offload=when,
                recompute=again,
                count_activations=True,
            )
            work, seen = terms.work(rows), []
            plain = work.objective
            work.objective = lambda done, seen=seen, plain=plain: (seen.append(done), plain(done))[1]
            pipeline.step(work)
            for done in seen:  # after the backward pass: what ran again did not count again
                routed = [i for i in done.parts.layers if pipeline.layout.kinds[i] == "sparse"]
                assert len(done.trunk.loads) == len(routed)
                assert len(done.trunk.indexer_losses) == len(done.parts.layers)
                assert len(done.mtp.loads) == len(done.mtp.indexer_losses) == 3 * done.parts.mtp
            a = pipeline.activations
            assert a is not None
            assert (a.device_bytes, a.host_bytes, a.late) == (0, 0, 0)
            case = f"{name}/{when}/{'+'.join(again)}"
            out.append((case, differences(pipeline, wanted), (a.peak_device, a.peak_host)))
    return out


def test_offloading_and_recomputation() -> None:
    ranks = run_ranks(2, "pp=2", activations)
    for rank in ranks:
        for case, worst, _ in rank:
            assert worst.pop(EMBEDDING, 0.0) < 1e-6, case
            assert set(worst.values()) <= {0.0}, case
        bytes_of = {case: found for case, _, found in rank}
        for name in ("interleaved", "zbv"):
            device, host = bytes_of[f"{name}/never/"]
            assert host == 0
            assert bytes_of[f"{name}/far/"][0] <= device
            assert 0 < bytes_of[f"{name}/warmup/"][1] <= bytes_of[f"{name}/far/"][1]
            for less, more in (("layer", "feed-forward+attention"), ("feed-forward+attention", "attention")):
                assert bytes_of[f"{name}/never/{less}"][0] < bytes_of[f"{name}/never/{more}"][0]
            assert bytes_of[f"{name}/never/attention"][0] < 0.8 * device
    # Rank 0 holds five half-stages at most; two of them stay, those that are computed and those that come back next.
    found = {case: peak for case, _, (peak, _) in ranks[0]}
    assert found["interleaved/far/"] < 0.8 * found["interleaved/never/"]


def micro_batches_held(world: World) -> tuple[int, int]:
    """Bytes of saved activations at once, and of one micro-batch."""
    terms = Terms(depths=0)
    rows = make_rows(pipeline_config(num_nextn_predict_layers=0), 8)
    found = []
    for count in (1, 8):
        own = make(terms, num_nextn_predict_layers=0)
        pipeline = build(own, world, layout="E D M | M*2 | M | M N H", count_activations=True)
        pipeline.step(terms.work(rows[:count]))
        assert pipeline.activations is not None
        found.append(pipeline.activations.peak_device)
    return found[1], found[0]


def test_a_rank_holds_the_micro_batches_of_the_formula() -> None:
    for rank, (held_bytes, one) in enumerate(run_ranks(4, "pp=4", micro_batches_held)):
        # Routing differs between micro-batches, and with it what the experts save of each.
        assert held_bytes / one == pytest.approx(in_flight("1f1b", 4, 1, rank), rel=0.02)


def test_which_micro_batches_move() -> None:
    ranks = orders("1f1b", 4, 4, 8)
    assert chosen(ranks[0], "never") == set()
    assert chosen(ranks[0], "warmup") == {(0, i) for i in range(4)}
    assert chosen(ranks[0], "far") == {(0, i) for i in range(8)}
    assert chosen(ranks[2], "warmup") == {(2, 1)}  # the first one's backward pass is the next computation but one
    assert chosen(ranks[2], "far") == {(2, i) for i in range(1, 7)}
    assert chosen(ranks[3], "far") == set()


# --------------------------------------------------------------------------- the copy of the embedding
def three_steps(world: World) -> float:
    """Three steps of SGD, with a pipeline and in one process: how far apart the models and the next loss are."""
    terms, rows = Terms(), make_rows(pipeline_config(), 4)
    alone, own = make(terms), make(terms)
    pipeline = build(own, world, schedule="1f1b", layout="E D M*3 | M*2 N P H")
    for _ in range(3):
        for model in (alone, None):
            parameters = list(alone.named_parameters() if model else pipeline.named_parameters())
            for _, p in parameters:
                p.grad = None
            if model:
                one_process(alone, rows, terms)
            else:
                pipeline.step(terms.work(rows))
            with torch.no_grad():
                for _, p in parameters:
                    if p.grad is not None:
                        p -= 0.1 * p.grad
    copies = [s.replica for s in pipeline.stages.values() if s.replica is not None]
    with torch.no_grad():
        for copied in copies:
            copied.zero_()  # as if another run had left it: the next step reads the embedding all the same
    loss = total(world, pipeline.step(terms.work(rows)))
    wanted = dict(alone.named_parameters())
    distances = [float((p - wanted[n]).abs().max()) for n, p in pipeline.named_parameters()]
    distances.append(abs(loss - one_process(alone, rows, terms)[0]))
    assert len(copies) == (world.place("pp") == 1)
    assert any(name == EMBEDDING for name, _ in pipeline.named_parameters()) == (world.place("pp") == 0)
    held = pipeline.stages[world.place("pp")].model.embed_tokens.weight.detach()
    first, second = world.gather_objects(held, "pp")
    assert torch.equal(first, second)
    return max(distances)


def test_the_embedding_moves_once_and_its_copy_follows() -> None:
    assert max(run_ranks(2, "pp=2", three_steps)) < 1e-5


# --------------------------------------------------------------------------- what cannot be
def refusals(world: World) -> dict[str, str]:
    terms, found = Terms(), {}
    rows = make_rows(pipeline_config(), 4)

    def attempt(name: str, kind: type[Exception], action: Any) -> None:
        try:
            action()
        except kind as e:
            found[name] = str(e)

    def told_apart() -> Pipeline:
        return build(make(terms), world, reduce_every=world.place("pp"))

    attempt("told apart", ParallelError, told_apart)
    attempt("tied", ConfigError, lambda: build(make(terms, tie_word_embeddings=True), world))
    attempt("stages", ConfigError, lambda: build(make(terms), world, layout="E D M*5 N P H"))
    attempt("offload", ConfigError, lambda: build(make(terms), world, offload="always"))  # type: ignore[arg-type]
    attempt("recompute", ConfigError, lambda: build(make(terms), world, recompute=("norms",)))
    attempt(
        "micro-batches", ConfigError, lambda: build(make(terms), world, schedule="dualpipev").step(terms.work(rows[:2]))
    )
    return found


def test_refusals() -> None:
    for rank, found in enumerate(run_ranks(2, "pp=2", refusals)):
        assert f"pipeline rank {1 - rank} was given" in found["told apart"]
        assert "cannot stand on another stage" in found["tied"]
        assert "must be a multiple of the 2 pipeline ranks" in found["stages"]
        assert "must be one of never, warmup, far" in found["offload"]
        assert "must be of attention, feed-forward, layer" in found["recompute"]
        assert "at least as many microbatches" in found["micro-batches"]
