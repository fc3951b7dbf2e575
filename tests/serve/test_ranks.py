"""An engine over two ranks: the ids and log-probabilities of one process, whatever is done to it."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from glm5.kernels.cpu.build import available
from glm5.model.generate import generate
from glm5.model.glm5 import GLM5
from glm5.model.paged import PagedCache
from glm5.model.weights import disk_tensors, load_model, save_model
from glm5.parallel.inference import Share, check
from glm5.parallel.mesh import Mesh, World
from glm5.serve import executor, lockstep, rank_graphs, ranks
from glm5.serve.client import WeightGroup, WeightUpdate
from glm5.serve.config import EngineConfig
from glm5.serve.engine import Engine
from glm5.serve.fold import Folded
from glm5.serve.lockstep import RankLost
from glm5.serve.ranks import Leader, LedWeights, Member
from glm5.serve.request import Request, SamplingParams
from glm5.serve.split import SplitBatch
from glm5.serve.weights import WeightSource
from glm5.utils.errors import ConfigError, UserError
from support.cluster import cluster, play
from support.drafting import agreeable
from support.ranks import exit_codes, run_ranks
from support.tiny import tiny_config

LENGTHS = (1, 23, 25, 64, 65, 129, 200)  # around k = 24, and around pages of 64
GREEDY = SamplingParams(max_new_tokens=10, temperature=0.0, ignore_eos=True, logprobs=0)
ROOMY = EngineConfig(pages=40, context=256, overlap=False, cuda_graphs=False)
TOLERANCE = 2e-5

# How the prompts are run: settings, and how often in turn.
WAYS: dict[str, EngineConfig] = {
    "plain": ROOMY,
    "drafts": replace(ROOMY, drafts=3, overlap=True),
    "chunks": replace(ROOMY, drafts=2, chunk=7, max_running=8, max_batched_tokens=30),
    "preempted": replace(ROOMY, drafts=3, pages=20),
    "host": replace(ROOMY, pages=6, host_pages=20, drafts=1),
}

Told = list[tuple[list[int], list[float]]]


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(6, 320, (n,), generator=generator).tolist() for n in LENGTHS]


def answers(engine: Engine, asked: list[list[int]], *, crowd: bool = False) -> Told:
    """With a crowd: strangers of higher priority come in the middle, and take the pages."""
    requests = [Request(ids, GREEDY) for ids in asked]
    folded = {request.rid: Folded() for request in requests}
    for request in requests:
        engine.add(request)
    for step in itertools.count():
        if step == 4 and crowd:
            for i in range(4):
                engine.add(Request([10 + i] * 240, replace(GREEDY, max_new_tokens=3), priority=1))
        if not engine.has_work:
            break
        for delta in engine.advance(lambda: None) if engine.overlap else engine.step():
            if delta.rid in folded:
                folded[delta.rid].add(delta)
        engine.scheduler.check()
    return [(one.ids, one.logprobs) for one in folded.values()]


def all_ways(engine_of: Callable[[EngineConfig], Engine], some: slice = slice(None)) -> dict[str, Any]:
    """Answers of every way, cold and then warm, to some of the prompts."""
    found: dict[str, Any] = {}
    for name, config in WAYS.items():
        engine = engine_of(config)
        found[name] = answers(engine, prompts()[some], crowd=name == "preempted")
        found[f"{name}, warm"] = answers(engine, prompts()[some])
        found[f"{name}, of the engine"] = (engine.stats().prefix_hits > 0, engine.scheduler.preemptions > 0)
        engine.close()
    return found


def same(found: Told, expected: Told) -> None:
    for (ids, logprobs), (right_ids, right_logprobs) in zip(found, expected, strict=True):
        assert ids == right_ids
        torch.testing.assert_close(torch.tensor(logprobs), torch.tensor(right_logprobs), rtol=0, atol=TOLERANCE)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two models with the same shapes."""
    paths = [tmp_path_factory.mktemp("ranks") / name for name in ("one", "two")]
    for seed, path in enumerate(paths):
        save_model(agreeable(seed), path, max_shard_bytes=100_000)
    return [str(path) for path in paths]


