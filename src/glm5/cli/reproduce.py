"""`glm5 reproduce table1 | table2 | table6`: the report's comparisons, trained again at a chosen size, and judged.

Every cell of a table (a variant with a seed) is a training run of its own below the run's directory, by default on the
source of the standard library, as the demo. What is finished is not run again: an interrupted comparison goes on, and
more seeds can be added to one. Read next: `glm5.train.reproduce.verdict` for the rule, `glm5.train.reproduce.table1`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from glm5.train.reproduce.settings import Settings, Size, Table, settings
from glm5.utils.config_io import parse, to_dict
from glm5.utils.devices import resolve_device
from glm5.utils.errors import ConfigError
from glm5.utils.files import write_json
from glm5.utils.progress import format_seconds
from glm5.utils.runlog import describe_environment

RESULT, PAGE = "reproduction.json", "report.html"


@dataclass(frozen=True)
class ReproduceOptions:
    """Run one of the report's comparisons again at a chosen size, over several seeds, and judge its claims.

    table1: GQA-8, MLA, MLA + Muon Split, MLA-256 + Muon Split. table2: accept length with one trained MTP depth and
    with three. table6: dense, warm-up only and sparse-adapted, by context length.
    """

    table: Annotated[tyro.conf.Positional[Table], tyro.conf.arg(metavar="{table1,table2,table6}")]
    """Which of the report's tables."""
    size: Size = "nano"
    """tiny: a minute, to see that it works. nano: up to an hour on a CPU. small: tens of millions of parameters, for
    minutes of a GPU. mini: about 1B parameters, for a GPU."""
    seeds: int | None = None
    """How many seeds, counted from 0; by default 3 (tiny: 2). More seeds can be added to a finished run."""
    steps: int | None = None
    """Steps of pretraining; later stages change in proportion. By default the size's."""
    corpus: str = "stdlib"
    """A directory of text files, a .jsonl file, one text file, or stdlib: the source of this Python's library."""
    run: Path | None = None
    """Directory of the run; by default runs/reproduce/TABLE-SIZE. An interrupted run goes on."""
    device: str = "auto"
    """auto (a GPU if there is one), cpu, cuda or cuda:N."""
    threads: int = 1
    """CPU threads. With 1 the figures do not depend on the number of cores, and several tables can run side by side."""
    processes: int = 1
    """Cells at a time, each in a process of its own: a small model does not fill a GPU alone. Where there are several
    GPUs and none is named, the processes are dealt out to them."""
    keep: bool = False
    """Leave the checkpoints of finished cells."""
    json: bool = False
    """Print the result as JSON on standard output."""


def main(argv: Sequence[str]) -> int:
    """Entry of `glm5 reproduce`."""
    options = parse(ReproduceOptions, argv, prog="glm5 reproduce", config_option=False)
    result = reproduce(options, Console(stderr=True, highlight=False))
    if options.json:
        print(json.dumps(result, indent=1))
    return 0


