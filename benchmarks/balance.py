"""Imbalance of work before and after the plans of `glm5.data.balance`, on real lengths: files of Python's library.

    python benchmarks/balance.py            # trains a tokenizer on the sources first; about half a minute

Lengths are tokens of a byte-pair tokenizer trained on the files; work is GLM-5's, forward and backward, by
`glm5.ledger.compute.training_cost`. Every figure is the time of a step that waits for its slowest rank over the time of
the same work spread evenly, the mean of `--batches` batches. `docs/long-sequences.md` quotes these tables.
"""

from __future__ import annotations

import argparse

import numpy as np

from glm5.data.balance import CostModel, context_spans, deal, dealt_time, imbalance, plan_groups, plan_uniform
from glm5.data.corpus import stdlib_sources
from glm5.data.hashing import permutation
from glm5.data.packing import plan_rows
from glm5.ledger.compute import training_cost
from glm5.model.presets import glm5
from glm5.text.tokenizer import Tokenizer


def batches(count: int, size: int, number: int) -> list[np.ndarray]:
    """Draws of `size` numbers below `count`, without repetition inside each."""
    return [permutation(count, 0, epoch)[:size] for epoch in range(number)]


def rows_table(lengths: np.ndarray, models: dict[str, CostModel], number: int) -> None:
    """Packed rows, one of each rank a micro-batch, in the loader's order and dealt by work."""
    print("| rows of | attention | ranks | in order | dealt |\n|---|---|---|---|---|")
    for seq_len in (4096, 32768, 131072):
        plan = plan_rows(lengths, seq_len, 4)
        pieces = np.minimum(plan.slots - 1, seq_len)
        for name, model in models.items():
            work = model.sequences(pieces)
            costs = np.add.reduceat(work, plan.row_starts[:-1])
            for ranks in (8, 64):
                size = min(4 * ranks, plan.rows // ranks * ranks)
                if size == 0:
                    continue
                before, after = [], []
                for rows in batches(plan.rows, size, number):
                    before.append(dealt_time(np.arange(size).reshape(-1, ranks, 1), costs[rows]))
                    after.append(dealt_time(deal(costs[rows], ranks), costs[rows]))
                print(f"| {seq_len:,} | {name} | {ranks} | {np.mean(before):.3f} | {np.mean(after):.3f} |")


def groups_table(lengths: np.ndarray, models: dict[str, CostModel], size: int, number: int) -> None:
    """Files as whole sequences, not packed into rows: groups of one size, and of several."""
    print("| tokens a rank | attention | ranks | one group size | steps | groups by length | steps | group sizes |")
    print("|---|---|---|---|---|---|---|---|")
    for capacity in (4096, 16384):
        for name, model in models.items():
            for ranks in (8, 32):
                if lengths.max() > ranks * capacity:
                    continue
                usual, planned, sizes = [], [], set()
                steps = [0, 0]
                for batch in batches(len(lengths), size, number):
                    own = lengths[batch]
                    plain, plan = plan_uniform(own, ranks, capacity), plan_groups(own, ranks, capacity, model)
                    usual.append(plain.time(own, model))
                    planned.append(plan.time(own, model))
                    steps = [steps[0] + len(plain.steps), steps[1] + len(plan.steps)]
                    sizes |= {g.size for step in plan.steps for g in step}
                print(
                    f"| {capacity:,} | {name} | {ranks} | {np.mean(usual):.2f} | {steps[0] / number:.1f} "
                    f"| {np.mean(planned):.2f} | {steps[1] / number:.1f} | {', '.join(map(str, sorted(sizes)))} |"
                )


def spans_table(lengths: np.ndarray, models: dict[str, CostModel], number: int) -> None:
    """One row's positions over a context-parallel group: equal pieces in order, head and tail, and by cost."""
    print("| row | attention | ranks | in order | head and tail | by cost |\n|---|---|---|---|---|---|")
    rows: dict[str, list[np.ndarray]] = {"one text of 202,752": [np.arange(1, 202_753)]}
    packed = []
    for files in batches(len(lengths), 400, number):
        seen = np.concatenate([np.arange(1, n + 1) for n in lengths[files]])
        packed.append(seen[:131_072])
    rows["files packed to 131,072"] = packed
    for label, cases in rows.items():
        for name, model in models.items():
            for ranks in (4, 16):
                found = []
                for seen in cases:
                    cost = model.queries(seen)
                    before = np.concatenate(([0.0], np.cumsum(cost)))
                    edge = np.linspace(0, len(cost), 2 * ranks + 1).astype(int)
                    part = before[edge[1:]] - before[edge[:-1]]
                    spans = [sum(before[b] - before[a] for a, b in own) for own in context_spans(cost, ranks)]
                    in_order, folded = part.reshape(ranks, 2).sum(1), part[:ranks] + part[::-1][:ranks]
                    found.append([imbalance(in_order), imbalance(folded), imbalance(spans)])
                print(f"| {label} | {name} | {ranks} | " + " | ".join(f"{x:.3f}" for x in np.mean(found, 0)) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=128, help="sequences of a batch")
    parser.add_argument("--batches", type=int, default=10)
    args = parser.parse_args()
    texts = [d.text for d in stdlib_sources(include_tests=True).documents]
    tokenizer = Tokenizer.train(texts, args.vocab)
    lengths = np.array([max(2, len(ids)) for ids in tokenizer.encode_batch(texts)])
    quantiles = ", ".join(f"{int(q):,}" for q in np.quantile(lengths, [0.1, 0.5, 0.9, 0.99, 1.0]))
    print(f"{len(lengths):,} files, {lengths.sum():,} tokens; 10%, 50%, 90%, 99% and longest: {quantiles}\n")
    config = glm5()
    models = {"DSA": training_cost(config), "dense": training_cost(config, sparse=False)}
    rows_table(lengths, models, args.batches)
    print()
    groups_table(lengths, models, args.batch, args.batches)
    print()
    spans_table(lengths, models, args.batches)


if __name__ == "__main__":
    main()
