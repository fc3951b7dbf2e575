"""Groups of answers to prompts, by an engine in this process, and the verdicts on them.

    prompts -> engine (ids, log-probabilities, kept sets, version of each token, end) -> verifiers -> groups

A group's advantages are made here, or the reason why it trains nothing: no verdict on half of it or more
(`group_dropped`), or equal rewards (`zero_variance`). An answer without a verdict is no 0: it leaves its group, and the
others take its place as the report's rule has it (`advantage.repair`). What a prompt's answers are is a function of the
weights, the run's seed and the prompt's number; so on several ranks each draws its share, with an engine of its own.
Source: report, section 3.2. Read next: `reason`.
"""

from __future__ import annotations

import copy
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from glm5.model.glm5 import GLM5
from glm5.model.weights import disk_tensors
from glm5.posttrain.advantage import (
    Baseline,
    all_equal,
    overlong_penalty,
    repair,
    repaired_advantages,
    reward_figures,
)
from glm5.posttrain.drawing import Drawing, offered, prompt_of
from glm5.posttrain.outcome import State
from glm5.posttrain.prompts import Prompt
from glm5.posttrain.pushing import require_same
from glm5.posttrain.rows import Trajectory
from glm5.posttrain.tools import PythonTool
from glm5.posttrain.verify.pool import VerifierPool
from glm5.posttrain.verify.verdict import Verdict
from glm5.serve.client import WeightUpdate
from glm5.serve.config import EngineConfig
from glm5.serve.engine import Engine
from glm5.serve.request import TokenInfo
from glm5.text.tokenizer import Tokenizer
from glm5.train.ranks import Ranks
from glm5.utils.errors import ConfigError, DataError


@dataclass(frozen=True)
class RolloutConfig:
    """How answers are drawn and judged."""

    prompts: int = 32
    """Groups that an update learns from (report: 32)."""
    group: int = 32
    """Answers to each prompt (report: 32)."""
    max_new_tokens: int = 1024
    """Tokens of the longest answer."""
    temperature: float = 1.0
    """Of the draws; the trainer repeats it."""
    top_p: float = 1.0
    """Draw from the likeliest ids of so much probability together; the trainer repeats the sets."""
    top_k: int = 0
    """Draw from so many of the likeliest ids; 0 is all."""
    thinking: bool = True
    """Begin answers with a thinking block."""
    zero_variance: Literal["resample", "drop"] = "resample"
    """A group whose rewards are all equal teaches nothing: draw other prompts in its place (DAPO), or do without."""
    rounds: int = 4
    """Draw at most so many times for one update; it then learns from what there is."""
    baseline: Baseline = "std"
    """Advantages: (R - mean) / std as the report, R - mean, or R - mean of the others."""
    overlong_margin: int = 0
    """Lower the reward of answers that come within so many tokens of the longest allowed (DAPO); 0 does not."""
    drafts: int = 0
    """Ids that the MTP block drafts in each step of the engine, which changes no answer."""
    invariant: Literal["auto", "on", "off"] = "auto"
    """The engine's batch-invariant mode: an answer has the same bits whatever runs beside it, more slowly. auto: on,
    where model, device and the other options allow it; where not, the run says why."""
    topk: Literal["stable", "racing"] = "stable"
    """racing: where index scores tie at the k-th place, engine and trainer take positions at random, as kernels whose
    threads race do; to see what that breaks. Once interrupted, such a run does not end in the same bytes."""
    tool: Literal["none", "python"] = "none"
    """python: the model may run code in the sandbox in the middle of an answer, as often as `tool_turns`; what comes
    back is read, counts in the answer's length, and is not learned from."""
    tool_turns: int = 4
    """Turns of an answer that may end with calls; it is judged as it stands after the next."""
    tool_timeout: float = 10.0
    """Seconds of each call."""
    tool_sessions: int = 64
    """Interpreters at a time, on each rank."""
    router_replay: bool = False
    """Train with the experts that the engine chose, token by token, so that routers cannot disagree."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the engine's weights and cache. The trainer's are float32; bfloat16 is faster on a GPU, and takes the two
    apart by its rounding, which the correction sees."""
    running: int = 64
    """Answers at a time in the engine, which reads 64 times as many ids in a step. Its recorded steps on a GPU take up
    to 256 of them."""
    memory_gib: float = 1.0
    """GiB of the engine's cache."""
    verifiers: int = 2
    """Checks at a time, each in a process of its own."""
    verifier_timeout: float = 10.0
    """Seconds after which a check is killed and the answer has no verdict."""

    def __post_init__(self) -> None:
        for name in (
            "prompts",
            "group",
            "max_new_tokens",
            "rounds",
            "running",
            "tool_turns",
            "tool_sessions",
            "verifiers",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "must be at least 1")
        for name in ("tool_timeout", "verifier_timeout", "memory_gib"):
            if not 0 < getattr(self, name) < math.inf:
                what = "GiB" if name == "memory_gib" else "seconds"
                raise ConfigError(name, getattr(self, name), f"must be a positive number of {what}")
        if not 0 < self.top_p <= 1:
            raise ConfigError("top_p", self.top_p, "must lie in (0, 1]; 1 keeps all ids")
        if self.top_k < 0:
            raise ConfigError("top_k", self.top_k, "must be at least 0; 0 keeps all ids")
        most = EngineConfig.max_batched_tokens // self.running - 1
        if not 0 <= self.drafts <= most:
            rule = f"must lie in [0, {most}], with running={self.running} answers at a time"
            raise ConfigError("drafts", self.drafts, rule)
        if not 0 < self.temperature <= 100:
            raise ConfigError("temperature", self.temperature, "must be above 0: greedy answers teach nothing")
        if self.invariant == "on" and (why := self.unsuited):
            raise ConfigError("invariant", "on", f"{why}: leave one of them out")
        if not 0 <= self.overlong_margin <= self.max_new_tokens:
            raise ConfigError("overlong_margin", self.overlong_margin, f"must lie in [0, {self.max_new_tokens}]")

    @property
    def unsuited(self) -> str:
        """Why these options do not go with the batch-invariant mode; empty where they do."""
        if self.router_replay:
            return "this mode does not tell the experts that router_replay needs"
        return "nothing is the same twice with topk=racing" if self.topk == "racing" else ""


