"""The scheduler in small known scenarios: what runs in which step, who enters, who has to go, and what is reused."""

from __future__ import annotations

from typing import Any

import pytest

from glm5.serve.pages import Copy, PageError, PagePool
from glm5.serve.prefix import PrefixTree
from glm5.serve.request import Finish, Request, SamplingParams
from glm5.serve.scheduler import Scheduler
from glm5.serve.sequence import Outcome, Plan, Sequence
from glm5.utils.errors import ConfigError, UserError

SIZE = 4


def new_scheduler(pages: int = 32, host_pages: int = 0, **options: Any) -> Scheduler:
    pool = PagePool(pages, host_pages, page_size=SIZE)
    return Scheduler(pool, PrefixTree(pool), **{"context": 100, "max_running": 4, "max_batched_tokens": 64, **options})


def ask(scheduler: Scheduler, rid: str, ids: list[int] | int, *, priority: int = 0, **params: Any) -> list[Sequence]:
    """Queue a prompt: its ids, or its length, with ids that no other prompt has."""
    if isinstance(ids, int):
        ids = [1000 * (1 + sum(map(ord, rid))) + i for i in range(ids)]
    return scheduler.add(Request(ids, SamplingParams(**params), rid, priority, arrival=0))


def rows(plan: Plan) -> list[tuple[str, int, int]]:
    """What runs: name, first slot, slots."""
    return [(item.sequence.request.rid, item.start, item.slots) for item in plan.items]


def land(scheduler: Scheduler, plan: Plan, given: dict[str, Outcome] | None = None) -> None:
    """Every answer gets one id, 7, and goes on to its limit, unless its request's outcome is given."""
    outcomes = {}
    for item in plan.items:
        for answer in item.answers:
            full = len(answer.ids) + 1 == answer.limit
            plain = Outcome((7,), Finish("length") if full else None)
            outcomes[answer] = (given or {}).get(answer.request.rid, plain)
    scheduler.commit(plan, outcomes)
    scheduler.check()


def step(scheduler: Scheduler, given: dict[str, Outcome] | None = None) -> Plan:
    plan = scheduler.plan()
    scheduler.check()
    land(scheduler, plan, given)
    return plan


def finish(scheduler: Scheduler) -> list[Plan]:
    """Run to the end."""
    plans = []
    while scheduler.has_work:
        plans.append(step(scheduler))
        assert plans[-1].items
    return plans


# --------------------------------------------------------------------------- what runs
def test_decodes_come_first_and_chunks_fill_the_rest() -> None:
    s = new_scheduler(max_running=3, max_batched_tokens=10, chunk=8)
    ask(s, "a", 5)
    assert rows(step(s)) == [("a", 0, 5)]
    ask(s, "b", 18)
    ask(s, "c", 3)
    assert rows(step(s)) == [("a", 5, 1), ("b", 0, 8), ("c", 0, 1)]
    assert rows(step(s)) == [("a", 6, 1), ("b", 8, 8), ("c", 1, 1)]
    assert rows(step(s)) == [("a", 7, 1), ("b", 16, 2), ("c", 2, 1)]
    assert rows(step(s)) == [("a", 8, 1), ("b", 18, 1), ("c", 3, 1)]


def test_chunks_end_with_a_page_where_they_can() -> None:
    s = new_scheduler(max_running=1, max_batched_tokens=7, chunk=7)
    ask(s, "a", 13)
    assert [rows(step(s))[0][1:] for _ in range(4)] == [(0, 4), (4, 4), (8, 5), (13, 1)]
    s = new_scheduler(max_running=1, max_batched_tokens=3)
    ask(s, "a", 7)
    assert [rows(step(s))[0][1:] for _ in range(4)] == [(0, 3), (3, 1), (4, 3), (7, 1)]


def test_nobody_gets_ids_in_the_middle_of_a_prompt() -> None:
    s = new_scheduler(chunk=4)
    (a,) = ask(s, "a", 6)
    assert step(s).items[0].answers == ()
    assert (a.generated, a.computed) == (0, 4)
    assert step(s).items[0].answers == (a,)
    assert (a.generated, a.computed, a.ids[-1]) == (1, 6, 7)


