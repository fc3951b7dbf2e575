"""One decoder block: norm, attention, norm, feed-forward, each with its residual. Read next: `mla`, `moe`."""

from __future__ import annotations

from torch import Tensor, nn

from glm5.kernels.visibility import Visibility
from glm5.model.cache import Keys
from glm5.model.config import ModelConfig
from glm5.model.gqa import GQA
from glm5.model.layers import RMSNorm, SwiGLU
from glm5.model.mla import MLA
from glm5.model.moe import MoE
from glm5.model.trace import Aux, Trace


class Block(nn.Module):
    """A trunk layer; dense or MoE by the configuration."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = MLA(config, layer) if config.attention == "mla" else GQA(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MoE(config) if config.is_moe(layer) else SwiGLU(config.hidden_size, config.intermediate_size)

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
        """x + attention, then + feed-forward: [B, T, D]. Arguments as `MLA.forward`."""
        x_BTD, normed = self.input_layernorm.beside(x_BTD)
        attended = self.self_attn(
            normed,
            rope,
            visible,
            sparse=sparse,
            cache=cache,
            slot_BT=slot_BT,
            trace=trace,
            aux=aux,
        )
        x_BTD, y = self.post_attention_layernorm.add(x_BTD, attended)
        return x_BTD + (self.mlp(y, trace=trace, aux=aux) if isinstance(self.mlp, MoE) else self.mlp(y))
