"""Our model against the public implementation in bf16, layer by layer: `checks.check_bf16_layer` has the tolerance.

End to end, bf16 noise changes selections and experts of either implementation until little is comparable (between the
reference's own bf16 and fp32 runs, half the positions of the fourth layer). So each layer starts from the reference's
hidden state.
"""

from __future__ import annotations

import pytest
import torch

from glm5.model.glm5 import GLM5
from glm5.model.trace import Trace
from support.checks import FORMS, Bf16Layer, check_bf16_layer, form, rms, visible_only
from support.golden import Shown, load_reference, show
from support.tiny import fuse_experts, tiny_config, write_public_checkpoint


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[GLM5, GLM5, torch.Tensor, Shown]:
    """bf16 model, fp32 model of the same bf16 weights, ids, and the bf16 reference's pass over them."""
    directory = tmp_path_factory.mktemp("bf16")
    tensors = fuse_experts(write_public_checkpoint(directory, 4, torch.bfloat16))
    model, exact = GLM5(tiny_config(), seed=None).to(torch.bfloat16), GLM5(tiny_config(), seed=None)
    model.load_state_dict(tensors)
    exact.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    ids = torch.randint(6, 320, (2, 300), generator=torch.Generator().manual_seed(0))
    return model.eval(), exact.eval(), ids, show(load_reference(directory, torch.bfloat16), ids)


@pytest.mark.parametrize("layer", range(3))
@pytest.mark.parametrize("name", FORMS)
def test_layer(run: tuple[GLM5, GLM5, torch.Tensor, Shown], layer: int, name: str) -> None:
    model, exact, _, theirs = run
    router = theirs.router[layer - 1] if layer else None
    given = Bf16Layer(layer, theirs.hidden[layer], theirs.hidden[layer + 1], theirs.selected[layer], router)
    with form(name):
        check_bf16_layer(model, exact, given)


def test_head_is_the_same_product(run: tuple[GLM5, GLM5, torch.Tensor, Shown]) -> None:
    model, _, _, theirs = run
    assert torch.equal(model.lm_head(theirs.hidden[-1]), theirs.logits)


@torch.no_grad()
def test_whole_pass_with_replayed_positions(run: tuple[GLM5, GLM5, torch.Tensor, Shown]) -> None:
    """With the positions given, the whole model lies as near to the golden as bf16 rounding lets it."""
    model, exact, ids, theirs = run
    replay = [visible_only(s) for s in theirs.selected]
    ours = model(ids, trace=Trace(replay=replay)).logits
    right = exact(ids, trace=Trace(replay=replay)).logits
    assert ours.dtype == torch.bfloat16
    assert rms(ours - theirs.logits) <= 2**0.5 * rms(right - theirs.logits.float())


def test_a_cast_keeps_the_router_in_fp32(run: tuple[GLM5, GLM5, torch.Tensor, Shown]) -> None:
    model = run[0]
    kept = {n for n, t in (*model.named_parameters(), *model.named_buffers()) if t.dtype == torch.float32}
    assert kept == {
        f"model.layers.{layer}.mlp.gate.{name}" for layer in (1, 2, 3) for name in ("weight", "e_score_correction_bias")
    }