def test_drafts_that_were_rejected_are_run_over() -> None:
    s = new_scheduler(drafts=3)
    (a,) = ask(s, "a", 4)
    assert rows(step(s)) == [("a", 0, 4)]
    plan = step(s, {"a": Outcome((1, 2, 3))})  # two of three drafts, and one id more
    assert rows(plan) == [("a", 4, 4)]
    assert (plan.items[0].count, plan.items[0].drafts, len(plan.items[0].pages)) == (1, 3, 2)
    assert (a.ids[4:], a.computed) == ([7, 1, 2, 3], 7)
    plan = s.plan()
    assert rows(plan) == [("a", 7, 4)]  # slots 5, 6 keep their drafts, 7 is written anew
    assert len(plan.items[0].pages) == 3


def test_drafts_stop_short_of_the_limit() -> None:
    s = new_scheduler(drafts=3)
    (a,) = ask(s, "a", 4, max_new_tokens=4)
    step(s)
    plan = s.plan()
    assert plan.items[0].drafts == 2  # three ids may come, and the last comes from the model
    land(s, plan, {"a": Outcome((1, 2, 3), Finish("length"))})
    assert (len(a.ids), a.state) == (8, "finished")


def test_fewer_drafts_rather_than_a_preemption() -> None:
    s = new_scheduler(pages=4, drafts=3)
    ask(s, "a", 3, max_new_tokens=8)
    ask(s, "b", 7, max_new_tokens=8)
    step(s)
    assert rows(step(s)) == [("a", 3, 4), ("b", 7, 1)]  # the last page was free for one of them
    assert s.preemptions == 0


# --------------------------------------------------------------------------- reuse
def test_a_second_turn_reads_only_what_is_new() -> None:
    s = new_scheduler()
    (a,) = ask(s, "a", 6, max_new_tokens=4)
    finish(s)
    (b,) = ask(s, "b", [*a.ids, 1, 2])
    assert rows(step(s)) == [("b", 8, 4)]  # 9 tokens have entries, which is two whole pages
    assert (b.cached, s.tree.queries, s.tree.hits) == (8, 6 + 12, 8)


def test_the_last_id_of_a_prompt_always_runs() -> None:
    s = new_scheduler()
    prompt = list(range(8))
    ask(s, "a", prompt, max_new_tokens=1)
    finish(s)
    assert len(list(s.tree.nodes())) == 2
    ask(s, "b", prompt)
    assert rows(step(s)) == [("b", 4, 4)]


def test_a_prompt_to_be_scored_is_read_whole() -> None:
    s = new_scheduler()
    prompt = list(range(10))
    for rid in ("a", "b"):
        ask(s, rid, prompt, max_new_tokens=1, prompt_logprobs=0)
        assert rows(step(s)) == [(rid, 0, 10)]


def test_equal_prompts_are_read_once() -> None:
    """They come together; the second waits a step for the pages of the first, chunk by chunk, and takes them over."""
    s = new_scheduler(chunk=8, max_batched_tokens=16)
    prompt = list(range(18))
    ask(s, "a", prompt)
    (b,) = ask(s, "b", prompt)
    assert rows(step(s)) == [("a", 0, 8)]
    assert rows(step(s)) == [("a", 8, 8)]
    assert rows(step(s)) == [("a", 16, 2), ("b", 16, 2)]
    assert b.cached == 16
    assert s.pool.device.count - s.pool.device.free == 4 + 2


def test_another_prompt_is_not_kept_waiting() -> None:
    s = new_scheduler()
    ask(s, "a", [1, 2, 3, 4, 5])
    ask(s, "b", [1, 2, 3, 9, 5])
    assert rows(s.plan()) == [("a", 0, 5), ("b", 0, 5)]


def test_answers_share_the_prompt_and_copy_its_last_page() -> None:
    s = new_scheduler()
    a, b, c = ask(s, "a", 6, n=3)
    plan = s.plan()
    assert rows(plan) == [("a", 0, 6)]
    assert plan.items[0].answers == (a, b, c)
    s.commit(plan, {a: Outcome((1,)), b: Outcome((2,)), c: Outcome((3,), Finish("stop"))})
    s.check()
    assert [x.ids[6:] for x in (a, b, c)] == [[1], [2], [3]]
    assert (b.state, c.state, c.pages) == ("running", "finished", [])
    assert a.pages[0] == b.pages[0]
    assert a.pages[1] != b.pages[1]
    plan = s.plan()
    assert plan.copies == (Copy("within", a.pages[1], b.pages[1]),)
    assert [(i.sequence, i.start, i.count) for i in plan.items] == [(a, 6, 1), (b, 6, 1)]


