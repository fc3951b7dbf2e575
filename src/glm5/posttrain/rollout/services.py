"""The task services that are there: registered, heard again and again, asked for rollouts. Read next: `sample`.

A service that was silent for `silent_s`, or whose connection broke, is away until it is heard again: nothing new is
asked of it, and what is open of it waits. One whose process began anew says so by its `boot`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import httpx

from glm5.agents.protocol import Offer, Result, Rollout, bearer
from glm5.utils.errors import DataError
from glm5.utils.outcome import Outcome

FULL_S = 1.0  # until a service that said 503 is asked again


class Gone(Exception):
    """A service has been away for too long. `left`: it said that it leaves."""

    def __init__(self, left: bool) -> None:
        self.left = left
        super().__init__("the service has left" if left else "the service is away")


class Broken(Exception):
    """A rollout was under way in a process that is gone."""


@dataclass
class Service:
    """What is known of one.

    Attributes:
        http: to ask it. heard: when, last. there: it may be asked. left: it said that it leaves.
        news: set whenever it is heard.
    """

    offer: Offer
    http: httpx.AsyncClient
    heard: float
    there: bool = True
    left: bool = False
    news: asyncio.Event = field(default_factory=asyncio.Event)


class Services:
    """See the module.

    Args:
        http: for services behind HTTP. clock: monotonic seconds. key: that they ask for.
        silent_s: a service that was not heard for so long is away. patience_s: how long its rollouts wait for it.
    """

    def __init__(
        self, http: httpx.AsyncClient, clock: Callable[[], float], *, silent_s: float, patience_s: float,
        key: str | None = None,
    ) -> None:  # fmt: skip
        self._http, self._clock, self.silent_s, self.patience_s = http, clock, silent_s, patience_s
        self._headers = bearer(key)
        self.known: dict[str, Service] = {}
        self._begun: float | None = None
        self._inside: set[str] = set()

    def add(self, offer: Offer, http: httpx.AsyncClient | None = None) -> None:
        """A service is there, or is heard again.

        Args:
            http: of a service in this process, which is always heard.
        """
        if http is not None:
            self._inside.add(offer.name)
        service = self.known.get(offer.name)
        if service is None:
            service = self.known[offer.name] = Service(offer, http or self._http, self._clock())
        service.offer, service.heard, service.there, service.left = offer, self._clock(), True, False
        service.news.set()
        service.news = asyncio.Event()

    def leave(self, name: str) -> None:
        """A service leaves; it may come back."""
        if name in self.known:
            self.known[name].there, self.known[name].left = False, True

    def lost(self, name: str) -> None:
        """Its connection broke: leave it out until it is heard again."""
        if name not in self._inside:
            self.known[name].there = False

    def there(self, name: str) -> bool:
        """Whether it may be asked."""
        service = self.known.get(name)
        if service is None or not service.there:
            return False
        return name in self._inside or self._clock() - service.heard <= self.silent_s

    def gone(self, name: str) -> Gone | None:
        """What is to be said of a service that nobody need wait for any longer."""
        service = self.known.get(name)
        if self._begun is None:
            self._begun = self._clock()
        heard = self._begun if service is None else service.heard
        if self.there(name) or self._clock() - heard <= self.patience_s:
            return None
        return Gone(service is not None and service.left)

    async def reach(self, name: str) -> Offer:
        """The offer of a service, as soon as it is there.

        Raises:
            Gone: it has been away for `patience_s`.
        """
        while not self.there(name):
            service = self.known[name]
            if (gone := self.gone(name)) is not None:
                raise gone
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.01, service.heard + self.patience_s - self._clock())):
                    await service.news.wait()
        return self.known[name].offer

    async def ask(self, asked: Rollout) -> Result:
        """The result of a rollout, as its service tells it; what it says that is no result is `env_crash`.

        Raises:
            Gone: as in `reach`. Broken: its process is gone.
        """
        boot: str | None = None  # of the process that has the rollout
        while True:
            offer = await self.reach(asked.task)
            if boot is not None and (boot != offer.boot or not offer.joins):
                raise Broken(f"the service of {asked.task} began anew, or does not join")
            try:
                url = f"{offer.url}/rollouts"
                answer = await self.known[asked.task].http.post(
                    url, json=asked.to_json(), headers=self._headers, timeout=httpx.Timeout(None)
                )
            except (httpx.ConnectError, httpx.ConnectTimeout):
                self.lost(asked.task)  # nothing was begun
                continue
            except httpx.HTTPError:
                boot = offer.boot
                self.lost(asked.task)
                continue
            if answer.status_code == 503:
                await asyncio.sleep(FULL_S)
                continue
            if answer.status_code == 410:
                raise Broken(f"the service of {asked.task} ended the rollout")
            if answer.status_code != 200:
                return Result(Outcome.ENV_CRASH, detail=f"the service said {answer.status_code}: {answer.text[:300]}")
            try:
                return Result.from_json(answer.json())
            except (DataError, ValueError) as error:
                return Result(Outcome.ENV_CRASH, detail=f"the service's answer is no result: {error}")

    async def rollouts(self, offer: Offer, http: httpx.AsyncClient | None = None) -> list[Rollout]:
        """Those that a service has, running or ended; none if it does not join.

        Raises:
            httpx.HTTPError: it does not answer.
        """
        if not offer.joins:
            return []
        answer = await (http or self._http).get(f"{offer.url}/rollouts", headers=self._headers, timeout=self.silent_s)
        return [Rollout.from_json(one) for one in answer.raise_for_status().json()["rollouts"]]

    async def end(self, name: str, session: str) -> None:
        """End a rollout, or let its result be forgotten, if its service is there."""
        service = self.known[name]
        if service.offer.joins and self.there(name):
            with suppress(httpx.HTTPError):
                await service.http.delete(f"{service.offer.url}/rollouts/{session}", headers=self._headers, timeout=60)
