"""A backend that says what a test tells it to say, in the pieces that the test wants: no model, no thread.

It keeps the contract of `glm5.serve.client.Backend`: stop ids and strings end an answer, `max_new_tokens` cuts it, an
abort finishes it, a pause holds it back, and every request is forgotten when its stream is closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from glm5.serve.client import PauseMode, Stats, Unavailable, WeightGroup, WeightUpdate
from glm5.serve.request import Delta, Finish, Request, TokenInfo
from glm5.serve.stops import StopMatcher
from glm5.text.tokenizer import Tokenizer
from glm5.utils.errors import UserError


@cache
def chat_tokenizer() -> Tokenizer:
    """A small tokenizer whose tokens are of one to a few bytes, so that text falls into many pieces."""
    words = "the answer is ping dim lvl path value def return a/b.txt {} [] 12 true null Größe 数据 naïve"
    return Tokenizer.train([words + "\n" + words.upper()] * 3, 340)


@dataclass
class Scripted:
    """See the module.

    Args:
        script: what a request is answered with, ids or text (in which special tokens count), for each answer's index.
        sizes: how many ids each step adds, in turn.
        gate: if given, no step is made until it is set.
        delay_s: between steps.
    """

    script: Callable[[Request, int], Sequence[int] | str] = lambda request, index: "the answer<|user|>"
    sizes: Iterable[int] = (1,)
    gate: asyncio.Event | None = None
    delay_s: float = 0.0
    cached: int = 0
    context: int = 4096
    model_name: str = "glm5-test"
    weight_version: str = "1"
    failure: str | None = None
    fail_with: Exception | None = None
    tokenizer: Tokenizer = field(default_factory=chat_tokenizer)

    def __post_init__(self) -> None:
        self.vocab_size = self.tokenizer.vocab_size
        self.pause_mode: PauseMode | None = None
        self.seen: list[Request] = []
        self.alive: set[str] = set()
        self.aborted: set[str] = set()
        self.calls: list[Any] = []
        self.steps = 0

    @property
    def paused(self) -> bool:
        return self.pause_mode is not None

    async def generate(self, request: Request) -> _Playing:
        if self.failure:
            raise Unavailable(self.failure)
        if request.params.constraint is not None and request.params.constraint.text == "(":
            raise UserError("regex: '(' cannot be read", "close it")
        self.seen.append(request)
        self.alive.add(request.rid)
        return _Playing(self, request)

    async def abort(self, rid: str | None) -> None:
        self.aborted |= self.alive if rid is None else {rid} & self.alive
        self.calls.append(("abort", rid))

    async def pause(self, mode: PauseMode) -> None:
        self.pause_mode = mode
        if mode == "abort":
            await self.abort(None)

    async def resume(self) -> None:
        self.pause_mode = None

    async def flush(self) -> bool:
        return not self.alive

    async def update_weights(self, update: WeightUpdate) -> None:
        self.calls.append(update)
        if update.path == "missing":
            raise UserError("missing is no checkpoint", "name a directory")
        if update.weight_version is not None:
            self.weight_version = update.weight_version

    async def join_group(self, group: WeightGroup) -> None:
        self.calls.append(group)

    async def leave_group(self, group_name: str) -> None:
        self.calls.append(("leave", group_name))

    async def checksum(self) -> dict[str, str]:
        return {"model.embed_tokens.weight": "00", "model.layers.78.eh_proj.weight": "11"}

    async def release_memory(self, tags: tuple[str, ...]) -> None:
        self.calls.append(("release", tags))

    async def resume_memory(self, tags: tuple[str, ...]) -> None:
        self.calls.append(("resume", tags))

    async def probe(self, timeout_s: float) -> bool:
        return self.gate is None or self.gate.is_set()

    def stats(self) -> Stats:
        return Stats(len(self.alive), 0, 0.25, 1000, self.steps, 2, 80, 60)

    async def info(self) -> dict[str, Any]:
        return {"page_size": 64}

    def play(self, request: Request) -> list[Delta]:
        """All deltas of a request, in order: the answers in turn, one step each."""
        played = [self._answer(request, i) for i in range(request.params.n)]
        longest = max(map(len, played))
        return [deltas[step] for step in range(longest) for deltas in played if step < len(deltas)]

    def _answer(self, request: Request, index: int) -> list[Delta]:
        p, given = request.params, self.script(request, index)
        ids = self.tokenizer.encode(given, allow_special=True) if isinstance(given, str) else list(given)
        stops = {*p.stop_token_ids, *(() if p.ignore_eos else self.tokenizer.stop_ids)}
        matcher = StopMatcher(p.stop)
        room = min(p.max_new_tokens or self.context, self.context - len(request.input_ids))
        kept: list[int] = []
        finish, trim = Finish("length"), 0
        for id in ids[:room]:
            kept.append(id)
            match = matcher.push(self.tokenizer.decode_bytes([id]))
            if id in stops:
                finish = Finish("stop", id)
                break
            if match is not None:
                finish, trim = Finish("stop", match.stop), match.after if p.no_stop_trim else match.trim
                break
        else:
            if len(ids) < room:  # a script that simply ends
                finish = Finish("stop")
        pieces, sizes, at = [], list(self.sizes), 0
        while at < len(kept):
            size = sizes[len(pieces) % len(sizes)]
            pieces.append(kept[at : at + size])
            at += size
        pieces = pieces or [[]]
        return [
            Delta(
                request.rid,
                index,
                tuple(piece),
                info=self._infos(request, piece),
                prompt_info=self._prompt_info(request) if number == 0 else (),
                finish=finish if number == len(pieces) - 1 else None,
                trim=trim if number == len(pieces) - 1 else 0,
                prompt_tokens=len(request.input_ids),
                cached_tokens=self.cached,
                drafted=3 if len(piece) > 1 else 0,
                accepted=len(piece) - 1,
                weight_version=self.weight_version,
            )
            for number, piece in enumerate(pieces)
        ]

    def _infos(self, request: Request, ids: Sequence[int]) -> tuple[TokenInfo, ...]:
        """Log-probability -id/1000, the next ids as the likeliest ones, and two kept ones."""
        p = request.params
        if p.logprobs is None:
            return ()
        return tuple(
            TokenInfo(
                -id / 1000,
                tuple((i % self.vocab_size, -1.0 - i) for i in range(p.logprobs)),
                (id, 0) if p.kept_set else None,
            )
            for id in ids
        )

    def _prompt_info(self, request: Request) -> tuple[TokenInfo | None, ...]:
        if request.params.prompt_logprobs is None:
            return ()
        return (None, *(TokenInfo(-id / 1000) for id in request.input_ids[1:]))


class _Playing:
    """The stream of one request."""

    def __init__(self, backend: Scripted, request: Request) -> None:
        self._backend, self._request = backend, request
        self._deltas = backend.play(request)
        self._left = set(range(request.params.n))

    def __aiter__(self) -> _Playing:
        return self

    async def __anext__(self) -> Delta:
        b, rid = self._backend, self._request.rid
        if not self._left:
            await self.aclose()
            raise StopAsyncIteration
        await asyncio.sleep(b.delay_s)
        while rid not in b.aborted and (b.paused or (b.gate is not None and not b.gate.is_set())):
            await asyncio.sleep(0.005)
        if rid in b.aborted:
            index = self._left.pop()
            return Delta(rid, index, (), finish=Finish("abort"), prompt_tokens=len(self._request.input_ids))
        if b.fail_with is not None:
            raise b.fail_with
        delta = replace(self._deltas.pop(0), version=b.weight_version)
        b.steps += 1
        if delta.finish is not None:
            self._left.discard(delta.index)
        return delta

    async def aclose(self) -> None:
        self._backend.alive.discard(self._request.rid)
