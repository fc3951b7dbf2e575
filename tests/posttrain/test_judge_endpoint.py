"""The judge's endpoint: slow, down or malformed is a failure with a name; nothing is asked twice; ceilings hold."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from glm5.posttrain.reward.endpoint import Ask, Endpoint, EndpointConfig, Failure
from glm5.utils.errors import ConfigError, DataError, UserError
from support.judges import Asked, JudgeServer, Said, closed_port

KEY = "sk-a-secret-key"


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.delenv("GLM5_JUDGE_KEY", raising=False)


def config(url: str, **changes: Any) -> EndpointConfig:
    defaults: dict[str, Any] = dict(url=url, model="judge", timeout_s=60, backoff_s=0.0, patience=0)
    return EndpointConfig(**{**defaults, **changes})


def number(text: str) -> int:
    return int(text)  # raises ValueError for all else


def ask(text: str, vote: int = 0) -> Ask:
    return Ask((("user", text),), number, vote)


def test_replies_come_in_their_order_and_equal_questions_are_asked_once(tmp_path: Path) -> None:
    def script(asked: Asked) -> Said:
        return Said(str(len(asked.body["messages"][0]["content"]) + 100 * asked.body["seed"]))

    with JudgeServer(script) as server:
        endpoint = Endpoint(config(server.url, extra='{"max_tokens": null, "stop": ["x"]}'), tmp_path / "j.jsonl")
        asks = [ask("aaa"), ask("a"), ask("aa", 2), ask("aaa"), ask("a")]
        assert endpoint.ask_all(asks) == [3, 1, 202, 3, 1]
        assert len(server.seen) == 3
        body = server.seen[0].body
        assert body["model"] == "judge"
        assert body["stop"] == ["x"]
        assert "max_tokens" not in body
        assert (endpoint.calls, endpoint.tokens) == (3, 30)

        again = Endpoint(config(server.url, extra='{"max_tokens": null, "stop": ["x"]}'), tmp_path / "j.jsonl")
        assert again.ask_all(asks) == [3, 1, 202, 3, 1]
        assert (again.calls, again.tokens) == (3, 30)
        assert len(server.seen) == 3
        assert again.ask_all([ask("aaaa")]) == [4]
        assert endpoint.ask_all([]) == []


@pytest.mark.parametrize(
    ("said", "detail"),
    [
        (Said("no number"), "cannot be read: invalid literal"),
        (Said(raw=b"<html>"), "no chat completion"),
        (Said(raw=b'{"choices": []}'), "no chat completion"),
        (Said(raw=b'{"choices": [{"message": {"content": null}}]}'), "without content"),
        (Said(raw=b"[1]"), "no chat completion"),
        (Said(raw=b"x" * (5 << 20)), "more than 4,194,304 bytes"),
        (Said(status=500, raw=b"on fire"), "status 500: on fire"),
        (Said(status=429, raw=b"slowly", headers={"Retry-After": "0.01"}), "status 429: slowly"),
        (Said(status=503, headers={"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}), "status 503"),
        (Said(drop=True), "RemoteProtocolError"),
    ],
    ids=["unread", "html", "empty", "null", "list", "flood", "500", "429", "503", "drop"],
)
def test_what_fails_is_tried_again_and_then_has_a_name(said: Said, detail: str) -> None:
    with JudgeServer(lambda asked: said) as server:
        (found,) = Endpoint(config(server.url, retries=2)).ask_all([ask("a")])
        assert isinstance(found, Failure)
        assert found.cause == "error"
        assert detail in found.detail
        assert len(server.seen) == 3
    with JudgeServer(lambda asked: Said("7") if asked.number == 2 else said) as server:
        endpoint = Endpoint(config(server.url, retries=2))
        assert endpoint.ask_all([ask("a")]) == [7]
        assert endpoint.calls == 3


@pytest.mark.parametrize("way", [Said(hang=True), Said("7", drip=True)], ids=["hang", "drip"])
def test_a_judge_that_never_ends_is_a_time_out(way: Said) -> None:
    with JudgeServer(lambda asked: way) as server:
        endpoint = Endpoint(config(server.url, timeout_s=0.3, retries=1, max_new_tokens=50))
        (found,) = endpoint.ask_all([ask("a")])
        assert found == Failure("timeout", "no reply after 0.3 s")
        assert endpoint.calls == 2
        assert endpoint.tokens > 100  # both may have been paid for


def test_nobody_there_costs_nothing() -> None:
    endpoint = Endpoint(config(f"http://127.0.0.1:{closed_port()}/v1", retries=1))
    (found,) = endpoint.ask_all([ask("a")])
    assert isinstance(found, Failure)
    assert "ConnectError" in found.detail
    assert (endpoint.calls, endpoint.tokens) == (0, 0)


def test_a_question_that_is_refused_is_not_tried_again_and_a_wrong_key_ends_the_run() -> None:
    with JudgeServer(lambda asked: Said(status=400, raw=b"context length")) as server:
        (found,) = Endpoint(config(server.url, retries=2)).ask_all([ask("a")])
        assert found == Failure("error", "status 400: context length")
        assert len(server.seen) == 1
    with (
        JudgeServer(lambda asked: Said(status=401, raw=b"bad key")) as server,
        pytest.raises(UserError, match=r"answers 401: bad key\. Check reward.judge: url, model, and the key"),
    ):
        Endpoint(config(server.url)).ask_all([ask(str(i)) for i in range(20)])


def test_the_run_stops_when_patience_ends() -> None:
    with JudgeServer(lambda asked: Said(status=500)) as server:
        endpoint = Endpoint(config(server.url, retries=0, patience=5, concurrency=1))
        assert all(isinstance(f, Failure) for f in endpoint.ask_all([ask(str(i)) for i in range(4)]))
        with pytest.raises(UserError, match=r"the last 5 questions to http://127\.0\.0\.1"):
            endpoint.ask_all([ask("x"), ask("y")])


def test_the_key_comes_from_the_environment_and_is_shown_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ANOTHER_KEY", KEY)
    with caplog.at_level(logging.DEBUG), JudgeServer(echo_key) as server:
        given = config(server.url, key_env="ANOTHER_KEY", retries=0)
        endpoint = Endpoint(given, tmp_path / "j.jsonl")
        good, bad = endpoint.ask_all([ask("good"), ask("bad")])
        assert good == 1
        assert isinstance(bad, Failure)
        assert "Bearer ***" in bad.detail
        with pytest.raises(UserError) as e:
            endpoint.ask_all([ask("useless")])
        assert "Bearer ***" in str(e.value)
    everything = [caplog.text, repr(given), repr(bad), str(e.value), (tmp_path / "j.jsonl").read_text()]
    assert not any(KEY in text for text in everything)
    assert "POST" in caplog.text  # something was logged

    with pytest.raises(ConfigError, match="no such environment variable"):
        Endpoint(config("http://x/v1", key_env="NO_SUCH_KEY"))
    with JudgeServer(lambda asked: Said("1" if "Authorization" not in asked.headers else "x")) as server:
        assert Endpoint(config(server.url)).ask_all([ask("a")]) == [1]  # a local server needs none


def echo_key(asked: Asked) -> Said:
    said = asked.headers["Authorization"].encode()
    assert said.decode() == f"Bearer {KEY}"
    text = asked.body["messages"][0]["content"]
    return {"good": Said("1"), "bad": Said(status=400, raw=said), "useless": Said(status=403, raw=said)}[text]


# --------------------------------------------------------------------------------------------------- costs
def test_the_ceiling_of_calls_holds_over_restarts(tmp_path: Path) -> None:
    with JudgeServer(lambda asked: Said("1")) as server:
        given, journal = config(server.url, max_calls=5, concurrency=2), tmp_path / "j.jsonl"
        assert Endpoint(given, journal).ask_all([ask(str(i)) for i in range(3)]) == [1, 1, 1]
        with pytest.raises(ConfigError, match=r"reward.judge.max_calls=5: 5 calls and 50 tokens are spent; raise it"):
            Endpoint(given, journal).ask_all([ask(str(i)) for i in range(9)])
        assert len(server.seen) == 5
        more = Endpoint(config(server.url, max_calls=9), journal)
        assert more.ask_all([ask(str(i)) for i in range(9)]) == [1] * 9  # what was answered until then is kept
        assert len(server.seen) == 9


@pytest.mark.parametrize("usage", [40, None])
def test_the_ceiling_of_tokens_is_never_passed(usage: int | None) -> None:
    with JudgeServer(lambda asked: Said("1", usage=usage)) as server:
        endpoint = Endpoint(config(server.url, max_tokens=1000, max_new_tokens=100, concurrency=4))
        with pytest.raises(ConfigError, match=r"reward.judge.max_tokens=1000"):
            endpoint.ask_all([ask(str(i)) for i in range(60)])
        assert 500 < endpoint.tokens <= 1000
        assert endpoint.tokens == 40 * len(server.seen) or usage is None


def test_a_journal_that_a_kill_has_torn_goes_on_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    journal = tmp_path / "j.jsonl"
    with JudgeServer(lambda asked: Said("1")) as server:
        Endpoint(config(server.url), journal).ask_all([ask("a"), ask("b")])
        whole = journal.read_bytes()
        journal.write_bytes(whole[:-9])
        endpoint = Endpoint(config(server.url), journal)
        assert endpoint.calls == 1
        assert endpoint.ask_all([ask("a"), ask("b")]) == [1, 1]
        assert len(server.seen) == 3
        assert len(journal.read_bytes().splitlines()) == 2
    journal.write_text('{"reply": 3}\n' + json.dumps({"key": "k", "reply": 1, "tokens": 1, "calls": 1}) + "\n")
    with pytest.raises(DataError, match=r"line 1, is none of ours"):
        Endpoint(config("http://x/v1"), journal)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (dict(url="ftp://x"), "must be http"),
        (dict(url="nowhere"), "url='nowhere': must be http"),
        (dict(url="https://x:port/v1"), "url='https://x:port/v1': must be http"),
        (dict(url="https://[x/v1"), "must be http"),
        (dict(url="https://me:secret@x/v1"), "url='https://x/v1': must be http"),
        (dict(url="https://x/v1?key=secret"), "url='https://x/v1': must be http"),
        (dict(model=""), "must be the model's name"),
        (dict(timeout_s=0), "timeout_s"),
        (dict(retries=-1), "retries"),
        (dict(concurrency=0), "concurrency"),
        (dict(extra="[]"), "must be an object of JSON"),
        (dict(extra="{"), "must be an object of JSON"),
    ],
)
def test_what_cannot_be_is_said_at_once(changes: dict[str, Any], match: str) -> None:
    make: Callable[[], Any] = lambda: EndpointConfig(**{"url": "http://x/v1", "model": "m", **changes})  # noqa: E731
    with pytest.raises(ConfigError, match=match) as e:
        make()
    assert "secret" not in str(e.value)
