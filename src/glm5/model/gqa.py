"""Grouped-query attention: the report's baseline in Table 1 (GQA-8), dense, with a plain key-value cache.

A GLM-5 never uses it; it exists so that MLA and Muon Split can be compared with it. Read next: `mla`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from glm5.kernels.attention import attention_logit_max, dense_attention
from glm5.kernels.basic import rope_interleaved
from glm5.kernels.visibility import Visibility
from glm5.model.cache import Keys, SharedRows
from glm5.model.config import ModelConfig
from glm5.model.layers import Linear
from glm5.model.trace import Aux, Trace


class GQA(nn.Module):
    """One attention layer with `num_key_value_heads` groups; rotates `qk_rope_head_dim` of each head at most."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.heads, self.groups, self.width = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.rotary = config.qk_rope_head_dim
        bias = config.attention_bias
        self.q_proj = Linear(config.hidden_size, self.heads * self.width, bias=bias)
        self.k_proj = Linear(config.hidden_size, self.groups * self.width, bias=bias)
        self.v_proj = Linear(config.hidden_size, self.groups * self.width, bias=bias)
        self.o_proj = Linear(self.heads * self.width, config.hidden_size, bias=bias)

    def forward(
        self,
        x_BTD: Tensor,
        rope: Tensor,
        visible: Visibility,
        *,
        sparse: bool = True,
        cache: Keys | None = None,
        slot_BT: Tensor | None = None,
        trace: Trace | None = None,
        aux: Aux | None = None,
    ) -> Tensor:
        """As `MLA.forward`; without an indexer there is no sparse form, and `aux` gathers logit maxima only."""
        rope = rope.unsqueeze(-2)
        q = self._rotate(self.q_proj(x_BTD).unflatten(-1, (self.heads, -1)), rope)
        k = self._rotate(self.k_proj(x_BTD).unflatten(-1, (self.groups, -1)), rope)
        v = self.v_proj(x_BTD)
        measured = aux is not None and aux.logits
        if isinstance(cache, SharedRows) and not measured and cache.by_heads(self.heads, self.groups):
            out = cache.attend(q, k, v.unflatten(-1, (self.groups, -1)), self.width**-0.5)
            return self.o_proj(out.flatten(-2))
        if cache is not None:
            (held,) = cache.store(self.layer, slot_BT, visible, k.flatten(-2), v)
            k = held.rows[:, : visible.slots].unflatten(-1, (self.groups, -1))
            assert isinstance(held.index_keys, Tensor), "GQA's second tensor, which no page holds"
            v = held.index_keys[:, : visible.slots]
        if aux is not None and aux.logits:
            aux.logit_maxima.append(attention_logit_max(q, k, visible, None, self.width**-0.5))
        out = dense_attention(q, k, v.unflatten(-1, (self.groups, -1)), visible, self.width**-0.5)
        return self.o_proj(out.flatten(-2))

    def _rotate(self, x: Tensor, rope: Tensor) -> Tensor:
        return torch.cat((x[..., : -self.rotary], rope_interleaved(x[..., -self.rotary :], rope)), dim=-1)
