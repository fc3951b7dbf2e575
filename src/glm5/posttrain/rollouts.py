"""Groups of answers to prompts, by an engine in this process, and the verdicts on them.

    prompts -> engine (ids, log-probabilities, kept sets, version of each token, end) -> verifiers -> groups

A group's advantages are made here, or the reason why it trains nothing: no verdict on half of it or more
(`group_dropped`), or equal rewards (`zero_variance`). An answer without a verdict is no 0: it leaves its group, and the
others take its place as the report's rule has it (`advantage.repair`). What a prompt's answers are is a function of the
weights, the run's seed and the prompt's number. Source: report, section 3.2. Read next: `reason`.
"""

from __future__ import annotations

import copy
import hashlib
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from glm5.model.glm5 import GLM5
from glm5.posttrain.advantage import (
    Baseline,
    all_equal,
    overlong_penalty,
    repair,
    repaired_advantages,
    reward_figures,
)
from glm5.posttrain.outcome import State
from glm5.posttrain.prompts import Prompt
from glm5.posttrain.pushing import packed, require_arrived
from glm5.posttrain.rows import Trajectory
from glm5.posttrain.verify.pool import VerifierPool
from glm5.posttrain.verify.verdict import Verdict
from glm5.serve.config import EngineConfig
from glm5.serve.engine import Engine
from glm5.serve.request import Request, SamplingParams, TokenInfo
from glm5.text.chat import render
from glm5.text.parser import parse
from glm5.text.tokenizer import Tokenizer
from glm5.utils.errors import ConfigError, DataError


@dataclass(frozen=True)
class RolloutConfig:
    """How answers are drawn and judged."""

    prompts: int = 32
    """Groups that an update learns from (report: 32)."""
    group: int = 32
    """Answers to each prompt (report: 32)."""
    max_new_tokens: int = 1024
    """Longest answer."""
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
    """Lower the reward of answers that come so near to the longest allowed (DAPO); 0 does not."""
    drafts: int = 0
    """Ids that the MTP block drafts in each step of the engine, which changes no answer."""
    invariant: bool = False
    """The engine's batch-invariant mode: the same bits whatever runs beside an answer; on a CPU, more slowly."""
    topk: Literal["stable", "racing"] = "stable"
    """racing: where index scores tie at the k-th place, engine and trainer take positions at random, as kernels whose
    threads race do; to see what that breaks. Once interrupted, such a run does not end in the same bytes."""
    router_replay: bool = False
    """Train with the experts that the engine chose, token by token, so that routers cannot disagree."""
    memory_gib: float = 1.0
    """Of the engine's cache."""
    verifiers: int = 2
    """Checks at a time, each in a process of its own."""
    verifier_timeout: float = 10.0
    """Seconds after which a check is killed and the answer has no verdict."""

    def __post_init__(self) -> None:
        for name in ("prompts", "group", "max_new_tokens", "rounds"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "must be at least 1")
        if not 0 < self.temperature <= 100:
            raise ConfigError("temperature", self.temperature, "must be above 0: greedy answers teach nothing")
        if self.router_replay and self.invariant:
            raise ConfigError("router_replay", True, "the engine's batch-invariant mode does not tell its experts")
        if not 0 <= self.overlong_margin <= self.max_new_tokens:
            raise ConfigError("overlong_margin", self.overlong_margin, f"must lie in [0, {self.max_new_tokens}]")


