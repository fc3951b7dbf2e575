"""`glm5 trajectories STORE [SAMPLE]`: what became of every sample, and what one was made of.

Read next: `glm5.posttrain.store`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from glm5.utils.config_io import parse
from glm5.utils.errors import ConfigError, UserError

if TYPE_CHECKING:
    from glm5.posttrain.record import Record
    from glm5.posttrain.store import Sample, Store

# The marks of a token's kind in a listing.
DRAWN, GIVEN = "*", " "


@dataclass(frozen=True)
class Options:
    """List the samples of a trajectory store, show one token by token, or export them."""

    store: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="STORE")] = ""
    """The store's file."""
    sample: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SAMPLE")] = ""
    """Show this sample; without it, list them."""
    status: str | None = None
    """Only these: running, delivered, or a final state (trained, stale, environment_failed, ...)."""
    task: str | None = None
    """Only of this task."""
    group: str | None = None
    """Only of this group."""
    outcome: str | None = None
    """Only with this outcome: ok, task_failed, timeout, env_crash, ..."""
    min_reward: float | None = None
    """Only with at least this reward."""
    max_reward: float | None = None
    """Only with at most this reward."""
    limit: int | None = 50
    """At most so many rows; None for all. An export has all, unless told."""
    tokenizer: str | None = None
    """A model's directory: show a sample's tokens as text too."""
    messages: bool = False
    """Show a sample as messages, in OpenAI's form, one a line; needs the tokenizer."""
    export: str | None = None
    """Write the samples to this file: .jsonl or .parquet."""
    json: bool = False
    """Print JSON."""


def main(argv: Sequence[str]) -> int:
    """Parse `argv` (without the command's name), print. Returns 0."""
    options = parse(Options, argv, prog="glm5 trajectories", config_option=False)
    if not options.store:
        raise UserError("no store is named", "Give its file: glm5 trajectories runs/agents/trajectories.sqlite")
    from glm5.posttrain.outcome import Outcome
    from glm5.posttrain.store import STATUSES, Store

    for name, value, known in (("status", options.status, STATUSES), ("outcome", options.outcome, tuple(Outcome))):
        if value is not None and value not in known:
            raise UserError(f"--{name} {value!r} is not known", f"Use one of {', '.join(known)}")
    if options.limit is not None and options.limit < 0:
        raise ConfigError("--limit", options.limit, "must be at least 0, or None")
    if Path(options.store).is_dir():
        mend = f"Give the file in it: {Path(options.store) / 'trajectories.sqlite'}"
        raise UserError(f"{options.store} is a directory", mend)
    with Store(options.store, read_only=True) as store:
        if options.sample:
            _show(store, options)
        elif options.export is not None:
            _export(store, options, explicit=any(a.split("=")[0] == "--limit" for a in argv))
        else:
            _list(store, options)
    return 0


def _found(store: Store, options: Options, limit: int | None) -> list[Sample]:
    return store.samples(
        status=options.status,
        task=options.task,
        group=options.group,
        outcome=options.outcome,
        min_reward=options.min_reward,
        max_reward=options.max_reward,
        limit=limit,
    )


def _list(store: Store, options: Options) -> None:
    counts, found = store.counts(options.task), _found(store, options, options.limit)
    if options.json:
        told = {"started": counts.started, **counts.by_status}
        print(json.dumps({"counts": told, "samples": [sample.to_json() for sample in found]}, ensure_ascii=False))
        return
    parts = [f"{count:,} {status}" for status, count in counts.by_status.items() if count]
    print(f"{counts.started:,} started = {' + '.join(parts) or '0'}")
    if not found:
        return
    width = max(len(sample.id) for sample in found)
    print(f"{'sample':<{width}}  {'status':<18}  {'outcome':<19}  {'reward':>7}  {'oldest':>6}  {'step':>5}  task")
    for one in found:
        reward = "" if one.reward is None else f"{one.reward:.3f}"
        cells = f"{one.status:<18}  {one.outcome or '':<19}  {reward:>7}  {_or(one.oldest):>6}  {_or(one.step):>5}"
        print(f"{one.id:<{width}}  {cells}  {one.task}")
    if len(found) == options.limit:
        print(f"... the first {options.limit}; --limit shows more")


def _or(value: int | None) -> str:
    return "" if value is None else str(value)


def _show(store: Store, options: Options) -> None:
    sample, records = store.sample(options.sample), store.records(options.sample)
    if options.messages:
        _messages(records, options)
        return
    if options.json:
        told: dict[str, Any] = {**sample.to_json(), "trajectories": [record.to_json() for record in records]}
        print(json.dumps(told, ensure_ascii=False))
        return
    for name, value in sample.to_json().items():
        if value not in (None, ""):
            print(f"{name:<10} {value}")
    spell = _speller(options.tokenizer)
    for part, record in enumerate(records):
        size = f"{len(record.ids)} tokens, {sum(record.drawn)} drawn"
        print(f"\ntrajectory {part}: {size}, temperature {record.temperature}")
        for turn in record.turns:
            print(f"  {json.dumps(dict(turn), ensure_ascii=False)}")
        _tokens(record, spell, options.limit)


def _messages(records: Sequence[Record], options: Options) -> None:
    if options.tokenizer is None:
        raise UserError("--messages needs the tokenizer", "Give the model's directory: --tokenizer DIR")
    from glm5.posttrain.transcript import transcript
    from glm5.text.messages import messages_to_openai
    from glm5.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(options.tokenizer)
    for part, record in enumerate(records):
        for message in messages_to_openai(transcript(record, tokenizer).messages):
            print(json.dumps({"trajectory": part, **message}, ensure_ascii=False))


def _tokens(record: Record, spell: Any, limit: int | None) -> None:
    print("    place  drawn      id   logprob  version   kept  text")
    for place, id in enumerate(record.ids[:limit]):
        drawn = record.drawn[place]
        kept = None if record.kept is None else record.kept[place]
        cells = (
            f"{record.logprobs[place]:>9.4f}  {record.versions[place]:>7}  {'all' if kept is None else len(kept):>5}"
            if drawn
            else " " * 25
        )
        print(f"  {place:>7}  {DRAWN if drawn else GIVEN:^5}  {id:>6} {cells}  {spell(id)}")
    if limit is not None and len(record.ids) > limit:
        print(f"  ... {len(record.ids) - limit} more; --limit shows them")


def _speller(directory: str | None) -> Any:
    if directory is None:
        return lambda id: ""
    from glm5.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(directory)
    return lambda id: repr(tokenizer.decode([id])) if id < tokenizer.vocab_size else "?"


def _export(store: Store, options: Options, explicit: bool) -> None:
    from glm5.posttrain.export import write_jsonl, write_parquet

    kind = Path(options.export or "").suffix.removeprefix(".")
    writers = {"jsonl": write_jsonl, "parquet": write_parquet}
    if kind not in writers:
        raise UserError(f"--export {options.export}", "Name a file that ends in .jsonl or .parquet")
    found = _found(store, options, options.limit if explicit else None)
    count = writers[kind](store, found, options.export or "")
    if options.json:
        print(json.dumps({"path": options.export, "samples": len(found), "rows": count}))
    else:
        print(f"{count:,} rows of {len(found):,} samples in {options.export}")