@pytest.fixture(scope="module")
def expected(checkpoints: list[str]) -> dict[str, Any]:
    """What one process answers."""
    models = [load_model(path) for path in checkpoints]
    found = all_ways(lambda config: Engine(models[0], config))
    found["other weights"] = answers(Engine(models[1], WAYS["drafts"]), prompts())
    found["sums"] = Engine(models[0], ROOMY).checksum()
    return found


def _lead(world: World, checkpoint: str, lead: Callable[[Leader], Any]) -> Any:
    """Run `lead` where a rank decides; the others follow, and give their pages and what they hold of the weights."""
    share = Share(world, tiny_config())
    member = Member(load_model(checkpoint, share=share), share)
    found = None
    if member.leads:
        leader = Leader(member)
        found = lead(leader)
        leader.close()
    else:
        member.follow()
    assert member.cache is not None
    pages = [pool.clone() for pool in member.cache.tensors()]
    return found, pages, sum(p.numel() for p in member.model.parameters())


def _once_without_room(kind: Any) -> None:
    """The first `resume` of the class finds no memory."""
    resume, left = kind.resume, [1]

    def fails(one: Any) -> None:
        if left:
            left.clear()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        resume(one)

    kind.resume = fails


# --------------------------------------------------------------------------- tensor parallel
def _tensor_parallel(world: World, checkpoints: list[str]) -> Any:
    lockstep.TICK_SECONDS = 0.05
    if world.rank:
        for kind in (WeightSource, PagedCache):
            _once_without_room(kind)

    def lead(leader: Leader) -> dict[str, Any]:
        time.sleep(0.2)  # the follower hears of its leader meanwhile
        found = all_ways(lambda config: Engine(leader.model, config, ranks=leader))
        engine = Engine(leader.model, WAYS["drafts"], ranks=leader)
        found["sums"] = engine.checksum()
        new = dict(disk_tensors(load_model(checkpoints[1])))
        for broken in ({"no.such": torch.ones(2)}, {"model.norm.weight": torch.full((48,), torch.nan)}):
            with pytest.raises(UserError, match="do not fit"):
                engine.update_weights(WeightUpdate("tensor", tensors=(save({**new, **broken}),)))
        with pytest.raises(UserError, match="no such directory"):
            engine.update_weights(WeightUpdate("disk", path="/no/where"))
        assert engine.checksum() == found["sums"]
        engine.update_weights(WeightUpdate("tensor", tensors=(save(new),), weight_version="1"))
        found["other weights"] = answers(engine, prompts())
        engine.update_weights(WeightUpdate("disk", path=checkpoints[0]))
        found["back"] = answers(engine, prompts())
        engine.release_memory(("weights", "kv_cache"))
        assert engine.resting is not None
        for _ in ("weights", "pages"):  # which the follower has no room for at first
            with pytest.raises(UserError, match=r"out of memory.*resume again"):
                engine.resume_memory(("weights", "kv_cache"))
            assert "kv_cache, weights is released" in (engine.resting or "")
            assert not any(p.numel() for p in leader.model.parameters())
            assert engine.cache.hidden.untyped_storage().nbytes() == 0
        engine.resume_memory(("weights", "kv_cache"))
        assert "weights have not come" in (engine.resting or "")
        engine.update_weights(WeightUpdate("disk", path=checkpoints[0]))
        found["resumed"] = answers(engine, prompts())
        pages = leader.page_bytes(engine.cache)
        page = torch.empty(pages.size, dtype=torch.uint8)
        pages.read(0, page)
        pages.write(WAYS["drafts"].pages - 1, page)  # as one that another worker has read
        engine.close()
        return found

    return _lead(world, checkpoints[0], lead)


def test_two_ranks_with_half_of_the_heads_each(checkpoints: list[str], expected: dict[str, Any]) -> None:
    (found, pages, held), (_, their_pages, their_held) = run_ranks(2, "tp=2", _tensor_parallel, checkpoints)
    for name in WAYS:
        same(found[name], expected[name])
        same(found[f"{name}, warm"], expected[f"{name}, warm"])
        assert found[f"{name}, of the engine"] == expected[f"{name}, of the engine"]
    assert expected["preempted, of the engine"] == (True, True)  # the ways do what their names say
    assert found["sums"] == expected["sums"]
    same(found["other weights"], expected["other weights"])
    for again in ("back", "resumed"):
        same(found[again], expected["drafts"])
    for mine, theirs in zip(pages, their_pages, strict=True):
        assert torch.equal(mine, theirs)  # both ranks computed the same latent rows, keys and states, to the bit
    *pools, ends = their_pages
    assert all(torch.equal(pool[:, :64], pool[:, -64:]) for pool in pools)
    assert all(pool[:, :64].any() for pool in pools)
    assert torch.equal(ends[0], ends[-1])
    whole = sum(p.numel() for p in agreeable(0).parameters())
    assert held == their_held < 0.65 * whole


