"""One turn of a session: what the model was given, what it drew, and everybody who waits for it.

A turn is generated once, by a task of its own, whoever listens: a client that breaks off and asks again finds it, and
hears it from the beginning. If nobody has listened for a while it is ended. Read next: `session`.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, overload

from glm5.serve.client import Stream
from glm5.serve.http.conversation import Reply
from glm5.serve.http.errors import ApiError
from glm5.serve.request import Delta, Request, TokenInfo
from glm5.utils.outcome import Outcome


class Turn:
    """See the module.

    Args:
        number: in its session. parent: the turn that this one goes on from, id by id.
        given: the ids that the model was given after the parent's. origin, note: as `session.Plan` has them.
        request: what the engine is asked. reply: takes what comes, as the client is told it.
        grace_s: how long it goes on with nobody listening.
        ended: called once, when nothing more will come.

    Attributes:
        error: what listeners are told at the end instead.
        failure: why it is of no use; None for a turn that runs or ended well.
    """

    def __init__(
        self,
        number: int,
        parent: Turn | None,
        given: tuple[int, ...],
        request: Request,
        reply: Reply,
        *,
        origin: str,
        note: str,
        name: str | None,
        digest: bytes,
        grace_s: float,
        ended: Callable[[Turn], None],
    ) -> None:
        self.number, self.parent, self.given = number, parent, given
        self.reply, self.origin, self.note, self.name, self.digest = reply, origin, note, name, digest
        self.params = request.params
        self.prompt_tokens = len(request.input_ids)
        self.started, self.first_at, self.ended_at = time.time(), None, None
        self.error: Exception | None = None
        self.failure: Outcome | None = None
        self.over = False
        self._deltas: list[Delta] = []
        self._news = asyncio.Event()
        self._listeners = 0
        self._grace_s, self._ended = grace_s, ended
        self._alarm: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._running = False

    started: float
    first_at: float | None
    ended_at: float | None

    @property
    def drawn(self) -> list[int]:
        """The ids of the answer so far."""
        return self.reply.answer.ids

    @property
    def complete(self) -> bool:
        """Whether it ended as an answer that an agent can go on from."""
        return self.over and self.failure is None

    def path(self) -> list[Turn]:
        """All turns from the first to this one."""
        turns: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]

    def ids(self) -> list[int]:
        """Everything from the first id of its first turn to the last that it drew."""
        return [id for turn in self.path() for part in (turn.given, turn.drawn) for id in part]

    # -------------------------------------------------------------------------------------------------- its course
    def run(self, stream: Stream) -> None:
        """Take in what the engine gives, in a task of its own."""
        self._task = asyncio.ensure_future(self._run(stream))

    async def _run(self, stream: Stream) -> None:
        self._running = True
        try:
            while not self.over:
                delta = await anext(stream, None)
                if delta is None:
                    break
                self._take(delta)
                if self.reply.done:
                    break
        except ApiError as error:
            self.stop(Outcome.TIMEOUT if error.status == 504 else Outcome.ENGINE_LOST, error)
        except Exception as error:  # of whatever backend this is
            self.stop(Outcome.ENGINE_LOST, error)
        else:
            finish = self.reply.answer.finish
            if not self.reply.done:
                lost = ApiError(503, "the engine broke off in the middle of an answer. Ask again", code="engine_lost")
                self.stop(Outcome.ENGINE_LOST, lost)
            elif finish is not None and finish.type == "abort":
                self.stop(Outcome.ABORTED_STALE, None)
            else:
                self.stop(None, None)
        finally:
            await stream.aclose()

    def _take(self, delta: Delta) -> None:
        if delta.ids and self.first_at is None:
            self.first_at = time.time()
        self.reply.take(delta)
        self._deltas.append(delta)
        self._tell()

    def stop(self, failure: Outcome | None, error: Exception | None) -> None:
        """Nothing more will come."""
        if self.over:
            return
        self.over, self.failure, self.error, self.ended_at = True, failure, error, time.time()
        if self._alarm is not None:
            self._alarm.cancel()
        self._ended(self)
        self._tell()

    def cancel(self) -> None:
        """End it now."""
        if self._task is not None and self._running:
            self._task.cancel()
        self.stop(Outcome.TIMEOUT, ApiError(503, "the turn was ended: nobody listened", code="abandoned"))

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    # -------------------------------------------------------------------------------------------------- listeners
    def listen(self, rid: str) -> Stream:
        """All that came and will come, as the answer to the request of this name."""
        self._listeners += 1
        if self._alarm is not None:
            self._alarm.cancel()
        return _Listener(self, rid)

    async def heard(self, place: int) -> Delta | None:
        """Delta number `place`, as soon as it is there; None after the last.

        Raises:
            whatever ended the turn.
        """
        while place >= len(self._deltas):
            if self.over:
                if self.error is not None:
                    raise self.error
                return None
            await self._news.wait()
        return self._deltas[place]

    def left(self) -> None:
        """A listener is gone."""
        self._listeners -= 1
        if not self._listeners and not self.over:
            self._alarm = asyncio.get_running_loop().call_later(self._grace_s, self.cancel)

    def pack(self) -> None:
        """Be small, once nothing more comes. The request's copy of all ids before goes: they are there once, turn by
        turn."""
        answer = self.reply.answer
        answer.request = replace(answer.request, input_ids=())
        self.reply.conversation = replace(self.reply.conversation, request=answer.request)
        answer.info = Packed(answer.info)  # type: ignore[assignment]
        self._deltas = [replace(d, info=Packed(d.info)) if d.info else d for d in self._deltas]  # type: ignore[arg-type]

    # -------------------------------------------------------------------------------------------------- told
    def to_json(self) -> dict[str, Any]:
        """What is known of it beside its ids."""
        finish = self.reply.answer.finish
        return {
            "turn": self.number,
            "parent": None if self.parent is None else self.parent.number,
            "origin": self.origin,
            "note": self.note,
            "request_id": self.name,
            "status": "running" if not self.over else "complete" if self.failure is None else "failed",
            "finish": None if finish is None else finish.type,
            "finish_reason": self.reply.finish_reason,
            "failure": self.failure,
            "error": "" if self.error is None else str(self.error) or type(self.error).__name__,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.reply.answer.cached_tokens,
            "drawn_tokens": len(self.drawn),
            "temperature": self.params.temperature,
            "started": self.started,
            "first_token": self.first_at,
            "ended": self.ended_at,
        }


class Packed(Sequence[TokenInfo]):
    """Figures of many ids in few objects. Python looks through all objects that are kept, again and again, while
    everybody waits: with one for each id of thousands of turns this takes seconds."""

    __slots__ = ("_kept_logprobs", "_logprobs", "_rest")

    def __init__(self, infos: Sequence[TokenInfo]) -> None:
        self._logprobs = array("d", (one.logprob for one in infos))
        self._kept_logprobs = array("d", (one.kept_logprob for one in infos))
        plain = all(one.kept is None and not one.top for one in infos)
        self._rest = None if plain else tuple((one.top, one.kept) for one in infos)

    def __len__(self) -> int:
        return len(self._logprobs)

    @overload
    def __getitem__(self, at: int) -> TokenInfo: ...
    @overload
    def __getitem__(self, at: slice) -> list[TokenInfo]: ...
    def __getitem__(self, at: int | slice) -> TokenInfo | list[TokenInfo]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        top, kept = self._rest[at] if self._rest is not None else ((), None)
        return TokenInfo(self._logprobs[at], top, kept, self._kept_logprobs[at])


class _Listener:
    """A stream of a turn's deltas."""

    def __init__(self, turn: Turn, rid: str) -> None:
        self._turn, self._rid, self._place, self._open = turn, rid, 0, True

    def __aiter__(self) -> _Listener:
        return self

    async def __anext__(self) -> Delta:
        delta = await self._turn.heard(self._place)
        if delta is None:
            raise StopAsyncIteration
        self._place += 1
        return replace(delta, rid=self._rid)

    async def aclose(self) -> None:
        if self._open:
            self._open = False
            self._turn.left()
