"""The moments of one tile under Muon: momentum of all elements, second moments of AdamW's alone."""

from dataclasses import dataclass

from torch import Tensor

from barnraise.errors import StateError
from barnraise.planning.plan import Plan
from barnraise.planning.tile_layout import TileLayout, lay_out_tiles
from barnraise.spec import OPTIMIZERS, Fragment
from barnraise.swap import precision
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
            piece = slice(matrix.begin, matrix.end)
            master = self._master_of(piece, weights)
            update_matrix(step, matrix, master, gradient[piece], self.m[piece])
            self._store_master_of(piece, weights, master)
        self._update_rest(step, begin, weights, gradient)

    def _update_rest(self, step: AdamWStep, begin: int, weights: Tensor, gradient: Tensor) -> None:
        """Apply AdamW to the spans around the matrices, which are norms and biases."""
        if not self.layout.spans:
            return
        kernel = AdamWKernel.prepare(step, begin, weights)
        pieces = [slice(*span) for span in self.layout.spans]
        masters = [self._master_of(piece, weights) for piece in pieces]
        gradients, m = ([flat[piece] for piece in pieces] for flat in (gradient, self.m))
        v = self.v.split([piece.stop - piece.start for piece in pieces])
        kernel.apply_lists(False, masters, gradients, m, list(v))
        for piece, master in zip(pieces, masters, strict=True):
            self._store_master_of(piece, weights, master)

    def _master_of(self, piece: slice, weights: Tensor) -> Tensor:
        """Return the master weights of a piece: the streamed ones, or joined from their halves."""
        if self.low is None:
            return weights[piece]
        return precision.join(precision.SplitWeights(weights[piece], self.low[piece]))

    def _store_master_of(self, piece: slice, weights: Tensor, master: Tensor) -> None:
        if self.low is not None:
            halves = precision.SplitWeights(weights[piece], self.low[piece])
            precision.split(master, out=halves)

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
