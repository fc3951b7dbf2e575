"""What the commands that train share: a mesh of processes, one run directory, data that is made once, closing figures.

Read next: `pretrain`, `midtrain` and `sparsify`, which are built of it; `glm5.parallel.mesh`, `ranks`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from glm5.data.loader import TokenDataset
from glm5.model.config import ModelConfig
from glm5.model.glm5 import GLM5
from glm5.model.weights import load_model
from glm5.parallel.mesh import Mesh, ParallelError, World, launched, open_world
from glm5.parallel.pipeline.engine import laid_out
from glm5.parallel.watch import check_alike, watched
from glm5.text.tokenizer import Tokenizer
from glm5.train.config import TrainConfig
from glm5.train.evaluate import HeldOut, held_out
from glm5.train.loop import Trainer
from glm5.train.prepare import Prepared, Say, TextConfig, opened, prepare
from glm5.train.ranks import PipelineOptions, Ranks, check_batch
from glm5.utils.config_io import to_dict
from glm5.utils.devices import resolve_device
from glm5.utils.errors import ConfigError
from glm5.utils.files import exclusive, read_json, require_writable, sha256_file, write_json
from glm5.utils.runlog import CONFIG

# Fields that a resumed run may change: how the work is divided decides nothing that is computed.
MESH_MAY_DIFFER = {"mesh", "gather_once", "prefetch", "by_heads", "restarts", "hang_seconds"}
MESH_MAY_DIFFER |= {"schedule", "layout", "stages_per_rank", "reduce_every", "offload", "recompute"}


@dataclass(frozen=True)
class ProcessConfig:
    """The processes of a run."""

    device: str = "auto"
    """cpu, cuda or cuda:N; auto is a GPU where there is one."""
    mesh: str = ""
    """How several processes divide the work, like dp=2,ep=2,tp=2 (axes: dp, pp, cp, tp; ep and shard fold on dp x cp).
    They are started here unless torchrun started them; without a mesh those that it started divide the rows."""
    restarts: int = 0
    """On processes that this command starts itself: how often all are started again, from the newest checkpoint, after
    one has failed."""
    hang_seconds: float = 300.0
    """On several processes: how long a step may stand still before stack traces of all are written to RUN/ranks."""
    deterministic: bool = False
    """Only operators whose result is the same at every run, where torch has them; slower on a GPU."""

    def __post_init__(self) -> None:
        Mesh.parse(self.mesh)
        if self.restarts < 0:
            raise ConfigError("restarts", self.restarts, "must be at least 0")
        if not 0 < self.hang_seconds < float("inf"):
            raise ConfigError("hang_seconds", self.hang_seconds, "must be a positive number")


C = TypeVar("C", bound=ProcessConfig)


@dataclass(frozen=True)
class MeshConfig(ProcessConfig):
    """The same, and how a model in training lies on them."""

    gather_once: bool = False
    """On several processes: hold all parameters from a step's first micro-batch to its last, and reduce gradients after
    the last; faster, for the memory of whole parameters and fp32 gradients."""
    prefetch: int = 1
    """On several processes: blocks whose parameters are on their way while one computes; 0 leaves it to FSDP."""
    by_heads: bool = True
    """Where ranks share rows (cp, context_groups): divide dense attention by heads, for which queries, keys and values
    travel; else by positions, for which the smaller latents do. Heads that don't divide go by positions anyway."""
    pipeline: PipelineOptions = field(default_factory=PipelineOptions)
    """How the stages run, where the mesh has pp."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prefetch < 0:
            raise ConfigError("prefetch", self.prefetch, "must be at least 0")

    def check_stages(self, model: ModelConfig, mesh: Mesh) -> None:
        """Whether a model can be laid out in the pipeline of a mesh, if it has one.

        Raises:
            ConfigError: it cannot.
        """
        if mesh.pp > 1:
            how = self.pipeline
            laid_out(model, mesh.pp, how.layout, how.schedule, how.stages_per_rank)

    def check_stage_batch(self, name: str, stage: TrainConfig) -> None:
        """Whether the mesh can deal out the batches of the stage in field `name`.

        Raises:
            ConfigError: it cannot; it names the field.
        """
        try:
            check_batch(stage, Mesh.parse(self.mesh))
        except ConfigError as e:
            raise ConfigError(f"{name}.{e.field}", e.value, e.rule) from None


def _launched_mesh() -> str:
    """Where no mesh is given: the processes that torchrun started, if it did, divide the rows."""
    return f"dp={os.environ['WORLD_SIZE']}" if launched() else ""


def settled(config: C) -> C:
    """A configuration with the device and the mesh that it will have here.

    Raises:
        ConfigError: there is no such device, or the mesh does not fit the rest.
    """
    return replace(config, device=resolve_device(config.device), mesh=config.mesh or _launched_mesh())


@contextmanager
def together(config: ProcessConfig, run: Path, model: ModelConfig) -> Iterator[World | None]:
    """The processes that train together: those that torchrun started, or None for this one alone.

    Args:
        run: the run's directory, where ranks watch each other. model: that they are to divide.

    Raises:
        ConfigError: the mesh needs another number of them, or cannot divide the model; so for a pipeline's stages.
        ParallelError: they did not find each other, or don't run the same.
    """
    before = torch.are_deterministic_algorithms_enabled()
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        mesh = Mesh.parse(config.mesh or _launched_mesh())
        if not launched() and mesh.size == 1:
            yield None
            return
        mesh.check_model(model)
        if isinstance(config, MeshConfig):
            config.check_stages(model, mesh)
        with open_world(mesh, config.device.partition(":")[0]) as world:
            check_alike(world, to_dict(config))
            with watched(world, run / "ranks", config.hang_seconds):
                yield world
    finally:
        torch.use_deterministic_algorithms(before, warn_only=torch.is_deterministic_algorithms_warn_only_enabled())


@contextmanager
def claimed(run: Path, name: str, ranks: Ranks) -> Iterator[None]:
    """Hold a run's directory, made if missing, by the lock file `name`, on the main rank.

    What fails while nothing is in it but the lock, what was asked for and empty directories leaves nothing behind.

    Raises:
        FileError: it cannot be written, or another process holds it.
    """
    with ExitStack() as held:

        def claim() -> None:
            missing = [path for path in (run, *run.parents) if not path.exists()]
            require_writable(run)
            held.enter_context(exclusive(run / name))
            held.callback(_leave, run, name, missing)

        ranks.on_main(claim)
        yield


def _leave(run: Path, name: str, made: list[Path]) -> None:
    """Remove a run's directory that was made for it if it holds no more than its lock and what was asked for, with
    parents that were, too."""
    files = [path for path in run.rglob("*") if not path.is_dir()]
    if not made or not {run / name, run / CONFIG, run / "weights.json"}.issuperset(files):
        return
    for path in files:
        path.unlink()
    below = sorted((path for path in run.rglob("*")), key=lambda p: -len(p.parts))
    with suppress(OSError):
        for path in (*below, *made):
            path.rmdir()


def prepare_once(
    config: TextConfig,
    directory: Path,
    given: Tokenizer | None,
    ranks: Ranks,
    say: Say,
    *,
    ahead: int,
    vocab_size: int,
    begun: bool,
) -> Prepared:
    """A run's data in `directory`: made by the main rank, opened by all. Arguments and errors as `prepare`'s."""

    def make() -> Prepared:
        return prepare(config, directory, ahead=ahead, vocab_size=vocab_size, tokenizer=given, begun=begun, say=say)

    made = ranks.on_main(make)
    return ranks.together(lambda: made or opened(config, directory, ahead=ahead))


def begin_with(checkpoint: str, device: torch.device | str, **changes: Any) -> GLM5:
    """A model to train further, in fp32, whole on every rank. Errors as `load_model`."""
    return load_model(checkpoint, device=str(device), dtype="float32", **changes)


def check_weights(model: GLM5, world: World | None) -> None:
    """Whether all ranks have read the same weights: each host may see another directory under one name.

    Raises:
        ParallelError: they haven't; on every rank, with the name of one that differs and of a tensor.
    """
    if world is None:
        return
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    state = {name: t.detach().contiguous() for name, t in model.state_dict().items()}
    own = {name: int(t.view(words[t.element_size()]).sum(dtype=torch.int64)) for name, t in state.items()}
    found = world.gather_objects(own)
    for rank, other in enumerate(found):
        differ = [name for name in found[0] | other if found[0].get(name) != other.get(name)]
        if differ:
            what = f"rank {rank} read other weights than rank 0: {len(differ)} tensors differ, such as {differ[0]}"
            raise ParallelError(what, "Let all hosts see one and the same checkpoint")


def weight_sums(checkpoint: str) -> dict[str, str]:
    """SHA-256 of each of a checkpoint's files of weights."""
    return {file.name: sha256_file(file) for file in sorted(Path(checkpoint).glob("*.safetensors"))}


