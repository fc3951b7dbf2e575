"""`glm5 orchestrate STORE --gateway URL`: rollouts of the tasks that register, into a trajectory store.

Needs the extra `serve`. Read next: `glm5.posttrain.rollout.orchestrator`.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import tyro

from glm5.utils.config_io import parse
from glm5.utils.errors import ConfigError, UserError
from glm5.utils.listening import listen


def main(argv: Sequence[str]) -> int:
    """Parse `argv` (without the command's name) and run, until every task is done, Ctrl-C or SIGTERM. Returns 0."""
    try:
        from glm5.agents.protocol import KEY
        from glm5.posttrain.rollout.desk import serve
        from glm5.posttrain.rollout.options import RolloutOptions
        from glm5.posttrain.rollout.orchestrator import Orchestrator
    except ModuleNotFoundError as error:
        raise UserError(f"rollouts need {error.name}", "Install the extra: pip install 'glm5[serve]'") from None
    from glm5.posttrain.store import Store
    from glm5.utils.runlog import RunLog

    @dataclass(frozen=True)
    class Options(RolloutOptions):
        """Run rollouts of the tasks that register here, and write them down; a learner takes them from the store."""

        store: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="STORE")] = ""
        """The trajectory store's file; what is open in it is picked up."""
        gateway: str = ""
        """Address of the gateway, as http://HOST:PORT; its key is read from GLM5_GATEWAY_KEY."""
        host: str = "127.0.0.1"
        """Address at which services register. The key in GLM5_API_KEY is asked of them, and shown to them; without one
        only this machine may be listened on."""
        port: int = 9100
        """0 takes a free one."""
        temperature: float = 1.0
        """Of all draws, whatever an agent asks for."""
        log: str | None = None
        """Directory for the figures that `glm5 watch` shows. None: `rollouts` beside the store."""
        until_done: tuple[str, ...] = ()
        """End when these tasks have registered, and given all of their groups."""

    options = parse(Options, argv, prog="glm5 orchestrate", config_option=False)
    if not options.store:
        raise UserError("no store is named", "Give its file: glm5 orchestrate runs/agents/trajectories.sqlite")
    if not options.gateway.startswith(("http://", "https://")):
        raise UserError(f"--gateway {options.gateway!r}", "Give an address as http://HOST:PORT")
    if not 0 < options.temperature < float("inf"):
        raise ConfigError("--temperature", options.temperature, "must be above 0")
    made = RolloutOptions(**{field.name: getattr(options, field.name) for field in fields(RolloutOptions)})
    listening = listen(options.host, options.port)

    def ready() -> None:
        host, port = listening.getsockname()[:2]
        print(f"tasks register at http://{host}:{port}", file=sys.stderr, flush=True)

    async def run(store: Store, log: RunLog) -> None:
        sampling = {"temperature": options.temperature}
        gateway_key, own = os.environ.get("GLM5_GATEWAY_KEY"), os.environ.get(KEY) or None
        orchestrator = Orchestrator(store, options.gateway, made, sampling=sampling, api_key=gateway_key, key=own)
        await serve(orchestrator, listening, log=log, until_done=options.until_done, ready=ready)

    with Store(options.store) as store, RunLog(options.log or Path(options.store).parent / "rollouts") as log:
        asyncio.run(run(store, log))
        counts = store.counts()
    print(f"{counts.started:,} samples, {counts.open:,} of them open. Show them: glm5 trajectories {options.store}")
    return 0
