"""Answers of an engine in this process, over several turns where the model calls its tool.

A turn that ends with calls is answered by `tools`; the results follow it as the chat format has them, and the engine
goes on from there. So an answer is one run of ids that only grew, of which the policy drew some and was given others:
`Sample.drawn` tells them apart, and nothing that was given is learned from. Read next: `rollouts`, `tools`.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from glm5.posttrain.tools import PythonTool, Results
from glm5.serve.engine import Engine
from glm5.serve.request import Delta, Request, SamplingParams, TokenInfo
from glm5.text.chat import render
from glm5.text.messages import Message, Tool
from glm5.text.parser import parse
from glm5.text.tokenizer import Tokenizer
from glm5.utils.errors import UserError

if TYPE_CHECKING:
    from glm5.posttrain.rollouts import Group, RolloutConfig, Sample

GIVEN = TokenInfo(0.0)  # of an id that nobody drew


@dataclass
class Turn:
    """What the engine says at one go. start: where it begins in `sample.ids`. messages: the conversation before it."""

    group: Group
    sample: Sample
    name: str
    prompt_ids: list[int]
    messages: list[Message]
    number: int = 0
    start: int = 0
    routed: bytearray = field(default_factory=bytearray)

    def take(self, delta: Delta) -> None:
        sample = self.sample
        sample.ids += delta.ids
        sample.info += delta.info
        sample.drawn += [True] * len(delta.ids)
        sample.versions += [delta.version or delta.weight_version] * len(delta.ids)
        sample.checks += delta.drafted > 0
        sample.accepted += delta.accepted
        self.routed += delta.routed


class Drawing:
    """Draws the answers of groups, once.

    Args:
        seed: of the run. greedy: the likeliest answers. tool: what the model may call; None is nothing.
        beat: called after each of the engine's steps.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        config: RolloutConfig,
        *,
        seed: int,
        greedy: bool,
        tool: PythonTool | None,
        beat: Callable[[], None],
    ) -> None:
        self.engine, self.tokenizer, self.config, self.tool = engine, tokenizer, config, tool
        self.seed, self.greedy, self.beat = seed, greedy, beat
        self.replays = config.router_replay and not greedy
        self._turns: defaultdict[str, list[Turn]] = defaultdict(list)

    def __call__(self, groups: Sequence[Group]) -> None:
        """Fill the samples of these groups.

        Raises:
            UserError: the engine failed on an answer.
        """
        for group in groups:
            rid = str(group.number)
            for index, sample in enumerate(group.samples):
                turn = Turn(group, sample, f"{rid}/{index}", group.prompt_ids, list(group.prompt.messages))
                self._turns[rid].append(turn)
            self._ask(rid, group.prompt_ids, self.config.max_new_tokens, len(group.samples))
        while self.engine.has_work or (self.tool is not None and self.tool.busy):
            self.beat()
            if self.engine.has_work:
                for delta in self.engine.step():
                    turn = self._turns[delta.rid][delta.index]
                    turn.take(delta)
                    if delta.finish is not None and delta.finish.type == "error":
                        what = f"the engine failed on prompt {turn.group.prompt.id!r}: {delta.finish.message}"
                        raise UserError(what, "Look at the checkpoint, and at the prompt")
                    if delta.finish is not None:
                        self._ended(turn, delta.finish.type)
            if self.tool is not None and self.tool.busy:
                for name, results in self.tool.done(patient=not self.engine.has_work):
                    self._go_on(self._turns[str(name)][0], results)

    def _ask(self, rid: str, ids: Sequence[int], room: int, count: int = 1) -> None:
        config = self.config
        params = SamplingParams(
            max_new_tokens=room,
            temperature=0.0 if self.greedy else config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            seed=seed_of(self.seed, rid),
            stop_token_ids=(self.tokenizer.user_id, self.tokenizer.observation_id),
            n=count,
            logprobs=0,
            kept_set=True,
            routed_experts=self.replays,
        )
        self.engine.add(Request(ids, params, rid=rid))

    def offered(self, group: Group) -> Sequence[Tool]:
        return offered(group.prompt.tools, self.tool)

    def _ended(self, turn: Turn, finish: str) -> None:
        """A turn's end: its calls are run, or the answer is whole."""
        sample, said = turn.sample, turn.sample.ids[turn.start :]
        parsed = parse(self.tokenizer, said, self.offered(turn.group), prompt_ids=turn.prompt_ids)
        sample.finish, sample.text = finish, parsed.content
        if self.replays:
            sample.experts = self._experts(turn.routed)
        calls = [call for call in parsed.calls if call.complete]
        waits = finish == "stop" and said[-1] == self.tokenizer.observation_id
        if self.tool is None:
            return
        if not (calls and waits and turn.number < self.config.tool_turns):
            self.tool.end(turn.name)
            return
        sample.calls += len(calls)
        turn.messages = [*turn.messages, parsed.message([turn.prompt_ids[-1], *said])]
        self._turns[turn.name] = [turn]
        self.tool.ask(turn.name, calls)

    def _go_on(self, turn: Turn, results: Results) -> None:
        """The turn after a call, unless there is no room for it."""
        assert self.tool is not None
        sample, group, before = turn.sample, turn.group, len(turn.prompt_ids) + len(turn.sample.ids) - turn.start
        messages = [*turn.messages, *(Message("tool", text) for text in results.texts)]
        ids = prompt_of(self.tokenizer, messages, self.offered(group), thinking=self.config.thinking)
        room = self.config.max_new_tokens - len(sample.ids) - (len(ids) - before)
        if results.failure or room < 1:
            sample.failure, sample.finish = results.failure, sample.finish if results.failure else "length"
            self.tool.end(turn.name)
            return
        given = ids[before:]
        sample.ids += given
        sample.info += [GIVEN] * len(given)
        sample.drawn += [False] * len(given)
        sample.versions += [""] * len(given)
        number = turn.number + 1
        following = Turn(group, sample, turn.name, ids, messages, number, len(sample.ids))
        rid = f"{turn.name}/{number}"
        self._turns[rid] = [following]
        self._ask(rid, ids, room)

    def _experts(self, told: bytearray) -> Tensor:
        """What the engine told of prompt and answer, of the layers that have experts."""
        shape = self.engine.model.config
        layers, chosen = shape.num_hidden_layers, shape.num_experts_per_tok
        told_TLM = torch.frombuffer(told, dtype=torch.int32).view(-1, layers, chosen)
        return told_TLM[:, [i for i in range(layers) if shape.is_moe(i)]].to(torch.int16)


def offered(given: Sequence[Tool], tool: PythonTool | None) -> Sequence[Tool]:
    """The tools that a prompt shows: its own, and ours unless it has one of that name."""
    if tool is None or any(one.name == tool.offered.name for one in given):
        return given
    return (*given, tool.offered)


def prompt_of(tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Tool], *, thinking: bool) -> list[int]:
    """What an engine goes on from. Thinking is preserved, so that ids only ever grow."""
    rendered = render(
        tokenizer, messages, tools, enable_thinking=thinking, clear_thinking=False, add_generation_prompt=True
    )
    return list(rendered.ids)


def seed_of(run: int, name: str) -> int:
    """Of the draws that `name` counts in a run: neighbours have nothing in common."""
    return int.from_bytes(hashlib.sha256(f"{run}/{name}".encode()).digest()[:7], "little")
