"""`glm5 distill` as a function: on-policy distillation from earlier stages, which restores what later ones forgot.

The policy answers prompts of each teacher's own domains, once each; a token's advantage is how much likelier its
teacher finds it, sg[log π_teacher - log π_θ], in the place of Â in Eq. 1. In the mean that is the gradient of
-KL(π_θ ‖ π_teacher). No verifier is asked but to measure. A teacher is a checkpoint, read by the model in this process
under the draws' temperature and kept sets; or an engine, as in the report, in this process or elsewhere (`teachers`).
Source: report, section 3.5, Eq. 2: groups of 1, batches of 1,024. Read next: `teachers`, `batched`, `advantage`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import torch
from torch import Tensor

from glm5.model.config import ModelConfig
from glm5.model.glm5 import GLM5
from glm5.model.weights import load_model
from glm5.posttrain.advantage import distillation_advantages
from glm5.posttrain.batched import BatchedLearner, digest
from glm5.posttrain.divergence import DivergenceUpdate
from glm5.posttrain.prompts import PromptOrder
from glm5.posttrain.reason import LoopConfig, Plan, Prompts, learned, model_config
from glm5.posttrain.rollouts import Group, RolloutConfig, Rollouts, figures
from glm5.posttrain.rows import PolicyRows
from glm5.posttrain.teachers import MOST, EngineTeacher, ServedTeacher, Teacher, told_rows
from glm5.posttrain.update import score
from glm5.text.tokenizer import load_tokenizer
from glm5.train.prepare import Say
from glm5.train.together import settled, weight_sums
from glm5.utils.errors import ConfigError
from glm5.utils.files import read_json, sha256_file, write_json

# Log-probabilities of equal weights differ by less, where rows are cut otherwise. Left in, such advantages would move
# the weights as much as any: Muon's updates have one size, whatever the gradient's.
ROUNDING = 1e-5


@dataclass(frozen=True)
class DistillConfig(LoopConfig):
    """Distillation on the policy's own answers, from a teacher for each domain."""

    run: str = "runs/distill"
    """Directory of the run. An interrupted run goes on when the same command is given again."""
    rollout: RolloutConfig = field(default_factory=lambda: RolloutConfig(prompts=1024, group=1))
    teachers: tuple[str, ...] = ()
    """DOMAIN=CHECKPOINT of every domain, or DOMAIN=http://HOST:PORT of a server (`glm5 serve`); one may teach several.
    A server's key, if it asks for one, is read from the environment variable GLM5_TEACHER_KEY."""
    teacher_engines: bool = False
    """Ask checkpoints through engines in this process, as the report does, in place of the model itself."""
    teacher_memory_gib: float = 1.0
    """GiB of the cache of each such engine."""
    divergence: Literal["drawn", "full"] = "drawn"
    """drawn: the advantage of each token drawn, as the report; full: the reverse KL of the whole distributions."""
    top: int = 0
    """With full: sum over so many of the policy's likeliest ids, and all others as one; 0 is over all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top < 0 or (self.top and self.divergence == "drawn"):
            raise ConfigError("top", self.top, "must be at least 0, and belongs to divergence=full")
        if self.divergence == "full":
            weights = {"learn.indexer_weight": self.learn.indexer_weight, "loss.kl_weight": self.loss.kl_weight}
            for name, weight in {**weights, "loss.entropy_weight": self.loss.entropy_weight}.items():
                if weight:
                    raise ConfigError(name, weight, "must be 0 with divergence=full")
        for text in self.teachers:
            domain, equals, path = text.partition("=")
            if not (domain and equals and path):
                raise ConfigError("teachers", text, "must be DOMAIN=CHECKPOINT, or DOMAIN=http://HOST:PORT")
            if "://" in path and not (served(path) and urlsplit(path).hostname):
                raise ConfigError("teachers", text, "must be http://HOST:PORT, or https, where it is an address")
        named = [text.partition("=")[0] for text in self.teachers]
        if twice := [domain for domain in named if named.count(domain) > 1]:
            raise ConfigError("teachers", twice[0], "has two teachers: give each domain one")
        if not 0 < self.teacher_memory_gib < float("inf"):
            raise ConfigError("teacher_memory_gib", self.teacher_memory_gib, "must be a positive number")
        if self.teacher_engines or any(map(served, self.paths.values())):
            draws = self.rollout
            if (draws.temperature, draws.top_p, draws.top_k) != (1.0, 1.0, 0):
                rule = "must be 1 (and top_p 1, top_k 0) with teachers behind engines, which tell of nothing else"
                raise ConfigError("rollout.temperature", draws.temperature, rule)
            if self.divergence == "full" and not 0 < self.top <= MOST:
                raise ConfigError("top", self.top, f"must lie in [1, {MOST}] with teachers behind engines")

    @property
    def paths(self) -> dict[str, str]:
        """A checkpoint or an address for each domain."""
        return {domain: path for domain, _, path in (text.partition("=") for text in self.teachers)}


@dataclass(frozen=True)
class Distilled:
    """What came of it. held_out: success by domain "before" and "after"."""

    run: Path
    model: Path
    steps: int
    prompts: int
    held_out: dict[str, dict[str, float]]


class Distiller(BatchedLearner):
    """A learner whose steps are of a teacher's log-probabilities, or of its whole distributions."""

    order: PromptOrder
    teachers: Mapping[str, GLM5 | Teacher]
    told: int = 0  # ids that served teachers name at each place

    def draw(self) -> tuple[dict[str, Any], Sequence[Group]]:
        first, count = self.ledger.next, self.rollouts.config.prompts
        groups = self.rollouts.draw(list(enumerate(self.order.prompts(first, count), first)))
        for group in groups:
            group.advantages = dict.fromkeys(range(len(group.samples)), 0.0)
            group.copies = dict.fromkeys(group.advantages, 1)
        self.divergence: dict[str, list[float]] = {}
        self.page(groups[:4], self.taught)
        self.divergence.clear()
        metrics = {**figures(groups), **self.learn_groups(groups, self.taught)}
        for domain, (total, tokens) in self.divergence.items():
            metrics[f"reverse_kl/{domain}"] = total / max(1.0, tokens)
        sums = [sum(column) for column in zip(*self.divergence.values(), strict=True)]
        metrics["reverse_kl"] = sums[0] / max(1.0, sums[1])
        return metrics, groups

    def taught(self, rows: PolicyRows, groups: Sequence[Group]) -> PolicyRows:
        """The rows with each token's advantage by the teacher of its domain."""
        domains = [g.prompt.domain for g in groups for _ in g.learned]
        names = list(self.teachers)
        number_S = torch.tensor([names.index(d) for d in domains], device=rows.rollout_BT.device)
        teacher_BT = torch.where(rows.rollout_BT < 0, -1, number_S[rows.rollout_BT.clamp(min=0)])
        own_BT = self.score(rows)
        advantages_BT = torch.zeros_like(rows.advantages_BT)
        texts = [[*g.prompt_ids, *g.samples[i].ids] for g in groups for i in g.learned]
        shape = (*rows.input_BT.shape, self.told)
        ids_BTK, told_BTK = rows.input_BT.new_zeros(shape), advantages_BT.new_zeros(shape)
        for domain in dict.fromkeys(domains):
            mask_BT = rows.mask_BT & (teacher_BT == names.index(domain))
            teacher = self.teachers[domain]
            if isinstance(teacher, GLM5):
                theirs_BT = self._read(teacher, rows, mask_BT)
            else:
                numbers = [s for s, d in enumerate(domains) if d == domain]
                mine = [texts[s] for s in numbers]
                theirs_BT, ids, told = told_rows(teacher, mine, numbers, rows, self.told, self.ranks)
                ids_BTK, told_BTK = ids_BTK + ids, told_BTK + told
            found_BT = distillation_advantages(theirs_BT, own_BT)
            found_BT = torch.where(mask_BT & (found_BT.abs() > ROUNDING), found_BT, 0.0)
            advantages_BT += found_BT
            total, tokens = self.divergence.get(domain, [0.0, 0.0])
            self.divergence[domain] = [total - float(found_BT.sum()), tokens + int(mask_BT.sum())]
        rows = replace(rows, advantages_BT=advantages_BT, teacher_BT=teacher_BT)
        return replace(rows, told_ids_BTK=ids_BTK, told_logprobs_BTK=told_BTK) if self.told else rows

    def _read(self, teacher: GLM5, rows: PolicyRows, mask_BT: Tensor) -> Tensor:
        """A model's own log-probabilities of the actions in the mask; it reads no row without one."""
        held = mask_BT.any(1).nonzero().squeeze(1)
        mine = replace(rows.without_replay(), mask_BT=mask_BT).take(held.tolist())
        theirs_BT = torch.zeros_like(rows.advantages_BT)
        theirs_BT[held] = score(teacher, mine, micro_batch=self.config.micro_batch, ranks=self.ranks)
        return theirs_BT


