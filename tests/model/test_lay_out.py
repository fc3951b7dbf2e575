"""Matrices side by side in memory: one product without a copy, and nothing else changes."""

from __future__ import annotations

from pathlib import Path

import torch

from glm5.kernels.basic import lay_side_by_side, side_by_side
from glm5.model.mla import MLA
from glm5.model.weights import load_model, save_model
from support.tiny import tiny_model

IDS = torch.randint(0, 300, (1, 40), generator=torch.Generator().manual_seed(0))


def test_side_by_side_is_a_view_of_what_lies_behind_each_other() -> None:
    a, b = torch.randn(3, 5), torch.randn(4, 5)
    expected = torch.cat((a, b))
    assert side_by_side(a, b) is None
    lay_side_by_side(a, b)
    both = side_by_side(a, b)
    assert both is not None
    assert torch.equal(both, expected)
    b.mul_(2)
    assert torch.equal(both[3:], 2 * expected[3:]), "the same memory"
    assert side_by_side(b, a) is None, "in another order"
    assert side_by_side(a, torch.randn(4, 5)) is None
    whole = torch.randn(10, 5)
    assert side_by_side(whole[:3], whole[4:]) is None, "a gap"
    assert side_by_side(whole[:, :2], whole[:, 2:]) is None, "rows with gaps"


def test_weights_made_in_inference_mode_stay_where_they_are() -> None:
    with torch.inference_mode():
        model = tiny_model()
        expected = model(IDS).logits
    model.lay_out()
    with torch.inference_mode():
        assert torch.equal(model(IDS).logits, expected)


def test_laying_a_model_out_changes_no_value_and_no_name(tmp_path: Path) -> None:
    model = tiny_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    logits = model(IDS).logits.detach()
    model.lay_out()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(model(IDS).logits, logits)
    attention = next(m for m in model.modules() if isinstance(m, MLA))
    indexer = attention.indexer
    downs = (attention.q_a_proj, attention.kv_a_proj_with_mqa, indexer.wk, indexer.weights_proj)
    assert side_by_side(*(p.weight for p in downs)) is not None

    save_model(model, tmp_path)
    loaded = load_model(tmp_path, dtype=torch.float32)
    assert all(torch.equal(tensor, before[name]) for name, tensor in loaded.state_dict().items())

    model.load_state_dict(tiny_model(5).state_dict())
    assert side_by_side(*(p.weight for p in downs)) is not None, "weights that are replaced stay where they are"
    assert torch.equal(model(IDS).logits, tiny_model(5)(IDS).logits)
    model.double()
    assert side_by_side(*(p.weight for p in downs)) is None, "casting undoes it"