@dataclass
class Sample:
    """One answer.

    Args:
        ids: stop ids included, and what tools said. info: of each. drawn: whether the policy drew it. versions: of the
            weights that each came from; empty where nobody drew it.
        finish: stop or length. text: what the verifier read. verdict: None before, and where nobody asks.
        experts: where asked for, int16 [tokens - 1, X, M]: the choice of the X MoE layers for prompt and answer.
        checks, accepted: how often drafts were checked, and how many of them counted.
        calls: of tools. failure: of the sandbox, which leaves the answer without a verdict.
    """

    ids: list[int] = field(default_factory=list)
    info: list[TokenInfo] = field(default_factory=list)
    drawn: list[bool] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    finish: str = ""
    text: str = ""
    verdict: Verdict | None = None
    reward: float | None = None
    experts: Tensor | None = None
    checks: int = 0
    accepted: int = 0
    calls: int = 0
    failure: str = ""


@dataclass
class Group:
    """A prompt's answers. number: of the prompt in the run. state: what became of it, `trained` until it is dropped.
    advantages, copies: of the answers that are learned from, by their place in `samples`. beside: rewards of answers by
    others, which count in the baseline and are not learned from. parts: what rewards are made of, one an answer."""

    number: int
    prompt: Prompt
    prompt_ids: list[int]
    samples: list[Sample]
    state: State = State.TRAINED
    advantages: dict[int, float] = field(default_factory=dict)
    copies: dict[int, int] = field(default_factory=dict)
    beside: list[float] = field(default_factory=list)
    parts: dict[str, list[float | None]] = field(default_factory=dict)

    @property
    def rewards(self) -> list[float | None]:
        return [sample.reward for sample in self.samples]

    @property
    def learned(self) -> list[int]:
        """Which answers are learned from, one that fills another's place as often as it does."""
        return [i for i in self.advantages for _ in range(self.copies[i])]

    def trajectories(self, first: int, temperature: float) -> list[Trajectory]:
        """The answers to learn from as rollouts `first`, `first` + 1, …; a repeated one is several."""
        return [
            Trajectory.sampled(
                self.prompt_ids,
                self.samples[i].ids,
                self.samples[i].info,
                first + at,
                drawn=self.samples[i].drawn,
                advantages=self.advantages[i],
                temperature=temperature,
                experts=self.samples[i].experts,
            )
            for at, i in enumerate(self.learned)
        ]

    def record(self) -> dict[str, Any]:
        """The ledger's line."""
        verdicts = [s.verdict for s in self.samples if s.verdict is not None]
        causes = Counter(v.cause for v in verdicts if v.cause)
        error = next((v.detail for v in verdicts if v.cause == "error"), "")
        return {
            "number": self.number,
            "id": self.prompt.id,
            "domain": self.prompt.domain,
            "state": str(self.state),
            "rewards": self.rewards,
            "no_verdict": dict(sorted(causes.items())),
            **({"error": error[:200]} if error else {}),
            "tokens": sum(len(s.ids) for s in self.samples),
            "versions": sorted({v for s in self.samples for v in s.versions if v}),
            **({"calls": calls} if (calls := sum(s.calls for s in self.samples)) else {}),
            **({"parts": self.parts} if self.parts else {}),
            **({"beside": self.beside} if self.beside else {}),
        }


Judges = Callable[[Sequence[Group]], Sequence[Verdict]]


