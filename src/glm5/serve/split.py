"""Context parallel: the rows of one call, shared out among the ranks of a `cp` group, which all have the same pages.

Each rank runs a piece of the flat batch through projections, attention and experts; before attention everyone's new
latent rows and index keys are gathered and written, so that pages stay copies of each other, and whatever reads them
later (decoding, another prompt that begins alike) finds them on every rank. A prompt's chunk takes so the time of a
share of it, and communicates little: a latent row and an index key of each token and layer. Calls of few rows are run
whole by everyone. Source: report section 3; FlashMLA's latent rows are read by all heads, so positions are what is left
to divide. Read first: `glm5.model.paged`; then `ranks`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from glm5.kernels.visibility import Visibility
from glm5.model.cache import Part
from glm5.model.paged import PagedBatch, Run


class SplitBatch(PagedBatch):
    """This rank's piece of a call; the entries of the whole are written here.

    Args:
        whole: the same on all ranks. group: who takes part.
    """

    def __init__(self, whole: PagedBatch, group: dist.ProcessGroup) -> None:
        self.whole, self._group = whole, group
        total, place = whole.row_N.shape[0], dist.get_rank(group)
        self._total, self._each = total, -(-total // group.size())
        begin, end = (min(total, n * self._each) for n in (place, place + 1))
        pieces, rows = [], []  # of this rank; and where each one's rows are among its own, in the order of the whole
        for run, at in zip(whole.runs, whole.offsets, strict=True):
            first, last = max(at, begin), min(at + run.count, end)
            if first < last:
                pieces.append(Run(run.table, run.start + first - at, last - first))
                rows.append((first - begin, last - begin))
        super().__init__(whole.cache, pieces, by_row=whole.by_row)
        device = whole.row_N.device
        self._mine = slice(begin, end)
        # For each of this rank's rows, in the order of the whole: which row of this batch it is; and back.
        self._own_n = torch.empty(end - begin, dtype=torch.int64, device=device)
        for (first, last), at in zip(rows, self.offsets, strict=True):
            self._own_n[first:last] = torch.arange(at, at + last - first, device=device)
        self._back_n = self._own_n.argsort()

    def share(self, ids_1N: Tensor) -> Tensor:
        """This rank's ids of the whole batch, in the order of this one."""
        return ids_1N[:, self._mine][:, self._back_n]

    def gather(self, x_1nX: Tensor) -> Tensor:
        """Everyone's rows, [1, N, X], in the order of the whole batch."""
        mine = x_1nX.new_zeros(self._each, x_1nX.shape[-1])
        mine[: len(self._own_n)] = x_1nX[0, self._own_n]
        parts = [torch.empty_like(mine) for _ in range(self._group.size())]
        dist.all_gather(parts, mine, group=self._group)
        return torch.cat(parts)[None, : self._total]

    def store(
        self, layer: int, slot_BT: Tensor | None, visible: Visibility, rows_1NX: Tensor, index_1NI: Tensor
    ) -> list[Part]:
        """Write everyone's new rows; what this rank's groups read."""
        width = rows_1NX.shape[-1]
        both = self.gather(torch.cat((rows_1NX, index_1NI), -1))
        self.whole.write(layer, both[..., :width], both[..., width:])
        return self.parts(layer)

    def pools(self, layer: int) -> None:
        """None: everyone's rows are gathered before they are written."""

    def keep_hidden(self, hidden_1ND: Tensor) -> None:
        """Left to the whole batch, when everyone's rows are there."""
