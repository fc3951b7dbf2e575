"""Hopper kernels in CUDA C++: sparse MLA, indexer, stable top-k, experts, where Triton left too much time on the table.

Built by `nvcc` on first use into the user's cache, one plain shared library without torch's headers, called through
ctypes with raw pointers. `docs/kernels.md` has the ideas and the measurements. Read next: `sparse_mla`, `topk`.
"""

from __future__ import annotations

from glm5.kernels.cuda.build import available
from glm5.kernels.cuda.index_scores import index_scores, index_select
from glm5.kernels.cuda.moe import grouped_swiglu
from glm5.kernels.cuda.moe_fp8 import grouped_swiglu_fp8
from glm5.kernels.cuda.sparse_mla import sparse_mla
from glm5.kernels.cuda.sparse_mla_backward import sparse_mla_backward
from glm5.kernels.cuda.sparse_mla_target import sparse_mla_target
from glm5.kernels.cuda.topk import stable_topk

__all__ = [
    "available",
    "grouped_swiglu",
    "grouped_swiglu_fp8",
    "index_scores",
    "index_select",
    "sparse_mla",
    "sparse_mla_backward",
    "sparse_mla_target",
    "stable_topk",
]