@dataclass
class Sample:
    """One answer.

    Args:
        ids: a stop id included. info: of each. versions: of the weights that each came from.
        finish: stop or length. text: what the verifier read. verdict: None before, and where nobody asks.
        experts: where asked for, int16 [tokens - 1, X, M]: the choice of the X MoE layers for prompt and answer.
        checks, accepted: how often drafts were checked, and how many of them counted.
    """

    ids: list[int] = field(default_factory=list)
    info: list[TokenInfo] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    finish: str = ""
    text: str = ""
    verdict: Verdict | None = None
    reward: float | None = None
    experts: Tensor | None = None
    checks: int = 0
    accepted: int = 0


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
        return {
            "number": self.number,
            "id": self.prompt.id,
            "domain": self.prompt.domain,
            "state": str(self.state),
            "rewards": self.rewards,
            "no_verdict": dict(sorted(causes.items())),
            "tokens": sum(len(s.ids) for s in self.samples),
            "versions": sorted({v for s in self.samples for v in s.versions}),
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
        model: whose weights the engine begins with, as version "0". pool: None where nobody judges.
        seed: of the run's draws.

    `judges` gives the verdicts on all answers of some groups, in their order: the verifiers', unless it is replaced.
    """

    def __init__(
        self, model: GLM5, tokenizer: Tokenizer, config: RolloutConfig, pool: VerifierPool | None, *, seed: int
    ) -> None:
        self.config, self.tokenizer, self.pool, self.seed = config, tokenizer, pool, seed
        settings = EngineConfig(
            memory_gib=config.memory_gib,
            drafts=config.drafts,
            invariant=config.invariant,
            overlap=False,
            cuda_graphs=config.topk == "stable",
        )
        if config.router_replay and not any(map(model.config.is_moe, range(model.config.num_hidden_layers))):
            raise ConfigError("router_replay", True, "this model has no experts")
        served = copy.deepcopy(model).eval().requires_grad_(False)
        if config.topk == "racing":
            served.race(seed + 1)
        self.engine = Engine(served, settings, tokenizer)
        self.judges: Judges = self._verified
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @property
    def version(self) -> str:
        return self.engine.weight_version

    # ------------------------------------------------------------------ weights
    def push(self, model: GLM5, version: int) -> None:
        """Give the engine a model's weights, the draft block's included, under a version; every cached prefix goes.

        Raises:
            CheckpointError: the engine's checksums are not those of what was sent.
        """
        began = time.perf_counter()
        update, sums = packed(model, version)
        self.engine.update_weights(update)
        require_arrived(self.engine.checksum(), sums, version)
        self.seconds["weight_sync"] += time.perf_counter() - began

    # ------------------------------------------------------------------ answers
    def ids(self, prompt: Prompt) -> list[int]:
        """A prompt as the engine reads it."""
        rendered = render(
            self.tokenizer,
            prompt.messages,
            prompt.tools,
            enable_thinking=self.config.thinking,
            clear_thinking=False,  # preserved thinking, so that ids only ever grow
            add_generation_prompt=True,
        )
        return list(rendered.ids)

    def refuse_long(self, prompts: Sequence[Prompt]) -> int:
        """Tokens of the longest prompt.

        Raises:
            DataError: one leaves no room for an answer; it names the first such.
        """
        room = self.engine.context - self.config.max_new_tokens
        lengths = [len(self.ids(p)) for p in prompts]
        long = [(p.id, n) for p, n in zip(prompts, lengths, strict=True) if n > room]
        if long:
            what = f"{len(long)} prompts are longer than {room} tokens, {long[0][0]!r} with {long[0][1]} first"
            raise DataError(what, "Remove them, or lower rollout.max_new_tokens")
        return max(lengths)

    def draw(self, wanted: Sequence[tuple[int, Prompt]], *, greedy: bool = False) -> list[Group]:
        """Answers to numbered prompts, not yet judged. `greedy`: the likeliest one to each, for measuring."""
        began, config = time.perf_counter(), self.config
        groups = []
        for number, prompt in wanted:
            ids, count = self.ids(prompt), 1 if greedy else config.group
            groups.append(Group(number, prompt, ids, [Sample() for _ in range(count)]))
            params = SamplingParams(
                max_new_tokens=config.max_new_tokens,
                temperature=0.0 if greedy else config.temperature,
                top_p=config.top_p,
                top_k=config.top_k,
                seed=_seed(self.seed, number),
                stop_token_ids=(self.tokenizer.user_id, self.tokenizer.observation_id),
                n=count,
                logprobs=0,
                kept_set=True,
                routed_experts=config.router_replay and not greedy,
            )
            self.engine.add(Request(ids, params, rid=str(number)))
        by_rid = {str(group.number): group for group in groups}
        routed: defaultdict[tuple[str, int], bytearray] = defaultdict(bytearray)
        while self.engine.has_work:
            for delta in self.engine.step():
                sample = by_rid[delta.rid].samples[delta.index]
                sample.ids += delta.ids
                sample.info += delta.info
                sample.versions += [delta.version or delta.weight_version] * len(delta.ids)
                sample.checks += delta.drafted > 0
                sample.accepted += delta.accepted
                routed[delta.rid, delta.index] += delta.routed
                if delta.finish is not None:
                    sample.finish = delta.finish.type
        for group in groups:
            for sample in group.samples:
                parsed = parse(self.tokenizer, sample.ids, group.prompt.tools, prompt_ids=group.prompt_ids)
                sample.text = parsed.content
        if config.router_replay and not greedy:
            for (rid, index), told in routed.items():
                by_rid[rid].samples[index].experts = self._experts(told)
        self.seconds["rollout"] += time.perf_counter() - began
        return groups

    def _experts(self, told: bytearray) -> Tensor:
        """What the engine told of an answer's tokens, of the layers that have experts."""
        shape = self.engine.model.config
        layers, chosen = shape.num_hidden_layers, shape.num_experts_per_tok
        told_TLM = torch.frombuffer(told, dtype=torch.int32).view(-1, layers, chosen)
        return told_TLM[:, [i for i in range(layers) if shape.is_moe(i)]].to(torch.int16)

    def judge(self, groups: Sequence[Group]) -> None:
        """Ask `judges` about every answer; rewards are set where there is a verdict."""
        began, config = time.perf_counter(), self.config
        samples = [sample for group in groups for sample in group.samples]
        for sample, verdict in zip(samples, self.judges(groups), strict=True):
            sample.verdict, sample.reward = verdict, verdict.reward
            if verdict.reward is not None and config.overlong_margin:
                sample.reward = verdict.reward + overlong_penalty(
                    len(sample.ids), config.max_new_tokens, config.overlong_margin
                )
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


def _seed(run: int, number: int) -> int:
    """Of a prompt's draws: neighbours have nothing in common."""
    return int.from_bytes(hashlib.sha256(f"{run}/{number}".encode()).digest()[:7], "little")
