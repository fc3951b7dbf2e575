"""The gateway as the orchestrator uses it: begin a session, fetch what it kept, end it. Read next: `sample`."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Any

import httpx

from glm5.agents.protocol import bearer
from glm5.utils.errors import UserError

log = logging.getLogger(__name__)

PAUSE_S = 0.25  # before a gateway that did not answer is asked again; grows to PAUSES times as much
PAUSES = 16


class SessionLost(Exception):
    """The gateway does not have what this session drew: it began anew, or somebody ended the session."""


class Sessions:
    """See the module. Waits for a gateway that does not answer: it may come back.

    Args:
        url: of the gateway. http: to ask it. sampling: what counts in each session, whatever an agent asks for.
    """

    def __init__(
        self, url: str, http: httpx.AsyncClient, *, sampling: dict[str, Any] | None = None, api_key: str | None = None
    ) -> None:
        self.url, self._http, self._sampling, self.api_key = url.rstrip("/"), http, sampling or {}, api_key
        self._headers = bearer(api_key)

    def base_url(self, name: str) -> str:
        """Where an agent attaches."""
        return f"{self.url}/sessions/{name}/v1"

    async def begin(self, name: str) -> float:
        """A new session. Returns when it began, by the gateway's clock: this tells it from another one of its name."""
        body = {"id": name, **({"sampling": self._sampling} if self._sampling else {})}
        while True:
            answer = await self._asked("POST", "/sessions", body)
            if answer.status_code == 200:
                return float(answer.json()["started"])
            # Its answer to the same request was lost on the way. Nobody has used it: only we know the name.
            if "session_exists" not in answer.text:
                raise UserError(f"the gateway refuses a session: {answer.text[:300]}", "Mend the sampling")
            return float((await self._asked("GET", f"/sessions/{name}")).json()["started"])

    async def show(self, name: str, begun: float) -> dict[str, Any]:
        """All that a session has kept.

        Raises:
            SessionLost: it is not there, or another one has its name.
        """
        answer = await self._asked("GET", f"/sessions/{name}")
        if answer.status_code == 404:
            raise SessionLost(f"the gateway has no session {name}")
        found: dict[str, Any] = answer.raise_for_status().json()
        if found["started"] != begun:
            raise SessionLost(f"the gateway began anew: session {name} is not the one that it was")
        return found

    async def end(self, name: str) -> None:
        """Forget a session, if the gateway is there."""
        with suppress(httpx.HTTPError):
            await self._http.delete(f"{self.url}/sessions/{name}", headers=self._headers, timeout=60)

    async def names(self) -> list[str]:
        """All sessions that it has."""
        found: list[str] = (await self._asked("GET", "/sessions")).raise_for_status().json()["sessions"]
        return found

    async def version(self) -> int | None:
        """The number of the weights that engines have; None if the gateway does not answer, or they have none."""
        try:
            answer = await self._http.get(f"{self.url}/health", headers=self._headers, timeout=10)
            told = str(answer.raise_for_status().json()["weight_version"])
        except (httpx.HTTPError, KeyError, ValueError):
            return None
        return int(told) if told.isdecimal() else None

    async def _asked(self, method: str, path: str, body: Any = None) -> httpx.Response:
        """The answer, however long the gateway is away or busy."""
        pauses = 1
        while True:
            try:
                answer = await self._http.request(method, self.url + path, json=body, headers=self._headers, timeout=60)
                if answer.status_code < 500:
                    return answer
                reason = f"status {answer.status_code}: {answer.text[:200]}"
            except httpx.HTTPError as error:
                reason = f"{type(error).__name__}: {error}"
            if pauses == PAUSES // 2:
                log.warning("the gateway does not answer %s %s, and is asked again: %s", method, path, reason)
            await asyncio.sleep(PAUSE_S * pauses)
            pauses = min(2 * pauses, PAUSES)
