"""AdamW for machines that average weights instead of gradients, after Wang et al., 2410.11998.

Every machine's moments are its own. They would follow the noise of its own small batches, while
those of synchronous training follow the mean over all machines. So the stored moments absorb only
the mean gradient ḡ of s steps, whose noise is that of s batches; every step still moves the weights
along its own gradient g, with moments that would follow if g were absorbed now. With s = 1 this is
AdamW. Weights, moments and gradients lie where the plan has them, in its precision; ḡ is one more
vector.

    m, v   stored moments                   `moments.m`, `moments.v`
    s      steps that a moment absorbs      `accumulation`
    k      ⌈step / s⌉                       `absorbed.number`
    λ      weight decay                     `step.weight_decay`

    x ← x · (1 − αλ) − α · (β₁m + (1−β₁)g) / (1−β₁ᵏ) / (√((β₂v + (1−β₂)g²) / (1−β₂ᵏ)) + ε)
    after every s steps: m ← β₁m + (1−β₁)ḡ and v ← β₂v + (1−β₂)ḡ²
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from barnraise.planning.mixing_memory import MOVED_ELEMENTS
from barnraise.spec import Fragment
from barnraise.swap.adam_moments import AdamMoments
from barnraise.swap.adamw import AdamWStep


@dataclass
class MeanGradients:
    """The part of ḡ that has been summed up, for each fragment.

    Attributes:
        accumulation: s, steps whose mean gradient the moments absorb.
    """

    accumulation: int

    def __post_init__(self) -> None:
        self._means: dict[int, Tensor] = {}

    def find(self, fragment: Fragment, device: torch.device) -> Tensor:
        """Return ḡ of a fragment, fp32 [n]; a new one is zero and lies on `device`."""
        if fragment.index not in self._means:
            self._means[fragment.index] = torch.zeros(fragment.size, device=device)
        return self._means[fragment.index]

    def replace(self, fragment: Fragment, mean: Tensor, device: torch.device) -> None:
        """Replace ḡ of a fragment by a saved one, fp32 [n]."""
        self.find(fragment, device).copy_(mean)

    def clear(self) -> None:
        """Begin again with a step whose number is a multiple of s."""
        self._means.clear()

    def update_tile(
        self, step: AdamWStep, begin: int, tile: tuple[AdamMoments, Tensor, Tensor]
    ) -> None:
        """Apply one step in place to the tile that begins at element `begin` of its fragment.

        The step's number counts steps of the weights. The tile is the moments, the weights as
        streamed [n], and the gradient, fp32 [n].
        """
        moments, weights, gradient = tile
        mean = self.find(step.fragment, gradient.device)[begin : begin + weights.numel()]
        for first in range(0, weights.numel(), MOVED_ELEMENTS):
            piece = slice(first, min(first + MOVED_ELEMENTS, weights.numel()))
            self._update_piece(
                step,
                begin + first,
                (moments.part(piece.start, piece.stop), weights[piece], gradient[piece]),
                mean[piece],
            )

    def _update_piece(
        self,
        step: AdamWStep,
        begin: int,
        piece: tuple[AdamMoments, Tensor, Tensor],
        mean: Tensor,
    ) -> None:
        moments, weights, gradient = piece
        number = int(step.number)
        absorbed = replace(step, number=-(-number // self.accumulation))
        _copy_moments(moments).update(absorbed, begin, weights, gradient)
        mean.add_(gradient, alpha=1 / self.accumulation)  # by now the gradient is clipped
        if number % self.accumulation == 0:
            still = replace(absorbed, learning_rate=0.0, weight_decay=0.0, gradient_divisor=1.0)
            unmoved = torch.zeros_like(mean)
            replace(moments, low=None).update(still, begin, unmoved, mean)
            mean.zero_()


def _copy_moments(moments: AdamMoments) -> AdamMoments:
    """Return a copy of the moments; the low halves of the weights stay those of the original."""
    scales = None if moments.scales is None else moments.scales.clone()
    return AdamMoments(moments.m.clone(), moments.v.clone(), scales, moments.low)
