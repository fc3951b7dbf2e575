"""What the gateway costs a turn: agents at once, each of several turns, against an engine that answers at once.

    python benchmarks/gateway_turns.py --agents 1000 --turns 100000

No network: requests go into the application directly, so that what is measured is the gateway. Prints the time that a
turn takes alone (p50, p99), turns a second with all agents at once, and the memory after every tenth of the turns.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import sys
import time
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from glm5.serve.gateway.app import GatewayOptions, create_gateway
from support.scripted import Scripted

TURNS = 10  # of a session


def memory_mib() -> float:
    """What the process has in memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


async def session(client: httpx.AsyncClient, name: str, spent: list[float]) -> None:
    history = [{"role": "system", "content": "be brief"}]
    for turn in range(TURNS):
        history.append({"role": "user", "content": f"question {turn} " * 20})
        begun = time.perf_counter()
        answer = await client.post(f"/sessions/{name}/v1/chat/completions", json={"messages": history})
        spent.append(time.perf_counter() - begun)
        history.append(answer.raise_for_status().json()["choices"][0]["message"])
    made = (await client.delete(f"/sessions/{name}")).json()
    assert len(made["trajectories"]) == 1, "every turn went on from the one before"


async def main(agents: int, turns: int) -> None:
    backend = Scripted(script=lambda request, index: "hm</think>" + "the answer is " * 10 + "<|user|>", sizes=(64,))
    backend.context = 100_000
    app = create_gateway(backend, GatewayOptions(max_requests=10 * agents))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway", timeout=600) as client:
        alone: list[float] = []
        for n in range(20):
            await session(client, f"alone{n}", alone)
            backend.seen.clear()
        alone.sort()
        print(
            f"a turn alone: p50 {1e3 * alone[len(alone) // 2]:.2f} ms, p99 {1e3 * alone[len(alone) * 99 // 100]:.2f} ms"
        )
        count, done, begun = 0, 0, time.perf_counter()
        sessions = turns // TURNS

        async def agent() -> None:
            nonlocal count, done
            while count < sessions:
                count += 1
                await session(client, f"s{count}", [])
                backend.seen.clear()  # the stand-in's own record
                done += 1
                if done % max(1, sessions // 10) == 0:
                    print(f"{done * TURNS:>8} turns  {memory_mib():7.1f} MiB", flush=True)

        await asyncio.gather(*(agent() for _ in range(agents)))
        print(f"{agents} agents at once: {turns / (time.perf_counter() - begun):.0f} turns a second")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=100)
    parser.add_argument("--turns", type=int, default=2000)
    given = parser.parse_args()
    asyncio.run(main(given.agents, given.turns))
