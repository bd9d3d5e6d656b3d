"""Define how machines agree in every step, and take one such step.

`NeighbourMixing` (decentralised Adam) implements `StepAveraging`.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from barnraise.exchange.mixing.accumulated_adam import AccumulatedAdam


class StepAveraging(Protocol):
    """Bring the replicas of several machines together, a little in each step."""

    def start_step(self, weights: Tensor) -> None:
        """Send what others need of the weights, float32 [n], before the step's arithmetic."""

    def average_gradient(self, gradient: Tensor) -> None:
        """Replace this machine's gradient, float32 [n], in place."""

    def mix_weights(self, weights: Tensor) -> None:
        """Mix others' weights into this machine's, float32 [n], in place."""


def train_step(
    averaging: StepAveraging,
    optimizer: AccumulatedAdam,
    weights: Tensor,
    compute_gradient: Callable[[], Tensor],
    learning_rate: float,
) -> None:
    """Take one step: x_i ← Σ_j W_ij x_j − α · Adam_i(g_i), with the gradient at the un-mixed x_i.

    Messages travel while the gradient is computed.

    Args:
        averaging: how machines agree.
        optimizer: of this machine, with moments of its own.
        weights: x_i, float32 [n], changed in place.
        compute_gradient: returns g_i at the current weights, float32 [n].
        learning_rate: α.
    """
    averaging.start_step(weights)
    gradient = compute_gradient()
    averaging.average_gradient(gradient)
    with torch.no_grad():
        averaging.mix_weights(weights)
    optimizer.apply_gradient(weights, gradient, learning_rate)
