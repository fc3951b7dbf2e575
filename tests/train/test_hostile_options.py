"""Options of a run that cannot be meant, each refused by its name."""

from __future__ import annotations

from typing import Any

import pytest

from glm5.train.config import TrainConfig
from glm5.train.prepare import TextConfig
from glm5.train.schedule import LearningRate
from glm5.utils.errors import ConfigError


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["peak", "final"])
def test_a_learning_rate_is_finite_and_not_negative(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name}=.*finite"):
        LearningRate(**{name: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(clip=float("nan")), "clip=nan"),
        (dict(mtp_weight=float("inf")), "mtp_weight=inf"),
        (dict(momentum=1.0), "momentum=1.0: must lie in"),
        (dict(momentum=float("nan")), "momentum=nan"),
        (dict(late_tokens=-1), "late_tokens=-1: must be at least 0"),
        (dict(late_tokens=5, late_bias_rate=float("nan")), "late_bias_rate=nan: must be a finite number"),
        (dict(late_mtp_weight=0.1), "late_mtp_weight=0.1: needs late_tokens"),
    ],
)
def test_weights_and_momentum_are_finite(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**changes)


def test_an_empty_corpus_name_is_not_the_current_directory() -> None:
    with pytest.raises(ConfigError, match="corpus=''"):
        TextConfig(corpus="")


@pytest.mark.parametrize("corpus", ["stdlib", "notes.jsonl"])
def test_suffixes_choose_among_the_files_of_a_directory_only(corpus: str) -> None:
    with pytest.raises(ConfigError, match="suffixes="):
        TextConfig(corpus=corpus, suffixes=(".py",))
