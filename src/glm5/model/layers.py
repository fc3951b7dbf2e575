"""The small modules: norms and the dense SwiGLU. Parameter names are the public checkpoint's.

Read next: `indexer`, `mla`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glm5.kernels import basic
from glm5.kernels.dispatch import pick


class RMSNorm(nn.Module):
    """RMSNorm with gain over the last axis; see `kernels.basic.rms_norm` for its precision."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return basic.rms_norm(x, self.weight, self.eps)

    def beside(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x itself, and its norm."""
        return basic.rms_norm_beside(x, self.weight, self.eps)

    def add(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """x + y, and its norm."""
        return basic.add_rms_norm(x, y, self.weight, self.eps)


class LayerNorm(nn.Module):
    """LayerNorm with gain and bias: the indexer's key norm."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return basic.layer_norm(x, self.weight, self.bias, self.eps)


class Linear(nn.Linear):
    """A Linear whose weights are left to `glm5.GLM5.init_weights`: building draws from no random state."""

    def reset_parameters(self) -> None:
        pass


class Embedding(nn.Embedding):
    """An Embedding whose weights are left to `glm5.GLM5.init_weights`."""

    def reset_parameters(self) -> None:
        pass


class SwiGLU(nn.Module):
    """down(silu(gate x) * up x): the dense feed-forward, and the shared expert."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = Linear(width, inner, bias=False)
        self.up_proj = Linear(width, inner, bias=False)
        self.down_proj = Linear(inner, width, bias=False)
        self._joined = basic.Joined()

    def forget_joined(self) -> None:
        """See `kernels.basic.Joined`."""
        self._joined.forget()

    def lay_out(self) -> None:
        """See `GLM5.lay_out`."""
        basic.lay_side_by_side(self.gate_proj.weight, self.up_proj.weight)

    def forward(self, x: Tensor) -> Tensor:
        fast = pick("swiglu", x, self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight)
        if fast is not None:
            out: Tensor = fast(x, self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight)
            return out
        if basic.Joined.pays(x):
            both = F.linear(x, self._joined.of(self.gate_proj.weight, self.up_proj.weight))
            return self.down_proj(basic.swiglu(*both.chunk(2, dim=-1)))
        self._joined.forget()
        return self.down_proj(basic.swiglu(self.gate_proj(x), self.up_proj(x)))
