"""`glm5 pretrain`: from a corpus to a model in the public layout. Read next: `glm5.train.pretrain`."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from glm5.cli.launch import several, spoken_once
from glm5.utils.config_io import parse, to_dict
from glm5.utils.errors import UserError

if TYPE_CHECKING:
    from glm5.train.pretrain import PretrainConfig

DESCRIPTION = """Train a model with dense attention, from text.

--preset nano | mini | glm5 chooses the model's shape and the training that fits it (default nano); --model FILE reads
the shape from a config.json; --from CHECKPOINT trains a model further that exists. --model.FIELD and --train.FIELD
change one field."""


def main(argv: Sequence[str]) -> int:
    """Parse `argv` (without the command's name) and run. Returns 0, or what a process of several returned."""
    return spoken_once(lambda say: _main(argv, say))


def _main(argv: Sequence[str], say: Callable[[str], None]) -> int:
    preset, given = take_option(argv, "--preset")
    shape, given = take_option(given, "--model")
    checkpoint, given = take_option(given, "--from")
    _one_vocabulary(given)
    default = choose(preset, shape, given, checkpoint)
    from glm5.train.pretrain import PretrainConfig, pretrain, resolve

    config, _ = resolve(parse(PretrainConfig, given, default=default, prog="glm5 pretrain", description=DESCRIPTION))
    if config.dry_run:
        show(config, say)
        dry_run(config)
        return 0
    if (status := several("pretrain", config, argv)) is not None:
        return status
    found = pretrain(config, say, lambda: show(config, say))
    say(f"trained   {found.parameters:,} parameters on {found.tokens:,} tokens in {found.steps:,} steps")
    if found.bits_per_byte is not None:
        sums = found.result["held_out"]
        say(f"held out  {found.bits_per_byte:.4f} bits per byte over {sums['bytes']:,} bytes, dense attention")
    say(f"run       {found.run}  (metrics.jsonl, config.json, result.json; `glm5 watch {found.run}` draws it)")
    say(f"next      glm5 chat {found.model}")
    say(f"          glm5 sparsify {found.model} --corpus {config.corpus} --run {found.run}-sparse")
    return 0


def _one_vocabulary(argv: Sequence[str]) -> None:
    """Refuse two sizes of one vocabulary: the model's follows the tokenizer's."""
    sizes: dict[str, str] = {}
    for name in ("--vocab-size", "--model.vocab-size"):
        for spelled in {name, name.replace("-", "_").replace("__", "--", 1)}:
            value, _ = take_option(argv, spelled)
            sizes |= {} if value is None else {name: value}
    if len(set(sizes.values())) > 1:
        what = " and ".join(f"{name} {value}" for name, value in sizes.items())
        raise UserError(f"{what} contradict each other: the model's vocabulary is the tokenizer's", "Give one of them")


def choose(preset: str | None, shape: str | None, argv: Sequence[str], checkpoint: str | None = None) -> PretrainConfig:
    """The configuration that options then change, from --preset, --model or --from."""
    choices = {"--preset": preset, "--model": shape, "--from": checkpoint}
    said = [f"{name} {value}" for name, value in choices.items() if value is not None]
    said = ["--config" for a in argv if said and (a == "--config" or a.startswith("--config="))][:1] + said
    if len(said) > 1:
        both = "both" if len(said) == 2 else "all"
        raise UserError(f"{' and '.join(said)} {both} choose the shape", "Give one of them")
    from glm5.model.config import ModelConfig
    from glm5.model.presets import preset as named
    from glm5.train import pretrain as stage

    if shape is not None or checkpoint is not None:
        model = ModelConfig.load(shape or checkpoint or "")
        depths = stage.nano_training().mtp_depths if model.num_nextn_predict_layers else 0
        training = replace(stage.nano_training(), mtp_depths=depths)
        length = min(512, model.max_position_embeddings)
        return stage.PretrainConfig(model=model, train=training, seq_len=length, checkpoint=checkpoint or "")
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


def show(config: Any, say: Callable[[str], None]) -> None:
    """Say what a run was told."""
    for line in describe(to_dict(config)):
        say(line)


def describe(config: Mapping[str, Any], width: int = 100) -> list[str]:
    """A configuration for a reader: the fields of each part as one wrapped paragraph."""
    parts: dict[str, list[str]] = {"run": []}
    for name, value in config.items():
        if isinstance(value, Mapping):
            parts[name] = _fields(value)
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            parts |= {f"{name}.{i}": _fields(each) for i, each in enumerate(value)}
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
        elif value not in ("", (), [], None):
            words.append(f"{prefix}{name}={_plain(value)}")
    return words


def _plain(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def dry_run(config: PretrainConfig) -> None:
    """Print what a resolved configuration's run would be. Reads the corpus, writes nothing."""
    from glm5.parallel.mesh import Mesh
    from glm5.train.estimate import estimate
    from glm5.train.prepare import collect
    from glm5.utils.files import format_bytes

    corpus = collect(config)
    mesh = Mesh.parse(config.mesh)
    e = estimate(
        config.model,
        config.train,
        config.seq_len,
        device=config.device,
        mesh=mesh,
        recompute=config.pipeline.recompute,
        gather_once=config.gather_once,
    )
    batch = config.train.batch
    rows = f"{batch.final}" if batch.initial == batch.final else f"{batch.initial} to {batch.final}"
    print(f"corpus    {corpus.summary()}")
    print(f"model     {e.parameters:,} parameters, {e.active_parameters:,} active for a token")
    kind, most = ("documents of up to", "at most ") if config.train.context_groups else ("rows of", "")
    print(f"training  {config.train.steps:,} steps of {rows} {kind} {config.seq_len:,}: {most}{e.tokens:,} tokens")
    parts = ["weights", "gradients", "optimizer", "activations", "logits", *(["gathered"] if mesh.size > 1 else [])]
    listed = ", ".join(f"{name} {format_bytes(getattr(e, name))}" for name in parts)
    where = config.device if mesh.size == 1 else f"each of {mesh.size} ranks"
    print(f"memory    about {format_bytes(e.total)} on {where}: {listed}; the libraries' own comes on top")
    print(f"dry run: nothing was written. Without --dry-run it trains in {config.run}")
