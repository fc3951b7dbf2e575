"""Does a model learn at a terminal? Fine-tuning on scripted sessions, then asynchronous reinforcement learning there.

    python benchmarks/terminal_learning.py [--preset nano|mini] [--device cuda] [--seeds 0,1,2] [--json FILE]
                                           [--dtype bfloat16] [--services 2] [--weaker | --pretend] ...

Tasks are directories in Harbor's format, made by the thousand: a table, and one figure of one of its columns to be
written into a file. What lies between the fields is not told, so an agent must look before it cuts. Scripts are of two
kinds: careful ones look first, hasty ones (--hasty is their share) guess. Every command runs in the sandbox, which
needs a host that can isolate; a model is judged by the file that it leaves, as any terminal task's. A quarter of the
combinations of figure, column and separator is held out: neither scripts nor rollouts have them. --weaker asks for the
sandbox that does without control groups. With --pretend nothing is run: the commands of scripts are answered by what
they would do, any other by an error. That is no terminal task but one of the same words, where there is no sandbox.
Tasks are services in --services processes of their own, each with its part of them, or with 0 in the learner's. The
trainer is in fp32 (on a GPU with TF32 products), the engine in --dtype. Fine-tuning keeps nothing but its model,
since saving takes the time. Success comes with Wilson's interval of 95%. Read next: `agent_learning`, which has the
ablations.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import random
import socket
import statistics
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from agent_config import asynchronous
from glm5 import GLM5, save_model
from glm5.agents.protocol import Rollout
from glm5.agents.sandbox import Finished, Limits
from glm5.agents.service import serve
from glm5.agents.services.terminal import SYSTEM, TerminalService
from glm5.agents.services.tools import Tool
from glm5.agents.tasks import InSandbox, Task, prove, read_task
from glm5.data.mixing import MixedLoader
from glm5.model.presets import mini, nano
from glm5.posttrain.agent_run import AgentConfig, agent
from glm5.posttrain.sft import SftConfig, conversations
from glm5.serve.config import EngineConfig
from glm5.text import Tokenizer, render
from glm5.text.messages import messages_from_openai, tools_from_openai
from glm5.train.loop import Trainer
from glm5.utils.runlog import read_metrics
from learning import quiet, seeds, spread, training

COLUMNS = 4
SEPARATORS = ",", ";", ":", "|"
FIGURES = {  # what is asked for, how a shell finds it in a column, and what it is
    "largest number": ("sort -n | tail -1", max),
    "smallest number": ("sort -n | head -1", min),
    "sum": ("awk '{s+=$1} END {print s}'", sum),
    "number of different values": ("sort -u | wc -l", lambda values: len(set(values))),
}
TOOL = Tool("bash", "Run a line of bash.", {"command": ("string", "what to run")}, lambda command: command).told
LOOK = "head -2 table.txt"
TEST = """#!/bin/bash
if [ -f /app/answer.txt ] && [ ! -L /app/answer.txt ] &&
    [ "$(tr -d '[:space:]' < /app/answer.txt)" = "$(cat /tests/expected.txt)" ]; then
    echo 1 > /logs/verifier/reward.txt
else
    echo 0 > /logs/verifier/reward.txt
fi
"""
TOML = """schema_version = "1.1"

[task]
name = "glm5/table-{number}"

[agent]
timeout_sec = 60.0

[verifier]
timeout_sec = 30.0

