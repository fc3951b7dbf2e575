"""`glm5 serve CHECKPOINT`: an engine behind OpenAI's, Anthropic's and SGLang's HTTP interfaces, and a page to chat on.

Needs the extra `serve`. Read next: `glm5.serve.http.app`, `glm5.serve.runner`, `glm5.serve.engine`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro

from glm5.utils.config_io import parse
from glm5.utils.devices import resolve_device
from glm5.utils.errors import UserError

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

    options = parse(ServeOptions, argv, prog="glm5 serve", config_option=False)
    if not options.checkpoint:
        raise UserError("no checkpoint is named", "Give a model's directory: glm5 serve runs/demo/model")
    if not Path(options.checkpoint).is_dir():
        raise UserError(f"{options.checkpoint}: no such directory", "Give a model's directory")
    from glm5.model.weights import load_model
    from glm5.serve.engine import Engine
    from glm5.serve.runner import Runner
    from glm5.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(options.checkpoint)
    model = load_model(options.checkpoint, device=resolve_device(options.device), dtype=options.dtype)
    engine = Engine(model, _part(EngineConfig, options), tokenizer)
    runner = Runner(engine, tokenizer, options.name or Path(options.checkpoint).resolve().name)
    http = _part(HttpOptions, options)
    if http.api_key is None and os.environ.get("GLM5_API_KEY"):  # which, unlike an option, no list of processes shows
        http = replace(http, api_key=os.environ["GLM5_API_KEY"])
    app = create_app(runner, http, start=runner.start, stop=runner.stop)

    def ready(host: str, port: int) -> None:
        pages, of_each = engine.pool.device.count, engine.cache.nbytes_per_page()
        print(f"{runner.model_name}: {pages} pages of 64 tokens, {pages * of_each / 2**20:,.0f} MiB", file=sys.stderr)
        print(f"listening on http://{host}:{port}", file=sys.stderr, flush=True)

    serve(app, ready, options.log_level)
    return 0


def _part(kind: type[T], options: Any) -> T:
    """The fields of one of the classes that the options consist of."""
    return kind(**{f.name: getattr(options, f.name) for f in fields(kind)})  # type: ignore[arg-type]
