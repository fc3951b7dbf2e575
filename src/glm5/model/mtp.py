"""Multi-token prediction: one block, stored as layer N, reused at every depth.

At depth d and position i the block reads [norm(emb(token i + d)) ; norm(h of depth d - 1)] (embedding first), runs
a whole DSA + MoE layer with its own indexer and cache, and its normed output is both what the shared head reads and
what the next depth recycles. h of depth 0 is the trunk's normed output. Source: report section 2.1 (parameter-shared
MTP), DeepSeek-V3. Read next: `generate`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from glm5.kernels.visibility import Visibility
from glm5.model.block import Block
from glm5.model.config import ModelConfig
from glm5.model.layers import Linear, RMSNorm


class SharedHead(nn.Module):
    """The norm before the shared output head. Embedding and head themselves are the trunk's."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class MTPBlock(Block):
    """A decoder block with the fusion in front and its own final norm behind."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        width = config.hidden_size
        self.enorm = RMSNorm(width, config.rms_norm_eps)
        self.hnorm = RMSNorm(width, config.rms_norm_eps)
        self.eh_proj = Linear(2 * width, width, bias=False)
        self.shared_head = SharedHead(config)

    def predict(
        self,
        embedded_BTD: Tensor,
        hidden_BTD: Tensor,
        rope: Tensor,
        visible: Visibility,
        **options: Any,
    ) -> Tensor:
        """One depth: the hidden state [B, T, D] for the shared head and for the next depth.

        Args:
            embedded_BTD: embeddings of the tokens d ahead. hidden_BTD: normed hidden of the depth before.
            options: as `Block.forward`.
        """
        fused = self.eh_proj(torch.cat((self.enorm(embedded_BTD), self.hnorm(hidden_BTD)), dim=-1))
        return self.shared_head.norm(self(fused, rope, visible, **options))
