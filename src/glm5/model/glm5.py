"""GLM-5 itself: embedding, blocks, norm, head, and the shared MTP block. The walk of a forward pass starts here.

    ids -> embed -> [block: norm, MLA + indexer, norm, MLP or MoE] x N -> norm -> head -> logits
                                                                       \\-> MTP block (depths 1, 2, 3) -> norm -> head

The module tree's names are the public checkpoint's, so that a state dict needs no renaming but the experts' fusion
(see `weights`). Source: report section 2.1. Read next: `block`, `mla`, `mtp`; then `weights` and `generate`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from glm5.kernels.basic import JOIN_UP_TO, rotations
from glm5.kernels.visibility import Visibility, inside
from glm5.model.block import Block
from glm5.model.cache import Cache, SharedRows, cache_widths
from glm5.model.config import ModelConfig
from glm5.model.indexer import Indexer
from glm5.model.layers import Embedding, Linear, RMSNorm, SwiGLU
from glm5.model.mla import MLA
from glm5.model.mtp import MTPBlock
from glm5.model.paged import PagedBatch
from glm5.model.trace import Aux, Trace
from glm5.utils.errors import ConfigError, UserError


@dataclass(frozen=True)
class Output:
    """logits [B, T or logits_to_keep, vocabulary] in the model's dtype; hidden [B, T, D] after the final norm."""

    logits: Tensor
    hidden: Tensor