def settle(group: Group, baseline: Baseline) -> None:
    """Give a judged group its advantages, or the state in which it trains nothing."""
    repaired = repair([r is not None for r in group.rewards])
    made = repaired_advantages(group.rewards, baseline, group.beside)
    known = [r for r in group.rewards if r is not None]
    if repaired.dropped or made is None:
        group.state = State.GROUP_DROPPED
    elif all_equal(known):
        group.state = State.ZERO_VARIANCE
    else:
        group.advantages, group.copies = made


class Rollouts:
    """An engine with its own copy of the weights, and the verifiers.

    Args:
        model: whose weights the engine begins with, as version "0"; whole. pool: None where nobody judges.
        seed: of the run's draws. ranks: that share prompts out, all calling the same; all have all groups afterwards.

    `varies` says why an answer's bits depend on what runs beside it, where they do and nobody asked for it. `judges`
    gives the verdicts on all answers of some groups, in their order: the verifiers', unless it is replaced. It is asked
    on the main rank alone, the only one that needs a pool.
    """

    def __init__(
        self,
        model: GLM5,
        tokenizer: Tokenizer,
        config: RolloutConfig,
        pool: VerifierPool | None,
        *,
        seed: int,
        ranks: Ranks | None = None,
    ) -> None:
        self.config, self.tokenizer, self.pool, self.seed = config, tokenizer, pool, seed
        self.ranks = ranks or Ranks()
        settings = EngineConfig(
            memory_gib=config.memory_gib,
            max_running=config.running,
            max_batched_tokens=64 * config.running,
            drafts=config.drafts,
            invariant=config.invariant == "on",
            overlap=False,
            cuda_graphs=config.topk == "stable",
        )
        if config.router_replay and not any(map(model.config.is_moe, range(model.config.num_hidden_layers))):
            raise ConfigError("router_replay", True, "this model has no experts")
        served = copy.deepcopy(model).eval().requires_grad_(False).to(getattr(torch, config.dtype))
        if config.topk == "racing":
            served.race(seed + 1)
        self.engine, self.varies = _engine(served, settings, tokenizer, config)
        self.tool = PythonTool(config.tool_timeout, config.tool_sessions) if config.tool == "python" else None
        self.judges: Judges = self._verified
        if pool is not None:
            pool.beat = self.ranks.beat
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @property
    def version(self) -> str:
        return self.engine.weight_version

    def close(self) -> None:
        """End the tool's interpreters."""
        if self.tool is not None:
            self.tool.close()

    # ------------------------------------------------------------------ weights
    def push(self, model: GLM5, version: int) -> None:
        """Give the engine a model's weights, the draft block's included, under a version; every cached prefix goes.

        They are copied where they lie, and then compared bit by bit.

        Raises:
            CheckpointError: what the engine has is not what was sent.
        """
        began = time.perf_counter()
        sent = dict(disk_tensors(model))
        self.engine.update_weights(WeightUpdate("distributed", weight_version=str(version)), received=sent)
        require_same(dict(disk_tensors(self.engine.model)), sent, version)
        self.seconds["weight_sync"] += time.perf_counter() - began

    # ------------------------------------------------------------------ answers
    def ids(self, prompt: Prompt) -> list[int]:
        """A prompt as the engine reads it."""
        return prompt_of(
            self.tokenizer, prompt.messages, offered(prompt.tools, self.tool), thinking=self.config.thinking
        )

    def refuse_long(self, prompts: Sequence[Prompt]) -> int:
        """Tokens of the longest prompt.

        Raises:
            DataError: one leaves no room for an answer; it names the first such.
        """
        room = self.engine.context - self.config.max_new_tokens
        if room < 1:
            rule = f"must be less than the model's context of {self.engine.context} tokens"
            raise ConfigError("rollout.max_new_tokens", self.config.max_new_tokens, rule)
        lengths = [len(self.ids(p)) for p in prompts]
        long = [(p.id, n) for p, n in zip(prompts, lengths, strict=True) if n > room]
        if long:
            what = f"{len(long)} prompts are longer than {room} tokens, {long[0][0]!r} with {long[0][1]} first"
            raise DataError(what, "Remove them, or lower rollout.max_new_tokens")
        return max(lengths)

    def draw(self, wanted: Sequence[tuple[int, Prompt]], *, greedy: bool = False) -> list[Group]:
        """Answers to numbered prompts, not yet judged. `greedy`: the likeliest one to each, for measuring."""
        return self.ranks.dealt(wanted, lambda mine: self._draw(mine, greedy))

    def _draw(self, wanted: Sequence[tuple[int, Prompt]], greedy: bool) -> list[Group]:
        """This rank's."""
        began, config = time.perf_counter(), self.config
        count = 1 if greedy else config.group
        groups = [Group(number, p, self.ids(p), [Sample() for _ in range(count)]) for number, p in wanted]
        how: dict[str, Any] = dict(seed=self.seed, greedy=greedy, tool=self.tool, beat=self.ranks.beat)
        Drawing(self.engine, self.tokenizer, config, **how)(groups)
        self.seconds["rollout"] += time.perf_counter() - began
        return groups

    def judge(self, groups: Sequence[Group]) -> None:
        """Ask `judges` about every answer; rewards are set where there is a verdict, and the tool did not fail."""
        began, config = time.perf_counter(), self.config
        samples = [sample for group in groups for sample in group.samples]

        def asked() -> tuple[Sequence[Verdict], list[Any]]:
            return self.judges(groups), [(group.parts, group.beside) for group in groups]

        verdicts, made = self.ranks.from_main(asked)
        for group, (parts, beside) in zip(groups, made, strict=True):
            group.parts, group.beside = parts, beside
        for sample, verdict in zip(samples, verdicts, strict=True):
            sample.verdict = Verdict(None, "crash", sample.failure) if sample.failure else verdict
            sample.reward = sample.verdict.reward
            if sample.reward is not None and config.overlong_margin:
                sample.reward += overlong_penalty(len(sample.ids), config.max_new_tokens, config.overlong_margin)
        self.seconds["verify"] += time.perf_counter() - began

    def _verified(self, groups: Sequence[Group]) -> Sequence[Verdict]:
        assert self.pool is not None
        return self.pool.check_all([group.prompt.task(sample.text) for group in groups for sample in group.samples])

    def collect(self, source: Callable[[int, int], list[Prompt]], first: int) -> list[Group]:
        """Groups for one update, those dropped among them; prompts are numbered from `first` without gaps.

        Args:
            source: (number, count) -> prompts.
        """
        found: list[Group] = []
        missing = self.config.prompts
        for _ in range(self.config.rounds):
            at = first + len(found)
            groups = self.draw(list(enumerate(source(at, missing), at)))
            self.judge(groups)
            for group in groups:
                settle(group, self.config.baseline)
            found += groups
            missing -= sum(group.state is State.TRAINED for group in groups)
            if not missing or self.config.zero_variance == "drop":
                break
        return found

    def success(self, prompts: Sequence[Prompt]) -> dict[str, float]:
        """Mean reward of greedy answers by domain; an answer without a verdict is left out."""
        groups = self.draw(list(enumerate(prompts)), greedy=True)
        self.judge(groups)
        of: dict[str, list[float]] = {}
        for group in groups:
            verdict = group.samples[0].verdict
            if verdict is not None and verdict.reward is not None:
                of.setdefault(group.prompt.domain, []).append(verdict.reward)
        return {domain: sum(rewards) / len(rewards) for domain, rewards in of.items()}


