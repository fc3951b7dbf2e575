"""The scheduler: which tokens of which sequences run next, and what a step's outcome means for the pages.

`plan` says what to run, `commit` takes what came out; `Engine.step` is both with the model between. In a step every
sequence that decodes runs its last id and its drafts; chunks of prompts fill what is left of `max_batched_tokens`.

Order is by priority, then arrival, and strict:
- Nobody enters before one that goes ahead of it, so within a priority each request is served in finite time, whatever
  arrives later; lower priorities wait as long as higher ones fill the machine.
- A request enters when pages for all ids it has are there, with one page to spare for each sequence that runs. One of
  strictly higher priority takes the place and pages of lower ones.
- When pages run out in the middle, the last in order is preempted. Its pages stay in the prefix tree while they can,
  so that coming back is mostly a prefix hit; its ids are kept.

A sequence that was planned is in flight until its plan is committed: it is not planned again, not preempted, and its
pages stay, even if it is aborted. So a plan can be made while another runs. One that waits for pages of a peer
(`Request.source`) is in flight in the same way, until `end_load`. The other side keeps pages under a lease.
Read next: `sequence`, `engine`.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping

from glm5.serve.pages import PageError, PagePool
from glm5.serve.prefix import Node, PrefixTree
from glm5.serve.request import Finish, PageSource, Request
from glm5.serve.sequence import Item, Lease, Order, Outcome, Plan, Sequence
from glm5.utils.errors import ConfigError, UserError


class Scheduler:
    """All sequences that are alive, and their pages.

    Args:
        pool, tree: the pages, and who remembers them. context: tokens that prompt and answer may hold together.
        max_running: sequences at a time. max_batched_tokens: tokens of a step, drafts included.
        chunk: tokens of one prompt in a step; less than `max_batched_tokens` lets short prompts pass beside a long
            one. drafts: ids that a decoding sequence tries ahead.

    Attributes:
        running, waiting: in order. preemptions: how often pages were taken from a running sequence.
        leases: by the request's name: pages kept after its end.

    Raises:
        ConfigError: a number is out of range, or a step could not hold every running sequence.
    """

    def __init__(
        self,
        pool: PagePool,
        tree: PrefixTree,
        *,
        context: int,
        max_running: int = 64,
        max_batched_tokens: int = 4096,
        chunk: int = 2048,
        drafts: int = 0,
    ) -> None:
        for name, value, least in (
            ("context", context, 2),
            ("max_running", max_running, 1),
            ("chunk", chunk, 1),
            ("drafts", drafts, 0),
        ):
            if value < least:
                raise ConfigError(name, value, f"must be at least {least}")
        if max_batched_tokens < max_running * (1 + drafts):
            rule = f"must hold {max_running} running sequences with {drafts} drafts each: {max_running * (1 + drafts)}"
            raise ConfigError("max_batched_tokens", max_batched_tokens, rule)
        self.pool, self.tree, self.context = pool, tree, context
        self.max_running, self.max_batched_tokens = max_running, max_batched_tokens
        self.chunk, self.drafts = chunk, drafts
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.preemptions = 0
        self._alive: dict[str, list[Sequence]] = {}
        self.leases: dict[str, Lease] = {}
        self._serial = itertools.count()
        self._loads: list[tuple[Item, PageSource]] = []

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    # ------------------------------------------------------------------ coming and going
    def add(self, request: Request) -> list[Sequence]:
        """Queue a request, which `request.check` has passed; one sequence for each of its n answers.

        Raises:
            UserError: its name is in use, or it could never fit into the pages.
        """
        if request.rid in self._alive or request.rid in self.leases:
            raise UserError(f"rid={request.rid!r}: a request of this name is alive", "Give each request its own rid")
        prompt, new = len(request.input_ids), request.params.max_new_tokens
        limit = self.context if new is None else min(self.context, prompt + new)
        size, pages = self.pool.page_size, self.pool.device.count
        if self.pool.pages_for(limit - 1) > pages:  # the last id needs no slot
            room = pages * size + 1 - prompt
            what = f"a prompt of {prompt} tokens and max_new_tokens={new} need {self.pool.pages_for(limit - 1)} pages"
            mend = f"Set max_new_tokens to at most {room}" if room > 0 else f"Shorten the prompt below {pages * size}"
            raise UserError(f"{what} of {size} tokens, and there are {pages}", mend)
        serial = next(self._serial)
        first, *others = answers = [
            Sequence(request, i, limit, (-request.priority, request.arrival, serial, i), list(request.input_ids))
            for i in range(request.params.n)
        ]
        first.siblings, first.source = tuple(others), request.source
        self._alive[request.rid] = list(answers)
        bisect.insort(self.waiting, first, key=_order)
        return answers

    def abort(self, rid: str) -> list[Sequence]:
        """End all answers of a request; returns those that were alive. An unknown name is none."""
        ended = list(self._alive.get(rid, ()))
        for sequence in ended:
            self._end(sequence, Finish("abort"))
        return ended

    def return_lease(self, rid: str) -> None:
        """The peer has what it wanted, or will never want it. An unknown name is no error."""
        lease = self.leases.pop(rid, None)
        if lease is not None:
            self.unpin(lease)

    def pin(self, lease: Lease) -> None:
        """Keep the pages of a lease, even if it is returned, until `unpin`."""
        for page in lease.pages:
            self.pool.device.pin(page)

    def unpin(self, lease: Lease) -> None:
        """Take back one `pin`."""
        for page in lease.pages:
            self.pool.device.unpin(page)

    def take_loads(self) -> tuple[tuple[Item, PageSource], ...]:
        """The loads ordered since the last call. Whoever takes them ends them."""
        loads, self._loads = tuple(self._loads), []
        return loads

    def end_load(self, item: Item, *, filled: bool) -> None:
        """A load is over: its slots were filled, all of them, or it is as if there had been no source."""
        sequence = item.sequence
        if sequence.item is not item:
            raise PageError(f"{sequence.request.rid}: this load is not in flight")
        sequence.item = None
        if sequence.state == "finished":
            self._release(sequence)
        elif filled:
            sequence.computed = sequence.settled = item.start + item.count
            self._publish(sequence)

    def retract_all(self) -> None:
        """Take the pages of all that run, ids kept: they are read again when they come back, under the weights of then.

        Nothing may be in flight.
        """
        for sequence in list(self.running):
            self._preempt(sequence)

    def set_version(self, version: str, *, keep: bool = False) -> None:
        """Go on under new weights. What runs keeps its entries of the old ones unless it is retracted, but shares them
        with nobody from now on. `keep`: see `PrefixTree.set_version`. Nothing may be in flight."""
        for sequence in self.running:
            if sequence.item is not None:
                raise PageError("the weights may not change under a plan in flight")
            sequence.cache_version = None
        self.tree.set_version(version, keep=keep)

    # ------------------------------------------------------------------ a step
    def plan(self) -> Plan:
        """What to run now. Without items there is nothing that can run."""
        for sequence in list(self.running):
            if sequence.state == "running" and sequence.item is None and sequence.decoding:
                self._grow(sequence)
        while self.waiting and self._enter(self.waiting[0]):
            pass
        items, left = [], self.max_batched_tokens
        for sequence in self.running:
            room = len(sequence.pages) * self.pool.page_size - sequence.computed
            if sequence.item is None and sequence.decoding and room:
                item = self._hand_out(sequence, 1, min(room - 1, self._drafts(sequence)))
                items.append(item)
                left -= item.slots
        for sequence in self.running:
            if sequence.item is None and not sequence.decoding and left:
                self._adopt(sequence)
                if not self._is_being_read(sequence):
                    item = self._hand_out(sequence, self._chunk(sequence, left))
                    items.append(item)
                    left -= item.slots
        return Plan(self.pool.take_copies(), tuple(items), self.take_loads())

    def prepare(self) -> None:
        """Find pages for the next step while one is in flight, as far as that takes them from nobody, so that the next
        `plan` has little left to do."""
        for sequence in self.running:
            item = sequence.item
            if item is not None and item.answers and sequence.state == "running":
                end = min(item.start + item.slots + 1 + self.drafts, sequence.limit - 1)
                wanted = self.pool.pages_for(end) - len(sequence.pages)
                if wanted > 0 and self._can_spare(wanted):
                    sequence.pages += self._allocate(wanted) or ()
        while self.waiting and self._enter(self.waiting[0]):
            pass

    def commit(self, plan: Plan, outcomes: Mapping[Sequence, Outcome]) -> list[Sequence]:
        """Take in what a plan gave.

        Args:
            outcomes: for every answer of every item. Those of sequences that were aborted meanwhile are ignored.

        Returns:
            The sequences that took their outcome, in the plan's order.
        """
        took: list[Sequence] = []
        for item in plan.items:
            sequence = item.sequence
            if sequence.item is not item:
                raise PageError(f"{sequence.request.rid}: this plan is not in flight")
            sequence.item = None
            if sequence.state == "finished":
                self._release(sequence)
                continue
            sequence.settled = item.start + item.count
            if not sequence.decoding:
                sequence.computed = sequence.settled
            if any(not outcomes[answer].ids for answer in item.answers):
                self.tree.forget(sequence.keys(1, self.pool.page_size))
                sequence.cache_version = None
            elif not sequence.decoding:
                self._publish(sequence)
            for answer in item.answers:
                if answer is not sequence:
                    self._fork(sequence, answer, outcomes[answer])
            for answer in item.answers:
                self._take(answer, outcomes[answer], item.drafts)
            if item.answers:
                sequence.siblings = ()
            took += item.answers
        return took

    def _drafts(self, sequence: Sequence) -> int:
        """Drafts to try: were all accepted, the last id of the answer would come from the model itself."""
        return min(self.drafts, sequence.limit - len(sequence.ids) - 1)

    def _chunk(self, sequence: Sequence, left: int) -> int:
        """How many ids to read; pieces end with a page where they can, since whole pages are shared at once."""
        todo = len(sequence.ids) - sequence.computed
        count = min(todo, self.chunk, left)
        over = (sequence.computed + count) % self.pool.page_size
        return count - over if count < todo and over < count else count

    def _hand_out(self, sequence: Sequence, count: int, drafts: int = 0) -> Item:
        end = sequence.computed + count
        pages = tuple(sequence.pages[: self.pool.pages_for(end + drafts)])
        answers = (sequence, *sequence.siblings) if end == len(sequence.ids) else ()
        sequence.item = Item(sequence, sequence.computed, count, drafts, pages, answers)
        return sequence.item

    def _take(self, sequence: Sequence, outcome: Outcome, drafts: int) -> None:
        sequence.ids += outcome.ids
        bad = len(outcome.ids) > drafts + 1 or len(sequence.ids) > sequence.limit
        if bad or (outcome.finish is None and (not outcome.ids or len(sequence.ids) == sequence.limit)):
            raise PageError(f"{sequence.request.rid}: {outcome} after {drafts} drafts, limit {sequence.limit}")
        if outcome.ids:
            sequence.oldest_version = sequence.oldest_version or self.tree.version
            if sequence.state == "running":
                sequence.computed, sequence.decoding = len(sequence.ids) - 1, True
        if outcome.finish is not None:
            self._end(sequence, outcome.finish)

    # ------------------------------------------------------------------ pages
    def _allocate(self, n: int) -> list[int] | None:
        """n pages, where need be of those that only the tree holds; None if there are not so many."""
        device = self.pool.device
        if n > device.free + device.idle:
            return None
        self.tree.evict(n - device.free)
        return device.allocate(max(n, 0)) if n <= device.free else None  # a pin can hold up those above it

    def _can_spare(self, n: int) -> bool:
        """Whether n pages are there beside one for each running sequence."""
        return n + len(self.running) <= self.pool.device.free + self.pool.device.idle

    def _grow(self, sequence: Sequence) -> None:
        """Get a decoding sequence the slots of this step: fewer drafts before anybody is preempted, which may be it."""
        size = self.pool.page_size
        wanted = self.pool.pages_for(sequence.computed + 1 + self._drafts(sequence)) - len(sequence.pages)
        sequence.pages += self._allocate(wanted) or ()
        while sequence.state == "running" and len(sequence.pages) * size == sequence.computed:
            page = self._allocate(1)
            if page is None:
                last = next(s for s in reversed(self.running) if s.item is None)
                if last is sequence and last is not self.running[-1]:
                    return  # those after it are in flight, and can be preempted when they are back
                self._preempt(last)
            else:
                sequence.pages += page

    def _room(self, sequence: Sequence) -> tuple[list[Node], int] | None:
        """The known beginning of a sequence and how many pages it needs beside it; None if it can't enter now."""
        nodes = self.tree.match(sequence.keys(self._matchable(sequence), self.pool.page_size))
        pages = [node.page for node in nodes if node.page is not None]
        need = self.pool.pages_for(len(sequence.ids)) - len(pages)
        idle = sum(map(self.pool.device.is_idle, pages))  # no longer to be had, when it holds them
        return (nodes, need) if len(self.running) < self.max_running and self._can_spare(need + idle) else None

    def _enter(self, sequence: Sequence) -> bool:
        """Move the first of `waiting` to `running`, if there is a place and pages for all its ids."""
        self._make_way(sequence)
        room = self._room(sequence)
        if room is None:
            return False
        nodes, need = room
        self.tree.acquire(nodes)
        pages = self._allocate(need)
        if pages is None:
            self.tree.abandon(nodes)
            return False
        self.tree.touch(nodes)
        new = iter(pages)
        for node in nodes:
            if node.page is None:
                self.tree.restore(node, next(new))
            assert node.page is not None
            sequence.pages.append(node.page)
        sequence.pages += new
        sequence.computed = sequence.settled = len(nodes) * self.pool.page_size
        if sequence.state == "waiting":
            sequence.cached = sequence.computed
            self.tree.count(len(sequence.ids), sequence.computed)
        sequence.cache_version = self.tree.version
        self.waiting.remove(sequence)
        self._run(sequence)
        source, sequence.source = sequence.source, None
        if source is not None and source.tokens > sequence.computed:
            table = tuple(sequence.pages[: self.pool.pages_for(source.tokens)])
            sequence.item = Item(sequence, sequence.computed, source.tokens - sequence.computed, 0, table, ())
            self._loads.append((sequence.item, source))
        return True

    def _make_way(self, sequence: Sequence) -> None:
        """Preempt sequences of strictly lower priority, last first, until `sequence` can enter; nobody if it can't."""
        lower = [s for s in self.running if s.item is None and s.request.priority < sequence.request.priority]
        if not lower:
            return
        others = [s for s in self.running if s not in lower]
        known = self.tree.match(sequence.keys(self._matchable(sequence), self.pool.page_size))
        shared = {node.page for node in known if node.page is not None}
        held = shared.union(*(s.pages for s in others))
        need = self.pool.pages_for(len(sequence.ids)) - len(shared)
        if len(others) < self.max_running and len(held) + need + len(others) <= self.pool.device.count:
            while lower and self._room(sequence) is None:
                self._preempt(lower.pop())

    def _fork(self, first: Sequence, sequence: Sequence, outcome: Outcome) -> None:
        """Let another answer go on where the prompt was read: whole pages are shared, a begun one is copied."""
        sequence.cached = first.cached
        if outcome.finish is not None:
            return
        full, begun = divmod(first.computed, self.pool.page_size)
        is_next = not self.waiting or sequence.order < self.waiting[0].order
        placed = is_next and len(self.running) < self.max_running and self._can_spare(1)
        own = self._allocate(1 if begun else 0) if placed else None
        if own is None:
            sequence.state = "preempted"
            bisect.insort(self.waiting, sequence, key=_order)
            return
        for page in first.pages[:full]:
            self.pool.device.share(page)
        if begun:
            self.pool.duplicate(first.pages[full], own[0])
        sequence.pages = first.pages[:full] + own
        sequence.computed, sequence.settled = first.computed, first.settled
        sequence.cache_version = first.cache_version
        self._run(sequence)

    def _matchable(self, sequence: Sequence) -> int:
        """How many pages may come from others: the last id must run, and all where its prompt is to be scored."""
        all_wanted = sequence.request.params.reads_all and not sequence.generated
        return 0 if all_wanted else (len(sequence.ids) - 1) // self.pool.page_size

    def _adopt(self, sequence: Sequence) -> None:
        """Take over pages that others have read since this one entered, in place of its own that are still empty."""
        at, inside = divmod(sequence.computed, self.pool.page_size)
        if inside or sequence.cache_version != self.tree.version:
            return
        keys = sequence.keys(self._matchable(sequence), self.pool.page_size)
        nodes = list(itertools.takewhile(lambda node: node.page is not None, self.tree.match(keys)[at:]))
        self.tree.acquire(nodes)
        self.tree.touch(nodes)
        for i, node in enumerate(nodes, at):
            assert node.page is not None
            self.pool.device.release(sequence.pages[i])
            sequence.pages[i] = node.page
        tokens = len(nodes) * self.pool.page_size
        if sequence.cached == sequence.computed and not sequence.generated:
            sequence.cached += tokens
            self.tree.count(0, tokens)
        sequence.computed += tokens
        sequence.settled = sequence.computed

    def _is_being_read(self, sequence: Sequence) -> bool:
        """Whether its next page is read right now by another prompt that begins the same: a step later it is there."""
        at, inside = divmod(sequence.computed, self.pool.page_size)
        if inside or at >= self._matchable(sequence) or sequence.cache_version != self.tree.version:
            return False
        end, keys = sequence.computed + self.pool.page_size, sequence.keys(at + 1, self.pool.page_size)
        return any(
            s.item.start <= sequence.computed
            and end <= s.item.start + s.item.count
            and s.cache_version == self.tree.version
            and s.keys(at + 1, self.pool.page_size) == keys
            for s in self.running
            if s.item is not None and not s.decoding and s.state == "running"
        )

    def _publish(self, sequence: Sequence) -> None:
        """Enter its whole pages into the tree, if they are of the weights of now."""
        full = sequence.settled // self.pool.page_size
        if sequence.cache_version == self.tree.version:
            keys = sequence.keys(full, self.pool.page_size)
            sequence.pages[:full] = self.tree.insert(keys, sequence.pages[:full])

    def _release(self, sequence: Sequence) -> None:
        self._publish(sequence)
        if sequence.request.lease and sequence.finish is not None and sequence.finish.type == "length":
            table = tuple(sequence.pages[: self.pool.pages_for(sequence.computed)])
            lease = Lease(table, sequence.computed, self.tree.version)
            if sequence.cache_version == lease.version:
                self.leases[sequence.request.rid] = lease
                self.pin(lease)
        for page in reversed(sequence.pages):
            self.pool.device.release(page)
        sequence.pages, sequence.computed, sequence.settled, sequence.decoding = [], 0, 0, False
        self.running.remove(sequence)

    # ------------------------------------------------------------------ states
    def _run(self, sequence: Sequence) -> None:
        sequence.state = "running"
        bisect.insort(self.running, sequence, key=_order)

    def _preempt(self, sequence: Sequence) -> None:
        if sequence.item is not None:
            raise PageError(f"{sequence.request.rid}: preempted in flight")
        self._release(sequence)
        sequence.state = "preempted"
        self.preemptions += 1
        bisect.insort(self.waiting, sequence, key=_order)

    def _end(self, sequence: Sequence, finish: Finish) -> None:
        before, sequence.state, sequence.finish = sequence.state, "finished", finish
        alive = self._alive[sequence.request.rid]
        alive.remove(sequence)
        if not alive:
            del self._alive[sequence.request.rid]
        if before == "running" and sequence.item is None:  # else `commit` releases it
            self._release(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def check(self) -> None:
        """Verify everything: each reference has its holder, each sequence its place, and the order holds.

        Raises:
            PageError: it does not.
        """
        self.pool.check()
        self.tree.check()
        refs = list(map(int, self.pool.device.cached))
        for sequence in self.running:
            for page in sequence.pages:
                refs[page] += 1
        if refs != self.pool.device.refs:
            raise PageError(f"device: holders {refs}, references {self.pool.device.refs}")
        for lease in self.leases.values():
            if not all(self.pool.device.pins[page] for page in lease.pages):
                raise PageError("a leased page is not pinned")
        if self.pool.host.refs != list(map(int, self.pool.host.cached)):
            raise PageError("host: a slot is held by another than the tree")
        for places in (self.running, self.waiting):
            if places != sorted(places, key=_order):
                raise PageError("out of order")
        siblings = [s for first in (*self.running, *self.waiting) for s in first.siblings if s.state != "finished"]
        alive = {s for answers in self._alive.values() for s in answers}
        placed = [*(s for s in self.running if s.state == "running"), *self.waiting, *siblings]
        if len(placed) != len(set(placed)) or set(placed) != alive or len(self.running) > self.max_running:
            raise PageError("a sequence is in no place, or in two")
        for s in self.running:
            if s.state not in ("running", "finished") or (s.state == "finished" and s.item is None):
                raise PageError(f"{s.request.rid} runs as {s.state}")
            if (s.decoding and s.computed != len(s.ids) - 1) or s.computed > len(s.pages) * self.pool.page_size:
                raise PageError(f"{s.request.rid}: {s.computed} computed of {len(s.ids)} ids, {len(s.pages)} pages")
        for s in (*self.waiting, *siblings):
            if s.state not in ("waiting", "preempted") or s.pages or s.computed or s.item is not None:
                raise PageError(f"{s.request.rid} waits as {s.state} with pages")


def _order(sequence: Sequence) -> Order:
    return sequence.order
