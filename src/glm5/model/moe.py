"""The MoE feed-forward: an fp32 router, fused expert weights, one shared expert that always runs.

Source: report section 2.1; the router's bias and sequence balance from DeepSeek-V3. Read next: `kernels.moe`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glm5.kernels.balance import loads_and_balance
from glm5.kernels.dispatch import pick
from glm5.kernels.moe import expert_loads, grouped_swiglu, route
from glm5.model.config import ModelConfig
from glm5.model.layers import SwiGLU
from glm5.model.trace import Aux, Trace


class Router(nn.Module):
    """Scores and selection. Weight and bias stay fp32 whatever the model is cast to: a bf16 bias near 7 with a
    spread of 0.1 would collapse to a handful of values and misroute most tokens."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size, dtype=torch.float32))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.n_routed_experts, dtype=torch.float32))
        self.e_score_correction_bias: Tensor
        self.settings = dict(
            top_k=config.num_experts_per_tok,
            normalise=config.norm_topk_prob,
            scaling=config.routed_scaling_factor,
            n_group=config.n_group,
            topk_group=config.topk_group,
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        weight, bias = self.weight.data, self.e_score_correction_bias
        super()._apply(fn, recurse)
        if self.weight.dtype != torch.float32:
            self.weight.data = weight.to(self.weight.device)
        if self.e_score_correction_bias.dtype != torch.float32:
            self.e_score_correction_bias = bias.to(self.e_score_correction_bias.device)
        return self

    def forward(self, x_ND: Tensor, given_NM: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """logits_NE, expert_NM, weight_NM, score_NE, all but the ids fp32. given_NM: as in `kernels.moe.route`."""
        settings: dict[str, Any] = self.settings
        trained = torch.is_grad_enabled() and (x_ND.requires_grad or self.weight.requires_grad)
        operator = "train_router" if trained else "router"
        fast = pick(operator, x_ND, self.weight) if settings["n_group"] == 1 and given_NM is None else None
        if fast is not None and trained:
            how = tuple(settings[k] for k in ("top_k", "normalise", "scaling"))
            trained_by: tuple[Tensor, Tensor, Tensor, Tensor] = fast(
                x_ND, self.weight, self.e_score_correction_bias, *how
            )
            return trained_by
        if fast is not None:
            some = {k: settings[k] for k in ("top_k", "normalise", "scaling")}
            routed: tuple[Tensor, Tensor, Tensor, Tensor] = fast(
                x_ND, self.weight, self.e_score_correction_bias, **some
            )
            return routed
        logits = F.linear(x_ND.float(), self.weight)
        return logits, *route(logits, self.e_score_correction_bias, **settings, given_NM=given_NM)


class Experts(nn.Module):
    """Routed experts, fused: gate_up_proj [E, 2F, D] (gate rows, then up rows) and down_proj [E, D, F].

    `through` is None, or gives what is read in place of a weight (`glm5.quant`).
    """

    through: Callable[[Tensor], Tensor] | None = None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        experts, width, inner = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * inner, width))
        self.down_proj = nn.Parameter(torch.empty(experts, width, inner))

    def held(self) -> tuple[Tensor, Tensor]:
        """The weights that are here."""
        return self.gate_up_proj, self.down_proj

    def read(self) -> tuple[Tensor, Tensor]:
        """What products read in their place."""
        gate_up, down = self.held()
        return (gate_up, down) if self.through is None else (self.through(gate_up), self.through(down))

    def forward(self, x_ND: Tensor, expert_NM: Tensor, weight_NM: Tensor) -> Tensor:
        """Each token's weighted sum over its experts, [N, D]."""
        return grouped_swiglu(x_ND, *self.read(), expert_NM, weight_NM)


class MoE(nn.Module):
    """Routed experts plus the shared expert."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config)
        shared = config.moe_intermediate_size * config.n_shared_experts
        self.shared_experts = SwiGLU(config.hidden_size, shared) if shared else None

    def forward(self, x_BTD: Tensor, *, trace: Trace | None = None, aux: Aux | None = None) -> Tensor:
        x_ND = x_BTD.flatten(0, 1)
        if trace is None and aux is None:
            y = self._at_once(x_ND)
            if y is not None:
                return y.view_as(x_BTD)
        given = None if aux is None or aux.experts is None else aux.experts[len(aux.loads)].flatten(0, 1)
        logits, expert, weight, score = self.gate(x_ND, given)
        if trace is not None:
            trace.router.append((logits, weight, expert))
        if aux is not None:
            batch, tokens = x_BTD.shape[:2]
            valid = None if aux.valid is None else aux.valid[:, :tokens]
            expert_BTM, score_BTE = expert.view(batch, tokens, -1), score.view(batch, tokens, -1)
            if aux.balance:
                loads, balance = loads_and_balance(score_BTE, expert_BTM, valid, aux.total, aux.sequences)
                aux.balance_losses.append(balance)
            else:
                loads = expert_loads(expert_BTM, score.shape[-1], valid)
            aux.loads.append(loads)
        routed, shared = self._both(x_ND, expert, weight)
        y = routed.view_as(x_BTD)
        return y if shared is None else y + shared.view_as(x_BTD)

    def _both(self, x_ND: Tensor, expert_NM: Tensor, weight_NM: Tensor) -> tuple[Tensor, Tensor | None]:
        """What the routed experts and the shared one say, each [N, D]."""
        routed = self.experts(x_ND, expert_NM, weight_NM)
        return routed, None if self.shared_experts is None else self.shared_experts(x_ND)

    def _at_once(self, x_ND: Tensor) -> Tensor | None:
        """The whole by one call, where there is one for these tokens."""
        gate, experts, shared = self.gate, self.experts, self.shared_experts
        if experts.through is not None:
            return None
        weights = () if shared is None else (shared.gate_proj.weight, shared.up_proj.weight, shared.down_proj.weight)
        routed = (experts.gate_up_proj, experts.down_proj)
        if gate.settings["n_group"] != 1:
            return None
        operator = "moe_row" if x_ND.is_cuda and x_ND.shape[0] == 1 else "moe"
        fast = pick(operator, x_ND, gate.weight, *routed, *weights)
        if fast is None:
            return None
        settings: dict[str, Any] = {k: gate.settings[k] for k in ("top_k", "normalise", "scaling")}
        y: Tensor = fast(x_ND, (gate.weight, gate.e_score_correction_bias), routed, weights or None, **settings)
        return y
