"""Checkpoints in the public safetensors layout: load with bounded memory, save so that other engines can load.

On disk every expert has its own tensors and the MTP block is layer N; in memory the experts of a layer are fused.
The router's weight is stored in the model's dtype and its bias in fp32; both are fp32 in memory. Loading is in two
passes: all headers are read and every misfit is reported at once, then tensors are copied one by one into a model
that had no memory until then. Neither metadata nor index is trusted for anything but names. No pickle is ever read.
Source: the layout of the published checkpoint. Read next: `generate`.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from glm5.model.config import ModelConfig
from glm5.model.glm5 import GLM5
from glm5.utils.errors import CheckpointError, ConfigError, UserError
from glm5.utils.files import (
    file_errors,
    fsync_directory,
    make_directory,
    read_json,
    replacing,
    require_space,
    write_json,
)

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
# Files are mapped into memory to be read; the mapping is dropped whenever this much of it has been touched.
MAPPED_BYTES = 256 * 2**20
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_STORED = {"F32": 4, "BF16": 2, "F16": 2}  # safetensors' names of what can be loaded, and their bytes
_TURNED = re.compile(r".*\.indexer\.(wq_b\.weight|wk\.weight|k_norm\.weight|k_norm\.bias)")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class SavesItself(Protocol):
    """A tokenizer, as far as this module knows."""

    def save(self, directory: str | os.PathLike[str]) -> None: ...


class Share(Protocol):
    """A part of a model, as one of several ranks keeps it (`glm5.parallel.inference`)."""

    def cut(self, model: GLM5) -> None:
        """Give a model without memory the shapes and classes of its part."""

    def read(self, name: str, stored: Any) -> tuple[str, Tensor] | None:
        """The part of a tensor, which is read by slicing `stored`, and the part's name in the model (experts apart or
        fused); None where nothing of it belongs to the part."""


@dataclass(frozen=True)
class _Stored:
    """A tensor on disk, by its file's header."""

    file: Path
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * _STORED.get(self.dtype, 1)


