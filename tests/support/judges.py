"""A judge that says what a test tells it to say: an OpenAI-compatible server on the loopback, in this process.

with JudgeServer(lambda asked: ratings_of(asked, lambda text: 7)) as server:
    JudgeConfig(url=server.url, model="judge", ...)
"""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any


@dataclass
class Asked:
    """One request: its body, its headers, and how many there were before it."""

    body: dict[str, Any]
    headers: dict[str, str]
    number: int

    def section(self, name: str) -> str:
        """The text between the tags of this name in what the user said."""
        found = re.search(rf"<{name}-(\w+)>\n(.*)\n</{name}-\1>", self.body["messages"][-1]["content"], re.DOTALL)
        assert found is not None, name
        return found[2]

    @property
    def paired(self) -> bool:
        return "<answer-A-" in self.body["messages"][-1]["content"]

    @property
    def criteria(self) -> list[str]:
        """Names of what is to be rated."""
        form = json.loads(self.body["messages"][0]["content"].split("nothing else: ")[1].split("\n")[0])
        return list(form["A"] if self.paired else form)


@dataclass
class Said:
    """What is answered. drop: close without a word. drip: send the body byte by byte until `release` is set, and never
    finish. hang: say nothing until then."""

    text: str = ""
    status: int = 200
    usage: int | None = 10
    raw: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    drop: bool = False
    drip: bool = False
    hang: bool = False


def ratings_of(asked: Asked, rate: Callable[[str], float], first_bonus: float = 0.0) -> Said:
    """Every criterion of every side rated by its text alone, and a liking for what comes first in a pair."""
    names = asked.criteria

    def side(text: str, bonus: float = 0.0) -> dict[str, float]:
        return {name: min(10.0, max(0.0, rate(text) + bonus)) for name in names}

    if asked.paired:
        a, b = asked.section("answer-A"), asked.section("answer-B")
        return Said(json.dumps({"A": side(a, first_bonus), "B": side(b)}))
    return Said("Let me see. " + json.dumps(side(asked.section("answer"))))


class JudgeServer:
    """See the module. `seen` are all requests, in the order in which they came."""

    def __init__(self, script: Callable[[Asked], Said]) -> None:
        self.script, self.seen, self.release = script, [], threading.Event()  # type: ignore[var-annotated]
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                with suppress(ConnectionError, OSError):
                    outer._answer(self)

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing on the test's output."""

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64  # connections that come at once wait, and none is refused

        self._server = Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        with self._lock:
            asked = Asked(body, dict(handler.headers.items()), len(self.seen))
            self.seen.append(asked)
        assert handler.path == "/v1/chat/completions"
        said = self.script(asked)
        if said.drop:
            handler.connection.shutdown(socket.SHUT_RDWR)
            handler.close_connection = True
            return
        if said.hang:
            self.release.wait(60)
            handler.close_connection = True
            return
        reply: dict[str, Any] = {"choices": [{"message": {"role": "assistant", "content": said.text}}]}
        if said.usage is not None:
            reply["usage"] = {"total_tokens": said.usage}
        data = json.dumps(reply).encode() if said.raw is None else said.raw
        handler.send_response(said.status)
        handler.send_header("Content-Length", str(len(data) + (1 << 20 if said.drip else 0)))
        for name, value in said.headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(data)
        while said.drip and not self.release.wait(0.02):
            handler.wfile.write(b" ")
            handler.wfile.flush()

    def __enter__(self) -> JudgeServer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(30)


def closed_port() -> int:
    """A port on which nobody listens."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
