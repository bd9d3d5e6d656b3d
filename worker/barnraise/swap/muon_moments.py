"""The moments of one tile under Muon: momentum of all elements, second moments of AdamW's alone."""

from dataclasses import dataclass

from torch import Tensor

from barnraise.errors import StateError
from barnraise.planning.plan import Plan
from barnraise.planning.tile_layout import TileLayout, lay_out_tiles
from barnraise.spec import OPTIMIZERS, Fragment
from barnraise.swap.adam_moments import AdamMoments
from barnraise.swap.adamw import AdamWKernel, AdamWStep
from barnraise.swap.muon import update_matrix


@dataclass(frozen=True)
class MuonMoments(AdamMoments):
    """Views of one record of moments (uint8) of a block's tile.

    Attributes:
        layout: the tile's matrices, and the spans that AdamW trains, whose second moments `v`
            holds one after the other.
    """

    layout: TileLayout

    def update(self, step: AdamWStep, begin: int, weights: Tensor, gradient: Tensor) -> None:
        """Apply a step of both optimizers in place; see `AdamMoments.update`."""
        for matrix in self.layout.matrices:
            piece = self.part(matrix.begin, matrix.end)
            streamed = weights[matrix.begin : matrix.end]
            master = piece.master(streamed)
            update_matrix(step, matrix, master, gradient[matrix.begin : matrix.end], piece.m)
            piece.store_master(streamed, master)
        self._update_rest(step, begin, weights, gradient)

    def _update_rest(self, step: AdamWStep, begin: int, weights: Tensor, gradient: Tensor) -> None:
        """Apply AdamW to the spans around the matrices, which are norms and biases."""
        spans = self.layout.spans
        if not spans:
            return
        kernel = AdamWKernel.prepare(step, begin, weights)
        pieces = [self.part(*span) for span in spans]
        streamed, gradients = (
            [flat[first:last] for first, last in spans] for flat in (weights, gradient)
        )
        masters = [piece.master(part) for piece, part in zip(pieces, streamed, strict=True)]
        v = self.v.split([last - first for first, last in spans])
        kernel.apply_lists(False, masters, gradients, [piece.m for piece in pieces], list(v))
        for piece, part, master in zip(pieces, streamed, masters, strict=True):
            piece.store_master(part, master)

    def part(self, begin: int, end: int) -> AdamMoments:
        """Return views of elements [begin, end) without second moments: AdamW's lie elsewhere."""
        low = None if self.low is None else self.low[begin:end]
        return AdamMoments(self.m[begin:end], self.v[:0], None, low)


def view_moments(plan: Plan, i: int, t: int, record: Tensor) -> AdamMoments:
    """Return views of the record, uint8, of the moments of tile t of fragment i."""
    layout = plan.tile_layouts(i)[t]
    moments = AdamMoments.of(plan, record, layout.elements, layout.second_moments)
    if not layout.matrices:
        return moments
    return MuonMoments(moments.m, moments.v, None, moments.low, layout)


def find_optimizer(block: Fragment, v: Tensor | None) -> str:
    """Return the optimizer whose second moments of a block are as many as those saved; or ""."""
    saved = -1 if v is None else v.numel()
    for optimizer in OPTIMIZERS:
        if lay_out_tiles(block, block.size, optimizer)[-1].second_end == saved:
            return optimizer
    return ""


def refuse_other_optimizer(plan: Plan, saved: str) -> None:
    """Check that a saved state is of the plan's optimizer; `saved` is "" for one that fits none.

    Raises:
        StateError: it is of the other one.
    """
    if saved not in ("", plan.optimizer):
        raise StateError(
            f"the saved state is of the optimizer {saved}, and this run trains with "
            f"{plan.optimizer}: remove the run's state folder, and join again with the run's "
            "current weights"
        )
