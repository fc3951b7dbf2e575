"""Checkpoints that hold everything, appear whole or not at all, and notice damage.

One checkpoint is a directory, `step-00000300/`, of one safetensors file per group of tensors (weights, optimizer,
random state), `state.json` (schedule, data position, whatever else is not a tensor) and `manifest.json` (size and
SHA-256 of the others, and of itself). It is written under another name, flushed to the disk and renamed, so a
kill at any instant leaves the checkpoints before it and never half of a new one; old ones go only after that.
The report's runs (sections 2 and 3) are weeks long, and a resumed run has to end in the same bytes. Read next:
`random_state`, which a checkpoint carries, and the training loop that saves and resumes.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from glm5.utils.errors import CheckpointError, ConfigError, FileError
from glm5.utils.files import exclusive, file_errors, fsync_directory, make_directory, require_space

FORMAT = 1
SHARDED = 2  # the tensors in parts, by many ranks: see `sharded`
Groups = Mapping[str, Mapping[str, Tensor]]

_STEP = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_UNFINISHED = (".saving-", ".removing-")
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Checkpoint:
    """One whole checkpoint, read back.

    Attributes:
        step: the step after which it was saved.
        path: its directory.
        tensors: group -> name -> tensor, with the dtypes and shapes that were saved.
        state: what is not a tensor, as it was saved.
        warnings: for the caller to print: which newer checkpoints were passed over, and the damaged file of each.
    """

    step: int
    path: Path
    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]
    warnings: tuple[str, ...] = ()


class Damage(Exception):
    """A checkpoint is not what its manifest says; the text names the file."""


class CheckpointStore:
    """The checkpoints of one run, in one directory, newest `keep` of them kept.

    Args:
        directory: made at the first save.
        keep: how many to keep, at least 1. The disk must hold one more: a new one comes before an old one goes.
    """

    def __init__(self, directory: str | Path, keep: int = 3) -> None:
        if keep < 1:
            raise ConfigError("keep", keep, "must be at least 1")
        self.directory, self.keep = Path(directory), keep

    def list(self) -> list[Path]:
        """Directories of the finished checkpoints, oldest first; interrupted saves are not among them."""
        try:
            names = os.listdir(self.directory)
        except FileNotFoundError:
            return []
        except OSError as e:
            raise CheckpointError(f"cannot list the checkpoints in {self.directory}: {e.strerror}") from e
        return [self.directory / name for name in sorted((n for n in names if _STEP.fullmatch(n)), key=_order)]

    # ------------------------------------------------------------------ saving
    def save(self, step: int, tensors: Groups, state: Mapping[str, Any]) -> Path:
        """Write one checkpoint, then prune. Returns its directory once it is durable.

        Args:
            step: the number of finished steps, at least 0. Saving a step again supersedes it.
            tensors: group -> name -> tensor on any device; a group's name becomes a file name.
            state: dicts with string keys, lists, strings, numbers (finite), booleans and None; comes back equal
                (but a tuple comes back as a list).

        Raises:
            CheckpointError: the disk is full or read-only, another process is saving here, or the directory holds
                a whole checkpoint of a later step. Nothing that was there is lost.
        """
        document = encode_state(state)
        try:
            make_directory(self.directory)
            with exclusive(self.directory / ".lock"):
                self._clear_unfinished()
                self._refuse_to_go_back(step)
                name = self._free_attempt(step)
                self._write(name, step, tensors, document)
                self._prune(self.directory / name)
        except FileError as e:
            what = f"the checkpoint of step {step} was not saved ({e.what}); the ones before it are untouched"
            raise CheckpointError(what, e.mend) from e
        return self.directory / name

    def wait(self) -> None:
        """Wait until what was saved is durable; here it is so already."""

    def _free_attempt(self, step: int) -> str:
        """The name of the next checkpoint of a step."""
        attempts = [_order(path.name)[1] for path in self.list() if _order(path.name)[0] == step]
        return f"step-{step:08d}.{max(attempts) + 1}" if attempts else f"step-{step:08d}"

    def _write(self, name: str, step: int, tensors: Groups, document: bytes) -> None:
        sizes = [t.numel() * t.element_size() for group in tensors.values() for t in group.values()]
        require_space(self.directory, len(document) + sum(sizes))
        unfinished = self.directory / f".saving-{name}"
        final = self.directory / name
        try:
            with file_errors(unfinished, "make the directory"):
                unfinished.mkdir()
            files = {}
            for group, named in tensors.items():
                if not re.fullmatch(r"[A-Za-z0-9_-]+", group):
                    raise ValueError(f"group {group!r} cannot be a file name: use letters, digits, - and _")
                files[f"{group}.safetensors"] = _write_tensors(unfinished / f"{group}.safetensors", named)
            files["state.json"] = write_file(unfinished / "state.json", [document])
            manifest = {"format": FORMAT, "step": step, "files": files}
            sealed = {**manifest, "sha256": seal(manifest)}
            write_file(unfinished / "manifest.json", [json.dumps(sealed, indent=1).encode()])
            with file_errors(final, "write"):
                fsync_directory(unfinished)
                os.rename(unfinished, final)
                fsync_directory(self.directory)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise

    def _clear_unfinished(self) -> None:
        # Safe under the lock: whoever wrote these is dead.
        for path in self.directory.iterdir():
            if path.name.startswith(_UNFINISHED):
                shutil.rmtree(path, ignore_errors=True)

    def _refuse_to_go_back(self, step: int) -> None:
        """A later checkpoint is either damaged (set it aside) or another run's (stop: pruning would lose it)."""
        for path in reversed(self.list()):
            if _order(path.name)[0] <= step:
                continue
            try:
                verify(path)
            except Damage:
                with file_errors(path, "set aside"):
                    path.rename(_free_name(path.with_name(f"damaged-{path.name}")))
            else:
                raise CheckpointError(
                    f"{self.directory} holds {path.name}, which is later than step {step}",
                    "Resume from it, remove it, or choose another directory for this run",
                )

    def _prune(self, newest: Path) -> None:
        """Remove all but the newest `keep`, counting only those whose files have the right sizes."""
        kept = 0
        for path in reversed(self.list()):
            superseded = path != newest and _order(path.name)[0] == _order(newest.name)[0]
            if kept < self.keep and not superseded:
                kept += _is_complete(path)
                continue
            # Renamed first: a kill during the removal must not leave what looks like a damaged checkpoint.
            removing = _free_name(path.with_name(f".removing-{path.name}"))
            try:
                path.rename(removing)
                shutil.rmtree(removing)
            except OSError as e:
                raise CheckpointError(
                    f"{newest.name} was saved, but the old {path} cannot be removed: {e.strerror}",
                    "Remove it yourself, before the disk fills up",
                ) from e

    # ------------------------------------------------------------------ loading
    def load_newest(self, device: str | torch.device = "cpu") -> Checkpoint | None:
        """The newest whole checkpoint, or None if none was ever saved here. Reads only: nothing is changed.

        Every file's checksum is verified before any of it is used. A damaged checkpoint is passed over for the
        one before, and `Checkpoint.warnings` says so.

        Raises:
            CheckpointError: there are checkpoints and every one of them is damaged; it lists the damage.
        """
        warnings: list[str] = []
        tried: set[Path] = set()
        # Listed again at every turn: a running trainer may save and prune while we read.
        while left := [path for path in self.list() if path not in tried]:
            path = left[-1]
            tried.add(path)
            try:
                found = read_checkpoint(path, device)
            except Damage as damage:
                if path.exists():
                    warnings.append(f"passing over {path}: {damage}")
                continue
            return replace(found, warnings=tuple(warnings))
        if warnings:
            raise CheckpointError(
                f"no whole checkpoint is left in {self.directory}: {'; '.join(warnings)}",
                "Restore one from a copy, or choose another directory to start again",
            )
        return None

    def load(self, step: int, device: str | torch.device = "cpu") -> Checkpoint:
        """The checkpoint of exactly `step`.

        Raises:
            CheckpointError: there is none, or it is damaged; it names the steps that are there, or the file.
        """
        paths = [path for path in self.list() if _order(path.name)[0] == step]
        if not paths:
            steps = ", ".join(str(_order(p.name)[0]) for p in self.list()) or "none"
            raise CheckpointError(f"no checkpoint of step {step} in {self.directory}", f"There are: {steps}")
        try:
            return read_checkpoint(paths[-1], device)
        except Damage as damage:
            raise CheckpointError(f"{paths[-1]} is damaged: {damage}", "Use another step, or a copy") from None


