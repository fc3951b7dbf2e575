"""What lies on the device, and the part of a step that needs it: drafts, one pass of the trunk, ids.

    drafts = MTP block        of each decoding item, as many as it asks for
    hidden = trunk            a recorded step of what decodes, and one flat call, or the invariant mode's, of the rest
    chosen = sampler          the head's logits of the rows that give ids, drafts checked

`Executor.run` is the three in turn, in whatever thread the engine chooses. The engine's other methods may be called
meanwhile, so all that they could change reaches it as an argument: the plan, and an `AnswerState` of each answer.
Read next: `speculate`, `graphs`, `glm5.model.paged`, `sampler`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from glm5.model.glm5 import GLM5
from glm5.model.paged import PagedBatch, PagedCache, Run
from glm5.model.trace import Trace
from glm5.serve import invariant
from glm5.serve.config import EngineConfig
from glm5.serve.graphs import Graphs, Recorder, recorder_for
from glm5.serve.request import TokenInfo
from glm5.serve.sampler import ROWS_AT_ONCE, Chosen, Sampler, SamplerState
from glm5.serve.sequence import Item, Plan, Sequence
from glm5.serve.speculate import Drafter
from glm5.utils.errors import ConfigError


@dataclass
class AnswerState:
    """What steps know of an answer, and what of it is still to be told.

    Attributes:
        sampler: what it draws with. prompt_info: figures of the prompt's ids.
        told, routed: the experts of the tokens from `told` on, int32 [., layers, experts of a token].
    """

    sampler: SamplerState
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

    def tell_routed(self, answer: Sequence, begin: int, rows: list[Tensor]) -> bytes:
        """The experts of the answer's tokens from `begin` on, but of the last, which has not been read."""
        end = len(answer.ids) - 1
        if not rows or end <= begin:
            return b""
        self.told = end
        return torch.cat(rows)[: end - begin].numpy().tobytes()


