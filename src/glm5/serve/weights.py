"""New weights for a running engine: from a checkpoint, from tensors in a request, or over a process group.

A trainer that sends over a group joins it as rank 0 with `Joined` and broadcasts the tensors of each update in their
names' order, as slime and others do. What waits for others (`join`, `receive`, `leave`) may be called in any thread,
so that steps go on meanwhile; what changes the model is called between two steps. Read next:
`glm5.model.weights.assign_tensors`, `engine`.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from glm5.model.glm5 import GLM5
from glm5.model.weights import assign_tensors, disk_tensors, load_model, public_tensors
from glm5.serve.client import WeightGroup, WeightUpdate
from glm5.utils.errors import CheckpointError, UserError, out_of_memory

JOIN_TIMEOUT = timedelta(minutes=5)
# How long rank 0 may take to listen: it may begin to join a little later than the engines that it asks.
REACH_SECONDS = 60.0
HASHERS = 8  # threads
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def no_memory(error: BaseException) -> UserError | None:
    """What to tell of memory that could not be taken again; None for an error of another kind."""
    if isinstance(error, UserError):
        return error
    told = out_of_memory(error)
    return None if told is None else UserError(told.what, "Free some of the device's, and resume again")


def checksum_of(tensor: Tensor) -> str:
    """SHA-256 of a tensor's bytes."""
    return hashlib.sha256(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data).hexdigest()


