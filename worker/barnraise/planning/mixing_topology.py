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
        rule: (machines, machine, step, site_size) → the members of the machine's group, sorted.
        period: (machines, site_size) → steps after which the groups repeat.
    """

    name: str
    rule: Callable[[int, int, int, int], tuple[int, ...]]
    period: Callable[[int, int], int]

    def group_at(
        self, machines: int, machine: int, step: int, site_size: int = 1
    ) -> tuple[int, ...]:
        """Return the machines, by index, whose weights a machine averages in a step.

        Args:
            machines: how many take part.
            machine: index of the one that asks, below `machines`.
            step: number of the step.
            site_size: consecutive machines on one fast network, for alternating topologies.

        Raises:
            ValueError: There is no such machine, or sites do not divide the machines.
        """
        if problem := self.describe_problem(machines, site_size):
            raise ValueError(problem)
        if not 0 <= machine < machines:
            raise ValueError(f"machine {machine} is not one of {machines}")
        return self.rule(machines, machine, step, site_size)

    def describe_problem(self, machines: int, site_size: int = 1) -> str:
        """Return why so many machines cannot use this topology, or ""."""
        if machines < 1:
            return "a topology needs at least one machine"
        if machines > MAX_MACHINES:
            return f"{self.name} connects at most {MAX_MACHINES} machines; these are {machines}"
        if site_size < 1 or machines % site_size:
            return (
                f"{machines} machines do not divide into sites of {site_size}: "
                "choose a site size that divides them"
            )
        return ""

    def consensus_steps(self, machines: int) -> int:
        """Return after how many steps every machine's weights have reached all others about evenly.

        On a ring that is diffusion, whose time grows with the square of the distance.
        """
        if self.name == "ring":
            return max(1, machines * machines // 4)
        return self.period(machines, 1)

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
        for step in range(topology.period(machines, 1))
    )


def _pair_on_ring(machines: int, machine: int, step: int, site_size: int) -> tuple[int, ...]:
    """Pair each machine with its right and its left neighbour alternately; the last one idles."""
    offset = step % machines
    place = (machine - offset) % machines
    partner_place = place ^ 1
    if partner_place >= machines:
        return (machine,)
    return tuple(sorted({machine, (partner_place + offset) % machines}))


def _pair_on_hypercube(machines: int, machine: int, step: int, site_size: int) -> tuple[int, ...]:
    """Pair machines whose numbers differ in one bit, another bit each step."""
    partner = machine ^ (1 << step % _count_dimensions(machines))
    return (machine,) if partner >= machines else tuple(sorted((machine, partner)))


def _alternate_partners(machines: int, machine: int, step: int, site_size: int) -> tuple[int, ...]:
    """Average within the site, then with another site on the hypercube of sites.

    Half of the pairs of sites do it the other way round, so that the links between sites are used
    evenly.
    """
    sites = machines // site_size
    site = machine // site_size
    bit = (step // 2) % _count_dimensions(sites)
    pair = _pair_on_hypercube(sites, site, bit, 1)
    low_bits = pair[0] & ((1 << bit) - 1)
    pair_number = (pair[0] >> (bit + 1) << bit) | low_bits
    is_late = pair_number & 1
    if step % 2 == (1 - is_late):
        return tuple(member for each in pair for member in _machines_of_site(each, site_size))
    return tuple(_machines_of_site(site, site_size))


def _average_all(machines: int, machine: int, step: int, site_size: int) -> tuple[int, ...]:
    """Average all machines."""
    return tuple(range(machines))


def _machines_of_site(site: int, site_size: int) -> range:
    return range(site * site_size, (site + 1) * site_size)


def _count_dimensions(count: int) -> int:
    """Return the dimensions of the smallest hypercube with so many corners, at least 1."""
    return max(1, (count - 1).bit_length())


RING = Topology("ring", _pair_on_ring, lambda machines, _: machines)
EXPONENTIAL = Topology(
    "exponential", _pair_on_hypercube, lambda machines, _: _count_dimensions(machines)
)
ALTERNATING = Topology(
    "alternating-exponential-ring",
    _alternate_partners,
    lambda machines, site_size: 2 * _count_dimensions(machines // site_size),
)
COMPLETE = Topology("complete", _average_all, lambda machines, _: 1)
TOPOLOGIES = {each.name: each for each in (RING, EXPONENTIAL, ALTERNATING, COMPLETE)}


def find_topology(name: str) -> Topology:
    """Return the topology of this name.

    Raises:
        ValueError: There is none.
    """
    if name not in TOPOLOGIES:
        raise ValueError(f"there is no topology '{name[:40]}'; there are {', '.join(TOPOLOGIES)}")
    return TOPOLOGIES[name]
