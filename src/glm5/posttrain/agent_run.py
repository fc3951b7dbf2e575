"""`glm5 rl agent` as a function: engines, gateway, orchestrator, task services and learner, on one machine or several.

    learner (this thread) <- RUN/trajectories.sqlite <- orchestrator <- task services, here or elsewhere
         \\-> weights -> engines, here or elsewhere <- gateway <- agents

All but the learner run in one event loop (`engines`) and in the engine's own thread. Nothing waits for anything else
but for room: the orchestrator never has more samples open than the learner takes within its bound of staleness. A run
that was killed goes on when the same command is given again; rollouts that were under way are run anew. With
`intake.max_staleness=0` it is the synchronous loop, in which each batch waits for its slowest rollout. With `mesh` the
learner is several processes, of which the first has all the rest as well. Source: report, sections 3.3, 3.6 and 4.1.
Read next: `agent`, `engines`, `glm5.posttrain.rollout.orchestrator`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import httpx
import torch

from glm5.agents.loading import load_tasks
from glm5.agents.protocol import KEY, require_key
from glm5.agents.service import TaskService
from glm5.model.config import ModelConfig
from glm5.model.glm5 import GLM5
from glm5.model.weights import load_model
from glm5.parallel.mesh import Mesh
from glm5.posttrain.agent import LEDGER, AgentLearner, IntakeConfig
from glm5.posttrain.cluster import Cluster, ClusterConfig
from glm5.posttrain.engines import Engines, InFlight
from glm5.posttrain.learner import LearnConfig
from glm5.posttrain.losses import LossConfig, glm5_agentic
from glm5.posttrain.reason import HELD_OUT_SEED, Measure, begin, model_config
from glm5.posttrain.rollout import held_out
from glm5.posttrain.rollout.desk import create_desk
from glm5.posttrain.rollout.options import RolloutOptions
from glm5.posttrain.rollout.orchestrator import Orchestrator
from glm5.posttrain.rollout.sessions import Sessions
from glm5.posttrain.spread import Spread
from glm5.posttrain.store import Store
from glm5.serve.config import EngineConfig
from glm5.serve.weights import JOIN_TIMEOUT
from glm5.text.tokenizer import Tokenizer, load_tokenizer
from glm5.train.prepare import Say
from glm5.train.ranks import Ranks
from glm5.train.together import MESH_MAY_DIFFER, ProcessConfig, check_weights, claimed, together
from glm5.utils.devices import resolve_device
from glm5.utils.ending import END_S, ended
from glm5.utils.errors import ConfigError, UserError
from glm5.utils.files import write_json
from glm5.utils.http import client

GREEDY = 1e-4  # a temperature at which the likeliest id is drawn; sessions have none of 0
# Beside what any run may change later: where and how fast things are done, and how patiently.
ALSO_MAY_DIFFER = {
    *(
        "desk",
        "engines",
        "weights_by",
        "cluster",
        "pages",
        "host_pages",
        "max_running",
        "max_batched_tokens",
        "chunk",
        "overlap",
    ),
    *("concurrency", "max_open", "lead", "retries", "losses", "grace_s", "beat_s", "silent_s", "patience_s", "look_s"),
    *("cuda_graphs", "eval_rollouts", "patience", *(of.name for of in fields(ClusterConfig)), *MESH_MAY_DIFFER),
}
FIRST_S = 60.0  # a task must be there after so long, or held-out figures would be of none


@dataclass(frozen=True)
class Sampling:
    """Of every session, whatever its agent asks for."""

    temperature: float = 1.0
    """Of the draws; the trainer repeats it."""
    top_p: float = 1.0
    """Draw from the likeliest ids of so much probability together; the trainer repeats the sets."""
    top_k: int = 0
    """Draw from so many of the likeliest ids; 0 is all."""

    def __post_init__(self) -> None:
        if not 0 < self.temperature <= 100:
            raise ConfigError("temperature", self.temperature, "must be above 0: greedy answers teach nothing")


@dataclass(frozen=True)
class AgentConfig(ProcessConfig):
    """Asynchronous reinforcement learning of agents. The mesh is the learner's: its first process has all the rest,
    too, with `engine` on its device."""

    checkpoint: str = ""
    """The model to begin with: a directory in the public layout, with its tokenizer."""
    run: str = "runs/agent"
    """Directory of the run. An interrupted run goes on when the same command is given again."""
    tasks: tuple[str, ...] = ()
    """Task services to run: FILE.py:Class or module:Class, of `glm5.agents.service.TaskService`; in this process, or
    with `cluster` on its nodes."""
    desk: str = ""
    """HOST:PORT where task services elsewhere register; without it only `tasks` are there. The gateway listens at HOST,
    too. If that is not this machine's alone, the key in GLM5_API_KEY is asked of services, and shown to them."""
    engines: tuple[str, ...] = ()
    """Addresses of engines (`glm5 serve`), which must see the run's directory; without any, one runs in this
    process. Their key is read from GLM5_ENGINE_KEY."""
    weights_by: Literal["files", "gloo", "nccl"] = "files"
    """How weights reach engines behind HTTP: files in the run's directory, which they must see, or a broadcast over a
    process group of this kind; nccl where learner and engines have GPUs."""
    engine: EngineConfig = field(default_factory=lambda: EngineConfig(overlap=False))
    """Of the engine in this process, or of each that `cluster` places."""
    engine_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the engines' weights and caches; those of `engines` must be served so (`glm5 serve --dtype`). The trainer's
    are float32; bfloat16 is faster on a GPU, and takes the two apart by its rounding, which the loss sees."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    """Where engines and tasks run; by default in this process."""
    in_flight: InFlight = "renew"
    """What a push does to answers under way: renew reads what they have so far anew, under the new weights, so that
    each token is drawn from exactly the weights that it names; keep goes on with the old cache."""
    sampling: Sampling = field(default_factory=Sampling)
    rollout: RolloutOptions = field(default_factory=RolloutOptions)
    """Its max_staleness and samples_per_version follow from `intake` and `learn`."""
    intake: IntakeConfig = field(default_factory=IntakeConfig)
    learn: LearnConfig = field(default_factory=LearnConfig)
    loss: LossConfig = field(default_factory=glm5_agentic)
    eval_every: int = 0
    """Steps between measurements of held-out prompts of every task, which are also measured before and after."""
    eval_rollouts: int = 0
    """Held-out prompts of each task, with greedy answers; 0 measures none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        mesh = Mesh.parse(self.mesh)
        if (mesh.pp, mesh.cp, mesh.tp) != (1, 1, 1):
            raise ConfigError("mesh", self.mesh, "may have dp, and ep and shard, which fold on it")
        for name in ("eval_every", "eval_rollouts"):
            if getattr(self, name) < 0:
                raise ConfigError(name, getattr(self, name), "must be at least 0")
        if self.desk and not self.desk.rpartition(":")[2].isdecimal():
            raise ConfigError("desk", self.desk, "must be HOST:PORT")
        if self.desk.startswith(("0.0.0.0:", "[::]:")):
            raise ConfigError("desk", self.desk, "must name the address under which services reach this machine")
        if self.cluster.kind and self.engines:
            raise ConfigError("engines", self.engines, "must be empty where cluster places engines")
        if self.loss.kl_weight:
            raise ConfigError("loss.kl_weight", self.loss.kl_weight, "must be 0: agents learn without a reference")


