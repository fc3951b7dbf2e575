"""The engine: prompts in, ids and log-probabilities out, many at a time, exactly. One step is one page.

    plan   = schedule         which tokens of which sequences run now, and what has to be copied first
    output = run              MTP drafts, one flat call of the trunk over everything, ids drawn, drafts checked
    deltas = commit           end or go on, give pages back, tell

`step` does the three in turn. `advance` runs the middle one in a thread of its own: while it runs, the caller tells
what the step before gave and takes new requests, and pages for the next step are found. The order of plans and commits
is the same, so no token changes. The first and the last are the `scheduler`'s, and here; the middle, all that needs the
model, is the `executor`'s; pages of and for other workers are in `lending`.

A greedy answer is the same cold, from cached pages, in chunks, beside strangers, preempted or with drafts, up to the
rounding of products of another size. The engine knows ids only; text is `sampler`'s for stops and grammars, and the
server's. Source: report section 3 (the engine of the rollouts). Read next: `scheduler`, `executor`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from glm5.model.glm5 import GLM5
from glm5.model.paged import PagedCache
from glm5.model.speculate import SpeculationStats
from glm5.serve.client import PauseMode, Stats, Unavailable, WeightGroup, WeightUpdate
from glm5.serve.config import EngineConfig
from glm5.serve.executor import AnswerState, Executor, StepOutput
from glm5.serve.graphs import Graphs
from glm5.serve.lending import Lending
from glm5.serve.pages import PAGE_SIZE, PagePool
from glm5.serve.prefix import PrefixTree, page_keys
from glm5.serve.request import Delta, Request, TokenInfo, check
from glm5.serve.sampler import Chosen, Sampler
from glm5.serve.scheduler import Scheduler
from glm5.serve.sequence import Outcome, Plan, Sequence
from glm5.serve.transfer import PageBytes
from glm5.serve.weights import WeightSource, no_memory
from glm5.text.tokenizer import Tokenizer
from glm5.utils.errors import ConfigError, UserError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Landed:
    """What one step gave one answer, before it is told."""

    answer: Sequence
    chosen: Chosen
    drafted: int
    prompt_info: tuple[TokenInfo | None, ...]
    routed: bytes
    version: str


@dataclass(frozen=True)
class _Flight:
    """A step that runs. answers: of all that it touches; leaving: those that were aborted meanwhile."""

    plan: Plan
    answers: dict[Sequence, AnswerState]
    work: Future[StepOutput]
    leaving: list[Sequence]


class Ranks(Protocol):
    """What an engine needs of several ranks (`glm5.serve.ranks`) beside a model that runs on all of them.

    Attributes:
        weights: whose updates reach all. pages, page_bytes, graphs: `PagedCache`, `PageBytes` and `Graphs` on all.
            sizes: of the mesh's axes by name.
    """

    weights: WeightSource
    pages: Callable[..., PagedCache]
    page_bytes: Callable[[PagedCache], PageBytes]
    graphs: Callable[..., Graphs]
    sizes: Mapping[str, int]


class Engine:
    """See the module.

    Args:
        model: in evaluation, on its device. tokenizer: needed for stop strings and constraints only.
        ranks: where the model's parts are on several ranks, of which this is the one that decides.

    Raises:
        ConfigError: a setting is out of range, or the model has what pages cannot hold.
    """

    def __init__(
        self,
        model: GLM5,
        config: EngineConfig | None = None,
        tokenizer: Tokenizer | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        config = config or EngineConfig()
        longest = model.config.max_position_embeddings
        if not 0 <= config.context <= longest:
            raise ConfigError("context", config.context, f"must be at most max_position_embeddings={longest}")
        self.model, self.config = model, config
        self.context = config.context or longest
        self.vocab_size = min(model.config.vocab_size, tokenizer.vocab_size if tokenizer else model.config.vocab_size)
        self.speculation = SpeculationStats()
        self.weight_version = "0"
        self._weights = WeightSource(model) if ranks is None else ranks.weights
        self._sizes = {} if ranks is None else dict(ranks.sizes)
        self._sampler = Sampler(self.vocab_size, model.config.eos_token_id, tokenizer)
        made = (PagedCache, Graphs) if ranks is None else (ranks.pages, ranks.graphs)
        sizes = dict(context=self.context, page_size=PAGE_SIZE)
        self.executor = Executor(model, config, self._sampler, new_pages=made[0], new_graphs=made[1], **sizes)
        self.cache, self._drafter = self.executor.cache, self.executor.drafter
        most = self.executor.pages * PAGE_SIZE + 1  # the last id of an answer has no entry
        if most < self.context:
            told = "texts may have %d tokens, not %d: so many fit into %d pages (memory_gib, pages)"
            log.warning(told, most, self.context, self.executor.pages)
            self.context = most
        self.pool = PagePool(self.executor.pages, config.host_pages, page_size=PAGE_SIZE)
        self.tree = PrefixTree(self.pool, policy=config.eviction, version=self.weight_version)
        self.scheduler = Scheduler(
            self.pool,
            self.tree,
            context=self.context,
            max_running=config.max_running,
            max_batched_tokens=config.max_batched_tokens,
            chunk=config.chunk,
            drafts=config.drafts,
        )
        page_bytes = PageBytes if ranks is None else ranks.page_bytes
        self.lending = Lending(self.scheduler, self.cache, self._drafter, self._go_on, page_bytes)
        self._answers: dict[Sequence, AnswerState] = {}
        self._flight: _Flight | None = None
        self._untold: list[_Landed] = []
        self._stalled = False
        self._released: set[str] = set()
        self._thread: ThreadPoolExecutor | None = None

    def warm(self) -> None:
        """Compile and record on a GPU what decode steps need, before the first request waits for it."""
        self.executor.warm()

    # ------------------------------------------------------------------ requests
    @property
    def has_work(self) -> bool:
        """Whether a step has something to do. While all wait for pages that other workers hold or send it has not."""
        may_run = not self._stalled and self.resting is None
        return (self.scheduler.has_work and may_run) or bool(self._untold)

    @property
    def resting(self) -> str | None:
        """Why no step can be made now, and what to do; None when one can."""
        if self._released:
            tags = ", ".join(sorted(self._released))
            return f"the memory of {tags} is released. Resume it with /resume_memory_occupation"
        missing = self._weights.missing
        if missing:
            return f"{len(missing)} weights have not come since their memory was released: {min(missing)} and others"
        return None

    def add(self, request: Request) -> None:
        """Accept a request; `step` then gives its deltas.

        Raises:
            UserError: it cannot be served. The message names the field. Unavailable: nothing can; see `resting`.
        """
        self._refuse(request)
        for sequence in self.scheduler.add(request):
            state = self._sampler.state(request, sequence.index, sequence.limit - sequence.prompt_tokens)
            self._answers[sequence] = AnswerState(state)
        self._go_on()

    def check(self, request: Request) -> int:
        """Refuse what `add` would refuse for what it asks, and compile its constraint.

        Returns:
            How many of its ids need not be read, since their pages are here.
        """
        self._refuse(request)
        keys = page_keys(request.input_ids[:-1], PAGE_SIZE)
        return len(self.tree.match(keys)) * PAGE_SIZE

    def prepare(self, request: Request) -> None:
        """Compile what the request is constrained to, in any thread, so that `add` finds it: it may take a second.

        Raises:
            UserError: it cannot be read, or is too large.
        """
        self._sampler.check(request.params)

    def _refuse(self, request: Request) -> None:
        if self.resting is not None:
            raise Unavailable(self.resting)
        check(request, vocab_size=self.vocab_size, context=self.context)
        config = self.model.config
        if request.params.routed_experts and not any(map(config.is_moe, range(config.num_hidden_layers))):
            raise UserError("routed_experts: this model has none", "Leave it out")
        if request.params.routed_experts and self.config.invariant:
            raise UserError("routed_experts: not offered in the invariant mode", "Leave one of them out")
        self._sampler.check(request.params)

    def abort(self, rid: str) -> None:
        """End a request without a word. An unknown one is no error."""
        for sequence in self.scheduler.abort(rid):
            self._close(sequence)
            self.lending.give_up(sequence)
        self._go_on()

    def return_lease(self, name: str) -> None:
        """See `Lending.return_lease`."""
        self.lending.return_lease(name)

    def _go_on(self) -> None:
        """What waits for pages may find some in the next step."""
        self._stalled = False

    # ------------------------------------------------------------------ a step
    def step(self) -> list[Delta]:
        """Schedule, run, commit. What it gave; nothing if there is nothing to do."""
        deltas = self.settle()
        self._begin(None)
        return deltas + self.settle()

    def advance(self, landed: Callable[[], None] | None = None) -> list[Delta]:
        """Take in the step that runs, waiting for it if need be, begin the next one, and say what the former gave.

        Args:
            landed: called, in any thread, when the step that begins here has run and `advance` would not wait.
        """
        done, self._untold = self._untold + self._land(), []
        if self._begin(landed):
            self.scheduler.prepare()
        return [self._delta(one) for one in done]

    def settle(self) -> list[Delta]:
        """Wait for the step that runs, if any. What it gave, and what else was not told."""
        done, self._untold = self._untold + self._land(), []
        return [self._delta(one) for one in done]

    @property
    def overlap(self) -> bool:
        """Whether `advance` is to be used."""
        return self.config.overlap

    @property
    def flying(self) -> bool:
        """Whether a step runs, so that `advance` would wait."""
        return self._flight is not None and not self._flight.work.done()

    def close(self) -> None:
        """End the thread in which steps run. The engine can be used again."""
        self._untold += self._land()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def _begin(self, landed: Callable[[], None] | None) -> bool:
        """Plan, and run: in another thread if `landed` is given. False if there is nothing to run."""
        plan = self.scheduler.plan()
        for copy in plan.copies:
            self.cache.copy(copy.kind, copy.source, copy.target)
        self._stalled = not plan.items
        for item, source in plan.loads:
            self.lending.begin_load(item, source, self.weight_version)
        if not plan.items:
            return False
        answers = {a: self._answers[a] for item in plan.items for a in (item.sequence, *item.answers)}
        if landed is None:
            work: Future[StepOutput] = Future()
            work.set_result(self.executor.run(plan, answers))
        else:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "model")
            work = self._thread.submit(self.executor.run, plan, answers)
            work.add_done_callback(lambda _: landed())
        self._flight = _Flight(plan, answers, work, [])
        return True

    def _land(self) -> list[_Landed]:
        """Wait for the step that runs, and commit it."""
        flight, self._flight = self._flight, None
        if flight is None:
            return []
        output = flight.work.result()
        took = self.scheduler.commit(flight.plan, {a: Outcome(c.ids, c.finish) for a, c in output.chosen.items()})
        each = zip(flight.plan.items, output.drafts, strict=True)
        of = {answer: (item.sequence, len(tried)) for item, tried in each for answer in item.answers}
        readers = [item.sequence for item in flight.plan.items if item.answers]
        read = {reader: flight.answers[reader].take_routed() for reader in readers}
        landed = []
        for answer in took:
            got, (reader, drafted) = output.chosen[answer], of[answer]
            if drafted:
                self.speculation.record(drafted, got.accepted)
            first = answer.generated == len(got.ids)
            prompt_info = tuple(flight.answers[reader].prompt_info) if first else ()
            routed = flight.answers[answer].tell_routed(answer, *read[reader])
            landed.append(_Landed(answer, got, drafted, prompt_info, routed, self.weight_version))
            if got.finish is not None:
                self.lending.keep_end(answer)
                self._close(answer)
        for answer in flight.leaving:
            self._close(answer)
        return landed

    def _delta(self, landed: _Landed) -> Delta:
        answer, got = landed.answer, landed.chosen
        return Delta(
            answer.request.rid,
            answer.index,
            got.ids,
            info=got.info,
            prompt_info=landed.prompt_info,
            finish=got.finish,
            trim=got.trim,
            prompt_tokens=answer.prompt_tokens,
            cached_tokens=answer.cached,
            drafted=landed.drafted,
            accepted=got.accepted,
            weight_version=answer.oldest_version or self.weight_version,
            version=landed.version,
            routed=landed.routed,
        )

    def _close(self, sequence: Sequence) -> None:
        if self._flight is not None and sequence in self._flight.answers:
            self._flight.leaving.append(sequence)
            return
        self._answers.pop(sequence, None)
        if self._drafter is not None:
            self._drafter.forget(sequence)

    # ------------------------------------------------------------------ between steps
    def pause(self, mode: PauseMode) -> None:
        """Prepare for a time without steps; `retract` gives all pages back, ids are kept. What the last step gave
        `settle` tells, or the next step."""
        self._untold += self._land()
        if mode == "retract":
            self.lending.end_loads()
            self.scheduler.retract_all()

    def resume(self) -> None:
        """Steps go on."""

    def flush_cache(self) -> bool:
        """Forget all prefixes; False, and nothing, while requests run."""
        if self.scheduler.running:
            return False
        self.tree.flush()
        return True

    @torch.no_grad()
    def update_weights(self, update: WeightUpdate, received: Mapping[str, Tensor] | None = None) -> None:
        """Replace the weights, MTP block included, all or none.

        Args:
            received: what `receive_weights` gave of them, where that was called.

        Raises:
            UserError: they cannot be read or do not fit.
        """
        self._untold += self._land()
        self._weights.apply(update, received)
        self.lending.end_loads()
        before, self.weight_version = self.weight_version, update.weight_version or self.weight_version
        self.scheduler.set_version(self.weight_version, keep=not update.flush_cache and self.weight_version != before)

    def receive_weights(self, update: WeightUpdate) -> dict[str, Tensor]:
        """Wait in any thread for the tensors that a group sends; steps go on, with the weights that are there.

        Raises:
            UserError: see `WeightSource.receive`.
        """
        return self._weights.receive(update)

    def join_group(self, group: WeightGroup) -> None:
        """Join, in any thread, a process group over which weights will come; it may take minutes."""
        self._weights.join(group)

    def leave_group(self, group_name: str) -> None:
        """Leave it, in any thread."""
        self._weights.leave(group_name)

    def checksum(self) -> dict[str, str]:
        """SHA-256 of every tensor by its public name.

        Raises:
            UserError: there are no weights now.
        """
        missing = len(self._weights.missing)
        if missing:
            what = f"no checksum: {missing} weights have not come since their memory was released"
            raise UserError(what, "Resume it where it is not back (/resume_memory_occupation), and update the weights")
        return self._weights.checksum()

    def release_memory(self, tags: tuple[str, ...]) -> None:
        """Give memory back: of the `weights`, which are lost; of the pages (`kv_cache`), with all prefixes; of recorded
        steps (`cuda_graph`), which also the other two make useless. Until all is resumed nothing runs.

        Requests that wait, or were retracted, stay.

        Raises:
            UserError: requests run, or other workers fetch pages.
        """
        self._untold += self._land()
        self.lending.end_loads()
        self.may_release()
        self.tree.flush()
        if "weights" in tags:
            self._weights.release()
        self.executor.release(pages="kv_cache" in tags)
        self._released |= set(tags)

    def may_release(self) -> None:
        """Refuse what `release_memory` would refuse. It stays as it is while no step is made.

        Raises:
            UserError: requests run, or other workers fetch pages.
        """
        if self.scheduler.running or any(self.pool.device.pins):
            what = f"{len(self.scheduler.running)} requests run, or their pages are being fetched"
            raise UserError(what, "Abort them, or pause with mode retract, before memory is released")

    def resume_memory(self, tags: tuple[str, ...]) -> tuple[str, ...]:
        """Take memory again, all of it or none. Resumed weights must come, all of them, before anything runs.

        Returns:
            What was taken. What was not released is no error.

        Raises:
            UserError: there is not so much memory.
        """
        back = self._released.intersection(tags)
        left, weights = self._released - back, "weights" in back
        try:
            if "kv_cache" in back:
                self.cache.resume()
            if weights:  # last: where leaders share experts all take them at once, and cannot give them back alone
                self._weights.resume()
            if back and not left:
                self.executor.record()
        except (RuntimeError, UserError) as error:
            told = no_memory(error)
            if told is None:
                raise
            if weights:
                self._weights.release()
            self.executor.release(pages="kv_cache" in back)
            raise told from None
        self._released = left
        self._go_on()
        return tuple(sorted(back))

    def stats(self) -> Stats:
        """A snapshot for the metrics."""
        device = self.pool.device
        free = device.free + device.idle
        return Stats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            cache_usage=1 - free / device.count,
            free_tokens=free * PAGE_SIZE,
            preemptions=self.scheduler.preemptions,
            prefix_queries=self.tree.queries,
            prefix_hits=self.tree.hits,
        )

    def info(self) -> dict[str, Any]:
        """Settings and figures, as JSON values."""
        return {
            **asdict(self.config),
            "context": self.context,
            "pages": self.pool.device.count,
            "bytes_per_page": self.cache.nbytes_per_page(),
            "accept_length": self.speculation.accept_length,
            "acceptance": self.speculation.acceptance,
            "recorded_steps": self.executor.recorded_steps,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "device": self.model.device.type,
            **self._sizes,
        }
