"""OpenAI's `/v1/completions`: text or ids go on, without a chat format. Read next: `chat`.

A prompt given as text opens with `[gMASK]<sop>`, as every text that the model was trained on; one given as ids is taken
as it is. `echo` with `logprobs` gives the prompt's ids their entries, too, and `max_tokens` may then be 0: so a text is
scored, as evaluations do.
"""

from __future__ import annotations

import time
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response
from pydantic import Field

from glm5.serve.client import Stream
from glm5.serve.http import logprobs
from glm5.serve.http.answers import Answer, finish_fields, untold, usage_of
from glm5.serve.http.bodies import (
    MAX_BATCH,
    OPENAI_WITHOUT_EFFECT,
    Id,
    Name,
    ResponseFormat,
    SamplingFields,
    StreamOptions,
    Strict,
    agreed,
    format_constraint,
    only,
)
from glm5.serve.http.errors import ApiError, Json
from glm5.serve.http.server import (
    DONE,
    STREAMED,
    Events,
    EventStream,
    Server,
    event,
    merged,
    new_id,
    prepared,
    start_all,
    unless_gone,
)
from glm5.serve.request import Delta, Request, SamplingParams, TokenInfo
from glm5.text.stream import StreamDecoder


class CompletionBody(SamplingFields, Strict):
    """The body of `/v1/completions`."""

    WITHOUT_EFFECT = OPENAI_WITHOUT_EFFECT - {"skip_special_tokens"}

    model: Name | None = None
    prompt: str | list[str] | list[Id] | list[list[Id]]
    max_tokens: int | None = Field(default=16, ge=0, le=2**31 - 1)  # OpenAI's default; null fills the context
    echo: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: int | None = Field(default=None, ge=0, le=64)
    prompt_logprobs: int | None = Field(default=None, ge=0, le=64)
    suffix: str | None = None
    best_of: int | None = None
    response_format: ResponseFormat | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None


class _Choice:
    """One answer as text."""

    def __init__(self, server: Server, body: CompletionBody, request: Request, index: int, place: int) -> None:
        self.body, self.place = body, place
        self.answer = Answer(request, index, server.backend.tokenizer)
        self._skip = body.skip_special_tokens is not False
        self._decoder = StreamDecoder(server.backend.tokenizer, self._skip)
        self._sent = 0
        self._offset = 0
        self._first = True
        self._tokenizer = server.backend.tokenizer
        self._echo = self._tokenizer.decode(request.input_ids, self._skip) if body.echo else ""

    def take(self, delta: Delta) -> str:
        """The text that a delta adds."""
        text = self._decoder.push(self.answer.take(untold(delta) if self.body.max_tokens == 0 else delta))
        if delta.finish is not None:
            text += self._decoder.finish()
        echo, self._echo = self._echo, ""
        return echo + text

    def report(self, text: str) -> dict[str, Any]:
        """The choice with this text, and what was not told before of its ids."""
        answer, body = self.answer, self.body
        new = slice(self._sent, len(answer.ids))
        out: dict[str, Any] = {"index": self.place, "text": text, "logprobs": None, **finish_fields(answer)}
        if body.logprobs is not None:
            ids, infos = answer.ids[new], list[TokenInfo | None](answer.info[new])
            if body.echo and self._first:
                ids, infos = [*answer.request.input_ids, *ids], [*answer.prompt_info, *infos]
            out["logprobs"] = logprobs.of_completion(
                self._tokenizer, ids, infos, self._offset, self._skip, bool(body.return_tokens_as_token_ids)
            )
        if body.prompt_logprobs is not None and self._first:
            out["prompt_logprobs"] = logprobs.of_prompt(self._tokenizer, answer)
        if body.return_token_ids:
            out["token_ids"] = answer.ids[new]
            if self._first:
                out["prompt_token_ids"] = list(answer.request.input_ids)
        self._sent, self._offset, self._first = len(answer.ids), self._offset + len(text), False
        return out


def routes(server: Server) -> APIRouter:
    """The routes of this page."""
    router = APIRouter()

    @router.post("/v1/completions", responses=STREAMED)
    async def completions(body: CompletionBody, http: HttpRequest) -> Response:
        """Continue a text."""
        requests = await prepared(http, lambda: _requests(server, body))
        n = requests[0].params.n
        choices = {
            (request.rid, i): _Choice(server, body, request, i, place * n + i)
            for place, request in enumerate(requests)
            for i in range(n)
        }
        head = {
            "id": new_id("cmpl-"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": server.check_model(body.model),
        }
        streams = await start_all(server, requests)
        if body.stream:
            return EventStream(_events(body, head, streams, choices), streams, http.url.path, DONE)
        return await unless_gone(http, _whole(head, streams, choices), streams)

    return router


async def _whole(head: dict[str, Any], streams: list[Stream], choices: dict[tuple[str, int], _Choice]) -> Response:
    texts: dict[tuple[str, int], str] = dict.fromkeys(choices, "")
    for stream in streams:
        async for delta in stream:
            key = delta.rid, delta.index
            texts[key] += choices[key].take(delta)
    usage = usage_of(choice.answer for choice in choices.values())
    return Json({**head, "choices": [choices[key].report(text) for key, text in texts.items()], "usage": usage})


async def _events(
    body: CompletionBody, head: dict[str, Any], streams: list[Stream], choices: dict[tuple[str, int], _Choice]
) -> Events:
    options = body.stream_options or StreamOptions()
    answers = [choice.answer for choice in choices.values()]
    async with aclosing(merged(streams)) as deltas:
        async for delta in deltas:
            choice = choices[delta.rid, delta.index]
            text = choice.take(delta)
            if not (text or delta.finish or delta.ids):
                continue
            chunk = {**head, "choices": [choice.report(text)]}
            if options.continuous_usage_stats:
                chunk["usage"] = usage_of(answers)
            yield event(chunk)
    if options.include_usage:
        yield event({**head, "choices": [], "usage": usage_of(answers)})


def _requests(server: Server, body: CompletionBody) -> list[Request]:
    """One request a prompt."""
    if body.suffix:
        raise ApiError(400, "suffix: filling in is not offered. Leave it out", param="suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise ApiError(400, f"best_of={body.best_of} is not offered. Use n, and choose", param="best_of")
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens=0 answers nothing. Give at least 1, or echo", param="max_tokens")
    of_prompt = agreed(
        "the log-probabilities of the prompt",
        prompt_logprobs=body.prompt_logprobs,
        logprobs=body.logprobs if body.echo else None,
    )
    params = SamplingParams(
        **body.sampling(),
        max_new_tokens=1 if body.max_tokens == 0 else body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=of_prompt,
        constraint=only([*body.constraints(), *format_constraint(body.response_format)]),
    )
    prompts: list[Any] = body.prompt if isinstance(body.prompt, list) else [body.prompt]
    if prompts and isinstance(prompts[0], int):
        prompts = [prompts]
    if not 0 < len(prompts) <= MAX_BATCH:
        raise ApiError(400, f"prompt: {len(prompts)} prompts. Give 1 to {MAX_BATCH}", param="prompt")
    tokenizer = server.backend.tokenizer
    return [
        Request(
            [*tokenizer.prefix_ids, *tokenizer.encode(prompt)] if isinstance(prompt, str) else prompt,
            params,
            priority=body.priority or 0,
        )
        for prompt in prompts
    ]
