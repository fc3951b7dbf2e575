"""Checkpoints of a model that lies over many ranks: each writes its part, and any other number of ranks reads them.

The parts are safetensors files of torch's distributed checkpoint, whose headers say where each piece lies in its
tensor, so a run saved on 4 ranks goes on on 2, on 8, or in one process. Everything else is as in `checkpoint`: written
under another name, each file with its checksum in the manifest, renamed by the main rank once all ranks are done, old
ones removed after. A save copies the tensors to host memory and returns; a thread writes them, while training goes on.
The threads of a store talk in a process group of their own, where no other thread does. `wait`, which the next save
begins with, raises what went wrong, on every rank. Read first: `checkpoint`.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.tensor import DTensor

from glm5.parallel.mesh import FILES_TIMEOUT_SECONDS, World
from glm5.parallel.shard import laid_out
from glm5.train.checkpoint import (
    SHARDED,
    Checkpoint,
    CheckpointStore,
    Damage,
    Groups,
    encode_state,
    read_checkpoint,
    read_state,
    seal,
    verify,
    write_file,
)
from glm5.utils.errors import CheckpointError, FileError, UserError
from glm5.utils.files import exclusive, file_errors, fsync_directory, make_directory, require_space, sha256_file

Places = Callable[[], Mapping[str, Tensor]]


class ShardedStore(CheckpointStore):
    """The checkpoints of one run on many ranks; every rank makes one and calls its methods together.

    Args:
        directory, keep: as `CheckpointStore`'s; the directory is one that all ranks see.
        world: the ranks.
        places: returns, by "group/name", a tensor laid out as a loaded one is to be; others come whole to every rank.
    """

    def __init__(self, directory: str | Path, keep: int, world: World, places: Places) -> None:
        super().__init__(directory, keep)
        self.world, self.places = world, places
        self._group: ProcessGroup | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    # ------------------------------------------------------------------ saving
    def save(self, step: int, tensors: Groups, state: Mapping[str, Any]) -> Path:
        """Begin to write one checkpoint; the tensors may change once this returns. See `CheckpointStore.save`.

        Returns:
            The directory that it will have after `wait`.

        Raises:
            CheckpointError: the save before failed.
        """
        self.wait()
        document = encode_state({**state, "mesh": str(self.world.mesh)})
        named = {f"{group}/{name}": t.detach() for group, members in tensors.items() for name, t in members.items()}
        name = self._agreed(lambda: self._begin(step, named, document))
        staged = BlockingAsyncStager().stage(named)
        if self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=FILES_TIMEOUT_SECONDS))
        self._thread = threading.Thread(
            target=self._save, args=(name, step, staged, document, self._group), daemon=True
        )
        self._thread.start()
        return self.directory / name

    def wait(self) -> None:
        """Wait until the checkpoint that was begun is whole.

        Raises:
            CheckpointError: it could not be written; it names rank and cause. The ones before it are untouched.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _begin(self, step: int, named: Mapping[str, Tensor], document: bytes) -> str:
        """On the main rank: room for a new checkpoint, and its name."""
        make_directory(self.directory)
        with exclusive(self.directory / ".lock"):
            self._clear_unfinished()
            self._refuse_to_go_back(step)
            require_space(self.directory, len(document) + sum(t.numel() * t.element_size() for t in named.values()))
            name = self._free_attempt(step)
            unfinished = self.directory / f".saving-{name}"
            with file_errors(unfinished, "make the directory"):
                unfinished.mkdir()
        return name

    def _save(self, name: str, step: int, staged: dict[str, Any], document: bytes, group: ProcessGroup) -> None:
        """In the thread: this rank's part, then, on the main rank, what makes it whole."""
        unfinished, part = self.directory / f".saving-{name}", f"shard-{self.world.rank + 1:05d}-"
        try:
            try:
                writer = dcp.HuggingFaceStorageWriter(str(unfinished), save_distributed=True)
                dcp.save(staged, storage_writer=writer, process_group=group)
            except dcp.api.CheckpointException as e:
                causes = "; ".join(f"rank {rank}: {_cause(wrapped[0])}" for rank, wrapped in sorted(e.failures.items()))
                raise CheckpointError(_not_saved(step, causes)) from e
            found: list[Any] = [None] * self.world.size
            dist.all_gather_object(found, _sums(unfinished, part), group=group)
            causes = "; ".join(f"rank {rank}: {cause}" for rank, (_, cause) in enumerate(found) if cause)
            if causes:
                raise CheckpointError(_not_saved(step, causes))
            files = {n: s for sums, _ in found for n, s in sums.items()}
            self._agreed(lambda: self._finish(name, step, files, document), group)
        except UserError as e:
            self._error = e
        except BaseException as e:
            self._error = CheckpointError(_not_saved(step, f"rank {self.world.rank}: {_cause(e)}"))
            self._error.__cause__ = e
        if self._error is not None and self.world.main:
            shutil.rmtree(unfinished, ignore_errors=True)

    def _finish(self, name: str, step: int, files: dict[str, Any], document: bytes) -> str:
        unfinished, final = self.directory / f".saving-{name}", self.directory / name
        with exclusive(self.directory / ".lock"), ExitStack() as undo:
            files = {**files, "state.json": write_file(unfinished / "state.json", [document])}
            manifest = {"format": SHARDED, "step": step, "files": files}
            write_file(
                unfinished / "manifest.json", [json.dumps({**manifest, "sha256": seal(manifest)}, indent=1).encode()]
            )
            with file_errors(final, "write"):
                fsync_directory(unfinished)
                os.rename(unfinished, final)
                fsync_directory(self.directory)
            undo.pop_all()
            self._prune(final)
        return name

    def _agreed(self, act: Callable[[], str], group: ProcessGroup | None = None) -> str:
        """What the main rank's `act` returns, on every rank; its `UserError` as a `CheckpointError` on every rank.

        Args:
            group: that of the thread; None in the main thread.
        """
        said: list[Any] = [None, None]
        if self.world.main:
            try:
                said[0] = act()
            except FileError as e:
                said[1] = (f"the checkpoint was not saved ({e.what}); the ones before it are untouched", e.mend)
            except UserError as e:
                said[1] = (e.what, e.mend)
            except Exception as e:
                said[1] = (f"rank 0: {_cause(e)}", "")
        dist.broadcast_object_list(said, src=0, group=group or self.world.group("files"))
        if said[1] is not None:
            raise CheckpointError(*said[1])
        return said[0]

    # ------------------------------------------------------------------ loading
    def load_newest(self, device: str | torch.device = "cpu") -> Checkpoint | None:
        """As `CheckpointStore.load_newest`, of what any number of ranks saved, laid out over these; all call it.

        Every rank verifies its share of the files before any of them is used.
        """
        passed: list[str] = []
        paths = self.world.gather_objects(self.list(), "files")[0]
        for path in reversed(paths):
            damages = self.world.gather_objects(self._damage(path), "files")
            damage = next((d for d in damages if d is not None), None)
            if damage is None:
                return self._read(path, tuple(passed))
            passed.append(f"passing over {path}: {damage}")
        if passed:
            raise CheckpointError(
                f"no whole checkpoint is left in {self.directory}: {'; '.join(passed)}",
                "Restore one from a copy, or choose another directory to start again",
            )
        return None

    def _damage(self, path: Path) -> str | None:
        try:
            verify(path, self.world.rank, self.world.size)
        except Damage as damage:
            return str(damage)
        except CheckpointError as e:
            return e.what
        return None

    def _read(self, path: Path, passed: tuple[str, ...]) -> Checkpoint:
        places = self.places()
        manifest = verify(path, check=False)
        if manifest["format"] != SHARDED:
            found = read_checkpoint(path, "cpu", check=False)
            tensors = {
                group: {name: _placed(t, places.get(f"{group}/{name}")) for name, t in members.items()}
                for group, members in found.tensors.items()
            }
            return Checkpoint(found.step, path, tensors, found.state, passed)
        named = read_parts(path, places, self.world)
        return Checkpoint(manifest["step"], path, grouped(named), read_state(path), passed)