class Trunk(nn.Module):
    """Everything under `model.` in a checkpoint. The MTP block is the last entry of `layers`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        blocks: list[Block] = [Block(config, i) for i in range(config.num_hidden_layers)]
        blocks += [MTPBlock(config, config.num_hidden_layers) for _ in range(config.num_nextn_predict_layers)]
        self.layers = nn.ModuleList(blocks)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class GLM5(nn.Module):
    """The model.

    Args:
        config: its shape.
        seed: of the initial weights; None leaves them uninitialised, for a loader to fill.
    """

    def __init__(self, config: ModelConfig, *, seed: int | None = 0) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        if seed is not None and self.device.type != "meta":
            self.init_weights(seed)

    # ------------------------------------------------------------------ what it is
    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_head.weight.dtype

    @property
    def blocks(self) -> list[Block]:
        """The trunk's blocks, without MTP."""
        return list(self.model.layers)[: self.config.num_hidden_layers]  # type: ignore[return-value]

    @property
    def mtp(self) -> MTPBlock:
        """The shared MTP block.

        Raises:
            UserError: the configuration has none.
        """
        if self.config.num_nextn_predict_layers == 0:
            raise UserError(
                "num_nextn_predict_layers=0: this model has no MTP block", "Use depth 0, or a config with one"
            )
        return self.model.layers[-1]  # type: ignore[return-value]

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Normal with std `initializer_range` for matrices, one for gains, zero for biases, drawn in name order."""
        generator = torch.Generator(device=self.device).manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, self.config.initializer_range, generator=generator)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)

    def new_cache(self, batch: int = 1, *, capacity: int = 0) -> Cache:
        """An empty cache on the model's device and in its dtype."""
        return Cache(self.config, batch, capacity=capacity, device=self.device, dtype=self.dtype)

    # ------------------------------------------------------------------ forward
    def forward(
        self,
        input_ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        documents: Tensor | None = None,
        cache: Cache | None = None,
        sparse: bool | None = None,
        logits_to_keep: int = 0,
        trace: Trace | None = None,
        aux: Aux | None = None,
    ) -> Output:
        """Logits of the next token at every position.

        Args:
            input_ids: int64 [B, T], the new tokens.
            attention_mask: [B, T], or [B, cached + T] of which the last T columns count: 1 for tokens, 0 for
                padding, which may stand on the left or the right. Outputs at padding are finite and meaningless.
            documents: [B, T], for packed training rows: the slot where each token's document begins; past its own
                slot for padding.
            cache: keys of earlier tokens; extended by this call.
            sparse: DSA's top-k selection; False attends to everything; None is what the model was trained for
                (`ModelConfig.sparse`).
            logits_to_keep: only the last so many positions' logits; 0 is all.
            trace, aux: see `glm5.model.trace`.

        Raises:
            UserError: ids outside the vocabulary, a context past the maximum, a mask with holes, documents that are no
                slots where one begins, or a cache of another model.
        """
        if logits_to_keep < 0:
            raise ConfigError("logits_to_keep", logits_to_keep, "must be at least 0, which keeps all")
        hidden = self.hidden(
            input_ids,
            attention_mask=attention_mask,
            documents=documents,
            cache=cache,
            sparse=sparse,
            trace=trace,
            aux=aux,
        )
        return Output(self.lm_head(hidden[:, -logits_to_keep:]), hidden)

    def hidden(
        self,
        input_ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        documents: Tensor | None = None,
        cache: Cache | PagedBatch | SharedRows | None = None,
        sparse: bool | None = None,
        trace: Trace | None = None,
        aux: Aux | None = None,
        embedded: Tensor | None = None,
        visible: Visibility | None = None,
        checked: bool = False,
    ) -> Tensor:
        """The trunk's hidden states after the final norm, [B, T, D]: what the head and MTP read.

        With a `PagedBatch` input_ids are its flat batch, [1, N], and its owner's to check: a look at them would wait
        for the device. Whoever changes weights then calls `forget_joined`.
        With `SharedRows` they are the positions held here.
        `embedded` [B, T, D] enters the first block in place of the ids' embeddings: a pipeline stage's input.
        `visible`, in place of `documents`, says what each position sees, its own slot the last.
        `checked`: int64 ids and documents are known to be right, as a loader's are; a look would wait for the device.
        """
        if not (checked or isinstance(cache, PagedBatch)):
            input_ids = self._checked_ids(input_ids)
            if documents is not None:
                _check_documents(documents, input_ids)
        sparse = self.config.sparse if sparse is None else sparse
        if isinstance(cache, PagedBatch):
            place = Placement(cache.visible, cache.position_1N, None, None, None)
        elif isinstance(cache, SharedRows):
            place = Placement(cache.visible, cache.position_BT, None, None, None)
        else:
            begins = cache is None or cache.uniform == 0
            if input_ids.numel() <= JOIN_UP_TO and begins and not torch.is_grad_enabled():
                self.forget_joined()
            if visible is not None:
                place = Placement(visible, (visible.last_BT - visible.first_BT).clamp(min=0), None, None, None)
            else:
                place = self._place(input_ids, attention_mask, documents, cache)
        x = self.model.embed_tokens(input_ids) if embedded is None else embedded
        if trace is not None:
            trace.hidden.append(x)
        rope = self._rope(place.position_BT)
        for i, block in enumerate(self.blocks):
            x = block(x, rope, place.visible, sparse=sparse, cache=cache, slot_BT=place.slot_BT, trace=trace, aux=aux)
            if trace is not None and i + 1 < len(self.blocks):
                trace.hidden.append(x)
        x = self.model.norm(x)
        if trace is not None:
            trace.hidden.append(x)
        if isinstance(cache, PagedBatch):
            cache.keep_hidden(x)
        elif isinstance(cache, Cache):
            place.commit(cache)
        return x

    def mtp_hidden(
        self,
        hidden_BTD: Tensor,
        ids_BS: Tensor,
        depths: int,
        *,
        documents: Tensor | None = None,
        cache: SharedRows | None = None,
        sparse: bool | None = None,
        trace: Trace | None = None,
        aux: Aux | None = None,
        visible: Sequence[Visibility] | None = None,
        checked: bool = False,
    ) -> Iterator[Tensor]:
        """MTP in its training form: for d = 1 … depths, hidden states that predict token i + d + 1.

        Args:
            hidden_BTD: the trunk's `hidden` of ids_BS[:, :T].
            ids_BS: the same tokens, and as many after them as the row has: depth d runs at the min(T, S - d)
                positions that have a token d ahead.
            documents: as in `forward`; a position whose prediction would cross a document must get loss weight 0.
                May be [B, S]: then positions whose token d ahead lies in another document see nothing, as padding, and
                the indexer's loss does not count them.
            cache: hidden_BTD are the positions of the rows that are held here, while ids_BS are the whole rows, with
                `depths` tokens after them.
            visible: in place of `documents`, of each depth. checked: see `hidden`.
        """
        batch, tokens = hidden_BTD.shape[:2]
        ids_BS = ids_BS if checked else self._checked_ids(ids_BS)
        sparse = self.config.sparse if sparse is None else sparse
        if cache is not None:
            for depth in range(1, depths + 1):
                there = cache.ahead(depth)
                embedded = self.model.embed_tokens(ids_BS[:, there.slot_T + depth])
                options: dict[str, Any] = dict(sparse=sparse, cache=there, trace=trace, aux=aux)
                rope = self._rope(there.position_BT)
                hidden_BTD = self.mtp.predict(embedded, hidden_BTD, rope, there.visible, **options)
                yield hidden_BTD
            return
        embedded = self.model.embed_tokens(ids_BS)
        for depth in range(1, depths + 1):
            n = min(tokens, ids_BS.shape[1] - depth)
            if n < 1:
                return
            if visible is not None:
                seen = visible[depth - 1]
            elif documents is None:
                seen = Visibility.causal(batch, n, device=self.device)
            elif documents.shape[1] == ids_BS.shape[1]:
                seen = Visibility.documents(inside(documents, depth, n))
            else:
                seen = Visibility.documents(documents[:, :n])
            hidden_BTD = self.mtp.predict(
                embedded[:, depth : depth + n],
                hidden_BTD[:, :n],
                self._rope((seen.last_BT - seen.first_BT).clamp(min=0)),
                seen,
                sparse=sparse,
                trace=trace,
                aux=aux,
            )
            yield hidden_BTD

    def draft_hidden(
        self,
        hidden_BTD: Tensor,
        next_ids: Tensor,
        cache: Cache | PagedBatch,
        start: int = 0,
        *,
        first: int = 0,
        sparse: bool | None = None,
    ) -> Tensor:
        """MTP in its serving form: T steps of the block at slots start … start + T - 1 of the cache.

        Args:
            hidden_BTD: trunk hidden of those positions, or the block's own output when recycling.
            next_ids: [B, T], the token after each position.
            cache: holds the block's keys in its last layer; its length is not changed.
            first: the first slot that the block has keys of, where it did not follow the trunk from the beginning.
                A `PagedBatch` knows both of itself: row by row, slot i reads the trunk's slot i - 1 and its own token.
        """
        sparse = self.config.sparse if sparse is None else sparse
        embedded = self.model.embed_tokens(next_ids)
        if isinstance(cache, PagedBatch):
            rope = self._rope(cache.position_1N)
            return self.mtp.predict(embedded, hidden_BTD, rope, cache.visible, sparse=sparse, cache=cache)
        batch, tokens = next_ids.shape
        cache.reserve(start + tokens)
        visible = Visibility.causal(batch, tokens, start, device=self.device)
        slot_BT = visible.last_BT if first > 0 else None
        if first > 0:
            visible = Visibility(torch.full_like(visible.last_BT, first), visible.last_BT, visible.slots)
        rope = self._rope(visible.last_BT)
        return self.mtp.predict(embedded, hidden_BTD, rope, visible, sparse=sparse, cache=cache, slot_BT=slot_BT)

    def generate(self, input_ids: Tensor | Sequence[int], **options: Any) -> Iterator[int]:
        """Stream new token ids of one sequence; see `glm5.model.generate.generate` for the options."""
        from glm5.model.generate import generate

        return generate(self, input_ids, **options)

    # ------------------------------------------------------------------ where tokens go
    def _rope(self, position_BT: Tensor) -> Tensor:
        return rotations(position_BT, self.config.qk_rope_head_dim, self.config.rope_theta)

    def forget_joined(self) -> None:
        """Take up weights that were changed where torch cannot see it; see `kernels.basic.Joined`."""
        for module in self.modules():
            if isinstance(module, MLA | SwiGLU):
                module.forget_joined()

    def race(self, seed: int | None) -> None:
        """Let positions whose index scores tie at the k-th place be taken at random, as kernels do whose threads race
        for it, from this seed on; None is the stable rule again. It is there to show what it breaks."""
        for module in self.modules():
            if isinstance(module, Indexer):
                module.ties = None if seed is None else torch.Generator().manual_seed(seed)

    def lay_out(self) -> None:
        """Move matrices that multiply the same input side by side in memory, for inference on a GPU: there they then
        multiply as one. Changes no value and no name; moving or casting the model undoes it."""
        for module in self.modules():
            if isinstance(module, MLA | SwiGLU):
                module.lay_out()

    def _checked_ids(self, ids: Tensor) -> Tensor:
        """The ids as a type that an embedding reads."""
        _check_integers("input_ids", ids)
        if ids.ndim != 2 or 0 in ids.shape:
            raise UserError(f"input_ids: shape {tuple(ids.shape)}", "Give [batch, tokens], both at least 1")
        if ids.device != self.device and (ids.is_meta or ids.device.type == "cpu"):
            raise UserError(f"input_ids: on {ids.device}, the model on {self.device}", "Move them to model.device")
        low, high = ids.aminmax()
        if low < 0 or high >= self.config.vocab_size:
            bad = int(low) if low < 0 else int(high)
            raise UserError(
                f"input_ids: token id {bad} lies outside the vocabulary [0, {self.config.vocab_size})",
                "Encode the text with this model's own tokenizer",
            )
        return ids if ids.dtype in (torch.int32, torch.int64) else ids.long()

    def _place(
        self, ids: Tensor, attention_mask: Tensor | None, documents: Tensor | None, cache: Cache | None
    ) -> Placement:
        batch, tokens = ids.shape
        longest = 0 if cache is None else (cache.uniform if cache.uniform is not None else int(cache.length_B.max()))
        slots = longest + tokens
        if slots > self.config.max_position_embeddings:
            raise UserError(
                f"context of {slots} tokens exceeds max_position_embeddings={self.config.max_position_embeddings}",
                "Shorten the input or crop the cache",
            )
        if cache is not None:
            if cache.batch != batch:
                raise UserError(f"input_ids: {batch} rows for a cache of {cache.batch}", "Give one row of ids to each")
            self._check_cache(cache)
            cache.reserve(slots)
        if documents is not None:
            if cache is not None or attention_mask is not None:
                raise UserError("documents: cannot be combined with a cache or an attention_mask", "Pass one of them")
            visible = Visibility.documents(documents)
            position_BT = (visible.last_BT - visible.first_BT).clamp(min=0)
            return Placement(visible, position_BT, None, None, None)
        if attention_mask is not None:
            if not isinstance(attention_mask, Tensor):
                raise UserError(f"attention_mask: a {type(attention_mask).__name__}", "Give a tensor of 0 and 1")
            if attention_mask.ndim != 2 or attention_mask.shape[0] != batch or attention_mask.shape[1] < tokens:
                shape = tuple(attention_mask.shape)
                raise UserError(f"attention_mask: shape {shape}", f"It must be [{batch}, >= {tokens}]")
            if bool((attention_mask[:, -tokens:] != 0).all()):
                attention_mask = None
        if attention_mask is None and (cache is None or cache.uniform is not None):
            visible = Visibility.causal(batch, tokens, longest, device=ids.device)
            return Placement(visible, visible.last_BT, None, None, None)
        return self._place_ragged(ids, attention_mask, cache, slots)

    def _check_cache(self, cache: Cache) -> None:
        held, own = cache.layers[0][0], self.lm_head.weight
        mend = "make it with this model's new_cache, after moving or casting the model"
        if cache.widths != cache_widths(self.config) or len(cache.layers) != self.config.num_cache_layers:
            raise UserError(f"cache: {len(cache.layers)} layers of {cache.widths} elements, another model's", mend)
        if held.dtype != own.dtype or held.device != own.device:
            what = f"cache: {held.dtype} on {held.device}, the model {own.dtype} on {own.device}"
            raise UserError(what, mend)

    def _place_ragged(self, ids: Tensor, attention_mask: Tensor | None, cache: Cache | None, slots: int) -> Placement:
        """Rows of unequal length: padding on the left shifts a row's first slot, on the right is never stored."""
        batch, tokens = ids.shape
        step_T = torch.arange(tokens, device=ids.device)
        zero_B = torch.zeros(batch, dtype=torch.int64, device=ids.device)
        length_B, first_B = (zero_B, zero_B) if cache is None else (cache.length_B, cache.first_B)
        real_BT = torch.ones_like(ids, dtype=torch.bool)
        if attention_mask is not None:
            real_BT = attention_mask[:, -tokens:].to(ids.device) != 0
        real_B = real_BT.sum(-1)
        lead_B = torch.where(real_B > 0, real_BT.int().argmax(-1), torch.where(length_B == first_B, tokens, 0))
        expected = (step_T >= lead_B[:, None]) & (step_T < (lead_B + real_B)[:, None])
        if bool((expected != real_BT).any()):
            raise UserError(
                "attention_mask: a row's ones are not one contiguous run", "Pad on the left or on the right only"
            )
        if bool(((lead_B > 0) & (length_B > first_B)).any()):
            raise UserError("attention_mask: padding before new tokens of a row that already holds tokens", "Remove it")
        first_B = first_B + lead_B
        slot_BT = length_B[:, None] + step_T
        last_BT = torch.where(real_BT, slot_BT, -1)
        visible = Visibility(first_B[:, None].expand(batch, tokens), last_BT, slots)
        position_BT = (slot_BT - first_B[:, None]).clamp(min=0)
        return Placement(visible, position_BT, slot_BT, length_B + lead_B + real_B, first_B)


