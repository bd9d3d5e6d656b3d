"""Whose turn it is to do what one mirror shall do for all, such as sending a letter. Pure.

Of the mirrors that are alive each duty has one, by rendezvous hashing: all that see the same ones alive agree without
asking. Whoever takes it says so in its log, with an epoch one higher than any before; who finds a higher epoch than its
own has lost the duty, and does nothing more about it. Mirrors that cannot see each other may both do it: what they do
bears one name, so that twice is no worse than once.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum

from blake3 import blake3

PEER_TIMEOUT = 60.0  # seconds unheard after which a mirror counts as dead
CANDIDATE_TIMEOUT = 60.0  # seconds after which one that does not do its duty (it may not know of it) makes room for the next
ISOLATION_WAIT = (
    300.0  # seconds that a mirror waits which hears no other: it may be the one that is cut off
)


class LeaseDecision(Enum):
    DONE = "somebody did it"
    HELD = "ours since before"
    ACQUIRE = "ours from now on"
    WAIT = "somebody else's, as long as nothing changes"


@dataclass(frozen=True)
class LeaseState:
    """What the log says of a duty. `epoch` 0: nobody has taken it."""

    epoch: int = 0
    holder: str = ""
    done: bool = False


def rank_candidates(duty: str, mirrors: Collection[str]) -> list[str]:
    """Keys, the one whose duty it is first. Without one of them the order of the others is the same."""
    return sorted(mirrors, key=lambda key: blake3(f"{duty}\0{key}".encode()).digest())


def decide(
    duty: str, taken: LeaseState, me: str, unheard: Mapping[str, float], age: float
) -> LeaseDecision:
    """`unheard`: of each other mirror of the list, seconds since it was last heard of; `age`: seconds since this mirror
    knows of the duty."""
    if taken.done:
        return LeaseDecision.DONE
    if taken.holder == me:
        return LeaseDecision.HELD
    live = {key for key, ago in unheard.items() if ago < PEER_TIMEOUT}
    if taken.holder in live:
        return LeaseDecision.WAIT
    died = min(
        (ago - PEER_TIMEOUT for key, ago in unheard.items() if key not in live), default=math.inf
    )
    waited = min(age, died)  # since when the mirrors that are alive are these
    before = rank_candidates(duty, {me, *live}).index(me) * CANDIDATE_TIMEOUT
    return (
        LeaseDecision.ACQUIRE
        if waited >= before + (ISOLATION_WAIT if unheard and not live else 0.0)
        else LeaseDecision.WAIT
    )
