"""A training step at GLM-5's attention widths by the fast operators: as near to fp32 as the specifications in bf16.

Skips without a Hopper GPU. Read next: `tests/kernels/test_sparse_mla_backward.py`.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from glm5.kernels import cuda
from glm5.kernels.cross_entropy import linear_cross_entropy
from glm5.model.config import ModelConfig
from glm5.model.glm5 import GLM5
from glm5.model.trace import Aux, Trace
from support.taken import taken

RUNS, WHY = cuda.available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not RUNS, reason=f"training by kernels goes untested here: {WHY}")]


def _model() -> GLM5:
    config = ModelConfig(
        vocab_size=512,
        hidden_size=512,
        num_hidden_layers=2,
        first_k_dense_replace=1,
        num_attention_heads=16,
        num_key_value_heads=16,
        q_lora_rank=256,
        intermediate_size=768,
        moe_intermediate_size=256,
        n_routed_experts=4,
        num_experts_per_tok=4,  # every expert: a near tie of two would be another model
        index_topk=128,
        num_nextn_predict_layers=0,
        eos_token_id=(0,),
        pad_token_id=0,
    )
    with torch.device("cuda"):
        return GLM5(config, seed=1).bfloat16()


def _step(
    model: GLM5, ids: Tensor, sparse: bool, replay: list[Tensor] | None
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Loss, the indexers' KL and mass, then every gradient. Selections are given: near ties may fall otherwise."""
    model.zero_grad(set_to_none=True)
    aux = Aux(indexer=True)
    trace = Trace(replay=replay) if sparse else None
    hidden = model.hidden(ids, sparse=sparse, aux=aux, trace=trace)
    loss = linear_cross_entropy(hidden.flatten(0, 1), model.lm_head.weight, ids.roll(-1, 1).flatten()).loss_sum
    ((loss + aux.indexer_kl()) / ids.numel()).backward()
    found = [loss, aux.indexer_kl(), torch.stack([x.recall_sum for x in aux.indexer_losses])]
    return [x.detach().float() for x in found], {
        n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None
    }


@pytest.mark.parametrize("sparse", [True, False])
def test_a_step_by_kernels_agrees_with_the_specifications(sparse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model()
    ids = torch.randint(1, 512, (2, 400), generator=torch.Generator().manual_seed(0)).cuda()
    used = taken(monkeypatch)
    replay = None
    if sparse:
        traced = Trace()
        with torch.no_grad():
            model.hidden(ids, sparse=True, trace=traced)
        replay = traced.selected
    numbers, gradients = _step(model, ids, sparse, replay)
    wanted = {"triton.moe_backward", "triton.cross_entropy", "triton.basic_backward", "triton.norm_backward"}
    wanted |= {"triton.routing_backward", "triton.heads_backward"}
    wanted |= {"cuda.sparse_mla_backward", "triton.indexer_loss"} if sparse else {"triton.indexer_warmup"}
    assert wanted <= set(used)
    monkeypatch.setenv("GLM5_KERNELS", "torch")
    plain, plain_gradients = _step(model, ids, sparse, replay)
    exact, exact_gradients = _step(copy.deepcopy(model).float(), ids, sparse, replay)
    for ours, theirs, wanted in zip(numbers, plain, exact, strict=True):
        assert (ours - wanted).abs().max() <= 1.3 * (theirs - wanted).abs().max() + 1e-2 * wanted.abs().max()
    assert gradients.keys() == exact_gradients.keys()
    for name, wanted in exact_gradients.items():
        ours, theirs = ((g[name] - wanted).norm() / wanted.norm() for g in (gradients, plain_gradients))
        assert ours <= 1.3 * theirs + 0.01, f"{name}: {ours:.3f} from fp32, the specification in bf16 {theirs:.3f}"
