"""`glm5 rl reason` as a function: a policy learns from verified answers, on-policy, with the report's Eq. 1.

    prompts of all domains -> groups of answers (`rollouts`) -> verdicts -> advantages -> update -> weights to engine

Trainer and engine run one model definition with one deterministic top-k, ties to the lowest position, and the indexers
rest, so both see the same positions. The engine's log-probabilities are compared with the trainer's in every step
(`train_rollout_logprob_abs_diff`); IcePop masks what lies outside the band. The run's files are `learner`'s and
`batched`'s. Source: report, section 3.2. Read next: `rollouts`, `batched`, `losses`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from glm5.model.config import ModelConfig
from glm5.model.glm5 import GLM5
from glm5.model.weights import load_model
from glm5.parallel.mesh import Mesh
from glm5.posttrain.batched import BatchedLearner, digest
from glm5.posttrain.learner import MAY_DIFFER, LearnConfig, Learner
from glm5.posttrain.losses import LossConfig, glm5_reasoning
from glm5.posttrain.outcome import State
from glm5.posttrain.prompts import Difficulty, Prompt, PromptOrder, prompts_from_rows, read_prompts, require_unique
from glm5.posttrain.rollouts import Group, RolloutConfig, Rollouts, figures
from glm5.posttrain.verify import gym
from glm5.posttrain.verify.pool import VerifierPool
from glm5.text.tokenizer import load_tokenizer
from glm5.train.prepare import Say
from glm5.train.ranks import Ranks
from glm5.train.together import (
    MESH_MAY_DIFFER,
    ProcessConfig,
    check_weights,
    claimed,
    keep_weights,
    settled,
    together,
)
from glm5.utils.config_io import to_dict
from glm5.utils.errors import CheckpointError, ConfigError, DataError
from glm5.utils.files import read_json, write_json
from glm5.utils.runlog import CONFIG, refuse_changes

HELD_OUT_SEED = 1_000_003  # added to the seed: held-out tasks are others than those that are learned from


@dataclass(frozen=True)
class PromptConfig:
    """Which prompts."""

    data: tuple[str, ...] = ()
    """JSONL files of prompts; without any, reasoning-gym's `tasks`."""
    tasks: tuple[str, ...] = ("chain_sum", "gcd", "spell_backward", "letter_counting")
    """Generators of reasoning-gym, one domain each: NAME, or NAME:{"option": value, ...}."""
    count: int = 1000
    """Tasks of each generator."""
    held_out: tuple[str, ...] = ()
    """JSONL files of prompts that are only measured; with `tasks`, others of the same generators are."""
    held_out_count: int = 50
    """Held-out prompts that are measured, of each domain; 0 measures none."""
    ratios: tuple[str, ...] = ()
    """DOMAIN=RATIO of every domain; without any, equal ones, as in the report."""
    difficulty: Difficulty = field(default_factory=Difficulty)
    """Which prompts are worth it, by pass rates in the data."""

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigError("count", self.count, "must be at least 1")
        if self.held_out_count < 0:
            raise ConfigError("held_out_count", self.held_out_count, "must be at least 0; 0 measures none")
        parse_ratios(self.ratios)