[environment]
cpus = 1
memory_mb = 256
storage_mb = 32
"""


@dataclass(frozen=True)
class Asked:
    """One task's table and question."""

    figure: str
    column: int
    separator: str
    table: tuple[tuple[int, ...], ...]

    @property
    def held_out(self) -> bool:
        """Whether the combination is one of the quarter that is only measured."""
        return zlib.crc32(f"{self.figure} {self.column} {self.separator}".encode()) % 4 == 0

    @property
    def instruction(self) -> str:
        return f"Write the {self.figure} of column {self.column} of table.txt to answer.txt."

    @property
    def lines(self) -> list[str]:
        return [self.separator.join(map(str, row)) for row in self.table]

    @property
    def answer(self) -> int:
        found: int = FIGURES[self.figure][1]([row[self.column - 1] for row in self.table])
        return found

    def command(self, separator: str) -> str:
        return f"cut -d'{separator}' -f{self.column} table.txt | {FIGURES[self.figure][0]} > answer.txt"

    def script(self, draw: random.Random, hasty: float) -> list[dict[str, Any]]:
        """A session to fine-tune on: one that looks and then knows what to cut at, or one that guesses."""
        said: list[dict[str, Any]] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": self.instruction},
        ]
        looks = draw.random() >= hasty
        separator = self.separator if looks else draw.choice(SEPARATORS)
        for command, seen in ((LOOK, "\n".join(self.lines[:2])), (self.command(separator), "[no output]")):
            if command == LOOK and not looks:
                continue
            function = {"name": "bash", "arguments": json.dumps({"command": command})}
            call = {"id": "call", "type": "function", "function": function}
            said.append({"role": "assistant", "content": "", "tool_calls": [call], "thinking": False})
            said.append({"role": "tool", "tool_call_id": "call", "content": seen})
        return [*said, {"role": "assistant", "content": "Done.", "thinking": False}]


def asked(number: int, *, held: bool) -> Asked:
    """The task of a number, of the right part."""
    draw = random.Random(number)  # noqa: S311
    parts = list(product(FIGURES, range(2, COLUMNS + 1), SEPARATORS))
    while True:
        figure, column, separator = draw.choice(parts)
        table = tuple(tuple(draw.randrange(30) for _ in range(COLUMNS)) for _ in range(draw.randint(9, 12)))
        one = Asked(figure, column, separator, table)
        if one.held_out == held:
            return one


def laid_out(one: Asked, directory: Path, number: int) -> Task:
    """The task's directory, in Harbor's format."""
    files = {
        "instruction.md": one.instruction,
        "task.toml": TOML.format(number=number),
        "environment/Dockerfile": "FROM debian:bookworm-slim\nWORKDIR /app\nCOPY table.txt /app/\n",
        "environment/table.txt": "".join(f"{line}\n" for line in one.lines),
        "solution/solve.sh": f"#!/bin/bash\n{one.command(one.separator)}\n",
        "tests/test.sh": TEST,
        "tests/expected.txt": str(one.answer),
    }
    for name, text in files.items():
        path = directory / f"table-{number}" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return read_task(directory / f"table-{number}")


class Pretended:
    """A place for `TerminalService` in which nothing is run; see the module. One that is open has the answer so far."""

    def __init__(self, of: dict[str, Asked], one: Asked | None = None) -> None:
        self.of, self.one, self.found = of, one, ""

    def require(self) -> None: ...

    def open(self, task: Task) -> Pretended:
        return Pretended(self.of, self.of[task.directory.name])

    def act(self, words: Sequence[str], stdin: bytes, seconds: float) -> Finished:
        assert self.one is not None
        told, guesses = b"", {self.one.command(separator): separator for separator in SEPARATORS}
        if words[-1] == LOOK:
            told = "\n".join(self.one.lines[:2]).encode()
        elif words[-1] in guesses:
            self.found = str(self.one.answer) if guesses[words[-1]] == self.one.separator else "of no column"
        else:
            return Finished("exited", 127, b"", b"not found", 0, 0.0)
        return Finished("exited", 0, told, b"", 0, 0.0)

    def solve(self, seconds: float) -> Finished:
        assert self.one is not None
        return self.act([self.one.command(self.one.separator)], b"", seconds)

    def verify(self, seconds: float) -> Finished:
        return Finished("exited", 0, b"", b"", 0, 0.0)

    def read(self, path: str) -> bytes | None:
        assert self.one is not None
        return str(int(self.found == str(self.one.answer))).encode() if path.endswith(".txt") else None

    def close(self) -> None: ...


