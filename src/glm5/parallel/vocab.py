"""The output head and its cross-entropy with the vocabulary divided over ranks: no rank holds all logits, nor the head.

A head of 154,880 rows and its fp32 gradient are the largest matrices of a last stage; over R ranks each keeps 1 / R of
both. It runs in chunks of the sequence, as `glm5.kernels.cross_entropy` does alone (whose contract this keeps: fp32
logits and accumulators, a weight for each token, log-probabilities and entropy out). For each chunk the ranks exchange
three or four numbers a token: the largest of their own logits, their sum of exponentials, the target's logit where they
hold it, and the entropy's sum. All then know the softmax's denominator, the same bits on every rank. The hidden
states' gradient, which each rank has a share of, is summed while the next chunk is computed; the head's needs no
communication. Main and MTP heads pass in one call. Source: report section 2.4.1; Megatron-LM's vocabulary-parallel loss
(arXiv:1909.08053). Read next: `glm5.train.losses`.

Legend: N tokens · D model width · v rows of the head here · c tokens of one chunk · R ranks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work
from torch.distributed.tensor import DTensor, Shard

from glm5.kernels.cross_entropy import CHUNK_ELEMENTS, LinearCrossEntropy, LinearLogprobs, Pass, product, summed
from glm5.model.glm5 import GLM5
from glm5.parallel.collectives import all_gather, copied, joined_rows
from glm5.parallel.expert import local
from glm5.parallel.mesh import World
from glm5.parallel.tensor import LocalLinear
from glm5.utils.errors import ConfigError, DataError


class Vocabulary:
    """How the head's rows are divided: rank r of the group holds the rows after those of the ranks before it.

    Args:
        rows: of this rank. group: the ranks. Every rank makes one.
    """

    def __init__(self, rows: int, group: ProcessGroup, device: torch.device | str = "cpu") -> None:
        self.group = group
        counts = all_gather(torch.tensor([rows], device=device), group).tolist()
        self.rows, self.size = rows, sum(counts)
        self.first = sum(counts[: group.rank()])

    def cross_entropy(
        self,
        hidden_ND: Tensor,
        weight_vD: Tensor,
        targets_N: Tensor,
        weights_N: Tensor | None = None,
        *,
        chunk: int | None = None,
        with_entropy: bool = False,
    ) -> LinearCrossEntropy:
        """`glm5.kernels.cross_entropy.linear_cross_entropy`, each rank with its rows of the head.

        Args:
            hidden_ND, targets_N, weights_N: the same on every rank, as are all results and the hidden states' gradient.
                Targets count over the whole vocabulary.
            weight_vD: this rank's rows; so is its gradient.
            chunk: tokens to a chunk, the same on every rank; by default what lets the logits here fill
                `CHUNK_ELEMENTS`.

        Raises:
            ValueError: shapes or dtypes do not fit together.
            DataError: a target lies outside the vocabulary.
        """
        chunk = self._checked(hidden_ND, weight_vD, targets_N, weights_N, chunk)

        def run(weights_N: Tensor, grad_hidden: bool, grad_weight: bool) -> Pass:
            return self._run(
                hidden_ND, weight_vD, targets_N, weights_N, chunk, with_entropy, False, grad_hidden, grad_weight
            )

        return summed(hidden_ND, weight_vD, weights_N, run)

    @torch.no_grad()
    def logprobs(
        self,
        hidden_ND: Tensor,
        weight_vD: Tensor,
        targets_N: Tensor,
        *,
        chunk: int | None = None,
        with_argmax: bool = False,
        with_entropy: bool = False,
    ) -> LinearLogprobs:
        """`linear_logprobs`, in the same way; of equal logits the argmax is the lowest id."""
        chunk = self._checked(hidden_ND, weight_vD, targets_N, None, chunk)
        run = self._run(hidden_ND, weight_vD, targets_N, None, chunk, with_entropy, with_argmax, False, False)
        return LinearLogprobs(run.logprobs_N, run.argmax_N, run.entropy_N)

    def _checked(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, weights: Tensor | None, chunk: int | None
    ) -> int:
        n = hidden.shape[0]
        if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
            raise ValueError(f"need hidden [N, D] and weight [v, D]: {list(hidden.shape)}, {list(weight.shape)}")
        if len(weight) != self.rows:
            raise ValueError(f"{len(weight)} rows of the head on a rank of {self.rows}")
        if targets.shape != (n,) or targets.dtype != torch.int64:
            raise ValueError(f"targets must be int64 [{n}], got {targets.dtype} {list(targets.shape)}")
        if weights is not None and weights.shape != (n,):
            raise ValueError(f"weights must be [{n}], got {list(weights.shape)}")
        if chunk is not None and chunk < 1:
            raise ValueError(f"chunk={chunk}: must be at least 1")
        inside = ((targets >= 0) & (targets < self.size)).all()
        if targets.is_cuda:  # no wait for the device: the launch fails there instead
            torch._assert_async(inside, f"a target lies outside the vocabulary of {self.size}")
        elif not inside:
            bad = targets[(targets < 0) | (targets >= self.size)][0].item()
            raise DataError(
                f"target {bad} lies outside the vocabulary of {self.size}",
                "Tokenize with this model's tokenizer; to ignore a token give it weight 0 and any valid id",
            )
        elements = CHUNK_ELEMENTS.get(weight.device.type, CHUNK_ELEMENTS["cuda"])
        # Of the whole vocabulary, so that ranks with unequal shares take equal chunks.
        return chunk or max(1, elements * self.group.size() // self.size)

    def _run(
        self,
        hidden_ND: Tensor,
        weight_vD: Tensor,
        targets_N: Tensor,
        weights_N: Tensor | None,
        chunk: int,
        with_entropy: bool,
        with_argmax: bool,
        grad_hidden: bool,
        grad_weight: bool,
    ) -> Pass:
        """One pass over the chunks; the same on every rank, but for this rank's rows of the head's gradient."""
        (n, d), v = hidden_ND.shape, self.rows
        accum = torch.promote_types(hidden_ND.dtype, torch.float32)
        mixed = hidden_ND.is_cuda and hidden_ND.dtype == weight_vD.dtype and hidden_ND.dtype != accum
        operand = hidden_ND.dtype if mixed else accum
        weight_vD = weight_vD.to(operand)
        new = hidden_ND.new_empty
        logprobs_N = new(n, dtype=accum)
        entropy_N = new(n, dtype=accum) if with_entropy else None
        argmax_N = new(n, dtype=torch.int64) if with_argmax else None
        grad_hidden_ND = new((n, d), dtype=accum) if grad_hidden else None
        grad_weight_vD = hidden_ND.new_zeros((v, d), dtype=accum) if grad_weight else None
        buffer_cv = new((min(chunk, n), v), dtype=accum)
        sums: list[Work] = []
        for start in range(0, n, chunk):
            part = slice(start, min(start + chunk, n))
            hidden_cD = hidden_ND[part].to(operand)
            exp_cv = buffer_cv[: hidden_cD.shape[0]]
            product(hidden_cD, weight_vD.T, out=exp_cv)
            target_c = targets_N[part] - self.first
            here_c = (target_c >= 0) & (target_c < v)
            target_c1 = target_c.clamp(0, max(0, v - 1))[:, None]

            own = _own(exp_cv, target_c1, here_c, with_entropy, with_argmax, self.first)
            every_RcX = all_gather(own[None], self.group)
            peak_Rc, sum_Rc, target_Rc = every_RcX[..., 0], every_RcX[..., 1], every_RcX[..., 2]
            peak_c = peak_Rc.amax(0)
            scale_Rc = (peak_Rc - peak_c).exp()
            total_c = (sum_Rc * scale_Rc).sum(0)
            log_total_c = total_c.log()
            logprobs_N[part] = target_Rc.sum(0) - peak_c - log_total_c
            if entropy_N is not None:
                # A rank's sum of exp * (logit - its peak), moved to the common peak.
                shift_Rc = torch.where(sum_Rc > 0, peak_Rc - peak_c, 0.0)
                mean_c = ((every_RcX[..., 3] + sum_Rc * shift_Rc) * scale_Rc).sum(0) / total_c
                entropy_N[part] = log_total_c - mean_c
            if argmax_N is not None:
                best_c1 = peak_Rc.argmax(0, keepdim=True)  # of equals the first rank, which has the lower ids
                argmax_N[part] = every_RcX[..., -1].gather(0, best_c1)[0].long()

            if weights_N is not None and (grad_hidden_ND is not None or grad_weight_vD is not None):
                # d loss / d logits = (weight / total) * (exp - total * onehot), of exponentials over the common peak.
                exp_cv.mul_(scale_Rc[self.group.rank(), :, None])
                if v:
                    exp_cv.scatter_add_(1, target_c1, torch.where(here_c, -total_c, 0.0)[:, None])
                row_c1 = (weights_N[part] / total_c)[:, None]
                error_cv = exp_cv.to(operand)
                if grad_hidden_ND is not None:
                    product(error_cv, weight_vD, out=grad_hidden_ND[part])
                    grad_hidden_ND[part].mul_(row_c1)
                    work = dist.all_reduce(grad_hidden_ND[part], group=self.group, async_op=True)
                    assert work is not None
                    sums.append(work)
                if grad_weight_vD is not None:
                    product(error_cv.T, (hidden_cD * row_c1).to(operand), out=grad_weight_vD, add=True)
        for work in sums:
            work.wait()
        return Pass(logprobs_N, entropy_N, argmax_N, grad_hidden_ND, grad_weight_vD)


def _own(
    exp_cv: Tensor, target_c1: Tensor, here_c: Tensor, with_entropy: bool, with_argmax: bool, first: int
) -> Tensor:
    """What this rank tells the others of a chunk, [c, X]; `exp_cv` turns from logits into exp(logit - own peak).

    Peak, sum of exponentials, the target's logit or 0, sum of exp * (logit - peak), the peak's id (exact in fp32 for
    ids below 2^24).
    """
    if exp_cv.shape[1] == 0:  # a rank without rows
        none = exp_cv.new_zeros(len(exp_cv), 3 + with_entropy + with_argmax)
        none[:, 0] = torch.finfo(exp_cv.dtype).min
        return none
    peak_c, place_c = exp_cv.max(-1)
    # Where all logits are -inf the peak must stay finite: exp(-inf - finite) is 0, exp(-inf + inf) no number.
    peak_c = peak_c.clamp(min=torch.finfo(exp_cv.dtype).min)
    target_c = torch.where(here_c, exp_cv.gather(1, target_c1).squeeze(1), 0.0)
    exp_cv.sub_(peak_c[:, None])
    shifted_cv = exp_cv.clone() if with_entropy else None
    columns = [peak_c, exp_cv.exp_().sum(-1), target_c]
    if shifted_cv is not None:
        shifted_cv.clamp_min_(torch.finfo(exp_cv.dtype).min)  # a logit of -inf adds 0, not 0 * -inf
        columns.append(shifted_cv.mul_(exp_cv).sum(-1))
    if with_argmax:
        columns.append((place_c + first).to(exp_cv.dtype))
    return torch.stack(columns, dim=-1)


class VocabularyLinear(LocalLinear):
    """The head with this rank's rows; called as a module it gives whole logits, for evaluation and generation."""

    group: ProcessGroup
    vocabulary: Vocabulary

    def forward(self, x: Tensor) -> Tensor:
        own = super().forward(copied(x, self.group)).movedim(-1, 0).contiguous()
        return joined_rows(own, self.vocabulary.size, self.group).movedim(0, -1)


