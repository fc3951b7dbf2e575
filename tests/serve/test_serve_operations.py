"""Random operations on allocator, prefix tree and scheduler, with a fake model that knows what every slot must hold.

The model writes into each slot the whole text up to it (as a chain of hashes) and the weights that wrote it. Before
an item runs, all that its page table shows is compared with the sequence's own ids. So a wrong share, a forgotten or
misplaced copy, a page freed too early, a write to a shared page: each is seen at once. After every operation all
references are counted again from their holders (`Scheduler.check`), and each answer has ended at most once.

Here runs a short one; `python tests/serve/test_serve_operations.py 100000` makes at least that many operations, not
counting those that bring each example to its end.
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections import Counter, deque

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from glm5.serve.pages import PagePool
from glm5.serve.prefix import PrefixTree
from glm5.serve.request import Finish, PageSource, Request, SamplingParams
from glm5.serve.scheduler import Scheduler
from glm5.serve.sequence import Item, Outcome, Plan, Sequence
from glm5.utils.errors import UserError

Entry = tuple[int, str]  # the text up to and with this slot, and the weights that wrote it
VOCABULARY = 2  # few ids, so that texts begin alike
OPERATIONS: Counter[str] = Counter()
SEEN: Counter[str] = Counter()  # what happened on the way; a run that meets none of it proves little
RANDOMS = st.randoms(use_true_random=True)  # seeded by hypothesis, so a failure can be repeated


class FakeModel:
    """Two arrays of pages, device and host, written and read as an engine would."""

    def __init__(self, pool: PagePool) -> None:
        self.pool, self.size = pool, pool.page_size
        self.device: list[list[Entry | None]] = [[None] * self.size for _ in range(pool.device.count)]
        self.host: list[list[Entry | None]] = [[None] * self.size for _ in range(pool.host.count)]

    def run(self, plan: Plan, version: str, drafts: dict[Item, list[int]]) -> None:
        """Make the copies, verify what the items read, and write what they write."""
        for copy in plan.copies:
            SEEN[copy.kind] += 1
            source = self.host if copy.kind == "to_device" else self.device
            target = self.host if copy.kind == "to_host" else self.device
            target[copy.target] = list(source[copy.source])
        to_write = [page for item in plan.items for page in item.pages[item.start // self.size :]]
        assert len(to_write) == len(set(to_write)), "a page is written to twice"
        for item in plan.items:
            ids = item.sequence.ids[item.start : item.start + item.count] + drafts[item]
            assert item.count >= 1, "nothing runs, so there are no logits"
            assert len(item.pages) == self.pool.pages_for(item.start + len(ids))
            text = self.read(item, version)
            for slot, token in enumerate(ids, item.start):
                text = hash((text, token))
                page = item.pages[slot // self.size]
                assert self.pool.device.refs[page] == 1, "a shared page is written to"
                self.device[page][slot % self.size] = (text, version)

    def read(self, item: Item, version: str) -> int:
        """The text before an item, after checking that its pages show just that."""
        text = 0
        for slot in range(item.start):
            text = hash((text, item.sequence.ids[slot]))
            entry = self.device[item.pages[slot // self.size]][slot % self.size]
            assert entry is not None, "a slot that nobody wrote is read"
            assert entry[0] == text, "another text is read"
            if item.sequence.cache_version is not None:
                assert entry[1] == version, "entries of other weights are read"
        return text


class Operations(RuleBasedStateMachine):
    """Any use of a scheduler, with up to two plans in flight."""

    @initialize(
        pages=st.integers(2, 24),
        host_pages=st.sampled_from([0, 1, 3, 12]),
        page_size=st.sampled_from([1, 2, 4]),
        policy=st.sampled_from(["lru", "frequency"]),
        context=st.integers(2, 60),
        roomy=st.sampled_from([True, True, True, False]),
        max_running=st.integers(1, 5),
        drafts=st.integers(0, 5),
        chunk=st.integers(1, 16),
        spare=st.integers(0, 20),
    )
    def start(
        self,
        pages: int,
        host_pages: int,
        page_size: int,
        policy: str,
        context: int,
        roomy: bool,
        max_running: int,
        drafts: int,
        chunk: int,
        spare: int,
    ) -> None:
        if roomy:
            context = min(context, pages * page_size + 1)
        self.pool = PagePool(pages, host_pages, page_size=page_size)
        self.tree = PrefixTree(self.pool, policy=policy)
        self.scheduler = Scheduler(
            self.pool,
            self.tree,
            context=context,
            max_running=max_running,
            max_batched_tokens=max_running * (1 + drafts) + spare,
            chunk=chunk,
            drafts=drafts,
        )
        self.model = FakeModel(self.pool)
        self.flying: deque[tuple[Plan, dict[Item, list[int]]]] = deque()
        self.answers: list[Sequence] = []
        self.ends: Counter[Sequence] = Counter()
        self.pins: list[int] = []
        self.loads: list[Item] = []
        self.leased: dict[str, list[list[Entry | None]]] = {}  # what the pages of each lease hold
        self.names = itertools.count()

    # ------------------------------------------------------------------ requests
    @rule(rng=RANDOMS, requests=st.integers(1, 4))
    def submit(self, rng: random.Random, requests: int) -> None:
        for name in itertools.islice(self.names, requests):
            OPERATIONS["submit"] += 1
            if self.answers and rng.random() < 0.5:  # the next turn of an answer, or the same prompt once more
                ids = [*rng.choice(self.answers).ids[: rng.randrange(1, 40)], rng.randrange(VOCABULARY)]
            else:
                ids = [0] * rng.randrange(1, 20) + rng.choices(range(VOCABULARY), k=rng.randrange(1, 6))
            ids = ids[: self.scheduler.context - 1]
            new = rng.choice([None, rng.randrange(1, 20)])
            params = SamplingParams(
                max_new_tokens=new, n=rng.choice([1, 1, 1, 2, 3]), prompt_logprobs=rng.choice([None, None, None, 0])
            )
            source, lease = None, rng.random() < 0.15
            if lease:
                params = SamplingParams(max_new_tokens=1)
            elif len(ids) > 1 and rng.random() < 0.3:
                source = PageSource("somewhere", "a lease", len(ids) - 1)
            request = Request(
                ids,
                params,
                str(name),
                priority=rng.choice([0, 0, 0, 1, 2]),
                arrival=name // 2,
                lease=lease,
                source=source,
            )
            new = params.max_new_tokens
            try:
                self.answers += self.scheduler.add(request)
            except UserError:
                limit = self.scheduler.context if new is None else min(self.scheduler.context, len(ids) + new)
                assert limit - 1 > self.pool.device.count * self.pool.page_size
                SEEN["refused"] += 1

    def abort(self, rid: str) -> None:
        alive = [a for a in self.answers if a.request.rid == rid and a.state != "finished"]
        SEEN["aborted in flight"] += any(a.item is not None for a in alive)
        assert self.scheduler.abort(rid) == alive
        self.ends.update(alive)

    # ------------------------------------------------------------------ steps
    @precondition(lambda self: len(self.flying) < 2)
    @rule(rng=RANDOMS)
    def plan(self, rng: random.Random) -> None:
        OPERATIONS["plan"] += 1
        self.launch(rng)

    @precondition(lambda self: self.flying)
    @rule(rng=RANDOMS)
    def commit(self, rng: random.Random) -> None:
        OPERATIONS["commit"] += 1
        self.land(rng, ends=0.05)

    @rule(rng=RANDOMS, operations=st.integers(1, 16))
    def run(self, rng: random.Random, operations: int) -> None:
        """Keep the machine busy."""
        for _ in range(operations):
            if not self.flying or (len(self.flying) < 2 and rng.random() < 0.3):
                self.plan(rng)
            else:
                self.commit(rng)
            self.scheduler.check()
            if rng.random() < 0.1 or not self.scheduler.has_work:
                self.submit(rng, 1)

    def launch(self, rng: random.Random) -> None:
        """Plan, and let the model run it."""
        before, running = self.scheduler.preemptions, set(self.scheduler.running)
        plan = self.scheduler.plan()
        self.nobody_was_overtaken(running)
        assert plan.tokens <= self.scheduler.max_batched_tokens
        SEEN["preempted"] += self.scheduler.preemptions - before
        self.loads += [item for item, _ in plan.loads]
        SEEN["overlapping plans"] += bool(self.flying and plan.items)
        if plan.items and rng.random() < 0.4:
            preemptions = self.scheduler.preemptions
            self.scheduler.prepare()
            self.nobody_was_overtaken(running)
            SEEN["prepared"] += 1
            SEEN["preempted"] += self.scheduler.preemptions - preemptions
        drafts = {item: rng.choices(range(VOCABULARY), k=item.drafts) for item in plan.items}
        self.model.run(plan, self.tree.version, drafts)
        if plan.items:
            self.flying.append((plan, drafts))
        else:
            assert self.scheduler.commit(plan, {}) == []

    def end_load(self, rng: random.Random) -> None:
        """A peer has sent all, or some, of what a load waits for."""
        item = self.loads.pop(rng.randrange(len(self.loads)))
        filled = item.sequence.state != "finished" and rng.random() < 0.6
        text, size = self.model.read(item, self.tree.version), self.pool.page_size
        for slot in range(item.start, item.start + item.count):
            text = hash((text, item.sequence.ids[slot]))
            page = item.pages[slot // size]
            assert self.pool.device.refs[page] == 1, "a shared page is loaded into"
            right = filled or rng.random() < 0.5
            self.model.device[page][slot % size] = (text, self.tree.version) if right else (0, "half of a load")
        self.scheduler.end_load(item, filled=filled)
        SEEN["filled" if filled else "not filled"] += 1

    def quiet(self, rng: random.Random) -> None:
        """Nothing is in flight."""
        while self.flying:
            self.commit(rng)
        for item, _ in self.scheduler.take_loads():
            self.scheduler.end_load(item, filled=False)
        while self.loads:
            self.end_load(rng)

    def return_lease(self, name: str) -> None:
        """Its pages have stayed as they were."""
        lease, before = self.scheduler.leases[name], self.leased.pop(name)
        assert [self.model.device[page] for page in lease.pages] == before
        self.scheduler.return_lease(name)
        SEEN["leases"] += 1

    def land(self, rng: random.Random, ends: float) -> None:
        """Commit the oldest plan in flight; an answer ends by itself with probability `ends`."""
        plan, drafts = self.flying.popleft()
        answers = [(answer, item) for item in plan.items for answer in item.answers]
        outcomes = {}
        for answer, item in answers:
            accepted = drafts[item][: rng.randint(0, item.drafts)]
            ids = (*accepted, rng.randrange(VOCABULARY))
            full = len(answer.ids) + len(ids) >= answer.limit
            finish = Finish("stop") if rng.random() < ends else Finish("length") if full else None
            if rng.random() < ends / 10:
                ids, finish = (), Finish("error")
            outcomes[answer] = Outcome(ids, finish)
        alive = [answer for answer, _ in answers if answer.state != "finished"]
        before, running = {answer: list(answer.ids) for answer in alive}, set(self.scheduler.running)
        assert self.scheduler.commit(plan, outcomes) == alive
        self.nobody_was_overtaken(running)
        for name in self.scheduler.leases.keys() - self.leased.keys():
            lease = self.scheduler.leases[name]
            self.leased[name] = [list(self.model.device[page]) for page in lease.pages]
        for answer in alive:
            assert answer.ids == before[answer] + list(outcomes[answer].ids)
            self.ends[answer] += answer.state == "finished"
            assert answer.finish == outcomes[answer].finish

    def nobody_was_overtaken(self, running: set[Sequence]) -> None:
        """Those that entered, beside `running`, go ahead of all that wait."""
        entered = [s.order for s in self.scheduler.running if s not in running]
        assert max(entered, default=()) < min((s.order for s in self.scheduler.waiting), default=(10,))

    # ------------------------------------------------------------------ everything else
    @rule(
        rng=RANDOMS,
        what=st.sampled_from(
            ["abort", "abort", "weights", "pin", "pin", "unpin", "retract", "flush", "load", "load", "load", "lease"]
        ),
    )
    def disturb(self, rng: random.Random, what: str) -> None:
        if rng.random() < 0.7:  # in the middle of things
            self.run(rng, rng.randrange(1, 10))
        if what in ("weights", "retract"):
            self.quiet(rng)
        OPERATIONS[what] += 1
        held = [page for page in range(self.pool.device.count) if self.pool.device.refs[page]]
        if what == "flush":
            self.tree.flush()
        elif what == "abort" and self.answers:
            self.abort(rng.choice(self.answers[-8:]).request.rid)
        elif what == "weights":
            if rng.random() < 0.2:
                self.scheduler.retract_all()
                assert not self.scheduler.running
            SEEN["other weights in the middle"] += any(s.decoding for s in self.scheduler.running)
            self.scheduler.set_version(rng.choice("012"), keep=rng.random() < 0.5)
        elif what == "retract":
            self.scheduler.retract_all()
        elif what == "pin" and held and len(self.pins) < 3:
            self.pins.append(rng.choice(held))
            self.pool.device.pin(self.pins[-1])
        elif what == "unpin" and self.pins:
            self.pool.device.unpin(self.pins.pop())
        elif what == "load" and self.loads:
            self.end_load(rng)
        elif what == "lease" and self.leased:
            self.return_lease(rng.choice(list(self.leased)))

    @invariant()
    def all_is_accounted_for(self) -> None:
        self.scheduler.check()
        pins = Counter(self.pins)
        pins.update(page for lease in self.scheduler.leases.values() for page in lease.pages)
        assert self.leased.keys() == self.scheduler.leases.keys()
        assert self.pool.device.pins == [pins[page] for page in range(self.pool.device.count)]
        for answer in self.answers:
            assert (answer.state == "finished") == (answer.finish is not None) == (self.ends[answer] == 1)
            assert len(answer.ids) <= answer.limit

    def teardown(self) -> None:
        """Left alone, everything comes to its end, and nothing stays behind."""
        if not hasattr(self, "pool"):
            return
        for page in self.pins:
            self.pool.device.unpin(page)
        self.pins, rng = [], random.Random(0)  # noqa: S311
        while self.flying:
            self.land(rng, ends=0.03)
        for _ in range(10 * sum(answer.limit for answer in self.answers)):
            for name in list(self.leased):
                self.return_lease(name)
            self.quiet(rng)
            if not self.scheduler.has_work:
                break
            self.launch(rng)
            if not self.flying and self.loads:
                continue
            assert self.flying, "there is work, and nothing runs"
            self.land(rng, ends=0.03)
        for name in list(self.leased):
            self.return_lease(name)
        self.all_is_accounted_for()
        assert all(answer.state == "finished" for answer in self.answers)
        assert self.pool.device.free + self.pool.device.idle == self.pool.device.count
        SEEN["prefix hits"] += self.tree.hits
        self.tree.flush()
        for tier in (self.pool.device, self.pool.host):
            assert tier.free == tier.count


def run_operations(examples: int, *, seeded: bool) -> None:
    options = settings(max_examples=examples, stateful_step_count=50, deadline=None, database=None, derandomize=seeded)
    run_state_machine_as_test(Operations, settings=options)


def test_random_operations() -> None:
    SEEN.clear()
    run_operations(120, seeded=True)
    met = ("to_host", "to_device", "within", "preempted", "refused", "aborted in flight", "overlapping plans")
    met += ("other weights in the middle", "prefix hits", "filled", "not filled", "leases")
    assert all(SEEN[name] for name in met), SEEN


if __name__ == "__main__":
    wanted, began = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000, time.monotonic()
    while OPERATIONS.total() < wanted:
        run_operations(1000, seeded=False)
    print(f"{OPERATIONS.total()} operations in {time.monotonic() - began:.0f} s: {dict(OPERATIONS)}; met {dict(SEEN)}")
