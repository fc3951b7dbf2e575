"""Numbers of 8 and 4 bits with scales: e4m3, int8 and int4, packed and unpacked, and products with them.

A scale is shared by a block of `rows` x `columns` elements of the last two dimensions, and is the block's largest
magnitude over the format's: nothing saturates, zeros stay zeros, and a NaN or an infinity spoils its whole block,
visibly. These are the layouts that the fast versions read: e4m3 per row of an index query or key, per 1 x 128 of
activations, per 128 x 128 of weights (as the published FP8 checkpoints have them); int4 two to a byte, even column in
the low half. Source: DeepSeek-V3, section 3.3; report section 3.2 (inference in low precision). Read next: `hadamard`,
`latent_rows`, `moe_fp8`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from glm5.kernels.dispatch import pick

E4M3 = torch.float8_e4m3fn
# Largest magnitude of each format. int4 leaves -8 out, so that it is symmetric.
LARGEST = {"fp8": 448.0, "int8": 127.0, "int4": 7.0}
SMALLEST_SCALE = 2.0**-126  # of a block of zeros, or of denormals
BLOCK = 128


@dataclass(frozen=True)
class Packed:
    """A matrix, or a stack of them, in a low-bit format.

    Attributes:
        kind: "fp8", "int8" or "int4".
        values: e4m3 or int8 [..., R, C]; of int4 uint8 [..., R, C / 2].
        scale: fp32 [..., ceil(R / rows), ceil(C / columns)].
        rows, columns: of a block that shares a scale.
    """

    kind: str
    values: Tensor
    scale: Tensor
    rows: int
    columns: int

    @property
    def shape(self) -> tuple[int, ...]:
        *lead, width = self.values.shape
        return (*lead, width * 2 if self.kind == "int4" else width)


def pack(x: Tensor, kind: str, rows: int = 1, columns: int | None = None) -> Packed:
    """x [..., R, C] in a low-bit format, a scale for every `rows` x `columns` (None: the whole width).

    Each element is within half a step of x: for int8 and int4 scale / 2, for fp8 the larger of |x| / 16 and
    scale / 1024.

    Raises:
        ValueError: an unknown format, or int4 of an odd width.
    """
    if kind not in LARGEST:
        raise ValueError(f"kind={kind!r}: must be one of {', '.join(LARGEST)}")
    if kind == "int4" and x.shape[-1] % 2:
        raise ValueError(f"int4 takes an even number of columns, not {x.shape[-1]}")
    columns = x.shape[-1] if columns is None else columns
    x = x.float()
    # By a tensor: a GPU multiplies by the reciprocal of a number, which gives other bits than a CPU's division.
    largest = torch.full((), LARGEST[kind], device=x.device)
    scale = (_block_max(x.abs(), rows, columns) / largest).clamp(min=SMALLEST_SCALE)
    # The quotient may round up to just above the largest.
    y = (x / _spread(scale, x, rows, columns)).clamp(-LARGEST[kind], LARGEST[kind])
    if kind == "fp8":
        return Packed(kind, y.to(E4M3), scale, rows, columns)
    whole = y.round().nan_to_num(0.0).to(torch.int8)  # the scale keeps the NaN
    if kind == "int8":
        return Packed(kind, whole, scale, rows, columns)
    low, high = (whole[..., i::2] & 15 for i in (0, 1))
    return Packed(kind, (low | high << 4).view(torch.uint8), scale, rows, columns)


def unpack(p: Packed) -> Tensor:
    """The matrix in fp32."""
    if p.kind == "int4":
        signed = p.values.view(torch.int8)
        values = torch.stack((signed << 4 >> 4, signed >> 4), -1).flatten(-2).float()  # shifts extend the sign
    else:
        values = p.values.float()
    return values * _spread(p.scale, values, p.rows, p.columns)


def packed_matmul(x_MK: Tensor, weight_NK: Packed) -> Tensor:
    """x W^T in x's dtype, summed in fp32: the seam that quantised linear layers call.

    Args:
        x_MK: [..., K]. weight_NK: a matrix [N, K] in any format.
    """
    fast = pick("packed_matmul", x_MK, weight_NK.values, weight_NK.scale)
    if fast is not None:
        out: Tensor = fast(x_MK, weight_NK)
        return out
    return (x_MK.float() @ unpack(weight_NK).t()).to(x_MK.dtype)


def rounded(x: Tensor, kind: str = "fp8", rows: int = 1, columns: int | None = BLOCK) -> Tensor:
    """What of x is left in a format, fp32. By default as activations of fp8 products: e4m3 by 1 x 128."""
    return unpack(pack(x, kind, rows, columns))


def _block_max(x: Tensor, rows: int, columns: int) -> Tensor:
    """Largest element of every block; the last blocks may be partial. NaN if there is one."""
    pad = (0, -x.shape[-1] % columns, 0, -x.shape[-2] % rows)
    x = torch.nn.functional.pad(x, pad) if any(pad) else x
    return x.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows)).amax((-3, -1))


def _spread(scale: Tensor, like: Tensor, rows: int, columns: int) -> Tensor:
    """A scale for every element of `like`, or for every row of it where a block is as wide."""
    if rows > 1:
        scale = scale.repeat_interleave(rows, -2)[..., : like.shape[-2], :]
    if scale.shape[-1] > 1:
        scale = scale.repeat_interleave(columns, -1)[..., : like.shape[-1]]
    return scale
