"""What a step says that it cost: work counted from the rows, memory by kind, traces on demand."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from glm5.ledger.step import step_flops
from glm5.train.estimate import estimate
from glm5.train.rows import Rows
from support.training import SEQ_LEN, dataset, tiny, trainer


def test_counts_of_packed_rows_are_what_a_loop_counts(tmp_path: Path) -> None:
    data = dataset(tmp_path)
    batch = data.batch(range(data.rows))
    rows, topk = Rows.of(batch, torch.device("cpu")), 8
    queries = pairs = selected = 0
    for row in range(data.rows):
        document = batch.document_BS[row]
        for t in range(batch.seq_len):
            if document[t] < 0:
                continue
            seen = sum(document[s] == document[t] for s in range(t + 1))
            queries, pairs, selected = queries + 1, pairs + int(seen), selected + min(int(seen), topk)
    assert rows.counts(topk).tolist() == [int(batch.targets(1)[1].sum()), queries, pairs, selected]
    assert queries < batch.document_BS[:, : batch.seq_len].size  # some are padding
    assert pairs > selected > queries


@pytest.mark.parametrize("stage", ["pretrain", "warmup", "sparse"])
def test_work_and_memory_of_a_step(stage: Any, tmp_path: Path) -> None:
    data = dataset(tmp_path)
    of = trainer(tmp_path, data, stage=stage, mtp_share=0.5, measure_every=1)
    of.meter.peak = 1e9
    seconds: list[float] = []
    speed = of.meter.speed
    of.meter.speed = lambda counts, s: seconds.append(s) or speed(counts, s)  # type: ignore[method-assign]
    found = of.step()
    counted = Rows.of(of.loader.batch(0, 4), torch.device("cpu")).counts(of.model.config.index_topk).tolist()
    wanted = step_flops(of.model.config, stage, tokens=counted[1], pairs=counted[2], selected=counted[3], mtp=1.5)
    assert found["tflops_per_device"] * 1e12 * seconds[0] == pytest.approx(wanted.total)
    shares = {k: v * 1e9 * seconds[0] for k, v in found["mfu"].items()}
    kinds = {k: v for k, v in vars(wanted).items() if v}
    assert shares == pytest.approx({"all": wanted.total, **kinds})
    assert ("sparse_attention" in kinds) == (stage == "sparse")
    assert ("dense_attention" in kinds) == (stage != "sparse")
    # Memory by kind is what the estimate counts from the configuration.
    said = estimate(tiny().config, of.config, SEQ_LEN, device="cpu")
    memory = {k: v * 2**20 for k, v in found["memory"].items()}
    assert memory["parameters"] == said.weights
    assert memory["gradients"] == said.gradients
    assert memory["optimizer"] == pytest.approx(said.optimizer, rel=0.01)  # and a few counters
    assert memory["rest"] > 0
    assert "exposed_communication" not in found  # of one rank


def test_steps_are_traced_on_demand(tmp_path: Path) -> None:
    of = trainer(tmp_path, dataset(tmp_path), profile=(2,))
    folder = tmp_path / "run" / "profiles"
    of.step()
    assert not folder.exists()
    of.step()
    assert sorted(p.name for p in folder.iterdir()) == [
        "step-00000002-rank-0.json.gz",
        "step-00000002-rank-0.txt",
    ]
    (tmp_path / "run" / "profile").touch()
    of.step()
    of.step()
    traces = sorted(p.name for p in folder.glob("*.gz"))
    assert traces == ["step-00000002-rank-0.json.gz", "step-00000003-rank-0.json.gz"]
    events = json.loads(gzip.decompress((folder / traces[1]).read_bytes()))["traceEvents"]
    assert sum(e.get("name") == "aten::mm" for e in events) > 10
    assert "aten::" in (folder / "step-00000003-rank-0.txt").read_text()


def test_a_trace_changes_nothing(tmp_path: Path) -> None:
    losses = []
    for name, steps in (("a", ()), ("b", (1, 2))):
        (tmp_path / name).mkdir()
        of = trainer(tmp_path / name, dataset(tmp_path / name), profile=steps)
        losses.append([of.step()["loss"] for _ in range(3)])
    assert np.array_equal(*losses)
