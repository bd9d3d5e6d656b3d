"""Move the anchor after the replicas of machines that average their weights in every step.

The machines' replicas agree by themselves (`mixing`), so the anchor is not where the next
round begins: it is the run's published model. Each round, every author moves it by its share of the
way to its own replica:

    update ← C(w · (replica − anchor))

w: the author's share of all training; C: the compression. The shares add up to one, so that after
updates from all machines the anchor is their replicas' mean, up to what the round's updates in
flight change. What the compression leaves out remains a part of the difference, and so of the next
update: no error feedback is stored, and there is no momentum.
"""

import torch
from torch import Tensor

from barnraise.spec import UNIT_BITS
from barnraise.swap.outer_optimizer import STEP_BOUND, RoundStart
from barnraise.swap.precision import units_to_float
from barnraise.swap.state_store import StateStore
from barnraise.swap.tiles import Tiles


class AnchorTracking:
    """Compute one fragment's update at the end of a round, and apply it to the anchor alone."""

    def __init__(self, store: StateStore, tiles: Tiles) -> None:
        """Work on the state in `store`, to which `tiles` gives access."""
        self._store, self._tiles = store, tiles

    def accumulate(
        self, i: int, values: Tensor, weight: float, start: RoundStart, has_momentum: bool
    ) -> None:
        """Write what fragment i's update without loss would hold into `values`, int32 [n].

        `start` and `has_momentum` are not used: the replica does not begin at the anchor, and there
        is no outer momentum.
        """
        for tile in self._tiles.iterate(i, changes=False):
            record = self._store.load_tile("anchor", i, tile.number)
            anchor = units_to_float(record[: 4 * tile.size].view(torch.int32))
            way = tile.host_master().sub(anchor).mul_(weight)
            assert torch.isfinite(way).all(), (
                f"the replica of {self._store.plan.fragments[i].name} is not finite"
            )
            way.mul_(2.0**UNIT_BITS).round_().clamp_(-STEP_BOUND, STEP_BOUND)
            values[tile.begin : tile.end] = way.to(torch.int32)

    def apply_published(self, i: int, values: Tensor, units: Tensor, start: RoundStart) -> None:
        """Add the published update of fragment i, int32 [n] units, to the anchor.

        `values` and `start` are not used: what the update does not hold stays a part of the
        difference.
        """
        for tile in self._tiles.iterate(i, changes=False):
            record = self._store.load_tile("anchor", i, tile.number)
            record[: 4 * tile.size].view(torch.int32).add_(units[tile.begin : tile.end])
            self._store.store_tile("anchor", i, tile.number, record)