SENDER = """
import sys, torch
from glm5.model.generate import generate
from glm5.model.weights import disk_tensors, load_model
from glm5.serve.client import WeightGroup
from glm5.serve.weights import Joined

torch.set_num_threads(1)
group = Joined(WeightGroup("127.0.0.1", int(sys.argv[1]), 0, 2, "trainer", "gloo"))
for name, tensor in disk_tensors(load_model(sys.argv[2])):
    group.broadcast(tensor.contiguous())
"""


def _trained(world: World, checkpoints: list[str]) -> Any:
    def lead(leader: Leader) -> Told:
        engine = Engine(leader.model, WAYS["drafts"], ranks=leader)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        sender = subprocess.Popen([sys.executable, "-c", SENDER, str(port), checkpoints[1]], env=environment)
        try:
            engine.join_group(WeightGroup("127.0.0.1", port, 1, 2, "trainer", "gloo"))
            sent = dict(disk_tensors(load_model(checkpoints[1])))
            dtypes = tuple(str(t.dtype) for t in sent.values())
            shapes = tuple(tuple(t.shape) for t in sent.values())
            update = dict(names=tuple(sent), dtypes=dtypes, shapes=shapes, group_name="trainer")
            engine.update_weights(WeightUpdate("distributed", **update))
            engine.leave_group("trainer")
        finally:
            assert sender.wait(60) == 0
        return answers(engine, prompts())

    return _lead(world, checkpoints[0], lead)


def test_a_trainer_sends_weights_to_two_ranks(checkpoints: list[str], expected: dict[str, Any]) -> None:
    (found, *_), _ = run_ranks(2, "tp=2", _trained, checkpoints)
    same(found, expected["other weights"])


# --------------------------------------------------------------------------- data and expert parallel
def _data_parallel(world: World, checkpoints: list[str]) -> Any:
    mine = slice(world.place("dp"), None, 2)

    def lead(leader: Leader) -> dict[str, Any]:
        found = all_ways(lambda config: Engine(leader.model, config, ranks=leader), mine)
        engine = Engine(leader.model, WAYS["drafts"], ranks=leader)
        if world.place("dp") == 0:  # while the other one has nothing to do
            found["alone"] = answers(engine, prompts())
        # Not all ask for the same weights: nobody gets them.
        lockstep.TOGETHER_SECONDS = 0.5
        with pytest.raises(UserError, match="were not asked for the same"):
            engine.update_weights(WeightUpdate("disk", path=checkpoints[world.place("dp")]))
        lockstep.TOGETHER_SECONDS = 60.0
        found["sums"] = engine.checksum()
        engine.update_weights(WeightUpdate("disk", path=checkpoints[1]))
        found["other weights"] = answers(engine, prompts()[mine])
        # One has no room for its pages: the other, too, takes nothing, neither its own pages nor weights.
        engine.release_memory(("weights", "kv_cache"))
        if world.place("dp"):
            _once_without_room(PagedCache)
        lockstep.TOGETHER_SECONDS = 0.5
        with pytest.raises(UserError, match="out of memory" if world.place("dp") else "were not asked for the same"):
            engine.resume_memory(("weights", "kv_cache"))
        lockstep.TOGETHER_SECONDS = 60.0
        assert engine.cache.hidden.untyped_storage().nbytes() == 0
        assert not any(p.numel() for p in leader.model.parameters())
        leader.together("both have failed", lambda: None)
        assert engine.resume_memory(("weights", "kv_cache")) == ("kv_cache", "weights")
        engine.update_weights(WeightUpdate("disk", path=checkpoints[0]))
        found["resumed"] = answers(engine, prompts()[mine])
        engine.close()
        return found

    return _lead(world, checkpoints[0], lead)


