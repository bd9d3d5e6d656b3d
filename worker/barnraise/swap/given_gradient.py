"""Run autograd's backward from a gradient that is there already."""

from typing import Any

import torch
from torch import Tensor


class _GivenGradient(torch.autograd.Function):
    """A scalar whose gradient by a tensor is given."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, gradient: Tensor) -> Tensor:
        """Return the scalar, which has no value."""
        ctx.save_for_backward(gradient)
        return output.new_empty(())

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> tuple[Tensor, None]:
        """Return the gradient that is given."""
        (gradient,) = ctx.saved_tensors
        return gradient, None


def run_backward(output: Tensor, gradient: Tensor) -> None:
    """Compute the gradients of an output's leaves from its own, as `output.backward(gradient)`.

    That call imports sympy to compare two shapes, which takes a second and 50 MB for good. On a GPU
    a scalar costs a kernel in each block, and CUDA's libraries take far more memory.
    """
    if output.device.type != "cpu":
        output.backward(gradient)
        return
    with torch.enable_grad():
        _GivenGradient.apply(output, gradient).backward()
