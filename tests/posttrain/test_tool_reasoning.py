"""A Python tool inside a trajectory: calls run in the sandbox, what comes back is read and not learned, and what fails
outside the policy is no 0."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_rollouts import model

from glm5.agents.sandbox import SandboxError, require
from glm5.agents.session import PythonSession
from glm5.model.glm5 import GLM5
from glm5.posttrain import tools
from glm5.posttrain.prompts import Prompt, prompts_from_rows
from glm5.posttrain.rollouts import RolloutConfig, Rollouts
from glm5.posttrain.rows import pack
from glm5.posttrain.tools import PythonTool
from glm5.posttrain.verify.pool import VerifierPool
from glm5.text import Message, ToolCall, parse, render
from glm5.text.chat import render_for_training
from glm5.text.events import ParsedCall
from glm5.utils.errors import ConfigError
from support.conversations import tokenizer


@pytest.fixture(autouse=True)
def _isolated() -> None:
    try:
        require()
    except SandboxError as e:
        pytest.skip(str(e))


PROMPTS = prompts_from_rows([{"prompt": "6 * 7?", "answer": "42", "verifier": "number", "domain": "sums"}])
SEEN = "42\n[no output]"  # of the two calls


@pytest.fixture(scope="module")
def speaker() -> GLM5:
    """A model that has one conversation by heart: it calls twice in one turn, and says what came back."""
    try:
        tool = PythonTool(5.0, 1)
    except SandboxError as e:
        pytest.skip(str(e))
    tool.close()
    calls = tuple(ToolCall("python", {"code": code}) for code in ("6*7", "x=1"))
    talk = [
        *PROMPTS[0].messages,
        Message("assistant", tool_calls=calls),
        *(Message("tool", text) for text in SEEN.split("\n")),
        Message("assistant", "42"),
    ]
    (rendered,) = render_for_training(tokenizer(), talk, [tool.offered], clear_thinking=False)
    ids, loss = torch.tensor([rendered.ids]), torch.tensor(rendered.loss)
    policy = model(hidden_size=64, index_topk=4096)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    for _ in range(300):
        logits = policy(ids[:, :-1]).logits[0]
        found = torch.nn.functional.cross_entropy(logits[loss[1:]], ids[0, 1:][loss[1:]])
        if float(found.detach()) < 0.01:
            break
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert float(found.detach()) < 0.05
    return policy.eval()


def rollouts(policy: GLM5, pool: VerifierPool | None, **changes: Any) -> Rollouts:
    config: dict[str, Any] = dict(prompts=1, group=4, max_new_tokens=160, thinking=False, memory_gib=0.1)
    config |= dict(tool="python", tool_timeout=120.0)
    return Rollouts(policy, tokenizer(), RolloutConfig(**{**config, **changes}), pool, seed=5)


def one(prompt: Prompt = PROMPTS[0]) -> list[tuple[int, Prompt]]:
    return [(0, prompt)]


@pytest.mark.parametrize("replay", [False, True])
def test_a_problem_is_worked_out_inside_one_trajectory(speaker: GLM5, replay: bool) -> None:
    with VerifierPool(workers=1, timeout_s=60) as pool:
        drawn = rollouts(speaker, pool, temperature=0.7, router_replay=replay)
        assert drawn.success(PROMPTS) == {"sums": 1.0}
        (group,) = drawn.draw(one())
        drawn.judge([group])
        drawn.close()
    t = tokenizer()
    right = [s for s in group.samples if s.reward == 1.0]
    assert right
    sample = right[0]
    assert (sample.calls, sample.text, sample.finish) == (2, "42", "stop")
    # What was given is what the format makes of the results; it has no version, and is not learned from.
    given = [id for id, own in zip(sample.ids, sample.drawn, strict=True) if not own]
    shown = "".join(f"<tool_response>{text}</tool_response>" for text in SEEN.split("\n"))
    assert t.decode(given) == f"{shown}<|assistant|></think>"
    assert [v == "" for v in sample.versions] == [not own for own in sample.drawn]
    assert group.record()["calls"] == sum(s.calls for s in group.samples)
    # The whole is what the format gives of the conversation with the sampled ids, so nothing is encoded anew.
    cut = sample.drawn.index(False)
    first = parse(t, sample.ids[:cut], [drawn.tool.offered] if drawn.tool else (), prompt_ids=group.prompt_ids)
    said = [
        *PROMPTS[0].messages,
        first.message([group.prompt_ids[-1], *sample.ids[:cut]]),
        *(Message("tool", text) for text in SEEN.split("\n")),
    ]
    assert drawn.tool is not None
    whole = render(
        t, said, [drawn.tool.offered], enable_thinking=False, add_generation_prompt=True, clear_thinking=False
    )
    full = [*group.prompt_ids, *sample.ids]
    assert list(whole.ids) == full[: len(whole.ids)]
    # The trainer reads all, learns from what was drawn, and finds the engine's own log-probabilities.
    group.advantages, group.copies = dict.fromkeys(range(4), 1.0), dict.fromkeys(range(4), 1)
    rows = pack(group.trajectories(0, 0.7), 4096, vocab_size=drawn.engine.vocab_size)
    assert int(rows.mask_BT.sum()) == sum(sum(s.drawn) for s in group.samples) < sum(len(s.ids) for s in group.samples)
    found = rows.logprobs(speaker).logprobs_N
    torch.testing.assert_close(found, rows.logprobs_BT[rows.mask_BT], rtol=0, atol=2e-4)


def test_turns_and_length_are_bounded(speaker: GLM5) -> None:
    with VerifierPool(workers=1, timeout_s=60) as pool:
        for changes, finish in (({"tool_turns": 1}, "stop"), ({"max_new_tokens": 55}, "length")):
            drawn = rollouts(speaker, pool, **changes)
            (group,) = drawn.draw(one(), greedy=True)
            drawn.close()
            (sample,) = group.samples
            assert sample.finish == finish
            assert len(sample.ids) <= drawn.config.max_new_tokens
            assert (False in sample.drawn) == (finish == "stop")


def test_a_sandbox_that_fails_leaves_no_verdict(speaker: GLM5, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise SandboxError("no interpreter", "")

    monkeypatch.setattr(PythonSession, "call", broken)
    with VerifierPool(workers=1, timeout_s=60) as pool:
        drawn = rollouts(speaker, pool)
        (group,) = drawn.draw(one(), greedy=True)
        drawn.judge([group])
        drawn.close()
    (sample,) = group.samples
    assert sample.reward is None
    assert sample.verdict is not None
    assert (sample.verdict.cause, sample.verdict.detail) == ("crash", "no interpreter")


# ---------------------------------------------------------------------------------------------------- the tool alone
def call(code: Any, name: str = "python") -> ParsedCall:
    return ParsedCall("", name, json.dumps({"code": code}), True)


@pytest.fixture
def tool() -> Iterator[PythonTool]:
    made = PythonTool(120.0, 2)
    yield made
    made.close()


def results(tool: PythonTool) -> dict[Any, list[str]]:
    found = {}
    while tool.busy:
        found |= {answer: got.texts for answer, got in tool.done(patient=True)}
    return found


def test_variables_last_and_are_an_answers_own(tool: PythonTool) -> None:
    for answer in "ab":
        tool.ask(answer, [call(f"x = {ord(answer)}"), call("x")])
    assert results(tool) == {"a": ["[no output]", "97"], "b": ["[no output]", "98"]}
    tool.ask("a", [call("x + 1")])
    assert results(tool) == {"a": ["98"]}
    tool.end("a")
    tool.ask("a", [call("x")])  # another answer of this name knows nothing of it
    assert "NameError" in results(tool)["a"][0]


def test_what_a_model_does_wrong_is_told_to_it(tool: PythonTool) -> None:
    tool.ask("a", [call("1", name="search"), call(3), call("1 / 0"), call("2")])
    missing, kind, fault, right = results(tool)["a"]
    assert missing == "Error: there is no tool 'search', but python"
    assert "code must be of the kind string" in kind
    assert "ZeroDivisionError" in fault
    assert right == "2"


def test_a_call_that_hangs_is_ended_and_others_wait_for_an_interpreter(tool: PythonTool) -> None:
    tool.ask(0, [call("0")])
    results(tool)  # its interpreter has begun, so its limit is of the call alone
    tool._open[0].limits = replace(tool.limits, wall_s=2.0)
    for answer in range(5):
        tool.ask(answer, [call("while True: pass" if answer == 0 else f"{answer}")])
    found: dict[Any, list[str]] = {}
    while tool.busy:
        for answer, got in tool.done(patient=True):
            found[answer] = got.texts
            tool.end(answer)
    assert found[0] == ["[ended: wall_time; variables are lost]"]
    assert {a: found[a] for a in range(1, 5)} == {a: [str(a)] for a in range(1, 5)}


def test_nothing_is_left_running(tool: PythonTool) -> None:
    tool.ask("a", [call("import os\nos.getpid()")])
    results(tool)
    session = tool._open["a"]
    process = session._process
    assert process is not None
    tool.close()
    assert process.poll() is not None


def test_settings_of_the_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    for changes in ({"tool_turns": 0}, {"tool_timeout": 0.0}, {"tool_sessions": 0}):
        with pytest.raises(ConfigError, match="must be"):
            RolloutConfig(**changes)

    def refused() -> None:
        raise SandboxError("this host cannot isolate programs", "")

    monkeypatch.setattr(tools, "require", refused)
    with pytest.raises(SandboxError, match="cannot isolate"):
        rollouts(model(), None)
