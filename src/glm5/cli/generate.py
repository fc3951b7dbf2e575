"""`glm5 generate CHECKPOINT --prompt TEXT`: continue a text, as it is written, token by token.

The text goes to standard output as it comes, what it cost to standard error; with --json one object holds all.
Read next: `glm5.model.generate`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from glm5.utils.config_io import parse
from glm5.utils.devices import resolve_device
from glm5.utils.errors import UserError


@dataclass(frozen=True)
class GenerateOptions:
    """Continue a text with a model: greedily, sampled, and with drafts from its MTP block if asked."""

    checkpoint: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="CHECKPOINT")]
    """Directory with config.json, safetensors files and tokenizer.json."""
    prompt: Annotated[str, tyro.conf.arg(metavar="TEXT")]
    """The text to continue; - reads standard input."""
    max_new_tokens: int = 256
    """Tokens to write at most; the end of a text and the context's limit end it earlier."""
    temperature: float = 0.0
    """0 takes the most probable token each time; 1 draws from the model's distribution."""
    top_p: float = 1.0
    """Draw from the most probable tokens that together have this probability."""
    top_k: int = 0
    """Draw from this many most probable tokens; 0 draws from all."""
    min_p: float = 0.0
    """Draw from tokens at least this fraction as probable as the best."""
    seed: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Repeats the draws; without it every call differs."""
    speculate: int = 0
    """Drafts per step from the MTP block. Changes the speed, not the distribution of the text."""
    dense: bool = False
    """Attend to every position, whatever the model was trained for."""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto is a GPU where there is one."""
    dtype: Annotated[str | None, tyro.conf.arg(metavar="DTYPE")] = None
    """float32, bfloat16 or float16; by default the checkpoint's."""
    json: bool = False
    """Print one JSON object: text, ids, log-probabilities, times and drafts."""


def main(argv: list[str]) -> int:
    """Parse `argv` (without the command's name) and run."""
    options = parse(GenerateOptions, argv, prog="glm5 generate", config_option=False)
    result = run(options)
    if options.json:
        print(json.dumps(result, ensure_ascii=False))
    else:
        print(flush=True)
        print(_summary(result), file=sys.stderr)
    return 0


def run(options: GenerateOptions) -> dict[str, Any]:
    """Generate; unless `options.json`, write the text to standard output as it comes.

    Returns:
        checkpoint, prompt_tokens, text, ids, logprobs (of each id, the model's own), seconds ("load", "first_token"
        from the prompt's start, "rest"), tokens_per_second after the first (None for a single token), and
        speculation (None without drafts): drafts, steps, accept_length, acceptance by position.
    """
    from glm5.model.generate import generate
    from glm5.model.speculate import SpeculationStats
    from glm5.model.weights import load_model
    from glm5.text.stream import StreamDecoder
    from glm5.text.tokenizer import load_tokenizer

    start = time.perf_counter()
    tokenizer = load_tokenizer(options.checkpoint)
    model = load_model(options.checkpoint, device=resolve_device(options.device), dtype=options.dtype)
    if tokenizer.vocab_size > model.config.vocab_size:
        raise UserError(
            f"{options.checkpoint}: the tokenizer has {tokenizer.vocab_size} ids, the model {model.config.vocab_size}",
            "Put the tokenizer that the model was trained with beside it",
        )
    # Arguments that are not UTF-8 come with lone surrogates: as bytes, the tokenizer spells them.
    prompt = sys.stdin.buffer.read() if options.prompt == "-" else os.fsencode(options.prompt)
    prompt_ids = [*tokenizer.prefix_ids, *tokenizer.encode(prompt)]
    stats, decoder = SpeculationStats(), StreamDecoder(tokenizer, skip_control=True)
    ids: list[int] = []
    logprobs: list[float] = []
    pieces: list[str] = []

    def show(piece: str) -> None:
        pieces.append(piece)
        if not options.json:
            sys.stdout.write(piece)
            sys.stdout.flush()

    began = first = time.perf_counter()
    for token in generate(
        model,
        prompt_ids,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        vocab_size=tokenizer.vocab_size,
        seed=options.seed,
        speculate=options.speculate,
        sparse=False if options.dense else None,
        stats=stats,
        logprobs=logprobs,
    ):
        if not ids:
            first = time.perf_counter()
        ids.append(token)
        show(decoder.push([token]))
    end = time.perf_counter()
    show(decoder.finish())
    return {
        "checkpoint": str(options.checkpoint),
        "prompt_tokens": len(prompt_ids),
        "text": "".join(pieces),
        "ids": ids,
        "logprobs": logprobs,
        "seconds": {"load": began - start, "first_token": first - began, "rest": end - first},
        "tokens_per_second": (len(ids) - 1) / (end - first) if len(ids) > 1 else None,
        "speculation": {
            "drafts": options.speculate,
            "steps": stats.steps,
            "accept_length": stats.accept_length,
            "acceptance": stats.acceptance,
        }
        if options.speculate
        else None,
    }


def _summary(result: dict[str, Any]) -> str:
    line = (
        f"{result['prompt_tokens']} tokens read, {len(result['ids'])} written; "
        f"the first after {result['seconds']['first_token']:.2f} s"
    )
    if result["tokens_per_second"]:
        line += f", then {result['tokens_per_second']:.1f} tokens/s"
    if result["speculation"]:
        line += f"; accept length {result['speculation']['accept_length']:.2f}"
    return line
