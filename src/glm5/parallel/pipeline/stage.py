"""One stage: a GLM5 with parts missing, and what it does to a micro-batch.

The parts are the ordinary model's own modules under their own names, and the forward pass is the ordinary model's:
`GLM5.hidden` over the layers that are here, `GLM5.mtp_hidden` where the MTP block is. Between stages travel hidden
states: the trunk's, and after the MTP block one for each depth beside it. Token ids do not travel; every rank reads
them from its loader. Auxiliary losses (the indexers' KL, the routers' balance) are backpropagated from the stage that
they arise on. Source: report section 2.4.1. Read next: `schedule`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glm5.model.block import Block
from glm5.model.glm5 import GLM5
from glm5.model.mtp import MTPBlock
from glm5.model.trace import Aux
from glm5.parallel.pipeline.layout import Parts


class Rows(Protocol):
    """What a stage reads of a micro-batch of B rows, T queries each; `glm5.train.rows.Rows` is one."""

    @property
    def ids_BS(self) -> Tensor: ...
    @property
    def input_BT(self) -> Tensor: ...
    @property
    def documents_BT(self) -> Tensor | None: ...
    @property
    def documents_BS(self) -> Tensor | None: ...
    @property
    def held(self) -> Any: ...
    @property
    def total(self) -> Callable[[Tensor], Tensor] | None: ...
    def valid_BT(self, depth: int = 0) -> Tensor: ...
    def head(self, rows: int) -> Rows: ...


@dataclass(frozen=True)
class Pass:
    """What a stage's forward pass over one micro-batch leaves for the loss.

    Attributes:
        micro: number of the micro-batch. rows: its rows. kept: those of them, the first, that MTP ran on.
        hidden: on the stage of the heads, the trunk's states [B, T, D] and each MTP depth's [kept, T, D]; else empty.
        head_VD: the shared head, there; else None.
        trunk, mtp: what the layers here, and the MTP block's depths, gathered. parts: what the stage holds.
    """

    micro: int
    rows: Any
    kept: int
    hidden: list[Tensor]
    head_VD: Tensor | None
    trunk: Aux
    mtp: Aux
    parts: Parts = field(default_factory=Parts)


class Objective(Protocol):
    """The loss of one stage's pass: over all stages they add up to the step's loss. None where there is none."""

    def __call__(self, done: Pass) -> Tensor | None: ...


@dataclass(repr=False)
class Work:
    """What one step does.

    Args:
        rows: the micro-batches. objective: their loss.
        depths: at which the MTP block runs. mtp_rows: on how many of the step's rows, the first; None is all.
        sparse: whether attention is restricted to the indexers' selection.
        indexer, balance: which auxiliary losses layers compute.
        joint: whether a gradient flows from stage to stage. False (the indexers' warm-up, whose losses each reach their
            own layer only) makes every stage's backward pass right after its forward.

    After the step: `losses`, this rank's parts of the loss, detached, in the order in which they were made.
    """

    rows: Sequence[Rows]
    objective: Objective
    depths: int = 0
    mtp_rows: int | None = None
    sparse: bool = False
    indexer: bool = False
    balance: bool = False
    joint: bool = True
    losses: list[Tensor] = field(default_factory=list)

    def kept(self, micro: int) -> int:
        """Rows of a micro-batch on which MTP runs."""
        size = len(self.rows[micro].ids_BS)
        before = sum(len(rows.ids_BS) for rows in self.rows[:micro])
        return size if self.mtp_rows is None else min(size, max(0, self.mtp_rows - before))


class KeptLayers(nn.ModuleDict):
    """Layers under their numbers in the whole model; as a sequence, those that are here."""

    def __iter__(self) -> Iterator[nn.Module]:  # type: ignore[override]
        return iter(self._modules.values())


class StageModel(GLM5):
    """The part of a GLM5 that one stage holds.

    Args:
        model: the whole model, whose modules are taken, not copied; but for the embedding of an MTP block that stands
            on another stage than the embedding itself: it is a copy, `replica`.
        parts: which of them.
    """

    def __init__(self, model: GLM5, parts: Parts) -> None:
        nn.Module.__init__(self)
        self.config, self.parts = model.config, parts
        whole = model.model
        trunk: Any = nn.Module()
        if parts.embedding:
            trunk.embed_tokens = whole.embed_tokens
        elif parts.mtp:
            trunk.embed_tokens = copy.deepcopy(whole.embed_tokens)
        kept = [*parts.layers] + [model.config.num_hidden_layers] * parts.mtp
        trunk.layers = KeptLayers({str(i): whole.layers[i] for i in kept})
        trunk.norm = whole.norm if parts.norm else nn.Identity()
        self.model = trunk
        if parts.head:
            self.lm_head = model.lm_head
        self.work: Work | None = None  # of the step that runs; no argument of `forward`, where FSDP would copy it

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        floats = (p.dtype for n, p in self.named_parameters() if not n.endswith("mlp.gate.weight"))
        return next(floats, torch.float32)

    @property
    def blocks(self) -> list[Block]:
        layers: Any = self.model.layers
        return [layers[str(i)] for i in self.parts.layers]

    @property
    def mtp(self) -> MTPBlock:
        layers: Any = self.model.layers
        block: MTPBlock = layers[str(self.config.num_hidden_layers)]
        return block

    @property
    def replica(self) -> nn.Parameter | None:
        """The copy of the embedding, where there is one."""
        return self.model.embed_tokens.weight if self.parts.copies_embedding else None  # type: ignore[return-value]

    def forward(self, *states: Tensor, micro: int) -> Tensor | tuple[Tensor, ...]:  # type: ignore[override]
        """The states for the next stage, or on the last one the loss.

        Args:
            states: of the stage before: the trunk's [B, T, D] and, after the MTP block, one of each depth.
        """
        assert self.work is not None
        work, parts = self.work, self.parts
        rows = work.rows[micro]
        if not work.joint:
            states = tuple(s.detach() for s in states)
        kept = work.kept(micro) if work.depths else 0
        trunk, mtp = (Aux(indexer=work.indexer, balance=work.balance, total=rows.total) for _ in range(2))
        trunk.valid = rows.valid_BT()
        given, deep = (None, []) if parts.embedding else (states[0], list(states[1:]))
        if parts.embedding or parts.layers or parts.norm:
            # The class's method: FSDP may have wrapped the instance's, whose hooks ran on the way here.
            given = GLM5.hidden(
                self,
                rows.input_BT,
                documents=rows.documents_BT,
                cache=rows.held,
                sparse=work.sparse,
                aux=trunk,
                embedded=given,
                checked=True,
            )
        assert given is not None
        if parts.mtp and kept:
            deep = list(self._deep(given, rows.head(kept), work, mtp))
        if not parts.head:
            if parts.mtp:  # every micro-batch's states have one shape
                lead = len(given) - kept
                deep = [F.pad(h, (0, 0, 0, 0, 0, lead)) for h in deep] or [torch.zeros_like(given)] * work.depths
            loss = work.objective(Pass(micro, rows, kept, [], None, trunk, mtp, parts))
            return self._passed_on((given, *deep), loss, work)
        hidden = [given, *(h[:kept] for h in deep)] if kept else [given]
        loss = work.objective(Pass(micro, rows, kept, hidden, self.lm_head.weight, trunk, mtp, parts))
        assert loss is not None, "the stage of the heads has a loss"
        work.losses.append(loss.detach())
        if not work.joint:
            return self._at_once(loss)
        return loss if kept else _with_unused(loss, states[1:])

    def _deep(self, hidden_BTD: Tensor, share: Rows, work: Work, aux: Aux) -> Iterator[Tensor]:
        depths = self.mtp_hidden(
            hidden_BTD[: len(share.ids_BS)],
            share.ids_BS,
            work.depths,
            documents=share.documents_BS,
            cache=share.held,
            sparse=work.sparse,
            aux=aux,
            checked=True,
        )
        for depth in range(1, work.depths + 1):
            aux.valid = share.valid_BT(depth)  # read when the depth is asked for
            yield next(depths)

    def _passed_on(self, states: tuple[Tensor, ...], loss: Tensor | None, work: Work) -> tuple[Tensor, ...]:
        if loss is not None:
            work.losses.append(loss.detach())
            if work.joint:
                return (_WithLoss.apply(states[0], loss), *states[1:])
            self._at_once(loss)
        return states if work.joint else tuple(s.detach() for s in states)

    def _at_once(self, loss: Tensor) -> Tensor:
        if loss.requires_grad:
            loss.backward()
        return loss.detach()


class _WithLoss(torch.autograd.Function):
    """The state itself; going backward, the loss gets a gradient of 1."""

    @staticmethod
    def forward(ctx: Any, state: Tensor, loss: Tensor) -> Tensor:
        ctx.dtype, ctx.device = loss.dtype, loss.device
        return state.detach()  # not a view: FSDP watches those

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.ones((), dtype=ctx.dtype, device=ctx.device)


def _with_unused(loss: Tensor, states: tuple[Tensor, ...]) -> Tensor:
    """The loss, with a gradient of zero for states that it does not depend on: the stage before waits for one."""
    out: Tensor = _Unused.apply(loss, *states) if states else loss
    return out


class _Unused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, *states: Tensor) -> Tensor:
        ctx.save_for_backward(*states)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return (grad, *(torch.zeros_like(s) for s in ctx.saved_tensors))