def public_tensors(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The public names of one tensor of the model, each with the view of it that the name stands for."""
    prefix, _, kind = name.rpartition("experts.")
    if kind == "gate_up_proj":
        inner = tensor.shape[1] // 2
        for e in range(tensor.shape[0]):
            yield f"{prefix}experts.{e}.gate_proj.weight", tensor[e, :inner]
            yield f"{prefix}experts.{e}.up_proj.weight", tensor[e, inner:]
    elif kind == "down_proj":
        for e in range(tensor.shape[0]):
            yield f"{prefix}experts.{e}.down_proj.weight", tensor[e]
    else:
        yield name, tensor


# --------------------------------------------------------------------------- load
@torch.inference_mode(False)  # what is loaded inside `inference_mode` may train, and its changes are counted
def load_model(
    path: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str | None = None,
    share: Share | None = None,
    **config_changes: Any,
) -> GLM5:
    """The model of a checkpoint directory, in eval mode. Peak memory is the model plus `MAPPED_BYTES` and a tensor.

    Args:
        share: which part of the model to load; by default all.
        path: holds config.json and safetensors files, sharded with an index or one file, experts apart or fused.
        device: where the weights go. dtype: of the weights in memory; by default the configuration's.
        config_changes: fields of `ModelConfig` to override, such as latent_norm_eps=1e-5. A checkpoint without MTP
            tensors needs num_nextn_predict_layers=0; where they are present, that leaves them on the disk.

    Raises:
        CheckpointError: files are missing or damaged, or tensors are missing, extra or misshapen; all are listed.
        ConfigError: config.json is missing or wrong.
    """
    path, device = Path(path), _check_device(device)
    config = _read_config(path, config_changes)
    torch_dtype = _check_dtype(config.dtype if dtype is None else dtype)
    config = config.replace(dtype=str(torch_dtype).removeprefix("torch."))
    try:
        with torch.device("meta"):
            model = GLM5(config, seed=None)
    except (RuntimeError, OverflowError) as e:  # more elements than can be counted
        raise CheckpointError(f"{path}: no such model can be ({e})", "Correct the sizes in its config.json") from None
    stored, index_problems = _read_headers(path)
    if config_changes.get("num_nextn_predict_layers") == 0:
        unused = f"model.layers.{config.num_hidden_layers}."
        stored = {name: s for name, s in stored.items() if not name.startswith(unused)}
    owner_of = _fit(path, model, stored, index_problems)
    if share is not None:
        share.cut(model)
    _fill(model, stored, owner_of, device, torch_dtype, share)
    return model.eval()


def _read_config(path: Path, changes: Mapping[str, Any]) -> ModelConfig:
    if path.suffix in _PICKLES:
        raise CheckpointError(f"{path} is a pickle, which can run any code", "Convert it to safetensors first")
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such directory", "Give the directory that holds config.json")
    if (path / "model" / "config.json").is_file() and not any(path.glob("*.safetensors")):
        raise CheckpointError(f"{path} is a run, not a model", f"Give its model, {path / 'model'}")
    for name, value in changes.items():
        if name not in {f.name for f in fields(ModelConfig)}:
            raise ConfigError(name, value, "is no field of the configuration")
    return ModelConfig.load(path).replace(**changes)


def _check_dtype(dtype: torch.dtype | str) -> torch.dtype:
    found = _DTYPES.get(str(dtype).removeprefix("torch."))
    if found is None:
        raise ConfigError("dtype", str(dtype), f"must be one of {', '.join(_DTYPES)}")
    return found


def _check_device(device: torch.device | str) -> torch.device:
    try:
        device = torch.device(device)
    except RuntimeError as e:
        raise UserError(f"device={device!r}: {str(e).splitlines()[0]}", "Give cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device={device}: weights are loaded to a CPU or a CUDA device", "Give cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device={device}: no CUDA device is available", "Use device=cpu, or run `glm5 doctor`")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        what = f"device={device}: there are {torch.cuda.device_count()} CUDA devices here"
        raise UserError(what, "Give one of them, counted from 0")
    return device


def _read_headers(path: Path) -> tuple[dict[str, _Stored], list[str]]:
    """What is on disk by name, and where index and files disagree."""
    problems: list[str] = []
    if not (path / INDEX).exists():
        return _read_header(_single_file(path)), problems
    weight_map = _read_index(path / INDEX)
    files = sorted(set(weight_map.values()))
    absent = [f for f in files if not (path / f).exists()]
    if absent:
        what = f"{path}: {len(absent)} of {len(files)} files that the index names are missing: {', '.join(absent)}"
        raise CheckpointError(what, "Finish the download, which was interrupted, or copy these files")
    headers = {f: _read_header(path / f) for f in files}
    for name, file in weight_map.items():
        if name not in headers[file]:
            problems.append(f"missing: {name} (the index says it is in {file})")
    problems += [
        f"extra: {name} (in {file}, where the index has no such tensor)"
        for file, header in headers.items()
        for name in header
        if weight_map.get(name) != file
    ]
    stored = {name: headers[file][name] for name, file in weight_map.items() if name in headers[file]}
    return stored, problems


def _read_index(index: Path) -> dict[str, str]:
    content = read_json(index)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map", "Download it again")
    for name, file in weight_map.items():
        # A name alone: an index must not reach outside its own directory.
        if not isinstance(file, str) or not re.fullmatch(r"[\w.-]+\.safetensors", file) or file.startswith("."):
            raise CheckpointError(
                f"{index}: {name} is said to be in {file!r}, which is no plain name of a .safetensors file",
                "Do not trust this checkpoint; download it again from its source",
            )
    return weight_map


def _single_file(path: Path) -> Path:
    if (path / SINGLE).exists():
        return path / SINGLE
    shards = sorted(p.name for p in path.glob("*.safetensors"))
    if shards:
        what = f"{path} has {', '.join(shards)} but neither {SINGLE} nor {INDEX}"
        raise CheckpointError(what, f"Download {INDEX}, which says what the files hold")
    pickles = sorted(p.name for p in path.iterdir() if p.suffix in _PICKLES)
    if pickles:
        what = f"{path} holds only pickles, which can run any code: {', '.join(pickles)}"
        raise CheckpointError(what, "Convert the checkpoint to safetensors where you trust it")
    raise CheckpointError(f"{path} holds no safetensors file", f"It needs {SINGLE}, or shards and {INDEX}")


def _read_header(file: Path) -> dict[str, _Stored]:
    with file_errors(file, "read"), file.open("rb") as f:
        if f.read(23) == b"version https://git-lfs":
            raise CheckpointError(f"{file} is a Git LFS pointer, not the tensors", "Run `git lfs pull` there")
    try:
        with safe_open(str(file), framework="pt") as f:
            slices = {name: f.get_slice(name) for name in f.keys()}  # noqa: SIM118 (no mapping)
            return {name: _Stored(file, s.get_dtype(), tuple(s.get_shape())) for name, s in slices.items()}
    except SafetensorError as e:
        size = file.stat().st_size
        what = f"{file} is damaged or only partly downloaded ({size:,} bytes; {e})"
        raise CheckpointError(what, "Download or copy this file again") from None


def _fit(path: Path, model: GLM5, stored: Mapping[str, _Stored], problems: list[str]) -> dict[str, str]:
    """Match disk against model; the model's name for each name on disk. Raises one error that lists all misfits."""
    problems, owner_of, absent = list(problems), {}, []
    for owner, tensor in model.state_dict().items():
        if owner == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        fused = [(owner, tensor)] if owner in stored else None
        for name, view in fused or public_tensors(owner, tensor):
            owner_of[name] = owner
            found = stored.get(name)
            if found is None:
                absent.append(name)
            else:
                problems += _misfit(name, found, tuple(view.shape))
    reported = {p.split(" ")[1] for p in problems if p.startswith("missing: ")}
    problems += [f"missing: {name}" for name in absent if name not in reported]
    problems += [f"extra: {name}" for name in stored if name not in owner_of]
    if not problems:
        return owner_of
    mend = "Check that config.json and the files belong together and that all files are of one version"
    mtp = f"model.layers.{model.config.num_hidden_layers}."
    if model.config.num_nextn_predict_layers and not any(name.startswith(mtp) for name in stored):
        mend = f"It has no MTP block ({mtp}*): to load it without, pass num_nextn_predict_layers=0 in Python, or "
        mend += "write it anew with glm5 convert --drop-mtp"
    what = f"{path} does not fit its configuration, {len(problems)} problem(s)"
    raise CheckpointError("\n  ".join([what + ":", *problems]), mend)


def _misfit(name: str, found: _Stored, expected: tuple[int, ...]) -> Iterator[str]:
    if found.shape != expected:
        yield f"misshapen: {name} is {list(found.shape)}, must be {list(expected)}"
    if found.dtype not in _STORED:
        yield f"unreadable: {name} is stored as {found.dtype}; this loader reads {', '.join(_STORED)}"
    elif name.endswith("e_score_correction_bias") and found.dtype != "F32":
        yield f"imprecise: {name} is stored as {found.dtype}, which misroutes tokens; it must be F32"


@torch.no_grad()
def _fill(
    model: GLM5,
    stored: Mapping[str, _Stored],
    owner_of: Mapping[str, str],
    device: torch.device,
    dtype: torch.dtype,
    share: Share | None,
) -> None:
    """Copy tensors in file by file. A tensor of the model gets its memory when the first part of it arrives."""
    target: dict[str, Tensor] = {}
    for names in _batches(stored):
        file = stored[names[0]].file
        try:
            with safe_open(str(file), framework="pt") as f:
                for name in names:
                    owner = owner_of[name]
                    part = share.read(name, f.get_slice(name)) if share is not None else (name, f.get_tensor(name))
                    if part is None:
                        continue
                    at, values = part
                    if model.config.half_split_indexer:
                        values = _interleaved(at, values, model.config)
                    if at not in target:
                        tensor = _materialise(model, owner, device, dtype)
                        target.update({owner: tensor} if at == owner else public_tensors(owner, tensor))
                    target.pop(at).copy_(values)
        except SafetensorError as e:
            raise CheckpointError(f"{file} cannot be read ({e})", "Download or copy this file again") from None
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight


def _interleaved(name: str, values: Tensor, config: ModelConfig) -> Tensor:
    """A tensor of an indexer that rotates halves, i with i + R / 2, as one that rotates pairs, 2 i with 2 i + 1: its
    rows in another order. Queries and keys change alike, so that no score does."""
    if not _TURNED.fullmatch(name):
        return values
    rotary, width = config.qk_rope_head_dim, config.index_head_dim
    order = torch.cat((torch.arange(rotary).view(2, -1).t().flatten(), torch.arange(rotary, width)))
    return values.unflatten(0, (-1, width))[:, order].flatten(0, 1)


@torch.no_grad()
def assign_tensors(model: GLM5, tensors: Mapping[str, Tensor]) -> None:
    """Replace some or all weights of a model in memory, by their public names (experts apart or fused). All or none.

    The model's own dtype and device are kept. Afterwards call `model.forget_joined`.

    Raises:
        CheckpointError: a tensor is unknown, misshapen or not finite; all are listed, and nothing has changed.
    """
    target: dict[str, Tensor] = {}
    for owner, tensor in model.state_dict().items():
        target[owner] = tensor
        target.update(public_tensors(owner, tensor))
    problems, finite = [], dict[str, Tensor]()
    for name, tensor in tensors.items():
        if name not in target:
            problems.append(f"unknown: {name}")
        elif tensor.shape != target[name].shape:
            problems.append(f"misshapen: {name} is {list(tensor.shape)}, must be {list(target[name].shape)}")
        else:
            finite[name] = tensor.isfinite().all()
    problems += [f"not finite: {name}" for name in failed(finite)]
    if problems:
        what = f"these weights do not fit the model, {len(problems)} problem(s)"
        raise CheckpointError("\n  ".join([what + ":", *problems]), "Send tensors of this model's public layout")
    for name, tensor in tensors.items():
        target[name].copy_(tensor)


def failed(checks: Mapping[str, Tensor]) -> list[str]:
    """The names whose check, one bool each on whatever device, came out False. A device is waited for once and not for
    each of a model's thousands of tensors."""
    by_device: dict[torch.device, list[str]] = {}
    for name, check in checks.items():
        by_device.setdefault(check.device, []).append(name)
    told = {
        name: ok
        for names in by_device.values()
        for name, ok in zip(names, torch.stack([checks[name] for name in names]).tolist(), strict=True)
    }
    return [name for name in checks if not told[name]]


def _batches(stored: Mapping[str, _Stored]) -> Iterator[list[str]]:
    """Names of one file at a time, at most `MAPPED_BYTES` of them together (or a single larger one)."""
    batch: list[str] = []
    size = 0
    for name in sorted(stored, key=lambda name: stored[name].file):
        found = stored[name]
        if batch and (found.file != stored[batch[0]].file or size + found.nbytes > MAPPED_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(name)
        size += found.nbytes
    if batch:
        yield batch


def _materialise(model: GLM5, name: str, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Give a meta tensor of the model memory; the router's stay fp32."""
    parent_name, _, leaf = name.rpartition(".")
    parent = model.get_submodule(parent_name)
    old = getattr(parent, leaf)
    router = parent_name.endswith("mlp.gate")
    new = torch.empty(old.shape, dtype=torch.float32 if router else dtype, device=device)
    setattr(parent, leaf, nn.Parameter(new) if isinstance(old, nn.Parameter) else new)
    return new


# --------------------------------------------------------------------------- save
def save_model(
    model: GLM5,
    path: str | Path,
    *,
    max_shard_bytes: float = 5e9,
    tokenizer: SavesItself | None = None,
    overwrite: bool = False,
) -> Path:
    """Write the public layout: config.json, model.safetensors or shards with their index, and the tokenizer.

    All files are written beside what is there, which goes only once they are whole; config.json, without which
    nothing loads, takes its place last.

    Args:
        path: a directory, made if missing. max_shard_bytes: tensor bytes of one file (one larger tensor may exceed).
        overwrite: replace a checkpoint that is there. Until then the disk holds both.

    Raises:
        CheckpointError: `path` holds a checkpoint and `overwrite` is not set, or a tensor has no memory.
        FileError: the disk is full, read-only, and so on; what was there is untouched.
    """
    if not max_shard_bytes > 0:
        raise ConfigError("max_shard_bytes", max_shard_bytes, "must be positive")
    path = make_directory(path)
    _refuse_to_replace(path, overwrite)
    tensors = dict(disk_tensors(model))
    new = path / ".saving"
    with file_errors(new, "write"):
        if new.exists():  # of a process that was killed
            shutil.rmtree(new)
        require_space(path, sum(t.nbytes for t in tensors.values()))
        new.mkdir()
        try:
            _write_all(model, new, tensors, max_shard_bytes, tokenizer)
            for file in _checkpoint_files(path):
                file.unlink()
            for file in sorted(new.iterdir(), key=lambda f: f.name == "config.json"):
                os.replace(file, path / file.name)
            fsync_directory(path)
        finally:
            shutil.rmtree(new, ignore_errors=True)
    return path


def _write_all(
    model: GLM5, path: Path, tensors: Mapping[str, Tensor], max_shard_bytes: float, tokenizer: SavesItself | None
) -> None:
    shards = _split(tensors, max_shard_bytes)
    if len(shards) == 1:
        _save_shard(path / SINGLE, shards[0], tensors)
    else:
        weight_map = {}
        for i, names in enumerate(shards):
            file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
            _save_shard(path / file, names, tensors)
            weight_map.update(dict.fromkeys(names, file))
        total = sum(t.nbytes for t in tensors.values())
        write_json(path / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    if tokenizer is not None:
        tokenizer.save(path)
    config = model.config.replace(dtype=str(model.dtype).removeprefix("torch."))
    write_json(path / "config.json", config.to_dict())


def disk_tensors(model: GLM5) -> Iterator[tuple[str, Tensor]]:
    """Every tensor by its public name: views, but for the router's weight, which is cast to the model's dtype."""
    for owner, tensor in model.state_dict().items():
        if owner == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if tensor.is_meta:
            raise CheckpointError(f"{owner} is on the meta device: it has no values to save", "Load or train first")
        if owner.endswith("mlp.gate.weight"):
            tensor = tensor.to(model.dtype)
        yield from public_tensors(owner, tensor)


def _split(tensors: Mapping[str, Tensor], max_bytes: float) -> list[list[str]]:
    """Names in the model's order, cut where a file would exceed `max_bytes`."""
    shards: list[list[str]] = []
    size = 0
    for name, tensor in tensors.items():
        if not shards or size + tensor.nbytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.nbytes
    return shards


def _checkpoint_files(path: Path) -> list[Path]:
    """What is to go, config.json first, so that no mixture of two checkpoints can ever be loaded."""
    old = [path / name for name in ("config.json", INDEX) if (path / name).exists()]
    return old + sorted(path.glob("*.safetensors"))


def _refuse_to_replace(path: Path, overwrite: bool) -> None:
    old = [file.name for file in _checkpoint_files(path)]
    if old and not overwrite:
        what = f"{path} already holds {', '.join(old[:4])}{f' and {len(old) - 4} more' if len(old) > 4 else ''}"
        raise CheckpointError(what, "Choose another directory, or ask for overwriting")


def _save_shard(file: Path, names: list[str], tensors: Mapping[str, Tensor]) -> None:
    with replacing(file) as temporary:
        try:
            save_file({name: tensors[name] for name in names}, str(temporary), metadata={"format": "pt"})
        except SafetensorError as e:  # it wraps the system's own error: "I/O error: ... (os error 28)"
            code = re.search(r"os error (\d+)", str(e))
            raise OSError(int(code[1]) if code else 0, str(e)) from e
