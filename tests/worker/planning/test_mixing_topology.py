"""Test the groups of each topology: symmetric, doubly stochastic, and as fast as published."""

import pytest

from barnraise.planning.mixing_topology import (
    ALTERNATING,
    COMPLETE,
    EXPONENTIAL,
    RING,
    TOPOLOGIES,
)

COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 31)


def mixing_matrix(topology, machines: int, step: int) -> list[list[float]]:
    """Build W of a step from every machine's view of its own group."""
    rows = []
    for machine in range(machines):
        group = topology.group_at(machines, machine, step)
        rows.append([1 / len(group) if other in group else 0.0 for other in range(machines)])
    return rows


def multiply(left: list[list[float]], right: list[list[float]]) -> list[list[float]]:
    columns = list(zip(*right, strict=True))
    return [
        [sum(a * b for a, b in zip(row, column, strict=True)) for column in columns] for row in left
    ]


@pytest.mark.parametrize("machines", COUNTS)
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_every_step_of_every_count_is_symmetric_and_stochastic(name, machines):
    for step in range(2 * machines + 3):
        matrix = mixing_matrix(TOPOLOGIES[name], machines, step)
        for i, row in enumerate(matrix):
            assert sum(row) == pytest.approx(1.0)
            assert row[i] > 0, "a machine keeps a part of its own weights"
            assert row == [other[i] for other in matrix], "both partners expect each other"


@pytest.mark.parametrize("machines", [2, 4, 8, 16, 32])
def test_exponential_reaches_exact_consensus_in_log2_steps(machines):
    steps = machines.bit_length() - 1
    product = mixing_matrix(EXPONENTIAL, machines, 0)
    for step in range(1, steps):
        product = multiply(mixing_matrix(EXPONENTIAL, machines, step), product)
    assert all(entry == 1 / machines for row in product for entry in row)
    assert EXPONENTIAL.consensus_steps(machines) == steps <= RING.consensus_steps(machines)
    assert EXPONENTIAL.mean_neighbours(machines) == EXPONENTIAL.most_neighbours(machines) == 1


def test_padded_exponential_idles_without_a_partner_and_still_mixes():
    assert EXPONENTIAL.group_at(6, 5, 1) == (5,), "machine 7 does not exist"
    assert EXPONENTIAL.group_at(6, 5, 0) == (4, 5)
    product = mixing_matrix(EXPONENTIAL, 6, 0)
    for step in range(1, 60):
        product = multiply(mixing_matrix(EXPONENTIAL, 6, step), product)
    assert all(entry == pytest.approx(1 / 6, abs=1e-6) for row in product for entry in row)


def test_ring_pairs_left_and_right_and_rotates_the_idle_machine():
    assert [RING.group_at(4, 0, step) for step in range(3)] == [(0, 1), (0, 3), (0, 1)]
    idle = [m for step in range(5) for m in range(5) if RING.group_at(5, m, step) == (m,)]
    assert sorted(idle) == [0, 1, 2, 3, 4]


def test_alternating_topology_pairs_half_of_the_machines_in_each_step():
    groups = [{ALTERNATING.group_at(4, machine, step) for machine in range(4)} for step in range(4)]
    assert all(sorted(map(len, step)) == [1, 1, 2] for step in groups)
    product = mixing_matrix(ALTERNATING, 4, 0)
    for step in range(1, 4):
        product = multiply(mixing_matrix(ALTERNATING, 4, step), product)
    assert all(entry == pytest.approx(1 / 4) for row in product for entry in row)
    assert ALTERNATING.mean_neighbours(4) == 0.5


def test_complete_sends_to_all_others():
    assert COMPLETE.group_at(5, 3, 7) == (0, 1, 2, 3, 4)
    assert COMPLETE.mean_neighbours(5) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 0, 0), "at least one machine"),
        ((257, 0, 0), "at most 256 machines; these are 257"),
        ((4, 4, 0), "machine 4 is not one of 4"),
    ],
)
def test_impossible_counts_are_refused_in_a_sentence(arguments, message):
    with pytest.raises(ValueError, match=message):
        ALTERNATING.group_at(*arguments)
