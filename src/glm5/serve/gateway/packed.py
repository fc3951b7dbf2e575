"""An answer that has ended, in few objects. Read next: `turn`.

Python's garbage collector goes through all objects that are kept, again and again, while everybody waits: with one for
each id, or each step, of thousands of turns this takes seconds.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import overload

from glm5.serve.http.conversation import Reply
from glm5.serve.request import Delta, TokenInfo
from glm5.text.events import fold


class PackedAnswer:
    """See the module.

    Args:
        reply: the answer as its client was told it. deltas: all that the engine gave.

    Attributes:
        size: how many of the ids are the answer's; an engine may have gone on behind its end.
        parsed: what it says. finish, finish_reason, cached_tokens: as `Reply` and its `Answer` have them.
    """

    def __init__(self, reply: Reply, deltas: Iterable[Delta]) -> None:
        answer = reply.answer
        self.size, self.finish, self.cached_tokens = len(answer.ids), answer.finish, answer.cached_tokens
        self.finish_reason, self.parsed = reply.finish_reason, fold(reply.events)
        self._ids, infos, runs = array("i"), list[TokenInfo](), list[tuple[int, Delta]]()
        for _, group in groupby(deltas, key=lambda one: (one.version, one.weight_version)):
            run = list(group)
            for one in run:
                self._ids.extend(one.ids)
                infos += one.info
            about = replace(
                run[-1],
                ids=(),
                info=(),
                prompt_info=sum((one.prompt_info for one in run), ()),
                drafted=sum(one.drafted for one in run),
                accepted=sum(one.accepted for one in run),
                routed=b"".join(one.routed for one in run),
            )
            runs.append((len(self._ids), about))
        self._info, self._runs = Packed(infos), tuple(runs)

    @property
    def ids(self) -> array[int]:
        """Of the answer."""
        return self._ids[: self.size]

    @property
    def logprobs(self) -> list[float]:
        """Of each id, in the distribution that it was drawn from."""
        return self._info.drawn_logprobs()[: self.size]

    @property
    def kept(self) -> list[list[int] | None]:
        """The ids that each was drawn from; None is all."""
        return self._info.kept()[: self.size]

    @property
    def versions(self) -> list[str]:
        """Of the weights that drew each id."""
        made: list[str] = []
        for end, about in self._runs:
            made += [about.version or about.weight_version] * (end - len(made))
        return made[: self.size]

    def deltas(self) -> list[Delta]:
        """What the engine gave, of each version of the weights in one piece."""
        made, at = [], 0
        for end, about in self._runs:
            made.append(replace(about, ids=tuple(self._ids[at:end]), info=tuple(self._info[at:end])))
            at = end
        return made


class Packed(Sequence[TokenInfo]):
    """Figures of many ids."""

    __slots__ = ("_kept_logprobs", "_logprobs", "_rest")

    def __init__(self, infos: Sequence[TokenInfo]) -> None:
        self._logprobs = array("d", [one.logprob for one in infos])
        uncut = all(one.kept is None and not one.top and not one.kept_logprob for one in infos)
        self._kept_logprobs = None if uncut else array("d", [one.kept_logprob for one in infos])
        self._rest = None if uncut else tuple((one.top, one.kept) for one in infos)

    def __len__(self) -> int:
        return len(self._logprobs)

    @overload
    def __getitem__(self, at: int) -> TokenInfo: ...
    @overload
    def __getitem__(self, at: slice) -> list[TokenInfo]: ...
    def __getitem__(self, at: int | slice) -> TokenInfo | list[TokenInfo]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        if self._rest is None or self._kept_logprobs is None:
            return TokenInfo(self._logprobs[at])
        top, kept = self._rest[at]
        return TokenInfo(self._logprobs[at], top, kept, self._kept_logprobs[at])

    def drawn_logprobs(self) -> list[float]:
        """`logprob - kept_logprob` of each."""
        if self._kept_logprobs is None:
            return self._logprobs.tolist()
        return [own - kept for own, kept in zip(self._logprobs, self._kept_logprobs, strict=True)]

    def kept(self) -> list[list[int] | None]:
        """`kept` of each."""
        if self._rest is None:
            return [None] * len(self)
        return [None if kept is None else list(kept) for _, kept in self._rest]