def test_two_ranks_with_half_of_the_experts_each(checkpoints: list[str], expected: dict[str, Any]) -> None:
    results = run_ranks(2, "dp=2,ep=2", _data_parallel, checkpoints)
    for place, (found, _, held) in enumerate(results):
        mine = slice(place, None, 2)
        for name in WAYS:
            same(found[name], expected[name][mine])
            same(found[f"{name}, warm"], expected[f"{name}, warm"][mine])
        assert found["sums"] == expected["sums"]
        same(found["other weights"], expected["other weights"][mine])
        same(found["resumed"], expected["drafts"][mine])
        parameters = list(agreeable(0).named_parameters())
        experts = sum(p.numel() for name, p in parameters if ".experts." in name)
        assert held == sum(p.numel() for _, p in parameters) - experts // 2
    same(results[0][0]["alone"], expected["drafts"])


def _four(world: World, checkpoints: list[str]) -> Any:
    mine = slice(world.place("dp"), None, 2)

    def lead(leader: Leader) -> Any:
        engine = Engine(leader.model, WAYS["drafts"], ranks=leader)
        first = answers(engine, prompts()[mine])
        new = save(dict(disk_tensors(load_model(checkpoints[1]))))
        engine.update_weights(WeightUpdate("tensor", tensors=(new,)))
        found = first, engine.checksum(), answers(engine, prompts()[mine])
        engine.close()
        return found

    return _lead(world, checkpoints[0], lead)


def test_heads_and_experts_over_four_ranks(checkpoints: list[str], expected: dict[str, Any]) -> None:
    results = [found for found, _, _ in run_ranks(4, "dp=2,tp=2,ep=2", _four, checkpoints) if found is not None]
    sums = Engine(load_model(checkpoints[1]), ROOMY).checksum()
    assert len(results) == 2
    for place, (first, found_sums, second) in enumerate(results):
        same(first, expected["drafts"][place::2])
        assert found_sums == sums
        same(second, expected["other weights"][place::2])


# --------------------------------------------------------------------------- context parallel
def _context_parallel(world: World, checkpoints: list[str]) -> Any:
    """Calls of at least 8 rows a rank are shared out."""
    ranks.SPLIT_FROM = 8
    shared = [0]
    gather = SplitBatch.gather

    def counted(batch: SplitBatch, x: torch.Tensor) -> torch.Tensor:
        shared[0] += 1
        return gather(batch, x)

    SplitBatch.gather = counted  # type: ignore[method-assign]

    def lead(leader: Leader) -> dict[str, Any]:
        if world.mesh.tp > 1:
            return {"chunks": answers(Engine(leader.model, WAYS["chunks"], ranks=leader), prompts())}
        found = all_ways(lambda config: Engine(leader.model, config, ranks=leader))
        engine = Engine(leader.model, replace(ROOMY, context=1024, drafts=1), ranks=leader)
        long = [id % 300 + 6 for id in range(1000)]
        for name in ("long", "long again"):
            request = Request(long, GREEDY)
            engine.add(request)
            told = Folded()
            while engine.has_work:
                for delta in engine.step():
                    told.add(delta)
            found[name] = (told.ids, told.logprobs), told.cached_tokens
        new = save(dict(disk_tensors(load_model(checkpoints[1]))))
        engine.update_weights(WeightUpdate("tensor", tensors=(new,)))
        found["sums"] = engine.checksum()
        found["other weights"] = answers(Engine(leader.model, WAYS["drafts"], ranks=leader), prompts())
        return found

    found, pages, _ = _lead(world, checkpoints[0], lead)
    return found, pages, shared[0]


