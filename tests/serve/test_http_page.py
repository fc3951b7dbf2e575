"""The chat page in a headless Chromium: thinking, tool calls, figures, errors, and text that is never HTML."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from glm5.serve.http.server import HttpOptions
from support.scripted import Scripted, chat_tokenizer
from support.serving import call, served, tool

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (Debian: apt-get install chromium)")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield chromium
        chromium.close()


@pytest.fixture
def opened(browser: Any) -> Iterator[tuple[Any, Scripted]]:
    backend = Scripted(sizes=(3, 1))
    with served(backend, HttpOptions(api_key="secret")) as address:
        page = browser.new_page()
        faults: list[str] = []
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda message: faults.append(message.text) if "Content Security" in message.text else None)
        page.set_default_timeout(20_000)
        page.goto(address)
        page.locator("#settings summary").click()
        page.fill("#key", "secret")
        yield page, backend
        page.close()
        assert not faults


def say(page: Any, text: str) -> Any:
    """Send a text; the answer's part of the page, once it is whole."""
    before = page.locator(".assistant").count()
    page.fill("#input", text)
    page.press("#input", "Enter")
    sync_api.expect(page.locator(".assistant")).to_have_count(before + 1)
    sync_api.expect(page.locator("#send")).to_have_text("Send")
    return page.locator(".assistant").last


def test_thinking_answer_and_figures(opened: tuple[Any, Scripted]) -> None:
    page, backend = opened
    backend.script = lambda request, index: "let me see</think><b>the</b> answer<|user|>"
    turn = say(page, "is <i>this</i> text?")
    assert turn.locator(".thinking").text_content() == "let me see"
    assert not turn.locator("details").get_attribute("open")
    assert turn.locator(".text").text_content() == "<b>the</b> answer"
    assert turn.locator("b").count() == 0
    assert page.locator(".user").text_content() == "is <i>this</i> text?"
    figures = turn.locator(".figures").text_content()
    for word in ("tokens/s", "accept length", "first after", "read"):
        assert word in figures
    say(page, "more")
    prompt = chat_tokenizer().decode(backend.seen[-1].input_ids)
    assert "is <i>this</i> text?<|assistant|></think><b>the</b> answer<|user|>more<|assistant|><think>" in prompt
    page.uncheck("#think")
    say(page, "without")
    assert chat_tokenizer().decode(backend.seen[-1].input_ids).endswith("</think>")
    page.click("#reset")
    assert page.locator(".turn").count() == 0


def test_tool_call_and_its_result(opened: tuple[Any, Scripted]) -> None:
    page, backend = opened
    backend.script = lambda request, index: (
        "done</think>12<|user|>"
        if chat_tokenizer().observation_id in request.input_ids
        else "</think>" + call("dim", lvl="3") + call("dim", lvl="4") + "<|observation|>"
    )
    page.fill("#tools", json.dumps([tool("dim", lvl="integer")]))
    turn = say(page, "call it")
    assert turn.locator(".call .name").all_text_contents() == ["dim", "dim"]
    assert turn.locator(".call .arguments").all_text_contents() == ['{"lvl": 3}', '{"lvl": 4}']
    turn.locator("input").nth(0).fill("three")
    turn.locator("input").nth(1).fill("four")
    turn.locator("button").click()
    page.wait_for_selector(".assistant .text")
    prompt = chat_tokenizer().decode(backend.seen[-1].input_ids)
    assert "<tool_response>three</tool_response><tool_response>four</tool_response>" in prompt
    assert page.locator(".assistant .text").last.text_content() == "12"


def test_stopping_frees_the_request_and_errors_are_shown(opened: tuple[Any, Scripted]) -> None:
    page, backend = opened
    backend.script, backend.delay_s = lambda request, index: "x" * 3000, 0.02
    page.fill("#input", "go")
    page.press("#input", "Enter")
    page.wait_for_selector(".thinking")
    page.click("#send")
    sync_api.expect(page.locator("#send")).to_have_text("Send")
    for _ in range(200):
        if not backend.alive:
            break
        page.wait_for_timeout(20)
    assert not backend.alive
    page.fill("#most", "100000")
    assert "exceed the context" in say(page, "again").locator(".error").text_content()
    page.fill("#key", "wrong")
    assert "API key" in say(page, "again").locator(".error").text_content()
