"""Table 1: GQA-8, MLA, MLA with Muon Split, MLA-256 with Muon Split, on the same tokens in the same order.

The report (section 2.1) finds that MLA trails GQA-8 under plain Muon, that Muon Split closes the gap and keeps the
attention logits stable without clipping, and that MLA-256 matches MLA while decoding costs a third less. Here quality
is held-out bits per byte instead of seven benchmarks' scores. Read next: `table2`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from glm5.data.loader import TokenDataset
from glm5.ledger.compute import decode_attention_flops, pair_flops
from glm5.ledger.memory import cache_bytes
from glm5.ledger.params import by_group, checkpoint_tensors, parameters
from glm5.model.config import ModelConfig
from glm5.model.glm5 import GLM5
from glm5.model.presets import glm5, gqa_8, mla_192, mla_256
from glm5.model.trace import Aux
from glm5.train.evaluate import held_out
from glm5.train.loop import Trainer
from glm5.train.reproduce import published
from glm5.train.reproduce.cells import Cell, Lab, Measured, by_seed
from glm5.train.reproduce.outcome import Chart, Column, Comparison, ReportTable, Row
from glm5.train.reproduce.verdict import Claim, judge
from glm5.train.rows import Rows
from glm5.utils.files import read_json, write_json

# The report's name of a variant -> its directory's, the model, and whether Muon is split by heads.
VARIANTS: dict[str, tuple[str, Callable[[ModelConfig], ModelConfig], bool]] = {
    "GQA-8": ("gqa-8", gqa_8, False),
    "MLA": ("mla", mla_192, False),
    "MLA + Muon Split": ("mla-split", mla_192, True),
    "MLA-256 + Muon Split": ("mla-256-split", mla_256, True),
}
RECORD = "attention.json"
PROBE_ROWS = 4

ABOUT = (
    "Four models see the same tokens in the same order; only the attention and the optimizer's treatment of its "
    "up-projections differ. Dense attention, no MTP, no logit clipping. The report scores seven benchmarks of a model "
    "whose size and tokens it does not give; here quality is bits per byte on held-out files, lower being better."
)


def compare(lab: Lab, seeds: Sequence[int]) -> Comparison:
    """Train and measure all cells, and judge the claims."""
    cells = [
        lab.cell(directory, seed, variant(lab.settings.model), split_heads=split)
        for seed in seeds
        for directory, variant, split in VARIANTS.values()
    ]

    def watch(cell: Cell) -> Callable[[Trainer], None]:
        return LogitRecord(lab.directory / cell.name / RECORD, lab.text.held_out, cell.settings.measure_every)

    def measure(cell: Cell, model: GLM5) -> Measured:
        text = held_out(model, lab.text.held_out, sparse=False, max_rows=cell.settings.held_out_rows)
        final = max(attention_logit_maxima(model, probe(lab.text.held_out, model)))  # also if the record missed it
        course = [[r["step"], max(r["by_layer"])] for r in _recorded(lab.directory / cell.name / RECORD)]
        return {
            "bits_per_byte": text.bits_per_byte,
            "accuracy": text.accuracy,
            "attention_logit_max": max([final, *(value for _, value in course)]),
            "attention_logit_final": final,
            "attention_logit_course": [*(p for p in course if p[0] < cell.train.steps), [cell.train.steps, final]],
        }

    found = lab.results(cells, measure, watch)
    names = {name: directory for name, (directory, _, _) in VARIANTS.items()}

    def of(variant: str, figure: str) -> list[float]:
        return by_seed(found, names[variant], seeds, figure)

    rows = [
        Row(
            name,
            {
                "bits per byte": of(name, "bits_per_byte"),
                "largest logit in training": of(name, "attention_logit_max"),
                "at the end": of(name, "attention_logit_final"),
            },
            cost(variant(lab.settings.model), lab.settings.seq_len),
        )
        for name, (_, variant, _) in VARIANTS.items()
    ]
    columns = [Column("bits per byte", 4), Column("largest logit in training", 1), Column("at the end", 1)]
    verdicts = [
        judge(claim, of(measured, figure), of(reference, figure)) for claim, figure, measured, reference in _claims()
    ]
    first = seeds[0]
    charts = [
        Chart(
            f"Largest attention logit on {PROBE_ROWS} held-out rows, seed {first}",
            "step",
            "logit",
            {n: [(p[0], p[1]) for p in found[d, first]["attention_logit_course"]] for n, d in names.items()},
        ),
        Chart(
            f"Training, seed {first}",
            "step",
            "nats per token",
            {n: lab.curve(d, first, "loss") for n, d in names.items()},
        ),
    ]
    return Comparison(
        title="Table 1: attention variants and Muon Split",
        about=ABOUT,
        report=ReportTable(
            ("mean", *published.TABLE1_BENCHMARKS),
            {n: (f"{published.table1_mean(n):.2f}", *scores) for n, scores in published.TABLE1.items()},
            "The report's scores; higher is better",
        ),
        columns=[*columns, *(Column(name, None) for name in rows[0].fixed)],
        rows=rows,
        seeds=seeds,
        verdicts=verdicts,
        charts=charts,
        notes=_notes(lab.settings.model),
    )


def _claims() -> list[tuple[Claim, str, str, str]]:
    """Claim, the figure that it is about, the variant measured, the reference."""
    mean = {name: f"{published.table1_mean(name):.2f}" for name in published.TABLE1}
    bits, gqa, mla, split, wide = "bits_per_byte", *VARIANTS

    def scores(a: str, b: str) -> str:
        return f"mean score {mean[a]} against {mean[b]}"

    return [
        (Claim("MLA trails GQA-8 under plain Muon: more bits per byte", scores(mla, gqa), "higher"), bits, mla, gqa),
        (Claim("Muon Split improves MLA: fewer bits per byte", scores(split, mla), "lower"), bits, split, mla),
        (Claim("MLA + Muon Split matches GQA-8", scores(split, gqa), "equal"), bits, split, gqa),
        (Claim("MLA-256 + Muon Split matches MLA + Muon Split", scores(wide, split), "equal"), bits, wide, split),
        (
            Claim(
                "Muon Split lowers MLA's largest attention logit",
                "stable without clipping; no figure",
                "lower",
                "logits",
            ),
            "attention_logit_max",
            split,
            mla,
        ),
    ]


# --------------------------------------------------------------------------- attention logits
def probe(dataset: TokenDataset, model: GLM5) -> Rows:
    """The rows on which all variants' logits are measured."""
    return Rows.of(dataset.batch(range(min(PROBE_ROWS, dataset.rows))), model.device)


