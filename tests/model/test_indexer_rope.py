"""`indexer_rope_interleave`: GLM-5's indexers rotate pairs, DeepSeek-V3.2's halves; a checkpoint says which."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from glm5.model.glm5 import GLM5
from glm5.model.trace import Trace
from glm5.model.weights import disk_tensors, load_model, save_model
from glm5.serve.client import WeightUpdate
from glm5.serve.weights import WeightSource
from glm5.utils.errors import UserError
from support import checks
from support.golden import load_reference, show, topk_gaps
from support.tiny import write_public_checkpoint

K = 24  # index_topk of the tiny model


def checkpoint(path: Path, flag: bool | None) -> Path:
    """The same tensors whatever the flag says of them; None leaves it out."""
    write_public_checkpoint(path, 5)
    config = json.loads((path / "config.json").read_text())
    config.pop("indexer_rope_interleave", None)
    if flag is not None:
        config["indexer_rope_interleave"] = flag
    (path / "config.json").write_text(json.dumps(config))
    return path


def scores_of(model: GLM5, ids: Tensor) -> Trace:
    trace = Trace(scores=True)
    with torch.no_grad():
        model(ids, trace=trace)
    return trace


def rotate_halves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int) -> tuple[Tensor, Tensor]:
    """Element i with i + R / 2, by the angle of i."""
    half = cos.shape[-1] // 2
    cos, sin = (t[..., :half].unsqueeze(unsqueeze_dim) for t in (cos, sin))

    def turn(x: Tensor) -> Tensor:
        a, b = x.split(half, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    return turn(q), turn(k)


@pytest.mark.parametrize("flag", [True, False, None])
def test_selections_are_the_reference_s(flag: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoint(tmp_path / "model", flag)
    reference = load_reference(path)  # transformers rotates pairs, whatever the flag says
    if flag is False:
        from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as module

        pairs = module.apply_rotary_pos_emb_interleave

        def of_the_indexer(*tensors: Any, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
            rotate = rotate_halves if unsqueeze_dim == 2 else pairs
            return rotate(*tensors, unsqueeze_dim=unsqueeze_dim)

        monkeypatch.setattr(module, "apply_rotary_pos_emb_interleave", of_the_indexer)
    ids = torch.randint(6, 320, (2, 150), generator=torch.Generator().manual_seed(3))
    theirs, model = show(reference, ids), load_model(path)
    each = zip(theirs.scores, theirs.selected, strict=True)
    chosen = [torch.where(scores.gather(-1, own.long()) > -torch.inf, own, -1) for scores, own in each]
    trace = Trace(replay=chosen, scores=True)  # so that no tie of one layer turns the next
    with torch.no_grad():
        model(ids, trace=trace)
    for ours, scores in zip(trace.index_scores, theirs.scores, strict=True):
        checks.same_scores(ours, scores, 1e-4)
    clear = topk_gaps(theirs.scores[0], K) > 1e-3
    assert int(clear.sum()) > 150
    rows = (t.flatten(0, 1) for t in (scores_of(model, ids).selected[0], chosen[0]))
    for ours, their_own, sure in zip(*rows, clear.flatten(), strict=True):
        assert not sure or set(ours.tolist()) == set(their_own.tolist())
    save_model(model, tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["indexer_rope_interleave"] is True
    again = load_model(tmp_path / "again")
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)


def test_the_two_differ(tmp_path: Path) -> None:
    ids = torch.randint(6, 320, (1, 150), generator=torch.Generator().manual_seed(3))
    pairs, halves = (scores_of(load_model(checkpoint(tmp_path / str(f), f)), ids) for f in (True, False))
    assert not torch.equal(pairs.selected[0], halves.selected[0])


def test_tensors_of_unknown_order_are_refused(tmp_path: Path) -> None:
    model = load_model(checkpoint(tmp_path / "model", False))
    named = {name: tensor.contiguous() for name, tensor in disk_tensors(model)}
    weights = WeightSource(model)
    with pytest.raises(UserError, match="rotate halves"):
        weights.apply(WeightUpdate("tensor", tensors=(save(named),)))
    weights.apply(WeightUpdate("tensor", tensors=(save({"model.norm.weight": named["model.norm.weight"]}),)))
    weights.apply(WeightUpdate("disk", path=str(tmp_path / "model")))
    assert all(torch.equal(tensor, named[name]) for name, tensor in disk_tensors(model))
