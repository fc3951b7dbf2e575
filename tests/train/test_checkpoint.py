"""Checkpoints: whole at any kill point, damage noticed and named, nothing lost when the disk refuses."""

from __future__ import annotations

import json
import math
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from glm5.train.checkpoint import _DTYPES, CheckpointStore
from glm5.utils.errors import CheckpointError, ConfigError

Fault = Callable[..., AbstractContextManager[None]]
VICTIM = Path(__file__).with_name("saving_victim.py")


def content(step: int) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any]]:
    w = torch.arange(1000, dtype=torch.float32) * (step + 1)
    return {"weights": {"w": w, "b": w[:7].bfloat16()}, "optimizer": {"m": -w}}, {"position": [step, step * 3]}


def assert_is(found: Any, step: int) -> None:
    assert found is not None
    tensors, state = content(step)
    assert found.step == step
    assert found.state == state
    assert found.tensors.keys() == tensors.keys()
    for group, named in tensors.items():
        assert found.tensors[group].keys() == named.keys()
        for name, t in named.items():
            assert found.tensors[group][name].dtype == t.dtype
            assert torch.equal(found.tensors[group][name], t)


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    """A store that holds steps 10, 20 and 30."""
    store = CheckpointStore(tmp_path / "checkpoints")
    for step in (10, 20, 30):
        store.save(step, *content(step))
    return store


# --------------------------------------------------------------------------- round trip
def test_newest_comes_back_and_old_ones_go(store: CheckpointStore) -> None:
    assert_is(store.load_newest(), 30)
    path = store.save(40, *content(40))
    assert path.name == "step-00000040"
    assert [p.name for p in store.list()] == ["step-00000020", "step-00000030", "step-00000040"]
    assert_is(store.load_newest(), 40)
    assert_is(store.load(20), 20)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 10 .*20, 30, 40"):
        store.load(10)


def test_empty_store(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "never")
    assert store.list() == []
    assert store.load_newest() is None
    with pytest.raises(CheckpointError, match="none"):
        store.load(1)
    with pytest.raises(ConfigError, match="keep=0"):
        CheckpointStore(tmp_path, keep=0)


@pytest.mark.parametrize("dtype", list(_DTYPES), ids=str)
def test_every_dtype_and_shape_keeps_its_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(3)
    width = torch.empty((), dtype=dtype).element_size()
    raw = torch.randint(0, 256, (6, 5 * width), dtype=torch.uint8, generator=g)
    raw = raw % 2 if dtype == torch.bool else raw
    full = raw.view(dtype)
    tensors = {
        "matrix": full,
        "transposed": full.t(),
        "strided": full[::2, 1:4],
        "scalar": full[0, 0],
        "empty": full[:0],
        "one byte, to shift what follows": torch.zeros(1, dtype=torch.uint8),
        "名前": full[1],
    }
    CheckpointStore(tmp_path).save(1, {"t": tensors}, {})
    loaded = CheckpointStore(tmp_path).load(1).tensors["t"]
    assert loaded.keys() == tensors.keys()
    for name, t in tensors.items():
        assert loaded[name].dtype == t.dtype
        assert loaded[name].shape == t.shape
        as_bytes = [x.contiguous().reshape(-1).view(torch.uint8) for x in (loaded[name], t)]
        assert torch.equal(*as_bytes)


def test_optimizer_of_mixed_dtypes_keeps_each(tmp_path: Path) -> None:
    state = {
        "0.momentum": torch.ones(4, 4, dtype=torch.bfloat16),
        "0.step": torch.tensor(3.0),
        "1.exp_avg": torch.full((4,), 1e-30, dtype=torch.float32),
        "1.exp_avg_sq": torch.full((4,), 1e-300, dtype=torch.float64),
        "counts": torch.tensor([40_840, 40_960]),
    }
    CheckpointStore(tmp_path).save(0, {"optimizer": state}, {})
    loaded = CheckpointStore(tmp_path).load(0).tensors["optimizer"]
    assert {n: t.dtype for n, t in loaded.items()} == {n: t.dtype for n, t in state.items()}
    assert all(torch.equal(loaded[n], t) for n, t in state.items())


def test_a_later_update_does_not_reach_what_was_saved(tmp_path: Path) -> None:
    w = torch.ones(100_000, requires_grad=True)
    CheckpointStore(tmp_path).save(1, {"weights": {"w": w}}, {})
    with torch.no_grad():
        w.add_(1)
    assert torch.equal(CheckpointStore(tmp_path).load(1).tensors["weights"]["w"], torch.ones(100_000))


