"""`glm5 distill CHECKPOINT`: a policy learns from earlier stages on its own answers. Read next:
`glm5.posttrain.distill`."""

from __future__ import annotations

from collections.abc import Sequence

from glm5.cli.pretrain import describe
from glm5.utils.config_io import parse, to_dict

DESCRIPTION = """On-policy distillation from earlier stages: glm5 distill CHECKPOINT --teachers DOMAIN=CHECKPOINT ...

The policy answers prompts of each teacher's domain (--prompts.data or --prompts.tasks), and learns from what its
teacher finds likely of them. docs/post-training.md says more."""


def main(argv: Sequence[str]) -> int:
    """Parse `argv` (without the command's name) and run. Returns 0."""
    from glm5.posttrain import reason
    from glm5.posttrain.distill import DistillConfig, distill, resolve

    config, _ = resolve(parse(DistillConfig, argv, prog="glm5 distill", description=DESCRIPTION, first="checkpoint"))
    for line in describe(to_dict(config)):
        print(line)
    if config.dry_run:
        for line in reason.describe(reason.prepare_prompts(config.prompts, config.learn.seed)):
            print(line)
        answers = config.learn.steps * config.rollout.prompts * config.rollout.group
        print(f"dry run: nothing was kept. A run learns from {answers:,} answers, in {config.run}")
        return 0
    found = distill(config)
    print(f"learned   {found.steps:,} steps from {found.prompts:,} prompts")
    for domain, after in found.held_out.get("after", {}).items():
        print(f"held out  {domain}: {found.held_out['before'].get(domain, 0.0):.1%} before, {after:.1%} after")
    print(f"run       {found.run}  (metrics.jsonl, samples.jsonl; `glm5 watch {found.run}` draws it)")
    print(f"next      glm5 chat {found.model}")
    return 0