def reproduce(options: ReproduceOptions, console: Console) -> dict[str, Any]:
    """Run the comparison; returns what reproduction.json holds, and prints it on standard output unless that is JSON.

    Raises:
        ConfigError: an option is out of range, there is no such device, or the directory holds a run of other settings.
    """
    chosen, seeds = _settings(options), tuple(range(_seeds(options)))
    for name in ("threads", "processes"):
        if getattr(options, name) < 1:
            raise ConfigError(name, getattr(options, name), "must be at least 1")
    directory = options.run or Path("runs") / "reproduce" / f"{options.table}-{options.size}"

    import torch

    from glm5.cli.reproduce_report import print_comparison, write_page
    from glm5.train.reproduce import table1, table2, table6
    from glm5.train.reproduce.cells import Lab

    device = resolve_device(options.device)
    torch.set_num_threads(options.threads)
    began = time.perf_counter()

    def say(line: str) -> None:
        console.print(line, soft_wrap=True)

    text, chosen, counts = prepare_text(chosen, options.corpus, directory, say)
    lab = Lab(
        directory,
        text,
        chosen,
        device=device,
        note=lambda line: say(f"cell      {line}"),
        keep=options.keep,
    )
    others: list[subprocess.Popen[bytes]] = []
    compare = {"table1": table1.compare, "table2": table2.compare, "table6": table6.compare}[options.table]
    try:
        for number in range(1, options.processes):
            others.append(_another(options, directory, number))
        comparison = compare(lab, seeds)
    finally:
        for number, process in enumerate(others, 1):
            if status := process.poll():
                say(f"warning: process {number} ended with status {status}: see {_log(directory, number)}")
            process.terminate()  # which has nothing left to do, or is to stop with this one
            process.wait()
    result = {
        "table": options.table,
        "size": options.size,
        "date": time.strftime("%Y-%m-%d"),
        "device": device,
        "environment": describe_environment(),
        "corpus": {"source": options.corpus, **counts},
        "settings": to_dict(chosen),
        **to_dict(comparison),
    }
    write_json(directory / RESULT, result)
    write_page(comparison, result, directory / PAGE)
    if not options.json:
        print_comparison(comparison)
    say(f"done      in {format_seconds(time.perf_counter() - began)}: {directory / PAGE} and {RESULT}")
    return result


def _another(options: ReproduceOptions, directory: Path, number: int) -> subprocess.Popen[bytes]:
    """The same command in another process, which takes cells of the same directory; what it says goes into a file."""
    import torch

    device = options.device
    if device == "auto" and torch.cuda.is_available():
        device = f"cuda:{number % torch.cuda.device_count()}"
    given = {
        "--size": options.size,
        "--seeds": _seeds(options),
        "--steps": options.steps,
        "--corpus": options.corpus,
        "--run": directory,
        "--device": device,
        "--threads": options.threads,
    }
    words = [str(word) for pair in given.items() if pair[1] is not None for word in pair]
    command = [sys.executable, "-m", "glm5.cli.main", "reproduce", options.table, *words, *(["--keep"] * options.keep)]
    with open(_log(directory, number), "wb") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def _log(directory: Path, number: int) -> Path:
    return directory / f"process-{number}.log"


def prepare_text(
    chosen: Settings, corpus: str, directory: Path, say: Callable[[str], None]
) -> tuple[Any, Settings, dict[str, Any]]:
    """The training and held-out text; the settings with the tokenizer's vocabulary; counts of the corpus."""
    from glm5.train.prepare import TextConfig, prepare
    from glm5.train.reproduce.cells import RESULT as CELL_RESULT
    from glm5.train.reproduce.cells import Text

    prepared = prepare(
        TextConfig(corpus=corpus, seq_len=chosen.seq_len),
        directory / "data",
        ahead=4,  # the next token, and three MTP depths
        vocab_size=chosen.model.vocab_size,
        tokenizer=None,
        begun=any(directory.glob(f"*/{CELL_RESULT}")) or any(directory.glob("*/checkpoints/*")),
        say=say,
    )
    assert prepared.held_out is not None
    stop = prepared.tokenizer.stop_ids
    model = chosen.model.replace(vocab_size=prepared.tokenizer.vocab_size, eos_token_id=stop[:1], pad_token_id=stop[0])
    return Text(prepared.training, prepared.held_out), replace(chosen, model=model), prepared.counts


def _settings(options: ReproduceOptions) -> Settings:
    chosen = settings(options.table, options.size)
    return chosen if options.steps is None else chosen.with_steps(options.steps)


def _seeds(options: ReproduceOptions) -> int:
    if options.seeds is None:
        return 2 if options.size == "tiny" else 3
    if options.seeds < 1:
        raise ConfigError("seeds", options.seeds, "must be at least 1; from 2 on there is a spread to judge by")
    return options.seeds
