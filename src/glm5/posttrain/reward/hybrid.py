"""The hybrid reward of the general stage: rules, verifiers, a reward model and a judge become one number in [0, 1].

    the prompt's verifier and rules -> the reward model -> the judge
    a part below its gate: the reward is 0, and what comes after it is not asked; else
    reward = sum of weight · score / sum of weights, over the parts that the prompt has

An empty answer is worth 0, and nobody is asked. Where a part that was asked has no verdict, the answer has none: it is
never counted as 0, and never judged by the other parts alone, since answers of a group must be measured alike.

A person's answer, where a prompt has some, is in the group as an anchor: the judge sees it as the reference of style,
it is rewarded like any other, and its reward counts in the group's mean and deviation. It has no loss: no policy drew
it, so there is no ratio to weigh it by. What is learned is to be better than the person by the same measure, and no
text is learned by heart; `glm5 sft` does that. A group whose own answers are all equal teaches nothing, whatever its
anchor. Source: report, section 3.4, which names the parts and the anchors; how they are combined is not disclosed, so
that gates, weights and the anchors' way in are ours. Read next: `rules`, `model`, `judge`, `monitors`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from glm5.posttrain.prompts import Prompt
from glm5.posttrain.reward.judge import Case, Judge, JudgeConfig, Judgement
from glm5.posttrain.reward.model import Scorer
from glm5.posttrain.reward.rules import require_rules
from glm5.posttrain.rollouts import Group
from glm5.posttrain.verify.pool import Task, VerifierPool
from glm5.posttrain.verify.verdict import Cause, Verdict
from glm5.utils.errors import ConfigError, DataError

RULES = "rules"  # a verifier
GENERAL = "general"  # where a prompt's `info` keeps rules, rubrics and anchors


@dataclass(frozen=True)
class Parts:
    """A number for each part."""

    verifier: float
    """Of the prompt's own verifier."""
    rules: float
    """Of rules: the run's and the prompt's."""
    model: float
    """Of the reward model."""
    judge: float
    """Of the judge."""

    def __post_init__(self) -> None:
        for f in fields(self):
            if not 0 <= getattr(self, f.name) < math.inf:
                raise ConfigError(f.name, getattr(self, f.name), "must be a finite number of at least 0")


@dataclass(frozen=True)
class RewardConfig:
    """What a reward is made of. The report has neither weights nor gates: these are ours."""

    weights: Parts = field(default_factory=lambda: Parts(verifier=1.0, rules=1.0, model=1.0, judge=1.0))
    """Of each part, among those that a prompt has; a part of weight 0 and gate 0 is not asked."""
    gates: Parts = field(default_factory=lambda: Parts(verifier=0.0, rules=0.0, model=0.0, judge=0.0))
    """An answer that a part scores below this is worth 0, whatever else it has; 0 is no gate."""
    rules: str = "{}"
    """JSON object of rules that every answer should keep: '{"max_words": 200, "excludes": ["As an AI"]}'."""
    model: str = ""
    """Directory of a reward model; empty: none."""
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    """A generative judge; without a url there is none."""
    anchors: Literal["group", "reference", "off"] = "group"
    """People's answers: "group" counts their rewards in the baseline, and shows them to the judge; "reference" shows
    them only."""

    def __post_init__(self) -> None:
        self.common_rules()
        for f in fields(Parts):
            if getattr(self.gates, f.name) > 1:
                raise ConfigError(f"gates.{f.name}", getattr(self.gates, f.name), "must lie in [0, 1], as scores do")

    def common_rules(self) -> dict[str, Any]:
        """`rules` as an object."""
        try:
            return require_rules(json.loads(self.rules))
        except ValueError:
            raise ConfigError("rules", self.rules, 'must be an object of JSON: {"max_words": 200}') from None
        except DataError as e:
            raise ConfigError("rules", self.rules, f"{e.what}. {e.mend}") from None

    def asks(self, part: str) -> bool:
        """Whether a part counts at all."""
        return getattr(self.weights, part) > 0 or getattr(self.gates, part) > 0


@dataclass
class Scored:
    """One answer on its way. parts: scores until now. cause: why one has none."""

    group: Group
    text: str
    parts: dict[str, float | None] = field(default_factory=dict)
    judgement: Judgement | None = None
    cause: Cause = ""
    detail: str = ""
    closed: bool = False

    def settle(self, part: str, score: float | None, gate: float, cause: Cause = "", detail: str = "") -> None:
        """Take over a part's score, or that it has none; close where nothing more is to be asked."""
        self.parts[part] = score
        if score is None:
            self.closed, self.cause, self.detail = True, cause, f"{part}: {detail}"
        elif score < gate:
            self.closed, self.detail = True, f"{part} {score:.3g} is below its gate, {gate:g}"

    def verdict(self, weights: Parts) -> Verdict:
        """The reward, once every part was asked."""
        if self.cause:
            return Verdict(None, self.cause, self.detail)
        if self.closed:
            return Verdict(0.0, detail=self.detail)
        known = {part: score for part, score in self.parts.items() if score is not None}
        total = math.fsum(getattr(weights, part) for part in known)
        if not total:  # gates alone, and all are passed
            return Verdict(1.0, detail="passes all gates")
        mean = math.fsum(getattr(weights, part) * score for part, score in known.items()) / total
        shown = ", ".join(f"{part} {score:.3g}" for part, score in known.items())
        return Verdict(min(1.0, max(0.0, mean)), detail=shown)


