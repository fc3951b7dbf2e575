"""Floating-point operations that a training step needs, by kind, and their share of what its devices could do.

What is counted, a multiply-accumulate being 2 FLOP:

    matrices           3 x forward of every matrix that a token meets: trunk, head, and for each MTP depth its block and
                       the head again; the indexers' are apart
    dense attention    3 x scores and weighted sums of the pairs that a query sees, expanded heads
    sparse attention   3 x the same of the pairs that it selected, on the latent
    indexer            its matrices 2 x (its inputs get no gradient); scores of all pairs forward, and backward of those
                       that its loss reads: all in warm-up, the selected ones in the sparse stage

In warm-up the model only runs forward, once. Not counted: recomputation, norms, the softmax, top-k, the optimizer. So
model FLOP utilization (MFU) is a figure of the work that there was, not of how it was done; and since attention is
apart, a sparse run's can be told from a dense one's. Source: report sections 2.1 to 2.3; MFU as in arXiv:2204.02311.
Read first: `compute`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from glm5.ledger.compute import indexer_pair_flops, pair_flops
from glm5.ledger.devices import DEVICES, Device
from glm5.ledger.params import Tensor, layer_tensors
from glm5.model.config import ModelConfig


@dataclass(frozen=True)
class StepFlops:
    """FLOP of one step by kind."""

    matrices: int
    dense_attention: int = 0
    sparse_attention: int = 0
    indexer: int = 0

    @property
    def total(self) -> int:
        return self.matrices + self.dense_attention + self.sparse_attention + self.indexer

    def shares(self, seconds: float, devices: int, peak: float) -> dict[str, float]:
        """Of what so many devices of `peak` FLOP/s could do in that time: of each kind there is, and "all"."""
        most = seconds * devices * peak
        found = {f.name: getattr(self, f.name) / most for f in fields(self) if getattr(self, f.name)}
        return {"all": self.total / most, **found}


def step_flops(config: ModelConfig, stage: str, *, tokens: int, pairs: int, selected: int, mtp: float) -> StepFlops:
    """What one step of a stage needs.

    Args:
        stage: "pretrain", "warmup" or "sparse", as `glm5.train.config.Stage`.
        tokens: queries that see something. pairs: what they see, themselves included, added up.
        selected: the same, of each query at most `index_topk`.
        mtp: MTP depths that run, times the share of the tokens on which they do.
    """
    layers = config.num_hidden_layers
    trunk = [t for i in range(layers) for t in layer_tensors(config, i)]
    block = [t for i in range(layers, config.num_cache_layers) for t in layer_tensors(config, i)]
    head = config.vocab_size * config.hidden_size
    each = 2 * (_macs(config, trunk) + head) + mtp * 2 * (_macs(config, block) + head)
    blocks = layers + mtp
    dense = blocks * pairs * pair_flops(config, absorbed=False)
    if stage == "pretrain" or config.attention == "gqa":
        return StepFlops(round(3 * tokens * each), dense_attention=round(3 * dense))
    own = 2 * (_macs(config, trunk, indexer=True) + mtp * _macs(config, block, indexer=True))
    score = blocks * indexer_pair_flops(config)
    if stage == "warmup":
        return StepFlops(round(tokens * each), round(dense), indexer=round(2 * tokens * own + 3 * pairs * score))
    return StepFlops(
        round(3 * tokens * each),
        sparse_attention=round(3 * blocks * selected * pair_flops(config, absorbed=True)),
        indexer=round(2 * tokens * own + (pairs + 2 * selected) * score),
    )


def _macs(config: ModelConfig, tensors: list[Tensor], *, indexer: bool = False) -> int:
    """Multiply-accumulates of one token in these tensors' matrices: the indexers', or all others."""
    return sum(
        t.numel // t.copies * config.num_experts_per_tok if t.group == "routed_experts" else t.numel
        for t in tensors
        if t.is_matrix and (t.group == "indexer") == indexer
    )


def named_device(name: str) -> Device | None:
    """The listed device that a driver calls `name`, such as "NVIDIA H200"; None if there is none."""
    words = name.lower().replace("-", " ").split()
    return next((d for key, d in DEVICES.items() if key.partition("-")[0] in words), None)