@dataclass(frozen=True)
class Learned:
    """What came of it. held_out: success by task "before" and "after". states: samples by what became of them."""

    run: Path
    model: Path
    steps: int
    held_out: dict[str, dict[str, float]]
    states: dict[str, int]


def resolve(config: AgentConfig) -> tuple[AgentConfig, ModelConfig]:
    """The configuration with all that follows from it, and the model's own.

    Raises:
        UserError: the checkpoint cannot be used, there is no task, fields contradict each other, or other machines
            could reach the desk without a key.
    """
    model = model_config(config.checkpoint, "glm5 rl agent")
    if not config.tasks and not config.desk:
        raise ConfigError("tasks", (), "must name a task service, or desk an address where some will register")
    if not config.cluster.kind:  # a cluster has a key of its own
        require_key(os.environ.get(KEY), _here(config, None)[0])
    if config.rollout.group < 2:
        raise ConfigError(
            "rollout.group", config.rollout.group, "must be at least 2: a lone rollout is no better than another"
        )
    taken = config.learn.updates * config.intake.groups * config.rollout.group
    follows = {"max_staleness": config.intake.max_staleness, "samples_per_version": taken}
    for name, value in follows.items():
        given = getattr(config.rollout, name)
        if given not in (getattr(RolloutOptions(), name), value):
            raise ConfigError(f"rollout.{name}", given, f"follows from intake and learn, and is {value}")
    rollout = replace(config.rollout, seed=config.learn.seed, **follows)
    return replace(config, rollout=rollout, device=resolve_device(config.device)), model


