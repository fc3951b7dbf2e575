"""`glm5 distill CHECKPOINT`: a policy learns from earlier stages on its own answers. Read next:
`glm5.posttrain.distill`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from glm5.cli.launch import several, spoken_once
from glm5.cli.pretrain import describe
from glm5.utils.config_io import parse, to_dict

DESCRIPTION = """On-policy distillation from earlier stages: glm5 distill CHECKPOINT --teachers DOMAIN=CHECKPOINT ...

The policy answers prompts of each teacher's domain (--prompts.data or --prompts.tasks), and learns from what its
teacher finds likely of them. docs/post-training.md says more."""


def main(argv: Sequence[str]) -> int:
    """Parse `argv` (without the command's name) and run. Returns 0, or what a process of several returned."""
    return spoken_once(lambda say: _main(argv, say))


def _main(argv: Sequence[str], say: Callable[[str], None]) -> int:
    from glm5.posttrain import reason
    from glm5.posttrain.distill import DistillConfig, distill, resolve

    config, _ = resolve(parse(DistillConfig, argv, prog="glm5 distill", description=DESCRIPTION, first="checkpoint"))
    if not config.dry_run and (status := several("distill", config, argv)) is not None:
        return status
    for line in describe(to_dict(config)):
        say(line)
    if config.dry_run:
        for line in reason.describe(reason.prepare_prompts(config.prompts, config.learn.seed)):
            say(line)
        answers = config.learn.steps * config.rollout.prompts * config.rollout.group
        say(f"dry run: nothing was kept. A run learns from {answers:,} answers, in {config.run}")
        return 0
    found = distill(config, say)
    say(f"learned   {found.steps:,} steps from {found.prompts:,} prompts")
    for domain, after in found.held_out.get("after", {}).items():
        say(f"held out  {domain}: {found.held_out['before'].get(domain, 0.0):.1%} before, {after:.1%} after")
    say(f"run       {found.run}  (metrics.jsonl, samples.jsonl, rollouts.html; `glm5 watch {found.run}` draws it)")
    say(f"next      glm5 chat {found.model}")
    return 0
