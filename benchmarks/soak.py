"""Sustained load on a real server: `python benchmarks/serve.py --soak MINUTES` runs this.

    python benchmarks/serve.py --soak 10 [--threads 2] [--drafts 3] [--checkpoint DIR] [--workers PREFILL DECODE]

First the capacity: as many requests as the server takes, for half a minute. Then requests at 90% of that rate, at
random moments, for so many minutes: new and known prompts of 16 to 512 ids, answers of 8 to 64, whole and streamed; one
in twenty clients goes away in the middle. Told: errors, memory of all processes of the server, open files, latencies
and their drift. Afterwards nothing may be left: no request, no page. Writes benchmarks/out/soak.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

OUT = Path(__file__).parent / "out"
CAPACITY_S, SHARE, AT_ONCE, LEAVING = 30.0, 0.9, 48, 0.05
SAMPLE_S, VOCABULARY = 2.0, 480


def checkpoint(path: str) -> None:
    """A nano with random weights and a tokenizer of its own vocabulary."""
    from glm5 import GLM5, save_model
    from glm5.model.presets import nano
    from glm5.text import Tokenizer

    tokenizer = Tokenizer.train([f"def hello(name):\n    print(name, {n})\n" for n in range(2000)], VOCABULARY)
    save_model(GLM5(nano(initializer_range=0.06, vocab_size=tokenizer.vocab_size), seed=1), path)
    tokenizer.save(path)


class Load:
    """Requests of one run, and what became of them."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client, self.rng = client, random.Random(0)  # noqa: S311
        self.known: list[list[int]] = []
        self.done: list[dict[str, float]] = []
        self.errors: list[str] = []

    def body(self) -> dict[str, Any]:
        rng = self.rng
        if self.known and rng.random() < 0.4:
            ids = [*rng.choice(self.known), rng.randrange(16, VOCABULARY)][-600:]
        else:
            ids = [rng.randrange(16, VOCABULARY) for _ in range(rng.randrange(16, 512))]
            self.known = [*self.known[-49:], ids]
        params = {"max_new_tokens": rng.randrange(8, 64), "temperature": rng.choice([0.0, 0.8]), "ignore_eos": True}
        return {"input_ids": ids, "sampling_params": params, "stream": rng.random() < 0.5, "return_logprob": True}

    async def one(self) -> None:
        body, begin, first, leave = self.body(), time.perf_counter(), None, self.rng.random() < LEAVING
        wanted = body["sampling_params"]["max_new_tokens"]
        try:
            async with self.client.stream("POST", "/generate", json=body) as answer:
                if answer.status_code != 200:
                    self.errors.append(f"{answer.status_code}: {(await answer.aread())[:200]!r}")
                    return
                last = ""
                async for line in answer.aiter_lines():
                    if line and line != "data: [DONE]":
                        first, last = first or time.perf_counter(), line
                    if leave and first:
                        return
            got = json.loads(last.removeprefix("data: "))["meta_info"]["completion_tokens"]
            if got != wanted:
                self.errors.append(f"{got} tokens of {wanted}")
        except (httpx.HTTPError, ValueError, KeyError) as error:
            self.errors.append(f"{type(error).__name__}: {error}")
            return
        now = time.perf_counter()
        # Latency by the token, since answers are of many lengths.
        each = (now - begin) / wanted
        self.done.append({"at": now, "tokens": wanted, "seconds": now - begin, "per_token": each})


async def capacity(load: Load) -> float:
    """Requests a second, with always so many under way."""
    end = time.perf_counter() + CAPACITY_S

    async def lane() -> None:
        while time.perf_counter() < end:
            await load.one()

    await asyncio.gather(*(lane() for _ in range(AT_ONCE)))
    return len([one for one in load.done if one["at"] <= end]) / CAPACITY_S


async def sustain(load: Load, rate: float, seconds: float, watch: Any) -> None:
    """Requests at random moments, `rate` of them a second."""
    tasks: set[asyncio.Task[None]] = set()
    begin = due = time.perf_counter()
    while due < begin + seconds:
        due += load.rng.expovariate(rate)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        task = asyncio.create_task(load.one())
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        watch(len(tasks))
    await asyncio.gather(*tasks)