def checksums_of(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Each one's checksum. Hashing lets other threads run, so that several tensors are hashed at once, but few are
    held: the whole tensors of a model on several ranks are made one by one, and need not fit together."""
    found: dict[str, str] = {}
    threads = min(HASHERS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads) as hashers:
        under_way: deque[tuple[str, Future[str]]] = deque()
        for name, tensor in tensors:
            under_way.append((name, hashers.submit(checksum_of, tensor)))
            if len(under_way) == 2 * threads:
                first, work = under_way.popleft()
                found[first] = work.result()
        return found | {name: work.result() for name, work in under_way}


class WeightSource:
    """Applies updates to one model.

    Args:
        model: whose weights are replaced, each update's all or none.

    Attributes:
        missing: public names of tensors whose memory was given back and which have not come again.
        released: whether there is no memory for them now.
    """

    def __init__(self, model: GLM5) -> None:
        self.model = model
        self.missing: set[str] = set()
        self.released = False
        self._forms: list[tuple[Tensor, tuple[int, ...], tuple[int, ...]]] = []
        self._groups: dict[str, Future[Joined]] = {}
        self._changing = threading.Lock()  # the table of groups

    def apply(self, update: WeightUpdate, received: Mapping[str, Tensor] | None = None) -> None:
        """Replace the weights that the update names.

        Args:
            received: what `receive` gave; without, it is called here.

        Raises:
            UserError: they cannot be read, or do not fit; the old ones stay.
        """
        self._check_memory()
        if update.source == "disk":
            new = load_model(Path(update.path), device=self.model.device, dtype=self.model.dtype)
            if new.config.replace(dtype=self.model.config.dtype) != self.model.config:
                what = f"{update.path}: another model's configuration"
                raise CheckpointError(what, "Give weights of the served model")
            self.model.load_state_dict(new.state_dict())
            self.missing.clear()
        else:
            tensors = self._sent(update, received)
            assign_tensors(self.model, tensors)
            self.missing -= self._public(tensors.keys()) if self.missing else set()
        self.model.forget_joined()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor by its public name."""
        return disk_tensors(self.model)

    def checksum(self) -> dict[str, str]:
        """SHA-256 of every tensor by its public name."""
        return checksums_of(self.tensors())

    def release(self) -> None:
        """Give the memory of all weights back; what they were is lost."""
        if self.released:
            return
        self.missing = self._public(self.model.state_dict().keys())
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            self._forms.append((tensor, tuple(tensor.shape), tensor.stride()))
            tensor.data = tensor.new_empty(0)
        self.model.forget_joined()
        self.released = True

    def resume(self) -> None:
        """Take the memory again, all or none. It holds NaN until the weights come.

        Raises:
            RuntimeError: there is not enough.
        """
        try:
            for tensor, shape, stride in self._forms:
                tensor.data = tensor.new_empty_strided(shape, stride).fill_(torch.nan)
        except RuntimeError:
            for tensor, *_ in self._forms:
                tensor.data = tensor.new_empty(0)
            raise
        self._forms.clear()
        self.released = False

    def _public(self, names: Iterable[str]) -> set[str]:
        """The tensors of a checkpoint that are meant by names of it or of the model's own parameters."""
        owners, tied, found = self.model.state_dict(), self.model.config.tie_word_embeddings, set[str]()
        for name in names:
            if name in owners:
                found.update(public for public, _ in public_tensors(name, owners[name].to("meta")))
            else:
                found.add(name)
        return found - {"lm_head.weight"} if tied else found

    def _check_memory(self) -> None:
        if self.released:
            raise UserError("the memory of the weights was released", "Resume it first: /resume_memory_occupation")

    def _sent(self, update: WeightUpdate, received: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        if update.source == "tensor":
            tensors = unpacked(update)
        else:
            tensors = dict(self.receive(update) if received is None else received)
        if self.model.config.half_split_indexer and any(".indexer." in name for name in tensors):
            what = "the checkpoint's indexers rotate halves, and tensors do not say in which order theirs are"
            raise UserError(
                what, "Serve what glm5 convert makes of it, and send the order that has; or update from disk"
            )
        return tensors

    # ------------------------------------------------------------------ in any thread
    def join(self, group: WeightGroup) -> None:
        """Join a group as rank `rank_offset`. Returns when all its ranks are there.

        Raises:
            UserError: the name is in use, the others did not come, or `leave` was called meanwhile.
        """
        name, joining = group.group_name, Future[Joined]()
        with self._changing:
            if name in self._groups:
                raise UserError(f"group_name={name!r} is in use", "Leave it first, or use another name")
            self._groups[name] = joining
        # What torch waits in cannot be called off: a thread of its own may wait to its end, and nobody waits for it.
        threading.Thread(target=_join, args=(group, joining), name="join", daemon=True).start()
        try:
            joining.result()
        except CancelledError:
            raise UserError(f"joining {name} was given up", "Join it again, over another port of rank 0") from None
        except Exception:
            self._forget(name, joining)
            raise

    def leave(self, name: str) -> None:
        """Leave a group, when the tensors that are on their way have come. One that is still being joined is given up.

        Raises:
            UserError: it was not joined.
        """
        with self._changing:
            joining = self._groups.get(name)
        if joining is None or not joining.cancel():
            member = self._group(name)
            with member.busy:
                member.leave()
        if joining is not None:
            self._forget(name, joining)

    def _forget(self, name: str, joining: Future[Joined]) -> None:
        """The name may be used again, unless that has happened already."""
        with self._changing:
            if self._groups.get(name) is joining:
                del self._groups[name]

    def _group(self, name: str) -> Joined:
        with self._changing:
            joining = self._groups.get(name)
        if joining is None:
            raise UserError(f"group_name={name!r} was not joined", "Join it with /init_weights_update_group")
        if not joining.done():
            raise UserError(f"group_name={name!r} is not joined yet", "Wait until /init_weights_update_group answers")
        return joining.result()

    def receive(self, update: WeightUpdate) -> dict[str, Tensor]:
        """The tensors that a group sends for this update. Every one is received, whatever it is, so that sender and
        receiver stay in step. One update of a group at a time; others wait.

        Raises:
            UserError: the group was not joined, a dtype is unknown, or the sender is gone.
        """
        self._check_memory()
        group = self._group(update.group_name)
        dtypes = [dtype.removeprefix("torch.") for dtype in update.dtypes]
        unknown = next((dtype for dtype in dtypes if dtype not in DTYPES), None)
        if unknown is not None:
            raise UserError(f"dtypes: {unknown!r}", f"Send one of {', '.join(DTYPES)}")
        received: dict[str, Tensor] = {}
        with group.busy, _beside_steps(self.model.device, received):
            for name, dtype, shape in zip(update.names, dtypes, update.shapes, strict=True):
                received[name] = torch.empty(shape, dtype=DTYPES[dtype], device=self.model.device)
                try:
                    group.broadcast(received[name])
                except RuntimeError as error:
                    said = str(error).partition("\n")[0]
                    what = f"{name} did not come over {update.group_name}: {said}"
                    raise UserError(what, "Leave the group, and join a new one") from None
        return received


@contextmanager
def _beside_steps(device: torch.device, received: dict[str, Tensor]) -> Iterator[None]:
    """On a GPU tensors arrive on a stream of their own, else steps would wait there for the sender. Afterwards they are
    there, and may be used on the stream that was current."""
    if device.type != "cuda":
        yield
        return
    user, own = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    with torch.cuda.stream(own):
        yield
        own.synchronize()
    for tensor in received.values():
        tensor.record_stream(user)


def _join(group: WeightGroup, joining: Future[Joined]) -> None:
    """Join a group in this thread, and say so, unless it was given up meanwhile."""
    member, problem = None, None
    try:
        member = Joined(group, given_up=joining.cancelled)
    except Exception as error:
        problem = error
    if not joining.set_running_or_notify_cancel():
        if member is not None:
            member.leave()
    elif member is not None:
        joining.set_result(member)
    else:
        joining.set_exception(problem)


class Joined:
    """A member of a group that is nobody's default group, so that trainer and engine keep worlds of their own.

    torch's public functions make subgroups of one world only; this is what they do below that.

    Args:
        group: where its ranks meet. Returns when all are there.
        given_up: asked while rank 0 does not listen yet: whether to wait no longer.

    Attributes:
        busy: held while tensors are received, so that updates do not mix.

    Raises:
        UserError: the others did not come in time, or the address is not to be reached.
    """

    def __init__(self, group: WeightGroup, given_up: Callable[[], bool] = lambda: False) -> None:
        from torch.distributed import distributed_c10d as c10d

        self.busy = threading.Lock()
        host, port, rank, size = group.master_address, group.master_port, group.rank_offset, group.world_size
        try:
            if rank:
                _reach(host, port, given_up)
            # Not by `rendezvous`: under torchrun that would make rank 0 a client of torchrun's store.
            store = dist.TCPStore(host, port, size, is_master=rank == 0, timeout=JOIN_TIMEOUT, multi_tenant=True)
            made, _ = c10d._new_process_group_helper(
                size,
                rank,
                [],
                c10d.Backend(group.backend),
                c10d.PrefixStore(group.group_name, store),
                group_name=group.group_name,  # type: ignore[arg-type]
                timeout=JOIN_TIMEOUT,
            )
        except (RuntimeError, ValueError, OSError, AssertionError) as error:  # the last of an unknown backend
            what = f"cannot join {group.group_name} at {host}:{port}: {str(error).partition(chr(10))[0]}"
            raise UserError(what, "Check address, ranks, size and backend") from None
        assert isinstance(made, dist.ProcessGroup)
        c10d._world.pg_group_ranks[made] = {i: i for i in range(size)}
        self._group: dist.ProcessGroup | None = made
        atexit.register(self.leave)  # a group whose threads outlive the interpreter may abort the process

    def broadcast(self, tensor: Tensor) -> None:
        """Send `tensor` from rank 0, or receive it, in place, elsewhere."""
        if self._group is None:
            raise UserError("the group was left", "Join it again")
        dist.broadcast(tensor, src=0, group=self._group)

    def leave(self) -> None:
        """End this member, and its threads."""
        atexit.unregister(self.leave)
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None


def _reach(host: str, port: int, given_up: Callable[[], bool]) -> None:
    """Wait until somebody listens there, for a bounded time: torch itself would try for minutes, whatever is said.

    Raises:
        OSError: nobody does.
    """
    end = time.monotonic() + REACH_SECONDS
    while True:
        try:
            socket.create_connection((host, port), timeout=5.0).close()
            return
        except socket.gaierror:  # there is no such host
            raise
        except OSError:
            if given_up() or time.monotonic() > end:
                raise
        time.sleep(0.1)


def unpacked(update: WeightUpdate) -> dict[str, Tensor]:
    """The tensors of an update that carries them.

    Raises:
        UserError: they are packed in a way that is not known.
    """
    if len(update.tensors) != 1 or update.load_format is not None:
        what = f"weights of {len(update.tensors)} ranks in the format {update.load_format}"
        raise UserError(what, "This engine is one rank: send one safetensors file, plain")
    try:
        return safetensors.torch.load(update.tensors[0])
    except SafetensorError as error:
        raise CheckpointError(f"the weights sent are no safetensors file ({error})", "Send them again") from None
