"""What is asked of the engine, and what it answers: ids in, ids and log-probabilities out. Needs no torch.

A `Request` holds the ids of a prompt and how to go on from them; each of its `n` answers is followed by `Delta`s, of
which the last carries a `Finish`. Text exists only at the border (`glm5.text`), but for stop strings, which the
engine must see itself. Read next: `scheduler`, `engine`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from glm5.utils.errors import ConfigError, UserError

Form = Literal["json", "json_schema", "regex", "ebnf", "tools"]
FinishType = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class Constraint:
    """A form that the answer must have.

    Args:
        kind: json (any object of JSON), json_schema (`text` is the schema), regex, ebnf, or tools (`text` is the JSON
            list of the tools of which at least one must be called, in GLM-5's own form).
        text: the schema, expression or grammar.
        after_thinking: begin after `</think>`, where the prompt opens a thinking block; else with the first token.
        max_calls: of kind tools, at most so many calls (1 for a named tool); None is any number.
        where: the client's field that asked for it, which errors name; empty is `kind`. Forms are equal whatever it is.
    """

    kind: Form
    text: str = ""
    after_thinking: bool = True
    max_calls: int | None = None
    where: str = field(default="", compare=False)

    @property
    def name(self) -> str:
        """How errors call it."""
        return self.where or self.kind


@dataclass(frozen=True)
class SamplingParams:
    """How to go on from a prompt. Field names are SGLang's where it has them.

    Args:
        max_new_tokens: None is whatever the context has room for. min_new_tokens: no stop before so many.
        temperature: 0 is greedy. top_p, top_k (0 or -1 keep all), min_p: as `glm5.model.sampling.Sampling`.
        frequency_penalty, presence_penalty: taken from the logits of ids that were generated, by count or at all.
        repetition_penalty: divides positive, multiplies negative logits of ids in prompt and answer; 1 is none.
        logit_bias: added to the logits of these ids.
        seed: of this request's draws, which then depend on nothing else; answer i of n uses its own stream of it.
        stop: strings that end the answer; they are left out of the text unless `no_stop_trim`.
        stop_token_ids: ids that end it beside the model's own; `ignore_eos` switches the model's own off.
        n: answers to one prompt.
        logprobs: None gives none; k gives the log-probability of every id and of the k likeliest. They are of the
            distribution that the id was drawn from, before truncation: temperature, penalties, bias and constraint in.
        prompt_logprobs: the same for the prompt's ids, of the model's own distribution.
        kept_set: give with each id those that truncation left to draw from, as reinforcement learning wants.
        thinking_budget: close a thinking block after so many tokens of it.
        routed_experts: tell which experts each token went to. The prompt is then read whole, cached or not.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    no_stop_trim: bool = False
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    kept_set: bool = False
    constraint: Constraint | None = None
    thinking_budget: int | None = None
    routed_experts: bool = False

    @property
    def reads_all(self) -> bool:
        """Whether something is wanted of every token of the prompt, so that none may come from a cache."""
        return self.prompt_logprobs is not None or self.routed_experts


@dataclass(frozen=True)
class PageSource:
    """Where the cache entries of a prompt's first `tokens` ids lie: with the worker at `address`, under the name
    `lease`."""

    address: str
    lease: str
    tokens: int


@dataclass(frozen=True)
class Request:
    """One prompt.

    Args:
        input_ids: the prompt's ids, at least one.
        rid: its name, unique among those alive. priority: higher goes first; equal ones in order of arrival.
        arrival: seconds of `time.monotonic`.
        lease: keep the prompt's pages after the end, for a peer to fetch, until the lease of this name is returned.
        source: fetch pages from there where they are not known here; what cannot be fetched is read.
        route: requests of one name share prefixes, and are best answered by one engine; empty is nobody else's.
    """

    input_ids: Sequence[int]
    params: SamplingParams = SamplingParams()
    rid: str = field(default_factory=lambda: uuid.uuid4().hex)
    priority: int = 0
    arrival: float = field(default_factory=time.monotonic)
    lease: bool = False
    source: PageSource | None = None
    route: str = ""


@dataclass(frozen=True)
class Finish:
    """Why an answer ended. `matched` is the stop id or string; `message` says what went wrong; `refused`: the request
    asked for what cannot be had, so the error is no fault of the engine."""

    type: FinishType
    matched: int | str | None = None
    message: str = ""
    refused: bool = False


@dataclass(frozen=True)
class TokenInfo:
    """One id's figures: its log-probability (natural), the likeliest alternatives, the ids that truncation left to draw
    from (None: it took none away, or was not asked for), and the logarithm of the probability that these had together.

    `logprob - kept_logprob` is the id's log-probability in the distribution that was drawn from.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    kept: tuple[int, ...] | None = None
    kept_logprob: float = 0.0


@dataclass(frozen=True)
class Delta:
    """What one step added to answer `index` of request `rid`.

    Args:
        ids: new ids, a stop id included. info: one entry an id where log-probabilities were asked for, else empty.
        prompt_info: with an answer's first delta, where asked for: one entry for each id of the prompt, the first None.
        finish: set on the last delta, and only there.
        trim: how many characters of a matched stop string, and all that follows it, to cut from the text's end.
        prompt_tokens, cached_tokens: of the request; cached ones were read from earlier requests' pages.
        drafted, accepted: drafts of this step. weight_version: the oldest that an id of this answer came from.
        version: of the weights that these ids came from; empty where it is not told apart from `weight_version`.
        routed: where asked for, int32 [tokens, layers, experts of a token] as bytes: of the prompt with the first
            delta, then of each token but the last; zeros in layers without experts.
    """

    rid: str
    index: int
    ids: tuple[int, ...]
    info: tuple[TokenInfo, ...] = ()
    prompt_info: tuple[TokenInfo | None, ...] = ()
    finish: Finish | None = None
    trim: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    weight_version: str = "0"
    version: str = ""
    routed: bytes = b""


def check(request: Request, *, vocab_size: int, context: int) -> None:
    """Refuse what cannot be served, before anything is allocated.

    Args:
        vocab_size: ids lie below it. context: tokens that prompt and answer may hold together.

    Raises:
        UserError: names the field, the value and the mend.
    """
    p, ids = request.params, request.input_ids
    if len(ids) == 0:
        raise UserError("the prompt is empty", "Give at least one token")
    # In three passes at C's speed: a session's prompt is looked at in each of its turns.
    if {*map(type, ids)} != {int} or min(ids) < 0 or max(ids) >= vocab_size:
        bad = next((i for i in ids if not _is_int(i) or not 0 <= i < vocab_size), None)
        if bad is not None:
            raise UserError(f"{bad!r} in the prompt is no token id", f"Ids lie in [0, {vocab_size})")
    if len(ids) >= context:
        raise UserError(f"a prompt of {len(ids)} tokens leaves no room in a context of {context}", "Shorten the prompt")
    numbers = {
        "temperature": (0, 100.0),
        "min_p": (0, 1),
        "frequency_penalty": (-2, 2),
        "presence_penalty": (-2, 2),
    }
    for name, (low, high) in numbers.items():
        value = getattr(p, name)
        if not _is_number(value) or not low <= value <= high:
            raise ConfigError(name, value, f"must be a number in [{low}, {high}]")
    if not _is_number(p.top_p) or not 0 < p.top_p <= 1:
        raise ConfigError("top_p", p.top_p, "must be a number in (0, 1]")
    if not _is_number(p.repetition_penalty) or not 0 < p.repetition_penalty <= 10:
        raise ConfigError("repetition_penalty", p.repetition_penalty, "must be a number in (0, 10]; 1 is none")
    integers: dict[str, tuple[int, int | None, bool]] = {
        "max_new_tokens": (1, None, True),
        "min_new_tokens": (0, None, False),
        "top_k": (-1, None, False),
        "seed": (-(2**63), 2**63 - 1, True),
        "n": (1, 128, False),
        "logprobs": (0, 64, True),
        "prompt_logprobs": (0, 64, True),
        "thinking_budget": (0, None, True),
    }
    for name, (least, most, optional) in integers.items():
        value = getattr(p, name)
        if value is None and optional:
            continue
        if not _is_int(value) or value < least or (most is not None and value > most):
            rule = f"must be an integer of at least {least}"
            raise ConfigError(name, value, rule if most is None else f"{rule}, at most {most}")
    for name in ("stop_token_ids", "logit_bias"):
        for i in getattr(p, name):
            if not _is_int(i) or not 0 <= i < vocab_size:
                raise UserError(f"{name}: {i!r} is no token id", f"Ids lie in [0, {vocab_size})")
    for i, value in p.logit_bias.items():
        if not _is_number(value) or not -1000 <= value <= 1000:
            raise ConfigError(f"logit_bias[{i}]", value, "must be a number in [-1000, 1000]")
    if isinstance(p.stop, str) or any(not isinstance(s, str) or not s for s in p.stop):
        raise ConfigError("stop", p.stop, "must be a tuple of strings of at least one character each")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value
