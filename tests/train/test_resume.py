"""A run that was stopped in any way and started again is the run that was never stopped, bit for bit."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from glm5.data.loader import Batch, TokenDataset
from glm5.train.loop import Trainer
from glm5.train.schedule import BatchWarmup
from glm5.utils.errors import CheckpointError, ConfigError, FileError
from glm5.utils.runlog import read_metrics, run_status
from support.training import dataset, same, tensors, tiny, trainer

VICTIM = Path(__file__).with_name("resume_victim.py")
TIMED = ("time", "tokens_per_second", "tflops_per_device", "memory_mib", "memory")


def untimed(directory: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in r.items() if k not in TIMED} for r in read_metrics(directory)]


class Stop(Exception):
    """Ends a run from inside, as a crash would."""


def stop_at(step: int) -> Callable[[Trainer], None]:
    def on_step(of: Trainer) -> None:
        if of.finished_steps == step:
            raise Stop

    return on_step


# --------------------------------------------------------------------------- killed
@pytest.mark.slow
@pytest.mark.parametrize(("stage", "precision", "kills"), [("sparse", "fp32", 8), ("pretrain", "bf16", 6)])
def test_killed_at_any_moment_it_ends_in_the_same_bytes(stage: str, precision: str, kills: int, tmp_path: Path) -> None:
    paths = os.pathsep.join([str(VICTIM.parents[1]), str(VICTIM.parents[2] / "src")])
    found = subprocess.run(
        [sys.executable, str(VICTIM), str(tmp_path), stage, precision, str(kills)],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert found.returncode == 0, found.stderr
    counts = re.match(r"during a save (\d+), elsewhere (\d+), starts (\d+), from (\d+) places", found.stdout)
    assert counts, found.stdout
    during_save, elsewhere, starts, places = map(int, counts.groups())
    # Not a test of an undisturbed run: it was hit inside saves and outside, and resumed from several steps.
    assert during_save >= 1
    assert elsewhere >= 1
    assert starts >= 4
    assert places >= 2


# --------------------------------------------------------------------------- stopped
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_stops_between_steps(
    number: signal.Signals, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = dataset(tmp_path)
    whole = trainer(tmp_path / "whole", data, steps=6, save_every=4)
    whole.run()
    before = signal.getsignal(number)

    def send(of: Trainer) -> None:
        if of.finished_steps == 2:
            os.kill(os.getpid(), number)

    stopped = trainer(tmp_path / "stopped", data, steps=6, save_every=4)
    with pytest.raises(KeyboardInterrupt):
        stopped.run(on_step=send)
    assert signal.getsignal(number) is before
    assert stopped.finished_steps == 3
    assert [p.name for p in stopped.store.list()] == ["step-00000003"]
    said = capsys.readouterr().err
    assert f"{number.name}: finishing this step" in said
    assert "stopped after step 3, which is saved" in said
    assert run_status(tmp_path / "stopped" / "run") == "interrupted"

    again = trainer(tmp_path / "stopped", data, steps=6, save_every=4)
    again.run()
    assert "resumed after step 3" in capsys.readouterr().err
    assert len(same(tensors(whole), tensors(again))) == len(tensors(whole))
    assert untimed(whole.directory) == untimed(again.directory)


def test_a_second_signal_stops_at_once(tmp_path: Path) -> None:
    of = trainer(tmp_path, dataset(tmp_path))
    step = of.step

    def interrupted() -> dict[str, Any]:
        signal.raise_signal(signal.SIGINT)  # to this thread: a process's own may reach another, later
        signal.raise_signal(signal.SIGINT)
        return step()

    of.step = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        of.run()
    assert of.finished_steps == 0
    assert not of.store.list()


def test_the_rows_drawn_are_those_of_an_unbroken_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A growing batch over several epochs: every sample once, in order. Twice only those of redone steps, and of the
    step that was read ahead when the run broke off."""
    data = dataset(tmp_path, (60, 45, 20))
    drawn: list[list[int]] = []
    load = TokenDataset.batch

    def record(self: TokenDataset, rows: NDArray[np.int64]) -> Batch:
        drawn.append(rows.tolist())
        return load(self, rows)

    monkeypatch.setattr(TokenDataset, "batch", record)
    options = dict(steps=8, batch=BatchWarmup(2, 6, 24), micro_batch=2, save_every=3)
    trainer(tmp_path / "whole", data, **options).run()
    whole, drawn = drawn, []
    with pytest.raises(Stop):
        trainer(tmp_path / "broken", data, **options).run(on_step=stop_at(5))
    micro_batches = [-(-BatchWarmup(2, 6, 24).batch(BatchWarmup(2, 6, 24).seen(s)) // 2) for s in range(8)]
    assert drawn == whole[: sum(micro_batches[:6])]
    drawn = []
    trainer(tmp_path / "broken", data, **options).run()
    assert drawn == whole[sum(micro_batches[:3]) :]
    assert sum(len(x) for x in whole) > 4 * data.rows


def test_a_fresh_run_is_a_function_of_its_seed(tmp_path: Path) -> None:
    """Whatever was drawn in this process before: the checkpoints are the same bytes, random state included."""
    data = dataset(tmp_path)
    sums = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        random.random()  # noqa: S311
        torch.rand(3)
        of = trainer(tmp_path / name, data, seed=seed, steps=2)
        of.run()
        sums.append((of.store.list()[-1] / "manifest.json").read_bytes())
    assert sums[0] == sums[1]
    assert sums[0] != sums[2]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="resuming on CUDA goes untested here: no device")
def test_a_run_on_a_gpu_resumes_in_bf16(tmp_path: Path) -> None:
    data = dataset(tmp_path)
    options: dict[str, Any] = dict(steps=6, stage="sparse", precision="auto")
    whole = trainer(tmp_path / "whole", data, model=tiny().to("cuda"), **options)
    whole.run()
    assert whole.model.dtype == torch.bfloat16
    with pytest.raises(Stop):
        trainer(tmp_path / "broken", data, model=tiny().to("cuda"), **options).run(on_step=stop_at(3))
    again = trainer(tmp_path / "broken", data, model=tiny().to("cuda"), **options)
    again.run()
    # Atomic additions on a GPU have no order, so the bytes may differ; the course may not.
    for a, b in zip(untimed(whole.directory), untimed(again.directory), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=2e-2)
    again.export(tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").exists()


# --------------------------------------------------------------------------- damage
def test_a_damaged_checkpoint_is_passed_over_with_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = dataset(tmp_path)
    options = dict(steps=6, save_every=2)
    whole = trainer(tmp_path / "whole", data, **options)
    whole.run()
    broken = trainer(tmp_path / "broken", data, **options)
    with pytest.raises(Stop):
        broken.run(on_step=stop_at(5))
    newest = broken.store.list()[-1]
    assert newest.name == "step-00000004"
    weights = newest / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    capsys.readouterr()

    again = trainer(tmp_path / "broken", data, **options)
    again.run()
    said = capsys.readouterr().err
    assert f"warning: passing over {newest}: model.safetensors does not match its checksum" in said
    assert "resumed after step 2" in said
    assert len(same(tensors(whole), tensors(again))) == len(tensors(whole))
    assert untimed(whole.directory) == untimed(again.directory)


def test_when_all_checkpoints_are_damaged_nothing_is_begun_anew(tmp_path: Path) -> None:
    data = dataset(tmp_path)
    of = trainer(tmp_path, data)
    of.run()
    for path in of.store.list():
        (path / "optimizer.safetensors").unlink()
    before = (of.directory / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match=r"no whole checkpoint is left.*optimizer\.safetensors is missing"):
        trainer(tmp_path, data).run()
    assert (of.directory / "metrics.jsonl").read_bytes() == before


# --------------------------------------------------------------------------- another run's directory
def test_what_decides_the_result_may_not_change(tmp_path: Path) -> None:
    data = dataset(tmp_path)
    with pytest.raises(Stop):
        trainer(tmp_path, data).run(on_step=stop_at(2))
    for changes, name in ((dict(lr=3e-2), "lr.peak"), (dict(steps=5), "steps"), (dict(seed=1), "seed")):
        with pytest.raises(ConfigError, match=rf"{re.escape(name)}=.*this run began with"):
            trainer(tmp_path, data, **changes).run()
    again = trainer(tmp_path, data, save_every=1, log_every=2, keep=1)
    again.run()
    assert again.finished_steps == 4


def test_another_models_checkpoint_is_refused(tmp_path: Path) -> None:
    data = dataset(tmp_path)
    trainer(tmp_path, data).run()
    with pytest.raises(CheckpointError, match=r"holds another model: .*size mismatch.*Resume with the model"):
        trainer(tmp_path, data, model=tiny(hidden_size=32)).run()
    # Frozen or trained is decided by the stage, so the optimizer's state tells one stage from another.
    other = trainer(tmp_path, data, stage="sparse")
    with pytest.raises(ConfigError, match=r"stage='sparse': this run began with 'pretrain'"):
        other.run()


def test_a_finished_run_is_left_as_it_is(tmp_path: Path) -> None:
    data = dataset(tmp_path)
    first = trainer(tmp_path, data)
    first.run()
    checkpoints = [(p.name, (p / "manifest.json").read_bytes()) for p in first.store.list()]
    again = trainer(tmp_path, data)
    again.run()
    assert (again.finished_steps, again.samples, again.tokens) == (first.finished_steps, first.samples, first.tokens)
    assert [(p.name, (p / "manifest.json").read_bytes()) for p in again.store.list()] == checkpoints
    assert run_status(again.directory) == "finished"


# --------------------------------------------------------------------------- disks
def test_a_full_disk_loses_no_checkpoint(
    tmp_path: Path, file_size_limit: Callable[[int], AbstractContextManager[None]]
) -> None:
    data = dataset(tmp_path)
    of = trainer(tmp_path, data, steps=6)
    with pytest.raises(Stop):
        of.run(on_step=stop_at(2))
    (saved,) = of.store.list()
    limit = (saved / "model.safetensors").stat().st_size // 2
    again = trainer(tmp_path, data, steps=6)
    untouched = pytest.raises(CheckpointError, match=r"step 4 was not saved.*the ones before it are untouched")
    with untouched, file_size_limit(limit):
        again.run()
    again = trainer(tmp_path, data, steps=6)
    again.run()
    whole = trainer(tmp_path / "whole", data, steps=6)
    whole.run()
    assert len(same(tensors(whole), tensors(again))) == len(tensors(whole))


def test_a_read_only_directory_is_refused_before_the_first_step(
    tmp_path: Path, read_only: Callable[[Path], AbstractContextManager[None]]
) -> None:
    data = dataset(tmp_path)
    of = trainer(tmp_path, data)
    of.directory.mkdir()
    with read_only(of.directory), pytest.raises(FileError, match=r"cannot write to .*run"):
        of.run()
    assert of.finished_steps == 0


def test_two_processes_cannot_write_one_run(tmp_path: Path) -> None:
    data = dataset(tmp_path)
    second = trainer(tmp_path, data)

    def start_second(_: Trainer) -> None:
        with pytest.raises(FileError, match="another process is writing"):
            second.run()
        raise Stop

    with pytest.raises(Stop):
        trainer(tmp_path, data).run(on_step=start_second)


# --------------------------------------------------------------------------- master weights
def test_bf16_resumes_with_its_master_weights(tmp_path: Path) -> None:
    data = dataset(tmp_path)
    options = dict(steps=6, precision="bf16", lr=1e-3)
    whole = trainer(tmp_path / "whole", data, **options)
    whole.run()
    with pytest.raises(Stop):
        trainer(tmp_path / "broken", data, **options).run(on_step=stop_at(3))
    again = trainer(tmp_path / "broken", data, **options)
    again.run()
    for a, b in ((tensors(whole), tensors(again)), (whole.optimizer.named_state(), again.optimizer.named_state())):
        assert len(same(a, b)) == len(a)
    masters = [n for n in whole.optimizer.named_state() if n.endswith(".master")]
    assert len(masters) > 20
    # The masters hold what bf16 cannot: an export differs from the rounded weights, and by less than their spacing.
    exact, rounded = whole.fp32_model().state_dict(), whole.model.state_dict()
    name = "model.layers.0.self_attn.o_proj.weight"
    assert not torch.equal(exact[name], rounded[name].float())
    assert torch.equal(exact[name].bfloat16(), rounded[name])


def test_a_stage_continues_the_weights_of_the_one_before(tmp_path: Path) -> None:
    """Pretrain, warm up and adapt the same model, stopped in each stage, as the commands do."""
    data = dataset(tmp_path)

    def stages(directory: Path, stop: bool) -> Trainer:
        model = tiny()
        for stage in ("pretrain", "warmup", "sparse"):
            if stop:
                part = tiny()
                part.load_state_dict(model.state_dict())
                stopped = trainer(directory / stage, data, model=part, stage=stage)
                with pytest.raises(Stop):
                    stopped.run(on_step=stop_at(3))
            of = trainer(directory / stage, data, model=model, stage=stage)
            of.run()
        return of

    whole, broken = stages(tmp_path / "a", False), stages(tmp_path / "b", True)
    assert len(same(tensors(whole), tensors(broken))) == len(tensors(whole))
