"""Recorded decode steps of an engine over several ranks: each rank replays its own recording, its sums included.

The leader says once which sequences and ids a step has; every rank fills its own buffers, and replays its part of the
step, in which the sums between ranks and the gathering of logits were recorded, too (NCCL's calls can be; gloo's run
plainly, in the tests). So a step is one message and one launch a rank. All ranks take the same shape from the same
message, and record it at the same time; where one of them could not, all run plainly from then on. Where experts are
spread (`ep`) that goes for all leaders: they agree on one shape (`lockstep`), experts exchange as many tokens of each
rank as it has, and an idle leader's ranks replay it for nobody. Read first: `graphs`, `ranks`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from glm5.model.glm5 import GLM5
from glm5.model.paged import PagedBatch, Run
from glm5.serve.graphs import MOST_QUERIES, Graphs, Outputs, recorder_for
from glm5.serve.lockstep import Kind, Size

if TYPE_CHECKING:
    from glm5.serve.ranks import Leader, Member

FORMS = 2 * MOST_QUERIES + 2  # bits for those that are ever used


class _Part:
    """A rank's part of the model as `Graphs` records it: here, and not on all ranks as the leader's model does."""

    def __init__(self, member: Member) -> None:
        self._member, self.device = member, member.model.device

    def hidden(self, ids_1N: Tensor, *, cache: PagedBatch) -> Tensor:
        with self._member.share.with_room(ids_1N.shape[1]):
            return GLM5.hidden(self._member.model, ids_1N, cache=cache)

    def draft_hidden(self, read_1ND: Tensor, ids_1N: Tensor, cache: PagedBatch) -> Tensor:
        with self._member.share.with_room(ids_1N.shape[1]):
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
    """A rank's own recordings, each of another form: twice the rows of a sequence, and 1 more of the MTP block's."""

    def __init__(self) -> None:
        self._made: dict[int, Graphs] = {}
        self._changes = 0

    def add(self, form: int, member: Member, limits: Mapping[str, Any]) -> None:
        """Begin to record. limits: as `Graphs` takes them."""
        record = recorder_for(member.model.device)
        if record is None or member.cache is None:
            raise AssertionError("the leader records where there is a GPU, and makes pages first")
        part: Any = _Part(member)
        self._made[form] = Graphs(part, member.cache, record=record, agree=member.all_recorded, **limits)
        self._changes += 1

    def __getitem__(self, form: int) -> Graphs:
        return self._made[form]

    @property
    def state(self) -> int:
        """Which there are, as `Lockstep` compares them."""
        return sum(1 << form for form in self._made if form < FORMS) + (self._changes << FORMS)

    def renew(self) -> None:
        """Give the memory of all steps back; they are recorded again when they are needed."""
        for graphs in self._made.values():
            graphs.forget()

    def forget(self, form: int | None = None) -> None:
        """Record one form no more, or none at all, and give the memory back."""
        for one in list(self._made) if form is None else [form]:
            self._made.pop(one).forget()
        self._changes += 1


class LedGraphs(Graphs):
    """The recordings of all ranks of a leader's group, as `Graphs` of one."""

    def __init__(self, leader: Leader, *, draft: bool = False, **limits: Any) -> None:
        self._leader, self._kind_of_call = leader, Kind.DRAFT if draft else Kind.TRUNK
        self._form = 2 * limits["queries"] + draft
        leader.do("record", self._form, dict(limits, draft=draft))

    def __call__(
        self, runs: Sequence[Run], ids: Sequence[Sequence[int]], hidden: Sequence[Tensor] = ()
    ) -> Outputs | None:
        shape = self._own.shape(runs)
        if shape is None:
            return None
        sent = torch.cat(list(hidden)) if hidden else None
        said = tuple(runs), [list(of_one) for of_one in ids], sent is not None
        size = Size(self._form, *shape)
        out: Outputs | None = self._leader.step(self._kind_of_call, size, "recorded", *said, sent=sent)
        return out

    def warm(self) -> None:
        self._leader.do("warm", self._form, kind=self._leader.widest)

    def forget(self) -> None:
        self._leader.do("forget_recorded", self._form)

    @property
    def _own(self) -> Graphs:
        return self._leader.member.recordings[self._form]

    @property
    def replayed(self) -> int:  # type: ignore[override]
        return self._own.replayed