class Hybrid:
    """Judges groups: `Rollouts.judges`.

    Args:
        pool: of verifiers. scorer: the reward model, and judge: where the configuration has them.
    """

    def __init__(
        self, config: RewardConfig, pool: VerifierPool, scorer: Scorer | None = None, judge: Judge | None = None
    ) -> None:
        self.config, self.pool, self.scorer, self.judge = config, pool, scorer, judge
        self.common = config.common_rules()
        self.judgements: list[Judgement] = []  # since `begin`

    def parts(self, prompt: Prompt) -> list[str]:
        """Which parts a prompt's answers have, in the order in which they are asked."""
        there = {
            "verifier": prompt.verifier != RULES,
            "rules": bool(self.rules(prompt)),
            "model": self.scorer is not None,
            "judge": self.judge is not None,
        }
        return [part for part, has in there.items() if has and self.config.asks(part)]

    def rules(self, prompt: Prompt) -> dict[str, Any]:
        """The run's rules, and the prompt's own, which come first."""
        return {**self.common, **prompt.info.get(GENERAL, {}).get("rules", {})}

    def require(self, prompts: Sequence[Prompt]) -> None:
        """Refuse prompts that cannot be rewarded, before anything is drawn.

        Raises:
            DataError: nothing judges a prompt, or a rubric is not known.
        """
        for prompt in prompts:
            if not self.parts(prompt):
                mend = "Give it rules or a verifier, or the run a reward model or a judge (--reward...)"
                raise DataError(f"nothing judges answers to prompt {prompt.id!r}", mend)
            if "judge" in self.parts(prompt) and self.judge is not None:
                self.judge.criteria(_rubrics(prompt))

    # ------------------------------------------------------------------ judging
    def __call__(self, groups: Sequence[Group]) -> list[Verdict]:
        """Verdicts on all answers, in their order. Groups get their `parts`, and of an anchor its reward `beside`."""
        answers = [[Scored(group, sample.text) for sample in group.samples] for group in groups]
        anchors = [
            Scored(group, text) if self.config.anchors == "group" and (text := self.anchor(group)) else None
            for group in groups
        ]
        everyone = [one for many in answers for one in many] + [a for a in anchors if a is not None]
        self._score(everyone)
        verdicts = []
        for group, many, anchor in zip(groups, answers, anchors, strict=True):
            group.parts = {part: [one.parts.get(part) for one in many] for part in self.parts(group.prompt)}
            found = None if anchor is None else anchor.verdict(self.config.weights).reward
            group.beside = [] if found is None else [found]
            verdicts += [one.verdict(self.config.weights) for one in many]
        return verdicts

    def anchor(self, group: Group) -> str | None:
        """The person's answer that a group is measured by: one of the prompt's, in turn."""
        given = group.prompt.info.get(GENERAL, {}).get("anchors", [])
        return None if self.config.anchors == "off" or not given else str(given[group.number % len(given)])

    def _score(self, answers: Sequence[Scored]) -> None:
        gates = self.config.gates
        for one in answers:
            if not one.text.strip():
                one.closed, one.detail = True, "empty"
        for part in ("verifier", "rules"):
            here = self._open(answers, part)
            verdicts = self.pool.check_all([self._task(one, part) for one in here])
            for one, verdict in zip(here, verdicts, strict=True):
                one.settle(part, verdict.reward, getattr(gates, part), verdict.cause, verdict.detail)
        here = self._open(answers, "model")
        if here:
            for one, score in zip(here, self._scores(here), strict=True):
                one.settle("model", score, gates.model)
        here = self._open(answers, "judge")
        if here and self.judge is not None:
            found = self.judge.judge([self._case(one) for one in here])
            self.judgements += found
            for one, judgement in zip(here, found, strict=True):
                why = judgement.failure
                one.settle("judge", judgement.score, gates.judge, why.cause if why else "", why.detail if why else "")

    def _open(self, answers: Sequence[Scored], part: str) -> list[Scored]:
        return [one for one in answers if not one.closed and part in self.parts(one.group.prompt)]

    def _task(self, one: Scored, part: str) -> Task:
        prompt = one.group.prompt
        return prompt.task(one.text) if part == "verifier" else Task(RULES, one.text, self.rules(prompt))

    def _scores(self, here: Sequence[Scored]) -> list[float]:
        """The reward model's; equal answers to one prompt are scored once, and alike."""
        assert self.scorer is not None
        unique = {(one.group.prompt.id, one.text): one for one in here}
        asked = [(one.group.prompt.messages, one.text) for one in unique.values()]
        scores = self.scorer.score(asked, [one.group.prompt.tools for one in unique.values()])
        found = dict(zip(unique, scores, strict=True))
        return [found[one.group.prompt.id, one.text] for one in here]

    def _case(self, one: Scored) -> Case:
        prompt = one.group.prompt
        return Case(prompt.messages, one.text, self.anchor(one.group), _rubrics(prompt))


def _rubrics(prompt: Prompt) -> tuple[str, ...]:
    return tuple(prompt.info.get(GENERAL, {}).get("rubrics", ()))
