"""The ledger: every published figure of GLM-5 recomputed from its configuration, and a planner for any other.

`params` (tensors and counts) · `compute` (pairs, FLOP, floors) · `figures` (what follows from a configuration) ·
`claims` (the rule of verdicts) · `published` and `disputes` (what the sources say) · `table` (all of it joined);
`devices` · `memory` (bytes of a layout) · `plan` (does it fit). Nothing here imports torch. Read `params` first,
then `figures`.
"""

from __future__ import annotations
