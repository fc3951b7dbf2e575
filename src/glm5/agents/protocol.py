"""What an orchestrator and a task service say to each other: JSON over HTTP, so that a service may be in any language.

A task is a service: it holds the prompts, runs the agent against the model, and judges. It tells the orchestrator that
it is there, and is then asked for one rollout at a time:

    service       -> POST   /services         {name, url, boot, ratio, timeout_s, concurrency, groups, joins}
                     again every `beat_s` of the answer {"beat_s": 2.0}; whoever is silent is asked no more
                  -> DELETE /services/NAME    it leaves; it may come back
    orchestrator  -> POST   /rollouts         a `Rollout`; the answer comes when it has ended: a `Result`
                  -> GET    /rollouts         {"rollouts": [...]}: those that run, or ended and are kept (if it `joins`)
                  -> DELETE /rollouts/SESSION end it, or forget its result (if it `joins`)

A rollout is known by its session. A service that `joins` answers a rollout that is asked for again with the same run of
it, running or complete, until it is told to forget it: so neither end loses work when the other begins anew. One that
does not needs no more than `POST /rollouts`, and is asked under a new session. A status of 503 means later. Where the
two share a key, each request of either bears it: `Authorization: Bearer KEY`.

Source: the report, sections 3.6 and 4.1. Read next: `service`, the base class of services in Python.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from ipaddress import ip_address
from typing import Any, Self, TypeVar

from glm5.utils.errors import DataError, UserError
from glm5.utils.outcome import Outcome

T = TypeVar("T")
NAME = re.compile(r"[\w.]{1,64}")  # of a task: part of the names of its groups, samples and sessions
KEY = "GLM5_API_KEY"  # the variable that holds what orchestrator and services share


def bearer(key: str | None) -> dict[str, str]:
    """The headers of a request that bears a key, if there is one."""
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def require_key(key: str | None, host: str) -> None:
    """Refuse to listen for other machines without a key: whoever registers a task is sent the gateway's, and whoever
    reaches a service makes it work.

    Raises:
        UserError: there is none, and `host` is not this machine's own address alone.
    """
    try:
        own = ip_address(host).is_loopback
    except ValueError:
        own = host == "localhost"
    if not own and not key:
        what = f"{host} is reached from other machines, and no key is asked for there"
        raise UserError(what, f"Set {KEY} to one secret for the orchestrator and its services")


@dataclass(frozen=True)
class Offer:
    """A service tells that it is there.

    Args:
        name: of the task. url: where it listens. boot: another one whenever its process begins anew.
        ratio: its weight among the tasks; only proportions count.
        timeout_s: how long a rollout may take. concurrency: rollouts that it bears at once.
        groups: how many groups of samples it has in all; None: as many as anybody wants.
        joins: it knows rollouts that are asked for again.
    """

    name: str
    url: str
    boot: str = ""
    ratio: float = 1.0
    timeout_s: float = 600.0
    concurrency: int = 64
    groups: int | None = None
    joins: bool = False

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise DataError(f"name={self.name!r}", "Give a task 1 to 64 letters, digits, or any of . and _")
        if not self.url.startswith(("http://", "https://")):
            raise DataError(f"url={self.url!r}", "Give the service's address as http://HOST:PORT")
        for name in ("ratio", "timeout_s", "concurrency"):
            if not 0 < getattr(self, name) < math.inf:
                raise DataError(f"{name}={getattr(self, name)!r}", "It must be above 0")
        if self.groups is not None and self.groups < 0:
            raise DataError(f"groups={self.groups!r}", "It must be at least 0, or null")

    @classmethod
    def from_json(cls, given: Any) -> Self:
        """Raises DataError, as the class does: the message names the field."""
        return _read(cls, given)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Rollout:
    """What a service is asked for: one attempt at a task.

    Args:
        sample, group, task: names in the ledger. index: number of the group among its task's, from 0: which prompt.
        member: number of the sample in its group. attempt: 0, and more when an earlier one failed without its fault.
        seed: the same for all members of a group, in [0, 2^53).
        session: of this attempt, at the gateway, which began it at `begun` by its own clock. base_url: of that session:
            an agent for OpenAI's interface attaches there. api_key: that the gateway asks for.
        time_s: in which the service must answer.
    """

    sample: str
    group: str
    task: str
    index: int
    member: int
    attempt: int
    seed: int
    session: str
    base_url: str
    time_s: float
    begun: float = 0.0
    api_key: str | None = None

    @classmethod
    def from_json(cls, given: Any) -> Self:
        """Raises DataError if a field is missing or of another kind."""
        return _read(cls, given)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Result:
    """How a rollout ended, as its service tells it.

    Args:
        outcome: see `glm5.utils.outcome`. reward: None where the outcome leaves the group, or nobody judged a time-out.
        detail: for a reader: what failed, first cause first. metrics: numbers by name, of whatever the task counts.
    """

    outcome: Outcome
    reward: float | None = None
    detail: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.reward is not None and (self.outcome.leaves_group or not math.isfinite(self.reward)):
            raise DataError(f"reward={self.reward!r} of a rollout that is {self.outcome}", "Leave it out")
        if self.reward is None and self.outcome in (Outcome.OK, Outcome.TASK_FAILED):
            raise DataError(f"no reward of a rollout that is {self.outcome}", "Give one, or say verifier_no_verdict")

    @classmethod
    def from_json(cls, given: Any) -> Self:
        """Raises DataError if it is none, or reward and outcome do not go together."""
        return _read(cls, given)

    def to_json(self) -> dict[str, Any]:
        return {"outcome": str(self.outcome), "reward": self.reward, "detail": self.detail, "metrics": {**self.metrics}}


def judged(reward: float, detail: str = "", *, solved_at: float = 1.0, **metrics: float) -> Result:
    """The result of a rollout that ran to its end: `ok` from a reward of `solved_at` on, else `task_failed`."""
    return Result(Outcome.OK if reward >= solved_at else Outcome.TASK_FAILED, reward, detail, metrics)


_KINDS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (float, int),
    "bool": (bool,),
    "Outcome": (str,),
    "Mapping[str, float]": (dict,),
    "None": (type(None),),
}


def _read(cls: type[T], given: Any) -> T:
    """The dataclass of an object of JSON. A name that it does not know is left out, so that either end may be newer."""
    if not isinstance(given, dict):
        raise DataError(f"{str(given)[:80]!r} is no {cls.__name__}", "Send an object of JSON")
    values: dict[str, Any] = {}
    for one in fields(cls):  # type: ignore[arg-type]
        if one.name not in given:
            if one.default is MISSING and one.default_factory is MISSING:
                raise DataError(f"a {cls.__name__} has no {one.name!r}", "Send it")
            continue
        value: Any = given[one.name]
        kinds = tuple(kind for word in str(one.type).split(" | ") for kind in _KINDS[word])
        fits = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
        if not fits:
            raise DataError(f"{one.name}={str(value)[:80]!r}", f"A {cls.__name__} has {one.type} there")
        if one.type == "Outcome":
            if value not in tuple(Outcome):
                raise DataError(f"{one.name}={value[:80]!r}", f"Use one of {', '.join(Outcome)}")
            value = Outcome(value)
        if one.type == "Mapping[str, float]":
            value = {str(k): float(v) for k, v in value.items() if isinstance(v, int | float) and math.isfinite(v)}
        values[one.name] = value
    return cls(**values)
