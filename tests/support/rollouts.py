"""Tasks, engines and a learner that follow a script: what becomes of a sample is a function of its name alone.

So that the ledger of a run is known in advance, whatever dies on the way. A fate is drawn for each sample; those that
the scripted environment plays out are `FATES`, with what the orchestrator is to make of them.
"""

from __future__ import annotations

import asyncio
import hashlib
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from glm5.agents.service import Policy, Result, Rollout, TaskService, judged
from glm5.posttrain.intake import take
from glm5.posttrain.outcome import Outcome
from glm5.posttrain.store import Store
from glm5.serve.request import Delta, Request
from support.scripted import Scripted

VERSION, MAX_STALENESS = 10, 4  # of the weights, and the learner's bound
OLD = "of old"  # in a prompt: the engine answers with weights that are too old

# What a rollout does, and how it ends in the ledger.
FATES = {
    "solved": Outcome.OK,
    "failed": Outcome.TASK_FAILED,
    "old": Outcome.OK,
    "crash": Outcome.ENV_CRASH,  # always
    "crash once": Outcome.OK,
    "no verdict": Outcome.VERIFIER_NO_VERDICT,
    "no verdict once": Outcome.TASK_FAILED,
    "hang": Outcome.TIMEOUT,  # after a turn; the service ends it
    "idle": Outcome.ENV_CRASH,  # never asks the policy, and says that it solved the task
}


def number(*names: object) -> int:
    """The same in every process."""
    return int.from_bytes(hashlib.blake2b("/".join(map(str, names)).encode(), digest_size=8).digest(), "big")


def fate(task: str, index: int, member: int) -> str:
    """Groups are of all kinds: good ones, of equal rewards, with one bad member, with half of them bad, or more."""
    kind, n = number(task, index) % 8, number(task, index, member)
    bad = ("crash", "no verdict", "idle", "hang" if n % 4 < 2 else "crash once", "old")[n % 5]
    good = ("solved", "failed", "failed", "solved", "crash once", "no verdict once")[n % 6]
    if kind == 0:
        return "solved"
    if kind == 1:
        return ("crash", "idle", "solved", "failed")[member % 4]  # exactly half
    if kind == 2:
        return bad if member != 0 else good
    if kind in (3, 4):
        return bad if member == 0 else good
    if kind == 5:
        return "old" if member % 2 else good
    return good


class ScriptedTask(TaskService):
    """Plays fates out. A rollout takes `seconds`, in steps, with a turn before each. `hang_s`: after so long a rollout
    that hangs says itself that its time is up."""

    hang_s = float("inf")

    def __init__(self, name: str, groups: int | None, *, seconds: float = 1.0, **attributes: Any) -> None:
        self.name, self.groups, self.seconds = name, groups, seconds
        for key, value in attributes.items():
            setattr(self, key, value)

    async def rollout(self, asked: Rollout, policy: Policy) -> Result:
        mine = fate(self.name, asked.index, asked.member)
        if mine == "idle":
            return judged(1.0)
        turns = 1 + number(asked.sample) % 3
        about = f"{asked.group} {OLD}" if mine == "old" else asked.group
        history: list[dict[str, Any]] = [{"role": "user", "content": about}]
        for turn in range(turns):
            told = await policy.chat(history)
            history += [told, {"role": "user", "content": f"turn {turn} of {asked.member}"}]
            await asyncio.sleep(self.seconds / turns)
            if mine == "hang":
                await asyncio.sleep(min(self.hang_s, 1e6))
                return Result(Outcome.TIMEOUT)
            if mine == "crash" or (mine == "crash once" and asked.attempt == 0):
                raise RuntimeError("the environment broke")
        if mine == "no verdict" or (mine == "no verdict once" and asked.attempt == 0):
            return Result(Outcome.VERIFIER_NO_VERDICT, detail="the verifier was killed")
        return judged(1.0 if FATES[mine] is Outcome.OK else (number(asked.sample) % 5) / 10, turns=turns)


class ScriptedEngine(Scripted):
    """Answers as a function of the prompt; with old weights where the prompt says so."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(script=self._say, sizes=(3,), weight_version=str(VERSION), **changes)

    def _say(self, request: Request, index: int) -> str:
        words = ("the answer", "is", "ping", "value", "path", "def")
        n = number(*request.input_ids)
        return f"hm</think>{' '.join(words[n >> (3 * i) & 3] for i in range(2 + n % 5))}<|user|>"

    async def generate(self, request: Request) -> Any:
        stream = await super().generate(request)
        return _Aged(stream) if OLD in self.tokenizer.decode(request.input_ids) else stream


@dataclass
class _Aged:
    """A stream whose ids come from weights too old."""

    stream: Any

    def __aiter__(self) -> _Aged:
        return self

    async def __anext__(self) -> Delta:
        return replace(await anext(self.stream), version=str(VERSION - MAX_STALENESS - 1))

    async def aclose(self) -> None:
        await self.stream.aclose()


def learn(store: Store, groups: int = 1, version: int = VERSION) -> int:
    """A learner's update without a model: take, and close. Returns how many samples have got their final state."""
    taken = take(store, groups, version, MAX_STALENESS)
    if taken.trained:
        store.close_samples(taken.trained, step=1)
    return len(taken.closed) + len(taken.trained)


def ledger(path: Path) -> dict[str, Sequence[Any]]:
    """What counts of every sample: not when, nor in which update."""
    with sqlite3.connect(path) as db:
        rows = db.execute("SELECT id, grp, task, outcome, reward, oldest, hex(digest), state FROM samples")
        return {row[0]: row[1:] for row in rows}
