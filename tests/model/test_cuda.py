"""The model on a GPU: the same numbers as on the CPU, and the fast operators against the specifications.

Skips without a CUDA device. Read next: `tests/kernels/test_cuda_operators.py`.
"""

from __future__ import annotations

import pytest
import torch

from glm5.model.config import ModelConfig
from glm5.model.glm5 import GLM5
from glm5.model.trace import Aux, Trace
from support.taken import taken
from support.tiny import tiny_model

CUDA = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="the model goes untested on CUDA: no device")]


def true_widths(**changes: int) -> ModelConfig:
    """GLM-5's attention and expert widths, with one dense and one MoE layer and few experts."""
    base = dict(
        vocab_size=1024,
        num_hidden_layers=2,
        first_k_dense_replace=1,
        n_routed_experts=16,
        num_nextn_predict_layers=0,
        intermediate_size=4096,
        eos_token_id=(0,),
        pad_token_id=0,
    )
    return ModelConfig(**{**base, **changes})


def test_fp32_on_cuda_is_fp32_on_the_cpu() -> None:
    """Decode, chunks and training form agree; products in TF32 would not."""
    model = tiny_model(3).eval()
    ids = torch.randint(6, 320, (2, 96), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(ids).logits
        on_gpu = tiny_model(3).eval().cuda()
        cache = on_gpu.new_cache(2)
        parts = [on_gpu(part.cuda(), cache=cache).logits for part in ids.split([64, 16, 15, 1], dim=1)]
    assert (torch.cat(parts, 1).cpu() - expected).abs().max() < 1e-3
    assert (torch.cat(parts, 1).cpu() - expected).abs().median() < 1e-5


@pytest.mark.parametrize("tokens", [1, 3, 300])
def test_fast_operators_in_the_model(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 at GLM-5's widths past index_topk: the hidden states of both ways agree as bf16 can, and the fast
    operators really ran."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = GLM5(true_widths(), seed=1).bfloat16().eval()
    context = 2500
    ids = torch.randint(1, 1024, (1, context + tokens), device="cuda")
    used = taken(monkeypatch)
    results, selections = {}, {}
    for kernels in ("torch", "fast"):
        monkeypatch.setenv("GLM5_KERNELS", kernels)
        with torch.no_grad():
            cache = model.new_cache(1)
            model.hidden(ids[:, :context], cache=cache)
            trace = Trace(replay=selections.get("torch"))
            results[kernels] = model.hidden(ids[:, context:], cache=cache, trace=trace).float()
            selections[kernels] = trace.selected
    assert {"cuda.absorbed_attention", "cuda.index_select", "cuda.grouped_swiglu"} <= set(used)
    difference = (results["fast"] - results["torch"]).norm(dim=-1) / results["torch"].norm(dim=-1)
    assert difference.median() < 2e-2
    assert difference.max() < 0.2  # a token whose eighth and ninth expert all but tie may take the other


def test_a_training_step_in_bf16() -> None:
    """Every parameter gets a finite gradient, sparse with the indexer's loss."""
    with torch.device("cuda"):
        model = GLM5(true_widths(index_topk=64, num_nextn_predict_layers=1), seed=1).bfloat16()
    ids = torch.randint(1, 1024, (2, 260), device="cuda")
    aux = Aux(indexer=True, balance=True)
    hidden = model.hidden(ids[:, :256], aux=aux)
    loss = hidden.float().square().mean()
    for drafted in model.mtp_hidden(hidden, ids, 2, aux=aux):
        loss = loss + drafted.float().square().mean()
    (loss + aux.indexer_kl() / 512 + torch.stack(aux.balance_losses).sum()).backward()
    missing = [n for n, p in model.named_parameters() if p.grad is None and n != "lm_head.weight"]
    assert not missing
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_one_tokens_moe_is_that_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token alone takes a kernel of its own; rounded where the others round, so that only sums differ."""
    with torch.device("cuda"):
        moe = GLM5(true_widths(), seed=1).bfloat16().eval().blocks[1].mlp
        x = torch.randn(5, 1, 6144, dtype=torch.bfloat16)
    used = taken(monkeypatch)
    with torch.no_grad():
        together = moe(x).float()
        assert "triton.moe_row" not in used
        alone = torch.cat([moe(x[i : i + 1]) for i in range(5)]).float()
    assert "triton.moe_row" in used
    assert (alone - together).norm() < 5e-3 * together.norm()
