"""A config.json with one field broken: it is read, or refused by a `ConfigError`, and nothing else happens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from glm5.model.config import ModelConfig
from glm5.utils.errors import ConfigError
from support.tiny import tiny_config

_LEAF = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 4), st.integers(), st.floats(), st.text(max_size=4),
    st.sampled_from([10**400, 2**63, 2**31, "float64", "torch.float16"]),
)  # fmt: skip
_VALUE = st.recursive(
    _LEAF,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["rope_theta", "rope_type", "type", "x"]), inner, max_size=3),
    ),
    max_leaves=4,
)
_ALSO = {"num_experts", "torch_dtype", "rope_theta", "rope_scaling", "indexer_types"}
_FIELDS = sorted(_ALSO | tiny_config().to_dict().keys())


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.sampled_from(_FIELDS), _VALUE)
@example("rms_norm_eps", 10**400)
@example("rope_parameters", {"rope_theta": 10**400})
@example("num_hidden_layers", 10**9)
@example("vocab_size", 2**63)
def test_any_value_of_any_field_is_read_or_refused(name: str, value: Any) -> None:
    try:
        config = ModelConfig.from_dict({**tiny_config().to_dict(), name: value})
    except ConfigError:
        return
    assert ModelConfig.from_dict(config.to_dict()) == config
    assert 0 < config.vocab_size < 2**31
    assert config.num_hidden_layers <= 10_000


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"vocab_size": ' + "9" * 5000 + "}", "", "\0", "null"], ids=lambda t: repr(t[:12])
)
def test_text_that_is_no_configuration_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json="):
        ModelConfig.load(file)


def test_an_unknown_field_with_a_lone_surrogate_survives_the_round_trip(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**tiny_config().to_dict(), "note": "\ud800"}))
    ModelConfig.load(file).save(tmp_path / "again.json")
    assert ModelConfig.load(tmp_path / "again.json").extra["note"] == "\ud800"
