"""`glm5 rl general` as a function: a policy learns to answer well where no verifier can say what is right.

The loop is `reason`'s: the same engine, groups, loss, ledger and checkpoints. What differs is the reward, which rules,
a reward model and a judge make together (`reward.hybrid`), and the monitors that watch it. Three aims are the report's:
foundational correctness, emotional intelligence, quality at a task (`reward/rubrics/`). Beside a run's other files:

    RUN/judge.jsonl     replies of the judge and what they cost; a resumed run asks nothing twice
    RUN/reward.json     checksums of what the reward depends on: rubrics, and the reward model's files

Rows of prompts are `{"prompt": …, "domain": …}` with, where wanted, `rules`, `rubrics`, `anchors` (people's answers),
`verifier` and `answer`, and the other fields of `prompts`. Source: report, section 3.4. Read next: `reward.hybrid`,
`reward.monitors`, `reason`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from glm5.model.config import ModelConfig
from glm5.model.glm5 import GLM5
from glm5.posttrain.batched import BatchedLearner, digest
from glm5.posttrain.jsonl import read_rows
from glm5.posttrain.prompts import Prompt, prompt_from_row, require_unique
from glm5.posttrain.reason import (
    LoopConfig,
    Plan,
    PromptConfig,
    Prompts,
    Reasoned,
    Reasoner,
    learned,
    model_config,
    reasoned,
    require_groups,
)
from glm5.posttrain.reward.data import answered
from glm5.posttrain.reward.hybrid import GENERAL, RULES, Hybrid, RewardConfig
from glm5.posttrain.reward.judge import Judge
from glm5.posttrain.reward.model import Scorer, fingerprint, require_reward_model
from glm5.posttrain.reward.monitors import MonitorConfig, Monitors, Watched
from glm5.posttrain.reward.rubric import load_rubric
from glm5.posttrain.reward.rules import require_rules
from glm5.posttrain.rollouts import Group, Rollouts
from glm5.posttrain.verify.pool import VerifierPool
from glm5.train.prepare import Say
from glm5.train.together import settled
from glm5.utils.errors import ConfigError, DataError
from glm5.utils.files import read_json, write_json
from glm5.utils.runlog import METRICS, read_metrics

OWN = ("rules", "rubrics", "anchors")  # fields of a row beside those of every prompt
JOURNAL = "judge.jsonl"
# What a resumed run may change of its judge: where it lies, how patiently it is asked, and what it may cost.
JUDGE_MAY_DIFFER = {"url", "key_env", "timeout_s", "retries", "backoff_s", "concurrency", "patience"}
JUDGE_MAY_DIFFER |= {"max_calls", "max_tokens"}


@dataclass(frozen=True)
class GeneralConfig(LoopConfig):
    """Reinforcement learning from rules, a reward model and a judge."""

    run: str = "runs/general"
    """Directory of the run. An interrupted run goes on when the same command is given again."""
    prompts: PromptConfig = field(default_factory=lambda: PromptConfig(tasks=()))
    reward: RewardConfig = field(default_factory=RewardConfig)
    monitors: MonitorConfig = field(default_factory=MonitorConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_groups(self.rollout)


# ---------------------------------------------------------------------------------------------------- prompts
def read_general(path: str) -> list[Prompt]:
    """All rows of a file. Errors as `read_rows`: every bad row by its line."""
    return require_unique(read_rows(path, general_row), path)


def general_row(row: Mapping[str, Any], number: int) -> Prompt:
    """Check and take over one row. Rules, rubrics and anchors become a part of the prompt's `info`.

    Raises:
        DataError: names the field, its value and the mend.
    """
    own: dict[str, Any] = {name: row[name] for name in OWN if name in row}
    require_rules(own.get("rules", {}))
    for name in ("rubrics", "anchors"):
        given = own.get(name, [])
        if not isinstance(given, list) or not all(isinstance(text, str) and text.strip() for text in given):
            raise DataError(f"{name}: {given!r}", "It must be a list of texts")
    for name in own.get("rubrics", []):
        load_rubric(name)
    plain = {name: value for name, value in row.items() if name not in OWN}
    if ("verifier" in plain) != ("answer" in plain):
        raise DataError("verifier, answer: one without the other", "Give both, or neither")
    info = plain.get("info", {})
    if not isinstance(info, dict) or GENERAL in info:
        raise DataError(f"info: {info!r}", f"It must be an object without {GENERAL!r}")
    return prompt_from_row({"verifier": RULES, "answer": {}, **plain, "info": {**info, GENERAL: own}}, number)


# ---------------------------------------------------------------------------------------------------- learning
class Generalist(Reasoner):
    """A learner whose groups a hybrid reward judges, watched by monitors."""

    hybrid: Hybrid | None = None  # on the main rank, which judges
    monitors: Monitors

    def rewind(self, state: Mapping[str, Any]) -> None:
        super().rewind(state)
        path = self.directory / METRICS
        records = read_metrics(self.directory) if path.exists() else []
        self.monitors.restore(r for r in records if 1 <= r["step"] <= self.finished_steps)

    def draw(self) -> tuple[dict[str, Any], Sequence[Group]]:
        if self.hybrid is not None:
            self.hybrid.judgements.clear()
        metrics, groups = super().draw()
        judge = {} if self.hybrid is None else judge_figures(self.hybrid)
        return {**metrics, **part_figures(groups), **judge, **self.monitors.watch(seen(groups))}, groups

    def shown(self, metrics: dict[str, Any]) -> dict[str, float]:
        return {**super().shown(metrics), **({"alerts": metrics["alerts"]} if metrics.get("alerts") else {})}

    def figures(self) -> dict[str, Any]:
        judge = None if self.hybrid is None else self.hybrid.judge
        spent = {} if judge is None else {"judge/calls": judge.endpoint.calls, "judge/tokens": judge.endpoint.tokens}
        return {**super().figures(), **spent}


def seen(groups: Sequence[Group]) -> list[list[Watched]]:
    """Groups as monitors see them."""
    return [
        [
            Watched(s.text, len(s.ids), s.reward, {part: scores[n] for part, scores in group.parts.items()})
            for n, s in enumerate(group.samples)
        ]
        for group in groups
    ]


def part_figures(groups: Sequence[Group]) -> dict[str, float]:
    """Mean of each part over the answers that it scored, and of the anchors' rewards."""
    of: dict[str, list[float]] = {}
    for group in groups:
        for part, scores in group.parts.items():
            of.setdefault(f"parts/{part}", []).extend(score for score in scores if score is not None)
        of.setdefault("parts/anchor", []).extend(group.beside)
    return {name: sum(scores) / len(scores) for name, scores in of.items() if scores}