def test_two_ranks_with_half_of_a_prompt_each(checkpoints: list[str], expected: dict[str, Any]) -> None:
    (found, pages, shared), (_, their_pages, theirs) = run_ranks(2, "cp=2", _context_parallel, checkpoints)
    assert shared == theirs > 0
    for name in WAYS:
        same(found[name], expected[name])
        same(found[f"{name}, warm"], expected[f"{name}, warm"])
        assert found[f"{name}, of the engine"] == expected[f"{name}, of the engine"]
    (cold, cached), (again, cached_again) = found["long"], found["long again"]
    same([again], [cold])
    assert (cached, cached_again) == (0, 960)
    model = load_model(checkpoints[0])
    assert cold[0] == list(generate(model, [id % 300 + 6 for id in range(1000)], max_new_tokens=10, stop_ids=()))
    assert found["sums"] == Engine(load_model(checkpoints[1]), ROOMY).checksum()
    same(found["other weights"], expected["other weights"])
    for mine, other in zip(pages, their_pages, strict=True):
        assert torch.equal(mine, other)
    ends = pages[-1]  # the trunk's states at pages' ends, of which prompts have seven
    assert int(ends.any(-1).sum()) >= 7


def test_halves_of_prompts_and_of_heads_over_four_ranks(checkpoints: list[str], expected: dict[str, Any]) -> None:
    results = run_ranks(4, "cp=2,tp=2", _context_parallel, checkpoints)
    (found, pages, shared), *others = results
    assert shared > 0
    same(found["chunks"], expected["chunks"])
    for _, their_pages, _ in others:
        assert all(map(torch.equal, pages, their_pages))


# --------------------------------------------------------------------------- the invariant mode
def _as_on_gpus() -> None:
    """With the plain call in place of a recording."""
    for module in (executor, rank_graphs):
        module.recorder_for = lambda device: lambda run: run  # type: ignore[attr-defined]


def _invariant(world: World, checkpoint: str) -> Any:
    """Answers to the same prompts alone, together in chunks, and together from recorded steps: of every leader, while
    the others read those of other prompts."""
    _as_on_gpus()
    share = Share(world, tiny_config(), ordered=True)
    member = Member(load_model(checkpoint, share=share), share)
    if not member.leads:
        member.follow()
        return None
    leader = Leader(member)
    config = replace(ROOMY, invariant=True)
    some = prompts()[1:5]
    if world.place("dp"):
        some = some[::-1][:3]
    alone = [answers(Engine(leader.model, config, ranks=leader), [ids])[0] for ids in some]
    together = answers(Engine(leader.model, replace(WAYS["chunks"], invariant=True), ranks=leader), some)
    few = replace(config, drafts=1, max_running=8, cuda_graphs=True)  # rows that the CPU's operators take at once
    engine = Engine(leader.model, few, ranks=leader)
    leader.together("recorded steps now", lambda: None)
    recorded = answers(engine, some)
    steps = engine.info()["recorded_steps"]
    leader.close()
    return some, alone, together, recorded, steps


@pytest.mark.skipif(not available()[0], reason="needs a C++ compiler")
@pytest.mark.parametrize(("size", "mesh"), [(4, "tp=4"), (2, "dp=2,ep=2"), (4, "dp=2,tp=2,ep=2")])
def test_no_bit_depends_on_the_batch_over_ranks(
    size: int, mesh: str, checkpoints: list[str], expected: dict[str, Any]
) -> None:
    results = [found for found in run_ranks(size, mesh, _invariant, checkpoints[0]) if found is not None]
    assert len(results) == Mesh.parse(mesh).dp
    bits: dict[tuple[int, ...], Any] = {}  # the same prompt's, by whichever engine
    for some, alone, together, recorded, _ in results:
        same(alone, [expected["plain"][prompts().index(ids)] for ids in some])
        assert together == alone
        assert recorded == alone
        for ids, told in zip(some, alone, strict=True):
            assert bits.setdefault(tuple(ids), told) == told
    assert max(steps for *_, steps in results) > 3  # beside another's plain calls there are none


