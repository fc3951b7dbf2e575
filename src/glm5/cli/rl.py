"""`glm5 rl KIND CHECKPOINT`: learning from verified answers; from rules, a reward model and a judge; from agents.

Read next: `glm5.posttrain.reason`, `glm5.posttrain.general`, `glm5.posttrain.agent_run`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from glm5.cli.launch import several, spoken_once
from glm5.cli.pretrain import describe
from glm5.utils.config_io import parse, to_dict
from glm5.utils.errors import UserError

if TYPE_CHECKING:
    from glm5.posttrain.prompts import Prompt
    from glm5.posttrain.reason import LoopConfig, Reader, Reasoned
    from glm5.posttrain.rollouts import Judges
    from glm5.posttrain.verify.pool import VerifierPool

Say = Callable[[str], None]

DESCRIPTION = """Reinforcement learning from verified answers: glm5 rl reason CHECKPOINT [options].

Prompts are JSONL rows of prompt, answer, verifier, domain (--prompts.data FILE ...; docs/post-training.md says what
else they may hold), or tasks of reasoning-gym made on the spot (--prompts.tasks). The loss is the report's Eq. 1.
--mesh dp=N runs it on N devices of this host; --rollout.tool python lets answers run code in the sandbox."""

GENERAL = """Reinforcement learning from rules, a reward model and a judge: glm5 rl general CHECKPOINT [options].

Prompts are JSONL rows of prompt and domain, with rules, rubrics, anchors, verifier and answer where wanted
(--prompts.data FILE ...; docs/post-training.md says more). Rules of every answer: --reward.rules; a reward model:
--reward.model; a judge behind any OpenAI-compatible endpoint: --reward.judge.url and .model, its key in the environment
variable GLM5_JUDGE_KEY. Weights and gates are --reward.weights... and --reward.gates..."""

AGENT = """Asynchronous reinforcement learning of agents: glm5 rl agent CHECKPOINT --tasks FILE.py:Class [options].

Engine, gateway, orchestrator and learner run in this process, tasks too or wherever they register (--desk). With
--mesh dp=N the learner is N processes on as many devices of this host. With --cluster ray, Ray places engines and
tasks on the nodes of its cluster. The loss is the report's Eq. 3 to 5. docs/agent-rl.md says more. Needs
the extra `serve`; a cluster also `cluster`."""

RATE = """Measure how often a policy passes each prompt: glm5 rl rate CHECKPOINT --data FILE --out RATED [options].

Each row gets its pass_rate as that of the --policy, weak or strong, by which runs choose prompts
(--prompts.difficulty.weak-at-most, .strong-at-least). Tries of each prompt: --rollout.group."""

USAGE = """usage: glm5 rl KIND CHECKPOINT [options]

kinds:
  reason   learn from verified answers: maths, science, code, puzzles
  general  learn from rules, a reward model and a judge: instructions, empathy, writing
  agent    learn from what agents do in their tasks, asynchronously
  rate     measure how often a policy passes each prompt, to choose by difficulty

