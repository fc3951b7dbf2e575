"""Runs on meshes that are stopped, resumed on the same and on other meshes, and damaged."""

from __future__ import annotations

import shutil
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from glm5.model.weights import load_model
from glm5.parallel.mesh import World
from glm5.train.loop import Trainer
from glm5.utils.errors import CheckpointError
from glm5.utils.runlog import read_metrics
from support.parallel import apart, make, optimizer_state, weights
from support.ranks import run_ranks
from support.training import dataset

OPTIONS: dict[str, Any] = dict(steps=6, save_every=2, mtp_share=0.5, keep=9)


class Stop(Exception):
    pass


def stop_at(step: int) -> Any:
    def check(of: Trainer) -> None:
        if of.finished_steps == step:
            of.store.wait()
            raise Stop

    return check


def losses(run: Path) -> list[float]:
    return [m["loss"] for m in read_metrics(run)]


def everything(of: Trainer) -> dict[str, Tensor]:
    return weights(of) | optimizer_state(of)


def _unbroken_and_broken(world: World, directory: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    unbroken = make(world, directory, "unbroken", **OPTIONS)
    unbroken.run()
    unbroken.export(Path(directory) / "exported")
    final = everything(unbroken)

    broken = make(world, directory, "broken", **OPTIONS)
    try:
        broken.run(on_step=stop_at(3))
    except Stop:
        found["stopped"] = broken.finished_steps
    again = make(world, directory, "broken", **OPTIONS)
    again.run()
    resumed = everything(again)
    found["same bits"] = sorted(n for n in final if not torch.equal(final[n], resumed[n]))
    found["dtypes"] = {str(t.dtype) for n, t in resumed.items() if n.endswith((".momentum", ".exp_avg"))}

    # What is saved is what was there when `save` returned, whatever happens to it meanwhile.
    racing = make(world, directory, "racing", **OPTIONS)
    before = everything(racing)
    racing.save()
    with torch.no_grad():
        for p in racing.model.parameters():
            racing.ranks.local(p).fill_(7.0)
    racing.store.wait()
    loaded = make(world, directory, "racing", **OPTIONS)
    loaded.resume()
    found["raced"] = sorted(n for n, t in everything(loaded).items() if not torch.equal(t, before[n]))
    torch.save(final, f"{directory}/final-{world.rank}.pt")
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Two ranks with two experts each: an unbroken run, a broken and resumed one, and a save that is raced."""
    directory = tmp_path_factory.mktemp("runs")
    dataset(directory)
    return directory, run_ranks(2, "dp=2,ep=2", _unbroken_and_broken, str(directory))


def test_a_resumed_run_ends_in_the_same_bits(trained: tuple[Path, list[dict[str, Any]]]) -> None:
    directory, found = trained
    for rank in found:
        assert rank["stopped"] == 3
        assert rank["same bits"] == []
        assert rank["dtypes"] == {"torch.float32"}
    whole, broken = (losses(directory / name) for name in ("unbroken", "broken"))
    assert whole == broken
    assert len(whole) == 6
    parts = [torch.load(directory / f"final-{rank}.pt") for rank in range(2)]
    assert all(torch.equal(parts[0][n], parts[1][n]) for n in parts[0])
    names = sorted(p.name for p in (directory / "unbroken" / "checkpoints").iterdir() if not p.name.startswith("."))
    assert names == ["step-00000002", "step-00000004", "step-00000006"]


def test_an_asynchronous_save_holds_what_was_there(trained: tuple[Path, list[dict[str, Any]]]) -> None:
    assert all(rank["raced"] == [] for rank in trained[1])


def test_the_export_is_the_public_layout(trained: tuple[Path, list[dict[str, Any]]]) -> None:
    directory, _ = trained
    exported = load_model(directory / "exported").state_dict()
    final = torch.load(directory / "final-0.pt")
    assert all(torch.equal(t, final[name]) for name, t in exported.items())


def _resumed(world: World, directory: str, run: str, **how: Any) -> tuple[dict[str, Tensor], list[str]]:
    of = make(world, directory, run, **OPTIONS, **how)
    warned = of.resume()
    state = everything(of)
    made = make(world, directory, run, **OPTIONS, **how)
    made.run()
    return state, warned


def fork(directory: Path, name: str, step: int) -> Path:
    """A copy of the unbroken run as it was after `step`."""
    shutil.copytree(directory / "unbroken", directory / name)
    for path in (directory / name / "checkpoints").iterdir():
        if path.name.startswith("step-") and int(path.name[5:]) > step:
            shutil.rmtree(path)
    return directory / name


@pytest.mark.parametrize("mesh", ["dp=4,shard=2,ep=4", "cp=2,tp=2", "dp=2,pp=2"])
def test_goes_on_on_another_mesh(mesh: str, trained: tuple[Path, list[dict[str, Any]]]) -> None:
    """Saved on 2 ranks, read on 4 and in one process: the same tensors to the bit, then the same loss curve."""
    directory, _ = trained
    name = mesh.replace(",", "-")
    run = fork(directory, name, 4)
    torn = run / "checkpoints" / ".saving-step-00000006"  # as a kill in the middle of a save leaves it
    torn.mkdir()
    shutil.copy(next((run / "checkpoints" / "step-00000004").glob("*.safetensors")), torn)
    alone = make(None, directory, name, **OPTIONS)
    assert alone.resume() == []
    expected = everything(alone)
    covered: set[str] = set()
    for state, warned in run_ranks(4, mesh, _resumed, str(directory), name):
        assert warned == []
        assert sorted(n for n in state if not torch.equal(expected[n], state[n])) == []
        covered |= state.keys()
    assert covered == expected.keys()  # which a pipeline's stages have between them
    assert not torn.exists()
    close = zip(losses(run), losses(directory / "unbroken"), strict=True)
    assert all(abs(a - b) < 2e-4 * abs(b) for a, b in close)
    # And from there in one process again.
    back = make(None, directory, name, **{**OPTIONS, "steps": 8})
    back.resume()
    assert back.finished_steps == 6
    assert not apart(torch.load(directory / "final-0.pt"), everything(back), 0.05)


def _until(world: World, directory: str, run: str, step: int) -> dict[str, Tensor]:
    """What is read from the newest checkpoint; the run then goes on to `step`."""
    of = make(world, directory, run, **OPTIONS)
    of.resume()
    state = everything(of)
    with suppress(Stop):
        of.run(on_step=stop_at(step))
    return state


def test_trained_on_four_goes_on_on_two(trained: tuple[Path, list[dict[str, Any]]]) -> None:
    """What four ranks trained and saved: the same tensors on two, and there the steps of one process."""
    directory, _ = trained
    run = fork(directory, "four", 2)
    run_ranks(4, "dp=4,ep=2", _until, str(directory), "four", 4)
    assert len(list((run / "checkpoints" / "step-00000004").glob("shard-*-model-*"))) == 4
    shutil.copytree(run, directory / "one")
    alone = make(None, directory, "one", **OPTIONS)
    alone.resume()
    expected = everything(alone)
    alone.run()
    for state in run_ranks(2, "dp=2,ep=2", _until, str(directory), "four", 6):
        assert sorted(n for n in expected if not torch.equal(expected[n], state[n])) == []
    four, one = losses(run), losses(directory / "one")
    assert len(four) == len(one) == 6
    assert all(abs(a - b) < 2e-4 * abs(b) for a, b in zip(four, one, strict=True))


def test_from_one_process_to_a_mesh(trained: tuple[Path, list[dict[str, Any]]]) -> None:
    directory, _ = trained
    alone = make(None, directory, "alone", **OPTIONS)
    with pytest.raises(Stop):
        alone.run(on_step=stop_at(4))
    expected = everything(alone)
    for state, _ in run_ranks(2, "tp=2", _resumed, str(directory), "alone"):
        assert sorted(n for n in expected if not torch.equal(expected[n], state[n])) == []
    assert len(losses(directory / "alone")) == 6


def _as_copies(world: World, directory: str, run: str) -> tuple[dict[str, Tensor], list[str]]:
    return _resumed(world, directory, run, gather_once=True)


def test_goes_on_as_copies(trained: tuple[Path, list[dict[str, Any]]]) -> None:
    """The same where every data rank then holds the whole model, without FSDP; and from there in one process again."""
    directory, _ = trained
    run = fork(directory, "copies", 4)
    alone = make(None, directory, "copies", **OPTIONS)
    alone.resume()
    expected = everything(alone)
    for state, warned in run_ranks(2, "dp=2,ep=2,shard=1", _as_copies, str(directory), "copies"):
        assert warned == []
        assert sorted(n for n in expected if not torch.equal(expected[n], state[n])) == []
    close = zip(losses(run), losses(directory / "unbroken"), strict=True)
    assert all(abs(a - b) < 2e-4 * abs(b) for a, b in close)
    back = make(None, directory, "copies", **{**OPTIONS, "steps": 8})
    back.resume()
    assert back.finished_steps == 6
    assert not apart(torch.load(directory / "final-0.pt"), everything(back), 0.05)


def _with_a_copy(world: World, directory: str) -> list[str]:
    """A pipeline whose MTP block reads a copy of the embedding, unbroken, and stopped after three of six steps."""
    options = {**OPTIONS, "layout": "E D | M N P H", "mtp_share": 1.0}
    whole = make(world, directory, "copy-whole", **options)
    whole.run()
    broken = make(world, directory, "copy-broken", **options)
    with suppress(Stop):
        broken.run(on_step=stop_at(3))
    again = make(world, directory, "copy-broken", **options)
    again.run()
    own, resumed = everything(whole), everything(again)
    assert again.pipeline is not None
    held = [stage.replica is not None for stage in again.pipeline.stages.values()]
    return [n for n in own if not torch.equal(own[n], resumed[n])] + ([] if held == [world.rank == 1] else ["no copy"])


def test_a_copied_embedding_does_not_drift_over_a_stop(trained: tuple[Path, list[dict[str, Any]]]) -> None:
    """The first MTP loss after it, and all others, are those of a run that was not stopped, to the bit."""
    directory, _ = trained
    assert run_ranks(2, "pp=2", _with_a_copy, str(directory)) == [[], []]
    whole, broken = (
        [(m["step"], m["loss"], m["mtp_loss_1"], m["mtp_loss_3"]) for m in read_metrics(directory / name)]
        for name in ("copy-whole", "copy-broken")
    )
    assert whole == broken
    assert len(whole) == 6


def _damaged(world: World, directory: str) -> tuple[int, list[str]]:
    of = make(world, directory, "damaged", **OPTIONS)
    return of.finished_steps, [*of.resume(), str(of.finished_steps)]


def test_a_damaged_part_is_found_by_all(trained: tuple[Path, list[dict[str, Any]]]) -> None:
    directory, _ = trained
    run = fork(directory, "damaged", 6)
    part = run / "checkpoints" / "step-00000006" / "shard-00002-model-00001-of-00001.safetensors"
    content = bytearray(part.read_bytes())
    content[-5] ^= 4
    part.write_bytes(content)
    for _, (warning, step) in run_ranks(2, "dp=2,ep=2", _damaged, str(directory)):
        assert "passing over" in warning
        assert "shard-00002" in warning
        assert step == "4"


def _full_disk(world: World, directory: str) -> str:
    """One rank's disk is full: the save fails on all, with its name, and what was there stays."""
    import torch.distributed.checkpoint as dcp

    of = make(world, directory, "full", **OPTIONS)
    of.save()
    of.store.wait()
    if world.rank == 1:

        def fail(*_: Any, **__: Any) -> None:
            raise OSError(28, "No space left on device")

        dcp.HuggingFaceStorageWriter.write_data = fail  # type: ignore[method-assign]
    of.finished_steps = 1
    of.save()
    try:
        of.store.wait()
    except Exception as e:
        return f"{type(e).__name__}: {e}; {[p.name for p in of.store.list()]}"
    return "nothing"


def test_a_full_disk_of_one_rank_is_said_by_all(trained: tuple[Path, list[dict[str, Any]]]) -> None:
    for said in run_ranks(2, "dp=2,ep=2", _full_disk, str(trained[0])):
        assert said.startswith("CheckpointError: the checkpoint of step 1 was not saved (rank 1: OSError")
        assert "No space left" in said
        assert said.endswith("['step-00000000']")


def _words_while_saving(world: World, directory: str) -> list[str]:
    """Main threads agree on something while a rank's thread is still writing."""
    from glm5.train import sharded

    of, go_on, plain = make(world, directory, "beside", **OPTIONS), threading.Event(), sharded.dcp.save

    def late(*args: Any, **options: Any) -> Any:
        assert go_on.wait(100)
        return plain(*args, **options)

    if world.rank == 1:
        sharded.dcp.save = late
    of.save()
    said = of.ranks.from_main(lambda: "a word")
    other = of.another_store(Path(directory) / "beside" / "elsewhere")
    of.save(other)  # its beginning is agreed on, and its end waits for nothing of the first
    go_on.set()
    of.store.wait()
    other.wait()
    return [said, *(path.name for store in (of.store, other) for path in store.list())]


def test_main_threads_agree_while_others_save(trained: tuple[Path, list[dict[str, Any]]]) -> None:
    for said in run_ranks(2, "dp=2,ep=2", _words_while_saving, str(trained[0])):
        assert said == ["a word", "step-00000000", "step-00000000"]


def _unreadable(world: World, directory: str) -> str:
    """One rank cannot read again what it wrote."""
    from glm5.train import sharded

    of = make(world, directory, "unreadable", **OPTIONS)
    if world.rank == 1:

        def fail(_: Path) -> str:
            raise OSError(5, "Input/output error")

        sharded.sha256_file = fail  # type: ignore[assignment]
    of.save()
    try:
        of.store.wait()
    except CheckpointError as e:
        return f"{e.what}; {[p.name for p in of.store.list()]}"
    return "nothing"


def test_a_part_that_cannot_be_read_again_is_said_by_all(trained: tuple[Path, list[dict[str, Any]]]) -> None:
    for said in run_ranks(2, "dp=2,ep=2", _unreadable, str(trained[0])):
        assert said.startswith("the checkpoint of step 0 was not saved (rank 1: OSError: [Errno 5] Input/output error)")
        assert said.endswith("; []")


def _bf16(world: World, directory: str) -> list[str]:
    """bf16 with fp32 master weights: saved, and read by another run."""
    of = make(world, directory, "bf16", **OPTIONS, precision="bf16")
    of.run()
    state = everything(of)
    again = make(world, directory, "bf16", **OPTIONS, precision="bf16")
    again.resume()
    found = everything(again)
    exact = of.fp32_model()
    wrong = [n for n in state if not torch.equal(state[n], found[n])]
    if world.main:
        masters = {n.removesuffix(".master"): t for n, t in state.items() if n.endswith(".master")}
        wrong += [n for n, t in exact.state_dict().items() if n in masters and not torch.equal(t, masters[n])]
        wrong += [] if len(masters) > 20 else ["masters"]
        router = [t.dtype for n, t in of.model.state_dict().items() if ".gate." in n]
        wrong += [] if set(router) == {torch.float32} else ["router"]
    return wrong


def test_bf16_keeps_its_masters(trained: tuple[Path, list[dict[str, Any]]]) -> None:
    assert run_ranks(2, "dp=2,ep=2", _bf16, str(trained[0])) == [[], []]
