"""AdamW (Loshchilov & Hutter 2019) over flat buffers, by torch's fused kernel; and the learning-rate schedule.

Matrices and embeddings decay, norms and biases do not (GPT-3). Decay differs within one flat buffer, so a buffer is
cut into spans of one kind, neighbours merged, and the kernel gets the list of each kind. Spans start and end on
TENSOR_ALIGN boundaries, whole cache lines: the kernel's vector path covers every element, and its bits do not depend on
the cut. So any tile of a fragment can be stepped by itself, wherever it lies.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from barnraise.spec import ALIGN, Fragment, Recipe
from barnraise.swap.tile_threads import BLOCK, Scratch, for_each_tile

BETA1, BETA2, EPSILON = 0.9, 0.95, 1e-8  # GPT-3's
WARMUP_FROM = 0.1  # the ledger's clock moves a round at a time: a rate of zero would waste the whole first round
COSINE_TO = 0.1


def learning_rate_scale(recipe: Recipe, tokens: int) -> float:
    """What to multiply the recipe's learning rate by when the run's ledger holds `tokens`. Between 0 and 1."""
    if tokens < recipe.warmup_tokens:
        return WARMUP_FROM + (1 - WARMUP_FROM) * tokens / recipe.warmup_tokens
    if recipe.schedule == "constant":
        return 1.0
    span = recipe.token_budget - recipe.warmup_tokens
    done = min(1.0, (tokens - recipe.warmup_tokens) / span) if span > 0 else 1.0
    return COSINE_TO + (1 - COSINE_TO) * (1 + math.cos(math.pi * done)) / 2


def decay_spans(fragment: Fragment) -> list[tuple[int, int, bool]]:
    """(begin, end, decays), in order, covering the buffer; padding goes with the tensor before it."""
    found: list[tuple[int, int, bool]] = []
    ends = [slot.offset for slot in fragment.slots[1:]] + [fragment.size]
    for slot, end in zip(fragment.slots, ends, strict=True):
        decays = len(slot.shape) >= 2
        begin = found.pop()[0] if found and found[-1][2] == decays else slot.offset
        found.append((begin, end, decays))
    return found


@dataclass(frozen=True)
class AdamWStep:
    """One AdamW step of one fragment, to be made on its tiles in any order, on any thread."""

    cut: list[tuple[int, int, bool]]  # spans
    count: Tensor  # fp32 scalar: of the fragment's steps, with this one
    rate: float
    decay: float
    scale: Tensor | None  # fp32 scalar that divides the gradient

    @classmethod
    def of(
        cls, fragment: Fragment, begin: int, flat: Tensor, *,
        steps: int | Tensor, rate: float, decay: float, shrink: float = 1.0,
    ) -> "AdamWStep":  # fmt: skip
        """For the tile at `begin` that `flat` is of. `steps`: this step's number, from 1. `shrink` ≥ 1: what clipping
        divides the gradient by, in the same pass."""
        end, device = begin + flat.numel(), flat.device
        assert begin % ALIGN == 0 and end % ALIGN == 0 and end <= fragment.size, (
            f"[{begin}, {end}) is no tile"
        )
        assert shrink >= 1.0, f"clipping does not stretch: {shrink}"
        cut = decay_spans(fragment) if decay else [(0, fragment.size, False)]
        count = torch.as_tensor(steps, dtype=torch.float32, device=device)
        return cls(
            cut, count, rate, decay, None if shrink == 1.0 else torch.tensor(shrink, device=device)
        )

    def apply(self, begin: int, weights: Tensor, gradient: Tensor, m: Tensor, v: Tensor) -> None:
        """In place, fp32 [n] each; a gradient that is divided is left divided."""
        end, flats = begin + weights.numel(), (weights, gradient, m, v)
        mine = [span for span in self.cut if span[0] < end and begin < span[1]]
        if len(mine) == 1:  # most tiles: nothing to cut
            self._call(mine[0][2], *([flat] for flat in flats))
            return
        for kind in {decays for _, _, decays in mine}:
            pieces = [
                slice(max(a, begin) - begin, min(b, end) - begin)
                for a, b, decays in mine
                if decays == kind
            ]
            self._call(kind, *([flat[piece] for piece in pieces] for flat in flats))

    def _call(
        self,
        decays: bool,
        weights: list[Tensor],
        gradients: list[Tensor],
        m: list[Tensor],
        v: list[Tensor],
    ):
        torch._fused_adamw_(
            weights,
            gradients,
            m,
            v,
            [],
            [self.count] * len(weights),
            lr=self.rate,
            beta1=BETA1,
            beta2=BETA2,
            weight_decay=self.decay if decays else 0.0,
            eps=EPSILON,
            amsgrad=False,
            maximize=False,
            grad_scale=self.scale,
        )


def adamw_update(
    fragment: Fragment, begin: int, weights: Tensor, gradient: Tensor, m: Tensor, v: Tensor, *,
    steps: int | Tensor, rate: float, decay: float, shrink: float = 1.0,
) -> None:  # fmt: skip
    """One step, in place, of the tile [begin, begin + n) of a fragment: fp32 [n] each, begin and n multiples of ALIGN.
    The same bits for every cut into tiles and every number of threads. `steps`: this step's number, from 1; `decay`: of
    what decays; `shrink` ≥ 1 divides the gradient, which is left divided."""
    step = AdamWStep.of(
        fragment, begin, weights, steps=steps, rate=rate, decay=decay, shrink=shrink
    )
    for_each_tile(
        lambda _, offset, *tile: step.apply(begin + offset, *tile), weights, gradient, m, v
    )


def sum_of_squares(gradient: Tensor) -> Tensor:
    """fp32 [n] → fp64 scalar, the same bits on any number of threads. Blocks in fp32, their sums in fp64: torch's norm,
    on a CPU one sum in fp32, is off by a few in a thousand after 38 million elements, and by the threads' number."""
    sums = torch.empty(-(-gradient.numel() // BLOCK), device=gradient.device)

    def work(scratch: Scratch, _: int, gradient: Tensor, sums: Tensor) -> None:
        squares = torch.mul(gradient, gradient, out=scratch.a)
        torch.sum(squares.view(sums.numel(), -1), 1, out=sums)

    for_each_tile(work, gradient, sums)
    return torch.stack(
        [part.sum() for part in sums.double().split(1 << 14)]
    ).sum()  # torch shares no sum this short
