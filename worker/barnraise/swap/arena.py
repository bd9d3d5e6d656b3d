"""Exact-size buffers: everything a worker keeps of a fragment, each kind in one flat tensor of the fragment's size.

A swap is then one copy, an optimizer step a call or two, a fragment one slice. The weights, gradient and Adam's moments
lie on the training device (16 bytes a parameter); momentum and error feedback lie where the anchor does, on the host
(8 more). Padding between tensors is zero and stays zero.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from barnraise.model import Weights, views
from barnraise.spec import UNIT_BITS, Fragment, ModelSpec

UNIT = 2.0**-UNIT_BITS


def to_float(units: Tensor) -> Tensor:
    """int32 units → fp32 weights: nearest fp32 to the integer, then an exact scaling. The same bits everywhere."""
    return units.float().mul_(UNIT)


@dataclass(frozen=True)
class Layer:
    """One fragment's state on this machine. All tensors flat, [fragment.size]."""

    fragment: Fragment
    weights: Tensor  # fp32: the replica
    gradient: Tensor  # fp32
    m: Tensor  # fp32: Adam's first moment
    v: Tensor  # fp32: Adam's second moment
    momentum: Tensor  # fp32: this author's outer momentum
    feedback: Tensor  # int32 units: what updates have not said yet
    parameters: Weights  # autograd leaves: views of `weights` whose .grad are views of `gradient`


class Arena:
    """Every layer of a model, allocated once."""

    def __init__(self, model: ModelSpec, device: torch.device):
        self.layers = [_allocate(fragment, device) for fragment in model.fragments()]

    @property
    def parameters(self) -> list[Weights]:
        return [layer.parameters for layer in self.layers]

    def clear_gradients(self) -> None:
        torch._foreach_zero_([layer.gradient for layer in self.layers])


def _allocate(fragment: Fragment, device: torch.device) -> Layer:
    weights, gradient, m, v = (torch.zeros(fragment.size, device=device) for _ in range(4))
    parameters = {name: view.detach().requires_grad_() for name, view in views(fragment, weights).items()}
    for name, view in views(fragment, gradient).items():
        parameters[name].grad = view  # autograd adds in place into a gradient that is there: the flat buffer
    momentum, feedback = torch.zeros(fragment.size), torch.zeros(fragment.size, dtype=torch.int32)
    return Layer(fragment, weights, gradient, m, v, momentum, feedback, parameters)
