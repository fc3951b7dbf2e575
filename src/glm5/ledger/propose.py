"""Layouts for a number of devices: which of them fit, and what each costs in memory, time of computing and on the wire.

Not a forecast: products at the data sheet's peak, every byte at the link's nominal rate, and no wait for the host. What
is sent is added to what is computed, as if nothing overlapped; layouts are ranked by that. Of a step of training, one
device's share:

    dp x cp   parameters gathered for a forward and a backward pass, gradients reduced in fp32
    ep        a token's hidden state to each of its experts and back, in both passes
    tp        two sums of the hidden states a layer, in both passes
    cp        latent rows and index keys of a layer, gathered, and their gradients in fp32
    pp        hidden states to the next stage and back; idle time (pp - 1) / (micro-batches + pp - 1), 1F1B's

Links: 450 GB/s within a host of 8 (NVLink), 50 GB/s beyond (400 Gb/s a device). Source: report section 2.4;
`glm5.parallel` is what is counted. Read first: `plan`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

from glm5.ledger.compute import mtp_flops, training_flops
from glm5.ledger.devices import Device
from glm5.ledger.memory import Layout, LayoutError, weight_elements
from glm5.ledger.plan import Plan, Work, plan
from glm5.model.config import ModelConfig
from glm5.utils.errors import UserError

HOST, WITHIN, BEYOND = 8, 450e9, 50e9  # devices of a host; bytes/s a device sends within it, and out of it
SPARE = {"tp": 8, "cp": 64, "pp": 32}  # no layout cuts further


@dataclass(frozen=True)
class Proposal:
    """One layout.

    Attributes:
        plan: its memory. compute: seconds of a step's products on each device, without idle time. wire: seconds of each
            kind of exchange, by axis. idle: share of a step in which pipeline stages wait.
    """

    plan: Plan
    compute: float
    wire: dict[str, float]
    idle: float

    @property
    def seconds(self) -> float:
        """Of a step in which nothing overlaps."""
        return (self.compute + sum(self.wire.values())) / (1 - self.idle)

    @property
    def layout(self) -> Layout:
        return self.plan.layout


def propose(config: ModelConfig, work: Work, device: Device, devices: int, utilization: float = 0.9) -> list[Proposal]:
    """All layouts of so many devices that fit, the quickest first; of equals the one with more memory to spare.

    Raises:
        UserError: no layout divides the model and the work, none fits (it names the one that comes nearest), or the
            device's rate is not listed.
    """
    if not work.training:
        raise UserError("layouts are proposed for training", "Add --training, or name one with --tp, --ep and --dp")
    if device.bf16_flops is None:
        raise UserError(f"the rate of {device.name} is not listed", "Name a layout, whose memory is known")
    fitting: list[Proposal] = []
    nearest: Plan | None = None
    for layout in _layouts(config, work, devices):
        found = plan(config, layout, work, device, utilization, search=False)
        if nearest is None or found.worst.total < nearest.worst.total:
            nearest = found
        if found.fits:
            fitting.append(_proposal(config, found))
    if nearest is None:
        what = f"no layout of {devices} devices divides the model, a batch of {work.batch} and {work.context} tokens"
        raise UserError(what, "Give another --devices, or a --batch with more factors")
    if not fitting:
        size = nearest.worst.total / 1e9
        what = (
            f"nothing fits on {devices} x {device.name}: {mesh_of(nearest.layout)} takes least, {size:,.1f} GB a device"
        )
        raise UserError(what, "Give more --devices, or less --context")
    return sorted(fitting, key=lambda p: (round(p.seconds, 6), p.plan.worst.total))


def _layouts(config: ModelConfig, work: Work, devices: int) -> Iterator[Layout]:
    for tp in _powers(SPARE["tp"]):
        for pp in _powers(SPARE["pp"]):
            for cp in _powers(SPARE["cp"]):
                if devices % (tp * pp * cp) or work.context % cp:
                    continue
                dp = devices // (tp * pp * cp)
                if work.batch % dp or (pp > 1 and work.batch // dp < pp):
                    continue  # a pipeline of fewer micro-batches than stages idles for most of its time
                for ep in _powers(gcd(cp * dp, config.n_routed_experts)):  # experts fold on the data ranks
                    layout = Layout(tp, ep, pp, cp, dp)
                    try:
                        layout.check(config)
                    except LayoutError:
                        continue
                    yield layout


def _powers(limit: int) -> list[int]:
    return [1 << i for i in range(limit.bit_length()) if 1 << i <= limit]


def _proposal(config: ModelConfig, found: Plan) -> Proposal:
    layout, work, rate = found.layout, found.work, found.device.bf16_flops
    assert rate is not None
    flops = work.batch * training_flops(config, work.context, mtp_depths=work.mtp_depths)
    # Every layer runs forward once more, from its input; the head does not.
    flops += work.batch * (flops // work.batch - 3 * work.mtp_depths * mtp_flops(config, work.context)) // 3
    micro = work.batch // layout.dp
    idle = (layout.pp - 1) / (micro + layout.pp - 1)
    return Proposal(found, flops / layout.devices / rate, _wire(config, layout, work), idle)


def _wire(config: ModelConfig, layout: Layout, work: Work) -> dict[str, float]:
    """Seconds that a device sends in a step, by axis."""
    tokens = work.batch * work.context // (layout.dp * layout.cp)  # that pass through a device's layers
    layers = (config.num_hidden_layers + work.mtp_depths) / layout.pp
    states, out = 2 * tokens * config.hidden_size, dict[str, float]()

    def sent(axis: str, count: int, span: int, size: float) -> None:
        """`size` bytes to all others of a group of `count` ranks, over `span` neighbouring devices."""
        if count > 1:
            out[axis] = size * (count - 1) / count / (WITHIN if span <= HOST else BEYOND)

    stages = layout.stages(config)
    tensors = [t for stage in stages for t in stage.tensors(config)]
    weights = weight_elements([t for t in tensors if t.group != "routed_experts"], layout) / layout.pp
    experts = weight_elements([t for t in tensors if t.group == "routed_experts"], layout) / layout.pp
    data = layout.dp * layout.cp
    sent("dp", data, data * layout.tp, (2 * 2 + 4) * weights)
    copies = layout.expert_replicas
    if copies > 1:
        out["dp"] = out.get("dp", 0.0) + (2 * 2 + 4) * experts * (copies - 1) / copies / (
            WITHIN if layout.devices // layout.pp <= HOST else BEYOND
        )
    routed = sum(config.is_moe(i) for i in range(config.num_hidden_layers)) + work.mtp_depths
    # Forward, again for the recomputation, and backward: there and back each time. Each tensor-parallel rank sends its
    # share of the tokens that all of them hold.
    chosen = states * config.num_experts_per_tok / layout.tp
    sent("ep", layout.ep, layout.ep * layout.tp, 3 * 2 * chosen * routed / layout.pp)
    sent("tp", layout.tp, layout.tp, 3 * 2 * 2 * states * layers)
    row = config.latent_dim + config.index_head_dim if config.attention == "mla" else 2 * config.head_dim
    everyone = tokens * layout.cp * row * layers
    sent("cp", layout.cp, layout.cp * layout.tp, (2 * 2 + 4) * everyone)
    if layout.pp > 1:
        out["pp"] = 2 * states / (WITHIN if layout.devices <= HOST else BEYOND)
    return out


def mesh_of(layout: Layout) -> str:
    """The layout as `--mesh` takes it."""
    axes = ("dp", "ep", "tp", "cp", "pp")
    return ",".join(f"{axis}={getattr(layout, axis)}" for axis in axes if getattr(layout, axis) > 1) or "dp=1"
