"""Memory grows with the length and not with its square: every allocation counted, and one real process measured."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from glm5.kernels import tiling
from glm5.model.glm5 import GLM5
from glm5.model.trace import Aux
from support.tiny import tiny_model

TILE = 16_384


class Allocations(TorchDispatchMode):
    """Follows the storages that operations return: bytes alive at the worst moment, and the largest in elements."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.total = self.peak = self.largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().nbytes() >= 1024:
                self._count(tensor)
        return out

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.largest = max(self.largest, storage.nbytes() // tensor.element_size())
        ref = StorageWeakRef(storage)
        if ref.cdata not in self.alive:
            self.alive[ref.cdata] = (ref, storage.nbytes())
            self.total += storage.nbytes()
        if self.total > self.peak:  # perhaps: what has been freed since is still in the sum
            self.alive = {key: held for key, held in self.alive.items() if not held[0].expired()}
            self.total = sum(nbytes for _, nbytes in self.alive.values())
            self.peak = max(self.peak, self.total)


def prefill(model: GLM5, ids: Tensor) -> None:
    with torch.no_grad():
        model(ids, logits_to_keep=1)


def prefill_dense(model: GLM5, ids: Tensor) -> None:
    with torch.no_grad():
        model(ids, logits_to_keep=1, sparse=False)


def prefill_in_chunks(model: GLM5, ids: Tensor) -> None:
    cache = model.new_cache(1)
    with torch.no_grad():
        for part in ids.split(ids.shape[1] // 4, dim=1):
            model(part, cache=cache, logits_to_keep=1)


def prefill_padded(model: GLM5, ids: Tensor) -> None:
    mask = torch.ones_like(ids)
    mask[:, :9] = 0
    with torch.no_grad():
        model(ids, attention_mask=mask, logits_to_keep=1)


def train(model: GLM5, ids: Tensor) -> None:
    """Trunk, one MTP depth, the indexer's loss and every gradient."""
    aux = Aux(indexer=True)
    hidden = model.hidden(ids, aux=aux)
    loss = hidden.square().sum() + aux.indexer_kl()
    for drafted in model.mtp_hidden(hidden, ids, 1, aux=aux):
        loss = loss + drafted.square().sum()
    torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)


def train_dense(model: GLM5, ids: Tensor) -> None:
    aux = Aux(indexer=True)
    loss = model.hidden(ids, sparse=False, aux=aux).square().sum() + aux.indexer_kl()
    torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)


@pytest.fixture(params=["as dispatched", "specifications"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "specifications":
        monkeypatch.setenv("GLM5_KERNELS", "torch")


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    "run", [prefill, prefill_dense, prefill_in_chunks, prefill_padded, train, train_dense], ids=lambda f: f.__name__
)
def test_twice_the_length_takes_twice_the_memory(
    run: Callable[[GLM5, Tensor], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest tensor and all that is alive grow like the length. One tensor of length x length, which would be the
    largest by far, would make either ratio 4."""
    # Small beside what these lengths need, so that the tiles' constant share doesn't hide the growth.
    monkeypatch.setattr(tiling, "TILE_ELEMENTS", TILE)
    model = tiny_model(0, max_position_embeddings=4096)
    ids = torch.randint(6, 320, (1, 1024), generator=torch.Generator().manual_seed(0))
    run(model, ids[:, :64])  # whatever is made once
    half, whole = Allocations(), Allocations()
    with half:
        run(model, ids[:, :512])
    with whole:
        run(model, ids)
    assert half.largest < 512 * 512 / 2
    assert whole.largest < 2.1 * half.largest
    assert 1.5 < whole.peak / half.peak < 2.2


def test_the_count_sees_a_square_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """With tiles as large as the input, the same count finds the square, so it can find one."""
    monkeypatch.setenv("GLM5_KERNELS", "torch")
    monkeypatch.setattr(tiling, "TILE_ELEMENTS", 2**40)
    model = tiny_model(0, max_position_embeddings=4096)
    ids = torch.randint(6, 320, (1, 1024), generator=torch.Generator().manual_seed(0))
    with Allocations() as seen:
        prefill(model, ids)
    assert seen.largest >= 1024 * 1024


PROCESS = """
import json, resource, sys, time
import torch
from glm5.model.glm5 import GLM5
from glm5.model.presets import nano

torch.set_num_threads(1)
tokens = int(sys.argv[1])
model = GLM5(nano()).eval()
ids = torch.randint(0, model.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))
begin, cache = time.process_time(), model.new_cache(1)
with torch.no_grad():
    logits = model(ids, cache=cache, logits_to_keep=1).logits
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
seconds, finite = time.process_time() - begin, bool(logits.isfinite().all())
print(json.dumps(dict(tokens=cache.uniform, peak=peak, seconds=seconds, finite=finite)))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux only")
def test_prefill_of_32768_tokens_stays_under_3_gib() -> None:
    """The whole prompt in one call, cached, in a process of its own."""
    run = subprocess.run([sys.executable, "-c", PROCESS, "32768"], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    measured = json.loads(run.stdout)
    print(f"peak {measured['peak'] / 2**20:.0f} MiB, {measured['seconds']:.0f} s of one core")
    assert measured["tokens"] == 32_768
    assert measured["finite"]
    assert measured["peak"] < 3 * 2**30
