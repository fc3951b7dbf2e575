"""From logits to ids, for a batch of answers: what each may say next, one draw, and whether it ends there.

    logits -> penalties, bias -> forbidden ids (stops, grammar, thinking budget) -> temperature -> truncation -> draw

**Same seed, same text.** The noise of a draw is a hash of (seed, answer, position, id), so it depends on nothing
else: not on the other rows, on chunks, on preemption, nor on drafts. With E_i that noise, exponentially distributed,
the id drawn is the one of largest p_i / E_i, which is distributed as p (the Gumbel-max trick, or an exponential race).

**Drafts.** Every row of a verified block is drawn as if its drafts were right. A draft counts while it is what was
drawn there, so the text is that of plain decoding, id by id, sampled or greedy. Drafts are drawn from the MTP layer's
distribution q with the noise of the same position; a draft is then right with a probability of at least
(1 - d) / (1 + d), d being the total variation between p and q. No draft made without a look at p can promise more;
rejection sampling reaches 1 - d, but what it says depends on the drafts. Source: report section 2.1 (MTP); Daliri et
al., 2025, "Coupling without communication and drafter-invariant speculative decoding". Read next: `grammar`, `engine`.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from glm5.model.sampling import kept
from glm5.serve.grammar import GrammarCompiler, Matcher
from glm5.serve.request import Constraint, Finish, Request, SamplingParams, TokenInfo
from glm5.serve.stops import StopMatcher
from glm5.text.tokenizer import Tokenizer
from glm5.utils.errors import UserError

NOT_FINITE = "the logits have a NaN or no finite value"
NOTHING_LEFT = "no id may follow"
ROWS_AT_ONCE = 128  # bounds the memory of the steps below; rows do not see each other


@dataclass(frozen=True)
class Chosen:
    """What one step gave one answer.

    Args:
        ids: at least one, unless `finish` is an error. info: one entry an id where asked for, else empty.
        accepted: how many drafts were right and are among `ids`.
        finish, trim: as `Delta` has them.
    """

    ids: tuple[int, ...]
    info: tuple[TokenInfo, ...] = ()
    accepted: int = 0
    finish: Finish | None = None
    trim: int = 0


@dataclass(frozen=True)
class _Phase:
    """Where an answer is between its marks. `waiting`: its constraint begins after this thinking block."""

    thinking: bool
    spent: int = 0
    waiting: bool = False

    def after(self, id: int, think: int | None, end_think: int | None) -> _Phase:
        if self.thinking:
            return _Phase(False) if id == end_think else replace(self, spent=self.spent + 1)
        return _Phase(True) if id is not None and id == think else self


class SamplerState:
    """What the sampler knows of one answer. Make it with `Sampler.state`; it survives preemption unchanged."""

    def __init__(
        self,
        request: Request,
        index: int,
        limit: int,
        stop_ids: frozenset[int],
        phase: _Phase,
        matcher: Matcher | None,
        stops: StopMatcher | None,
    ) -> None:
        params = request.params
        self.params, self.index, self.limit, self.stop_ids = params, index, limit, stop_ids
        self.seed = params.seed if params.seed is not None else secrets.randbits(63)
        self.count = 0  # ids of this answer so far
        self.finish: Finish | None = None
        self.phase, self.matcher, self.stops = phase, matcher, stops
        self.penalised = bool(params.frequency_penalty or params.presence_penalty or params.repetition_penalty != 1)
        self._prompt = request.input_ids
        self.counts_V: Tensor | None = None  # of generated ids, made when first needed
        self.seen_V: Tensor | None = None  # ids of prompt and answer

    @property
    def constrained(self) -> bool:
        return self.matcher is not None and not self.phase.waiting

    @property
    def unbounded(self) -> bool:
        """Any id may come next."""
        p = self.params
        return self.matcher is None and p.thinking_budget is None and self.count >= p.min_new_tokens

    @property
    def plain(self) -> bool:
        """The next id is that of the largest logit, and nobody asks more."""
        p = self.params
        asked = p.logprobs is not None or p.kept_set
        return p.temperature == 0 and not asked and not p.logit_bias and not self.penalised and self.unbounded

    def histories(self, x_RV: Tensor) -> tuple[Tensor, Tensor]:
        """Counts of generated ids fp32 [V], and ids seen at all bool [V]."""
        if self.counts_V is None or self.seen_V is None:
            self.counts_V = torch.zeros_like(x_RV[0])
            self.seen_V = torch.zeros_like(x_RV[0], dtype=torch.bool)
            self.seen_V[torch.tensor(self._prompt, device=x_RV.device)] = True
        return self.counts_V, self.seen_V


@dataclass(frozen=True)
class _Block:
    """An answer with drafts that are taken as right, and the logits after its last id and after each; or, with `first`,
    only those after `first` drafts and later."""

    state: SamplerState
    ahead: tuple[int, ...]
    first: int = 0

    @property
    def rows(self) -> int:
        return len(self.ahead) + 1 - self.first

    def noise_keys(self) -> list[tuple[int, int]]:
        """Of each row's noise: 64 bits of a hash, as two signed words."""
        state, start = self.state, self.state.count + self.first
        seeds = (struct.pack("<qqq", state.seed, state.index, start + row) for row in range(self.rows))
        return [struct.unpack("<ii", blake2b(seed, digest_size=8).digest()) for seed in seeds]


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
        special = tokenizer.special if tokenizer is not None else {}
        self._think, self._end_think = special.get("<think>"), special.get("</think>")
        self._compiler: GrammarCompiler | None = None

    # ------------------------------------------------------------------------------------------ before the first id
    def check(self, params: SamplingParams) -> None:
        """Refuse what this sampler cannot do, and compile the constraint, which may take a while: call it early.

        Raises:
            UserError: it names the field.
        """
        if self.tokenizer is None and (params.stop or params.constraint or params.thinking_budget is not None):
            raise UserError("stop, constraint and thinking_budget need text", "start the engine with a tokenizer")
        if params.thinking_budget is not None and self._end_think is None:
            raise UserError("thinking_budget: the tokenizer has no </think>", "use a GLM tokenizer")
        if params.constraint is not None:
            self._matcher(params.constraint)

    def state(self, request: Request, index: int, limit: int) -> SamplerState:
        """The state of answer `index` of a request, which gets at most `limit` ids.

        Raises:
            UserError: as `check`.
        """
        params = request.params
        self.check(params)
        eos = () if params.ignore_eos else self.eos_ids
        thinking = self._opens_thinking(request.input_ids)
        waiting = params.constraint is not None and params.constraint.after_thinking and thinking
        return SamplerState(
            request,
            index,
            limit,
            frozenset((*eos, *params.stop_token_ids)),
            _Phase(thinking, 0, waiting),
            self._matcher(params.constraint) if params.constraint is not None else None,
            StopMatcher(params.stop) if params.stop else None,
        )

    def _matcher(self, constraint: Constraint) -> Matcher:
        assert self.tokenizer is not None
        if self._compiler is None:
            self._compiler = GrammarCompiler(self.tokenizer)
        return self._compiler.compile(constraint).matcher()

    def _opens_thinking(self, ids: Sequence[int]) -> bool:
        """Whether the last mark of a prompt is `<think>`."""
        marks = {self._think, self._end_think}
        return self._think is not None and next((i for i in reversed(ids) if i in marks), None) == self._think

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
            For each answer its accepted drafts and one id more, cut where it finishes.
        """
        each = zip(states, drafts or [()] * len(states), strict=True)
        blocks = [_Block(state, tuple(ahead)) for state, ahead in each]
        rows = iter(list(self._draw(logits_NV, blocks, figures=True)))
        return [self._accept(block.state, block.ahead, list(islice(rows, block.rows))) for block in blocks]

    def draft(
        self, logits_BV: Tensor, states: Sequence[SamplerState], ahead: Sequence[Sequence[int]] | None = None
    ) -> list[int]:
        """One more draft for every answer, from the MTP layer's logits, with the noise that `choose` will use there.

        Args:
            logits_BV: one row an answer. ahead: its drafts so far; None is none for all.
        """
        each = zip(states, ahead or [()] * len(states), strict=True)
        blocks = [_Block(state, tuple(ids), first=len(ids)) for state, ids in each]
        return [row.id for row in self._draw(logits_BV, blocks, figures=False)]

    def prompt_info(self, logits_TV: Tensor, next_ids: Sequence[int], top: int) -> list[TokenInfo]:
        """Figures of a prompt's ids under the model's own distribution: row t is what `next_ids[t]` follows."""
        out: list[TokenInfo] = []
        for start in range(0, len(next_ids), ROWS_AT_ONCE):
            ids = next_ids[start : start + ROWS_AT_ONCE]
            logits = logits_TV[start : start + len(ids)].float().clone()
            logits[:, self.vocab_size :] = -torch.inf
            logprobs = logits.log_softmax(-1)
            out += _figures(logprobs, torch.tensor(ids, device=logits.device), [top] * len(ids))
        return out

    # ------------------------------------------------------------------------------------------ drawing
    def _draw(self, logits_NV: Tensor, blocks: Sequence[_Block], figures: bool) -> Iterator[_Row]:
        """One draw for every row of every block, block by block, in groups that bound the memory."""
        start, group, rows = 0, [], 0
        for i, block in enumerate(blocks):
            group.append(block)
            rows += block.rows
            if rows >= ROWS_AT_ONCE or i == len(blocks) - 1:
                yield from self._draw_group(logits_NV[start : start + rows], group, figures)
                start, group, rows = start + rows, [], 0

    def _draw_group(self, logits_NV: Tensor, blocks: Sequence[_Block], figures: bool) -> list[_Row]:
        if all(block.state.plain for block in blocks):
            best_N, id_N = logits_NV[:, : self.vocab_size].max(-1)
            pairs = zip(id_N.tolist(), best_N.isfinite().tolist(), strict=True)
            return [_Row(id, "" if sound else NOT_FINITE) for id, sound in pairs]

        x_NV = logits_NV.to(torch.float32, copy=True)  # all ids, padding too: rows stay aligned in memory
        x_NV[:, self.vocab_size :] = -torch.inf
        sound_N = x_NV.amax(-1).isfinite()
        x_NV.masked_fill_(~sound_N[:, None], 0.0)
        start, params = 0, []
        for block in blocks:
            self._shape(x_NV[start : start + block.rows], block)
            start += block.rows
            params += [block.state.params] * block.rows
        best_N = x_NV.amax(-1)
        open_N = best_N > -torch.inf
        id_N = x_NV.argmax(-1)

        sampled = [row for row, p in enumerate(params) if p.temperature > 0]
        wanted = [row for row, p in enumerate(params) if figures and (p.logprobs is not None or p.kept_set)]
        sets: dict[int, tuple[int, ...]] = {}
        if sampled or wanted:
            heat_N = x_NV.new_tensor([max(p.temperature, 1e-30) if p.temperature > 0 else 1.0 for p in params])
            x_NV = ((x_NV - best_N.nan_to_num(neginf=0.0)[:, None]) / heat_N[:, None]).log_softmax(-1)
        if sampled:
            keys = [key for block in blocks if block.state.params.temperature > 0 for key in block.noise_keys()]
            id_N[sampled], keep_SV = _race(x_NV[sampled].exp(), [params[row] for row in sampled], keys)
            for i, row in enumerate(sampled):
                if keep_SV is not None and params[row].kept_set and _truncates(params[row]) and figures:
                    sets[row] = tuple(keep_SV[i].nonzero()[:, 0].tolist())
        ids = id_N.tolist()
        infos: dict[int, TokenInfo] = {}
        if wanted:
            tops = [params[row].logprobs or 0 for row in wanted]
            for row, info in zip(wanted, _figures(x_NV[wanted], id_N[wanted], tops), strict=True):
                only = (ids[row],) if params[row].temperature == 0 and params[row].kept_set else None
                infos[row] = replace(info, kept=sets.get(row, only))
        faults = [
            NOT_FINITE if not sound else ("" if is_open else NOTHING_LEFT)
            for sound, is_open in zip(sound_N.tolist(), open_N.tolist(), strict=True)
        ]
        return [_Row(id, fault, infos.get(row)) for row, (id, fault) in enumerate(zip(ids, faults, strict=True))]

    def _shape(self, x_RV: Tensor, block: _Block) -> None:
        """Turn one answer's logits into those of what it may say, in place."""
        state, ahead, first = block.state, block.ahead, block.first
        p = state.params
        if state.penalised:
            counts_V, seen_V = state.histories(x_RV)
            counts_RV = counts_V.expand_as(x_RV).clone()
            for row in range(block.rows):
                for id in ahead[: first + row]:
                    counts_RV[row, id] += 1
            seen_RV = seen_V | (counts_RV > 0)
            fair_RV = torch.where(x_RV > 0, x_RV / p.repetition_penalty, x_RV * p.repetition_penalty)
            x_RV.copy_(torch.where(seen_RV, fair_RV, x_RV))
            x_RV -= p.frequency_penalty * counts_RV + p.presence_penalty * (counts_RV > 0)
        if p.logit_bias:
            ids = torch.tensor(list(p.logit_bias), device=x_RV.device)
            x_RV[:, ids] += x_RV.new_tensor(list(p.logit_bias.values()))
        if state.unbounded:
            return

        phase, taken = state.phase, 0
        for j in range(len(ahead) + 1):
            if j >= first:
                self._forbid(x_RV[j - first], state, phase, state.count + j)
            # What follows a stop id or what the grammar refuses is never reached.
            if j == len(ahead) or ahead[j] in state.stop_ids:
                break
            if state.matcher is not None and not phase.waiting:
                if not state.matcher.advance(ahead[j]):
                    break
                taken += 1
            phase = phase.after(ahead[j], self._think, self._end_think)
        if state.matcher is not None:
            state.matcher.rollback(taken)

    def _forbid(self, x_V: Tensor, state: SamplerState, phase: _Phase, position: int) -> None:
        """Leave what may stand at one position."""
        p, stops = state.params, list(state.stop_ids)
        if phase.thinking and p.thinking_budget is not None and phase.spent >= p.thinking_budget:
            x_V.fill_(-torch.inf)
            x_V[self._end_think] = 0.0
            return
        early = position < p.min_new_tokens
        if state.matcher is not None and not phase.waiting:
            may = np.zeros(len(x_V), dtype=bool)
            allowed = state.matcher.allowed()
            may[: len(allowed)] = allowed
            may[stops] = False  # a stop id is never part of the form
            if state.matcher.complete and not (early and may.any()):
                may[stops] = True
            x_V.masked_fill_(~torch.from_numpy(may).to(x_V.device), -torch.inf)
        elif stops and (early or phase.waiting):  # an answer that owes a form cannot end before it
            x_V[stops] = -torch.inf

    # ------------------------------------------------------------------------------------------ accepting
    def _accept(self, state: SamplerState, ahead: tuple[int, ...], rows: Sequence[_Row]) -> Chosen:
        """Go along a block while its drafts are what was drawn, and end where the answer does."""
        assert state.finish is None
        ids: list[int] = []
        info: list[TokenInfo] = []
        accepted = trim = 0
        for j, row in enumerate(rows):
            if row.fault:
                why = state.matcher.error if state.matcher is not None else ""
                state.finish = Finish("error", message=f"{row.fault}: {why}" if why else row.fault)
                break
            ids.append(row.id)
            if row.info is not None:
                info.append(row.info)
            right = j < len(ahead) and row.id == ahead[j]
            accepted += right
            trim = self._advance(state, row.id)
            if state.finish is not None or not right:
                break
        return Chosen(tuple(ids), tuple(info), accepted, state.finish, trim)

    def _advance(self, state: SamplerState, id: int) -> int:
        """Take one id, and decide whether the answer ends with it: grammar, stop id, stop string, length.

        Returns:
            `Delta.trim`.
        """
        p, constrained = state.params, state.constrained
        state.count += 1
        if state.counts_V is not None and state.seen_V is not None:
            state.counts_V[id] += 1
            state.seen_V[id] = True
        if id in state.stop_ids:
            state.finish = Finish("stop", id)
            return 0
        if constrained and state.matcher is not None:
            if not state.matcher.advance(id):
                state.finish = Finish("error", message=f"constraint: {state.matcher.error}")
                return 0
            if state.matcher.finished:
                state.finish = Finish("stop")
                return 0
        state.phase = state.phase.after(id, self._think, self._end_think)
        if state.stops is not None and self.tokenizer is not None:
            match = state.stops.push(self.tokenizer.decode_bytes([id]))
            if match is not None and state.count >= p.min_new_tokens:
                state.finish = Finish("stop", match.stop)
                return match.after if p.no_stop_trim else match.trim
        if state.count >= state.limit:
            state.finish = Finish("length")
        return 0