`glm5 rl KIND --help` lists its options."""


def main(argv: Sequence[str]) -> int:
    """Parse `argv` (without the command's name) and run. Returns 0."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    kind, *arguments = argv
    if kind not in KINDS:
        raise UserError(f"no kind {kind!r} of reinforcement learning", f"There are: {', '.join(KINDS)}")
    return KINDS[kind](arguments)


def _reason(arguments: list[str]) -> int:
    return spoken_once(lambda say: _reason_here(arguments, say))


def _reason_here(arguments: list[str], say: Say) -> int:
    from glm5.posttrain.reason import ReasonConfig, reason, resolve

    config, _ = resolve(
        parse(ReasonConfig, arguments, prog="glm5 rl reason", description=DESCRIPTION, first="checkpoint")
    )
    if not config.dry_run and (status := several("rl", config, ["reason", *arguments])) is not None:
        return status
    for line in describe(to_dict(config)):
        say(line)
    if config.dry_run:
        dry_run(config)
        return 0
    said(reason(config, say), say)
    return 0


def _general(arguments: list[str]) -> int:
    return spoken_once(lambda say: _general_here(arguments, say))


def _general_here(arguments: list[str], say: Say) -> int:
    from glm5.posttrain.general import GeneralConfig, general, hybrid_reward, read_general, resolve

    config, _ = resolve(
        parse(GeneralConfig, arguments, prog="glm5 rl general", description=GENERAL, first="checkpoint")
    )
    if not config.dry_run and (status := several("rl", config, ["general", *arguments])) is not None:
        return status
    for line in describe(to_dict(config)):
        say(line)
    if config.dry_run:
        dry_run(config, read_general, lambda pool, prompts: hybrid_reward(config, pool, prompts))
        return 0
    said(general(config, say), say)
    return 0


def said(found: Reasoned, say: Say) -> None:
    """What came of a run, and what to do next."""
    say(f"learned   {found.steps:,} steps from {found.prompts:,} prompts: {counts(found.states)}")
    if found.states.get("group_dropped"):
        say(f"dropped   had no verdict on half of the answers; {found.run}/samples.jsonl says why (no_verdict, error)")
    for domain, after in found.held_out.get("after", {}).items():
        say(f"held out  {domain}: {found.held_out['before'].get(domain, 0.0):.1%} before, {after:.1%} after")
    say(f"run       {found.run}  (metrics.jsonl, samples.jsonl, rollouts.html; `glm5 watch {found.run}` draws it)")
    say(f"next      glm5 chat {found.model}")


def _agent(arguments: list[str]) -> int:
    return spoken_once(lambda say: _agent_here(arguments, say))


def _agent_here(arguments: list[str], say: Say) -> int:
    try:
        from glm5.posttrain.agent_run import AgentConfig, agent, resolve
    except ModuleNotFoundError as error:
        raise UserError(f"glm5 rl agent needs {error.name}", "Install the extra: pip install 'glm5[serve]'") from None

    # `--cluster ray` is short for `--cluster.kind ray`.
    arguments = [f"--cluster.kind{a[9:]}" if a.partition("=")[0] == "--cluster" else a for a in arguments]
    config = parse(AgentConfig, arguments, prog="glm5 rl agent", description=AGENT, first="checkpoint")
    resolved, _ = resolve(config)
    if (status := several("rl", resolved, ["agent", *arguments])) is not None:
        return status
    for line in describe(to_dict(resolved)):
        say(line)
    found = agent(config, say)
    say(f"learned   {found.steps:,} steps from {sum(found.states.values()):,} samples: {counts(found.states)}")
    for task, after in found.held_out.get("after", {}).items():
        say(f"held out  {task}: {found.held_out['before'].get(task, 0.0):.1%} before, {after:.1%} after")
    say(f"run       {found.run}  (`glm5 watch {found.run}`, `glm5 trajectories {found.run}/trajectories.sqlite`)")
    say(f"next      glm5 chat {found.model}")
    return 0


def _rate(arguments: list[str]) -> int:
    from glm5.posttrain.rate import RateConfig, rate

    config = parse(RateConfig, arguments, prog="glm5 rl rate", description=RATE, first="checkpoint")
    for domain, rates in rate(config).items():
        never, always = rates.count(0.0) / len(rates), rates.count(1.0) / len(rates)
        mean = sum(rates) / len(rates)
        print(f"{config.policy:<9} {domain}: passes {mean:.1%}; {never:.0%} of the prompts never, {always:.0%} always")
    print(f"written   {config.out}")
    bound = "weak-at-most 0.5" if config.policy == "weak" else "strong-at-least 0.1"
    print(f"next      glm5 rl reason CHECKPOINT --prompts.data {config.out} --prompts.difficulty.{bound}")
    return 0


KINDS: dict[str, Callable[[list[str]], int]] = {
    "reason": _reason,
    "general": _general,
    "agent": _agent,
    "rate": _rate,
}


def counts(states: dict[str, int]) -> str:
    """{"trained": 3} as "3 trained"."""
    return ", ".join(f"{n:,} {state}" for state, n in sorted(states.items())) or "none"


def dry_run(
    config: LoopConfig,
    read: Reader | None = None,
    judges: Callable[[VerifierPool, Sequence[Prompt]], Judges] | None = None,
) -> None:
    """Read and check the prompts, draw and judge one group, and say what a run would be. Keeps nothing.

    Args:
        read, judges: what rows are read by, and what judges answers; by default those of verified answers.
    """
    from glm5.model.weights import load_model
    from glm5.posttrain import reason
    from glm5.posttrain.prompts import read_prompts
    from glm5.posttrain.rollouts import figures
    from glm5.train.ranks import Ranks

    prompts = reason.prepare_prompts(config.prompts, config.learn.seed, read or read_prompts)
    for line in reason.describe(prompts):
        print(line)
    model = load_model(config.checkpoint, device=config.device, dtype="float32")
    everyone = [*prompts.train, *prompts.held_out]
    with reason.rollouts_of(config, model, everyone, everyone, Ranks()) as rollouts:
        if judges is not None:
            assert rollouts.pool is not None
            rollouts.judges = judges(rollouts.pool, everyone)
        longest = rollouts.refuse_long(everyone)
        groups = rollouts.draw([(0, prompts.order.prompts(0, 1)[0])])
        rollouts.judge(groups)
    shown = figures(groups)
    print(f"prompt    the longest has {longest:,} tokens; of one group of {len(groups[0].samples)} answers:")
    print(f"          reward {shown.get('reward', 'none')}, mean length {shown['completions/mean_length']:.0f} tokens")
    print(f"          first answer: {groups[0].samples[0].text[:200]!r}")
    if (verdict := groups[0].samples[0].verdict) is not None and verdict.detail:
        print(f"          its verdict: {verdict.detail[:200]}")
    answers = config.learn.steps * config.rollout.prompts * config.rollout.group
    print(f"dry run: nothing was kept. A run learns from up to {answers:,} answers, in {config.run}")
