"""Table 6: from dense to sparse attention, by context length: dense, warm-up only, sparse-adapted, and a control.

The report (section 2.1.1) takes a dense model, trains the indexers alone (warm-up), then everything with sparse
attention, and scores RULER from 4K to 128K: warm-up alone loses at the longest contexts, adaptation recovers it. Here
the measure is held-out bits per byte of the tokens that see so many others, from half of top-k to many times it. The
adapted model has seen more tokens than the dense one, so the same dense model trained on for the same steps, at the
same rate and on the same rows, stands beside it. Read next: `glm5.cli.reproduce`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from glm5.data.loader import TokenDataset
from glm5.kernels.cross_entropy import linear_logprobs
from glm5.model.glm5 import GLM5
from glm5.train.evaluate import indexer_recall
from glm5.train.reproduce import published
from glm5.train.reproduce.cells import Cell, Lab, Measured, by_seed
from glm5.train.reproduce.outcome import Chart, Column, Comparison, ReportTable, Row
from glm5.train.reproduce.verdict import Claim, Verdict, judge
from glm5.train.rows import Rows
from glm5.train.schedule import LearningRate
from glm5.utils.errors import ConfigError, DataError

DENSE, WARMUP, SPARSE = published.TABLE6
CONTROL = "dense, trained on"
# Row -> its directory. The report has no control.
VARIANTS = {DENSE: "dense", WARMUP: "warm-up", SPARSE: "sparse", CONTROL: "control"}
LATER_DATA = 1000  # added to the seed of stages after pretraining, so that they see rows in another order

ABOUT = (
    "One dense model; its indexers warmed up; then everything adapted to sparse attention. Beside the report's rows "
    "stands the dense model trained on for as many steps as the adaptation, at the same rate on the same rows. The "
    "report scores RULER; here each column is held-out bits per byte, lower being better, of the tokens that see so "
    "many positions, given in multiples of the indexer's top-k."
)


def compare(lab: Lab, seeds: Sequence[int]) -> Comparison:
    """Train and measure all cells, and judge the claims."""
    cells = [cell for seed in seeds for cell in _chain(lab, seed)]
    edges = length_edges(lab.settings.model.index_topk, lab.settings.seq_len)

    def measure(cell: Cell, model: GLM5) -> Measured:
        sparse = cell.variant in (VARIANTS[WARMUP], VARIANTS[SPARSE])
        rows = cell.settings.held_out_rows
        recall = indexer_recall(model, lab.text.held_out, max_rows=min(8, rows)) if sparse else []
        return {
            "bits_per_byte": bits_by_context(model, lab.text.held_out, edges, sparse=sparse, max_rows=rows),
            "indexer_recall": sum(recall) / len(recall) if recall else None,
        }

    found = lab.results(cells, measure)
    names = length_names(edges, lab.settings.model.index_topk)

    def of(variant: str, length: int) -> list[float]:
        return by_seed(found, VARIANTS[variant], seeds, "bits_per_byte", length)

    rows = [Row(v, {name: of(v, i) for i, name in enumerate(names)}, {}) for v in VARIANTS]
    recalls = {v: by_seed(found, VARIANTS[v], seeds, "indexer_recall") for v in (WARMUP, SPARSE)}
    topk = lab.settings.model.index_topk
    middles = [math.log2(edge / topk) for edge in edges]
    means = {v: [sum(of(v, i)) / len(seeds) for i in range(len(names))] for v in VARIANTS}
    charts = [
        Chart(
            "Bits per byte against the control's, in percent, mean over seeds",
            "positions seen at most, in powers of two of top-k",
            "%",
            {
                v: [(x, 100 * (a / b - 1)) for x, a, b in zip(middles, means[v], means[CONTROL], strict=True)]
                for v in VARIANTS
            },
        ),
        Chart(f"Warm-up, seed {seeds[0]}", "step", "nats", {"KL": lab.curve(VARIANTS[WARMUP], seeds[0], "indexer_kl")}),
        Chart(
            f"Adaptation and control, seed {seeds[0]}",
            "step",
            "nats per token",
            {v: lab.curve(VARIANTS[v], seeds[0], "loss") for v in (SPARSE, CONTROL)},
        ),
    ]
    ratios = [f"{1024 * n / published.TABLE6_TOPK:g}x" for n in published.TABLE6_LENGTHS]
    return Comparison(
        title="Table 6: dense, warm-up only, sparse-adapted, by context length",
        about=ABOUT,
        report=ReportTable(
            [f"{n}K ({ratio})" for n, ratio in zip(published.TABLE6_LENGTHS, ratios, strict=True)],
            published.TABLE6,
            f"The report's RULER scores; higher is better. In brackets: length over a top-k of {published.TABLE6_TOPK}",
        ),
        columns=[Column(name, 4) for name in names],
        rows=rows,
        seeds=seeds,
        verdicts=_verdicts(of, edges, topk),
        charts=charts,
        notes=[
            f"Top-k is {topk}, the context {lab.settings.seq_len}; sparse attention reads everything up to top-k.",
            "Indexer recall of the attention's mass, mean over layers and seeds: "
            + ", ".join(f"{v} {sum(values) / len(values):.3f}" for v, values in recalls.items())
            + ".",
            f"Steps: dense {lab.settings.steps}, warm-up {lab.settings.warmup_steps}, adaptation and control "
            f"{lab.settings.adapt_steps}.",
        ],
    )


def _chain(lab: Lab, seed: int) -> list[Cell]:
    """One seed's cells. Adaptation and control differ in the attention (and the indexers' own loss) alone."""
    s, later = lab.settings, seed + LATER_DATA
    end = LearningRate(peak=s.lr.final, final=s.lr.final, shape="constant")
    name = VARIANTS
    dense = lab.cell(name[DENSE], seed, s.model)
    warm = lab.cell(
        name[WARMUP], seed, s.model, parent=dense, data_seed=later, stage="warmup", steps=s.warmup_steps, lr=s.warmup_lr
    )
    shared: dict[str, Any] = dict(data_seed=later, steps=s.adapt_steps, lr=end)
    control = lab.cell(name[CONTROL], seed, s.model, parent=dense, **shared)
    sparse = lab.cell(name[SPARSE], seed, s.model, parent=warm, stage="sparse", **shared)
    return [dense, control, warm, sparse]


def _verdicts(of: Callable[[str, int], list[float]], edges: Sequence[int], topk: int) -> list[Verdict]:
    """Claims at the longest contexts, and at the first that exceed top-k (the report's 4K: twice its top-k)."""
    short, long = edges.index(2 * topk), len(edges) - 1
    at = {name: dict(zip(published.TABLE6_LENGTHS, scores, strict=True)) for name, scores in published.TABLE6.items()}
    last, first = published.TABLE6_LENGTHS[-1], published.TABLE6_LENGTHS[0]

    def scores(a: str, b: str, length: int) -> str:
        return f"RULER {at[a][length]} against {at[b][length]} at {length}K"

    def lost(length: int) -> list[float]:
        return [a / b for a, b in zip(of(WARMUP, length), of(DENSE, length), strict=True)]

    return [
        judge(
            Claim("Warm-up alone loses at the longest contexts", scores(WARMUP, DENSE, last), "higher"),
            of(WARMUP, long),
            of(DENSE, long),
        ),
        judge(
            Claim("Its loss is larger there than just above top-k", scores(WARMUP, DENSE, first), "higher"),
            lost(long),
            lost(short),
        ),
        judge(
            Claim("Warm-up alone matches dense just above top-k", scores(WARMUP, DENSE, first), "equal"),
            of(WARMUP, short),
            of(DENSE, short),
        ),
        judge(
            Claim("Adaptation improves on warm-up at the longest contexts", scores(SPARSE, WARMUP, last), "lower"),
            of(SPARSE, long),
            of(WARMUP, long),
        ),
        judge(
            Claim(
                "Sparse-adapted matches dense, trained on, at the longest contexts",
                scores(SPARSE, DENSE, last) + ", where dense was not trained on",
                "equal",
            ),
            of(SPARSE, long),
            of(CONTROL, long),
        ),
    ]


# --------------------------------------------------------------------------- bits per byte by context
def length_edges(topk: int, seq_len: int) -> list[int]:
    """Upper bounds of the buckets of positions seen: half of top-k, top-k, twice that, and so on to the context.

    Raises:
        ConfigError: the context is shorter than twice top-k, so that sparsity would hardly be seen.
    """
    if seq_len < 2 * topk:
        raise ConfigError("seq_len", seq_len, f"must be at least twice index_topk={topk}")
    edges = [max(1, topk // 2)]
    while edges[-1] < seq_len:
        edges.append(min(seq_len, topk if len(edges) == 1 else 2 * edges[-1]))
    return edges


def length_names(edges: Sequence[int], topk: int) -> list[str]:
    """Buckets by their upper bounds, in multiples of top-k: "0.5x", "1x", "2x", ..."""
    return [f"{edge / topk:g}x" for edge in edges]


@torch.no_grad()
def bits_by_context(
    model: GLM5, dataset: TokenDataset, edges: Sequence[int], *, sparse: bool, max_rows: int, rows_at_once: int = 4
) -> list[float]:
    """Bits per byte of the tokens whose query sees at most edges[i] positions of its document, and more than the last.

    Raises:
        DataError: no held-out document is long enough for one of the buckets.
    """
    nats, size = np.zeros(len(edges)), np.zeros(len(edges))
    for batch in dataset.batches(rows_at_once, max_rows):
        on = Rows.of(batch, model.device)
        hidden_BTD = model.hidden(on.input_BT, documents=on.documents_BT, sparse=sparse)
        target_BT, weight_BT = on.targets[0]
        out = linear_logprobs(hidden_BTD.flatten(0, 1), model.lm_head.weight, target_BT.flatten())
        bucket_BT = np.searchsorted(edges, batch.position_BT + 1)
        loss_BT = (-out.logprobs_N.double() * weight_BT.flatten()).cpu().numpy()
        nats += np.bincount(bucket_BT.ravel(), loss_BT.ravel(), len(edges))
        size += np.bincount(bucket_BT.ravel(), batch.num_bytes_BT.ravel(), len(edges))
    if not size.all():
        raise DataError(
            f"no held-out text has tokens that see more than {edges[int(np.argmin(size)) - 1]} others",
            "Use a corpus with longer documents, or a shorter context",
        )
    return (nats / math.log(2) / size).tolist()
