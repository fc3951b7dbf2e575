"""Configurations to JSON and back, with errors by dotted name; options of the command line."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm5.model.config import ModelConfig
from glm5.model.presets import nano
from glm5.utils import config_io
from glm5.utils.errors import ConfigError, FileError, UserError


class Kind(Enum):
    COSINE = "cosine"
    LINEAR = "linear"


@dataclass(frozen=True)
class Optim:
    """How to step."""

    lr: float = 1e-3
    """Step size at the peak."""
    betas: tuple[float, float] = (0.9, 0.95)
    kind: Kind = Kind.COSINE
    clip: float | None = 1.0

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ConfigError("lr", self.lr, "must be positive")


@dataclass(frozen=True)
class Run:
    """A run."""

    name: str
    optim: Optim = field(default_factory=Optim)
    steps: int = 10
    resume: bool = False
    mode: Literal["dense", "sparse"] = "dense"
    pace: Literal["slow", "fast"] | None = None
    out: Path = Path("runs/x")
    depths: tuple[int, ...] = (1, 2, 3)
    tags: list[str] = field(default_factory=list)
    weights: dict[str, float] = field(default_factory=dict)
    model: ModelConfig = field(default_factory=nano)

    def __post_init__(self) -> None:
        if self.name == "no name":
            raise ConfigError("name", self.name, "must be a name")


EXAMPLE = Run(
    name="ex",
    optim=Optim(lr=3e-4, betas=(0.8, 0.99), kind=Kind.LINEAR, clip=None),
    steps=7,
    resume=True,
    mode="sparse",
    out=Path("somewhere/q"),
    depths=(),
    tags=["a", "文"],
    weights={"en.wiki": 0.25},
    model=nano(extra={"unknown_field": [1, {"x": None}]}),
)


def test_round_trip(tmp_path: Path) -> None:
    config_io.save(tmp_path / "run.json", EXAMPLE)
    assert config_io.load(Run, tmp_path / "run.json") == EXAMPLE
    written = json.loads((tmp_path / "run.json").read_text())
    assert written["optim"] == {"lr": 3e-4, "betas": [0.8, 0.99], "kind": "linear", "clip": None}
    assert config_io.load(Run, tmp_path / "run.json").model.extra == EXAMPLE.model.extra


@given(
    lr=st.floats(min_value=1e-300, max_value=1e300),
    steps=st.integers(),
    depths=st.lists(st.integers()),
    tags=st.lists(st.text()),
    weights=st.dictionaries(st.text(), st.floats(allow_nan=False, allow_infinity=False)),
)
def test_round_trip_is_exact(lr: float, steps: int, depths: list[int], tags: list[str], weights: Any) -> None:
    run = Run("r", Optim(lr=lr), steps, depths=tuple(depths), tags=tags, weights=weights)
    text = json.dumps(config_io.to_dict(run), ensure_ascii=True)
    assert config_io.from_dict(Run, json.loads(text)) == run


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, r"^name=None: is missing"),
        ({"name": "x", "stepz": 1}, r"^stepz=1: is not a field of Run; did you mean steps\?"),
        ({"name": "x", "optim": {"lrr": 1}}, r"^optim\.lrr=1: .*did you mean optim\.lr\?"),
        ({"name": "x", "optim": {"zzz": 1}}, r"the fields are lr, betas, kind, clip"),
        ({"name": "x", "optim": {"lr": "1e-3"}}, r"^optim\.lr='1e-3': must be a number"),
        ({"name": "x", "optim": {"lr": True}}, r"^optim\.lr=True: must be a number"),
        ({"name": "x", "optim": {"lr": -1}}, r"^optim\.lr=-1\.0: must be positive"),
        ({"name": "x", "optim": {"betas": [0.9]}}, r"^optim\.betas=.*must have 2 entries"),
        ({"name": "x", "optim": {"betas": [0.9, "b"]}}, r"^optim\.betas\[1\]='b': must be a number"),
        ({"name": "x", "optim": {"kind": "cubic"}}, r"^optim\.kind='cubic'"),
        ({"name": "x", "optim": {"clip": "no"}}, r"^optim\.clip='no': must be a number"),
        ({"name": "x", "optim": None}, r"^optim=None: must be an object with the fields of Optim"),
        ({"name": 3}, r"^name=3: must be a string"),
        ({"name": "x", "steps": 1.0}, r"^steps=1\.0: must be an integer"),
        ({"name": "x", "steps": True}, r"^steps=True: must be an integer"),
        ({"name": "x", "resume": 1}, r"^resume=1: must be true or false"),
        ({"name": "x", "mode": "dens"}, r"^mode='dens': must be one of 'dense', 'sparse'"),
        ({"name": "x", "depths": 3}, r"^depths=3: must be a list"),
        ({"name": "x", "weights": {"a": "b"}}, r"^weights\.a='b'"),
        ({"name": "x", "model": {"num_attention_heads": 0}}, r"^model\.num_attention_heads=0: must be a positive"),
        ({"name": "x", "model": {"hiden_size": 1}}, r"^model\.hiden_size=1: .*did you mean model\.hidden_size\?"),
    ],
)
def test_errors_name_the_dotted_field(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_io.from_dict(Run, data)


def test_union_keeps_the_kind_of_number() -> None:
    @dataclass(frozen=True)
    class Either:
        x: float | int | str | None = None

    assert [repr(config_io._decode(v, float | int | str | None, "x")) for v in (3, 3.0, "3", None)] == [
        "3",
        "3.0",
        "'3'",
        "None",
    ]
    with pytest.raises(ConfigError, match=r"x=\[\]: must be a number or an integer or a string or null"):
        config_io._decode([], float | int | str | None, "x")


def test_partial_file_keeps_the_given_default(tmp_path: Path) -> None:
    assert config_io.from_dict(Run, {"optim": {"lr": 0.5}}, EXAMPLE) == replace(
        EXAMPLE, optim=replace(EXAMPLE.optim, lr=0.5)
    )


def test_what_json_cannot_hold_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^optim\.clip=inf"):
        config_io.to_dict(Run("x", Optim(clip=math.inf)))


def test_file_that_is_no_configuration(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"list\.json.*one JSON object"):
        config_io.load(Run, tmp_path / "list.json")
    with pytest.raises(FileError, match="no such file"):
        config_io.load(Run, tmp_path / "missing.json")


def test_differences_by_dotted_name() -> None:
    other = replace(EXAMPLE, steps=8, optim=replace(EXAMPLE.optim, lr=1.0))
    before, after = config_io.to_dict(EXAMPLE), config_io.to_dict(other)
    assert config_io.differences(before, before) == {}
    assert config_io.differences(before, after) == {"optim.lr": (3e-4, 1.0), "steps": (7, 8)}
    assert config_io.differences({"a": {"b": 1}}, {"c": 2}) == {"a": ({"b": 1}, None), "c": (None, 2)}


# --------------------------------------------------------------------------- the command line
def test_options_override_the_file_which_overrides_the_default(tmp_path: Path) -> None:
    config_io.save(tmp_path / "run.json", EXAMPLE)
    file = str(tmp_path / "run.json")
    assert config_io.parse(Run, ["--config", file]) == EXAMPLE
    expected = replace(EXAMPLE, optim=replace(EXAMPLE.optim, lr=2.0), depths=(5, 6))
    for argv in (
        ["--optim.lr", "2", "--config", file, "--depths", "5", "6"],
        [f"--config={file}", "--depths", "5", "6", "--optim.lr=2.0"],
    ):
        assert config_io.parse(Run, argv) == expected
    (tmp_path / "part.json").write_text('{"steps": 99}')
    assert config_io.parse(Run, ["--config", str(tmp_path / "part.json")], default=EXAMPLE).steps == 99
    run = config_io.parse(Run, ["--name", "n", "--optim.clip", "None", "--resume", "--model.index_topk", "64"])
    assert (run.name, run.optim.clip, run.resume, run.model.index_topk) == ("n", None, True, 64)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "--name"),
        (["--name", "x", "--optm.lr", "1"], r"--optm\.lr.*Perhaps you meant.*--optim\.lr"),
        (["--name", "x", "--steps", "many"], "^--steps: must be an integer, not 'many'$"),
        (["--name", "x", "--optim.lr", "fast"], r"^--optim\.lr: must be a number, not 'fast'$"),
        (["--name", "x", "--optim.clip", "none"], r"^--optim\.clip: must be a number, not 'none'$"),
        (["--name", "x", "--optim.lr", "-1"], r"^optim\.lr=-1\.0: must be positive$"),
        (["--name", "no name"], "^name='no name': must be a name$"),
        (["--name", "x", "--mode", "other"], "--mode"),
        (["--name", "x", "--pace", "other"], r"one of \('(slow|fast)', '(slow|fast)'\)$"),
        (["--name", "x", "stray"], "stray"),
        (["--config"], "--config needs a file"),
        (["--config", "a", "--config=b"], "--config is given 2 times"),
        (["--config", "/nowhere/run.json"], "/nowhere/run.json: no such file"),
    ],
)
def test_wrong_options_are_user_errors_on_one_line(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError) as e:
        config_io.parse(Run, argv, prog="glm5 run")
    assert re.search(message, e.value.what), e.value.what
    assert "\n" not in e.value.what
    assert e.value.mend
    assert capsys.readouterr().err == ""


def test_help_shows_fields_defaults_and_the_config_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        config_io.parse(Run, ["--help"], prog="glm5 run")
    assert e.value.code == 0
    out = capsys.readouterr().out
    for text in ("glm5 run", "A run.", "--optim.lr", "Step size at the peak.", "0.001", "--config FILE"):
        assert text in out


def test_without_the_config_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        config_io.parse(Optim, ["--help"], config_option=False)
    assert "--config" not in capsys.readouterr().out
    with pytest.raises(UserError, match="Unrecognized options: --config, x"):
        config_io.parse(Optim, ["--config", "x"], config_option=False)
