"""Multi-head latent attention with DSA: one 512-wide latent and one 64-wide rotary key per position.

Expanded form: the latent is turned into 64 heads of keys and values (training, dense prefill). Absorbed form: W_UK
is folded into the query and W_UV into the output, and all heads read the latent row itself (decode, sparse prefill);
no expanded key is ever cached. Both give the same numbers; `_prefers_absorbed` picks by counted work. Source: report
section 2.1. Read next: `cache`, `moe`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glm5.kernels import latent_rows as packed_rows
from glm5.kernels.attention import attention_logit_max, dense_attention, sparse_attention, sparse_attention_lse
from glm5.kernels.basic import Joined, keys_and_values, latent_rows, lay_side_by_side, rope_heads
from glm5.kernels.dispatch import pick, trains_absorbed
from glm5.kernels.indexer import index_scores, index_select
from glm5.kernels.indexer_fp8 import IndexKeys, index_select_fp8, round_queries
from glm5.kernels.indexer_loss import indexer_loss
from glm5.kernels.pages import Pages
from glm5.kernels.visibility import Visibility
from glm5.model.cache import Keys, Part, SharedRows
from glm5.model.config import ModelConfig
from glm5.model.indexer import Indexer
from glm5.model.layers import Linear, RMSNorm
from glm5.model.packed import unpack_rows
from glm5.model.paged import PagedBatch
from glm5.model.trace import Aux, Trace

# One multiply-add of gathered single-query attention costs about so many of a masked matrix product's, since the gather
# moves a row of memory for every few products. Measured on one CPU thread with `nano`: 0.8 to 1.5 choose alike, and
# prefill of 1,024 tokens takes 0.115 s, against 0.151 s with 6.
GATHER_COST = 1.5


class MLA(nn.Module):
    """One attention layer. Parameter names and shapes are the public checkpoint's."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.heads = config.num_attention_heads
        self.latent, self.rotary = config.kv_lora_rank, config.qk_rope_head_dim
        self.nope, self.value = config.qk_nope_head_dim, config.v_head_dim
        self.scale = config.qk_head_dim**-0.5
        bias = config.attention_bias
        self.q_a_proj = Linear(config.hidden_size, config.q_lora_rank, bias=bias)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, config.latent_norm_eps)
        self.q_b_proj = Linear(config.q_lora_rank, self.heads * config.qk_head_dim, bias=False)
        self.kv_a_proj_with_mqa = Linear(config.hidden_size, config.latent_dim, bias=bias)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, config.latent_norm_eps)
        self.kv_b_proj = Linear(config.kv_lora_rank, self.heads * (self.nope + self.value), bias=False)
        self.o_proj = Linear(self.heads * self.value, config.hidden_size, bias=bias)
        self.indexer = Indexer(config)
        self._down, self._up = Joined(), Joined()

    def forget_joined(self) -> None:
        """See `kernels.basic.Joined`."""
        self._down.forget()
        self._up.forget()

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
        """Attend and project back to [B, T, D].

        Args:
            rope: rotations [B, T, R / 2]. visible: each query's key slots, in cache slots where there is a cache.
            sparse: restrict to the indexer's top-k; False attends to everything visible (before DSA adaptation).
            slot_BT: where new tokens go in the cache, when they don't follow `visible.offset` in every row.
        """
        into = cache.pools(self.layer) if isinstance(cache, PagedBatch) else None
        few = None if torch.is_grad_enabled() or self.q_a_proj.bias is not None else self._few(x_BTD, rope, into)
        index_q: tuple[Tensor, Tensor] | None
        if few is not None:
            q_full, rows, index_keys, index_q = few
        else:
            self.forget_joined()
            q_latent = self.q_a_layernorm(self.q_a_proj(x_BTD))
            q_full = rope_heads(self.q_b_proj(q_latent).unflatten(-1, (self.heads, -1)), rope)
            rows = self._rows(self.kv_a_proj_with_mqa(x_BTD), rope)
            indexed = sparse or cache is not None or trace is not None or (aux is not None and aux.indexer)
            index_keys = self.indexer.keys(x_BTD, rope) if indexed else rows
            index_q = None
        if isinstance(cache, SharedRows) and not sparse and not _measured(aux) and cache.by_heads(self.heads):
            return self.o_proj(cache.attend(q_full, *self._expand(rows), self.scale).flatten(-2))
        if cache is None:
            parts = [Part(visible, rows, index_keys)]
        elif isinstance(cache, PagedBatch) and into is not None and rows is into[1]:  # written already
            parts = cache.parts(self.layer)
        else:
            parts = cache.store(self.layer, slot_BT, visible, rows, index_keys)

        searched = any(p.visible.slots > self.indexer.topk for p in parts) or trace is not None
        if index_q is None and ((sparse and searched) or (aux is not None and aux.indexer)):
            index_q = self.indexer.queries(x_BTD, q_latent, rope)
        if parts[0].span is None:
            out = self._attend(parts[0], q_full, index_q, sparse, trace, aux)
        else:
            outs = []
            for part in parts:
                index = None if index_q is None else (part.of(index_q[0]), part.of(index_q[1]))
                mixed = self._attend(part, part.of(q_full), index, sparse, trace, aux)
                outs.append(mixed.flatten(0, 1))
            out = (outs[0] if len(outs) == 1 else torch.cat(outs))[None]
        return self.o_proj(out.flatten(-2))

    def _attend(
        self,
        part: Part,
        q_full: Tensor,
        index_q: tuple[Tensor, Tensor] | None,
        sparse: bool,
        trace: Trace | None,
        aux: Aux | None,
    ) -> Tensor:
        """Every head's mixture of values, [B, T, H, V]."""
        visible, rows = part.visible, part.rows
        q_nope, q_rope = q_full.split_with_sizes((self.nope, self.rotary), -1)
        selected = None
        if sparse and index_q is not None and (visible.slots > self.indexer.topk or trace is not None):
            selected = self._select(index_q, part, trace)
        if part.by_row and selected is None:
            selected = part.visible.positions_BTK
        measured = _measured(aux)
        trained = measured or torch.is_grad_enabled()
        absorbed = part.by_row or self._prefers_absorbed(q_nope.shape[1], visible, selected)
        if trained:
            absorbed = absorbed and selected is not None and trains_absorbed(rows, self.latent)
        pages = part.pages
        if pages is None:
            rows = rows[:, : visible.slots]
        elif rows.dtype == torch.uint8 and absorbed and selected is not None and self._reads_packed:
            return self._absorbed_fp8(q_nope, q_rope, rows, selected, pages)
        elif rows.dtype == torch.uint8:
            rows, pages = unpack_rows(pages.gather(rows, visible), self.latent).to(q_nope.dtype), None
        elif selected is None or trained or not absorbed:  # only the selected rows can be read where they lie
            rows = pages.gather(rows, visible)
        if absorbed and trained and selected is not None:
            q_folded, keys, values, w_uv = self._fold(q_nope, q_rope, rows)
            mixed, lse = sparse_attention_lse(q_folded, keys, values, selected, visible, self.scale)
            if aux is not None and measured:
                self._observe(aux, part, index_q, q_folded, keys, selected, lse)
            return _by_head(mixed, w_uv)
        if absorbed:
            return self._absorbed(q_nope, q_rope, rows, visible, selected, pages)
        keys, values = self._expand(rows)
        if selected is None:
            out = dense_attention(q_full, keys, values, visible, self.scale)
        else:
            out = sparse_attention(q_full, keys, values, selected, visible, self.scale)
        if aux is not None and measured:
            self._observe(aux, part, index_q, q_full, keys, selected)
        return out

    def _observe(
        self,
        aux: Aux,
        part: Part,
        index_q: tuple[Tensor, Tensor] | None,
        q_BTHX: Tensor,
        keys_BSHX: Tensor,
        selected: Tensor | None,
        lse_BTH: Tensor | None = None,
    ) -> None:
        """Fill in what `aux` asks of one call's attention: logit maxima, the indexer's loss."""
        visible = part.visible
        if aux.logits:
            aux.logit_maxima.append(attention_logit_max(q_BTHX, keys_BSHX, visible, selected, self.scale))
        if aux.indexer:
            assert index_q is not None
            assert isinstance(part.index_keys, Tensor)
            index = (*index_q, part.index_keys)
            aux.indexer_losses.append(
                indexer_loss(*index, q_BTHX, keys_BSHX, visible, selected, self.scale, self.indexer.topk, lse_BTH)
            )

    def _rows(self, kv_BTX: Tensor, rope: Tensor) -> Tensor:
        """What the cache holds of each position: its normed latent and its rotated key, [B, T, L + R]."""
        return latent_rows(kv_BTX, self.kv_a_layernorm.weight, rope, self.kv_a_layernorm.eps)

    def _few(
        self, x_BTD: Tensor, rope: Tensor, into: tuple[Tensor, Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]] | None:
        """What `forward` makes of x up to attention: by one operator, or of a few tokens by two joined products. An
        operator that can writes rows and keys into the pools, and these are returned in their place."""
        indexer, norm, k_norm = self.indexer, self.kv_a_layernorm, self.indexer.k_norm
        query = (self.q_a_proj.weight, self.q_a_layernorm.weight, self.q_b_proj.weight)
        latent = (self.kv_a_proj_with_mqa.weight, norm.weight)
        index = (indexer.wq_b.weight, indexer.wk.weight, k_norm.weight, k_norm.bias, indexer.weights_proj.weight)
        heads = (self.heads, indexer.heads)
        placed = None if into is None else pick("project_into", x_BTD, *query, *latent, *index)
        whole = placed or pick("project", x_BTD, *query, *latent, *index)
        if whole is not None:
            eps = (self.q_a_layernorm.eps, norm.eps, k_norm.eps)
            options = {} if placed is None else {"into": into}
            q, rows, keys, *index_q = whole(x_BTD, rope, query, latent, index, heads, eps, **options)
            return q, rows, keys, tuple(index_q)
        if not Joined.pays(x_BTD):
            return None
        downs, ups = self._joinable()
        down = F.linear(x_BTD, self._down.of(*downs))
        q_a, *parts = down.split_with_sizes([w.shape[0] for w in downs], -1)
        up = F.linear(self.q_a_layernorm(q_a), self._up.of(*ups))
        (q, index_up), (kv, index_k, index_w) = up.split_with_sizes([w.shape[0] for w in ups], -1), parts
        keys, queries = indexer.turned_keys(index_k, rope), indexer.turned_queries(index_up, index_w, rope)
        return rope_heads(q.unflatten(-1, (self.heads, -1)), rope), self._rows(kv, rope), keys, queries

    def _joinable(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The matrices that multiply x, and those that multiply the query latent."""
        indexer = self.indexer
        downs = (self.q_a_proj, self.kv_a_proj_with_mqa, indexer.wk, indexer.weights_proj)
        return tuple(p.weight for p in downs), (self.q_b_proj.weight, indexer.wq_b.weight)

    def lay_out(self) -> None:
        """See `GLM5.lay_out`."""
        for weights in self._joinable():
            lay_side_by_side(*weights)

    def _select(self, index_q: tuple[Tensor, Tensor], part: Part, trace: Trace | None) -> Tensor | None:
        visible = part.visible
        with torch.no_grad():
            if trace is not None and trace.scores:
                assert isinstance(part.index_keys, Tensor), "scores are traced of keys that are not rounded"
                trace.index_scores.append(index_scores(*index_q, part.index_keys, visible))
            if trace is not None and trace.replay is not None:
                selected = trace.replay[len(trace.selected)]
            elif isinstance(part.index_keys, IndexKeys):
                rounded = round_queries(*index_q)
                selected = index_select_fp8(*rounded, part.index_keys, visible, self.indexer.topk, part.pages)
            else:
                k, ties = self.indexer.topk, self.indexer.ties
                selected = index_select(*index_q, part.index_keys, visible, k, part.pages, ties)
            if trace is not None:
                trace.selected.append(selected)
        replayed = trace is not None and trace.replay is not None
        return selected if visible.slots > self.indexer.topk or replayed else None

    def _expand(self, rows_BSX: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [B, S, H, N + R] and values [B, S, H, V] from cached rows."""
        latent, k_rope = rows_BSX.split((self.latent, self.rotary), dim=-1)
        return keys_and_values(self.kv_b_proj(latent).unflatten(-1, (self.heads, -1)), k_rope, self.nope)

    def _absorbed(
        self,
        q_nope: Tensor,
        q_rope: Tensor,
        rows: Tensor,
        visible: Visibility,
        selected: Tensor | None,
        pages: Pages | None,
    ) -> Tensor:
        up = self.kv_b_proj.weight.view(self.heads, self.nope + self.value, self.latent)
        fast = pick("absorbed_attention", q_nope, rows, up) if selected is not None else None
        if fast is not None:
            out: Tensor = fast(q_nope, q_rope, up, rows, selected, self.scale, pages)
            return out
        q_full, keys, values, w_uv = self._fold(q_nope, q_rope, rows)
        if selected is None:
            mixed = dense_attention(q_full, keys, values, visible, self.scale)
        else:
            mixed = sparse_attention(q_full, keys, values, selected, visible, self.scale, pages)
        return _by_head(mixed, w_uv)

    @property
    def _reads_packed(self) -> bool:
        """Whether there is an operator for packed rows of these widths, which reads them where they lie."""
        return (self.latent, self.rotary) == (packed_rows.LATENT, packed_rows.ROTARY)

    def _absorbed_fp8(self, q_nope: Tensor, q_rope: Tensor, rows: Tensor, selected: Tensor, pages: Pages) -> Tensor:
        """`_absorbed` of packed rows."""
        up = self.kv_b_proj.weight.view(self.heads, self.nope + self.value, self.latent)
        q_full = torch.cat((_by_head(q_nope, up[:, : self.nope]), q_rope), dim=-1)
        mixed, _ = packed_rows.sparse_attention_fp8(q_full, rows, selected, self.scale, pages)
        return _by_head(mixed, up[:, self.nope :].transpose(1, 2))

    def _fold(self, q_nope: Tensor, q_rope: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries [B, T, H, L + R] that meet the rows themselves, keys and values [B, S, 1, ...], W_UV [H, L, V]."""
        up = self.kv_b_proj.weight.view(self.heads, self.nope + self.value, self.latent)
        keys = rows.unsqueeze(2)
        q_full = torch.cat((_by_head(q_nope, up[:, : self.nope]), q_rope), dim=-1)
        return q_full, keys, keys[..., : self.latent], up[:, self.nope :].transpose(1, 2)

    def _prefers_absorbed(self, queries: int, visible: Visibility, selected: Tensor | None) -> bool:
        """Whether the absorbed form does less counted work for this call (multiply-adds per head)."""
        if selected is not None and self.o_proj.weight.is_cuda:
            return True  # the kernels gather as fast as they multiply, and masked products have none
        slots, wide, absorbed = visible.slots, self.nope + self.rotary + self.value, 2 * self.latent + self.rotary
        expand = slots * self.latent * (self.nope + self.value)
        fold = queries * self.latent * (self.nope + self.value)
        seen = slots - queries / 2  # keys per query, on average, of the masked products
        if selected is None:
            return fold + queries * seen * absorbed < expand + queries * seen * wide
        return fold + queries * selected.shape[-1] * absorbed * GATHER_COST < expand + queries * seen * wide


def _measured(aux: Aux | None) -> bool:
    """Whether queries and all keys are wanted, gradients or not."""
    return aux is not None and (aux.indexer or aux.logits)


def _by_head(x_BTHX: Tensor, weight_HXY: Tensor) -> Tensor:
    """Multiply each head's vectors by its own matrix: [B, T, H, Y]."""
    batch, queries, heads, width = x_BTHX.shape
    rows_HNX = x_BTHX.reshape(batch * queries, heads, width).transpose(0, 1)
    return torch.bmm(rows_HNX, weight_HXY).transpose(0, 1).view(batch, queries, heads, -1)
