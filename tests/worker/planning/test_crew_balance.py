"""Blocks move between a crew's members only where that pays, and then the crew stays fast."""

import random
from dataclasses import replace

import pytest

from barnraise.planning.crew import CrewMachine, PipelineShape, SpanPrice, deal_blocks
from barnraise.planning.crew_balance import (
    BlockMove,
    CrewBalancer,
    find_move,
    lay_deal,
    slow_down,
)
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


def simulate(seed: int, balances: bool) -> float:
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
    for number in range(300):
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


def test_rebalanced_crew_reaches_the_oracles_speed_under_churn():
    with_moves = [simulate(seed, balances=True) for seed in range(3)]
    without = [simulate(seed, balances=False) for seed in range(3)]
    assert sum(with_moves) / 3 >= 0.93  # 0.947 on average
    assert sum(without) / 3 <= 0.80  # 0.756


def test_block_moves_after_three_rounds_that_agree():
    machines = [machine(1.0)] * 2
    pipeline = shape(layers=12)
    deal = deal_blocks(machines, pipeline)
    balancer = CrewBalancer()
    move = find_move(deal, machines, pipeline, [6.0, 12.0])
    assert (move.giver, move.receiver) == (1, 0)
    assert balancer.choose(move, ROUND_STEPS) is None
    assert balancer.choose(move, ROUND_STEPS) is None
    assert balancer.choose(move, ROUND_STEPS) is move
    # A round that disagrees begins the count again.
    even = find_move(deal, machines, pipeline, [6.0, 6.0])
    assert even is None and balancer.choose(even, ROUND_STEPS) is None
    assert balancer.choose(move, ROUND_STEPS) is None


def test_small_differences_move_nothing():
    machines = [machine(1.0)] * 2
    pipeline = shape(layers=12)
    deal = deal_blocks(machines, pipeline)
    move = find_move(deal, machines, pipeline, [6.0, 7.0])
    assert move is None or not move.pays(ROUND_STEPS)


def test_move_that_costs_more_than_it_gains_is_refused():
    cheap = BlockMove(0, 1, present_seconds=10.0, target_seconds=8.0, cost_seconds=200.0)
    assert cheap.pays(ROUND_STEPS)  # 600 s in ten rounds
    assert not replace(cheap, cost_seconds=301.0).pays(ROUND_STEPS)
    assert not cheap.pays(round_steps=10)
    assert not replace(cheap, target_seconds=9.1).pays(ROUND_STEPS)


def test_cost_is_that_of_twenty_bytes_a_parameter_over_the_line():
    machines = [machine(1.0)] * 2
    pipeline = shape(layers=12)
    deal = deal_blocks(machines, pipeline)
    move = find_move(deal, machines, pipeline, [6.0, 12.0])
    moved = abs(deal_blocks(list(map(slow_down, machines, (1.0, 2.0))), pipeline).counts[0] - 6)
    block = pipeline.model.fragments()[1].size
    assert move.cost_seconds == pytest.approx(moved * 20 * block / LAN.up_bytes)


def test_span_never_grows_beyond_what_fits():
    full = CrewMachine("full", LAN, lambda s: SpanPrice(s.blocks) if s.blocks <= 6 else None)
    machines = [full, machine(1.0)]
    pipeline = shape(layers=12)
    deal = deal_blocks(machines, pipeline)
    assert deal.counts == {0: 6, 1: 6}
    assert find_move(deal, machines, pipeline, [6.0, 60.0]) is None
