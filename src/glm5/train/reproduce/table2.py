"""Table 2: accept length of drafting with a shared MTP block that trained at one depth, and at three.

The report (section 2.1) says that DeepSeek-V3 trains one MTP layer and drafts more tokens than it trained for, which
costs acceptance from the second draft on; GLM-5 trains the shared block at three depths, and reaches an accept length
of 2.76 with four speculative steps, DeepSeek-V3.2 2.55. Those are two different models on private prompts; here all
but the number of depths is the same. Read next: `table6`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

import torch

from glm5.data.loader import TokenDataset
from glm5.model.glm5 import GLM5
from glm5.model.speculate import SpeculationStats
from glm5.train.evaluate import held_out
from glm5.train.losses import language_model_loss
from glm5.train.reproduce import published
from glm5.train.reproduce.cells import Cell, Lab, Measured, by_seed
from glm5.train.reproduce.outcome import Chart, Column, Comparison, ReportTable, Row
from glm5.train.reproduce.verdict import Claim, judge
from glm5.train.rows import Rows

ONE, THREE = published.TABLE2
# The report's row -> the variant's directory, and the depths that train.
VARIANTS = {ONE: ("one-depth", 1), THREE: ("three-depths", 3)}
DRAFTS = range(1, published.TABLE2_DRAFTS + 1)
MOST = str(DRAFTS[-1])  # as it stands in the figures
DEPTHS = (1, 2, 3)

Figure = Callable[..., list[float]]  # (variant, where in what was measured ...) -> its value of each seed

ABOUT = (
    "Two models see the same tokens in the same order, with dense attention and the same total weight on MTP; one "
    "trains the shared MTP block at one depth, the other at three. Then both draft one to four tokens a step on "
    "held-out prompts. The report compares two different models on private prompts. Accept length is the mean number "
    "of tokens a verification yields, its own included."
)


def compare(lab: Lab, seeds: Sequence[int]) -> Comparison:
    """Train and measure all cells, and judge the claims."""
    cells = [
        lab.cell(directory, seed, lab.settings.model, mtp_depths=depths)
        for seed in seeds
        for directory, depths in VARIANTS.values()
    ]
    found = lab.results(cells, lambda cell, model: _measured(lab, cell, model))

    def of(variant: str, *path: str | int) -> list[float]:
        return by_seed(found, VARIANTS[variant][0], seeds, *path)

    rows = [Row(name, _columns(name, of), {}) for name in VARIANTS]
    training = Chart(
        f"Training of the first MTP depth, seed {seeds[0]}",
        "step",
        "nats per token",
        {n: lab.curve(d, seeds[0], "mtp_loss_1") for n, (d, _) in VARIANTS.items()},
    )
    return Comparison(
        title="Table 2: accept length with one trained MTP depth and with three",
        about=ABOUT,
        report=ReportTable(
            ("model", f"accept length, {MOST} steps"),
            dict(published.TABLE2),
            "The report's accept length; higher is better",
        ),
        columns=[Column(name) for name in rows[0].by_seed],
        rows=rows,
        seeds=seeds,
        verdicts=[judge(claim, of(THREE, *path), of(ONE, *path)) for claim, path in _claims()],
        charts=[*_charts(of), training],
        notes=[
            "A small model's greedy text repeats itself, which makes drafting easy for both; hence the sampled figure, "
            "and the loss of each depth on held-out text, whose own tokens it is given. The block that trained at one "
            "depth is run at the others all the same, as drafting does.",
            f"{lab.settings.prompts} prompts, {lab.settings.new_tokens} new tokens each.",
        ],
    )


def _measured(lab: Lab, cell: Cell, model: GLM5) -> Measured:
    text, rows, tokens = lab.text.held_out, cell.settings.held_out_rows, cell.settings.new_tokens
    prompts = lab.text.prompts(cell.settings.prompts)
    return {
        "bits_per_byte": held_out(model, text, sparse=False, max_rows=rows).bits_per_byte,
        "depth_loss": depth_losses(model, text, max_rows=rows),
        "greedy": {str(k): draft(model, prompts, k, tokens) for k in DRAFTS},
        "sampled": draft(model, prompts, DRAFTS[-1], tokens, temperature=1.0),
    }


def _columns(name: str, of: Figure) -> dict[str, list[float]]:
    return {
        **{f"accept length, {_drafts(k)}": of(name, "greedy", str(k), "accept_length") for k in DRAFTS},
        f"accept length, {MOST} drafts, sampled": of(name, "sampled", "accept_length"),
        **{f"draft {k} of {MOST} accepted": of(name, "greedy", MOST, "acceptance", k - 1) for k in DRAFTS},
        **{f"nats of depth {d}": of(name, "depth_loss", d - 1) for d in DEPTHS},
        "bits per byte": of(name, "bits_per_byte"),
    }


def _claims() -> list[tuple[Claim, tuple[str | int, ...]]]:
    """Of three depths against one: each claim, and the figure that it is about."""
    report = published.TABLE2
    lengths = f"{report[THREE][1]} against {report[ONE][1]} with {MOST} steps"
    return [
        (
            Claim(f"Three trained depths: a longer accept length with {MOST} drafts", lengths, "higher", "tokens"),
            ("greedy", MOST, "accept_length"),
        ),
        (
            Claim(f"The same when sampling at temperature 1 with {MOST} drafts", "no figure", "higher", "tokens"),
            ("sampled", "accept_length"),
        ),
        (
            Claim("The second draft is accepted more often where the first was", "no figure", "higher", "share"),
            ("greedy", MOST, "conditional", 1),
        ),
        (
            Claim("The second depth predicts better: fewer nats on held-out text", "no figure", "lower"),
            ("depth_loss", 1),
        ),
    ]


def _charts(of: Figure) -> list[Chart]:
    def mean(name: str, *path: str | int) -> float:
        values = of(name, *path)
        return sum(values) / len(values)

    return [
        Chart(
            "Accept length, greedy, mean over seeds",
            "drafts a step",
            "tokens",
            {n: [(k, mean(n, "greedy", str(k), "accept_length")) for k in DRAFTS] for n in VARIANTS},
        ),
        Chart(
            f"Share of steps that accept a draft, greedy, {MOST} drafts a step, mean over seeds",
            "draft",
            "accepted",
            {n: [(k, mean(n, "greedy", MOST, "acceptance", k - 1)) for k in DRAFTS] for n in VARIANTS},
        ),
    ]


@torch.no_grad()
def depth_losses(model: GLM5, dataset: TokenDataset, *, max_rows: int, rows_at_once: int = 8) -> list[float]:
    """Held-out nats per token of MTP depths 1, 2, 3, given the text's own tokens, with dense attention."""
    sums, tokens = torch.zeros(len(DEPTHS), dtype=torch.float64), torch.zeros(len(DEPTHS), dtype=torch.float64)
    for batch in dataset.batches(rows_at_once, max_rows):
        on = Rows.of(batch, model.device)
        trunk_BTD = model.hidden(on.input_BT, documents=on.documents_BT, sparse=False)
        depths = model.mtp_hidden(trunk_BTD, on.ids_BS, DEPTHS[-1], documents=on.documents_BS, sparse=False)
        lm = language_model_loss([trunk_BTD, *depths], model.lm_head.weight, on.targets[: len(DEPTHS) + 1])
        sums += lm.ce_sums[1:].double().cpu()
        tokens += lm.tokens[1:].double().cpu()
    return (sums / tokens).tolist()


def draft(
    model: GLM5, prompts: Sequence[Sequence[int]], drafts: int, new_tokens: int, temperature: float = 0.0
) -> Measured:
    """Decode after every prompt with `drafts` drafts a step, densely.

    Returns:
        accept_length; acceptance: by draft position, the share of steps in which it and all before it were accepted;
        conditional: the same among the steps that accepted the one before (0 where there is none).
    """
    stats = SpeculationStats()
    for i, prompt in enumerate(prompts):
        stream = model.generate(
            list(prompt),
            max_new_tokens=new_tokens + drafts + 1,  # more than are taken, so that no step drafts fewer
            temperature=temperature,
            seed=i,
            stop_ids=(),
            speculate=drafts,
            sparse=False,
            stats=stats,
        )
        for _ in islice(stream, new_tokens):
            pass
    acceptance = stats.acceptance
    before = [1.0, *acceptance[:-1]]
    conditional = [a / b if b else 0.0 for a, b in zip(acceptance, before, strict=True)]
    return {"accept_length": stats.accept_length, "acceptance": acceptance, "conditional": conditional}


def _drafts(k: int) -> str:
    return "1 draft" if k == 1 else f"{k} drafts"
