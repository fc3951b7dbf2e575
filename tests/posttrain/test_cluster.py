"""Agent runs over several nodes: engines and tasks where Ray has room for them, and what becomes of lost ones."""

from __future__ import annotations

import asyncio
import copy
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from glm5.model.weights import save_model
from glm5.posttrain.agent import LEDGER, AgentLearner, IntakeConfig
from glm5.posttrain.agent_run import ALSO_MAY_DIFFER, AgentConfig, Field, agent
from glm5.posttrain.cluster import Cluster, ClusterConfig, _options
from glm5.posttrain.engines import Engines
from glm5.posttrain.learner import LearnConfig
from glm5.posttrain.outcome import State
from glm5.posttrain.rollout.options import RolloutOptions
from glm5.posttrain.store import Store
from glm5.serve.client import Unavailable
from glm5.serve.config import EngineConfig
from glm5.serve.engine import Engine
from glm5.serve.gateway.remote import HttpEngine
from glm5.serve.http.app import create_app
from glm5.serve.runner import Runner
from glm5.train.schedule import LearningRate
from glm5.utils.config_io import to_dict
from glm5.utils.errors import ConfigError, UserError
from glm5.utils.runlog import refuse_changes
from support.scripted import chat_tokenizer
from support.serving import served
from support.tiny import tiny_model
from support.waiting import until

T = chat_tokenizer()
STEPS = 3
TASK = """
from glm5.agents.service import TaskService, judged


class Letters(TaskService):
    name = "letters"
    timeout_s = 300.0
    concurrency = 8

    async def rollout(self, asked, policy):
        history = [{"role": "user", "content": f"the answer {asked.index}"}]
        told = await policy.chat(history, max_tokens=8, thinking={"type": "disabled"})
        said = told["content"] or ""
        return judged(sum(ord(letter) for letter in said) % 8 / 8)
"""


# ---------------------------------------------------------------------------------------------------- without Ray
def test_what_a_lost_engine_was_asked_fails_at_once() -> None:
    async def main() -> None:
        asked = asyncio.Event()

        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(1)
            asked.set()
            await reader.read()
            writer.close()

        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        engine = HttpEngine(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", T, "policy", 64)
        call = asyncio.ensure_future(engine.checksum())
        await asked.wait()
        await engine.leave("its node died")
        with pytest.raises(Unavailable, match="its node died"):
            await asyncio.wait_for(call, 60)
        assert engine.failure == "its node died"
        await engine.move("http://127.0.0.1:9")
        assert (engine.failure, engine.weight_version, engine.url) == (None, "", "http://127.0.0.1:9")
        call = asyncio.ensure_future(engine.checksum())
        call.cancel()  # of whoever asks, it is a cancellation
        with pytest.raises(asyncio.CancelledError):
            await call
        await engine.stop()
        server.close()

    asyncio.run(main())


def test_an_engine_that_begins_anew_elsewhere_gets_the_current_weights(tmp_path: Path) -> None:
    first = tiny_model(0, vocab_size=T.vocab_size, eos_token_id=T.stop_ids)
    config = EngineConfig(pages=20, context=256)
    runners = [Runner(Engine(copy.deepcopy(first).eval(), config, T), T, "policy") for _ in range(2)]
    apps = [create_app(runner, start=runner.start, stop=runner.stop) for runner in runners]
    with (
        served(apps[0]) as one,
        served(apps[1]) as other,
        Engines.remote({"engine-0": one}, T, 256, tmp_path, beat_s=0.2, patience_s=120) as engines,
    ):
        engines.push(first, 1)
        engines.call(engines.moved("engine-0", None))
        assert not engines.call(engines.pool.probe(1))
        pushing = threading.Thread(target=engines.push, args=(first, 2), daemon=True)
        pushing.start()  # waits for an engine
        engines.call(engines.moved("engine-0", other))
        pushing.join(120)
        assert not pushing.is_alive()
        assert [runner.weight_version for runner in runners] == ["1", "2"]
        assert engines.figures()["engine/routable"] == 1


def test_ray_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match="needs ray") as told, Cluster(ClusterConfig("ray")):
        pass
    assert "glm5[cluster]" in told.value.mend


def test_fields_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="engines"):
        AgentConfig(cluster=ClusterConfig("ray"), engines=("http://a",))
    for changes in ({"engines": 0}, {"engine_gpus": -1}, {"place_s": 0}):
        with pytest.raises(ConfigError, match=next(iter(changes))):
            ClusterConfig("ray", **changes)


