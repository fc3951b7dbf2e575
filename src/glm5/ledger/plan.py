"""Does it fit? Memory of every pipeline stage for a layout, batch, context and device, and the largest that would.

Serving holds weights, cache and the activations of one chunk; training holds weights, gradients, optimizer states
and the activations of the micro-batches in flight, as report section 2.4.1 does it (bf16 weights, gradients and
optimizer states sharded over data parallel ranks, each layer recomputed from its input, logits in chunks).
Read next: `glm5.cli.ledger`, which prints it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction

from glm5.ledger import compute
from glm5.ledger.devices import Device
from glm5.ledger.memory import (
    LOSS_CHUNK,
    CachePrecision,
    Layout,
    LayoutError,
    Precision,
    Stage,
    cache_bytes,
    layer_buffers,
    shards,
    weight_bytes,
    weight_elements,
)
from glm5.ledger.params import Group, Tensor
from glm5.model.config import ModelConfig
from glm5.utils.errors import UserError


@dataclass(frozen=True)
class Work:
    """What is to run.

    Args:
        batch: sequences in flight over all data-parallel ranks (serving), or per optimizer step (training).
        context: tokens of each sequence.
        precision: of the weights. Training needs bf16 or fp32.
        cache: of the cache.
        training: plan a training step in place of serving; one sequence is one micro-batch.
        chunk: most tokens that one forward pass of serving takes on one device.
        mtp_depths: how often training applies the one MTP block (three times in the report).
    """

    batch: int = 1
    context: int = 4096
    precision: Precision = "bf16"
    cache: CachePrecision = "bf16"
    training: bool = False
    chunk: int = 8192
    mtp_depths: int = 3


@dataclass(frozen=True)
class Line:
    """One item of a device's memory, in bytes, and how it was reckoned."""

    label: str
    kind: str  # weights | cache | activations | gradients | optimizer
    bytes: int
    formula: str


@dataclass(frozen=True)
class StagePlan:
    """Memory of each device of one pipeline stage."""

    stage: Stage
    lines: tuple[Line, ...]

    @property
    def total(self) -> int:
        return sum(line.bytes for line in self.lines)

    def of(self, kind: str) -> int:
        """Bytes of one kind."""
        return sum(line.bytes for line in self.lines if line.kind == kind)


@dataclass(frozen=True)
class Plan:
    """The answer: every stage, and whether the heaviest fits. Bytes throughout.

    `usable` is the share of the device that the plan may fill. The largest batch and context are what would still
    fit with everything else unchanged; 0 where not even the smallest does, None where not sought. Training has no
    largest batch: its micro-batches run one after another.
    """

    layout: Layout
    work: Work
    device: Device
    usable: int
    stages: tuple[StagePlan, ...]
    largest_batch: int | None
    largest_context: int | None
    decode_floor: compute.Roofline | None

    @property
    def worst(self) -> StagePlan:
        return max(self.stages, key=lambda s: s.total)

    @property
    def fits(self) -> bool:
        return self.worst.total <= self.usable


