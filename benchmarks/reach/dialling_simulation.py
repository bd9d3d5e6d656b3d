"""Simulate how a thousand peers meet, most of them behind routers.

The state machines are those of the worker; time, network and routers are simulated. A peer behind a
router is reached only by whom it has dialled itself within the last seconds, so that two of them
meet only when they dial at one time. The site names peers as it does: some that reported lately,
whether or not they can be reached.
"""

import random
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "tests"))
# The folder of the tests' helpers is no import path of the type checker.
from helpers.network.simulated_swarm import Simulation, key_of  # pyright: ignore[reportMissingImports]

PAYLOAD = 500_000  # bytes of an update
UPLINK = 2.5e6  # bytes per second of each home line
SITE_HINTS = 64  # peers that the site names in an answer: those that reported last
REPORT_SECONDS = 20.0  # between two answers of the site
AUTHORS = 8
MEET_SECONDS = 120.0  # until updates are published
SPREAD_SECONDS = 120.0  # in which an update must reach everybody


@dataclass(frozen=True)
class SwarmOutcome:
    """What a simulated swarm did.

    Attributes:
        peers: How many there are.
        natted: How many are behind routers.
        is_connected: Whether links lead from each to all others.
        everyone_has_all: Whether every update reached everyone.
        largest_load: Bytes that the busiest peer sent, in multiples of the mean.
        unlinked_natted: Peers behind routers without a link to another such peer.
        statements: "Dial now" statements that were sent, for each peer.
        median_links: Links of a peer.
    """

    peers: int
    natted: int
    is_connected: bool
    everyone_has_all: bool
    largest_load: float
    unlinked_natted: int
    statements: float
    median_links: float


def simulate_swarm(peers: int, natted_share: float, seed: int = 0) -> SwarmOutcome:
    """Let peers join, meet and publish.

    Args:
        peers: How many.
        natted_share: The share that is behind routers.
        seed: Of all random choices.
    """
    swarm = Simulation(peers, seed=seed, payload=PAYLOAD, uplink=UPLINK)
    choice = random.Random(seed)
    numbers = list(range(peers))
    natted = choice.sample(numbers, round(peers * natted_share))
    swarm.natted = {key_of(number) for number in natted}
    while swarm.now < MEET_SECONDS:
        hints = choice.sample(numbers, min(SITE_HINTS, peers))
        swarm.introduce(dict.fromkeys(numbers, hints))
        swarm.run(REPORT_SECONDS)
    is_connected = swarm.is_connected
    authors = choice.sample(numbers, AUTHORS)
    for number in authors * 2:  # these form the trees
        swarm.publish(number)
        swarm.run(5.0)
    swarm.run(SPREAD_SECONDS, until=lambda: swarm.has_converged)
    before = dict(swarm.sent_bytes)
    for number in authors * 4:
        swarm.publish(number)
        swarm.run(3.0)
    everyone_has_all = swarm.run(SPREAD_SECONDS, until=lambda: swarm.has_converged)
    loads = [swarm.sent_bytes[key] - before.get(key, 0) for key in swarm.machines]
    unlinked = sum(
        not any(other in swarm.natted for other in swarm.machines[key].links)
        for key in swarm.natted
    )
    return SwarmOutcome(
        peers=peers,
        natted=len(natted),
        is_connected=is_connected and swarm.is_connected,
        everyone_has_all=everyone_has_all,
        largest_load=max(loads) / statistics.mean(loads),
        unlinked_natted=unlinked,
        statements=swarm.sent["statement"] / peers,
        median_links=statistics.median(swarm.degrees),
    )
