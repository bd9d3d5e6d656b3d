"""Split a block's matrices by heads and hidden values among tensor-parallel ranks.

Each rank computes whole heads and a part of the feed-forward (Shoeybi et al. 2019, Megatron-LM,
arXiv:1909.08053, section 3). The block's functions are the same: they compute a block with fewer
heads, whose two last products are partial sums.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from barnraise.models.weights import Weights
from barnraise.spec import Fragment, ModelSpec, Slot

ROWS, COLUMNS = 0, 1
# The dimension in which a block's tensors are split; all others are whole on each rank.
SPLIT_TENSORS = {
    "qkv.weight": ROWS,
    "qkv.bias": ROWS,
    "up.weight": ROWS,
    "up.bias": ROWS,
    "gate_up.weight": ROWS,
    "out.weight": COLUMNS,
    "down.weight": COLUMNS,
}
SHARED_BIASES = ("out.bias", "down.bias")  # that every rank would add to the sum
SPLIT_NORMS = ("query_norm.weight", "key_norm.weight")  # of heads, which each rank has a part of


def narrow_model(model: ModelSpec, ranks: int) -> ModelSpec:
    """Return the dimensions with which one of several tensor-parallel ranks computes a block."""
    if ranks == 1:
        return model
    return replace(
        model,
        heads=model.heads // ranks,
        key_value_heads=model.grouped_heads // ranks,
        head_size=model.head_width,
        hidden=model.hidden_width // ranks,
    )


def _row_parts(fragment: Fragment, slot: Slot) -> list[int]:
    """Return the rows of the tensors that lie one above another in one that is split by rows."""
    parts = slot.parts
    if slot.name == "qkv.bias":
        parts = next(each.parts for each in fragment.slots if each.name == "qkv.weight")
    return list(parts) or [slot.shape[0]]


def cut_part(fragment: Fragment, slot: Slot, whole: Tensor, rank: int, ranks: int) -> Tensor:
    """Return the part of a tensor that one of several tensor-parallel ranks computes with."""
    dimension = SPLIT_TENSORS.get(slot.name)
    if ranks == 1 or dimension is None:
        return whole
    if dimension == COLUMNS:
        return whole.chunk(ranks, COLUMNS)[rank]
    rows = whole.split(_row_parts(fragment, slot))
    return torch.cat([part.chunk(ranks)[rank] for part in rows])


def join_parts(fragment: Fragment, slot: Slot, parts: list[Tensor]) -> Tensor:
    """Return the tensor that `cut_part` has cut into these parts, in the order of the ranks."""
    dimension = SPLIT_TENSORS.get(slot.name)
    if len(parts) == 1 or dimension is None:
        return parts[0]
    if dimension == COLUMNS:
        return torch.cat(parts, COLUMNS)
    rows = [size // len(parts) for size in _row_parts(fragment, slot)]
    pieces = [part.split(rows) for part in parts]
    return torch.cat([piece for group in zip(*pieces, strict=True) for piece in group])


class TensorParallelism:
    """What a block computes with on one of several tensor-parallel ranks."""

    def __init__(self, mesh: DeviceMesh) -> None:
        """Compute among the ranks of a one-dimensional mesh."""
        self._mesh = mesh

    def copy_to_ranks(self, x: Tensor) -> Tensor:
        """Return x, which is the same on all ranks; the gradients by it are added up."""
        whole = DTensor.from_local(x, self._mesh, [Replicate()], run_check=False)
        return whole.to_local(grad_placements=[Partial()])

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        """Return the sum of what the ranks have computed; its gradient is the same on all."""
        part = DTensor.from_local(x, self._mesh, [Partial()], run_check=False)
        return part.redistribute(placements=[Replicate()]).to_local()

    def prepare_weights(self, weights: Weights) -> Weights:
        """Return weights whose biases are added once by all ranks together."""
        changed = dict(weights)
        for name in SHARED_BIASES:
            if name in weights:
                bias = weights[name]
                # The value is a share of the bias, and the gradient that of the whole bias.
                changed[name] = bias - bias.detach() * (1 - 1 / self._mesh.size())
        for name in SPLIT_NORMS:
            if name in weights:
                changed[name] = self.copy_to_ranks(weights[name])
        return changed
