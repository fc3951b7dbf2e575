"""`glm5 serve CHECKPOINT`: an engine behind OpenAI's, Anthropic's and SGLang's HTTP interfaces, and a page to chat on.

Needs the extra `serve`. Read next: `glm5.serve.http.app`, `glm5.serve.runner`, `glm5.serve.engine`.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import tyro

from glm5.utils.config_io import parse
from glm5.utils.devices import resolve_device
from glm5.utils.errors import UserError

if TYPE_CHECKING:
    from glm5.serve.http.server import HttpOptions
    from glm5.serve.worker import WorkerOptions

T = TypeVar("T")


def main(argv: Sequence[str]) -> int:
    """Parse `argv` (without the command's name) and serve, until Ctrl-C (returns 0) or SIGTERM (ends the process)."""
    try:
        from glm5.serve.http.app import create_app, serve
        from glm5.serve.http.server import HttpOptions
    except ModuleNotFoundError as error:
        raise UserError(f"the server needs {error.name}", "Install the extra: pip install 'glm5[serve]'") from None
    from glm5.serve.config import EngineConfig

    @dataclass(frozen=True)
    class ServeOptions(EngineConfig, HttpOptions):
        """Serve a model over HTTP: OpenAI's, Anthropic's and SGLang's interfaces, and a page to chat on at /."""

        checkpoint: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="CHECKPOINT")] = ""
        """The model's directory, tokenizer included."""
        name: str = ""
        """What the model is called; by default the directory's name."""
        api_key: str | None = None
        """Clients must send it. Better given as GLM5_API_KEY in the environment; without either everyone is let in."""
        device: str = "auto"
        """cpu, cuda or cuda:N; auto is a GPU where there is one."""
        dtype: str | None = None
        """Of the weights in memory; by default the checkpoint's."""
        log_level: Literal["critical", "error", "warning", "info", "debug"] = "info"
        """How much the server says on standard error."""
        prefill_workers: int = 0
        """Processes that read prompts, apart from those that answer; each is an engine with these settings."""
        decode_workers: int = 0
        """Processes that answer. With 0 of both, one engine does all in this process."""
        workers_at: str = ""
        """HOST:PORT at which workers of other hosts may join; they must have the same GLM5_WORKER_KEY."""
        join: str = ""
        """HOST:PORT of a server's `workers_at`: be one of its workers instead of a server."""
        role: Literal["prefill", "decode"] = "decode"
        """With `join`: what to do there."""
        mesh: str = ""
        """Several processes for one model: tp divides heads and widths, dp makes engines with requests of their own, ep
        spreads the experts over these; such as tp=2, or dp=8,ep=8. On several hosts start it with torchrun."""

    options = parse(ServeOptions, argv, prog="glm5 serve", config_option=False)
    if not options.checkpoint:
        raise UserError("no checkpoint is named", "Give a model's directory: glm5 serve runs/demo/model")
    if not Path(options.checkpoint).is_dir():
        raise UserError(f"{options.checkpoint}: no such directory", "Give a model's directory")
    if options.role == "prefill" and not options.join:
        raise UserError(
            "role='prefill' is a worker's, and no server is named that it works for", "Add --join HOST:PORT"
        )
    name = options.name or Path(options.checkpoint).resolve().name
    http = _part(HttpOptions, options)
    if http.api_key is None and os.environ.get("GLM5_API_KEY"):  # which, unlike an option, no list of processes shows
        http = replace(http, api_key=os.environ["GLM5_API_KEY"])
    apart = options.join or options.workers_at or options.prefill_workers or options.decode_workers
    if options.mesh:
        if apart and not options.join:
            what = f"mesh={options.mesh!r} beside prefill or decode workers"
            raise UserError(what, "Start the front without a mesh, with --workers-at, and each mesh with --join")
        return _spread(options, http, name, argv)
    if apart:
        return _apart(options, http, name)
    from glm5.model.weights import load_model
    from glm5.serve.engine import Engine
    from glm5.serve.runner import Runner
    from glm5.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(options.checkpoint)
    model = load_model(options.checkpoint, device=resolve_device(options.device), dtype=options.dtype)
    engine = Engine(model, _part(EngineConfig, options), tokenizer)
    engine.warm()
    runner = Runner(engine, tokenizer, name)
    app = create_app(runner, http, start=runner.start, stop=runner.stop)

    def ready(host: str, port: int) -> None:
        pages, of_each = engine.pool.device.count, engine.cache.nbytes_per_page()
        print(f"{runner.model_name}: {pages} pages of 64 tokens, {pages * of_each / 2**20:,.0f} MiB", file=sys.stderr)
        print(f"listening on http://{host}:{port}", file=sys.stderr, flush=True)

    serve(app, ready, options.log_level)
    return 0


