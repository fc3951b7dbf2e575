"""Several scripted engines behind one gateway: sessions stay, engines die and come back, weights are pushed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fastapi.testclient import TestClient

from glm5.serve.client import Unavailable, WeightGroup, WeightUpdate
from glm5.serve.gateway.app import GatewayOptions, create_gateway
from glm5.serve.gateway.pool import EnginePool
from glm5.serve.gateway.router import Router
from glm5.serve.request import Request
from glm5.utils.errors import UserError
from support.scripted import Scripted
from support.serving import HI


def pool_of(count: int, **options: Any) -> EnginePool:
    engines = {f"e{i}": Scripted(**options) for i in range(count)}
    return EnginePool(engines, Router("1"), beat_s=0.05)


async def ids(pool: EnginePool, name: str, route: str) -> list[int]:
    stream = await pool.generate(Request([5, 6], rid=name, route=route))
    return [id async for delta in stream for id in delta.ids]


def asked(pool: EnginePool) -> dict[str, int]:
    return {name: len(engine.seen) for name, engine in pool.engines.items()}  # type: ignore[attr-defined]


def test_sessions_through_the_gateway_stay_at_an_engine() -> None:
    pool = pool_of(3)
    app = create_gateway(pool, GatewayOptions(), start=pool.start, stop=pool.stop, forget=pool.router.forget)
    with TestClient(app) as client:
        for turn in range(4):
            for session in "abcdef":
                history = [*HI, *[{"role": "user", "content": str(n)} for n in range(turn)]]
                answer = client.post(f"/sessions/{session}/v1/chat/completions", json={"messages": history})
                assert answer.status_code == 200, answer.text
        assert len(pool.router._homes) == 6
        assert all(client.delete(f"/sessions/{session}").status_code == 200 for session in "abcdef")
        assert not pool.router._homes, "nothing is kept of sessions that have ended"
    routes = [{r.route for r in engine.seen} for engine in pool.engines.values()]  # type: ignore[attr-defined]
    assert sum(map(len, routes)) == 6, "each session met one engine only"
    assert sum(asked(pool).values()) == 24
    assert all(engine.load == 0 for engine in pool.router.engines.values())


def test_a_request_lost_before_its_first_id_is_asked_elsewhere() -> None:
    async def go() -> None:
        pool = pool_of(3)
        await pool.beat()
        expected = await ids(pool, "r0", "s")
        home = next(name for name, count in asked(pool).items() if count)
        pool.engines[home].fail_with = Unavailable("gone")  # type: ignore[attr-defined]
        assert await ids(pool, "r1", "s") == expected
        second = next(name for name, count in asked(pool).items() if count and name != home)
        pool.engines[second].failure = "dead"  # type: ignore[misc]
        assert await ids(pool, "r2", "s") == expected, "also where the engine refuses at once"
        for engine in pool.engines.values():
            engine.failure = "dead"  # type: ignore[misc]
        with pytest.raises(Unavailable):
            await ids(pool, "r3", "s")
        assert pool.failure == "dead; dead; dead"
        assert not pool._at
        assert all(engine.load == 0 for engine in pool.router.engines.values())

    asyncio.run(go())


def test_a_request_lost_later_fails() -> None:
    async def go() -> None:
        pool = pool_of(2)
        await pool.beat()
        stream = await pool.generate(Request([5, 6], rid="r", route="s"))
        assert (await anext(stream)).ids
        for engine in pool.engines.values():
            engine.fail_with = Unavailable("gone")  # type: ignore[attr-defined]
        with pytest.raises(Unavailable, match="gone"):
            await anext(stream)
        await stream.aclose()
        assert all(engine.load == 0 for engine in pool.router.engines.values())

    asyncio.run(go())


def test_a_push_and_an_engine_that_wakes_with_old_weights() -> None:
    async def go() -> None:
        pool = pool_of(2)
        await pool.beat()
        pool.engines["e1"].failure = "restarting"  # type: ignore[misc]
        await pool.update_weights(WeightUpdate("disk", path="x", weight_version="2"))
        assert [e.name for e in pool.router.routable(pool.clock())] == ["e0"]
        pool.engines["e1"].failure = None  # type: ignore[misc]
        await pool.beat()
        assert pool.engines["e1"].weight_version == "1"
        assert [e.name for e in pool.router.routable(pool.clock())] == ["e0"]
        await pool.engines["e1"].update_weights(WeightUpdate("disk", path="x", weight_version="2"))
        await pool.beat()
        assert [e.name for e in pool.router.routable(pool.clock())] == ["e0", "e1"]
        assert await pool.info() == {f"e{i}": {"routable": True, "version": "2", "load": 0} for i in range(2)}

    asyncio.run(go())


def test_aborts_and_sums() -> None:
    async def go() -> None:
        pool = pool_of(2, gate=asyncio.Event())
        for engine in pool.engines.values():
            engine.probe = _yes  # type: ignore[method-assign]
        await pool.beat()
        streams = [await pool.generate(Request([5], rid=f"r{i}", route=f"s{i}")) for i in range(4)]
        assert pool.stats().running == 4
        assert pool.stats().cache_usage == 0.25
        await pool.abort("r1")
        delta = await anext(streams[1])
        assert delta.finish is not None
        assert delta.finish.type == "abort"
        assert sum(len(e.aborted) for e in pool.engines.values()) == 1  # type: ignore[attr-defined]
        for stream in streams:
            await stream.aclose()
        assert pool.stats().running == 0

    asyncio.run(go())


def test_a_group_and_memory_of_all_engines() -> None:
    """Each joins as a rank of its own; none gives memory back while another one is at work."""

    async def go() -> None:
        gates = asyncio.Event()
        pool = pool_of(3, gate=gates)
        await pool.join_group(WeightGroup("127.0.0.1", 1, 1, 4))
        calls = [engine.calls for engine in pool.engines.values()]  # type: ignore[attr-defined]
        assert [group.rank_offset for (group,) in calls] == [1, 2, 3]
        stream = await pool.engines["e1"].generate(Request([5]))
        with pytest.raises(UserError, match="requests run"):
            await pool.release_memory(("kv_cache",))
        assert not any(("release", ("kv_cache",)) in made for made in calls)
        assert not any(engine.paused for engine in pool.engines.values())
        await stream.aclose()
        await pool.pause("retract")
        await pool.release_memory(("kv_cache",))
        assert all(("release", ("kv_cache",)) in made for made in calls)
        assert pool.paused
        await pool.resume()

        async def lost() -> bool:
            raise Unavailable("e2 is gone")

        async def refused(mode: str) -> None:
            raise UserError(mode, "Ask for what it offers")

        pool.engines["e2"].flush = lost  # type: ignore[method-assign]
        await pool.release_memory(("weights",))
        assert ("release", ("weights",)) in calls[0]
        pool.engines["e2"].pause = refused  # type: ignore[method-assign, assignment]
        with pytest.raises(UserError, match="keep"):
            await pool.release_memory(("cuda_graph",))
        assert not any(engine.paused for engine in pool.engines.values())

    asyncio.run(go())


async def _yes(timeout_s: float) -> bool:
    return True


def test_a_gateway_that_is_late_takes_no_engine_for_silent() -> None:
    async def go() -> None:
        now = [0.0]
        engines = {f"e{i}": Scripted() for i in range(2)}
        pool = EnginePool(engines, Router("1", silent_s=0.1), beat_s=0.01, clock=lambda: now[0])
        await pool.start()
        now[0] += 100.0  # nothing was done meanwhile, here
        for _ in range(10):
            assert len(pool.router.routable(pool.clock())) == 2
            await asyncio.sleep(0.01)
        engines["e1"].gate = asyncio.Event()  # from now on it does not answer
        while len(pool.router.routable(pool.clock())) == 2:
            now[0] += 0.02
            await asyncio.sleep(0.001)
        assert [engine.name for engine in pool.router.routable(pool.clock())] == ["e0"]
        await pool.stop()

    asyncio.run(asyncio.wait_for(go(), 120))
