"""The ledger: every published figure of GLM-5 recomputed from its configuration, and a planner for any other.

`params` (tensors and counts) · `compute` (pairs, FLOPs, floors) · `devices` · `memory` (bytes a device holds) ·
`figures` (what follows from a configuration) · `published` (what the sources say) · `claims` (the two compared).
Nothing here imports torch. Read `params` first, then `claims`.
"""

from __future__ import annotations