def _spread(options: Any, http: HttpOptions, name: str, argv: Sequence[str]) -> int:
    """Be one of several ranks, or the process that starts them."""
    from glm5.cli.launch import first, start
    from glm5.parallel.mesh import Mesh, launched
    from glm5.serve.config import EngineConfig
    from glm5.serve.rank_server import RankOptions, check_options, run

    try:
        made = RankOptions(
            checkpoint=options.checkpoint,
            name=name,
            mesh=Mesh.parse(options.mesh),
            device=options.device,
            dtype=options.dtype,
            log_level=options.log_level,
            engine=_part(EngineConfig, options),
            worker=_worker(options) if options.join else None,
        )
        check_options(made)
        if made.mesh.size > 1 and not launched():
            status = start("serve", made.mesh.size, argv, on_gpus=resolve_device(options.device) != "cpu")
            return 0 if status == 128 + signal.SIGINT else status  # Ctrl-C is how a server ends
        return run(made, http)
    except UserError:
        if first():
            raise
        return 2


def _apart(options: Any, http: HttpOptions, name: str) -> int:
    """Be the front of several workers, or one of them."""
    from glm5.serve.fleet import Fleet
    from glm5.serve.http.app import create_app, serve
    from glm5.serve.worker import Crew, run
    from glm5.text.tokenizer import load_tokenizer

    made = _worker(options)
    if options.join:
        return run(made)
    if options.prefill_workers < 0 or options.decode_workers < 0:
        raise UserError("prefill_workers and decode_workers count processes", "Give 0 or more")
    if not (options.decode_workers or options.workers_at):
        raise UserError("prefill_workers without decode_workers answer nothing", "Set decode_workers to at least 1")
    fleet = Fleet(load_tokenizer(options.checkpoint), name)
    crew = Crew(fleet, made, options.prefill_workers, options.decode_workers, options.workers_at)

    def ready(host: str, port: int) -> None:
        if crew.joined_at:
            print(f"workers of other hosts join at {crew.joined_at}", file=sys.stderr)
        for worker in (*fleet.prefill, *fleet.decode):
            print(f"{worker.hello.name}: {worker.hello.pages} pages of 64 tokens", file=sys.stderr)
        print(f"listening on http://{host}:{port}", file=sys.stderr, flush=True)

    try:
        serve(create_app(fleet, http, start=crew.start, stop=crew.stop), ready, options.log_level)
    except SystemExit:  # the web server's way to say that it could not start
        if crew.failure is None:
            raise
        raise crew.failure from None
    return 0


def _worker(options: Any) -> WorkerOptions:
    """What a worker of this host is told."""
    from glm5.serve.config import EngineConfig
    from glm5.serve.worker import WorkerOptions

    key = os.environ.get("GLM5_WORKER_KEY", "")
    if (options.join or options.workers_at) and not key:
        raise UserError("GLM5_WORKER_KEY is not set", "Give all hosts the same secret in the environment")
    return WorkerOptions(
        checkpoint=options.checkpoint,
        role=options.role,
        name=f"{options.role}-{socket.gethostname()}-{os.getpid()}",
        front=options.join,
        key=key or secrets.token_hex(32),
        device=options.device,
        dtype=options.dtype,
        log_level=options.log_level,
        engine=_part(EngineConfig, options),
    )


def _part(kind: type[T], options: Any) -> T:
    """The fields of one of the classes that the options consist of."""
    return kind(**{f.name: getattr(options, f.name) for f in fields(kind)})  # type: ignore[arg-type]
