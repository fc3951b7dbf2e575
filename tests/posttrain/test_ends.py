"""A run's end waits for nobody for ever: neither for open connections nor for an engine that hangs. Who waits for the
event loop meanwhile says that they live."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from contextlib import closing
from urllib.parse import urlsplit

import pytest

from glm5.posttrain import engines as module
from glm5.posttrain.engines import Engines
from support.scripted import Scripted

LINES = "POST /sessions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"


def ends(engines: Engines) -> None:
    """As the end of the `with` block, in time."""
    ending = threading.Thread(target=engines.__exit__, args=(None, None, None), daemon=True)
    ending.start()
    ending.join(120)
    assert not ending.is_alive(), "it waits"


def test_an_open_connection_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE_S", 1)
    engines = Engines({"one": Scripted()})
    engines.__enter__()
    address = urlsplit(engines.url)
    with closing(socket.create_connection((address.hostname, address.port))) as half:
        half.sendall(LINES.encode())  # and the rest of it never
        with closing(socket.create_connection((address.hostname, address.port))) as idle:
            idle.sendall(b"GET /health HTTP/1.1\r\nHost: t\r\n\r\n")
            assert b"200 OK" in idle.recv(1000)
            ends(engines)
    assert not engines._thread.is_alive()


def test_an_engine_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(module, "STOP_S", 0.1)

    class Hung(Scripted):
        async def abort(self, rid: str | None) -> None:
            await asyncio.Event().wait()

    engines = Engines({"far": Hung()})
    engines.__enter__()
    with caplog.at_level(logging.WARNING):
        ends(engines)
    assert "what runs at far did not end in 0.1 s, and is left" in caplog.text


@pytest.mark.parametrize("bound", ["LAST_S", "STILL_S"])
def test_who_holds_the_event_loop_up_is_named(
    bound: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, bound, 0.1)
    monkeypatch.setattr(module, "STOP_S", 0.1)
    engines, free = Engines({"one": Scripted()}), threading.Event()
    engines.__enter__()
    engines._loop.call_soon_threadsafe(free.wait, 120)
    with caplog.at_level(logging.WARNING):
        ends(engines)
    free.set()
    engines._thread.join(120)
    assert "the engines did not end: something holds the event loop up" in caplog.text
    assert "the event loop of the engines does not end, and is left" in caplog.text


def test_whoever_waits_for_the_event_loop_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BEAT_S", 0.01)
    beaten = threading.Event()

    async def long() -> bool:
        return await asyncio.to_thread(beaten.wait, 60)

    with Engines({"one": Scripted()}) as engines:
        engines.beat = beaten.set
        assert engines.call(long())


def test_whoever_waits_is_told_who_holds_the_event_loop_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A measurement is waited for, however long it takes, and a rollout may block."""
    monkeypatch.setattr(module, "BEAT_S", 0.01)
    monkeypatch.setattr(module, "STILL_S", 0.1)
    told = threading.Event()

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "nothing has gone on for 0.1 s in" in record.getMessage():
                told.set()

    async def blocks() -> bool:
        return told.wait(60)

    handler = Heard()
    module.log.addHandler(handler)
    try:
        with Engines({"one": Scripted()}) as engines:
            assert engines.call(blocks())
            monkeypatch.setattr(module, "STILL_S", 60.0)  # or a slow machine's end is given up
    finally:
        module.log.removeHandler(handler)
    assert "make it a plain `def`" in caplog.text
