"""Environments of the package verifiers as a service: with a real one where the package is, and what errors become."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from glm5.agents.protocol import Result
from glm5.agents.service import Hosted
from glm5.agents.services.environments import VerifiersService, result_of
from glm5.utils.errors import ConfigError, UserError
from glm5.utils.outcome import Outcome
from support.listening import listening
from support.scripted_chat import rollout

INSTALLED = importlib.util.find_spec("verifiers") is not None
needs_verifiers = pytest.mark.skipif(
    not INSTALLED, reason="verifiers is not installed (it wants openai<3): make test-environments"
)


# --------------------------------------------------------------------------- what becomes of an episode
def episode(*traces: Any, ok: bool = True, **others: Any) -> Any:
    return SimpleNamespace(**{"traces": traces, "ok": ok, "errors": [], "is_timeout": False, **others})


def trace(trainable: bool = True, **others: Any) -> Any:
    given = {"rewards": {"a": 0.25}, "reward": 0.25, "metrics": {"m": 2.0, "n": None}, "errors": [], "num_turns": 3}
    given |= {"is_timeout": False, "stop_condition": "done", "agent": SimpleNamespace(trainable=trainable)}
    return SimpleNamespace(**{**given, **others})


def error(kind: str, message: str = "why") -> Any:
    return SimpleNamespace(type=kind, message=message)


def test_a_reward_and_its_metrics() -> None:
    metrics = {"turns": 3, "m": 2.0}
    assert result_of(episode(trace())) == Result(Outcome.TASK_FAILED, 0.25, "done", metrics)
    assert result_of(episode(trace(), trace(trainable=False)), solved_at=0.2).outcome is Outcome.OK
    tried_again = episode(trace(errors=[error("SandboxError")]))  # and ok in the end
    assert result_of(tried_again).reward == 0.25


@pytest.mark.parametrize(
    ("given", "outcome"),
    [
        (episode(trace(rewards={})), Outcome.VERIFIER_NO_VERDICT),
        (episode(trace(rewards={"a": 1.0, "b": None})), Outcome.VERIFIER_NO_VERDICT),
        (episode(trace(errors=[error("TaskError")]), ok=False), Outcome.VERIFIER_NO_VERDICT),
        (episode(trace(errors=[error("ProviderError")]), ok=False), Outcome.ENGINE_LOST),
        (episode(trace(errors=[error("SandboxError")]), ok=False), Outcome.ENV_CRASH),
        (episode(trace(errors=[error("HarnessError")]), ok=False), Outcome.ENV_CRASH),
        (episode(ok=False, errors=[error("EnvError")]), Outcome.ENV_CRASH),
        (episode(trace(is_timeout=True), ok=False), Outcome.TIMEOUT),
        (episode(is_timeout=True, ok=False), Outcome.TIMEOUT),
        (episode(), Outcome.ENV_CRASH),
        (episode(trace(), trace()), Outcome.ENV_CRASH),
    ],
)
def test_no_failure_becomes_a_reward(given: Any, outcome: Outcome) -> None:
    found = result_of(given)
    assert (found.outcome, found.reward) == (outcome, None)


def test_a_full_context_is_a_failed_task() -> None:
    full = episode(trace(errors=[error("ProviderError", "upstream 400: context_length_exceeded")]), ok=False)
    assert (result_of(full).outcome, result_of(full).reward) == (Outcome.TASK_FAILED, 0.0)


@pytest.mark.skipif(INSTALLED, reason="verifiers is installed")
def test_without_the_package() -> None:
    with pytest.raises(UserError, match="pip install 'verifiers"):
        asyncio.run(VerifiersService("shout", {"taskset": {"id": "shout_env"}}).start())


# --------------------------------------------------------------------------- a real environment
CONFIG = {"taskset": {"id": "shout_env"}, "agent": {"runtime": {"type": "subprocess"}}}


class Model:
    """A model behind HTTP that says one thing. `requests`: what it was asked, with which key, at which path."""

    def __init__(self) -> None:
        self.says, self.status, self.requests = "", 200, list[tuple[str, str, Any]]()

    async def answer(self, request: Request) -> Response:
        key = request.headers.get("authorization", "")
        self.requests.append((request.url.path, key, (await request.json())["messages"]))
        if self.status != 200:
            return JSONResponse({"error": {"message": self.says, "code": self.says}}, self.status)
        message = {"role": "assistant", "content": self.says}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        head = {"id": "1", "object": "chat.completion", "created": 1, "model": "policy"}
        return JSONResponse({**head, "choices": [choice], "usage": usage})


@pytest.fixture
def model() -> Iterator[tuple[Model, str]]:
    made = Model()
    with listening(Starlette(routes=[Route("/{path:path}", made.answer, methods=["POST"])])) as url:
        yield made, url


def ask(url: str, *indexes: int, key: str | None = None) -> list[Result]:
    async def main() -> list[Result]:
        hosted = Hosted(VerifiersService("shout", CONFIG))
        await hosted.start()
        try:
            asked = [rollout(url, index=i, api_key=key) for i in indexes]
            return list(await asyncio.gather(*map(hosted.ask, asked)))
        finally:
            await hosted.stop()

    return asyncio.run(main())


@needs_verifiers
def test_an_episode_goes_through_its_session(model: tuple[Model, str], monkeypatch: pytest.MonkeyPatch) -> None:
    made, url = model
    made.says = "FJORD"
    monkeypatch.setenv("GLM5_GATEWAY_KEY", "secret")
    (found,) = ask(url, 0, key="secret")
    assert found == Result(Outcome.OK, 1.0, "agent_completed", {"turns": 2, "letters": 5.0})
    assert [(path, key) for path, key, _ in made.requests] == [
        ("/sessions/s0/v1/chat/completions", "Bearer secret")
    ] * 2
    assert [m["content"] for m in made.requests[1][2]] == ["Shout fjord", "FJORD", "Louder!"]
    other, again, wrong_key = ask(url, 1, 2)[:2] + ask(url, 0, key="other")
    assert (other.outcome, again.outcome) == (Outcome.TASK_FAILED, Outcome.OK)  # task 1 is another, 2 is 0 again
    assert wrong_key.outcome is Outcome.ENV_CRASH
    assert "GLM5_GATEWAY_KEY" in wrong_key.detail


@needs_verifiers
@pytest.mark.parametrize(
    ("says", "status", "outcome"),
    [
        ("BREAK THE JUDGE", 200, Outcome.VERIFIER_NO_VERDICT),
        ("gone", 500, Outcome.ENGINE_LOST),
        ("context_length_exceeded", 400, Outcome.TASK_FAILED),
    ],
)
def test_whose_fault_it_is(model: tuple[Model, str], says: str, status: int, outcome: Outcome) -> None:
    made, url = model
    made.says, made.status = says, status
    (found,) = ask(url, 0)
    assert found.outcome is outcome, found
    assert found.reward == (0.0 if outcome is Outcome.TASK_FAILED else None)


@needs_verifiers
def test_environments_that_cannot_be_had() -> None:
    with pytest.raises(UserError, match="no_such_environment"):
        asyncio.run(VerifiersService("x", {"taskset": {"id": "no_such_environment"}}).start())
    with pytest.raises(UserError, match="holds no task"):
        asyncio.run(VerifiersService("x", CONFIG, limit=0).start())
    service = VerifiersService("x", CONFIG)
    with pytest.MonkeyPatch.context() as patch:
        from shout_env import ShoutTaskset

        patch.setattr(ShoutTaskset, "INFINITE", True)
        with pytest.raises(ConfigError, match="limit"):
            asyncio.run(service.start())
