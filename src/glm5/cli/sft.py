"""`glm5 sft CHECKPOINT`: from conversations to a model that answers. Read next: `glm5.posttrain.sft`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from glm5.cli.launch import several, spoken_once
from glm5.cli.pretrain import show
from glm5.utils.config_io import parse

if TYPE_CHECKING:
    from glm5.posttrain.sft import SftConfig

DESCRIPTION = """Fine-tune a model on conversations: glm5 sft CHECKPOINT --data FILE [FILE=RATIO ...] [options].

A row of a JSONL file is {"messages": [...], "tools": [...]} in OpenAI's form, with reasoning_content for thinking;
docs/post-training.md says what else it may hold. --train.FIELD changes one field of the training; --mesh runs it on
several devices."""


def main(argv: Sequence[str]) -> int:
    """Parse `argv` (without the command's name) and run. Returns 0, or what a process of several returned."""
    return spoken_once(lambda say: _main(argv, say))


def _main(argv: Sequence[str], say: Callable[[str], None]) -> int:
    from glm5.posttrain.sft import SftConfig, resolve, sft

    config, _ = resolve(parse(SftConfig, argv, prog="glm5 sft", description=DESCRIPTION, first="checkpoint"))
    if config.dry_run:
        show(config, say)
        dry_run(config)
        return 0
    if (status := several("sft", config, argv)) is not None:
        return status
    show(config, say)
    found = sft(config, say)
    say(f"trained   {found.steps:,} steps on {found.tokens:,} learned tokens")
    say(f"run       {found.run}  (metrics.jsonl, config.json, result.json; `glm5 watch {found.run}` draws it)")
    say(f"next      glm5 chat {found.model}")
    return 0


def dry_run(config: SftConfig) -> None:
    """Print what a resolved configuration's run would be. Reads and renders the conversations, keeps nothing."""
    import tempfile
    from pathlib import Path

    from glm5.posttrain import sft
    from glm5.text.tokenizer import load_tokenizer
    from glm5.train.estimate import estimate
    from glm5.utils.files import format_bytes

    _, model = sft.resolve(config)
    with tempfile.TemporaryDirectory() as directory:
        data = sft.conversations(config, load_tokenizer(config.checkpoint), Path(directory) / "data", begun=False)
        dataset = data.dataset(config.seq_len, 1 + config.train.mtp_depths)
        config = sft.staged(config, model, dataset)
        for line in sft.describe(config, data, dataset):
            print(line)
    e = estimate(model, config.train, dataset.seq_len, device=config.device)
    print(f"model     {e.parameters:,} parameters, {e.active_parameters:,} active for a token")
    parts = ("weights", "gradients", "optimizer", "activations", "logits")
    listed = ", ".join(f"{name} {format_bytes(getattr(e, name))}" for name in parts)
    print(f"memory    about {format_bytes(e.total)} on {config.device}: {listed}; the libraries' own comes on top")
    if config.qat == "int4":
        size = format_bytes(sft.int4_bytes(config, model))
        print(f"          {size} more for what is read of the experts at INT4, until the backward pass")
    print(f"dry run: nothing was kept. Without --dry-run it trains in {config.run}")
