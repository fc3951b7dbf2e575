"""Questions to a model behind any OpenAI-compatible endpoint: what it said, or why there is nothing, and what it cost.

Every question has an end: a time limit over all of it, so many tries, and then a failure with a name. Nothing here
makes a number of a failure. Replies that are accepted, and the cost of all tries, are kept in a journal: a run that is
resumed asks nothing twice, and its ceilings hold over restarts. The key comes from the environment, and stands in no
file and in no message. Needs httpx (glm5[serve]), no torch. Read next: `judge`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx

from glm5.utils.errors import ConfigError, DataError, UserError
from glm5.utils.files import file_errors

DEFAULT_KEY = "GLM5_JUDGE_KEY"
LARGEST_REPLY = 1 << 22  # bytes
LONGEST_WAIT_S = 60.0  # between two tries
BYTES_PER_TOKEN = 3  # where a server does not count: fewer than most tokenizers have, so that costs are not belittled
AGAIN = {408, 409, 425, 429}  # and all from 500 on: try again
USELESS = {401, 402, 403, 404, 405}  # no question will fare better


@dataclass(frozen=True)
class EndpointConfig:
    """A model behind an endpoint."""

    url: str = ""
    """Base address, up to /v1: http://localhost:8000/v1. Empty: there is none."""
    model: str = ""
    """Its name there."""
    key_env: str = DEFAULT_KEY
    """Name of the environment variable that holds the key; the key itself is written nowhere."""
    temperature: float = 0.7
    """Of its draws: votes of a model that draws nothing are one vote."""
    max_new_tokens: int = 1024
    """Longest reply, its thinking included."""
    extra: str = "{}"
    """JSON object of further fields of a request; null takes one out ('{"max_tokens": null, "max_completion_tokens":
    900}')."""
    timeout_s: float = 60.0
    """Seconds that one try may take from the first to the last byte."""
    retries: int = 2
    """Tries after the first, where it was slow, down, or said what cannot be read."""
    backoff_s: float = 1.0
    """Seconds before the second try; each further one waits twice as long, or as the server asks, a minute at most."""
    concurrency: int = 8
    """Questions at a time."""
    patience: int = 32
    """Stop the run after so many failed questions in a row; 0 never does."""
    max_calls: int = 100_000
    """Ceiling of the tries of a run, restarts included; 0 is none."""
    max_tokens: int = 100_000_000
    """Ceiling of the tokens of a run, prompts included; 0 is none."""

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "concurrency"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "must be at least 1")
        for name in ("retries", "backoff_s", "patience", "max_calls", "max_tokens", "temperature"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(name, getattr(self, name), "must be at least 0")
        if not 0 < self.timeout_s < float("inf"):
            raise ConfigError("timeout_s", self.timeout_s, "must be above 0")
        if self.url:
            rule = "must be http(s)://HOST[:PORT]/PATH; a key goes into the environment"
            try:
                at, _ = urlsplit(self.url), urlsplit(self.url).port
            except ValueError:
                raise ConfigError("url", self.url.partition("?")[0].rpartition("@")[2], rule) from None
            if at.scheme not in ("http", "https") or not at.hostname or at.query or at.username or at.password:
                shown = at._replace(netloc=at.netloc.rpartition("@")[2], query="", fragment="")  # nothing secret
                raise ConfigError("url", shown.geturl(), rule)
            if not self.model:
                raise ConfigError("model", "", "must be the model's name at the endpoint")
        if not isinstance(_json(self.extra), dict):
            raise ConfigError("extra", self.extra, 'must be an object of JSON: {"field": value}')


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


@dataclass(frozen=True)
class Ask:
    """One question.

    Args:
        messages: (role, content). vote: which of several draws of the same question.
        accept: what is kept of a reply's text, a value of JSON; raises ValueError for a reply that cannot be read.
    """

    messages: tuple[tuple[str, str], ...]
    accept: Callable[[str], Any]
    vote: int = 0


@dataclass(frozen=True)
class Failure:
    """Why there is no reply."""

    cause: Literal["timeout", "error"]
    detail: str


class Endpoint:
    """Asks, and keeps accounts.

    Args:
        journal: a JSONL file of replies and costs, read first; None keeps them in memory.

    Attributes:
        calls, tokens: what was spent, as the server counts or, where it does not, a third of the bytes.

    Raises:
        ConfigError: the key's variable is named and not set. DataError: the journal is damaged.
    """

    def __init__(self, config: EndpointConfig, journal: Path | None = None) -> None:
        self.config, self.journal = config, journal
        self._key = os.environ.get(config.key_env, "")
        if not self._key and config.key_env != DEFAULT_KEY:
            raise ConfigError("key_env", config.key_env, "there is no such environment variable, or it is empty")
        # Certificates are read once, and not at all where there is no TLS.
        self._tls = ssl.create_default_context() if config.url.startswith("https:") else False
        self.calls = self.tokens = 0
        self._reserved = 0
        self._failed = 0  # questions in a row
        self._known: dict[str, Any] = {}
        self.beat: Callable[[], None] = lambda: None  # called after each question
        if journal is not None and journal.exists():
            self._read(journal)

    def _read(self, journal: Path) -> None:
        with file_errors(journal, "read"):
            data = journal.read_bytes()
        whole = data.rfind(b"\n") + 1
        for number, line in enumerate(data[:whole].splitlines(), 1):
            try:
                kept = json.loads(line)
                self.calls, self.tokens = self.calls + int(kept["calls"]), self.tokens + int(kept["tokens"])
                if kept["reply"] is not None:
                    self._known[kept["key"]] = kept["reply"]
            except (ValueError, KeyError, TypeError):
                raise DataError(f"{journal}, line {number}, is none of ours: {line[:60]!r}", "Remove it") from None
        if whole != len(data):  # a line that a kill has torn
            with file_errors(journal, "write"):
                os.truncate(journal, whole)

    # ------------------------------------------------------------------ asking
    def ask_all(self, asks: Sequence[Ask]) -> list[Any | Failure]:
        """What was accepted of the replies, in their order; equal questions are asked once.

        Raises:
            ConfigError: a ceiling is reached; what was answered until then is kept.
            UserError: the endpoint refuses every question, or `patience` is at its end.
        """
        keys = [self._digest(ask) for ask in asks]
        missing = {key: ask for key, ask in zip(keys, asks, strict=True) if key not in self._known}
        failures = asyncio.run(self._ask_missing(missing)) if missing else {}
        return [self._known[key] if key in self._known else failures[key] for key in keys]

    def _digest(self, ask: Ask) -> str:
        config = self.config
        about = [config.model, config.temperature, config.max_new_tokens, config.extra, ask.messages, ask.vote]
        return hashlib.sha256(json.dumps(about).encode()).hexdigest()

    async def _ask_missing(self, missing: Mapping[str, Ask]) -> dict[str, Failure]:
        failures: dict[str, Failure] = {}
        self._settled, gate = asyncio.Condition(), asyncio.Semaphore(self.config.concurrency)
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}

        async def one(key: str, ask: Ask) -> None:
            async with gate:
                found = await self._tries(client, key, ask)
            if isinstance(found, Failure):
                failures[key] = found

        try:  # no limit of httpx's: `_try` has one for all of a call
            made = httpx.AsyncClient(headers=headers, timeout=None, verify=self._tls)  # noqa: S113
            async with made as client, asyncio.TaskGroup() as tasks:
                for key, ask in missing.items():
                    tasks.create_task(one(key, ask))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        return failures

    async def _tries(self, client: httpx.AsyncClient, key: str, ask: Ask) -> Any | Failure:
        """Tries until one is accepted; what came of the last."""
        failure, wait = Failure("error", "not asked"), 0.0
        for number in range(self.config.retries + 1):
            if number:
                await asyncio.sleep(min(LONGEST_WAIT_S, max(wait, self.config.backoff_s * 2 ** (number - 1))))
            found = await self._try(client, key, ask)
            if not isinstance(found, _Again):
                self._failed = 0
                return found
            failure, wait = found.failure, found.wait_s
            if not found.worth_it:
                break
        self._failed += 1
        if self.config.patience and self._failed >= self.config.patience:
            what = (
                f"the last {self._failed} questions to {self.config.url} have failed, the last one so: {failure.detail}"
            )
            raise UserError(what, "See what is wrong there; the same command goes on from the last checkpoint")
        return failure

    async def _try(self, client: httpx.AsyncClient, key: str, ask: Ask) -> Any | _Again:
        """One call. Its cost is reserved before, and written down after, whatever became of it."""
        config, body = self.config, self._body(ask)
        sent = json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
        cost = len(sent) // BYTES_PER_TOKEN + config.max_new_tokens
        await self._reserve(cost)
        spent, calls, reply = cost, 1, None  # unless more is known, as after a cancellation
        try:
            async with asyncio.timeout(config.timeout_s):
                status, head, data = await self._post(client, sent)
            if status != 200:
                spent = 0
                return self._refused(status, head, data)
            text, used = _content(data)
            spent = used if used is not None else (len(sent) + len(data)) // BYTES_PER_TOKEN
            reply = ask.accept(text)
            return reply
        except TimeoutError:
            return _Again(Failure("timeout", f"no reply after {config.timeout_s:g} s"))
        except httpx.HTTPError as e:
            if isinstance(e, httpx.ConnectError):
                spent = calls = 0
            return _Again(Failure("error", self._plain(f"{type(e).__name__}: {e}")))
        except ValueError as e:  # also what no reader of JSON expects
            return _Again(Failure("error", self._plain(f"cannot be read: {e}")))
        finally:
            await self._settle(key, reply, cost, spent, calls)

    async def _post(self, client: httpx.AsyncClient, sent: bytes) -> tuple[int, httpx.Headers, bytes]:
        """Status, headers and body. Raises ValueError for a body without end."""
        address, form = f"{self.config.url.rstrip('/')}/chat/completions", {"Content-Type": "application/json"}
        form["Accept-Encoding"] = "identity"  # so that what is counted is what is kept
        data = bytearray()
        async with client.stream("POST", address, content=sent, headers=form) as answer:
            async for piece in answer.aiter_raw():
                data += piece
                if len(data) > LARGEST_REPLY:
                    raise ValueError(f"more than {LARGEST_REPLY:,} bytes")
            return answer.status_code, answer.headers, bytes(data)

    def _body(self, ask: Ask) -> dict[str, Any]:
        config = self.config
        body = {
            "model": config.model,
            "messages": [{"role": role, "content": content} for role, content in ask.messages],
            "temperature": config.temperature,
            "max_tokens": config.max_new_tokens,
            "seed": ask.vote,
            **json.loads(config.extra),
        }
        return {name: value for name, value in body.items() if value is not None}

    def _refused(self, status: int, head: httpx.Headers, data: bytes) -> _Again:
        said = self._plain(data[:300].decode(errors="replace"))
        if status in USELESS:
            mend = f"Check reward.judge: url, model, and the key in the variable {self.config.key_env}"
            raise UserError(f"{self.config.url} answers {status}: {said}", mend)
        try:
            wait = float(head.get("Retry-After", 0))
        except ValueError:  # a date
            wait = 0.0
        again = status in AGAIN or status >= 500
        return _Again(Failure("error", f"status {status}: {said}"), wait if wait > 0 else 0.0, again)

    def _plain(self, text: str) -> str:
        """A text on one line, without the key."""
        text = " ".join(text.split())
        return text.replace(self._key, "***") if self._key else text

    # ------------------------------------------------------------------ accounts
    async def _reserve(self, cost: int) -> None:
        """Put a call's cost aside. Where that would pass a ceiling, wait for the calls under way, which are kept, and
        may turn out cheaper."""
        config = self.config
        async with self._settled:
            while over := self._over(cost):
                if not self._reserved:
                    spent = f"{self.calls:,} calls and {self.tokens:,} tokens are spent"
                    rule = f"{spent}; raise it, and the same command goes on"
                    raise ConfigError(f"reward.judge.{over}", getattr(config, over), rule)
                await self._settled.wait()
            self._reserved += cost
            self.calls += 1

    def _over(self, cost: int) -> str:
        """The ceiling that one more call would pass, or nothing."""
        config = self.config
        if config.max_tokens and self.tokens + self._reserved + cost > config.max_tokens:
            return "max_tokens"
        return "max_calls" if config.max_calls and self.calls >= config.max_calls else ""

    async def _settle(self, key: str, reply: Any, cost: int, spent: int, calls: int) -> None:
        self._reserved -= cost
        self.tokens += spent
        self.calls += calls - 1
        if reply is not None:
            self._known[key] = reply
        if self.journal is not None and (spent or calls):
            line = json.dumps({"key": key, "reply": reply, "tokens": spent, "calls": calls})
            with file_errors(self.journal, "write"), self.journal.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        self.beat()
        async with self._settled:
            self._settled.notify_all()


@dataclass(frozen=True)
class _Again:
    """A try that failed. wait_s: what the server asks for. worth_it: whether another may fare better."""

    failure: Failure
    wait_s: float = 0.0
    worth_it: bool = True


def _content(data: bytes) -> tuple[str, int | None]:
    """The text of a reply and the tokens of the call. Raises ValueError where there is no text."""
    try:
        reply = json.loads(data)
        text = reply["choices"][0]["message"]["content"]
        usage = reply.get("usage") or {}
        used = usage.get("total_tokens")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as e:
        raise ValueError(f"no chat completion ({type(e).__name__})") from None
    if not isinstance(text, str):
        raise ValueError("a chat completion without content")
    return text, used if isinstance(used, int) and not isinstance(used, bool) and used >= 0 else None
