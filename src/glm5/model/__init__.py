"""The one model definition that trainer and engine share.

`config` (no torch) · `presets` (no torch) · `layers` · `indexer` · `mla` · `gqa` · `moe` · `block` · `mtp` · `cache` ·
`trace` · `glm5` · `weights` · `sampling` · `speculate` · `generate`. Read `config` first, then `glm5`.
"""

from __future__ import annotations

from glm5.model.config import ModelConfig

__all__ = ["ModelConfig"]