def memory(pid: int) -> tuple[float, int]:
    """MiB and open files of a process and those that it has started."""
    mib, files = 0.0, 0
    for one in (pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())):
        status = Path(f"/proc/{one}/status").read_text()
        mib += int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) / 1024
        files += len(os.listdir(f"/proc/{one}/fd"))
    return mib, files


def slope(points: list[tuple[float, float]]) -> float:
    """Of the line through points, by least squares."""
    x, y = zip(*points, strict=True)
    return statistics.linear_regression(x, y).slope


async def run(a: argparse.Namespace, address: str, pid: int) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=200)
    async with httpx.AsyncClient(base_url=address, timeout=300, limits=limits) as client:
        probe = Load(client)
        rate = SHARE * await capacity(probe)
        print(f"capacity {rate / SHARE:.2f} requests/s; {SHARE:.0%} of it for {a.soak:g} minutes", flush=True)
        load, samples, begin, most = Load(client), [], time.perf_counter(), [0]

        async def sample() -> None:
            while True:
                samples.append((time.perf_counter() - begin, *memory(pid)))
                await asyncio.sleep(SAMPLE_S)

        def watch(under_way: int) -> None:
            most[0] = max(most[0], under_way)

        sampling = asyncio.create_task(sample())
        await sustain(load, rate, a.soak * 60, watch)
        sampling.cancel()
        left = (await client.get("/v1/loads")).json()["loads"][0]["num_total_reqs"]
        flushed = (await client.post("/flush_cache")).status_code == 200
        usage = (await client.get("/v1/loads")).json()["loads"][0]["token_usage"]
    tenths = [[] for _ in range(10)]
    for one in load.done:
        tenths[min(9, int((one["at"] - begin) / (a.soak * 6)))].append(one["per_token"])
    settled = [(t / 60, mib) for t, mib, _ in samples if t > a.soak * 60 * 0.3]
    quantiles = statistics.quantiles([one["per_token"] for one in load.done], n=100)
    return {
        "requests_per_second": rate,
        "requests": len(load.done),
        "tokens": sum(one["tokens"] for one in load.done),
        "errors": probe.errors + load.errors,
        "most_under_way": most[0],
        "memory_mib": {"first": samples[0][1], "after_30_percent": settled[0][1], "last": samples[-1][1]},
        "memory_growth_mib_per_minute": slope(settled),
        "open_files": {"first": samples[0][2], "last": samples[-1][2]},
        "seconds_per_token": {"p50": quantiles[49], "p99": quantiles[98]},
        "p50_by_tenth_of_the_time": [statistics.median(part) if part else None for part in tenths],
        "left_over": {"requests": left, "flushed": flushed, "usage_after_flush": usage},
    }


def soak(a: argparse.Namespace) -> None:
    """Start a server, load it, print and write what came out; status 1 if anything failed or stayed."""
    with tempfile.TemporaryDirectory() as made:
        path = a.checkpoint or made
        if not a.checkpoint:
            checkpoint(path)
        options = ["--port", "0", "--drafts", str(a.drafts), "--memory-gib", "0.25", "--host-pages", "64"]
        options += ["--context", "1024", "--log-level", "warning", "--device", "cpu"]
        if a.workers:
            options += ["--prefill-workers", str(a.workers[0]), "--decode-workers", str(a.workers[1])]
        main = "import sys; from glm5.cli.main import main; sys.exit(main())"
        environment = {**os.environ, "OMP_NUM_THREADS": str(a.threads), "GOMP_SPINCOUNT": "20000"}
        command = [sys.executable, "-c", main, "serve", path, *options]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as server:
            assert server.stderr is not None
            lines = []
            for line in server.stderr:
                lines.append(line)
                if line.startswith("listening on "):
                    break
            else:
                raise SystemExit("the server did not start:\n" + "".join(lines))
            try:
                found = asyncio.run(run(a, lines[-1].split()[-1], server.pid))
            finally:
                server.terminate()
    found = {
        "machine": f"{platform.machine()}, {a.threads} threads",
        "command": "python " + " ".join(["benchmarks/serve.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        **found,
    }
    print(json.dumps(found, indent=1))
    OUT.mkdir(exist_ok=True)
    (OUT / "soak.json").write_text(json.dumps(found, indent=1) + "\n")
    left = found["left_over"]
    if found["errors"] or left["requests"] or not left["flushed"] or left["usage_after_flush"]:
        raise SystemExit(1)
