"""Recorded micro-batches: what a plain run gives, from buffers that stay where they are."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from glm5.data.corpus import Document
from glm5.data.loader import TokenDataset
from glm5.model.config import ModelConfig
from glm5.model.glm5 import GLM5
from glm5.train.config import TrainConfig
from glm5.train.loop import Trainer
from glm5.train.optim import MuonSplit, parameter_roles
from glm5.train.ranks import Ranks
from glm5.train.recorded import MicroBatches, records
from glm5.train.recorder import CudaRecorder
from glm5.train.schedule import BatchWarmup
from support.training import SEQ_LEN, VOCAB, LetterTokenizer, dataset, same, tensors, trainer


class Again:
    """Records nothing: runs the same call again, on the same buffers."""

    def __init__(self, waits: bool = False) -> None:
        self.does_wait, self.recorded, self.replayed = waits, 0, 0

    def waits(self, run: Callable[[], None]) -> bool:
        run()
        return self.does_wait

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        self.recorded += 1
        run()

        def again() -> None:
            self.replayed += 1
            run()

        return again


def rows_of_one_document(directory: Path, seq_len: int = SEQ_LEN, count: int = 16) -> TokenDataset:
    letters = "".join(chr(97 + (i * i + 3 * (i // 7)) % 26) for i in range(seq_len * count + 8))
    return TokenDataset.build([Document("one", letters)], LetterTokenizer(), directory / "one", seq_len)


def recording(of: Trainer, **options: bool) -> Again:
    recorder = Again(**options)
    of.recorded = MicroBatches(of.model, recorder)
    return recorder


def losses(of: Trainer, steps: int) -> list[float]:
    return [of.step()["loss"] for _ in range(steps)]


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_recorded_steps_are_the_plain_ones(share: float, tmp_path: Path) -> None:
    data = rows_of_one_document(tmp_path)
    options = dict(micro_batch=2, steps=6, balance_weight=0.3, mtp_share=share)
    plain, ours = (trainer(tmp_path, data, **options) for _ in range(2))
    recorder = recording(ours)
    assert losses(ours, 4) == pytest.approx(losses(plain, 4), rel=1e-5)
    kinds = 1 if share == 1 else 2  # with and without MTP
    assert recorder.recorded == kinds
    assert recorder.replayed == 4 * 2 - 2 * kinds  # all but those that ran as they are, and those that were recorded
    for name, expected in tensors(plain).items():
        torch.testing.assert_close(tensors(ours)[name], expected, rtol=1e-4, atol=1e-5, msg=name)


def test_gradients_stay_where_they_are(tmp_path: Path) -> None:
    ours = trainer(tmp_path, rows_of_one_document(tmp_path), steps=6)
    recording(ours)
    places = []
    for _ in range(3):
        ours.step()
        places.append({n: p.grad.data_ptr() for n, p in ours.model.named_parameters() if p.grad is not None})
    assert places[0] == places[1] == places[2]
    assert set(places[0]) == {n for n, p in ours.model.named_parameters() if p.requires_grad}


def test_rows_of_several_documents_run_as_they_are(tmp_path: Path) -> None:
    data = dataset(tmp_path)
    plain, ours = (trainer(tmp_path, data, micro_batch=1, steps=6) for _ in range(2))
    recorder = recording(ours)
    assert losses(ours, 4) == pytest.approx(losses(plain, 4), rel=1e-5)
    assert recorder.replayed < 4 * 4 - 2
    assert recorder.recorded == 1  # some rows of the same data are of one document


def test_what_waits_for_the_device_is_not_recorded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = rows_of_one_document(tmp_path)
    plain, ours = (trainer(tmp_path, data, micro_batch=2, steps=6) for _ in range(2))
    recorder = recording(ours, waits=True)
    with caplog.at_level(logging.WARNING):
        assert losses(ours, 2) == pytest.approx(losses(plain, 2), rel=1e-5)
    assert (recorder.recorded, recorder.replayed) == (0, 0)
    assert caplog.text.count("not recorded") == 1


def test_a_recorded_optimizer_takes_the_same_steps(tmp_path: Path) -> None:
    data, recorder = dataset(tmp_path), Again()
    plain, ours = (trainer(tmp_path, data, steps=6) for _ in range(2))
    roles = parameter_roles(ours.model, ours.model.config)
    ours.optimizer = MuonSplit(roles, 1e-2, recorder=recorder)
    assert losses(ours, 4) == losses(plain, 4)
    assert recorder.replayed >= recorder.recorded > 0
    assert same(tensors(ours), tensors(plain)) == list(tensors(plain))


def test_another_batch_size_is_recorded_anew(tmp_path: Path) -> None:
    data = rows_of_one_document(tmp_path)
    batch = BatchWarmup(2, 4, 12, multiple=2)
    plain, ours = (trainer(tmp_path, data, micro_batch=2, steps=8, batch=batch, balance_weight=0.3) for _ in range(2))
    recorder = recording(ours)
    assert losses(ours, 8) == pytest.approx(losses(plain, 8), rel=1e-5)
    assert recorder.recorded == 2
    assert recorder.replayed > 2


def test_a_later_stage_moves_only_what_it_trains(tmp_path: Path) -> None:
    """Without MTP its block has no gradient: one of zero would still decay its weights."""
    data, recorder = rows_of_one_document(tmp_path), Again()
    plain, ours = (trainer(tmp_path, data, micro_batch=2, steps=2, cuda_graphs=graphs) for graphs in (False, True))
    ours.recorder = recorder
    ours._set_out()
    for of in (plain, ours):
        losses(of, 2)
        of.go_on(replace(of.config, mtp_depths=0), of.loader, tmp_path / "next")
        before = {n: p.detach().clone() for n, p in of.model.mtp.named_parameters()}
        losses(of, 2)
        assert all(torch.equal(p, before[n]) for n, p in of.model.mtp.named_parameters())
    assert recorder.replayed > 2
    for name, expected in tensors(plain).items():
        torch.testing.assert_close(tensors(ours)[name], expected, rtol=1e-4, atol=1e-5, msg=name)
    assert ours.recorded is not None
    ours.go_on(plain.config, ours.loader, tmp_path / "last")
    assert ours.recorded is None


def test_a_steps_rows_are_not_written_over(tmp_path: Path) -> None:
    """They are looked at once more where a loss is not finite."""
    ours = trainer(tmp_path, rows_of_one_document(tmp_path), micro_batch=1, steps=6)
    recorder, rows = recording(ours), ours._rows(0, 4)
    ours._ahead = (0, 4, rows)
    before = [t.clone() for r in rows for t in r.tensors]
    ours.step()
    assert recorder.replayed == 2
    assert all(map(torch.equal, before, (t for r in rows for t in r.tensors)))


def test_what_is_not_recorded_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert records(TrainConfig(cuda_graphs=True), Ranks())
    assert not records(TrainConfig(cuda_graphs=True, context_groups=64), Ranks())
    assert not records(TrainConfig(cuda_graphs=True, stage="warmup"), Ranks())
    for asked in (False, True):
        with caplog.at_level(logging.WARNING):
            of = trainer(tmp_path, rows_of_one_document(tmp_path / str(asked)), cuda_graphs=asked)
        assert of.recorded is None
        assert caplog.text.count("no micro-batch of this stage is recorded") == asked


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="recording goes untested here: no CUDA device")
def test_all_recordings_may_be_given_up() -> None:
    recorder, x = CudaRecorder(), torch.zeros(4, device="cuda")

    def call() -> None:
        x.add_(1)

    for recorded in range(3):
        again = recorder.record(call)
        again()
        assert x.tolist() == [2.0 * (recorded + 1)] * 4
        del again


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="recording goes untested here: no CUDA device")
def test_cuda_graphs_train_as_launches_do(tmp_path: Path) -> None:
    config = ModelConfig(
        vocab_size=VOCAB,
        hidden_size=512,
        num_hidden_layers=2,
        first_k_dense_replace=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=256,
        intermediate_size=768,
        moe_intermediate_size=256,
        n_routed_experts=8,
        num_experts_per_tok=2,
        eos_token_id=(0,),
        pad_token_id=0,
    )
    data, found = rows_of_one_document(tmp_path, 256), []
    for graphs in (True, False):
        with torch.device("cuda"):
            model = GLM5(config, seed=1)
        of = trainer(tmp_path, data, model=model, micro_batch=2, steps=9, precision="bf16", cuda_graphs=graphs)
        assert (of.recorded is not None) == graphs
        found.append(losses(of, 6))
    assert found[0] == pytest.approx(found[1], rel=2e-3)
    assert found[0][-1] < found[0][0] - 0.2
