"""What each rank reads of a checkpoint: the parts make up the whole, experts apart or fused on disk, tied or not."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from glm5.model.weights import load_model
from glm5.parallel.inference import Share
from glm5.parallel.mesh import Mesh
from glm5.utils.errors import CheckpointError
from support.tiny import fuse_experts, tiny_config, tiny_model, write_public_checkpoint


def shares(tp: int, ep: int, **changes: Any) -> dict[tuple[int, int], Share]:
    """Of every rank, by its places along tp and ep, without processes."""
    mesh, counts = Mesh(dp=ep, tp=tp, ep=ep), {"tp": tp, "ep": ep}
    found = {}
    for place in [(t, e) for t in range(tp) for e in range(ep)]:
        at = dict(zip(("tp", "ep"), place, strict=True))
        world: Any = SimpleNamespace(mesh=mesh, count=counts.get, place=at.get, group=lambda axis: None)
        found[place] = Share(world, tiny_config(**changes))
    return found


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (1, 5), (4, 2)])
def test_the_parts_make_up_the_whole(tmp_path: Path, tp: int, ep: int, tied: bool, fused: bool) -> None:
    write_public_checkpoint(tmp_path, 0, shards=1, tie_word_embeddings=tied)
    if fused:
        file = tmp_path / "model.safetensors"
        save_file(fuse_experts(load_file(file)), file)
    whole = tiny_model(0, tie_word_embeddings=tied).state_dict()
    parts = {
        place: load_model(tmp_path, share=share).state_dict()
        for place, share in shares(tp, ep, tie_word_embeddings=tied).items()
    }
    cut = 0
    for name, tensor in whole.items():
        seen = torch.zeros_like(tensor)  # by how many ranks each element is held
        for (t, e), part in parts.items():
            mine, at = part[name], torch.arange(tensor.numel()).view(tensor.shape)
            if ".experts." in name:
                at = at.chunk(ep)[e]
                halves = at.unflatten(1, (2, -1)) if name.endswith("gate_up_proj") else at
                at = halves.chunk(tp, 2)[t].reshape(mine.shape)
            elif mine.shape[0] < tensor.shape[0]:
                at = at.chunk(tp)[t]
            elif mine.ndim == 2 and mine.shape[1] < tensor.shape[1]:
                at = at.chunk(tp, 1)[t]
            assert torch.equal(mine, tensor.flatten()[at]), name
            seen.view(-1)[at.flatten()] += 1
        assert len(seen.unique()) == 1
        cut += seen.flatten()[0] < tp * ep
    # Three matrices of attention in each of four layers, three of the dense one, experts and shared experts of three.
    expected = 4 * 3 + 3 + 3 * 3 + (not tied) if tp > 1 else 0
    assert cut == expected + (3 * 2 if tp * ep > 1 else 0)


def test_a_checkpoint_that_does_not_fit_is_refused_whole(tmp_path: Path) -> None:
    write_public_checkpoint(tmp_path, 0, shards=1)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))
    (share, *_) = shares(2, 1, intermediate_size=96).values()
    with pytest.raises(CheckpointError, match=r"gate_proj.weight is \[88, 48\], must be \[96, 48\]"):
        load_model(tmp_path, share=share)