def resolve(config: DistillConfig) -> tuple[DistillConfig, ModelConfig]:
    """The configuration with the device and mesh that it will have here, and the model's own.

    Raises:
        UserError: a checkpoint cannot be used, or a teacher reads other ids than the policy.
    """
    model = model_config(config.checkpoint, "glm5 distill")
    if not config.teachers:
        raise ConfigError("teachers", (), "must name a teacher for every domain: --teachers DOMAIN=CHECKPOINT ...")
    own = Path(config.checkpoint) / "tokenizer.json"
    for domain, path in config.paths.items():
        if served(path):
            continue  # asked when the run begins
        model_config(path, "glm5 distill")
        other = Path(path) / "tokenizer.json"
        if not other.is_file() or sha256_file(other) != sha256_file(own):
            raise ConfigError(
                "teachers", f"{domain}={path}", "its tokenizer.json is not the policy's: ids would differ"
            )
    return settled(config), model


def served(path: str) -> bool:
    """Whether a teacher is an address."""
    return path.startswith(("http://", "https://"))


def load_teachers(config: DistillConfig, domains: Sequence[str], device: str) -> dict[str, GLM5 | Teacher]:
    """Whom to ask for each domain, each checkpoint once in memory.

    Raises:
        ConfigError: domains and teachers do not name each other. UserError: a server does not answer, or reads other
            ids.
    """
    paths = config.paths
    if paths.keys() != set(domains):
        raise ConfigError("teachers", sorted(paths), f"must name the domains that there are: {', '.join(domains)}")
    tokenizer = load_tokenizer(config.checkpoint)
    loaded: dict[str, GLM5 | Teacher] = {}
    for path in dict.fromkeys(paths.values()):
        if served(path):
            loaded[path] = there = ServedTeacher(path)
            there.check(tokenizer)
            continue
        model = load_model(path, device=device, dtype="float32").eval().requires_grad_(False)
        loaded[path] = EngineTeacher(model, tokenizer, config.teacher_memory_gib) if config.teacher_engines else model
    return {domain: loaded[path] for domain, path in paths.items()}


