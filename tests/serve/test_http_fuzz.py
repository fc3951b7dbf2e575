"""Random and malformed bodies: no 5xx, the server stays up, and other requests are unharmed.

The tests send a few hundred bodies and a few examples a route. `python tests/serve/test_http_fuzz.py 10000` sends so
many bodies to a real server while other requests run beside, and counts the answers.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the command above

from glm5.serve.http.app import create_app
from glm5.serve.http.server import HttpOptions
from support.scripted import Scripted
from support.serving import HI, PING, served

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": HI,
        "tools": [PING],
        "tool_choice": "auto",
        "n": 2,
        "stop": ["a"],
        "logprobs": True,
        "top_logprobs": 1,
        "response_format": {"type": "text"},
        "stream": False,
        "thinking": {"type": "enabled"},
        "stream_options": {"include_usage": True},
    },
    "/v1/completions": {"prompt": ["a", "b"], "max_tokens": 5, "logprobs": 1, "echo": False, "stream": False},
    "/v1/responses": {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}],
        "text": {"format": {"type": "text"}},
        "tools": [{"type": "function", "name": "f", "parameters": {}}],
        "stream": False,
    },
    "/v1/messages": {
        "max_tokens": 5,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "thinking": {"type": "disabled"},
        "stream": False,
    },
    "/v1/messages/count_tokens": {"messages": HI, "system": "x"},
    "/generate": {
        "input_ids": [[50], [51]],
        "sampling_params": {"max_new_tokens": 4, "temperature": 1.0, "stop_token_ids": [60]},
        "return_logprob": True,
        "rid": ["a", "b"],
        "stream": False,
    },
    "/tokenize": {"prompt": "x", "return_token_strs": True},
    "/detokenize": {"tokens": [50, 51]},
    "/abort_request": {"rid": "x"},
    "/update_weights_from_disk": {"model_path": "x", "weight_version": "1"},
    "/update_weights_from_tensor": {"serialized_named_tensors": ["AA=="], "flush_cache": True},
    "/update_weights_from_distributed": {"names": ["a"], "dtypes": ["bfloat16"], "shapes": [[1]]},
    "/init_weights_update_group": {"master_address": "x", "master_port": 1, "rank_offset": 1, "world_size": 2},
    "/release_memory_occupation": {"tags": ["weights"]},
    "/weights_checker": {"action": "checksum"},
}
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2, 2**31, 2**63, 2**64, -(2**63), 10**400, 0.5, -0.0, 1e308, "", "x", "0", "\x00",
    "\ud800", "💥" * 50, "<|user|>", "a" * 5000, [], [[]], [None], {}, {"": None}, {"type": None}, {"type": "text"},
    float("nan"), float("inf"), ["x", 1, None], {"a": {"a": {"a": []}}},
]  # fmt: skip


def mutant(draw: random.Random) -> tuple[str, bytes]:
    """A path and a body for it: a good one in which things were replaced, removed or added, or its bytes broken."""
    path = draw.choice(list(BODIES))
    body: Any = json.loads(json.dumps(BODIES[path]))
    for _ in range(draw.choice((0, 1, 1, 1, 2, 4))):
        body = _changed(body, draw)
    if draw.random() < 0.3 and isinstance(body, dict):
        body["stream"] = True
    data = json.dumps(body).encode()
    kind = draw.random()
    if kind < 0.1:
        data = data[: draw.randrange(len(data) + 1)]
    elif kind < 0.16:
        at = draw.randrange(len(data))
        data = data[:at] + bytes(draw.randrange(256) for _ in range(draw.randrange(1, 4))) + data[at + 1 :]
    elif kind < 0.18:
        data = draw.randbytes(draw.randrange(200))
    elif kind < 0.2:
        data = (b"[" if draw.random() < 0.5 else b'{"a":') * draw.randrange(1, 20_000)
    return path, data


def _changed(value: Any, draw: random.Random) -> Any:
    """One change somewhere in it."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key = draw.choice(list(value))
        if draw.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        if draw.random() < 0.05:
            return {
                **value,
                draw.choice(("temperature", "top_p", "seed", "regex", "stop", "unknown")): draw.choice(ODD),
            }
        return {**value, key: _changed(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.7:
        at = draw.randrange(len(value))
        return [*value[:at], _changed(value[at], draw), *value[at + 1 :]]
    return draw.choice(ODD)


def app() -> Any:
    return create_app(Scripted(context=512), HttpOptions(max_body_bytes=200_000, request_timeout_s=5))


# ------------------------------------------------------------------------------------------------ against the document
APP = app()
schema = schemathesis.openapi.from_asgi("/openapi.json", APP)
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    unsupported_method,
]


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """Most bodies ask for the model that is here, so that they get further than that."""
    if isinstance(body, dict) and "model" in body:
        body["model"] = None
    return body


@schema.parametrize()
@settings(max_examples=3, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
def test_answers_are_as_the_document_says(case: Any) -> None:
    case.call_and_validate(checks=CHECKS)


# --------------------------------------------------------------------------------------------------- malformed bodies
async def storm(client: httpx.AsyncClient, count: int, seed: int, at_once: int = 8) -> tuple[Counter[int], list[str]]:
    """Send so many mutants, `at_once` at a time; the statuses, and what must not have happened."""
    draw = random.Random(seed)  # noqa: S311
    statuses: Counter[int] = Counter()
    faults: list[str] = []
    wanted: str | None = None

    async def send(path: str, data: bytes) -> None:
        try:
            answer = await client.post(path, content=data, headers={"Content-Type": "application/json"})
        except Exception as error:
            faults.append(f"{path} {data[:300]!r}: {error!r}")
            return
        statuses[answer.status_code] += 1
        if answer.status_code >= 500 or b'"server_error"' in answer.content or b'"api_error"' in answer.content:
            faults.append(f"{path} {data[:300]!r}: {answer.status_code} {answer.text[-300:]}")

    async def bystander() -> None:
        nonlocal wanted
        body = {"messages": HI, "return_token_ids": True}
        answer = (await client.post("/v1/chat/completions", json=body)).json()
        told = json.dumps(answer["choices"])
        wanted = wanted or told
        if told != wanted:
            faults.append(f"another request was harmed: {told[:300]}")

    for _ in range(0, count, at_once):
        await asyncio.gather(bystander(), *(send(*mutant(draw)) for _ in range(at_once)))
    return statuses, faults


def test_malformed_bodies_harm_nobody() -> None:
    async def main() -> None:
        made = app()
        transport = httpx.ASGITransport(made)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            statuses, faults = await storm(client, 400, seed=1)
            assert not faults, faults[:3]
            assert statuses[200] > 20
            assert statuses[400] > 100
            assert (await client.get("/health")).status_code == 200
        server = made.state.server
        assert not server.live
        assert not server.backend.alive

    asyncio.run(main())


def test_mutants_reach_every_path() -> None:
    draw = random.Random(1)  # noqa: S311
    assert {mutant(draw)[0] for _ in range(400)} == set(BODIES)


@pytest.mark.parametrize("path", sorted(BODIES))
def test_bodies_that_are_mutated_are_good(path: str) -> None:
    async def main() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(APP), base_url="http://test") as client:
            answer = await client.post(path, json=BODIES[path])
            assert answer.status_code == 200, answer.text

    asyncio.run(main())


if __name__ == "__main__":
    total = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    backend = Scripted(context=512)
    with served(backend, HttpOptions(max_body_bytes=200_000, request_timeout_s=5)) as address:

        async def storm_of_all() -> tuple[Counter[int], list[str]]:
            async with httpx.AsyncClient(base_url=address, timeout=60) as client:
                return await storm(client, total, seed=int(time.time()))

        found, bad = asyncio.run(storm_of_all())
        alive = httpx.get(address + "/health").status_code
    print(dict(sorted(found.items())), f"health {alive}, left over {len(backend.alive)}, faults {len(bad)}")
    print(*bad[:20], sep="\n")
    sys.exit(bool(bad) or alive != 200 or bool(backend.alive))
