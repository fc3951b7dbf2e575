"""Prompts of reinforcement learning: JSONL rows, domains at stated ratios, and only those that are hard enough.

    {"prompt": "…" or a list of messages, "answer": …, "verifier": "maths", "domain": "maths"}

and, where wanted, "id", "tools", "info" (what the verifier reads besides), "pass_rate": {"weak": 0.0, "strong": 0.5}.
Source: report, section 3.2: problems that an earlier model rarely or never solves and stronger ones can; domains about
equal. Read next: `glm5.data.mixing`, `verify`.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glm5.data.mixing import Mixture, order_of
from glm5.posttrain.jsonl import asked, read_rows
from glm5.posttrain.verify.pool import Task
from glm5.posttrain.verify.verdict import Verdict
from glm5.text import Message, Tool, tools_from_openai
from glm5.utils.errors import ConfigError, DataError

FIELDS = ("id", "prompt", "answer", "verifier", "domain", "tools", "info", "pass_rate")


@dataclass(frozen=True)
class Prompt:
    """One task. answer, info: JSON values that the verifier reads. weak, strong: share of tries that two policies
    passed, None where that was not measured."""

    id: str
    messages: tuple[Message, ...]
    answer: Any
    verifier: str
    domain: str
    tools: tuple[Tool, ...] = ()
    info: Mapping[str, Any] = field(default_factory=dict)
    weak: float | None = None
    strong: float | None = None

    def task(self, response: str) -> Task:
        """What a verifier is asked about a response."""
        return Task(self.verifier, response, self.answer, self.info)


def read_prompts(path: str | Path) -> list[Prompt]:
    """All rows of a file. A row without an id gets one from its content.

    Raises:
        FileError, DataError: as `read_rows`; ids that are there twice.
    """
    return require_unique(read_rows(path, prompt_from_row), str(path))


def prompts_from_rows(rows: Iterable[Mapping[str, Any]]) -> list[Prompt]:
    """The same of rows that are made in memory, as `glm5.posttrain.verify.gym.rows` makes them."""
    return require_unique([prompt_from_row(row, number) for number, row in enumerate(rows, 1)], "the rows")


def require_unique(prompts: list[Prompt], where: str) -> list[Prompt]:
    """Refuse prompts whose ids are not all different; `where` names them in the message."""
    twice = [id for id, count in Counter(p.id for p in prompts).items() if count > 1]
    if twice:
        raise DataError(f"{where}: id {twice[0]!r} is there twice", "Give each row its own id, or remove copies")
    return prompts


def prompt_from_row(row: Mapping[str, Any], number: int) -> Prompt:
    """Check and take over one row.

    Raises:
        DataError: names the field, its value and the mend.
    """
    for name in row:
        if name not in FIELDS:
            raise DataError(f"{name}: no such field", f"The fields are {', '.join(FIELDS)}")
    for name in ("verifier", "domain"):
        if not isinstance(row.get(name), str) or not row[name]:
            raise DataError(f"{name}: {row[name]!r}" if name in row else f"{name}: missing", "It must be a name")
    if row.get("answer") is None:
        raise DataError("answer: missing", "Give what the verifier compares with")
    messages = tuple(asked(row))
    info = row.get("info", {})
    if not isinstance(info, dict):
        raise DataError(f"info: {info!r}", "It must be an object")
    id = row.get("id", "")
    if not isinstance(id, str):
        raise DataError(f"id: {id!r}", "It must be a string")
    if not id:
        content = json.dumps([row.get("prompt"), row["answer"], row["verifier"], info], sort_keys=True)
        id = hashlib.sha256(content.encode()).hexdigest()[:16]
    rates = row.get("pass_rate", {})
    if not isinstance(rates, dict) or not rates.keys() <= {"weak", "strong"}:
        raise DataError(f"pass_rate: {rates!r}", 'It must be an object with "weak" and "strong"')
    for name, rate in rates.items():
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate <= 1:
            raise DataError(f"pass_rate.{name}: {rate!r}", "It must be a number in [0, 1]")
    tools = tools_from_openai(row.get("tools"))
    return Prompt(
        id, messages, row["answer"], row["verifier"], row["domain"], tools, info, rates.get("weak"), rates.get("strong")
    )


# ---------------------------------------------------------------------------------------------------- difficulty
@dataclass(frozen=True)
class Difficulty:
    """Which prompts are worth training on, by two policies' pass rates. A rate not measured rules nothing out."""

    weak_at_most: float = 1.0
    """The policy that is trained, or an earlier one, passes at most so often: what it can do already is left out."""
    strong_at_least: float = 0.0
    """A stronger one passes at least so often: what nobody solves, or has a wrong answer, is left out."""

    def __post_init__(self) -> None:
        for name in ("weak_at_most", "strong_at_least"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(name, getattr(self, name), "must lie in [0, 1]")

    def select(self, prompts: Sequence[Prompt]) -> tuple[list[Prompt], dict[str, int]]:
        """Those that stay, and how many did not for which reason."""
        kept: list[Prompt] = []
        left: Counter[str] = Counter()
        for p in prompts:
            if p.weak is not None and p.weak > self.weak_at_most:
                left["too easy"] += 1
            elif p.strong is not None and p.strong < self.strong_at_least:
                left["too hard"] += 1
            else:
                kept.append(p)
        return kept, dict(left)


def pass_rate(verdicts: Sequence[Verdict]) -> float | None:
    """Mean reward of the tries that have a verdict; None where none has."""
    known = [v.reward for v in verdicts if v.reward is not None]
    return sum(known) / len(known) if known else None


# ---------------------------------------------------------------------------------------------------- order
class PromptOrder:
    """Endless prompts, domains at stated ratios, each domain shuffled anew in each of its passes.

    Prompt i of a run is a function of i and the seed.

    Args:
        prompts: of all domains. ratios: by domain; None is equal ones, as the report's. seed: of the orders.

    Raises:
        ConfigError: ratios and domains do not name each other.
    """

    def __init__(self, prompts: Sequence[Prompt], ratios: Mapping[str, float] | None = None, seed: int = 0) -> None:
        self.domains: dict[str, list[Prompt]] = {}
        for p in prompts:
            self.domains.setdefault(p.domain, []).append(p)
        ratios = dict.fromkeys(self.domains, 1.0) if ratios is None else ratios
        if ratios.keys() != self.domains.keys():
            rule = f"must name the domains that there are: {', '.join(self.domains) or 'none'}"
            raise ConfigError("ratios", dict(ratios), rule)
        self.mixture, self.seed = Mixture(ratios), seed
        self._order = lru_cache(maxsize=2 * len(ratios))(self._epoch_order)

    def prompts(self, index: int, count: int) -> list[Prompt]:
        """Prompts `index` to `index + count - 1` of the run."""
        found = []
        for domain, number in self.mixture.samples(index, count):
            here = self.domains[domain]
            epoch, place = divmod(number, len(here))
            found.append(here[int(self._order(domain, epoch)[place])])
        return found

    def _epoch_order(self, domain: str, epoch: int) -> NDArray[np.int64]:
        return order_of(domain, len(self.domains[domain]), self.seed, epoch)
