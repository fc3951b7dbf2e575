"""`glm5 pretrain`: from a corpus to a model in the public layout. Read next: `glm5.train.pretrain`."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from glm5.cli.launch import first, start
from glm5.utils.config_io import parse, to_dict
from glm5.utils.errors import UserError

if TYPE_CHECKING:
    from glm5.train.pretrain import PretrainConfig

DESCRIPTION = """Train a model with dense attention, from text.

--preset nano | mini | glm5 chooses the model's shape and the training that fits it (default nano); --model FILE reads
the shape from a config.json. --model.FIELD and --train.FIELD change one field of it."""


def main(argv: Sequence[str]) -> int:
    """Parse `argv` (without the command's name) and run. Returns 0, or what a process of several returned."""
    speaks = first()
    try:
        return _main(argv, print if speaks else lambda _: None)
    except UserError:
        if speaks:
            raise
        return 2
    except KeyboardInterrupt:
        if speaks:
            raise
        return 130


def _main(argv: Sequence[str], say: Callable[[str], None]) -> int:
    preset, given = take_option(argv, "--preset")
    shape, given = take_option(given, "--model")
    default = choose(preset, shape, given)
    from glm5.parallel.mesh import Mesh, launched
    from glm5.train.pretrain import PretrainConfig, pretrain, resolve

    config, _ = resolve(parse(PretrainConfig, given, default=default, prog="glm5 pretrain", description=DESCRIPTION))
    processes = Mesh.parse(config.mesh).size
    if processes > 1 and not launched() and not config.dry_run:
        return start("pretrain", processes, argv, restarts=config.restarts, on_gpus=config.device != "cpu")
    for line in describe(to_dict(config)):
        say(line)
    if config.dry_run:
        dry_run(config)
        return 0
    found = pretrain(config, say)
    say(f"trained   {found.parameters:,} parameters on {found.tokens:,} tokens in {found.steps:,} steps")
    if found.bits_per_byte is not None:
        sums = found.result["held_out"]
        say(f"held out  {found.bits_per_byte:.4f} bits per byte over {sums['bytes']:,} bytes, dense attention")
    say(f"run       {found.run}  (metrics.jsonl, config.json, result.json; `glm5 watch {found.run}` draws it)")
    say(f"next      glm5 chat {found.model}")
    say(f"          glm5 sparsify {found.model} --corpus {config.corpus} --run {found.run}-sparse")
    return 0


def choose(preset: str | None, shape: str | None, argv: Sequence[str]) -> PretrainConfig:
    """The configuration that options then change, from --preset or --model."""
    if preset is not None and shape is not None:
        raise UserError(f"--preset {preset} and --model {shape} both choose the shape", "Give one of them")
    if (preset or shape) and any(a == "--config" or a.startswith("--config=") for a in argv):
        given = f"--preset {preset}" if preset else f"--model {shape}"
        raise UserError(f"--config and {given} both choose the shape", "Give one of them")
    from glm5.model.config import ModelConfig
    from glm5.model.presets import preset as named
    from glm5.train import pretrain as stage

    if shape is not None:
        model = ModelConfig.load(shape)
        depths = stage.nano_training().mtp_depths if model.num_nextn_predict_layers else 0
        training = replace(stage.nano_training(), mtp_depths=depths)
        return stage.PretrainConfig(model=model, train=training, seq_len=min(512, model.max_position_embeddings))
    name = preset or "nano"
    model = named(name)
    training = {"nano": stage.nano_training, "mini": stage.mini_training, "glm5": stage.glm5_training}[name]()
    return stage.PretrainConfig(model=model, train=training, seq_len=512 if name == "nano" else 4096)


def take_option(argv: Sequence[str], name: str) -> tuple[str | None, list[str]]:
    """The value of `name VALUE` or `name=VALUE`, and the arguments without it.

    Raises:
        UserError: it has no value, or is given twice.
    """
    values: list[str] = []
    rest: list[str] = []
    arguments = iter(argv)
    for argument in arguments:
        if argument == name:
            value = next(arguments, None)
            if value is None or value.startswith("--"):
                raise UserError(f"{name} needs a value", "See `glm5 pretrain --help`")
            values.append(value)
        elif argument.startswith(f"{name}="):
            values.append(argument.removeprefix(f"{name}="))
        else:
            rest.append(argument)
    if len(values) > 1:
        raise UserError(f"{name} is given {len(values)} times", "Give it once")
    return (values[0] if values else None), rest


def describe(config: Mapping[str, Any], width: int = 100) -> list[str]:
    """A configuration for a reader: the fields of each part as one wrapped paragraph."""
    parts: dict[str, list[str]] = {"run": []}
    for name, value in config.items():
        if isinstance(value, Mapping):
            parts[name] = _fields(value)
        elif value not in ("", (), [], None):
            parts["run"].append(f"{name}={_plain(value)}")
    lines = []
    for name, words in parts.items():
        lines += textwrap.wrap(
            "  ".join(words), width, initial_indent=f"{name:<10}", subsequent_indent=" " * 10, break_long_words=False
        )
    return lines


def _fields(values: Mapping[str, Any], prefix: str = "") -> list[str]:
    words = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            words += _fields(value, f"{prefix}{name}.")
        elif value is not None:
            words.append(f"{prefix}{name}={_plain(value)}")
    return words


def _plain(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def dry_run(config: PretrainConfig) -> None:
    """Print what a resolved configuration's run would be. Reads the corpus, writes nothing."""
    from glm5.train.estimate import estimate
    from glm5.train.prepare import collect
    from glm5.utils.files import format_bytes

    corpus = collect(config)
    e = estimate(config.model, config.train, config.seq_len, device=config.device)
    batch = config.train.batch
    rows = f"{batch.final}" if batch.initial == batch.final else f"{batch.initial} to {batch.final}"
    print(f"corpus    {corpus.summary()}")
    print(f"model     {e.parameters:,} parameters, {e.active_parameters:,} active for a token")
    print(f"training  {config.train.steps:,} steps of {rows} rows of {config.seq_len:,}: {e.tokens:,} tokens")
    parts = ("weights", "gradients", "optimizer", "activations", "logits")
    listed = ", ".join(f"{name} {format_bytes(getattr(e, name))}" for name in parts)
    print(f"memory    about {format_bytes(e.total)} on {config.device}: {listed}; the libraries' own comes on top")
    print(f"dry run: nothing was written. Without --dry-run it trains in {config.run}")
