"""The operators once more, as plainly as they can be written: float64, whole matrices, Python loops where clearer."""

from __future__ import annotations

import torch
from torch import Tensor

from glm5.kernels.visibility import Visibility


def relative_error(ours: Tensor, oracle: Tensor) -> float:
    """|ours - oracle| / |oracle|, of tensors of one shape without NaN."""
    assert ours.shape == oracle.shape
    assert not ours.isnan().any()
    return float((ours.double() - oracle.double()).norm() / oracle.double().norm().clamp(min=1e-30))


def interval_mask(visible: Visibility, slots: int) -> Tensor:
    """Boolean [B, T, slots] straight from the definition: first <= s <= last."""
    slot = torch.arange(slots)
    return (slot >= visible.first_BT[..., None]) & (slot <= visible.last_BT[..., None])


def selection_mask(selected_BTK: Tensor, slots: int) -> Tensor:
    """Boolean [B, T, slots], True at every selected slot."""
    mask = torch.zeros(*selected_BTK.shape[:2], slots, dtype=torch.bool)
    for b, t in torch.cartesian_prod(torch.arange(mask.shape[0]), torch.arange(mask.shape[1])).tolist():
        chosen = selected_BTK[b, t]
        mask[b, t, chosen[chosen >= 0].long()] = True
    return mask


def attention_probs(q_BTHX: Tensor, k_BSGX: Tensor, mask_BTS: Tensor, scale: float) -> Tensor:
    """[B, H, T, S] in float64; rows that see nothing are zero. Differentiable."""
    k = k_BSGX.double().repeat_interleave(q_BTHX.shape[2] // k_BSGX.shape[2], dim=2)
    logits = torch.einsum("bthx,bshx->bhts", q_BTHX.double(), k) * scale
    logits = logits.masked_fill(~mask_BTS[:, None], -torch.inf)
    seen = mask_BTS.any(-1)[:, None, :, None]
    return torch.where(seen, logits.masked_fill(~seen, 0.0).softmax(-1), 0.0)


def attention(q_BTHX: Tensor, k_BSGX: Tensor, v_BSGV: Tensor, mask_BTS: Tensor, scale: float) -> Tensor:
    """[B, T, H, V] in float64."""
    v = v_BSGV.double().repeat_interleave(q_BTHX.shape[2] // v_BSGV.shape[2], dim=2)
    return torch.einsum("bhts,bshv->bthv", attention_probs(q_BTHX, k_BSGX, mask_BTS, scale), v)


def index_scores(q_BTJI: Tensor, w_BTJ: Tensor, k_BSI: Tensor) -> Tensor:
    """[B, T, S] in float64, unmasked."""
    dots = torch.einsum("btji,bsi->btjs", q_BTJI.double(), k_BSI.double()).relu()
    return torch.einsum("btj,btjs->bts", w_BTJ.double(), dots)


def topk_positions(scores_S: list[float], k: int) -> list[int]:
    """The rule by sorting: higher score first, then lower position; -inf is never chosen. Ascending."""
    ranked = sorted((-score, slot) for slot, score in enumerate(scores_S) if score != -float("inf"))
    return sorted(slot for _, slot in ranked[:k])


def swiglu_experts(x_ND: Tensor, gate_up_EFD: Tensor, down_EDF: Tensor, expert_NM: Tensor, weight_NM: Tensor) -> Tensor:
    """[N, D] in float64, token by token, expert by expert. Differentiable."""
    rows = []
    for n in range(x_ND.shape[0]):
        total = torch.zeros(x_ND.shape[1], dtype=torch.float64)
        for m, e in enumerate(expert_NM[n].tolist()):
            gate, up = (gate_up_EFD[e].double() @ x_ND[n].double()).chunk(2)
            hidden = gate / (1 + torch.exp(-gate)) * up
            total = total + weight_NM[n, m].double() * (down_EDF[e].double() @ hidden)
        rows.append(total)
    return torch.stack(rows)
