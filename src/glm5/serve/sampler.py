"""From logits to ids, for a batch of answers: what each may say next, one draw, and whether it ends there.

    logits -> penalties, bias -> forbidden ids (stops, grammar, thinking budget) -> temperature -> truncation -> draw

**Same seed, same text.** The noise of a draw depends on the seed, the answer's number and the position, and on nothing
else: not on the other rows, on chunks, on preemption, nor on drafts.

**Drafts.** Every row of a verified block is drawn as if its drafts were right. A draft counts while it is what was
drawn there, so the text is that of plain decoding, id by id, sampled or greedy. Drafts are drawn from the MTP layer's
distribution q with the noise of the same position; a draft is then right with a probability of at least
(1 - d) / (1 + d), where d is the total variation between p and q. No draft made without a look at p can promise more;
rejection sampling reaches 1 - d, but what it says depends on the drafts. Source: report section 2.1 (MTP); Daliri et
al., 2025, "Coupling without communication and drafter-invariant speculative decoding".

Read next: `answer`, `race`, `grammar`, `stops`.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from glm5.model.noise import noise_key
from glm5.serve.answer import Marks, Phase, SamplerState
from glm5.serve.grammar import Grammar, GrammarCompiler
from glm5.serve.race import figures, race, truncates
from glm5.serve.request import Constraint, Finish, Request, SamplingParams, TokenInfo
from glm5.serve.stops import StopMatcher
from glm5.text.tokenizer import Tokenizer
from glm5.utils.errors import UserError

ROWS_AT_ONCE = 128  # bounds the memory of a step; rows do not see each other
NOT_FINITE = "the logits have a NaN or no finite value"
NOTHING_LEFT = "no id may follow"


@dataclass(frozen=True)
class Chosen:
    """What one step gave one answer.

    Args:
        ids: at least one, unless `finish` is an error. info: one entry an id where asked for, else empty.
        accepted: how many drafts were right; they are the first of `ids`.
        finish, trim: as `Delta` has them.
    """

    ids: tuple[int, ...]
    info: tuple[TokenInfo, ...] = ()
    accepted: int = 0
    finish: Finish | None = None
    trim: int = 0


@dataclass(frozen=True)
class _Block:
    """An answer, drafts that are taken as right, and the rows of logits after its last id and after each draft; with
    `first`, only the rows after so many drafts and later."""

    state: SamplerState
    ahead: tuple[int, ...]
    first: int = 0

    @property
    def rows(self) -> int:
        return len(self.ahead) + 1 - self.first


@dataclass(frozen=True)
class _Row:
    """One draw. `fault` says why there is none."""

    id: int
    fault: str = ""
    info: TokenInfo | None = None


class Sampler:
    """Chooses ids for the answers of one engine.

    Args:
        vocab_size: ids below it exist; logits may be padded beyond.
        eos_ids: the model's own stop ids.
        tokenizer: needed for stop strings, constraints and thinking budgets only.
    """

    def __init__(self, vocab_size: int, eos_ids: Sequence[int], tokenizer: Tokenizer | None = None) -> None:
        self.vocab_size, self.eos_ids, self.tokenizer = vocab_size, tuple(eos_ids), tokenizer
        self._marks = Marks(tokenizer.special if tokenizer is not None else {})
        self._compiler: GrammarCompiler | None = None
        self._first = threading.Lock()  # constraints are compiled in any thread

    # ------------------------------------------------------------------------------------------ before the first id
    def check(self, params: SamplingParams) -> None:
        """Refuse what this sampler cannot do. It compiles the constraint, which may take a while, and remembers it:
        call it early, in any thread.

        Raises:
            UserError: it names the field.
        """
        if self.tokenizer is None and (params.stop or params.constraint or params.thinking_budget is not None):
            raise UserError("stop, constraint and thinking_budget need text", "Start the engine with a tokenizer")
        if params.thinking_budget is not None and self._marks.end_think is None:
            raise UserError("thinking_budget: the tokenizer has no </think>", "Use a GLM tokenizer")
        if params.constraint is not None:
            self._grammar(params.constraint)

    def state(self, request: Request, index: int, limit: int) -> SamplerState:
        """The state of answer `index` of a request, which gets at most `limit` ids.

        Raises:
            UserError: as `check`.
        """
        p = request.params
        self.check(p)
        thinking = self._marks.open_thinking(request.input_ids)
        waiting = p.constraint is not None and p.constraint.after_thinking and thinking
        return SamplerState(
            request,
            index,
            limit,
            stop_ids=frozenset((*(() if p.ignore_eos else self.eos_ids), *p.stop_token_ids)),
            seed=p.seed if p.seed is not None else secrets.randbits(63),
            phase=Phase(thinking, waiting),
            matcher=self._grammar(p.constraint).matcher() if p.constraint is not None else None,
            stops=StopMatcher(p.stop) if p.stop else None,
        )

    def _grammar(self, constraint: Constraint) -> Grammar:
        assert self.tokenizer is not None
        with self._first:
            if self._compiler is None:
                self._compiler = GrammarCompiler(self.tokenizer)
        return self._compiler.compile(constraint)

    # ------------------------------------------------------------------------------------------ a step
    def choose(
        self, logits_NV: Tensor, states: Sequence[SamplerState], drafts: Sequence[Sequence[int]] | None = None
    ) -> list[Chosen]:
        """Draw the next ids of every answer, and advance its state by them.

        Args:
            logits_NV: the trunk's, any float type: for each answer in order, the row after its last id, then one after
                each of its drafts.
            drafts: of each answer; None is none for all.

        Returns:
            For each answer the drafts that were right and one id more, cut where it finishes.
        """
        each = zip(states, drafts or [()] * len(states), strict=True)
        blocks = [_Block(state, tuple(ahead)) for state, ahead in each]
        rows = iter(list(self._draw(logits_NV, blocks, with_figures=True)))
        return [self._accept(block.state, block.ahead, islice(rows, block.rows)) for block in blocks]

    def draft(
        self, logits_BV: Tensor, states: Sequence[SamplerState], ahead: Sequence[Sequence[int]] | None = None
    ) -> list[int]:
        """One more draft for every answer, drawn as `choose` will draw there. No state changes.

        Args:
            logits_BV: the MTP layer's, one row an answer. ahead: its drafts so far; None is none for all.
        """
        each = zip(states, ahead or [()] * len(states), strict=True)
        blocks = [_Block(state, tuple(ids), first=len(ids)) for state, ids in each]
        return [row.id for row in self._draw(logits_BV, blocks, with_figures=False)]

    def prompt_info(self, logits_TV: Tensor, next_ids: Sequence[int], top: int) -> list[TokenInfo]:
        """Figures of a prompt's ids under the model's own distribution: `next_ids[t]` follows row t."""
        out: list[TokenInfo] = []
        for start in range(0, len(next_ids), ROWS_AT_ONCE):
            ids = next_ids[start : start + ROWS_AT_ONCE]
            logits = logits_TV[start : start + len(ids)].to(torch.float32, copy=True)
            logits[:, self.vocab_size :] = -torch.inf
            out += figures(logits.log_softmax(-1), torch.tensor(ids, device=logits.device), [top] * len(ids))
        return out

    # ------------------------------------------------------------------------------------------ drawing
    def _draw(self, logits_NV: Tensor, blocks: Sequence[_Block], with_figures: bool) -> Iterator[_Row]:
        """One draw for every row of every block, in groups of blocks that bound the memory."""
        start, rows = 0, 0
        group: list[_Block] = []
        for i, block in enumerate(blocks):
            group.append(block)
            rows += block.rows
            if rows >= ROWS_AT_ONCE or i == len(blocks) - 1:
                logits = logits_NV[start : start + rows]
                plain = all(block.state.plain for block in group)
                yield from self._largest(logits) if plain else self._draw_group(logits, group, with_figures)
                start, rows, group = start + rows, 0, []

    def _largest(self, logits_NV: Tensor) -> Iterator[_Row]:
        best_N, id_N = logits_NV[:, : self.vocab_size].max(-1)
        for id, sound in zip(id_N.tolist(), best_N.isfinite().tolist(), strict=True):
            yield _Row(id, "" if sound else NOT_FINITE)

    def _draw_group(self, logits_NV: Tensor, blocks: Sequence[_Block], with_figures: bool) -> Iterator[_Row]:
        x_NV = logits_NV.to(torch.float32, copy=True)  # with the padding, so that every row is aligned in memory
        x_NV[:, self.vocab_size :] = -torch.inf
        sound_N = x_NV.amax(-1).isfinite()
        start, params, keys = 0, [], []
        for block in blocks:
            state, position = block.state, block.state.count + block.first
            self._shape(x_NV[start : start + block.rows], block)
            start += block.rows
            params += [state.params] * block.rows
            if state.params.temperature > 0:
                keys += [noise_key(state.seed, state.index, position + row) for row in range(block.rows)]
        open_N = x_NV.amax(-1).isfinite()
        x_NV.masked_fill_(~open_N[:, None], 0.0)  # what cannot be drawn from must not stop the others
        best_N, id_N = x_NV.max(-1)

        sampled = [row for row, p in enumerate(params) if p.temperature > 0]
        wanted = [row for row, p in enumerate(params) if with_figures and (p.logprobs is not None or p.kept_set)]
        if sampled or wanted:
            # Subtracting first keeps tiny temperatures from overflowing to inf - inf, the bound from dividing 0 by 0.
            heat_N = x_NV.new_tensor([max(p.temperature, 1e-30) if p.temperature > 0 else 1.0 for p in params])
            x_NV = ((x_NV - best_N[:, None]) / heat_N[:, None]).log_softmax(-1)
        sets: dict[int, tuple[tuple[int, ...], float]] = {}
        if sampled:
            id_N[sampled], keep_SV = race(x_NV[sampled].exp(), [params[row] for row in sampled], keys)
            for i, row in enumerate(sampled):
                if with_figures and keep_SV is not None and params[row].kept_set and truncates(params[row]):
                    of_kept = float(x_NV[row].masked_fill(~keep_SV[i], -torch.inf).logsumexp(-1))
                    sets[row] = tuple(keep_SV[i].nonzero()[:, 0].tolist()), of_kept
        ids = id_N.tolist()
        infos: dict[int, TokenInfo] = {}
        if wanted:
            of_wanted = figures(x_NV[wanted], id_N[wanted], [params[row].logprobs or 0 for row in wanted])
            for row, info in zip(wanted, of_wanted, strict=True):
                if params[row].temperature == 0 and params[row].kept_set:
                    sets[row] = (ids[row],), info.logprob
                kept, of_kept = sets.get(row, (None, 0.0))
                infos[row] = replace(info, kept=kept, kept_logprob=of_kept)
        for row, (id, sound, is_open) in enumerate(zip(ids, sound_N.tolist(), open_N.tolist(), strict=True)):
            yield _Row(id, NOT_FINITE if not sound else "" if is_open else NOTHING_LEFT, infos.get(row))

    # ------------------------------------------------------------------------------------------ what may be said
    def _shape(self, x_RV: Tensor, block: _Block) -> None:
        """Turn one answer's logits into those of what it may say, in place."""
        state, ahead, first = block.state, block.ahead, block.first
        p = state.params
        if state.penalised:
            self._penalise(x_RV, block)
        if p.logit_bias:
            ids = torch.tensor(list(p.logit_bias), device=x_RV.device)
            x_RV[:, ids] += x_RV.new_tensor(list(p.logit_bias.values()))
        if state.unbounded:
            return
        phase, taken = state.phase, 0
        for j in range(len(ahead) + 1):
            if j >= first:
                self._forbid(x_RV[j - first], state, phase, state.count + j)
            # What follows a stop id, or a draft that the grammar refuses, is never reached.
            if j == len(ahead) or ahead[j] in state.stop_ids:
                break
            if state.matcher is not None and not phase.waiting:
                if not state.matcher.advance(ahead[j]):
                    break
                taken += 1
            phase = phase.after(ahead[j], self._marks)
        if state.matcher is not None:
            state.matcher.rollback(taken)

    def _penalise(self, x_RV: Tensor, block: _Block) -> None:
        state, p = block.state, block.state.params
        if state.histories is None:
            prompt_V = torch.zeros_like(x_RV[0], dtype=torch.bool)
            prompt_V[torch.tensor(state.request.input_ids, device=x_RV.device)] = True
            state.histories = torch.zeros_like(x_RV[0]), prompt_V
        counts_V, prompt_V = state.histories
        counts_RV = counts_V.repeat(block.rows, 1)
        for row in range(block.rows):
            for id in block.ahead[: block.first + row]:
                counts_RV[row, id] += 1
        fair_RV = torch.where(x_RV > 0, x_RV / p.repetition_penalty, x_RV * p.repetition_penalty)
        x_RV.copy_(torch.where(prompt_V | (counts_RV > 0), fair_RV, x_RV))
        x_RV -= p.frequency_penalty * counts_RV + p.presence_penalty * (counts_RV > 0)

    def _forbid(self, x_V: Tensor, state: SamplerState, phase: Phase, position: int) -> None:
        """Leave what may stand at one position."""
        p, stops = state.params, list(state.stop_ids)
        early = position < p.min_new_tokens
        if phase.thinking and p.thinking_budget is not None and phase.spent >= p.thinking_budget:
            x_V.fill_(-torch.inf)
            x_V[self._marks.end_think] = 0.0
        elif state.matcher is not None and not phase.waiting:
            may_V = np.zeros(len(x_V), dtype=bool)
            allowed = state.matcher.allowed()[: len(x_V)]
            may_V[: len(allowed)] = allowed
            may_V[stops] = False  # a stop id is never part of the form
            if state.matcher.complete and not (early and may_V.any()):
                may_V[stops] = True
            x_V.masked_fill_(~torch.from_numpy(may_V).to(x_V.device), -torch.inf)
        else:
            if phase.waiting and self._marks.tool_call is not None:
                stops.append(self._marks.tool_call)  # it would end the thinking, without the form
            if stops and (early or phase.waiting):  # an answer that owes a form cannot end before it
                x_V[stops] = -torch.inf

    # ------------------------------------------------------------------------------------------ accepting
    def _accept(self, state: SamplerState, ahead: tuple[int, ...], rows: Iterator[_Row]) -> Chosen:
        """Go along a block while its drafts are what was drawn, and end where the answer does."""
        assert state.finish is None
        ids: list[int] = []
        info: list[TokenInfo] = []
        accepted = trim = 0
        for row, draft in zip(list(rows), (*ahead, None), strict=True):
            if row.fault:
                why = state.matcher.error if state.matcher is not None else ""
                refused = row.fault == NOTHING_LEFT and state.matcher is not None
                said = f"{state.form}: {row.fault}" if refused else row.fault
                state.finish = Finish("error", message=f"{said}: {why}" if why else said, refused=refused)
                break
            ids.append(row.id)
            if row.info is not None:
                info.append(row.info)
            accepted += row.id == draft
            trim = self._advance(state, row.id)
            if state.finish is not None or row.id != draft:
                break
        return Chosen(tuple(ids), tuple(info), accepted, state.finish, trim)

    def _advance(self, state: SamplerState, id: int) -> int:
        """Take one id, and decide whether the answer ends with it: stop id, grammar, stop string, length.

        Returns:
            `Delta.trim`.
        """
        constrained = state.constrained
        state.count += 1
        if state.histories is not None:
            state.histories[0][id] += 1
        if id in state.stop_ids:  # a constraint has let it through only where the form was complete
            state.finish = Finish("stop", id)
            return 0
        state.phase = state.phase.after(id, self._marks)
        if constrained and state.matcher is not None:
            if not state.matcher.advance(id):
                state.finish = Finish("error", message=f"{state.form}: {state.matcher.error}", refused=True)
                return 0
            if state.matcher.finished:
                state.finish = Finish("stop")
                return 0
        if state.stops is not None and self.tokenizer is not None:
            match = state.stops.push(self.tokenizer.decode_bytes([id]))
            if match is not None and state.count >= state.params.min_new_tokens:
                state.finish = Finish("stop", match.stop)
                return match.after if state.params.no_stop_trim else match.trim
        if state.count >= state.limit:
            state.finish = Finish("length")
        return 0
