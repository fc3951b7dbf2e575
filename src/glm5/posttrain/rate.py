"""`glm5 rl rate` as a function: how often a policy passes each prompt, so that runs may choose by difficulty.

Each prompt is tried a number of times; the share of tries that its verifier passes is written into the row's
`pass_rate`, as that of the weak policy (the one that will learn, or an earlier one) or of the strong one. A row that no
try of which has a verdict gets none, also if it had one. The rows are those that were read, one line each and in their
order, so an interrupted run goes on behind the last whole line, if it is told the same and the weights are the same:
OUT.json beside it says what it was told. Source: report, section 3.2 (difficulty filtering).
Read next: `prompts`, whose `Difficulty` reads the rates; `rollouts`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from glm5.model.weights import load_model
from glm5.posttrain.batched import digest
from glm5.posttrain.jsonl import read_rows
from glm5.posttrain.prompts import Prompt, pass_rate, prompt_from_row, require_unique
from glm5.posttrain.reason import LoopConfig, PromptConfig, model_config, rollouts_of, task_rows
from glm5.posttrain.rollouts import RolloutConfig
from glm5.train.prepare import Say
from glm5.train.ranks import Ranks
from glm5.train.together import weight_sums
from glm5.utils.config_io import differences, to_dict
from glm5.utils.devices import resolve_device
from glm5.utils.errors import ConfigError, DataError, FileError
from glm5.utils.files import exclusive, file_errors, read_json, require_writable, write_bytes, write_json

Rated = tuple[dict[str, Any], Prompt]
PLACES = {"checkpoint", "data", "out"}  # what they hold counts, which is compared, and not what they are called
# What a later start may change: where and how fast things are done.
MAY_DIFFER = {"device", "prompts", "memory_gib", "verifiers", "running", "tool_sessions"}


@dataclass(frozen=True)
class RateConfig:
    """Measure how often a policy passes each prompt."""

    checkpoint: str = ""
    """The policy: a directory in the public layout, with its tokenizer."""
    data: tuple[str, ...] = ()
    """JSONL files of prompts; without any, reasoning-gym's `tasks`."""
    tasks: tuple[str, ...] = PromptConfig.tasks
    """Generators of reasoning-gym: NAME, or NAME:{"option": value, ...}."""
    count: int = 1000
    """Tasks of each generator."""
    out: str = ""
    """The file of rated prompts, JSONL. One that is there already goes on behind its last line."""
    policy: Literal["weak", "strong"] = "weak"
    """Whose rate it is."""
    rollout: RolloutConfig = field(default_factory=lambda: RolloutConfig(group=8))
    """How answers are drawn: `group` is the number of tries, `prompts` how many prompts are tried at a time."""
    seed: int = 0
    """Of the tasks and of the draws."""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto is a GPU where there is one."""

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigError("count", self.count, "must be at least 1")
        if not (self.data or self.tasks):
            raise ConfigError("tasks", (), "must name generators, where data names no files")


def read_rated(config: RateConfig) -> list[Rated]:
    """The rows to rate, each with its prompt.

    Raises:
        UserError: a file has bad rows (all are listed by line), or ids are there twice.
    """

    def both(row: Mapping[str, Any], number: int) -> Rated:
        return dict(row), prompt_from_row(row, number)

    if config.data:
        rows = [one for path in config.data for one in read_rows(path, both)]
    else:
        try:
            made = task_rows(config.tasks, config.count, config.seed)
        except ConfigError as e:
            raise ConfigError(e.field.removeprefix("prompts."), e.value, e.rule) from None
        rows = [both(row, n) for n, row in enumerate(made, 1)]
    require_unique([prompt for _, prompt in rows], ", ".join(config.data or config.tasks))
    return rows


def rate(config: RateConfig, say: Say = print) -> dict[str, list[float]]:
    """Write the rated rows; rates by domain, of the rows that have one.

    Raises:
        UserError: see `read_rated`, `rollouts_of`; or `out` holds rows that are not these.
    """
    model_config(config.checkpoint, "glm5 rl rate")
    if not config.out:
        raise ConfigError("out", "", "must name the file to write: --out FILE")
    out = Path(config.out)
    if out.resolve() in [Path(path).resolve() for path in config.data]:
        raise ConfigError("out", config.out, "is one of the files that are read; write another one")
    rows = read_rated(config)
    require_writable(out.parent)
    with exclusive(out.with_name(f".{out.name}.lock")):
        _keep_told(config, out, [prompt for _, prompt in rows])
        done = _done(out, rows)
        device = resolve_device(config.device)
        model = load_model(config.checkpoint, device=device, dtype="float32")
        loop = LoopConfig(
            checkpoint=config.checkpoint, rollout=replace(config.rollout, router_replay=False), device=device
        )
        prompts = [prompt for _, prompt in rows]
        with rollouts_of(loop, model, prompts, prompts, Ranks(), seed=config.seed) as rollouts:
            if rollouts.varies:
                say(f"rollouts  not batch-invariant: {rollouts.varies}")
            size = config.rollout.prompts
            for at in range(len(done), len(rows), size):
                part = rows[at : at + size]
                groups = rollouts.draw([(at + n, prompt) for n, (_, prompt) in enumerate(part)])
                rollouts.judge(groups)
                made = []
                for (row, prompt), group in zip(part, groups, strict=True):
                    found = pass_rate([s.verdict for s in group.samples if s.verdict is not None])
                    rates = {**row.get("pass_rate", {}), config.policy: found}
                    rates = {name: share for name, share in rates.items() if share is not None}
                    others = {name: value for name, value in row.items() if name != "pass_rate"}
                    made.append({**others, "id": prompt.id, **({"pass_rate": rates} if rates else {})})
                done += made
                with file_errors(out, "write"), out.open("ab") as f:
                    f.write(b"".join(map(_line, made)))
                    f.flush()
                    os.fsync(f.fileno())
                say(f"rated     {len(done):,} of {len(rows):,} prompts")
    by_domain: dict[str, list[float]] = {}
    for row in done:
        if config.policy in row.get("pass_rate", {}):
            by_domain.setdefault(row["domain"], []).append(row["pass_rate"][config.policy])
    return by_domain


def _keep_told(config: RateConfig, out: Path, prompts: Sequence[Prompt]) -> None:
    """Write down all that decides the rates, beside them.

    Raises:
        UserError: an earlier start has begun to write `out`, and was told otherwise or had other weights.
    """
    path, told = out.with_name(f"{out.name}.json"), to_dict(config)
    told = {name: value for name, value in told.items() if name not in PLACES}
    now = {"told": told, "weights": weight_sums(config.checkpoint), "prompts": digest(prompts)}
    if out.exists():
        if not path.exists():
            what = f"{out} is there, and {path.name}, which says how its rates were made, is not"
            raise FileError(what, "Bring it back, or name another file as --out")
        before = read_json(path)
        if before.get("prompts") != now["prompts"]:
            raise DataError(f"{out} holds other prompts than these", "Name another file as --out")
        if before.get("weights") != now["weights"]:
            rule = (
                f"its weights are not those that {out} was begun with; bring them back, or name another file as --out"
            )
            raise ConfigError("checkpoint", config.checkpoint, rule)
        for name, (began, value) in differences(before["told"], told).items():
            if name.rpartition(".")[2] not in MAY_DIFFER:
                rule = f"{out} was begun with {began!r}; give that, or name another file as --out"
                raise ConfigError(name, value, rule)
    write_json(path, now)


def _done(out: Path, rows: list[Rated]) -> list[dict[str, Any]]:
    """What an earlier start wrote, without a line that a kill has torn."""
    if not out.exists():
        return []
    with file_errors(out, "read"):
        lines = out.read_bytes().split(b"\n")[:-1]
    try:
        done = [json.loads(line) for line in lines]
        same = [row["id"] for row in done] == [prompt.id for _, prompt in rows[: len(done)]]
    except (ValueError, KeyError, TypeError):
        raise FileError(f"{out} is no file of prompts", "Name another one as --out") from None
    if not same:
        raise DataError(f"{out} holds other prompts than these", "Name another file as --out")
    write_bytes(out, b"".join(map(_line, done)))
    return done


def _line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n"