class Field:
    """`agent.Drawers`: engines, gateway and orchestrator of a run. Use it in a `with` block.

    Args:
        engines: not yet entered. services: to be hosted in this process. cluster: where the tasks run otherwise.
    """

    def __init__(
        self,
        config: AgentConfig,
        engines: Engines,
        store: Store,
        services: Sequence[TaskService],
        cluster: Cluster | None = None,
    ) -> None:
        self.config, self.engines, self.store, self.services = config, engines, store, services
        self.cluster = cluster
        sampling = config.sampling
        self._sampling = {k: v for k, v in vars(sampling).items() if v != getattr(_PLAIN, k) or k == "temperature"}
        self._orchestrator: Orchestrator | None = None
        self._running: asyncio.Task[None] | None = None

    def __enter__(self) -> Field:
        of = self.engines
        if self.cluster is not None:
            self.cluster.attach(lambda name, url: of.spawn(of.moved(name, url)))
        of.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self.cluster is not None:
            self.cluster.attach(None)
        try:
            self.engines.end(self._end(), "the orchestrator")
        finally:
            self.engines.__exit__(*error)

    # ------------------------------------------------------------------ of the learner
    def push(self, model: GLM5, version: int) -> None:
        self.engines.push(model, version)

    def begin(self) -> None:
        self.engines.call(self._begin())

    def check(self) -> None:
        if self._running is not None and self._running.done():
            self._running.result()
            raise UserError("the orchestrator has ended", "Look at what it says")
        self.engines.check()
        if self.cluster is not None:
            self.cluster.check()

    def figures(self) -> dict[str, Any]:
        return {**self.engines.figures(), "rollouts": self.engines.call(self._snapshot())}

    # ------------------------------------------------------------------ in the event loop
    async def _begin(self) -> None:
        self._http = _client()
        of = self._orchestrator = Orchestrator(
            self.store, self.engines.url, self.config.rollout, sampling=self._sampling, http=self._http,
            api_key=self.engines.key, key=self.engines.key,
        )  # fmt: skip
        self._running = asyncio.ensure_future(of.run())
        hosting = asyncio.ensure_future(self._host(of))
        await asyncio.wait({self._running, hosting}, return_when=asyncio.FIRST_COMPLETED)
        if not hosting.done():  # it waits for an orchestrator that has failed
            hosting.cancel()
            self._running.result()
        await hosting

    async def _host(self, of: Orchestrator) -> None:
        for service in self.services:
            await of.host(service)
        here, port = _here(self.config, self.cluster)
        if self.config.desk or self.cluster is not None:
            require_key(of.key, here)
            desk = await self.engines.serve(create_desk(of), here, port)
        if self.cluster is not None:
            await asyncio.to_thread(self.cluster.place_services, self.config.tasks, desk)

    async def _end(self) -> None:
        """The orchestrator lets go of what runs, without a word to the ledger."""
        if self._running is not None:
            await ended({self._running}, "the orchestrator", END_S)
            await self._http.aclose()

    async def _snapshot(self) -> dict[str, Any]:
        assert self._orchestrator is not None, "it has begun"
        return self._orchestrator.figures.snapshot(self._orchestrator, time.time())

    # ------------------------------------------------------------------ held-out prompts
    def success(self, count: int) -> dict[str, float]:
        """Mean reward of greedy answers to so many held-out prompts, by task. Rollouts of the run go on meanwhile."""
        return self.engines.call(self._success(count))

    async def _success(self, count: int) -> dict[str, float]:
        assert self._orchestrator is not None, "it has begun"
        tasks, room = self._orchestrator.services, self._orchestrator.room
        deadline = time.monotonic() + FIRST_S
        while not tasks.known and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        if self.config.desk or self.cluster is not None:  # others that are there say so within a beat
            await asyncio.sleep(self.config.rollout.beat_s)
        async with _client() as http:
            sampling = {**self._sampling, "temperature": GREEDY}
            sessions = Sessions(self.engines.url, http, sampling=sampling, api_key=self.engines.key)
            options = replace(self.config.rollout, seed=self.config.learn.seed + HELD_OUT_SEED)
            return await held_out.success(tasks, sessions, options, list(tasks.known), count, room)


_PLAIN = Sampling()


def _client() -> httpx.AsyncClient:
    return client(256, timeout=600)


