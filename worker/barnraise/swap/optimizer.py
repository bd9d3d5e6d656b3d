"""AdamW (Loshchilov & Hutter 2019) over flat buffers, by torch's fused kernel; and the learning-rate schedule.

Matrices and embeddings decay, norms and biases do not (GPT-3). Decay differs within one flat buffer, so the buffer is
cut into spans of one kind, neighbours merged, and the kernel gets the list of each kind. Spans start and end on
TENSOR_ALIGN boundaries, whole cache lines: the kernel's vector path covers every element, and its bits do not depend on
the cut.
"""

import math

import torch
from torch import Tensor

from barnraise.spec import Fragment, Recipe
from barnraise.swap.arena import Layer

BETA1, BETA2, EPSILON = 0.9, 0.95, 1e-8  # GPT-3's
WARMUP_FROM = 0.1  # the ledger's clock moves a round at a time: a rate of zero would waste the whole first round
COSINE_TO = 0.1


def schedule(recipe: Recipe, tokens: int) -> float:
    """What to multiply the recipe's learning rate by when the run's ledger holds `tokens`. Between 0 and 1."""
    if tokens < recipe.warmup_tokens:
        return WARMUP_FROM + (1 - WARMUP_FROM) * tokens / recipe.warmup_tokens
    if recipe.schedule == "constant":
        return 1.0
    span = recipe.token_budget - recipe.warmup_tokens
    done = min(1.0, (tokens - recipe.warmup_tokens) / span) if span > 0 else 1.0
    return COSINE_TO + (1 - COSINE_TO) * (1 + math.cos(math.pi * done)) / 2


def spans(fragment: Fragment) -> list[tuple[int, int, bool]]:
    """(begin, end, decays), in order, covering the buffer; padding goes with the tensor before it."""
    found: list[tuple[int, int, bool]] = []
    ends = [slot.offset for slot in fragment.slots[1:]] + [fragment.size]
    for slot, end in zip(fragment.slots, ends, strict=True):
        decays = len(slot.shape) >= 2
        begin = found.pop()[0] if found and found[-1][2] == decays else slot.offset
        found.append((begin, end, decays))
    return found


class AdamW:
    """Steps the layers' `weights` by their `gradient`, keeping moments in their `m` and `v`."""

    def __init__(self, layers: list[Layer], decay: float):
        self.steps = torch.zeros((), device=layers[0].weights.device)  # fp32, where the kernel wants it
        self._calls = [call for layer in layers for call in self._cut(layer, decay)]

    @staticmethod
    def _cut(layer: Layer, decay: float) -> list[tuple[float, list[list[Tensor]]]]:
        buffers = (layer.weights, layer.gradient, layer.m, layer.v)
        cut = spans(layer.fragment)
        calls = []
        for kind, rate in ((True, decay), (False, 0.0)):
            slices = [[flat[begin:end] for begin, end, decays in cut if decays == kind] for flat in buffers]
            calls += [(rate, slices)] if slices[0] else []
        return calls

    @torch.no_grad()
    def step(self, rate: float, shrink: float = 1.0) -> None:
        """One step at learning rate `rate`, with gradients divided by `shrink` (≥ 1: clipping, in the same pass)."""
        self.steps.add_(1)
        scale = None if shrink == 1.0 else torch.tensor(shrink, device=self.steps.device)
        for decay, (weights, gradients, m, v) in self._calls:
            torch._fused_adamw_(
                weights,
                gradients,
                m,
                v,
                [],
                [self.steps] * len(weights),
                lr=rate,
                beta1=BETA1,
                beta2=BETA2,
                weight_decay=decay,
                eps=EPSILON,
                amsgrad=False,
                maximize=False,
                grad_scale=scale,
            )
