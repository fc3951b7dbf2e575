"""A worker process: an engine that obeys a front elsewhere, and whose pages other workers can fetch.

The front starts those of its own host itself (`Crew`) and tells them what to do on their standard input;
`glm5 serve CHECKPOINT --join HOST:PORT --role decode` starts one on another host, with `--mesh` over several ranks
(`rank_server`). A worker ends when its front does. Read next: `fleet`, `remote`, `transfer`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from glm5.serve.config import EngineConfig
from glm5.serve.fleet import Fleet
from glm5.serve.remote import Hello, Remote, serve_backend
from glm5.serve.wire import Wire, WireClosed, as_type, connect, host_and_port, is_path, listen
from glm5.utils.errors import UserError

if TYPE_CHECKING:
    from glm5.serve.engine import Engine
    from glm5.serve.runner import Runner

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerOptions:
    """What a worker needs to know.

    Args:
        front: the front's address, a path or host:port. name: unique among its workers; `role`: prefill or decode.
        pages_at: where its pages are fetched: a path; or empty, any port of the address at which it sees the front.
        pages_also_at: a host at which workers of other hosts can fetch them too.
        number: of several GPUs, which one it takes (modulo their count), unless `device` names one.
    """

    checkpoint: str
    role: str
    name: str
    front: str
    key: str
    pages_at: str = ""
    pages_also_at: str = ""
    device: str = "auto"
    dtype: str | None = None
    log_level: str = "info"
    number: int = 0
    engine: EngineConfig = field(default_factory=EngineConfig)


async def work(options: WorkerOptions) -> None:
    """Serve the front until it is gone.

    Raises:
        UserError: the checkpoint or a setting cannot be used. WireClosed: the front cannot be reached.
    """
    import torch

    from glm5.model.weights import load_model
    from glm5.serve.engine import Engine
    from glm5.serve.runner import Runner
    from glm5.text.tokenizer import load_tokenizer
    from glm5.utils.devices import resolve_device

    tokenizer = load_tokenizer(options.checkpoint)
    device = resolve_device(options.device)
    if device == "cuda":
        device = f"cuda:{options.number % torch.cuda.device_count()}"
    model = load_model(options.checkpoint, device=device, dtype=options.dtype)
    engine = Engine(model, options.engine, tokenizer)
    if options.role == "decode":
        engine.warm()
    await obey(options, engine, Runner(engine, tokenizer, options.name))


async def obey(options: WorkerOptions, engine: Engine, runner: Runner) -> None:
    """Serve the front with an engine that is there, until the front is gone.

    Raises:
        WireClosed: it cannot be reached.
    """
    from glm5.serve.transfer import Fetcher, PageBytes, keep

    key = options.key.encode()
    wire = await connect(options.front, key)

    async def reader(other: Wire) -> None:
        near = options.pages_at and not other.local_host
        await keep(
            other,
            engine.lending,
            runner.call,
            PageBytes(engine.cache),
            str(Path(options.pages_at).parent) if near else "",
        )

    servers = [await listen(options.pages_at or f"{wire.local_host}:0", key, reader)]
    address, port = options.pages_at or "{}:{}".format(*servers[0].sockets[0].getsockname()[:2]), ""
    if options.pages_also_at:
        servers.append(await listen(f"{options.pages_also_at}:0", key, reader))
        port = f":{servers[1].sockets[0].getsockname()[1]}"
    fetcher = Fetcher(
        key,
        asyncio.get_running_loop(),
        runner.call,
        lambda load, filled: engine.lending.end_load(load, filled=filled),
        "" if is_path(options.front) else host_and_port(options.front)[0],
    )
    engine.lending.fetch = fetcher.start
    await runner.start()
    try:
        hello = Hello(
            options.role,
            options.name,
            address,
            engine.context,
            engine.vocab_size,
            pages=engine.pool.device.count,
            page=engine.cache.nbytes_per_page(),
            weight_version=engine.weight_version,
            port=port,
        )
        await wire.send("hello", hello)
        if not is_path(options.front):
            print(f"{options.name}: works for {options.front}", file=sys.stderr, flush=True)
        await serve_backend(runner, wire)
    finally:
        for server in servers:
            server.close()
        await fetcher.close()
        await runner.stop()


async def accept(address: str, key: str, arrived: Callable[[Remote], None]) -> asyncio.Server:
    """Take in workers at `address`: `arrived(worker)` is called when one is ready."""

    async def serve(wire: Wire) -> None:
        message = await wire.receive()
        if len(message) != 2 or message[0] != "hello":
            raise WireClosed("no worker")
        worker = Remote(wire, as_type(message[1], Hello))
        arrived(worker)
        await worker.listen()

    return await listen(address, key.encode(), serve)


class Crew:
    """The workers of one front: starts those of its host, takes in those of others, and ends them.

    Args:
        options: for all; role, name, front, key and address are filled in. prefill, decode: how many to start here.
        listen_at: host:port at which workers of other hosts may join, with the key; empty for none.
    """

    def __init__(self, fleet: Fleet, options: WorkerOptions, prefill: int, decode: int, listen_at: str = "") -> None:
        self._fleet, self._options, self._listen_at = fleet, options, listen_at
        self._roles = ["prefill"] * prefill + ["decode"] * decode
        memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108  pages pass through files there
        self._directory = tempfile.TemporaryDirectory(prefix="glm5-", dir=memory)  # of mode 700
        self._servers: list[asyncio.Server] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self.failure: UserError | None = None
        self.joined_at = ""

    async def start(self) -> None:
        """Start the workers; returns when they are ready.

        Raises:
            UserError: one of them ended instead. It has said why on standard error.
        """
        home, key = self._directory.name, self._options.key
        front = f"{home}/front"
        self._servers.append(await accept(front, key, self._fleet.join))
        if self._listen_at:
            outside = await accept(self._listen_at, key, self._fleet.join)
            self._servers.append(outside)
            self.joined_at = "{}:{}".format(*outside.sockets[0].getsockname()[:2])
        for i, role in enumerate(self._roles):
            name = f"{role}-{i}"
            one = replace(self._options, role=role, name=name, front=front, pages_at=f"{home}/{name}", number=i)
            if self._listen_at:
                one = replace(one, pages_also_at=host_and_port(self._listen_at)[0])
            self.processes.append(_start_process(one))
        while len(self._fleet.prefill) + len(self._fleet.decode) < len(self._roles):
            if any(process.poll() is not None for process in self.processes):
                await self.stop()
                self.failure = UserError("a worker did not start", "See above what it said")
                raise self.failure
            await asyncio.sleep(0.05)

    async def stop(self) -> None:
        """End the workers of this host; those of others see that the front is gone."""
        for server in self._servers:
            server.close()
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            await asyncio.to_thread(_wait, process)
        self._directory.cleanup()


def _wait(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _start_process(options: WorkerOptions) -> subprocess.Popen[bytes]:
    """Its options, the key among them, go to standard input, where no list of processes shows them. It has a session of
    its own, so that a Ctrl-C is the front's alone to answer."""
    command = [sys.executable, "-m", "glm5.serve.worker"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    assert process.stdin is not None
    process.stdin.write(json.dumps(asdict(options)).encode() + b"\n")
    process.stdin.close()
    return process


def run(options: WorkerOptions) -> int:
    """Work until the front is gone; the process' exit status.

    Raises:
        UserError: the front cannot be reached, or the checkpoint or a setting cannot be used.
    """
    logging.basicConfig(level=options.log_level.upper(), format=f"{options.name}: %(message)s")
    try:
        asyncio.run(work(options))
    except WireClosed as error:
        raise UserError(
            f"the front at {options.front}: {error}", "Start it first, with --workers-at and this GLM5_WORKER_KEY"
        ) from None
    except KeyboardInterrupt:
        pass
    return 0


def _started() -> int:
    """Be one of a front's own workers; it says by itself that one did not start."""
    given = json.loads(sys.stdin.buffer.readline())
    options = WorkerOptions(**{**given, "engine": EngineConfig(**given["engine"])})
    try:
        return run(options)
    except UserError as error:
        print(f"{options.name}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(_started())
