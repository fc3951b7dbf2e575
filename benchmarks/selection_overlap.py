"""How many positions do neighbouring queries select in common? Measured on a small model with a trained indexer.

    python benchmarks/selection_overlap.py [--out DIR] [--context 2048] [--topk 256] [--rows 24] [--json FILE]

A gather is as fast as its positions repeat, so a benchmark of sparse prefill needs index sets that overlap as real ones
do (`inputs.neighbourly_selection` makes them up). This trains a model on the Python standard library's sources: dense,
then DSA's warm-up of the indexers, then the sparse stage, in about a quarter of an hour on one thread. On held-out text
it records what every layer selects, and gives the share that a query has in common with the one so many positions
before it in the same document, and the share among its last k/8 positions; beside that the same of the indexers before
their training (on the dense model, attending sparsely all the same) and of uniformly random sets. Only queries that see
more than k positions count, and in a second table more than 4 k: the longer the past, the less is shared by chance. A
run in --out is gone on with, so that a second call only measures. Source: report section 2.1.1. Read next: `inputs`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glm5.data.loader import TokenDataset
from glm5.model.glm5 import GLM5
from glm5.model.presets import nano
from glm5.model.trace import Trace
from glm5.model.weights import load_model
from glm5.train.config import TrainConfig
from glm5.train.pretrain import PretrainConfig, pretrain
from glm5.train.rows import Rows
from glm5.train.schedule import BatchWarmup, LearningRate
from glm5.train.sparsify import SparsifyConfig, sparsify
from inputs import shared_positions

DISTANCES = (1, 2, 4, 8, 16, 64)
PASTS = (1, 4)  # queries count that see more than so many times k positions


def train(args: argparse.Namespace) -> dict[str, Any]:
    """The run in DIR, begun or gone on with: DIR/dense/model, DIR/model, and what `sparsify` measured."""
    shape = dict(
        hidden_size=128, num_hidden_layers=3, intermediate_size=256, moe_intermediate_size=64, n_routed_experts=8
    )
    text: dict[str, Any] = dict(device="cpu", seq_len=args.context, held_out_rows=8)
    step: dict[str, Any] = dict(batch=BatchWarmup(2, 2, 0), micro_batch=2, mtp_depths=0)
    dense, warmup, adapt = args.steps
    fast = LearningRate(peak=2e-2, final=1e-3, warmup_steps=10)
    pretrained = pretrain(
        PretrainConfig(
            run=str(args.out / "dense"),
            model=nano(**shape, index_topk=args.topk),
            train=TrainConfig(steps=dense, lr=fast, bias_rate=5e-3, **step),
            **text,
        )
    )
    falling, constant = LearningRate(2e-2, 1e-3, shape="linear"), LearningRate(1e-3, 1e-3, shape="constant")
    sparse = sparsify(
        SparsifyConfig(
            run=str(args.out),
            checkpoint=str(pretrained.model),
            recall_rows=8,
            warmup=TrainConfig(stage="warmup", steps=warmup, lr=falling, **step),
            adapt=TrainConfig(stage="sparse", steps=adapt, lr=constant, **step),
            **text,
        )
    )
    return {"bits_per_byte": sparse.bits_per_byte, "recall": sparse.recall, **sparse.result}


def random_layer(selected_TK: Tensor, first_T: Tensor) -> Tensor:
    """Uniformly random positions among those that each query sees."""
    slots = torch.arange(len(first_T))
    seen_TT = (slots >= first_T[:, None]) & (slots <= slots[:, None])
    draw = torch.rand(seen_TT.shape).masked_fill(~seen_TT, -1.0).topk(selected_TK.shape[1])
    return draw.indices.masked_fill(draw.values < 0, -1)


class Shares:
    """Sums over queries of one kind of set, of one layer: (past, distance or "recent") -> sum and count."""

    def __init__(self) -> None:
        self.sums: dict[tuple[int, int | str], Tensor] = {}

    def add(self, selected_TK: Tensor, first_T: Tensor) -> None:
        """A row's sets, of queries whose documents begin at first_T."""
        tokens, k = selected_TK.shape
        slot_T = torch.arange(tokens)
        recent_T = (selected_TK > slot_T[:, None] - k // 8).double().mean(-1)
        shared = {d: shared_positions(selected_TK, tokens, d).double() for d in DISTANCES}
        for past in PASTS:
            long_T = slot_T - first_T + 1 > past * k
            self._take(past, "recent", recent_T, long_T)
            for d, share in shared.items():
                self._take(past, d, share, long_T[d:] & long_T[:-d] & (first_T[d:] == first_T[:-d]))

    def _take(self, past: int, what: int | str, share: Tensor, counted: Tensor) -> None:
        new = torch.stack((share[counted].sum(), counted.sum().double()))
        self.sums[past, what] = self.sums.get((past, what), torch.zeros(2, dtype=torch.float64)) + new

    def means(self, past: int) -> dict[str, float]:
        found = {str(what): s for (p, what), s in self.sums.items() if p == past}
        return {what: float(total / count) for what, (total, count) in found.items()}


@torch.no_grad()
def layers(model: GLM5, data: TokenDataset, rows: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(layer, selected_TK, first_T) of rows spread over a dataset."""
    for n in range(0, data.rows, max(1, data.rows // rows)):
        batch = Rows.of(data.batch([n]), model.device)
        trace = Trace()
        model.hidden(batch.input_BT, documents=batch.documents_BT, sparse=True, trace=trace)
        for layer, selected_BTK in enumerate(trace.selected):
            yield layer, selected_BTK[0], batch.first_BS[0, : data.seq_len]


def measure(args: argparse.Namespace) -> dict[str, Shares]:
    torch.manual_seed(0)
    data = TokenDataset.open(args.out / "data" / "held-out", args.context, 1)
    found: dict[str, Shares] = {}
    for kind, path in (("trained", args.out / "model"), ("untrained", args.out / "dense" / "model")):
        model = load_model(path, dtype="float32").eval()
        for layer, selected_TK, first_T in layers(model, data, args.rows):
            found.setdefault(f"{kind}, layer {layer}", Shares()).add(selected_TK, first_T)
            if kind == "untrained" and layer == 0:
                found.setdefault("random", Shares()).add(random_layer(selected_TK, first_T), first_T)
    found["random"] = found.pop("random")  # the table's last line
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/selection-overlap"))
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--topk", type=int, default=256)
    parser.add_argument("--steps", type=int, nargs=3, default=(190, 36, 12), metavar=("DENSE", "WARMUP", "SPARSE"))
    parser.add_argument("--rows", type=int, default=24, help="measure at least so many held-out rows, spread over all")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    trained = train(args)
    found = measure(args)
    result = {f"more than {past} k": {kind: shares.means(past) for kind, shares in found.items()} for past in PASTS}
    for title, table in result.items():
        print(f"\nqueries that see {title} positions (k = {args.topk}): share in common at a distance, share recent")
        print(f"{'':20}" + "".join(f"{d:>8}" for d in (*DISTANCES, "k/8")))
        for kind, shares in table.items():
            print(
                f"{kind:20}"
                + "".join(f"{share:8.3f}" for share in (*(shares[str(d)] for d in DISTANCES), shares["recent"]))
            )
    if args.json:
        args.json.write_text(json.dumps({"training": trained, "shares": result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
