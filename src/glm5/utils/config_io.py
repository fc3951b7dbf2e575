"""Frozen dataclasses to JSON and back, and their fields on the command line by dotted name.

A run saves its resolved configuration and can be started again from it: `glm5 pretrain --config run.json
--train.lr.peak 1e-3` reads the file, then overrides one field. A file that has an unknown field or a value of the wrong
type is refused by the field's dotted name; nothing is guessed. Read next: `runlog`, which writes `config.json`.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from math import isfinite
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from glm5.utils.errors import ConfigError, UserError
from glm5.utils.files import read_json, write_json

T = TypeVar("T")


# --------------------------------------------------------------------------- to JSON
def to_dict(config: Any) -> dict[str, Any]:
    """`config` (a dataclass instance) as JSON values, nested dataclasses as nested objects.

    Raises:
        ConfigError: a field holds what JSON cannot (an infinity, an open file); it names the field.
    """
    encoded = _encode(config, "")
    assert isinstance(encoded, dict)
    return encoded


def _encode(value: Any, where: str) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _encode(getattr(value, f.name), _dot(where, f.name)) for f in fields(value) if f.init}
    if isinstance(value, Mapping):
        return {str(k): _encode(v, _dot(where, str(k))) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(v, f"{where}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Enum):
        return _encode(value.value, where)
    if value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and isfinite(value)):
        return value
    raise ConfigError(where, value, "cannot be written as JSON")


def save(path: str | Path, config: Any) -> None:
    """Write `config` to the JSON file `path`, atomically."""
    write_json(path, to_dict(config))


# --------------------------------------------------------------------------- from JSON
def from_dict(cls: type[T], data: Mapping[str, Any], default: T | None = None) -> T:
    """The dataclass `cls` with the fields of `data`; a missing field has its value in `default`, or its own default.

    Raises:
        ConfigError: an unknown field, a missing one that has no default, a value of the wrong type, or one that
            breaks a rule of the class; the field is named by its dotted path.
    """
    return _decode_dataclass(data, cls, "", default)


def load(cls: type[T], path: str | Path, default: T | None = None) -> T:
    """`from_dict` of a JSON file.

    Raises:
        FileError: the file is missing or is not JSON.
        ConfigError: see `from_dict`.
    """
    data = read_json(path)
    if not isinstance(data, dict):
        raise ConfigError(str(path), type(data).__name__, "the file must hold one JSON object")
    return from_dict(cls, data, default)


def _decode_dataclass(data: Any, cls: type[T], where: str, default: T | None) -> T:
    if not isinstance(data, Mapping):
        raise ConfigError(where, data, f"must be an object with the fields of {cls.__name__}")
    known = {f.name: f for f in fields(cls) if f.init}  # type: ignore[arg-type]
    for name, value in data.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {_dot(where, near[0])}?" if near else f"the fields are {', '.join(known)}"
            raise ConfigError(_dot(where, name), value, f"is not a field of {cls.__name__}; {hint}")
    hints = get_type_hints(cls)
    values: dict[str, Any] = {}
    for name, f in known.items():
        inherited = getattr(default, name) if default is not None else None
        if name in data:
            values[name] = _decode(data[name], hints[name], _dot(where, name), inherited)
        elif default is not None:
            values[name] = inherited
        elif f.default is MISSING and f.default_factory is MISSING:
            raise ConfigError(_dot(where, name), None, f"is missing, and {cls.__name__} has no default for it")
    try:
        return cls(**values)
    except ConfigError as e:
        raise (ConfigError(_dot(where, e.field), e.value, e.rule) if where else e) from None


def _decode(value: Any, kind: Any, where: str, default: Any = None) -> Any:
    """`value` from JSON as the annotated type `kind`."""
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if is_dataclass(kind):
        assert isinstance(kind, type)
        return _decode_dataclass(value, kind, where, default if isinstance(default, kind) else None)
    if origin in (Union, types.UnionType):
        return _decode_union(value, kind, where, default)
    if origin is Literal:
        if any(value == a and type(value) is type(a) for a in args):
            return value
        raise ConfigError(where, value, f"must be one of {', '.join(map(repr, args))}")
    if origin is tuple and isinstance(value, list | tuple):
        if len(args) == 2 and args[1] is Ellipsis:
            return tuple(_decode(v, args[0], f"{where}[{i}]") for i, v in enumerate(value))
        if len(value) != len(args):
            raise ConfigError(where, value, f"must have {len(args)} entries")
        return tuple(_decode(v, a, f"{where}[{i}]") for i, (v, a) in enumerate(zip(value, args, strict=True)))
    if isinstance(origin, type) and issubclass(list, origin) and isinstance(value, list):
        return [_decode(v, args[0], f"{where}[{i}]") for i, v in enumerate(value)]
    if isinstance(origin, type) and issubclass(dict, origin) and isinstance(value, Mapping):
        return {k: _decode(v, args[1], _dot(where, k)) for k, v in value.items()}
    if isinstance(kind, type):
        if issubclass(kind, Enum) and value in [member.value for member in kind]:
            return kind(value)
        if kind is Path and isinstance(value, str):
            return Path(value)
        if kind is float and type(value) in (int, float):
            return float(value)
        # `type is`: a boolean is an int to isinstance, and no number to a reader.
        if type(value) is kind:
            return value
    raise ConfigError(where, value, f"must be {_name(kind)}")


def _decode_union(value: Any, kind: Any, where: str, default: Any) -> Any:
    args = get_args(kind)
    if value is None and type(None) in args:
        return None
    choices = [a for a in args if a is not type(None)]
    # An exact match first, so that 3 stays an int in `float | int`.
    for choice in sorted(choices, key=lambda a: a is not type(value)):
        try:
            return _decode(value, choice, where, default)
        except ConfigError:
            if len(choices) == 1:
                raise
    raise ConfigError(where, value, f"must be {_name(kind)}")


def _name(kind: Any) -> str:
    plain = {int: "an integer", float: "a number", str: "a string", bool: "true or false", type(None): "null"}
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(_name(a) for a in get_args(kind))
    if get_origin(kind) is tuple or get_origin(kind) is list:
        return "a list"
    return plain.get(kind) or f"a {getattr(kind, '__name__', kind)}"


def _dot(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


# --------------------------------------------------------------------------- comparing
def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted name -> (value before, value after) of every field that differs between two `to_dict` results.

    A field that one of them lacks counts as None there.
    """
    changed: dict[str, tuple[Any, Any]] = {}
    for name in dict.fromkeys([*before, *after]):
        a, b = before.get(name), after.get(name)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            changed.update({_dot(name, inner): pair for inner, pair in differences(a, b).items()})
        elif a != b:
            changed[name] = (a, b)
    return changed


