"""Measuring a model on held-out text: bits per byte, the indexer's recall, and what drafting gains.

Bits per byte counts every byte of every document once, whatever the tokenizer, so models and compressors compare.
Recall is the share of the dense attention's mass, averaged over heads and queries, that lies on the indexer's top-k.
Read next: `rows`, `glm5.model.speculate`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from glm5.data.loader import Batch, TokenDataset
from glm5.ledger.compute import training_cost
from glm5.model.glm5 import GLM5
from glm5.model.speculate import SpeculationStats
from glm5.model.trace import Aux
from glm5.train.ranks import Ranks
from glm5.train.rows import Rows


@dataclass(frozen=True)
class HeldOut:
    """Sums over all predicted tokens. nats: summed loss. correct: tokens that were the likeliest."""

    nats: float
    tokens: int
    bytes: int
    correct: int

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.bytes

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def accuracy(self) -> float:
        return self.correct / self.tokens


@torch.no_grad()
def held_out(
    model: GLM5,
    dataset: TokenDataset,
    *,
    sparse: bool,
    rows_at_once: int = 8,
    max_rows: int | None = None,
    ranks: Ranks | None = None,
) -> HeldOut:
    """Loss of the next token over a dataset's rows (all, or the first `max_rows`).

    Args:
        ranks: that share the work out; all call this, and all get the sums of all.
    """
    nats, tokens, size, correct = 0.0, 0, 0, 0
    ranks, cost = ranks or Ranks(), training_cost(model.config, sparse)
    rows = dataset.rows if max_rows is None else min(max_rows, dataset.rows)
    for batch, counted in _dealt(dataset, rows, rows_at_once, ranks):
        on = ranks.shared(Rows.of(batch, model.device), batch, cost).head(len(batch), counted)
        hidden_BTD = model.hidden(on.input_BT, documents=on.documents_BT, cache=on.held, sparse=sparse)
        target_BT, weight_BT = on.targets[0]
        weight, head = ranks.head(model)
        out = head.logprobs(hidden_BTD.flatten(0, 1), weight, target_BT.flatten(), with_argmax=True)
        counted_N = weight_BT.flatten() > 0
        nats -= float(out.logprobs_N[counted_N].double().sum())
        tokens += int(counted_N.sum())
        assert out.argmax_N is not None
        correct += int((out.argmax_N == target_BT.flatten())[counted_N].sum())
        num_bytes_BT = torch.from_numpy(batch.num_bytes_BT[:counted])
        size += int((num_bytes_BT if on.held is None else on.held.own(num_bytes_BT)).sum())
    sums = ranks.sum(torch.tensor([nats, tokens, size, correct], dtype=torch.float64, device=model.device)).tolist()
    return HeldOut(sums[0], *(round(x) for x in sums[1:]))


def _dealt(dataset: TokenDataset, rows: int, at_once: int, ranks: Ranks) -> Iterator[tuple[Batch, int]]:
    """Batches of this rank's share of the first `rows` rows, and how many rows of each count.

    Every rank has as many batches as any other, since they gather parameters together; the last rows of some are
    repeated and count nothing.
    """
    numbers = ranks.share(np.arange(rows))
    most = int(ranks.largest(torch.tensor(len(numbers), device=ranks.device)))
    for start in range(0, most, at_once):
        mine = numbers[start : start + at_once]
        size = min(at_once, most - start)
        yield dataset.batch(np.append(mine, np.zeros(size - len(mine), dtype=np.int64))), len(mine)


@torch.no_grad()
def indexer_recall(model: GLM5, dataset: TokenDataset, *, rows_at_once: int = 8, max_rows: int = 32) -> list[float]:
    """Per layer, the share of the dense attention's mass that lies on the indexer's top-k.

    Counts queries that see more than k tokens only: the others keep everything, and would flatter the figure.
    """
    topk = model.config.index_topk
    sums = [0.0] * model.config.num_hidden_layers
    queries = 0
    for batch in dataset.batches(rows_at_once, max_rows):
        on = Rows.of(batch, model.device)
        aux = Aux(indexer=True)
        model.hidden(on.input_BT, documents=on.documents_BT, sparse=False, aux=aux)
        seen_BT = torch.from_numpy(batch.position_BT) + 1
        real_BT = on.valid_BT().cpu()
        short = int((real_BT & (seen_BT <= topk)).sum())  # whose recall is 1 by definition
        queries += int(real_BT.sum()) - short
        for layer, loss in enumerate(aux.indexer_losses):
            sums[layer] += float(loss.recall_sum) - short
    return [s / queries for s in sums] if queries else [1.0] * len(sums)


@dataclass(frozen=True)
class Drafting:
    """Greedy decoding with and without drafts on the same prompts.

    identical: every text the same, token for token. accept_length: tokens per verification. acceptance: by draft
    position. speedup: plain time over drafted time (medians over prompts of seconds per token).
    """

    drafts: int
    identical: bool
    accept_length: float
    acceptance: list[float]
    plain_tokens_per_second: float
    drafted_tokens_per_second: float

    @property
    def speedup(self) -> float:
        return self.drafted_tokens_per_second / self.plain_tokens_per_second


def drafting(model: GLM5, prompts: Sequence[Sequence[int]], *, drafts: int, new_tokens: int) -> Drafting:
    """Decode every prompt plainly and with `drafts` drafts a step, alternating, and compare."""
    stats, same = SpeculationStats(), True
    seconds: dict[int, list[float]] = {0: [], drafts: []}
    for prompt in prompts:
        texts = {}
        for k in (0, drafts):
            stream = model.generate(
                list(prompt),
                max_new_tokens=new_tokens,
                stop_ids=(),
                speculate=k,
                stats=stats if k else None,
            )
            text = [next(stream)]  # the prompt's own pass is not decoding
            began = time.perf_counter()
            text += list(stream)
            seconds[k].append((time.perf_counter() - began) / (len(text) - 1))
            texts[k] = text
        same &= texts[0] == texts[drafts]
    plain, drafted = (sorted(seconds[k])[len(prompts) // 2] for k in (0, drafts))
    return Drafting(drafts, same, stats.accept_length, stats.acceptance, 1 / plain, 1 / drafted)
