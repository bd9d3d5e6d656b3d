"""Decide which machines average their weights with each other in which step. Pure, without torch.

In each step the machines form groups, and the members of a group replace their weights by the
group's mean. The mixing matrix W of a step is therefore doubly stochastic: W_ij = 1/|group| within
a group, else 0. Wang et al., arXiv 2410.11998, section 4, compare the topologies.

Counts that a matching does not cover are padded: a machine whose partner does not exist has an idle
step, in which it mixes with nobody. Exact consensus needs 2^k machines.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean

MAX_MACHINES = 256  # every machine has a channel to every other one


@dataclass(frozen=True)
class Topology:
    """A named rule for the groups of each step.

    Attributes:
        name: as a recipe spells it.
        rule: (machines, machine, step) → the members of the machine's group, sorted.
        period: machines → steps after which the groups repeat.
    """

    name: str
    rule: Callable[[int, int, int], tuple[int, ...]]
    period: Callable[[int], int]

    def group_at(self, machines: int, machine: int, step: int) -> tuple[int, ...]:
        """Return the machines, by index, whose weights a machine averages in a step.

        Raises:
            ValueError: There is no such machine, or there are too many.
        """
        if problem := self.describe_problem(machines):
            raise ValueError(problem)
        if not 0 <= machine < machines:
            raise ValueError(f"machine {machine} is not one of {machines}")
        return self.rule(machines, machine, step)

    def describe_problem(self, machines: int) -> str:
        """Return why so many machines cannot use this topology, or ""."""
        if machines < 1:
            return "a topology needs at least one machine"
        if machines > MAX_MACHINES:
            return f"{self.name} connects at most {MAX_MACHINES} machines; these are {machines}"
        return ""

    def consensus_steps(self, machines: int) -> int:
        """Return after how many steps every machine's weights have reached all others about evenly.

        On a ring that is diffusion, whose time grows with the square of the distance.
        """
        if self.name == "ring":
            return max(1, machines * machines // 4)
        return self.period(machines)

    def mean_neighbours(self, machines: int) -> float:
        """Return to how many neighbours a machine sends its weights in a step, on average."""
        return fmean(_count_neighbours(self, machines))

    def most_neighbours(self, machines: int) -> int:
        """Return to how many neighbours a machine sends its weights in one step, at most."""
        return max(_count_neighbours(self, machines))


@lru_cache(maxsize=1024)
def _count_neighbours(topology: Topology, machines: int) -> tuple[int, ...]:
    """Count the neighbours of each machine in each step of a period."""
    return tuple(
        len(topology.group_at(machines, machine, step)) - 1
        for machine in range(machines)
        for step in range(topology.period(machines))
    )


def _pair_on_ring(machines: int, machine: int, step: int) -> tuple[int, ...]:
    """Pair each machine with its right and its left neighbour alternately; the last one idles."""
    offset = step % machines
    place = (machine - offset) % machines
    partner_place = place ^ 1
    if partner_place >= machines:
        return (machine,)
    return tuple(sorted({machine, (partner_place + offset) % machines}))


def _pair_on_hypercube(machines: int, machine: int, step: int) -> tuple[int, ...]:
    """Pair machines whose numbers differ in one bit, another bit each step."""
    partner = machine ^ (1 << step % _count_dimensions(machines))
    return (machine,) if partner >= machines else tuple(sorted((machine, partner)))


def _alternate_partners(machines: int, machine: int, step: int) -> tuple[int, ...]:
    """Pair machines on the hypercube in every other step.

    Half of the pairs do so in the even steps and half in the odd ones, so that a line which all of
    them share is used evenly.
    """
    bit = (step // 2) % _count_dimensions(machines)
    pair = _pair_on_hypercube(machines, machine, bit)
    low_bits = pair[0] & ((1 << bit) - 1)
    pair_number = (pair[0] >> (bit + 1) << bit) | low_bits
    return pair if step % 2 != pair_number & 1 else (machine,)


def _average_all(machines: int, machine: int, step: int) -> tuple[int, ...]:
    """Average all machines."""
    return tuple(range(machines))


def _count_dimensions(count: int) -> int:
    """Return the dimensions of the smallest hypercube with so many corners, at least 1."""
    return max(1, (count - 1).bit_length())


RING = Topology("ring", _pair_on_ring, lambda machines: machines)
EXPONENTIAL = Topology("exponential", _pair_on_hypercube, _count_dimensions)
ALTERNATING = Topology(
    "alternating-exponential-ring",
    _alternate_partners,
    lambda machines: 2 * _count_dimensions(machines),
)
COMPLETE = Topology("complete", _average_all, lambda machines: 1)
TOPOLOGIES = {each.name: each for each in (RING, EXPONENTIAL, ALTERNATING, COMPLETE)}
