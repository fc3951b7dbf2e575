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
from typing import Any

from glm5.serve.client import Stream
from glm5.serve.gateway.packed import PackedAnswer
from glm5.serve.http.conversation import Reply
from glm5.serve.http.errors import ApiError
from glm5.serve.request import Delta, Request
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
        answer: all of it, once nothing more will come.
    """

    def __init__(
        self,
        number: int,
        parent: Turn | None,
        given: Sequence[int],
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
        self.origin, self.note, self.name, self.digest = origin, note, name, digest
        self.temperature = request.params.temperature
        self.prompt_tokens = len(request.input_ids)
        self.started, self.first_at, self.ended_at = time.time(), None, None
        self.error: Exception | None = None
        self.failure: Outcome | None = None
        self.answer: PackedAnswer | None = None
        self._reply: Reply | None = reply  # until it is over, as the two that follow
        self._deltas: list[Delta] = []
        self._news: asyncio.Event | None = asyncio.Event()
        self._listeners = 0
        self._grace_s, self._ended = grace_s, ended
        self._alarm: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._running = False

    started: float
    first_at: float | None
    ended_at: float | None

    @property
    def over(self) -> bool:
        """Nothing more will come."""
        return self._news is None

    @property
    def drawn(self) -> Sequence[int]:
        """The ids of the answer so far."""
        if self.answer is not None:
            return self.answer.ids
        return () if self._reply is None else self._reply.answer.ids

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
        ids = array("i")
        for turn in self.path():
            ids.extend(turn.given)
            ids.extend(turn.drawn)
        return ids.tolist()

    # -------------------------------------------------------------------------------------------------- its course
    def run(self, stream: Stream) -> None:
        """Take in what the engine gives, in a task of its own."""
        self._task = asyncio.ensure_future(self._run(stream))

    async def _run(self, stream: Stream) -> None:
        self._running = True
        try:
            while not self.over:
                delta = await anext(stream, None)
                if delta is None or self._take(delta):
                    break
        except ApiError as error:
            self.stop(Outcome.TIMEOUT if error.status == 504 else Outcome.ENGINE_LOST, error)
        except Exception as error:  # of whatever backend this is
            self.stop(Outcome.ENGINE_LOST, error)
        else:
            self._conclude()
        finally:
            self._task = None
            await stream.aclose()

    def _conclude(self) -> None:
        """The engine has nothing more to give."""
        if self._reply is None:
            return
        finish = self._reply.answer.finish
        if not self._reply.done:
            lost = ApiError(503, "the engine broke off in the middle of an answer. Ask again", code="engine_lost")
            self.stop(Outcome.ENGINE_LOST, lost)
        elif finish is not None and finish.type == "abort":
            self.stop(Outcome.ABORTED_STALE, None)
        else:
            self.stop(None, None)

    def _take(self, delta: Delta) -> bool:
        """Whether that was all."""
        if self._reply is None or self._news is None:
            return True
        if delta.ids and self.first_at is None:
            self.first_at = time.time()
        self._reply.take(delta)
        self._deltas.append(delta)
        news, self._news = self._news, asyncio.Event()
        news.set()
        return self._reply.done

    def stop(self, failure: Outcome | None, error: Exception | None) -> None:
        """Nothing more will come. What is kept is small: ids and figures in few objects, those of earlier turns at
        these turns alone."""
        if self._reply is None or self._news is None:
            return
        self.failure, self.error, self.ended_at = failure, error, time.time()
        self.answer, self.given = PackedAnswer(self._reply, self._deltas), array("i", self.given)
        if self._alarm is not None:
            self._alarm.cancel()
        news, self._reply, self._news, self._alarm = self._news, None, None, None
        self._deltas = []  # whoever listens has the list
        self._ended(self)
        news.set()

    def cancel(self) -> None:
        """End it now."""
        if self._task is not None and self._running:
            self._task.cancel()
        self.stop(Outcome.TIMEOUT, ApiError(503, "the turn was ended: nobody listened", code="abandoned"))

    # -------------------------------------------------------------------------------------------------- listeners
    def listen(self, rid: str) -> Stream:
        """All that came and will come, as the answer to the request of this name."""
        self._listeners += 1
        if self._alarm is not None:
            self._alarm.cancel()
        return _Listener(self, rid, self._deltas if self.answer is None else self.answer.deltas())

    async def more(self) -> bool:
        """Wait for another delta; False after the last.

        Raises:
            whatever ended the turn.
        """
        if self._news is not None:
            await self._news.wait()
            return True
        if self.error is not None:
            raise self.error
        return False

    def left(self) -> None:
        """A listener is gone."""
        self._listeners -= 1
        if not self._listeners and not self.over:
            self._alarm = asyncio.get_running_loop().call_later(self._grace_s, self.cancel)

    # -------------------------------------------------------------------------------------------------- told
    def to_json(self) -> dict[str, Any]:
        """What is known of it beside its ids."""
        answer, reply = self.answer, self._reply
        return {
            "turn": self.number,
            "parent": None if self.parent is None else self.parent.number,
            "origin": self.origin,
            "note": self.note,
            "request_id": self.name,
            "status": "running" if not self.over else "complete" if self.failure is None else "failed",
            "finish": None if answer is None or answer.finish is None else answer.finish.type,
            "finish_reason": None if answer is None else answer.finish_reason,
            "failure": self.failure,
            "error": "" if self.error is None else str(self.error) or type(self.error).__name__,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": answer.cached_tokens if answer else reply.answer.cached_tokens if reply else 0,
            "drawn_tokens": len(self.drawn),
            "temperature": self.temperature,
            "started": self.started,
            "first_token": self.first_at,
            "ended": self.ended_at,
        }


class _Listener:
    """A stream of a turn's deltas."""

    def __init__(self, turn: Turn, rid: str, deltas: list[Delta]) -> None:
        self._turn, self._rid, self._deltas, self._place, self._open = turn, rid, deltas, 0, True

    def __aiter__(self) -> _Listener:
        return self

    async def __anext__(self) -> Delta:
        while self._place >= len(self._deltas):
            if not await self._turn.more():
                raise StopAsyncIteration
        self._place += 1
        return replace(self._deltas[self._place - 1], rid=self._rid)

    async def aclose(self) -> None:
        if self._open:
            self._open = False
            self._turn.left()
