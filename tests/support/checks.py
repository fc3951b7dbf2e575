"""What "the same as the public implementation" means: one function per claim, each on a `golden.Golden`.

`test_parity` calls them on the model as it is; `test_faults` calls them on a model with a fault put in and demands
that they fail. Tolerances: logits and hidden states 5e-5 in fp32, index scores 1e-5 on the same hidden state. End to
end the fp32 noise of the layers below adds up, so scores (of size 10) are compared within 3e-5 there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from glm5.kernels.visibility import Visibility
from glm5.model.glm5 import GLM5
from glm5.model.mla import MLA
from glm5.model.trace import Trace
from support.golden import Golden, new_cache, show

LOGITS = 5e-5
SCORES = 1e-5
SCORES_END_TO_END = 3e-5
WEIGHTS = 1e-5

FORMS = ("chosen", "expanded", "absorbed")


def worst(ours: Tensor, theirs: Tensor) -> float:
    """Largest absolute difference; NaN if there is one, which no bound admits."""
    assert ours.shape == theirs.shape, f"{tuple(ours.shape)} against {tuple(theirs.shape)}"
    if ours.numel() == 0:
        return 0.0
    return (ours.float() - theirs.float()).abs().max().item()


@contextmanager
def form(name: str) -> Iterator[None]:
    """Force one form of MLA; "chosen" leaves the model's own choice."""
    if name == "chosen":
        yield
    else:
        with patch.object(MLA, "_prefers_absorbed", lambda *_: name == "absorbed"):
            yield


