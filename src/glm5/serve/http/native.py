"""SGLang's `/generate`: ids in, ids and log-probabilities out, as reinforcement learning asks for them.

Field names and shapes are SGLang's, which slime's rollouts read: `meta_info` with `finish_reason.type`,
`output_token_logprobs` as `[logprob, id, text]`, `weight_version`, and the counts of speculation. A stream repeats the
whole text and all log-probabilities so far in each event. Read next: `control`.
"""

from __future__ import annotations

import base64
import time
from contextlib import aclosing
from itertools import accumulate
from typing import Annotated, Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response
from pydantic import Field

from glm5.serve.client import Stream
from glm5.serve.http.answers import Answer, logprob, untold
from glm5.serve.http.bodies import MAX_BATCH, Body, Id, Name, SamplingFields, Strict, agreed, only
from glm5.serve.http.errors import ApiError, Json
from glm5.serve.http.logprobs import token_text
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
from glm5.serve.request import Delta, Request, SamplingParams
from glm5.text.stream import StreamDecoder


class NativeSampling(SamplingFields, Strict):
    """SGLang's `sampling_params`."""

    WITHOUT_EFFECT = frozenset({"spaces_between_special_tokens", "stream_interval"})

    max_new_tokens: int | None = Field(default=None, ge=0, le=2**31 - 1)  # with 0 a prompt is only scored
    min_new_tokens: int | None = Field(default=None, ge=0, le=2**31 - 1)
    sampling_seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None
    thinking_budget: int | None = Field(default=None, ge=0, le=2**31 - 1)
    custom_params: dict[str, Any] | None = None


class GenerateBody(Body):
    """The body of `/generate`: one prompt, or a batch of them."""

    text: str | Annotated[list[str], Field(max_length=MAX_BATCH)] | None = None
    input_ids: list[Id] | Annotated[list[list[Id]], Field(max_length=MAX_BATCH)] | None = None
    sampling_params: NativeSampling | Annotated[list[NativeSampling], Field(max_length=MAX_BATCH)] | None = None
    rid: Name | list[Name] | None = None
    stream: bool | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: Annotated[int, Field(ge=0, le=64)] | list[Annotated[int, Field(ge=0, le=64)]] | None = None
    return_text_in_logprobs: bool | None = None
    return_prompt_token_ids: bool | None = None
    return_routed_experts: bool | None = None
    return_weight_versions: bool | None = None
    return_hidden_states: bool | list[bool] | None = None
    image_data: Any = None
    priority: int | None = Field(default=None, ge=-(2**31), le=2**31 - 1)


