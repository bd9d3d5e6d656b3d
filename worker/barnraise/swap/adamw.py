"""AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) over flat buffers, by torch's fused kernel.

Matrices and embeddings decay, norms and biases do not (as in GPT-3). Decay differs within one flat
buffer, so a buffer is cut into spans of one kind, with neighbours merged, and the kernel gets the
list of each kind. Spans start and end on TENSOR_ALIGN boundaries, which are whole cache lines: the
kernel's vector path covers every element, and the bits of the result do not depend on the cut. So
any tile of a fragment can be updated by itself, wherever it lies.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from barnraise.spec import ALIGN, Fragment
from barnraise.swap.tile_threads import BLOCK, Scratch, for_each_tile

BETA1, BETA2, EPSILON = 0.9, 0.95, 1e-8  # GPT-3's

# torch computes the sum of a tensor this short on one thread, so that its order is fixed.
SUM_CHUNK = 1 << 14


@dataclass(frozen=True)
class AdamWStep:
    """The hyperparameters of one step of one fragment.

    Attributes:
        fragment: the fragment whose tiles are updated.
        number: this step's number, from 1, for Adam's bias correction.
        learning_rate: the rate of this step, with schedule and warm-up.
        weight_decay: the decay of matrices and embeddings.
        gradient_divisor: what clipping divides the gradient by, ≥ 1. A GPU takes it as a tensor
            as well, fp32 [], so that the host need not wait for the norm.
        found_inf: on a GPU, fp32 []: where it is 1, the step changes nothing.
        matrix_rate: the rate of the matrices that Muon trains; AdamW does not use it.
        beta2: the decay of the second moment.
    """

    fragment: Fragment
    number: int | Tensor
    learning_rate: float
    weight_decay: float
    gradient_divisor: float | Tensor = 1.0
    found_inf: Tensor | None = None
    matrix_rate: float = 0.0
    beta2: float = BETA2


def decay_spans(fragment: Fragment) -> list[tuple[int, int, bool]]:
    """Return (begin, end, decays) spans that cover the buffer in order.

    Padding belongs to the tensor before it.
    """
    spans: list[tuple[int, int, bool]] = []
    ends = [slot.offset for slot in fragment.slots[1:]] + [fragment.size]
    for slot, end in zip(fragment.slots, ends, strict=True):
        decays = len(slot.shape) >= 2
        begin = slot.offset
        if spans and spans[-1][2] == decays:
            begin = spans.pop()[0]
        spans.append((begin, end, decays))
    return spans


@dataclass(frozen=True)
class AdamWKernel:
    """An AdamW step prepared for one device, for tiles in any order and on any thread."""

    spans: list[tuple[int, int, bool]]
    step_count: Tensor  # fp32 scalar
    learning_rate: float
    weight_decay: float
    gradient_divisor: Tensor | None  # fp32 scalar
    found_inf: Tensor | None  # fp32 scalar
    beta2: float

    @classmethod
    def prepare(cls, step: AdamWStep, begin: int, flat: Tensor) -> "AdamWKernel":
        """Prepare a step for the tile of the size of `flat` that begins at element `begin`."""
        end, device = begin + flat.numel(), flat.device
        fragment, divisor = step.fragment, step.gradient_divisor
        assert begin % ALIGN == 0 and end % ALIGN == 0 and end <= fragment.size, (
            f"[{begin}, {end}) is not a tile of {fragment.name}"
        )
        if not isinstance(divisor, Tensor):
            assert divisor >= 1.0, f"clipping must not enlarge a gradient: its divisor is {divisor}"
            divisor = None if divisor == 1.0 else _create_scalar(divisor, device)
        return cls(
            spans=decay_spans(fragment) if step.weight_decay else [(0, fragment.size, False)],
            step_count=_create_scalar(step.number, device),
            learning_rate=step.learning_rate,
            weight_decay=step.weight_decay,
            gradient_divisor=divisor,
            found_inf=step.found_inf,
            beta2=step.beta2,
        )

    def apply(self, begin: int, weights: Tensor, gradient: Tensor, m: Tensor, v: Tensor) -> None:
        """Update fp32 [n] tensors in place; a gradient that is divided stays divided."""
        end, flats = begin + weights.numel(), (weights, gradient, m, v)
        spans = [span for span in self.spans if span[0] < end and begin < span[1]]
        if len(spans) == 1:  # most tiles lie within one span
            self.apply_lists(spans[0][2], *([flat] for flat in flats))
            return
        for kind in {decays for _, _, decays in spans}:
            pieces = [
                slice(max(first, begin) - begin, min(last, end) - begin)
                for first, last, decays in spans
                if decays == kind
            ]
            self.apply_lists(kind, *([flat[piece] for piece in pieces] for flat in flats))

    def apply_lists(
        self,
        decays: bool,
        weights: list[Tensor],
        gradients: list[Tensor],
        m: list[Tensor],
        v: list[Tensor],
    ) -> None:
        """Update lists of fp32 tensors in place, which begin and end where `decay_spans` may."""
        torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage]: torch has no public name for the kernel
            weights,
            gradients,
            m,
            v,
            [],
            [self.step_count] * len(weights),
            lr=self.learning_rate,
            beta1=BETA1,
            beta2=self.beta2,
            weight_decay=self.weight_decay if decays else 0.0,
            eps=EPSILON,
            amsgrad=False,
            maximize=False,
            grad_scale=self.gradient_divisor,
            found_inf=self.found_inf,
        )


def _create_scalar(value: float | Tensor, device: torch.device) -> Tensor:
    """Return an fp32 scalar, filled by the device: copying it there would wait for the device."""
    return torch.full((), float(value), dtype=torch.float32, device=device)


def adamw_update(
    step: AdamWStep, begin: int, weights: Tensor, gradient: Tensor, m: Tensor, v: Tensor
) -> None:
    """Apply one AdamW step in place to the tile [begin, begin + n) of a fragment.

    The result has the same bits for every cut into tiles and every number of threads.

    Args:
        step: the hyperparameters.
        begin: the tile's first element in its fragment; begin and n are multiples of ALIGN.
        weights: fp32 [n].
        gradient: fp32 [n]; stays divided by the step's divisor.
        m: first moment, fp32 [n].
        v: second moment, fp32 [n].
    """
    kernel = AdamWKernel.prepare(step, begin, weights)

    def update_tile(_: Scratch, offset: int, *tile: Tensor) -> None:
        kernel.apply(begin + offset, *tile)

    for_each_tile(update_tile, weights, gradient, m, v)


def sum_of_squares(gradient: Tensor) -> Tensor:
    """Return the sum of squares of fp32 [n] as an fp64 scalar.

    The result has the same bits on any number of threads. Sums blocks in fp32, and their sums in
    fp64. On a CPU torch's norm is one sum in fp32: after 38 million elements it
    is off by a few in a thousand, and it depends on the number of threads.
    """
    block_sums = torch.empty(-(-gradient.numel() // BLOCK), device=gradient.device)

    def sum_blocks(scratch: Scratch, _: int, gradient: Tensor, sums: Tensor) -> None:
        squares = torch.mul(gradient, gradient, out=scratch.fp32_scratch(0))
        torch.sum(squares.view(sums.numel(), -1), 1, out=sums)

    for_each_tile(sum_blocks, gradient, block_sums)
    return torch.stack([part.sum() for part in block_sums.double().split(SUM_CHUNK)]).sum()