def same_scores(ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    seen = theirs > -torch.inf
    assert bool(((ours > -torch.inf) == seen).all()), "the visible slots differ"
    assert worst(ours[seen], theirs[seen]) < tolerance


def same_selection(ours_BTK: Tensor, theirs_BTK: Tensor, scores_BTS: Tensor) -> None:
    """Equal sets; the reference fills up a row of fewer visible slots with invisible ones, which don't count."""
    slots = scores_BTS.shape[-1]
    ours = torch.zeros(*scores_BTS.shape[:2], slots + 1, dtype=torch.bool)
    ours.scatter_(-1, torch.where(ours_BTK < 0, slots, ours_BTK).long(), True)
    theirs = torch.zeros_like(scores_BTS, dtype=torch.bool).scatter_(-1, theirs_BTK.long(), True)
    assert bool((ours[..., :slots] == (theirs & (scores_BTS > -torch.inf))).all()), "the selected positions differ"


def same_routing(ours: Sequence[tuple[Tensor, ...]], theirs: Sequence[tuple[Tensor, ...]]) -> None:
    """Logits, experts as sets, and each expert's weight."""
    assert len(ours) == len(theirs)
    for (logits, weights, experts), (logits_, weights_, experts_) in zip(ours, theirs, strict=True):
        assert worst(logits, logits_) < LOGITS
        spread = torch.zeros_like(logits).scatter_(-1, experts, weights)
        assert worst(spread, torch.zeros_like(logits_).scatter_(-1, experts_, weights_)) < WEIGHTS


@torch.no_grad()
def run_block(model: GLM5, layer: int, x_BTD: Tensor, trace: Trace, **options: Any) -> Tensor:
    """One block of the trunk on a given hidden state, causal; after the last one comes the final norm."""
    visible = Visibility.causal(*x_BTD.shape[:2])
    out = model.blocks[layer](x_BTD, model._rope(visible.last_BT), visible, trace=trace, **options)
    return model.model.norm(out) if layer + 1 == len(model.blocks) else out


# --------------------------------------------------------------------------- one pass
@torch.no_grad()
def check_prefill(g: Golden, tokens: int | None = None) -> None:
    """Logits, hidden states, scores, selected positions and router outputs of one pass."""
    ids = g.ids[:, :tokens]
    theirs = g.out if tokens is None else show(g.reference, ids)
    trace = Trace(scores=True)
    out = g.model(ids, trace=trace)
    assert worst(out.logits, theirs.logits) < LOGITS
    assert len(trace.hidden) == len(theirs.hidden)
    for ours, hidden in zip(trace.hidden, theirs.hidden, strict=True):
        assert worst(ours, hidden) < LOGITS
    for ours, scores in zip(trace.index_scores, theirs.scores, strict=True):
        same_scores(ours, scores, SCORES_END_TO_END)
    for ours, selected, scores in zip(trace.selected, theirs.selected, theirs.scores, strict=True):
        same_selection(ours, selected, scores)
    same_routing(trace.router, theirs.router)


def check_layers(g: Golden) -> None:
    """Every block on the reference's own hidden state: scores within 1e-5, and all that it decides and returns."""
    for layer in range(g.config.num_hidden_layers):
        trace = Trace(scores=True)
        out = run_block(g.model, layer, g.out.hidden[layer], trace)
        same_scores(trace.index_scores[0], g.out.scores[layer], SCORES)
        same_selection(trace.selected[0], g.out.selected[layer], g.out.scores[layer])
        assert worst(out, g.out.hidden[layer + 1]) < LOGITS
        if trace.router:
            same_routing(trace.router, [g.out.router[layer - g.config.first_k_dense_replace]])


@torch.no_grad()
def check_logits(g: Golden, tokens: int | None = None) -> None:
    """Logits alone, without a trace (which makes the indexer run where it need not)."""
    assert worst(g.model(g.ids[:, :tokens]).logits, g.out.logits[:, :tokens]) < LOGITS


# --------------------------------------------------------------------------- through the cache
@torch.no_grad()
def in_chunks(model: GLM5, ids: Tensor, sizes: Sequence[int], mask: Tensor | None = None) -> Tensor:
    """Logits of `ids`, fed in pieces through one cache."""
    assert sum(sizes) == ids.shape[1]
    cache, outs, at = model.new_cache(ids.shape[0]), [], 0
    for size in sizes:
        part = None if mask is None else mask[:, at : at + size]
        outs.append(model(ids[:, at : at + size], cache=cache, attention_mask=part).logits)
        at += size
    return torch.cat(outs, dim=1)


def check_chunks(g: Golden, sizes: Sequence[int]) -> None:
    """Fed in pieces, the reference's logits of one pass (causality: of that prefix)."""
    tokens = sum(sizes)
    assert worst(in_chunks(g.model, g.ids[:, :tokens], sizes), g.out.logits[:, :tokens]) < LOGITS


def check_decode(g: Golden, tokens: int | None = None) -> None:
    """Token by token from an empty cache."""
    check_chunks(g, [1] * (g.ids.shape[1] if tokens is None else tokens))


def check_every_split(g: Golden) -> None:
    """In two pieces, cut at every point of a sequence a little longer than k."""
    tokens = g.config.index_topk + 6
    for cut in range(1, tokens):
        check_chunks(g, [cut, tokens - cut])


@torch.no_grad()
def check_reference_chunks(g: Golden, sizes: Sequence[int]) -> None:
    """Our pieces against the reference's own pieces through its own cache."""
    cache, outs, at = new_cache(g.reference), [], 0
    for size in sizes:
        outs.append(show(g.reference, g.ids[:, at : at + size], cache=cache).logits)
        at += size
    assert worst(in_chunks(g.model, g.ids[:, :at], sizes), torch.cat(outs, dim=1)) < LOGITS


# --------------------------------------------------------------------------- batches of unequal length
def padded(g: Golden, lengths: Sequence[int], side: str) -> tuple[Tensor, Tensor]:
    """The first `lengths[b]` ids of each row, padded to the longest, and the mask."""
    width = max(lengths)
    ids = torch.full((len(lengths), width), g.config.pad_token_id or 0)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        place = slice(width - length, width) if side == "left" else slice(0, length)
        ids[row, place] = g.ids[row, :length]
        mask[row, place] = 1
    return ids, mask


@torch.no_grad()
def check_padding(g: Golden, lengths: Sequence[int], side: str) -> None:
    """Padded rows give each row's own logits, finite ones at padding too, and continue with the cache."""
    ids, mask = padded(g, lengths, side)
    cache = g.model.new_cache(len(lengths))
    logits = g.model(ids, attention_mask=mask, cache=cache).logits
    assert bool(logits.isfinite().all())
    assert worst(g.model(ids, attention_mask=mask).logits[mask.bool()], logits[mask.bool()]) < LOGITS
    for row, length in enumerate(lengths):
        assert worst(logits[row][mask[row].bool()], g.out.logits[row, :length]) < LOGITS
    for step in range(4):
        more = torch.stack([g.ids[row, length + step] for row, length in enumerate(lengths)])[:, None]
        logits = g.model(more, cache=cache).logits
        for row, length in enumerate(lengths):
            assert worst(logits[row, 0], g.out.logits[row, length + step]) < LOGITS


@torch.no_grad()
def check_padding_reference(g: Golden, lengths: Sequence[int], side: str) -> None:
    """The same padded batch, given to the reference with its mask."""
    ids, mask = padded(g, lengths, side)
    theirs = show(g.reference, ids, mask)
    trace = Trace(scores=True)
    ours = g.model(ids, attention_mask=mask, trace=trace)
    real = mask.bool()
    assert worst(ours.logits[real], theirs.logits[real]) < LOGITS
    for layer in range(g.config.num_hidden_layers):
        assert worst(trace.hidden[layer][real], theirs.hidden[layer][real]) < LOGITS
        ours_seen, theirs_seen = trace.index_scores[layer][real], theirs.scores[layer][real]
        same_scores(ours_seen, theirs_seen, SCORES_END_TO_END)


# --------------------------------------------------------------------------- MTP
@torch.no_grad()
def check_mtp(g: Golden, depths: int = 3) -> None:
    """Three depths in the training form: hidden states, logits of the shared head, the block's own selection."""
    hidden = g.model.hidden(g.ids)
    trace = Trace(scores=True)
    for depth, ours in enumerate(g.model.mtp_hidden(hidden, g.ids, depths, trace=trace)):
        theirs = g.mtp_out[depth]
        assert worst(ours, theirs.hidden) < LOGITS
        assert worst(g.model.lm_head(ours), theirs.logits) < LOGITS
        same_scores(trace.index_scores[depth], theirs.scores, SCORES_END_TO_END)
        same_selection(trace.selected[depth], theirs.selected, theirs.scores)
        same_routing(trace.router[depth : depth + 1], [theirs.router])
    assert len(trace.selected) == depths


@torch.no_grad()
def check_drafts(g: Golden) -> None:
    """The serving form at depth 1, in pieces through the cache, is the training form."""
    hidden = g.model.hidden(g.ids)
    theirs = g.mtp_out[0]
    cache, at = g.model.new_cache(g.ids.shape[0]), 0
    for size in (3, g.config.index_topk, 1, 1, 17, 1):
        part = g.model.draft_hidden(hidden[:, at : at + size], g.ids[:, at + 1 : at + size + 1], cache, at)
        assert worst(part, theirs.hidden[:, at : at + size]) < LOGITS
        at += size


# --------------------------------------------------------------------------- bf16
def visible_only(selected_BTK: Tensor, first_B: Tensor | None = None) -> Tensor:
    """The reference's positions as ours: int32, ascending, invisible fillers replaced by -1 at the end."""
    row = torch.arange(selected_BTK.shape[1])[:, None]
    seen = selected_BTK <= row
    if first_B is not None:
        seen = seen & (selected_BTK >= first_B[:, None, None])
    far = torch.iinfo(torch.int32).max
    ordered = torch.where(seen, selected_BTK, far).sort(-1).values
    return torch.where(ordered == far, -1, ordered).int()


@dataclass(frozen=True)
class Bf16Layer:
    """What the reference computed in bf16 for one layer: its input, output, selection, and router if it has one."""

    layer: int
    hidden_in: Tensor
    hidden_out: Tensor
    selected: Tensor
    router: tuple[Tensor, Tensor, Tensor] | None


def check_bf16_layer(model: GLM5, exact: GLM5, given: Bf16Layer) -> None:
    """One layer in bf16, from the reference's input and with its selected positions.

    The golden tells its own tolerance: how far it lies from fp32 arithmetic on the same bf16 weights, input and
    positions. Two bf16 computations that round independently differ by √2 of that (rms), which is the bound here; the
    largest single difference may be twice the golden's. A router decision within bf16's noise may flip: those tokens
    are left out, and must be under 1 in 100. Selected positions, likewise, must be the same for 99.9 in 100.
    """
    replay = visible_only(given.selected)
    ours, truth, free = Trace(replay=[replay]), Trace(replay=[replay]), Trace()
    out = run_block(model, given.layer, given.hidden_in, ours)
    right = run_block(exact, given.layer, given.hidden_in.float(), truth)
    assert out.dtype == torch.bfloat16
    agree = torch.ones(given.hidden_in.shape[:2], dtype=torch.bool)
    if given.router is not None:
        logits, _, experts = given.router
        for trace in (ours, truth):
            same = (trace.router[0][2].sort(-1).values == experts.sort(-1).values).all(-1)
            assert same.float().mean() > 0.99
            agree &= same.view_as(agree)
        noise = rms(truth.router[0][0] - logits)
        assert rms(ours.router[0][0] - logits) <= 2**0.5 * noise
        assert ours.router[0][0].dtype == ours.router[0][1].dtype == torch.float32
    golden = given.hidden_out.float()
    noise, mine = (golden - right)[agree], (golden - out.float())[agree]
    assert rms(mine) <= 2**0.5 * rms(noise)
    assert mine.abs().max() <= 2 * noise.abs().max()

    run_block(model, given.layer, given.hidden_in, free)
    chosen, theirs = free.selected[0].unsqueeze(-1), replay.unsqueeze(-2)
    common = ((chosen == theirs) & (theirs >= 0)).any(-1).sum() / (replay >= 0).sum()
    assert common > 0.999


def rms(x: Tensor) -> float:
    return x.float().pow(2).mean().sqrt().item()