def test_a_whole_last_page_needs_no_copy() -> None:
    s = new_scheduler()
    a, b = ask(s, "a", 8, n=2)
    step(s)
    assert a.pages == b.pages
    plan = s.plan()
    assert plan.copies == ()
    assert a.pages[:2] == b.pages[:2]
    assert a.pages[2] != b.pages[2]


def test_answers_that_find_no_place_come_later_with_their_first_id() -> None:
    s = new_scheduler(max_running=2)
    answers = ask(s, "a", 6, n=4, max_new_tokens=3)
    step(s)
    assert [x.state for x in answers] == ["running", "running", "preempted", "preempted"]
    assert [x.ids[6:] for x in answers] == [[7]] * 4
    finish(s)
    assert [len(x.ids) for x in answers] == [9] * 4


def test_pages_come_back_from_the_host() -> None:
    s = new_scheduler(pages=4, host_pages=4)
    prompt = list(range(9))
    ask(s, "a", prompt, max_new_tokens=1)
    finish(s)
    ask(s, "b", 13, max_new_tokens=1)
    assert {c.kind for plan in finish(s) for c in plan.copies} == {"to_host"}
    (c,) = ask(s, "c", prompt, max_new_tokens=1)
    plan = step(s)
    assert [copy.kind for copy in plan.copies].count("to_device") == 2
    assert rows(plan) == [("c", 8, 1)]
    assert c.cached == 8


# --------------------------------------------------------------------------- who enters, who goes
def test_entry_is_in_order_and_leaves_a_page_to_each_that_runs() -> None:
    s = new_scheduler(pages=6, context=24)
    ask(s, "a", 12, max_new_tokens=4)
    ask(s, "b", 12, max_new_tokens=4)
    ask(s, "c", 1, max_new_tokens=1)  # would fit, but does not overtake
    assert rows(step(s)) == [("a", 0, 12)]
    assert [x.request.rid for x in s.waiting] == ["b", "c"]
    s = new_scheduler(pages=7, context=24)
    ask(s, "a", 12, max_new_tokens=4)
    ask(s, "b", 12, max_new_tokens=4)
    assert rows(step(s)) == [("a", 0, 12), ("b", 0, 12)]


def test_waiting_for_a_place_is_no_use_of_a_prefix() -> None:
    s = new_scheduler(max_running=1)
    ask(s, "a", list(range(5)), max_new_tokens=1)
    finish(s)
    ask(s, "b", 3)
    step(s)
    ask(s, "c", list(range(5)))
    node = next(s.tree.nodes())
    before = (node.used, node.uses)
    step(s)
    assert (node.used, node.uses) == before
    s.abort("b")
    step(s)
    assert node.uses == before[1] + 1


def test_the_last_in_order_is_preempted_and_comes_back_where_it_was() -> None:
    s = new_scheduler(pages=6, context=20)
    (a,) = ask(s, "a", 7)
    (b,) = ask(s, "b", 7)
    states = []
    while b.state != "preempted":
        step(s)
        states.append((len(a.pages), len(b.pages)))
    assert states == [(2, 2), (2, 2), (3, 3), (3, 3), (3, 3), (3, 3), (4, 0)]
    assert (s.preemptions, b.pages, b.computed) == (1, [], 0)
    ids = list(b.ids)
    ask(s, "c", 3, max_new_tokens=1)
    assert s.waiting[0] is b
    while b.state != "running":
        step(s)
    assert b.ids[: len(ids)] == ids
    finish(s)
    assert len(a.ids) == len(b.ids) == 20


def test_coming_back_is_a_prefix_hit() -> None:
    s = new_scheduler()
    (a,) = ask(s, "a", 14)
    step(s)
    s.retract_all()
    assert (a.state, a.pages, a.ids[14:]) == ("preempted", [], [7])
    assert rows(step(s)) == [("a", 12, 3)]
    assert (a.cached, s.tree.hits) == (0, 0)  # its own pages are no reuse


def test_strictly_higher_priority_takes_the_place_of_lower() -> None:
    s = new_scheduler(max_running=2)
    for rid in ("a", "b"):
        ask(s, rid, 6)
    step(s)
    ask(s, "same", 6)
    step(s)
    assert [x.request.rid for x in s.running] == ["a", "b"]
    ask(s, "high", 6, priority=1)
    assert rows(step(s)) == [("a", 7, 1), ("high", 0, 6)]
    assert [x.request.rid for x in s.running] == ["high", "a"]
    assert [x.request.rid for x in s.waiting] == ["b", "same"]


