"""One answer as it comes: its ids, its figures, and the ids whose text can be shown already.

Stop strings are found by the engine, which then says how many characters to cut; until then the end of the text may
turn out to be the beginning of one, so that much is held back. This is done on ids, before they become text, so every
interface shows the same. Read next: `chat`, `completions`, `native`.
"""

from __future__ import annotations

import codecs
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from glm5.serve.fold import Folded
from glm5.serve.http.errors import ApiError
from glm5.serve.request import Delta, Finish, Request
from glm5.text.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0  # for what JSON cannot hold: the logarithm of zero


class Held:
    """Holds back ids that may belong to a stop string.

    Args:
        tokenizer: of the ids. stops: the strings; without any, nothing is ever held.
    """

    def __init__(self, tokenizer: Tokenizer, stops: tuple[str, ...]) -> None:
        self._tokenizer, self._stops = tokenizer, [stop.encode() for stop in stops]
        self._ids: list[int] = []

    def push(self, ids: Iterable[int]) -> list[int]:
        """The ids, of these and earlier ones, whose text can no longer be cut."""
        self._ids += ids
        if not self._stops:
            return self.finish()
        sizes = [len(self._tokenizer.decode_bytes([id])) for id in self._ids]
        text = self._tokenizer.decode_bytes(self._ids)
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        count, end = 0, 0
        while count < len(sizes) and end + sizes[count] <= len(text) - keep:
            end += sizes[count]
            count += 1
        free, self._ids = self._ids[:count], self._ids[count:]
        return free

    def finish(self, last: Iterable[int] = (), trim: int = 0) -> list[int]:
        """All that is held and the last ids, less `trim` characters of their text; a token that is cut is respelled."""
        ids, self._ids = [*self._ids, *last], []
        if not trim:
            return ids
        data = self._tokenizer.decode_bytes(ids)
        end = _prefix_bytes(data, len(data.decode("utf-8", "replace")) - trim)
        kept: list[int] = []
        for id in ids:
            size = len(self._tokenizer.decode_bytes([id]))
            if size > end:
                return kept + self._tokenizer.encode(self._tokenizer.decode_bytes([id])[:end])
            kept.append(id)
            end -= size
        return kept


def _overlap(text: bytes, stop: bytes) -> int:
    """Length of the longest end of `text` that begins `stop`, without being all of it."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0


def _prefix_bytes(data: bytes, characters: int) -> int:
    """How many bytes spell the first so many characters, replacement characters counted."""
    decoder, seen = codecs.getincrementaldecoder("utf-8")("replace"), 0
    if characters <= 0:
        return 0
    for place, byte in enumerate(data):
        seen += len(decoder.decode(bytes([byte])))
        if seen >= characters:
            return place + 1
    return len(data)


class Answer(Folded):
    """One answer as it comes, with the ids whose text can be shown."""

    def __init__(self, request: Request, index: int, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.request, self.index, self.tokenizer = request, index, tokenizer
        self.first_at: float | None = None
        self.last_at: float | None = None
        trimmed = not request.params.no_stop_trim
        self._held = Held(tokenizer, request.params.stop if trimmed else ())

    def take(self, delta: Delta) -> list[int]:
        """Count a delta; the ids whose text can be shown now. A stop id is not among them, unless asked for.

        Raises:
            ApiError: 400 or 500, the engine could not go on with this answer.
        """
        self.add(delta)
        if delta.ids:
            self.last_at = time.monotonic()
            self.first_at = self.first_at or self.last_at
        finish = delta.finish
        if finish is None:
            return self._held.push(delta.ids)
        if finish.type == "error":
            status, code = (400, None) if finish.refused else (500, "engine_error")
            raise ApiError(status, f"the engine could not finish the answer: {finish.message}", code=code)
        ids = list(delta.ids)
        if finish.type == "stop" and not self.request.params.no_stop_trim and ids and ids[-1] == finish.matched:
            del ids[-1]
        return self._held.finish(ids, delta.trim)

    def cut(self, count: int) -> None:
        """Keep the first so many ids: the answer ended there, though the engine went on."""
        if count < len(self.ids):
            del self.ids[count:], self.info[count:], self.versions[count:]
            self.finish, self.trim = None, 0

    @property
    def accept_length(self) -> float:
        """Tokens a step: 1 without drafts."""
        return len(self.ids) / self.steps if self.steps else 0.0

    def timings(self) -> dict[str, Any]:
        """Figures of speed, for people: seconds to the first token, tokens a second after it, drafts."""
        spent = (self.last_at or 0) - (self.first_at or 0)
        return {
            "time_to_first_token": None if self.first_at is None else self.first_at - self.request.arrival,
            "tokens_per_second": (len(self.ids) - 1) / spent if spent > 0 else None,
            "accept_length": self.accept_length,
            "draft_tokens": self.drafted,
            "accepted_draft_tokens": self.accepted,
        }


def untold(delta: Delta) -> Delta:
    """The delta without its ids: the engine gives at least one, and a client that scores its prompt wants none."""
    finish = delta.finish
    ended = Finish("length") if finish is not None and finish.type == "stop" else finish
    last = len(delta.routed) // max(1, delta.prompt_tokens)  # bytes of the prompt's last id, which leads to no other
    return replace(delta, ids=(), info=(), trim=0, finish=ended, routed=delta.routed[: len(delta.routed) - last])


def finish_fields(answer: Answer) -> dict[str, Any]:
    """`finish_reason`, and what the answer stopped at under the names of both engines that tell it."""
    finish = answer.finish
    return {
        "finish_reason": None if finish is None else finish.type,
        "stop_reason": None if finish is None else finish.matched,
        "matched_stop": None if finish is None else finish.matched,
    }


def usage_of(answers: Iterable[Answer], reasoning_tokens: int | None = None) -> dict[str, Any]:
    """OpenAI's `usage` of all answers to one or more requests."""
    answers = list(answers)
    requests = {answer.request.rid: answer.request for answer in answers}
    prompt = sum(len(request.input_ids) for request in requests.values())
    cached = sum(max(a.cached_tokens for a in answers if a.request.rid == rid) for rid in requests)
    completion = sum(len(answer.ids) for answer in answers)
    details = {} if reasoning_tokens is None else {"reasoning_tokens": reasoning_tokens}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": 0, **details},
    }


def logprob(value: float) -> float:
    """A log-probability that JSON can hold."""
    return value if value > LEAST_LOGPROB else LEAST_LOGPROB