# --------------------------------------------------------------------------- one checkpoint's files
def _order(name: str) -> tuple[int, int]:
    """(step, attempt) of a checkpoint's directory name."""
    match = _STEP.fullmatch(name)
    assert match is not None
    return int(match[1]), int(match[2] or 0)


def _free_name(path: Path) -> Path:
    n, candidate = 0, path
    while candidate.exists():
        n += 1
        candidate = path.with_name(f"{path.name}.{n}")
    return candidate


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Write `chunks` (bytes-like) durably; returns the size and checksum of what was written.

    A thread hashes a chunk while it is written and the next one is made, so that two are in memory at most.
    """
    digest, size = hashlib.sha256(), 0
    with file_errors(path, "write"), path.open("xb") as f, ThreadPoolExecutor(1) as hasher:
        hashed: Future[None] | None = None
        for chunk in chunks:
            if hashed is not None:
                hashed.result()
            hashed = hasher.submit(digest.update, chunk)
            f.write(chunk)
            size += memoryview(chunk).nbytes
        if hashed is not None:
            hashed.result()
        f.flush()
        os.fsync(f.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Write a safetensors file, two tensors in host memory at a time, hashing on the way.

    The library's own writer can neither hash nor tell a full disk from other failures; its reader reads this.
    """
    # Widest elements first keeps every tensor aligned, as the library does.
    names = sorted(tensors, key=lambda n: (-tensors[n].element_size(), n))
    header: dict[str, Any] = {}
    offset = 0
    for name in names:
        t = tensors[name]
        if t.dtype not in _DTYPES or name == "__metadata__":
            raise ValueError(f"tensor {name!r} of {t.dtype} cannot be stored in safetensors")
        end = offset + t.numel() * t.element_size()
        header[name] = {"dtype": _DTYPES[t.dtype], "shape": list(t.shape), "data_offsets": [offset, end]}
        offset = end
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)

    def chunks() -> Iterator[bytes | memoryview]:
        yield len(head).to_bytes(8, "little")
        yield head
        for name in names:
            flat = tensors[name].detach().to("cpu").contiguous().reshape(-1)
            yield flat.view(torch.uint8).numpy().data

    return write_file(path, chunks())