def keep_weights(checkpoint: str, path: Path, *, begun: bool) -> None:
    """Write checksums of the weights that the run begins with.

    Raises:
        ConfigError: the run has begun, with other weights.
    """
    sums = weight_sums(checkpoint)
    if begun and read_json(path) != sums:
        rule = "its weights are not those that this run began with; choose another --run directory"
        raise ConfigError("checkpoint", checkpoint, rule)
    write_json(path, sums)


def measured(
    trainer: Trainer,
    data: TokenDataset,
    rows: int | None,
    *,
    sparse: bool,
    ready: Callable[[GLM5], object] = lambda model: None,
) -> HeldOut:
    """Loss over the first so many held-out rows (None: all), of the model as it is now; all ranks call it.

    Args:
        ready: makes a whole copy read its weights as the trained one does, where there is one.
    """
    if trainer.pipeline is None:
        return held_out(trainer.model, data, sparse=sparse, max_rows=rows, ranks=trainer.ranks)
    # A pipeline's stages have no forward pass of their own: the main rank measures the whole model.
    model, world = trainer.fp32_model(), trainer.ranks.world
    assert world is not None
    ready(model)
    device = world.device
    return trainer.ranks.from_main(lambda: held_out(model.to(device), data, sparse=sparse, max_rows=rows))
