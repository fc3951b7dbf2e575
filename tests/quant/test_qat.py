"""Training at INT4: what products read is what packing gives, to the bit; gradients pass straight through."""

from __future__ import annotations

import pytest
import torch

from glm5.kernels.formats import unpack
from glm5.model.config import ModelConfig
from glm5.model.moe import Experts
from glm5.quant.int4 import MARK, marked, pack_experts, read_at_int4, train_at_int4
from glm5.utils.errors import ConfigError
from support.training import tiny


def by_hand(weight: torch.Tensor, group: int) -> torch.Tensor:
    """INT4 element by element: fp32 largest / 7, division, half to even, product."""
    rows = weight.flatten(0, -2)
    out = torch.empty(rows.shape)
    for r, row in enumerate(rows):
        for at in range(0, len(row), group):
            part = row[at : at + group].float()
            scale = part.abs().max() / torch.tensor(7.0)
            for c, x in enumerate(part):
                out[r, at + c] = torch.tensor(float(round(float(x / scale)))) * scale  # Python rounds half to even
    return out.view_as(weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_read_is_int4_by_hand_and_the_gradient_passes(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(3, 4, 32, generator=generator).to(dtype).requires_grad_()
    with torch.no_grad():  # a scale of 1, with values halfway between two whole numbers
        weight[0, 0, :8] = torch.tensor([7.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 6.5])
    read = read_at_int4(weight, 8)
    assert read.dtype == dtype
    assert read[0, 0, :8].tolist() == [7.0, 0.0, 2.0, 2.0, 0.0, -2.0, -2.0, 6.0]
    assert torch.equal(read, by_hand(weight.detach(), 8).to(dtype))
    assert not torch.equal(read, weight)
    grad = torch.randn(weight.shape, generator=generator).to(dtype)
    read.backward(grad)
    assert weight.grad is not None
    assert torch.equal(weight.grad, grad)


@pytest.mark.parametrize("group", [2, 4, 12])
def test_packed_weights_hold_what_training_saw(group: int) -> None:
    model = tiny(hidden_size=24)
    names = train_at_int4(model, group)
    experts = [m for m in model.modules() if isinstance(m, Experts)]
    assert len(experts) == 2  # of a layer and of the MTP block
    assert names == {n for n, _ in model.named_parameters() if ".experts." in n}
    for one in experts:
        for packed, read in zip(pack_experts(one, group), one.read(), strict=True):
            assert torch.equal(unpack(packed), read)
            assert packed.scale.shape[-1] == packed.shape[-1] // group


def test_a_model_reads_its_experts_so_in_every_pass() -> None:
    ids = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(0))
    plain, quantised, replaced = tiny(), tiny(), tiny()
    train_at_int4(quantised, 4)
    with torch.no_grad():
        for own in (m for m in replaced.modules() if isinstance(m, Experts)):
            for p in own.parameters():
                p.copy_(by_hand(p, 4))
    outs = [m(ids).logits for m in (plain, quantised, replaced)]
    assert torch.equal(outs[1], outs[2])
    assert not torch.equal(outs[0], outs[1])
    with torch.no_grad():  # where a faster way reads all of a layer's weights at once
        assert torch.equal(quantised(ids).logits, replaced(ids).logits)
    for m in (quantised, replaced):
        m(ids).logits.square().sum().backward()
    for (name, p), (_, q) in zip(quantised.named_parameters(), replaced.named_parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        assert p.grad is None or torch.equal(p.grad, q.grad), name


def test_a_gradient_that_waits_is_the_weight_s_own() -> None:
    weight = torch.randn(2, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    asked = []
    weight.defer = lambda which, compute: asked.append((which, compute()))  # type: ignore[attr-defined]
    read = read_at_int4(weight, 4)
    assert torch.equal(read, by_hand(weight.detach(), 4))
    assert read.requires_grad
    read.defer(read, lambda: "the product")  # type: ignore[attr-defined]
    assert asked == [(weight, "the product")]
    assert weight.grad is None


def test_the_mark_says_how_weights_were_trained_last() -> None:
    model = tiny()
    train_at_int4(model, 4)
    stored = model.config.to_dict()
    assert stored[MARK] == {"format": "int4", "group": 4, "weights": "experts"}
    again = ModelConfig.from_dict(stored)
    assert MARK not in marked(again, None).to_dict()
    assert marked(again, 2).extra[MARK]["group"] == 2


def test_models_and_groups_that_do_not_fit_are_refused() -> None:
    for group in (0, 1, 5, 16, -4):
        with pytest.raises(ConfigError, match="qat_group"):
            train_at_int4(tiny(), group)
    with pytest.raises(ConfigError, match="has none"):
        train_at_int4(tiny(first_k_dense_replace=2, num_nextn_predict_layers=0), 4)