# --------------------------------------------------------------------------- the command line
def parse(
    cls: type[T],
    argv: Sequence[str],
    *,
    default: T | None = None,
    prog: str | None = None,
    description: str | None = None,
    config_option: bool = True,
    first: str = "",
) -> T:
    """`cls` from the command line: `--config FILE` first, then every other option overrides a field by dotted name.

    Args:
        cls: a dataclass. Its docstring is the help text, its fields' docstrings those of the options.
        argv: the arguments, without the program's name.
        default: values for what neither the file nor an option gives.
        prog, description: for the help text.
        config_option: whether there is a `--config`; a command that runs nothing that is saved has none.
        first: the field that a first argument without dashes gives; none by default.

    Raises:
        UserError: an unknown option, a value of the wrong type or one that breaks a rule.
        FileError: the file of `--config` cannot be read.
        SystemExit: with status 0, after `--help` was printed.
    """
    import tyro  # here, since only the command line needs it

    argv, text = list(argv), (description or cls.__doc__ or "").strip()
    if first and argv and not argv[0].startswith("-"):
        argv = [f"--{first}", *argv]
    rest = argv
    if config_option:
        assert all(f.name != "config" for f in fields(cls)), "--config is taken"  # type: ignore[arg-type]
        rest, path = _split_config(argv)
        if path is not None:
            default = load(cls, path, default)
        text += "\n\n--config FILE reads a saved configuration first."
    # A run's flags come in pairs (--x, --no-x), since a saved configuration may have turned either on.
    style: tuple[Any, ...] = () if config_option else (tyro.conf.FlagCreatePairsOff,)
    known: dict[str, Any] = {} if default is None else {"default": default}
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(cls, args=rest, prog=prog, description=text, config=style, **known)
    except SystemExit as e:
        if e.code in (0, None):
            raise
        raise UserError(_plain(complaint.getvalue(), cls.__name__), f"See `{prog or 'the command'} --help`") from None


def _split_config(argv: Sequence[str]) -> tuple[list[str], str | None]:
    """The arguments without `--config FILE`, and FILE."""
    rest: list[str] = []
    paths: list[str] = []
    arguments = iter(argv)
    for argument in arguments:
        if argument == "--config":
            path = next(arguments, None)
            if path is None:
                raise UserError("--config needs a file", "Give the config.json of a run")
            paths.append(path)
        elif argument.startswith("--config="):
            paths.append(argument.removeprefix("--config="))
        else:
            rest.append(argument)
    if len(paths) > 1:
        raise UserError(f"--config is given {len(paths)} times", "Give one file")
    return rest, paths[0] if paths else None


def _plain(box: str, whole: str) -> str:
    """tyro's framed complaint (drawn in Unicode or in ASCII) as one line, without its frame, hints and own words.

    Args:
        whole: name of the class that was parsed, which no user has typed.
    """
    frame = r"\x1b\[[0-9;]*m|[─-╿]|-{5,}|^[|+]|[|+]$"
    lines = [re.sub(frame, "", line.strip()).strip() for line in box.splitlines()]
    text = " ".join(line for line in lines[1:] if line)
    text = re.split(r" (?:For full helptext|Argument helptext:)", text)[0].rstrip(".")
    text = re.sub(r"'None', |, 'None'", "", text)  # of an option that may be left out
    # Of an option that may also be left out tyro lists what it tried.
    text = re.sub(r"no type matching .* - <class '\w+'>: ", "", text)
    text = re.sub(r"invalid literal for int\(\) with base 10: ", "must be an integer, not ", text)
    text = re.sub(r"could not convert string to float: ", "must be a number, not ", text)
    found = re.match(r"Error parsing ([\w.-]+): ", text)
    if found is None:
        return text
    said, part = text[found.end() :], found[1]
    if part.startswith("--"):
        return f"{part}: {said}"
    # A rule of a part of the configuration names the part's field alone.
    return f"{part}.{said}" if part != whole and re.match(r"\w[\w.]*=", said) else said
