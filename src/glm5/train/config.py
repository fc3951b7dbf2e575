"""What a training run is told: one frozen dataclass for every stage. Read next: `loop`.

Stages (report sections 2.1.1, 2.3): "pretrain" trains everything with dense attention; "warmup" trains only the
indexers, on the KL to the dense attention; "sparse" trains everything with the indexer's selection, the indexers from
the KL on the selected set.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from glm5.train.schedule import BatchWarmup, LearningRate
from glm5.utils.errors import ConfigError

Stage = Literal["pretrain", "warmup", "sparse"]


@dataclass(frozen=True)
class TrainConfig:
    """One stage of training. Sequence counts are rows of the dataset; weights are factors of the loss terms."""

    stage: Stage = "pretrain"
    """What trains, and with which attention."""
    steps: int = 1000
    """Updates in all."""
    batch: BatchWarmup = field(default_factory=lambda: BatchWarmup(8, 8, 0))
    """Rows in a step, and their warm-up."""
    micro_batch: int = 8
    """Rows that go through the model at once; a step accumulates the gradients of its micro-batches."""
    lr: LearningRate = field(default_factory=LearningRate)
    """Learning rate, of Muon and AdamW alike."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices and embeddings."""
    momentum: float = 0.95
    """Muon's momentum."""
    split_heads: bool = True
    """Muon Split: orthogonalise W_UQ, W_UK and W_UV head by head. False is plain Muon."""
    clip: float = 1.0
    """Largest global gradient norm."""
    mtp_depths: int = 3
    """Depths at which the shared MTP block trains; 0 trains none."""
    mtp_weight: float = 0.3
    """Weight of the MTP losses together."""
    mtp_share: float = 1.0
    """Share of a step's rows (its first ones) on which MTP trains: 1 as in the report, less to save time on a CPU."""
    by_work: bool = False
    """Deal a step's rows to data-parallel ranks by the work of the documents in them, so that none waits long for
    another. Changes no gradient but in its last digits. Needs mtp_share 1, which takes a step's first rows."""
    context_groups: int = 0
    """Tokens that a rank holds at once, where data-parallel ranks divide into context-parallel groups of 1, 2, 4, ...
    for every batch, as its lengths ask for: a long document is shared by many, short ones run beside it. Rows are then
    documents of up to seq_len tokens, each as long as it is, and micro_batch does not matter. 0: rows are packed to one
    length. Needs mtp_share 1 and a mesh of dp, tp, ep and shard alone."""
    balance_weight: float = 1e-4
    """Weight of the sequence-wise balance loss."""
    bias_rate: float = 1e-3
    """Step of the router's selection bias; 0 freezes it."""
    late_tokens: int | None = None
    """Tokens of training from which on the two late values hold (GLM-4.5: 15T; not restated for GLM-5)."""
    late_mtp_weight: float | None = None
    """`mtp_weight` from there on (GLM-4.5: 0.1)."""
    late_bias_rate: float | None = None
    """`bias_rate` from there on (GLM-4.5: 0)."""
    indexer_weight: float = 1.0
    """Weight of the indexers' KL, which reaches nothing else."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Of weights and activations; bf16 keeps fp32 master weights. auto: bf16 on a GPU, fp32 on a CPU."""
    cuda_graphs: bool = False
    """Record micro-batches as CUDA graphs and replay them, in pre-training on packed rows, on GPUs that hold the whole
    model each."""
    seed: int = 0
    """Of the data order and of all random generators (initial weights have their own)."""
    log_every: int = 1
    """Steps between lines of the metrics."""
    measure_every: int = 50
    """Steps between measurements of attention-logit maxima and indexer recall (but in warm-up, a pass of their own)."""
    save_every: int = 200
    """Steps between checkpoints; one is also written at the end."""
    keep: int = 2
    """Checkpoints kept."""
    profile: tuple[int, ...] = ()
    """Steps of which a profiler's trace is written to RUN/profiles; a file RUN/profile asks for the next one."""

    def __post_init__(self) -> None:
        for name in ("steps", "micro_batch", "log_every", "measure_every", "save_every", "keep"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "must be at least 1")
        if self.mtp_depths < 0:
            raise ConfigError("mtp_depths", self.mtp_depths, "must be at least 0")
        if not 0 < self.mtp_share <= 1:
            raise ConfigError("mtp_share", self.mtp_share, "must lie in (0, 1]")
        if self.by_work and self.mtp_depths and self.mtp_share < 1:
            raise ConfigError("by_work", True, f"needs mtp_share=1, not {self.mtp_share}")
        late = ("late_mtp_weight", "late_bias_rate")
        if self.context_groups < 0:
            raise ConfigError("context_groups", self.context_groups, "must be at least 0")
        if self.context_groups and self.by_work:
            raise ConfigError("context_groups", self.context_groups, "deals by work itself: leave by_work out")
        if self.context_groups and self.mtp_depths and self.mtp_share < 1:
            raise ConfigError("context_groups", self.context_groups, f"needs mtp_share=1, not {self.mtp_share}")
        for name in ("mtp_weight", "balance_weight", "bias_rate", "indexer_weight", "weight_decay", "clip", *late):
            if not 0 <= (getattr(self, name) or 0) < float("inf"):
                raise ConfigError(name, getattr(self, name), "must be a finite number of at least 0")
        if not 0 <= self.momentum < 1:
            raise ConfigError("momentum", self.momentum, "must lie in [0, 1)")
        if self.late_tokens is not None and self.late_tokens < 0:
            raise ConfigError("late_tokens", self.late_tokens, "must be at least 0")
        for name in late:
            if getattr(self, name) is not None and self.late_tokens is None:
                raise ConfigError(name, getattr(self, name), "needs late_tokens, from which on it holds")

    def check_follows(self, before: TrainConfig, where: str = "") -> None:
        """Whether one model and one optimizer can go through this stage after another; `where` begins a field's name.

        Raises:
            ConfigError: the two differ in what a model and an optimizer are made for.
        """
        for name in ("stage", "precision", "split_heads", "weight_decay", "momentum"):
            was, now = getattr(before, name), getattr(self, name)
            if was != now:
                raise ConfigError(f"{where}{name}", now, f"must stay {was!r} from stage to stage")

    def mtp_weight_at(self, tokens: int) -> float:
        """`mtp_weight` of the step that begins after so many tokens."""
        return self._at(tokens, self.mtp_weight, self.late_mtp_weight)

    def bias_rate_at(self, tokens: int) -> float:
        """`bias_rate` of the step that begins after so many tokens."""
        return self._at(tokens, self.bias_rate, self.late_bias_rate)

    def _at(self, tokens: int, value: float, late: float | None) -> float:
        return value if late is None or self.late_tokens is None or tokens < self.late_tokens else late

    @property
    def sparse(self) -> bool:
        """Whether attention is restricted to the indexer's selection."""
        return self.stage == "sparse"

    @property
    def trains_indexer(self) -> bool:
        return self.stage in ("warmup", "sparse")

    @property
    def trains_model(self) -> bool:
        return self.stage in ("pretrain", "sparse")
