"""`glm5 reward-model CHECKPOINT`: an outcome reward model from preferences or scores. Read next:
`glm5.posttrain.reward.train`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from glm5.cli.launch import several, spoken_once
from glm5.cli.pretrain import describe
from glm5.utils.config_io import parse, to_dict

DESCRIPTION = """Train an outcome reward model: glm5 reward-model CHECKPOINT --data FILE ... [options].

A row of a JSONL file is {"prompt": ..., "chosen": ..., "rejected": ...}, or with --kind pointwise {"prompt": ...,
"response": ..., "score": ...}. `glm5 rl general --reward.model` uses the result."""


def main(argv: Sequence[str]) -> int:
    """Parse `argv` (without the command's name) and run. Returns 0, or what a process of several returned."""
    return spoken_once(lambda say: _main(argv, say))


def _main(argv: Sequence[str], say: Callable[[str], None]) -> int:
    from glm5.posttrain.reward import train
    from glm5.posttrain.reward.train import RewardModelConfig

    config = parse(RewardModelConfig, argv, prog="glm5 reward-model", description=DESCRIPTION, first="checkpoint")
    config = train.resolve(config)
    if not config.dry_run and (status := several("reward-model", config, argv)) is not None:
        return status
    for line in describe(to_dict(config)):
        say(line)
    if config.dry_run:
        from glm5.text.tokenizer import load_tokenizer

        for line in train.describe(config, *train.read_all(config, load_tokenizer(config.checkpoint))):
            say(line)
        say(f"dry run: nothing was kept. Without --dry-run it trains in {config.run}")
        return 0
    found = train.train_reward_model(config, say)
    say(f"trained   {found.steps:,} steps")
    for name, after in found.held_out.get("after", {}).items():
        say(f"held out  {name}: {found.held_out['before'].get(name, 0.0):.4g} before, {after:.4g} after")
    say(f"run       {found.run}  (metrics.jsonl, config.json, result.json; `glm5 watch {found.run}` draws it)")
    say(f"next      glm5 rl general CHECKPOINT --prompts.data FILE --reward.model {found.model}")
    return 0