def test_files_are_plain_safetensors_and_json(store: CheckpointStore) -> None:
    path = store.list()[-1]
    with safe_open(path / "weights.safetensors", "pt") as f:
        assert torch.equal(f.get_tensor("w"), content(30)[0]["weights"]["w"])
    assert json.loads((path / "state.json").read_text()) == content(30)[1]
    assert {p.name for p in path.iterdir()} == {
        "weights.safetensors",
        "optimizer.safetensors",
        "state.json",
        "manifest.json",
    }


@pytest.mark.parametrize(
    ("state", "named"),
    [
        ({"loss": math.nan}, r"state\.loss=nan"),
        ({"a": {"b": [1, math.inf]}}, r"state\.a\.b\[1\]=inf"),
        ({"by_step": {3: 1}}, "key 3"),
        ({"lr": np.float64(1)}, r"state\.lr is a float64"),
        ({"t": torch.ones(1)}, r"state\.t is a Tensor"),
    ],
)
def test_state_that_json_would_change_is_refused_by_name(tmp_path: Path, state: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        CheckpointStore(tmp_path).save(1, {}, state)
    assert CheckpointStore(tmp_path).list() == []


def test_state_floats_are_exact(tmp_path: Path) -> None:
    values = [0.1, 1e-323, 1.7976931348623157e308, -0.0, 2**70, math.pi]
    CheckpointStore(tmp_path).save(1, {}, {"values": values})
    loaded = CheckpointStore(tmp_path).load(1).state["values"]
    assert [repr(v) for v in loaded] == [repr(v) for v in values]


# --------------------------------------------------------------------------- kills
def killing(directory: Path, *how: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(VICTIM), str(directory), *how]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    return run


def test_kill_at_every_file_operation_of_a_save(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, str(VICTIM), str(tmp_path / "c"), "operations"],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout.split()[1].rstrip(",")) > 30, run.stdout


def test_kill_at_random_times_during_saves(tmp_path: Path) -> None:
    run = killing(tmp_path / "c", "times", "60")
    assert int(run.stdout.split()[5].rstrip(",")) > 0, f"no kill fell into a save: {run.stdout}"


def test_leftovers_of_an_interrupted_save_are_ignored_then_removed(store: CheckpointStore) -> None:
    shutil.copytree(store.list()[0], store.directory / ".saving-step-00000040")
    shutil.copytree(store.list()[0], store.directory / ".removing-step-00000001")
    (store.directory / ".saving-step-00000040" / "weights.safetensors").write_bytes(b"half")
    (store.directory / "notes.txt").write_text("not ours")
    found = store.load_newest()
    assert_is(found, 30)
    assert found is not None
    assert found.warnings == ()
    store.save(40, *content(40))
    assert not list(store.directory.glob(".saving*")) + list(store.directory.glob(".removing*"))
    assert (store.directory / "notes.txt").exists()


# --------------------------------------------------------------------------- damage
def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("file", ["weights.safetensors", "optimizer.safetensors", "state.json", "manifest.json"])
def test_any_flipped_bit_is_found(store: CheckpointStore, file: str) -> None:
    path = store.list()[-1] / file
    bits = path.stat().st_size * 8
    for bit in random.Random(file).sample(range(bits), min(60, bits)):  # noqa: S311
        flip(path, bit)
        found = store.load_newest()
        assert_is(found, 20)
        assert found is not None
        (warning,) = found.warnings
        assert "step-00000030" in warning
        assert file in warning
        with pytest.raises(CheckpointError, match=file):
            store.load(30)
        flip(path, bit)
    assert_is(store.load_newest(), 30)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def become_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [truncate, lengthen, empty, become_directory, Path.unlink])
@pytest.mark.parametrize("file", ["weights.safetensors", "state.json", "manifest.json"])
def test_damage_to_the_two_newest_uses_the_third(
    store: CheckpointStore, file: str, damage: Callable[[Path], None]
) -> None:
    for path in store.list()[1:]:
        damage(path / file)
    found = store.load_newest()
    assert_is(found, 10)
    assert found is not None
    assert len(found.warnings) == 2
    assert all(file in w for w in found.warnings)


def test_all_damaged_is_an_error_and_not_a_fresh_start(store: CheckpointStore) -> None:
    for path in store.list():
        truncate(path / "optimizer.safetensors")
    with pytest.raises(CheckpointError, match=r"no whole checkpoint.*30.*20.*10") as e:
        store.load_newest()
    assert e.value.mend


def test_saving_after_a_fallback_sets_the_damaged_one_aside(store: CheckpointStore) -> None:
    truncate(store.list()[-1] / "weights.safetensors")
    assert_is(store.load_newest(), 20)
    # Step 25 is earlier than the damaged 30, which must neither win the next load nor push out what is whole.
    CheckpointStore(store.directory, keep=2).save(25, *content(25))
    found = store.load_newest()
    assert_is(found, 25)
    assert found is not None
    assert found.warnings == ()
    names = sorted(p.name for p in store.directory.iterdir() if p.name != ".lock")
    assert names == ["damaged-step-00000030", "step-00000020", "step-00000025"]


