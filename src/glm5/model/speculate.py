"""Speculative decoding with the shared MTP block: k drafts, one verification, the same tokens as without.

    trunk holds L tokens, t is the next        MTP at slot L - 1 reads (trunk hidden, t)  -> draft 1
                                               MTP at slot L reads (its own output, d1)   -> draft 2, and so on
    trunk reads [t, d1 .. dk] in one call   -> accepts the first j drafts and adds one token of its own

Drafts are accepted while they equal the trunk's choice. That choice is a draw with the noise of its position, whatever
the drafts are, so the text is that of plain decoding, greedy or sampled. Drafts are drawn from the block's distribution
q with the same noise, and are right with a probability of at least (1 - d) / (1 + d), d being the total variation
between p and q (Daliri et al., 2025). The engine's rule is the same (`glm5.serve.sampler`).

After a verification the cache is cropped to what was accepted, and the MTP layer's slots are written again from the
trunk's own hidden states, in the same call that makes the next draft 1. The equality holds up to rounding: a call of
k + 1 tokens may round otherwise than k + 1 calls, and where two tokens tie that closely, either may win. Source: report
section 2.1 (parameter-shared MTP). Read next: `generate`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from glm5.model.cache import Cache, DraftPlace
from glm5.model.glm5 import GLM5
from glm5.model.sampling import Sampling

# Tokens that may wait for the next draft's call: more are a prompt's chunk, whose call is better made at once.
WAITING_AT_MOST = 16


@dataclass
class SpeculationStats:
    """Counts of speculative decoding, over any number of calls.

    After use: `steps` verifications; `drafted` and `accepted` drafts by position (index 0 is the first draft). A
    draft counts as accepted also where a stop id before it ended the text.
    """

    steps: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def record(self, drafted: int, accepted: int) -> None:
        """Count one verification of `drafted` tokens, of which the first `accepted` were right."""
        self.steps += 1
        for counts, n in ((self.drafted, drafted), (self.accepted, accepted)):
            counts += [0] * (drafted - len(counts))
            for i in range(n):
                counts[i] += 1

    @property
    def accept_length(self) -> float:
        """The report's accept length: mean tokens per verification, its own token included. 0 before any step."""
        return 1 + sum(self.accepted) / self.steps if self.steps else 0.0

    @property
    def acceptance(self) -> list[float]:
        """Per draft position, the share of drafts there that were accepted (so all before them were too)."""
        return [a / d for a, d in zip(self.accepted, self.drafted, strict=True)]


def follow(model: GLM5, cache: Cache, hidden_1TD: Tensor, ids: list[int], *, sparse: bool = True) -> None:
    """Tell the MTP layer what the trunk has just read: the last len(ids) tokens of `cache`, with their hidden states.

    All but the last slot are entered when there are many (a prompt's chunk), else they wait for `propose`.
    """
    start = _held(cache) - len(ids)
    place = cache.draft
    if place is None or place.end != start:  # it has not followed so far: it sees the text from here on
        place = DraftPlace(start, start, hidden_1TD[:, :0], ())
    waiting = torch.cat((place.hidden_1ND, hidden_1TD), dim=1)
    after = (*place.ids, *ids) if place.hidden_1ND.shape[1] else tuple(ids[1:])
    if len(after) > WAITING_AT_MOST:
        next_ids = torch.tensor([after], device=model.device)
        model.draft_hidden(waiting[:, :-1], next_ids, cache, place.filled, first=place.first, sparse=sparse)
        place = DraftPlace(place.first, place.filled + len(after), waiting[:, -1:].clone(), ())
    else:
        place = DraftPlace(place.first, place.filled, waiting, after)
    cache.draft = place


def propose(
    model: GLM5, cache: Cache, next_id: int, k: int, sampling: Sampling, seed: int, position: int, *, sparse: bool
) -> Tensor:
    """k drafts of what comes after `next_id`, which itself follows the cache's tokens: int64 [1, k].

    Args:
        position: of the first of them among the ids that are drawn with this seed.
    """
    place, held = cache.draft, _held(cache)
    assert place is not None
    assert place.end == held
    step_ids = torch.tensor([(*place.ids, next_id)], device=model.device)
    hidden, start = place.hidden_1ND, place.filled
    ids = []
    for i in range(k):
        hidden = model.draft_hidden(hidden, step_ids, cache, start, first=place.first, sparse=sparse)[:, -1:]
        start += step_ids.shape[1]
        step_ids = sampling.draw(model.lm_head(hidden[:, -1]), seed, position + i)[None]
        ids.append(step_ids)
    cache.draft = DraftPlace(place.first, held, hidden[:, :0], ())
    return torch.cat(ids, dim=1)


def speculative_step(
    model: GLM5,
    cache: Cache,
    next_id: int,
    k: int,
    sampling: Sampling,
    seed: int,
    position: int,
    *,
    sparse: bool = True,
    stats: SpeculationStats | None = None,
) -> tuple[list[int], Tensor]:
    """Draft k tokens after `next_id`, verify them, and leave the cache with `next_id` and the accepted ones.

    Returns:
        1 to k + 1 new ids, and the trunk's logits [that many, V] from which each follows.
    """
    held = _held(cache)
    drafts_1K = propose(model, cache, next_id, k, sampling, seed, position, sparse=sparse)
    drafts: list[int] = drafts_1K[0].tolist()
    block = torch.cat((drafts_1K.new_tensor([[next_id]]), drafts_1K), dim=1)
    out = model(block, cache=cache, sparse=sparse)
    logits_NV = out.logits[0]
    target = sampling.draw(logits_NV, seed, position).tolist()
    j = next((i for i in range(k) if drafts[i] != target[i]), k)
    new = target[: j + 1]
    cache.crop(held + 1 + j)
    follow(model, cache, out.hidden[:, : j + 1], [next_id, *drafts[:j]], sparse=sparse)
    if stats is not None:
        stats.record(k, j)
    return new, logits_NV[: j + 1]


def _held(cache: Cache) -> int:
    """The tokens of a one-sequence cache."""
    assert cache.uniform is not None
    return cache.uniform