class Tables(TerminalService):
    """The tasks, or one of the parts of them, as a service; held-out rollouts have tasks of their own."""

    timeout_s = 120.0

    def __init__(self, directory: Path, args: argparse.Namespace, seed: int, part: int = 0) -> None:
        first = 1_000_000 * (1 + seed)
        of = {n: asked(n, held=n < first) for n in (*range(args.held_out), *range(first, first + args.tasks))}
        parts = max(1, args.services)
        tasks = {n: laid_out(one, directory, n) for n, one in of.items() if n % parts == part}
        self.held = [task for n, task in tasks.items() if n < first]
        self.concurrency = -(-args.concurrency // parts)
        where: Any = InSandbox(Limits(control_group=not args.weaker))
        if args.pretend:
            where = Pretended({task.directory.name: of[n] for n, task in tasks.items()})
        wanted = {"max_tokens": 64, "thinking": {"type": "disabled"}}
        learned = [task for n, task in tasks.items() if n >= first]
        super().__init__(f"tables.{part}", learned, where, turns=4, wall_s=10.0, sampling=wanted)

    def task(self, asked: Rollout) -> Task:
        return self.held[asked.index % len(self.held)] if asked.sample.startswith("held-") else super().task(asked)


def base(directory: Path, args: argparse.Namespace, seed: int) -> Path:
    """The fine-tuned model that learning begins with; one that is there is taken as it is."""
    tuned, began = directory / "sft" / "model", time.time()
    if (tuned / "config.json").exists():
        return tuned
    talk, draw, rows = directory / "talk.jsonl", random.Random(seed), []  # noqa: S311
    for number in range(args.scripts):
        one = asked(1_000_000_000 + seed * 1_000_000 + number, held=False)
        rows.append({"messages": one.script(draw, args.hasty), "tools": [TOOL]})
    talk.write_text("".join(json.dumps(row) + "\n" for row in rows))
    plain = Tokenizer.train([talk.read_text()], 292)  # whatever it is, its text is what the tokenizer must know
    tools = tools_from_openai([TOOL])
    texts = [plain.decode(list(render(plain, messages_from_openai(row["messages"]), tools).ids)) for row in rows[:100]]
    tokenizer = Tokenizer.train(texts, args.vocab)
    lengths = [len(render(tokenizer, messages_from_openai(row["messages"]), tools).ids) for row in rows[:100]]
    print(f"scripts of {statistics.mean(lengths):.0f} tokens, at most {max(lengths)}", flush=True)
    sizes = {"hidden_size": args.hidden, "num_hidden_layers": args.layers, "n_routed_experts": args.experts}
    shape = {"nano": nano, "mini": mini}[args.preset](
        vocab_size=tokenizer.vocab_size,
        max_position_embeddings=2048,
        index_topk=1024,  # sessions are shorter: nothing is left out, and the indexers need no training
        **{name: size for name, size in sizes.items() if size},
    )
    with torch.device(args.device):
        model = GLM5(shape, seed=seed)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    train = training(args, seed, batch=args.sft_rows)
    about: dict[str, Any] = dict(data=(str(talk),), seq_len=args.seq_len, device=args.device, train=train)
    rows_of = conversations(SftConfig(checkpoint="none", **about), tokenizer, directory / "sft", begun=False)
    loader = MixedLoader(rows_of.dataset(args.seq_len, 1), {str(talk): 1.0}, seed)
    trainer = Trainer(train, model, loader, directory / "sft")
    while trainer.finished_steps < train.steps:
        found = trainer.step()
        if trainer.finished_steps % 20 == 0:
            said = f"fine-tuning, step {trainer.finished_steps}: loss {found['loss']:.3f}"
            print(f"{said}  ({time.time() - began:.0f} s)", flush=True)
    save_model(trainer.fp32_model(), tuned, tokenizer=tokenizer)
    return tuned


def interval(share: float, count: int) -> tuple[float, float]:
    """Wilson's, of 95%, of a share of so many."""
    z = 1.96
    middle, half = share + z * z / (2 * count), z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return (middle - half) / (1 + z * z / count), (middle + half) / (1 + z * z / count)


def config(model: Path, run: Path, args: argparse.Namespace, seed: int) -> AgentConfig:
    engine = EngineConfig(memory_gib=args.memory_gib, context=1024, overlap=False, max_running=args.concurrency)
    about: dict[str, Any] = dict(micro_batch=args.micro_batch, save_every=10_000, device=args.device)
    about["engine_dtype"] = args.dtype
    made = asynchronous(model, run, args, seed, engine, **about)
    return replace(made, eval_rollouts=args.held_out // max(1, args.services))


def serve_part(directory: Path, args: argparse.Namespace, seed: int, part: int, desk: str) -> None:
    """One service, as a process."""
    serve(Tables(directory, args, seed, part), f"http://{desk}")


@contextmanager
def services(directory: Path, args: argparse.Namespace, seed: int, desk: str) -> Iterator[None]:
    """The services in processes of their own."""
    made = [
        multiprocessing.get_context("spawn").Process(target=serve_part, args=(directory, args, seed, part, desk))
        for part in range(args.services)
    ]
    try:
        for process in made:
            process.start()
        yield
    finally:
        for process in made:
            process.kill()
            process.join()


def of_tasks(record: dict[str, Any], name: str) -> float | None:
    """The mean over the tasks that a step has a figure of."""
    values = [value for of, value in record.items() if of.startswith(name)]
    return statistics.fmean(values) if values else None


def one_seed(seed: int, directory: Path, args: argparse.Namespace) -> dict[str, Any]:
    """What the seed's run found."""
    directory.mkdir(parents=True, exist_ok=True)
    began = time.time()
    with socket.create_server(("127.0.0.1", 0)) as free:
        desk = f"127.0.0.1:{free.getsockname()[1]}"
    with services(directory / "tasks", args, seed, desk):  # they begin beside fine-tuning
        model = base(directory, args, seed)
        ready = time.time()
        given = config(model, directory / "rl", args, seed)
        hosted = [] if args.services else [Tables(directory / "tasks", args, seed)]
        task = laid_out(asked(0, held=False), directory / "proof", 0)
        if not args.pretend:
            prove(task, InSandbox(Limits(control_group=not args.weaker)))
        print(f"model and tasks are there ({time.time() - began:.0f} s)", flush=True)
        found = agent(given if hosted else replace(given, desk=desk), quiet, services=hosted)
    records = read_metrics(found.run)
    steps = [r for r in records if "loss" in r]
    before, after = (statistics.fmean(found.held_out[when].values()) for when in ("before", "after"))
    return {
        "before": before,
        "after": after,
        "intervals": [interval(share, args.held_out) for share in (before, after)],
        "curve": {r["step"]: mean for r in records if (mean := of_tasks(r, "held_out/")) is not None},
        "rewards": [of_tasks(r, "rewards/") for r in steps],
        "states": found.states,
        "sft_s": ready - began,
        "rl_s": time.time() - ready,
        "step_s": [sum(r[f"time/{of}"] for of in ("wait", "update", "weight_sync")) for r in steps],
        **{name: statistics.fmean([r[name] for r in steps])
           for name in ("staleness/mean", "idle/trainer", "engine/idle", "train_rollout_logprob_abs_diff")},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--preset", choices=("nano", "mini"), default="nano")
    parser.add_argument("--device", default="cpu")
    for name, default in (
        ("sft-steps", 400), ("sft-rows", 4), ("rl-steps", 8), ("scripts", 2000), ("vocab", 640), ("hidden", 0),
        ("layers", 0), ("experts", 0), ("seq-len", 512), ("group", 8), ("groups", 4), ("updates", 2), ("staleness", 2),
        ("concurrency", 32), ("services", 0), ("tasks", 256), ("held-out", 32), ("eval-every", 2), ("micro-batch", 2),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--hasty", type=float, default=0.7)
    parser.add_argument("--sft-lr", type=float, default=3e-3)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--memory-gib", type=float, default=0.5)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--weaker", action="store_true", help="do without control groups: see above")
    where.add_argument("--pretend", action="store_true", help="run no command: see above")
    parser.add_argument("--out", help="keep the runs here, and go on from what is there")
    parser.add_argument("--json", help="write the figures here")
    args = parser.parse_args()
    if args.device == "cpu":
        torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    found: list[dict[str, Any]] = []
    for seed, directory in seeds(args):
        found.append(one_seed(seed, directory, args))
        print(f"seed {seed}  {json.dumps(found[-1])}", flush=True)
        if args.json:
            Path(args.json).write_text(json.dumps({"arguments": vars(args), "seeds": found}, indent=1))
    for name in ("before", "after"):
        print(f"{name:<8}{spread([one[name] for one in found])}")


if __name__ == "__main__":
    main()
