"""`glm5 gateway --engines URL ... --tokenizer DIRECTORY`: exact tokens of every agent that talks to these engines.

Needs the extra `serve`. Read next: `glm5.serve.gateway.app`.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

from glm5.utils.config_io import parse
from glm5.utils.errors import ConfigError, UserError


def main(argv: Sequence[str]) -> int:
    """Parse `argv` (without the command's name) and serve, until Ctrl-C (returns 0) or SIGTERM (ends the process)."""
    try:
        from glm5.serve.gateway.app import GatewayOptions, create_gateway
        from glm5.serve.gateway.pool import EnginePool
        from glm5.serve.gateway.remote import HttpEngine
        from glm5.serve.gateway.router import Router
        from glm5.serve.http.app import serve
    except ModuleNotFoundError as error:
        raise UserError(f"the gateway needs {error.name}", "Install the extra: pip install 'glm5[serve]'") from None
    from glm5.text.tokenizer import load_tokenizer

    @dataclass(frozen=True)
    class Options(GatewayOptions):
        """Keep the exact tokens of agents: OpenAI's and Anthropic's interfaces before engines that serve the model."""

        engines: tuple[str, ...] = ()
        """Addresses of the engines, as http://HOST:PORT."""
        tokenizer: str = ""
        """A directory with the model's tokenizer."""
        name: str = "glm5"
        """What the model is called."""
        context: int = 202_752
        """Tokens of prompt and answer together that the engines have room for."""
        version: str = "0"
        """Of the weights that the engines must have; others are not asked."""
        slack: float = 1.25
        """How far above the mean an engine's load may be before sessions leave it."""
        beat_s: float = 2.0
        """How often engines are asked whether they live."""
        log_level: Literal["critical", "error", "warning", "info", "debug"] = "info"
        """How much is said on standard error."""

    options = parse(Options, argv, prog="glm5 gateway", config_option=False)
    if not options.engines:
        raise UserError("no engine is named", "Give addresses: --engines http://127.0.0.1:8000")
    for url in options.engines:
        if not url.startswith(("http://", "https://")):
            raise UserError(f"--engines {url}", "Give an address as http://HOST:PORT")
    if not Path(options.tokenizer or ".nowhere").is_dir():
        raise UserError(f"--tokenizer {options.tokenizer!r}: no such directory", "Give the model's directory")
    if not options.beat_s > 0:
        raise ConfigError("--beat-s", options.beat_s, "must be above 0")
    made = GatewayOptions(**{field.name: getattr(options, field.name) for field in fields(GatewayOptions)})
    if made.api_key is None and os.environ.get("GLM5_API_KEY"):
        made = replace(made, api_key=os.environ["GLM5_API_KEY"])
    tokenizer = load_tokenizer(options.tokenizer)
    router = Router(options.version, slack=options.slack, silent_s=5 * options.beat_s)
    engines = {
        url: HttpEngine(url, tokenizer, options.name, options.context, api_key=os.environ.get("GLM5_ENGINE_KEY"))
        for url in options.engines
    }
    pool = EnginePool(engines, router, beat_s=options.beat_s)

    async def stop() -> None:
        await pool.stop()
        await asyncio.gather(*(engine.stop() for engine in engines.values()))

    def ready(host: str, port: int) -> None:
        there = len(router.routable(pool.clock()))
        print(f"{there} of {len(engines)} engines answer with weights {options.version}", file=sys.stderr)
        print(f"agents attach at http://{host}:{port}/sessions/NAME/v1", file=sys.stderr, flush=True)

    app = create_gateway(pool, made, start=pool.start, stop=stop, forget=router.forget)
    serve(app, ready, options.log_level)
    return 0