class _Item:
    """One prompt of the batch, and what was asked about its answers."""

    def __init__(self, server: Server, body: GenerateBody, place: int, count: int) -> None:
        def mine(name: str) -> Any:
            given = getattr(body, name)
            if not isinstance(given, list):
                return given
            if len(given) != count:
                raise ApiError(400, f"{name}: {len(given)} entries for {count} prompts. Give one for each", param=name)
            return given[place]

        self.tokenizer = server.backend.tokenizer
        self.vocab_size = server.backend.vocab_size
        sampling = mine("sampling_params") or NativeSampling()
        self.where = f"sampling_params[{place}]." if isinstance(body.sampling_params, list) else "sampling_params."
        self.with_logprob, self.with_text = bool(mine("return_logprob")), bool(body.return_text_in_logprobs)
        start = mine("logprob_start_len")
        self.logprob_start = -1 if start is None else start
        self.with_prompt_ids = bool(body.return_prompt_token_ids)
        self.skip_control = sampling.skip_special_tokens is not False
        self.top = mine("top_logprobs_num") or 0
        self.scores_only = sampling.max_new_tokens == 0
        self.with_routed = bool(body.return_routed_experts)
        self.with_versions = bool(body.return_weight_versions)
        self.kept = bool((sampling.custom_params or {}).get("return_top_p_token_ids"))
        rid = mine("rid")
        if isinstance(body.rid, str) and count > 1:
            rid = f"{rid}_{place}"
        self.request = Request(
            self._ids(body, place), self._params(sampling), rid or new_id(""), priority=body.priority or 0
        )
        self.answers = [Answer(self.request, i, self.tokenizer) for i in range(self.request.params.n)]
        self._decoders = [StreamDecoder(self.tokenizer, self.skip_control) for _ in self.answers]
        self._texts = ["" for _ in self.answers]

    def _ids(self, body: GenerateBody, place: int) -> list[int]:
        if body.input_ids is not None:
            ids: Any = body.input_ids if not _is_batch(body.input_ids) else body.input_ids[place]
            return ids
        text = body.text if isinstance(body.text, str) else (body.text or [])[place]
        return [*self.tokenizer.prefix_ids, *self.tokenizer.encode(text)]

    def _params(self, sampling: NativeSampling) -> SamplingParams:
        given = sampling.sampling()
        seed = agreed("the seed", sampling_seed=sampling.sampling_seed, seed=sampling.seed)
        least = agreed("the least tokens", min_new_tokens=sampling.min_new_tokens, min_tokens=sampling.min_tokens)
        given |= {} if seed is None else {"seed": seed}
        given |= {} if least is None else {"min_new_tokens": least}
        given |= {"no_stop_trim": True} if sampling.no_stop_trim else {}
        wants_prompt = self.with_logprob and self.logprob_start >= 0
        return SamplingParams(
            **given,
            max_new_tokens=1 if self.scores_only else sampling.max_new_tokens,
            logprobs=self.top if self.with_logprob or self.kept else None,
            prompt_logprobs=self.top if wants_prompt else None,
            kept_set=self.kept,
            routed_experts=self.with_routed,
            thinking_budget=sampling.thinking_budget,
            constraint=only(sampling.constraints(self.where)),
        )

    def take(self, delta: Delta) -> None:
        i, delta = delta.index, untold(delta) if self.scores_only else delta
        self._texts[i] += self._decoders[i].push(self.answers[i].take(delta))
        if delta.finish is not None:
            self._texts[i] += self._decoders[i].finish()

    def report(self, i: int) -> dict[str, Any]:
        """What is known of answer `i`, in SGLang's shape."""
        a = self.answers[i]
        meta: dict[str, Any] = {
            "id": self.request.rid,
            "finish_reason": _finish_reason(a),
            "prompt_tokens": len(self.request.input_ids),
            "completion_tokens": len(a.ids),
            "cached_tokens": a.cached_tokens,
            "weight_version": a.weight_version,
            "spec_accept_token_num": a.accepted,
            "spec_draft_token_num": a.drafted,
            "spec_verify_ct": a.verifications,
            "spec_accept_length": a.accept_length,
            "e2e_latency": time.monotonic() - self.request.arrival,
        }
        if self.with_logprob:
            meta["output_token_logprobs"] = [
                [logprob(info.logprob), id, self._text(id)] for id, info in zip(a.ids, a.info, strict=True)
            ]
            if self.top:
                meta["output_top_logprobs"] = [
                    [[logprob(value), id, self._text(id)] for id, value in info.top] for info in a.info
                ]
            if a.prompt_info:
                meta |= self._prompt(a)
        if self.with_versions:
            meta["weight_versions"] = a.versions
        if self.kept:
            meta |= self._kept(a)
        if self.with_routed and a.finish is not None:  # int32 [tokens - 1, layers, experts of a token]
            meta["routed_experts"] = base64.b64encode(a.routed).decode()
        out = {"text": self._texts[i], "output_ids": a.ids, "meta_info": meta}
        if self.with_prompt_ids:
            out["prompt_token_ids"] = list(self.request.input_ids)
        return out

    def _text(self, id: int) -> str | None:
        return token_text(self.tokenizer, id) if self.with_text else None

    def _prompt(self, a: Answer) -> dict[str, Any]:
        """Log-probabilities of the prompt from `logprob_start_len` on; the very first id follows nothing."""
        first = self.logprob_start
        pairs = list(zip(self.request.input_ids, a.prompt_info, strict=True))[first:]
        meta: dict[str, Any] = {
            "input_token_logprobs": [[logprob(p.logprob) if p else None, id, self._text(id)] for id, p in pairs]
        }
        if self.top:
            meta["input_top_logprobs"] = [
                [[logprob(value), id, self._text(id)] for id, value in p.top] if p else None for _, p in pairs
            ]
        return meta

    def _kept(self, a: Answer) -> dict[str, Any]:
        """The ids that could be drawn at each place, end to end, where each place begins, and the logarithm of the
        probability that they had together."""
        ids: list[int] = []
        offsets = [0]
        for info in a.info:
            ids += range(self.vocab_size) if info.kept is None else info.kept
            offsets.append(len(ids))
        together = [logprob(info.kept_logprob) for info in a.info]
        return {"top_p_token_ids": ids, "top_p_token_offsets": offsets, "top_p_logprobs": together}