def plan(
    config: ModelConfig, layout: Layout, work: Work, device: Device, utilization: float = 0.9, search: bool = True
) -> Plan:
    """Plan `work` on `layout.devices` devices of one kind.

    Args:
        utilization: share of each device's memory that may be filled; the rest is for the allocator,
            communication buffers and kernel workspaces.
        search: also find the largest batch and context that fit.

    Raises:
        LayoutError: the layout does not divide the model, the batch or the context.
        UserError: another option is out of its range.
    """
    _check(config, layout, work, utilization)
    usable = int(device.memory * utilization)
    stages = tuple(stage_plan(config, layout, work, s) for s in layout.stages(config))
    batch = context = None
    if search:

        def fits(**change: int) -> bool:
            changed = replace(work, **change)  # type: ignore[arg-type]
            return all(stage_plan(config, layout, changed, s).total <= usable for s in layout.stages(config))

        if not work.training:
            batch = layout.dp * _largest(lambda n: fits(batch=n * layout.dp), limit=1 << 20)
        most = max(1, config.max_position_embeddings // layout.cp)
        context = layout.cp * _largest(lambda n: fits(context=n * layout.cp), limit=most)
    floor = None if work.training else decode_floor(config, layout, work, device)
    return Plan(layout, work, device, usable, stages, batch, context, floor)


def stage_plan(config: ModelConfig, layout: Layout, work: Work, stage: Stage) -> StagePlan:
    """Memory of one device of `stage`."""
    lines = _weights(config, layout, work, stage)
    lines += _training(config, layout, work, stage) if work.training else _serving(config, layout, work, stage)
    return StagePlan(stage, tuple(lines))


def decode_floor(config: ModelConfig, layout: Layout, work: Work, device: Device) -> compute.Roofline | None:
    """Least seconds for one decoding step of all sequences: stages run in turn, communication is free.

    Each device reads its weights once (of the routed experts, those that the batch touches under uniform routing)
    and, per sequence, the index keys of the whole context and the content of the selected positions.
    """
    per_rank = Fraction(work.batch, layout.dp)
    touched = compute.expected_experts(config.n_routed_experts, config.num_experts_per_tok, work.batch)
    share = touched / config.n_routed_experts
    trunk = [s.tensors(config) for s in layout.stages(_without_mtp(config))]
    bytes_read = Fraction(0)
    for tensors in trunk:
        # An embedding row a token is nothing beside the matrices.
        read = [t for t in tensors if t.group != "embedding"]
        experts = [t for t in read if t.group == "routed_experts"]
        rest = [t for t in read if t.group != "routed_experts"]
        bytes_read += weight_bytes(rest, layout, work.precision)
        bytes_read += share * weight_bytes(experts, layout, work.precision)
    cache = cache_bytes(config, work.cache, layout.tp)
    seen = work.context if config.attention == "gqa" else min(work.context, config.index_topk)
    per_layer = cache.content * seen + cache.index * work.context
    bytes_read += per_rank * config.num_hidden_layers * Fraction(per_layer, layout.cp)
    attention = compute.decode_attention_flops(config, work.context)
    main = Fraction(compute.linear_flops(config) + attention.main, layout.tp * layout.cp)
    # Every tensor-parallel rank runs the whole indexer.
    flops = per_rank * (main + Fraction(attention.indexer, layout.cp))
    return compute.roofline(device, float(flops), float(bytes_read))


# --------------------------------------------------------------------------- lines
_WEIGHT_LINES: tuple[tuple[str, tuple[Group, ...]], ...] = (
    ("attention, indexer, norms", ("attention", "indexer", "norms")),
    ("dense and shared FFN, router, MTP fusion", ("dense_ffn", "shared_experts", "router", "mtp_fusion")),
    ("routed experts", ("routed_experts",)),
    ("embedding and head", ("embedding", "head")),
)


def _weights(config: ModelConfig, layout: Layout, work: Work, stage: Stage) -> list[Line]:
    tensors, lines = stage.tensors(config), []
    for label, groups in _WEIGHT_LINES:
        group = [t for t in tensors if t.group in groups]
        if not group:
            continue
        # Told apart, because what tensor parallelism cannot cut is what limits it.
        cut = sum(t.numel for t in group if shards(t, layout) > 1)
        whole = sum(t.numel for t in group if shards(t, layout) == 1)
        ways = layout.expert_shards if groups == ("routed_experts",) else layout.tp
        parts = [f"{cut:,} elements / {ways}"] if cut else []
        parts += [f"{whole:,} whole"] if whole else []
        total = weight_bytes(group, layout, work.precision)
        lines.append(Line(label, "weights", total, f"({' + '.join(parts)}), {_stored_as(group, work.precision)}"))
    return lines


def _stored_as(tensors: list[Tensor], precision: Precision) -> str:
    """The precisions in which `tensors` are held."""
    if precision in ("fp32", "bf16"):
        return precision
    kinds = [precision] if any(t.quantized for t in tensors) else []
    return " and ".join([*kinds, *(["bf16"] if not all(t.quantized for t in tensors) else [])])


def _serving(config: ModelConfig, layout: Layout, work: Work, stage: Stage) -> list[Line]:
    sequences, positions = work.batch // layout.dp, work.context // layout.cp
    each = cache_bytes(config, work.cache, layout.tp)
    n_layers = len(stage.layers)
    lines = []
    kinds = [("MLA latent and rotary key" if config.attention == "mla" else "K and V", each.content)]
    kinds += [("index keys", each.index)] if each.index else []
    for label, size in kinds:
        total = sequences * positions * n_layers * size
        formula = f"batch {sequences:,} × {positions:,} tokens × {n_layers} layers × {size:,} B"
        lines.append(Line(f"cache: {label}", "cache", total, formula))
    tokens = min(work.chunk, sequences * positions)
    width = 4 if work.precision == "fp32" else 2
    buffers = layer_buffers(config, layout, tokens, positions, stage.layers)
    lines.append(
        Line(
            "activations of one layer",
            "activations",
            buffers.peak_bytes(width),
            f"{tokens:,} tokens: {buffers.residual:,} residual + max({buffers.attention:,} attention, "
            f"{buffers.ffn:,} FFN) elements × {width} B, {buffers.attention_bytes:,} B of ids and scores",
        )
    )
    if stage.head:
        vocab = config.vocab_size // layout.tp
        formula = f"batch {sequences:,} × {vocab:,} entries × 4 B"
        lines.append(Line("logits", "activations", 4 * sequences * vocab, formula))
    return lines


def _training(config: ModelConfig, layout: Layout, work: Work, stage: Stage) -> list[Line]:
    tensors = stage.tensors(config)
    experts = [t for t in tensors if t.group == "routed_experts"]
    rest = [t for t in tensors if t.group != "routed_experts"]
    replicas = layout.dp * layout.cp
    n_experts, n_rest = weight_elements(experts, layout), weight_elements(rest, layout)
    adamw = weight_elements([t for t in rest if _on_adamw(t)], layout)
    owned = -(-n_experts // layout.expert_replicas) - (-n_rest // replicas)
    owned_adamw = -(-adamw // replicas)
    largest = max(
        weight_elements([t for t in tensors if t.name.startswith(f"model.layers.{i}.")], layout) for i in stage.layers
    )
    whose = f"({n_experts:,} / {layout.expert_replicas} + {n_rest:,} / {replicas})"
    lines = [
        Line("gradients", "gradients", 4 * owned, f"{whose} × 4 B, fp32, sharded over replicas"),
        Line("Muon momentum", "optimizer", 4 * (owned - owned_adamw), f"{owned - owned_adamw:,} × 4 B, fp32"),
        Line("AdamW moments", "optimizer", 8 * owned_adamw, f"{owned_adamw:,} × 8 B: embedding, head, vectors"),
    ]
    if replicas > 1:
        lines.append(Line("two layers' reduce buffers", "gradients", 8 * largest, f"2 × {largest:,} elements × 4 B"))
    width = 4 if work.precision == "fp32" else 2
    if work.precision != "fp32":
        lines.append(Line("master weights", "optimizer", 4 * owned, f"{whose} × 4 B, fp32"))
    tokens = work.context // layout.cp
    flights = min(layout.pp - stage.index, work.batch // layout.dp)
    trunk = sum(i < config.num_hidden_layers for i in stage.layers)
    passes = trunk + work.mtp_depths * (len(stage.layers) - trunk)
    lines.append(
        Line(
            "inputs of recomputed layers",
            "activations",
            flights * passes * tokens * config.hidden_size * width,
            f"{flights} micro-batches in flight × {passes} layer passes × {tokens:,} tokens × "
            f"{config.hidden_size:,} × {width} B",
        )
    )
    if layout.cp > 1:
        keys = cache_bytes(config, "fp32" if width == 4 else "bf16", layout.tp).total
        formula = f"2 × {work.context:,} tokens × {keys:,} B"
        lines.append(Line("gathered keys and their gradient", "activations", 2 * work.context * keys, formula))
    buffers = layer_buffers(config, layout, tokens, work.context, stage.layers)
    kept = 2 * buffers.kept_bytes(width)
    lines.append(Line("one layer and its gradients", "activations", kept, f"2 × {kept // 2:,} B for {tokens:,} tokens"))
    if stage.head:
        rows, vocab = min(LOSS_CHUNK, tokens), config.vocab_size // layout.tp
        formula = f"2 × {rows:,} tokens × {vocab:,} entries × 4 B"
        lines.append(Line("logits and their gradient, one chunk", "activations", 8 * rows * vocab, formula))
    return lines


def _on_adamw(tensor: Tensor) -> bool:
    """Whether the report's recipe gives it to AdamW: embedding, head and all vectors."""
    return tensor.group in ("embedding", "head") or len(tensor.shape) == 1


# --------------------------------------------------------------------------- helpers
def _check(config: ModelConfig, layout: Layout, work: Work, utilization: float) -> None:
    layout.check(config)
    if not 0 < utilization <= 1:
        raise UserError(f"utilization={utilization} is not a share", "Give --utilization in (0, 1], for example 0.9")
    for name in ("batch", "context", "chunk", "mtp_depths"):
        if getattr(work, name) < 1:
            raise UserError(
                f"{name}={getattr(work, name)} is not positive", f"Give --{name.replace('_', '-')} at least 1"
            )
    for name, parts, size in (("dp", layout.dp, work.batch), ("cp", layout.cp, work.context)):
        if size % parts:
            what = "batch" if name == "dp" else "context"
            up = -(-size // parts) * parts
            raise LayoutError(
                f"{name}={parts} does not divide {what}={size}", f"Give --{what} {up}, or change --{name}"
            )
    if work.context > config.max_position_embeddings:
        raise UserError(
            f"context={work.context} is past max_position_embeddings={config.max_position_embeddings}",
            "Lower --context, or name a configuration with more positions",
        )
    if work.training and work.precision not in ("bf16", "fp32"):
        raise UserError(
            f"dtype={work.precision} cannot train: gradients need bf16 or fp32 weights",
            "Give --dtype bf16 with --training",
        )


def _largest(fits: Callable[[int], bool], limit: int) -> int:
    """Largest n in [0, limit] with `fits(n)`; fits must be true up to some n and false after."""
    low, high = 0, 1
    while high <= limit and fits(high):
        low, high = high, high * 2
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _without_mtp(config: ModelConfig) -> ModelConfig:
    return config.replace(num_nextn_predict_layers=0)