def _check_integers(name: str, given: Tensor) -> None:
    if not isinstance(given, Tensor):
        raise UserError(f"{name}: a {type(given).__name__}", "Give a torch tensor of integers, [batch, tokens]")
    if given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
        raise UserError(f"{name}: shape {tuple(given.shape)} of {given.dtype}", "Give integers, [batch, tokens]")


def _check_documents(documents: Tensor, ids: Tensor) -> None:
    """Each slot begins a document, or goes on with that of the slot before it, or is padding."""
    _check_integers("documents", documents)
    if documents.shape != ids.shape:
        raise UserError(f"documents: shape {tuple(documents.shape)} for ids of {tuple(ids.shape)}", "Give one a token")
    slot_T = torch.arange(ids.shape[1], device=documents.device)
    fits = documents >= slot_T  # begins here, or padding
    fits[:, 1:] |= (documents[:, 1:] == documents[:, :-1]) & (documents[:, :-1] < slot_T[1:])
    if not bool(fits.all()):
        row, slot = (~fits).nonzero()[0].tolist()
        raise UserError(
            f"documents: {int(documents[row, slot])} in row {row}, slot {slot}, where no document begins or goes on",
            "Give the slot where each token's document begins (not its number), and one past its own for padding",
        )


@dataclass(frozen=True)
class Placement:
    """Where the new tokens of one call go: what they see, their rotary positions, their slots, the cache after."""

    visible: Visibility
    position_BT: Tensor
    slot_BT: Tensor | None
    length_B: Tensor | None
    first_B: Tensor | None

    def commit(self, cache: Cache) -> None:
        """Count the new tokens in, once every layer has stored them."""
        if self.length_B is None or self.first_B is None:
            assert cache.uniform is not None
            cache.uniform += self.position_BT.shape[1]
            cache.length_B = torch.full_like(cache.length_B, cache.uniform)
        else:
            cache.length_B, cache.first_B, cache.uniform = self.length_B, self.first_B, None
