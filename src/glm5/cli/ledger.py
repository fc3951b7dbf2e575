"""`glm5 ledger`: print the ledger of a configuration, or plan whether a layout fits on a device.

Tables, or JSON on request. No torch. Read next: `glm5.ledger.table` and `glm5.ledger.plan`, which do the reckoning;
`ledger_tables`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from glm5.cli.ledger_tables import Block, print_blocks, print_lines, without_empty_columns
from glm5.ledger.claims import Row, Verdict
from glm5.ledger.devices import device
from glm5.ledger.disputes import MEASURED, WORDS
from glm5.ledger.memory import CachePrecision, Layout, Precision
from glm5.ledger.plan import Plan, StagePlan, Work, plan
from glm5.ledger.propose import mesh_of, propose
from glm5.ledger.table import as_json, is_published, ledger, tally
from glm5.model.config import ModelConfig
from glm5.model.presets import PRESETS, VARIANTS
from glm5.utils.config_io import parse
from glm5.utils.errors import ConfigError, UserError


def _opt(metavar: str) -> Any:
    """How `--help` prints an option whose default its own text explains."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="")


@dataclass(frozen=True)
class LedgerOptions:
    """Recompute every published figure of GLM-5 from its configuration, or (with --fit) plan memory for a layout.

    The exit status is 0, or 1 if a plan does not fit.
    """

    config: str = "glm5"
    """Preset (glm5, mini, nano), or the path of a config.json or of the directory that holds one."""
    variant: Annotated[Literal["gqa-8", "mla-192", "mla-256"] | None, _opt("gqa-8 | mla-192 | mla-256")] = None
    """Exchange the attention for one of the variants of the report's Table 1."""
    context: Annotated[int | None, _opt("N")] = None
    """Tokens of a sequence. Default: all positions of the configuration."""
    json: bool = False
    """Print JSON."""
    only: Annotated[Verdict | None, _opt("VERDICT")] = None
    """Show only the rows with this verdict: exact, consistent, conflict or "not computable"."""

    fit: Annotated[str | None, _opt("DEVICE")] = None
    """Plan for this device: h100, h200, b200, a100-80, l40s, rtx4090, ascend-910c, or cpu:NN (GB)."""
    tp: int = 1
    """Tensor parallel ranks."""
    ep: int = 1
    """Expert parallel ranks, over the tp x cp x dp ranks of a pipeline stage."""
    pp: int = 1
    """Pipeline stages."""
    cp: int = 1
    """Context parallel ranks."""
    dp: int = 1
    """Data parallel ranks."""
    batch: int = 1
    """Sequences in flight over all data parallel ranks, or per training step."""
    dtype: Annotated[Precision | None, _opt("fp32 | bf16 | fp8 | w4a8")] = None
    """Precision of the weights. Default: the configuration's."""
    cache_dtype: Annotated[CachePrecision | None, _opt("fp32 | bf16 | fp8")] = None
    """Precision of the cache. Default: fp32 with fp32 weights, else bf16."""
    training: bool = False
    """Plan a training step in place of serving."""
    no_mtp: bool = False
    """Leave out the MTP block and its cache."""
    chunk: int = 8192
    """Most tokens in one forward pass of serving."""
    utilization: float = 0.9
    """Share of the device that the plan may fill."""
    devices: Annotated[int | None, _opt("N")] = None
    """Propose layouts of so many devices for training, in place of planning one."""


_PLANNING = "tp ep pp cp dp batch dtype cache_dtype training no_mtp chunk utilization devices".split()
SHOWN = 12  # proposals


def main(argv: list[str]) -> int:
    """Parse `argv` (without the command's name) and run. Returns the exit status."""
    return run(parse(LedgerOptions, argv, prog="glm5 ledger", config_option=False))


def run(options: LedgerOptions) -> int:
    """Print what `options` ask for. Returns 0, or 1 if a plan does not fit.

    Raises:
        UserError: an option, the configuration or the layout cannot be used; the message says how to mend it.
    """
    config = _config(options)
    most = config.max_position_embeddings
    if options.context is not None and not 1 <= options.context <= most:
        raise ConfigError("context", options.context, f"must lie in [1, {most}], this model's positions")
    if options.fit is None:
        _reject_planning_options(options)
        return _show_ledger(config, options)
    if options.only is not None:
        raise UserError("--only picks rows of the ledger, which --fit does not print", "Leave one of them out")
    return _show_plan(config, options)


def _config(options: LedgerOptions) -> ModelConfig:
    if options.config in PRESETS:
        config = PRESETS[options.config]()
    elif Path(options.config).exists():
        config = ModelConfig.load(options.config)
    else:
        rule = f"is neither a preset ({', '.join(PRESETS)}) nor an existing file or directory"
        raise ConfigError("config", options.config, rule)
    return VARIANTS[options.variant](config) if options.variant else config