def test_saving_the_damaged_step_again_supersedes_it(store: CheckpointStore) -> None:
    truncate(store.list()[-1] / "weights.safetensors")
    store.save(30, *content(30))
    assert_is(store.load_newest(), 30)
    assert_is(store.load(30), 30)
    assert [p.name for p in store.list()] == ["step-00000010", "step-00000020", "step-00000030.1"]


def test_damaged_ones_do_not_count_as_kept(store: CheckpointStore) -> None:
    truncate(store.list()[1] / "weights.safetensors")
    CheckpointStore(store.directory, keep=3).save(40, *content(40))
    assert [p.name for p in store.list()] == [f"step-000000{s}" for s in (10, 20, 30, 40)]


def test_an_earlier_step_beside_a_whole_later_one_is_refused(store: CheckpointStore) -> None:
    with pytest.raises(CheckpointError, match=r"holds step-00000030.* later than step 5"):
        store.save(5, *content(5))
    assert_is(store.load_newest(), 30)
    assert len(store.list()) == 3


def test_a_future_format_is_not_mistaken_for_damage(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glm5.train.checkpoint.FORMAT", 3)
    store.save(40, *content(40))
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="format 3"):
        store.load_newest()


# --------------------------------------------------------------------------- refusals of the disk
def test_full_disk_loses_nothing(store: CheckpointStore, file_size_limit: Fault) -> None:
    before = sorted(store.directory.iterdir())
    with file_size_limit(3000), pytest.raises(CheckpointError, match=r"step 40 was not saved.*untouched") as e:
        store.save(40, *content(40))
    assert e.value.mend
    assert sorted(store.directory.iterdir()) == before
    assert_is(store.load_newest(), 30)
    store.save(40, *content(40))
    assert_is(store.load_newest(), 40)


def test_too_little_space_is_known_before_writing(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda p: shutil._ntuple_diskusage(10, 8, 2048))
    with pytest.raises(CheckpointError, match=r"7\.9 KiB needed, 2\.0 KiB free"):
        store.save(40, *content(40))
    assert_is(store.load_newest(), 30)


def test_failing_write_loses_nothing(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk fails at the k-th fsync, for every k of a save: before the rename nothing of step 40 is left."""
    for k in range(1, 7):
        calls: Iterator[int] = iter(range(1, 100))

        def fsync(fd: int, calls: Iterator[int] = calls, k: int = k) -> None:
            if next(calls) == k:
                raise OSError(5, "Input/output error")

        with monkeypatch.context() as m:
            m.setattr("os.fsync", fsync)
            with suppress(CheckpointError):
                store.save(40, *content(40))
        found = store.load_newest()
        assert found is not None
        assert_is(found, found.step)
        assert found.step in (30, 40)
        assert found.warnings == ()
        if k < 5:
            assert found.step == 30
            assert not list(store.directory.glob(".saving*"))


def test_read_only_directory(store: CheckpointStore, read_only: Fault) -> None:
    with read_only(store.directory):
        with pytest.raises(CheckpointError, match="permission denied"):
            store.save(40, *content(40))
        assert_is(store.load_newest(), 30)
    with read_only(store.directory.parent), pytest.raises(CheckpointError, match="permission denied"):
        CheckpointStore(store.directory.parent / "new").save(1, *content(1))


def test_a_file_in_the_place_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for attempt in (
        lambda: CheckpointStore(tmp_path / "file").save(1, *content(1)),
        lambda: CheckpointStore(tmp_path / "file").load_newest(),
    ):
        with pytest.raises(CheckpointError, match="file"):
            attempt()


def test_two_directories_do_not_touch_each_other(tmp_path: Path) -> None:
    a, b = CheckpointStore(tmp_path / "a", keep=1), CheckpointStore(tmp_path / "b", keep=1)
    for step in (1, 2, 3):
        a.save(step, *content(step))
        b.save(step + 10, *content(step + 10))
    assert_is(a.load_newest(), 3)
    assert_is(b.load_newest(), 13)
    assert len(a.list()) == len(b.list()) == 1


def test_a_prune_during_the_load_is_no_damage(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    import glm5.train.checkpoint as module

    verify = module.verify

    def pruned_meanwhile(path: Path, **options: Any) -> Any:
        if path.name == "step-00000030":
            monkeypatch.setattr(module, "verify", verify)
            CheckpointStore(store.directory, keep=1).save(40, *content(40))
        return verify(path, **options)

    monkeypatch.setattr(module, "verify", pruned_meanwhile)
    found = store.load_newest()
    assert_is(found, 40)
    assert found is not None
    assert found.warnings == ()