# ---------------------------------------------------------------------------------------------- the mathematics
def exponentials(keys: Sequence[tuple[int, int]], width: int, device: torch.device) -> Tensor:
    """Noise of the exponential distribution, one row a key, fp32 [len(keys), width]: a hash of key and column.

    Two rounds of the 32-bit finalizer of MurmurHash3, each on one word of the key; 31 bits make a uniform number.
    """
    words = torch.tensor(keys, dtype=torch.int32, device=device)
    h = torch.arange(width, dtype=torch.int32, device=device) ^ words[:, :1]
    _mix(h)
    h += words[:, 1:]
    _mix(h)
    # Small numbers decide a race, and float32 is fine near 0, so it is 1 that is cut off.
    uniform = ((h & 0x7FFFFFFF).float() + 0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_()


def _mix(h: Tensor) -> None:
    """MurmurHash3's finalizer, in place on int32: shifts are made logical, products wrap."""
    h ^= (h >> 16) & 0xFFFF
    h *= 0x85EBCA6B - 2**32
    h ^= (h >> 13) & 0x7FFFF
    h *= 0xC2B2AE35 - 2**32
    h ^= (h >> 16) & 0xFFFF


def _race(
    probs_SV: Tensor, params: Sequence[SamplingParams], keys: Sequence[tuple[int, int]]
) -> tuple[Tensor, Tensor | None]:
    """Truncate and draw: ids int64 [S], and what could be drawn bool [S, V] (None: all)."""
    keep_SV = None
    if any(map(_truncates, params)):
        top_k = torch.tensor([max(p.top_k, 0) for p in params], device=probs_SV.device)
        top_p = torch.tensor([p.top_p for p in params], dtype=torch.double, device=probs_SV.device)
        keep_SV = kept(probs_SV, top_k, top_p, probs_SV.new_tensor([p.min_p for p in params]))
        probs_SV = probs_SV.masked_fill(~keep_SV, 0.0)
    return (probs_SV / exponentials(keys, probs_SV.shape[1], probs_SV.device)).argmax(-1), keep_SV


def _truncates(p: SamplingParams) -> bool:
    return p.top_k > 0 or p.top_p < 1 or p.min_p > 0


def _figures(logprobs_NV: Tensor, id_N: Tensor, tops: Sequence[int]) -> list[TokenInfo]:
    """Each id's log-probability, and those of the likeliest ids that can occur at all."""
    own = logprobs_NV.gather(-1, id_N[:, None])[:, 0].tolist()
    best = logprobs_NV.topk(max(tops))
    likeliest = [
        list(zip(*pair, strict=True)) for pair in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
    return [
        TokenInfo(logprob, tuple((id, value) for id, value in pairs[:top] if value > -torch.inf))
        for logprob, pairs, top in zip(own, likeliest, tops, strict=True)
    ]
