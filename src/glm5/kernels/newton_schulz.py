"""Newton-Schulz orthogonalisation, the heart of Muon: a batch of matrices to their nearest orthogonal factors.

An update matrix U = P S Qᵀ is replaced by about P Qᵀ, without an SVD: an odd polynomial, applied five times,
drives every singular value towards 1. The coefficients are Moonlight's (arXiv:2502.16982). They are chosen for
speed and do not converge to exactly 1: after five steps a value that was at least 1% of the matrix's Frobenius norm
lies between 0.68 and 1.135, one of at least 0.2% between 0.68 and 1.203.

Legend of this file: A rows · B columns of a matrix, after any leading batch dimensions. Read next: `train.optim`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from glm5.kernels.dispatch import pick

# Of the quintic x -> a x + b x^3 + c x^5.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def newton_schulz(
    m_BAB: Tensor,
    steps: int = 5,
    dtype: torch.dtype | None = None,
    eps: float = 1e-7,
) -> Tensor:
    """Replace the singular values of every matrix by values near 1, keeping its singular vectors.

    Args:
        m_BAB: [..., A, B], any floating dtype; every leading dimension is a batch. It is not changed.
        steps: applications of the quintic.
        dtype: of the iteration, `torch.float32` or `torch.bfloat16`; by default the input's own.
        eps: added to the Frobenius norm (taken in fp32) that scales the input. A matrix far below it, such as the
            stale momentum of an expert that no token reaches, fades to zero; a zero matrix stays exactly zero.

    Returns:
        [..., A, B] of the iteration's dtype. Matrices never mix: a NaN stays in its own matrix.

    Raises:
        ValueError: the input is not a matrix, or the dtype is not a floating one.
    """
    dtype = m_BAB.dtype if dtype is None else dtype
    if m_BAB.ndim < 2:
        raise ValueError(f"newton_schulz needs [..., A, B], got shape {tuple(m_BAB.shape)}")
    if not (dtype.is_floating_point and m_BAB.is_floating_point()):
        raise ValueError(f"newton_schulz iterates in a floating dtype, got {m_BAB.dtype} and dtype={dtype}")
    if m_BAB.numel() == 0:
        return m_BAB.to(dtype, copy=True)
    a, b, c = COEFFICIENTS
    rows, cols = m_BAB.shape[-2:]
    # The Gram matrix is cheapest on the short side.
    x = m_BAB.reshape(-1, rows, cols)
    x = x.mT if rows > cols else x
    norm_dtype = torch.promote_types(m_BAB.dtype, torch.float32)
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=norm_dtype) + eps
    divide = pick("divided", x)
    x = divide(x, norm.flatten(), dtype) if divide is not None else (x / norm).to(dtype)
    fast = pick("newton_schulz", x)
    if fast is not None:
        x = fast(x, steps, COEFFICIENTS)
    else:
        for _ in range(steps):
            gram = torch.bmm(x, x.mT)
            poly = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
            poly.diagonal(dim1=-2, dim2=-1).add_(a)
            x = torch.bmm(poly, x)
    x = x.mT if rows > cols else x
    return x.reshape(m_BAB.shape)


def nesterov_input(grad_PRC: Tensor, momentum_PRC: Tensor, mu: float, out_PRC: Tensor, *, move: bool = True) -> None:
    """What Muon orthogonalises: out = grad + mu momentum, after momentum = mu momentum + grad where it is to `move`.

    Args:
        grad_PRC, momentum_PRC, out_PRC: [P, R, C] at any strides; all but the gradient fp32 (or float64).
    """
    fast = pick("nesterov", momentum_PRC, out_PRC)
    if fast is not None:
        fast(grad_PRC, momentum_PRC, mu, out_PRC, move=move)
        return
    if move:
        momentum_PRC.mul_(mu).add_(grad_PRC)
    torch.add(grad_PRC, momentum_PRC, alpha=mu, out=out_PRC)


def move_momentum(grad: Tensor, momentum: Tensor, mu: float) -> None:
    """momentum = mu momentum + grad, in place, as `nesterov_input` moves it."""
    fast = pick("move_momentum", momentum, grad)
    if fast is not None:
        fast(grad, momentum, mu)
    else:
        momentum.mul_(mu).add_(grad)


def move_weights(weight_PRC: Tensor, factor_PRC: Tensor, keep: float, rate: float) -> None:
    """weight = keep weight + rate factor, in place; shapes and strides as in `nesterov_input`."""
    fast = pick("move_weights", weight_PRC)
    if fast is not None:
        fast(weight_PRC, factor_PRC, keep, rate)
    else:
        weight_PRC.mul_(keep).add_(factor_PRC, alpha=rate)


def orthogonal_factor_svd(m_BAB: Tensor) -> Tensor:
    """The exact orthogonal factor P Qᵀ of [..., A, B] by SVD in float64: what `newton_schulz` approximates.

    A singular value of 0 (up to rounding) has no direction and contributes nothing, as in the iteration.
    """
    p, s, qt = torch.linalg.svd(m_BAB.double(), full_matrices=False)
    cutoff = s[..., :1] * (max(m_BAB.shape[-2:]) * torch.finfo(torch.float64).eps)
    keep = (s > cutoff).to(p.dtype)
    return (p * keep.unsqueeze(-2)) @ qt
