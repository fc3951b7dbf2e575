"""What the gateway costs a turn, over HTTP: agents at once, each of several turns, in processes of their own.

    python benchmarks/gateway_turns.py --agents 1000 --turns 100000               as fast as it goes; is memory flat?
    python benchmarks/gateway_turns.py --agents 1000 --turns 20000 --answer-s 10  what does a turn cost on the way?

One process is the gateway (router and pool included) before four scripted engines in it, which answer after
`--answer-s` seconds on average; the agents are `--clients` other processes. The overhead of a turn is the time that its
client waits beyond what the engine takes, both ends of the connection included. Prints it (p50, p99), turns a second,
the gateway's processor time a turn, its memory after every tenth of the turns, and what a request costs that asks for
nothing. `--cores 2`: all of it on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import resource
import socket
import sys
import time
from dataclasses import replace
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import uvicorn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from glm5.serve.gateway.app import GatewayOptions, create_gateway
from glm5.serve.gateway.pool import EnginePool
from glm5.serve.gateway.router import Router
from glm5.serve.request import Delta, Finish, TokenInfo
from glm5.utils.listening import listen
from support.scripted import Scripted, chat_tokenizer

TURNS = 10  # of a session
ENGINES = 4
ANSWER = chat_tokenizer().encode("hm</think>" + "the answer is " * 10 + "<|user|>", allow_special=True)
DELTA = Delta(
    "", 0, tuple(ANSWER), tuple(TokenInfo(-id / 1000) for id in ANSWER), finish=Finish("stop", ANSWER[-1]), version="1"
)


class Engine(Scripted):
    """Costs next to nothing: what it answers is made once, and told when the request's client wants it."""

    async def generate(self, request: Any) -> Any:
        self.alive.add(request.rid)
        return Answering(self, request)


class Answering:
    """The stream of one request: all ids in one delta."""

    def __init__(self, engine: Engine, request: Any) -> None:
        self._engine, self._rid, self._told = engine, request.rid, False
        self._s = (request.params.seed or 0) / 1e6  # as its client has it

    async def __anext__(self) -> Delta:
        await asyncio.sleep(self._s)
        assert not self._told, "its end was told"
        self._told = True
        return replace(DELTA, rid=self._rid)

    async def aclose(self) -> None:
        self._engine.alive.discard(self._rid)


def gateway(listening: socket.socket, agents: int) -> None:
    engines = {}
    for n in range(ENGINES):
        engines[f"engine{n}"] = Engine()
        engines[f"engine{n}"].context = 100_000
    pool = EnginePool(engines, Router("1"))
    options = GatewayOptions(max_requests=10 * agents)
    app = create_gateway(pool, options, start=pool.start, stop=pool.stop, forget=pool.router.forget)
    uvicorn.Server(uvicorn.Config(app, log_level="warning", ws="none")).run([listening])


async def post(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, method: str, path: str, body: Any = None
) -> Any:
    """As little of a client as there can be: it shares the cores."""
    data = json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: gateway\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    told = await reader.readexactly(int(head.split("content-length:")[1].split()[0]))
    assert head.startswith("http/1.1 200"), (head, told)
    return json.loads(told)


def client(address: tuple[str, int], first: int, agents: int, sessions: int, answer_s: float, out: Queue[Any]) -> None:
    """So many agents; tells of each session's turns what they took beyond the engine's time."""
    left = iter(range(sessions))
    rng = random.Random(first)  # noqa: S311

    async def agent() -> None:
        reader, writer = await asyncio.open_connection(*address, limit=1 << 24)
        await asyncio.sleep(rng.random() * answer_s)  # agents do not keep step
        for number in left:
            spent, name, history = [], f"s{first + number}", [{"role": "system", "content": "be brief"}]
            for turn in range(TURNS):
                history.append({"role": "user", "content": f"question {turn} " * 20})
                # Of random length: agents whose answers all took as long would stay together once they met.
                took = rng.expovariate(1 / answer_s) if answer_s else 0.0
                body = {"messages": history, "seed": int(1e6 * took)}
                begun = time.perf_counter()
                path = f"/sessions/{name}/v1/chat/completions"
                answer = await post(reader, writer, "POST", path, body)
                spent.append(time.perf_counter() - begun - took)
                history.append(answer["choices"][0]["message"])
            made = await post(reader, writer, "DELETE", f"/sessions/{name}")
            assert len(made["trajectories"]) == 1, "every turn went on from the one before"
            out.put(spent)
        writer.close()

    async def main() -> None:
        await asyncio.gather(*(agent() for _ in range(agents)))

    asyncio.run(main())