def _reject_planning_options(options: LedgerOptions) -> None:
    defaults = {f.name: f.default for f in fields(options)}
    given = [f"--{n.replace('_', '-')}" for n in _PLANNING if getattr(options, n) != defaults[n]]
    if given:
        raise UserError(f"{', '.join(given)}: only for a plan, which needs a device", "Add --fit DEVICE")


# --------------------------------------------------------------------------- the ledger
def _show_ledger(config: ModelConfig, options: LedgerOptions) -> int:
    context = config.max_position_embeddings if options.context is None else options.context
    rows = [r for r in ledger(config, context) if options.only in (None, r.verdict)]
    if options.json:
        out = {
            "config": config.to_dict(),
            "published": is_published(config),
            "context": context,
            "verdicts": tally(rows),
            "rows": [as_json(r) for r in rows],
        }
        print(json.dumps(out, ensure_ascii=False, indent=2))
        return 0
    name = options.config + (f" with {options.variant}" if options.variant else "")
    whose = "the published GLM-5" if is_published(config) else "not the published GLM-5, so figures without claims"
    print_blocks(_blocks(rows, f"Ledger of {name} ({whose}), {context:,} tokens"))
    conflicts = [r for r in rows if r.verdict == "conflict" and not r.in_words]
    notes = [f"{r.label}: {r.claim} ({r.source}), but {r.ours} by the formula; {r.why}." for r in conflicts]
    lines = [f"{i:3}. {text}" for i, text in enumerate(notes, 1)]
    print_lines([*(["Why they conflict", *lines, ""] if lines else []), _summary(rows)])
    return 0


def _blocks(rows: list[Row], title: str) -> list[Block]:
    """The computed figures, the disagreements in words, and what cannot be computed."""
    computed: list[tuple[str, ...] | str] = []
    for section, members in groupby((r for r in rows if r.value is not None), key=lambda r: r.section):
        computed.append(section)
        seen = ""
        for r in members:
            # A further claim on the same figure leaves out what the row above already says.
            label, formula = ("", "") if r.key == seen else (r.label, r.formula)
            seen = r.key
            computed.append((label, r.ours, r.claim, r.source, r.verdict or "", formula))
    words: list[tuple[str, ...] | str] = [
        (r.label, r.ours, r.claim, r.source, r.verdict or "", r.why) for r in rows if r.in_words
    ]
    measured: list[tuple[str, ...] | str] = [
        (r.label, r.claim, r.source, r.verdict or "", r.why) for r in rows if r.verdict == "not computable"
    ]
    blocks = [
        Block(title, ("figure", "ours", "claimed", "source", "verdict", "formula"), ("ours", "claimed"), computed),
        Block(WORDS, ("matter", "we follow", "other reading", "source", "verdict", "why"), (), words),
        Block(MEASURED, ("figure", "claimed", "source", "verdict", "needs"), (), measured),
    ]
    return [without_empty_columns(b) for b in blocks if b.rows]


def _summary(rows: list[Row]) -> str:
    counts = tally(rows)
    free = sum(r.verdict is None for r in rows)
    if not any(counts.values()):
        return f"{free} figures."
    listed = ", ".join(f"{n} {verdict}" for verdict, n in counts.items() if n)
    ending = f"; {free} figures without a claim." if free else "."
    return f"{sum(counts.values())} claims: {listed}{ending}"


# --------------------------------------------------------------------------- the plan
def _show_plan(config: ModelConfig, options: LedgerOptions) -> int:
    if options.no_mtp:
        config = config.replace(num_nextn_predict_layers=0)
    precision = options.dtype or ("fp32" if config.dtype == "float32" else "bf16")
    work = Work(
        batch=options.batch,
        context=config.max_position_embeddings if options.context is None else options.context,
        precision=precision,
        cache=options.cache_dtype or ("fp32" if precision == "fp32" else "bf16"),
        training=options.training,
        chunk=options.chunk,
    )
    layout = Layout(options.tp, options.ep, options.pp, options.cp, options.dp)
    assert options.fit is not None
    if options.devices is not None:
        return _show_proposals(config, work, layout, options)
    found = plan(config, layout, work, device(options.fit), options.utilization)
    if options.json:
        print(json.dumps(_plan_json(found, options), ensure_ascii=False, indent=2))
    else:
        _print_plan(found, options)
    return 0 if found.fits else 1