@torch.no_grad()
def attention_logit_maxima(model: GLM5, rows: Rows) -> list[float]:
    """Largest attention logit of each trunk layer over all heads and visible pairs, dense attention, any variant."""
    aux = Aux(logits=True)
    model.hidden(rows.input_BT, documents=rows.documents_BT, sparse=False, aux=aux)
    return [float(maxima_H.max()) for maxima_H in aux.logit_maxima]


class LogitRecord:
    """Called after each step: every so many, appends the layers' largest logits to a JSON file.

    A resumed run measures again what came after its checkpoint; the file is rewritten whole each time.
    """

    def __init__(self, path: Path, dataset: TokenDataset, every: int) -> None:
        self.path, self.dataset, self.every = path, dataset, every
        self.records: list[dict[str, Any]] | None = None

    def __call__(self, trainer: Trainer) -> None:
        step = trainer.finished_steps
        if self.records is None:
            self.records = [r for r in _recorded(self.path) if r["step"] < step]
        if step % self.every == 0 or step == trainer.config.steps:
            maxima = attention_logit_maxima(trainer.model, probe(self.dataset, trainer.model))
            self.records.append({"step": step, "by_layer": maxima})
            write_json(self.path, self.records)


def _recorded(path: Path) -> list[dict[str, Any]]:
    return read_json(path) if path.exists() else []


# --------------------------------------------------------------------------- costs
def cost(config: ModelConfig, context: int) -> dict[str, float]:
    """What a variant costs, from the ledger, without indexers: Table 1 is about dense attention."""
    groups = by_group(checkpoint_tensors(config))
    layers = config.num_hidden_layers
    return {
        "parameters": parameters(config).total - groups["indexer"],
        "cache elements a token and layer": cache_bytes(config, "bf16").content // 2,
        f"decode attention FLOP a layer, {context} seen": decode_attention_flops(config, context, False).main // layers,
    }


def _notes(model: ModelConfig) -> list[str]:
    notes = []
    for where, base in (("here", model), ("at GLM-5's size", glm5())):
        old, new, gqa = mla_192(base), mla_256(base), gqa_8(base)
        decode = pair_flops(new, absorbed=True) / pair_flops(old, absorbed=True)
        train = pair_flops(new, absorbed=False) / pair_flops(old, absorbed=False)
        against = pair_flops(old, absorbed=True) / pair_flops(gqa, absorbed=True)
        attention = [by_group(checkpoint_tensors(c))["attention"] for c in (new, old)]
        notes.append(
            f"By the ledger, {where}: decoding a pair of query and key costs MLA-256 {decode:.3f} of MLA's FLOP "
            f"(MLA's are {against:.2f} times GQA-8's); training a pair costs it {train:.3f} times MLA's, and its "
            f"attention has {attention[0] / attention[1]:.3f} times MLA's parameters."
        )
    notes.append(
        "GQA-8 has as many groups as divide its heads where a small model has fewer than 16 "
        f"({gqa_8(model).num_key_value_heads} here). Parameters are not matched between GQA and MLA."
    )
    return notes
