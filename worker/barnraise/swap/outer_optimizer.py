"""The outer step: what a round learnt becomes an update, and the replica begins the next (DESIGN section 5).

Momentum and error feedback are the author's own. While updates of others are under way the replica is ahead of the
anchor by a guess of them: a fragment's `guess` times this machine's momentum, which is what it says itself when it goes
on as before. The anchor never holds a guess, and no update does, because what is guessed is taken off again.
"""

import torch
from torch import Tensor

from barnraise.spec import UNIT_BITS, Recipe
from barnraise.swap.arena import units_to_float
from barnraise.swap.state_store import StateStore
from barnraise.swap.tiles import Tiles

FEEDBACK_BOUND = (
    1 << 30
)  # units, 16.0: far beyond what an update may say, and room below int32's end
STEP_BOUND = 1 << 29


class OuterOptimizer:
    def __init__(self, recipe: Recipe, store: StateStore, tiles: Tiles):
        self.recipe, self.store, self.tiles = recipe, store, tiles
        self.plan, self.spare = tiles.plan, tiles.buffers.tile_scratch

    def accumulate(self, i: int, values: Tensor, weight: float, guess: float) -> None:
        """What the round adds to what was owed: into the error feedback, and negated into `values` (int32 [n])."""
        recipe, (a, b, c) = self.recipe, (self.spare(k) for k in (1, 2, 3))
        for t, (begin, end, moments, weights) in enumerate(self.tiles.iterate(i, changes=False)):
            n = end - begin
            anchor = self.store.load_tile("anchor", i, t, a)[: 4 * n].view(torch.int32)
            raw = self.store.load_tile("momentum", i, t, b)
            momentum = raw[: 4 * n].view(torch.float32)
            delta = (
                predicted_start(anchor, momentum, guess)
                .sub_(moments.master(weights).to(anchor.device))
                .mul_(weight)
            )
            assert torch.isfinite(delta).all(), (
                f"the replica of {self.plan.fragments[i].name} is not finite"
            )
            momentum.mul_(recipe.outer_momentum).add_(delta)
            self.store.store_tile("momentum", i, t, raw)
            step = momentum.mul(recipe.outer_momentum).add_(delta).mul_(recipe.outer_rate)
            feedback = self.store.load_tile("feedback", i, t, c)[: 4 * n].view(torch.int32)
            accumulate_feedback(feedback, step, recipe.feedback_decay)
            torch.neg(feedback, out=values[begin:end])

    def apply_published(self, i: int, values: Tensor, units: Tensor, guess: float) -> None:
        """`units` of `values` were said: the rest stays owed, the anchor moves, and the replica begins ahead of it."""
        a, b, c = (self.spare(k) for k in (1, 2, 3))
        for t, (begin, end, moments, weights) in enumerate(self.tiles.iterate(i)):
            n, said = end - begin, units[begin:end]
            held = self.store.memory_buffer("feedback", i)
            raw = (
                b[: self.plan.record("feedback", n)]
                if held is None
                else self.store.memory_record("feedback", i, t)
            )
            torch.sub(said, values[begin:end], out=raw[: 4 * n].view(torch.int32))
            self.store.store_tile("feedback", i, t, raw)
            raw = self.store.load_tile("anchor", i, t, a)
            anchor = raw[: 4 * n].view(torch.int32).add_(said)
            self.store.store_tile("anchor", i, t, raw)
            momentum = (
                self.store.load_tile("momentum", i, t, c)[: 4 * n].view(torch.float32)
                if guess
                else anchor
            )
            self.tiles.set_weights(moments, weights, predicted_start(anchor, momentum, guess))


def predicted_start(anchor: Tensor, momentum: Tensor, guess: float) -> Tensor:
    """Where a replica begins: fp32, from int32 units and, with a guess, the momentum."""
    start = units_to_float(anchor)
    return start.sub_(momentum * guess) if guess else start


def accumulate_feedback(feedback: Tensor, step: Tensor, decay: float) -> None:
    """feedback (int32 units) ← round(decay · feedback) + round(step / unit), bounded; uses up `step` (fp32)."""
    if decay != 1.0:
        feedback.copy_(feedback.double().mul_(decay).round_())
    rounded = step.mul_(2.0**UNIT_BITS).round_().clamp_(-STEP_BOUND, STEP_BOUND).to(torch.int32)
    feedback.add_(rounded).clamp_(-FEEDBACK_BOUND, FEEDBACK_BOUND)