def read_parts(path: Path, places: Mapping[str, Tensor], world: World | None = None) -> dict[str, Tensor]:
    """The tensors of a sharded checkpoint by "group/name": like `places` where that has the name, else whole.

    Args:
        world: None reads in one process.
    """
    reader = dcp.HuggingFaceStorageReader(str(path))
    named: dict[str, Any] = {}
    for name, kind in reader.read_metadata().state_dict_metadata.items():
        assert isinstance(kind, TensorStorageMetadata)
        like = places.get(name)
        if like is None and world is not None and world.count("pp") > 1 and not name.startswith("random/"):
            rest = name.removesuffix(f".{name.rpartition('.')[2]}")
            if f"{rest}.step" != name or f"model/{rest.removeprefix('optimizer/')}" not in places:
                continue  # another stage's
        if isinstance(like, DTensor) and like.shape == kind.size:
            named[name] = torch.zeros_like(like, dtype=kind.properties.dtype, requires_grad=False)
        else:
            named[name] = torch.zeros(kind.size, dtype=kind.properties.dtype)
    group = None if world is None else world.group("files")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one process loads alone, which is what was asked for
        dcp.load(named, storage_reader=reader, process_group=group, no_dist=world is None)
    return named


def grouped(named: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """group -> name -> tensor, of tensors by "group/name"."""
    out: dict[str, dict[str, Tensor]] = {}
    for name, t in named.items():
        group, _, rest = name.partition("/")
        out.setdefault(group, {})[rest] = t
    return out


def _placed(t: Tensor, like: Tensor | None) -> Tensor:
    return laid_out(t, like) if isinstance(like, DTensor) and like.shape == t.shape else t


def _sums(directory: Path, part: str) -> tuple[dict[str, dict[str, Any]], str]:
    """Size and checksum of a rank's files, by name; and what went wrong, which is empty if nothing did."""
    try:
        files = sorted(directory.glob(f"{part}*.safetensors"))
        return {f.name: {"bytes": f.stat().st_size, "sha256": sha256_file(f)} for f in files}, ""
    except (OSError, FileError) as e:
        return {}, _cause(e)


def _cause(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _not_saved(step: int, cause: str) -> str:
    return f"the checkpoint of step {step} was not saved ({cause}); the ones before it are untouched"