def routes(server: Server) -> APIRouter:
    """The routes of this page."""
    router = APIRouter()

    @router.put("/generate", responses=STREAMED)
    @router.post("/generate", responses=STREAMED)
    async def generate(body: GenerateBody, http: HttpRequest) -> Response:
        """Continue ids or text."""
        _refuse(body)
        given = body.text if body.input_ids is None else body.input_ids
        batch = isinstance(given, list) and (body.input_ids is None or _is_batch(given))
        count = len(given) if batch and given is not None else 1
        if not count:
            raise ApiError(400, "text or input_ids: an empty batch. Give at least one prompt", param="input_ids")
        items = await prepared(http, lambda: [_Item(server, body, place, count) for place in range(count)])
        streams = await start_all(server.of(http), [item.request for item in items])
        if body.stream:
            return EventStream(_events(items, streams), streams, http.url.path, DONE)
        return await unless_gone(http, _whole(items, streams, single=not batch), streams)

    return router


async def _whole(items: list[_Item], streams: list[Stream], single: bool) -> Response:
    for item, stream in zip(items, streams, strict=True):
        async for delta in stream:
            item.take(delta)
    reports = [item.report(i) for item in items for i in range(len(item.answers))]
    return Json(reports[0] if single and len(reports) == 1 else reports)


async def _events(items: list[_Item], streams: list[Stream]) -> Events:
    by_rid = {item.request.rid: item for item in items}
    ahead = accumulate((len(item.answers) for item in items), initial=0)
    first = dict(zip(by_rid, ahead, strict=False))
    several = len(items) > 1 or len(items[0].answers) > 1
    async with aclosing(merged(streams)) as deltas:
        async for delta in deltas:
            item = by_rid[delta.rid]
            item.take(delta)
            report = item.report(delta.index)
            yield event({**report, "index": first[delta.rid] + delta.index} if several else report)


def _finish_reason(a: Answer) -> dict[str, Any] | None:
    match a.finish:
        case None:
            return None
        case finish if finish.type == "length":
            return {"type": "length", "length": len(a.ids)}
        case finish if finish.type == "abort":
            return {"type": "abort", "message": finish.message or "Aborted"}
        case finish:
            return {"type": finish.type, "matched": finish.matched}


def _is_batch(ids: Any) -> bool:
    return bool(ids) and isinstance(ids[0], list)


def _refuse(body: GenerateBody) -> None:
    """What would be answered wrongly if it were ignored."""
    if (body.text is None) == (body.input_ids is None):
        raise ApiError(400, "give either text or input_ids", param="input_ids")
    if body.image_data:
        raise ApiError(400, "image_data: the model reads text only. Leave it out", param="image_data")
    hidden = body.return_hidden_states
    if any(hidden) if isinstance(hidden, list) else hidden:
        raise ApiError(400, "return_hidden_states: not offered. Leave it out", param="return_hidden_states")
