"""The lightning indexer's projections: what to look at. MLA then reads it.

Queries come from the normalised query latent, keys from the hidden state through a LayerNorm with bias; the first
`qk_rope_head_dim` of each head are rotated (the main attention rotates its last), interleaved. It learns only from
its KL loss: its inputs are detached. Source: report section 2.1.1; DeepSeek-V3.2. Read next: `mla`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from glm5.kernels.basic import rope_interleaved
from glm5.model.config import ModelConfig
from glm5.model.layers import LayerNorm, Linear


class Indexer(nn.Module):
    """Index queries, keys and head weights of one layer.

    `ties` is None: of equal scores the lower positions are taken. With a generator they are drawn (`GLM5.race`).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.width = config.index_n_heads, config.index_head_dim
        self.rotary = config.qk_rope_head_dim
        self.topk = config.index_topk
        self.ties: torch.Generator | None = None
        self.wq_b = Linear(config.q_lora_rank, self.heads * self.width, bias=False)
        self.wk = Linear(config.hidden_size, self.width, bias=False)
        self.k_norm = LayerNorm(self.width)
        self.weights_proj = Linear(config.hidden_size, self.heads, bias=False)

    def keys(self, x_BTD: Tensor, rope: Tensor) -> Tensor:
        """Index keys [B, T, I], normed and rotated: what the cache holds."""
        return self.turned_keys(self.wk(x_BTD.detach()), rope)

    def queries(self, x_BTD: Tensor, q_latent_BTQ: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """Index queries [B, T, J, I], and head weights fp32 [B, T, J] with both scales (J and I, power -1/2) in."""
        return self.turned_queries(self.wq_b(q_latent_BTQ.detach()), self.weights_proj(x_BTD.detach()), rope)

    def turned_keys(self, k_BTI: Tensor, rope: Tensor) -> Tensor:
        """`keys` from the product of `wk`."""
        k = self.k_norm(k_BTI)
        return torch.cat((rope_interleaved(k[..., : self.rotary], rope), k[..., self.rotary :]), dim=-1)

    def turned_queries(self, q_BTX: Tensor, w_BTJ: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """`queries` from the products of `wq_b` and `weights_proj`."""
        q = q_BTX.unflatten(-1, (self.heads, self.width))
        rotated = rope_interleaved(q[..., : self.rotary], rope.unsqueeze(-2))
        return torch.cat((rotated, q[..., self.rotary :]), dim=-1), w_BTJ.float() * (self.heads * self.width) ** -0.5
