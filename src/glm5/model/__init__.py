"""The one model definition that trainer and engine share.

`config` (no torch) · `presets` (no torch) · `layers` · `indexer` · `mla` · `moe` · `mtp` · `cache` · `glm5` ·
`weights` · `generate` · `variants`. Read `config` first, then `glm5`.
"""

from __future__ import annotations

from glm5.model.config import ModelConfig

__all__ = ["ModelConfig"]
