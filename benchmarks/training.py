"""Training steps of `nano` (or another preset) on random tokens: tokens/s, and the share of the machine's matrix rate.

    python benchmarks/training.py [--preset nano] [--rows 8] [--seq-len 512] [--steps 6] [--threads N] [--device cuda]
                                  [--stages pretrain,warmup,sparse] [--packed] [--cuda-graphs]

The share is model operations (`glm5.ledger.step`: of the pairs that each document has, MTP depths included) over the
time, divided by the rate of a large matrix product measured in the same run and dtype. Stages: dense pretraining, the
indexers' warm-up, and sparse adaptation. Rows hold one document each, or several (`--packed`). Writes
benchmarks/out/training.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # as the command line does

import numpy as np
import torch
from numpy.typing import NDArray

from glm5.cli.doctor import matmul_rate
from glm5.data.corpus import Document
from glm5.data.loader import Loader, TokenDataset
from glm5.model.glm5 import GLM5
from glm5.model.presets import preset
from glm5.text.tokenizer import Tokenizer
from glm5.train.config import TrainConfig
from glm5.train.loop import Trainer
from glm5.train.schedule import BatchWarmup, LearningRate

OUT = Path(__file__).parent / "out"


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


class WholeRows(Loader):
    """Only the rows that hold one document."""

    def __init__(self, dataset: TokenDataset) -> None:
        super().__init__(dataset, 0)
        first = (dataset.batch([row]).first_BT for row in range(dataset.rows))
        self.whole = np.array([row for row, first_BT in enumerate(first) if not first_BT.any()])

    def rows(self, index: int, count: int) -> NDArray[np.int64]:
        return self.whole[np.arange(index, index + count) % len(self.whole)]


def loader(directory: Path, seq_len: int, rows: int, packed: bool) -> Loader:
    """Random lower-case words: what is read does not matter for the time, only that experts are not all alike.

    Rows are of one document each, or of several, 100 to 4,000 words long.
    """
    rng = np.random.default_rng(0)
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz    \n", dtype=np.uint8)
    sizes = rng.integers(600, 24_000, rows * seq_len // 2000 + 8) if packed else [seq_len * 14] * rows
    texts = [rng.choice(letters, size).tobytes().decode() for size in sizes]
    tokenizer = Tokenizer.train(texts[:8], 320)
    documents = [Document(str(i), text) for i, text in enumerate(texts)]
    data = TokenDataset.build(documents, tokenizer, directory, seq_len)
    return Loader(data, 0) if packed else WholeRows(data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="nano")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--mtp-depths", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--stages", default="pretrain,warmup,sparse")
    parser.add_argument("--packed", action="store_true", help="rows of several documents")
    parser.add_argument("--cuda-graphs", action="store_true", help="record micro-batches, in pre-training")
    parser.add_argument("--precision", choices=("auto", "fp32", "bf16"), default="auto")
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    device = torch.device(a.device)
    config = preset(a.preset)
    rows = []
    with tempfile.TemporaryDirectory() as place:
        data, rate = loader(Path(place) / "data", a.seq_len, a.rows, a.packed), 0.0
        for stage in a.stages.split(","):
            train = TrainConfig(
                stage=stage,
                steps=a.steps + 2,
                batch=BatchWarmup(a.rows, a.rows, 0),
                micro_batch=a.micro_batch,
                lr=LearningRate(1e-3, 1e-3, shape="constant"),
                mtp_depths=a.mtp_depths,
                precision=a.precision,
                cuda_graphs=a.cuda_graphs,
                measure_every=10**6,
            )
            with device:
                model = GLM5(config)
            trainer = Trainer(train, model, data, Path(place) / stage)
            dtype, rate = trainer.model.dtype, rate or matmul_rate(a.device, trainer.model.dtype)
            seconds, tflops = [], []
            for i in range(a.steps + 2):
                synchronize(device)
                began = time.perf_counter()
                metrics = trainer.step()
                synchronize(device)
                if i >= 2:
                    seconds.append(time.perf_counter() - began)
                    tflops.append(metrics["tflops_per_device"])
            tokens = a.rows * a.seq_len
            row = {
                "stage": stage,
                "seconds": statistics.median(seconds),
                "tokens_per_second": tokens / statistics.median(seconds),
                "memory_mib": metrics["memory_mib"],
            }
            row["tflops"] = statistics.median(tflops)
            row["share_of_matmul_rate"] = row["tflops"] * 1e12 / rate
            rows.append(row)
    place_name = torch.cuda.get_device_name() if device.type == "cuda" else f"{platform.machine()}, {a.threads} threads"
    result = {
        "machine": place_name,
        "versions": {"torch": torch.__version__},
        "command": "python " + " ".join(["benchmarks/training.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "preset": a.preset,
        "dtype": str(dtype),
        "matmul_tflops": rate / 1e12,
        "rows": rows,
    }
    print(f"{a.preset} on {place_name}, {dtype}; matrix products at {rate / 1e12:.2f} TFLOP/s")
    print(f"{'stage':10}{'s/step':>10}{'tokens/s':>12}{'MiB':>10}{'share of rate':>16}")
    for row in rows:
        first = f"{row['stage']:10}{row['seconds']:>10.3f}{row['tokens_per_second']:>12.0f}{row['memory_mib']:>10.0f}"
        print(f"{first}{row['share_of_matmul_rate']:>16.1%}")
    OUT.mkdir(exist_ok=True)
    (OUT / "training.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