def test_what_the_preempted_had_written_is_there_for_the_one_that_preempts() -> None:
    """ "low" holds a page of the same text that "high" finds on the host; it becomes known only by the preemption."""
    s = new_scheduler(host_pages=8, max_running=1)
    text = [1, 2, 3, 4, 5, 7, 7, 7, 7, 7, 7, 7, 7]  # every answer is made of 7
    ask(s, "a", text[:5], max_new_tokens=8)
    finish(s)
    s.tree.evict(3)
    (low,) = ask(s, "low", text[:5], max_new_tokens=8)
    while low.computed < 9:
        step(s)
    ask(s, "high", text, priority=1, max_new_tokens=1)
    plan = step(s)
    assert [copy.kind for copy in plan.copies] == ["to_device"]  # the third page; the second is here already
    assert rows(plan) == [("high", 12, 1)]
    finish(s)
    assert s.pool.device.free + s.pool.device.idle == s.pool.device.count


def test_nobody_is_preempted_for_one_that_could_not_enter_even_so() -> None:
    s = new_scheduler(pages=8, context=24)
    ask(s, "top", 16, priority=2)
    ask(s, "low", 4)
    step(s)
    ask(s, "middle", 20, priority=1)  # needs 5 pages; without "low" there would be 3
    step(s)
    assert [x.request.rid for x in s.running] == ["top", "low"]
    assert s.preemptions == 0


def test_within_a_priority_each_is_served_however_many_come_after() -> None:
    """Machine always overfull, small requests without end: the large one enters as soon as its turn comes."""
    s = new_scheduler(pages=8, max_running=3, context=32)
    for i in range(5):
        ask(s, f"before {i}", 3, max_new_tokens=5)
    (large,) = ask(s, "large", 25, max_new_tokens=4)
    for i in range(200):
        ask(s, f"after {i}", 3, max_new_tokens=5)
        before = {x.request.rid for x in s.running}
        step(s)
        entered = {x.request.rid for x in s.running} - before
        if large.state == "waiting":
            assert not any(rid.startswith("after") for rid in entered)
        if large.state == "finished":
            break
    assert large.state == "finished"
    assert i < 60


# --------------------------------------------------------------------------- ends
def test_what_could_never_fit_is_refused_with_its_mend() -> None:
    s = new_scheduler(pages=2)
    with pytest.raises(UserError, match=r"need 3 pages of 4 tokens, .* Set max_new_tokens to at most 3"):
        ask(s, "a", 6, max_new_tokens=4)
    with pytest.raises(UserError, match="max_new_tokens=None need 25 pages"):
        ask(s, "a", 6)
    with pytest.raises(UserError, match="Shorten the prompt"):
        ask(s, "a", 9, max_new_tokens=1)
    (a,) = ask(s, "a", 6, max_new_tokens=3)
    assert [len(p.items) for p in finish(s)] == [1, 1, 1]
    assert len(a.ids) == 9


def test_a_name_that_is_alive_is_refused() -> None:
    s = new_scheduler()
    ask(s, "a", 3, max_new_tokens=1)
    with pytest.raises(UserError, match="rid='a'"):
        ask(s, "a", 3)
    finish(s)
    ask(s, "a", 3)


@pytest.mark.parametrize("when", ["waiting", "running", "in flight", "preempted"])
def test_an_abort_frees_everything(when: str) -> None:
    s = new_scheduler()
    answers = ask(s, "a", 6, n=2)
    if when != "waiting":
        step(s)
    if when == "preempted":
        s.retract_all()
    plan = s.plan() if when == "in flight" else None
    assert s.abort("a") == answers
    assert s.abort("a") == s.abort("unknown") == []
    assert all(x.finish == Finish("abort") for x in answers)
    s.check()
    if plan is not None:
        assert s.has_work  # its pages are still written to
        assert s.pool.device.free + s.pool.device.idle < s.pool.device.count
        assert s.commit(plan, {x: Outcome((7,)) for x in answers}) == []
        assert len(answers[0].ids) == 7
    assert not s.has_work
    assert s.pool.device.free + s.pool.device.idle == s.pool.device.count