def split_head(model: GLM5, world: World) -> Vocabulary | None:
    """Keep this rank's rows of the output head, as a DTensor over the axis `tp`; None where that is one rank.

    Raises:
        ConfigError: the head is the embedding (`tie_word_embeddings`), or the vocabulary does not divide.
    """
    ranks = world.count("tp")
    if ranks == 1:
        return None
    config = model.config
    if config.tie_word_embeddings:
        raise ConfigError("tie_word_embeddings", True, "a head that is the embedding is not divided: use tp=1")
    if config.vocab_size % ranks:
        raise ConfigError("mesh.tp", ranks, f"must divide vocab_size={config.vocab_size}")
    head, group = model.lm_head, world.group("tp")
    weight = head.weight
    own = weight.detach().chunk(ranks)[world.place("tp")].contiguous().clone()
    mesh = world.dense["tp"]
    whole = DTensor.from_local(own, mesh, [Shard(0)], run_check=False, shape=weight.shape, stride=weight.stride())
    head.weight = nn.Parameter(whole, requires_grad=weight.requires_grad)
    head.__class__ = VocabularyLinear  # type: ignore[assignment]
    assert isinstance(head, VocabularyLinear)
    head.group, head.vocabulary = group, Vocabulary(len(own), group, own.device)
    return head.vocabulary


def divided_head(head: nn.Module) -> tuple[Tensor, Vocabulary] | None:
    """This rank's rows of a model's `lm_head` and how it is divided; None where it is whole."""
    return (local(head.weight), head.vocabulary) if isinstance(head, VocabularyLinear) else None
