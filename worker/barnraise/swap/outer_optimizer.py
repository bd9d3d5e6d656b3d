"""The outer optimizer (DiLoCo, Douillard et al. 2023, arXiv:2311.08105) with error feedback.

It turns what a round has learnt into an update, and sets the replica to where the next round
begins. Outer momentum and error feedback are the author's own.

The replica may be ahead of the anchor by two things, which the anchor never contains, and which are
subtracted again when the round ends, so that neither is sent twice.

**The residual**, where the last update held only a few of its values. What an update leaves out is
then what the machine has learnt next best. A replica that began without it would learn the same
again, and both would be sent in the end. CHOCO-SGD (Koloskova et al. 2019, arXiv:1902.00340,
algorithm 2) has the same property: a machine's own model contains what its messages leave out.
After an update of all values in a few bits the residual is rounding noise. There the replica begins
without it, at the anchor, where the next round corrects the noise of all machines
(docs/benchmarks/exchange_study.md has the losses of both).

**A prediction** of updates of others in flight: a fragment's `prediction` times this machine's
momentum, which is what the machine itself publishes when it goes on as before.

**A machine's first rounds have no momentum where they are long.** Such a round goes far, and
momentum would go most of that way again in the next ones. It publishes as much of what it learnt as
one with momentum publishes at once, and at most all of it. Its momentum only serves predictions,
and the next round replaces it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from barnraise.spec import UNIT_BITS, Recipe
from barnraise.swap.precision import units_to_float
from barnraise.swap.state_store import StateStore
from barnraise.swap.tiles import Tiles

# Units, 16.0: far beyond what an update may hold, and far enough below int32's end that a sum
# cannot wrap.
FEEDBACK_BOUND = 1 << 30
STEP_BOUND = 1 << 29


@dataclass(frozen=True)
class RoundStart:
    """Where a replica is at the beginning of a round, relative to the anchor.

    Attributes:
        prediction: by how many momenta it is ahead of the anchor.
        has_residual: whether it is ahead of the anchor by this machine's residual, too.
        forgets_momentum: whether the momentum only serves predictions: the round before had none.
    """

    prediction: float = 0.0
    has_residual: bool = False
    forgets_momentum: bool = False


class OuterOptimizer:
    """Compute one fragment's update at the end of a round, and apply it."""

    def __init__(self, recipe: Recipe, store: StateStore, tiles: Tiles) -> None:
        """Work on the state in `store`, to which `tiles` gives access."""
        self._recipe, self._store, self._tiles = recipe, store, tiles

    def accumulate(
        self, i: int, values: Tensor, weight: float, start: RoundStart, has_momentum: bool
    ) -> None:
        """Add what the round has learnt of fragment i to the momentum and to the error feedback.

        Args:
            i: the fragment's index.
            values: int32 [n], receives the negated error feedback: what an update without loss
                would hold.
            weight: this author's share of all training, 0 to 1.
            start: where the replica was at the round's beginning.
            has_momentum: whether the momentum of the rounds before is published with this one's
                result.
        """
        recipe, store = self._recipe, self._store
        for tile in self._tiles.iterate(i, changes=False):
            t, n = tile.number, tile.size
            anchor = store.load_tile("anchor", i, t)[: 4 * n].view(torch.int32)
            momentum_record = store.load_tile("momentum", i, t)
            momentum = momentum_record[: 4 * n].view(torch.float32)
            feedback_record = store.load_tile("feedback", i, t)
            feedback = feedback_record[: 4 * n].view(torch.int32)

            # Δ = w · (anchor − r · e − g · m − replica)
            units = anchor
            if start.has_residual:
                units = torch.sub(anchor, feedback, out=values[tile.begin : tile.end])
            origin = predicted_start(units, momentum, start.prediction)
            delta = origin.sub_(tile.host_master()).mul_(weight)
            assert torch.isfinite(delta).all(), (
                f"the replica of {store.plan.fragments[i].name} is not finite"
            )

            if has_momentum:
                # m ← μ · m + Δ and s = η · (Δ + μ · m)
                if start.forgets_momentum:
                    momentum.zero_()
                momentum.mul_(recipe.outer_momentum).add_(delta)
                step = momentum.mul(recipe.outer_momentum).add_(delta).mul_(recipe.outer_rate)
            else:
                # s = min(1, η · (1 + μ)) · Δ and m ← s / η
                share = min(1.0, recipe.outer_rate * (1 + recipe.outer_momentum))
                torch.mul(delta, share / recipe.outer_rate, out=momentum)
                step = delta.mul_(share)
            store.store_tile("momentum", i, t, momentum_record)

            # e ← round(β · e) + round(s / unit); `apply_published` stores the residual
            accumulate_feedback(feedback, step, recipe.feedback_decay)
            torch.neg(feedback, out=values[tile.begin : tile.end])

    def apply_published(self, i: int, values: Tensor, units: Tensor, start: RoundStart) -> None:
        """Apply the published update of fragment i to residual, anchor and replica.

        Args:
            i: the fragment's index.
            values: int32 [n], what `accumulate` returned; overwritten.
            units: int32 [n], what of it the update holds.
            start: where the replica is to be at the next round's beginning.
        """
        store = self._store
        for tile in self._tiles.iterate(i):
            t, n, published = tile.number, tile.size, units[tile.begin : tile.end]

            # e ← e − C(e)
            feedback_record = store.load_tile("feedback", i, t, reads=False)
            residual = feedback_record[: 4 * n].view(torch.int32)
            torch.sub(published, values[tile.begin : tile.end], out=residual)
            store.store_tile("feedback", i, t, feedback_record)

            anchor_record = store.load_tile("anchor", i, t)
            anchor = anchor_record[: 4 * n].view(torch.int32).add_(published)
            store.store_tile("anchor", i, t, anchor_record)

            # replica ← anchor − r · e − g · m
            origin = anchor
            if start.has_residual:
                origin = torch.sub(anchor, residual, out=values[tile.begin : tile.end])
            if start.prediction:
                momentum_record = store.load_tile("momentum", i, t)
                momentum = momentum_record[: 4 * n].view(torch.float32)
                tile.set_master(predicted_start(origin, momentum, start.prediction))
            else:
                tile.set_master(units_to_float(origin))


def predicted_start(units: Tensor, momentum: Tensor, prediction: float) -> Tensor:
    """Return where a replica begins, fp32 [n].

    Args:
        units: int32 [n], the anchor, minus the residual if the replica contains that.
        momentum: fp32 [n], this machine's outer momentum.
        prediction: by how many momenta the replica is ahead of that.
    """
    start = units_to_float(units)
    return start.sub_(momentum * prediction) if prediction else start


def accumulate_feedback(feedback: Tensor, step: Tensor, decay: float) -> None:
    """Set feedback (int32 units) to round(decay · feedback) + round(step / unit), bounded.

    Overwrites `step` (fp32).
    """
    if decay != 1.0:
        feedback.copy_(feedback.double().mul_(decay).round_())
    rounded = step.mul_(2.0**UNIT_BITS).round_().clamp_(-STEP_BOUND, STEP_BOUND).to(torch.int32)
    feedback.add_(rounded).clamp_(-FEEDBACK_BOUND, FEEDBACK_BOUND)