def agent(
    config: AgentConfig,
    say: Say = print,
    *,
    services: Sequence[TaskService] = (),
    on_step: Callable[[AgentLearner], None] | None = None,
) -> Learned:
    """Learn, export and measure; goes on where an earlier start of the same run ended.

    Args:
        services: to be hosted beside those that `config.tasks` names. on_step: as `Learner.run` has it.

    Raises:
        UserError: see `resolve`, `load_tasks`, `Engines` and `Learner.run`.
    """
    if services and config.cluster.kind:
        raise ConfigError("cluster.kind", config.cluster.kind, "places services by name only: give them as tasks")
    load = () if config.cluster.kind else config.tasks
    if services and not config.tasks:
        config = replace(config, tasks=tuple(f"{type(s).__module__}:{type(s).__name__}" for s in services))
    config, shape = resolve(config)
    run = Path(config.run)
    with together(config, run, shape) as world, ExitStack() as held:
        ranks = Ranks(world)
        hosted = ranks.on_main(lambda: [*services, *load_tasks(load)]) or []
        held.enter_context(claimed(run, ".rl.lock", ranks))
        ranks.on_main(lambda: begin(run, config.checkpoint, config, ALSO_MAY_DIFFER))
        tokenizer = load_tokenizer(config.checkpoint)
        device = config.device if world is None else str(world.device)
        model = load_model(config.checkpoint, device=device, dtype="float32")
        check_weights(model, world)
        of = ranks.on_main(lambda: held.enter_context(_field(config, model, tokenizer, shape, hosted, say)))
        store = None
        if of is not None:
            store, of.engines.beat = of.store, ranks.beat  # rollouts that are measured, and pushes, may take long
        vocab = min(shape.vocab_size, tokenizer.vocab_size)
        digest = hashlib.sha256(json.dumps(sorted(config.tasks)).encode()).hexdigest()
        learner = AgentLearner(config.learn, config.intake, model, config.loss, run, digest, vocab, store, of, ranks)
        learner.tokenizer = tokenizer

        def success() -> dict[str, float]:
            return ranks.from_main(lambda: {} if of is None else of.success(config.eval_rollouts))

        measure = Measure(run / "held-out.json", success, learner)
        if config.eval_rollouts:
            learner.measure, learner.measure_every = measure, config.eval_every
        learner.run(
            resolved=config, title="agent", may_differ=ALSO_MAY_DIFFER,
            on_step=None if on_step is None else lambda of: on_step(learner),
        )  # fmt: skip
        path = learner.export(tokenizer)
        counted = ranks.from_main(lambda: {} if store is None else store.counts().by_status)
        states = {state: n for state, n in counted.items() if n}
        found = Learned(run, path, learner.finished_steps, measure.ends(), states)
        result = {"steps": found.steps, "held_out": found.held_out, "states": found.states}
        ranks.on_main(lambda: write_json(run / "result.json", result))
    return found


@contextmanager
def _field(
    config: AgentConfig,
    model: GLM5,
    tokenizer: Tokenizer,
    shape: ModelConfig,
    services: Sequence[TaskService],
    say: Say,
) -> Iterator[Field]:
    """All that the main rank has beside the learner."""
    named = [s.name for s in services] or config.tasks
    say(f"tasks     {', '.join(named) or 'those that register'}")
    with (
        Cluster(config.cluster) if config.cluster.kind else nullcontext() as cluster,
        Store(Path(config.run) / LEDGER) as store,
        Field(config, _engines(config, model, tokenizer, shape, cluster), store, services, cluster) as of,
    ):
        if cluster is not None:
            say(f"cluster   engines at {', '.join(one.url for one in cluster.engines.values())}")
        if config.desk:
            say(f"desk      task services register at http://{config.desk}")
        yield of


def _engines(
    config: AgentConfig, model: GLM5, tokenizer: Tokenizer, shape: ModelConfig, cluster: Cluster | None = None
) -> Engines:
    key = os.environ.get(KEY) or None if cluster is None else cluster.key
    dtype = getattr(torch, config.engine_dtype)
    about: dict[str, Any] = {
        "in_flight": config.in_flight,
        "host": _here(config, cluster)[0],
        "key": key,
        "dtype": dtype,
    }
    if not config.engines and cluster is None:
        return Engines.local(model, tokenizer, config.engine, **about)
    context = config.engine.context or shape.max_position_embeddings
    directory = Path(config.run).absolute() / "pushed" if config.weights_by == "files" else None
    if config.weights_by != "files":
        about["spread"] = Spread(about["host"], config.weights_by)
        about["patience_s"] = JOIN_TIMEOUT.total_seconds()  # who missed the group gets the weights alone
    if cluster is None:
        engine_key = os.environ.get("GLM5_ENGINE_KEY")
        return Engines.remote(config.engines, tokenizer, context, directory, api_key=engine_key, **about)
    placed = cluster.place_engines(config.checkpoint, config.engine, config.engine_dtype)
    about["patience_s"] = config.cluster.place_s + config.cluster.start_s
    return Engines.remote(placed, tokenizer, context, directory, api_key=key, **about)


def _here(config: AgentConfig, cluster: Cluster | None) -> tuple[str, int]:
    """The address of gateway and desk, and the desk's port."""
    host, _, port = config.desk.rpartition(":")
    return host or ("127.0.0.1" if cluster is None else cluster.host), int(port or 0)
