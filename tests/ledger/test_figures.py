"""Double entry: each figure's formula, worked out by a calculator that knows nothing of models, gives its value."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5.ledger.figures import figures
from glm5.ledger.published import report_figures
from glm5.model.config import ModelConfig
from glm5.model.presets import PRESETS, VARIANTS, glm5
from support.ledger import configs, evaluate


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("context", [1, 100, None])
def test_formulas_of_presets_give_their_values(name: str, variant: str, context: int | None) -> None:
    for figure in figures(VARIANTS[variant](PRESETS[name]()), context):
        if figure.formula:
            assert evaluate(figure.formula) == figure.value, figure.key


@settings(max_examples=80, deadline=None)
@given(configs(), st.integers(1, 600))
def test_formulas_of_any_configuration_give_their_values(config: ModelConfig, context: int) -> None:
    for figure in figures(config, context):
        if figure.formula:
            assert evaluate(figure.formula) == figure.value, figure.key


def test_formulas_of_the_reports_own_figures_give_their_values() -> None:
    for figure in report_figures(glm5()):
        assert evaluate(figure.formula) == figure.value, figure.key


@settings(max_examples=30, deadline=None)
@given(configs())
def test_keys_are_unique_and_sections_contiguous(config: ModelConfig) -> None:
    found = figures(config)
    assert len({f.key for f in found}) == len(found)
    sections = [f.section for f in found]
    assert sections == sorted(sections, key=sections.index)


def test_only_plain_fields_and_the_searched_length_lack_a_formula() -> None:
    bare = {f.key for f in figures(glm5()) if not f.formula and f.section != "Shape"}
    assert bare == {"macs", "crossover"}


def test_the_calculator_refuses_anything_but_arithmetic() -> None:
    with pytest.raises(AssertionError):
        evaluate("open(1)")
    assert evaluate("1,000 × (2 + 0.5) − 1 / 4") == evaluate("2,499.75")
