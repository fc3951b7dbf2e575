"""Weights to engines behind HTTP over a process group, for those that do not see the run's directory.

    learner (rank 0)                                 engine n (rank n)
    meet: POST /init_weights_update_group      ->    joins; a group lasts as long as its engines do
    send: broadcast, tensor by tensor          ->    receives, while its steps go on
          (and POST /update_weights_from_distributed, by `engines`, says what comes and under which version)

All of it is SGLang's interface. A group in which anybody was lost is given up, and the next push makes another one; who
has missed a push gets it in a group of its own. Waiting is bounded by `JOIN_TIMEOUT` of `glm5.serve.weights`. Source:
the report, section 3.6. Read next: `engines`, `glm5.serve.weights`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import Mapping, Sequence
from typing import Literal

from torch import Tensor

from glm5.serve.client import Unavailable, WeightGroup, WeightUpdate
from glm5.serve.gateway.remote import HttpEngine
from glm5.serve.weights import Joined
from glm5.utils.errors import UserError

log = logging.getLogger(__name__)

Kind = Literal["gloo", "nccl"]


class Spread:
    """The learner's end. One call at a time.

    Args:
        host: under which engines reach this machine. kind: of the group; nccl sends from this process's GPU.
    """

    def __init__(self, host: str, kind: Kind) -> None:
        self.host, self.kind = host, kind
        self._group: Joined | None = None
        self._name = ""
        self._members: list[HttpEngine] = []
        self._where: list[str] = []  # their addresses: one that has moved is another process
        self._tensors: Mapping[str, Tensor] = {}

    def update(self, tensors: Mapping[str, Tensor], version: str) -> WeightUpdate:
        """What engines are told of these tensors, which are kept until there are others. `meet` names the group."""
        self._tensors = tensors
        return WeightUpdate(
            "distributed",
            names=tuple(tensors),
            dtypes=tuple(str(t.dtype).removeprefix("torch.") for t in tensors.values()),
            shapes=tuple(tuple(t.shape) for t in tensors.values()),
            weight_version=version,
        )

    async def meet(self, engines: Sequence[HttpEngine]) -> str:
        """The name of a group of exactly these engines, made unless it is there.

        Raises:
            Unavailable: they did not all come.
        """
        where = [engine.url for engine in engines]
        if self._group is not None and where == self._where:
            return self._name
        await self.leave()
        self._name = f"weights-{secrets.token_hex(4)}"
        with socket.create_server((self.host, 0)) as free:
            port = free.getsockname()[1]

        def of(rank: int) -> WeightGroup:
            return WeightGroup(self.host, port, rank, len(engines) + 1, self._name, self.kind)

        self._members, self._where = list(engines), where
        joining = [engine.join_group(of(rank)) for rank, engine in enumerate(engines, 1)]
        own, *others = await asyncio.gather(asyncio.to_thread(Joined, of(0)), *joining, return_exceptions=True)
        self._group = own if isinstance(own, Joined) else None
        if errors := [one for one in (own, *others) if isinstance(one, BaseException)]:
            await self.leave()
            raise Unavailable(f"no group of {', '.join(where)}: {errors[0]}")
        return self._name

    async def send(self) -> None:
        """Send the tensors. A group that breaks is given up: engines that lack something say so themselves."""
        try:
            return await asyncio.to_thread(self._send)
        except (RuntimeError, UserError) as error:
            log.warning("the group %s broke: %s", self._name, str(error).partition("\n")[0])
        # Not before: what was raised has hold of the group, whose end is what the others wait for.
        await self.leave()

    def _send(self) -> None:
        if self._group is None:
            raise UserError("there is no group", "Let engines join one")
        for tensor in self._tensors.values():
            self._group.broadcast(tensor.cuda() if self.kind == "nccl" else tensor)

    async def leave(self) -> None:
        """Give the group up, at both ends."""
        group, members, self._group, self._members, self._where = self._group, self._members, None, [], []
        leaving = [engine.leave_group(self._name) for engine in members]
        own = [asyncio.to_thread(group.leave)] if group is not None else []
        await asyncio.gather(*own, *leaving, return_exceptions=True)
