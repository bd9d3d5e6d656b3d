"""Decide which mirror does what one of them shall do for all, such as sending a mail. Pure.

Rendezvous hashing (Thaler and Ravishankar, 1998) ranks the live mirrors for each lease: all that
see the same mirrors alive agree without communicating. A mirror that acquires a lease records this
in its log, with an epoch one higher than any before. A mirror that sees a higher epoch than its own
has lost the lease and does nothing further. Mirrors that cannot reach each other may both do the
work: its result carries one name, so doing it twice is no worse than once.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum

from blake3 import blake3

PEER_TIMEOUT = 60.0  # seconds without contact after which a mirror counts as dead
# Seconds after which a candidate that does nothing (it may not know of the lease) is passed over.
CANDIDATE_TIMEOUT = 60.0
ISOLATION_WAIT = 300.0  # seconds that a mirror waits which reaches no other: it may be cut off


class LeaseDecision(Enum):
    """What a mirror does about a lease."""

    DONE = "the work is done"
    HELD = "this mirror holds the lease"
    ACQUIRE = "this mirror shall acquire the lease"
    WAIT = "the lease is another mirror's, as long as nothing changes"


@dataclass(frozen=True)
class LeaseState:
    """Hold what the log says about a lease; with `epoch` 0 nobody has acquired it."""

    epoch: int = 0
    holder: str = ""
    done: bool = False


def rank_candidates(lease: str, mirrors: Collection[str]) -> list[str]:
    """Return the mirrors' keys, best candidate first.

    Removing one does not change the order of the others.
    """
    return sorted(mirrors, key=lambda key: blake3(f"{lease}\0{key}".encode()).digest())


def decide(
    lease: str, state: LeaseState, own_key: str, silence: Mapping[str, float], age: float
) -> LeaseDecision:
    """Decide what the mirror `own_key` does about a lease.

    Args:
        lease: Name of the lease.
        state: What the log says about it.
        own_key: Key of this mirror.
        silence: Key of each other mirror of the list → seconds since it was last seen.
        age: Seconds since this mirror has known of the lease.
    """
    if state.done:
        return LeaseDecision.DONE
    if state.holder == own_key:
        return LeaseDecision.HELD
    live = {key for key, seconds in silence.items() if seconds < PEER_TIMEOUT}
    if state.holder in live:
        return LeaseDecision.WAIT
    dead_for = [seconds - PEER_TIMEOUT for key, seconds in silence.items() if key not in live]
    unchanged_for = min(age, min(dead_for, default=math.inf))  # since the live mirrors are these
    rank = rank_candidates(lease, {own_key, *live}).index(own_key)
    wait = rank * CANDIDATE_TIMEOUT
    if silence and not live:
        wait += ISOLATION_WAIT
    return LeaseDecision.ACQUIRE if unchanged_for >= wait else LeaseDecision.WAIT