@dataclass(frozen=True)
class LoopConfig(ProcessConfig):
    """What is the same for all that draw their own answers: reasoning, general, distillation."""

    checkpoint: str = ""
    """The model to begin with: a directory in the public layout, with its tokenizer."""
    run: str = "runs/reason"
    """Directory of the run. An interrupted run goes on when the same command is given again."""
    prompts: PromptConfig = field(default_factory=PromptConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    learn: LearnConfig = field(default_factory=LearnConfig)
    loss: LossConfig = field(default_factory=glm5_reasoning)
    eval_every: int = 20
    """Steps between measurements of the held-out prompts, which are also measured before and after."""
    page_every: int = 20
    """Steps between pages of sampled rollouts, RUN/rollouts.html; 0 writes none."""
    dry_run: bool = False
    """Read and check the prompts, print what would be done, and keep nothing; where answers are judged, of one group
    that is drawn."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("eval_every", "page_every"):
            if getattr(self, name) < 0:
                raise ConfigError(name, getattr(self, name), "must be at least 0")
        mesh = Mesh.parse(self.mesh)
        if (mesh.pp, mesh.cp, mesh.tp) != (1, 1, 1):
            raise ConfigError("mesh", self.mesh, "may have dp, and ep and shard, which fold on it")


@dataclass(frozen=True)
class ReasonConfig(LoopConfig):
    """Reinforcement learning from verified answers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_groups(self.rollout)


def require_groups(rollout: RolloutConfig) -> None:
    """Whether answers can be better than others.

    Raises:
        ConfigError: there are none beside them.
    """
    if rollout.group < 2:
        raise ConfigError("rollout.group", rollout.group, "must be at least 2: a lone answer is no better than another")


@dataclass(frozen=True)
class Reasoned:
    """What came of it. held_out: success by domain "before" and "after". states: prompts by what became of them."""

    run: Path
    model: Path
    steps: int
    prompts: int
    held_out: dict[str, dict[str, float]]
    states: dict[str, int]


# ---------------------------------------------------------------------------------------------------- prompts
Reader = Callable[[str], list[Prompt]]


@dataclass(frozen=True)
class Prompts:
    """Those to learn from, in their order; those to measure; and what difficulty left out."""

    order: PromptOrder
    train: list[Prompt]
    held_out: list[Prompt]
    left_out: dict[str, int]


def prepare_prompts(config: PromptConfig, seed: int, read: Reader = read_prompts) -> Prompts:
    """Read or make the prompts.

    Args:
        read: what a file's rows are read by.

    Raises:
        UserError: a file has bad rows (all are listed by line), a generator or an option is not known, a domain has no
            ratio, or nothing is left.
    """
    if config.data:
        train = [p for path in config.data for p in read(path)]
        held_out = [p for path in config.held_out for p in read(path)]
    elif not config.tasks:
        raise ConfigError("prompts.tasks", (), "must name generators of reasoning-gym, or prompts.data files")
    else:
        train = prompts_from_rows(task_rows(config.tasks, config.count, seed))
        known = {(p.messages, p.answer) for p in train}
        wanted = config.held_out_count
        spare = prompts_from_rows(task_rows(config.tasks, 4 * wanted, seed + HELD_OUT_SEED)) if wanted else []
        held_out = list({(p.messages, p.answer): p for p in spare if (p.messages, p.answer) not in known}.values())
    require_unique(train, ", ".join(config.data or config.tasks))
    train, left_out = config.difficulty.select(train)
    if not train:
        raise DataError(f"no prompt is left: {left_out}", "Widen prompts.difficulty, or give other prompts")
    per_domain: dict[str, list[Prompt]] = {}
    for p in held_out:
        if len(per_domain.setdefault(p.domain, [])) < config.held_out_count:
            per_domain[p.domain].append(p)
    try:
        order = PromptOrder(train, parse_ratios(config.ratios), seed)
    except ConfigError as e:
        raise ConfigError(f"prompts.{e.field}", e.value, e.rule) from None
    return Prompts(
        order,
        train,
        [p for domain in per_domain.values() for p in domain],
        left_out,
    )


def task_rows(specs: Sequence[str], count: int, seed: int) -> list[dict[str, Any]]:
    """Rows of so many tasks of each generator of reasoning-gym.

    Raises:
        ConfigError: one is not known, or takes no such options.
    """
    rows = []
    for spec in specs:
        name, _, options = spec.partition(":")
        try:
            given = json.loads(options) if options else {}
        except ValueError:
            given = None
        if not isinstance(given, dict):
            raise ConfigError("prompts.tasks", spec, 'must be NAME or NAME:{"option": value}')
        try:
            rows += gym.rows(name, count, seed, **given)
        except ConfigError as e:
            raise ConfigError("prompts.tasks", spec, e.rule) from None
        except (TypeError, AssertionError) as e:
            raise ConfigError("prompts.tasks", spec, f"reasoning-gym does not take these options: {e}") from None
        except ModuleNotFoundError:
            raise ConfigError(
                "prompts.tasks", spec, "needs reasoning-gym: install glm5[rl], or give prompts.data"
            ) from None
    return rows


def parse_ratios(given: Sequence[str]) -> dict[str, float] | None:
    """DOMAIN=RATIO …; None where none is given."""
    ratios = {}
    for text in given:
        domain, equals, ratio = text.rpartition("=")
        if domain in ratios:
            raise ConfigError("ratios", text, "names its domain twice")
        try:
            ratios[domain] = float(ratio)
        except ValueError:
            equals = ""
        if not equals:
            raise ConfigError("ratios", text, "must be DOMAIN=RATIO")
    return ratios or None


# ---------------------------------------------------------------------------------------------------- learning
class Reasoner(BatchedLearner):
    """A learner whose steps are of verified groups."""

    order: PromptOrder

    def draw(self) -> tuple[dict[str, Any], Sequence[Group]]:
        groups = self.rollouts.collect(self.order.prompts, self.ledger.next)
        kept = [g for g in groups if g.state is State.TRAINED]
        metrics: dict[str, Any] = {**figures(groups), "groups": len(kept)}
        if kept:
            self.page(kept[:2])
            metrics |= self.learn_groups(kept)
        return metrics, groups


def resolve(config: ReasonConfig) -> tuple[ReasonConfig, ModelConfig]:
    """The configuration with the device and mesh that it will have here, and the model's own.

    Raises:
        UserError: the checkpoint cannot be used.
    """
    return settled(config), model_config(config.checkpoint, "glm5 rl reason")


def model_config(checkpoint: str, command: str) -> ModelConfig:
    """Of a checkpoint to begin with."""
    if not checkpoint:
        raise ConfigError("checkpoint", "", f"must name the model's directory: {command} CHECKPOINT ...")
    path = Path(checkpoint)
    if (path / "model" / "config.json").is_file():
        raise CheckpointError(f"{path} is a run, not a model", f"Give its model, {path / 'model'}")
    return ModelConfig.load(checkpoint)


@contextmanager
def rollouts_of(
    config: LoopConfig,
    model: GLM5,
    prompts: Sequence[Prompt],
    judged: Sequence[Prompt],
    ranks: Ranks,
    seed: int | None = None,
) -> Iterator[Rollouts]:
    """Engine, tool, and on the main rank verifiers of the prompts that are `judged`; all `prompts` must have room.

    Args:
        seed: of the draws; None is the configuration's.

    Raises:
        UserError: as `verifier_pool` and `Rollouts.refuse_long`.
    """
    with ExitStack() as held:
        pool = ranks.on_main(lambda: held.enter_context(verifier_pool(config.rollout, judged)))
        tokenizer, seed = load_tokenizer(config.checkpoint), config.learn.seed if seed is None else seed
        rollouts = ranks.together(lambda: Rollouts(model, tokenizer, config.rollout, pool, seed=seed, ranks=ranks))
        held.enter_context(closing(rollouts))
        rollouts.refuse_long(prompts)
        yield rollouts


def verifier_pool(config: RolloutConfig, prompts: Sequence[Prompt]) -> VerifierPool:
    """The verifiers of these prompts, loaded.

    Raises:
        UserError: one is not known, or cannot be imported.
    """
    pool = VerifierPool(config.verifiers, config.verifier_timeout)
    try:
        pool.require(sorted({p.verifier for p in prompts}))
    except BaseException:
        pool.close()
        raise
    return pool


def begin(run: Path, checkpoint: str, config: Any, may_differ: Collection[str] = ()) -> None:
    """Refuse, before anything is loaded, to go on with another configuration or other weights."""
    begun = (run / "checkpoints").exists()
    if begun:
        refuse_changes(read_json(run / CONFIG), to_dict(config), {*MAY_DIFFER, *MESH_MAY_DIFFER, *may_differ})
    keep_weights(checkpoint, run / "weights.json", begun=begun)


def reason(config: ReasonConfig, say: Say = print) -> Reasoned:
    """Learn, export and measure; goes on where an earlier start of the same run ended.

    Raises:
        UserError: see `prepare_prompts`, `Rollouts` and `Learner.run`.
    """
    config, _ = resolve(config)

    def plan(prompts: Prompts) -> Plan:
        def make(model: GLM5, rollouts: Rollouts) -> BatchedLearner:
            learner = Reasoner(config.learn, model, config.loss, rollouts, Path(config.run), digest(prompts.train))
            learner.order, learner.pages = prompts.order, config.page_every
            return learner

        return [*prompts.train, *prompts.held_out], make

    with learned(config, "reason", plan, say) as (learner, path, held_out):
        found = reasoned(learner, path, held_out)
    return found


def reasoned(learner: BatchedLearner, path: Path, held_out: dict[str, dict[str, float]]) -> Reasoned:
    """What came of a run, also written into it."""
    run, states = learner.directory, dict(learner.ledger.states)
    found = Reasoned(run, path, learner.finished_steps, learner.ledger.next, held_out, states)
    result = {"steps": found.steps, "prompts": found.prompts, "held_out": found.held_out, "states": found.states}
    learner.ranks.on_main(lambda: write_json(run / "result.json", result))
    return found


# Prompts whose answers verifiers will judge, and what makes the learner.
Plan = tuple[Sequence[Prompt], Callable[[GLM5, Rollouts], BatchedLearner]]


@contextmanager
def learned(
    config: LoopConfig,
    title: str,
    plan: Callable[[Prompts], Plan],
    say: Say,
    read: Reader = read_prompts,
    may_differ: Collection[str] = (),
) -> Iterator[tuple[BatchedLearner, Path, dict[str, dict[str, float]]]]:
    """What reasoning and distillation share: prepare, learn, export. Gives the learner, the model's directory, success
    of held-out prompts, while the run is still this process's alone.

    Args:
        config: resolved. plan: called before the policy is loaded, on every rank. read: as in `prepare_prompts`.
            may_differ: fields that a resumed run may change, besides those of every run.
    """
    run, kept = Path(config.run), replace(config, dry_run=False)
    changing = {*MESH_MAY_DIFFER, *may_differ}
    with together(config, run, ModelConfig.load(config.checkpoint)) as world:
        ranks = Ranks(world)
        with claimed(run, ".rl.lock", ranks):
            ranks.on_main(lambda: begin(run, config.checkpoint, kept, may_differ))
            prompts = ranks.together(lambda: prepare_prompts(config.prompts, config.learn.seed, read))
            for line in describe(prompts):
                say(line)
            device = config.device if world is None else str(world.device)
            judged, make = plan(prompts)
            model = load_model(config.checkpoint, device=device, dtype="float32")
            check_weights(model, world)
            everyone = [*prompts.train, *prompts.held_out]
            with rollouts_of(config, model, everyone, judged, ranks) as rollouts:
                if rollouts.varies:
                    say(f"rollouts  not batch-invariant: {rollouts.varies}")
                learner = make(model, rollouts)
                if config.loss.kl_weight:
                    reference = load_model(config.checkpoint, device=device, dtype="float32")
                    learner.reference = reference.eval().requires_grad_(False)
                measure = Measure(run / "held-out.json", lambda: rollouts.success(prompts.held_out), learner)
                if prompts.held_out:
                    learner.measure, learner.measure_every = measure, config.eval_every
                learner.run(resolved=kept, title=title, may_differ=changing)
                path = learner.export(rollouts.tokenizer)
            yield learner, path, measure.ends()


class Measure:
    """Success on held-out prompts by domain, kept by step in a file, so that a resumed run knows how it began."""

    def __init__(self, path: Path, success: Callable[[], dict[str, float]], learner: Learner) -> None:
        self.path, self.success, self.learner = path, success, learner
        self.found: dict[str, dict[str, float]] = learner.ranks.from_main(
            lambda: read_json(path) if path.exists() and learner.store.list() else {}
        )

    def __call__(self) -> dict[str, Any]:
        success = self.success()
        self.found[str(self.learner.finished_steps)] = success
        self.learner.ranks.on_main(lambda: write_json(self.path, self.found))
        return {f"held_out/{domain}": value for domain, value in success.items()}

    def ends(self) -> dict[str, dict[str, float]]:
        """Before the first step and after the last; empty where nothing was measured."""
        if not self.found:
            return {}
        last = str(max(map(int, self.found)))
        return {"before": self.found.get("0", {}), "after": self.found[last]}


def describe(prompts: Prompts) -> list[str]:
    """What there is to learn from, a line a domain."""
    held = [p.domain for p in prompts.held_out]
    lines = [
        f"prompts   {domain}: {len(here):,}, {prompts.order.mixture.shares[domain]:.0%} of the mixture; "
        f"{held.count(domain)} held out"
        for domain, here in prompts.order.domains.items()
    ]
    if prompts.left_out:
        lines.append(f"          left out: {', '.join(f'{n:,} {why}' for why, n in prompts.left_out.items())}")
    return lines
