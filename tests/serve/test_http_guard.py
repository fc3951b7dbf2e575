"""Keys, origins, limits, clients that go away, shutting down, and what is measured."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from glm5.serve.http.app import create_app
from glm5.serve.http.server import HttpOptions
from glm5.text.tokenizer import Tokenizer
from glm5.utils.errors import UserError
from support.scripted import Scripted, chat_tokenizer
from support.serving import HI, events, served
from support.waiting import until

CHAT = "/v1/chat/completions"


def client_of(options: HttpOptions | None = None, **more: Any) -> tuple[TestClient, Scripted]:
    backend = Scripted(**more)
    return TestClient(create_app(backend, options)), backend


# ------------------------------------------------------------------------------------------------------------ keys
def test_key_is_asked_for_everywhere_but_for_health() -> None:
    client, _ = client_of(HttpOptions(api_key="secret-ключ"))
    key = "secret-ключ".encode()
    wrong: list[dict[str, Any]] = [
        {},
        {"Authorization": "Bearer other"},
        {"Authorization": b"Basic " + key},
        {"Authorization": key},
        {"x-api-key": "secret"},
    ]
    for headers in wrong:
        answer = client.post(CHAT, json={"messages": HI}, headers=headers)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
    for headers in ({"Authorization": b"Bearer " + key}, {"Authorization": b"bearer  " + key}, {"x-api-key": key}):
        assert client.post(CHAT, json={"messages": HI}, headers=headers).status_code == 200
    for path in ("/", "/health", "/health_generate", "/metrics"):
        assert client.get(path).status_code == 200
    for path in ("/v1/models", "/server_info", "/openapi.json", "/nothing"):
        assert client.get(path).status_code == 401
    told = client.post("/v1/messages", json={}).json()
    assert (told["type"], told["error"]["type"]) == ("error", "authentication_error")


def test_wrong_settings_are_refused() -> None:
    for wrong in ({"api_key": ""}, {"port": 70000}, {"max_body_bytes": 0}, {"head_timeout_s": 0}, {"drain_s": -1}):
        with pytest.raises(UserError):
            HttpOptions(**wrong)  # type: ignore[arg-type]
    assert HttpOptions().host == "127.0.0.1"


@pytest.mark.parametrize(
    ("host", "origin", "key", "status"),
    [
        ("127.0.0.1:8000", "https://evil.example", None, 403),
        ("127.0.0.1:8000", "http://127.0.0.1:8000", None, 200),
        ("127.0.0.1:8000", "http://127.0.0.1:9000", None, 403),
        ("localhost:8000", "http://localhost:8000", None, 200),
        ("[::1]:8000", "http://[::1]:8000", None, 200),
        ("evil.example:8000", "http://evil.example:8000", None, 403),  # a name that its owner points here
        ("gpu.example:8000", "http://gpu.example:8000", "secret", 200),
        ("127.0.0.1:8000", "https://evil.example", "secret", 403),
        ("127.0.0.1:8000", "null", None, 403),
        ("127.0.0.1:8000", "http://[", None, 403),
    ],
)
def test_pages_of_other_origins_may_change_nothing(host: str, origin: str, key: str | None, status: int) -> None:
    client, backend = client_of(HttpOptions(api_key=key))
    headers = {"Host": host, "Origin": origin, "x-api-key": key or ""}
    assert client.post("/pause_generation", headers=headers).status_code == status
    assert backend.paused == (status == 200)


@pytest.mark.parametrize(
    ("site", "status"), [("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200), (None, 200)]
)
def test_an_image_of_another_page_flushes_no_cache(site: str | None, status: int) -> None:
    """A browser says no origin where it only gets something."""
    client, _ = client_of()
    headers = {} if site is None else {"Sec-Fetch-Site": site}
    assert client.get("/flush_cache", headers=headers).status_code == status
    assert client.get("/health", headers=headers).status_code == 200


def test_pages_of_origins_that_are_allowed() -> None:
    open_, _ = client_of(HttpOptions(origins=("https://friend.example",)))
    answer = open_.post(CHAT, json={"messages": HI}, headers={"Origin": "https://friend.example"})
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://friend.example"


# ---------------------------------------------------------------------------------------------------------- limits
def test_body_too_large_is_413_whether_it_says_so_or_not() -> None:
    client, backend = client_of(HttpOptions(max_body_bytes=1000))
    assert client.post(CHAT, json={"messages": HI}).status_code == 200
    large = b'{"messages": [{"role": "user", "content": "' + b"x" * 2000 + b'"}]}'
    json_ = {"Content-Type": "application/json"}
    assert client.post(CHAT, content=large, headers=json_).status_code == 413
    assert client.post(CHAT, content=iter([large[:500], large[500:]]), headers=json_).status_code == 413
    told = client.post("/v1/messages", content=large, headers=json_).json()
    assert told["error"]["type"] == "request_too_large"
    assert len(backend.seen) == 1


def test_body_that_never_ends_is_408() -> None:
    with served(Scripted(), HttpOptions(body_timeout_s=0.2)) as address:
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            head = "POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json", "Content-Length: 100"
            connection.sendall("\r\n".join([*head, "", "{"]).encode())
            assert b" 408 " in connection.recv(4096)


HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


HALF = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Slow: "


@pytest.mark.parametrize(("first", "half"), [(b"", b""), (b"", HALF), (HEALTH, HALF)], ids=["nothing", "half", "later"])
def test_head_that_never_ends_is_408(first: bytes, half: bytes) -> None:
    with served(Scripted(), HttpOptions(head_timeout_s=1.0)) as address:
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            if first:
                connection.sendall(first)
                assert b" 200 OK" in read_answer(connection)
            connection.sendall(half)
            said = b""
            while part := connection.recv(4096):  # until the server closes
                said += part
            assert said.startswith(b"HTTP/1.1 408 ")
            assert b"Send it faster" in said
        assert httpx.get(f"{address}/health").status_code == 200


def read_answer(connection: socket.socket) -> bytes:
    said = b""
    while b"\r\n\r\n" not in said or not said.endswith(b"}"):
        said += connection.recv(4096)
    return said


def test_head_that_is_there_in_time_may_be_answered_late_and_the_connection_used_again() -> None:
    backend = Scripted(script=lambda request, index: "x" * 8, delay_s=0.15)
    with served(backend, HttpOptions(head_timeout_s=1.0)) as address, httpx.Client(base_url=address) as client:
        for idle_s in (1.2, 0):
            assert client.post(CHAT, json={"messages": HI}, timeout=60).status_code == 200
            time.sleep(idle_s)
        assert len(backend.seen) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_request_that_runs_too_long_is_ended(stream: bool) -> None:
    client, backend = client_of(HttpOptions(request_timeout_s=0.1), gate=asyncio.Event())
    answer = client.post(CHAT, json={"messages": HI, "stream": stream})
    error = events(answer.text)[-1]["error"] if stream else answer.json()["error"]
    assert answer.status_code == (200 if stream else 504)
    assert error["code"] == "time_limit"
    assert not backend.alive


def test_too_many_requests_are_503() -> None:
    client, _ = client_of(HttpOptions(max_requests=2))
    answer = client.post("/generate", json={"input_ids": [[50], [51], [52]]})
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "overloaded"
    assert "retry-after" in answer.headers
    assert client.post("/generate", json={"input_ids": [[50], [51]]}).status_code == 200
    full, _ = client_of(HttpOptions(max_requests=1))
    full.app.state.server.live.add("x")  # type: ignore[attr-defined]
    assert full.post("/generate", json={"input_ids": [50]}).status_code == 503
    assert full.get("/health").status_code == 200  # busy is not ill


async def others_while_a_text_is_encoded() -> None:
    encoding, go_on = threading.Event(), threading.Event()
    backend = Scripted(context=10**6)

    class Slow(Tokenizer):
        def encode(self, text: str | bytes, allow_special: bool = False) -> list[int]:
            if len(text) > 1000:
                encoding.set()
                assert go_on.wait(20)
            return super().encode(text, allow_special)

        def decode(self, ids: Iterable[int], skip_control: bool = False) -> str:
            if isinstance(ids, list) and len(ids) == 30_000:
                encoding.set()
                assert go_on.wait(20)
            return super().decode(ids, skip_control)

    backend.tokenizer = Slow(chat_tokenizer()._full)
    long = "x" * 100_000
    bodies: dict[str, Any] = {
        CHAT: {"messages": [{"role": "user", "content": long}]},
        "/v1/completions": {"prompt": long},
        "/generate": {"text": long},
        "/v1/messages": {"max_tokens": 5, "messages": [{"role": "user", "content": long}]},
        "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": long}]},
        "/v1/responses": {"input": long},
        "/tokenize": {"prompt": long},
        "/detokenize": {"tokens": [50] * 30_000},
    }
    transport = httpx.ASGITransport(create_app(backend))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        for path, body in bodies.items():
            encoding.clear()
            go_on.clear()
            waiting = asyncio.create_task(client.post(path, json=body))
            while not encoding.is_set():
                await asyncio.sleep(0.001)
            assert (await client.get("/health")).status_code == 200
            assert not waiting.done()
            go_on.set()
            assert (await waiting).status_code == 200, path


def test_long_texts_hold_up_nobody_else() -> None:
    asyncio.run(others_while_a_text_is_encoded())


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"", "application/json"),
        (b"{", "application/json"),
        (b"[]", "application/json"),
        (b"null", "application/json"),
        (b'"x"', "application/json"),
        (b"\xff\xfe", "application/json"),
        (b'{"messages": [{"role": "user", "content": "x"}]}', "text/plain"),
        (b'{"messages": [{"role": "user", "content": "x"}]}', ""),
        (b"a=b", "application/x-www-form-urlencoded"),
        (b'{"messages":' + b"[" * 100_000, "application/json"),
        (b'{"messages": [{"role": "user", "content": NaN}], "temperature": Infinity}', "application/json"),
        (b'{"messages": [{"role": "user", "content": "x"}], "seed": 1' + b"0" * 5000 + b"}", "application/json"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "application/json"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/generate", "/update_weights_from_disk"])
def test_bodies_that_are_none_are_400(content: bytes, kind: str, path: str) -> None:
    client, backend = client_of()
    answer = client.post(path, content=content, headers={"Content-Type": kind} if kind else {})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]
    assert not backend.alive


def test_unknown_paths_and_methods_have_the_error_shape() -> None:
    client, _ = client_of()
    assert client.get("/v1/nothing").json()["error"]["type"] == "not_found_error"
    wrong = client.get(CHAT)
    assert wrong.status_code == 405
    assert wrong.json()["error"]["type"] == "invalid_request_error"
    assert client.get("/v1/messages").json()["type"] == "error"


def test_a_fault_of_the_server_is_500_and_no_more_is_told() -> None:
    backend = Scripted(fail_with=RuntimeError("secret path"))
    client = TestClient(create_app(backend), raise_server_exceptions=False)
    answer = client.post(CHAT, json={"messages": HI})
    assert answer.status_code == 500
    assert "secret path" not in answer.text


# ------------------------------------------------------------------------------------------- clients that go away
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/generate", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("stream", [False, True])
def test_client_that_goes_away_frees_its_request(path: str, stream: bool, slow: tuple[str, Scripted]) -> None:
    address, backend = slow
    body = {
        CHAT: {"messages": HI, "n": 2},
        "/v1/completions": {"prompt": ["a", "b"]},
        "/generate": {"input_ids": [[50], [51]]},
        "/v1/messages": {"messages": HI, "max_tokens": 100},
        "/v1/responses": {"input": "hi"},
    }[path]
    client = httpx.Client()
    request = client.build_request("POST", address + path, json={**body, "stream": stream})
    if stream:
        answer = client.send(request, stream=True)
        parts = answer.iter_raw()
        next(parts)
        assert backend.alive
        answer.close()
    else:
        with pytest.raises(httpx.ReadTimeout):
            client.post(address + path, json=body, timeout=0.2)
    client.close()
    until(lambda: not backend.alive)


@pytest.fixture(scope="module")
def slow() -> Any:
    backend = Scripted(script=lambda request, index: "x" * 3000, delay_s=0.01)
    with served(backend) as address:
        yield address, backend


def test_others_are_unharmed_when_one_goes_away(slow: tuple[str, Scripted]) -> None:
    address, backend = slow
    with httpx.Client() as stays, httpx.Client() as leaves:
        with stays.stream("POST", address + CHAT, json={"messages": HI, "stream": True, "max_tokens": 40}) as kept:
            lines = kept.iter_lines()
            next(lines)
            with leaves.stream("POST", address + CHAT, json={"messages": HI, "stream": True}) as gone:
                next(gone.iter_lines())
            rest = [line for line in lines if line.startswith("data: ")]
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in rest[-2]
    until(lambda: not backend.alive)


# ----------------------------------------------------------------------------------------------------- shutting down
PROGRAM = """
import sys
from support.scripted import Scripted, chat_tokenizer
from glm5.serve.http.app import create_app, serve
from glm5.serve.http.server import HttpOptions
backend = Scripted(script=lambda request, index: "x" * 60, delay_s=0.02)
app = create_app(backend, HttpOptions(port=0, drain_s=float(sys.argv[1])))
serve(app, ready=lambda host, port: print(f"http://{host}:{port}", flush=True), log_level="error")
"""


@pytest.mark.parametrize("drain_s", [30.0, 0.3])
def test_sigterm_drains(drain_s: float) -> None:
    """New requests are refused, running ones end: by themselves, or as aborted when the time is over."""
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(drain_s)], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        with (
            httpx.Client(timeout=30) as client,
            client.stream("POST", address + CHAT, json={"messages": HI, "stream": True}) as answer,
        ):
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            if drain_s > 10:  # else it may be over before another client comes
                with httpx.Client() as other:
                    until(lambda: other.get(address + "/health").status_code == 503)
                    refused = other.post(address + CHAT, json={"messages": HI})
                    assert refused.status_code == 503
                    assert refused.json()["error"]["code"] == "draining"
            told = [line for line in lines if line.startswith("data: ")]
        assert told[-1] == "data: [DONE]"
        finish = "length" if drain_s > 10 else "abort"
        # The scripted text has no stop: it ends by itself.
        assert f'"finish_reason":"{"stop" if finish == "length" else "abort"}"' in told[-2]
        assert process.wait(20) in (0, -signal.SIGTERM)
    finally:
        process.kill()
        process.wait()


# ---------------------------------------------------------------------------------------------------------- metrics
def figures(client: TestClient) -> dict[str, float]:
    lines = [line for line in client.get("/metrics").text.split("\n") if line and not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_metrics_count_what_happened() -> None:
    client, backend = client_of(script=lambda request, index: "x" * 10 + "<|user|>", sizes=(3,), cached=2)
    label = '{model_name="glm5-test"}'
    before = figures(client)
    assert before[f"glm5:generation_tokens_total{label}"] == 0
    client.post("/generate", json={"input_ids": [50, 51, 52, 53], "sampling_params": {"n": 2}})
    client.post("/generate", json={"input_ids": [50]}, headers={})
    client.post("/generate", json={"input_ids": [-1]})
    after = figures(client)
    deltas = len(backend.play(backend.seen[0])) + len(backend.play(backend.seen[1]))
    ids = sum(len(d.ids) for request in backend.seen for d in backend.play(request))
    assert after[f"glm5:prompt_tokens_total{label}"] == 5
    assert after[f"glm5:prompt_tokens_cached_total{label}"] == 4
    assert after[f"glm5:generation_tokens_total{label}"] == ids
    assert after[f"glm5:time_to_first_token_seconds_count{label}"] == 3
    assert after[f"glm5:inter_token_latency_seconds_count{label}"] == deltas - 3
    assert after[f"glm5:e2e_request_latency_seconds_count{label}"] == 2
    assert after['glm5:request_success_total{finished_reason="stop",model_name="glm5-test"}'] == 3
    accepted = sum(d.accepted for request in backend.seen for d in backend.play(request))
    per_place = [
        v for name, v in after.items() if name.startswith("glm5:spec_decode_num_accepted_tokens_per_pos_total")
    ]
    assert after[f"glm5:spec_decode_num_accepted_tokens_total{label}"] == sum(per_place) == accepted > 0
    for stem in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_hits_total"):
        assert f"glm5:{stem}{label}" in after