def _show_proposals(config: ModelConfig, work: Work, layout: Layout, options: LedgerOptions) -> int:
    if options.devices is None or options.devices < 1:
        raise ConfigError("devices", options.devices, "must be at least 1")
    if layout != Layout():
        raise UserError("--devices proposes what --tp, --ep, --pp, --cp and --dp would say", "Leave those out")
    assert options.fit is not None
    found = propose(config, work, device(options.fit), options.devices, options.utilization)
    tokens = work.batch * work.context
    if options.json:
        rows = [
            {
                "mesh": mesh_of(p.layout),
                "bytes": p.plan.worst.total,
                "compute_seconds": p.compute,
                "wire_seconds": p.wire,
                "idle": p.idle,
                "seconds": p.seconds,
            }
            for p in found
        ]
        print(json.dumps({"config": options.config, "device": options.fit, "proposals": rows}, indent=2))
        return 0
    title = (
        f"training {options.config} on {options.devices} × {options.fit}: batch {work.batch:,} × {work.context:,} "
        f"tokens; {len(found):,} layouts fit"
    )
    columns = ("mesh", "GB a device", "compute", "on the wire", "idle", "step", "tokens/s a device")
    table: list[tuple[str, ...] | str] = [
        (
            mesh_of(p.layout),
            f"{p.plan.worst.total / 1e9:,.1f}",
            f"{p.compute:,.3g} s",
            " ".join(f"{axis} {s:.2g}" for axis, s in p.wire.items()) or "nothing",
            f"{p.idle:.0%}",
            f"{p.seconds:,.3g} s",
            f"{tokens / p.seconds / options.devices:,.0f}",
        )
        for p in found[:SHOWN]
    ]
    print_blocks([Block(title, columns, columns[1:3] + columns[4:], table)])
    print_lines(["Bounds from nominal rates, with nothing overlapped: for choosing what to measure, not a forecast."])
    return 0


def _plan_json(found: Plan, options: LedgerOptions) -> dict[str, Any]:
    floor = found.decode_floor
    return {
        "config": options.config,
        "device": found.device.name,
        "devices": found.layout.devices,
        "device_bytes": found.device.memory,
        "usable_bytes": found.usable,
        "fits": found.fits,
        "heaviest_stage": found.worst.stage.index,
        "total_bytes": found.worst.total,
        "largest_batch": found.largest_batch,
        "largest_context": found.largest_context,
        "decode_floor_seconds": None if floor is None else {"compute": floor.compute_s, "memory": floor.memory_s},
        "stages": [
            {
                "stage": s.stage.index,
                "layers": list(s.stage.layers),
                "total_bytes": s.total,
                "lines": [{"label": x.label, "kind": x.kind, "bytes": x.bytes, "formula": x.formula} for x in s.lines],
            }
            for s in found.stages
        ],
    }


def _print_plan(found: Plan, options: LedgerOptions) -> None:
    """The heaviest stage, line by line, then the verdict and what would fit."""
    layout, work, worst = found.layout, found.work, found.worst
    kind = "training" if work.training else "serving"
    cut = " ".join(f"{n}={getattr(layout, n)}" for n in ("tp", "ep", "pp", "cp", "dp"))
    cache = "" if work.training else f", {work.cache} cache"
    devices = f"{layout.devices} × {found.device.name}"
    title = (
        f"{kind} {options.config} on {devices} ({cut}): batch {work.batch:,} × {work.context:,} tokens, "
        f"{work.precision} weights{cache}"
    )
    rows: list[tuple[str, ...] | str] = [(x.label, _gb(x.bytes), x.formula) for x in worst.lines]
    rows.append(("together", _gb(worst.total), _where(found, worst)))
    rows.append(("may be filled", _gb(found.usable), f"{options.utilization:.0%} of {_gb(found.device.memory)}"))
    print_blocks([Block(title, ("each device holds", "size", "formula"), ("size",), rows)])
    *more, verdict = _plan_ending(found)
    print_lines([*more, verdict], style="bold green" if found.fits else "bold red")


def _where(found: Plan, worst: StagePlan) -> str:
    if found.layout.pp == 1:
        return "every device"
    return f"stage {worst.stage.index}, the heaviest of {found.layout.pp}"


def _plan_ending(found: Plan) -> list[str]:
    spare = found.usable - found.worst.total
    verdict = f"Fits, {_gb(spare)} to spare" if found.fits else f"Does not fit: {_gb(-spare)} too much"
    out = []
    if found.largest_batch is not None:
        out.append(f"Largest batch at this context: {found.largest_batch:,}.")
    out.append(f"Longest context at this batch: {found.largest_context or 0:,}.")
    floor = found.decode_floor
    if floor is not None and found.fits:
        rate = found.work.batch / floor.seconds
        out.append(
            f"A decoding step takes at least {1e3 * floor.seconds:.2f} ms ({floor.bound}-bound), at most {rate:,.0f} "
            "tokens/s: a floor from data-sheet rates with free communication, not a forecast."
        )
    return [*out, f"{verdict} on each device."]


def _gb(size: int) -> str:
    """Decimal, as devices are sold."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6)):
        if size >= scale:
            return f"{size / scale:,.2f} {unit}"
    return f"{size / 1000:,.1f} kB"