def test_a_resumed_run_may_lie_elsewhere_and_nothing_else_shares_these_names() -> None:
    config = AgentConfig()
    elsewhere = replace(config, cluster=ClusterConfig("ray", "head:6379", engines=3, engine_gpus=1))
    refuse_changes(to_dict(config), to_dict(elsewhere), ALSO_MAY_DIFFER)
    names = {f.name for f in fields(ClusterConfig)} - {"engines"}  # which is a place, too
    others = {name for name in leaves(to_dict(config)) if not name.startswith("cluster.")}
    assert not names & {name.rpartition(".")[2] for name in others}


def leaves(made: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in made.items():
        yield from leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else [prefix + name]


def test_an_engine_is_told_what_differs() -> None:
    told = _options(EngineConfig(pages=7, overlap=False, invariant=True, kv_cache_dtype="fp8_e4m3"))
    assert told == ["--pages", "7", "--kv-cache-dtype", "fp8_e4m3", "--no-overlap", "--invariant"]


# ---------------------------------------------------------------------------------------------------- with Ray
@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A cluster on this machine: one node with a core, one with two."""
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'glm5[cluster]'")
    from ray.cluster_utils import Cluster as Nodes

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # whether or not this machine's user has a token
    directory = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # paths of sockets have to be short
    # All that Ray writes goes there; the directory of its own must exist, and then no cluster of the user's is touched.
    monkeypatch.setenv("RAY_TMPDIR", directory)
    Path(directory, "ray").mkdir()
    nodes = Nodes()
    try:
        nodes.add_node(**about(1))
        nodes.engine_node = nodes.add_node(**about(2))
        nodes.wait_for_nodes(timeout=120)
        ray.init(address=nodes.address, log_to_driver=True)
        yield nodes
    finally:
        ray.shutdown()
        nodes.shutdown()
        until(lambda: not commands(directory), f"Ray left behind {commands(directory)}")
        shutil.rmtree(directory, ignore_errors=True)


def about(cpus: int) -> dict[str, Any]:
    return {"num_cpus": cpus, "num_gpus": 0, "object_store_memory": 80 << 20, "include_dashboard": False}


def commands(word: str) -> list[str]:
    """Of the processes that have a word in their command."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if word in line:
            found.append(line[:200])
    return found


@pytest.mark.slow
def test_a_run_over_two_nodes_of_which_one_dies(
    tmp_path: Path, two_nodes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, task = tmp_path / "base", tmp_path / "letters.py"
    save_model(tiny_model(0, vocab_size=T.vocab_size, eos_token_id=T.stop_ids), checkpoint, tokenizer=T)
    task.write_text(TASK)
    found: list[Cluster] = []
    begin = Field.__enter__

    def began(self: Field) -> Field:
        assert self.cluster is not None
        found.append(self.cluster)
        return begin(self)

    monkeypatch.setattr(Field, "__enter__", began)
    where: list[tuple[str, str]] = []

    def lose(learner: AgentLearner) -> None:
        (engine,), (service,) = found[0].engines.values(), found[0].services.values()
        where.append((engine.node, service.node))
        if learner.finished_steps == 1:
            two_nodes.remove_node(two_nodes.engine_node, allow_graceful=False)
            two_nodes.add_node(**about(2))

    given = AgentConfig(
        checkpoint=str(checkpoint),
        run=str(tmp_path / "run"),
        tasks=(f"{task}:Letters",),
        engine=EngineConfig(pages=60, context=256, overlap=False),
        cluster=ClusterConfig("ray", engine_cpus=2, place_s=120, start_s=240),
        rollout=RolloutOptions(group=4, concurrency=8, losses=30, look_s=0.05),
        intake=IntakeConfig(groups=2, max_staleness=4),
        learn=LearnConfig(steps=STEPS, lr=LearningRate(3e-3, 3e-3), row_tokens=128),
        device="cpu",
    )
    told = agent(given, print, on_step=lose)
    assert told.steps == STEPS
    assert all(engine != service for engine, service in where), "they did not fit on one node"
    assert len({engine for engine, _ in where}) == 2, "the engine lives on another node after its own died"
    assert len({service for _, service in where}) == 1
    with Store(tmp_path / "run" / LEDGER, read_only=True) as store:
        assert {s.step for s in store.samples(status=State.TRAINED)} == set(range(1, STEPS + 1))
        assert sum(store.counts().by_status.values()) == store.counts().started
    until(lambda: not commands(str(tmp_path)), f"left behind: {commands(str(tmp_path))}")

    # What no node has is named, in the time that was given.
    lacking = ClusterConfig("ray", engine_gpus=1, place_s=1)
    with pytest.raises(UserError, match=r"1 GPU, which no node has \(nodes: .*CPU, 0 GPU"), Cluster(lacking) as cluster:
        cluster.place_engines(str(checkpoint), EngineConfig())
