"""Decide at a round's end whether one block moves to the neighbouring member of a crew. Pure.

Speeds change while a crew trains: other programs run, cards throttle. Every member states how long
its stage of the last round's steps took. What a changed span would take is its planner's price,
scaled by measured over predicted seconds. A block moves only if that pays clearly, because Petals'
servers, which balance themselves, have reloaded their own blocks for ten minutes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate

from barnraise.planning.crew import (
    CrewMachine,
    Deal,
    PipelineShape,
    SpanPrice,
    SpanRequest,
    deal_blocks,
)

SHORTER_STEP = 0.9  # blocks move if a step then takes at most this part of its time
ROUNDS_IN_A_ROW = 3  # that predict this before the first block moves
GAIN_ROUNDS = 10  # whose gain is compared with the cost of moving
GAIN_OVER_COST = 2.0
MOVED_BYTES = 20  # a parameter: weights, both moments, outer momentum and error feedback


@dataclass(frozen=True)
class BlockMove:
    """One block that passes one boundary, towards the best deal on measured speeds.

    Attributes:
        giver: the index of the stage that gives its first or last block.
        receiver: the index of the neighbouring stage.
        present_seconds: of a step now.
        target_seconds: of a step once all blocks have moved.
        cost_seconds: for which the state of all these blocks is on its way.
    """

    giver: int
    receiver: int
    present_seconds: float
    target_seconds: float
    cost_seconds: float

    def pays(self, round_steps: int) -> bool:
        """Return whether the gain is large enough, with so many steps a round."""
        saved = self.present_seconds - self.target_seconds
        is_shorter = self.target_seconds <= SHORTER_STEP * self.present_seconds
        return is_shorter and GAIN_ROUNDS * round_steps * saved > GAIN_OVER_COST * self.cost_seconds


def slow_down(machine: CrewMachine, ratio: float) -> CrewMachine:
    """Return a machine that takes so many times the predicted seconds."""

    @cache
    def price(span: SpanRequest) -> SpanPrice | None:
        predicted = machine.price(span)
        if predicted is None:
            return None
        return replace(predicted, step_seconds=predicted.step_seconds * ratio)

    return replace(machine, price=price)


def lay_deal(
    machines: Sequence[CrewMachine], shape: PipelineShape, counts: Sequence[int]
) -> Deal | None:
    """Return the deal of so many blocks to each machine; None if a span does not fit."""
    laid = [
        shape.lay_stage(machine, index, 1, blocks) if blocks else None
        for index, (machine, blocks) in enumerate(zip(machines, counts, strict=True))
    ]
    stages = [stage for stage in laid if stage is not None]
    return shape.close_deal(stages) if len(stages) == len(machines) else None


def find_move(
    deal: Deal, machines: Sequence[CrewMachine], shape: PipelineShape, measured: Sequence[float]
) -> BlockMove | None:
    """Find the next move towards the best deal that the members' speeds allow.

    Args:
        deal: the present one.
        machines: the members, in the order of the deal's stages.
        shape: how a step passes the pipeline.
        measured: seconds of each stage's own work in a step, in the last round.

    Returns:
        Of the moves over a boundary that the best deal has elsewhere, the one with the shortest
        step; None if there is none.
    """
    predicted = [stage.price.step_seconds for stage in deal.stages]
    ratios = [seconds / price for seconds, price in zip(measured, predicted, strict=True)]
    slowed = [slow_down(machine, ratio) for machine, ratio in zip(machines, ratios, strict=True)]
    counts = [stage.blocks for stage in deal.stages]
    present = lay_deal(slowed, shape, counts)
    target = deal_blocks(slowed, shape)
    if present is None or target is None:
        return None
    wanted = [target.counts.get(index, 0) for index in range(len(machines))]
    block_bytes = MOVED_BYTES * shape.model.fragments()[1].size
    cost = 0.0
    moves: list[tuple[float, int, int]] = []
    bounds = list(zip(accumulate(counts), accumulate(wanted), strict=True))[:-1]
    for left, (bound, wanted_bound) in enumerate(bounds):
        if bound == wanted_bound:
            continue
        giver, receiver = (left, left + 1) if wanted_bound < bound else (left + 1, left)
        rate = min(machines[giver].line.up_bytes, machines[receiver].line.down_bytes)
        cost += abs(bound - wanted_bound) * block_bytes / rate
        changed = list(counts)
        changed[giver] -= 1
        changed[receiver] += 1
        moved = lay_deal(slowed, shape, changed)
        if moved is not None:
            moves.append((moved.step_seconds, giver, receiver))
    if not moves:
        return None
    _, giver, receiver = min(moves)
    return BlockMove(giver, receiver, present.step_seconds, target.step_seconds, cost)


class CrewBalancer:
    """Count the rounds in a row in which moving blocks would pay."""

    def __init__(self) -> None:
        """Begin without any round."""
        self._rounds = 0

    def choose(self, move: BlockMove | None, round_steps: int) -> BlockMove | None:
        """Return the move if it happens at the end of this round.

        Args:
            move: by this round's speeds, from `find_move`.
            round_steps: steps of a round.
        """
        self._rounds = self._rounds + 1 if move is not None and move.pays(round_steps) else 0
        return move if self._rounds >= ROUNDS_IN_A_ROW else None