# --------------------------------------------------------------------------- recorded steps
def _recorded(world: World, checkpoints: list[str]) -> Any:
    """Every rank's steps."""
    _as_on_gpus()
    renewed, renew = [0], rank_graphs.Recordings.renew

    def counted(recordings: rank_graphs.Recordings) -> None:
        renewed[0] += 1
        renew(recordings)

    rank_graphs.Recordings.renew = counted  # type: ignore[method-assign]
    some = slice(world.place("dp"), None, world.mesh.dp)

    def lead(leader: Leader) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name in ("plain", "drafts", "preempted"):
            engine = Engine(leader.model, replace(WAYS[name], cuda_graphs=True), ranks=leader)
            engine.warm()
            assert engine.info()["pages"] == WAYS[name].pages  # the spare one is not given out
            found[name] = answers(engine, prompts()[some], crowd=name == "preempted")
            found[f"{name}, recorded"] = engine.info()["recorded_steps"]
            drafter = engine.executor.drafter
            found[f"{name}, drafts"] = [g.replayed if g is not None else 0 for g in drafter.recorded] if drafter else []
        engine.release_memory(("kv_cache", "cuda_graph"))
        engine.resume_memory(("kv_cache", "cuda_graph"))
        found["resumed"] = answers(engine, prompts()[some])
        # One loses its recordings, while another one's steps replay them; then all record anew.
        leader.together("one of them", lambda: None)
        before = renewed[0]
        if world.place("dp"):
            engine.release_memory(("kv_cache", "cuda_graph"))
            engine.resume_memory(("kv_cache", "cuda_graph"))
        found["beside"] = answers(engine, prompts()[some])
        leader.together("all of them", lambda: None)
        found["renewed"] = renewed[0] > before
        engine.close()
        return found

    found, pages, _ = _lead(world, checkpoints[0], lead)
    return found, pages


@pytest.mark.parametrize("mesh", ["tp=2", "cp=2", "dp=2,ep=2"])
def test_recorded_steps_on_every_rank(mesh: str, checkpoints: list[str], expected: dict[str, Any]) -> None:
    results = run_ranks(2, mesh, _recorded, checkpoints)
    for place, (found, _) in enumerate(results):
        if found is None:
            continue
        mine = slice(place, None, 2) if "dp" in mesh else slice(None)
        for name in ("plain", "drafts", "preempted"):
            same(found[name], expected[name][mine])
            assert found[f"{name}, recorded"] > 3
            assert all(steps > 3 for steps in found[f"{name}, drafts"])
        for again in ("resumed", "beside"):
            same(found[again], expected["preempted"][mine])
        assert found["renewed"] == ("ep" in mesh)
    if "dp" not in mesh:
        assert all(map(torch.equal, results[0][1], results[1][1]))  # the same pages on both, the spare one included


def _unrecorded(world: World, checkpoint: str) -> Any:
    """One rank's recorder fails, at its second shape."""
    _as_on_gpus()
    asked = [0]

    def fails(run: Any) -> Any:
        asked[0] += 1
        if asked[0] > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run

    if world.rank == 1:
        rank_graphs.recorder_for = lambda device: fails  # type: ignore[attr-defined]
    some = slice(world.place("dp"), None, world.mesh.dp)

    def lead(leader: Leader) -> Any:
        engine = Engine(leader.model, replace(ROOMY, cuda_graphs=True), ranks=leader)
        engine.warm()
        found = answers(engine, prompts()[some]), engine.info()["recorded_steps"]
        engine.close()
        return found

    return _lead(world, checkpoint, lead)[0]


@pytest.mark.parametrize("mesh", ["tp=2", "dp=2,ep=2"])
def test_where_one_rank_cannot_record_all_run_plainly(
    mesh: str, checkpoints: list[str], expected: dict[str, Any]
) -> None:
    results = run_ranks(2, mesh, _unrecorded, checkpoints[0])
    for place, found in enumerate(results):
        if found is not None:
            same(found[0], expected["plain"][slice(place, None, 2) if "dp" in mesh else slice(None)])
            assert found[1] == 0


def _breaks_off(world: World, checkpoint: str) -> None:
    """One rank fails in the middle of the step that is to be recorded, while the other waits for its sums."""
    _as_on_gpus()
    ranks.RECORD_SECONDS = 1.0

    def record(run: Any) -> Any:
        if world.rank == 1:
            raise RuntimeError("a kernel cannot be compiled here")
        run()
        return run

    rank_graphs.recorder_for = lambda device: record  # type: ignore[attr-defined]
    share = Share(world, tiny_config())
    member = Member(load_model(checkpoint, share=share), share)
    try:
        if not member.leads:
            member.follow()
        Engine(member.model, replace(ROOMY, cuda_graphs=True), ranks=Leader(member)).warm()
    except RuntimeError:
        os._exit(3)
    except RankLost:
        os._exit(4)


