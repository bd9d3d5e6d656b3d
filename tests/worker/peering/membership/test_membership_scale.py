"""Tests of gossip with loss, partitions, churn and a thousand peers."""

import random

import hypothesis.strategies as st
import pytest
from helpers.effort import one_in
from helpers.network.simulated_swarm import Simulation, key_of, number_of
from hypothesis import HealthCheck, given, settings

from barnraise.peering.membership.link_targets import LINK_TARGETS

# The rules are the same for each number of peers; a thousand take half a minute.
SWARM_SIZES = one_in(3, [60, 120, 1000])


def introduce_to_earlier_peers(simulation: Simulation, count: int) -> None:
    """Introduce each machine to five that joined before it."""
    hints = {n: simulation.random.sample(range(max(5, n)), 5) for n in range(count)}
    simulation.introduce(hints)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 10**6), st.floats(0, 0.4), st.integers(2, 9))
def test_gossip_with_loss_partitions_and_churn_converges(seed, loss, count):
    simulation = Simulation(count, seed, loss)
    simulation.introduce_to_hub()
    chance = random.Random(seed)
    for _ in range(25):
        simulation.run(chance.random() * 3)
        event = chance.random()
        alive = [number_of(key) for key in simulation.machines]
        if event < 0.6:
            simulation.publish(chance.choice(alive))
        elif event < 0.8:
            simulation.partition({number: chance.randrange(2) for number in alive})
        elif event < 0.9:
            simulation.partition({})
        else:  # a machine restarts with its ledger and without its connections
            number = chance.choice(alive)
            vector = dict(simulation.machines[key_of(number)].vector)
            simulation.leave(number)
            simulation.join(number, seed + 1, vector)
            simulation.introduce({number: [0]})
    simulation.partition({})
    simulation.publish(0)
    # A claim whose proof was lost is refused for five minutes, and so may be the next one.
    assert simulation.run(1000, until=lambda: simulation.has_converged)


@pytest.mark.parametrize("count", SWARM_SIZES)
def test_peers_of_a_large_swarm_receive_each_update_about_once(count):
    """Simulate home lines: 20 Mb/s up, 50 ms, updates of 500 kB.

    The peers connect for half a minute, and the first two updates of a machine form its tree.
    """
    simulation = Simulation(count, seed=5, payload=500_000, uplink=2.5e6)
    introduce_to_earlier_peers(simulation, count)
    simulation.run(20)
    assert simulation.is_connected
    assert max(simulation.degrees) <= LINK_TARGETS.most + 2
    assert min(simulation.degrees) >= LINK_TARGETS.least_dialled
    authors = simulation.random.sample(range(count), 8)
    for number in authors * 2:
        simulation.publish(number)
        simulation.run(5)
    assert simulation.run(60, until=lambda: simulation.has_converged)
    before = simulation.bytes
    for number in authors:
        simulation.publish(number)
        simulation.run(3)
    assert simulation.run(60, until=lambda: simulation.has_converged)
    cost = (simulation.bytes - before) / (len(authors) * simulation.payload * (count - 1))
    assert 1.0 <= cost <= 1.15, cost
    assert simulation.is_connected and max(simulation.degrees) <= LINK_TARGETS.most + 2


@pytest.mark.parametrize("count", SWARM_SIZES)
def test_partitioned_large_swarm_with_churn_reconnects(count):
    simulation = Simulation(count, seed=6, loss=0.01)
    introduce_to_earlier_peers(simulation, count)
    simulation.run(20)
    simulation.partition({number: number % 2 for number in range(count)})
    for number in range(4):
        simulation.publish(number)
        simulation.run(2)
    # A tenth of the machines leaves, and as many others join.
    for number in simulation.random.sample(range(count // 10, count), count // 10):
        simulation.leave(number)
        simulation.join(number + count, number)
        simulation.introduce({number + count: [0, 1, 2, 3]})
    simulation.run(10)
    assert not simulation.is_connected
    simulation.partition({})
    for number in (4, 5):
        simulation.publish(number)
    assert simulation.run(120, until=lambda: simulation.has_converged)
    assert simulation.is_connected and len(simulation.machines[key_of(0)].vector) == 6
    # The machines that were introduced to the same four peers are still closing surplus links.
    assert max(simulation.degrees) <= LINK_TARGETS.most + 8
