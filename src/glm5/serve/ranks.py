"""One engine over several ranks: one decides, schedules and samples; the others run the same calls on their parts.

    leader     Engine -> model.hidden, draft_hidden, lm_head; cache.copy; weights     each: a message, then the call
    followers  message -> the same call on their heads, widths and experts, with pages of their own

The ranks of a `tp` group are one leader and its followers. All communication of a leader is made by one thread, in one
order (`lockstep`); where experts are spread over ranks (`ep`), that thread also keeps step with the other leaders. With
`cp`, several such groups are one engine: a leader, and followers that run shares of its long calls (`split`). What
a message has to say goes over gloo on CPUs, pickled between our own processes; rows of ids, hidden states and logits go
between the devices. MLA's latent rows are read by all heads, so the pages of a `tp` group are copies of each other;
data parallel (`dp`) engines have requests and pages of their own.

A follower that dies ends its leader's next call with `RankLost`, a leader that dies its followers' wait: at once where
the connection breaks, otherwise within `QUIET_SECONDS`. Read first: `glm5.parallel.inference`; then `lockstep`.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from glm5.model.config import ModelConfig
from glm5.model.glm5 import GLM5
from glm5.model.layers import Linear
from glm5.model.paged import PagedBatch, PagedCache, Run
from glm5.model.trace import Trace
from glm5.model.weights import assign_tensors, load_model, public_tensors
from glm5.parallel.inference import Share
from glm5.parallel.mesh import World
from glm5.serve import invariant
from glm5.serve.client import WeightUpdate
from glm5.serve.graphs import Graphs, Outputs
from glm5.serve.lockstep import Kind, Lockstep, Size
from glm5.serve.rank_graphs import LedGraphs, Recordings
from glm5.serve.split import SplitBatch
from glm5.serve.transfer import PageBytes
from glm5.serve.weights import WeightSource, no_memory
from glm5.utils.errors import CheckpointError, UserError

# Without a word from its leader, after which a follower gives up; it hears one every `lockstep.TICK_SECONDS`.
QUIET_SECONDS = 120.0
# How much longer one rank may read weights from disk than another.
LOAD_SECONDS = 3600.0
# How much longer one rank may record a step, kernels compiled for it included, than another.
RECORD_SECONDS = 300.0
HEAD_BYTES = 4096
# Rows of a call for each rank of a `cp` group, from which they share it out.
SPLIT_FROM = 64


class Member:
    """One rank's part of an engine: its part of the model, its pages, and every call that runs on all of a `tp` group.

    Every rank makes one, at the same time. A call has the same arguments on all ranks, but for `sent`: tensors that
    only the leader has, and which it sends.

    Args:
        model: as `load` gives it. share: of the same world; if its sums are ordered, calls of the trunk and of the head
            keep to the operators of the invariant mode.
    """

    def __init__(self, model: GLM5, share: Share) -> None:
        self.model, self.share, world = model, share, share.world
        self.tensor, self.context = world.group("tp"), world.group("cp")
        self.heads_logits = world.place("cp") == 0  # its `tp` group brings the leader's logits together
        self.leads = self.heads_logits and world.place("tp") == 0
        mesh, wait = world.mesh, timedelta(seconds=QUIET_SECONDS)
        engines = torch.arange(world.size).view(-1, mesh.cp * mesh.tp)
        grid = torch.arange(world.size).view(-1, mesh.ep, mesh.tp)  # copies of the experts, ep, tp
        self.control = _own_group(engines, world, wait)
        self.leaders = _own_group(grid.transpose(1, 2).flatten(0, 1), world, wait)
        parts = grid.flatten(1) if mesh.cp == 1 else engines  # `check` lets nobody have experts spread over cp
        self.peers = _own_group(parts, world, timedelta(seconds=LOAD_SECONDS))
        self.recording = _own_group(parts, world, timedelta(seconds=RECORD_SECONDS))
        self.everyone = self.tensor if mesh.cp == 1 else _own_group(engines, world, None)
        self.cache: PagedCache | None = None
        self.recordings = Recordings()
        self._store = WeightSource(model)
        if model.device.type == "cuda":
            model.lay_out()

    def follow(self) -> None:
        """Obey the leader until it says that it is over.

        Raises:
            RuntimeError: the leader, or another rank, is gone.
        """
        while True:
            name, args = self.hear()
            if name == "end":
                self.recordings.forget()
                return
            with suppress(UserError):  # all ranks have agreed on it, and the leader raises it, too
                getattr(self, name)(*args)

    def hear(self) -> tuple[str, tuple[Any, ...]]:
        """What the leader says next."""
        head = torch.empty(HEAD_BYTES, dtype=torch.uint8)
        dist.broadcast(head, src=_first(self.control), group=self.control)
        length = int(head[:8].view(torch.int64))
        said = head[8 : 8 + length]
        if length > len(said):
            rest = torch.empty(length - len(said), dtype=torch.uint8)
            dist.broadcast(rest, src=_first(self.control), group=self.control)
            said = torch.cat((said, rest))
        name, args = pickle.loads(said.numpy().tobytes())  # noqa: S301  of a process that we started
        return name, args

    def tell(self, name: str, *args: Any) -> None:
        """As the leader: name the call that follows. Most are short enough for one message."""
        if self.control.size() == 1:
            return
        said = torch.frombuffer(bytearray(pickle.dumps((name, args))), dtype=torch.uint8)
        head = torch.zeros(HEAD_BYTES, dtype=torch.uint8)
        head[:8].view(torch.int64).fill_(len(said))
        first, rest = said.split([n := min(len(said), HEAD_BYTES - 8), len(said) - n])
        head[8 : 8 + n] = first
        dist.broadcast(head, src=_first(self.control), group=self.control)
        if len(rest):
            dist.broadcast(rest.contiguous(), src=_first(self.control), group=self.control)

    # ------------------------------------------------------------------ calls
    def tick(self) -> None:
        """The leader is there, and has nothing to do."""

    def pages(self, count: int, host: int, options: Mapping[str, Any]) -> None:
        """Make pages. What was recorded with others is forgotten."""
        self.recordings.forget()
        self.cache = PagedCache(self.model.config, count, host, device=self.model.device, **options)

    def copy(self, kind: str, source: int, target: int) -> None:
        """See `PagedCache.copy`."""
        PagedCache.copy(self._cache, kind, source, target)

    def release_pages(self) -> None:
        """See `PagedCache.release`."""
        PagedCache.release(self._cache)

    def resume_pages(self) -> None:
        """See `PagedCache.resume`: on all ranks of the engine, or on none."""
        self._take(lambda: PagedCache.resume(self._cache), lambda: PagedCache.release(self._cache), self.control)

    def fill(self, page: int, sent: Tensor | None = None) -> None:
        """Write a page that came from another worker, uint8; the leader sends it."""
        pages = PageBytes(self._cache)
        given = None if sent is None else sent.to(self.model.device)
        pages.write(page, self._sent(given, (pages.size,), torch.uint8))

    def record(self, form: int, limits: Mapping[str, Any]) -> None:
        """Begin to record steps of one form."""
        self.recordings.add(form, self, limits)

    def renew(self) -> None:
        """Record all steps again: another leader's ranks have to."""
        self.recordings.renew()

    @torch.inference_mode()
    def warm(self, form: int) -> None:
        """See `Graphs.warm`."""
        self.recordings[form].warm()

    @torch.inference_mode()
    def recorded(
        self,
        size: Size,
        runs: Sequence[Run],
        ids: Sequence[Sequence[int]],
        reads: bool = False,
        sent: Tensor | None = None,
    ) -> Outputs | None:
        """A step from this rank's recording; None if it has to be run plainly, on all ranks. reads: the hidden states
        of all rows, too, which the leader sends."""
        hidden: Sequence[Tensor] = ()
        if reads:
            counts = [run.count for run in runs]
            shape = sum(counts), self.model.config.hidden_size
            hidden = self._sent(sent, shape, self.model.dtype).split(counts)
        return self.recordings[size.form].run((size.rows, size.pages), runs, ids, hidden)

    def all_recorded(self, made: bool) -> bool:
        """Whether all ranks that record the same step have, of which this is one.

        Raises:
            RuntimeError: another one is gone, or waits in the middle of its step for what this one did not send.
        """
        agreed = torch.tensor(int(made))
        dist.all_reduce(agreed, dist.ReduceOp.MIN, group=self.recording)
        return bool(agreed)

    def forget_recorded(self, form: int) -> None:
        """Give the memory of recordings back."""
        self.recordings.forget(form)
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def hidden(
        self,
        size: Size,
        runs: Sequence[Run],
        traced: bool = False,
        sent: Tensor | None = None,
        batch: PagedBatch | None = None,
        trace: Trace | None = None,
    ) -> Tensor:
        """`GLM5.hidden` of ids in pages; the leader has made the batch already. traced: it wants to see all rows."""
        batch = batch or PagedBatch(self._cache, runs, by_row=self.share.ordered)
        ids = self._sent(sent, (1, len(batch.row_N)), torch.int64)
        ranks = self.context.size()
        if ranks == 1 or len(batch.row_N) < SPLIT_FROM * ranks or traced:
            with self._operators(), self._room(size):
                return GLM5.hidden(self.model, ids, cache=batch, trace=trace)
        piece = SplitBatch(batch, self.context)
        hidden = piece.gather(GLM5.hidden(self.model, piece.share(ids), cache=piece))
        batch.keep_hidden(hidden)
        return hidden

    @torch.inference_mode()
    def draft(
        self,
        size: Size,
        runs: Sequence[Run],
        sent: tuple[Tensor, Tensor] | None = None,
        batch: PagedBatch | None = None,
    ) -> Tensor:
        """`GLM5.draft_hidden` in pages."""
        batch = batch or PagedBatch(self._cache, runs, first=1)
        rows, width = len(batch.row_N), self.model.config.hidden_size
        hidden, ids = sent or (None, None)
        read = self._sent(hidden, (1, rows, width), self.model.dtype)
        return GLM5.draft_hidden(self.model, read, self._sent(ids, (1, rows), torch.int64), batch)

    @torch.inference_mode()
    def head(self, rows: int, sent: Tensor | None = None) -> Tensor | None:
        """Logits of rows, [N, V], on the leader."""
        read = self._sent(sent, (rows, self.model.config.hidden_size), self.model.dtype)
        if not self.heads_logits:
            return None
        with self._operators():
            part = self.share.head(self.model, read)
        if self.tensor.size() == 1:
            return part
        parts = [torch.empty_like(part) for _ in range(self.tensor.size())] if self.leads else None
        dist.gather(part, parts, dst=_first(self.tensor), group=self.tensor)
        return torch.cat(parts, -1) if parts is not None else None

    @torch.inference_mode()
    def empty(self, size: Size, draft: bool) -> None:
        """Take part in the exchanges of a call that another leader makes."""
        if size.form:
            self.recordings[size.form].run((size.rows, size.pages), (), ())
            return
        with nullcontext() if draft else self._operators(), nullcontext() if draft else self._room(size):
            self.share.run_empty(self.model, draft=draft)

    def load(self, path: str) -> None:
        """Read other weights from disk: all ranks, or none.

        Raises:
            UserError: one of them could not.
        """
        problem: UserError | None = None
        try:
            new = load_model(Path(path), device=self.model.device, dtype=self.model.dtype, share=self.share)
            if new.config.replace(dtype=self.model.config.dtype) != self.model.config:
                what = f"{path}: another model's configuration"
                raise CheckpointError(what, "Give weights of the served model")
        except UserError as error:
            problem = error
        self.agree(problem)
        self.model.load_state_dict(new.state_dict())
        self.model.forget_joined()

    def assign(
        self, named: Sequence[tuple[str, torch.dtype, tuple[int, ...]]], sent: Mapping[str, Tensor] | None = None
    ) -> None:
        """Take each rank's part of whole tensors, which the leader has checked."""
        parts = {}
        for name, dtype, shape in named:
            given = sent[name].to(self.model.device) if sent is not None else None
            part = self.share.read(name, self._sent(given, shape, dtype))
            if part is not None:
                parts[part[0]] = part[1].clone()
        assign_tensors(self.model, parts)
        self.model.forget_joined()

    def agree(self, problem: UserError | None, group: dist.ProcessGroup | None = None) -> None:
        """Raise the first problem of all ranks of a group, or of all that hold parts of one model, on each of them."""
        group = group or self.peers
        found: list[Any] = [None] * group.size()
        told = None if problem is None else (problem.what, problem.mend)
        dist.all_gather_object(found, told, group=group)
        for one in found:
            if one is not None:
                raise UserError(*one)

    def _take(self, take: Callable[[], None], give_back: Callable[[], None], group: dist.ProcessGroup) -> None:
        """Take memory on all ranks of a group, or on none."""
        problem: UserError | None = None
        try:
            take()
        except RuntimeError as error:
            problem = no_memory(error)
            if problem is None:
                raise
        try:
            self.agree(problem, group)
        except UserError:
            give_back()
            raise

    def release_weights(self) -> None:
        """See `WeightSource.release`."""
        self._store.release()

    def resume_weights(self) -> None:
        """See `WeightSource.resume`: on all ranks that hold parts of one model, or on none."""

        def take() -> None:
            self._store.resume()
            if self.model.device.type == "cuda":
                self.model.lay_out()

        self._take(take, self._store.release, self.peers)

    @torch.no_grad()
    def whole(self, name: str) -> Tensor:
        """A tensor of the model, whole again."""
        return self.share.whole(name, self.model.state_dict()[name])

    # ------------------------------------------------------------------ helpers
    def _operators(self) -> AbstractContextManager[None]:
        return invariant.operators(self.model) if self.share.ordered else nullcontext()

    def _room(self, size: Size) -> AbstractContextManager[None]:
        """Ordered sums of experts are those of exchanges with room for as many tokens of everybody."""
        return self.share.with_room(size.rows if self.share.ordered else None)

    @property
    def _cache(self) -> PagedCache:
        assert self.cache is not None, "the engine makes pages first"
        return self.cache

    def _sent(self, given: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The leader's tensor, on every rank of the engine."""
        if self.everyone.size() == 1:
            assert given is not None
            return given
        if given is None:
            given = torch.empty(shape, dtype=dtype, device=self.model.device)
        given = given.contiguous()
        dist.broadcast(given, src=_first(self.everyone), group=self.everyone)
        return given


def _first(group: dist.ProcessGroup) -> int:
    return dist.get_process_group_ranks(group)[0]


def _own_group(groups: Tensor, world: World, wait: timedelta | None) -> dist.ProcessGroup:
    """Of groups, which all ranks make, this rank's: on CPUs, or, without a time to wait, as the world's."""
    options: dict[str, Any] = {} if wait is None else dict(timeout=wait, backend="gloo")
    made = [(ranks, dist.new_group(ranks, **options)) for ranks in groups.tolist()]
    return next(group for ranks, group in made if world.rank in ranks)


class Leader:
    """The rank of a `tp` group whose engine decides: `glm5.serve.engine.Ranks`. Its model, given to an engine, runs on
    all ranks of the group.

    Args:
        member: of this rank.
        lost: called, in another thread, when ranks are lost, with what happened.
    """

    def __init__(self, member: Member, lost: Callable[[str], None] | None = None) -> None:
        self.member, share = member, member.share
        self._steps = Lockstep(
            leaders=member.leaders if share.ep > 1 else None,
            tick=lambda: member.tell("tick"),
            empty=lambda draft, size: self._all("empty", size, draft),
            recorded=lambda: member.recordings.state,
            renew=lambda: self._all("renew"),
            lost=lost,
            device=member.model.device,
        )
        self.model = member.model
        self.model.__class__ = LedGLM5
        self.model.lm_head.__class__ = LedHead
        self.model.leader = self.model.lm_head.leader = self  # type: ignore[assignment]
        self.weights: WeightSource = LedWeights(self)
        self.pages: Callable[..., PagedCache] = self._make_pages
        self.page_bytes: Callable[[PagedCache], PageBytes] = lambda cache: LedPageBytes(cache, self)
        self.graphs: Callable[..., Graphs] = self._make_graphs
        self.widest = Kind.ALL if share.ep > 1 else Kind.LOCAL  # of a call that all whom experts tie together must make
        mesh = member.share.world.mesh
        self.sizes: Mapping[str, int] = {"tp": mesh.tp, "cp": mesh.cp, "dp": mesh.dp, "ep": mesh.ep}

    def do(self, name: str, *args: Any, kind: Kind = Kind.LOCAL, **sent: Any) -> Any:
        """Run a call of `Member` on all ranks of the group; the leader's result.

        Raises:
            RankLost: another rank is gone. UserError: the call's own.
        """

        topic = f"{name} {args}" if kind is Kind.ALL else ""
        return self._steps.run(kind, lambda _: self._all(name, *args, **sent), topic)

    def step(self, kind: Kind, size: Size, name: str, *args: Any, **sent: Any) -> Any:
        """The same of a call in which other leaders' experts take part: its first argument is the size that all agree
        upon. None where a recorded one was wanted, and cannot be."""
        return self._steps.run(kind, lambda agreed: self._all(name, agreed, *args, **sent), size=size)

    def together(self, topic: str, work: Callable[[], Any]) -> Any:
        """Run `work` in the thread that communicates, when all leaders want the same."""
        return self._steps.run(Kind.ALL, lambda _: work(), topic)

    def _all(self, name: str, *args: Any, **sent: Any) -> Any:
        self.member.tell(name, *args)
        return getattr(self.member, name)(*args, **sent)

    def _make_pages(self, config: ModelConfig, count: int, host: int = 0, **options: Any) -> PagedCache:
        """As `PagedCache`, on all ranks, each on its own device."""
        self.do("pages", count, host, {k: v for k, v in options.items() if k != "device"})
        cache = self.member.cache
        assert cache is not None
        cache.__class__ = LedCache
        cache.leader = self  # type: ignore[attr-defined]
        return cache

    def _make_graphs(self, model: GLM5, cache: PagedCache, *, record: Any, **limits: Any) -> Graphs:
        """As `Graphs`, of every rank's own part."""
        return LedGraphs(self, **limits)

    def close(self) -> None:
        """Let the followers go. Where experts are spread, this returns when all leaders close."""
        self._steps.close(lambda: self.member.tell("end"))
        self.member.recordings.forget()  # before the groups end, whose calls they hold


class LedGLM5(GLM5):
    """A model whose calls for pages run on all ranks of a leader's group."""

    leader: Leader

    def hidden(self, input_ids: Tensor, *, cache: Any = None, trace: Trace | None = None, **_: Any) -> Tensor:
        """See `GLM5.hidden`; in pages only."""
        runs = tuple(cache.runs)
        seen, size = dict(sent=input_ids, batch=cache, trace=trace), Size(rows=input_ids.shape[1])
        out: Tensor = self.leader.step(Kind.TRUNK, size, "hidden", runs, trace is not None, **seen)
        return out

    def draft_hidden(self, hidden_BTD: Tensor, next_ids: Tensor, cache: Any, *_: Any, **__: Any) -> Tensor:
        """See `GLM5.draft_hidden`; in pages only."""
        seen = dict(sent=(hidden_BTD, next_ids), batch=cache)
        out: Tensor = self.leader.step(Kind.DRAFT, Size(), "draft", tuple(cache.runs), **seen)
        return out


class LedHead(Linear):
    """A head whose rows are on all ranks of a leader's group."""

    leader: Leader

    def forward(self, x_ND: Tensor) -> Tensor:
        """Logits [N, V]."""
        out: Tensor = self.leader.do("head", len(x_ND), sent=x_ND)
        return out


class LedCache(PagedCache):
    """Pages of a leader's group; those of this rank are read and written here."""

    leader: Leader

    def copy(self, kind: str, source: int, target: int) -> None:
        self.leader.do("copy", kind, source, target)

    def release(self) -> None:
        self.leader.do("release_pages")

    def resume(self) -> None:
        self.leader.do("resume_pages")


class LedPageBytes(PageBytes):
    """Pages of a leader's group, each the same on all ranks: read here, written on all."""

    def __init__(self, cache: PagedCache, leader: Leader) -> None:
        super().__init__(cache)
        self._leader = leader

    def write(self, page: int, data: Tensor) -> None:
        self._leader.do("fill", page, sent=data)


class LedWeights(WeightSource):
    """Updates that reach every rank. Where experts are spread, all leaders must be given each of them: they are applied
    when all have come."""

    def __init__(self, leader: Leader) -> None:
        super().__init__(leader.model)
        self._leader, self._member = leader, leader.member
        with torch.device("meta"):
            self._whole = GLM5(self.model.config, seed=None)
        self._names = WeightSource(self._whole)

    def _public(self, names: Iterable[str]) -> set[str]:
        return self._names._public(names)

    def apply(self, update: WeightUpdate, received: Mapping[str, Tensor] | None = None) -> None:
        self._check_memory()
        if update.source == "disk":
            self._leader.do("load", update.path, kind=Kind.ALL)
            self.missing.clear()
            return
        problem: UserError | None = None
        tensors: dict[str, Tensor] = {}
        try:
            tensors = self._sent(update, received)
            assign_tensors(self._whole, tensors)  # which has no memory: names, shapes and values are looked at
        except UserError as error:
            problem = error
        named = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]

        def assign() -> None:
            self._member.tell("agree", None)
            self._member.agree(problem)
            self._member.tell("assign", named)
            self._member.assign(named, tensors)

        self._leader.together("assign", assign)
        self.missing -= self._public(tensors.keys()) if self.missing else set()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name in self.model.state_dict():
            if name == "lm_head.weight" and self.model.config.tie_word_embeddings:
                continue
            whole: Tensor = self._leader.do("whole", name, kind=Kind.ALL)
            yield from public_tensors(name, whole.to(self.model.dtype) if name.endswith("mlp.gate.weight") else whole)

    def release(self) -> None:
        if not self.released:
            self._leader.do("release_weights", kind=Kind.ALL)  # which other leaders may not want: then all is as before
            self.missing = self._public(self.model.state_dict().keys())
            self.released = True

    def resume(self) -> None:
        self._leader.do("resume_weights", kind=Kind.ALL)
        self.released = False