def test_a_rank_that_fails_while_another_records_ends_both(checkpoints: list[str]) -> None:
    assert exit_codes(2, "tp=2", _breaks_off, checkpoints[0], timeout=100) == [4, 3]


# --------------------------------------------------------------------------- a worker of several ranks
def _fetches(world: World, checkpoint: str, home: str) -> Any:
    """The leader's process has a prefill worker of its own model, the front, and the decode worker on both ranks."""

    def lead(leader: Leader) -> Any:
        found: list[Any] = []

        async def test() -> None:
            sides = dict(models={1: leader.model}, ranks={1: leader})
            config = replace(ROOMY, drafts=2, context=300)
            async with cluster(load_model(checkpoint), Path(home), config=config, **sides) as workers:
                answers = await workers.all([Request(ids, GREEDY) for ids in prompts()])
                found.extend((one.ids, one.logprobs) for one in answers)
                await workers.until_clean()

        play(test)
        return found

    filled, fill = [0], Member.fill

    def counted(member: Member, page: int, sent: torch.Tensor | None = None) -> None:
        filled[0] += 1
        fill(member, page, sent)

    Member.fill = counted  # type: ignore[method-assign]
    found, pages, _ = _lead(world, checkpoint, lead)
    return found, pages, filled[0]


def test_two_ranks_decode_what_another_worker_has_read(
    checkpoints: list[str], expected: dict[str, Any], tmp_path: Path
) -> None:
    (found, pages, filled), (_, their_pages, theirs) = run_ranks(2, "tp=2", _fetches, checkpoints[0], str(tmp_path))
    same(found, expected["drafts"])
    assert filled == theirs > 0
    assert all(map(torch.equal, pages, their_pages))


# --------------------------------------------------------------------------- a rank dies
def _dies(world: World, checkpoint: str, who: int) -> None:
    share = Share(world, tiny_config())
    member = Member(load_model(checkpoint, share=share), share)
    if member.leads:
        lost: list[str] = []
        leader = Leader(member, lost.append)
        engine = Engine(leader.model, ROOMY, ranks=leader)
        began = time.monotonic()
        try:
            while time.monotonic() < began + 30:
                answers(engine, prompts()[:2])
                if world.rank == who:
                    os._exit(9)
        except RankLost as error:
            while not lost and time.monotonic() < began + 40:  # told in another thread
                time.sleep(0.01)
            os._exit(3 if lost and "Start the server again" in str(error) and len(lost) == 1 else 4)
        os._exit(5)
    try:
        if world.rank == who:
            member.hear()
            os._exit(9)
        member.follow()
    except RuntimeError:
        os._exit(3)


@pytest.mark.parametrize(("mesh", "who"), [("tp=2", 0), ("tp=2", 1), ("dp=2,ep=2", 1)])
def test_when_a_rank_dies_the_other_ends_with_an_error(checkpoints: list[str], mesh: str, who: int) -> None:
    codes = exit_codes(2, mesh, _dies, checkpoints[0], who, timeout=60)
    assert codes[who] == 9
    assert codes[1 - who] == 3


def test_memory_that_others_do_not_release_is_kept() -> None:
    """Another engine has refused, so that this one's call was not made: its weights are there, and it can go on."""

    class Alone:
        model, member = GLM5(tiny_config()), None

        def do(self, name: str, **_: Any) -> None:
            raise UserError("the other ranks were not asked for the same", "Ask all of them")

    weights = LedWeights(Alone())  # type: ignore[arg-type]
    with pytest.raises(UserError, match="not asked for the same"):
        weights.release()
    assert not weights.missing
    assert not weights.released


def test_meshes_that_do_not_fit() -> None:
    for text, what in (
        ("tp=3", "num_attention_heads"),
        ("tp=8", "num_attention_heads"),
        ("dp=3,ep=3", "n_routed_experts"),
        ("pp=2", "training only"),
        ("shard=2,dp=2", "training only"),
        ("cp=2,ep=2", "without ep"),
    ):
        with pytest.raises(ConfigError, match=what):
            check(Mesh.parse(text), tiny_config())
    with pytest.raises(ConfigError, match="moe_intermediate_size"):
        check(Mesh.parse("tp=4"), tiny_config(moe_intermediate_size=38, n_shared_experts=2))
