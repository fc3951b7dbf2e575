"""`glm5 rl reason CHECKPOINT`: a policy learns from verified answers. Read next: `glm5.posttrain.reason`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from glm5.cli.pretrain import describe
from glm5.utils.config_io import parse, to_dict
from glm5.utils.errors import UserError

if TYPE_CHECKING:
    from glm5.posttrain.reason import ReasonConfig

DESCRIPTION = """Reinforcement learning from verified answers: glm5 rl reason CHECKPOINT [options].

Prompts are JSONL rows of prompt, answer, verifier, domain (--prompts.data FILE ...; docs/post-training.md says what
else they may hold), or tasks of reasoning-gym made on the spot (--prompts.tasks). The loss is the report's Eq. 1."""

USAGE = """usage: glm5 rl KIND CHECKPOINT [options]

kinds:
  reason   learn from verified answers: maths, science, code, puzzles

`glm5 rl reason --help` lists its options."""


def main(argv: Sequence[str]) -> int:
    """Parse `argv` (without the command's name) and run. Returns 0."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    kind, *arguments = argv
    if kind != "reason":
        raise UserError(f"no kind {kind!r} of reinforcement learning", "There is: reason")
    return _reason(arguments)


def _reason(arguments: list[str]) -> int:
    from glm5.posttrain.reason import ReasonConfig, reason, resolve

    config, _ = resolve(
        parse(ReasonConfig, arguments, prog="glm5 rl reason", description=DESCRIPTION, first="checkpoint")
    )
    for line in describe(to_dict(config)):
        print(line)
    if config.dry_run:
        dry_run(config)
        return 0
    found = reason(config)
    print(f"learned   {found.steps:,} steps from {found.prompts:,} prompts: {counts(found.states)}")
    for domain, after in found.held_out.get("after", {}).items():
        print(f"held out  {domain}: {found.held_out['before'].get(domain, 0.0):.1%} before, {after:.1%} after")
    print(f"run       {found.run}  (metrics.jsonl, samples.jsonl, rollouts.html; `glm5 watch {found.run}` draws it)")
    print(f"next      glm5 chat {found.model}")
    return 0


def counts(states: dict[str, int]) -> str:
    """{"trained": 3} as "3 trained"."""
    return ", ".join(f"{n:,} {state}" for state, n in sorted(states.items())) or "none"


def dry_run(config: ReasonConfig) -> None:
    """Read and check the prompts, draw and judge one group, and say what a run would be. Keeps nothing."""
    from glm5.model.weights import load_model
    from glm5.posttrain import reason
    from glm5.posttrain.rollouts import Rollouts, figures
    from glm5.text.tokenizer import load_tokenizer

    prompts = reason.prepare_prompts(config.prompts, config.learn.seed)
    for line in reason.describe(prompts):
        print(line)
    model = load_model(config.checkpoint, device=config.device, dtype="float32")
    with reason.verifier_pool(config.rollout, [*prompts.train, *prompts.held_out]) as pool:
        rollouts = Rollouts(model, load_tokenizer(config.checkpoint), config.rollout, pool, seed=config.learn.seed)
        longest = rollouts.refuse_long([*prompts.train, *prompts.held_out])
        groups = rollouts.draw([(0, prompts.order.prompts(0, 1)[0])])
        rollouts.judge(groups)
    shown = figures(groups)
    print(f"prompt    the longest has {longest:,} tokens; of one group of {len(groups[0].samples)} answers:")
    print(f"          reward {shown.get('reward', 'none')}, mean length {shown['completions/mean_length']:.0f} tokens")
    print(f"          first answer: {groups[0].samples[0].text[:200]!r}")
    answers = config.learn.steps * config.rollout.prompts * config.rollout.group
    print(f"dry run: nothing was kept. A run learns from up to {answers:,} answers, in {config.run}")
