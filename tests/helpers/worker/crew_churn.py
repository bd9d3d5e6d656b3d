"""Simulate a crew whose machines' speeds change, with and without moves of blocks."""

import random
from dataclasses import replace

from barnraise.planning.crew import CrewMachine, PipelineShape, SpanPrice, deal_blocks
from barnraise.planning.crew_balance import CrewBalancer, find_move, lay_deal, slow_down
from barnraise.planning.lines import Line
from barnraise.spec import preset

LAN = Line("LAN", 1000, 1000, 0.002)
ROUND_STEPS = 30
CHANGE_ROUNDS = 100  # between two changes of a machine's speed, on average
SPEEDS = (1.0, 0.7, 0.5)  # parts of its own speed that other programs leave a machine
MEASUREMENT_ERROR = 0.03


def machine(seconds: float, line: Line = LAN) -> CrewMachine:
    """Return a machine that takes so many seconds a block and step."""
    return CrewMachine(f"{seconds:g}", line, lambda span: SpanPrice(seconds * span.blocks))


def shape(layers: int, micro_batches: int = 32) -> PipelineShape:
    """Return how a step of a model of that depth passes a crew."""
    return PipelineShape(replace(preset("gpt2-124m"), layers=layers), 1, micro_batches, 16)


def simulate(seed: int, balances: bool, rounds: int) -> float:
    """Return the speed of a crew whose machines' speeds change, over that of an oracle.

    The oracle deals all blocks again in each round, by the true speeds and at no cost.
    """
    rng = random.Random(seed)
    machines = [machine(rng.uniform(0.5, 2.0)) for _ in range(4)]
    pipeline = shape(layers=32)
    deal = deal_blocks(machines, pipeline)
    assert deal is not None and len(deal.stages) == 4
    balancer = CrewBalancer()
    slowness = [1.0] * 4
    seconds = ideal_seconds = ideal = 0.0
    for number in range(rounds):
        changed = [i for i in range(4) if rng.random() < 1 / CHANGE_ROUNDS]
        for i in changed:
            slowness[i] = 1 / rng.choice(SPEEDS)
        true_machines = list(map(slow_down, machines, slowness))
        if changed or number == 0:
            ideal = deal_blocks(true_machines, pipeline).step_seconds
        counts = [stage.blocks for stage in deal.stages]
        present = lay_deal(true_machines, pipeline, counts)
        ideal_seconds += ROUND_STEPS * ideal
        seconds += ROUND_STEPS * present.step_seconds
        measured = [
            stage.price.step_seconds * rng.uniform(1 - MEASUREMENT_ERROR, 1 + MEASUREMENT_ERROR)
            for stage in present.stages
        ]
        move = find_move(deal, machines, pipeline, measured) if balances else None
        if chosen := balancer.choose(move, ROUND_STEPS):
            counts[chosen.giver] -= 1
            counts[chosen.receiver] += 1
            deal = lay_deal(machines, pipeline, counts)
            seconds += chosen.cost_seconds
    return ideal_seconds / seconds
