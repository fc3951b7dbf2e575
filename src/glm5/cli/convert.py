"""`glm5 convert IN OUT`: write a checkpoint again in the public layout, in another dtype, shard size or without MTP.

Whatever loads is checked whole before anything is written. The model must fit in memory. Read next:
`glm5.model.weights`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from glm5.utils.config_io import parse
from glm5.utils.errors import CheckpointError, ConfigError
from glm5.utils.files import file_errors, write_bytes

# What stands beside the weights and stays as it is.
_BESIDE = (
    "tokenizer*.json",
    "vocab.json",
    "merges.txt",
    "*.jinja",
    "generation_config.json",
    "special_tokens_map.json",
)


@dataclass(frozen=True)
class ConvertOptions:
    """Write a checkpoint again in the public layout: experts apart, sharded with an index, the MTP block as a layer."""

    source: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="IN")]
    """Directory of the checkpoint to read, its experts apart or fused."""
    target: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")]
    """Directory to write."""
    dtype: Annotated[str | None, tyro.conf.arg(metavar="DTYPE")] = None
    """float32, bfloat16 or float16; by default as it is. Router biases stay float32."""
    max_shard_gb: float = 5.0
    """Size of one file in 10^9 bytes."""
    drop_mtp: bool = False
    """Leave out the MTP block."""
    overwrite: bool = False
    """Replace a checkpoint in OUT."""


def main(argv: list[str]) -> int:
    """Parse `argv` (without the command's name) and run."""
    options = parse(ConvertOptions, argv, prog="glm5 convert", config_option=False)
    if options.source.resolve() == options.target.resolve():
        raise CheckpointError(f"{options.source} is both source and target", "Give another directory to write")
    if not options.max_shard_gb > 0:
        raise ConfigError("max_shard_gb", options.max_shard_gb, "must be positive")

    from glm5.model.weights import load_model, save_model

    changes: dict[str, Any] = {"num_nextn_predict_layers": 0} if options.drop_mtp else {}
    model = load_model(options.source, dtype=options.dtype, **changes)
    save_model(model, options.target, max_shard_bytes=options.max_shard_gb * 1e9, overwrite=options.overwrite)
    for pattern in _BESIDE:
        for file in sorted(options.source.glob(pattern)):
            with file_errors(file, "read"):
                data = file.read_bytes()
            write_bytes(options.target / file.name, data)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{options.target}: {parameters:,} parameters in {model.config.dtype}")
    return 0
