"""Text, one token at a time: prefill in chunks, then decode from the cache, plainly or with MTP drafts.

For one sequence, on any device, with nothing but the model. Read next: `speculate`, `sampling`.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from glm5.model.cache import Cache
from glm5.model.glm5 import GLM5
from glm5.model.sampling import Sampling
from glm5.model.speculate import SpeculationStats, follow, speculative_step
from glm5.utils.errors import ConfigError, UserError

# Prompt tokens per call. Bounds the memory of a long prompt; 1024 to 4096 take the same time on one thread (nano).
PREFILL_CHUNK = 2048


def generate(
    model: GLM5,
    input_ids: Tensor | Sequence[int],
    *,
    max_new_tokens: int | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    vocab_size: int | None = None,
    seed: int | None = None,
    stop_ids: Iterable[int] | None = None,
    speculate: int = 0,
    sparse: bool | None = None,
    cache: Cache | None = None,
    stats: SpeculationStats | None = None,
    logprobs: list[float] | None = None,
) -> Iterator[int]:
    """Stream the ids that follow a prompt, as soon as each is certain.

    Ends after `max_new_tokens`, at the context limit, or with a stop id, which is yielded as the last one.

    Args:
        input_ids: the prompt, [T], [1, T] or a list; with a `cache` that holds tokens, what comes after those.
        max_new_tokens: by default whatever the context (`max_position_embeddings`) has room for.
        temperature, top_p, top_k, min_p: see `Sampling`; temperature 0 is greedy.
        vocab_size: the tokenizer's, where the model's is padded: no id from there on is ever chosen.
        seed: of the draws; None takes one from the system. The same seed gives the same text, with drafts or without,
            here and from an engine.
        stop_ids: by default the configuration's `eos_token_id`.
        speculate: drafts per step from the MTP block; 0 decodes plainly.
        sparse: DSA; False attends to everything; None is what the model was trained for.
        cache: to continue a conversation. Ends up holding all tokens but the last one that was yielded, so begin
            the next call's input with that one.
        stats: counts drafts and acceptances. logprobs: receives, per id, the model's log-probability of it (fp32,
            at temperature 1, nothing truncated).

    Raises:
        UserError: the prompt is empty, holds an id outside the vocabulary or leaves no room, an option is out of
            range, or the cache is not of one unpadded sequence. All but bad ids are found before the first token.
        NumericalError: the logits are not finite.
    """
    ids = _prompt(input_ids)
    cache = model.new_cache(1) if cache is None else cache
    if cache.batch != 1 or cache.uniform is None:
        raise UserError(f"cache: holds {cache.batch} rows or padding", "Generate takes one unpadded sequence")
    held, limit = cache.uniform, model.config.max_position_embeddings
    room = limit - held - len(ids)
    if room < 1:
        raise UserError(
            f"a context of {held + len(ids)} tokens leaves no room below max_position_embeddings={limit}",
            "Shorten the prompt, or crop the cache",
        )
    if max_new_tokens is not None and not (_is_int(max_new_tokens) and max_new_tokens >= 1):
        raise ConfigError("max_new_tokens", max_new_tokens, "must be an integer of at least 1")
    if not (_is_int(speculate) and speculate >= 0):
        raise ConfigError("speculate", speculate, "must be an integer of at least 0, which decodes without drafts")
    if seed is not None and not (_is_int(seed) and -(2**63) <= seed < 2**64):
        raise ConfigError("seed", seed, "must be an integer of 64 bits")
    if speculate > 0 and model.config.num_nextn_predict_layers == 0:
        raise UserError(f"speculate={speculate}: this model has no MTP block to draft with", "Use 0")
    seed = secrets.randbits(63) if seed is None else seed
    plan = _Plan(
        limit=room if max_new_tokens is None else min(room, max_new_tokens),
        stop=frozenset(model.config.eos_token_id) if stop_ids is None else _stops(stop_ids, model.config.vocab_size),
        sampling=Sampling(temperature, top_p, top_k, min_p, vocab_size),
        seed=seed if seed < 2**63 else seed - 2**64,
        speculate=speculate,
        sparse=model.config.sparse if sparse is None else sparse,
    )
    return _stream(model, ids, cache, plan, stats, logprobs)


@dataclass(frozen=True)
class _Plan:
    limit: int
    stop: frozenset[int]
    sampling: Sampling
    seed: int
    speculate: int
    sparse: bool


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _stops(stop_ids: Iterable[int], vocab_size: int) -> frozenset[int]:
    if not isinstance(stop_ids, Iterable):
        raise UserError(f"stop_ids={stop_ids}", "Give several ids, such as (5,)")
    stops = [int(i) if isinstance(i, Tensor) else i for i in stop_ids]
    for i in stops:
        if not _is_int(i) or not 0 <= i < vocab_size:
            raise UserError(f"stop_ids: {i!r} is no token id", f"Ids lie in [0, {vocab_size})")
    return frozenset(stops)


def _prompt(input_ids: Tensor | Sequence[int]) -> list[int]:
    try:
        ids = torch.as_tensor(input_ids)
    except (TypeError, ValueError, RuntimeError):  # text, None, an integer of more than 64 bits, ragged rows
        what = f"input_ids: a {type(input_ids).__name__} that holds no token ids"
        raise UserError(what, "Give the integer ids of one sequence") from None
    if ids.ndim == 2 and ids.shape[0] == 1:
        ids = ids[0]
    if ids.ndim != 1 or (ids.numel() and (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)):
        raise UserError(f"input_ids: shape {tuple(ids.shape)} of {ids.dtype}", "Give the integer ids of one sequence")
    if ids.numel() == 0:
        raise UserError("the prompt is empty", "Give at least one token, such as the beginning-of-text ids")
    return ids.tolist()


@torch.inference_mode()
def _stream(
    model: GLM5,
    ids: list[int],
    cache: Cache,
    plan: _Plan,
    stats: SpeculationStats | None,
    logprobs: list[float] | None,
) -> Iterator[int]:
    start, emitted = cache.uniform or 0, 0
    try:
        logits_NV = _prefill(model, ids, cache, plan)
        block: list[int] = plan.sampling.draw(logits_NV, plan.seed, 0).tolist()
        while True:
            if logprobs is not None:
                block_logprobs = _logprobs(logits_NV, block)
            for i, token in enumerate(block):
                emitted += 1
                if logprobs is not None:
                    logprobs.append(block_logprobs[i])
                yield token
                if token in plan.stop or emitted == plan.limit:
                    return
            drafts = min(plan.speculate, plan.limit - emitted - 1)
            block, logits_NV = _step(model, cache, block[-1], emitted, drafts, plan, stats)
    finally:
        # A block may have been cut by a stop id or by the caller: leave what was yielded, less the last.
        cache.crop(start + len(ids) + emitted - 1 if emitted else start)


def _prefill(model: GLM5, ids: list[int], cache: Cache, plan: _Plan) -> Tensor:
    """Read the prompt; the logits [1, V] of what follows it."""
    for at in range(0, len(ids), PREFILL_CHUNK):
        chunk = ids[at : at + PREFILL_CHUNK]
        hidden = model.hidden(torch.tensor([chunk], device=model.device), cache=cache, sparse=plan.sparse)
        if plan.speculate:
            follow(model, cache, hidden, chunk, sparse=plan.sparse)
    return model.lm_head(hidden[:, -1])


def _step(
    model: GLM5, cache: Cache, last: int, position: int, drafts: int, plan: _Plan, stats: SpeculationStats | None
) -> tuple[list[int], Tensor]:
    """The next ids, at least one, and the logits that each follows from. `last` is not in the cache yet."""
    if drafts > 0:
        return speculative_step(
            model, cache, last, drafts, plan.sampling, plan.seed, position, sparse=plan.sparse, stats=stats
        )
    out = model(torch.tensor([[last]], device=model.device), cache=cache, sparse=plan.sparse)
    if plan.speculate:  # the last token before the limit: no draft, but a later call may go on from here
        follow(model, cache, out.hidden, [last], sparse=plan.sparse)
    return plan.sampling.draw(out.logits[0], plan.seed, position).tolist(), out.logits[0]


def _logprobs(logits_NV: Tensor, ids: list[int]) -> list[float]:
    index = torch.tensor(ids, device=logits_NV.device)[:, None]
    return logits_NV.float().log_softmax(-1).gather(-1, index)[:, 0].tolist()
