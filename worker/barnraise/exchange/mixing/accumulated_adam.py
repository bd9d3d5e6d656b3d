"""AdamW for machines that average weights instead of gradients, after Wang et al., 2410.11998.

Every machine's moments are its own. They would follow the noise of its own small batches, while
those of synchronous training follow the mean over all machines. So the stored moments absorb only
the mean gradient of s steps, whose noise is that of s batches; every step still moves the weights
along its own gradient. With s = 1 this is AdamW.

    m, v     stored moments                 `first_moment`, `second_moment`
    g        gradient of this step          `gradient`
    β₁, β₂   decays                         `betas`
    s        steps that a moment absorbs    `accumulation`
    k        ⌈step / s⌉                     `absorbed`

    x ← x · (1 − αλ) − α · (β₁m + (1−β₁)g) / (1−β₁ᵏ) / (√((β₂v + (1−β₂)g²) / (1−β₂ᵏ)) + ε)
    after every s steps: m ← β₁m + (1−β₁)ḡ and v ← β₂v + (1−β₂)ḡ², where ḡ is their mean gradient
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class AdamSettings:
    """The constants of `AccumulatedAdam`.

    Attributes:
        betas: decays of the first and of the second moment.
        epsilon: added to the root of the second moment.
        weight_decay: share of a weight that a learning rate of one would subtract in a step.
        accumulation: s, steps whose mean gradient the stored moments absorb; Wang et al. let it
            grow with the number of machines.
    """

    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    accumulation: int = 1

    def __post_init__(self) -> None:
        if self.accumulation < 1:
            raise ValueError("the moments absorb the mean of one or more steps")


class AccumulatedAdam:
    """Update one vector of weights; its state is two or three vectors of the same length."""

    def __init__(self, weights: Tensor, settings: AdamSettings) -> None:
        """Create the state.

        Args:
            weights: float32 [n]; gives the state its shape and device.
            settings: the constants.
        """
        self.settings = settings
        self.steps = 0
        self.first_moment = torch.zeros_like(weights)
        self.second_moment = torch.zeros_like(weights)
        accumulates = settings.accumulation > 1
        self._mean_gradient = torch.zeros_like(weights if accumulates else weights[:0])

    @torch.no_grad()
    def apply_gradient(self, weights: Tensor, gradient: Tensor, learning_rate: float) -> None:
        """Move the weights one step.

        Args:
            weights: float32 [n], changed in place.
            gradient: float32 [n].
            learning_rate: α.
        """
        settings = self.settings
        beta1, beta2 = settings.betas
        self.steps += 1
        absorbed = -(-self.steps // settings.accumulation)
        if settings.accumulation == 1:  # the moments of the step are those that are stored
            self._absorb(gradient)
            first, second = self.first_moment, self.second_moment
        else:
            first = self.first_moment.mul(beta1).add_(gradient, alpha=1 - beta1)
            second = self.second_moment.mul(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        denominator = second.sqrt().div_(math.sqrt(1 - beta2**absorbed)).add_(settings.epsilon)
        weights.mul_(1 - learning_rate * settings.weight_decay)
        weights.addcdiv_(first, denominator, value=-learning_rate / (1 - beta1**absorbed))
        if settings.accumulation > 1:
            mean = self._mean_gradient.add_(gradient, alpha=1 / settings.accumulation)
            if self.steps % settings.accumulation == 0:
                self._absorb(mean)
                mean.zero_()

    def _absorb(self, gradient: Tensor) -> None:
        """Bring a gradient, or the mean of several, into the stored moments."""
        beta1, beta2 = self.settings.betas
        self.first_moment.mul_(beta1).add_(gradient, alpha=1 - beta1)
        self.second_moment.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
