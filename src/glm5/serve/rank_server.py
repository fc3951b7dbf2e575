"""A server whose engine is spread over ranks: what each of the processes does that torchrun (or `glm5 serve`) started.

    rank 0             the HTTP server; and the leader of its `tp` group
    other leaders      engines that answer rank 0's front as decode workers do (`fleet`), one a `dp` rank
    followers          run what their leader says

As workers of a front elsewhere (`--join`), every leader's engine answers that one, or reads prompts for it.

With dp=1 the front is the engine's own runner; with more it spreads requests: to the engine with the least to do, among
equals the same one for prompts that begin alike. On SIGTERM rank 0 lets answers end, then the others go; they take no
notice of it themselves. When a rank is lost, its leader's process ends within seconds, and the launcher ends all. Read
next: `ranks`, `lockstep`; `glm5.cli.serve`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NoReturn

from glm5.model.config import ModelConfig
from glm5.model.weights import load_model
from glm5.parallel.inference import Share, check
from glm5.parallel.mesh import Mesh, World, open_world
from glm5.serve.client import Backend
from glm5.serve.config import EngineConfig
from glm5.serve.engine import Engine
from glm5.serve.fleet import Fleet
from glm5.serve.ranks import Leader, Member
from glm5.serve.remote import Hello, serve_backend
from glm5.serve.runner import Runner
from glm5.serve.wire import Wire, WireClosed, connect
from glm5.serve.worker import WorkerOptions, accept, obey
from glm5.text.tokenizer import load_tokenizer
from glm5.utils.errors import ConfigError, UserError

if TYPE_CHECKING:
    from glm5.serve.http.server import HttpOptions

log = logging.getLogger(__name__)
# How long the front waits for the others' engines, and they for the front.
START_SECONDS = 300.0


@dataclass(frozen=True)
class RankOptions:
    """What every process is told.

    Args:
        device: auto, cpu or cuda; of several GPUs each process takes its own.
        worker: of a front elsewhere, instead of a server; its name is completed by the rank.
    """

    checkpoint: str
    name: str
    mesh: Mesh
    device: str = "auto"
    dtype: str | None = None
    log_level: str = "info"
    engine: EngineConfig = field(default_factory=EngineConfig)
    worker: WorkerOptions | None = None


def check_options(options: RankOptions) -> None:
    """Whether the model can be served so, before any process starts.

    Raises:
        ConfigError: it cannot.
    """
    check(options.mesh, ModelConfig.load(options.checkpoint))
    if options.engine.invariant and options.mesh.cp > 1:
        raise ConfigError("mesh.cp", options.mesh.cp, "does not go with --invariant: leave one of them out")
    if options.device.startswith("cuda:"):
        raise ConfigError("device", options.device, "each process takes a GPU of its own: give cuda")


def run(options: RankOptions, http: HttpOptions) -> int:
    """Be this process's rank until the server, or the front elsewhere, ends; its exit status.

    Args:
        options: which `check_options` has seen.

    Raises:
        UserError: a process cannot start.
    """
    with open_world(options.mesh, options.device) as world, ExitStack() as stack:
        if not world.main and options.worker is None:
            for number in (signal.SIGTERM, signal.SIGINT):  # the first process says when it is over
                signal.signal(number, signal.SIG_IGN)
        front = _meet(world, stack) if options.worker is None else ("", "")
        config = ModelConfig.load(options.checkpoint)
        share = Share(world, config, ordered=options.engine.invariant)
        try:
            model = load_model(options.checkpoint, device=world.device, dtype=options.dtype, share=share)
        except UserError as error:
            if not world.main:  # maybe of this rank's host alone
                print(f"rank {world.rank}: {error}", file=sys.stderr, flush=True)
            raise
        world.gather_objects(True, "files")  # some read longer than others
        member = Member(model, share)
        if not member.leads:
            try:
                member.follow()
            except RuntimeError as error:
                log.info("rank %d ends: %s", world.rank, error)
                _leave(1)
            return 0
        tokenizer = load_tokenizer(options.checkpoint)
        leader = Leader(member, lambda what: _lost(world, what))
        engine = Engine(model, options.engine, tokenizer, ranks=leader)
        if options.worker is None or options.worker.role == "decode":
            engine.warm()
        runner = Runner(engine, tokenizer, options.name)
        one = _Leading(world, leader, engine, runner, front)
        if options.worker is not None:
            asyncio.run(one.join(options.worker))
        elif world.main:
            one.serve(options, http)
        else:
            asyncio.run(one.work())
        return 0


def _meet(world: World, stack: ExitStack) -> tuple[str, str]:
    """Where the front listens to the other leaders, and the key that all have; the same on every rank."""
    told = ("", "")
    if world.main and world.mesh.dp > 1:
        if int(os.environ.get("LOCAL_WORLD_SIZE", world.size)) == world.size:
            home = stack.enter_context(tempfile.TemporaryDirectory(prefix="glm5-"))  # of mode 700
            address = f"{home}/front"
        else:
            with socket.create_server(("", 0)) as free:
                address = f"{os.environ['MASTER_ADDR']}:{free.getsockname()[1]}"
        told = address, secrets.token_hex(32)
    address, key = world.gather_objects(told, "files")[0]
    return address, key


def _lost(world: World, what: str) -> None:
    """End this process: its answers get a moment to end as failed."""
    log.error("rank %d: %s", world.rank, what)  # the launcher says who was first
    time.sleep(1.0)
    _leave(1)


def _leave(status: int) -> NoReturn:
    """End the process at once: leaving the groups in order would wait for ranks that are gone."""
    sys.stderr.flush()
    os._exit(status)


class _Leading:
    """A leader's process, around its runner."""

    def __init__(self, world: World, leader: Leader, engine: Engine, runner: Runner, front: tuple[str, str]) -> None:
        self._world, self._leader, self._engine, self._runner = world, leader, engine, runner
        self._address, self._key = front
        self._server: asyncio.Server | None = None
        self._own: asyncio.Task[None] | None = None
        self._fleet: Fleet | None = None

    def serve(self, options: RankOptions, http: HttpOptions) -> None:
        """On rank 0: the HTTP server, until it is told to end."""
        from glm5.serve.http.app import create_app, serve

        backend: Backend = self._runner
        if options.mesh.dp > 1:
            backend = self._fleet = Fleet(self._runner.tokenizer, options.name)

        def ready(host: str, port: int) -> None:
            pages, of_each = self._engine.pool.device.count, self._engine.cache.nbytes_per_page()
            size = f"{pages} pages of 64 tokens, {pages * of_each / 2**20:,.0f} MiB, on each rank"
            print(f"{options.name}: mesh {options.mesh}, {size}", file=sys.stderr)
            print(f"listening on http://{host}:{port}", file=sys.stderr, flush=True)

        app = create_app(backend, http, start=self._start, stop=self._stop)
        serve(app, ready, options.log_level)

    async def work(self) -> None:
        """On another leader: obey the front until it is gone."""
        await self._runner.start()
        try:
            with suppress(WireClosed):
                await self._obey(await self._reach(self._address))
        finally:
            await self._end()

    async def join(self, worker: WorkerOptions) -> None:
        """As a worker: obey a front elsewhere until it is gone.

        Raises:
            UserError: it cannot be reached.
        """
        try:
            await obey(replace(worker, name=f"{worker.name}-{self._world.rank}"), self._engine, self._runner)
        except WireClosed as error:
            raise UserError(
                f"the front at {worker.front}: {error}", "Start it first, with --workers-at and this GLM5_WORKER_KEY"
            ) from None
        finally:
            self._engine.close()
            await asyncio.to_thread(self._leader.close)

    async def _reach(self, address: str) -> Wire:
        """The front, which may not listen yet."""
        end = time.monotonic() + START_SECONDS
        while True:
            try:
                return await connect(address, self._key.encode())
            except WireClosed:
                if time.monotonic() > end:
                    raise
                await asyncio.sleep(0.1)

    async def _obey(self, wire: Wire) -> None:
        pages, of_each = self._engine.pool.device.count, self._engine.cache.nbytes_per_page()
        name = f"dp-{self._world.place('dp')}"
        await wire.send(
            "hello", Hello("decode", name, "", self._engine.context, self._engine.vocab_size, pages, of_each)
        )
        await serve_backend(self._runner, wire)

    async def _start(self) -> None:
        """On rank 0: begin, and wait for the other engines."""
        await self._runner.start()
        if self._fleet is None:
            return
        local = "/" in self._address
        listened = self._address if local else f"0.0.0.0:{self._address.rpartition(':')[2]}"
        self._server = await accept(listened, self._key, self._fleet.join)
        self._own = asyncio.ensure_future(self._obey(await self._reach(self._address)))
        async with asyncio.timeout(START_SECONDS):
            while len(self._fleet.decode) < self._world.mesh.dp:
                await asyncio.sleep(0.02)

    async def _stop(self) -> None:
        """On rank 0: let everybody go."""
        if self._server is not None:
            self._server.close()
        if self._fleet is not None:
            for worker in self._fleet.decode:
                await worker.close()
        if self._own is not None:
            await self._own
        await self._end()

    async def _end(self) -> None:
        await self._runner.stop()
        self._engine.close()
        await asyncio.to_thread(self._leader.close)
