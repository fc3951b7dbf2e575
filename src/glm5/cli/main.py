"""`glm5 COMMAND ...`: find the command, import it alone, and turn what goes wrong into one line and a status.

Nothing heavy is imported here: `glm5 --help` must answer at once, and torch takes a second. Status 0 is success,
2 a mistake that the user can mend, 130 an interrupt, 141 a reader that has gone; a bug keeps its traceback and has
status 1. Read next: the module of any command in `COMMANDS`.
"""

from __future__ import annotations

import difflib
import importlib
import io
import json
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

from glm5 import __version__
from glm5.utils.errors import UserError, out_of_memory


class Command(NamedTuple):
    """One subcommand: what it does in a line, and the module whose `main(argv) -> int` does it."""

    help: str
    module: str


COMMANDS = {
    "demo": Command("train a small GLM-5 on real code, make it sparse, measure it, talk to it", "glm5.cli.demo"),
    "pretrain": Command("train a model with dense attention, from text", "glm5.cli.pretrain"),
    "midtrain": Command("train a model further on longer contexts, in stages", "glm5.cli.midtrain"),
    "sparsify": Command("adapt a dense model to sparse attention", "glm5.cli.sparsify"),
    "sft": Command("fine-tune a model on conversations", "glm5.cli.sft"),
    "rl": Command("learn from verified answers, by reinforcement learning", "glm5.cli.rl"),
    "reward-model": Command("train a reward model from preferences or scores", "glm5.cli.reward_model"),
    "distill": Command("bring back what earlier stages could do, from their own models", "glm5.cli.distill"),
    "chat": Command("talk to a model in the terminal", "glm5.cli.chat"),
    "generate": Command("continue a text with a checkpoint", "glm5.cli.generate"),
    "serve": Command("answer over HTTP: OpenAI's, Anthropic's and SGLang's interfaces", "glm5.cli.serve"),
    "convert": Command("write a checkpoint again in the public layout", "glm5.cli.convert"),
    "ledger": Command("recompute every published figure from a configuration", "glm5.cli.ledger"),
    "reproduce": Command("run the report's comparisons again at a chosen size", "glm5.cli.reproduce"),
    "watch": Command("draw a run's curves in the terminal, while it runs or after", "glm5.cli.watch"),
    "gateway": Command("keep the exact tokens of agents that talk to engines", "glm5.cli.gateway"),
    "orchestrate": Command("run the rollouts of agent tasks that register, for a learner", "glm5.cli.orchestrate"),
    "trajectories": Command("list, show and export the samples of agents' training", "glm5.cli.trajectories"),
    "doctor": Command("show versions, devices, and which operator version runs and why", "glm5.cli.doctor"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments after the program's name; by default those of this process.

    Returns:
        the exit status (see the module's docstring).
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    # torch's threads otherwise spin for long while they wait, and on cores shared with other work a step then takes
    # several times as long; these turns are about what the next call is away. Read when torch is first imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    as_json = "--json" in arguments
    for stream in (sys.stdout, sys.stderr):  # a terminal that cannot show a sign shows another, and the work goes on
        if isinstance(stream, io.TextIOWrapper) and not stream.encoding.lower().startswith("utf"):
            stream.reconfigure(errors="replace")
    try:
        status = _run(arguments)
        sys.stdout.flush()  # here, where a reader that has gone is still handled
        return status
    except UserError as e:
        print(_describe(e, as_json), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output has gone (`| head`); keep the interpreter from failing again at its last flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (MemoryError, RuntimeError) as e:
        full = out_of_memory(e)
        if full is None:
            raise
        print(_describe(full, as_json), file=sys.stderr)
        return 2
    except SystemExit as e:
        if isinstance(e.code, int) or e.code is None:
            return e.code or 0
        raise


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    name, *rest = arguments
    if name in ("-V", "--version"):
        print(f"glm5 {__version__}")
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        mend = f"Did you mean `glm5 {near[0]}`?" if near else f"There are: {', '.join(COMMANDS)}"
        raise UserError(f"no command {name!r}", mend)
    return int(importlib.import_module(COMMANDS[name].module).main(rest) or 0)


def _help() -> str:
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items())
    return (
        "usage: glm5 COMMAND [options]\n\n"
        "GLM-5, whole and readable: from a laptop's CPU to a GPU cluster.\n\n"
        f"commands:\n{rows}\n\n"
        "`glm5 COMMAND --help` lists a command's options. Every option of a run is a field of its configuration:\n"
        "`--config FILE` reads a saved one, and `--train.lr.peak 1e-3` overrides a field by its dotted name.\n"
        "Start with `glm5 demo`."
    )


def _describe(error: UserError, as_json: bool) -> str:
    if as_json:
        return json.dumps({"error": error.what, "mend": error.mend, "kind": type(error).__name__})
    return f"error: {error.what}" + (f" / mend: {error.mend}" if error.mend else "")


if __name__ == "__main__":
    sys.exit(main())
