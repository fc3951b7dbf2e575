"""`glm5 distill` as a function: on-policy distillation from earlier stages, which restores what later ones forgot.

The policy answers prompts of each teacher's own domains, once each; a token's advantage is how much likelier its
teacher finds it, sg[log π_teacher - log π_θ], in the place of Â in Eq. 1. In the mean that is the gradient of
-KL(π_θ ‖ π_teacher). No verifier is asked but to measure. The teachers' log-probabilities are made by the model in this
process, under the draws' temperature and kept sets; the report asks engines for them. Source: report, section 3.5,
Eq. 2: groups of 1, batches of 1,024. Read next: `learner`, `advantage`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

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
from glm5.posttrain.update import score
from glm5.train.prepare import Say
from glm5.utils.devices import resolve_device
from glm5.utils.errors import ConfigError
from glm5.utils.files import sha256_file, write_json

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
    """DOMAIN=CHECKPOINT of every domain; one checkpoint may teach several."""
    divergence: Literal["drawn", "full"] = "drawn"
    """drawn: the advantage of each token drawn, as the report; full: the reverse KL of the whole distributions."""
    top: int = 0
    """With full: sum over so many of the policy's likeliest ids, and all others as one; 0 is over all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top < 0 or (self.top and self.divergence == "drawn"):
            raise ConfigError("top", self.top, "must be at least 0, and belongs to divergence=full")
        if self.divergence == "full" and self.learn.indexer_weight:
            raise ConfigError("learn.indexer_weight", self.learn.indexer_weight, "must be 0 with divergence=full")
        for text in self.teachers:
            domain, equals, path = text.partition("=")
            if not (domain and equals and path):
                raise ConfigError("teachers", text, "must be DOMAIN=CHECKPOINT")

    @property
    def paths(self) -> dict[str, str]:
        """A checkpoint for each domain."""
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
    teachers: Mapping[str, GLM5]

    def draw(self) -> tuple[dict[str, Any], Sequence[Group]]:
        first, count = self.ledger.next, self.rollouts.config.prompts
        groups = self.rollouts.draw(list(enumerate(self.order.prompts(first, count), first)))
        for group in groups:
            group.advantages = dict.fromkeys(range(len(group.samples)), 0.0)
            group.copies = dict.fromkeys(group.advantages, 1)
        self.divergence: dict[str, list[float]] = {}
        metrics = {**figures(groups), **self.learn_groups(groups, self.taught)}
        for domain, (total, tokens) in self.divergence.items():
            metrics[f"reverse_kl/{domain}"] = total / max(1.0, tokens)
        sums = [sum(column) for column in zip(*self.divergence.values(), strict=True)]
        metrics["reverse_kl"] = sums[0] / max(1.0, sums[1])
        return metrics, groups

    def taught(self, rows: PolicyRows, groups: Sequence[Group]) -> PolicyRows:
        """The rows with each token's advantage by the teacher of its domain."""
        micro = self.config.micro_batch
        domains = [g.prompt.domain for g in groups for _ in g.learned]
        number_S = torch.tensor([list(self.teachers).index(d) for d in domains], device=rows.rollout_BT.device)
        teacher_BT = torch.where(rows.rollout_BT < 0, -1, number_S[rows.rollout_BT.clamp(min=0)])
        own_BT = self.score(rows)
        advantages_BT = torch.zeros_like(rows.advantages_BT)
        for domain in dict.fromkeys(domains):
            mask_BT = rows.mask_BT & (teacher_BT == list(self.teachers).index(domain))
            held = mask_BT.any(1).nonzero().squeeze(1)  # a teacher reads no row without its domain
            mine = replace(rows.without_replay(), mask_BT=mask_BT).take(held.tolist())
            theirs_BT = torch.zeros_like(own_BT)
            theirs_BT[held] = score(self.teachers[domain], mine, micro_batch=micro, ranks=self.ranks)
            found_BT = distillation_advantages(theirs_BT, own_BT)
            found_BT = torch.where(mask_BT & (found_BT.abs() > ROUNDING), found_BT, 0.0)
            advantages_BT += found_BT
            total, tokens = self.divergence.get(domain, [0.0, 0.0])
            self.divergence[domain] = [total - float(found_BT.sum()), tokens + int(mask_BT.sum())]
        return replace(rows, advantages_BT=advantages_BT, teacher_BT=teacher_BT)


def resolve(config: DistillConfig) -> tuple[DistillConfig, ModelConfig]:
    """The configuration with its device, and the model's own.

    Raises:
        UserError: a checkpoint cannot be used, or a teacher reads other ids than the policy.
    """
    model = model_config(config.checkpoint, "glm5 distill")
    if not config.teachers:
        raise ConfigError("teachers", (), "must name a teacher for every domain: --teachers DOMAIN=CHECKPOINT ...")
    own = Path(config.checkpoint) / "tokenizer.json"
    for domain, path in config.paths.items():
        model_config(path, "glm5 distill")
        other = Path(path) / "tokenizer.json"
        if not other.is_file() or sha256_file(other) != sha256_file(own):
            raise ConfigError(
                "teachers", f"{domain}={path}", "its tokenizer.json is not the policy's: ids would differ"
            )
    return replace(config, device=resolve_device(config.device)), model


def load_teachers(config: DistillConfig, domains: Sequence[str]) -> dict[str, GLM5]:
    """A model for each domain, each checkpoint once in memory.

    Raises:
        ConfigError: domains and teachers do not name each other.
    """
    paths = config.paths
    if paths.keys() != set(domains):
        raise ConfigError("teachers", sorted(paths), f"must name the domains that there are: {', '.join(domains)}")
    loaded = {
        path: load_model(path, device=config.device, dtype="float32").eval().requires_grad_(False)
        for path in dict.fromkeys(paths.values())
    }
    return {domain: loaded[path] for domain, path in paths.items()}


def distill(config: DistillConfig, say: Say = print) -> Distilled:
    """Learn, export and measure; goes on where an earlier start of the same run ended.

    Raises:
        UserError: see `resolve`, `load_teachers`, `prepare_prompts` and `Learner.run`.
    """
    config, _ = resolve(config)

    def plan(prompts: Prompts) -> Plan:
        teachers = load_teachers(config, list(prompts.order.domains))

        def make(model: GLM5, rollouts: Rollouts) -> BatchedLearner:
            learner = Distiller(config.learn, model, config.loss, rollouts, Path(config.run), digest(prompts.train))
            learner.order, learner.teachers = prompts.order, teachers
            if config.divergence == "full":
                learner.update = DivergenceUpdate(learner.update, list(teachers.values()), config.top)
            return learner

        return prompts.held_out, make

    with learned(config, "distill", plan, say) as (learner, path, held_out):
        found = Distilled(Path(config.run), path, learner.finished_steps, learner.ledger.next, held_out)
        result = {"steps": found.steps, "prompts": found.prompts, "held_out": found.held_out}
        learner.ranks.on_main(lambda: write_json(found.run / "result.json", result))
    return found
