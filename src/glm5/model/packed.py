"""What FP8 pages hold of a position: its latent row and its index key in 8 bits, with their scales.

A latent row is its normed latent in e4m3 with an fp32 scale for each 128 of it, then the rotated part in bfloat16: at
GLM-5's widths the 656 bytes of `kernels.latent_rows`, which `kernels.latent_rows.sparse_attention_fp8` reads where they
lie. An index key is turned and rounded as `kernels.indexer_fp8` says, 132 bytes. Scales are of each row, never of a
whole tensor. Source: DeepSeek-V3.2; report section 3.2 (inference in low precision). Read next: `paged`, `mla`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from glm5.kernels.formats import BLOCK, E4M3, Packed, pack, unpack
from glm5.model.config import ModelConfig
from glm5.utils.errors import ConfigError


def page_tensors(config: ModelConfig) -> tuple[tuple[int, torch.dtype], ...]:
    """Width and dtype of each tensor of a layer: packed latent rows, index keys, and the keys' scales.

    Raises:
        ConfigError: widths that cannot be packed.
    """
    width, packed = config.index_head_dim, row_bytes(config.kv_lora_rank, config.qk_rope_head_dim)
    if width & (width - 1) or config.kv_lora_rank % 4 or packed % 4:
        rule = "takes index keys of a power of two, and latent rows whose parts are whole multiples of 4 bytes"
        raise ConfigError("kv_cache_dtype", "fp8_e4m3", rule)
    return (packed, torch.uint8), (width, E4M3), (1, torch.float32)


def row_bytes(latent: int, rotary: int) -> int:
    """Bytes of a packed latent row."""
    return latent + 4 * -(-latent // BLOCK) + 2 * rotary


def pack_rows(rows: Tensor, latent: int) -> Tensor:
    """Latent rows [..., latent + rotary] as uint8 [..., row_bytes]."""
    p = pack(rows[..., :latent], "fp8", columns=BLOCK)
    parts = (p.values, p.scale, rows[..., latent:].to(torch.bfloat16).contiguous())
    return torch.cat([part.view(torch.uint8) for part in parts], -1)


def unpack_rows(rows: Tensor, latent: int) -> Tensor:
    """Packed rows as fp32 [..., latent + rotary]."""
    at = latent + 4 * -(-latent // BLOCK)
    values, scale = rows[..., :latent].view(E4M3), rows[..., latent:at].view(torch.float32)
    return torch.cat((unpack(Packed("fp8", values, scale, 1, BLOCK)), rows[..., at:].view(torch.bfloat16).float()), -1)