def test_an_error_alone_ends_its_answer_and_what_it_read_is_forgotten() -> None:
    s = new_scheduler(chunk=8)
    (a,) = ask(s, "a", list(range(10)))
    (b,) = ask(s, "b", 6)
    step(s)
    assert len(list(s.tree.nodes())) == 3
    step(s, {"a": Outcome((), Finish("error", message="not finite"))})
    assert (a.state, b.state) == ("finished", "running")
    assert len(list(s.tree.nodes())) == 1
    ask(s, "c", list(range(10)))
    assert rows(s.plan())[1] == ("c", 0, 8)


def test_entries_of_old_weights_are_shared_with_nobody() -> None:
    s = new_scheduler()
    prompt = list(range(9))
    (a,) = ask(s, "a", prompt)
    step(s)
    s.set_version("1")
    (b,) = ask(s, "b", prompt, max_new_tokens=2)
    assert rows(step(s)) == [("a", 9, 1), ("b", 0, 9)]
    assert (a.oldest_version, b.oldest_version) == ("0", "1")
    s.abort("a")
    s.set_version("0", keep=True)
    assert s.tree.match(a.keys(2, SIZE)) == []


def test_entries_of_old_weights_are_not_continued_with_pages_of_the_new() -> None:
    s = new_scheduler(max_running=2, max_batched_tokens=4)
    prompt = list(range(13))
    ask(s, "a", prompt)
    step(s)
    s.set_version("1")
    ask(s, "b", prompt, priority=1, max_new_tokens=1)
    assert [rows(step(s)) for _ in range(4)][-1] == [("b", 12, 1), ("a", 4, 3)]


def test_what_was_retracted_is_read_again_under_new_weights() -> None:
    s = new_scheduler()
    (a,) = ask(s, "a", 9)
    step(s)
    s.retract_all()
    s.set_version("1")
    assert rows(step(s)) == [("a", 0, 10)]
    assert (a.cache_version, a.oldest_version) == ("1", "0")


# --------------------------------------------------------------------------- plans that overlap
def test_a_plan_can_be_made_while_another_runs() -> None:
    s = new_scheduler(max_running=2)
    ask(s, "a", 6)
    first = s.plan()
    ask(s, "b", 6)
    second = s.plan()
    assert (rows(first), rows(second), rows(s.plan())) == ([("a", 0, 6)], [("b", 0, 6)], [])
    land(s, first)
    third = s.plan()
    assert rows(third) == [("a", 6, 1)]
    land(s, second)
    land(s, third)
    with pytest.raises(PageError, match="not in flight"):
        s.commit(first, {})


def test_what_is_in_flight_is_not_preempted_nor_is_one_that_goes_ahead_of_it() -> None:
    s = new_scheduler(pages=4)
    (a,) = ask(s, "a", 3, max_new_tokens=12)
    prompt = s.plan()
    (b,) = ask(s, "b", 7, max_new_tokens=2)
    flying = s.plan()
    land(s, prompt)
    while len(a.ids) < 9:
        assert [item.sequence for item in step(s).items] == [a]
    assert s.plan().items == ()  # its third page has to come from "b"
    assert (a.state, b.state, s.preemptions) == ("running", "running", 0)
    land(s, flying)
    assert rows(step(s)) == [("a", 8, 1)]
    assert (b.state, s.preemptions) == ("preempted", 1)


def test_weights_and_retraction_wait_for_what_is_in_flight() -> None:
    s = new_scheduler()
    ask(s, "a", 6)
    plan = s.plan()
    with pytest.raises(PageError):
        s.retract_all()
    with pytest.raises(PageError):
        s.set_version("1")
    land(s, plan)
    s.set_version("1")


@pytest.mark.parametrize(
    "outcome",
    [Outcome(()), Outcome((1, 2, 3)), Outcome((1, 2, 3, 4), Finish("stop"))],
    ids=["nothing", "at the limit without an end", "more than was tried"],
)
def test_an_impossible_outcome_is_a_bug(outcome: Outcome) -> None:
    s = new_scheduler(drafts=2)
    ask(s, "a", 6, max_new_tokens=4)
    step(s)
    with pytest.raises(PageError):
        step(s, {"a": outcome})


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("context", {"context": 1}),
        ("max_running", {"max_running": 0}),
        ("chunk", {"chunk": 0}),
        ("drafts", {"drafts": -1}),
        ("max_batched_tokens", {"max_running": 4, "drafts": 3, "max_batched_tokens": 15}),
    ],
)
def test_impossible_options_are_refused(field: str, options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=field):
        new_scheduler(**options)
