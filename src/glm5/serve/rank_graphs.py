"""Recorded decode steps of an engine over several ranks: each rank replays its own recording, its sums included.

The leader says once which sequences and ids a step has; every rank fills its own buffers, and replays its part of the
step, in which the sums between ranks and the gathering of logits were recorded, too (NCCL's calls can be; gloo's run
plainly, in the tests). So a step is one message and one launch a rank. All ranks take the same shape from the same
message, and record it at the same time. Where experts are spread (`ep`) a call's exchanges have the sizes of its
tokens, which the host has to know: nothing is recorded there. Read first: `graphs`, `ranks`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from glm5.model.glm5 import GLM5
from glm5.model.paged import PagedBatch, Run
from glm5.serve.graphs import Graphs, Outputs, recorder_for

if TYPE_CHECKING:
    from glm5.serve.ranks import Leader, Member


class _Part:
    """A rank's part of the model as `Graphs` records it: here, and not on all ranks as the leader's model does."""

    def __init__(self, member: Member) -> None:
        self._member, self.device = member, member.model.device

    def hidden(self, ids_1N: Tensor, *, cache: PagedBatch) -> Tensor:
        return GLM5.hidden(self._member.model, ids_1N, cache=cache)

    def draft_hidden(self, read_1ND: Tensor, ids_1N: Tensor, cache: PagedBatch) -> Tensor:
        return GLM5.draft_hidden(self._member.model, read_1ND, ids_1N, cache)

    def lm_head(self, hidden_ND: Tensor) -> Tensor:
        """Logits [N, V], on every rank: a recording has no place for what differs between them."""
        part, group = self._member.share.head(self._member.model, hidden_ND), self._member.tensor
        if group.size() == 1:
            return part
        parts = part.new_empty(group.size(), *part.shape)
        dist.all_gather(list(parts.unbind()), part.contiguous(), group=group)
        return parts.transpose(0, 1).flatten(1)


class Recordings:
    """A rank's own recordings, by number: what is called in the same order on all ranks."""

    def __init__(self) -> None:
        self._made: list[Graphs] = []

    def add(self, member: Member, limits: Mapping[str, Any]) -> int:
        """One more; its number. limits: as `Graphs` takes them."""
        record = recorder_for(member.model.device)
        if record is None or member.cache is None:
            raise AssertionError("the leader records where there is a GPU, and makes pages first")
        part: Any = _Part(member)
        self._made.append(Graphs(part, member.cache, record=record, alone=False, **limits))
        return len(self._made) - 1

    def __getitem__(self, number: int) -> Graphs:
        return self._made[number]

    def forget(self, number: int) -> None:
        """Give the memory of one back."""
        self._made[number].forget()


class LedGraphs(Graphs):
    """The recordings of all ranks of a leader's group, as `Graphs` of one."""

    def __init__(self, leader: Leader, **limits: Any) -> None:
        self._leader, self._number = leader, leader.do("record", limits)

    def __call__(
        self, runs: Sequence[Run], ids: Sequence[Sequence[int]], hidden: Sequence[Tensor] = ()
    ) -> Outputs | None:
        sent = torch.cat(list(hidden)) if hidden else None
        said = tuple(runs), [list(of_one) for of_one in ids]
        out: Outputs | None = self._leader.do("recorded", self._number, *said, sent is not None, sent=sent)
        return out

    def warm(self) -> None:
        self._leader.do("warm", self._number)

    def forget(self) -> None:
        self._leader.do("forget_recorded", self._number)

    @property
    def replayed(self) -> int:  # type: ignore[override]
        return self._leader.member.recordings[self._number].replayed