def refuse_long(config: DistillConfig, teachers: Mapping[str, GLM5 | Teacher], longest: int) -> None:
    """See that each teacher's engine can read the longest answer to the longest prompt, and draw an id behind it.

    Raises:
        ConfigError: one cannot.
    """
    for domain, teacher in teachers.items():
        if isinstance(teacher, GLM5) or teacher.context is None:
            continue
        room, asked = teacher.context - longest - 1, config.rollout.max_new_tokens
        if asked > room:
            rule = f"must be at most {room}: with a prompt of {longest}, fewer than the context of {teacher.context}"
            raise ConfigError("rollout.max_new_tokens", asked, f"{rule} of the engine of {domain}'s teacher")


def keep_teachers(config: DistillConfig, teachers: Mapping[str, GLM5 | Teacher]) -> None:
    """Write down in RUN/teachers.json which weights teach: checksums of files; of a served one, who it says it is.

    Raises:
        ConfigError: the run has begun with others.
    """
    run = Path(config.run)

    def known(domain: str, teacher: GLM5 | Teacher) -> dict[str, Any]:
        if isinstance(teacher, ServedTeacher):
            return teacher.identity
        return weight_sums(config.paths[domain])

    now = {domain: known(domain, teacher) for domain, teacher in teachers.items()}
    begun = (run / "checkpoints").exists() and (run / "teachers.json").exists()
    before = read_json(run / "teachers.json") if begun else now
    changed = [domain for domain, sums in now.items() if before.get(domain) != sums]
    if changed:
        domain, rule = changed[0], "its weights are not those that this run began with"
        teacher, known_before = teachers[domain], before.get(domain, {})
        if isinstance(teacher, ServedTeacher):
            what = next(name for name, value in teacher.identity.items() if known_before.get(name) != value)
            rule = f"the server's {what} is not the one that this run began with: {known_before.get(what)!r}"
        raise ConfigError(
            "teachers", f"{domain}={config.paths[domain]}", f"{rule}; bring it back, or use another --run"
        )
    write_json(run / "teachers.json", now)


def distill(config: DistillConfig, say: Say = print) -> Distilled:
    """Learn, export and measure; goes on where an earlier start of the same run ended.

    Raises:
        UserError: see `resolve`, `load_teachers`, `prepare_prompts` and `Learner.run`.
    """
    config, _ = resolve(config)

    def plan(prompts: Prompts) -> Plan:
        def make(model: GLM5, rollouts: Rollouts) -> BatchedLearner:
            ranks, domains = rollouts.ranks, list(prompts.order.domains)
            teachers = ranks.together(lambda: load_teachers(config, domains, str(model.device)))
            refuse_long(config, teachers, rollouts.refuse_long(prompts.train))
            ranks.on_main(lambda: keep_teachers(config, teachers))
            for domain, teacher in teachers.items():
                if not isinstance(teacher, GLM5):
                    teacher.beat = ranks.beat
                if isinstance(teacher, ServedTeacher) and not teacher.identity["weights"]:
                    say(f"teacher   {domain}: its server has no checksums, so it is known by name and version only")
            learner = Distiller(config.learn, model, config.loss, rollouts, Path(config.run), digest(prompts.train))
            learner.order, learner.teachers, learner.pages = prompts.order, teachers, config.page_every
            if config.divergence == "full":
                read = [t if isinstance(t, GLM5) else None for t in teachers.values()]
                learner.update = DivergenceUpdate(learner.update, read, config.top)
                learner.told = 0 if None not in read else config.top
            return learner

        return prompts.held_out, make

    with learned(config, "distill", plan, say, may_differ={"teacher_memory_gib"}) as (learner, path, held_out):
        found = Distilled(Path(config.run), path, learner.finished_steps, learner.ledger.next, held_out)
        result = {"steps": found.steps, "prompts": found.prompts, "held_out": found.held_out}
        learner.ranks.on_main(lambda: write_json(found.run / "result.json", result))
    return found
