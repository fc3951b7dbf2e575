"""The ledger itself: figures of a configuration joined with what the sources claim about them.

For the published GLM-5 every claim is judged; for any other configuration the same figures stand without claims.
Read next: `glm5.cli.ledger`, which prints it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from glm5.ledger import disputes, published
from glm5.ledger.claims import Claim, Row, Verdict, judge, show, show_as
from glm5.ledger.figures import Figure, figures
from glm5.model.config import ModelConfig
from glm5.model.presets import glm5

VERDICTS: tuple[Verdict, ...] = ("exact", "consistent", "conflict", "not computable")


def is_published(config: ModelConfig) -> bool:
    """Whether `config` has the published GLM-5's sizes, so that claims about GLM-5 are about it.

    Token ids, the initializer and the norms' epsilons do not count: no figure depends on them.
    """
    reference = glm5()
    same: dict[str, Any] = {
        "eos_token_id": reference.eos_token_id,
        "pad_token_id": reference.pad_token_id,
        "initializer_range": reference.initializer_range,
        "rms_norm_eps": reference.rms_norm_eps,
        "latent_norm_eps": reference.latent_norm_eps,
    }
    if config.layer_types == reference.layer_types:  # listed or counted
        same |= {"mlp_layer_types": None, "first_k_dense_replace": reference.first_k_dense_replace}
    try:
        return replace(config, **same) == reference
    except ValueError:  # a smaller vocabulary than the published token ids
        return False


def ledger(config: ModelConfig, context: int | None = None) -> list[Row]:
    """Every row for `config` at `context` tokens (default: all its positions), section by section.

    A figure with several claims has a row for each, one after another.
    """
    context = config.max_position_embeddings if context is None else context
    rows: list[Row] = []
    claimed = is_published(config)
    for figure in figures(config, context):
        quoted = claimed and (context == published.CONTEXT or figure.key not in published.CONTEXT_KEYS)
        rows += _rows(figure, published.CLAIMS.get(figure.key, ()) if quoted else ())
    if claimed:
        for figure in published.report_figures(config):
            rows += _rows(figure, published.CLAIMS[figure.key])
        rows += [_disagreement(d) for d in disputes.DISAGREEMENTS]
        rows += [_measurement(m) for m in disputes.MEASUREMENTS]
    return rows


def tally(rows: Iterable[Row]) -> dict[Verdict, int]:
    """How many rows have each verdict, in the order of VERDICTS."""
    found = Counter(row.verdict for row in rows)
    return {v: found[v] for v in VERDICTS}


def as_json(row: Row) -> dict[str, Any]:
    """A row for machines: `value` is a number in base units, `exact` the same as a fraction where it is not whole."""
    out: dict[str, Any] = {
        "key": row.key,
        "section": row.section,
        "label": row.label,
        "formula": row.formula,
        "value": None,
        "ours": row.ours,
        "claim": row.claim or None,
        "source": row.source or None,
        "verdict": row.verdict,
        "note": row.note or None,
        "why": row.why or None,
    }
    if row.value is not None:
        whole = row.value.denominator == 1
        out["value"] = row.value.numerator if whole else float(row.value)
        if not whole:
            out["exact"] = f"{row.value.numerator}/{row.value.denominator}"
    return out


def _rows(figure: Figure, claims: tuple[Claim, ...]) -> list[Row]:
    base = Row(figure.key, figure.section, figure.label, figure.formula, figure.value, "", note=figure.note)
    if not claims:
        return [replace(base, ours=show(figure.value, figure.unit))]
    return [
        replace(
            base,
            ours=show_as(figure.value, claim),
            claim=claim.shown(),
            source=claim.source,
            verdict=judge(figure.value, claim),
            why=claim.note,
        )
        for claim in claims
    ]


def _disagreement(d: disputes.Disagreement) -> Row:
    return Row(
        key=d.key,
        section=disputes.WORDS,
        label=d.label,
        formula="",
        value=None,
        ours=d.ours,
        claim=d.other,
        source=d.source,
        verdict="conflict",
        why=d.why,
        in_words=True,
    )


def _measurement(m: disputes.Measurement) -> Row:
    return Row(
        key=m.key,
        section=disputes.MEASURED,
        label=m.label,
        formula="",
        value=None,
        ours="",
        claim=m.text,
        source=m.source,
        verdict="not computable",
        why=f"needs {m.needs}",
    )
