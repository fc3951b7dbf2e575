"""The engine: prompts in, ids and log-probabilities out, many at a time, exactly. One step is one page.

    plan = schedule         which tokens of which sequences run now, and what has to be copied first
    hidden = run            MTP drafts, then one flat call of the trunk over everything
    deltas = commit         draw, check drafts, end or go on, give pages back

`step` does the three in turn. `advance` runs the middle one in a thread of its own: while it runs, the caller tells
what the step before gave and takes new requests, and pages for the next step are found. The order of plans and commits
is the same, so no token changes.

A greedy answer is the same cold, from cached pages, in chunks, beside strangers, preempted or with drafts, up to the
rounding of products of another size. The engine knows ids only; text is `sampler`'s for stops and grammars, and the
server's. Source: report section 3 (the engine of the rollouts). Read next: `scheduler`, `glm5.model.paged`,
`speculate`, `sampler`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from glm5.model.glm5 import GLM5
from glm5.model.paged import PagedBatch, PagedCache, Run
from glm5.model.speculate import SpeculationStats
from glm5.model.trace import Trace
from glm5.serve import invariant
from glm5.serve.client import PauseMode, Stats, Unavailable, WeightGroup, WeightUpdate
from glm5.serve.config import EngineConfig
from glm5.serve.graphs import Graphs, recorder_for
from glm5.serve.lending import Lending
from glm5.serve.pages import PAGE_SIZE, PagePool
from glm5.serve.prefix import PrefixTree, page_keys
from glm5.serve.request import Delta, Request, SamplingParams, TokenInfo, check
from glm5.serve.sampler import ROWS_AT_ONCE, Chosen, Sampler, SamplerState
from glm5.serve.scheduler import Item, Outcome, Plan, Scheduler, Sequence
from glm5.serve.speculate import Drafter
from glm5.serve.weights import WeightSource
from glm5.text.tokenizer import Tokenizer
from glm5.utils.errors import ConfigError, UserError


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
    answers: dict[Sequence, _Answer]
    work: Future[tuple[list[list[int]], dict[Sequence, Chosen]]]
    leaving: list[Sequence]


@dataclass
class _Answer:
    """What the engine keeps of a sequence: what the sampler knows, and what is still to be told: figures of the prompt,
    and the experts of the tokens from `told` on, int32 [., layers, experts of a token]."""

    state: SamplerState
    prompt_info: list[TokenInfo | None] = field(default_factory=list)
    told: int = 0
    routed: list[Tensor] = field(default_factory=list)

    def route(self, start: int, routed_TLM: Tensor) -> None:
        """Tokens from `start` on were read, maybe not for the first time."""
        known = self.told + sum(map(len, self.routed))
        if start + len(routed_TLM) > known:
            self.routed.append(routed_TLM[known - start :])

    def take_routed(self) -> tuple[int, list[Tensor]]:
        """Where the experts that are still to be told begin, and what they are."""
        rows, self.routed = self.routed, []
        return self.told, rows


class Ranks(Protocol):
    """What an engine needs of several ranks (`glm5.serve.ranks`) beside a model that runs on all of them.

    Attributes:
        weights: whose updates reach all. pages: `PagedCache` on all.
    """

    weights: WeightSource
    pages: Callable[..., PagedCache]


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
        if config.drafts and not model.config.num_nextn_predict_layers:
            raise ConfigError("drafts", config.drafts, "this model has no MTP block to make them")
        longest = model.config.max_position_embeddings
        if not 0 <= config.context <= longest:
            raise ConfigError("context", config.context, f"must be at most max_position_embeddings={longest}")
        if config.invariant:
            invariant.check(model)
        self.model, self.config = model, config
        self.context = config.context or longest
        self.vocab_size = min(model.config.vocab_size, tokenizer.vocab_size if tokenizer else model.config.vocab_size)
        self.speculation = SpeculationStats()
        self._sampler = Sampler(self.vocab_size, model.config.eos_token_id, tokenizer)
        self._answers: dict[Sequence, _Answer] = {}
        self._stalled = False
        self._released: set[str] = set()
        self._flight: _Flight | None = None
        self._untold: list[_Landed] = []
        self._thread: ThreadPoolExecutor | None = None
        self.weight_version = "0"
        self._weights = WeightSource(model) if ranks is None else ranks.weights
        self._new_pages = PagedCache if ranks is None else ranks.pages
        self._allocate()

    def _allocate(self) -> None:
        """Pages and whoever counts them, all empty."""
        config, device = self.config, self.model.device
        options: dict[str, Any] = dict(draft=config.drafts > 0, device=device, dtype=self.model.dtype)
        pages = config.pages
        if pages == 0:
            one = PagedCache(self.model.config, 1, size=PAGE_SIZE, **options).nbytes_per_page()
            pages = min(int(config.memory_gib * 2**30 // one), config.max_running * -(-self.context // PAGE_SIZE))
        if pages < 1:
            raise ConfigError("memory_gib", config.memory_gib, "holds no page")
        record = recorder_for(device) if config.cuda_graphs else None
        spare = record is not None  # a page that is nobody's, for padding
        self.cache = self._new_pages(self.model.config, pages + spare, config.host_pages, size=PAGE_SIZE, **options)
        self._record(pages)
        self.pool = PagePool(pages, config.host_pages, page_size=PAGE_SIZE)
        self.tree = PrefixTree(self.pool, version=self.weight_version)
        self.scheduler = Scheduler(
            self.pool,
            self.tree,
            context=self.context,
            max_running=config.max_running,
            max_batched_tokens=config.max_batched_tokens,
            chunk=config.chunk,
            drafts=config.drafts,
        )
        self._drafter = Drafter(self.model, self.cache, self._sampler) if config.drafts else None
        self.lending = Lending(self.scheduler, self.cache, self._drafter, self._go_on)

    def _record(self, pages: int) -> None:
        """Begin to record decode steps, where that is possible."""
        if self.model.device.type == "cuda":
            self.model.lay_out()  # again where weights have been given new memory
        record = recorder_for(self.model.device) if self.config.cuda_graphs else None
        self._graphs = None
        if record is not None:
            limits = dict(most=self.config.max_running, context=self.context)
            self._graphs = Graphs(self.model, self.cache, spare=pages, record=record, **limits)

    @torch.inference_mode()
    def warm(self) -> None:
        """Compile and record on a GPU what decode steps need, before the first request waits for it."""
        if self._graphs is not None:
            self._graphs.warm(1 + self.config.drafts)

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
        if self.resting is not None:
            raise Unavailable(self.resting)
        check(request, vocab_size=self.vocab_size, context=self.context)
        self._check_routed(request.params)
        self._sampler.check(request.params)
        for sequence in self.scheduler.add(request):
            state = self._sampler.state(request, sequence.index, sequence.limit - sequence.prompt_tokens)
            self._answers[sequence] = _Answer(state)
        self._go_on()

    def check(self, request: Request) -> int:
        """Refuse what `add` would refuse for what it asks, and compile its constraint.

        Returns:
            How many of its ids need not be read, since their pages are here.
        """
        if self.resting is not None:
            raise Unavailable(self.resting)
        check(request, vocab_size=self.vocab_size, context=self.context)
        self._check_routed(request.params)
        self._sampler.check(request.params)
        keys = page_keys(request.input_ids[:-1], PAGE_SIZE)
        return len(self.tree.match(keys)) * PAGE_SIZE

    def _check_routed(self, params: SamplingParams) -> None:
        config = self.model.config
        if params.routed_experts and not any(map(config.is_moe, range(config.num_hidden_layers))):
            raise UserError("routed_experts: this model has none", "Leave it out")
        if params.routed_experts and self.config.invariant:
            raise UserError("routed_experts: not offered in the invariant mode", "Leave one of them out")

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
            work: Future[tuple[list[list[int]], dict[Sequence, Chosen]]] = Future()
            work.set_result(self._work(plan, answers))
        else:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "model")
            work = self._thread.submit(self._work, plan, answers)
            work.add_done_callback(lambda _: landed())
        self._flight = _Flight(plan, answers, work, [])
        return True

    @torch.inference_mode()
    def _work(self, plan: Plan, answers: dict[Sequence, _Answer]) -> tuple[list[list[int]], dict[Sequence, Chosen]]:
        """The part of a step that needs the model. What others may change meanwhile it has from its arguments only."""
        drafts, hidden, logits = self._run(plan, answers)
        return drafts, self._choose(plan, answers, drafts, hidden, logits)

    def _run(self, plan: Plan, answers: dict[Sequence, _Answer]) -> tuple[list[list[int]], list[Tensor], Tensor | None]:
        """Drafts of each item, the trunk's hidden states of its slots, [slots, D], and, where the step was recorded,
        the logits of all of them."""
        items = plan.items
        drafts: list[list[int]] = [[] for _ in items]
        if self._drafter is not None:
            drafts = self._drafter.propose(items, [answers[item.sequence].state for item in items])
        runs = [Run(item.pages, item.start, item.slots) for item in items]
        ids = [i.sequence.ids[i.start : i.start + i.count] + d for i, d in zip(items, drafts, strict=True)]
        recorded = None
        trace = Trace() if any(item.sequence.request.params.routed_experts for item in items) else None
        if self._graphs is not None and trace is None and all(item.count == len(item.answers) == 1 for item in items):
            recorded = self._graphs(runs, ids)
        if self.config.invariant:
            hidden = invariant.hidden(self.model, self.cache, runs, ids)
        elif recorded is not None:
            hidden = list(recorded[0].split(items[0].slots))
        else:
            batch = PagedBatch(self.cache, runs)
            flat = self.model.hidden(batch.flat(ids), cache=batch, trace=trace)[0]
            if trace is not None:
                routed_NLM = self._routed(trace)
                for at, item in zip(batch.offsets, items, strict=True):
                    if item.sequence.request.params.routed_experts:
                        answers[item.sequence].route(item.start, routed_NLM[at : at + item.slots])
            hidden = [flat[at : at + item.slots] for at, item in zip(batch.offsets, items, strict=True)]
        if self._drafter is not None:
            self._drafter.follow(items, hidden)
        return drafts, hidden, None if recorded is None else recorded[1]

    def _routed(self, trace: Trace) -> Tensor:
        """The experts of a call's rows, int32 [N, layers, experts of a token], zeros in layers without; on the CPU."""
        config, found = self.model.config, iter(trace.router)
        layers = [next(found)[2] if config.is_moe(i) else None for i in range(config.num_hidden_layers)]
        blank = next((torch.zeros_like(layer) for layer in layers if layer is not None), None)
        if blank is None:
            raise AssertionError("no layer has experts")  # `add` has refused the request
        return torch.stack([blank if layer is None else layer for layer in layers], 1).to("cpu", torch.int32)

    def _choose(
        self,
        plan: Plan,
        known: dict[Sequence, _Answer],
        drafts: list[list[int]],
        hidden: list[Tensor],
        logits: Tensor | None,
    ) -> dict[Sequence, Chosen]:
        """What every answer gets: of the rows after an item's last id and after each of its drafts."""
        answers, ahead, rows = [], [], []
        for item, tried, hidden_TD in zip(plan.items, drafts, hidden, strict=True):
            self._score_prompt(item, known[item.sequence].prompt_info, hidden_TD)
            for answer in item.answers:
                answers.append(answer)
                ahead.append(tried)
                rows.append(hidden_TD[item.count - 1 :])
        if not answers:
            return {}
        if logits is None:
            logits = self._head(torch.cat(rows))
        chosen = self._sampler.choose(logits, [known[answer].state for answer in answers], ahead)
        return dict(zip(answers, chosen, strict=True))

    def _score_prompt(self, item: Item, info: list[TokenInfo | None], hidden_TD: Tensor) -> None:
        """Log-probabilities of a prompt's ids, for whoever wants them."""
        sequence, top = item.sequence, item.sequence.request.params.prompt_logprobs
        if top is None or sequence.decoding or sequence.generated:
            return
        if item.start == 0:  # also when it begins again, having been preempted
            info[:] = [None]  # nothing comes before the first id
        next_ids = sequence.ids[item.start + 1 : item.start + item.count + 1]
        for at in range(0, len(next_ids), ROWS_AT_ONCE):  # logits of a whole chunk would be the largest tensor of all
            part = next_ids[at : at + ROWS_AT_ONCE]
            info += self._sampler.prompt_info(self._head(hidden_TD[at : at + len(part)]), part, top)

    def _head(self, hidden_ND: Tensor) -> Tensor:
        logits: Tensor = (
            invariant.head(self.model, hidden_ND) if self.config.invariant else self.model.lm_head(hidden_ND)
        )
        return logits

    def _land(self) -> list[_Landed]:
        """Wait for the step that runs, and commit it."""
        flight, self._flight = self._flight, None
        if flight is None:
            return []
        drafts, chosen = flight.work.result()
        took = self.scheduler.commit(flight.plan, {a: Outcome(c.ids, c.finish) for a, c in chosen.items()})
        each = zip(flight.plan.items, drafts, strict=True)
        of = {answer: (item.sequence, len(tried)) for item, tried in each for answer in item.answers}
        read = {
            item.sequence: flight.answers[item.sequence].take_routed() for item in flight.plan.items if item.answers
        }
        landed = []
        for answer in took:
            got, (reader, drafted) = chosen[answer], of[answer]
            if drafted:
                self.speculation.record(drafted, got.accepted)
            first = answer.generated == len(got.ids)
            prompt_info = tuple(flight.answers[reader].prompt_info) if first else ()
            routed = _routed_of(answer, flight.answers[answer], *read[reader])
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
    def update_weights(self, update: WeightUpdate) -> None:
        """Replace the weights, MTP block included, all or none.

        Raises:
            UserError: they cannot be read or do not fit.
        """
        self._untold += self._land()
        self._weights.apply(update)
        self.lending.end_loads()
        before, self.weight_version = self.weight_version, update.weight_version or self.weight_version
        self.scheduler.set_version(self.weight_version, keep=not update.flush_cache and self.weight_version != before)

    def join_group(self, group: WeightGroup) -> None:
        """Join a process group over which weights will come."""
        self._weights.join(group)

    def leave_group(self, group_name: str) -> None:
        """Leave it."""
        self._weights.leave(group_name)

    def checksum(self) -> dict[str, str]:
        """SHA-256 of every tensor by its public name.

        Raises:
            UserError: there are no weights now.
        """
        if self._weights.missing:
            raise UserError(f"no checksum: {self.resting}")
        return {
            name: hashlib.sha256(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
            for name, tensor in self._weights.tensors()
        }

    def release_memory(self, tags: tuple[str, ...]) -> None:
        """Give memory back: of the `weights`, which are lost; of the pages (`kv_cache`), with all prefixes; of recorded
        steps (`cuda_graph`), which also the other two make useless. Until all is resumed nothing runs.

        Requests that wait, or were retracted, stay.

        Raises:
            UserError: requests run, or other workers fetch pages.
        """
        self._untold += self._land()
        self.lending.end_loads()
        if self.scheduler.running or any(self.pool.device.pins):
            what = f"{len(self.scheduler.running)} requests run, or their pages are being fetched"
            raise UserError(what, "Abort them, or pause with mode retract, before memory is released")
        self.tree.flush()
        if "weights" in tags:
            self._weights.release()
        if "kv_cache" in tags:
            self.cache.release()
        self._graphs = None
        self._released |= set(tags)
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    def resume_memory(self, tags: tuple[str, ...]) -> None:
        """Take memory again. Resumed weights must come, all of them, before anything runs. What was not released is no
        error."""
        back = self._released.intersection(tags)
        if "weights" in back:
            self._weights.resume()
        if "kv_cache" in back:
            self.cache.resume()
        self._released -= back
        if back and not self._released:
            self._record(self.pool.device.count)
        self._go_on()

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
            "recorded_steps": self._graphs.replayed if self._graphs is not None else 0,
        }


def _routed_of(answer: Sequence, known: _Answer, begin: int, rows: list[Tensor]) -> bytes:
    """The experts of the tokens of an answer from `begin` on, but of the last, which has not been read."""
    end = len(answer.ids) - 1
    if not rows or end <= begin:
        return b""
    known.told = end
    return torch.cat(rows)[: end - begin].numpy().tobytes()