def floor(address: tuple[str, int], pid: int) -> None:
    """What a request costs that asks for nothing: HTTP and the framework alone."""

    async def ask(count: int) -> list[float]:
        reader, writer = await asyncio.open_connection(*address)
        spent = []
        for _ in range(count):
            begun = time.perf_counter()
            await post(reader, writer, "GET", "/sessions")
            spent.append(time.perf_counter() - begun)
        writer.close()
        return sorted(spent)

    asyncio.run(ask(50))
    used, spent = processor_s(pid), asyncio.run(ask(500))
    used = processor_s(pid) - used
    print(f"a request for nothing: {1e3 * spent[250]:.1f} ms (p50), {1e3 * used / 500:.2f} ms of processor", flush=True)


def memory_mib(pid: int) -> float:
    """What a process has in memory now."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(context: Any, listening: socket.socket, pid: int, agents: int, turns: int, given: Any) -> list[float]:
    """All overheads, in seconds, sorted."""
    out, clients = context.Queue(), min(given.clients, agents)
    sessions = turns // TURNS // clients
    made = []
    for n in range(clients):
        first = n * sessions + agents * 10**7  # no two sessions have one name
        args = listening.getsockname(), first, agents // clients, sessions, given.answer_s, out
        made.append(context.Process(target=client, args=args, daemon=True))
    begun, used = time.perf_counter(), processor_s(pid)
    for one in made:
        one.start()
    spent: list[float] = []
    total, tenth = sessions * clients * TURNS, max(1, turns // TURNS // 10) * TURNS
    while len(spent) < total:
        spent += out.get(timeout=600)
        if agents > 1 and len(spent) % tenth == 0:
            print(f"{len(spent):>8} turns  {memory_mib(pid):7.1f} MiB", flush=True)
    for one in made:
        one.join()
    took, used = time.perf_counter() - begun, processor_s(pid) - used
    spent.sort()
    p50, p99 = (1e3 * spent[len(spent) * percent // 100] for percent in (50, 99))
    print(
        f"{agents} agents at once: {total / took:.0f} turns a second, {1e3 * used / total:.2f} ms of the gateway's "
        f"processor a turn; overhead of a turn p50 {p50:.1f} ms, p99 {p99:.1f} ms",
        flush=True,
    )
    return spent


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=100)
    parser.add_argument("--turns", type=int, default=2000)
    parser.add_argument(
        "--answer-s", type=float, default=0.0, help="seconds that the engines take for an answer, on average"
    )
    parser.add_argument("--clients", type=int, default=1, help="processes of agents")
    parser.add_argument("--cores", type=int, help="run on so many cores")
    given = parser.parse_args()
    if given.cores is not None:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: given.cores])
    context = multiprocessing.get_context("spawn")
    listening = listen("127.0.0.1", 0)
    server = context.Process(target=gateway, args=(listening, given.agents), daemon=True)
    server.start()
    assert server.pid is not None
    try:
        floor(listening.getsockname(), server.pid)
        if not given.answer_s:
            measure(context, listening, server.pid, 1, 200, given)
        measure(context, listening, server.pid, given.agents, given.turns, given)
    finally:
        server.kill()
        server.join()
