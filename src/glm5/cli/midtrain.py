"""`glm5 midtrain CHECKPOINT`: longer contexts, in stages. Read next: `glm5.train.midtrain`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from glm5.cli.launch import several, spoken_once
from glm5.cli.pretrain import show
from glm5.utils.config_io import parse

DESCRIPTION = """Train a model further on longer contexts: glm5 midtrain CHECKPOINT [options].

Without options these are the report's three lengths. --stages.0.FIELD changes one field of the first stage, such as
--stages.0.corpora DIR=3 FILE.jsonl=1; a file for --config may name other stages, as many as it likes."""


def main(argv: Sequence[str]) -> int:
    """Parse `argv` (without the command's name) and run. Returns 0, or what a process of several returned."""
    return spoken_once(lambda say: _main(argv, say))


def _main(argv: Sequence[str], say: Callable[[str], None]) -> int:
    from glm5.train.midtrain import MidtrainConfig, midtrain

    config = parse(MidtrainConfig, argv, prog="glm5 midtrain", description=DESCRIPTION, first="checkpoint")
    if (status := several("midtrain", config, argv)) is not None:
        return status
    found = midtrain(config, say, lambda: show(config, say))
    say(f"trained   on {found.tokens:,} tokens in {len(config.stages)} stages")
    say(f"run       {found.run}  (each stage's directory holds its metrics; result.json)")
    say(f"next      glm5 sparsify {found.model} --run {found.run}-sparse")
    return 0