@dataclass(frozen=True)
class StepOutput:
    """What a step gave: the drafts that each item tried, and what each answer gets."""

    drafts: list[list[int]]
    chosen: dict[Sequence, Chosen]


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Inside it kernels are launched on this device, of several GPUs, in whatever thread: each has a current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class Executor:
    """A model, its pages, the MTP block beside it, and its recorded decode steps.

    Args:
        sampler: draws ids. context: tokens of a sequence at most. page_size: tokens of a page.
        new_pages, new_graphs: `PagedCache` and `Graphs`, or what makes them on several ranks.

    Attributes:
        cache: the pages. pages: how many there are to be given out. drafter: None where nothing is drafted.

    Raises:
        ConfigError: the memory holds no page, drafts without an MTP block, or what the invariant mode refuses.
    """

    def __init__(
        self,
        model: GLM5,
        config: EngineConfig,
        sampler: Sampler,
        *,
        context: int,
        page_size: int,
        new_pages: Callable[..., PagedCache] = PagedCache,
        new_graphs: Callable[..., Graphs] = Graphs,
    ) -> None:
        if config.drafts and not model.config.num_nextn_predict_layers:
            raise ConfigError("drafts", config.drafts, "this model has no MTP block to make them")
        if config.invariant:
            with on_device(model.device):
                invariant.check(model)
        self._model, self._config, self._sampler, self._context = model, config, sampler, context
        if config.kv_cache_dtype not in ("auto", "fp8_e4m3"):
            raise ConfigError("kv_cache_dtype", config.kv_cache_dtype, "must be auto or fp8_e4m3")
        fp8 = config.kv_cache_dtype == "fp8_e4m3"
        if fp8 and config.invariant:
            raise ConfigError("kv_cache_dtype", config.kv_cache_dtype, "is not of the invariant mode: leave one out")
        options: dict[str, Any] = dict(size=page_size, draft=config.drafts > 0, device=model.device, dtype=model.dtype)
        options["fp8"] = fp8
        self.pages = config.pages
        if self.pages < 0:
            raise ConfigError("pages", self.pages, "must be at least 0, which is as many as memory_gib holds")
        if config.max_running < 1:
            raise ConfigError("max_running", config.max_running, "must be at least 1")
        if self.pages == 0:
            one = PagedCache(model.config, 1, **options).nbytes_per_page()
            self.pages = min(int(config.memory_gib * 2**30 // one), config.max_running * -(-context // page_size))
        if self.pages < 1:
            raise ConfigError("memory_gib", config.memory_gib, "holds no page: give more, or a number of pages")
        self._new_graphs, self._alone = new_graphs, new_graphs is Graphs  # several ranks make the same calls
        spare = self._recorder() is not None  # a page that is nobody's, for padding
        self.cache = new_pages(model.config, self.pages + spare, config.host_pages, **options)
        self.drafter = Drafter(model, self.cache, sampler) if config.drafts else None
        self.record()

    # ------------------------------------------------------------------ recorded steps, and memory
    def record(self) -> None:
        """Begin to record decode steps, where that is possible. All memory must be there."""
        model, config = self._model, self._config
        if model.device.type == "cuda":
            model.lay_out()  # again where weights have been given new memory
        self._graphs: Graphs | None = None
        record, new = self._recorder(), self._new_graphs
        if record is None:
            return
        limits: dict[str, Any] = dict(spare=self.pages, most=config.max_running, context=self._context, record=record)
        queries = 1 + config.drafts
        self._graphs = new(model, self.cache, queries=queries, fixed=config.invariant, **limits)
        if self.drafter is not None:  # whose drafts change no answer, whatever operators make them
            first, next_ones = (new(model, self.cache, queries=n, draft=True, **limits) for n in (queries, 1))
            self.drafter.recorded = first, next_ones

    def _recorder(self) -> Recorder | None:
        """How steps are recorded, where they are."""
        return recorder_for(self._model.device) if self._config.cuda_graphs else None

    @torch.inference_mode()
    def warm(self) -> None:
        """Compile and record on a GPU what decode steps need, before the first request waits for it."""
        with on_device(self._model.device):
            for graphs in self._all_graphs():
                graphs.warm()

    def _all_graphs(self) -> list[Graphs]:
        of_drafts = self.drafter.recorded if self.drafter is not None else ()
        return [graphs for graphs in (self._graphs, *of_drafts) if graphs is not None]

    @property
    def recorded_steps(self) -> int:
        """Steps that ran from a recording, since recording began."""
        return self._graphs.replayed if self._graphs is not None else 0

    def release(self, *, pages: bool) -> None:
        """Give the memory of recorded steps back, and that of the pages, whose content is lost."""
        for graphs in self._all_graphs():  # first: other ranks' steps replay ours as long as they are there
            graphs.forget()
        self._graphs = None
        if self.drafter is not None:
            self.drafter.recorded = None, None
        if pages:
            self.cache.release()
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()

    # ------------------------------------------------------------------ a step
    @torch.inference_mode()
    def run(self, plan: Plan, answers: Mapping[Sequence, AnswerState]) -> StepOutput:
        """Run a plan, whose copies have been made. answers: of all its sequences and their answers."""
        with on_device(self._model.device):
            return self._run(plan.items, answers)

    def _run(self, items: tuple[Item, ...], answers: Mapping[Sequence, AnswerState]) -> StepOutput:
        drafts: list[list[int]] = [[] for _ in items]
        if self.drafter is not None:
            drafts = self.drafter.propose(items, [answers[item.sequence].sampler for item in items])
        hidden, logits = self._trunk(items, drafts, answers)
        if self.drafter is not None:
            self.drafter.follow(items, hidden)
        return StepOutput(drafts, self._choose(items, drafts, hidden, logits, answers))

    def _trunk(
        self, items: tuple[Item, ...], drafts: list[list[int]], answers: Mapping[Sequence, AnswerState]
    ) -> tuple[list[Tensor], Tensor | None]:
        """Hidden states of each item's slots, [slots, D], and, where the step was recorded, the logits of all."""
        runs = [Run(item.pages, item.start, item.slots) for item in items]
        ids = [i.sequence.ids[i.start : i.start + i.count] + d for i, d in zip(items, drafts, strict=True)]
        routed = [item for item in items if item.sequence.request.params.routed_experts]
        decodes = [item.count == len(item.answers) == 1 for item in items]
        if self._graphs is not None and all(decodes) and not routed:
            recorded = self._graphs(runs, ids)
            if recorded is not None:
                return list(recorded[0].split([item.slots for item in items])), recorded[1]
        elif self._graphs is not None and self._alone and any(decodes) and not routed:
            # Beside prompts, too: launched one by one, a step of many sequences takes longer than both calls.
            some, others = ([i for i, decode in enumerate(decodes) if decode is of] for of in (True, False))
            recorded = self._graphs([runs[i] for i in some], [ids[i] for i in some])
            if recorded is not None:
                both = dict(zip(some, recorded[0].split([items[i].slots for i in some]), strict=True))
                rest, _ = self._trunk(tuple(items[i] for i in others), [drafts[i] for i in others], answers)
                both |= zip(others, rest, strict=True)
                return [both[i] for i in range(len(items))], None
        if self._config.invariant:
            return invariant.hidden(self._model, self.cache, runs, ids), None
        trace = Trace() if routed else None
        batch = PagedBatch(self.cache, runs)
        flat_ND = self._model.hidden(batch.flat(ids), cache=batch, trace=trace)[0]
        at = dict(zip(items, batch.offsets, strict=True))
        if trace is not None:
            routed_NLM = self._routed(trace)
            for item in routed:
                answers[item.sequence].route(item.start, routed_NLM[at[item] : at[item] + item.slots])
        return [flat_ND[at[item] : at[item] + item.slots] for item in items], None

    def _routed(self, trace: Trace) -> Tensor:
        """The experts of a call's rows, int32 [N, layers, experts of a token], zeros in layers without; on the CPU."""
        config, found = self._model.config, iter(trace.router)
        layers = [next(found)[2] if config.is_moe(i) else None for i in range(config.num_hidden_layers)]
        blank = next((torch.zeros_like(layer) for layer in layers if layer is not None), None)
        if blank is None:
            raise AssertionError("no layer has experts")  # `Engine.add` has refused the request
        return torch.stack([blank if layer is None else layer for layer in layers], 1).to("cpu", torch.int32)

    def _choose(
        self,
        items: tuple[Item, ...],
        drafts: list[list[int]],
        hidden: list[Tensor],
        logits: Tensor | None,
        known: Mapping[Sequence, AnswerState],
    ) -> dict[Sequence, Chosen]:
        """What every answer gets: of the rows after an item's last id and after each of its drafts."""
        answers, ahead, rows = [], [], []
        for item, tried, hidden_TD in zip(items, drafts, hidden, strict=True):
            self._score_prompt(item, known[item.sequence].prompt_info, hidden_TD)
            for answer in item.answers:
                answers.append(answer)
                ahead.append(tried)
                rows.append(hidden_TD[item.count - 1 :])
        if not answers:
            return {}
        if logits is None:
            logits = self._head(torch.cat(rows))
        chosen = self._sampler.choose(logits, [known[answer].sampler for answer in answers], ahead)
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
        """Logits [N, V]."""
        if self._config.invariant:
            return invariant.head(self._model, hidden_ND)
        logits: Tensor = self._model.lm_head(hidden_ND)
        return logits
