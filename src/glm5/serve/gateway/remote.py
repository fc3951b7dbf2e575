"""An engine behind HTTP as a backend: SGLang's native interface, which `glm5 serve` speaks too.

An answer comes whole, when it has ended: an engine that is lost on the way has told nothing, so that the pool can ask
elsewhere. Draws that are cut (top_p, top_k, min_p) need the kept set and its probability, and answers that go on across
an update need a version an id; `glm5 serve` tells both. Of an engine that does not, cut draws are refused, and all ids
of an answer have the version that it tells. Read next: `pool`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import groupby, pairwise
from typing import Any

import httpx

from glm5.serve.client import PauseMode, Stats, Unavailable, WeightGroup, WeightUpdate
from glm5.serve.request import Delta, Finish, Request, SamplingParams, TokenInfo
from glm5.text.tokenizer import Tokenizer
from glm5.utils.ending import ended
from glm5.utils.errors import UserError
from glm5.utils.http import client

SHAPED = {"regex": "regex", "ebnf": "ebnf", "json_schema": "json_schema"}  # forms that the interface has
DEFAULTS = SamplingParams()
AT_ONCE = 256  # requests that have a connection kept for them
CONTROL_S = 360.0  # above `glm5.serve.weights.JOIN_TIMEOUT`: an engine that hangs holds a push no longer


class HttpEngine:
    """A `Backend`. `start` before, `stop` after.

    Args:
        url: of the engine. tokenizer, model_name, context: of its model.
        timeout_s: in which an answer must be there.
    """

    def __init__(
        self, url: str, tokenizer: Tokenizer, model_name: str, context: int, *, api_key: str | None = None,
        timeout_s: float = 3600.0,
    ) -> None:  # fmt: skip
        self.url, self.tokenizer, self.model_name, self.context = url, tokenizer, model_name, context
        self.vocab_size = tokenizer.vocab_size
        self.weight_version, self.paused = "", False
        self.failure: str | None = None
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._client = partial(client, AT_ONCE, headers=headers, timeout=timeout_s)
        self._http = self._client(base_url=url)
        self._asked: set[asyncio.Future[httpx.Response]] = set()

    async def start(self) -> None:
        """Nothing has to be waited for: `probe` says when it is there."""

    async def stop(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def leave(self, failure: str) -> None:
        """It is known to be lost: what it was asked has failed, and it is asked nothing until it has moved."""
        self.failure, self.weight_version = failure, ""
        for asked in self._asked:  # a machine that is gone does not close its connections
            asked.cancel()
        await self._http.aclose()

    async def move(self, url: str) -> None:
        """It has begun anew, at this address."""
        if self.failure is None:
            await self.leave("it moves")
        self.url, self._http = url, self._client(base_url=url)
        self.failure, self.paused = None, False

    async def _call(self, path: str, body: dict[str, Any] | None = None, method: str = "POST", **about: Any) -> Any:
        """What the engine answers.

        Raises:
            Unavailable: it does not, or says that it cannot. UserError: it refuses what was asked.
        """
        if self.failure is not None:
            raise Unavailable(f"engine {self.url}: {self.failure}")
        asked = asyncio.ensure_future(self._http.request(method, path, json=body, **about))
        self._asked.add(asked)
        try:
            answer = await asked
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            raise Unavailable(f"engine {self.url}: {self.failure}") from None
        except httpx.HTTPError as error:
            raise Unavailable(f"engine {self.url}: {error or type(error).__name__}") from error
        finally:
            self._asked.discard(asked)
        if answer.status_code >= 500:
            raise Unavailable(f"engine {self.url}: status {answer.status_code}: {answer.text[:200]}")
        if answer.status_code >= 400:
            raise UserError(f"engine {self.url} refuses: {answer.text[:500]}", "Ask for what it offers")
        try:
            return answer.json()
        except ValueError:
            return answer.text

    # -------------------------------------------------------------------------------------------------- requests
    async def generate(self, request: Request) -> _Whole:
        """As `Backend` has it. Raises UserError for what the interface has no words for."""
        return _Whole(self, request, body_of(request))

    async def answer(self, request: Request, body: dict[str, Any]) -> list[Delta]:
        """The deltas of a request, when it has ended."""
        return deltas_of(request, await self._call("/generate", body), self)

    async def abort(self, rid: str | None) -> None:
        await self._call("/abort_request", {"abort_all": True} if rid is None else {"rid": rid})

    # -------------------------------------------------------------------------------------------------- control
    async def pause(self, mode: PauseMode) -> None:
        await self._call("/pause_generation", {"mode": mode}, timeout=CONTROL_S)
        self.paused = True

    async def resume(self) -> None:
        await self._call("/continue_generation", {}, timeout=CONTROL_S)
        self.paused = False

    async def flush(self) -> bool:
        try:
            await self._call("/flush_cache", {})
        except UserError:
            return False
        return True

    async def update_weights(self, update: WeightUpdate) -> None:
        """From disk, or over a group that the engine has joined. Raises Unavailable if nothing came over that, or the
        engine refuses what came: others may have taken it."""
        body: dict[str, Any] = {"flush_cache": update.flush_cache, "weight_version": update.weight_version}
        if update.source == "disk":
            await self._call("/update_weights_from_disk", {**body, "model_path": update.path})
        elif update.source == "distributed":
            sent = {name: getattr(update, name) for name in ("names", "dtypes", "shapes", "group_name")}
            try:
                await self._call("/update_weights_from_distributed", {**body, **sent}, timeout=CONTROL_S)
            except UserError as error:
                raise Unavailable(str(error)) from None
        else:
            raise UserError("weights in a request through the gateway", "Send them to the engine itself")
        await self._hear_version()

    async def join_group(self, group: WeightGroup) -> None:
        await self._call("/init_weights_update_group", asdict(group), timeout=CONTROL_S)

    async def leave_group(self, group_name: str) -> None:
        await self._call("/destroy_weights_update_group", {"group_name": group_name}, timeout=CONTROL_S)

    async def checksum(self) -> dict[str, str]:
        found: dict[str, str] = (await self._call("/weights_checker", {"action": "checksum"}))["checksums"]
        return found

    async def release_memory(self, tags: tuple[str, ...]) -> None:
        await self._call("/release_memory_occupation", {"tags": list(tags)})

    async def resume_memory(self, tags: tuple[str, ...]) -> None:
        await self._call("/resume_memory_occupation", {"tags": list(tags)})

    async def probe(self, timeout_s: float) -> bool:
        """Whether it lives; also hears the version of its weights."""
        try:
            await self._call("/health_generate", method="GET", timeout=timeout_s)
            await self._hear_version(timeout=timeout_s)
        except (Unavailable, UserError):
            return False
        return True

    async def _hear_version(self, **about: Any) -> None:
        told = await self._call("/get_weight_version", method="GET", **about)
        if not isinstance(told, dict) or "weight_version" not in told:
            raise Unavailable(f"engine {self.url} does not tell the version of its weights: {str(told)[:200]}")
        self.weight_version = str(told["weight_version"])

    def stats(self) -> Stats:
        """Nothing: ask the engine itself."""
        return Stats()

    async def info(self) -> dict[str, Any]:
        found: dict[str, Any] = await self._call("/server_info", method="GET")
        return found


class _Whole:
    """The stream of a request, all at once."""

    def __init__(self, engine: HttpEngine, request: Request, body: dict[str, Any]) -> None:
        self._engine = engine
        self._work: asyncio.Task[list[Delta]] | None = asyncio.ensure_future(engine.answer(request, body))
        self._place = 0

    def __aiter__(self) -> _Whole:
        return self

    async def __anext__(self) -> Delta:
        if self._work is None:
            raise StopAsyncIteration
        deltas = await asyncio.shield(self._work)
        if self._place == len(deltas):
            raise StopAsyncIteration
        self._place += 1
        return deltas[self._place - 1]

    async def aclose(self) -> None:
        """Close the connection, by which the engine ends the request."""
        work, self._work = self._work, None
        if work is not None:
            await ended([work], f"an answer of engine {self._engine.url}")


# ------------------------------------------------------------------------------------------------------ their words
def body_of(request: Request) -> dict[str, Any]:
    """A request in SGLang's form.

    Raises:
        UserError: it asks for what that form does not have.
    """
    p = request.params
    sampling: dict[str, Any] = {
        "max_new_tokens": p.max_new_tokens,
        "temperature": p.temperature,
        "top_p": p.top_p,
        "top_k": p.top_k or -1,
        "min_p": p.min_p,
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    for name in ("frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens", "thinking_budget"):
        if getattr(p, name) != getattr(DEFAULTS, name):
            sampling[name] = getattr(p, name)
    if p.seed is not None:
        sampling["sampling_seed"] = p.seed
    if p.stop:
        sampling["stop"] = list(p.stop)
    if p.stop_token_ids:
        sampling["stop_token_ids"] = list(p.stop_token_ids)
    if p.ignore_eos:
        sampling["ignore_eos"] = True
    if p.logit_bias:
        sampling["logit_bias"] = {str(id): value for id, value in p.logit_bias.items()}
    if p.constraint is not None:
        if p.constraint.kind not in SHAPED:
            raise UserError(f"an answer in the form {p.constraint.kind}", "This engine's interface cannot ask for it")
        sampling[SHAPED[p.constraint.kind]] = p.constraint.text
    if p.prompt_logprobs is not None or p.routed_experts or p.n != 1:
        raise UserError("n, prompt_logprobs or routed_experts", "Ask the engine itself")
    if p.kept_set:
        sampling["custom_params"] = {"return_top_p_token_ids": True}
    return {
        "rid": request.rid,
        "input_ids": list(request.input_ids),
        "sampling_params": sampling,
        "return_logprob": p.logprobs is not None,
        "top_logprobs_num": p.logprobs or 0,
        "return_weight_versions": True,
        "priority": request.priority,
        "stream": False,
    }


def deltas_of(request: Request, told: dict[str, Any], engine: HttpEngine) -> list[Delta]:
    """An answer in SGLang's form as deltas, each of ids of one version of the weights.

    Raises:
        Unavailable: it has not what was asked for.
    """
    meta, p = told["meta_info"], request.params
    pairs = meta.get("output_token_logprobs") or []
    ids = list(told["output_ids"] if "output_ids" in told else (pair[1] for pair in pairs))
    if p.logprobs is not None and [pair[1] for pair in pairs] != ids:
        raise Unavailable(f"engine {engine.url}: {len(pairs)} log-probabilities of {len(ids)} ids")
    oldest = str(meta.get("weight_version", ""))
    versions = meta.get("weight_versions") or [oldest] * len(ids)
    tops = meta.get("output_top_logprobs") or [()] * len(ids)
    kept = _kept(meta, engine) if p.kept_set else [(None, 0.0)] * len(ids)
    for name, each in (("versions", versions), ("lists of the likeliest ids", tops), ("sets of kept ids", kept)):
        if len(each) != len(ids):
            raise Unavailable(f"engine {engine.url}: {len(each)} {name} of {len(ids)} ids")
    _check(engine, ids, [pair[0] for pair in pairs], [one for one, _ in kept])
    info = [
        TokenInfo(pair[0], tuple((id, value) for value, id, *_ in top), *of)
        for pair, top, of in zip(pairs, tops, kept, strict=bool(pairs))
    ]
    reason = meta.get("finish_reason") or {"type": "error", "message": "the engine does not say how it ended"}
    finish = Finish(reason["type"], reason.get("matched"), reason.get("message", ""))
    runs = [list(run) for _, run in groupby(range(len(ids)), key=versions.__getitem__)] or [[]]
    return [
        Delta(
            request.rid,
            0,
            tuple(ids[i] for i in run),
            info=tuple(info[i] for i in run) if info else (),
            finish=finish if run is runs[-1] else None,
            trim=_trim(ids, finish, p.no_stop_trim, engine.tokenizer) if run is runs[-1] else 0,
            prompt_tokens=meta.get("prompt_tokens", len(request.input_ids)),
            cached_tokens=meta.get("cached_tokens", 0),
            weight_version=oldest,
            version=versions[run[0]] if run else oldest,
        )
        for run in runs
    ]


def _check(
    engine: HttpEngine, ids: Sequence[Any], logprobs: Sequence[Any], kept: Sequence[Sequence[int] | None]
) -> None:
    """Refuse what cannot be: it would end a learner, again whenever that begins anew, or teach it something wrong."""
    said = f"engine {engine.url}"
    if wrong := [id for id in ids if not isinstance(id, int) or not 0 <= id < engine.vocab_size]:
        raise Unavailable(f"{said} drew {wrong[0]!r}, which is no id of the {engine.vocab_size:,} that are")
    if odd := [one for one in logprobs if not isinstance(one, float | int) or not -math.inf < one <= 1e-3]:
        raise Unavailable(f"{said}: {odd[0]!r} is no log-probability")
    if out := [id for id, one in zip(ids, kept, strict=True) if one is not None and id not in one]:
        raise Unavailable(f"{said} drew {out[0]}, which is not among those that truncation kept")


def _kept(meta: dict[str, Any], engine: HttpEngine) -> list[tuple[tuple[int, ...] | None, float]]:
    """The kept set of each id (None: all ids), and the logarithm of its probability."""
    sets, offsets, masses = (meta.get(f"top_p_{name}") for name in ("token_ids", "token_offsets", "logprobs"))
    if sets is None or offsets is None or masses is None:
        raise Unavailable(f"engine {engine.url} does not tell what truncation kept, and with which probability")
    spans = list(pairwise(offsets))
    if len(spans) != len(masses):
        raise Unavailable(f"engine {engine.url}: {len(masses)} probabilities of {len(spans)} kept sets")
    every = engine.vocab_size
    return [(None if b - a == every else tuple(sets[a:b]), m) for (a, b), m in zip(spans, masses, strict=True)]


def _trim(ids: Sequence[int], finish: Finish, keep: bool, tokenizer: Tokenizer) -> int:
    """Characters to cut from the end: a stop string that was matched, unless it is kept, and what follows it."""
    if finish.type != "stop" or not isinstance(finish.matched, str):
        return 0
    text = tokenizer.decode_bytes(ids).decode("utf-8", "replace")
    at = text.rfind(finish.matched)
    return len(text) - at - (len(finish.matched) if keep else 0) if at >= 0 else 0