def _engine(model: GLM5, settings: EngineConfig, tokenizer: Tokenizer, config: RolloutConfig) -> tuple[Engine, str]:
    """An engine, in the batch-invariant mode if it can be had; else why not."""
    why = config.unsuited if config.invariant == "auto" else ""
    if config.invariant != "auto" or why:
        return Engine(model, settings, tokenizer), why
    try:
        return Engine(model, replace(settings, invariant=True), tokenizer), ""
    except ConfigError as e:
        if e.field != "invariant":
            raise
        return Engine(model, settings, tokenizer), f"the mode {e.rule}"


def figures(groups: Sequence[Group]) -> dict[str, Any]:
    """What a step's rollouts were like, under practitioners' names."""
    samples = [s for g in groups for s in g.samples]
    lengths = [len(s.ids) for s in samples]
    found: dict[str, Any] = {
        "completions/mean_length": sum(lengths) / len(lengths),
        "completions/max_length": max(lengths),
        "completions/clipped_ratio": sum(s.finish == "length" for s in samples) / len(samples),
    }
    checks = sum(s.checks for s in samples)
    if checks:  # tokens a check, the engine's own one included
        found["spec_accept_length"] = 1 + sum(s.accepted for s in samples) / checks
    if any(s.calls for s in samples):
        found["tools/calls"] = sum(s.calls for s in samples) / len(samples)
        found["tools/given_tokens"] = sum(len(s.drawn) - sum(s.drawn) for s in samples) / len(samples)
    known = [[r for r in g.rewards if r is not None] for g in groups]
    if any(s.verdict is not None for s in samples):
        found["no_verdict"] = len(samples) - sum(map(len, known))
        found["groups_dropped"] = sum(g.state is State.GROUP_DROPPED for g in groups)
    found |= reward_figures(known)
    for domain in dict.fromkeys(g.prompt.domain for g in groups):
        here = [r for g, rewards in zip(groups, known, strict=True) if g.prompt.domain == domain for r in rewards]
        if here:
            found[f"rewards/{domain}"] = sum(here) / len(here)
    return found