def seal(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as e:
        raise _as_damage(path, e) from e


def _as_damage(path: Path, e: OSError) -> Exception:
    """Missing or unreadable sectors are damage; what the user can mend (permissions) is not."""
    if e.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR):
        return Damage(f"{path.name} is missing")
    if e.errno == errno.EIO:
        return Damage(f"{path.name} cannot be read from the disk")
    return CheckpointError(f"cannot read {path}: {e.strerror}", "Change its permissions")


def _manifest(path: Path) -> dict[str, Any]:
    data = _read_bytes(path / "manifest.json")
    try:
        manifest = json.loads(data.decode())
        given = manifest.pop("sha256")
    except (ValueError, KeyError, AttributeError, TypeError):
        raise Damage("manifest.json is not whole") from None
    if seal(manifest) != given:
        raise Damage("manifest.json does not match its own checksum")
    return manifest


def _is_complete(path: Path) -> bool:
    """Whether every file is there with its size: what can be known without reading gigabytes."""
    try:
        return all((path / n).stat().st_size == f["bytes"] for n, f in _manifest(path)["files"].items())
    except (Damage, OSError):
        return False


def verify(path: Path, place: int = 0, of: int = 1, *, check: bool = True) -> dict[str, Any]:
    """The manifest, after every `of`-th file from `place` was read and matches it.

    Raises:
        Damage: one does not.
    """
    manifest = _manifest(path)
    if manifest["format"] not in (FORMAT, SHARDED):
        raise CheckpointError(
            f"{path} has checkpoint format {manifest['format']}, and this version reads {FORMAT} and {SHARDED}",
            "Use the version of glm5 that wrote it",
        )
    for name, expected in list(manifest["files"].items())[place::of] if check else []:
        try:
            size = (path / name).stat().st_size
            if size != expected["bytes"]:
                raise Damage(f"{name} has {size} bytes, and {expected['bytes']} were written")
            with (path / name).open("rb") as f:
                digest = hashlib.file_digest(f, "sha256").hexdigest()
        except OSError as e:
            raise _as_damage(path / name, e) from e
        if digest != expected["sha256"]:
            raise Damage(f"{name} does not match its checksum")
    return manifest


def read_checkpoint(path: Path, device: str | torch.device, *, check: bool = True) -> Checkpoint:
    """All of a checkpoint, of one process or of many, in this process."""
    manifest = verify(path, check=check)
    state = read_state(path)
    if manifest["format"] == SHARDED:
        from glm5.train.sharded import grouped, read_parts

        named = {name: t.to(device) for name, t in read_parts(path, {}).items()}
        return Checkpoint(manifest["step"], path, grouped(named), state)
    tensors = {}
    for name in manifest["files"]:
        if name.endswith(".safetensors"):
            try:
                tensors[name.removesuffix(".safetensors")] = load_file(path / name, device=str(device))
            except OSError as e:
                raise _as_damage(path / name, e) from e
    return Checkpoint(manifest["step"], path, tensors, state)


def read_state(path: Path) -> dict[str, Any]:
    """What is not a tensor."""
    state: dict[str, Any] = json.loads(_read_bytes(path / "state.json").decode())
    return state


def encode_state(state: Mapping[str, Any]) -> bytes:
    _check_json(state, "state")
    return json.dumps(state, indent=1, allow_nan=False).encode()


def _check_json(value: Any, where: str) -> None:
    """JSON would turn an integer key into a string and a NaN into nonsense without a word: refuse by name."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{where} has the key {key!r}: keys must be strings")
            _check_json(item, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            _check_json(item, f"{where}[{i}]")
    elif isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        raise ValueError(f"{where}={value}: a checkpoint's state must be finite; keep such values as tensors")
    elif not (value is None or type(value) in (str, int, float, bool)):
        raise ValueError(f"{where} is a {type(value).__name__}, which JSON cannot hold; keep it as a tensor")
