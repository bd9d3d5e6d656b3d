"""Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) on matrices in flat buffers.

The update is the momentum's nearest orthogonal matrix, roughly: five steps of a Newton–Schulz
iteration bring all singular values near 1. Its size is that of an AdamW update (Liu et al. 2025,
arXiv:2502.16982, section 2.2), so that one weight decay and similar rates serve both.

    m ← μ·m + (1−μ)·g
    x = (1−μ)·g + μ·m, divided by its norm; five times: x ← a·x + (b·xxᵀ + c·(xxᵀ)²)·x
    w ← w·(1 − αλ) − α · 0.2·√max(rows, columns) · x

    g, w   gradient and weights         `gradient`, `weights`
    m, μ   momentum and its decay       `momentum`, `MOMENTUM`
    α, λ   learning rate, decay         `step.matrix_rate`, `step.weight_decay`

The norm of a gradient does not matter, so that matrices are not clipped. A matrix is updated as a
whole, in buffers of its own, by the threads with which torch computes in the calling thread: its
bits do not depend on where it lies.
"""

import torch
from torch import Tensor

from barnraise.planning.cost_model import NEWTON_SCHULZ_STEPS
from barnraise.planning.tile_layout import Matrix
from barnraise.swap.adamw import AdamWStep, sum_of_squares

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # a, b, c
UPDATE_RMS = 0.2  # of an element of AdamW's updates
SMALLEST_NORM = 1e-7  # keeps the division of a zero matrix finite


def update_matrix(
    step: AdamWStep, matrix: Matrix, weights: Tensor, gradient: Tensor, momentum: Tensor
) -> None:
    """Apply one step of Muon to one matrix in place.

    Args:
        step: the hyperparameters; its divisor is not used.
        matrix: the matrix's sides.
        weights: fp32 [rows · columns].
        gradient: fp32 [rows · columns]; stays as it is.
        momentum: fp32 [rows · columns].
    """
    m, n = matrix.short_and_long
    x, spare = (weights.new_empty(m * n) for _ in range(2))
    torch.lerp(momentum, gradient, 1 - MOMENTUM, out=spare)
    _replace(momentum, spare, step.found_inf)
    g, average = (flat.view(matrix.rows, matrix.columns) for flat in (gradient, spare))
    if matrix.rows > matrix.columns:
        g, average = g.mT, average.mT
    torch.lerp(g, average, MOMENTUM, out=x.view(m, n))
    x.div_(sum_of_squares(x).sqrt_().clamp_min_(SMALLEST_NORM))
    x, spare = orthogonalise(x.view(m, n), spare.view(m, n))
    direction = x if matrix.rows <= matrix.columns else x.mT
    scale = UPDATE_RMS * n**0.5
    new = spare.view(-1)
    torch.mul(weights, 1 - step.matrix_rate * step.weight_decay, out=new)
    new.view(matrix.rows, matrix.columns).sub_(direction, alpha=step.matrix_rate * scale)
    _replace(weights, new, step.found_inf)


def find_direction(average: Tensor) -> Tensor:
    """Return what a step of rate 1 subtracts from a matrix, for its average gradient.

    Args:
        average: fp32 [rows, columns]; overwritten.
    """
    is_wide = average.shape[0] <= average.shape[1]
    x = (average if is_wide else average.mT).contiguous()
    x.div_(torch.linalg.vector_norm(x, dtype=torch.float64).clamp_min_(SMALLEST_NORM))
    direction, _ = orthogonalise(x, torch.empty_like(x))
    direction.mul_(UPDATE_RMS * x.shape[1] ** 0.5)
    return direction if is_wide else direction.mT


def orthogonalise(x: Tensor, spare: Tensor) -> tuple[Tensor, Tensor]:
    """Bring the singular values of a matrix of norm 1 near 1.

    Args:
        x: fp32 [m, n], m ≤ n; overwritten.
        spare: a buffer like `x`.

    Returns:
        The result, and the buffer that does not hold it.
    """
    a, b, c = COEFFICIENTS
    products = x.new_empty(x.shape[0], x.shape[0])
    polynomial = torch.empty_like(products)
    for _ in range(NEWTON_SCHULZ_STEPS):
        torch.mm(x, x.mT, out=products)
        torch.addmm(products, products, products, beta=b, alpha=c, out=polynomial)
        torch.addmm(x, polynomial, x, beta=a, out=spare)
        x, spare = spare, x
    return x, spare


def _replace(target: Tensor, value: Tensor, found_inf: Tensor | None) -> None:
    """Copy a value, which is overwritten, unless the step found what is not finite."""
    if found_inf is not None:
        torch.where(found_inf.bool(), target, value, out=value)
    target.copy_(value)
