"""What is kept of a rollout's tokens: ids that only grew, and every figure of each, as plain arrays. Needs no torch.

A sample may have several records, where its history was edited, folded or tried twice: each id that the policy drew is
marked in one of them only. Ids, figures and marks stand at their own token; `rows` moves them to the query before it.
Read next: `store`, which keeps records; `rows`, which trains on them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from glm5.utils.errors import DataError

if TYPE_CHECKING:
    from glm5.posttrain.rows import Trajectory
    from glm5.text.tokenizer import Tokenizer

NO_VERSION = -1  # of a token that no engine drew


@dataclass(frozen=True)
class Record:
    """One trajectory. All sequences have L entries, one a token.

    Args:
        ids: prompt, answers, observations, in order.
        drawn: True where the policy drew the id here, and it is to be learned from: the loss mask.
        logprobs: the engine's, of the distribution that it drew from; 0 where nothing was drawn.
        versions: number of the weights that drew the id; -1 where nothing was drawn.
        kept: the ids that each was drawn from (None: all); None is all everywhere.
        temperature: of the draws.
        turns: what else is known of each answer, JSON objects: request id, finish, failure, timestamps.

    Raises:
        DataError: lengths differ, or a figure is missing or is no number.
    """

    ids: Sequence[int]
    drawn: Sequence[bool]
    logprobs: Sequence[float]
    versions: Sequence[int]
    kept: Sequence[Sequence[int] | None] | None = None
    temperature: float = 1.0
    turns: Sequence[Mapping[str, Any]] = ()

    def __post_init__(self) -> None:
        length = len(self.ids)
        for name in ("drawn", "logprobs", "versions", "kept"):
            values = getattr(self, name)
            if values is not None and len(values) != length:
                raise DataError(f"{name} has {len(values)} entries for {length} ids", "Give one for each id")
        if not isinstance(self.temperature, float | int):
            raise DataError(f"temperature={self.temperature!r}", "All draws of a trajectory need the same one")
        if any(not 0 <= i < 2**31 for i in self.ids):
            raise DataError("ids: one is no token id", "They lie in [0, 2^31)")
        if length and self.drawn[0]:
            raise DataError("drawn[0] is True, and nothing comes before it", "Begin with the prompt")
        for place, drawn in enumerate(self.drawn):
            if drawn and not -1e30 < self.logprobs[place] <= 1e-3:
                raise DataError(f"logprobs[{place}]={self.logprobs[place]!r}", "A drawn id needs a log-probability")
            if drawn and self.versions[place] < 0:
                raise DataError(f"versions[{place}]={self.versions[place]!r}", "A drawn id needs its weights' version")

    @property
    def oldest(self) -> int | None:
        """The oldest version that drew one of its ids; None if nothing was drawn."""
        return min((v for v, drawn in zip(self.versions, self.drawn, strict=True) if drawn), default=None)

    def trajectory(self, rollout: int, advantages: float = 0.0) -> Trajectory:
        """What `rows` packs. Imports torch."""
        from glm5.posttrain.rows import Trajectory

        return Trajectory(
            self.ids, self.drawn, self.logprobs, rollout, advantages, temperature=self.temperature, kept=self.kept
        )

    def to_json(self) -> dict[str, Any]:
        """As an object of JSON."""
        return {
            "ids": [int(i) for i in self.ids],
            "drawn": [bool(d) for d in self.drawn],
            "logprobs": [float(p) for p in self.logprobs],
            "versions": [int(v) for v in self.versions],
            "kept": None if self.kept is None else [None if k is None else list(k) for k in self.kept],
            "temperature": self.temperature,
            "turns": [dict(turn) for turn in self.turns],
        }

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Record:
        """What `to_json` wrote, and what the gateway gives of a session.

        Raises:
            DataError: a field is missing, or as in the class.
        """
        names = ("ids", "drawn", "logprobs", "versions", "kept", "temperature", "turns")
        missing = [name for name in names[:4] if name not in given]
        if missing:
            raise DataError(f"a trajectory has no {', '.join(missing)}", "Give them, one entry for each token")
        return cls(**{name: given[name] for name in names if name in given})

    # ------------------------------------------------------------------------------------------------ as bytes
    def to_blobs(self) -> tuple[bytes, bytes, bytes, bytes, bytes | None, bytes | None, str]:
        """Little-endian int32 ids, uint8 marks, fp64 log-probabilities, int32 versions, int32 sizes of kept sets (-1:
        all ids) and the sets end to end (both None without sets), and the rest as JSON."""
        sizes = sets = None
        if self.kept is not None:
            sizes = np.array([-1 if k is None else len(k) for k in self.kept], "<i4").tobytes()
            sets = np.array([i for k in self.kept if k is not None for i in k], "<i4").tobytes()
        rest = json.dumps({"temperature": self.temperature, "turns": [dict(turn) for turn in self.turns]})
        return (
            np.array(self.ids, "<i4").tobytes(),
            np.array(self.drawn, "u1").tobytes(),
            np.array(self.logprobs, "<f8").tobytes(),  # not fp32: an engine's figure comes back as it was
            np.array(self.versions, "<i4").tobytes(),
            sizes,
            sets,
            rest,
        )

    @classmethod
    def from_blobs(
        cls,
        ids: bytes,
        drawn: bytes,
        logprobs: bytes,
        versions: bytes,
        sizes: bytes | None,
        sets: bytes | None,
        rest: str,
    ) -> Record:
        """The way back."""
        kept: list[list[int] | None] | None = None
        if sizes is not None and sets is not None:
            every, at, kept = np.frombuffer(sets, "<i4").tolist(), 0, []
            for size in np.frombuffer(sizes, "<i4").tolist():
                kept.append(None if size < 0 else every[at : at + size])
                at += max(size, 0)
        return cls(
            ids=np.frombuffer(ids, "<i4").tolist(),
            drawn=np.frombuffer(drawn, "u1").astype(bool).tolist(),
            logprobs=np.frombuffer(logprobs, "<f8").tolist(),
            versions=np.frombuffer(versions, "<i4").tolist(),
            kept=kept,
            **json.loads(rest),
        )


def retokenised(record: Record, tokenizer: Tokenizer) -> Record:
    """The record as it would be if only its text had been kept: what was given and what was drawn, each piece decoded
    and encoded anew. Figures are laid beside the new ids in order, as far as there are some. There to show what that
    breaks; nothing else here makes ids from text that a model drew."""
    ids: list[int] = []
    drawn: list[bool] = []
    logprobs: list[float] = []
    versions: list[int] = []
    for marked, run in groupby(range(len(record.ids)), key=record.drawn.__getitem__):
        places = list(run)
        text = tokenizer.decode_bytes([record.ids[i] for i in places]).decode("utf-8", "replace")
        new = tokenizer.encode(text, allow_special=True)
        ids += new
        drawn += [marked] * len(new)
        beside = [places[min(i, len(places) - 1)] for i in range(len(new))]
        logprobs += [record.logprobs[i] for i in beside]
        versions += [record.versions[i] for i in beside]
    return replace(record, ids=ids, drawn=drawn, logprobs=logprobs, versions=versions, kept=None)


def records_of_session(session: Mapping[str, Any]) -> list[Record]:
    """The trajectories of a gateway's session, as `GET /sessions/NAME` gives it; those without a drawn id are left out.

    Raises:
        DataError: weights are not named by a number, or the draws of a trajectory had several temperatures.
    """
    turns = {turn["turn"]: turn for turn in session["turns"]}
    made = []
    for given in session["trajectories"]:
        mine = [turns[number] for number in given["turns"]]
        temperatures = {turn["temperature"] for turn in mine}
        record = Record.from_json(
            {
                **given,
                "versions": [_number(version) for version in given["versions"]],
                "temperature": temperatures.pop() if len(temperatures) == 1 else None,
                "turns": mine,
            }
        )
        if record.oldest is not None:
            made.append(record)
    return made


def _number(version: str) -> int:
    if not version:
        return NO_VERSION
    if not version.isdecimal():
        raise DataError(f"weight version {version!r} is no number", "Name the weights by a number when you push them")
    return int(version)