def judge_figures(hybrid: Hybrid) -> dict[str, float]:
    """How well the judge's votes agree, where it was asked."""
    known = [j for j in hybrid.judgements if j.votes]
    flips = [j.flips for j in known if j.flips is not None]
    return {
        **({"judge/spread": sum(j.spread for j in known) / len(known)} if known else {}),
        **({"judge/order_flips": sum(flips) / len(flips)} if flips else {}),
    }


# ---------------------------------------------------------------------------------------------------- all of it
def resolve(config: GeneralConfig) -> tuple[GeneralConfig, ModelConfig]:
    """The configuration with the device and mesh that it will have here, and the model's own.

    Raises:
        UserError: the checkpoint or the reward model cannot be used, or there are no prompts.
    """
    model = model_config(config.checkpoint, "glm5 rl general")
    if not config.prompts.data:
        raise ConfigError("prompts.data", (), "must name at least one JSONL file of prompts")
    if config.reward.model:
        require_reward_model(config.reward.model)
    return settled(config), model


def hybrid_reward(
    config: GeneralConfig, pool: VerifierPool, prompts: Sequence[Prompt], journal: Path | None = None
) -> Hybrid:
    """The reward of a resolved configuration, for these prompts.

    Raises:
        UserError: the reward model, a rubric or the endpoint's key cannot be had, or nothing judges a prompt.
    """
    reward = config.reward
    scorer = Scorer.load(reward.model, config.device, config.learn.micro_batch) if reward.model else None
    judge = Judge(reward.judge, journal) if reward.judge.url else None
    hybrid = Hybrid(reward, pool, scorer, judge)
    hybrid.require(prompts)
    if scorer is not None:
        room = scorer.model.longest - config.rollout.max_new_tokens
        long = next((p.id for p in prompts if len(answered(scorer.tokenizer, p.messages, "", p.tools)) > room), None)
        if long is not None:
            what = (
                f"prompt {long!r} with an answer of {config.rollout.max_new_tokens} tokens may not fit the reward model"
            )
            raise DataError(
                what, f"It reads {scorer.model.longest:,}: lower rollout.max_new_tokens, or use another one"
            )
    return hybrid


def keep_reward(run: Path, config: GeneralConfig, prompts: Sequence[Prompt]) -> None:
    """Write down what the reward depends on besides the configuration.

    Raises:
        ConfigError: the run has begun, and it has changed.
    """
    reward, path = config.reward, run / "reward.json"
    names = [*reward.judge.rubrics, *(n for p in prompts for n in p.info[GENERAL].get("rubrics", ()))]
    now = {
        "rubrics": {n: repr(load_rubric(n)) for n in sorted(set(names))} if reward.judge.url else {},
        "model": fingerprint(reward.model) if reward.model else {},
    }
    if (run / "checkpoints").exists() and read_json(path) != now:
        changed = "rubrics" if read_json(path).get("rubrics") != now["rubrics"] else "the reward model"
        raise ConfigError("reward", changed, "not as this run began; bring them back, or use another --run")
    write_json(path, now)


def general(config: GeneralConfig, say: Say = print) -> Reasoned:
    """Learn, export and measure; goes on where an earlier start of the same run ended.

    Raises:
        UserError: see `read_general`, `hybrid_reward`, `Hybrid.require`, `Rollouts` and `Learner.run`.
    """
    config, _ = resolve(config)
    run = Path(config.run)

    def plan(prompts: Prompts) -> Plan:
        everyone = [*prompts.train, *prompts.held_out]

        def make(model: GLM5, rollouts: Rollouts) -> BatchedLearner:
            def judges() -> Hybrid:
                assert rollouts.pool is not None
                keep_reward(run, config, everyone)
                return hybrid_reward(config, rollouts.pool, everyone, run / JOURNAL)

            hybrid = rollouts.ranks.on_main(judges)
            if hybrid is not None:
                rollouts.judges = hybrid
                if hybrid.judge is not None:
                    hybrid.judge.endpoint.beat = rollouts.ranks.beat
            learner = Generalist(config.learn, model, config.loss, rollouts, run, digest(prompts.train))
            learner.order, learner.pages = prompts.order, config.page_every
            learner.hybrid, learner.monitors = hybrid, Monitors(config.monitors)
            return learner

        return everyone, make

    with learned(config, "general", plan, say, read_general, JUDGE_MAY_DIFFER) as (learner, path, held_out):
        found = reasoned(learner, path, held_out)
    return found
