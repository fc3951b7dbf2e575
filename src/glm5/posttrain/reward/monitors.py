"""What watches a run for rewards that are gained by other means than better answers, and says so in the run's log.

A step's figures go into its metrics as `monitor/...`; where one of them passes its bound, `alerts` counts it and
`alert` says it, which `glm5 watch` shows. A monitor changes nothing: it cannot know whether longer answers are better
ones. Most compare the last steps with the run's first, since a habit that was always there was not learned from the
reward. They know no more than the metrics hold, so a resumed run alerts like one that was not stopped. Source: report,
section 3.4: reward models are open to hacking, and answers drift towards a model's manner; monitors and bounds are
ours. Needs no torch. Read next: `hybrid`, `glm5.cli.watch`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from glm5.posttrain.reward.rules import has_markdown, openings, repetition
from glm5.utils.errors import ConfigError

PRECISE, SOFT = ("verifier", "rules"), ("model", "judge")
PREFIX = "monitor/"


@dataclass(frozen=True)
class MonitorConfig:
    """Bounds of the monitors; all are ours."""

    window: int = 5
    """Steps whose mean is looked at, at the run's beginning and now."""
    length_growth: float = 1.5
    """Answers so many times as long as at first, where longer ones are also paid better, are an alert."""
    length_correlation: float = 0.3
    """From this correlation of length and reward within groups on, longer answers count as paid better."""
    format_rise: float = 0.3
    """Rise of the share of answers with Markdown, or with the commonest opening, or of what is said again."""
    disagreement: float = 0.1
    """Model and judge rise by so much while rules and verifier fall by as much."""
    overrated: float = 0.5
    """Share of answers that model and judge put above rules and verifier by a half or more."""
    no_verdict: float = 0.2
    """Share of answers without a verdict: a policy may have learned to break its judge."""

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ConfigError("window", self.window, "must be at least 1")
        for name, value in vars(self).items():
            if not 0 < value < math.inf:
                raise ConfigError(name, value, "must be above 0")


@dataclass(frozen=True)
class Watched:
    """An answer as monitors see it. reward: None without a verdict. parts: scores that are known."""

    text: str
    tokens: int
    reward: float | None
    parts: Mapping[str, float | None]


def observed(groups: Sequence[Sequence[Watched]]) -> dict[str, float]:
    """A step's figures. Those that nothing can be said of are not there."""
    answers = [a for group in groups for a in group]
    if not answers:
        return {}
    found = {
        "length": _mean(a.tokens for a in answers),
        "markdown": _mean(has_markdown(a.text) for a in answers),
        "repetition": _mean(repetition(a.text) for a in answers),
        "no_verdict": _mean(a.reward is None for a in answers),
    }
    begun = openings([a.text for a in answers])
    if begun:
        found["opening"] = begun.most_common(1)[0][1] / len(answers)
    correlations = [
        c
        for group in groups
        if (c := _correlation([(a.tokens, a.reward) for a in group if a.reward is not None])) is not None
    ]
    if correlations:
        found["length_correlation"] = _mean(correlations)
    both = [(p, s) for a in answers if (p := _of(a, PRECISE)) is not None and (s := _of(a, SOFT)) is not None]
    if both:
        found["precise"], found["soft"] = _mean(p for p, _ in both), _mean(s for _, s in both)
        found["overrated"] = _mean(s - p >= 0.5 for p, s in both)
    return {f"{PREFIX}{name}": value for name, value in found.items()}


class Monitors:
    """The figures of a run's steps until now, and what they say."""

    def __init__(self, config: MonitorConfig) -> None:
        self.config = config
        self.history: list[dict[str, float]] = []

    def restore(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Take up the figures of earlier steps from a run's metrics, in their order."""
        self.history = [{n: v for n, v in record.items() if n.startswith(PREFIX)} for record in records]

    def watch(self, groups: Sequence[Sequence[Watched]]) -> dict[str, Any]:
        """A step's metrics: its figures, and "alerts" (how many) with "alert" (their texts)."""
        figures = observed(groups)
        self.history.append(figures)
        alerts = list(self._alerts())
        return {**figures, "alerts": len(alerts), **({"alert": alerts} if alerts else {})}

    def _alerts(self) -> Iterable[str]:
        config = self.config
        share = self._now("no_verdict")
        if share is not None and share >= config.no_verdict:
            yield f"no verdict: {share:.0%} of the answers have none"
        share = self._now("overrated")
        if share is not None and share >= config.overrated:
            yield f"disagreement: model or judge praise {share:.0%} of the answers that rules or verifier reject"
        then, now = self._both("length")
        paid = self._now("length_correlation") or 0.0
        if then and now / then >= config.length_growth and paid >= config.length_correlation:
            yield (
                f"length: answers grew from {then:.0f} to {now:.0f} tokens, and longer ones are paid better "
                f"(correlation {paid:.2f})"
            )
        words = {
            "markdown": "answers with Markdown rose",
            "opening": "answers that begin alike rose",
            "repetition": "what an answer says again rose",
        }
        for name, said in words.items():
            then, now = self._both(name)
            if now - then >= config.format_rise:
                yield f"format: {said} from {then:.0%} to {now:.0%}"
        soft, precise = self._both("soft"), self._both("precise")
        rise, fall = soft[1] - soft[0], precise[0] - precise[1]
        if rise >= config.disagreement and fall >= config.disagreement:
            yield (
                f"disagreement: model and judge rose from {soft[0]:.2f} to {soft[1]:.2f} while rules and verifier fell "
                f"from {precise[0]:.2f} to {precise[1]:.2f}"
            )

    def _now(self, name: str) -> float | None:
        """Mean of the last steps, once there are enough of them."""
        known = self._known(name)
        return _mean(known[-self.config.window :]) if len(known) >= self.config.window else None

    def _both(self, name: str) -> tuple[float, float]:
        """Mean of the first steps and of the last; zeros while they would overlap."""
        known, window = self._known(name), self.config.window
        if len(known) < 2 * window:
            return 0.0, 0.0
        return _mean(known[:window]), _mean(known[-window:])

    def _known(self, name: str) -> list[float]:
        return [figures[PREFIX + name] for figures in self.history if PREFIX + name in figures]


def _mean(values: Iterable[float]) -> float:
    there = list(values)
    return math.fsum(there) / len(there)


def _of(answer: Watched, names: Sequence[str]) -> float | None:
    """Mean of the parts of a kind that are known."""
    known = [score for name in names if (score := answer.parts.get(name)) is not None]
    return _mean(known) if known else None


def _correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Pearson's; None where there is none."""
    if len(pairs) < 2:
        return None
    x, y = _mean(a for a, _ in pairs), _mean(b for _, b in pairs)
    xx = math.fsum((a - x) ** 2 for a, _ in pairs)
    yy = math.fsum((b - y) ** 2 for _, b in pairs)
    if not xx or not yy:
        return None
    return math.fsum((a - x) * (b - y) for a, b in pairs) / math.sqrt(xx * yy)
